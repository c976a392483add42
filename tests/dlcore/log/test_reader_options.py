"""Readers that are idle, that meet broken or missing entries, or read what is truncated."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore.base.config import LogConfig
from dlcore.base.errors import (
    ConfigurationError,
    InvalidEntryError,
    LedgerReadError,
    ReaderIdleError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import EntryPlace
from dlcore.log.reading.reader import EntryDecoder
from dlcore.log.reading.tail import Broke, FetchedEntry, IdleStep, IdleWatch
from dlcore.wire.frames import decode_frame, encode_frame
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, record

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.backends.direct.log import DirectLog


async def write(log: DirectLog, count: int = 6) -> int:
    """Write a segment of an entry for each record; return its ledger."""
    async with await log.open_writer() as writer:
        first = writer.last_txid + 1
        for txid in range(first, first + count):
            await writer.write(record(txid))
    return (await log.get_log_segments())[-1].extents[-1].ledger_id


async def txids(log: DirectLog, **options: Any) -> list[int]:
    """Return the transaction ids of all that a reader gives."""
    async with await log.open_reader(**options) as reader:
        return [r.txid async for r in reader]


def test_being_idle_is_measured_from_the_first_wait_on() -> None:
    """Waits add up, a record ends it; looks come every so often, and failing begins anew."""
    watch = IdleWatch(warn_s=10, error_s=25)
    assert watch.due(100) is IdleStep.NOTHING
    watch.waits(0)
    watch.waits(9)
    assert (watch.deadline, watch.due(9.9)) == (10, IdleStep.NOTHING)
    assert (watch.due(10), watch.due(11), watch.deadline) == (IdleStep.LOOK, IdleStep.NOTHING, 20)
    assert (watch.due(20), watch.deadline, watch.idle_s(24)) == (IdleStep.LOOK, 25, 24)
    assert (watch.due(25), watch.idle_s(26)) == (IdleStep.FAIL, 0)
    watch.waits(30)
    watch.received()
    assert watch.due(1000) is IdleStep.NOTHING
    with pytest.raises(ConfigurationError, match="reader_idle_warn_s"):
        LogConfig(reader_idle_warn_s=0)


def test_a_reader_that_is_idle_for_too_long_fails() -> None:
    """By the time of all its waits; it goes on when it is asked again and there is a record."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log, 1)
        config = replace(CONFIG, reader_idle_error_s=0.2)
        idle = await cluster.namespaces[0].open_log("clicks", config=config)
        async with await idle.open_reader() as reader:
            assert await reader.read_next() is not None
            for _ in range(2):
                with pytest.raises(ReaderIdleError, match=r"no record came for 0\.2"):
                    await asyncio.wait_for(reader.read_next(), 20)

            async def poll() -> None:
                while True:
                    assert await reader.read_bulk(1, timeout_s=0.05) == []

            with pytest.raises(ReaderIdleError):
                await asyncio.wait_for(poll(), 20)
            await write(log, 1)
            assert (await reader.read_bulk(1))[0].txid == 1

    on_log(body)


def test_an_idle_reader_looks_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for changes that were never reported to it; and says so."""
    caplog.set_level(logging.WARNING)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        config = replace(CONFIG, reader_idle_warn_s=0.1)
        store = cluster.stores["a"]
        watch = store.watch

        def deaf(path: str, _callback: Callable[[], None], *, children: bool = True) -> Any:
            return watch(path, lambda: None, children=children)

        monkeypatch.setattr(store, "watch", deaf)
        idle = await cluster.namespaces[0].open_log("clicks", config=config)
        async with await idle.open_reader() as reader:
            waiting = asyncio.create_task(reader.read_next())
            await asyncio.sleep(0)
            await write(await (await cluster.open("b")).open_log("clicks"), 1)
            found = await asyncio.wait_for(waiting, 20)
            assert found is not None

    on_log(body)
    assert "got no news for 0.1" in caplog.text


@pytest.mark.parametrize("is_open", [False, True])
def test_damaged_entries_are_left_out_only_when_asked(*, is_open: bool) -> None:
    """An error that stays, or left out and counted; what follows is read with its own numbers."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log)
        writer = await log.open_writer()
        for txid in range(6, 12):
            await writer.write(record(txid))
        await writer.commit()
        ledger_id = (await log.get_log_segments())[-1].extents[-1].ledger_id
        if not is_open:
            await writer.aclose()
        for bookie in cluster.bookies:
            for entry_id in (1, 2, 5):
                if entry_id in bookie.entries(ledger_id):
                    bookie.entries(ledger_id)[entry_id] = b"damaged"
        async with await log.open_reader() as reader:
            assert len(await reader.read_bulk(99, timeout_s=60)) == 7
            for _ in range(2):
                with pytest.raises(LedgerReadError, match="no replica returned entry 1"):
                    await reader.read_next()
            assert reader.broken_entries == 0
        async with await log.open_reader(skip_broken_entries=True) as reader:
            found = await reader.read_bulk(9, timeout_s=60)
            assert [r.txid for r in found] == [0, 1, 2, 3, 4, 5, 6, 9, 10]
            assert [r.sequence_id for r in found] == [0, 1, 2, 3, 4, 5, 6, 9, 10]
            if is_open:
                await writer.write(record(12))
                assert (await reader.read_bulk(1))[0].txid == 12
            else:
                assert await reader.read_next(until_caught_up=True) is None
            assert reader.broken_entries == 3
            await reader.seek(dlsn=DLSN(2, 3, 0))
            assert (await reader.read_bulk(1))[0].txid == 9
        await writer.aclose()

    on_log(body)


