"""The return of freed memory to the system, after sends to readers have used much of it.

The C library keeps freed memory for later use, and by itself returns only the ends of its heaps.
After many clients that received nothing, it would keep hundreds of megabytes.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING

from dlcore.base.kept_memory import give_back_what_is_free

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_S = 0.5
"""Interval of returning freed memory while memory is short."""
CALM_S = 30.0
"""Time after a use of memory at which all free memory is returned, with buffers kept for reuse."""


class Relief:
    """Returns the memory of one proxy to the system.

    Args:
        forget: frees buffers that are kept for reuse and not in use.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._look: asyncio.TimerHandle | None = None
        self._calm: asyncio.TimerHandle | None = None
        self._was_short = False

    def used(self) -> None:
        """Note that memory is used now."""
        if self._calm is None:
            self._calm = asyncio.get_running_loop().call_later(CALM_S, self._give_all_back)

    def needed(self) -> None:
        """Note that memory is short now."""
        self.used()
        self._was_short = True
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._give_back)

    def _give_back(self) -> None:
        self._look = None
        _give_back_aside()

    def _give_all_back(self) -> None:
        self._calm = None
        if self._was_short:  # else the pause of a collection is not worth it
            gc.collect()
        self._was_short = False
        self._forget()
        _give_back_aside()

    def close(self) -> None:
        """Stop returning memory."""
        for timer in (self._look, self._calm):
            if timer is not None:
                timer.cancel()
        self._look = self._calm = None


def _give_back_aside() -> None:
    # In a thread, since it takes up to some ten milliseconds.  No caller waits for its end.
    name = "giving memory back"
    threading.Thread(target=give_back_what_is_free, name=name, daemon=True).start()
