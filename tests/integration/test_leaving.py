"""Programs that end without `close()`: what they wrote is in the log, or they say what is not.

Each runs as a process of its own against real bookies.  Afterwards a writer that does not wait for
the lock must get it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore.base.config import LogConfig
from dlcore.sync import open_namespace
from tests.fixtures.lengths import amount, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import Namespace
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration

WAIT_S = 120
LOST_STATUS = 120
MANY = amount(100_000, sampled=20_000)
PRELUDE = """
import os, signal, sys, threading, time
from dlcore import LogRecord
from dlcore.sync import open_namespace
uri, log = sys.argv[1:]

def write(writer, count, first=1):
    writer.write_bulk(LogRecord(txid=first + n, payload=b"%d" % (first + n)) for n in range(count))
"""
OPEN = "namespace = open_namespace(uri); writer = namespace.open_log(log).open_writer()\n"


@pytest.fixture(scope="module")
def namespace(sandbox: Sandbox) -> Iterator[Namespace]:
    """The shared cluster's namespace, for a look at what the programs left."""
    with open_namespace(sandbox.uri) as opened:
        yield opened


@pytest.fixture
def log(namespace: Namespace) -> str:
    """A fresh log."""
    name = f"leaving/{uuid4().hex}"
    namespace.create_log(name)
    return name


def start(code: str, uri: str, log: str) -> subprocess.Popen[str]:
    """Start a program."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), uri, log],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str], words: str = "") -> tuple[int, str]:
    """Say `words` to it and wait for its end; return exit code and standard error."""
    try:
        _, errors = process.communicate(words, timeout=WAIT_S)
    finally:
        process.kill()
    return process.returncode, errors


def txids_of(namespace: Namespace, log: str) -> list[int]:
    """Return what is in the log once a writer that waits for no other has recovered it."""
    with namespace.open_log(log, config=LogConfig(lock_timeout_s=0)) as manager:
        manager.open_writer().close()
        with manager.open_reader() as reader:
            return [record.txid for record in reader.read_bulk(1_000_000)]


EXITS = {
    "end": ("write(writer, 3)", 0, ""),
    "much": (f"write(writer, {MANY})", 0, ""),
    "sys.exit": ("write(writer, 3); sys.exit(7)", 7, ""),
    "unhandled": ("write(writer, 3); raise KeyError('mine')", 1, "KeyError: 'mine'"),
    # Python ends by the signal, or with 1 where its exit ran code from a string, as imports may.
    "interrupt": (
        "write(writer, 3); signal.raise_signal(signal.SIGINT)",
        (1, -signal.SIGINT),
        "KeyboardInterrupt",
    ),
    "exit in atexit": ("import atexit; atexit.register(print, 'x'); write(writer, 3)", 0, ""),
    "namespace closed": ("write(writer, 3); namespace.close()", 0, ""),
    "watching": (
        "watch = namespace.open_log(log).watch_segments(); next(watch); write(writer, 3)",
        0,
        "",
    ),
    "daemon": (
        """
        def work():
            write(writer, 3); written.set(); time.sleep(1000)
        written = threading.Event()
        threading.Thread(target=work, daemon=True).start()
        written.wait()
        """,
        0,
        "",
    ),
    "thread that writes on": (
        """
        def work():
            threading.main_thread().join(); time.sleep(0.2); write(writer, 3); writer.flush()
            write(writer, 3, first=4)
        threading.Thread(target=work).start()
        """,
        0,
        "",
    ),
    "executor that writes on": (
        """
        from concurrent.futures import ThreadPoolExecutor
        executor = ThreadPoolExecutor(1)
        for number in (1, 2, 3):
            executor.submit(lambda n=number: (time.sleep(0.1), write(writer, 1, n), writer.flush()))
        """,
        0,
        "",
    ),
    "term with a handler": (
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        write(writer, 3); os.kill(os.getpid(), signal.SIGTERM); time.sleep(1000)
        """,
        143,
        "",
    ),
    "forked by multiprocessing": (
        """
        writer.close(); namespace.close()
        import multiprocessing
        def work():
            global kept
            kept = open_namespace(uri).open_log(log).open_writer()
            write(kept, 3)
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start(); process.join(); sys.exit(process.exitcode)
        """,
        0,
        "",
    ),
}
REMOTE_OPEN = "from dlcore.sync import open_namespace\n" + OPEN
REMOTE_EXITS = ["end", "sys.exit", "unhandled", "interrupt", "much", "thread that writes on"]


def leave(way: str, opening: str, uri: str, log: str) -> None:
    """Let a process that writes end so, by itself, and complain of nothing else."""
    code, expected_status, expected_error = EXITS[way]
    status, errors = end(start(opening + textwrap.dedent(code), uri, log))
    statuses = expected_status if isinstance(expected_status, tuple) else (expected_status,)
    assert status in statuses, errors
    assert expected_error in errors
    assert errors.count("Traceback") == (1 if expected_error else 0), errors
    assert "dlcore" not in errors


def written(way: str) -> list[int]:
    """Return the transaction ids that a process writes which ends so."""
    return list(range(1, {"much": MANY, "thread that writes on": 6}.get(way, 3) + 1))


