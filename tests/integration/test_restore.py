"""The restore drill: a cluster in use is exported, loses its metadata, and reads every record.

Goal: what was acknowledged before the export is read after the import, by bookies that start again
on their folders; metadata of ZooKeeper goes into the server of one host.
"""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from dlcore.base.records import LogRecord
from dlcore.log.metadata.store import LogStore
from dlcore.ops.sandbox.metadata_server import EmbeddedMetadataServer
from dlcore.sync import open_namespace
from tests.fixtures.shell import Shell
from tests.fixtures.waiting import wait_until
from tests.fixtures.zookeeper import ask_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.zookeeper import ZooKeeperStore
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
LOGS = ("clicks", "views", "orders")


@pytest.mark.parametrize("command", ["metadata export", "debug bundle"])
def test_a_killed_command_leaves_no_half_file_under_the_name(command: str, tmp_path: Path) -> None:
    """Method: its metadata server stands still, so that it is killed at its work."""
    folder = tmp_path / "out"
    folder.mkdir()
    with EmbeddedMetadataServer(tmp_path / "metadata") as server:
        uri = f"distributedlog://{server.servers}/dlog"
        line = [sys.executable, "-m", "dlcore.ops.cli", *command.split(), str(folder / "file")]
        server.pause()
        with subprocess.Popen([*line, "--uri", uri]) as process:
            try:
                wait_until(lambda: list(folder.iterdir()), timeout_s=60)
            finally:
                process.kill()
        server.resume()
    assert [each.suffix for each in folder.iterdir()] == [".partial"]


class Writers:
    """Appends to all logs until it is stopped; `acknowledged` has what each log holds for sure."""

    def __init__(self, uri: str) -> None:
        self.acknowledged: dict[str, int] = dict.fromkeys(LOGS, 0)
        self._uri = uri
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(log,)) for log in LOGS]

    def start(self) -> None:
        """Begin; return when all logs hold some records."""
        for thread in self._threads:
            thread.start()
        wait_until(lambda: min(self.acknowledged.values()) >= 20, timeout_s=60)

    def stop(self) -> None:
        """End."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _write(self, name: str) -> None:
        with open_namespace(self._uri) as namespace, namespace.open_log(name) as log:
            while not self._is_over.is_set():
                first = self.acknowledged[name]
                with log.open_writer() as writer:  # each begins another ledger
                    for number in range(first, first + 5):
                        writer.write(LogRecord(number, b"%d" % number))
                        if number % 2:
                            writer.flush()
                            self.acknowledged[name] = number + 1
                self.acknowledged[name] = first + 5
                self._is_over.wait(0.05)  # many ledgers would only be read for longer


def test_every_record_is_read_after_a_restore(
    fresh_sandbox: Callable[..., Sandbox], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """From ZooKeeper, while it is written, into the server of one host."""
    cluster, file = fresh_sandbox(3, zookeeper=True), tmp_path / "export"
    shell = Shell(cluster.uri, capsys)
    for name in LOGS:
        shell.text("log", "create", name)
    writers = Writers(cluster.uri)
    try:
        writers.start()
        before = dict(writers.acknowledged)
        assert shell.json("metadata", "export", str(file))["logs"] == len(LOGS)
    finally:
        writers.stop()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "expected the name of a new file" in shell.outcome("metadata", "export", str(file))[2]
    assert "there is a namespace" in shell.outcome("metadata", "import", str(file))[2]
    cluster.stop()

    shutil.rmtree(cluster.data_dir / "zookeeper")
    with EmbeddedMetadataServer(cluster.data_dir / "metadata") as server:
        other = Shell(f"distributedlog://{server.servers}/dlog", capsys)
        assert other.json("metadata", "import", str(file), "--dry-run")["dry_run"]
        assert other.json("metadata", "import", str(file))["logs"] == len(LOGS)
    again = fresh_sandbox(3, data_dir=cluster.data_dir)
    shell = Shell(again.uri, capsys)
    with open_namespace(again.uri) as namespace:
        for name in LOGS:
            with namespace.open_log(name) as log:
                with log.open_writer() as writer:  # it recovers what was open
                    writer.write(LogRecord(10**6, b"after"))
                payloads = [value for batch in log.read() for value in batch["value"].to_pylist()]
            count = len(payloads) - 1
            assert count >= before[name]
            assert payloads == [*(b"%d" % number for number in range(count)), b"after"]
    shell.text("log", "inspect", "--entries")
    assert shell.json("metadata", "accept", "--yes")["accepted"]
    assert not shell.json("metadata", "accept", "--yes")["accepted"]


def test_a_damaged_log_does_not_keep_the_others_from_a_copy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The export names it, and exits with 1; file, import and restore name it, too."""
    file = tmp_path / "export"

    async def damage(store: ZooKeeperStore, paths: NamespacePaths) -> None:
        log = await LogStore(store, paths).find("damaged")
        await store.put(paths.log_of(log.log_id).head, b"?", version=-1)

    with EmbeddedMetadataServer(tmp_path / "metadata") as server:
        shell = Shell(f"distributedlog://{server.servers}/dlog", capsys)
        shell.text("namespace", "create")
        for name in ("damaged", "whole"):
            shell.text("log", "create", name)
        ask_store(shell.uri, damage)
        code, out, err = shell.outcome("metadata", "export", str(file))
        assert code == 1
        assert "1 logs" in out
        assert "left out: log damaged, whose metadata are damaged: LogHead at" in err
        other = Shell(f"distributedlog://{server.servers}/other", capsys)
        for options in (("--dry-run",), ("--json",)):
            code, out, err = other.outcome("metadata", "import", str(file), *options)
            assert (code, "left out: log damaged" in err) == (0, True)
        assert json.loads(out)["left_out"][0]["log"] == "damaged"
        assert [each["log"] for each in other.json("log", "list")] == ["whole"]
        third = Shell(f"distributedlog://{server.servers}/third", capsys)
        code, out, err = third.outcome("restore", "--from", str(file), "--json")
        assert (code, "left out: log damaged" in err) == (0, True)
        assert json.loads(out)["left_out"][0]["log"] == "damaged"
