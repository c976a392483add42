"""Looks at a cluster for `dlog top`: each part within a time limit, beside the others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dlcore.base.access.tls_in_use import TlsInUse
from dlcore.base.background import together
from dlcore.base.errors import DLError
from dlcore.log.metadata.values import LockHolder, LogKey
from dlcore.log.reading.subscriptions import list_subscriptions
from dlcore.metadata.stored import decode_or_tell
from dlcore.ops.autorecovery.maintenance import Maintenance
from dlcore.ops.diagnosis.asking import PATIENCE_S, ask_bookies, ask_proxies
from dlcore.ops.diagnosis.top import Look
from dlcore.wire.control import ControlClient

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.ids import DLSN
    from dlcore.flight.answers import ProxyHealth
    from dlcore.ops.autorecovery.maintenance import RecoveryStatus
    from dlcore.ops.diagnosis.asking import Answer
    from dlcore.wire.control import BookieInfo

PART_S = 2 * PATIENCE_S
LOGS_MAX = 200
"""Most logs of one look: each costs some requests to the metadata store."""


class Looker:
    """Looks at one namespace.

    Args:
        namespace: the namespace; the caller closes it.
        prefix: how the names of the logs begin.
        tls: certificates for bookies and proxies.
        token: returns the token for proxies.
    """

    def __init__(
        self,
        namespace: DirectNamespace,
        *,
        prefix: str | None = None,
        tls: TlsFiles | None = None,
        token: Callable[[], str] | None = None,
    ) -> None:
        self._namespace = namespace
        self._prefix = prefix
        self._tls = tls
        self._token = token
        self._control = ControlClient(timeout_s=PATIENCE_S, tls=TlsInUse.of(tls))

    async def aclose(self) -> None:
        """Close the connections to bookies."""
        await self._control.aclose()

    async def look(self) -> Look:
        """Return all that answers; what does not is among the problems."""
        at_s = asyncio.get_running_loop().time()
        works: dict[str, Coroutine[Any, Any, dict[str, Any]]] = {
            "logs": self._logs(),
            "bookies": self._bookies(),
            "proxies": self._proxies(),
            "recovery": self._recovery(),
        }
        found = await together(*map(_in_time, works.values()))
        parts: dict[str, Any] = {}
        problems = {}
        for name, (part, problem) in zip(works, found, strict=True):
            parts |= part
            if problem:
                problems[name] = problem
        return Look(at_s=at_s, problems=problems, **parts)

    async def _logs(self) -> dict[str, object]:
        names = await self._namespace.get_logs(self._prefix)
        taken = await self._namespace.survey_logs(names[:LOGS_MAX])
        broken = {name: each for name, each in taken.items() if isinstance(each, DLError)}
        snapshots = {name: each for name, each in taken.items() if not isinstance(each, DLError)}
        keys = [LogKey(name=name, log_id=each.log_id) for name, each in snapshots.items()]
        owners, subscribers = await together(
            self._owners(keys), together(*map(self._positions, keys))
        )
        return {
            "logs": snapshots,
            "owners": owners,
            "subscribers": dict(zip(snapshots, subscribers, strict=True)),
            "left_out": max(0, len(names) - LOGS_MAX),
            "broken": {name: str(error) for name, error in broken.items()},
        }

    async def _owners(self, keys: Sequence[LogKey]) -> dict[str, str | None]:
        context = self._namespace.log_context
        paths = [context.logs.paths_of(key).lock for key in keys]
        nodes = await context.store.get_many(paths)
        holders = (
            decode_or_tell(LockHolder, node, source=path, tell=lambda _: None)
            for path, node in zip(paths, nodes, strict=True)
        )
        return {
            key.name: None if holder is None else holder.owner
            for key, holder in zip(keys, holders, strict=True)
        }

    async def _positions(self, key: LogKey) -> list[DLSN]:
        try:
            found = await list_subscriptions(self._namespace.log_context, key)
        except DLError:
            return []  # it was deleted meanwhile, or is damaged: `dlog log inspect` tells that
        return [seen.position for seen in found.values()]

    async def _bookies(self) -> dict[str, list[Answer[BookieInfo]]]:
        registered = await self._namespace.get_bookies()
        return {"bookies": await ask_bookies(registered, self._control)}

    async def _proxies(self) -> dict[str, list[Answer[ProxyHealth]]]:
        locations = await self._namespace.get_proxies()
        return {"proxies": await ask_proxies(locations, tls=self._tls, token=self._token)}

    async def _recovery(self) -> dict[str, RecoveryStatus]:
        return {"recovery": await Maintenance(self._namespace.ports).read_status()}


async def _in_time(
    work: Coroutine[Any, Any, dict[str, Any]],
) -> tuple[dict[str, Any], str]:
    try:
        async with asyncio.timeout(PART_S):
            return await work, ""
    except DLError as error:
        return {}, str(error)
    except TimeoutError:
        return {}, f"no answer within {PART_S:g} s"
