"""Erasures: after the answer no file has a byte of a ledger that is gone.

The ledgers' bytes differ in their bodies, which the tests search in all files of the disk,
with what lies behind the ends of files, and in files that are kept to be used again.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from bookie.config import CompactionConfig, GarbageConfig
from bookie.disks.real import RealDisk
from bookie.files.format import file_name
from bookie.upkeep import garbage, rounds
from bookie.upkeep.compaction import CompactionReport
from bookie.upkeep.erasing import Eraser
from bookie.upkeep.garbage import GarbageJudge
from bookie.upkeep.garbage_collector import GarbageCollector
from dlcore.base.errors import BookieUnavailableError, CorruptMetadataError, MetadataError
from dlcore.ledger.metadata.values import Erased, Erasure, LedgerState
from dlcore.metadata.stored import decode, encode
from tests.bookie.test_garbage_collector import OWN, PATHS, Bench, bench
from tests.fixtures.aio import run
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import make_frame, open_storage, read_all, small_config

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path
    from typing import TypeAlias

    from bookie.ledger_storage import LedgerStorage
    from bookie.upkeep.garbage import GarbageReport

    Collect: TypeAlias = Callable[[], Coroutine[Any, Any, GarbageReport]]

NEEDLE = b"the needle of ledger one hundred"
KEPT, DOOMED = 1, 100
ENTRIES = 40
CONFIG = small_config(
    file_bytes_max=6000,
    garbage=GarbageConfig(age_ms=0),
    compact=CompactionConfig(bytes_per_second=10**9, floor_bytes=0),
)


async def is_doomed(ledger_id: int) -> bool:
    """Say which ledger the metadata store no longer knows."""
    return ledger_id == DOOMED


async def fill(storage: LedgerStorage, entries: range = range(ENTRIES)) -> None:
    """Add entries, one in eight of the ledger that is deleted later: no file is worth a copy."""
    for number in entries:
        body = b"of the ledger to keep, entry %d, and some more bytes" % number
        await storage.writes.add_entry(make_frame(KEPT, number, body, last_add_confirmed=-1))
        if number % 8 == 0:
            frame = make_frame(DOOMED, number, NEEDLE, last_add_confirmed=-1)
            await storage.writes.add_entry(frame)


async def check_kept(storage: LedgerStorage, entries: int = ENTRIES) -> None:
    """Require that the other ledger has all of its entries."""
    assert len(await read_all(storage, KEPT, first=0, last=entries - 1)) == entries


def collects(storage: LedgerStorage) -> Collect:
    """Return a pass that takes the doomed ledger's deletion as proven."""
    return partial(storage.upkeep.collect_garbage, is_doomed, at_once={DOOMED})


async def erase(storage: LedgerStorage) -> str:
    """Erase the doomed ledger; return why it waits."""
    waits, _ = await storage.upkeep.erase(collects(storage))
    return waits


def bytes_in(disk: MemoryDisk) -> bytes:
    """Return what the device and its cache have, spares included."""
    return b"".join(data for _, data in disk.folder.contents())


