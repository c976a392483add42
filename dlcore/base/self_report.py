"""A file in the memory of a server, in which it tells its settings, and its stacks at a signal.

`dlog debug bundle` finds the servers of a machine by these files: /proc shows them to the user of
the process and to root, and to no one else.  Nothing is on a disk, and nothing is left at the end.

The first line is an object with the settings in use.  They name files of keys and tokens, and hold
none.  At SIGUSR2 the stacks of all threads are written below it, by the handler of the signal
itself: also by a process whose event loop hangs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from typing import TYPE_CHECKING

from dlcore.base.log_lines import escaped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.base.log_lines import Process

NAME_PREFIX = "dlog "
"""How the names of these files begin; role and name of the process follow."""
STACKS_SIGNAL = signal.SIGUSR2
_NAME_BYTES_MAX = 200


def report_oneself(process: Process, settings: Mapping[str, object]) -> None:
    """Tell the settings of this process, and at `STACKS_SIGNAL` its stacks; only on Linux."""
    if not hasattr(os, "memfd_create"):
        return
    name = escaped(f"{NAME_PREFIX}{process.role} {process.name}").encode()
    file = os.memfd_create(name[:_NAME_BYTES_MAX].decode(errors="ignore"))
    os.fchmod(file, 0o600)
    report = {"role": process.role, "name": process.name, "settings": settings}
    os.write(file, json.dumps(report, default=str).encode() + b"\n")
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
