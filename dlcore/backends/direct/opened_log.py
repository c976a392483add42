"""A log over a metadata store and bookies that was opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from dlcore.api.opened_log import OpenedLog
from dlcore.base.config import LogConfig, require_kind
from dlcore.base.errors import UnsupportedError
from dlcore.log.reading.opening import ReaderOpener

if TYPE_CHECKING:
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogMetadata, VersionedHead
    from dlcore.log.reading.snapshot import LogFollower


class DirectOpenedLog(OpenedLog):
    """The adapters and the stored metadata of one log, on which all its parts rest."""

    _log: LogMetadata

    def __init__(
        self,
        context: LogContext,
        log: LogMetadata,
        config: LogConfig,
        known: LogFollower | None = None,
    ) -> None:
        """Open a log; readers take its metadata from `known`, if given, instead of reading it."""
        require_kind("config", config, LogConfig)
        self._context = context
        self._config = config
        self._log = log
        self.readers = ReaderOpener(context, log, config, known)
        """Opens readers, also those of parts, for proxies."""

    @override
    def _require_open(self) -> None:
        self._context.lifetime.require_open()
        super()._require_open()

    async def _read(self) -> VersionedHead:
        self._require_open()
        return await self._context.logs.read(self._log)

    def _require_typed(self, *, typed: bool = True) -> None:
        if self._log.typed is not typed:
            raise self._of_another_kind(typed=not typed)

    def _only_over_proxies(self, argument: str) -> UnsupportedError:
        return UnsupportedError(
            f"log {self.name!r}: {argument} is for clients of proxies; open the namespace by "
            "grpc://…, or leave the argument out"
        )
