"""Goal: without the calls that only Linux has, dlog imports, stores, and talks to a cluster.

Method: fresh Pythons that lack them (`tests/fixtures/not_linux`), which is no proof for macOS: its
kernel and its file systems are not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.other_system import run_elsewhere, run_tests_elsewhere

if TYPE_CHECKING:
    from pathlib import Path

IMPORTS = """
import fcntl, importlib, os, pkgutil, select, signal, socket, sys

assert sys.platform == "darwin"
gone = (os, "pwritev"), (os, "O_DIRECT"), (signal, "pidfd_send_signal"), (select, "epoll")
assert not [name for module, name in gone if hasattr(module, name)]
try:
    open("/proc/self/stat")
except FileNotFoundError:
    pass
else:
    raise AssertionError("/proc is there")
count = 0
for package in map(importlib.import_module, ("dlcore", "bookie", "dlspark")):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name != "dlcore.ops.cli.__main__":  # which runs the command
            importlib.import_module(module.name)
            count += 1
importlib.import_module("pyspark_dlog")
print(count)
"""
CLUSTER = """
import subprocess, sys
from dlcore import LogRecord
from dlcore.sync import open_namespace as open_remote
from dlcore.ops.sandbox import Sandbox
from dlcore.sync import open_namespace

with Sandbox(3, data_dir=sys.argv[1], proxies=1, autorecovery=False) as sandbox:
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log("clicks")
        with namespace.open_log("clicks") as log:
            with log.open_writer() as writer:
                writer.write(LogRecord(txid=1, payload=b"all answer"))
                writer.flush()
                sandbox.bookies[0].pause()
                writer.write(LogRecord(txid=2, payload=b"one stands still"))
                writer.flush()
                sandbox.bookies[0].resume()
            with log.open_reader() as reader:
                print([bytes(record.payload) for record, _ in zip(reader, range(2))], flush=True)
    endpoint = sandbox.proxies[0].location
    with open_remote(endpoint) as remote, remote.open_log("clicks") as log:
        with log.open_writer() as writer:
            writer.write(LogRecord(txid=3, payload=b"by a proxy"))
        print(log.read().to_arrow().column("value").to_pylist(), flush=True)
    for bookie in sandbox.bookies:
        bookie.kill()
        bookie.restart()
    dlog = [sys.executable, "-m", "dlcore.ops.cli", "--endpoint", endpoint]
    subprocess.run([*dlog, "log", "write", "clicks"], input=b"by a command\\n", check=True)
    subprocess.run([*dlog, "log", "tail", "clicks"], check=True)
"""


def test_every_module_imports() -> None:
    """Also those whose calls fail there: they fail when they are called, and say why."""
    assert int(run_elsewhere("-W", "error", "-c", IMPORTS)) > 300


def test_a_bookie_stores_and_finds_its_entries() -> None:
    """Appends, syncs, restarts after a kill, reads, compaction and collection of garbage."""
    tests = ("storage", "storage_kill", "compaction_kill", "real_disk", "garbage_collector")
    files = [f"tests/bookie/test_{name}.py" for name in tests]
    output = run_tests_elsewhere("tests/contracts/test_disk.py", *files)
    assert "failed" not in output
    assert "skipped" not in output


def test_the_sandbox_kills_what_it_started() -> None:
    """By process ids, and the time of their start, where there are no descriptors of processes."""
    assert "3 passed" in run_tests_elsewhere("tests/dlcore/ops/sandbox/test_warden.py")


@pytest.mark.integration
def test_a_cluster_serves_clients(tmp_path: Path) -> None:
    """All of its processes and all of its clients are there."""
    lines = run_elsewhere("-c", CLUSTER, str(tmp_path)).splitlines()
    assert lines[0] == "[b'all answer', b'one stands still']"
    assert lines[1] == "[b'all answer', b'one stands still', b'by a proxy']"
    assert "by a command" in lines[-1]
