"""Changes of a log's settings: a running writer learns of them by a watch on their node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.metadata.following import NodeFollower

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.base.config import LogSettings
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogKey


class SettingsFollower(NodeFollower):
    """Calls `on_change` with the settings of a log, soon after each change, until it is closed."""

    def __init__(
        self, context: LogContext, log: LogKey, on_change: Callable[[LogSettings], None]
    ) -> None:
        self._logs = context.logs
        self._log = log
        self._on_change = on_change
        path, what = context.logs.paths_of(log).settings, f"settings of log={log.name}"
        super().__init__(context.store, path, self._read, what=what)

    async def _read(self) -> None:
        self._on_change(await self._logs.read_settings(self._log))
