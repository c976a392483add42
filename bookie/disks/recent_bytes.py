"""The last bytes of a file that is appended to: where writes come from, and who follows reads.

A ring of memory holds byte `offset` of the file at `offset` modulo its size.  So blocks of the file
are aligned in memory, as direct writes must be; the last block, partly filled, is there when the
next append begins in it; and whoever reads the end of the file needs neither device nor page cache.
Nothing is allocated per append or per entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterable, Iterator, Sequence

    from dlcore.wire.digest import BytesLike

BLOCK_BYTES = 4096
"""What direct writes are aligned to, in the file and in memory."""
_SMALL_BYTES = 4096
"""Buffers smaller than this on average are joined before they are copied: that costs less than a
copy of each."""
_PIECES = 4
"""No write is longer than the ring divided by this: two batches and more can still be read."""
_ZEROS = bytes(BLOCK_BYTES)


def rounded_up(size: int) -> int:
    """Return `size` in whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


class RecentBytes:
    """The ring of one file; filled by one append at a time, in any thread.

    Args:
        ring: whole pages, and a power of two of them.
        block: the bytes of the file's last block, as far as it is filled.
        offset: where the file ends.
    """

    def __init__(self, ring: mmap.mmap, block: BytesLike, offset: int) -> None:
        self.ring = ring
        self._view = memoryview(ring)
        self._first = offset - len(block)
        self.end = offset
        """Where the file ends, with all that is durable."""
        self._filled = offset
        self._put(memoryview(block), self._first)

    def fill(
        self, buffers: Sequence[BytesLike], offset: int, size: int
    ) -> Iterable[tuple[int, list[memoryview]]]:
        """Take `buffers`, `size` bytes that follow the file's end, which is `offset`.

        Yield (offset, memory) of what to write, one after the other: whole blocks, the first one
        with what it held before, the last one padded with zeros.
        """
        end = self._filled = rounded_up(offset + size)
        if len(buffers) * _SMALL_BYTES <= size:
            return self._fill_pieces(buffers, offset)
        data = b"".join(buffers)
        start = offset - offset % BLOCK_BYTES
        at = start % len(self.ring)
        memory = self._view[at : at + end - start]
        if len(memory) < end - start or not self.is_one_piece(offset, size):
            return self._fill_pieces([data], offset)
        filled = offset - start + size
        memory[offset - start : filled] = data
        memory[filled:] = _ZEROS[: len(memory) - filled]
        return [(start, [memory])]

    def _fill_pieces(
        self, buffers: Sequence[BytesLike], offset: int
    ) -> Iterator[tuple[int, list[memoryview]]]:
        start = offset - offset % BLOCK_BYTES
        piece_bytes = len(self.ring) // _PIECES
        for buffer in buffers:
            data = memoryview(buffer)
            while data:
                if offset == start + piece_bytes:
                    yield start, self._memory(start, offset)
                    start = offset
                part = data[: start + piece_bytes - offset]
                self._put(part, offset)
                offset += len(part)
                data = data[len(part) :]
        self._put(memoryview(_ZEROS)[: self._filled - offset], offset)
        yield start, self._memory(start, self._filled)

    def is_one_piece(self, offset: int, size: int) -> bool:
        """Return whether an append is one write."""
        return offset % BLOCK_BYTES + size <= len(self.ring) // _PIECES

    def note_written(self, end: int) -> None:
        """Let bytes up to `end` be read: they are durable."""
        self.end = end

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> bool:
        """Fill buffers, one after the other; False if not all of it is here."""
        if offset < self._first or offset + sum(map(len, buffers)) > self.end:
            return False
        at = offset
        for buffer in buffers:
            filled = 0
            for memory in self._memory(at, at + len(buffer)):
                buffer[filled : filled + len(memory)] = memory
                filled += len(memory)
            at += filled
        # Another thread may have begun to fill meanwhile: it said so before it changed anything.
        return offset >= self._filled - len(self.ring)

    def _put(self, data: memoryview, offset: int) -> None:
        for memory in self._memory(offset, offset + len(data)):
            memory[:] = data[: len(memory)]
            data = data[len(memory) :]

    def _memory(self, start: int, end: int) -> list[memoryview]:
        """Return the memory of a range, in two parts if the ring ends within it."""
        at = start % len(self.ring)
        first = self._view[at : at + end - start]
        rest = end - start - len(first)
        return [first, self._view[:rest]] if rest else [first]
