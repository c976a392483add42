"""The embedded cluster: metadata server, bookies, proxies, each in its own process.

<data dir>/sandbox.lock                 held while a sandbox, or what it left, runs on the folder
<data dir>/metadata/{metadata.sqlite,metadata-server.log}
<data dir>/zookeeper/{zoo.cfg,zookeeper.log,data}   instead, with `zookeeper`
<data dir>/bookie-<n>, bookie-<n>.log
<data dir>/proxy-<n>.log
<data dir>/autorecovery.log
<data dir>/secure                       with `secure`: what `dlog secure init` makes
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import sys
import tempfile
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from dlcore.base.clock import SystemClock
from dlcore.base.config import require
from dlcore.base.errors import BookieUnavailableError, ConfigurationError
from dlcore.base.whole_files import naming
from dlcore.metadata.binding import ensure_namespace
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.ops.sandbox.certificates import Certificates
from dlcore.ops.sandbox.metadata_server import EmbeddedMetadataServer
from dlcore.ops.sandbox.process import (
    HOST,
    ChildProcess,
    PortReservation,
    Restartable,
    Startable,
    Warden,
    python_path,
    wait_until,
)
from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.base.access.tls import TlsFiles
    from dlcore.ops.sandbox.metadata_server import MetadataProcess

ROOT = "/dlog"
"""The path of a sandbox's namespace."""

_START_TIMEOUT_S = 90.0
"""Time for a bookie to start: it takes about a second; several on a busy machine take longer."""
_LOCK_TIMEOUT_S = 3.0
"""Long enough for processes of a killed sandbox to end, and short for a folder that is in use."""
_AUTORECOVERY_OPTIONS = (
    "--lost-bookie-delay-s=10",
    "--open-ledger-grace-s=30",
    "--audit-interval-s=60",
    "--poll-interval-s=1",
    "--retry-pause-s=1",
    "--upkeep-interval-s=2",
    "--sweep-interval-s=60",
    "--merged-grace-s=60",
)
"""Short, so that users of a sandbox see repairs soon."""
_SERVING = re.compile(r"^bookie (\S+) \(incarnation (\S+)\) serving on (\S+:\d+)$", re.MULTILINE)

_PROXY_SERVING = re.compile(r"^proxy serving on (\S+)$", re.MULTILINE)


class _Process(Restartable):
    """One process of a sandbox, which can be restarted."""

    def __init__(self, name: str, *, options: Sequence[str], cluster: Sandbox) -> None:
        self.name = name
        self._options = tuple(options)
        self._cluster = cluster

    @property
    def log_path(self) -> Path:
        """The file with its output."""
        return self._cluster.data_dir / f"{self.name}.log"

    def terminate(self) -> None:
        """Stop the process in order with SIGTERM, and wait until it is gone."""
        self._latest_child.terminate()

    def restart(self) -> None:
        """Restart the process, after stopping it if it runs; wait until it serves."""
        if self._child is not None:
            self._child.terminate()
        self._spawn()
        self._wait_until_serving()

    @abstractmethod
    def _spawn(self) -> None:
        """Start the process."""

    def _wait_until_serving(self) -> None:
        """Return at once: it announces nothing."""

    def _run(self, command: Sequence[str]) -> None:
        """Start a process: Python with the arguments of `command` and the options."""
        self._child = ChildProcess(
            [sys.executable, *command, *self._options],
            log_path=self.log_path,
            warden=self._cluster._running_warden,
            environment={"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"},
        )

    def _served(self, announcement: re.Pattern[str]) -> re.Match[str]:
        return self._wait_for(
            announcement, timeout_s=_START_TIMEOUT_S, error=BookieUnavailableError
        )


