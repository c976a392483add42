"""Messages of older records that stay in memory for the next readers of the same records.

A message that one reader of older records was sent is kept under the position where it begins, and
the next reader at this position gets it without a request to a bookie.  Readers that begin at the
same position find the same messages one after the other, because they divide entries in the same
way: consumers that start again, and a query that is repeated.

Promises:

* What is kept takes at most `bytes_max`, which is what rings leave of their budget.
* A message is kept for at most `KEPT_S`.  A reader may get records from here that were truncated,
  or whose extents were replaced, after it began.  One that begins later gets none of them, because
  replaced extents are another series.
* A message that was used within `UNUSED_S` does not give way to a new one.  A series larger than
  `bytes_max`, read again and again, would otherwise lose each message before its next use.

There is no I/O and no clock here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sized

    from dlcore.base.ids import DLSN

KEPT_S = 60.0
UNUSED_S = 5.0
OWN_BYTES = 1024
"""About so much a kept message takes beside its bytes: its places here, and its objects."""


@dataclass(frozen=True, slots=True)
class Series:
    """The messages that readers of one kind divide a log into."""

    log_id: str
    log: str
    view: bytes
    """The key of the readers' view."""
    rewrites: int
    """How often extents of the log had been replaced."""


Key: TypeAlias = "tuple[Series, DLSN]"
"""A series, and the position of a message's first record."""


@dataclass(slots=True)
class _Kept:
    message: Sized
    end: DLSN
    kept_s: float
    used_s: float

    @property
    def size_bytes(self) -> int:
        return len(self.message) + OWN_BYTES


class KeptMessages:
    """Messages of older records, by the position where they begin."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.size_bytes = 0
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()  # in the order of their last use

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Key, message: Sized, end: DLSN, now_s: float) -> None:
        """Keep a message with all records from a position to `end`, if there is room."""
        if key in self._kept:
            return
        kept = _Kept(message, end, now_s, now_s)
        if kept.size_bytes > self._bytes_max:
            return
        while self.size_bytes + kept.size_bytes > self._bytes_max:
            oldest = next(iter(self._kept))
            if self._kept[oldest].used_s > now_s - UNUSED_S:
                return
            self._drop(oldest)
        self._kept[key] = kept
        self.size_bytes += kept.size_bytes

    def find(self, key: Key, until: DLSN, now_s: float) -> tuple[Sized, DLSN] | None:
        """Return the message at a position, and its end, if it has no records behind `until`."""
        kept = self._kept.get(key)
        if kept is None or kept.end > until:
            return None
        if kept.kept_s <= now_s - KEPT_S:
            self._drop(key)
            return None
        kept.used_s = now_s
        self._kept.move_to_end(key)
        return kept.message, kept.end

    def resize(self, bytes_max: int) -> None:
        """Keep this many bytes from now on; what is too much goes at once."""
        self._bytes_max = bytes_max
        while self.size_bytes > bytes_max:
            self._drop(next(iter(self._kept)))

    def expire(self, now_s: float) -> None:
        """Drop what was kept for too long."""
        for key in [key for key, kept in self._kept.items() if kept.kept_s <= now_s - KEPT_S]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        self.size_bytes -= self._kept.pop(key).size_bytes
