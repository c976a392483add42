"""The modules that one record passes, seen by a profiler in one process of client and bookies.

The bookies are real: `BookieServer` with a disk and sockets.  Only the metadata store is in memory,
because a record does not pass it.  Each part of the process runs in a context of its own, whose
`ROLE` tells whose calls the profiler sees.

The ack quorum is the whole ensemble.  Therefore all bookies have answered when the writer sends the
LAC, and the bookies' part of the write ends there.  Their part of the read begins there, because
they push a record to a reader when they learn that it is confirmed.

A call is a Python call into a file of the product, also when a coroutine continues.  A module
counts if more than half of the records pass it, which leaves out timers that fall due beside one.
On a slow device a bookie writes in a thread, which adds a module.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
import statistics
import sys
import tempfile
import threading
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from bookie.server import BookieServer
from bookie.server_config import BookieConfig
from dlcore.backends.direct.namespace import DirectNamespace
from dlcore.base.clock import SystemClock
from dlcore.base.config import LedgerClientConfig, LogConfig, QuorumConfig
from dlcore.base.event_loop import run
from dlcore.base.records import LogRecord
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.metadata.binding import ensure_namespace
from dlcore.metadata.memory import MemoryTree
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.wire.client import WireBookieClient
from tools.trace.counts import PACKAGES, ROOT

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from types import FrameType

    from dlcore.api.log import DistributedLogManager
    from dlcore.base.ids import BookieId

T = TypeVar("T")

_URI = "distributedlog://memory:2181/trace"
_BOOKIES = 3
_RECORD_BYTES = 1024
_PAUSE_S = 0.02
"""Between two records: for answers and flushes that no caller waits for."""
# A disk's threads have no context of their own; the client has no threads.
ROLE = contextvars.ContextVar("role", default="bookie")


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One way of a record: how often it calls into each module, in the order of the first calls."""

    name: str
    client: dict[str, int]
    bookie: dict[str, int]


class Recorder:
    """Counts the calls of those roles that are recorded at the moment."""

    def __init__(self) -> None:
        self._roles: tuple[str, ...] = ()
        self._then: tuple[str, ...] = ()
        self._calls: dict[str, dict[str, int]] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note a call; the interpreter calls this."""
        if event != "call" or not self._roles or (role := ROLE.get()) not in self._roles:
            return
        if module := _module_of(frame.f_code.co_filename):
            calls = self._calls.setdefault(role, {})
            calls[module] = calls.get(module, 0) + 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the interpreter call it, in this thread and in those that start."""
        # `sys.setprofile` is for this thread alone, and a bookie writes in another one if its disk
        # is slow.
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self, *roles: str, then: tuple[str, ...]) -> None:
        """Record these roles, and others when the record is confirmed."""
        self._roles, self._then = roles, then

    def confirmed(self) -> None:
        """Change the roles, as the writer sends the LAC."""
        self._roles = self._then

    def take(self, name: str, client: str) -> Passage:
        """End the record's passage, and return what was counted."""
        self._roles = self._then = ()
        calls, self._calls = self._calls, {}
        return Passage(name=name, client=calls.get(client, {}), bookie=calls.get("bookie", {}))


@cache
def _module_of(filename: str) -> str:
    """Return the name of a product's module; empty for any other file."""
    path = Path(filename)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in PACKAGES:
        return ""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def usual(passages: list[Passage]) -> Passage:
    """Return the modules that more than half of the records pass, with the median of the calls.

    They are in the order of the median of their places.
    """

    def side(counted: list[dict[str, int]]) -> dict[str, int]:
        found: dict[str, list[tuple[int, int]]] = {}
        for calls in counted:
            for place, (module, number) in enumerate(calls.items()):
                found.setdefault(module, []).append((place, number))
        common = {each: seen for each, seen in found.items() if 2 * len(seen) > len(counted)}
        places = {
            each: statistics.median(place for place, _ in seen) for each, seen in common.items()
        }
        return {
            each: statistics.median_low(number for _, number in common[each])
            for each in sorted(common, key=lambda each: places[each])
        }

    return Passage(
        name=passages[0].name,
        client=side([each.client for each in passages]),
        bookie=side([each.bookie for each in passages]),
    )


