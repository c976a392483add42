"""Giving memory back that sends to readers have freed, once they have taken much of it.

The C library keeps what is freed for what comes next, and of its heaps only the ends are ever given
back by themselves.  After many clients that took nothing that would be hundreds of megabytes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import TYPE_CHECKING

from dlcore.kept_memory import give_back_what_is_free

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""What was freed is given back so often while memory is short."""
CALM_S = 30.0
"""After so long without that, what is kept for later goes as well."""


class Relief:
    """Gives memory back for one proxy.

    Args:
        forget: lets go of memory that is kept and that nothing uses.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._look: asyncio.TimerHandle | None = None
        self._calm: asyncio.TimerHandle | None = None

    def needed(self) -> None:
        """Note that memory is short now."""
        if self._look is None:
            self._look = self._loop.call_later(LOOK_S, self._give_back)
            if self._calm is not None:
                self._calm.cancel()
            self._calm = self._loop.call_later(LOOK_S + CALM_S, self._give_all_back)

    def _give_back(self) -> None:
        self._look = None
        self._loop.run_in_executor(None, give_back_what_is_free)

    def _give_all_back(self) -> None:
        self._calm = None
        gc.collect()
        self._forget()
        self._give_back()

    def close(self) -> None:
        """Give nothing back any more."""
        for timer in (self._look, self._calm):
            if timer is not None:
                timer.cancel()
        self._look = self._calm = None
