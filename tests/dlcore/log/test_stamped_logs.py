"""Producers of logs as the next owner finds them: by what stands in entries, over rolls, crashes,
truncation, merging and damage; and an owner that was overtaken knows that it knows too little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.config import LogConfig
from dlcore.base.errors import (
    InvalidEntryError,
    LedgerNotFoundError,
    OwnershipAcquireFailedError,
    ProducerFencedError,
)
from dlcore.base.ids import DLSN
from dlcore.log.entries.body import (
    Compressor,
    batch_of,
    decode_entry_batch,
    decode_entry_header,
    encode_entry,
    move_entry,
    stamp_of,
)
from dlcore.log.entries.stamp import PRODUCERS_KEPT_MS, Claim, Mark
from dlcore.log.proxied.extension import ProxyExtension
from dlcore.log.proxied.producers import Producers
from tests.fixtures.durable import durable_of
from tests.fixtures.memory_namespace import MemoryCluster, on_log, read_all, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.log.writing.writer import DirectWriter


class Owner:
    """A writer that knows producers, and one claim."""

    def __init__(self, writer: DirectWriter, producers: Producers[Any]) -> None:
        self.writer = writer
        self.producers = producers

    @classmethod
    async def open(cls, log: DirectLog) -> Owner:
        """Take the log."""
        producers: Producers[Any] = Producers()
        return cls(await log.open_writer(extension=ProxyExtension(producers)), producers)

    def begin(self, name: str = "p") -> Claim:
        """Begin an incarnation."""
        return self.producers.grant(name, b"12345678", now_ms=0)

    async def write(self, claim: Claim, first: int, count: int = 1) -> DLSN:
        """Write records in one batch; return where the last one is."""
        batch = batch_of([0] * count, [b"%d" % (first + number) for number in range(count)])
        mark = Mark(claim, first)
        future = self.writer.write_fitted(batch, mark=mark)
        self.producers.accepted(mark, count, future, now_ms=0)
        dlsn = await future
        self.producers.durable(mark, count, dlsn)
        return dlsn


def test_the_next_owner_knows_them_over_rolls_and_crashes() -> None:
    """Segments of which each has one entry; then one that is recovered."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        small = LogConfig(segment_bytes_max=1, lock_timeout_s=5)
        namespace = await cluster.open("small", config=small)
        owner = await Owner.open(await namespace.open_log("clicks"))
        claim = owner.begin()
        for number in range(5):
            await owner.write(claim, number)
        await owner.writer.abort()
        after = await Owner.open(log)
        assert after.producers.continue_with(claim, now_ms=0) == 4
        last = await after.write(claim, 5, 3)
        await after.writer.abort()
        again = await Owner.open(log)
        assert durable_of(again.producers, "p") == 7
        assert again.producers.look_at(claim, 5, 3).dlsn == last  # type: ignore[union-attr]
        await again.writer.aclose()
        assert [each.payload for each in await read_all(log)] == [b"%d" % n for n in range(8)]

    on_log(body)


def test_a_batch_that_becomes_several_entries_is_whole() -> None:
    """Each of them says which of its records it has."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = await cluster.open("small", config=LogConfig(entry_bytes=64))
        owner = await Owner.open(await namespace.open_log("clicks"))
        claim = owner.begin()
        last = await owner.write(claim, 0, 40)
        assert last.entry_id > 5
        await owner.writer.aclose()
        after = await Owner.open(log)
        assert durable_of(after.producers, "p") == 39
        await after.writer.aclose()

    on_log(body)


def test_writes_of_others_leave_them_as_they_are() -> None:
    """Direct writers, whose segments come behind; and an owner that wrote nothing."""

    async def body(_: MemoryCluster, log: DirectLog) -> None:
        owner = await Owner.open(log)
        claim = owner.begin()
        await owner.write(claim, 0)
        await owner.writer.aclose()
        for number in range(3):
            async with await log.open_writer() as direct:
                await direct.write(record(number))
            idle = await Owner.open(log)
            assert durable_of(idle.producers, "p") == 0
            await idle.writer.abort()

    on_log(body)


def test_they_are_kept_while_all_is_truncated_and_for_seven_days() -> None:
    """Then their segment goes, and no producer is known."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        owner = await Owner.open(log)
        claim = owner.begin()
        last = await owner.write(claim, 0)
        await owner.writer.aclose()
        assert await log.truncate(DLSN(last.lssn, last.entry_id + 1, 0))
        assert not await read_all(log)
        after = await Owner.open(log)
        assert after.producers.continue_with(claim, now_ms=0) == 0
        await after.writer.aclose()
        async with await log.open_writer() as direct:
            later = await direct.write(record(7))
        cluster.clocks["a"].current_ms += PRODUCERS_KEPT_MS
        await log.truncate(later)
        forgetful = await Owner.open(log)
        with pytest.raises(ProducerFencedError, match="forgotten"):
            forgetful.producers.look_at(claim, 1, 1)
        await forgetful.writer.aclose()
        assert [each.txid for each in await read_all(log)] == [7]

    on_log(body)


