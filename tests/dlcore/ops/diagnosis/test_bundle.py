"""Archives of real clusters: planted faults are named from them alone, and no secret is in one.

Method: servers as processes.  The planted faults happen to servers: a file system that others
filled, a clock that is off, an address that no connection passes, bookies that are gone.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.records import LogRecord
from dlcore.metadata.stored import decode
from dlcore.ops.cli.app import run
from dlcore.ops.diagnosis import asking, collecting, servers
from dlcore.proxy.load import LiveProxy
from dlcore.sync import open_namespace
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.operators import LASTING
from tests.fixtures.ports import free_ports
from tests.fixtures.proxies import proxy_process
from tests.fixtures.waiting import wait_until
from tests.fixtures.zookeeper import ask_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import Versioned
    from dlcore.metadata.zookeeper import ZooKeeperStore
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

WAIT_S = 120.0
QUICK_RECOVERY = (
    "--lost-bookie-delay-s=0.1",
    "--audit-interval-s=0.2",
    "--poll-interval-s=0.1",
    "--retry-pause-s=0.1",
)
SMALL_DISK = """
mount -t tmpfs -o size=48m none "$1" && head -c 44m /dev/zero > "$1/filler" && shift && exec "$@"
"""
LATE = """
import runpy, sys, time
now = time.time_ns
time.time_ns = lambda: now() - 90_000_000_000
sys.argv[0] = "bookie"
runpy.run_module("bookie", run_name="__main__")
"""


def be_patient(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let an archive wait so long for each server."""
    for module in (asking, collecting):
        monkeypatch.setattr(module, "PATIENCE_S", seconds)
    monkeypatch.setattr(collecting, "PART_S", 4 * seconds)
    monkeypatch.setattr(servers, "_STACKS_WAIT_S", seconds)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is slow on a busy machine is none that does not answer."""
    be_patient(monkeypatch, 20.0)


class Explained:
    """An archive that the command made, and the faults that it names in it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> None:
        self.path = folder / f"bundle-{len(list(folder.glob('bundle-*')))}.tar.gz"
        capsys.readouterr()
        assert run(["debug", "bundle", str(self.path), "--json", *options]) == 0
        missing = json.loads(capsys.readouterr().out)["missing"]
        # Servers of other tests on this machine come and go.
        self.missing = {name: why for name, why in missing.items() if "/" not in name}
        code = run(["debug", "explain", str(self.path), "--json"])
        self.faults = {each["kind"]: each for each in json.loads(capsys.readouterr().out)}
        assert code == bool(self.faults)
        with tarfile.open(self.path) as archive:
            self.members = {
                each.name: (archive.extractfile(each) or pytest.fail(each.name)).read()
                for each in archive
            }

    def value(self, name: str) -> Any:
        """Return a part."""
        return json.loads(self.members[f"dlog-bundle/{name}.json"])


def write_to_log(uri: str) -> None:
    """Leave a completed segment and an open one."""
    with open_namespace(uri) as namespace:
        namespace.create_log("clicks")
        for _ in range(2):
            with namespace.open_log("clicks") as log, log.open_writer() as writer:
                writer.write(LogRecord(txid=1, payload=b"x"))
                writer.commit()


