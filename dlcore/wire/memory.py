"""Memory for received bytes: one scratch buffer, and large payloads' memory, used again.

Zeroed pages of the kernel cost as much as the copy of what is received into them; pages that were
touched a moment ago are in the cache besides.
"""

from __future__ import annotations

from sys import getrefcount
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SCRATCH_BYTES = 64 * 1024
_KEPT_BYTES_MAX = 16 * 1024 * 1024
"""What a reader of a log has on its way and ahead of its caller."""
_SIZE_MIN = 256 * 1024
"""Smaller payloads are for the C library to find memory for."""
_ROUND_BYTES = 64 * 1024
_WASTE_SHARE_MAX = 4
"""A payload leaves at most one part in so many of its memory unused."""
_UNUSED_REFERENCES = 3
"""To an array that no view refers to: the list's, a variable's and the counting function's."""


class ReceiveMemory:
    """What all connections of one event loop receive into.

    Every view of a received payload, an Arrow buffer too, refers to the array whose memory it is;
    so the count of references tells when that is free.

    Args:
        kept_bytes_max: of memory that is used again, whether it is in use or not.
    """

    def __init__(self, kept_bytes_max: int = _KEPT_BYTES_MAX) -> None:
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._kept_bytes_max = kept_bytes_max
        self._arrays: list[NDArray[np.uint8]] = []
        self.kept_bytes = 0

    def take(self, size: int) -> memoryview:
        """Return `size` bytes of memory, with anything in them."""
        if size < _SIZE_MIN:
            return np.empty(size, np.uint8).data
        for array in self._arrays:
            spare = len(array) - size
            is_right = 0 <= spare <= len(array) // _WASTE_SHARE_MAX
            if is_right and getrefcount(array) == _UNUSED_REFERENCES:
                return array.data[:size]
        array = np.empty(-(-size // _ROUND_BYTES) * _ROUND_BYTES, np.uint8)
        self._make_room(len(array))
        if self.kept_bytes + len(array) <= self._kept_bytes_max:
            self.kept_bytes += len(array)
            self._arrays.append(array)
        return array.data[:size]

    def _make_room(self, size: int) -> None:
        """Let go of unused memory of other sizes, the oldest first, if `size` bytes need it."""
        kept: list[NDArray[np.uint8]] = []
        for array in self._arrays:
            is_full = self.kept_bytes + size > self._kept_bytes_max
            if is_full and getrefcount(array) == _UNUSED_REFERENCES:
                self.kept_bytes -= len(array)
            else:
                kept.append(array)
        self._arrays = kept
