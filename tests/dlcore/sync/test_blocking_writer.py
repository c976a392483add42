"""A blocking writer whose twin refuses records: at the moment, for good, between calls.

Goal: a record whose write returned is in the log once, or a later call says that it is not.
Method: the writer of a cluster in memory, on the portal's loop, refuses when the test says so.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    DLError,
    LedgerFencedError,
    LogNotReadyError,
    TransactionIdOutOfOrderError,
    WriteError,
)
from dlcore.base.records import LogRecord
from dlcore.sync.portal import Portal
from dlcore.sync.writer import LogWriter
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, read_all
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.base.config import LogConfig
    from dlcore.log.writing.writer import DirectWriter

NOT_READY = LogNotReadyError("log 'clicks' is rolling and takes no record at the moment")


class Refusing:
    """A log, its blocking writer, and what the writer's twin answers to what it gets."""

    def __init__(self, portal: Portal, cluster: MemoryCluster) -> None:
        self._portal = portal
        self._cluster = cluster
        self.error: DLError | None = None
        self.refused = 0
        self.writer: LogWriter

    def open(self, config: LogConfig) -> LogWriter:
        """Open the writer."""

        async def open_writer() -> Any:
            namespace = await self._cluster.open("a", config=config)
            log = await namespace.open_log("clicks", create_if_missing=True)
            return await log.open_writer()

        twin = self._portal.call(open_writer())
        write_fitted = twin.write_fitted

        def refuse(rows: Any, **how: Any) -> Any:
            if self.error is not None:
                self.refused += 1
                raise self.error
            return write_fitted(rows, **how)

        twin.write_fitted = refuse
        self.writer = LogWriter(self._portal, twin, {})
        return self.writer

    def refuses_again(self) -> None:
        """Wait until it has refused once more."""
        before = self.refused
        wait_until(lambda: self.refused > before + 1, timeout_s=30)

    def txids(self) -> list[int]:
        """Return what is readable."""

        async def read() -> list[int]:
            log = await self._cluster.namespaces[0].open_log("clicks")
            return [each.txid for each in await read_all(log)]

        return self._portal.call(read())


@pytest.fixture
def log() -> Iterator[Refusing]:
    """Return one in a cluster of its own."""
    portal, cluster = Portal(), MemoryCluster()
    portal.call(cluster.start())
    found = Refusing(portal, cluster)
    yield found
    found.error = None
    with suppress(DLError):
        found.writer.abort()
    portal.call(cluster.aclose())
    portal.stop()


def test_records_refused_at_the_moment_wait_for_the_next_call(log: Refusing) -> None:
    """A call that raises has taken nothing, and what was taken is written once."""
    writer = log.open(replace(CONFIG, buffer_bytes=300))
    taken: list[int] = []
    for txid in range(60):
        log.error = NOT_READY if txid % 3 else None
        with suppress(LogNotReadyError):
            writer.write(LogRecord(txid, b"x" * 50))
            taken.append(txid)
        if txid % 7 == 0:
            batch = pa.record_batch({"txid": [txid, txid], "value": [b"y", b"y"]})
            with suppress(LogNotReadyError):
                writer.write_batch(batch)
                taken += [txid, txid]
    assert 20 < len(taken) < 70, "some were taken, and some were not"
    assert log.refused > 10
    log.error = NOT_READY
    with pytest.raises(LogNotReadyError):
        writer.flush()
    log.error = None
    writer.commit()
    assert log.txids() == taken
    writer.close()


def test_a_refused_writer_keeps_no_more_than_a_buffer_and_a_batch(log: Refusing) -> None:
    """A caller that goes on writing is refused, from then on each time."""
    writer = log.open(replace(CONFIG, buffer_bytes=300))
    log.error = NOT_READY
    taken: Counter[bool] = Counter()
    for txid in range(50):
        try:
            writer.write(LogRecord(txid, b"x" * 50))
        except LogNotReadyError:
            taken[False] += 1
        else:
            taken[True] += 1
    assert taken == {True: 5, False: 45}
    log.error = None
    writer.close()
    assert log.txids() == [0, 1, 2, 3, 4]


def test_a_writer_that_closes_waits_until_it_is_taken(log: Refusing) -> None:
    """It is the last call: what was accepted has no other."""
    writer = log.open(CONFIG)
    writer.write(LogRecord(1, b"x"))
    log.error = NOT_READY
    closing = threading.Thread(target=writer.close)
    closing.start()
    log.refuses_again()
    log.error = None
    closing.join(30)
    assert not closing.is_alive()
    assert log.txids() == [1]


def end_as_at_exit(writer: LogWriter) -> None:
    """End a writer as the end of its process does, after which other threads may still write."""
    writer._portal.call(writer.finish())