@pytest.mark.parametrize("way", sample(REMOTE_EXITS, 4))
def test_records_written_through_a_proxy_are_flushed(
    way: str, proxy: ProxyProcess, namespace: Namespace, log: str
) -> None:
    """By the same mechanism."""
    leave(way, REMOTE_OPEN, proxy.location, log)
    assert proxy.act("release", log=log)["released"]
    assert txids_of(namespace, log) == written(way)


@pytest.mark.parametrize("way", sample(EXITS, 6))
def test_written_records_are_flushed(
    way: str, sandbox: Sandbox, namespace: Namespace, log: str
) -> None:
    """Whichever way the process ends: all is there, the lock is free, and nothing is complained."""
    leave(way, OPEN, sandbox.uri, log)
    assert txids_of(namespace, log) == written(way)


def test_termination_by_default_keeps_what_was_flushed(
    sandbox: Sandbox, namespace: Namespace, log: str
) -> None:
    """Nothing runs then: what was not sent is gone, and the lock goes with the session."""
    code = OPEN + "write(writer, 3); writer.flush(); write(writer, 3, 4); print(flush=True)\n"
    process = start(code + "time.sleep(1000)", sandbox.uri, log)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert end(process) == (-signal.SIGTERM, "")
    with namespace.open_log(log, config=LogConfig(lock_timeout_s=60)) as manager:
        manager.open_writer().close()
    # Waiting records are sent in the background, after some milliseconds.
    found = txids_of(namespace, log)
    assert found == list(range(1, len(found) + 1))
    assert 3 <= len(found) <= 6


@pytest.mark.parametrize("gone", ["bookies", "everything"])
def test_unwritten_records_are_named_within_a_bounded_time(
    gone: str, fresh_sandbox: Callable[..., Sandbox]
) -> None:
    """Which records of which log, on standard error, and the exit status is not 0."""
    sandbox = fresh_sandbox()
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log("clicks")
    code = OPEN + "write(writer, 5); writer.flush(); print(flush=True); sys.stdin.readline()\n"
    code += "write(writer, 3, 6); import atexit; atexit.register(print, 'others still run')"
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, sandbox.uri, "clicks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    for bookie in sandbox.bookies:
        bookie.kill()
    if gone == "everything":
        sandbox.metadata_server.kill()
    out, errors = process.communicate("\n", timeout=WAIT_S)
    assert process.returncode == LOST_STATUS
    assert "others still run" in out
    assert "log 'clicks': not written: 3 records, transaction ids 6 to 8" in errors
    assert "Traceback" not in errors


ASYNC = """
import asyncio
from dlcore import open_namespace as open_async
async def main():
    namespace = await open_async(uri)
    writer = await (await namespace.open_log(log)).open_writer()
    await writer.write(LogRecord(txid=1, payload=b"1"))
    print(flush=True)
    sys.stdin.readline()
    for txid in (2, 3, 4):
        writer.write(LogRecord(txid=txid, payload=b"x"))
"""
ASYNC_ENDS = {
    "run": ("asyncio.run(main())", "its event loop ended"),
    "namespace": (
        "    await namespace.aclose()\nasyncio.run(main())",
        "its namespace was closed",
    ),
    "exit": ("    sys.exit(0)\nasyncio.run(main())", "its event loop ended"),
    "loop": ("loop = asyncio.new_event_loop(); loop.run_until_complete(main())", "process ended"),
}


@pytest.mark.parametrize("way", ASYNC_ENDS)
def test_the_async_face_says_what_was_not_written(
    way: str, sandbox: Sandbox, namespace: Namespace, log: str
) -> None:
    """No one can flush once the loop ended: that is logged, and the lock is free at once."""
    code, reason = ASYNC_ENDS[way]
    process = start(ASYNC + code, sandbox.uri, log)
    assert process.stdout is not None
    process.stdout.readline()
    for bookie in sandbox.bookies:
        bookie.pause()  # else they may have answered before the loop has ended
    try:
        status, errors = end(process, "\n")
    finally:
        for bookie in sandbox.bookies:
            bookie.resume()
    assert status == 0
    (line,) = [line for line in errors.splitlines() if "not written" in line]
    assert f"log {log!r}: not written: 3 records, transaction ids 2 to 4: " in line
    assert reason in line
    found = txids_of(namespace, log)
    assert found[0] == 1


def test_a_notebook_kernel_that_is_shut_down(
    sandbox: Sandbox, namespace: Namespace, log: str
) -> None:
    """Closing or restarting a notebook loses nothing that its cells wrote."""
    from jupyter_client.manager import KernelManager

    kernel = KernelManager(kernel_name="python3")
    kernel.start_kernel(env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        client = kernel.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=WAIT_S)
        code = PRELUDE.replace("sys.argv[1:]", repr((sandbox.uri, log))) + OPEN + "write(writer, 3)"
        reply = client.execute_interactive(code, timeout=WAIT_S)
        assert reply["content"]["status"] == "ok", reply
        client.stop_channels()
    finally:
        kernel.shutdown_kernel()
    assert txids_of(namespace, log) == [1, 2, 3]
