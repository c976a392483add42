"""The blocking face beyond writing and reading, on a real cluster."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

from dlcore import LogConfig, LogRecord, LogSettings
from dlcore.backends.direct.namespace import open_namespace as open_async_namespace
from dlcore.base.errors import AlreadyClosedError, ConfigurationError, EndOfStreamError
from dlcore.ops.upkeep.worker import LogUpkeep
from dlcore.sync import open_namespace
from tests.fixtures.waiting import wait_until


def test_settings_of_a_log(namespace_uri: str) -> None:
    """They are stored with it, and change under a running writer."""
    with open_namespace(namespace_uri) as namespace, open_namespace(namespace_uri) as other:
        namespace.create_log("face/settings", settings=LogSettings(entry_bytes=200))
        log = namespace.open_log("face/settings", create_if_missing=True)
        with log.open_writer() as writer:
            writer.write_batch(pa.record_batch({"txid": [1] * 4, "value": [b"x" * 88] * 4}))
            writer.flush()
            elsewhere = other.open_log("face/settings")
            assert elsewhere.update_settings(segment_bytes_max=400).entry_bytes == 200
            while len(log.get_log_segments()) < 2:
                writer.write(LogRecord(2, b"y" * 88))
                writer.flush()
        assert log.get_settings() == LogSettings(entry_bytes=200, segment_bytes_max=400)
        with pytest.raises(ConfigurationError, match="LogSettings has entry_bytes"):
            log.update_settings(colour="red")


@pytest.mark.parametrize("config", [LogConfig(flush_interval_s=0.05), LogConfig(buffer_bytes=0)])
def test_a_buffer_is_handed_over_in_time(namespace_uri: str, config: LogConfig) -> None:
    """After an interval, or at once; the last records need no flush to be read."""
    with open_namespace(namespace_uri) as namespace:
        log = namespace.open_log("face/flushed", config=config, create_if_missing=True)
        before = log.get_log_record_count()
        with log.open_writer() as writer:
            writer.write(LogRecord(1, b"a"))
            writer.write(LogRecord(1, b"b"))
            wait_until(lambda: log.get_log_record_count() == before + 2, timeout_s=30)
            writer.write(LogRecord(1, b"c"))
            writer.commit()
        assert log.get_log_record_count() == before + 3
        aborted = log.open_writer()
        aborted.abort()
        with pytest.raises(AlreadyClosedError):
            aborted.flush()


def test_a_timed_writer_that_fails_says_so_at_the_next_call(
    namespace_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its records are refused in the background first."""
    with open_namespace(namespace_uri) as namespace:
        config = LogConfig(flush_interval_s=0.02)
        log = namespace.open_log("face/failing", config=config, create_if_missing=True)
        writer = log.open_writer()
        writer.mark_end_of_stream()
        writer.write(LogRecord(1, b"late"))
        wait_until(lambda: "records are refused" in caplog.text, timeout_s=30)
        with pytest.raises(EndOfStreamError):
            writer.write_batch(pa.record_batch({"txid": [2], "value": [b"late"]}))
        writer.close()


def test_retention_truncation_and_seal_without_a_writer(namespace_uri: str) -> None:
    """Old records go from an idle log; the rest by transaction id and time; then the seal."""

    async def sweep() -> None:
        async with await open_async_namespace(namespace_uri) as namespace:
            await LogUpkeep.of(namespace).sweep()

    with open_namespace(namespace_uri) as namespace:
        namespace.create_log("face/old", settings=LogSettings(retention_s=0.001))
        log = namespace.open_log("face/old")
        with log.open_writer() as writer:
            writer.write(LogRecord(1, b"x"))
        asyncio.run(sweep())
        assert log.get_log_record_count() == 0
        log.update_settings(retention_s=None)
        for txid in (2, 5):
            with log.open_writer() as writer:
                writer.write_bulk([LogRecord(txid, b"x"), LogRecord(txid + 1, b"x")])
                assert not writer.truncate(txid=0)
        assert log.purge_logs_older_than(4)
        assert log.get_log_record_count() == 2
        assert log.truncate(txid=6)
        assert not log.truncate(timestamp_ms=0)
        log.mark_end_of_stream()
        assert log.is_end_of_stream_marked()
        assert log.get_log_record_count() == 1
