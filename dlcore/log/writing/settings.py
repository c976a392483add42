"""Changes of a log's settings: a running writer learns of them by a watch on their node."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dlcore.base.background import BackgroundTasks
from dlcore.base.errors import DLError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.base.config import LogSettings
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogKey

logger = logging.getLogger(__name__)


class SettingsFollower:
    """Calls `on_change` with the settings of a log, soon after each change, until it is closed."""

    def __init__(
        self, context: LogContext, log: LogKey, on_change: Callable[[LogSettings], None]
    ) -> None:
        self._logs = context.logs
        self._log = log
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._unsubscribe = context.store.watch(
            context.logs.paths_of(log).settings, self._changed.set, children=False
        )
        self._tasks = BackgroundTasks()
        self._tasks.start(self._run(), name=f"log-settings-{log.name}")

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                self._on_change(await self._logs.read_settings(self._log))
            except DLError as error:
                # The known settings stay in force; the watch fires again after a reconnection.
                logger.warning("settings of log=%s are not known: %s", self._log.name, error)

    async def aclose(self) -> None:
        """Stop following."""
        self._unsubscribe()
        await self._tasks.aclose()
