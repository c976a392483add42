"""Readers that are at work while the log changes under them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    AlreadyTruncatedError,
    BookieUnavailableError,
    EndOfStreamError,
    LedgerNotFoundError,
    LedgerReadError,
    LogNotFoundError,
    MetadataConnectionError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import EntryPlace
from dlcore.ledger.reading.reader import LedgerReader
from dlcore.log.metadata.history import LogHistory
from dlcore.log.reading.extent_ledgers import ExtentLedgers
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.log.metadata.values import LogState
    from dlcore.log.reading.cursor import ReadExtent


async def write_segments(log: DirectLog, payloads: list[bytes]) -> None:
    """Write one segment for each of `payloads`, with that record in it."""
    for payload in payloads:
        async with await log.open_writer() as writer:
            await writer.write(record(writer.last_txid + 1, payload))


@pytest.mark.parametrize("until_caught_up", [True, False])
def test_a_log_that_was_made_anew_is_not_the_one_that_was_read(*, until_caught_up: bool) -> None:
    """The reader was away meanwhile: its position means nothing in the log of the same name."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, [b"old"])
        other = await (await cluster.open("b")).open_log("clicks")
        async with await other.open_reader() as reader:
            assert len(await reader.read_bulk(9, until_caught_up=True)) == 1
            cluster.stores["b"].disconnect()
            await log.delete()
            await cluster.namespaces[0].create_log("clicks")
            anew = await cluster.namespaces[0].open_log("clicks")
            await write_segments(anew, [b"new"] * 3)
            cluster.stores["b"].reconnect()
            with pytest.raises(LogNotFoundError, match="was deleted"):
                await asyncio.wait_for(reader.read_next(until_caught_up=until_caught_up), 20)

    on_log(body)


