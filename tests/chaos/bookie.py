"""A bookie whose disk can be told to fail or to be slow: for machines without strace.

`python -m tests.chaos.bookie CONTROL-FILE ...` is `python -m bookie ...`, but each sync, and each
write, which may sync by itself, first looks into the file: "error" makes it fail, "delay SECONDS"
makes it wait, no file is an ordinary disk.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from bookie.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


def obey(control: Path, sync: Callable[P, T]) -> Callable[P, T]:
    """Return `sync` with the faults that the file `control` asks for at each call."""

    def sync_or_fail(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            command, _, argument = control.read_text().partition(" ")
        except FileNotFoundError:
            command = argument = ""
        if command == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if command == "delay":
            time.sleep(float(argument))
        return sync(*args, **kwargs)

    return sync_or_fail


if __name__ == "__main__":
    control_file = Path(sys.argv[1])
    os.fsync = obey(control_file, os.fsync)
    os.fdatasync = obey(control_file, os.fdatasync)
    os.pwritev = obey(control_file, os.pwritev)
    sys.exit(main(sys.argv[2:]))
