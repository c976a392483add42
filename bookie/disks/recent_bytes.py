"""A ring buffer with the last bytes of a file: appends are written from it, and followers read it.

The ring holds byte `offset` of the file at `offset` modulo the ring's size.  This has four uses.
Blocks of the file are aligned in memory, as direct writes must be.  The last block, partly filled,
is in memory when the next append continues it.  Reads at the end of the file need neither the
device nor the page cache.  Nothing is allocated per append or per entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterable, Iterator, Sequence

    from dlcore.wire.frames import BytesLike

BLOCK_BYTES = 4096
"""Alignment of direct writes, in the file and in memory."""
_SMALL_BYTES = 4096
"""Buffers that are smaller than this on average are joined before the copy: one join costs less
than many small copies."""
_PIECES = 4
"""No write is longer than the ring divided by this, so that older bytes can still be read."""
_ZEROS = bytes(BLOCK_BYTES)


def rounded_up(size: int) -> int:
    """Return `size` in whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


class RecentBytes:
    """The ring of one file; one append at a time fills it, in any thread.

    Args:
        ring: memory of whole pages; their number is a power of two.
        block: the bytes of the file's last, partly filled block.
        offset: the end of the file.
    """

    def __init__(self, ring: mmap.mmap, block: BytesLike, offset: int) -> None:
        self.ring = ring
        self._view = memoryview(ring)
        self._first = offset - len(block)
        self.end = offset
        """The end of the durable bytes."""
        # The end of the bytes in the ring: during an append it is ahead of `end`.
        self._filled = offset
        self._put(memoryview(block), self._first)

    def fill(
        self, buffers: Sequence[BytesLike], offset: int, size: int
    ) -> Iterable[tuple[int, list[memoryview]]]:
        """Copy `buffers`, `size` bytes in all, into the ring at the file's end, which is `offset`.

        Returns: pairs (offset, memory) to write in this order.  They are whole blocks: the first
        one begins with the bytes that it held before, the last one is padded with zeros.  Write
        each pair before the next one is taken, which may overwrite memory of the ring.
        """
        # Set before any byte changes: `read_into` in another thread relies on this order.
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
        """Return whether the append of `size` bytes at `offset` is a single write."""
        return offset % BLOCK_BYTES + size <= len(self.ring) // _PIECES

    def note_written(self, end: int) -> None:
        """Allow reads up to `end`: these bytes are durable now."""
        self.end = end

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> bool:
        """Fill buffers, one after the other; False if the ring does not hold all these bytes."""
        if offset < self._first or offset + sum(map(len, buffers)) > self.end:
            return False
        at = offset
        for buffer in buffers:
            filled = 0
            for memory in self._memory(at, at + len(buffer)):
                buffer[filled : filled + len(memory)] = memory
                filled += len(memory)
            at += filled
        # An append in another thread may have overwritten these bytes during the copy.  It moves
        # `_filled` first, so this check finds it.
        return offset >= self._filled - len(self.ring)

    def _put(self, data: memoryview, offset: int) -> None:
        for memory in self._memory(offset, offset + len(data)):
            memory[:] = data[: len(memory)]
            data = data[len(memory) :]

    def _memory(self, start: int, end: int) -> list[memoryview]:
        """Return the memory of a range, in two parts if the range wraps around the ring's end."""
        at = start % len(self.ring)
        first = self._view[at : at + end - start]
        rest = end - start - len(first)
        return [first, self._view[:rest]] if rest else [first]