def test_an_owner_that_was_overtaken_fails() -> None:
    """Another one wrote before its first record: what it knows of producers is old."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        first = await Owner.open(log)
        claim = first.begin()
        await first.write(claim, 0)
        await first.writer.aclose()
        unlocked = await cluster.open("b", config=LogConfig(lock_enabled=False))
        stale = await Owner.open(await unlocked.open_log("clicks"))
        other = await Owner.open(log)
        await other.write(claim, 1)
        with pytest.raises(OwnershipAcquireFailedError, match="another writer wrote to it"):
            await stale.write(claim, 1)
        await stale.writer.abort()
        behind = await Owner.open(await unlocked.open_log("clicks"))
        await other.writer.abort()
        assert durable_of(behind.producers, "p") == 1
        await behind.write(claim, 2)
        await behind.writer.aclose()
        assert [each.payload for each in await read_all(log)] == [b"0", b"1", b"2"]

    on_log(body)


def test_an_incomplete_all_or_none_write_is_refused() -> None:
    """It would be two entries."""

    async def body(_: MemoryCluster, log: DirectLog) -> None:
        owner = await Owner.open(log)
        large = batch_of([0, 0], [bytes(1000 * 1000)] * 2)
        with pytest.raises(Exception, match="do not fit into one entry"):
            owner.writer.write_fitted(large, whole=True)
        assert await owner.writer.find_last() is None
        await owner.writer.aclose()
        with pytest.raises(Exception, match="is closed"):
            await owner.writer.find_last()

    on_log(body)


def test_entries_that_contradict_each_other_are_reported() -> None:
    """One without a stamp among those that have one."""

    async def body(_: MemoryCluster, log: DirectLog) -> None:
        owner = await Owner.open(log)
        claim = owner.begin()
        await owner.write(claim, 0)
        machine: Any = owner.writer.machine
        machine._maker.stamper = None
        await owner.writer.write(record(0))
        machine._maker.stamper = owner.producers
        await owner.write(claim, 1)
        await owner.writer.aclose()
        with pytest.raises(InvalidEntryError, match="entry 1 of segment 1 has no stamp"):
            await Owner.open(log)

    on_log(body)


def test_entries_that_move_meanwhile_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into another ledger, by merging; a ledger that is gone for good is an error."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        owner = await Owner.open(log)
        claim = owner.begin()
        for number in range(3):
            last = await owner.write(claim, number)
        await owner.writer.aclose()
        context = log._context
        opened = context.ledgers.open_ledger

        async def moved(ledger_id: int) -> Any:
            monkeypatch.setattr(context.ledgers, "open_ledger", opened)
            other = await (await cluster.open("merger")).open_log("clicks")
            await other.truncate(last)
            raise LedgerNotFoundError(f"ledger {ledger_id} is gone")

        monkeypatch.setattr(context.ledgers, "open_ledger", moved)
        after = await Owner.open(log)
        assert durable_of(after.producers, "p") == 2
        await after.writer.aclose()

        async def gone(ledger_id: int) -> Any:
            raise LedgerNotFoundError(f"ledger {ledger_id} is gone")

        monkeypatch.setattr(context.ledgers, "open_ledger", gone)
        with pytest.raises(LedgerNotFoundError):
            await Owner.open(log)

    on_log(body)


def test_merging_keeps_stamps() -> None:
    """An entry that is moved to another ledger says the same."""
    batch = batch_of([1, 2], [b"a", b"b" * 1000])
    body = b"".join(
        map(
            bytes,
            encode_entry(
                batch,
                first_txid=1,
                last_txid=2,
                records_before=0,
                write_time_ms=5,
                compressor=Compressor("lz4"),
                stamp=b"12345678",
            ),
        )
    )
    moved = b"".join(map(bytes, move_entry(body, records_before=9, floor_ms=0, assigned_txid=None)))
    header = decode_entry_header(moved)
    assert header.compressed
    assert bytes(stamp_of(moved, header)) == b"12345678"
    assert decode_entry_batch(moved, header).equals(batch)
    with pytest.raises(InvalidEntryError, match="says that its stamp has"):
        decode_entry_header(moved[:50])
