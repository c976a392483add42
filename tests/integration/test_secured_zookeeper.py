"""ZooKeeper with TLS and a user: only their user may read what processes make there."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError, NoNodeError
from kazoo.security import make_digest_acl

from dlcore import LogRecord, TlsFiles, ZooKeeperAccess
from dlcore.base.access.tls import name_in_certificate
from dlcore.base.errors import (
    ConfigurationError,
    MetadataConnectionError,
    MetadataError,
    UnsupportedError,
)
from dlcore.metadata import zookeeper_session
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper
from dlcore.sync import open_namespace
from tests.fixtures.certificates import Authority
from tests.fixtures.lengths import sample
from tests.fixtures.proxies import serving_process
from tests.fixtures.secure_zookeeper import (
    SecureZooKeeper,
    reserved_ports,
    secure_quorum,
    secure_zookeeper,
)
from tests.fixtures.tls_cluster import REPOSITORY, tls_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration
PATIENCE_S = 60.0
REFUSED_S = 3.0
"""Enough to be refused on a machine with nothing else to do; then it is tried with more."""


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureZooKeeper]:
    """One server that the tests of this module share, each with a root of its own."""
    with secure_zookeeper(tmp_path_factory.mktemp("zookeeper")) as running:
        yield running


def nodes_of(client: KazooClient, root: str) -> list[str]:
    """Return the paths of all nodes from a root down."""
    found = [root]
    with suppress(NoNodeError):  # processes at work delete nodes meanwhile
        for name in client.get_children(root):
            found += nodes_of(client, f"{root}/{name}")
    return found


def require_only_for_us(zookeeper: SecureZooKeeper, root: str) -> int:
    """See that each node is for our user alone, and none for a stranger; return their number.

    That ZooKeeper refuses a stranger by such a rule is tried at some of them.
    """
    owner, stranger = (
        KazooClient(zookeeper.open_servers, timeout=PATIENCE_S, auth_data=[("digest", each)])
        for each in ("dlog:a secret", "dlog:guessed")
    )
    owner.start(timeout=PATIENCE_S)
    stranger.start(timeout=PATIENCE_S)
    try:
        seen = 0
        paths = nodes_of(owner, root)
        tried = set(sample(paths, 10))
        for path in paths:
            with suppress(NoNodeError):
                acls, _ = owner.get_acls(path)
                assert acls == [make_digest_acl("dlog", "a secret", all=True)], path
                seen += 1
                if path in tried:
                    require_refused(stranger, path)
                    tried.remove(path)
        assert len(tried) < 10 // 2  # others were deleted meanwhile
        return seen
    finally:
        for client in (owner, stranger):
            client.stop()
            client.close()


def require_refused(stranger: KazooClient, path: str) -> None:
    """See that a stranger can neither read a node nor add to it."""
    for attempt in (stranger.get, stranger.get_children, stranger.get_acls):
        with pytest.raises(NoAuthError):
            attempt(path)
    with pytest.raises(NoAuthError):
        stranger.create(f"{path}/mine")


def dlog(uri: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the variables of this process."""
    return subprocess.run(
        [sys.executable, "-m", "dlcore.ops.cli", "--uri", uri, *arguments],
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )


def require_no_connection(attempt: Callable[[float], object], reason: str) -> None:
    """See that a connection fails within a time, and why; a busy machine gets more of it."""
    for time_s in (REFUSED_S, PATIENCE_S / 2):
        with pytest.raises(MetadataConnectionError) as refused:
            attempt(time_s)
        if re.search(reason, str(refused.value)):
            return
    raise AssertionError(f"{reason!r} is not in {refused.value}")


