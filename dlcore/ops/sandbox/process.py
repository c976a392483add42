"""Child processes that cannot outlive this one, and ports for them to listen on."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dlcore.base.errors import ConfigurationError
from dlcore.ops.sandbox import warden

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Mapping, Sequence

    from dlcore.base.errors import DLError

HOST = "127.0.0.1"
GATE = ("/bin/sh", "-c", 'read -r go && exec "$@"', "sh")
"""Arguments before a command that delay its start until its standard input has a line."""
_POLL_INTERVAL_S = 0.02
_TERMINATION_TIMEOUT_S = 15.0
_PAUSE_TIMEOUT_S = 15.0
_LOG_TAIL_BYTES = 2000


class Warden:
    """Kills the watched processes when this process ends, even by SIGKILL.

    It is a separate process.  `PR_SET_PDEATHSIG` is not enough: it depends on the *thread* that
    started a child.
    """

    def __init__(self, *, held_open: Sequence[int] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", warden.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=held_open,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """Watch the child `pid`."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % pid)
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill the remaining processes, and end the warden."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


class ChildProcess:
    """One child: its output goes to a log file, and its standard input ends with this process."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        warden: Warden,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log_path = log_path
        self._is_asked = False
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        with log_path.open("ab") as log:
            # The gate opens only once the warden knows the process, so that none is missed.
            self._process = subprocess.Popen(
                [*GATE, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                # Ctrl-C goes only to this process, which then stops its children in order.
                start_new_session=True,
            )
        warden.watch(self._process.pid)
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """The exit status (negative: the signal that ended it), or None while it runs."""
        return self._process.poll()

    def kept_waiting_s(self) -> float:
        """Return how long the process waited for a processor; 0 where the system does not tell."""
        try:  # only Linux has this file
            counts = Path(f"/proc/{self.pid}/schedstat").read_text(encoding="ascii").split()
        except OSError:
            return 0.0
        return int(counts[1]) / 1e9

    def kill(self) -> None:
        """Kill the process (SIGKILL) and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        self._close_stdin()

    def ask_to_stop(self) -> None:
        """Send SIGTERM, and resume the process if it is paused; do not wait."""
        if self.is_running:
            self._process.send_signal(signal.SIGCONT)
            if not self._is_asked:
                # Only once: an interpreter that is ending has no handler any more, and would be
                # killed.
                self._is_asked = True
                self._process.terminate()

    def terminate(self, *, timeout_s: float = _TERMINATION_TIMEOUT_S) -> None:
        """Stop the process with SIGTERM and wait; kill it if it does not end in time."""
        self.ask_to_stop()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close_stdin()

    def pause(self) -> None:
        """Stop the process with SIGSTOP; return when it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        else:  # macOS before Python 3.13; `waitpid` would take the exit status from `subprocess`
            wait_until(
                lambda: not self.is_running or _state_of(self.pid).startswith("T"),
                timeout_s=_PAUSE_TIMEOUT_S,
            )

    def resume(self) -> None:
        """Continue the process after `pause`."""
        self._process.send_signal(signal.SIGCONT)

    def output(self) -> str:
        """Return the output since the start of the process."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def describe_end(self) -> str:
        """Return its exit status and last output, for an error message."""
        tail = self.output()[-_LOG_TAIL_BYTES:].strip()
        return f"exit status {self.exit_status}; the end of {self.log_path}:\n{tail}"

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


class Restartable:
    """A process of a sandbox, which can be started again."""

    name: str
    """Its name in messages."""
    _child: ChildProcess | None = None

    @property
    def pid(self) -> int:
        """The process id of the latest start."""
        return self._latest_child.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._child is not None and self._child.is_running

    def kill(self) -> None:
        """Kill the process with SIGKILL, as a crash would, and wait until it is gone."""
        self._latest_child.kill()

    def pause(self) -> None:
        """Stop the process with SIGSTOP, until `resume`."""
        self._latest_child.pause()

    def resume(self) -> None:
        """Continue the process after `pause`."""
        self._latest_child.resume()

    @property
    def _latest_child(self) -> ChildProcess:
        if self._child is None:
            raise ConfigurationError(f"{self.name} is not started")
        return self._child

    def _wait_for(
        self, announcement: re.Pattern[str], *, timeout_s: float, error: type[DLError]
    ) -> re.Match[str]:
        """Wait until the latest process announces that it serves, or raise such an error."""
        child = self._latest_child
        has_settled = wait_until(
            lambda: not child.is_running or announcement.search(child.output()) is not None,
            timeout_s=timeout_s,
            child=child,
        )
        served = announcement.search(child.output())
        if served is None or not child.is_running:
            problem = "ended" if has_settled else f"does not serve after {timeout_s:g} s"
            raise error(f"{self.name} {problem}: {child.describe_end()}")
        return served


class Startable(ABC):
    """One or more processes that run from `start` until `stop`, or for a `with` block."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all processes and wait until they serve; do nothing if they run."""
        if self.is_running:
            return
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether there is nothing to start."""

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None:
        """Stop all processes; do nothing if none runs."""


def taken_port(host: str, port: int) -> ConfigurationError:
    """Return the error of a port that another process has."""
    return ConfigurationError(
        f"port {port} of {host} is taken: expected a free one; another sandbox may run"
    )


class PortReservation:
    """Holds a port of the loopback interface without listening, until a child uses it.

    On Linux a child that sets SO_REUSEADDR, as ZooKeeper does, can bind and listen meanwhile, and
    no other process gets the port as a free one.  Other systems do not allow this: there the port
    was free a moment ago, and is not held.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((HOST, port))
        except OSError as error:
            self._socket.close()
            if error.errno != errno.EADDRINUSE:
                raise ConfigurationError(f"port {port} of {HOST}: {error.strerror}") from error
            raise taken_port(HOST, port) from error
        except OverflowError as error:
            self._socket.close()
            raise ConfigurationError(f"port {port}: expected 0 … 65535") from error
        self.port: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self._socket.close()

    def release(self) -> None:
        """Release the port."""
        self._socket.close()


def _state_of(pid: int) -> str:
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout


def wait_until(
    condition: Callable[[], bool], *, timeout_s: float, child: ChildProcess | None = None
) -> bool:
    """Return True as soon as `condition` holds, or False after `timeout_s`.

    The time in which the `child` that is waited for got no processor does not count.
    """
    # Blocking code has no event loop with a clock.
    began_s = time.perf_counter()
    while not condition():
        kept_s = 0.0 if child is None else child.kept_waiting_s()
        if time.perf_counter() - began_s >= timeout_s + kept_s:
            return False
        time.sleep(_POLL_INTERVAL_S)
    return True


def python_path() -> str:
    """Return PYTHONPATH for a child that runs this installation of dlog."""
    spec = importlib.util.find_spec("bookie")
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            "the package bookie is not installed: pip install distributed-dlog"
        )
    folder = str(Path(spec.origin).parent.parent)
    rest = os.environ.get("PYTHONPATH")
    return f"{folder}{os.pathsep}{rest}" if rest else folder