@pytest.mark.parametrize("start", [None, DLSN(1, 1, 0)])
def test_the_segment_being_followed_is_truncated_inside(start: DLSN | None) -> None:
    """A slow reader from the beginning goes on behind the cut; another one gets an error."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        config = replace(CONFIG, entry_bytes=100, read_ahead_bytes=300)
        slow = await (await cluster.open("b", config=config)).open_log("clicks")
        async with await slow.open_writer() as writer, await slow.open_reader(dlsn=start) as reader:
            for txid in range(50):
                await writer.write(record(txid, b"x" * 80))
            await writer.commit()
            first = await reader.read_next()
            assert first is not None
            for _ in range(100):
                await asyncio.sleep(0)  # it follows, and its buffer is full
            await log.truncate(DLSN(1, 40, 0))
            for _ in range(100):
                await asyncio.sleep(0)  # it sees the truncation
            if start is not None:
                assert 0 < len(await reader.read_bulk(100, until_caught_up=True)) < 40
                for _ in range(2):
                    with pytest.raises(AlreadyTruncatedError):
                        await reader.read_bulk(100, until_caught_up=True)
                await reader.seek(dlsn=DLSN(1, 40, 0))
                assert [r.txid async for r in reader] == list(range(40, 50))
                return
            txids = [r.txid for r in await reader.read_bulk(100, until_caught_up=True)]
            assert txids[-10:] == list(range(40, 50))
            assert txids[:-10] == list(range(1, len(txids) - 9))  # what was fetched before
            assert len(txids) < 40
            await writer.write(record(50))
            after = await reader.read_next()
            assert after is not None
            assert after.txid == 50

    on_log(body)


@pytest.mark.parametrize("state", ["empty", "closed", "open"])
def test_a_waiting_reader_learns_that_the_metadata_store_is_gone(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it waits for: it fails after the time-out, and reads on when the store is back."""
    monkeypatch.setattr("dlcore.ledger.reading.follow._SILENCE_S", 0.02)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        config = replace(CONFIG, read_unavailable_timeout_s=0.2)
        if state != "empty":
            await write_segments(log, [b"first"])
        writer = await log.open_writer()
        if state == "open":
            await writer.write(record(1, b"second"))
        other = await (await cluster.open("b", config=config)).open_log("clicks")
        async with await other.open_reader() as reader:
            await reader.read_bulk(9, until_caught_up=True)
            cluster.stores["b"].disconnect()
            for _ in range(2):
                with pytest.raises(MetadataConnectionError, match=r"ZooKeeper for 0\.2 s"):
                    await asyncio.wait_for(reader.read_next(), 20)
            cluster.stores["b"].reconnect()
            await writer.write(record(2, b"third"))
            found = await reader.read_next()
            assert found is not None
            assert found.payload == b"third"
        await writer.aclose()

    on_log(body)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_reader_of_many_segments_knows_a_few_at_a_time(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes over all of them, from anywhere, and along the tail, and none is read before."""
    monkeypatch.setattr("dlcore.log.metadata.history._SEGMENTS_AHEAD", at_once)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, [b"%d" % number for number in range(7)])
        config = replace(CONFIG, read_ahead_bytes=1)
        slow = await cluster.namespaces[0].open_log("clicks", config=config)
        for first in range(8):
            async with await slow.open_reader(dlsn=DLSN(first + 1, 0, 0)) as reader:
                assert len(reader._fetcher._machine.segments.state.segments) <= at_once
                assert [r.txid async for r in reader] == list(range(first, 7))
        async with await slow.open_reader() as reader:
            following = asyncio.create_task(reader.read_bulk(9, timeout_s=60))
            await write_segments(log, [b"7"])
            async with await log.open_writer() as writer:
                await writer.write(record(8, b"8"))
                assert [r.payload for r in await following] == [b"%d" % n for n in range(9)]
            assert await reader.read_next(until_caught_up=True) is None
        async with await slow.open_reader() as reader:
            assert await reader.read_next() is not None
            await log.truncate(DLSN(6, 0, 0))
            found = [r.txid async for r in reader]
            assert found[-4:] == [5, 6, 7, 8]
            assert found == sorted(set(found))

    on_log(body)


def test_the_next_segment_is_opened_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One and no more, however long the reader stands still; closing it leaves nothing open."""
    read, chunks = [], ExtentLedgers.chunks

    async def noted(self: ExtentLedgers, step: ReadExtent) -> Any:
        async with aclosing(chunks(self, step)) as found:
            async for frames in found:
                read.append(step.lssn)
                yield frames

    monkeypatch.setattr(ExtentLedgers, "chunks", noted)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, [b"%d" % number for number in range(5)])
        config = replace(CONFIG, read_ahead_bytes=1)
        slow = await cluster.namespaces[0].open_log("clicks", config=config)
        async with await slow.open_reader() as reader:
            fetcher = reader._fetcher
            for _ in range(300):
                await asyncio.sleep(0)
            # The first one fills the buffer, the second waits for room.
            assert fetcher._machine.cursor.position == DLSN(2, 0, 0)
            assert read == [1, 2, 3]
            assert [r.txid async for r in reader] == list(range(5))
            assert read == [1, 2, 3, 4, 5]
            assert fetcher._ahead is None
        async with await slow.open_reader() as reader:
            assert await reader.read_next() is not None
            for _ in range(300):
                await asyncio.sleep(0)
            opened = reader._fetcher._ahead
        assert opened is not None
        assert opened.task.done()
        assert reader._fetcher._ahead is None

    on_log(body)


def test_nothing_is_fetched_behind_the_end_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader ends there; a reader with a truncated start gets an error, the first one too."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, [b"%d" % number for number in range(5)])
        asked: list[tuple[int, int]] = []
        read = LedgerReader.read

        def noted(self: LedgerReader, first: int, last: int) -> Any:
            asked.append((self.metadata.ledger_id, last))
            return read(self, first, last)

        monkeypatch.setattr(LedgerReader, "read", noted)
        async with await log.readers.open_part(DLSN(2, 0, 0), DLSN(4, 0, 0)) as reader:
            assert [r.txid async for r in reader] == [1, 2]
            with pytest.raises(EndOfStreamError):
                await reader.read_next()
        assert len(asked) == 2
        await log.truncate(DLSN(5, 0, 0))
        for start in (DLSN.INITIAL, DLSN(2, 0, 0)):
            with pytest.raises(AlreadyTruncatedError):
                await log.readers.open_part(start, DLSN(4, 0, 0))

    on_log(body)


