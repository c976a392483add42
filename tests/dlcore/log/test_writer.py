"""The log's writer over stores and bookies in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore import sync
from dlcore.base.config import RECORD_SIZE_BYTES_MAX
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    EndOfStreamError,
    LedgerFencedError,
    LogRecordTooLongError,
    OverCapacityError,
    OwnershipAcquireFailedError,
    TransactionIdOutOfOrderError,
    WriteCancelledError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.log.metadata.segment import SegmentState
from dlcore.log.recovery import recover_log
from dlcore.metadata import one_node
from dlcore.sync.portal import Portal
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, read_all, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.metadata.changes import Change
    from dlcore.log.metadata.values import VersionedHead
    from dlcore.metadata.port import Versioned


async def other(cluster: MemoryCluster, **changes: object) -> DirectLog:
    """Open the log as another client."""
    name = f"b{len(cluster.namespaces)}"
    namespace = await cluster.open(name, config=replace(CONFIG, **changes))  # type: ignore[arg-type]
    return await namespace.open_log("clicks")


def test_positions_come_in_order_and_records_are_read_back() -> None:
    """Futures complete in order; what is read is what was written, with dense sequence ids."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        done: list[int] = []
        async with await log.open_writer() as writer:
            futures = [writer.write(record(i // 3, b"%d" % i)) for i in range(50)]
            for i, future in enumerate(futures):
                future.add_done_callback(lambda _, i=i: done.append(i))  # type: ignore[misc]
            positions = await asyncio.gather(*futures)
            assert await writer.flush() == positions[-1]
            await asyncio.sleep(0)
        assert done == list(range(50))
        assert positions == sorted(set(positions))
        records = await read_all(log)
        assert [r.dlsn for r in records] == positions
        assert [r.payload for r in records] == [b"%d" % i for i in range(50)]
        assert [r.txid for r in records] == [i // 3 for i in range(50)]
        assert [r.sequence_id for r in records] == list(range(50))

    on_log(body)


def test_batches_and_records_mix() -> None:
    """A batch answers with the position of its last row."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            first = writer.write(record(1))
            batch = pa.record_batch({"txid": list(range(2, 5002)), "value": [b"y" * 50] * 5000})
            last = writer.write_batch(batch)
            after = writer.write(record(5002))
            assert await first < await last < await after
            with pytest.raises(ConfigurationError, match="without rows"):
                writer.write_batch(batch.slice(0, 0))
        records = await read_all(log)
        assert [r.txid for r in records] == list(range(1, 5003))
        assert records[5000].dlsn == last.result()
        assert len({r.dlsn.entry_id for r in records}) < 10

    on_log(body)


def test_refused_records_leave_the_writer_usable() -> None:
    """Too long, or out of order; nothing of them is written."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            writer.write(record(7))
            with pytest.raises(LogRecordTooLongError):
                writer.write(record(8, b"x" * (RECORD_SIZE_BYTES_MAX + 1)))
            with pytest.raises(TransactionIdOutOfOrderError, match="6 is lower than 7"):
                writer.write(record(6))
            with pytest.raises(TransactionIdOutOfOrderError):
                writer.write_batch(pa.record_batch({"txid": [9, 8], "value": [b"", b""]}))
            largest = writer.write(record(7, b"z" * RECORD_SIZE_BYTES_MAX))
            assert await largest == DLSN(1, 1, 0)
        assert [r.txid for r in await read_all(log)] == [7, 7]
        async with await log.open_writer() as writer:
            assert writer.last_txid == 7
            with pytest.raises(TransactionIdOutOfOrderError, match="6 is lower than 7"):
                writer.write(record(6))
            await writer.write(record(7))

    on_log(body)


def test_a_buffer_may_be_used_again_at_once() -> None:
    """The record is what was in it when it was written."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            buffer = bytearray(4)
            for letter in b"abc":
                buffer[:] = bytes([letter]) * 4
                writer.write(LogRecord(1, buffer))  # type: ignore[arg-type]
        assert [r.payload for r in await read_all(log)] == [b"aaaa", b"bbbb", b"cccc"]

    on_log(body)


def test_a_buffer_may_be_used_again_at_once_in_blocking_code() -> None:
    """There the record waits in the caller's thread."""
    portal, cluster = Portal(), MemoryCluster()

    async def open_namespace() -> DirectNamespace:
        await cluster.start()
        return await cluster.open("a")

    try:
        with sync.Namespace(portal, portal.call(open_namespace())) as namespace:
            namespace.create_log("clicks")
            with namespace.open_log("clicks") as log:
                buffer = bytearray(4)
                with log.open_writer() as writer:
                    for letter in b"abc":
                        buffer[:] = bytes([letter]) * 4
                        writer.write(LogRecord(1, buffer))  # type: ignore[arg-type]
                with log.open_reader() as reader:
                    payloads = [r.payload for r in reader.read_bulk(9)]
        assert payloads == [b"aaaa", b"bbbb", b"cccc"]
    finally:
        portal.stop()


def test_a_bulk_stops_at_its_first_refusal() -> None:
    """Earlier records are written, later ones are cancelled."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            futures = writer.write_bulk([record(1), record(2), record(0), record(3)])
            await writer.flush()
            assert [await f for f in futures[:2]] == [DLSN(1, 0, 0), DLSN(1, 0, 1)]
            with pytest.raises(TransactionIdOutOfOrderError):
                await futures[2]
            with pytest.raises(WriteCancelledError):
                await futures[3]
            await writer.write(record(3))

    on_log(body)


def test_rolling_by_size_and_by_age() -> None:
    """Whichever comes first; the reader goes over every roll."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        clock = cluster.clocks["a"]
        reader = await log.open_reader()
        small = await cluster.open("a2", config=replace(CONFIG, segment_bytes_max=2000))
        async with await (await small.open_log("clicks")).open_writer() as writer:
            for i in range(10):
                await writer.write(record(i, b"x" * 1000))
        assert [s.lssn for s in await log.get_log_segments()] == [1, 2, 3, 4, 5]
        async with await log.open_writer() as writer:
            await writer.write(record(10))
            clock.current_ms += int(CONFIG.segment_age_max_s * 1000)
            await writer.write(record(11))
            segments = await log.get_log_segments()
            assert [s.state for s in segments[-2:]] == [
                SegmentState.COMPLETED,
                SegmentState.IN_PROGRESS,
            ]
        assert [r.txid for r in await reader.read_bulk(100, until_caught_up=True)] == list(
            range(12)
        )
        await reader.aclose()

    on_log(body)


def test_timestamps_never_decrease() -> None:
    """A clock that goes back does not show, within a segment or from one to the next."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        clock = cluster.clocks["a"]
        for step_ms in (0, 5, -1000):
            async with await log.open_writer() as writer:
                for txid in range(2):
                    clock.current_ms += step_ms
                    await writer.write(record(txid + writer.last_txid + 1))
        stamps = [r.timestamp_ms for r in await read_all(log)]
        assert stamps == sorted(stamps)
        assert len(set(stamps)) == 3

    on_log(body)


def test_a_seal_keeps_what_another_completed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery just before the writer seals the log finds the same end: no record is lost."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        context = (await other(cluster))._context
        writer = await log.open_writer()
        last = await writer.write(record(1))
        logs = cluster.namespaces[0].log_context.logs
        apply, interruptions = logs.apply, [1]

        async def apply_late(change: Change) -> VersionedHead:
            if interruptions.pop():
                await recover_log(context, await context.logs.read(log._log))
                interruptions.append(0)
            return await apply(change)

        monkeypatch.setattr(logs, "apply", apply_late)
        await writer.mark_end_of_stream()
        await writer.aclose()
        assert interruptions == []
        assert [r.dlsn for r in await read_all(log)] == [last]
        assert await log.is_end_of_stream_marked()

    on_log(body)


def test_sealing_an_empty_log() -> None:
    """Readers that wait learn that there is nothing to wait for."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_reader() as reader:
            waiting = asyncio.create_task(reader.read_next())
            async with await log.open_writer() as writer:
                await writer.mark_end_of_stream()
            with pytest.raises(EndOfStreamError):
                await waiting

    on_log(body)


def test_a_second_writer_is_refused_while_the_first_owns_the_log() -> None:
    """The error names the owner; afterwards the log is free."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await log.open_writer()
        rival = await other(cluster)
        with pytest.raises(OwnershipAcquireFailedError, match="owned by a") as caught:
            await rival.open_writer()
        assert caught.value.owner == "a"
        with pytest.raises(OwnershipAcquireFailedError):
            await rival.recover()
        with pytest.raises(OwnershipAcquireFailedError):
            await rival.delete()
        await writer.write(record(1))
        await writer.aclose()
        async with await rival.open_writer() as second:
            assert await second.write(record(1)) == DLSN(2, 0, 0)

    on_log(body)


def test_a_second_writer_waits_for_the_first() -> None:
    """Up to the lock time-out."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await log.open_writer()
        rival = await other(cluster, lock_timeout_s=30)
        waiting = asyncio.create_task(rival.open_writer())
        await writer.write(record(1))
        assert not waiting.done()
        await writer.aclose()
        async with await waiting as second:
            await second.write(record(2))

    on_log(body)


def test_a_crashed_writer_is_recovered() -> None:
    """Its acknowledged records stay, and its late ones are refused."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        crashed = await log.open_writer()
        await crashed.write(record(1, b"kept"))
        await crashed.abort()
        with pytest.raises(AlreadyClosedError):
            crashed.write(record(2))
        assert (await log.get_log_segments())[0].state is SegmentState.IN_PROGRESS
        async with await (await other(cluster)).open_writer() as writer:
            assert (await log.get_log_segments())[0].state is SegmentState.COMPLETED
            assert writer.last_txid == 1
            await writer.write(record(2))
        assert [r.payload for r in await read_all(log)] == [b"kept", b"x"]

    on_log(body)


def test_an_empty_segment_of_a_crashed_writer_vanishes() -> None:
    """With its ledger; the number is used again."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        for bookie in cluster.bookies:
            bookie.is_read_only = False
        crashed = await log.open_writer()
        for bookie in cluster.bookies:
            bookie.stop()
        doomed = crashed.write(record(7))
        for _ in range(1000):
            if await log.get_log_segments():
                break
        await crashed.abort()
        with pytest.raises(WriteCancelledError):
            await doomed
        for bookie in cluster.bookies:
            bookie.start()
        async with await (await other(cluster)).open_writer() as writer:
            assert await log.get_log_segments() == []
            assert writer.last_txid == -1
            assert await writer.write(record(1)) == DLSN(1, 0, 0)
        ledgers = [path for path in cluster.tree.dump() if path.startswith("/dlog/ledgers/0/0000/")]
        assert len(ledgers) == 1

    on_log(body)


def test_acks_are_held_back_until_a_lost_lock_is_regained() -> None:
    """The records were durable all the time; after the expiry the writer goes on."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await log.open_writer()
        await writer.write(record(1))
        cluster.stores["a"].expire()
        held = writer.write(record(2))
        assert await held == DLSN(1, 1, 0)
        holder = cluster.tree.dump().get(cluster.paths.log_of(log.log_id).lock)
        assert holder is not None
        await writer.write(record(3))
        await writer.aclose()
        assert [r.txid for r in await read_all(log)] == [1, 2, 3]

    on_log(body)


def test_a_writer_that_lost_its_lock_to_another_fails() -> None:
    """While it was away another one took over: nothing of it is acknowledged any more."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await log.open_writer()
        await writer.write(record(1, b"before"))
        store = cluster.stores["a"]
        store.disconnect()
        store.expire()
        second = await (await other(cluster)).open_writer()
        await second.write(record(2, b"second"))
        late = writer.write(record(3, b"late"))
        store.reconnect()
        with pytest.raises((OwnershipAcquireFailedError, LedgerFencedError)):
            await late
        with pytest.raises(WriteError):
            writer.write(record(4))
        with pytest.raises(WriteError):
            await writer.aclose()
        await second.write(record(5, b"third"))
        await second.aclose()
        assert [r.payload for r in await read_all(log)] == [b"before", b"second", b"third"]

    on_log(body)


def test_nothing_is_acknowledged_while_the_lock_is_lost() -> None:
    """The bookies have the record, but the writer does not know whether the log is its own."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await log.open_writer()
        await writer.write(record(1))
        store = cluster.stores["a"]
        held = writer.write(record(2))
        await asyncio.sleep(0)  # sent, not answered
        assert writer.pump.segment.ledger is not None
        assert writer.pump.segment.ledger.last_add_pushed == 1
        writer._lock._session_changed(_EXPIRED)  # type: ignore[union-attr]
        for _ in range(200):
            await asyncio.sleep(0)
        assert not held.done()
        store.expire()
        assert await held == DLSN(1, 1, 0)
        await writer.aclose()

    from dlcore.metadata.port import SessionState

    _EXPIRED = SessionState.EXPIRED
    on_log(body)


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("step", ["start", "roll", "complete", "seal", "truncate"])
def test_a_lost_reply_is_classified(step: str, *, applied: bool) -> None:
    """Applied or not, the change is made once, and the writer goes on."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        store = cluster.stores["a"]
        manager = await cluster.namespaces[0].open_log(
            "clicks", config=replace(CONFIG, segment_bytes_max=1)
        )
        writer = await manager.open_writer()
        if step != "start":
            await writer.write(record(1))
        store.lose_next_reply(applied=applied)
        if step == "seal":
            await writer.mark_end_of_stream()
        elif step == "truncate":
            await writer.truncate(DLSN(1, 1, 0))
            await writer.write(record(2))
        elif step != "complete":
            await writer.write(record(2))
        await writer.aclose()
        txids = {"start": [2], "complete": [1], "seal": [1], "truncate": [2]}.get(step, [1, 2])
        records = await read_all(log)
        assert [r.txid for r in records] == txids
        first = 1 if step == "truncate" else 0
        assert [r.sequence_id for r in records] == list(range(first, first + len(txids)))

    on_log(body)


def test_a_failed_writer_tells_what_became_of_each_record() -> None:
    """In flight: the failure itself.  Never sent: cancelled.  Later ones: refused."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await log.open_writer()
        await writer.write(record(1))
        async with await (await other(cluster, lock_enabled=False)).open_writer() as second:
            await second.write(record(1))
        sent = writer.write(record(2))
        await asyncio.sleep(0)
        queued = writer.write(record(3))
        with pytest.raises(LedgerFencedError):
            await sent
        with pytest.raises(WriteCancelledError):
            await queued
        for refused in (writer.flush, writer.commit, writer.mark_end_of_stream):
            with pytest.raises(WriteError, match="LedgerFencedError"):
                await refused()
        with pytest.raises(WriteError):
            await writer.aclose()
        await writer.aclose()

    on_log(body)


@pytest.mark.parametrize("limit", [{"pending_bytes_max": 200_000}, {"pending_records_max": 20}])
def test_pending_records_are_bounded(limit: dict[str, int]) -> None:
    """Beyond a limit a write is refused; a writer that waits for capacity never gets there."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        log = await other(cluster, **limit)
        async with await log.open_writer() as writer:
            for _ in range(20):
                writer.write(record(0, b"x" * 10_000))
            with pytest.raises(OverCapacityError, match="wait_for_capacity"):
                writer.write(record(0, b"x" * 10_000))
            for _ in range(100):
                await writer.wait_for_capacity()
                writer.write(record(0, b"x" * 10_000))
        assert len(await read_all(log)) == 100 + 20

    on_log(body)


def test_commit_makes_the_last_record_visible() -> None:
    """Without another one following; and so does durability alone, a moment later."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            assert await writer.commit() is None  # the log holds no record
            writer.write(record(1))
            last = await writer.commit()
            assert last == DLSN(1, 0, 0)
            assert await log.get_last_dlsn() == last
            async with await log.open_reader() as reader:
                assert (await reader.read_bulk(9, until_caught_up=True))[0].dlsn == last
                waiting = asyncio.create_task(reader.read_next())
                position = await writer.write(record(2))
                received = await waiting
                assert received is not None
                assert received.dlsn == position

    on_log(body)


def test_commit_without_a_write_returns_the_last_position_of_the_log() -> None:
    """The last record of an earlier writer, unless all of it was truncated meanwhile."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            writer.write_bulk([record(1), record(2)])
            last = await writer.commit()
        async with await log.open_writer() as writer:
            assert await writer.flush() is None
            assert await writer.commit() == last == await log.get_last_dlsn()
            await log.truncate((await log.get_snapshot()).end)
            assert await writer.commit() is None

    on_log(body)


def test_a_sealed_log_has_no_writer() -> None:
    """Opening one fails at once, also when the seal came while it waited for the lock."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        other = await cluster.open("b", config=replace(CONFIG, lock_timeout_s=30))
        waiting_log = await other.open_log("clicks")
        async with await log.open_writer() as writer:
            await writer.write(record(1))
            waiting = asyncio.create_task(waiting_log.open_writer())
            await asyncio.sleep(0.01)
            assert not waiting.done()
            await writer.mark_end_of_stream()
        with pytest.raises(EndOfStreamError, match="'clicks' is sealed"):
            await waiting
        for each in (log, waiting_log):
            with pytest.raises(EndOfStreamError, match="'clicks' is sealed"):
                await each.open_writer()
        assert cluster.paths.log_of(log.log_id).lock not in cluster.tree.dump()

    on_log(body)


def test_giving_up_without_a_metadata_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of attempts to remove the lock, not one for each; then the session's end does."""
    monkeypatch.setattr(one_node, "RETRY_DELAYS_S", (0.0,) * 5)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await log.open_writer()
        await writer.write(record(1))
        store = cluster.stores["a"]
        get, asked = store.get, []

        async def count(path: str, *, fresh: bool = False) -> Versioned | None:
            asked.append(path)
            return await get(path, fresh=fresh)

        monkeypatch.setattr(store, "get", count)
        store.disconnect()
        await writer.abort()
        assert len(asked) == 6
        store.expire()
        async with await (await other(cluster)).open_writer() as second:
            await second.write(record(2))

    on_log(body)