def test_no_byte_of_the_ledger_is_in_a_file_afterwards() -> None:
    """Goal: however small its share is, in sealed files and in the newest one; after a restart."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            assert len(storage.core.files.numbers()) > 0
            assert bytes_in(disk).count(NEEDLE) > 5
            assert await erase(storage) == ""
            assert NEEDLE not in bytes_in(disk)
            await check_kept(storage)
            await fill(storage, range(ENTRIES, 2 * ENTRIES))
            await check_kept(storage, 2 * ENTRIES)
        async with open_storage(disk, CONFIG) as storage:
            await check_kept(storage, 2 * ENTRIES)

    run(main())


def test_no_byte_of_it_is_in_a_file_of_a_real_disk(tmp_path: Path) -> None:
    """Goal: also in no file that is kept to be used again, nor behind the end of one that was."""

    def bytes_of_folder() -> bytes:
        return b"".join(each.read_bytes() for each in tmp_path.iterdir())

    async def main() -> None:
        disk = RealDisk(tmp_path)
        try:
            async with open_storage(disk, CONFIG) as storage:
                # Files of the ledger alone are dropped, and kept as spares; the next use them.
                for number in range(60):
                    frame = make_frame(DOOMED, number, NEEDLE * 8, last_add_confirmed=-1)
                    await storage.writes.add_entry(frame)
                for _ in range(2):
                    await storage.upkeep.collect_garbage(is_doomed)
                for number in range(3):
                    await storage.writes.add_entry(
                        make_frame(KEPT, number, b"kept", last_add_confirmed=-1)
                    )
                assert NEEDLE in bytes_of_folder()
                assert await erase(storage) == ""
                assert NEEDLE not in bytes_of_folder()
                await check_kept(storage, 3)
        finally:
            await disk.aclose()

    run(main())


def test_an_unused_storage_is_erased() -> None:
    """Goal: a file without records is sealed as well, for old bytes may lie behind its end."""

    async def main() -> None:
        async with open_storage(MemoryDisk(), CONFIG) as storage:
            assert await erase(storage) == ""
            assert storage.core.log.unsealed.current.index.number == 2

    run(main())


def test_the_answer_says_what_cannot_be_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: unproven deletions, want of space, damage, and a disk that does not seal."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, CONFIG) as storage:
            await fill(storage)
            unproven = partial(storage.upkeep.collect_garbage, is_doomed)
            waits, awaited = await storage.upkeep.erase(unproven)
            assert awaited == {DOOMED}
            assert waits.startswith("1 ledgers look deleted, and are not proven so yet")
            disk.room.fill(leave_bytes=60_000)
            monkeypatch.setattr(storage.upkeep._compactor, "_room_bytes", lambda: 100)
            waits = await erase(storage)
            assert waits.endswith("files could not be copied for want of space")
            monkeypatch.undo()
            location = storage.core.reader.find(KEPT, 0)
            assert location is not None
            name = file_name(location.file_number)
            disk.folder.corrupt(name, location.offset + location.size - 1, b"\xff")
            waits = await erase(storage)
            assert waits == "files [1] are damaged, and stay until they are repaired"
            assert NEEDLE in bytes_in(disk)

    run(main())


def test_the_brake_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: an erasure does not hasten the deletion of other ledgers."""

    async def main() -> None:
        async with open_storage(MemoryDisk(), CONFIG) as storage:

            async def collect() -> GarbageReport:
                return garbage.GarbageReport(
                    ledgers_deleted=0,
                    files_deleted=0,
                    bytes_freed=0,
                    held="held",
                    waiting=frozenset((1, 2)),
                )

            assert await storage.upkeep.erase(collect) == ("held", frozenset((1, 2)))
            # Others that are held back by now are of no interest to the same request.
            assert await storage.upkeep.erase(collect, awaited=frozenset((3,))) == ("", frozenset())
            monkeypatch.setattr(rounds, "_SEAL_POLLS", 0)
            waits = await erase(storage)
            assert waits == "the newest file could not be sealed yet"
            left = rounds._why_left({1}, CompactionReport())
            assert left == "1 files are still to be copied"

    run(main())


def test_a_named_ledger_needs_no_time_and_moves_no_brake() -> None:
    """Goal: others go on as they did."""
    one = GarbageJudge(GarbageConfig(age_ms=1000, brake_count=3, brake_share=0.5))
    verdict = one.judge(seen=range(10), looks_deleted=range(6), now_ms=0, at_once={0, 1, 2, 3, 9})
    assert verdict.deleted == {0, 1, 2, 3}
    assert not verdict.held
    assert one.waiting == {4, 5}
    assert one.judge(seen=range(10), looks_deleted=[4, 5], now_ms=1000).deleted == {4, 5}


