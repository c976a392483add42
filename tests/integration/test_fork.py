"""Processes that fork while a namespace is open and its writer busy: parents and children go on.

They do so in a process of its own, since pytest's has threads of its own: one, in all ways.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from tests.fixtures.lengths import amount

if TYPE_CHECKING:
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

WAIT_S = 280
CHILDREN = amount(60, sampled=10)
PRELUDE = """
import os, subprocess, sys, threading
from dlcore import LogRecord
from dlcore.base.errors import ConfigurationError
from dlcore.sync import open_namespace
from uuid import uuid4
uri, log, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
namespace = open_namespace(uri)
namespace.create_log(log)
manager = namespace.open_log(log)
writer = manager.open_writer()
stop = threading.Event()
written = 0

def keep_busy():
    global written
    while not stop.is_set():
        for _ in range(50):
            writer.write(LogRecord(txid=written, payload=b"x" * 1000))
            written += 1
        writer.flush()
        stop.wait(0.01)

busy = threading.Thread(target=keep_busy, daemon=True)
busy.start()

def finish():
    stop.set()
    busy.join()
    writer.commit()
    assert manager.get_log_record_count() == written > 0
    namespace.close()

def child_of_its_own():
    with open_namespace(uri) as own:
        name = f"{log}-{uuid4().hex}"
        own.create_log(name)
        with own.open_log(name) as mine, mine.open_writer() as my_writer:
            my_writer.write(LogRecord(txid=1, payload=b"child"))
            my_writer.commit()
            with mine.open_reader() as reader:
                assert reader.read_next().payload == b"child"
        with own.open_log(log) as shared, shared.open_reader() as reader:
            assert len(reader.read_bulk(10)) == 10
    return 0
"""

WAYS = {
    # As py4j's gateway starts the JVM.
    "subprocess with preexec_fn": """
        failed = 0
        for _ in range(count):
            done = subprocess.run(["true"], preexec_fn=lambda: None, timeout=60)
            failed += done.returncode != 0
        assert failed == 0, f"{failed} of {count} children failed"
    """,
    "children that exit at once": """
        for number in range(count // 5):
            pid = os.fork()
            if pid == 0:
                sys.exit(number % 100)  # with all that Python does at exit
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == number % 100
    """,
    "children with connections of their own": """
        for _ in range(count // 10):
            pid = os.fork()
            if pid == 0:
                sys.exit(child_of_its_own())
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    """,
    "multiprocessing": """
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            results = [pool.apply_async(child_of_its_own) for _ in range(count // 10)]
            assert [each.get(100) for each in results] == [0] * (count // 10)
    """,
    "children that use what they inherited": """
        def refused(action):
            try:
                action()
            except ConfigurationError as error:
                return "open the namespace in the process that uses it" in str(error)
            return False

        for _ in range(count // 10):
            pid = os.fork()
            if pid == 0:
                uses = [
                    lambda: namespace.get_logs(), lambda: manager.open_writer(),
                    lambda: writer.write(LogRecord(txid=2**60, payload=b"child")),
                    lambda: writer.flush(), lambda: writer.commit(),
                ]
                refusals = [refused(use) for use in uses]
                writer.close(); manager.close(); namespace.close()
                sys.exit(0 if all(refusals) else 3)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    """,
    "children of a process that opens what Spark's tasks share": """
        from dlspark.options import Address
        from dlspark.sessions import close_shared_namespace, open_shared_namespace

        address = Address(uri=uri)

        def open_and_close():
            while not stop.is_set():
                open_shared_namespace(address)
                close_shared_namespace(address)

        opening = threading.Thread(target=open_and_close, daemon=True)
        opening.start()
        for _ in range(count // 10):
            pid = os.fork()
            if pid == 0:
                found = log in open_shared_namespace(address).get_logs()
                close_shared_namespace(address)
                sys.exit(0 if found else 3)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        stop.set()
        opening.join()
    """,
}


def test_forks_of_a_busy_writer(sandbox: Sandbox) -> None:
    """Every child does what it should, and the writer loses nothing."""
    parts = (f"print({way!r}, flush=True)\n{textwrap.dedent(code)}" for way, code in WAYS.items())
    program = "\n".join((PRELUDE, *parts, "finish()"))
    arguments = [sandbox.uri, f"fork/{uuid4().hex}", str(CHILDREN)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines() == list(WAYS)
