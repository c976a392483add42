"""A script, run as a process of its own: kills the processes it was told of when its parent ends.

Standard input brings one process id per line, and its end says that the parent is gone, however
that happened.  Descriptors that it inherits (the folder's lock) stay open until all are dead.
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
    """A process by its descriptor, which never means a later process of the same id.

    Raises:
        ProcessLookupError: it is gone.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        """Kill it, and wait until it is dead; one that is gone already is no error."""
        try:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return
        select.select([self._descriptor], [], [])  # readable when it is dead


class _ByStart:
    """The same where there are no such descriptors: the time of its start tells it from others."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._start = _start_of(pid)
        if self._start is None:
            raise ProcessLookupError(f"no process {pid}")

    def kill(self) -> None:
        """Kill it, and wait until it is dead; one that is gone already is no error."""
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
    """Return when a process began, None for one that is dead, whether or not it was waited for."""
    command = ["ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    state, _, start = ended.stdout.strip().partition(" ")
    return None if not start or state.startswith("Z") else start.strip()


def main() -> None:
    """Collect process ids until standard input ends, then kill what still runs."""
    kind = _ByDescriptor if hasattr(os, "pidfd_open") else _ByStart
    processes: list[_ByDescriptor | _ByStart] = []
    for line in sys.stdin:
        try:
            processes.append(kind(int(line)))
        except ProcessLookupError:
            continue  # it is dead already
    for process in processes:
        process.kill()


if __name__ == "__main__":
    main()