class Bookie(_Process):
    """One bookie process of a sandbox."""

    def __init__(
        self, name: str, *, folder: Path, port: int, options: Sequence[str], cluster: Sandbox
    ) -> None:
        super().__init__(name, options=options, cluster=cluster)
        self.folder = folder
        self._port = port
        self._address = ""
        self._incarnation = ""

    def __repr__(self) -> str:
        state = f"pid={self.pid}" if self.is_running else "stopped"
        return f"<Bookie {self.name} {self._address} {state}>"

    @property
    def address(self) -> str:
        """Address of the bookie, or its last one: ``host:port``."""
        return self._address

    @property
    def incarnation(self) -> str:
        """The incarnation of its data."""
        return self._incarnation

    def _spawn(self) -> None:
        command = ["-m", "bookie", "--name", self.name, "--metadata-uri", self._cluster.uri]
        command += ["--data-dir", str(self.folder), "--host", HOST, "--port", str(self._port)]
        self._run([*command, "--watch-parent", *self._cluster._tls_options("bookie")])

    def _wait_until_serving(self) -> None:
        served = self._served(_SERVING)
        self._incarnation, self._address = served[2], served[3]


class Proxy(_Process):
    """One proxy process of a sandbox."""

    def __init__(self, name: str, *, port: int, options: Sequence[str], cluster: Sandbox) -> None:
        super().__init__(name, options=options, cluster=cluster)
        self._port = port
        self.location = ""
        """Location for Flight clients, or the last one: ``grpc://host:port``."""

    def __repr__(self) -> str:
        state = f"pid={self.pid}" if self.is_running else "stopped"
        return f"<Proxy {self.name} {self.location} {state}>"

    def _spawn(self) -> None:
        command = ["-m", "dlcore.ops.cli", "proxy", "run", "--uri", self._cluster.uri]
        command += ["--host", HOST, "--port", str(self._port)]
        made = self._cluster.certificates
        self._run(command if made is None else [*command, *made.proxy_options()])

    def _wait_until_serving(self) -> None:
        self.location = self._served(_PROXY_SERVING)[1]