@pytest.mark.parametrize("is_truncated", [True, False])
def test_an_extent_opened_before_its_turn_may_be_gone(
    monkeypatch: pytest.MonkeyPatch, *, is_truncated: bool
) -> None:
    """That is an error when its turn comes and not before, unless a truncation explains it."""
    failed, chunks = [], ExtentLedgers.chunks

    async def noted(self: ExtentLedgers, step: ReadExtent) -> Any:
        try:
            async with aclosing(chunks(self, step)) as found:
                async for frames in found:
                    yield frames
        except LedgerNotFoundError as error:
            failed.append(error)
            raise

    monkeypatch.setattr(ExtentLedgers, "chunks", noted)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, [b"%d" % number for number in range(4)])
        config = replace(CONFIG, read_ahead_bytes=1)
        slow = await cluster.namespaces[0].open_log("clicks", config=config)
        ledger_id = (await log.get_log_segments())[2].extents[0].ledger_id
        await cluster.namespaces[0].log_context.ledger_store.delete(ledger_id)
        async with await slow.open_reader() as reader:
            for _ in range(300):
                await asyncio.sleep(0)
            ahead = reader._fetcher._ahead
            assert ahead is not None
            assert isinstance(failed[0], LedgerNotFoundError)
            if is_truncated:
                await log.truncate(DLSN(4, 0, 0))
                assert [r.txid async for r in reader] == [0, 1, 3]
                return
            for txid in range(2):
                found = await reader.read_next()
                assert found is not None
                assert found.txid == txid
            with pytest.raises(LedgerNotFoundError):
                await reader.read_next()

    on_log(body)


def test_an_error_takes_no_records_with_it() -> None:
    """Records collected before it are returned; the next call raises the error."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        config = replace(CONFIG, read_unavailable_timeout_s=0.2)
        await write_segments(log, [b"first"])
        other = await (await cluster.open("b", config=config)).open_log("clicks")
        async with await other.open_reader() as reader:
            assert await reader.read_next(until_caught_up=True) is not None
            await reader.seek()
            cluster.stores["b"].disconnect()
            assert len(await reader.read_bulk(9, timeout_s=60)) == 1
            with pytest.raises(MetadataConnectionError):
                await reader.read_bulk(9, timeout_s=60)
            cluster.stores["b"].reconnect()

    on_log(body)


def test_a_follower_learns_that_all_bookies_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails after the time-out, not while one of them answers; it reads on when one is back."""
    monkeypatch.setattr("dlcore.ledger.reading.follow._SILENCE_S", 0.02)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        config = replace(CONFIG, read_unavailable_timeout_s=2)
        other = await (await cluster.open("b", config=config)).open_log("clicks")
        async with await log.open_writer() as writer, await other.open_reader() as reader:
            await writer.write(record(1))
            assert await reader.read_next()
            (segment,) = await log.get_log_segments()
            ledger = await cluster.namespaces[0].get_ledger(segment.extents[0].ledger_id)
            first, *others = (
                each for each in cluster.bookies if each.bookie in ledger.last_ensemble.bookies
            )
            for bookie in others:
                bookie.stop()
            waiting = asyncio.create_task(reader.read_next())
            await asyncio.sleep(4.5)  # more than two time-outs
            assert not waiting.done()
            first.stop()
            with pytest.raises(BookieUnavailableError, match="bookies that it follows for 2"):
                await asyncio.wait_for(waiting, 20)
            for bookie in (first, *others):
                bookie.start()
            await writer.write(record(2, b"back"))
            found = await reader.read_next()
            assert found is not None
            assert found.payload == b"back"

    on_log(body)


