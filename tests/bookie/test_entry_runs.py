"""Goal: reading many entries at once gives what reading each gives.

Method: columns made by hand with every reason to stop; a real storage with damage in the middle.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bookie.files.entry_reader import LargerEntryError
from bookie.files.entry_runs import EntryRun, first_run, joined, scattered
from bookie.files.format import file_name
from bookie.files.index import EntryColumns
from dlcore.base.errors import BookieStorageError
from dlcore.wire.frames import FrameRun
from tests.fixtures.aio import run
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import make_frame, open_storage, small_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bookie.ledger_storage import LedgerStorage

COUNT = 40
IDS = np.arange(100, 100 + COUNT)
SIZES = np.full(COUNT, 60)
OFFSETS = 1000 + 100 * np.arange(COUNT)


def run_at(
    ids: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> EntryRun:
    """Return a run of file 1, a part of one that began before."""
    return EntryRun(1, ids, offsets, sizes, 700 + np.cumsum(sizes))


def count_of(
    ids: NDArray[np.int64] = IDS,
    offsets: NDArray[np.int64] = OFFSETS,
    sizes: NDArray[np.int64] = SIZES,
    *,
    wanted: range = range(100, 1000),
) -> int:
    """Return how many entries the first run has, 0 for none."""
    found = first_run(ids, offsets, sizes, wanted=wanted, file_number=1)
    if found is None:
        return 0
    assert len(found.entry_ids) == len(found.offsets) == len(found.sizes)
    assert found.sums.tolist() == np.cumsum(found.sizes).tolist()
    assert found.entry_ids.tolist() == list(wanted[: len(found.entry_ids)])
    return len(found.entry_ids)


def changed(column: NDArray[np.int64], position: int, value: int) -> NDArray[np.int64]:
    """Return a column with `value` added from `position` on."""
    column = column.copy()
    column[position:] += value
    return column


def test_neighbours_are_one_run() -> None:
    """All of them, where nothing is in the way."""
    assert count_of() == COUNT


@pytest.mark.parametrize("position", [0, 1, 2, 17, 39])
def test_a_run_ends_before_what_does_not_belong_to_it(position: int) -> None:
    """A hole, an entry that is held twice, one elsewhere in the file."""
    assert count_of(changed(IDS, position, 1)) == position
    if position:
        assert count_of(changed(IDS, position, -1)) == position
        assert count_of(offsets=changed(OFFSETS, position, 2000)) == position
        assert count_of(offsets=changed(OFFSETS, position, -2000)) == position


def test_nothing_is_no_run() -> None:
    """Where no entry is held from the wanted one on."""
    assert count_of(IDS[:0], OFFSETS[:0], SIZES[:0]) == 0


@given(
    sizes=st.lists(st.integers(1, 99), min_size=1, max_size=30),
    bytes_max=st.integers(1, 999),
    last=st.integers(0, 40),
    stride=st.integers(1, 3),
)
def test_a_run_is_split_where_a_chunk_is_full(
    sizes: list[int], bytes_max: int, last: int, stride: int
) -> None:
    """The head is as long as it may be; the rest is what is left, unless it is too little."""
    ids = np.arange(0, len(sizes) * stride, stride)
    ends = np.cumsum(np.array(sizes, np.int64))
    run = run_at(ids, ends - np.array(sizes), np.array(sizes))
    head, rest = run.split(bytes_max, last)
    count = len(head.entry_ids)
    wanted = int(sum(ids <= last))
    assert 1 <= count <= wanted
    assert count == 1 or ends[count - 1] <= bytes_max
    assert count == wanted or ends[count] > bytes_max
    left = ends[-1] - ends[count - 1]
    assert (rest is not None) == (count < wanted and left >= ends[count - 1])
    for column, whole in zip(head[1:], run[1:], strict=True):
        assert column.tolist() == whole[:count].tolist()
    if rest is not None:
        assert rest.entry_ids.tolist() == ids[count:].tolist()
        assert rest.sizes.tolist() == sizes[count:]


def test_a_run_ends_where_another_file_begins() -> None:
    """A newer file that holds it too counts."""
    run = run_at(IDS, OFFSETS, SIZES)
    found = run.before(110)
    assert found is not None
    assert found.entry_ids.tolist() == list(range(100, 110))
    assert run.before(100) is None


def test_a_stride_takes_every_other_entry() -> None:
    """Bytes between them are skipped, if they are few."""
    assert count_of(wanted=range(100, 1000, 2)) == COUNT // 2
    assert count_of(IDS[1:], OFFSETS[1:], SIZES[1:], wanted=range(101, 1000, 2)) == COUNT // 2


@pytest.mark.parametrize("sizes", [[5] * 20, [*range(1, 21)]])
@pytest.mark.parametrize("gaps", [[3] * 20, [*range(20)], [0] * 20])
def test_frames_are_joined_without_what_lies_between(sizes: list[int], gaps: list[int]) -> None:
    """Equal or not, as they lie in the file."""
    offsets = 500 + np.cumsum([0, *sizes[:-1]]) + np.cumsum(gaps)
    data = os.urandom(int(offsets[-1] - offsets[0]) + sizes[-1])
    entries = run_at(np.arange(20), offsets, np.array(sizes))
    starts = (offsets - offsets[0]).tolist()
    expected = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert list(joined(memoryview(data), entries)) == expected
    frames, buffers = scattered(entries)
    assert sum(map(len, buffers)) == len(data) == entries.span_bytes
    rest = data
    for buffer in buffers:
        buffer[:], rest = rest[: len(buffer)], rest[len(buffer) :]
    assert list(frames) == expected
    assert frames.payload.readonly


def test_a_single_frame_is_a_run() -> None:
    """And nothing is copied of one that is large."""
    entries = run_at(np.arange(1), np.array([40]), np.array([3]))
    assert list(joined(memoryview(b"abc"), entries)) == [b"abc"]
    assert entries.is_copied
    assert not run_at(np.arange(1), np.array([40]), np.array([9000])).is_copied


async def chunk_of(storage: LedgerStorage, first: int, *, stride: int = 1) -> Sequence[memoryview]:
    """Return the next chunk of ledger 1."""
    return await storage.reads.read_chunk(
        1, first_entry_id=first, last_entry_id=10**6, stride=stride, bytes_max=10**6
    )


def test_a_storage_gives_many_entries_at_once_wherever_they_are() -> None:
    """In the file being written and in sealed ones, beside another ledger's, with a stride."""

    async def main() -> None:
        config = small_config(file_bytes_max=30_000, batch_bytes_max=10_000)
        disk = MemoryDisk()
        frames = [make_frame(1, entry_id, os.urandom(entry_id % 50)) for entry_id in range(900)]
        async with open_storage(disk, config) as storage:
            for entry_id, frame in enumerate(frames):
                future = storage.writes.add_entry(frame)
                if entry_id % 3 == 0:
                    storage.writes.add_entry(make_frame(2, entry_id, b"x" * 30))
            await future
        async with open_storage(disk, config) as storage:
            assert len(disk.names()) > 3
            for stride in (1, 3):
                first, chunks = 1, 0
                while first < len(frames):
                    chunk = await chunk_of(storage, first, stride=stride)
                    expected = frames[first::stride][: len(chunk)]
                    assert list(chunk) == expected
                    first += len(chunk) * stride
                    chunks += isinstance(chunk, FrameRun)
                assert chunks > 1

    run(main())


