"""Readers, positions and truncation over stores and bookies in memory."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    AlreadyTruncatedError,
    ConfigurationError,
    LogEmptyError,
    LogNotFoundError,
)
from dlcore.base.ids import DLSN, TXID_MAX
from dlcore.base.records import NotLessThan, RecordField, RecordPlace
from dlcore.log.entries.batches import read_schema
from dlcore.log.reading.scan_driver import by_entry, scan_range
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, read_all, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.reading.reader import DirectReader


async def fill(cluster: MemoryCluster, log: DirectLog, *, seed: int = 0) -> None:
    """Fill a log with segments of writers and of appends, some of many entries, some of few."""
    rng = random.Random(seed)
    config = replace(CONFIG, entry_bytes=300, segment_bytes_max=rng.choice([800, 10**6]))
    namespace = await cluster.open(f"filler-{seed}", config=config)
    manager = await namespace.open_log(log.name)
    clock = cluster.clocks[f"filler-{seed}"]
    for version in range(1, 7):
        clock.current_ms += rng.randrange(100)
        if rng.random() < 0.5:
            async with await manager.open_writer() as writer:
                txid = max(writer.last_txid, 0)
                for _ in range(rng.randrange(1, 30)):
                    txid += rng.randrange(3)
                    clock.current_ms += rng.randrange(3)
                    await writer.write(record(txid, b"x" * rng.randrange(100)))
        else:
            append = await namespace.begin_append(f"filler-{seed}", version)
            for _ in range(rng.randrange(1, 4)):
                payloads = [b"y" * rng.randrange(100)] * rng.randrange(1, 20)
                await append.write_batch(log.name, pa.record_batch({"value": payloads}))
            await append.commit()


async def scan_all(
    cluster: MemoryCluster, log: DirectLog, start: DLSN, end: DLSN, entries: int
) -> list[tuple[DLSN, int, int, int, bytes]]:
    """Return what scans of a snapshot give, row by row."""
    snapshot = await log.get_snapshot()
    found = []
    for part in snapshot.scans(start, end):
        for piece in part.split(entries):
            async for batch in by_entry(scan_range(piece, cluster.namespaces[0].ports.ledgers)):
                for row, (txid, payload) in enumerate(
                    zip(batch.batch[0].to_pylist(), batch.batch[1].to_pylist(), strict=True)
                ):
                    dlsn = DLSN(batch.lssn, batch.entry_id, batch.first_slot + row)
                    found.append((dlsn, txid, batch.sequence_id + row, batch.timestamp_ms, payload))
    return found


def as_rows(records: list[LogRecordWithDLSN]) -> list[tuple[DLSN, int, int, int, bytes]]:
    """Return records in the form of `scan_all`."""
    return [(r.dlsn, r.txid, r.sequence_id, r.timestamp_ms, r.payload) for r in records]


async def rows_in_bulk(
    reader: DirectReader,
) -> list[tuple[DLSN, int, int, int, bytes]]:
    """Return what is left in the form of `scan_all`, taken as the blocking reader takes it."""
    rows = []
    while taken := await reader.take_entries(until_caught_up=True):
        for part in taken:
            rows += as_rows(part.peek_records(part.rows_left))
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_every_way_of_reading_agrees(seed: int) -> None:
    """Record by record is the reference; all others are compared with it, from random positions."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        rng = random.Random(seed)
        await fill(cluster, log, seed=seed)
        records = await read_all(log)
        assert [r.sequence_id for r in records] == list(range(len(records)))
        assert [r.txid for r in records] == sorted(r.txid for r in records)
        snapshot = await log.get_snapshot()
        rows = as_rows(records)
        assert await scan_all(cluster, log, snapshot.first, snapshot.end, 2) == rows
        assert await log.get_log_record_count() == len(records)
        assert await log.get_last_dlsn() == records[-1].dlsn
        assert await log.get_last_txid() == records[-1].txid
        for _ in range(6):
            low, high = sorted(rng.choices([*(r.dlsn for r in records), snapshot.end], k=2))
            part = [row for row in rows if low <= row[0] < high]
            assert await scan_all(cluster, log, low, high, rng.randrange(1, 5)) == part
            assert await log.get_log_record_count(low, high) == len(part)
            async with await log.open_reader(dlsn=low) as reader:
                taken = await reader.read_bulk(len(rows) + 1, until_caught_up=True)
                assert as_rows(taken) == [row for row in rows if row[0] >= low]
            async with await log.open_reader(dlsn=low) as reader:
                assert await rows_in_bulk(reader) == [row for row in rows if row[0] >= low]

    on_log(body)


