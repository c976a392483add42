"""Memory for received bytes: one scratch buffer, and memory of large payloads, which is reused.

Fresh pages, which the kernel has to zero, cost as much as the copy of the received bytes into them.
Pages that were used a moment ago are also in the cache.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SCRATCH_BYTES = 64 * 1024
_KEPT_BYTES_MAX = 16 * 1024 * 1024
"""Bytes that a reader of a log has on the way and ahead of its caller."""
_SIZE_MIN = 256 * 1024
"""Smaller payloads get memory from the C library each time."""
_ROUND_BYTES = 64 * 1024
_WASTE_SHARE_MAX = 4
"""A payload leaves at most 1 / `_WASTE_SHARE_MAX` of its memory unused."""


class ReceiveMemory:
    """The memory that all connections of one event loop receive into.

    Memory is lent: each payload is received through a loan, an array object of its own that stands
    for the memory.  Each object that refers to the payload (a view, an Arrow or numpy array of it,
    a slice of these) holds the buffer of the loan, and with it the loan.  A weak reference shows
    when nothing holds the loan any more; then the memory can be lent again.  Holders may release it
    in any thread; only the event loop takes memory.

    Args:
        kept_bytes_max: most memory that is kept for reuse, whether it is lent or not.
    """

    def __init__(self, kept_bytes_max: int = _KEPT_BYTES_MAX) -> None:
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._kept_bytes_max = kept_bytes_max
        self._kept: list[_Kept] = []
        self.kept_bytes = 0

    def take(self, size: int) -> memoryview:
        """Return `size` bytes of memory with arbitrary contents."""
        # The C library reuses small blocks by itself; it returns large ones to the kernel.
        if size < _SIZE_MIN:
            return np.empty(size, np.uint8).data
        for kept in self._kept:
            spare = kept.size - size
            if 0 <= spare <= kept.size // _WASTE_SHARE_MAX and kept.is_free():
                return kept.lend(size)
        # Rounded up, so that the next payload of about this size fits too.
        kept = _Kept(-(-size // _ROUND_BYTES) * _ROUND_BYTES)
        self._make_room(kept.size)
        # Memory beyond the bound is lent once, and goes back to the C library with its last view.
        if self.kept_bytes + kept.size <= self._kept_bytes_max:
            self.kept_bytes += kept.size
            self._kept.append(kept)
        return kept.lend(size)

    def forget_free(self) -> None:
        """Release all memory that nothing refers to."""
        self._kept = [kept for kept in self._kept if not kept.is_free()]
        self.kept_bytes = sum(kept.size for kept in self._kept)

    def _make_room(self, size: int) -> None:
        """Release free memory of other sizes, the oldest first, if `size` bytes need it."""
        remaining: list[_Kept] = []
        for kept in self._kept:
            is_full = self.kept_bytes + size > self._kept_bytes_max
            if is_full and kept.is_free():
                self.kept_bytes -= kept.size
            else:
                remaining.append(kept)
        self._kept = remaining


class _Kept:
    """Memory that is lent to one payload at a time."""

    __slots__ = ("_array", "_loan", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._array = np.empty(size, np.uint8)
        self._loan: weakref.ref[NDArray[np.uint8]] | None = None

    def is_free(self) -> bool:
        """Return whether nothing refers to the last loan."""
        return self._loan is None or self._loan() is None

    def lend(self, size: int) -> memoryview:
        # Only the buffer of the loan is returned.  A slice of a numpy array refers to the base of
        # that array, so a slice of the loan would not hold the loan.
        loan = self._array[:size]
        self._loan = weakref.ref(loan)
        return loan.data
