"""Runs many `dlog` commands in one go, each in a process of its own that costs no start.

``python -m tests.dlcore.ops.cli.many_commands FOLDER LIMIT_S`` reads from standard input a JSON
list of [where the output goes, arguments]; it prints one of [exit code, what was said on standard
error].  An output is "full", a disk without room, "left", a pipe without a reader, or "kept", one
that takes all.  A command that takes longer than the limit is killed.

All that commands import is imported once; then each is a fork, some at a time.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from dlcore.ops.cli.app import main as dlog

_AT_ONCE = 12
_POLL_S = 0.01


def run_all(
    wanted: list[tuple[str, list[str]]], folder: Path, limit_s: float
) -> list[tuple[int, str]]:
    """Run the commands; return how each ended, in their order."""
    files = [folder / str(number) for number in range(len(wanted))]
    left = list(enumerate(wanted))
    running: dict[int, tuple[int, float]] = {}  # by process: its number, and when its time ends
    exit_codes: dict[int, int] = {}
    while left or running:
        while left and len(running) < _AT_ONCE:
            number, (output, arguments) = left.pop(0)
            process = os.fork()
            if not process:
                _become(output, files[number])
                _run(arguments)
            running[process] = number, time.monotonic() + limit_s
        for process, (number, end_s) in list(running.items()):
            if time.monotonic() > end_s:
                os.kill(process, signal.SIGKILL)
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                exit_codes[number] = os.waitstatus_to_exitcode(status)
                del running[process]
        time.sleep(_POLL_S)
    return [(exit_codes[number], file.read_text()) for number, file in enumerate(files)]


def _run(arguments: list[str]) -> NoReturn:
    """Run a command, and end as the interpreter does, but for taking everything apart."""
    exit_code: object = 0
    try:
        dlog(arguments)
    except SystemExit as ended:
        exit_code = ended.code
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
        exit_code = 1
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except OSError:
        traceback.print_exc()
        exit_code = 120
    sys.stderr.flush()
    os._exit(exit_code if isinstance(exit_code, int) else 1)


def _become(output: str, errors: Path) -> None:
    """Give this process the outputs that the command is to have."""
    if output == "left":
        read_end, target = os.pipe()
        os.close(read_end)
    else:
        target = os.open("/dev/full" if output == "full" else os.devnull, os.O_WRONLY)
    os.dup2(target, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


if __name__ == "__main__":
    # The commands import these when they begin their work.
    import dlcore.api.copying
    import dlcore.metadata.zookeeper
    import dlcore.ops.inspection
    import dlcore.sync
    import dlcore.wire.client  # noqa: F401
    from dlcore.ops.autorecovery import maintenance, service  # noqa: F401

    gc.freeze()
    json.dump(run_all(json.load(sys.stdin), Path(sys.argv[1]), float(sys.argv[2])), sys.stdout)
