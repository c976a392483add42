"""Giving memory back that sends to readers have freed, once they have taken much of it.

The C library keeps what is freed for what comes next, and of its heaps only the ends are ever given
back by themselves.  After many clients that took nothing that would be hundreds of megabytes.
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
"""What was freed is given back so often while memory is short."""
CALM_S = 30.0
"""So long after it was used what is free is given back, and what is kept for later as well."""


class Relief:
    """Gives memory back for one proxy.

    Args:
        forget: lets go of memory that is kept and that nothing uses.
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
        if self._was_short:  # else the pause is not worth it
            gc.collect()
        self._was_short = False
        self._forget()
        _give_back_aside()

    def close(self) -> None:
        """Give nothing back any more."""
        for timer in (self._look, self._calm):
            if timer is not None:
                timer.cancel()
        self._look = self._calm = None


def _give_back_aside() -> None:
    # It takes up to some ten milliseconds, and tells the event loop nothing.
    name = "giving memory back"
    threading.Thread(target=give_back_what_is_free, name=name, daemon=True).start()
