"""Bookies that speak TLS only, as processes: their clients, by the commands and the library."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore import DLSN, LedgerClientConfig, LogConfig, LogRecord, QuorumConfig, TlsFiles
from dlcore.base.errors import ConfigurationError, LedgerReadError
from dlcore.sync import open_namespace
from tests.fixtures.certificates import Authority
from tests.fixtures.tls_cluster import REPOSITORY, TlsCluster, tls_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper

pytestmark = pytest.mark.integration
IMPATIENT = LedgerClientConfig(add_timeout_s=15.0, read_timeout_s=20.0)


@pytest.fixture(scope="module")
def cluster(
    zookeeper: EmbeddedZooKeeper, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TlsCluster]:
    """Bookies that the tests of this module share, each with logs of its own."""
    uri = f"distributedlog://{zookeeper.servers}/test-{uuid4().hex}"
    with tls_cluster(uri, tmp_path_factory.mktemp("tls")) as running:
        yield running


@pytest.fixture
def log(cluster: TlsCluster) -> str:
    """A log of one record."""
    name = f"log-{uuid4().hex}"
    with open_namespace(cluster.uri, tls=cluster.client) as namespace:
        namespace.create_log(name)
        with namespace.open_log(name) as log, log.open_writer() as writer:
            writer.write(LogRecord(txid=1, payload=b"x"))
    return name


def dlog(
    cluster: TlsCluster, *arguments: str, tls: TlsFiles | None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command that knows the files by its environment."""
    environment = dict(os.environ, DLOG_URI=cluster.uri)
    if tls is not None:
        files = {"CA": tls.ca, "CERT": tls.cert, "KEY": tls.key}
        environment |= {f"DLOG_TLS_{key}": value for key, value in files.items()}
    return subprocess.run(
        [sys.executable, "-m", "dlcore.ops.cli", *arguments],
        cwd=REPOSITORY,
        env=environment,
        input=stdin,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )


def require_unreadable(cluster: TlsCluster, log: str, *, tls: TlsFiles | None) -> None:
    """Let a client try to read, which must fail by its connections."""
    with (
        open_namespace(cluster.uri, tls=tls, client_config=IMPATIENT) as namespace,
        namespace.open_log(log) as manager,
        manager.open_reader(dlsn=DLSN.INITIAL) as reader,
        pytest.raises(LedgerReadError, match="connection"),
    ):
        reader.read_next()


def test_commands_reach_bookies_that_speak_tls(cluster: TlsCluster) -> None:
    """Write, tail, and ask all replicas by the control service, with the files of a client."""
    # Each acknowledgement stands for all copies: the check below finds none on its way.
    created = dlog(cluster, "log", "create", "clicks", "--ack-quorum", "3", tls=cluster.client)
    assert created.returncode == 0, created.stderr
    written = dlog(
        cluster,
        *("log", "write", "clicks", "--txid", "line-number"),
        tls=cluster.client,
        stdin="one\ntwo\n",
    )
    assert written.returncode == 0, written.stderr
    options = ("--tls-ca", cluster.client.ca, "--tls-cert", cluster.client.cert)
    tailed = dlog(
        cluster, *options, "--tls-key", cluster.client.key, "log", "tail", "clicks", tls=None
    )
    assert "two" in tailed.stdout, tailed.stderr
    checked = dlog(cluster, "ledger", "check", "0", tls=cluster.client)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    half = dlog(cluster, "--tls-cert", cluster.client.cert, "log", "tail", "clicks", tls=None)
    assert (half.returncode, "no ca" in half.stderr) == (2, True)


@pytest.mark.parametrize("who", ["without TLS", "a stranger", "who trusts another authority"])
def test_a_client_that_is_not_let_in_reads_nothing(
    cluster: TlsCluster, log: str, tmp_path: Path, who: str
) -> None:
    """A client in plain text, one with a foreign certificate, and one that trusts others fail."""
    other = Authority(tmp_path / "other")
    tls = {
        "without TLS": None,
        "a stranger": replace(other.issue("client"), ca=cluster.client.ca),
        "who trusts another authority": replace(cluster.client, ca=str(other.ca)),
    }[who]
    require_unreadable(cluster, log, tls=tls)


def test_without_client_auth_who_has_no_certificate_is_let_in(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """By TLS, for entries and for control; it asks the bookies for their certificates still."""
    uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"
    with tls_cluster(uri, tmp_path, "--tls-client-auth", "none") as cluster:
        nameless = TlsFiles(ca=cluster.client.ca)
        # Else the namespace may be closed before the last of the bookies has the record.
        on_all = LogConfig(quorum=QuorumConfig(3, 3, 3))
        with open_namespace(cluster.uri, tls=nameless, config=on_all) as namespace:
            namespace.create_log("clicks")
            with namespace.open_log("clicks") as log, log.open_writer() as writer:
                writer.write(LogRecord(txid=1, payload=b"x"))
            with namespace.open_log("clicks") as log, log.open_reader() as reader:
                assert [record.payload for record in reader.read_bulk(10)] == [b"x"]
        checked = dlog(cluster, "--tls-ca", nameless.ca, "ledger", "check", "0", tls=None)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        other = TlsFiles(ca=str(Authority(tmp_path / "other").ca))
        for tls in (None, other):
            require_unreadable(cluster, "clicks", tls=tls)


def test_a_bookie_that_cannot_use_its_files_does_not_start(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """The error names the option's file; half of the files is refused too."""
    uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"
    files = Authority(tmp_path / "tls").issue("a")
    for options, reason in (
        (("--tls-ca", "/nowhere.pem", "--tls-cert", files.cert, "--tls-key", files.key), "nowhere"),
        (("--tls-cert", files.cert, "--tls-key", files.key), "no ca"),
        (("--tls-ca", files.ca), "needs a certificate"),
        (("--tls-client-auth", "maybe"), "expected required, or_capability or none"),
    ):
        command = [sys.executable, "-m", "bookie", "--name", "a", "--metadata-uri", uri]
        command += ["--data-dir", str(tmp_path / "a"), *options]
        done = subprocess.run(
            command, cwd=REPOSITORY, text=True, capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert reason in done.stderr, done.stderr


def test_a_namespace_is_not_opened_with_files_that_cannot_be_used(cluster: TlsCluster) -> None:
    """The library says so at once, not at the first write."""
    with pytest.raises(ConfigurationError, match="nowhere"):
        open_namespace(cluster.uri, tls=TlsFiles(ca="/nowhere.pem"))
