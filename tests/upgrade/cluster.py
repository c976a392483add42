"""A cluster whose processes run different releases, and change them one by one."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Self

from dlcore.backends.direct.namespace import open_namespace
from dlcore.metadata.binding import finalize_features
from dlcore.ops.sandbox.process import HOST, ChildProcess, PortReservation, Warden
from dlcore.ops.upgrade_members import look
from tests.fixtures.aio import run
from tests.fixtures.waiting import wait_until
from tests.upgrade.releases import NOW, REPOSITORY, Installed

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from dlcore.ops.upgrade_report import Member, Role

_CLIENT = str(REPOSITORY / "tests" / "upgrade" / "client.py")
_JOB = str(REPOSITORY / "tests" / "upgrade" / "spark_job.py")
_ROOT = "/dlog"
_WAIT_S = 300.0
_SESSION = "--session-timeout-s=10"


class Process:
    """One program, of a release that may change with each start."""

    def __init__(self, name: str, command: list[str], announcement: str, cluster: Mixed) -> None:
        self.name = name
        self._command = command
        self._announcement = re.compile(announcement, re.MULTILINE)
        self._cluster = cluster
        self._child: ChildProcess | None = None

    def start(self, release: Installed) -> Self:
        """Start it, and wait until it says that it serves."""
        child = self._begin(release)
        wait_until(lambda: self.found is not None or not child.is_running, timeout_s=_WAIT_S)
        assert self.found is not None, child.describe_end()
        return self

    def refused(self, release: Installed) -> str:
        """Start it, which fails; return its output."""
        self._begin(release)
        output = self.ended()
        self.stop()
        assert self.found is None
        return output

    def _begin(self, release: Installed) -> ChildProcess:
        self._child = ChildProcess(
            [sys.executable, *self._command],
            log_path=self._cluster.folder / f"{self.name}.log",
            warden=self._cluster.warden,
            environment=release.environment,
        )
        return self._child

    @property
    def found(self) -> re.Match[str] | None:
        """Its line when it began to serve, if it did."""
        assert self._child is not None
        return self._announcement.search(self._child.output())

    def stop(self) -> None:
        """Stop it in order."""
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        """Kill it."""
        assert self._child is not None
        self._child.kill()

    def restart(self, release: Installed) -> None:
        """Stop it, and start it as this release."""
        self.stop()
        self.start(release)

    def ended(self) -> str:
        """Wait until it has ended; return its output."""
        child = self._child
        assert child is not None
        wait_until(lambda: not child.is_running, timeout_s=_WAIT_S)
        return child.output()

    @property
    def at(self) -> int:
        """The last number that a client printed."""
        assert self._child is not None
        output = self._child.output()
        assert "lost or doubled" not in output, output
        known = re.findall(r"^at (\d+)$", output, re.MULTILINE)
        return int(known[-1]) if known else 0

    def advance(self, count: int = 20) -> None:
        """Wait until a client is this much further."""
        aim = self.at + count
        wait_until(lambda: self.at >= aim, timeout_s=_WAIT_S)


class Mixed:
    """The processes of one cluster, in a folder; a `release` made it, and serves its metadata."""

    def __init__(self, folder: Path, release: Installed = NOW) -> None:
        self.folder = folder
        self.warden = Warden()
        self.processes: list[Process] = []
        self._release = release
        self._reserved: list[PortReservation] = []
        self._port = self._free_port()
        command = ["-m", "dlcore.ops.cli", "metadata", "serve", "--port", str(self._port)]
        command += ["--data-dir", str(folder / "metadata")]
        self.metadata = self._add("metadata", command, r"^metadata server serving on")

    def __enter__(self) -> Self:
        self.metadata.start(self._release)
        create = ["-m", "dlcore.ops.cli", "namespace", "create", "--uri", self.uri]
        self._add("create", create, r"^").start(self._release).ended()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in reversed(self.processes):
            process.stop()
        self.warden.close()
        for each in self._reserved:
            each.release()

    @property
    def uri(self) -> str:
        """Where clients find the namespace."""
        return f"distributedlog://{HOST}:{self._port}{_ROOT}"

    def finalize(self, *features: str) -> None:
        """Finalize features without a look at the members."""

        async def work() -> None:
            async with await open_namespace(self.uri) as namespace:
                await finalize_features(namespace.ports.store, namespace.ports.paths, features)

        run(work())

    def bookie(self, name: str, *options: str) -> Process:
        """Add a bookie, on the same folder at each start."""
        command = ["-m", "bookie", "--name", name, "--metadata-uri", self.uri, "--watch-parent"]
        command += ["--data-dir", str(self.folder / name), "--host", HOST, "--port", "0", _SESSION]
        return self._add(name, [*command, *options], r"^bookie .* serving on")

    def proxy(self, name: str) -> tuple[Process, str]:
        """Add a proxy; return it with its location."""
        port = self._free_port()
        command = ["-m", "dlcore.ops.cli", "proxy", "run", "--uri", self.uri, "--host", HOST]
        command += ["--port", str(port), _SESSION]
        process = self._add(name, command, r"^proxy serving on")
        return process, f"grpc://{HOST}:{port}"

    def recovery(self, name: str) -> Process:
        """Add a process of auto-recovery that is quick."""
        command = ["-m", "dlcore.ops.cli", "autorecovery", "run", "--uri", self.uri]
        command += ["--lost-bookie-delay-s=2", "--audit-interval-s=5", "--poll-interval-s=0.5"]
        command += ["--retry-pause-s=0.5", "--open-ledger-grace-s=6"]
        return self._add(name, command, r"^auto-recovery of .* at work")

    def program(self, name: str, *words: str) -> Process:
        """Add a program of tests/upgrade."""
        path = str(REPOSITORY / "tests" / "upgrade" / f"{name}.py")
        return self._add(f"{name}-{len(self.processes)}", [path, *words], r"^of ")

    def client(self, name: str, work: str, log: str, uri: str = "", *more: str) -> Process:
        """Add a client that does one of the works of `client.py`."""
        return self._add(name, [_CLIENT, work, uri or self.uri, log, *more], r"^of ")

    def read(self, release: Installed, log: str, uri: str = "", *, first: int = 1) -> int:
        """Let a client of a release read a log whole; return the number of its last record."""
        name = f"read-{len(self.processes)}"
        process = self.client(name, "read", log, uri, str(first)).start(release)
        output = process.ended()
        assert f"of {release.folder}" in output
        assert re.search(r"^at \d+$", output, re.MULTILINE), output
        return process.at

    def job(self, source: str, copy: str) -> Process:
        """Add a streaming query, which goes on from its checkpoint at each start."""
        checkpoint = str(self.folder / "checkpoint")
        return self._add("job", [_JOB, self.uri, source, copy, checkpoint], r"^of ")

    def releases(self) -> dict[Role, set[str]]:
        """Return by role the versions that the members tell."""

        async def members() -> tuple[Member, ...]:
            async with await open_namespace(self.uri) as namespace:
                return (await look(namespace.ports)).members

        known: dict[Role, set[str]] = {}
        for member in run(members()):
            known.setdefault(member.role, set()).add(member.version)
        return known

    def _add(self, name: str, command: list[str], announcement: str) -> Process:
        process = Process(name, command, announcement, self)
        self.processes.append(process)
        return process

    def _free_port(self) -> int:
        """Return a port that no other process gets while its process ends and starts again."""
        self._reserved.append(PortReservation(0))
        return self._reserved[-1].port
