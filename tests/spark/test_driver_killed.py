"""A driver that dies with SIGKILL around a commit: restarted, it has written each record once.

Goal: between the metadata transaction and Spark's own commit log there is no moment in which a
crash loses or doubles a batch, or leaves staged data behind.  Method: a driver process whose commit
waits at the moment in question, is killed there, and is started again from its checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.metadata.zookeeper import ZooKeeperStore
from tests.fixtures.spark import spark_environment
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlcore.sync import Namespace
    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]
TIMEOUT_S = 180


@contextlib.contextmanager
def driver(
    logs: LogBench, source: str, target: str, folder: Path, *pause: str
) -> Iterator[subprocess.Popen[str]]:
    """Run `tests.spark.driver`; whatever happens, neither it nor its JVM is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.driver", logs.uri, source, target, str(folder), *pause],
        env=spark_environment(),
        stdout=subprocess.PIPE,
        text=True,
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
        for pid in (process.pid, jvm):
            if process.poll() is None or pid == jvm:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait(TIMEOUT_S)
        process.stdout.close()


def list_staged(namespace: Namespace, identity: str) -> tuple[set[str], set[str]]:
    """Return the ids of the ledgers staged under an identity, and of the processes that stage."""

    async def list_both() -> tuple[set[str], set[str]]:
        where = parse_uri(namespace.uri)
        paths = NamespacePaths(where.root)
        store = await ZooKeeperStore.connect(where.servers)
        try:
            ledgers = await store.get_children(paths.staging_of(identity))
            owners = await store.get_children(paths.staging_owners)
        finally:
            await store.aclose()
        return set(ledgers or ()), set(owners or ())

    return asyncio.run(list_both())


@pytest.mark.parametrize(
    ("pause", "visible"), [("pause-before-commit", 0), ("pause-after-commit", 50)]
)
def test_killed_driver(logs: LogBench, tmp_path: Path, pause: str, visible: int) -> None:
    """Before the transaction nothing is there, after it everything; in the end all of it once."""
    source, target = logs.create("in"), logs.create("out")
    logs.append(source, [(n, b"%d" % n) for n in range(50)])
    _, owners_before = list_staged(logs.namespace, "none")
    with driver(logs, source, target, tmp_path, pause) as process:
        wait_until(
            lambda: (tmp_path / "paused").exists() or process.poll() is not None,
            timeout_s=TIMEOUT_S,
        )
        assert process.poll() is None
    assert len(logs.payloads(target)) == visible
    assert not list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
    query_id = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
    identity = f"stream:{query_id}"
    left, _ = list_staged(logs.namespace, identity)
    assert left
    # The dead process's session ends after its time-out; from then on what it staged is nobody's.
    wait_until(
        lambda: list_staged(logs.namespace, identity)[1] <= owners_before, timeout_s=TIMEOUT_S
    )
    logs.append(source, [(n, b"%d" % n) for n in range(50, 60)])
    with driver(logs, source, target, tmp_path) as process:
        wait_until(
            lambda: len(logs.payloads(target)) >= 60 or process.poll() is not None,
            timeout_s=TIMEOUT_S,
        )
        (tmp_path / "stop").touch()
        assert process.wait(TIMEOUT_S) == 0
    assert logs.payloads(target) == [b"%d" % n for n in range(60)]
    still_left, _ = list_staged(logs.namespace, identity)
    assert not left & still_left
