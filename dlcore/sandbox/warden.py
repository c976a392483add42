"""A script, run as a process of its own: kills the processes it was told of when its parent ends.

Standard input brings one process id per line, and its end says that the parent is gone, however
that happened.  Descriptors that it inherits (the folder's lock) stay open until all are dead.
"""

from __future__ import annotations

import os
import select
import signal
import sys


def main() -> None:
    """Collect process ids until standard input ends, then kill what still runs."""
    processes: list[int] = []  # pid descriptors: they never mean a later process of the same id
    for line in sys.stdin:
        try:
            processes.append(os.pidfd_open(int(line)))
        except ProcessLookupError:
            continue  # it is dead already
    for process in processes:
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
        select.select([process], [], [])  # readable when it is dead


if __name__ == "__main__":
    main()