class AutoRecoveryProcess(_Process):
    """The auto-recovery process of a sandbox."""

    def __init__(self, *, options: Sequence[str], cluster: Sandbox) -> None:
        super().__init__("autorecovery", options=options, cluster=cluster)

    def __repr__(self) -> str:
        return f"<AutoRecoveryProcess {f'pid={self.pid}' if self.is_running else 'stopped'}>"

    def _spawn(self) -> None:
        command = ["-m", "dlcore.ops.cli", "autorecovery", "run", "--uri", self._cluster.uri]
        command += self._cluster._tls_options("autorecovery")
        self._run([*command, *_AUTORECOVERY_OPTIONS])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The parts of a sandbox and their options, as its arguments say."""

    bookies_min: int
    base_port: int | None
    data_dir: Path | None
    bookie_options: tuple[str, ...]
    racks: tuple[str, ...]
    proxies: int
    proxy_options: tuple[str, ...]
    secure: bool
    zookeeper: bool

    def options_of(self, number: int) -> tuple[str, ...]:
        """Return the options of a bookie, the first of which is number 1."""
        if not self.racks:
            return self.bookie_options
        return ("--rack", self.racks[(number - 1) % len(self.racks)], *self.bookie_options)


class Sandbox(Startable):
    """A whole cluster for experiments, tests and demonstrations.

    Its processes end with this one, however this one ends.  Without `data_dir` the data is in a
    temporary folder until `stop`.  With it, a later sandbox on the same folder finds all data, and
    starts as many bookies as before if that is more than `bookies`.  With `base_port` the metadata
    server listens there and the bookies on the ports after it; otherwise free ports are used.

    The metadata is kept by the metadata server of one host.  With `zookeeper`, or on a folder that
    began so, it is kept by a ZooKeeper from the jars in PySpark, which needs Java.

    `proxies` is the number of Arrow Flight proxies, on the ports after those of the bookies.

    With `racks` the bookies are assigned to these in turn: ``bookie-1`` to the first one, and so
    on.  Without `autorecovery` the replicas of lost bookies are not restored.

    With `secure` bookies and proxies let only clients in that have a certificate, such as `tls`.

    Raises (from `start`):
        ConfigurationError: the folder or a port is in use, or with `zookeeper` Java is missing.
        MetadataConnectionError, BookieUnavailableError: a process did not start; the message says
            why.
    """

    def __init__(
        self,
        bookies: int = 3,
        base_port: int | None = None,
        data_dir: Path | str | None = None,
        *,
        bookie_options: Sequence[str] = (),
        racks: Sequence[str] = (),
        proxies: int = 0,
        proxy_options: Sequence[str] = (),
        autorecovery: bool = True,
        autorecovery_options: Sequence[str] = (),
        secure: bool = False,
        zookeeper: bool = False,
        report: Callable[[str], None] | None = None,
    ) -> None:
        require(condition=bookies >= 1, key="bookies", value=bookies, rule="expected 1 or more")
        require(condition=proxies >= 0, key="proxies", value=proxies, rule="expected 0 or more")
        if base_port is not None:
            require(
                condition=1 <= base_port <= 65535 - bookies - proxies,
                key="base_port",
                value=base_port,
                rule=f"expected 1 … {65535 - bookies - proxies}: bookies and proxies take the "
                "ports after it",
            )
        self._plan = _Plan(
            bookies_min=bookies,
            base_port=base_port,
            data_dir=None if data_dir is None else Path(data_dir).absolute(),
            bookie_options=tuple(bookie_options),
            racks=tuple(racks),
            proxies=proxies,
            proxy_options=tuple(proxy_options),
            secure=secure,
            zookeeper=zookeeper,
        )
        self._autorecovery = (
            AutoRecoveryProcess(options=autorecovery_options, cluster=self)
            if autorecovery
            else None
        )
        self._report = report
        self._temporary_dir: Path | None = None
        self._lock: IO[str] | None = None
        self._warden: Warden | None = None
        self._metadata_server: MetadataProcess | None = None
        self._bookies: list[Bookie] = []
        self._proxies: list[Proxy] = []

    def __repr__(self) -> str:
        state = self.uri if self.is_running else "stopped"
        return f"<Sandbox {state} bookies={len(self._bookies)}>"

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not stopped."""
        return self._metadata_server is not None

    @property
    def uri(self) -> str:
        """The URI of the sandbox's namespace."""
        return f"distributedlog://{self.metadata_server.servers}{ROOT}"

    @property
    def metadata_server(self) -> MetadataProcess:
        """The process that keeps the sandbox's metadata.

        Raises:
            ConfigurationError: the sandbox is not started.
        """
        if self._metadata_server is None:
            raise ConfigurationError("the sandbox is not started")
        return self._metadata_server

    @property
    def bookies(self) -> Sequence[Bookie]:
        """The bookies, ``bookie-1`` first."""
        return tuple(self._bookies)

    @property
    def proxies(self) -> Sequence[Proxy]:
        """The proxies, ``proxy-1`` first."""
        return tuple(self._proxies)

    @property
    def autorecovery(self) -> AutoRecoveryProcess | None:
        """The auto-recovery process, if the sandbox has one."""
        return self._autorecovery

    @property
    def data_dir(self) -> Path:
        """The folder with all data and logs.

        Raises:
            ConfigurationError: the sandbox is not started.
        """
        folder = self._plan.data_dir or self._temporary_dir
        if folder is None:
            raise ConfigurationError("the sandbox is not started")
        return folder

    @property
    def certificates(self) -> Certificates | None:
        """The certificates, among them those of a client; None without `secure`."""
        return Certificates(self.data_dir / "secure") if self._plan.secure else None

    @property
    def tls(self) -> TlsFiles | None:
        """The files of a client that is let in; None without `secure`."""
        return None if self.certificates is None else self.certificates.client

    def _start(self) -> None:
        if self._plan.data_dir is None:
            self._temporary_dir = Path(tempfile.mkdtemp(prefix="dlog-sandbox-"))
        lock = self._lock = _take_folder(self.data_dir)
        ports = self._choose_ports()
        self._warden = Warden(held_open=[lock.fileno()])
        server = self._metadata_server = self._new_metadata_server(self._warden)
        self._tell(f"starting {server.name}")
        server.start()
        _make_namespace(server.servers)
        if self.certificates is not None:
            self.certificates.make(self.uri)
        self._bookies = [
            Bookie(
                f"bookie-{number}",
                folder=self.data_dir / f"bookie-{number}",
                port=port,
                options=self._plan.options_of(number),
                cluster=self,
            )
            for number, port in enumerate(ports, start=1)
        ]
        self._tell(f"starting {len(self._bookies)} bookies")
        for bookie in self._bookies:
            bookie._spawn()
        for bookie in self._bookies:
            bookie._wait_until_serving()
            self._tell(f"{bookie.name} serves on {bookie.address}")
        self._start_proxies()
        if self._autorecovery is not None:
            self._tell("starting auto-recovery")
            self._autorecovery.restart()

    def _new_metadata_server(self, warden: Warden) -> MetadataProcess:
        of_zookeeper = self.data_dir / "zookeeper"
        if self._plan.zookeeper or of_zookeeper.exists():
            return EmbeddedZooKeeper(of_zookeeper, port=self._plan.base_port, warden=warden)
        folder = self.data_dir / "metadata"
        return EmbeddedMetadataServer(folder, port=self._plan.base_port, warden=warden)

    def _start_proxies(self) -> None:
        first = (
            None if self._plan.base_port is None else self._plan.base_port + len(self._bookies) + 1
        )
        self._proxies = [
            Proxy(
                f"proxy-{number + 1}",
                port=0 if first is None else first + number,
                options=self._plan.proxy_options,
                cluster=self,
            )
            for number in range(self._plan.proxies)
        ]
        for proxy in self._proxies:
            proxy._spawn()
        for proxy in self._proxies:
            proxy._wait_until_serving()
            self._tell(f"{proxy.name} serves on {proxy.location}")

    def _tls_options(self, role: str) -> list[str]:
        """Return the options that name the files of a process; none without `secure`."""
        return [] if self.certificates is None else self.certificates.options(role)

    def _choose_ports(self) -> list[int]:
        numbers = [
            int(match[1])
            for path in self.data_dir.iterdir()
            if path.is_dir() and (match := re.fullmatch(r"bookie-(\d+)", path.name))
        ]
        count = max([self._plan.bookies_min, *numbers])
        if self._plan.base_port is None:
            return [0] * count
        ports = [self._plan.base_port + number for number in range(1, count + 1)]
        proxies = (ports[-1] + number for number in range(1, self._plan.proxies + 1))
        for port in (self._plan.base_port, *ports, *proxies):
            PortReservation(port).release()
        return ports

    def stop(self) -> None:
        """Stop all processes and wait until none is left; do nothing if none runs."""
        # In this order, because the first ones need the others.
        started = [self._autorecovery, *self._proxies, *self._bookies]
        children = [each._child for each in started if each is not None and each._child is not None]
        try:
            for proxy in self._proxies:  # a proxy releases its logs, which needs bookies
                if proxy._child is not None:
                    proxy.terminate()
            for child in children:
                child.ask_to_stop()
            for child in children:
                child.terminate()
            if self._metadata_server is not None:
                self._tell(f"stopping {self._metadata_server.name}")
                self._metadata_server.stop()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._metadata_server = None
        self._bookies = []
        self._proxies = []
        if self._warden is not None:
            self._warden.close()  # kills processes that an interrupted stop has left
            self._warden = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir)
            self._temporary_dir = None

    @property
    def _running_warden(self) -> Warden:
        if self._warden is None:
            raise ConfigurationError("the sandbox is not started")
        return self._warden

    def _tell(self, progress: str) -> None:
        if self._report is not None:
            self._report(progress)


def _take_folder(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "sandbox.lock").open("a+")
    except OSError as error:
        raise ConfigurationError(f"cannot use the folder {folder}: {error.strerror}") from error

    def is_taken() -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    if not wait_until(is_taken, timeout_s=_LOCK_TIMEOUT_S):
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise ConfigurationError(f"the folder {folder} is used by another sandbox, pid {holder}")
    with naming(Path(lock.name)):
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
    return lock


def _make_namespace(servers: str) -> None:
    async def make() -> None:
        store = await ZooKeeperStore.connect(servers)
        try:
            await ensure_namespace(store, NamespacePaths(ROOT), SystemClock())
        finally:
            await store.aclose()

    # In another thread, because the caller (a notebook) may run an event loop.
    with ThreadPoolExecutor(1) as executor:
        executor.submit(asyncio.run, make()).result()
