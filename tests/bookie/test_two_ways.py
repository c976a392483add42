"""Many entries at once or one by one: a bookie comes to the same in both ways.

Method: Hypothesis chooses what is asked.  One storage gets entries in runs, or on a disk that now
and then takes an append at once; the other gets each by itself, on a disk that queues all of them.
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given, settings, strategies as st

from bookie.files.format import file_name
from dlcore.base.errors import BookieError
from dlcore.wire.frames import FrameRun
from tests.fixtures.aio import run
from tests.fixtures.lengths import amount
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import make_frame, open_storage, read_entries, small_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie.config import StorageConfig
    from bookie.ledger_storage import LedgerStorage

LEDGERS = (1, 2)
ADDS = st.tuples(
    st.just("add"),
    st.sampled_from(LEDGERS),
    st.integers(0, 12),  # so far before the first entry that is not held
    st.integers(2, 20),
    st.sampled_from(["", "", "", "damaged", "high LAC", "other bytes"]),
    st.booleans(),  # whether all have one size
)
STEPS = st.lists(
    st.one_of(
        ADDS,
        ADDS,
        st.tuples(st.just("fence"), st.sampled_from(LEDGERS)),
        st.tuples(st.just("lac"), st.sampled_from(LEDGERS), st.integers(0, 60)),
    ),
    min_size=1,
    max_size=8,
)
FILES = st.sampled_from([700, 2000, 10**6])


def frames_of(ledger_id: int, first: int, count: int, wrong: str, *, even: bool) -> list[bytes]:
    """Return entries, the last but one of which may be wrong in some way."""
    frames = [
        make_frame(ledger_id, each, bytes(30 + (0 if even else each % 5)))
        for each in range(first, first + count)
    ]
    entry_id = first + count - 2
    if wrong == "damaged":
        frames[-2] = frames[-2][:-1] + bytes([frames[-2][-1] ^ 1])
    elif wrong == "high LAC":
        frames[-2] = make_frame(ledger_id, entry_id, bytes(30), last_add_confirmed=entry_id + 5)
    elif wrong == "other bytes":
        frames[-2] = make_frame(ledger_id, entry_id, b"other")
    return frames


async def add_all(storage: LedgerStorage, frames: Sequence[bytes], *, together: bool) -> list[Any]:
    """Add entries; return of each the type of its error, or None."""
    if together:
        whole = memoryview(b"".join(frames))
        future = storage.writes.add_run(
            FrameRun.of_sizes(whole, np.array([len(each) for each in frames]))
        )
        if future is not None:
            await future
            return [None] * len(frames)
    added = [storage.writes.add_entry(each) for each in frames]
    return [
        type(each) if each else None
        for each in await asyncio.gather(*added, return_exceptions=True)
    ]


async def state_of(storage: LedgerStorage) -> list[Any]:
    """Return all that a storage tells of its ledgers."""
    answers: list[Any] = []
    for ledger_id in LEDGERS:
        try:
            listed = storage.reads.list_entries(ledger_id)
            answers.append([*listed, await storage.reads.read_lac(ledger_id, fence=False)])
            answers.append(await storage.reads.read_held(ledger_id))
            for each in listed:
                for entry_id in range(each.first_entry_id, each.last_entry_id + 1):
                    frame = await storage.reads.read_entry(ledger_id, entry_id, fence=False)
                    answers.append(bytes(frame))
        except BookieError as error:
            answers.append(type(error))
    return answers


@settings(max_examples=amount(100, sampled=30))
@given(STEPS, FILES, st.lists(st.booleans(), min_size=1, max_size=5))
def test_adds_in_runs_are_adds_one_by_one(
    steps: list[tuple[Any, ...]], file_bytes: int, quick: list[bool]
) -> None:
    """The same answers, the same state, and the same after a restart."""
    config = small_config(file_bytes_max=file_bytes, batch_bytes_max=1500)

    async def main() -> None:
        disks = (MemoryDisk(), MemoryDisk())
        takes_at_once = cycle(quick)
        disks[0].device.is_quick = lambda: next(takes_at_once)
        async with open_storage(disks[0], config) as one, open_storage(disks[1], config) as other:
            ends = dict.fromkeys(LEDGERS, 0)
            for step in steps:
                match step:
                    case ("add", ledger_id, back, count, wrong, even):
                        first = max(0, ends[ledger_id] - back // 4)
                        frames = frames_of(ledger_id, first, count, wrong, even=even)
                        answers = await add_all(one, frames, together=True)
                        assert answers == await add_all(other, frames, together=False), step
                        ends[ledger_id] = max(ends[ledger_id], first + count)
                    case ("fence", ledger_id):
                        for storage in (one, other):
                            await storage.writes.fence(ledger_id)
                    case ("lac", ledger_id, lac):
                        for storage in (one, other):
                            await storage.writes.write_lac(ledger_id, lac)
                assert await state_of(one) == await state_of(other), step
            expected = await state_of(other)
        for disk in disks:
            async with open_storage(disk, config) as storage:
                assert await state_of(storage) == expected

    run(main())


@settings(max_examples=amount(100, sampled=30))
@given(
    added=st.lists(st.integers(0, 60), min_size=1, max_size=60, unique=True),
    wanted=st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 3)),
    chunk_bytes=st.sampled_from([100, 300, 2000, 10**6]),
    damaged=st.none() | st.integers(0, 59),
    file_bytes=FILES,
)
def test_a_range_is_what_reads_of_its_entries_are(
    added: list[int],
    wanted: tuple[int, int, int],
    chunk_bytes: int,
    damaged: int | None,
    file_bytes: int,
) -> None:
    """As far as these go: up to the first that is absent or damaged, whose error ends it."""
    config = small_config(file_bytes_max=file_bytes)
    first, last, stride = min(wanted[:2]), max(wanted[:2]), wanted[2]

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk, config) as storage:
            await asyncio.gather(
                *(storage.writes.add_entry(make_frame(1, each, bytes(30))) for each in added)
            )
            location = None if damaged is None else storage.core.reader.find(1, damaged)
            if location is not None:
                place = location.offset + location.size - 1
                disk.folder.flip(file_name(location.file_number), place, 1)
            one_by_one: list[Any] = []
            for entry_id in range(first, last + 1, stride):
                try:
                    frame = await storage.reads.read_entry(1, entry_id, fence=False)
                except BookieError as error:
                    one_by_one.append(type(error))
                    break
                one_by_one.append(bytes(frame))
            together: list[Any] = []
            try:
                async for chunk in read_entries(
                    storage,
                    1,
                    first_entry_id=first,
                    last_entry_id=last,
                    stride=stride,
                    chunk_bytes=chunk_bytes,
                ):
                    together += map(bytes, chunk)
            except BookieError as error:
                together.append(type(error))
            assert together == one_by_one

    run(main())


GROUPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(LEDGERS), st.integers(1, 6)), min_size=1, max_size=3),
        st.integers(0, 5),  # turns of the loop before the next group
    ),
    min_size=1,
    max_size=8,
)


async def added(
    disk: MemoryDisk, config: StorageConfig, groups: Sequence[Any], *, loses_power: bool
) -> tuple[list[tuple[int, int]], list[Any], list[Any]]:
    """Add groups of entries; return the acknowledged ones, in order, and the state after a start.

    The last value is what is counted and what the storage tells, before it is closed.
    """
    acknowledged: list[tuple[int, int]] = []
    before: list[Any] = []

    def note(entry: tuple[int, int], done: asyncio.Future[None]) -> None:
        if done.exception() is None:
            acknowledged.append(entry)

    async with open_storage(disk, config) as storage:
        ends, futures = dict.fromkeys(LEDGERS, 0), []
        for adds, turns in groups:
            for ledger_id, count in adds:
                for _ in range(count):
                    entry = ledger_id, ends[ledger_id]
                    ends[ledger_id] += 1
                    futures.append(storage.writes.add_entry(make_frame(*entry, bytes(40))))
                    futures[-1].add_done_callback(partial(note, entry))
            for _ in range(turns):
                await asyncio.sleep(0)
        if loses_power:
            before = list(acknowledged)  # later acknowledgements are of a device without power
            disk.crash()
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        if not loses_power:
            assert not any(outcomes)
            commits = storage.core.log.commits
            before = [
                commits.queue.pending_bytes,
                commits.queue.durable_bytes,
                *await state_of(storage),
            ]
    async with open_storage(disk, config) as storage:
        return acknowledged, await state_of(storage), before


@settings(max_examples=amount(100, sampled=30))
@given(GROUPS, FILES, st.lists(st.booleans(), min_size=1, max_size=5))
def test_queued_entries_are_written_at_once(
    groups: list[Any], file_bytes: int, quick: list[bool]
) -> None:
    """The same entries in the same files, acknowledged in the same order, and the same counts."""
    config = small_config(file_bytes_max=file_bytes, batch_bytes_max=300)

    async def main() -> None:
        eager, queued = MemoryDisk(), MemoryDisk()
        eager.device.is_quick = partial(next, cycle(quick))
        found = [await added(each, config, groups, loses_power=False) for each in (eager, queued)]
        assert found[0] == found[1]
        files = [
            {name: each.folder.size_of(name) for name in each.names()} for each in (eager, queued)
        ]
        assert files[0] == files[1]

    run(main())


@settings(max_examples=amount(100, sampled=30))
@given(GROUPS, FILES, st.lists(st.booleans(), min_size=1, max_size=5))
def test_acknowledged_entries_are_held_whichever_way_they_were_written(
    groups: list[Any], file_bytes: int, quick: list[bool]
) -> None:
    """After the power goes off, amid what is written at once and what waits behind it."""
    config = small_config(file_bytes_max=file_bytes, batch_bytes_max=300)

    async def main() -> None:
        for pattern in (quick, [False]):
            disk = MemoryDisk(latency_s=lambda: 0)  # a turn of the loop for each step
            disk.device.is_quick = partial(next, cycle(pattern))
            _, _, acknowledged = await added(disk, config, groups, loses_power=True)
            async with open_storage(disk, config) as storage:
                for ledger_id, entry_id in acknowledged:
                    frame = await storage.reads.read_entry(ledger_id, entry_id, fence=False)
                    assert bytes(frame) == make_frame(ledger_id, entry_id, bytes(40))

    run(main())