def test_every_node_that_processes_make_is_for_their_user(
    zookeeper: SecureZooKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of bookies, a proxy, auto-recovery, commands, writers, subscribers and appends."""
    for key, value in zookeeper.variables.items():
        monkeypatch.setenv(key, value)
    uri, access = f"distributedlog://{zookeeper.secure_servers}/secured", zookeeper.access
    with ExitStack() as stack:
        cluster = stack.enter_context(tls_cluster(uri, tmp_path))
        tls = cluster.client
        for key, path in {"CA": tls.ca, "CERT": tls.cert, "KEY": tls.key}.items():
            monkeypatch.setenv(f"DLOG_TLS_{key}", path)
        command = [sys.executable, "-m", "dlcore.ops.cli", "--uri", uri]
        proxy = stack.enter_context(serving_process([*command, "proxy", "run"]))
        recovery = stack.enter_context(
            subprocess.Popen(
                [*command, "autorecovery", "run"],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        stack.callback(recovery.kill)
        assert recovery.stdout is not None
        assert b"at work" in recovery.stdout.readline()
        created = dlog(uri, "log", "create", "clicks")
        assert created.returncode == 0, created.stderr
        namespace = stack.enter_context(open_namespace(uri, tls=tls, zookeeper=access))
        with namespace.open_log("clicks") as log:
            with log.open_writer() as writer:
                writer.write(LogRecord(txid=1, payload=b"direct"))
            with log.open_reader(subscriber="s") as reader:
                assert reader.read_next() is not None
                reader.commit()
        append = namespace.begin_append("job", 1)
        append.write_batch("clicks", pa.record_batch({"value": [b"staged"]}))
        append.commit()
        with open_namespace(proxy.location) as remote, remote.open_log("clicks") as log:
            with log.open_writer() as writer:
                writer.write_batch(pa.record_batch({"value": [b"proxied"]}))
            assert log.get_log_record_count() == 3
        assert require_only_for_us(zookeeper, "/secured") > 20
        for mode in (replace(access, auth_file=""), None):
            servers = zookeeper.secure_servers if mode else zookeeper.open_servers
            with pytest.raises(MetadataError, match="for another user of ZooKeeper: expected zk_a"):
                open_namespace(f"distributedlog://{servers}/secured", zookeeper=mode)


def test_a_namespace_of_everybody_is_secured_afterwards(
    zookeeper: SecureZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its nodes, once or more often; another user's is reported."""
    uri = f"distributedlog://{zookeeper.open_servers}/older/one"
    with open_namespace(uri, create=True) as namespace:
        for number in range(3):
            namespace.create_log(f"log-{number}")
    refused = dlog(uri, "namespace", "secure")
    assert refused.returncode == 2
    assert "give --zk-auth-file" in refused.stderr
    options = ["--zk-auth-file", zookeeper.access.auth_file]
    for _ in range(2):
        done = dlog(uri, "namespace", "secure", *options, "--json")
        assert done.returncode == 0, done.stderr
        count = require_only_for_us(zookeeper, "/older/one")
        assert f'"nodes": {count}' in done.stdout
        assert '"user": "dlog"' in done.stdout
    with open_namespace(uri, zookeeper=replace(zookeeper.access, tls=None)) as namespace:
        assert len(namespace.get_logs()) == 3
    missing = dlog(uri.replace("/one", "/two"), "namespace", "secure", *options)
    assert "there is no dlog namespace at /older/two" in missing.stderr


def test_a_client_refused_by_zookeeper_learns_why(
    zookeeper: SecureZooKeeper, tmp_path: Path
) -> None:
    """Within the time for connecting, with what would be right."""
    tls = zookeeper.access.tls
    assert tls is not None
    stranger = Authority(tmp_path / "strangers").issue("stranger")
    cases = [
        (TlsFiles(ca=tls.ca), zookeeper.secure_servers, "asks for a certificate closes so"),
        (replace(stranger, ca=tls.ca), zookeeper.secure_servers, "does not accept cert="),
        (stranger, zookeeper.secure_servers, "its certificate is not accepted .*: expected one"),
        (tls, zookeeper.secure_servers.replace("127.0.0.1", "localhost"), "expected one with the"),
        (None, zookeeper.secure_servers, "no ZooKeeper answers"),
        (tls, zookeeper.open_servers, "no ZooKeeper answers"),
    ]

    def connect(given: TlsFiles | None, servers: str, time_s: float) -> None:
        access = ZooKeeperAccess(tls=given)
        asyncio.run(ZooKeeperStore.connect(servers, access=access, connect_timeout_s=time_s))

    for given, servers, reason in cases:
        require_no_connection(partial(connect, given, servers), reason)
    with pytest.raises(ConfigurationError, match="zk_auth_file='/nowhere'"):
        open_namespace(
            f"distributedlog://{zookeeper.open_servers}/any",
            zookeeper=ZooKeeperAccess(auth_file="/nowhere"),
        )
    with pytest.raises(UnsupportedError, match="zookeeper="):
        open_namespace("grpc://127.0.0.1:1", zookeeper=zookeeper.access)


def test_the_certificates_of_secure_init_are_for_servers_too(tmp_path: Path) -> None:
    """Its lines for zoo.cfg, and the settings of a client: a client without them is not let in."""
    with reserved_ports(1) as (port,):
        uri = f"distributedlog://127.0.0.1:{port}/dlog"
        command = ["secure", "init", str(tmp_path), "--client", "ingest", "--zookeeper-tls"]
        assert dlog(uri, *command).returncode == 0
        lines = (tmp_path / "hosts/127.0.0.1/zoo.cfg").read_text().splitlines()
        settings = dict(each.split("=", 1) for each in lines if not each.startswith("#"))
        assert int(settings["secureClientPort"]) == port
        with EmbeddedZooKeeper(tmp_path / "data", settings=settings):
            client = tmp_path / "clients/ingest"
            for made in ("create", "secure"):
                done = dlog(uri, "--config", str(client / "dlog.toml"), "namespace", made)
                assert done.returncode == 0, done.stderr
            ca = TlsFiles(ca=str(client / "ca.pem"))
            bare = partial(open_namespace, uri, zookeeper=ZooKeeperAccess(tls=ca))
            require_no_connection(
                lambda time_s: bare(connect_timeout_s=time_s), "asks for a certificate"
            )


def test_many_answers_at_once_arrive_and_no_log_has_the_password(
    zookeeper: SecureZooKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what TLS has received together; kazoo's own debug log would show the password."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(1, logger=zookeeper_session.__name__)

    async def scenario() -> None:
        store = await ZooKeeperStore.connect(zookeeper.secure_servers, access=zookeeper.access)
        await store.create("/many", b"x" * 1000)
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(5):
                found = await asyncio.gather(*(store.get("/many") for _ in range(200)))
                assert all(node is not None for node in found)
        assert "a secret" not in repr(store)
        await store.aclose()

    asyncio.run(scenario())
    assert "Sending request" in caplog.text
    assert "a secret" not in caplog.text
    assert os.environ.get("DLOG_ZK_AUTH_FILE") is None


def test_servers_that_speak_tls_among_themselves(tmp_path: Path) -> None:
    """Three of them, of which each one shows its certificate to the others and asks for theirs."""
    with secure_quorum(tmp_path) as (zookeeper, election_ports):
        shown = {tls_name_at(port, zookeeper) for port in election_ports}
        assert shown == {"zookeeper-1", "zookeeper-2", "zookeeper-3"}
        servers = zookeeper.secure_servers.split(",")

        async def scenario() -> None:
            stores = [
                await ZooKeeperStore.connect(each, access=zookeeper.access) for each in servers
            ]
            await stores[0].create("/one", b"value")
            for store in stores:
                node = await store.get("/one", fresh=True)
                assert node is not None
                assert node.value == b"value"
                await store.aclose()

        asyncio.run(scenario())


def tls_name_at(port: int, zookeeper: SecureZooKeeper) -> str | None:
    """Return the name in the certificate that a port shows."""
    files = zookeeper.access.tls
    assert files is not None
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection,
        files.client_context().wrap_socket(connection, server_hostname="127.0.0.1") as secure,
    ):
        return name_in_certificate(secure.getpeercert())
