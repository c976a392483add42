"""The processes of a run: each is kept running unless a fault means it to be down."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlcore.base.features import own_release
from dlcore.ops.sandbox.process import HOST, ChildProcess, PortReservation, Warden
from tests.chaos.threads import in_thread
from tests.fixtures.forking import LOADED_PYTHON

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from tests.upgrade.releases import Installed

REPOSITORY = Path(__file__).parents[2]
EXIT_FAILED, EXIT_REFUSED = 1, 2
_SERVING = re.compile(r"^bookie \S+ \(incarnation (\S+)\) serving on \S+$", re.MULTILINE)
_POLL_S = 0.1
_RESTART_DELAY_S = 0.5
_STOP_TIMEOUT_S = 90.0
"""To close everything in order on a busy machine; more means that something hangs."""


class Service:
    """One process that is started again when it ends, as an init system would do.

    A fault takes `turn` while it is at work, so that faults do not meet at one process.  A caller
    that wants it down sets `is_wanted` to False.

    Args:
        may_end: whether an end by itself, with this status and output, is what it should do then.
        installed: the release that it runs from its next start on; None: this release.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        *,
        log_path: Path,
        warden: Warden,
        may_end: Callable[[int, str], bool],
        installed: Installed | None = None,
    ) -> None:
        self.name = name
        self.installed = installed
        self.log_path = log_path
        self.turn = asyncio.Lock()
        self.is_wanted = False
        self.starts = 0
        self.unexpected: list[str] = []
        """The processes that ended in an unplanned way."""
        self._command = command
        self._warden = warden
        self._may_end = may_end
        self._child: ChildProcess | None = None
        self._paused = False
        self._reported: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """The id of the running process, if it runs."""
        return self._child.pid if self._child is not None and self._child.is_running else None

    @property
    def version(self) -> str:
        """The version of the release that it runs, or will at its next start."""
        return own_release().version if self.installed is None else self.installed.name

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self.pid is not None

    @property
    def exit_status(self) -> int | None:
        """How the latest process ended, if it did."""
        return None if self._child is None else self._child.exit_status

    @property
    def output(self) -> str:
        """The output of the latest process."""
        return "" if self._child is None else self._child.output()

    def start(self) -> None:
        """Start it, if it does not run; its end is watched from then on."""
        self.is_wanted = True
        if self.is_running:
            return
        self._child = ChildProcess(
            self._command(self.starts),
            log_path=self.log_path,
            warden=self._warden,
            environment=environment_of(self.installed),
        )
        self.starts += 1

    async def kill(self) -> None:
        """Kill it, and leave it down."""
        self.is_wanted = False
        if self._child is not None:
            self._note_end()
            await in_thread(self._child.kill)

    async def pause(self) -> None:
        """Let it stand still, if it runs."""
        if self._child is not None and self._child.is_running:
            self._paused = True
            await in_thread(self._child.pause)

    def resume(self) -> None:
        """Let it go on."""
        if self._paused and self._child is not None and self._child.is_running:
            self._child.resume()
        self._paused = False

    async def stop(self) -> bool:
        """Stop it in order; return False if it had to be killed, or failed on its way out.

        A process that is signalled to stop before it has begun to work ends by the signal itself.
        """
        self.is_wanted = False
        if self._child is None:
            return True
        self._note_end()
        began_s, had_begun = time.monotonic(), bool(self._child.output())
        await in_thread(self._child.terminate, timeout_s=_STOP_TIMEOUT_S)
        expected = (0,) if had_begun else (0, -signal.SIGTERM)
        in_time = time.monotonic() - began_s < _STOP_TIMEOUT_S
        return in_time and self._child.exit_status in expected

    async def keep_running(self) -> None:
        """Start it again whenever it has ended and is wanted; runs until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            if self.is_wanted and not self.is_running:
                self._note_end()
                await asyncio.sleep(_RESTART_DELAY_S)
                if self.is_wanted:
                    self.start()

    def _note_end(self) -> None:
        """Judge an end that was not asked for, once."""
        child = self._child
        if child is None or child is self._reported or child.exit_status is None:
            return
        self._reported = child
        output = child.output()
        if not self._may_end(child.exit_status, output):
            self.unexpected.append(f"{self.name} ended: {child.describe_end()}")


class BookieService(Service):
    """A bookie behind its proxies."""

    def __init__(
        self,
        name: str,
        *,
        folder: Path,
        program: Sequence[str],
        options: Callable[[], Sequence[str]],
        warden: Warden,
        installed: Installed | None = None,
    ) -> None:
        self.folder = folder
        self._reservation = PortReservation(0)
        self.port = self._reservation.port
        self._control_reservation = PortReservation(0)
        self.control_port = self._control_reservation.port
        self.has_failing_disk = False
        super().__init__(
            name,
            lambda _life: [
                *(LOADED_PYTHON, "-m", *program, "--name", name, "--data-dir", str(folder)),
                *("--host", HOST, "--port", str(self.port), "--watch-parent"),
                *("--control-port", str(self.control_port)),
                *options(),
            ],
            log_path=folder.with_name(f"{name}.log"),
            warden=warden,
            may_end=bookie_may_end,
            installed=installed,
        )

    @property
    def incarnation(self) -> str | None:
        """The data that the latest process serves, once it has said so."""
        match = _SERVING.search(self.output)
        return None if match is None else match[1]

    @property
    def serves(self) -> bool:
        """Whether it runs and has said that it serves."""
        return self.is_running and self.incarnation is not None

    def release(self) -> None:
        """Give the ports up."""
        self._reservation.release()
        self._control_reservation.release()


def environment_of(release: Installed | None) -> Mapping[str, str]:
    """Return the variables of a process of a release; None: of this one.

    The programs of `tests` are those of this release in any case, and use what both have.
    """
    if release is None:
        return {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
    given = release.environment
    return {**given, "PYTHONPATH": f"{given['PYTHONPATH']}{os.pathsep}{REPOSITORY}"}


def bookie_may_end(status: int, output: str) -> bool:
    """Whether a bookie ended as it should: it said why, and did not just break.

    Its disk failed or is full, the metadata store was away, or another session still held its name.
    """
    said_why = status in (EXIT_FAILED, EXIT_REFUSED) and "Traceback" not in output
    return said_why and ("failed: " in output or "refuses to start: " in output)


def client_may_end(_status: int, _output: str) -> bool:
    """Clients go on until they get the signal to stop."""
    return False


def proxy_may_end(status: int, output: str) -> bool:
    """Whether a proxy ended as it should: it did not reach the metadata store when it started."""
    return status != 0 and "Traceback" not in output and "error: " in output.lower()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A bound on waiting: generous, since the machine may be busy."""

    seconds: float

    async def wait(self, condition: Callable[[], Awaitable[bool]]) -> bool:
        """Return whether `condition` came to hold in time."""
        until_s = time.monotonic() + self.seconds
        while not await condition():
            if time.monotonic() >= until_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True
