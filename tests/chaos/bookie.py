"""A bookie whose disk can lose power, fail or be slow on command where there is no strace.

`python -m tests.chaos.bookie CONTROL-FILE JOURNAL ...` is `python -m bookie ...`, but each sync,
and each write, which may sync by itself, first looks into the file: "error" makes it fail, "delay
SECONDS" makes it wait, no file is an ordinary disk.  JOURNAL is what a loss of power may take back
(`tests/fixtures/power.py`).  `DLOG_CHAOS_MUTANT` in the environment is a known bug to put back, for
those who try out whether a run finds it.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from bookie.__main__ import main
from tests.fixtures.power import Journal

if TYPE_CHECKING:
    from collections.abc import Callable

MUTANT = "DLOG_CHAOS_MUTANT"
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


def run(control: Path, journal: Path, arguments: list[str]) -> int:
    """Run the bookie; return its exit status."""
    os.fsync = obey(control, os.fsync)
    os.fdatasync = obey(control, os.fdatasync)
    os.pwritev = obey(control, os.pwritev)
    folder = Path(arguments[arguments.index("--data-dir") + 1])
    folder.mkdir(exist_ok=True)
    Journal(journal, folder).watch(folder)
    with ExitStack() as stack:
        if mutant := os.environ.get(MUTANT):
            from tests.simulation.mutants_tested import TESTED

            stack.enter_context(TESTED[mutant].apply())
        return main(arguments)


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
