"""The cluster of the chaos of Spark with what runs beside it for years.

Proxies, by which one of the sources is written, auto-recovery, retention, and restarts of all
processes one after the other.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, ClassVar

from dlcore import DLSN, DLError, open_namespace
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.metadata.paths import NamespacePaths
from tests.chaos.services import proxy_may_end
from tests.chaos_spark import cluster as chaos
from tests.chaos_spark.churn import PREFIX
from tests.chaos_spark.driver import SOURCES, TARGETS
from tests.soak.samples import Samples

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from dlcore import DistributedLogManager, Namespace
    from tests.chaos.services import Service

PROXIES = ("proxy-1", "proxy-2")
REPAIRERS = ("autorecovery-1", "autorecovery-2")
KILLED = (PROXIES[0], REPAIRERS[0])
"""The others live from one restart in order to the next, so that a slope of their memory shows."""
PROXIED = SOURCES[1]
"""The source that is written by way of proxies."""
QUERIES = 3
"""Subscribers of each source: a query each."""
_TARGET_SEGMENT_BYTES = 500_000
_TRIM_EVERY_S = 15.0
_KILL_EVERY_S = 90.0
_READ_RECORDS = 1000
_DOWN_S_MAX = 4.0
_BOOKIE_OPTIONS = (
    *("--session-timeout-s", "4", "--watch-parent"),
    *("--file-bytes-max", str(2**21), "--garbage-interval-s", "3", "--garbage-age-ms", "2000"),
    *("--compact-interval-s", "3", "--compact-floor-bytes", str(2**20), "--scrub-interval-s", "60"),
)
_RECOVERY_OPTIONS = (
    *("--lost-bookie-delay-s", "5", "--open-ledger-grace-s", "5", "--audit-interval-s", "30"),
    *("--upkeep-interval-s", "5", "--sweep-interval-s", "10", "--merged-grace-s", "10"),
)


class SoakCluster(chaos.Cluster):
    """All processes; sources and targets keep only unread output."""

    host_names: ClassVar[Sequence[str]] = (*chaos.HOSTS, *PROXIES, *REPAIRERS)
    secured: ClassVar[Sequence[str]] = (*chaos.BOOKIES, *PROXIES, *REPAIRERS)
    bookie_options: ClassVar[Sequence[str]] = _BOOKIE_OPTIONS

    def __init__(
        self, folder: Path, seed: int, *, roll_every_s: float, look_every_s: float
    ) -> None:
        super().__init__(folder, seed, is_secure=True)
        self.samples = Samples()
        self._roll_every_s = roll_every_s
        self._look_every_s = look_every_s
        self.beside: dict[str, Service] = {}
        """Proxies and auto-recovery."""
        self.restarts = 0
        self.kills = 0
        self.trimmed = 0
        self.failures: list[str] = []
        self._rng = random.Random(f"soak {seed}")
        self._found: dict[str, list[str]] = defaultdict(list)
        self._last: dict[str, DLSN] = {}
        self._reading = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def services(self) -> dict[str, Service]:
        """All processes that were started, by name."""
        return {**self.bookies, **self.beside, **self.spark}

    async def _start(self) -> None:
        await super()._start()
        # A log that comes and goes would have to be kept whole, to be judged.
        self._writing.pop().cancel()
        await self._namespace.create_log(f"{PREFIX}idle")
        for log in TARGETS:  # only whole segments are removed, and a sink's are for 256 MiB
            manager = await self._namespace.open_log(log)
            await manager.update_settings(segment_bytes_max=_TARGET_SEGMENT_BYTES)
        for name in PROXIES:
            where = ("--host", self.hosts.address(name), "--port", str(self._port(name)))
            self.beside[name] = self._add(name, [*self._dlog("proxy", name), *where])
        for name in REPAIRERS:
            command = self._dlog("autorecovery", name)
            self.beside[name] = self._add(name, [*command, *_RECOVERY_OPTIONS])

    def _dlog(self, role: str, name: str) -> list[str]:
        assert self._certificates is not None
        host = self.hosts.address(name)
        if role == "proxy":
            files = self._certificates.proxy_options(host=host)
        else:
            files = self._certificates.options(role, host=host)
        return [sys.executable, "-m", "dlcore.ops.cli", role, "run", "--uri", self.uri, *files]

    def _may_end(self, name: str) -> Callable[[int, str], bool]:
        return proxy_may_end if name in (*PROXIES, *REPAIRERS) else super()._may_end(name)

    async def _open_for(self, source: str) -> Namespace:
        if source != PROXIED:
            return await super()._open_for(source)
        places = ",".join(f"{self.hosts.address(name)}:{self._port(name)}" for name in PROXIES)
        return await open_namespace(f"grpc+tls://{places}", tls=self._tls)

    # Work beside the faults

    def begin_faults(self) -> None:
        """Let looks, retention, restarts and kills go on, until the sources end."""
        rhythm = {
            self._look: self._look_every_s,
            self._trim: _TRIM_EVERY_S,
            self._roll: self._roll_every_s,
            self._kill: _KILL_EVERY_S,
        }
        self._tasks += [asyncio.create_task(_again(*each)) for each in rhythm.items()]

    async def _look(self) -> None:
        await self.samples.look(self)

    async def end_sources(self) -> int:
        """End what goes on; return how many records the sources ever held."""
        await self._end_tasks()
        await self._stop_writing()
        for name in PROXIES:  # so that they release what they own
            await self.beside[name].stop()
        await super().end_sources()
        total = 0
        for source in SOURCES:
            last = await (await self._namespace.open_log(source)).get_last_record()
            total += last.sequence_id + 1
        return total

    async def aclose(self) -> None:
        """Kill what runs."""
        await self._end_tasks()
        for service in self.beside.values():
            await service.kill()
        await super().aclose()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                self.failures.append(f"what goes on beside ended: {outcome!r}")
        self._tasks.clear()

    async def _trim(self) -> None:
        """Truncate what was read: of targets by the checker, of sources by all queries."""
        for log in TARGETS:
            await self._read(log)
            await self._truncate(await self._namespace.open_log(log), self._last.get(log))
        for source in SOURCES:
            manager = await self._namespace.open_log(source)
            positions = await manager.get_subscriptions()
            if len(positions) >= QUERIES:
                await self._truncate(manager, min(positions.values()))

    async def _truncate(self, manager: DistributedLogManager, dlsn: DLSN | None) -> None:
        if dlsn is not None:
            self.trimmed += await manager.truncate(dlsn)

    async def _roll(self) -> None:
        """Restart all processes in good order, one after the other."""
        for name, service in {**self.bookies, **self.beside}.items():
            async with service.turn:
                if not await service.stop():
                    end = f"{name} did not stop in order: {service.output[-2000:]}"
                    self.failures.append(end)
                service.start()
            self.restarts += 1
            if name in self.bookies and not await self.wait_all_serve():
                self.failures.append(f"{name} does not serve after its restart")

    async def _kill(self) -> None:
        service = self.beside[self._rng.choice(KILLED)]
        async with service.turn:
            await service.kill()
            await asyncio.sleep(self._rng.uniform(0.2, _DOWN_S_MAX))
            service.start()
        self.kills += 1

    # The checker's reads

    async def _read(self, log: str) -> list[str]:
        """Return all records that the log ever held, as far as the checker has read them."""
        async with self._reading:
            manager, last = await self._namespace.open_log(log), self._last.get(log)
            async with await manager.open_reader(dlsn=last) as reader:
                while records := await reader.read_bulk(_READ_RECORDS, until_caught_up=True):
                    new = [each for each in records if last is None or each.dlsn > last]
                    self._found[log] += [each.payload.decode() for each in new]
                    self._last[log] = last = records[-1].dlsn
            return self._found[log]

    async def count_targets(self) -> dict[str, int]:
        """Return how many records each target ever held."""
        return {log: len(await self._read(log)) for log in TARGETS}

    # Measurements

    async def count_ledgers(self) -> int:
        """Return how many ledgers exist."""
        ledgers = LedgerStore(self._store, NamespacePaths(chaos.ROOT))
        return len([each async for each in ledgers.list_ledgers()])

    async def count_nodes(self) -> int:
        """Return how many nodes ZooKeeper has, as its command `srvr` tells."""
        host, _, port = self.zookeeper.servers.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(b"srvr")
            output = (await reader.read()).decode()
        finally:
            writer.close()
        return int(output.partition("Node count: ")[2].split()[0])

    def disk_bytes(self) -> int:
        """Return what the bookies' folders take on the disk."""
        paths = [path for name in chaos.BOOKIES for path in (self.folder / name).rglob("*")]
        return sum(512 * _blocks(path) for path in paths)


def _blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks
    except FileNotFoundError:
        return 0  # it was deleted meanwhile


async def _again(step: Callable[[], Awaitable[None]], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await step()
        except DLError as error:  # a server that is needed is away
            print(json.dumps({"put off": f"{step.__name__}: {error}"[:300]}), file=sys.stderr)