def test_entries_known_to_be_there_are_read_without_another_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller that is faster than the bookies asks the metadata store at the end only."""
    looks: list[int] = []
    read = LogHistory.read

    async def counted(self: LogHistory, **which: Any) -> LogState:
        looks.append(which["from_lssn"])
        return await read(self, **which)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, [b"x"] * 20)
        async with await log.open_reader() as reader:
            monkeypatch.setattr(LogHistory, "read", counted)
            for _ in range(20):
                assert await reader.read_next(until_caught_up=True) is not None
            assert await reader.read_next(until_caught_up=True) is None
            assert len(looks) <= 2  # this one, and the fetcher's at the end of what it knows

    on_log(body)


def test_known_entries_are_truncated_before_they_are_read() -> None:
    """A reader that waits for it learns that nothing is left, and waits for no other record."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, [b"a", b"b"])
        for bookie in cluster.bookies:
            bookie.stop()
        other = await (await cluster.open("b")).open_log("clicks")
        async with await other.open_reader() as reader:
            reading = asyncio.create_task(reader.read_next(until_caught_up=True))
            await log.truncate(DLSN(2, 1, 0))
            assert await asyncio.wait_for(reading, 30) is None

    on_log(body)


def test_two_who_read_one_history_at_once_do_not_disturb_each_other() -> None:
    """A reader fetches ahead, and asks whether there is more, from another segment on."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, [b"x"] * 4)
        history = LogHistory(cluster.namespaces[0].log_context.logs, log._log)
        await history.read(from_lssn=1, count=1)
        await write_segments(log, [b"x"])
        states = await asyncio.gather(
            history.read(from_lssn=1, count=2), history.read(from_lssn=3, count=1)
        )
        assert [[each.lssn for each in state.segments] for state in states] == [[1, 2], [3]]

    on_log(body)


def test_a_reader_that_is_closed_while_it_looks_for_more_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its call gets an error, and does not wait for ever."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write_segments(log, [b"a"])
        reader = await log.open_reader()
        assert len(await reader.read_bulk(9, until_caught_up=True)) == 1
        looks, goes_on = asyncio.Event(), asyncio.Event()
        read = LogHistory.read

        async def slow(self: LogHistory, **which: Any) -> LogState:
            looks.set()
            await goes_on.wait()
            return await read(self, **which)

        monkeypatch.setattr(LogHistory, "read", slow)
        reading = asyncio.create_task(reader.read_next(until_caught_up=True))
        await looks.wait()
        await reader.aclose()
        goes_on.set()
        with pytest.raises(AlreadyClosedError):
            await asyncio.wait_for(reading, 30)

    on_log(body)


def test_pushed_entries_are_buffered_within_the_bound() -> None:
    """A tail reader that is slow gets all of it, in order."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        config = replace(CONFIG, read_ahead_bytes=300)
        slow = await (await cluster.open("b", config=config)).open_log("clicks")
        async with await log.open_writer() as writer, await slow.open_reader() as reader:
            await writer.write(record(0))
            assert await reader.read_next() is not None
            for txid in range(1, 30):
                await writer.write(record(txid, b"x" * 100))
                await asyncio.sleep(0.001)
                assert reader._fetcher._machine.buffer.size_bytes < 300 + 400
            assert reader._fetcher._machine.buffer.size_bytes > 300
            assert [r.txid for r in await reader.read_bulk(29, timeout_s=60)] == list(range(1, 30))

    on_log(body)


def test_nothing_is_taken_behind_an_error() -> None:
    """Whenever it comes while entries are being pushed."""

    async def body(_: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write(record(0))
            for turns in range(20):
                async with await log.open_reader() as reader:
                    await reader.read_bulk(turns + 1, timeout_s=60)
                    await asyncio.sleep(0.01)  # it follows by then, in most rounds
                    written = writer.write(record(turns + 1))
                    for _turn in range(turns):
                        await asyncio.sleep(0)
                    place = EntryPlace(1, 0, 0, 1, 0)
                    reader._fetcher.reject(place, LedgerReadError("planted"))
                    await written
                    await asyncio.sleep(0.01)
                    assert reader._fetcher.take() is None

    on_log(body)
