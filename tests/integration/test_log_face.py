"""The blocking face beyond writing and reading, on a real cluster."""

from __future__ import annotations

import pyarrow as pa
import pytest

from dlcore import LogConfig, LogRecord
from dlcore.base.errors import EndOfStreamError
from dlcore.sync import open_namespace
from tests.fixtures.waiting import wait_until


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
