"""The processes: ZooKeeper, bookies, Spark's master and workers, the driver, writers of sources."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import pyspark

from dlcore import DLSN, DLError, LedgerClientConfig, LogConfig, LogRecord, open_namespace
from dlcore.base.clock import SystemClock
from dlcore.metadata.binding import ensure_namespace
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.ops.sandbox.certificates import Certificates
from dlcore.ops.sandbox.process import PortReservation, Warden
from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper, find_java
from tests.chaos.services import Deadline, Service, bookie_may_end
from tests.chaos.threads import in_thread
from tests.chaos_spark.checker import Written
from tests.chaos_spark.churn import PREFIX, Churn
from tests.chaos_spark.driver import (
    EVEN,
    ODD,
    ONCE,
    PLAIN,
    SOURCES,
    SURVIVORS,
    TARGETS,
    TWICE,
)
from tests.chaos_spark.hosts import Hosts, Machine, can_have_hosts, descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore import DistributedLogManager, Namespace, TlsFiles
    from tests.chaos_spark.checker import Channel

ROOT = "/dlog"
ZOOKEEPER, MASTER, DRIVER = "zookeeper", "master", "driver"
BOOKIES = ("bookie-1", "bookie-2", "bookie-3", "bookie-4")
WORKERS = ("worker-1", "worker-2")
HOSTS = (ZOOKEEPER, *BOOKIES, MASTER, *WORKERS, DRIVER)
START_TIMEOUT_S = 120.0
LOCAL = "local[2,8]"
_PR_SET_CHILD_SUBREAPER = 36
_BATCH_RECORDS = 20
_BATCH_GAP_S = 0.3
_CLIENT_CONFIG = LedgerClientConfig(add_timeout_s=3.0, read_timeout_s=3.0)
_LOG_CONFIG = LogConfig(lock_timeout_s=60.0, segment_bytes_max=200_000)
_BOOKIE_OPTIONS = ("--session-timeout-s", "4", "--watch-parent")
_SPARK_JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m")
_MASTER_JVM = (
    "-Dspark.deploy.maxExecutorRetries=-1",  # executors are killed for hours
    "-Dspark.worker.timeout=15",
    "-Dspark.master.rest.enabled=false",
    "-Dspark.master.ui.enabled=false",
)


class Cluster:
    """Everything that runs; an async context manager that leaves nothing behind."""

    host_names: ClassVar[Sequence[str]] = HOSTS
    secured: ClassVar[Sequence[str]] = BOOKIES
    """Those that have a certificate of a server."""
    bookie_options: ClassVar[Sequence[str]] = _BOOKIE_OPTIONS

    def __init__(self, folder: Path, seed: int, *, is_secure: bool = False) -> None:
        self.folder = folder
        self._is_secure = is_secure
        self._certificates: Certificates | None = None
        self.hosts: Machine = Machine()
        self.zookeeper: EmbeddedZooKeeper
        self._namespace: Namespace
        self._store: ZooKeeperStore
        self.zookeeper_turn = asyncio.Lock()
        self.bookies: dict[str, Service] = {}
        self.spark: dict[str, Service] = {}
        self.sources = {source: Written() for source in SOURCES}
        self.churn = Churn(seed, self._open, self._held_by_survivors)
        self._held: dict[str, int] = {}
        self._held_up_to = DLSN.INITIAL
        self.is_local = True
        self.uri = ""
        self._resources = AsyncExitStack()
        self._keepers: list[asyncio.Task[None]] = []
        self._writing: list[asyncio.Task[None]] = []
        self._reservations: dict[str, PortReservation] = {}
        self._warden = Warden()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Kill what runs."""
        await self._stop_writing()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._resources.aclose()
        for service in (*self.spark.values(), *self.bookies.values()):
            await service.kill()
        if hasattr(self, "zookeeper"):
            await in_thread(self.zookeeper.stop)
        await in_thread(self._warden.close)
        for reservation in self._reservations.values():
            reservation.release()
        await in_thread(_end_orphans)

    async def _start(self) -> None:
        # Orphans come to this process, which so finds and ends them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if can_have_hosts():
            self.hosts = Hosts(self.folder)
        for name in self.host_names:
            self.hosts.add(name)
        self.zookeeper = EmbeddedZooKeeper(
            self.folder / ZOOKEEPER,
            warden=self._warden,
            host=self.hosts.address(ZOOKEEPER),
            launcher=self.hosts.launcher(ZOOKEEPER),
        )
        await in_thread(self.zookeeper.start)
        self.uri = f"distributedlog://{self.zookeeper.servers}{ROOT}"
        if self._is_secure:
            hosts = dict.fromkeys(self.hosts.address(name) for name in self.secured)
            self._certificates = Certificates(self.folder / "secure", tuple(hosts))
            self._certificates.make(self.uri)
        self._store = store = await ZooKeeperStore.connect(self.zookeeper.servers)
        self._resources.push_async_callback(store.aclose)
        paths = NamespacePaths(ROOT)
        await ensure_namespace(store, paths, SystemClock())
        for name in BOOKIES:
            self.bookies[name] = self._add(name, self._bookie_command(name))

        if not await self.wait_all_serve():
            raise RuntimeError(f"the bookies did not start: see {self.folder}")
        self._namespace = await self._open()
        self._resources.push_async_callback(self._namespace.aclose)
        for log in (*SOURCES, *TARGETS, SURVIVORS):
            await self._namespace.create_log(log)
        self._writing = [asyncio.create_task(self._write(source)) for source in SOURCES]
        self._writing.append(asyncio.create_task(self.churn.run()))

    async def wait_all_serve(self) -> bool:
        """Return whether all bookies came to be registered as writable in time."""
        available = NamespacePaths(ROOT).bookies_available

        async def all_serve() -> bool:
            try:
                return set(await self._store.get_children(available) or ()) == set(BOOKIES)
            except DLError:
                return False

        return await Deadline(START_TIMEOUT_S).wait(all_serve)

    async def _open_for(self, _source: str) -> Namespace:
        """Open the namespace for the writer of a source."""
        return await self._open()

    async def _open(self) -> Namespace:
        return await open_namespace(
            self.uri, config=_LOG_CONFIG, client_config=_CLIENT_CONFIG, tls=self._tls
        )

    @property
    def _tls(self) -> TlsFiles | None:
        return None if self._certificates is None else self._certificates.client

    def _port(self, name: str) -> int:
        if name not in self._reservations:
            self._reservations[name] = PortReservation(0)
        return self._reservations[name].port

    def _add(self, name: str, command: Sequence[str]) -> Service:
        service = Service(
            name,
            lambda _life: [*self.hosts.launcher(name), *command],
            log_path=self.folder / f"{name}.log",
            warden=self._warden,
            may_end=self._may_end(name),
        )
        service.start()
        self._keepers.append(asyncio.create_task(service.keep_running()))
        return service

    def _may_end(self, name: str) -> Callable[[int, str], bool]:
        return bookie_may_end if name in BOOKIES else lambda _status, _output: True

    def _bookie_command(self, name: str) -> list[str]:
        host = self.hosts.address(name)
        where = ["--host", host, "--port", str(self._port(name))]
        if self._certificates is not None:
            where += self._certificates.options("bookie", host=host)
        data = ("--data-dir", str(self.folder / name), "--metadata-uri", self.uri)
        program = (sys.executable, "-m", "bookie", "--name", name)
        return [*program, *where, *data, *self.bookie_options]

    # Spark

    @property
    def master_url(self) -> str:
        """Where the standalone master listens."""
        return f"spark://{self.hosts.address(MASTER)}:{self._port(MASTER)}"

    def start_driver(self, *, is_local: bool) -> None:
        """Start the driver, and before it the standalone cluster if that is where it shall run."""
        installed = Path(pyspark.__file__).parent
        core = next(installed.glob("jars/spark-core_*.jar"))
        # Without PySpark's own zip file, out of which Python processes start three times as slowly.
        home = self.folder / "spark-home"
        home.mkdir(exist_ok=True)
        for name in ("bin", "jars"):
            if not (home / name).exists():
                (home / name).symlink_to(installed / name)
        os.environ.update(
            SPARK_HOME=str(home),
            SPARK_SCALA_VERSION=core.name.split("_")[1].split("-")[0],  # workers ask for it
            PYSPARK_PYTHON=sys.executable,
            PYSPARK_DRIVER_PYTHON=sys.executable,
        )
        self.is_local = is_local
        if not is_local:
            self._start_standalone()
        tls = self._tls
        work = {
            "address": {"uri": self.uri}
            | ({} if tls is None else {"tlsCa": tls.ca, "tlsCert": tls.cert, "tlsKey": tls.key}),
            "master": LOCAL if is_local else self.master_url,
            "host": self.hosts.address(DRIVER),
            "folder": str(self.folder),
        }
        program = [sys.executable, "-m", "tests.chaos_spark.driver", json.dumps(work)]
        self.spark[DRIVER] = self._add(DRIVER, program)

    def _start_standalone(self) -> None:
        jars = str(Path(pyspark.__file__).parent / "jars" / "*")
        java = [find_java(), *_SPARK_JVM, "-cp", jars]
        where = ["--host", self.hosts.address(MASTER), "--port", str(self._port(MASTER))]
        self.spark[MASTER] = self._add(
            MASTER, [*java, *_MASTER_JVM, "org.apache.spark.deploy.master.Master", *where]
        )
        for name in WORKERS:
            # Executors are this program's children: they find its Python and the repository.
            options = ["--host", self.hosts.address(name), "--cores", "2", "--memory", "1g"]
            work = ["--work-dir", str(self.folder / name), "--webui-port", "0", self.master_url]
            program = "org.apache.spark.deploy.worker.Worker"
            self.spark[name] = self._add(name, [*java, program, *options, *work])

    def begin_faults(self) -> None:
        """Records come through, and faults follow."""

    async def stop_driver(self) -> bool:
        """Stop the driver; return whether it ended in order."""
        return await self.spark[DRIVER].stop()

    def processes(self, kind: str) -> list[int]:
        """Return the processes that a kill of this kind may meet now."""
        driver = self.spark[DRIVER].pid
        if kind == "kill driver":
            return [] if driver is None else [driver]
        if kind == "kill JVM":
            below = {} if driver is None else descendants(driver)
            return [pid for pid, command in below.items() if "deploy.SparkSubmit" in command]
        roots = [service.pid for service in self.spark.values() if service.pid is not None]
        below = {pid: command for root in roots for pid, command in descendants(root).items()}
        if kind == "kill executor":
            word = "executor.CoarseGrainedExecutorBackend"
        else:
            word = " -m pyspark."  # and not what starts a JVM, a shell with "pyspark-shell"
        return sorted(pid for pid, command in below.items() if word in command)

    # Sources

    async def _write(self, source: str) -> None:
        """Write numbers without end; what is not acknowledged is left as it is."""
        while True:
            try:
                async with await self._open_for(source) as namespace:
                    await self._write_on(await namespace.open_log(source), self.sources[source])
            except DLError as error:
                print(f"{source} is opened again: {error}", file=sys.stderr, flush=True)
                await asyncio.sleep(0.5)

    async def _write_on(self, log: DistributedLogManager, written: Written) -> None:
        name = log.name.rpartition("-")[2]
        async with await log.open_writer() as writer:
            while True:
                first = written.attempted
                numbers = range(first, first + _BATCH_RECORDS)
                written.attempted = numbers.stop
                futures = [
                    writer.write(LogRecord(txid=n, payload=f"{name}:{n}".encode())) for n in numbers
                ]
                for number, result in zip(
                    numbers, await asyncio.gather(*futures, return_exceptions=True), strict=True
                ):
                    if not isinstance(result, BaseException):
                        written.acked.add(number)
                await writer.commit()
                await asyncio.sleep(_BATCH_GAP_S)

    async def _stop_writing(self) -> None:
        for task in self._writing:
            task.cancel()
        await asyncio.gather(*self._writing, return_exceptions=True)

    async def end_sources(self) -> int:
        """Stop writing; return how many records the sources hold, once they are recovered."""
        await self._stop_writing()
        total = 0
        for log in (*SOURCES, *await self._namespace.get_logs(PREFIX)):
            manager = await self._namespace.open_log(log)
            await manager.recover()
            if log in SOURCES:
                total += await manager.get_log_record_count()
        return total

    async def count_targets(self) -> dict[str, int]:
        """Return how many records the targets hold now."""
        async with await self._open() as namespace:
            return {
                log: await (await namespace.open_log(log)).get_log_record_count()
                for log in (*TARGETS, SURVIVORS)
            }

    async def _held_by_survivors(self) -> dict[str, int]:
        """Return the highest number of each source of the churn that its target holds."""
        log = await self._namespace.open_log(SURVIVORS)
        async with await log.open_reader(dlsn=self._held_up_to) as reader:
            while records := await reader.read_bulk(1000, until_caught_up=True):
                for source, number in _parse([record.payload.decode() for record in records]):
                    self._held[source] = max(number, self._held.get(source, -1))
                self._held_up_to = max(self._held_up_to, records[-1].dlsn)
        return self._held

    async def read_survivors(self) -> Channel:
        """Read the target of the churn from its beginning."""
        return [_parse(await self._read(SURVIVORS))]

    async def read_channels(self) -> dict[str, Channel]:
        """Read every target from its beginning, as channels: each must hold every record."""
        found = {log: await self._read(log) for log in TARGETS}
        twice = [text.split(":", 1) for text in found[TWICE]]
        return {
            "plain": [_parse(found[PLAIN])],
            "by column": [_parse(found[EVEN]), _parse(found[ODD])],
            "first write of two": [_parse([text for mark, text in twice if mark == "a"])],
            "second write of two": [_parse([text for mark, text in twice if mark == "b"])],
            "once": [_parse(found[ONCE])],
        }

    async def _read(self, log: str) -> list[str]:
        payloads: list[str] = []
        async with await (await self._namespace.open_log(log)).open_reader() as reader:
            while records := await reader.read_bulk(1000, until_caught_up=True):
                payloads += [record.payload.decode() for record in records]
        return payloads


def _end_orphans() -> None:
    """Kill what is left: executors outlive their worker, and JVMs their driver."""
    while orphans := descendants(os.getpid()):
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _parse(payloads: Sequence[str]) -> list[tuple[str, int]]:
    records = []
    for text in payloads:
        source, _, number = text.partition(":")
        records.append((f"source-{source}", int(number)))
    return records