def test_large_entries_are_given_at_once_too() -> None:
    """As many as fit; where none does the answer says what one needs, and nothing is read."""

    async def main() -> None:
        frames = [make_frame(1, entry_id, os.urandom(20_000)) for entry_id in range(8)]
        config = small_config(
            file_bytes_max=10**6, batch_bytes_max=10**5, entry_size_bytes_max=10**5
        )
        async with open_storage(MemoryDisk(), config) as storage:
            for frame in frames:
                await storage.writes.add_entry(frame)
            size = len(frames[0])
            for bytes_max in (1, size - 1):
                with pytest.raises(LargerEntryError) as caught:
                    await storage.reads.read_chunk(
                        1, first_entry_id=0, last_entry_id=99, bytes_max=bytes_max
                    )
                assert caught.value.size_bytes == size
            for bytes_max, count in ((size, 1), (50_000, 2), (10**6, 8)):
                chunk = await storage.reads.read_chunk(
                    1, first_entry_id=0, last_entry_id=99, bytes_max=bytes_max
                )
                assert isinstance(chunk, FrameRun)
                assert list(chunk) == frames[:count]

    run(main())


def test_the_search_for_the_next_chunk_is_bounded_and_no_answer_by_itself() -> None:
    """Readers that never go on cost little; one that does finds damage, and its repair."""

    async def main() -> None:
        frames = frames_of(0, 200)
        disk = MemoryDisk()
        async with open_storage(disk, small_config(file_bytes_max=10**6)) as storage:
            for frame in frames:
                future = storage.writes.add_entry(frame)
            await future

            async def chunk_from(first: int, last: int = 199) -> list[memoryview]:
                bytes_max = 2 * len(frames[0])
                return list(
                    await storage.reads.read_chunk(
                        1, first_entry_id=first, last_entry_id=last, bytes_max=bytes_max
                    )
                )

            for first in reversed(range(100)):
                assert await chunk_from(first) == frames[first : first + 2]
            assert len(storage.core.reader._found) == 64
            assert await chunk_from(100, last=100) == frames[100:101]
            location = storage.core.reader.find(1, 101)
            assert location is not None
            disk.folder.corrupt(file_name(location.file_number), location.offset + 50, b"\xff")
            with pytest.raises(BookieStorageError, match="entry 1:101 is damaged"):
                await chunk_from(101)
            assert await chunk_from(99) == frames[99:101]  # keeps where the next ones are
            await storage.writes.repair_entry(frames[101])
            assert await chunk_from(101) == frames[101:103]

    run(main())