@pytest.mark.parametrize("keeps_header", [False, True])
def test_entries_that_are_none_are_left_out_only_when_asked(*, keeps_header: bool) -> None:
    """Whether their header or their batch does not parse: sound frames of something else."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            for first in (0, 2, 4):
                await writer.write_batch(
                    pa.record_batch({"txid": [first, first + 1], "value": [b"x"] * 2})
                )
                await writer.flush()
        ledger_id = (await log.get_log_segments())[0].extents[0].ledger_id
        for bookie in cluster.bookies:
            entries = bookie.entries(ledger_id)
            if 1 not in entries:
                continue
            old = decode_frame(entries[1], ledger_id=ledger_id, entry_id=1)
            entries[1] = encode_frame(
                ledger_id=ledger_id,
                entry_id=1,
                last_add_confirmed=0,
                ledger_bytes=old.ledger_bytes,
                body=[old.body[: 48 if keeps_header else 0], b"something else"],
            )
        async with await log.open_reader() as reader:
            assert [r.txid for r in await reader.read_bulk(2)] == [0, 1]
            for _ in range(2):
                with pytest.raises(InvalidEntryError):
                    await reader.read_next()
            await reader.seek(dlsn=DLSN(1, 2, 0))
            assert (await reader.read_bulk(1))[0].txid == 4
        async with await log.open_reader(skip_broken_entries=True) as reader:
            assert [r.txid async for r in reader] == [0, 1, 4, 5]
            assert reader.broken_entries == 1

    on_log(body)


def test_missing_entries_and_silent_bookies_are_errors_also_for_who_skips() -> None:
    """Left out is only what is there and damaged: all else could be a loss in silence."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        ledger_id = await write(log)
        for bookie in cluster.bookies:
            bookie.entries(ledger_id).pop(2, None)
        async with await log.open_reader(skip_broken_entries=True) as reader:
            assert [r.txid for r in await reader.read_bulk(9, timeout_s=60)] == [0, 1]
            with pytest.raises(LedgerReadError):
                await reader.read_next()
            assert reader.broken_entries == 0

    on_log(body)


def test_truncated_records_are_read_as_long_as_they_are_stored() -> None:
    """In the segment that is truncated in part; from those that are gone on."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        for _ in range(3):
            await write(log, 4)
        await log.truncate(DLSN(2, 2, 0))
        assert await txids(log) == [6, 7, 8, 9, 10, 11]
        assert await txids(log, ignore_truncation=True) == list(range(4, 12))
        assert await txids(log, dlsn=DLSN(2, 1, 0), ignore_truncation=True) == list(range(5, 12))
        assert await txids(log, dlsn=DLSN(1, 3, 0), ignore_truncation=True) == list(range(4, 12))

    on_log(body)


def test_records_that_retention_keeps_are_read_though_truncated() -> None:
    """Whole segments of a log that truncates by itself and keeps them for a time."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await log.update_settings(explicit_truncation=True, retention_s=3600.0)
        for _ in range(3):
            await write(log, 4)
        await log.truncate(DLSN(3, 1, 0))
        assert await txids(log) == [9, 10, 11]
        assert await txids(log, ignore_truncation=True) == list(range(12))
        assert await txids(log, dlsn=DLSN(2, 2, 0), ignore_truncation=True) == list(range(6, 12))

    on_log(body)


def test_a_broken_entry_is_skipped_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is about what follows the entry, and comes in its turn."""

    def broken(self: EntryDecoder, entry: FetchedEntry) -> None:
        raise InvalidEntryError("planted")

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log, 1)
        async with await log.open_reader(skip_broken_entries=True) as reader:
            await reader._fetcher.wait()
            reader._fetcher._handle(Broke(LedgerReadError("later")))
            monkeypatch.setattr(EntryDecoder, "decode", broken)
            with pytest.raises(LedgerReadError, match="later"):
                await reader.read_next()
            assert (reader.broken_entries, reader.position) == (1, DLSN(1, 1, 0))

    on_log(body)


def test_an_error_that_is_raised_again_and_again_does_not_grow() -> None:
    """A loop that polls a failed reader does not fill the memory with its traceback."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_reader() as reader:
            reader._fetcher.reject(EntryPlace(1, 0, 0, 1, 0), LedgerReadError("planted"))
            depths = set()
            for _ in range(3):
                with pytest.raises(LedgerReadError, match="planted") as refused:
                    await reader.read_next()
                depths.add(len(refused.traceback))
        assert len(depths) == 1

    on_log(body)
