"""The cluster of a run: ZooKeeper, bookies behind proxies, and the clients that work on it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from dlcore import DLError, LogConfig, QuorumConfig
from dlcore.backends.direct.namespace import open_namespace
from dlcore.backends.flight import planning
from dlcore.backends.flight.endpoint import Endpoint
from dlcore.base.clock import SystemClock
from dlcore.base.errors import LedgerNotFoundError
from dlcore.flight.requests import NoRequest
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.ledger.metadata.values import LedgerState
from dlcore.log.metadata.values import LockHolder, LogMetadata
from dlcore.metadata.binding import ensure_namespace, read_binding
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.stored import decode
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.ops.sandbox.certificates import Certificates
from dlcore.ops.sandbox.process import HOST, PortReservation, Warden
from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper
from dlcore.ops.upgrade_members import finalize, look
from tests.chaos import disks
from tests.chaos.client import CLIENT_CONFIG, LOG_CONFIG, Work
from tests.chaos.history import DAMAGED, Found, History
from tests.chaos.links import Network
from tests.chaos.payloads import identity_of
from tests.chaos.plan import BOOKIE_SESSION_S, ZOOKEEPER
from tests.chaos.producers import Production
from tests.chaos.services import (
    BookieService,
    Deadline,
    Service,
    client_may_end,
    environment_of,
    proxy_may_end,
)
from tests.chaos.threads import in_thread
from tests.fixtures.forking import LOADED_PYTHON

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence, Set
    from pathlib import Path

    from dlcore.flight.actions import Action
    from dlcore.flight.answers import NoAnswer
    from dlcore.ops.upgrade_report import UpgradeReport
    from tests.upgrade.releases import Installed

ROOT = "/dlog"
BOOKIES = tuple(f"bookie-{number}" for number in range(1, 6))
WRITERS = ("writer-1", "writer-2")
READER = "reader"
RECOVERER = "recoverer"
REPAIRERS = ("auto-recovery-1", "auto-recovery-2")
PRODUCERS = "producers"
PROXIES = ("proxy-1", "proxy-2", "proxy-3")
CLIENTS = (*WRITERS, READER, RECOVERER, *REPAIRERS, PRODUCERS, *PROXIES)
"""All processes that talk to bookies, and the producers, which talk to proxies."""
LOCKED, CONTENDED, SOLO = "chaos/locked", "chaos/contended", "chaos/solo"
STAGED = ("chaos/staged-1", "chaos/staged-2")
SCRATCH = "chaos/scratch"
PROXIED = "chaos/proxied"
LOGS = (LOCKED, CONTENDED, SOLO, *STAGED, PROXIED)
START_TIMEOUT_S = 120.0
ACTION_PATIENCE_S = 60.0
_PRODUCERS_PER_S = 1 / 6
_PRODUCERS_MIN, _PRODUCERS_MAX = 4, 100
_SMALL_DISKS = 2
_RACKS = 3
_SMALL_DISK_BYTES_MIN = 96 * 1024 * 1024
_BYTES_PER_S = 1024 * 1024
_BOOKIE_OPTIONS = {
    "session-timeout-s": BOOKIE_SESSION_S,
    "file-bytes-max": 2 * 1024 * 1024,
    "garbage-interval-s": 3.0,
    "garbage-age-ms": 2000,
    "compact-interval-s": 3.0,
    "scrub-interval-s": 8.0,
    "compact-floor-bytes": 1024 * 1024,
    "space-minimum-bytes": 2 * 1024 * 1024,
    "space-read-only-below-bytes": 6 * 1024 * 1024,
    "space-writable-above-bytes": 8 * 1024 * 1024,
    "space-check-interval-s": 0.5,
}
FULL_DISK_BYTES = 0
READ_ONLY_DISK_BYTES = 4 * 1024 * 1024


class Cluster:
    """Everything that runs; an async context manager that leaves nothing behind.

    Args:
        folder: for all data and logs.
        seed: chooses the quorums of one log, and what clients do.
        seconds: how long it will work, for the size of small disks.
        producers: how many write through proxies; None: some, more in a longer run.
        is_secure: whether bookies and proxies let only those in who have a certificate.
        last: the release that makes the namespace, and that all processes run first; None: this.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        seconds: float,
        producers: int | None = None,
        is_secure: bool = False,
        last: Installed | None = None,
    ) -> None:
        self.last = last
        self.folder = folder
        self._certificates = Certificates(folder / "secure") if is_secure else None
        self.tls = None if self._certificates is None else self._certificates.client
        self._scheme = "grpc" if self.tls is None else "grpc+tls"
        self.history = History()
        self.bookies: dict[str, BookieService] = {}
        self.clients: dict[str, Service] = {}
        self.small_disks: tuple[str, ...] = ()
        self.store: ZooKeeperStore
        self.cluster_id: str
        self.paths = NamespacePaths(ROOT)
        self.seed = seed
        self._seconds = seconds
        few = min(_PRODUCERS_MAX, max(_PRODUCERS_MIN, round(seconds * _PRODUCERS_PER_S)))
        self._producers = few if producers is None else producers
        self._offsets: dict[Path, int] = {}
        self._resources = AsyncExitStack()
        self._keepers: list[asyncio.Task[None]] = []
        self._warden = Warden()
        self._zookeeper_port = 0
        self.zookeeper = EmbeddedZooKeeper(folder / "zookeeper", warden=self._warden)
        self.zookeeper_turn = asyncio.Lock()
        self.network = Network(self._process_ids)
        self.syncs = disks.SyncFaults(folder, self._warden)
        self._proxy_ports = {name: PortReservation(0) for name in PROXIES}

    @property
    def _files(self) -> dict[str, str] | None:
        """The files of a client, as processes are given them."""
        return None if self.tls is None else dataclasses.asdict(self.tls)

    def _process_ids(self) -> dict[str, int]:
        services = self.services.values()
        return {each.name: pid for each in services if (pid := each.pid) is not None}

    @property
    def services(self) -> dict[str, Service]:
        """All processes but ZooKeeper, by name."""
        return {**self.bookies, **self.clients}

    async def __aenter__(self) -> Cluster:
        try:
            await self._start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Kill what runs, unmount, close."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for service in (*self.clients.values(), *self.bookies.values()):
            await service.kill()
        for name in self.bookies:
            await self.syncs.end(name)
            self.bookies[name].release()
        for reservation in self._proxy_ports.values():
            reservation.release()
        await self._resources.aclose()
        await self.network.aclose()
        await in_thread(self.zookeeper.stop)
        await in_thread(self._warden.close)
        for name in self.small_disks:
            disks.unmount(self.folder / name)
        self.small_disks = ()

    async def _start(self) -> None:
        await in_thread(self.zookeeper.start)
        port = int(self.zookeeper.servers.rpartition(":")[2])
        self._zookeeper_port = await self.network.open_proxy(ZOOKEEPER, lambda: port)
        self.store = await ZooKeeperStore.connect(self.zookeeper.servers)
        self._resources.push_async_callback(self.store.aclose)
        if self.last is None:
            await ensure_namespace(self.store, self.paths, SystemClock())
        else:
            await in_thread(self._make_namespace, self.last)
        self.cluster_id = (await read_binding(self.store, self.paths)).cluster_id
        if self._certificates is not None:
            await in_thread(self._certificates.make, self.direct_uri)
        if disks.can_mount():
            size_bytes = _SMALL_DISK_BYTES_MIN + int(self._seconds * _BYTES_PER_S)
            for name in BOOKIES[:_SMALL_DISKS]:
                disks.mount_small_disk(self.folder / name, size_bytes=size_bytes)
                self.small_disks += (name,)
        for name in BOOKIES:
            await self._add_bookie(name)
        if not await self.wait_all_serve(START_TIMEOUT_S):
            raise RuntimeError(f"the bookies did not start: see {self.folder}")
        await self._create_logs()
        for name in CLIENTS:
            self._add_client(name)

    def _make_namespace(self, release: Installed) -> None:
        """Let another release make it: of its own, this one would use all features at once."""
        command = [sys.executable, "-m", "dlcore.ops.cli", "namespace", "create"]
        subprocess.run(
            [*command, "--uri", self.direct_uri],
            env={**os.environ, **environment_of(release)},
            check=True,
            stdout=subprocess.DEVNULL,
        )

    @property
    def uri(self) -> str:
        """The namespace, by way of the proxy."""
        return f"distributedlog://{HOST}:{self._zookeeper_port}{ROOT}"

    @property
    def direct_uri(self) -> str:
        """The namespace, for those whom no fault shall hit."""
        return f"distributedlog://{self.zookeeper.servers}{ROOT}"

    async def _add_bookie(self, name: str) -> None:
        proxy_port = control_proxy_port = 0
        rack = f"/rack-{len(self.bookies) % _RACKS}"

        def options() -> Sequence[str]:
            given = {
                **_BOOKIE_OPTIONS,
                "metadata-uri": self.uri,
                "advertised-port": proxy_port,
                "advertised-control-port": control_proxy_port,
                "rack": rack,
            }
            parts = [part for key, value in given.items() for part in (f"--{key}", str(value))]
            made = self._certificates
            return parts if made is None else [*parts, *made.options("bookie")]

        bookie = BookieService(
            name,
            folder=self.folder / name,
            program=self.syncs.program(name),
            options=options,
            warden=self._warden,
            installed=self.last,
        )
        proxy_port = await self.network.open_proxy(name, lambda: bookie.port)
        control_proxy_port = await self.network.open_proxy(name, lambda: bookie.control_port)
        self.bookies[name] = bookie
        bookie.start()
        self._keepers.append(asyncio.create_task(bookie.keep_running()))

    async def _create_logs(self) -> None:
        rng = random.Random(f"quorums {self.seed}")
        striped = QuorumConfig(ensemble_size=rng.choice([3, 4, 5]))
        async with await open_namespace(self.direct_uri, tls=self.tls) as namespace:
            for log in LOGS:
                await namespace.create_log(
                    log, config=LogConfig(quorum=striped) if log == SOLO else None
                )

    def _add_client(self, name: str) -> None:
        def command(life: int) -> Sequence[str]:
            if name in PROXIES:
                return self._proxy_command(name)
            if name == PRODUCERS:
                return self._producers_command(life)
            if name in REPAIRERS:
                tls = json.dumps(self._files)
                return [LOADED_PYTHON, "-m", "tests.chaos.autorecovery", name, self.uri, tls]
            work = self._work_of(name, life)
            return [
                LOADED_PYTHON,
                "-m",
                "tests.chaos.client",
                json.dumps(dataclasses.asdict(work)),
            ]

        service = Service(
            name,
            command,
            log_path=self.folder / f"{name}.log",
            warden=self._warden,
            may_end=proxy_may_end if name in PROXIES else client_may_end,
            installed=self.last,
        )
        self.clients[name] = service
        service.start()
        self._keepers.append(asyncio.create_task(service.keep_running()))

    def _proxy_command(self, name: str) -> Sequence[str]:
        port = str(self._proxy_ports[name].port)
        return [
            *(LOADED_PYTHON, "-m", "dlcore.ops.cli", "proxy", "run"),
            *("--uri", self.uri, "--port", port),
            *(() if self._certificates is None else self._certificates.proxy_options()),
        ]

    def _producers_command(self, life: int) -> Sequence[str]:
        addresses = ",".join(f"{HOST}:{each.port}" for each in self._proxy_ports.values())
        work = Production(
            name=PRODUCERS,
            life=life,
            endpoint=f"{self._scheme}://{addresses}",
            log=PROXIED,
            producers=self._producers,
            seed=self.seed,
            folder=str(self.folder),
            tls=self._files,
        )
        options = json.dumps(dataclasses.asdict(work))
        return [LOADED_PYTHON, "-m", "tests.chaos.producers", options]

    async def find_owner(self) -> str | None:
        """Return which proxy owns the log of the producers; None if none does or none knows."""
        try:
            names = await self.store.get(self.paths.log(PROXIED))
            if names is None:
                return None
            log_id = decode(LogMetadata, names.value, source=PROXIED).log_id
            lock = await self.store.get(self.paths.log_of(log_id).lock)
        except DLError:
            return None
        if lock is None:
            return None
        holder = decode(LockHolder, lock.value, source=PROXIED).owner
        ports = {
            f"{self._scheme}://{HOST}:{each.port}": name for name, each in self._proxy_ports.items()
        }
        return ports.get(holder)

    def _work_of(self, name: str, life: int) -> Work:
        work = Work(
            name=name,
            life=life,
            uri=self.uri,
            seed=self.seed,
            folder=str(self.folder),
            tls=self._files,
        )
        if name in WRITERS:
            return dataclasses.replace(
                work,
                locked=(LOCKED,) if name != WRITERS[-1] else (LOCKED, SOLO),
                contended=(CONTENDED,),
                staged=STAGED,
                scratch=SCRATCH,
            )
        if name == READER:
            return dataclasses.replace(work, tailed=LOGS)
        return dataclasses.replace(work, recovered=(LOCKED, CONTENDED, SOLO))

    # Processes and clients

    def poll(self) -> None:
        """Take new events into the history."""
        for path in sorted(self.folder.glob("*.events"), key=lambda each: each.stat().st_ctime_ns):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(complete)
            self.history.add_file(complete.decode())

    async def wait_all_serve(self, timeout_s: float) -> bool:
        """Return whether all bookies came to serve and to be registered as writable in time."""

        async def all_serve() -> bool:
            if not all(bookie.serves for bookie in self.bookies.values()):
                return False
            try:
                registered = await self.store.get_children(self.paths.bookies_available)
            except DLError:
                return False
            return set(registered or ()) == set(self.bookies)

        return await Deadline(timeout_s).wait(all_serve)

    async def look_at_releases(self) -> UpgradeReport:
        """Return the releases that the members tell, as ``dlog upgrade check`` shows them."""
        async with await open_namespace(self.direct_uri, tls=self.tls) as namespace:
            return await look(namespace.ports)

    async def finalize(self) -> None:
        """Finalize the features of this release, as ``dlog upgrade finalize`` does."""
        async with await open_namespace(self.direct_uri, tls=self.tls) as namespace:
            await finalize(namespace.ports)

    async def forget_cookie(self, name: str) -> None:
        """Delete a bookie's cookie, as the command does that its error message names.

        The command waits until the killed bookie's session is over; here nothing else can start it.
        """
        await self.store.delete(self.paths.cookie(name))

    async def find_open_ledgers(self, incarnation: str) -> list[int]:
        """Return the open ledgers whose entries go to a bookie now."""
        ledgers = LedgerStore(self.store, self.paths)
        found = []
        async for ledger_id in ledgers.list_ledgers():
            try:
                metadata = (await ledgers.read(ledger_id)).metadata
            except LedgerNotFoundError:
                continue  # deleted meanwhile
            members = {each.incarnation for each in metadata.last_ensemble.bookies}
            if metadata.state is not LedgerState.CLOSED and incarnation in members:
                found.append(ledger_id)
        return found

    async def act_on_proxy(self, name: str, action: Action[NoRequest, NoAnswer]) -> None:
        """Have a proxy drain, or undrain it, as the command does."""
        endpoint = f"{self._scheme}://{HOST}:{self._proxy_ports[name].port}"
        calls = Endpoint(endpoint, patience_s=ACTION_PATIENCE_S, tls=self.tls)
        try:
            await planning.act(calls, action, NoRequest())
        finally:
            await calls.aclose()

    async def find_missing(self, lost: Set[str]) -> dict[int, str]:
        """Return the ledgers that still rely on one of the `lost` incarnations, described.

        A ledger that is open may name one in an ensemble before its last: that is repaired too.
        """
        ledgers = LedgerStore(self.store, self.paths)
        found: dict[int, str] = {}
        async for ledger_id in ledgers.list_ledgers():
            try:
                metadata = (await ledgers.read(ledger_id)).metadata
            except LedgerNotFoundError:
                continue  # deleted meanwhile
            if any(b.incarnation in lost for each in metadata.ensembles for b in each.bookies):
                found[ledger_id] = repr(metadata)
        return found

    async def read_logs(self) -> dict[str, list[Found]]:
        """Read every log from its beginning, after completing what killed writers left."""
        config = dataclasses.replace(LOG_CONFIG, lock_timeout_s=START_TIMEOUT_S)
        finals: dict[str, list[Found]] = {}
        async with await open_namespace(
            self.direct_uri, config=config, client_config=CLIENT_CONFIG, tls=self.tls
        ) as namespace:
            for log in LOGS:
                manager = await namespace.open_log(log)
                await manager.recover()
                finals[log] = []
                async with await manager.open_reader() as reader:
                    while records := await reader.read_bulk(1000, until_caught_up=True):
                        finals[log] += [
                            Found(each.dlsn, each.sequence_id, identity_of(each.payload) or DAMAGED)
                            for each in records
                        ]
        return finals


async def persistently(step: Callable[[], Awaitable[None]], *, timeout_s: float) -> None:
    """Try `step` until it succeeds; raise its error when that takes too long."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    while True:
        try:
            return await step()
        except DLError:
            if loop.time() >= until_s:
                raise
        await asyncio.sleep(0.2)
