"""Many small entries that lie close together in one file: their frames out of its bytes, and in.

Nothing here takes a step per entry, but for joining frames of different sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dlcore.wire.frames import FrameRun

if TYPE_CHECKING:
    from numpy.typing import NDArray

COUNT_MIN = 16
"""So many or more are read together."""
_COUNT_MAX = 4096
_SIZE_MAX = 16 * 1024
"""Of an entry on average: to copy one from its neighbours then costs less than a step for it."""
_GAP_BYTES_MAX = 1024
"""Between two frames: the record header of the next one, and perhaps a small record."""


class EntryRun(NamedTuple):
    """Entries of one ledger, ascending in one file; columns of equal length."""

    file_number: int
    entry_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @property
    def last_offset(self) -> int:
        """Where the last frame begins."""
        return int(self.offsets[-1])


def run_count(sizes: NDArray[np.int64], *, bytes_max: int) -> int:
    """Return how many entries to look up for a run that begins with these; 0: it is none.

    `sizes` has those of the first `COUNT_MIN` entries, fewer if there are no more.
    """
    count, size = len(sizes), int(sizes.sum())
    if count < COUNT_MIN or size > count * _SIZE_MAX:
        return 0
    return min(_COUNT_MAX, max(COUNT_MIN, 2 * bytes_max * count // size))


def first_run(
    entry_ids: NDArray[np.int64],
    offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    *,
    wanted: range,
    bytes_max: int,
    file_number: int,
) -> EntryRun | None:
    """Return the first `wanted` entries of those in a file, if they are many small neighbours.

    They are without a hole, and have at most `bytes_max` bytes.

    Args:
        entry_ids: from `wanted.start` on, ascending.
        offsets: of their frames in the file.
        sizes: of their frames.
        wanted: which entries are.
        bytes_max: of all frames.
        file_number: which file it is.
    """
    if wanted.step > 1:
        is_wanted = (entry_ids - wanted.start) % wanted.step == 0
        entry_ids, offsets, sizes = entry_ids[is_wanted], offsets[is_wanted], sizes[is_wanted]
    count = len(entry_ids)
    if count < COUNT_MIN:
        return None
    gaps = offsets[1:] - offsets[:-1] - sizes[:-1]
    is_next = (np.diff(entry_ids) == wanted.step) & (gaps >= 0) & (gaps <= _GAP_BYTES_MAX)
    is_good = np.concatenate(([entry_ids[0] == wanted.start], is_next))
    is_good &= np.cumsum(sizes) <= bytes_max
    count = count if is_good.all() else int(np.argmin(is_good))
    if count < COUNT_MIN or int(sizes[:count].sum()) > count * _SIZE_MAX:
        return None
    return EntryRun(file_number, entry_ids[:count], offsets[:count], sizes[:count])


def interleaved(headers: NDArray[np.void], run: FrameRun) -> memoryview:
    """Return each frame behind its header, in one buffer."""
    sizes = np.diff(run.bounds)
    head_bytes = headers.itemsize
    if (sizes == sizes[0]).all():
        records = np.empty((len(run), head_bytes + int(sizes[0])), np.uint8)
        records[:, :head_bytes] = headers.view(np.uint8).reshape(len(run), head_bytes)
        frames = np.frombuffer(run.payload, np.uint8)
        records[:, head_bytes:] = frames.reshape(len(run), int(sizes[0]))
        return records.reshape(-1).data
    data = headers.tobytes()
    pieces: list[bytes | memoryview] = []
    for number, frame in enumerate(run):
        pieces += (data[number * head_bytes : (number + 1) * head_bytes], frame)
    return memoryview(b"".join(pieces))


def joined(data: memoryview, run: EntryRun) -> FrameRun:
    """Return the frames of a run without what lies between them.

    `data` is the file from the beginning of the first frame to the end of the last one.
    """
    starts = run.offsets - run.offsets[0]
    size, step = int(run.sizes[0]), int(starts[1])
    count = len(starts)
    if (run.sizes == size).all() and (np.diff(starts) == step).all():
        frames = np.ndarray((count, size), np.uint8, data, strides=(step, 1))
        payload = frames.copy().reshape(-1).data
    else:
        ends = starts + run.sizes
        pieces = [
            data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]
        payload = memoryview(b"".join(pieces))
    return FrameRun.of_sizes(payload.toreadonly(), run.sizes)
