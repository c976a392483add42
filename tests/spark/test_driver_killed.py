"""A driver that dies around a commit, or stands still within one: each record is written once.

Goal: between the metadata transaction and Spark's own commit log there is no moment in which a
crash loses or doubles a batch, or leaves staged data behind; nor in which a driver that was taken
for dead does so when it goes on.  Method: a driver process whose commit waits at the moment in
question, is killed or stopped there, and is started again from its checkpoint: first before the
transaction, then after it.  The last run, by the session of the tests, goes through.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.spark import list_staged, spark_environment
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.spark import LogBench

pytestmark = [
    pytest.mark.spark,
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.prove,  # `test_failed_commit_is_retried_once` has both moments without a kill
]
TIMEOUT_S = 180


@contextlib.contextmanager
def driver(
    logs: LogBench, source: str, target: str, folder: Path, pause: str
) -> Iterator[subprocess.Popen[str]]:
    """Run `tests.spark.driver`; whatever happens, neither it nor its JVM is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.driver", logs.uri, source, target, str(folder), pause],
        env=spark_environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    jvm = 0
    try:
        for line in process.stdout:
            if line.startswith("jvm "):
                jvm = int(line.split()[1])
                break
        yield process
    finally:
        process.kill()
        if jvm:
            with contextlib.suppress(ProcessLookupError):
                os.kill(jvm, signal.SIGKILL)
        signal_all(process, signal.SIGKILL)
        process.wait(TIMEOUT_S)
        process.stdout.close()


def signal_all(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to the process and all that came of it."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(path.name)) == process.pid:
                os.kill(int(path.name), number)


@contextlib.contextmanager
def standing_still(
    logs: LogBench, process: subprocess.Popen[str], *, others: set[str]
) -> Iterator[None]:
    """Stop a driver for longer than its sessions last; it goes on at the end."""
    assert list_staged(logs.uri, "none")[1] - others, "its tasks have sessions"
    signal_all(process, signal.SIGSTOP)
    try:
        wait_until(lambda: list_staged(logs.uri, "none")[1] <= others, timeout_s=TIMEOUT_S)
        yield
    finally:
        signal_all(process, signal.SIGCONT)


def run_into_pause(logs: LogBench, source: str, target: str, folder: Path, pause: str) -> None:
    """Run a driver until it waits at `pause`, and kill it there."""
    marker = folder / pause
    with driver(logs, source, target, folder, pause) as process:
        wait_until(lambda: marker.exists() or process.poll() is not None, timeout_s=TIMEOUT_S)
        assert process.poll() is None
    assert not list((folder / "checkpoint" / "commits").glob("[0-9]*"))


def test_killed_driver(logs: LogBench, tmp_path: Path) -> None:
    """Before the transaction nothing is there, after it everything; in the end all of it once."""
    source, target = logs.create("in"), logs.create("out")
    logs.append(source, [(n, b"%d" % n) for n in range(50)])
    _, owners_before = list_staged(logs.uri, "none")
    run_into_pause(logs, source, target, tmp_path, "before-commit")
    assert logs.payloads(target) == []
    query_id = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
    identity = f"stream:{query_id}"
    staged_first, _ = list_staged(logs.uri, identity)
    assert staged_first
    run_into_pause(logs, source, target, tmp_path, "after-commit")
    assert len(logs.payloads(target)) == 50
    staged_second, _ = list_staged(logs.uri, identity)
    # The dead processes' sessions end after their time-out; then their staged records are unowned.
    wait_until(lambda: list_staged(logs.uri, identity)[1] <= owners_before, timeout_s=TIMEOUT_S)
    logs.append(source, [(n, b"%d" % n) for n in range(50, 60)])
    frame = logs.stream(log=source, startingOffsets="earliest")
    writer = frame.writeStream.format("dlog").options(uri=logs.uri, log=target)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    wait_until(lambda: len(logs.payloads(target)) >= 60 or not query.isActive, timeout_s=TIMEOUT_S)
    assert query.isActive, query.exception()
    # Leftovers are settled after the commit's answer, by a process that ends with the query.
    left = staged_first | staged_second
    wait_until(lambda: not list_staged(logs.uri, identity)[0] & left, timeout_s=TIMEOUT_S)
    query.stop()
    assert logs.payloads(target) == [b"%d" % n for n in range(60)]


def test_frozen_driver(logs: LogBench, tmp_path: Path) -> None:
    """Its sessions are gone when it goes on: alone, or when another one has taken its place."""
    source, target = logs.create("in"), logs.create("out")
    marker, checkpoint = tmp_path / "within-commit", tmp_path / "checkpoint"

    def append(*numbers: int) -> None:
        logs.append(source, [(n, b"%d" % n) for n in numbers])

    def wait_for(count: int) -> None:
        wait_until(lambda: len(logs.payloads(target)) >= count, timeout_s=TIMEOUT_S)

    append(*range(50))
    _, others = list_staged(logs.uri, "none")
    with driver(logs, source, target, tmp_path, marker.name) as frozen:
        wait_until(marker.exists, timeout_s=TIMEOUT_S)
        with standing_still(logs, frozen, others=others):
            marker.unlink()
            assert logs.payloads(target) == []
        wait_for(50)
        append(*range(50, 60))
        wait_until(marker.exists, timeout_s=TIMEOUT_S)
        assert (checkpoint / "commits" / "0").exists(), "it went on with its own batch"
        with standing_still(logs, frozen, others=others):
            frame = logs.stream(log=source, startingOffsets="earliest")
            writer = frame.writeStream.format("dlog").options(uri=logs.uri, log=target)
            query = writer.option("checkpointLocation", str(checkpoint)).start()
            wait_until((checkpoint / "commits" / "1").exists, timeout_s=TIMEOUT_S)
            assert len(logs.payloads(target)) == 60
            marker.unlink()
        assert frozen.wait(TIMEOUT_S) != 0, "Spark finds its checkpoint taken"
        append(*range(60, 70))
        wait_for(70)
        assert query.isActive, query.exception()
        query.stop()
    assert logs.payloads(target) == [b"%d" % n for n in range(70)]