def eraser_of(one: Bench, *, retry_s: float = 0.0) -> Eraser:
    """Return the bookie's eraser."""
    collector = GarbageCollector(
        one.storage.upkeep, bookie=OWN, store=one.store, paths=PATHS, cluster_id=one.cluster_id
    )
    return Eraser(
        one.storage.upkeep,
        collector,
        bookie=OWN,
        store=one.store,
        paths=PATHS,
        retry_s=retry_s,
    )


async def answer_to(one: Bench, token: str) -> Erased | None:
    """Return the bookie's answer."""
    path = PATHS.erasure_at(token, OWN.name)
    node = await one.store.get(path)
    return None if node is None else decode(Erased, node.value, source=path)


def test_a_request_is_answered_once_with_the_reason_if_it_must_wait() -> None:
    """Goal: named ledgers go at once, others after their age; then nothing more is done."""

    async def scenario() -> None:
        async with bench() as one:
            eraser = eraser_of(one)
            assert await eraser.run() == 0
            await one.hold(1, bookie=OWN, state=LedgerState.CLOSED)
            for ledger_id in (2, 3):  # the metadata does not know them
                await one.storage.writes.add_entry(make_frame(ledger_id, 0, b"gone"))
            request = encode(Erasure(ledgers=(2,), asked_ms=0))
            await one.store.create(PATHS.erasure("t"), request, make_parents=True)
            assert await eraser.run() == 1
            answer = await answer_to(one, "t")
            assert answer is not None
            assert answer.waits.startswith("1 ledgers look deleted")
            one.clock.now += 1000
            # In a busy cluster there is always a ledger that was deleted just now.
            await one.storage.writes.add_entry(make_frame(4, 0, b"gone later"))
            assert await eraser.run() == 1
            assert await answer_to(one, "t") == Erased(incarnation=OWN.incarnation)
            assert one.storage.core.live_ledgers() == [1, 4]
            assert await eraser.run() == 0

    run(scenario())


def test_failures_are_answers_and_another_disk_is_asked_again() -> None:
    """Goal: no one waits without a reason; an answer counts only for the disk that gave it."""

    async def scenario() -> None:
        async with bench() as one:
            request = encode(Erasure(ledgers=(), asked_ms=0))
            await one.store.create(PATHS.erasure("t"), request, make_parents=True)
            own = PATHS.erasure_at("t", OWN.name)
            await one.store.create(own, encode(Erased(incarnation="another")))
            await one.store.put(PATHS.ledger_idgen, b"broken", version=-1)
            eraser = eraser_of(one, retry_s=0.05)
            assert await eraser.run() == 1
            answer = await answer_to(one, "t")
            assert answer is not None
            assert answer.waits.startswith(CorruptMetadataError.__name__)
            assert await eraser.run() == 0  # it is not due
            await one.store.put(PATHS.ledger_idgen, b"1000", version=-1)
            await asyncio.sleep(0.1)
            assert await eraser.run() == 1
            assert await answer_to(one, "t") == Erased(incarnation=OWN.incarnation)

    run(scenario())


def test_a_request_that_is_withdrawn_meanwhile_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: the end of a redaction disturbs no bookie."""

    async def scenario() -> None:
        async with bench() as one:
            request = encode(Erasure(ledgers=(), asked_ms=0))
            await one.store.create(PATHS.erasure("t"), request, make_parents=True)
            real = one.storage.upkeep.erase

            async def erase(collect: Collect, **awaited: Any) -> tuple[str, frozenset[int]]:
                await one.store.delete(PATHS.erasure("t"))
                return await real(collect, **awaited)

            monkeypatch.setattr(one.storage.upkeep, "erase", erase)
            assert await eraser_of(one).run() == 1
            assert await eraser_of(one).run() == 0

    run(scenario())


def test_a_closed_storage_refuses() -> None:
    """Goal: the storage's own errors reach the caller."""

    async def main() -> None:
        async with open_storage(MemoryDisk(), CONFIG) as storage:
            pass
        with pytest.raises((BookieUnavailableError, MetadataError)):
            await erase(storage)

    run(main())
