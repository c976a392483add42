"""Reads that are cancelled or interrupted: nothing is lost, nothing comes twice.

Goal: wherever a read is given up, the next one returns what it had.  Method: many reads of one
reader are cancelled after so many turns of the loop, every number of them in turn, and what the
others returned is the log.  In another thread an interrupt also comes after the read has ended and
before its result is known.
"""

from __future__ import annotations

import asyncio
import gc
import io
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    DLError,
    EndOfStreamError,
    LedgerReadError,
    SchemaMismatchError,
)
from dlcore.base.records import LogRecord
from dlcore.log.reading.entry_rows import EntryRows
from dlcore.sync.merged import MergedReader
from dlcore.sync.portal import Portal
from dlcore.sync.reader import LogReader
from dlcore.sync.stream import AppendOnlyStreamReader
from dlcore.sync.watch import LogWatch
from tests.fixtures.aio import cancel_after, until
from tests.fixtures.lengths import sample
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, read_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence

    from dlcore.backends.direct.log import DirectLog
    from dlcore.base.ids import DLSN
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.reading.reader import DirectReader
    from dlcore.log.streams import AsyncAppendOnlyStreamReader
    from dlcore.log.writing.writer import DirectWriter

TURNS = sample(range(60), 12)
SEGMENTS = 5


async def fill(log: DirectLog, *, first_txid: int = 1) -> None:
    """Write a log of a few segments, each of a few entries."""
    txid = first_txid
    for segment in range(SEGMENTS):
        async with await log.open_writer() as writer:
            for count in (1, 3, 150)[: 1 + segment % 3]:
                txids = list(range(txid, txid + 2 * count, 2))
                txid += 2 * count
                await writer.write_batch(
                    pa.record_batch({"txid": txids, "value": [b"x" * 40] * count})
                )


async def tight(cluster: MemoryCluster, log: DirectLog) -> DirectLog:
    """Return the log of a client that keeps little fetched ahead, and so waits often."""
    config = replace(CONFIG, read_ahead_bytes=4096)
    return await cluster.namespaces[0].open_log(log.name, config=config)


async def give_up(read: Callable[[], Awaitable[Sequence[Any]]], turns: Iterable[int]) -> list[Any]:
    """Read on, cancelled after so many turns of the loop; then to the end."""
    found: list[Any] = []
    for count in turns:
        reading = asyncio.ensure_future(read())
        for _ in range(count):
            await asyncio.sleep(0)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            found += await reading
    while more := await read():
        found += more
    return found


def reads_of(reader: DirectReader) -> dict[str, Callable[[], Awaitable[Sequence[DLSN]]]]:
    """Return all ways of reading, each with the positions of what it read."""

    async def one() -> Sequence[DLSN]:
        record = await reader.read_next(until_caught_up=True)
        return [] if record is None else [record.dlsn]

    async def batch() -> Sequence[DLSN]:
        found = await reader.read_batch(until_caught_up=True)
        return [] if found is None else dlsns_of(found)

    async def rows() -> Sequence[DLSN]:
        await reader._gather_rows(until_caught_up=True, records_min=400)
        taken = reader._take_gathered()
        return [dlsn for each in taken for dlsn in dlsns_of(each.take_batch("clicks"))]

    async def bulk(**until: Any) -> Sequence[DLSN]:
        return [each.dlsn for each in await reader.read_bulk(400, **until)]

    return {
        "one": one,
        "batch": batch,
        "rows": rows,
        "bulk": partial(bulk, until_caught_up=True),
        "bulk with a deadline": partial(bulk, timeout_s=0.05),
    }


def dlsns_of(batch: pa.RecordBatch) -> list[DLSN]:
    """Return the positions of a batch's rows."""
    from dlcore.base.ids import DLSN

    return [DLSN(*each.values()) for each in batch.column("dlsn").to_pylist()]


@pytest.mark.parametrize("way", ["one", "batch", "rows", "bulk", "bulk with a deadline"])
def test_a_cancelled_read_loses_and_repeats_nothing(way: str) -> None:
    """Wherever it waits: for entries, at a segment's end, for whether there is more."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await fill(log)
        wanted = [each.dlsn for each in await read_all(log)]
        small = await tight(cluster, log)
        for first in TURNS:
            async with await small.open_reader() as reader:
                turns = range(first, first + 20)
                assert await give_up(reads_of(reader)[way], turns) == wanted

    on_log(body)


def test_the_position_stays_where_a_cancelled_read_began() -> None:
    """It may be stored: a reader from there gets what the cancelled one had."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await fill(log)
        records = await read_all(log)
        async with await log.open_reader() as reader:
            assert await reader.read_bulk(2, until_caught_up=True) == records[:2]
            begin = reader.position
            waiting = asyncio.create_task(reader.read_bulk(len(records), timeout_s=60))
            await until(lambda: sum(each.rows_left for each in reader._rows) == len(records) - 2)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert reader.position == begin
            async with await log.open_reader(dlsn=begin) as other:
                assert await other.read_bulk(999, until_caught_up=True) == records[2:]
            assert await reader.read_bulk(999, until_caught_up=True) == records[2:]

    on_log(body)


