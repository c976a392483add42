"""The processes that the demo starts: a mark to know them by, and a check that none is left."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from uuid import uuid4

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import SparkSession

_MARK = "DLOG_DEMO_RUN"
_POLL_S = 0.1
_JAVA_TIMEOUT_S = 60


def mark_children() -> None:
    """From here on every process that this one starts, and theirs, carries a mark of this run."""
    os.environ[_MARK] = uuid4().hex


def marked_processes() -> dict[int, str]:
    """Return the command lines of this run's processes, this one left out, by process id."""
    # A process whose parent ends gets another parent, but its environment stays.
    wanted = f"{_MARK}={os.environ[_MARK]}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = command.decode(errors="replace")[:200]
        except OSError:
            continue  # it ended meanwhile, or is another user's: then it is not ours
    return found


def wait_until_alone(timeout_s: float) -> dict[int, str]:
    """Wait until no process of this run is left; return those that are when the time is over."""
    deadline = time.monotonic() + timeout_s
    while (left := marked_processes()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left


def stop_spark() -> None:
    """Stop Spark and its Java process, which would otherwise live as long as this one."""
    # A Ctrl-C that came in the middle of a call leaves a connection that no longer answers; what
    # cannot be stopped through it ends with the Java process.
    with contextlib.suppress(Py4JError):
        _stop_session()
    gateway = SparkContext._gateway
    if gateway is None:
        return
    with contextlib.suppress(Py4JError):
        gateway.shutdown()
    process = getattr(gateway, "proc", None)
    if process is not None:
        process.stdin.close()  # its Java process ends with its input
        process.wait(timeout=_JAVA_TIMEOUT_S)


def _stop_session() -> None:
    session = SparkSession.getActiveSession()
    if session is not None:
        for query in session.streams.active:
            query.stop()
        session.stop()