def test_damage_among_many_entries_is_found_and_belongs_to_one_of_them() -> None:
    """A reader gets no answer about it, and all other entries as they are."""

    async def main() -> None:
        disk = MemoryDisk()
        frames = [make_frame(1, entry_id) for entry_id in range(100)]
        async with open_storage(disk, small_config(file_bytes_max=10**6)) as storage:
            for frame in frames:
                future = storage.writes.add_entry(frame)
            await future
            assert isinstance(await chunk_of(storage, 0), FrameRun)
            location = storage.core.reader.find(1, 50)
            assert location is not None
            name = file_name(location.file_number)
            disk.folder.corrupt(name, location.offset + location.size // 2, b"\xff")
            with pytest.raises(BookieStorageError, match="entry 1:50 is damaged"):
                await chunk_of(storage, 0)
            assert storage.core.damage.entries() == [(1, 50)]
            assert list(await chunk_of(storage, 51)) == frames[51:]
            assert await storage.reads.read_entry(1, 49, fence=False) == frames[49]

    run(main())


def run_of(frames: Sequence[bytes]) -> FrameRun:
    """Return frames in one buffer, as they are received."""
    sizes = np.array([len(frame) for frame in frames], np.int64)
    return FrameRun.of_sizes(memoryview(b"".join(frames)), sizes)


def frames_of(first: int, count: int, *, spread: int = 1) -> list[bytes]:
    """Return frames of ledger 1, of equal sizes or not."""
    return [
        make_frame(1, entry_id, bytes(40 + entry_id % spread))
        for entry_id in range(first, first + count)
    ]


@pytest.mark.parametrize("spread", [1, 7])
def test_entries_added_together_are_stored_as_each_by_itself(spread: int) -> None:
    """The same bytes in the log, the same answers, also after a restart."""

    async def main() -> None:
        config = small_config(file_bytes_max=10**6, batch_bytes_max=10**5)
        frames = frames_of(0, 60, spread=spread)
        together, alone = MemoryDisk(), MemoryDisk()
        async with open_storage(together, config) as one, open_storage(alone, config) as other:
            for storage in (one, other):
                await storage.writes.add_entry(frames[0])
            future = one.writes.add_run(run_of(frames[1:]))
            assert future is not None
            assert not future.done()
            await asyncio.gather(future, *map(other.writes.add_entry, frames[1:]))
            stored, expected = (storage.core.log.unsealed.indexes()[-1] for storage in (one, other))
            for name in EntryColumns._fields:
                column = getattr(stored.columns(), name)
                assert column.tolist() == getattr(expected.columns(), name).tolist()
            assert list(stored.summaries()) == list(expected.summaries())
            assert one.status.stats() == other.status.stats()
            assert await one.reads.read_lac(1, fence=False) == 58
        async with open_storage(together, config) as storage:
            assert list(await chunk_of(storage, 0)) == frames

    run(main())


def test_doubt_about_one_entry_makes_each_one_checked_alone() -> None:
    """An unknown ledger, a held entry, a hole, a damaged frame, a LAC too high, a full batch."""

    async def main() -> None:
        config = small_config(file_bytes_max=5000, batch_bytes_max=4000)
        async with open_storage(MemoryDisk(), config) as storage:
            assert storage.writes.add_run(run_of(frames_of(0, 20))) is None
            await storage.writes.add_entry(frames_of(0, 1)[0])
            good = frames_of(1, 20)
            damaged = bytearray(good[7])
            damaged[60] ^= 1
            lac = make_frame(1, 8, bytes(40), last_add_confirmed=8)
            for frames in (
                frames_of(0, 20),
                good[:7] + good[8:],
                [*good[:7], bytes(damaged), *good[8:]],
                [*good[:7], lac, *good[8:]],
                [*good[:7], make_frame(2, 8, bytes(40)), *good[8:]],
                frames_of(1, 40),
            ):
                assert storage.writes.add_run(run_of(frames)) is None
            before = storage.status.stats()
            future = storage.writes.add_run(run_of(good))
            assert future is not None
            await future
            assert storage.status.stats() != before
            assert (
                storage.writes.add_run(run_of(frames_of(21, 20))) is None
            )  # the file would be too long
            await storage.reads.read_lac(1, fence=True)
            assert storage.writes.add_run(run_of(frames_of(21, 2))) is None
            await storage.aclose()
            assert storage.writes.add_run(run_of(frames_of(21, 2))) is None

    run(main())
