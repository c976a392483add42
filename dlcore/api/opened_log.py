"""A log that was opened: which one it is, and whether it may still be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.closing import AsyncClosing
from dlcore.base.errors import AlreadyClosedError, SchemaMismatchError, UnsupportedError

if TYPE_CHECKING:
    from typing import NoReturn

    from dlcore.log.metadata.values import LogKey


class OpenedLog(AsyncClosing):
    """The base of all that a log offers; a back end sets `_log`."""

    _log: LogKey
    _closed = False

    @property
    def name(self) -> str:
        """The log's name."""
        return self._log.name

    @property
    def log_id(self) -> str:
        """The log's identity; a log that is deleted and created again has another one."""
        return self._log.log_id

    def _require_open(self) -> None:
        if self._closed:
            raise AlreadyClosedError(f"the manager of log {self.name!r} is closed")

    def _unsupported(self, operation: str) -> NoReturn:
        raise UnsupportedError(
            f"log {self.name!r}: proxies do not offer `{operation}`; open the namespace directly, "
            "as distributedlog://…"
        )

    def _of_another_kind(self, *, typed: bool) -> SchemaMismatchError:
        """Return the error for a use of a log that is `typed`, or is not, as the other kind."""
        return SchemaMismatchError(
            f"log {self.name!r} was created {'with' if typed else 'without'} a schema, which "
            f"makes it a log of {'typed columns' if typed else 'bytes'} for good"
        )

    async def aclose(self) -> None:
        """Stop using the log; its writers and readers must be closed by themselves."""
        self._closed = True
