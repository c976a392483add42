"""Changes that the console makes to logs, each as the user who started it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from dlcore.backends.flight.endpoint import Endpoint, token_at
from dlcore.backends.flight.planning import act
from dlcore.base.errors import ConditionFailedError, ConfigurationError, UnsupportedError
from dlcore.base.ids import DLSN
from dlcore.flight import actions
from dlcore.flight.requests import LogRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.api.log import DistributedLogManager
    from dlcore.api.namespace import Namespace
    from dlcore.base.access.tls import TlsFiles

    Change = Callable[["Asked"], Awaitable[dict[str, Any]]]

_PATIENCE_S = 30.0


class Asked(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a change; `log_id` is that of the log that the user saw."""

    log: str
    log_id: str
    dlsn: str | None = None
    subscriber: str | None = None
    changes: dict[str, Any] = {}


class Changing:
    """Changes logs; each method answers what it did.

    Args:
        namespace: the logs.
        endpoint: the proxies; None for a direct namespace.
        tls: the files for connections to proxies.
        token: gives the user's token.
    """

    def __init__(
        self,
        namespace: Namespace,
        *,
        endpoint: str | None,
        tls: TlsFiles | None,
        token: Callable[[], str] | None,
    ) -> None:
        self._namespace = namespace
        self._endpoint = endpoint
        self._tls = tls
        self._token = token

    async def truncate(self, asked: Asked) -> dict[str, Any]:
        """Drop the records before a position.  Raises: DLError."""
        if asked.dlsn is None:
            raise ConfigurationError("dlsn is missing: expected the position to truncate before")
        position = DLSN.parse(asked.dlsn)
        async with await self._open(asked) as manager:
            return {"changed": await manager.truncate(position)}

    async def seal(self, asked: Asked) -> dict[str, Any]:
        """Mark the end of a log.  Raises: DLError."""
        async with await self._open(asked) as manager:
            await manager.mark_end_of_stream()
        return {"changed": True}

    async def delete(self, asked: Asked) -> dict[str, Any]:
        """Delete a log.  Raises: DLError."""
        async with await self._open(asked):
            pass
        await self._namespace.delete_log(asked.log)
        return {"changed": True}

    async def settings(self, asked: Asked) -> dict[str, Any]:
        """Change settings of a log.  Raises: DLError."""
        async with await self._open(asked) as manager:
            await manager.update_settings(**asked.changes)
        return {"changed": True}

    async def forget(self, asked: Asked) -> dict[str, Any]:
        """Forget a subscriber.  Raises: DLError."""
        async with await self._open(asked) as manager:
            return {"changed": await manager.delete_subscription(asked.subscriber or "")}

    async def release(self, asked: Asked) -> dict[str, Any]:
        """Make the proxy that owns a log release it.  Raises: DLError."""
        if self._endpoint is None:
            raise UnsupportedError("only proxies own logs: start the console with --endpoint")
        request = LogRequest(log=asked.log)
        async with self._calls(self._endpoint) as calls:
            owner = await act(calls, actions.OWNER, request)
        async with self._calls(owner.location or self._endpoint) as calls:
            return {"changed": (await act(calls, actions.RELEASE, request)).released}

    def _calls(self, location: str) -> Endpoint:
        token = token_at(location, self._token, endpoint=self._endpoint, tls=self._tls)
        return Endpoint(location, patience_s=_PATIENCE_S, tls=self._tls, token=token)

    async def _open(self, asked: Asked) -> DistributedLogManager:
        manager = await self._namespace.open_log(asked.log)
        if manager.log_id != asked.log_id:
            await manager.aclose()
            raise ConditionFailedError(
                f"log {asked.log!r} is another one than the page shows: it was deleted and created "
                "again; reload the page"
            )
        return manager
