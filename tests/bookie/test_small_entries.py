"""Goal: reading many small entries at once gives what reading each gives.

Method: columns made by hand with every reason to stop; a real storage with damage in the middle.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bookie.disk import MemoryDisk
from bookie.entry_log_format import file_name
from bookie.small_entries import EntryRun, first_run, joined
from dlcore.errors import BookieStorageError
from dlcore.wire.frames import FrameRun
from tests.fixtures.aio import run
from tests.fixtures.storage import make_frame, open_storage, small_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bookie.storage import LedgerStorage

COUNT = 40
IDS = np.arange(100, 100 + COUNT)
SIZES = np.full(COUNT, 60)
OFFSETS = 1000 + 100 * np.arange(COUNT)


def count_of(
    ids: NDArray[np.int64] = IDS,
    offsets: NDArray[np.int64] = OFFSETS,
    sizes: NDArray[np.int64] = SIZES,
    *,
    wanted: range = range(100, 1000),
    bytes_max: int = 10**6,
) -> int:
    """Return how many entries the first run has, 0 for none."""
    found = first_run(ids, offsets, sizes, wanted=wanted, bytes_max=bytes_max, file_number=1)
    if found is None:
        return 0
    assert len(found.entry_ids) == len(found.offsets) == len(found.sizes)
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


@pytest.mark.parametrize("position", [0, 1, 15, 16, 17, 39])
def test_a_run_ends_before_what_does_not_belong_to_it(position: int) -> None:
    """A hole, an entry that is held twice, one elsewhere in the file, one that does not fit."""
    expected = position if position >= 16 else 0
    assert count_of(changed(IDS, position, 1)) == expected
    assert count_of(bytes_max=60 * (position + 1) - 1) == expected
    if position:
        assert count_of(changed(IDS, position, -1)) == expected
        assert count_of(offsets=changed(OFFSETS, position, 2000)) == expected
        assert count_of(offsets=changed(OFFSETS, position, -2000)) == expected


def test_large_entries_are_no_run() -> None:
    """They are not worth copying."""
    sizes = np.full(COUNT, 20_000)
    assert count_of(offsets=20_040 * np.arange(COUNT), sizes=sizes) == 0


def test_a_stride_takes_every_other_entry() -> None:
    """What lies between is skipped, if it is little."""
    assert count_of(wanted=range(100, 1000, 2)) == COUNT // 2
    assert count_of(IDS[1:], OFFSETS[1:], SIZES[1:], wanted=range(101, 1000, 2)) == COUNT // 2


@pytest.mark.parametrize("sizes", [[5] * 20, [*range(1, 21)]])
@pytest.mark.parametrize("gaps", [[3] * 20, [*range(20)], [0] * 20])
def test_frames_are_joined_without_what_lies_between(sizes: list[int], gaps: list[int]) -> None:
    """Equal or not, as they lie in the file."""
    offsets = 500 + np.cumsum([0, *sizes[:-1]]) + np.cumsum(gaps)
    data = os.urandom(int(offsets[-1] - offsets[0]) + sizes[-1])
    frames = joined(memoryview(data), EntryRun(1, np.arange(20), offsets, np.array(sizes)))
    starts = (offsets - offsets[0]).tolist()
    assert list(frames) == [
        data[start : start + size] for start, size in zip(starts, sizes, strict=True)
    ]


async def chunk_of(storage: LedgerStorage, first: int, *, stride: int = 1) -> Sequence[memoryview]:
    """Return the next chunk of ledger 1."""
    return await storage.read_chunk(
        1, first_entry_id=first, last_entry_id=10**6, stride=stride, bytes_max=10**6
    )


def test_a_storage_gives_many_small_entries_at_once_wherever_they_are() -> None:
    """In the file being written and in sealed ones, beside another ledger's, with a stride."""

    async def main() -> None:
        config = small_config(file_bytes_max=30_000, batch_bytes_max=10_000)
        disk = MemoryDisk()
        frames = [make_frame(1, entry_id, os.urandom(entry_id % 50)) for entry_id in range(900)]
        async with open_storage(disk, config) as storage:
            for entry_id, frame in enumerate(frames):
                future = storage.add_entry(frame)
                if entry_id % 3 == 0:
                    storage.add_entry(make_frame(2, entry_id, b"x" * 30))
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


def test_damage_among_small_entries_is_found_and_belongs_to_one_of_them() -> None:
    """Whoever reads it gets no answer about it, and all others as they are."""

    async def main() -> None:
        disk = MemoryDisk()
        frames = [make_frame(1, entry_id) for entry_id in range(100)]
        async with open_storage(disk, small_config(file_bytes_max=10**6)) as storage:
            for frame in frames:
                future = storage.add_entry(frame)
            await future
            assert isinstance(await chunk_of(storage, 0), FrameRun)
            location = storage._reader.find(1, 50)
            assert location is not None
            name = file_name(location.file_number)
            disk.corrupt(name, location.offset + location.size // 2, b"\xff")
            with pytest.raises(BookieStorageError, match="entry 1:50 is damaged"):
                await chunk_of(storage, 0)
            assert storage.damaged_entries() == [(1, 50)]
            assert list(await chunk_of(storage, 51)) == frames[51:]
            assert await storage.read_entry(1, 49, fence=False) == frames[49]

    run(main())