def test_a_cancelled_seek_has_happened_or_not() -> None:
    """A read goes on from the position."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await fill(log)
        records = await read_all(log)
        middle = records[len(records) // 2]
        for turns in TURNS:
            async with await log.open_reader() as reader:
                await reader.read_bulk(3)
                seeking = asyncio.create_task(reader.seek(dlsn=middle.dlsn))
                for _ in range(turns):
                    await asyncio.sleep(0)
                seeking.cancel()
                await asyncio.gather(seeking, return_exceptions=True)
                position = reader.position
                found = await reader.read_bulk(len(records), until_caught_up=True)
                assert found == [each for each in records if each.dlsn >= position]

    on_log(body)


async def merged_logs(cluster: MemoryCluster) -> list[int]:
    """Make two logs whose records alternate; return their transaction ids."""
    namespace = cluster.namespaces[0]
    found = []
    for first, name in enumerate(("even", "odd")):
        await namespace.create_log(name)
        log = await namespace.open_log(name)
        await fill(log, first_txid=first)
        found += [each.txid for each in await read_all(log)]
    return sorted(found)


@pytest.mark.parametrize("turns", TURNS)
def test_a_cancelled_merged_read_loses_and_repeats_nothing(turns: int) -> None:
    """A read of any of its logs, whichever of them had given records by then."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        wanted = await merged_logs(cluster)
        async with await cluster.namespaces[0].open_merged_reader(["even", "odd"]) as reader:

            async def read() -> list[int]:
                return [each.record.txid for each in await reader.read_bulk(37)]

            assert await give_up(read, range(turns, turns + 30)) == wanted

    on_log(body)


@pytest.mark.parametrize("turns", TURNS)
def test_a_cancelled_read_of_a_stream_loses_and_repeats_nothing(turns: int) -> None:
    """Bytes are given once, and an error in between keeps those that were read before it."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        wanted = bytes(range(256)) * 40
        async with await log.open_stream_writer() as writer:
            for at in range(0, len(wanted), 640):
                await writer.write(wanted[at : at + 640])
                await writer.flush()
        small = await tight(cluster, log)
        async with await small.open_stream_reader() as stream:

            async def read() -> list[bytes]:
                data = await stream.read(3000)
                return [data] if data else []

            assert b"".join(await give_up(read, range(turns, turns + 30))) == wanted
            seeking = asyncio.create_task(stream.seek(700))
            await asyncio.sleep(0)
            seeking.cancel()
            await asyncio.gather(seeking, return_exceptions=True)
            position = stream.tell()
            assert await stream.read() == wanted[position:]
            await stream.seek(700)
            take_batch = stream._reader.read_batch
            calls = iter(range(9))

            async def failing(**until: bool) -> pa.RecordBatch | None:
                if next(calls) == 2:
                    raise LedgerReadError("no replica answers")
                return await take_batch(**until)

            stream._reader.read_batch = failing
            with pytest.raises(LedgerReadError):
                await stream.read()
            assert stream.tell() == 700
            assert await stream.read(5000) == wanted[700:5700]

    on_log(body)


class Interrupted:
    """A result whose waiting caller is interrupted after so many turns of the loop."""

    def __init__(self, portal: Portal, future: Any, turns: int | None) -> None:
        self._portal, self._future, self._turns = portal, future, turns

    def result(self) -> None:
        """Wait for the turns, or for the result if there is no number of them; never give it."""
        if self._turns is None:
            with suppress(DLError):
                self._future.result()
        for _ in range(self._turns or 0):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._portal._loop).result()
        raise KeyboardInterrupt

    def cancel(self) -> None:
        """Cancel what is under way, if it still is."""
        self._future.cancel()


class ImpatientPortal(Portal):
    """Its callers are interrupted, each after as many turns as come next; then no more."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupts: Iterator[int | None] = iter(())

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Start it."""
        future = super().submit(coroutine)
        turns = next(self.interrupts, -1)
        return future if turns == -1 else Interrupted(self, future, turns)


@pytest.fixture
def portal() -> Iterator[ImpatientPortal]:
    """Return one, stopped at the end."""
    portal = ImpatientPortal()
    yield portal
    portal.stop()


@pytest.fixture
def cluster(portal: Portal) -> Iterator[MemoryCluster]:
    """Return a cluster on the portal's loop, with a filled log "clicks"."""
    cluster = MemoryCluster()

    async def start() -> None:
        await cluster.start()
        namespace = await cluster.open("a")
        await namespace.create_log("clicks")
        await fill(await namespace.open_log("clicks"))

    portal.call(start())
    yield cluster
    portal.call(cluster.aclose())