async def _as(role: str, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; what it starts, and what is received on its connections, has its role."""
    context = contextvars.copy_context()
    context.run(ROLE.set, role)
    return await asyncio.create_task(work, context=context)


class _Client(WireBookieClient):
    """Tells the recorder of each LAC that it sends."""

    recorder: Recorder

    @override
    def write_lac(
        self, bookie: BookieId, *, ledger_id: int, last_add_confirmed: int
    ) -> asyncio.Future[None]:
        self.recorder.confirmed()
        return super().write_lac(bookie, ledger_id=ledger_id, last_add_confirmed=last_add_confirmed)


class _Cluster:
    """A metadata store in memory, and real bookies."""

    def __init__(self, recorder: Recorder, stack: AsyncExitStack) -> None:
        self._recorder = recorder
        self._stack = stack
        self._tree = MemoryTree()
        self._paths = NamespacePaths(parse_uri(_URI).root)
        self._clock = SystemClock()

    async def start_bookie(self, name: str, folder: Path) -> None:
        config = BookieConfig(name=name, metadata_uri=_URI, data_dir=folder)
        server = await BookieServer.start(config, store=self._tree.connect(), clock=self._clock)
        self._stack.push_async_callback(server.aclose)

    async def open_log(self, client_id: str) -> DistributedLogManager:
        store = self._tree.connect()
        binding = await ensure_namespace(store, self._paths, self._clock)
        registry = BookieRegistry(store, self._paths)
        bookies = _Client(
            registry.resolve, cluster_id=binding.cluster_id, config=LedgerClientConfig()
        )
        bookies.recorder = self._recorder
        namespace = DirectNamespace(
            uri=_URI,
            store=store,
            bookies=bookies,
            paths=self._paths,
            cluster_id=binding.cluster_id,
            clock=self._clock,
            rng=random.Random(client_id),
            config=LogConfig(quorum=QuorumConfig(_BOOKIES, _BOOKIES, _BOOKIES)),
            client_config=LedgerClientConfig(),
            client_id=client_id,
            registry=registry,
        )
        self._stack.push_async_callback(namespace.aclose)
        return await namespace.open_log("traced", create_if_missing=True)


async def trace(records: int, folder: Path) -> list[Passage]:
    """Write records one by one, then read others as they are written; return both ways of one.

    As many records of each kind go before as are counted.
    """
    recorder = Recorder()
    async with AsyncExitStack() as stack:
        cluster = _Cluster(recorder, stack)
        stack.enter_context(recorder.installed())
        for name in map(str, range(_BOOKIES)):
            await _as("bookie", cluster.start_bookie(name, folder / name))
        log = await _as("writer", cluster.open_log("writer"))
        writer = await _as("writer", log.open_writer())
        txids = itertools.count()

        async def write() -> None:
            await writer.write(LogRecord(next(txids), bytes(_RECORD_BYTES)))

        async def write_one() -> Passage:
            await asyncio.sleep(_PAUSE_S)
            recorder.begin("writer", "bookie", then=("writer",))
            await _as("writer", write())
            return recorder.take("write", "writer")

        written = [await write_one() for _ in range(2 * records)]
        log = await _as("reader", cluster.open_log("reader"))
        reader = await _as("reader", log.open_reader(txid=next(txids)))

        async def read_one() -> Passage:
            await asyncio.sleep(_PAUSE_S)
            recorder.begin("reader", then=("reader", "bookie"))
            read = asyncio.create_task(_as("reader", reader.read_next()))
            await _as("writer", write())
            await read
            return recorder.take("read", "reader")

        read = [await read_one() for _ in range(2 * records)]
    # The first half warms up: connections, caches and first segments are no part of a record's way.
    return [usual(written[records:]), usual(read[records:])]


def trace_in_temporary_folder(records: int) -> list[Passage]:
    """Run `trace` on an event loop of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return run(trace(records, Path(folder)))
