"""The budget of reads of cold objects, for all readers of a client or proxy together.

Theory of operation.  A part is what one request to a store brings: a row group.  A reader that
waits for its next part *wants* it; others it may read *ahead*.  A part has a slot while it is read
and decoded, and bytes from the beginning until it is given to its reader.  Wanted parts wait in
turn for both.  Parts ahead never wait: they are read if there is room now, or not ahead.

A reader may stop to take its parts at any time, and what was read ahead for it stays.  Therefore a
slot and a quarter of the bytes are kept for parts that are wanted, whose readers take them at once:
every wanted part is read some time, whatever other readers do.  Each reader has at most as
many bytes ahead as it leaves to others.

Promises:

* No more parts than `reads_at_once` are read at the same time.
* No more than `bytes_max` are held, and one wanted part more if it alone is as large.
* Wanted parts are read in the order in which they were asked for.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Part:
    """A part of an object, for a reader: its bytes in memory once it is decoded."""

    reader: object
    size_bytes: int
    is_ahead: bool = False
    has_slot: bool = False
    has_bytes: bool = False


class ReadBudget:
    """The slots and bytes.

    Args:
        reads_at_once: the number of slots.
        bytes_max: the number of bytes.
    """

    def __init__(self, *, reads_at_once: int, bytes_max: int) -> None:
        self._reads_at_once = reads_at_once
        self._bytes_max = bytes_max
        self._ahead_max = bytes_max - bytes_max // 4
        self._waiting: deque[Part] = deque()
        self._slots = 0
        self._wanted_bytes = 0
        self._ahead_bytes = 0
        self._ahead_of: Counter[object] = Counter()

    def want(self, part: Part) -> list[Part]:
        """Ask for a part whose reader waits; return the parts that are to be read now, in order."""
        self._waiting.append(part)
        return self._grant()

    def ahead(self, part: Part) -> bool:
        """Return whether a part may be read ahead, which is to be read now then."""
        size = part.size_bytes
        left = self._ahead_max - self._ahead_bytes - size
        is_fair = self._ahead_of[part.reader] + size <= left
        fits = self._ahead_bytes + self._wanted_bytes + size <= self._bytes_max
        if self._waiting or self._slots >= self._reads_at_once - 1 or not is_fair or not fits:
            return False
        part.is_ahead = True
        self._ahead_bytes += size
        self._ahead_of[part.reader] += size
        self._take(part)
        return True

    def read(self, part: Part) -> list[Part]:
        """Take back the slot of a part that was read; return the parts that are to be read now."""
        if part.has_slot:
            part.has_slot = False
            self._slots -= 1
        return self._grant()

    def give_back(self, part: Part) -> list[Part]:
        """Take back all that a part has, or waits for; return the parts that are to be read now."""
        if part in self._waiting:
            self._waiting.remove(part)
        if part.has_bytes:
            part.has_bytes = False
            if part.is_ahead:
                self._ahead_bytes -= part.size_bytes
                self._ahead_of[part.reader] -= part.size_bytes
                if not self._ahead_of[part.reader]:
                    del self._ahead_of[part.reader]
            else:
                self._wanted_bytes -= part.size_bytes
        return self.read(part)

    def _grant(self) -> list[Part]:
        granted = []
        while self._waiting and self._slots < self._reads_at_once and self._fits(self._waiting[0]):
            part = self._waiting.popleft()
            self._wanted_bytes += part.size_bytes
            self._take(part)
            granted.append(part)
        return granted

    def _fits(self, part: Part) -> bool:
        held = self._wanted_bytes + self._ahead_bytes
        # One that is alone is read, however large it is, and whatever lies ahead of others.
        return held + part.size_bytes <= self._bytes_max or not self._wanted_bytes

    def _take(self, part: Part) -> None:
        part.has_slot = part.has_bytes = True
        self._slots += 1

    def validate(self) -> None:
        """Assert all that holds between two calls; tests call it after each."""
        assert 0 <= self._slots <= self._reads_at_once
        assert 0 <= self._ahead_bytes <= self._ahead_max
        assert self._ahead_bytes == self._ahead_of.total()
        assert self._wanted_bytes >= 0