def status_of(uri: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return what auto-recovery says."""
    capsys.readouterr()
    assert run(["autorecovery", "status", "--json", "--uri", uri]) == 0
    return json.loads(capsys.readouterr().out)


@contextmanager
def server(*command: str) -> Iterator[None]:
    """Run a bookie until the block ends, from when it serves."""
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            assert "serving on" in process.stdout.readline()
            yield
        finally:
            process.kill()


def test_five_faults_are_named(
    fresh_sandbox: Callable[..., Sandbox], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in a cluster that was healthy, of which no fault was named."""
    metrics = ("--http-address", f"127.0.0.1:{free_ports(1)}", LASTING)
    cluster = fresh_sandbox(
        3,
        proxies=1,
        proxy_options=metrics,
        autorecovery=True,
        autorecovery_options=QUICK_RECOVERY,
    )
    uri = ("--uri", cluster.uri)
    write_to_log(cluster.uri)
    wait_until(lambda: status_of(cluster.uri, capsys)["auditor"] is not None, timeout_s=WAIT_S)
    healthy = Explained(tmp_path, capsys, *uri)
    assert (healthy.faults, healthy.missing) == ({}, {})
    scraped = healthy.members[f"dlog-bundle/metrics/proxy-{cluster.proxies[0].pid}.txt"]
    assert b"\ndlog_" in scraped

    # A full disk, a late clock, and a proxy whose address swallows all connections.
    disk = tmp_path / "disk"
    disk.mkdir()
    bookie = ("-m", "bookie", "--metadata-uri", cluster.uri)
    privileges = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    full = ("unshare", *privileges, "--mount", "/bin/sh", "-c", SMALL_DISK, "sh", str(disk))
    with (
        server(*full, sys.executable, *bookie, "--name", "full", "--data-dir", str(disk / "data")),
        server(
            sys.executable, "-c", LATE, *bookie[2:], "--name", "late",
            "--data-dir", str(tmp_path / "late"),
        ),
        socket.create_server(("127.0.0.1", 0)) as hole,
        proxy_process(cluster.uri, "--advertised-port", str(hole.getsockname()[1])),
    ):  # fmt: skip
        found = Explained(tmp_path, capsys, *uri).faults
    assert sorted(found) == ["clock-skew", "full-disk", "partitioned-proxy"]
    assert "bookie full is full" in found["full-disk"]["what"]
    assert found["clock-skew"]["evidence"][0].startswith("bookies: late: -")
    assert "does not answer" in found["partitioned-proxy"]["evidence"][0]


def test_a_recovery_that_does_not_get_on_is_named(
    fresh_sandbox: Callable[..., Sandbox], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bookie is gone, and no other can take its copies; then a second one, and the quorum."""
    cluster = fresh_sandbox(3, autorecovery=True, autorecovery_options=QUICK_RECOVERY)
    write_to_log(cluster.uri)
    cluster.bookies[0].terminate()

    def has_tried() -> bool:
        return any(each["attempts"] >= 3 for each in status_of(cluster.uri, capsys)["ledgers"])

    wait_until(has_tried, timeout_s=WAIT_S)
    found = Explained(tmp_path, capsys, "--uri", cluster.uri).faults
    assert sorted(found) == ["lost-bookie", "stuck-recovery"]
    assert "bookie" in found["stuck-recovery"]["evidence"][0]
    assert "bookie bookie-1 does not answer" in found["lost-bookie"]["what"]

    cluster.bookies[1].kill()
    found = Explained(tmp_path, capsys, "--uri", cluster.uri).faults
    assert "1 can be written to" in found["lost-quorum"]["evidence"][0]
    assert any(line.endswith("and 1 answer") for line in found["lost-quorum"]["evidence"])


def test_a_silent_server_costs_only_its_own_part(
    fresh_sandbox: Callable[..., Sandbox],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Servers that are stopped, and then no metadata store; the rest is in the archive."""
    be_patient(monkeypatch, 8.0)  # to be waited for, twice
    cluster = fresh_sandbox(1, proxies=1, proxy_options=(LASTING,))
    hanging, proxy = cluster.bookies[0], cluster.proxies[0]
    hanging.pause()
    archive = Explained(tmp_path, capsys, "--uri", cluster.uri)
    assert {"lost-bookie", "lost-quorum", "no-recovery"} == archive.faults.keys()
    stacks = archive.members[f"dlog-bundle/stacks/bookie-{hanging.pid}.txt"].decode()
    assert "it wrote no stacks" in stacks
    hanging.resume()

    cluster.metadata_server.pause()
    try:
        archive = Explained(tmp_path, capsys, "--uri", cluster.uri)
    finally:
        cluster.metadata_server.resume()
    assert list(archive.faults) == ["no-metadata"]
    assert list(archive.missing) == ["namespace"]
    stacks = archive.members[f"dlog-bundle/stacks/proxy-{proxy.pid}.txt"].decode()
    assert "most recent call first" in stacks
    (process,) = (each for each in archive.value("processes") if each["pid"] == hanging.pid)
    assert (process["role"], process["name"]) == ("bookie", "bookie-1")
    assert process["settings"]["data_dir"] == str(hanging.folder)
    assert process["open_files"] < process["open_files_max"]
    assert b"serving" in archive.members[f"dlog-bundle/logs/bookie-{hanging.pid}.log"]
    folder = archive.value(f"folders/bookie-{hanging.pid}")
    assert sum(folder["files"].values()) > 0
    assert archive.value("versions")["packages"]["grpcio"]
    assert archive.value("machine")["memory"]["MemTotal"]


def test_no_secret_is_in_an_archive(
    fresh_sandbox: Callable[..., Sandbox], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line of a key or password of the cluster, and nothing that ZooKeeper's nodes keep."""
    cluster = fresh_sandbox(3, proxies=1, proxy_options=(LASTING,), autorecovery=True, secure=True)
    assert cluster.certificates is not None
    configuration = str(cluster.certificates.configuration)
    assert run(["namespace", "keys", "--config", configuration]) == 0
    archive = Explained(tmp_path, capsys, "--config", configuration)
    assert (archive.faults.keys() - {"no-recovery"}, archive.missing) == (set(), {})
    assert archive.path.stat().st_mode & 0o777 == 0o600

    secrets = {
        line
        for path in cluster.certificates.folder.rglob("*")
        if path.is_file() and path.suffix in (".key", ".auth", ".token")
        for line in path.read_bytes().splitlines()
        if not line.startswith(b"-----")
    }
    (location,) = (each.location for each in cluster.proxies)

    async def read(store: ZooKeeperStore, paths: NamespacePaths) -> list[Versioned | None]:
        return await store.get_many([paths.proxy(location), paths.capability_keys])

    proxy, keys = ask_store(cluster.uri, read)
    assert proxy is not None
    assert keys is not None
    secrets.add(decode(LiveProxy, proxy.value, source=location).secret.encode())
    secrets.add(keys.value[-40:])
    assert len(secrets) > 20
    nodes = archive.value("zookeeper")["nodes"]
    assert nodes["/dlog/capability-keys"]["bytes"] == len(keys.value)
    for name, content in archive.members.items():
        assert not [each for each in secrets if each and each in content], name