def interrupt(
    portal: ImpatientPortal, read: Callable[[], Sequence[Any]], count: int = 0
) -> list[Any]:
    """Read on, interrupted at first; then to the end.

    One that has a deadline may find nothing before it: then `count` says where the end should be.
    """
    found: list[Any] = []
    portal.interrupts = iter([*(None, 0, 1, None), *TURNS, *(None, None)])
    for _ in range(1000):
        try:
            more = read()
        except KeyboardInterrupt:
            continue
        if not more and len(found) >= count:
            break
        found += more
    return found


@pytest.mark.parametrize("timeout_s", [None, 0.1])
def test_an_interrupted_read_loses_and_repeats_nothing(
    portal: ImpatientPortal, cluster: MemoryCluster, timeout_s: float | None
) -> None:
    """Also when it had ended by then, without a caller that knew."""

    async def open_small() -> tuple[DirectLog, list[LogRecordWithDLSN]]:
        log = await cluster.namespaces[0].open_log("clicks")
        return await tight(cluster, log), await read_all(log)

    log, wanted = portal.call(open_small())
    reader = LogReader(portal, portal.call(log.open_reader()))

    bulk = partial(reader.read_bulk, 90, timeout_s=timeout_s)
    assert interrupt(portal, bulk, len(wanted)) == wanted
    reader.seek()
    positions = interrupt(
        portal, lambda: [] if (batch := reader.read_batch()) is None else dlsns_of(batch)
    )
    assert positions == [each.dlsn for each in wanted]
    reader.seek()
    found = interrupt(portal, lambda: [each] if (each := reader.read_next()) else [])
    assert found == wanted
    reader.close()


def test_a_typed_log_is_followed_with_a_deadline(portal: Portal, cluster: MemoryCluster) -> None:
    """For a batch; there are no records."""

    async def open_typed() -> tuple[DirectReader, DirectWriter]:
        namespace = cluster.namespaces[0]
        await namespace.create_log("typed", schema=pa.schema({"x": pa.int64()}))
        log = await namespace.open_log("typed")
        return await log.open_reader(), await log.open_writer()

    async def write(batch: pa.RecordBatch) -> None:
        await asyncio.sleep(0.05)
        await writer.write_batch(batch)

    twin, writer = portal.call(open_typed())
    with LogReader(portal, twin) as reader:
        assert reader.read_batch() is None
        began = time.monotonic()
        assert reader.read_batch(timeout_s=0.1) is None
        assert time.monotonic() - began >= 0.09  # the loop may look a little early
        writing = portal.submit(write(pa.record_batch({"x": [1, 2]})))
        found = reader.read_batch(timeout_s=30)
        assert found is not None
        assert found.column("x").to_pylist() == [1, 2]
        writing.result()
        with pytest.raises(SchemaMismatchError, match="use read_batch"):
            reader.read_bulk(1, timeout_s=30)
        portal.call(writer.mark_end_of_stream())
        with pytest.raises(EndOfStreamError):
            reader.read_batch(timeout_s=30)
    portal.call(writer.aclose())


