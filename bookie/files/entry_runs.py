"""Many entries at once: runs in one file, cut out of its bytes and put into them; listed ranges.

Numpy does the work of all entries at once.  Only large frames, and small ones of different sizes,
take a Python step each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dlcore.wire.frames import FrameRun
from dlcore.wire.port import EntryRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


COUNT_MAX = 4096
"""Most entries that are looked up at once: several chunks of 1 KB entries, and not too many large
ones."""
_GAP_BYTES_MAX = 1024
"""Largest gap between two frames of a run: the next record's header, and perhaps a small record."""
_COPIED_BYTES_MAX = 8 * 1024
"""Average frame size up to which copying a frame costs less than a Python step for it."""
_GAP = memoryview(bytearray(_GAP_BYTES_MAX))
"""Buffer for bytes between frames, which are read and ignored."""


class EntryRun(NamedTuple):
    """Entries of one ledger, ascending and close together in one file; columns of equal length."""

    file_number: int
    entry_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    sums: NDArray[np.int64]
    """Running sums of the sizes, each with its own; they may start from any number."""

    @property
    def last_offset(self) -> int:
        """Offset of the last frame."""
        return int(self.offsets[-1])

    @property
    def span_bytes(self) -> int:
        """Bytes of the file from the first frame to the end of the last one."""
        return int(self.offsets[-1] + self.sizes[-1] - self.offsets[0])

    @property
    def frames_bytes(self) -> int:
        """Bytes of all frames."""
        return int(self.sums[-1] - self.sums[0] + self.sizes[0])

    @property
    def is_copied(self) -> bool:
        """Whether it is faster to read the whole span, and to copy the frames out of it."""
        # Each buffer of a scattered read is a Python object, and the kernel takes only 1,024 of
        # them.
        return self.frames_bytes <= len(self.sizes) * _COPIED_BYTES_MAX

    def split(self, bytes_max: int, last_entry_id: int) -> tuple[EntryRun, EntryRun | None]:
        """Return the first entries, and the rest if it is not smaller than these, else None.

        The first ones have at most `bytes_max` bytes, or are one entry.  Neither part begins above
        `last_entry_id`, and no entry of the first part is above it.
        """
        sums = self.sums
        start = sums[0] - self.sizes[0]
        last = int(self.entry_ids.searchsorted(last_entry_id, "right"))
        count = min(last, max(1, int(sums.searchsorted(start + bytes_max, "right"))))
        has_rest = count < last and sums[-1] - sums[count - 1] >= sums[count - 1] - start
        return self._part(slice(count)), self._part(slice(count, None)) if has_rest else None

    def before(self, entry_id: int) -> EntryRun | None:
        """Return the entries below `entry_id`, None if there are none."""
        count = int(self.entry_ids.searchsorted(entry_id))
        return self._part(slice(count)) if count else None

    def _part(self, part: slice) -> EntryRun:
        _, entry_ids, offsets, sizes, sums = self
        return EntryRun(self.file_number, entry_ids[part], offsets[part], sizes[part], sums[part])


def first_run(
    entry_ids: NDArray[np.int64],
    offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    *,
    wanted: range,
    file_number: int,
) -> EntryRun | None:
    """Return the first `wanted` entries of a file as far as they follow each other.

    None: the file does not hold the first one.

    Args:
        entry_ids: ids of the file's entries from `wanted.start` on, ascending.
        offsets: of their frames in the file.
        sizes: of their frames.
        wanted: ids of the entries to return.
        file_number: the number of the file.
    """
    if wanted.step > 1:
        is_wanted = (entry_ids - wanted.start) % wanted.step == 0
        entry_ids, offsets, sizes = entry_ids[is_wanted], offsets[is_wanted], sizes[is_wanted]
    if not len(entry_ids) or entry_ids[0] != wanted.start:
        return None
    gaps = offsets[1:] - offsets[:-1] - sizes[:-1]
    is_next = (np.diff(entry_ids) == wanted.step) & (gaps >= 0) & (gaps <= _GAP_BYTES_MAX)
    count = len(entry_ids) if is_next.all() else int(np.argmin(is_next)) + 1
    sizes = sizes[:count]
    return EntryRun(file_number, entry_ids[:count], offsets[:count], sizes, np.cumsum(sizes))


def interleaved(headers: NDArray[np.void], run: FrameRun) -> memoryview:
    """Return all frames in one buffer, each after its header."""
    sizes = run.sizes
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
    """Return the frames of a run without the bytes between them.

    `data` is the file from the beginning of the first frame to the end of the last one.
    """
    starts = run.offsets - run.offsets[0]
    size = int(run.sizes[0])
    count = len(starts)
    step = int(starts[1]) if count > 1 else size
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


def scattered(run: EntryRun) -> tuple[FrameRun, list[memoryview]]:
    """Return frames that are still to be read, and the buffers to read them into.

    The buffers take the file from the beginning of the first frame to the end of the last one.
    They place the frames one after the other without a copy.
    """
    # Not zeroed: the buffer is handed out only after every byte was read.
    payload = np.empty(run.frames_bytes, np.uint8).data
    frames = FrameRun.of_sizes(payload.toreadonly(), run.sizes)
    gaps = [0, *(run.offsets[1:] - run.offsets[:-1] - run.sizes[:-1]).tolist()]
    bounds = frames.bounds.tolist()
    buffers: list[memoryview] = []
    for gap, start, end in zip(gaps, bounds[:-1], bounds[1:], strict=True):
        if gap:
            # All reads share it, in several threads: its content does not matter.
            buffers.append(_GAP[:gap])
        buffers.append(payload[start:end])
    return frames, buffers


class RangePage(NamedTuple):
    """Ranges found in one step; further ranges are looked up with the next page."""

    firsts: list[int]
    lasts: list[int]
    next_entry_id: int | None
    """First entry of the next step; None: there are no more ranges."""


class ListedRanges:
    """Ascending ranges; a striped ledger may have a million of them.

    Args:
        look: returns the page that begins at an entry.
    """

    def __init__(self, look: Callable[[int], RangePage]) -> None:
        self._look = look

    def pages(self) -> Iterator[list[tuple[int, int]]]:
        """Yield lists of (first, last); each list is the result of one bounded step, or empty."""
        next_entry_id: int | None = 0
        # Last range of the page before, which may continue in the next page.
        last: tuple[int, int] | None = None
        while next_entry_id is not None:
            firsts, lasts, next_entry_id = self._look(next_entry_id)
            page = list(zip(firsts, lasts, strict=True))
            if last is not None and page and page[0][0] == last[1] + 1:
                page[0] = last[0], page[0][1]
            elif last is not None:
                page.insert(0, last)
            last = page.pop() if page else None
            yield page
        yield [] if last is None else [last]

    def __iter__(self) -> Iterator[EntryRange]:
        for page in self.pages():
            for first, last in page:
                yield EntryRange(first_entry_id=first, last_entry_id=last)


def joined_ranges(
    firsts: NDArray[np.int64], lasts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ascending ranges, after joining those that overlap or touch."""
    if not len(firsts):
        return firsts, lasts
    reach = np.maximum.accumulate(lasts)
    starts = firsts[1:] - 1 > reach[:-1]
    return firsts[np.r_[True, starts]], reach[np.r_[starts, True]]
