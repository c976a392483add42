"""The limit on the bytes and entries that all writers of a client have in flight together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class InFlight:
    """Bounds the entries of all writers that some bookie has not answered.

    A writer that finds the limit reached waits in a queue, and no other passes it.  A writer that
    has nothing in flight may always append one entry.  Therefore a writer whose bookies do not
    answer does not block the others for good.
    """

    def __init__(self, *, bytes_max: int, entries_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries_max = entries_max
        self.size_bytes = 0
        self.entry_count = 0
        self.line: dict[Share, None] = {}

    @property
    def has_room(self) -> bool:
        """Whether bytes and entries are both below their limits."""
        return self.size_bytes < self._bytes_max and self.entry_count < self._entries_max

    def wake_first(self) -> None:
        """Wake the first writer in the queue to check again."""
        for first in self.line:
            first.wake()
            return


class Share:
    """One writer's bytes and entries in flight; `wake` makes it check again if it may append."""

    def __init__(self, total: InFlight, wake: Callable[[], None]) -> None:
        self._total = total
        self._size_bytes = 0
        self._entry_count = 0
        self.wake = wake

    def changed(self, *, size_bytes: int, entry_count: int) -> None:
        """Record the bytes and entries that the writer has in flight now."""
        total = self._total
        more_bytes, more_entries = size_bytes - self._size_bytes, entry_count - self._entry_count
        total.size_bytes += more_bytes
        total.entry_count += more_entries
        self._size_bytes, self._entry_count = size_bytes, entry_count
        if more_bytes < 0 or more_entries < 0:
            total.wake_first()

    def may_append(self) -> bool:
        """Return whether the writer may append an entry now; if not, it is in the queue now."""
        total = self._total
        if self._entry_count == 0 or (total.has_room and next(iter(total.line), self) is self):
            return True
        total.line.setdefault(self)
        return False

    def leave(self) -> None:
        """Leave the queue, if the writer is in it, and wake the first one."""
        if self in self._total.line:
            del self._total.line[self]
            self._total.wake_first()
