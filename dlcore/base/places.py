"""Places for a number of holders, which may change while some of them are held."""

from __future__ import annotations

import asyncio


class Places(asyncio.Semaphore):
    """At most `count` holders at once, others wait in order.

    With fewer places than are held, those that become free are gone until there are few enough.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._count = count
        self._excess = 0

    def release(self) -> None:
        """Give a place back."""
        if self._excess:
            self._excess -= 1
        else:
            super().release()

    def resize(self, count: int) -> None:
        """Let there be `count` places from now on."""
        more, self._count = count - self._count, count
        for _ in range(more):
            self.release()
        free = min(self._value, max(0, -more))
        self._value -= free
        self._excess += max(0, -more) - free