@pytest.mark.parametrize("flush_interval_s", [0.0, 60.0])
@pytest.mark.parametrize("end", [LogWriter.close, LogWriter.abort, end_as_at_exit])
def test_a_writer_that_has_ended_takes_nothing(
    log: Refusing, end: Callable[[LogWriter], None], flush_interval_s: float
) -> None:
    """No call would hand it over, nor report that it was lost."""
    writer = log.open(replace(CONFIG, flush_interval_s=flush_interval_s))
    writer.write(LogRecord(1, b"x"))
    with pytest.raises(ConfigurationError, match="'x': expected a LogRecord"):
        writer.write("x")  # type: ignore[arg-type]
    writer.flush()
    end(writer)
    with pytest.raises(AlreadyClosedError, match="the writer of log 'clicks' is closed"):
        writer.write(LogRecord(2, b"x"))
    with pytest.raises(AlreadyClosedError):
        writer.write_bulk([LogRecord(2, b"x")])
    with pytest.raises(AlreadyClosedError):
        writer.write_batch(pa.record_batch({"txid": [2], "value": [b"x"]}))
    with pytest.raises(AlreadyClosedError):
        writer.flush()
    assert log.txids() == [1]


def test_a_timed_writer_hands_over_what_was_refused_at_the_moment(log: Refusing) -> None:
    """No call is needed for that."""
    writer = log.open(replace(CONFIG, flush_interval_s=0.01))
    log.error = NOT_READY
    writer.write(LogRecord(1, b"x"))
    log.refuses_again()
    writer.write(LogRecord(2, b"x"))
    log.refuses_again()
    log.error = None
    wait_until(lambda: log.txids() == [1, 2], timeout_s=30)
    writer.close()
    assert log.txids() == [1, 2]


def test_waiting_records_are_written_without_a_call(log: Refusing) -> None:
    """By default after some milliseconds, again after a pause, and with no call in between."""
    writer = log.open(CONFIG)

    def has(last: int) -> bool:
        return log.txids() == list(range(1, last + 1))

    for txid in (1, 2, 3):
        writer.write(LogRecord(txid, b"x"))
        wait_until(partial(has, txid), timeout_s=30)
    writer.close()


def test_without_an_interval_nothing_is_written_before_a_call(log: Refusing) -> None:
    """A program may want to say itself when."""
    writer = log.open(replace(CONFIG, flush_interval_s=0))
    writer.write(LogRecord(1, b"x"))
    assert writer._interval._running is None
    assert log.txids() == []
    writer.commit()
    assert log.txids() == [1]


def test_no_record_is_lost_or_doubled_between_the_two_threads(log: Refusing) -> None:
    """The calling thread appends without a lock while the event loop takes, and takes itself."""
    writer = log.open(replace(CONFIG, flush_interval_s=0.0001, buffer_bytes=20_000))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for txid in range(20_000):
            writer.write(LogRecord(txid, b"x"))
    finally:
        sys.setswitchinterval(before)
    wait_until(lambda: writer._writer.last_txid == 19_999, timeout_s=30)
    writer.commit()
    assert log.txids() == list(range(20_000))


def test_a_record_is_taken_as_it_was_when_it_was_written(log: Refusing) -> None:
    """Also from an object that the caller changes and writes again."""

    class Mine:
        txid, payload = 1, b"one"

    mine = Mine()
    writer = log.open(replace(CONFIG, flush_interval_s=0))
    writer.write(mine)  # type: ignore[arg-type]
    mine.txid, mine.payload = 2, b"two"
    writer.write(mine)  # type: ignore[arg-type]
    writer.commit()
    assert log.txids() == [1, 2]


def direct(writer: LogWriter) -> DirectWriter:
    """Return the async writer, over bookies."""
    return cast("DirectWriter", writer._writer)


def test_a_writer_that_fails_in_the_background_takes_no_more(log: Refusing) -> None:
    """It had accepted the record; the next write raises, and each after it."""
    writer = log.open(replace(CONFIG, flush_interval_s=0.001))
    writer.write(LogRecord(1, b"x"))
    wait_until(lambda: log.txids() == [1], timeout_s=30)
    writer._portal.post(lambda: direct(writer).pump.fail(LedgerFencedError("another writer")))
    writer._portal.call(asyncio.sleep(0))
    writer.write(LogRecord(2, b"x"))
    wait_until(lambda: writer._has_failed, timeout_s=30)
    for _ in range(3):
        with pytest.raises(WriteError, match="another writer"):
            writer.write(LogRecord(3, b"x"))
    with pytest.raises(WriteError, match="another writer"):
        writer.flush()
    with suppress(WriteError):
        writer.close()
    assert log.txids() == [1]


def test_a_timed_writer_reports_refusals_between_calls(
    log: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    """The next call, whichever it is, which takes nothing; then it goes on, for the writer does."""
    writer = log.open(replace(CONFIG, flush_interval_s=0.01))
    log.error = TransactionIdOutOfOrderError("log 'clicks': 1 follows 7")
    writer.write(LogRecord(1, b"x"))
    wait_until(lambda: "records are refused" in caplog.text, timeout_s=30)
    with pytest.raises(TransactionIdOutOfOrderError):
        writer.write(LogRecord(2, b"x"))
    assert caplog.text.count("records are refused") == 1
    log.error = None
    writer.write(LogRecord(3, b"x"))
    wait_until(lambda: log.txids() == [3], timeout_s=30)
    writer.close()
