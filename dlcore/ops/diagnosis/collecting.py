"""The parts of an archive, collected side by side, each with a time limit of its own.

A part that fails, or takes too long, costs the archive only itself: the manifest says why it is
missing, and that is evidence as well.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dlcore.base.access.tls_in_use import TlsInUse
from dlcore.base.background import together
from dlcore.base.clock import SystemClock
from dlcore.base.errors import DLError
from dlcore.metadata.answers import in_thread
from dlcore.ops.autorecovery.maintenance import Maintenance
from dlcore.ops.autorecovery.replicas import read_cookies
from dlcore.ops.diagnosis.archive import MANIFEST, Bundle
from dlcore.ops.diagnosis.asking import PATIENCE_S, ask_bookies, ask_proxies
from dlcore.ops.diagnosis.servers import Server, describe_machine, find_servers
from dlcore.wire.control import ControlClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.access.tls import TlsFiles
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ops.diagnosis.asking import Answer

PART_S = 20.0
"""Longest time for a part.  Opening the namespace takes at most half of it."""
_LEDGERS_MAX = 2000
_NODES_MAX = 20_000
_NODES_AT_ONCE = 200
_PACKAGES = (
    "distributed-dlog", "grpcio", "kazoo", "msgspec", "numpy", "protobuf", "pyarrow", "pyspark",
    "uvloop",
)  # fmt: skip
_Result = TypeVar("_Result")


class Collector:
    """Collects the parts of one archive.

    Args:
        open_namespace: opens the namespace, within some seconds.
        settings: settings of the command, without secrets.
        tls: certificates for bookies and proxies.
        token: returns the token for proxies.
    """

    def __init__(
        self,
        open_namespace: Callable[[], Awaitable[DirectNamespace]],
        *,
        settings: Mapping[str, object],
        tls: TlsFiles | None = None,
        token: Callable[[], str] | None = None,
    ) -> None:
        self._open = open_namespace
        self._settings = dict(settings)
        self._tls = tls
        self._token = token
        self._bundle = Bundle()
        self._manifest: dict[str, dict[str, object]] = {}

    async def collect(self) -> Bundle:
        """Return all parts that could be had, and the manifest."""
        clock = SystemClock()
        begun_ms = clock.now_ms()
        self._bundle.values["settings"] = self._settings
        await together(self._collect_machine(), self._collect_cluster())
        self._bundle.values[MANIFEST] = {
            "format": 1,
            "begun_ms": begun_ms,
            "took_ms": clock.now_ms() - begun_ms,
            "parts": self._manifest,
        }
        return self._bundle

    async def _part(self, name: str, make: Callable[[], Awaitable[object]]) -> None:
        """Collect a part; a text goes into a file of its own, all else into one of JSON."""
        now_s = asyncio.get_running_loop().time
        begun_s, problem = now_s(), ""
        try:
            async with asyncio.timeout(PART_S):
                made = await make()
            if isinstance(made, str):
                self._bundle.texts[name] = made
            else:
                self._bundle.values[name] = made
        except TimeoutError:
            problem = f"no answer within {PART_S:g} s"
        except Exception as error:  # noqa: BLE001  # the manifest tells it
            problem = f"{type(error).__name__}: {error}"
        took_s = round(now_s() - begun_s, 3)
        self._manifest[name] = {"took_s": took_s, "problem": problem or None}

    # The machine

    async def _collect_machine(self) -> None:
        servers: list[Server] = []

        async def look() -> object:
            described = []
            for each in await _threaded(find_servers):
                with suppress(OSError):  # it has ended meanwhile
                    described.append(await _threaded(each.describe))
                    servers.append(each)
            return described

        await together(
            self._part("versions", lambda: _threaded(_versions)),
            self._part("machine", lambda: _threaded(describe_machine)),
            self._part("processes", look),
        )
        await together(*map(self._collect_server, servers))

    async def _collect_server(self, server: Server) -> None:
        label = server.label
        parts = [
            self._part(f"logs/{label}.log", lambda: _threaded(server.log_tail)),
            self._part(f"stacks/{label}.txt", lambda: _threaded(server.stacks)),
        ]
        if server.folder:
            parts.append(self._part(f"folders/{label}", lambda: _threaded(server.list_folder)))
        if server.facts["settings"].get("http_address"):
            metrics = partial(server.metrics, self._tls)
            parts.append(self._part(f"metrics/{label}.txt", lambda: _threaded(metrics)))
        await together(*parts)

    # The cluster

    async def _collect_cluster(self) -> None:
        opened: list[DirectNamespace] = []

        async def open_it() -> object:
            opened.append(await self._open())
            return {"uri": opened[0].uri}

        await self._part("namespace", open_it)
        if not opened:
            return
        (namespace,) = opened
        ports = namespace.ports
        try:
            await together(
                self._part("bookies", lambda: self._ask_bookies(namespace)),
                self._part("proxies", lambda: self._ask_proxies(namespace)),
                self._part("recovery", lambda: _recovery(namespace)),
                self._part("ledgers", lambda: _ledgers(namespace)),
                self._part("zookeeper", lambda: _tree(namespace, ports.paths.root)),
            )
        finally:
            await self._part("closing", namespace.aclose)
            self._bundle.values.pop("closing", None)

    async def _ask_bookies(self, namespace: DirectNamespace) -> object:
        cookies = await read_cookies(namespace.ports)
        registered = {each.bookie: each for each in await namespace.get_bookies()}
        control = ControlClient(timeout_s=PATIENCE_S, tls=TlsInUse.of(self._tls))
        try:
            answers = await ask_bookies(registered.values(), control)
        finally:
            await control.aclose()
        by_name = {each.server: _answered(each) for each in answers}
        for bookie, each in registered.items():
            by_name[bookie.name] |= {
                "incarnation": bookie.incarnation,
                "address": each.address,
                "rack": each.rack,
                "is_registered": True,
            }
        for cookie in cookies:
            by_name.setdefault(
                cookie.name,
                {"name": cookie.name, "incarnation": cookie.incarnation, "is_registered": False},
            )
        return [by_name[name] for name in sorted(by_name)]

    async def _ask_proxies(self, namespace: DirectNamespace) -> object:
        locations = await namespace.get_proxies()
        answers = await ask_proxies(locations, tls=self._tls, token=self._token)
        return [_answered(each) for each in answers]


def _answered(answer: Answer[Any]) -> dict[str, object]:
    return {
        "name": answer.server,
        "told": msgspec.to_builtins(answer.report),
        "problem": answer.problem or None,
        "ahead_ms": answer.ahead_ms,
        "within_ms": answer.within_ms,
    }


async def _recovery(namespace: DirectNamespace) -> object:
    status = await Maintenance(namespace.ports).read_status()
    return {"now_ms": SystemClock().now_ms(), **msgspec.to_builtins(status)}


async def _ledgers(namespace: DirectNamespace) -> object:
    found = await namespace.list_ledgers(count=_LEDGERS_MAX)
    return [
        {"ledger": ledger_id, "problem": str(each)} if isinstance(each, DLError) else _ledger(each)
        for ledger_id, each in found.items()
    ]


def _ledger(ledger: LedgerMetadata) -> dict[str, object]:
    return {
        "ledger": ledger.ledger_id,
        "state": ledger.state.name,
        "ensemble_size": ledger.quorum.ensemble_size,
        "write_quorum": ledger.quorum.write_quorum_size,
        "ack_quorum": ledger.quorum.ack_quorum_size,
        "bookies": [] if ledger.is_cold else [str(each) for each in ledger.last_ensemble.bookies],
        "ensembles": len(ledger.ensembles),
        "created_ms": ledger.created_ms,
        "length_bytes": ledger.length_bytes,
        "custom": ledger.custom,
    }


async def _tree(namespace: DirectNamespace, root: str) -> object:
    """Return the size and version of each node below the root, and never what is in it."""
    store, waiting = namespace.ports.store, [root]
    nodes: dict[str, object] = {}
    while waiting and len(nodes) < _NODES_MAX:
        paths, waiting = waiting[:_NODES_AT_ONCE], waiting[_NODES_AT_ONCE:]
        for path, node in zip(paths, await store.get_many(paths), strict=True):
            if node is not None:
                nodes[path] = {"bytes": len(node.value), "version": node.version}
        for path, names in zip(paths, await together(*map(store.get_children, paths)), strict=True):
            waiting += [f"{path}/{name}" for name in names or ()]
    return {"nodes": nodes, "left_out": bool(waiting)}


def _versions() -> dict[str, object]:
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {"python": sys.version, "packages": versions}


async def _threaded(work: Callable[[], _Result]) -> _Result:
    """Return the result of `work` in a thread, which may hang for ever as a dead mount does."""
    results: list[_Result] = []
    await in_thread(lambda: results.append(work()))
    return results[0]