@pytest.mark.parametrize("seed", range(6))
def test_positions_by_transaction_id_and_by_time(seed: int) -> None:
    """The first record that is not less, found by comparing with a plain search."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await fill(cluster, log, seed=seed)
        records = await read_all(log)
        end = (await log.get_snapshot()).end
        txids = {r.txid + d for r in records for d in (0, 1)} | {0}
        for txid in random.Random(seed).sample(sorted(txids), min(len(txids), 15)):
            wanted = next((r.dlsn for r in records if r.txid >= txid), end)
            assert await log.get_dlsn_not_less_than_txid(txid) == wanted
            async with await log.open_reader(txid=txid) as reader:
                found = await reader.read_bulk(1, until_caught_up=True)
                assert [r.dlsn for r in found] == ([wanted] if wanted != end else [])
        times = {r.timestamp_ms + d for r in records for d in (0, 1)}
        for time_ms in sorted(times)[:15]:
            wanted = next((r.dlsn for r in records if r.timestamp_ms >= time_ms), end)
            assert await log.get_dlsn_not_less_than_timestamp(time_ms) == wanted

    on_log(body)


@pytest.mark.parametrize("seed", range(6))
def test_places_of_records(seed: int) -> None:
    """By position, number, transaction id and time, many at once; also when some are truncated."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await fill(cluster, log, seed=seed)
        records = await read_all(log)
        await log.truncate(records[len(records) // 3].dlsn)
        records = await read_all(log)
        snapshot = await log.get_snapshot()
        namespace = cluster.namespaces[-1]
        places = [RecordPlace(r.dlsn, r.sequence_id, r.timestamp_ms) for r in records]
        after = RecordPlace(snapshot.end, records[-1].sequence_id + 1, records[-1].timestamp_ms)

        def first(field: str, value: int) -> RecordPlace:
            found = (
                place
                for place, record in zip(places, records, strict=True)
                if getattr(record, field) >= value
            )
            return next(found, after)

        chosen = random.Random(seed).sample(records, min(len(records), 12))
        wanted: list[tuple[DLSN | NotLessThan, RecordPlace]] = [
            (DLSN.INITIAL, places[0]),
            (snapshot.end, after),
            (NotLessThan(RecordField.SEQUENCE_ID, 0), places[0]),
            (NotLessThan(RecordField.SEQUENCE_ID, after.sequence_id), after),
        ]
        for each in chosen:
            wanted.append((each.dlsn, places[records.index(each)]))
            for field in RecordField:
                value = getattr(each, field.value) + 1
                wanted.append((NotLessThan(field, value), first(field.value, value)))
        found = await namespace.find_places([(snapshot, key) for key, _ in wanted])
        assert found == [place for _, place in wanted]

    on_log(body)


def test_places_in_an_empty_log() -> None:
    """All are its end, before which there is nothing."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        snapshot = await log.get_snapshot()
        found = await cluster.namespaces[-1].find_places([(snapshot, DLSN(3, 1, 0))])
        assert found == [RecordPlace(snapshot.end, 0, 0)]

    on_log(body)


def test_a_reader_by_transaction_id_waits_for_it() -> None:
    """Records that come later with a lower one are not for it."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with (
            await log.open_writer() as writer,
            await log.open_reader(txid=50) as reader,
        ):
            for txid in (10, 49, 50, 51):
                await writer.write(record(txid))
            found = await reader.read_next()
            assert found is not None
            assert found.txid == 50

    on_log(body)


def test_batches_have_documented_columns() -> None:
    """A batch is what is left of one entry."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write_batch(
                pa.record_batch({"txid": [1, 2, 3], "value": [b"a", b"b", b"c"]})
            )
        async with await log.open_reader() as reader:
            await reader.read_next()
            batch = await reader.read_batch()
            assert batch is not None
            assert batch.schema == read_schema()
            rows = batch.to_pylist()
            assert [(r["dlsn"]["slot"], r["txid"], r["value"]) for r in rows] == [
                (1, 2, b"b"),
                (2, 3, b"c"),
            ]
            assert rows[0]["timestamp"].timestamp() * 1000 == 1_700_000_000_000
            assert await reader.read_batch(until_caught_up=True) is None

    on_log(body)


def test_non_blocking_and_waiting() -> None:
    """Nothing here is not the same as caught up; a waiting read gets the next record."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_reader() as reader:
            assert await reader.read_next(non_blocking=True) is None
            assert await reader.read_next(until_caught_up=True) is None
            waiting = asyncio.create_task(reader.read_bulk(10))
            async with await log.open_writer() as writer:
                for txid in range(3):
                    await writer.write(record(txid))
            received = await waiting
            while len(received) < 3:
                received += await reader.read_bulk(10)
            assert [r.txid for r in received] == [0, 1, 2]
            cancelled = asyncio.create_task(reader.read_next())
            await asyncio.sleep(0)
            cancelled.cancel()
            async with await log.open_writer() as writer:
                await writer.write(record(3))
            found = await reader.read_next()
            assert found is not None
            assert found.txid == 3
            with pytest.raises(ConfigurationError, match="count=0"):
                await reader.read_bulk(0)
        with pytest.raises(AlreadyClosedError):
            await reader.read_next()

    on_log(body)


def test_closing_a_reader_ends_a_waiting_read() -> None:
    """It does not wait for ever."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        reader = await log.open_reader()
        waiting = asyncio.create_task(reader.read_next())
        await asyncio.sleep(0)
        await reader.aclose()
        with pytest.raises(AlreadyClosedError):
            await waiting

    on_log(body)


def test_reading_ahead_is_bounded() -> None:
    """A reader that is not read from keeps little in memory, and later gives everything."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            for txid in range(100):
                await writer.write(record(txid, b"x" * 1000))
        tight = await cluster.namespaces[0].open_log(
            "clicks", config=replace(CONFIG, read_ahead_bytes=5000)
        )
        async with await tight.open_reader() as reader:
            for _ in range(300):
                await asyncio.sleep(0)
            assert 0 < reader._fetcher._machine.buffer.size_bytes < 10_000
            assert len(await reader.read_bulk(200, until_caught_up=True)) == 100

    on_log(body)


def test_truncation_and_readers() -> None:
    """Inside the active segment too; explicit lower positions are an error, the earliest is not."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await log.open_writer()
        positions = [await writer.write(record(txid)) for txid in range(10)]
        await writer.commit()  # an acknowledged record is durable; a committed one is visible too
        async with await log.open_reader(dlsn=positions[2]) as behind:
            assert (await behind.read_bulk(1))[0].txid == 2
            assert await writer.truncate(positions[5])
            assert not await writer.truncate(positions[4])
        assert await log.get_first_dlsn() == positions[5]
        assert await log.get_log_record_count() == 5
        assert [r.txid for r in await read_all(log)] == [5, 6, 7, 8, 9]
        with pytest.raises(AlreadyTruncatedError, match=str(positions[5])):
            await log.open_reader(dlsn=positions[4])
        with pytest.raises(AlreadyTruncatedError, match="transaction id 1 was truncated"):
            await log.open_reader(txid=1)
        async with await log.open_reader(txid=0) as reader:
            found = await reader.read_next()
            assert found is not None
            assert found.txid == 5
        assert await (await cluster.namespaces[0].open_log("clicks")).truncate(positions[7])
        await writer.write(record(10))
        await writer.aclose()
        assert [r.txid for r in await read_all(log)] == [7, 8, 9, 10]
        assert [r.sequence_id for r in await read_all(log)] == [7, 8, 9, 10]

    on_log(body)


def test_a_position_past_the_end_truncates_nothing() -> None:
    """By the manager and by the writer, of logs that are empty, open, closed; the end is named."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        with pytest.raises(ConfigurationError, match=r"7:0:0 lies past the end.* 1:0:0"):
            await log.truncate(DLSN(7, 0, 0))
        async with await log.open_writer() as writer:
            await writer.write(record(1))
            await writer.write(record(2))
            await writer.commit()
            for truncate in (log.truncate, writer.truncate):
                with pytest.raises(ConfigurationError, match=r"1:2:1 lies past the end.* 1:2:0"):
                    await truncate(DLSN(1, 2, 1))
        with pytest.raises(ConfigurationError, match=r"9:9:9 lies past the end.* 1:2:0"):
            await log.truncate(DLSN(9, 9, 9))
        assert len(await read_all(log)) == 2
        assert await log.truncate(DLSN(1, 2, 0))
        assert await read_all(log) == []
        for nothing_new in (DLSN(1, 1, 0), DLSN(1, 2, 0), DLSN(2, 0, 0)):
            assert not await log.truncate(nothing_new)

    on_log(body)


def test_truncating_up_to_the_end() -> None:
    """Later records are readable; the log goes on counting."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write(record(1))
            await writer.commit()
            assert await log.truncate(DLSN(1, 1, 0))
            await writer.write(record(2))
        assert [r.sequence_id for r in await read_all(log)] == [1]
        assert await log.truncate(DLSN(1, 2, 0))
        with pytest.raises(LogEmptyError):
            await log.get_first_dlsn()
        snapshot = await log.get_snapshot()
        assert snapshot.is_empty
        async with await log.open_writer() as writer:
            await writer.write(record(3))
        assert [(r.sequence_id, r.dlsn) for r in await read_all(log)] == [(2, DLSN(2, 0, 0))]
        await log.truncate(DLSN(2, 0, 0))
        (segment,) = await log.get_log_segments()
        assert segment.lssn == 2
        ledgers = [p for p in cluster.tree.dump() if p.startswith("/dlog/ledgers/0/0000/")]
        assert len(ledgers) == 1

    on_log(body)


def test_a_crash_while_truncating_is_made_good_by_the_next_one() -> None:
    """Truncated records are there, and no reader gets them; they go next time."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        for _ in range(3):
            async with await log.open_writer() as writer:
                await writer.write(record(1))
        store = cluster.stores["a"]
        apply = store.multi
        calls = 0

        async def crash_second(ops: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise asyncio.CancelledError
            await apply(ops)  # type: ignore[arg-type]

        store.multi = crash_second  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await log.truncate(DLSN(2, 0, 0))
        store.multi = apply  # type: ignore[method-assign]
        paths = cluster.paths.log_of(log.log_id)
        assert [s.lssn for s in await log.get_log_segments()] == [2, 3]
        assert paths.segment(1) in cluster.tree.dump()
        assert len(await read_all(log)) == 2
        await log.truncate(DLSN(3, 0, 0))
        assert [s.lssn for s in await log.get_log_segments()] == [3]
        assert not {paths.segment(1), paths.segment(2)} & cluster.tree.dump().keys()

    on_log(body)


def test_a_log_that_is_deleted_while_it_is_read() -> None:
    """Readers and managers say that it is gone; deleting it again is harmless."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write(record(1))
        async with await log.open_reader() as reader:
            await reader.read_next()
            waiting = asyncio.create_task(reader.read_next())
            await log.delete()
            with pytest.raises(LogNotFoundError):
                await waiting
        with pytest.raises(LogNotFoundError):
            await log.get_snapshot()
        await log.delete()
        await cluster.namespaces[0].create_log("clicks")
        with pytest.raises(LogNotFoundError, match="was deleted"):
            await log.get_snapshot()
        left = [p for p in cluster.tree.dump() if p.startswith("/dlog/ledgers/0/0000/")]
        assert left == []

    on_log(body)


def test_iterating_over_a_reader() -> None:
    """Records and batches until caught up; after the loop reads go on behind the last one."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write_batch(pa.record_batch({"txid": list(range(5)), "value": [b"x"] * 5}))
            await writer.write_batch(pa.record_batch({"txid": [5, 6], "value": [b"y"] * 2}))
        async with await log.open_reader() as reader:
            assert reader.position == DLSN.INITIAL
            async for found in reader:
                if found.txid == 1:
                    break
            assert reader.position == DLSN(1, 0, 2)
            assert [r.txid for r in await reader.read_bulk(1)] == [2]
            batches = [batch.column("txid").to_pylist() async for batch in reader.batches()]
            assert sum(batches, []) == [3, 4, 5, 6]  # noqa: RUF017
            assert [r async for r in reader] == []
            assert reader.position == (await log.get_snapshot()).end
            assert "at 1:" in repr(reader)
            async with await log.open_writer() as writer:
                await writer.write(record(7))
                await writer.mark_end_of_stream()
            assert [r.txid async for r in reader.records(follow=True)] == [7]
            assert [r async for r in reader] == []
            assert [b async for b in reader.batches(follow=True)] == []

    on_log(body)


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_seeks(seed: int) -> None:
    """To a position, a transaction id, a time; forward and back, and out of a loop."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await fill(cluster, log, seed=seed)
        records = await read_all(log)
        rng = random.Random(seed)
        async with await log.open_reader() as reader:
            loop = reader.records()
            await anext(loop)
            for _ in range(10):
                to = rng.choice(records)
                by = rng.choice(["dlsn", "txid", "timestamp_ms"])
                await reader.seek(**{by: getattr(to, by)})
                wanted = next(r for r in records if getattr(r, by) >= getattr(to, by))
                assert reader.position == wanted.dlsn
                assert await reader.read_next() == wanted
                following = records[records.index(wanted) + 1 :]
                assert reader.position <= (following[0].dlsn if following else reader.position)
                assert [r async for r in loop] == following
                loop = reader.records()
            with pytest.raises(ConfigurationError, match="not several"):
                await reader.seek(dlsn=DLSN.INITIAL, txid=3)
            await reader.seek()
            assert [r async for r in reader] == records
        with pytest.raises(AlreadyClosedError):
            await reader.seek()

    on_log(body)


def test_bulk_read_with_a_deadline() -> None:
    """It waits for as many records as are asked for, until the time is over; none are lost."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer, await log.open_reader() as reader:
            assert await reader.read_bulk(5, timeout_s=0.01) == []
            assert await reader.take_entries(timeout_s=0.01) == []
            waiting = asyncio.create_task(reader.read_bulk(3, timeout_s=60))
            for txid in range(4):
                await writer.write(record(txid))
            assert [r.txid for r in await waiting] == [0, 1, 2]
            rest: list[LogRecordWithDLSN] = []
            while not rest:
                rest = await reader.read_bulk(2, timeout_s=0.05)
            assert [r.txid for r in rest] == [3]
            await writer.mark_end_of_stream()
        async with await log.open_reader() as reader:
            assert len(await reader.read_bulk(9, timeout_s=60)) == 4  # the end is the end

    on_log(body)


def test_positions_at_the_edges() -> None:
    """Below the first, between segments, among equal ones, within an entry, behind the last."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        for txids in ([5, 7], [7, 7, 9], [12]):
            async with await log.open_writer() as writer:
                payloads = [b"%d" % txid for txid in txids]
                await writer.write_batch(pa.record_batch({"txid": txids, "value": payloads}))

        async def first(**start: Any) -> DLSN | None:
            async with await log.open_reader(**start) as reader:
                found = await reader.read_bulk(1, until_caught_up=True)
                return found[0].dlsn if found else None

        by_txid = {-1: (1, 0, 0), 0: (1, 0, 0), 6: (1, 0, 1), 7: (1, 0, 1), 8: (2, 0, 2)}
        by_txid |= {10: (3, 0, 0), 12: (3, 0, 0)}
        for txid, place in by_txid.items():
            assert await first(txid=txid) == DLSN(*place)
        assert await first(txid=13) is None
        assert await first(txid=TXID_MAX) is None
        by_dlsn = {(0, 0, 0): (1, 0, 0), (1, 0, 1): (1, 0, 1), (1, 0, 2): (2, 0, 0)}
        by_dlsn |= {(1, 7, 0): (2, 0, 0), (2, 0, 1): (2, 0, 1)}
        for dlsn, place in by_dlsn.items():
            assert await first(dlsn=DLSN(*dlsn)) == DLSN(*place)
        async with await log.open_reader(dlsn=DLSN(4, 0, 1)) as future:
            assert await future.read_next(until_caught_up=True) is None
            async with await log.open_writer() as writer:
                await writer.write_batch(pa.record_batch({"txid": [20, 21], "value": [b"x"] * 2}))
            found = await future.read_next()
            assert found is not None
            assert found.dlsn == DLSN(4, 0, 1)

    on_log(body)