def test_an_interrupt_while_records_are_made_takes_none(
    portal: Portal, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between two entries of a bulk that are here."""

    async def open_reader() -> tuple[DirectReader, list[LogRecordWithDLSN]]:
        log = await cluster.namespaces[0].open_log("clicks")
        return await log.open_reader(), await read_all(log)

    twin, wanted = portal.call(open_reader())
    with LogReader(portal, twin) as reader:
        peek, calls = EntryRows.peek_records, iter(range(9))

        def peek_records(rows: EntryRows, count: int) -> list[LogRecordWithDLSN]:
            if next(calls) == 2:
                raise KeyboardInterrupt
            return peek(rows, count)

        with monkeypatch.context() as patched:
            patched.setattr(EntryRows, "peek_records", peek_records)
            with pytest.raises(KeyboardInterrupt):
                reader.read_bulk(200)
        assert reader.position == wanted[0].dlsn
        assert reader.read_bulk(999) == wanted


def test_an_interrupted_merged_read_loses_and_repeats_nothing(
    portal: ImpatientPortal, cluster: MemoryCluster
) -> None:
    """In bulk, and by a new iteration."""
    wanted = portal.call(merged_logs(cluster))

    async def open_merged() -> MergedReader:
        names = ["even", "odd"]
        return MergedReader(portal, await cluster.namespaces[0].open_merged_reader(names))

    for count in (1, 37):
        reader = portal.call(open_merged())

        def read(reader: MergedReader = reader, count: int = count) -> Sequence[int]:
            if count > 1:
                return [each.record.txid for each in reader.read_bulk(count)]
            return [each.record.txid for each in islice(reader, 5)]

        assert interrupt(portal, read) == wanted
        assert set(reader.positions) == {"even", "odd"}
        reader.close()


def test_an_interrupted_read_of_a_stream_loses_and_repeats_nothing(
    portal: ImpatientPortal, cluster: MemoryCluster
) -> None:
    """Into a buffer, and all of it."""
    wanted = bytes(range(256)) * 4

    async def open_stream() -> AsyncAppendOnlyStreamReader:
        namespace = cluster.namespaces[0]
        await namespace.create_log("bytes")
        log = await namespace.open_log("bytes")
        async with await log.open_stream_writer() as writer:
            for at in range(0, len(wanted), 64):
                await writer.write(wanted[at : at + 64])
                await writer.flush()
        return await log.open_stream_reader()

    stream = AppendOnlyStreamReader(portal, portal.call(open_stream()))
    assert b"".join(interrupt(portal, lambda: parts(stream.read(50)))) == wanted
    assert stream.seek(-len(wanted), io.SEEK_CUR) == 0
    assert stream.skip_to(10)
    assert b"".join(interrupt(portal, lambda: parts(stream.readall()))) == wanted[10:]
    assert stream.tell() == len(wanted)
    stream.close()


def parts(data: bytes | None) -> list[bytes]:
    """Return what was read, if anything was."""
    return [data] if data else []


def test_an_interrupted_watch_tells_all_that_it_found(
    portal: ImpatientPortal, cluster: MemoryCluster
) -> None:
    """It had found the log when the interrupt came."""

    async def open_watch() -> LogWatch:
        return LogWatch(portal, cluster.namespaces[0].watch_logs())

    watch = portal.call(open_watch())
    portal.interrupts = iter([None])
    with pytest.raises(KeyboardInterrupt):
        watch.take()
    assert [each.name for each in watch.take(timeout_s=60)] == ["clicks"]
    watch.close()


@pytest.mark.parametrize("again", range(4))
def test_a_reader_cancelled_while_closing_leaves_no_read_to_the_collector(again: int) -> None:
    """It would end them in no order, and one that waits for another's end raises an error."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await fill(log)
        left: list[str] = []
        sys.set_asyncgen_hooks(finalizer=lambda each: left.append(repr(each)))
        narrow = await tight(cluster, log)

        async def read() -> None:
            async with await narrow.open_reader() as reader:
                while await reader.read_bulk(20, until_caught_up=True):
                    pass

        for turns in TURNS:
            await cancel_after(asyncio.create_task(read()), turns, again)
        gc.collect()
        assert not left

    on_log(body)


@pytest.mark.parametrize("again", [3, 4])
def test_a_reader_cancelled_while_it_stops_to_follow_leaves_nothing_behind(again: int) -> None:
    """Neither a stream of a bookie nor a task that waits for one."""

    async def body(_: MemoryCluster, log: DirectLog) -> None:
        left: list[str] = []
        sys.set_asyncgen_hooks(finalizer=lambda each: left.append(repr(each)))

        async def follow() -> None:
            async with await log.open_reader() as reader:
                while await reader.read_next():
                    pass

        async with await log.open_writer() as writer:
            for txid in range(5):
                await writer.write(LogRecord(txid, b"x"))
            await writer.commit()
            before = asyncio.all_tasks()
            for turns in range(60):
                await cancel_after(asyncio.create_task(follow()), turns, again)
            gc.collect()
            assert not left
            await until(lambda: asyncio.all_tasks() == before)

    on_log(body)


def test_a_cancelled_close_of_a_reader_still_ends_the_waits() -> None:
    """Also if that was while it waited for the end of the call under way."""

    async def body(_: MemoryCluster, log: DirectLog) -> None:
        for turns in range(5):
            reader = await log.open_reader()
            waiting = asyncio.create_task(reader.read_next())
            await asyncio.wait([waiting], timeout=0.01)
            await cancel_after(asyncio.create_task(reader.aclose()), turns)
            await reader.aclose()
            with pytest.raises(AlreadyClosedError):
                await asyncio.wait_for(waiting, 10)

    on_log(body)
