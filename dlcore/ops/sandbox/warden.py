"""A script for a separate process: kills the watched processes when its parent ends.

Standard input brings one process id per line.  Its end means that the parent is gone, for any
reason.  Inherited descriptors (the folder's lock) stay open until all processes are dead.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

_POLL_INTERVAL_S = 0.02


class _ByDescriptor:
    """A process by its descriptor, which never refers to a later process with the same id.

    Raises:
        ProcessLookupError: the process is gone.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        """Kill the process, and wait until it is dead; it is no error if it is gone already."""
        try:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return
        select.select([self._descriptor], [], [])  # readable when the process is dead


class _ByStart:
    """The same on systems without such descriptors: its start time identifies the process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._start = _start_of(pid)
        if self._start is None:
            raise ProcessLookupError(f"no process {pid}")

    def kill(self) -> None:
        """Kill the process, and wait until it is dead; it is no error if it is gone already."""
        if not self._is_alive():
            return
        try:
            os.kill(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        while self._is_alive():
            time.sleep(_POLL_INTERVAL_S)

    def _is_alive(self) -> bool:
        return _start_of(self._pid) == self._start


def _start_of(pid: int) -> str | None:
    """Return the start time of a process, None for a dead one, also before it was waited for."""
    command = ["ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    state, _, start = ended.stdout.strip().partition(" ")
    return None if not start or state.startswith("Z") else start.strip()


def main() -> None:
    """Collect process ids until standard input ends, then kill the processes that still run."""
    kind = _ByDescriptor if hasattr(os, "pidfd_open") else _ByStart
    processes: list[_ByDescriptor | _ByStart] = []
    for line in sys.stdin:
        try:
            processes.append(kind(int(line)))
        except ProcessLookupError:
            continue  # the process is dead already
    for process in processes:
        process.kill()


if __name__ == "__main__":
    main()
