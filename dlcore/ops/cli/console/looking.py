"""Reads what the console shows: through proxies or directly, as the namespace was opened."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from dlcore.backends.direct.namespace import DirectNamespace
from dlcore.backends.flight.endpoint import Endpoint
from dlcore.backends.flight.planning import act
from dlcore.base.clock import steady_s
from dlcore.base.config import LogSettings
from dlcore.base.errors import DLError
from dlcore.flight import actions
from dlcore.flight.requests import NoRequest
from dlcore.metadata.paths import unescape
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.cli.console import values

if TYPE_CHECKING:
    from dlcore.api.log import DistributedLogManager
    from dlcore.api.namespace import Namespace
    from dlcore.backends.direct.ports import NamespacePorts
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.ids import DLSN

_AT_ONCE = 8
_PROXY_S = 3.0
_LEDGERS_MAX = 1_000
_PROXIES_MAX = 100
_SHARE_MAX = 0.05
"""Share of the time in which names are listed, however many pages are open."""


class Looking:
    """Answers about a cluster and its logs."""

    def __init__(self, namespace: Namespace, *, tls: TlsFiles | None, endpoint: str | None) -> None:
        self._namespace = namespace
        self._tls = tls
        self._endpoint = endpoint
        self._rates = values.Rates()
        self._few = asyncio.Semaphore(_AT_ONCE)
        self._listing = asyncio.Lock()
        self._known: list[str] = []
        self._due_s = 0.0

    async def cluster(self) -> dict[str, Any]:
        """Return bookies, proxies, and ledgers that lack copies; null for what proxies do not tell.

        Raises: DLError.
        """
        namespace = self._namespace
        locations = await self._proxies()
        healths = await asyncio.gather(*map(self._health, locations[:_PROXIES_MAX]))
        found: dict[str, Any] = {"proxies": healths, "bookies": None, "recovery": None}
        if isinstance(namespace, DirectNamespace):
            bookies = await namespace.get_bookies()
            found["bookies"] = sorted(map(values.bookie_value, bookies), key=lambda b: b["name"])
            found["recovery"] = await self._recovery(namespace.ports)
        return found

    async def _recovery(self, ports: NamespacePorts) -> dict[str, Any]:
        repairs = RepairList(ports.store, ports.paths, ports.clock)
        lacking = 0
        async with aclosing(repairs.ledger_ids()) as ids:
            async for _ in ids:
                lacking += 1
                if lacking > _LEDGERS_MAX:
                    break
        return {
            "auditor": await repairs.read_auditor() is not None,
            "paused": await repairs.is_paused(),
            "under_replicated": min(lacking, _LEDGERS_MAX),
            "more": lacking > _LEDGERS_MAX,
        }

    async def _proxies(self) -> list[str]:
        if isinstance(self._namespace, DirectNamespace):
            ports = self._namespace.ports
            nodes = await ports.store.get_children(ports.paths.proxies, fresh=True)
            return sorted(map(unescape, nodes or ()))
        assert self._endpoint is not None
        async with Endpoint(self._endpoint, patience_s=_PROXY_S, tls=self._tls) as calls:
            return (await act(calls, actions.PROXIES, NoRequest())).locations

    async def _health(self, location: str) -> dict[str, Any]:
        tls = self._tls if location.startswith("grpc+tls://") else None
        try:
            async with (
                self._few,
                Endpoint(location, patience_s=_PROXY_S, tls=tls) as calls,
            ):
                health = await act(calls, actions.HEALTH, NoRequest())
        except DLError as error:
            return {"location": location, "state": "no answer", "logs": None, "detail": str(error)}
        state = "serving" if health.serves else "draining"
        return {
            "location": location,
            "state": "degraded" if health.degraded else state,
            "logs": health.logs,
            "detail": health.degraded or "",
        }

    async def logs(self, part: str, after: str) -> dict[str, Any]:
        """Return a page of the logs whose names contain `part`, with rates and lags.

        Raises: DLError.
        """
        names, is_more = values.matching(await self._names(), part, after)
        snapshots = await self._namespace.get_snapshots(names, fresh=True)
        positions = await asyncio.gather(*map(self._positions, names))
        now_s = steady_s()
        rows = []
        for name, found in zip(names, positions, strict=True):
            snapshot = snapshots[name]
            if snapshot is None:
                continue  # it was deleted meanwhile
            count = values.end_count(snapshot)
            rate = self._rates.of(snapshot.log_id, count, now_s=now_s)
            rows.append(values.log_row(snapshot, rate=rate, positions=found))
        return {"logs": rows, "more": is_more}

    async def _names(self) -> list[str]:
        """Return all names, read again after a while: each list reads every name there is."""
        async with self._listing:
            began_s = steady_s()
            if began_s >= self._due_s:
                self._known = await self._namespace.get_logs()
                now_s = steady_s()
                self._due_s = now_s + (now_s - began_s) / _SHARE_MAX
        return self._known

    async def _positions(self, name: str) -> dict[str, DLSN] | None:
        try:
            async with self._few, await self._namespace.open_log(name) as manager:
                return await manager.get_subscriptions()
        except DLError:
            return None  # the log is gone, or its positions are not for this user

    async def log(self, name: str) -> dict[str, Any]:
        """Return one log: status, segments, settings, columns and subscribers.

        Raises: DLError.
        """
        async with await self._namespace.open_log(name) as manager:
            snapshot = await manager.get_snapshot()
            schema = await manager.get_schema()
            count = values.end_count(snapshot)
            return {
                "status": values.status_value(await manager.status()),
                "picture": values.picture_value(snapshot),
                "settings": _settings_value(await manager.get_settings()),
                "columns": None
                if schema is None
                else [{"name": field.name, "type": str(field.type)} for field in schema],
                "subscribers": await self._subscribers(manager),
                "records_per_s": self._rates.of(snapshot.log_id, count, now_s=steady_s()),
            }

    async def _subscribers(self, manager: DistributedLogManager) -> list[dict[str, Any]]:
        positions = await manager.get_subscriptions()
        if not positions:
            return []
        # The end is read after the positions, which are then at or before it.
        snapshot = await manager.get_snapshot()
        wanted = [max(position, snapshot.first) for position in positions.values()]
        *places, end = await self._namespace.find_places(
            [(snapshot, min(each, snapshot.end)) for each in (*wanted, snapshot.end)]
        )
        return values.subscriber_values(positions, dict(zip(positions, places, strict=True)), end)


def _settings_value(settings: LogSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in LogSettings.__struct_fields__}
