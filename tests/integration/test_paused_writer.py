"""A process that is paused past its session, wakes up, and writes.

Goal: it never adds a record behind the back of the new owner of the log, and goes on where no one
does.  Method: a writer in a process of its own, stopped until ZooKeeper has ended its session.
"""

from __future__ import annotations

import signal
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast
from uuid import uuid4

import pytest

from dlcore import LogConfig, LogRecord
from dlcore.sync import open_namespace
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.sync import DistributedLogManager, Namespace

pytestmark = pytest.mark.integration

_WRITER = """
import sys
from dlcore import LogRecord
from dlcore.base.errors import DLError
from dlcore.sync import open_namespace

with open_namespace(sys.argv[1]) as namespace, namespace.open_log(sys.argv[2]) as log:
    writer = log.open_writer()
    for line in sys.stdin:
        try:
            writer.write(LogRecord(int(line), b"paused"))
            writer.flush()
            print("durable", flush=True)
        except DLError as error:
            print(type(error).__name__, flush=True)
    writer.abort()
"""
_SESSION_ENDS_S = 60.0


class Writer:
    """A process that writes on command, and reports the result."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def write(self, txid: int) -> str:
        """Let it write a record; return what it says."""
        self.begin(txid)
        return self.answer()

    def begin(self, txid: int) -> None:
        """Tell it to write a record."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{txid}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """Return what it says of the next record."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def pause(self) -> None:
        """Stop it in the middle of whatever it does."""
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let it go on as if nothing had happened."""
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def writer_of(uri: str, log: str) -> Iterator[Writer]:
    """Yield a writer in a process of its own."""
    with subprocess.Popen(
        [LOADED_PYTHON, "-c", _WRITER, uri, log],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Writer(process)
        finally:
            process.kill()


def is_owned(namespace: Namespace, log: DistributedLogManager) -> bool:
    """Return whether a process has the log's writer lock."""
    direct = cast("DirectNamespace", namespace._namespace)
    logs, key = direct.log_context.logs, cast("DirectLog", log._manager)._log
    return namespace._call(logs.locks.holder_of(key)) is not None


def test_a_paused_writer_that_was_replaced_writes_nothing(namespace_uri: str) -> None:
    """It learns at its next record that another owns the log; the other's records stay."""
    name = f"paused/{uuid4().hex}"
    with open_namespace(namespace_uri) as namespace:
        log = namespace.open_log(
            name, config=LogConfig(lock_timeout_s=_SESSION_ENDS_S), create_if_missing=True
        )
        with writer_of(namespace_uri, name) as paused:
            assert paused.write(1) == "durable"
            paused.pause()
            paused.begin(3)
            with log.open_writer() as other:  # waits until the session of the first has ended
                other.write(LogRecord(2, b"other"))
                other.flush()
                paused.wake()
                assert paused.answer() in {
                    "LedgerFencedError",
                    "OwnershipAcquireFailedError",
                    "WriteError",
                }
                assert paused.write(5) == "WriteError"
                other.write(LogRecord(4, b"other"))
                other.flush()
            with log.open_reader() as reader:
                assert [each.txid for each in reader.read_bulk(100)] == [1, 2, 4]


def test_a_paused_writer_without_a_replacement_goes_on(namespace_uri: str) -> None:
    """Its session and lock are gone; it takes the log again and writes on in its segment.

    A record that it writes before it notices is in the log, for its ledger is not fenced.
    """
    name = f"paused/{uuid4().hex}"
    with open_namespace(namespace_uri) as namespace:
        log = namespace.open_log(name, create_if_missing=True)
        with writer_of(namespace_uri, name) as paused:
            assert paused.write(1) == "durable"
            paused.pause()
            wait_until(lambda: not is_owned(namespace, log), timeout_s=_SESSION_ENDS_S)
            paused.begin(2)
            paused.wake()
            assert paused.answer() == "durable"
            wait_until(lambda: is_owned(namespace, log), timeout_s=_SESSION_ENDS_S)
            assert paused.write(3) == "durable"
            assert len(log.get_log_segments()) == 1
            with log.open_reader() as reader:
                # While it lives: it tells readers of its last record once that is durable.
                assert [each.txid for each in reader.read_bulk(3, timeout_s=60)] == [1, 2, 3]
