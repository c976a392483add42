"""Bookies that take capabilities, as processes: what a client without a certificate reaches.

A capability is bound to no host: every holder may use it until it expires.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore import DLSN, LedgerClientConfig, LogRecord, TlsFiles
from dlcore.base.access.capability import SKEW_S, CarriedPurse, Signer, new_private_key
from dlcore.base.access.tls_in_use import TlsInUse
from dlcore.base.clock import SystemClock
from dlcore.base.errors import BookieAccessDeniedError, DLError, LedgerReadError
from dlcore.metadata.capability_keys import KeyRing, ensure_keys, rotate_keys
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.sync import ScanRange, open_namespace, scan
from dlcore.wire.client import WireBookieClient
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.served_bookie import frame_of, run
from tests.fixtures.tls_cluster import REPOSITORY, TlsCluster, tls_cluster
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.base.ids import BookieId
    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper
    from dlcore.sync import DistributedLogManager

pytestmark = pytest.mark.integration
IMPATIENT = LedgerClientConfig(add_timeout_s=15.0, read_timeout_s=20.0)
RECORDS = [b"one", b"two", b"three"]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster(
    zookeeper: EmbeddedZooKeeper, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TlsCluster]:
    """Bookies that the tests of this module share, each with logs of its own.

    The names of machines that they let in say nothing of who has a capability.
    """
    uri = f"distributedlog://{zookeeper.servers}/test-{uuid4().hex}"
    folder = tmp_path_factory.mktemp("capabilities")
    options = ("--tls-client-auth", "or_capability", "--tls-client-names", "client,127.0.0.1")
    with tls_cluster(uri, folder, *options) as running:
        yield running


@pytest.fixture
def nameless(cluster: TlsCluster) -> TlsFiles:
    """Trusts the bookies, and has no certificate."""
    return TlsFiles(ca=cluster.client.ca)


@pytest.fixture
def log(cluster: TlsCluster) -> str:
    """A log with an entry for each record, written by a machine with a certificate."""
    name = f"log-{uuid4().hex}"
    with open_namespace(cluster.uri, tls=cluster.client) as namespace:
        namespace.create_log(name)
        with namespace.open_log(name) as manager, manager.open_writer() as writer:
            for number, payload in enumerate(RECORDS):
                writer.write(LogRecord(txid=number, payload=payload))
                writer.flush()
    return name


def planned(
    cluster: TlsCluster, log: str, *, lifetime_s: int = 600, start: DLSN = DLSN.INITIAL
) -> ScanRange:
    """Return the range of a log with capabilities, as a driver with a certificate makes it."""
    with open_namespace(cluster.uri, tls=cluster.client) as namespace:
        snapshot = namespace.get_snapshots([log], fresh=True)[log]
        assert snapshot is not None
        (part,) = snapshot.scans(start, snapshot.end)
        (capabilities,) = namespace.grant([[part]], lifetime_s=lifetime_s)
    return replace(part, capabilities=capabilities)


def payloads(part: ScanRange, tls: TlsFiles) -> list[bytes]:
    """Read a range from bookies, without the metadata store."""
    batches = scan([part], config=IMPATIENT, tls=tls)
    return [value for each in batches for value in each.batch["value"].to_pylist()]


def write(log: DistributedLogManager, payload: bytes) -> None:
    """Append a record."""
    with log.open_writer() as writer:
        writer.write(LogRecord(txid=9, payload=payload))


def on_keys(cluster: TlsCluster, *, rotate: bool = False, withdraw: bool = False) -> KeyRing:
    """Return the cluster's keys, after a change."""
    parsed, found = parse_uri(cluster.uri), list[KeyRing]()

    async def scenario() -> None:
        store = await ZooKeeperStore.connect(
            parsed.servers, session_timeout_s=WAIT_S, connect_timeout_s=WAIT_S
        )
        paths, clock = NamespacePaths(parsed.root), SystemClock()
        if rotate or withdraw:
            await rotate_keys(store, paths, clock, withdraw=withdraw)
        found.append(await ensure_keys(store, paths, clock))
        await store.aclose()

    run(scenario)
    return found[0]


def require_denied(part: ScanRange, tls: TlsFiles, reason: str) -> None:
    """Let a read fail by the answer of every bookie."""
    with pytest.raises(LedgerReadError, match=rf"no right to READ in ledger \d+.*: {reason}"):
        payloads(part, tls)


def test_a_range_is_read_with_its_capability(
    cluster: TlsCluster, nameless: TlsFiles, log: str
) -> None:
    """By a process without a certificate, which is denied the same range without one."""
    part = planned(cluster, log)
    require_denied(replace(part, capabilities=()), nameless, "the connection has no certificate")
    assert payloads(part, nameless) == RECORDS
    assert payloads(replace(part, capabilities=()), cluster.client) == RECORDS


def test_a_capability_is_used_in_another_process(
    cluster: TlsCluster, nameless: TlsFiles, log: str
) -> None:
    """It is bound to no one, and nothing that is shown has it."""
    part = planned(cluster, log)
    program = (
        "import sys; from tests.integration.test_capabilities import *; "
        "(part,) = ScanRange.unpack(sys.stdin.buffer.read()); "
        "print(payloads(part, TlsFiles(ca=sys.argv[1])))"
    )
    done = subprocess.run(
        [LOADED_PYTHON, "-c", program, nameless.ca],
        cwd=REPOSITORY,
        input=ScanRange.pack([part]),
        capture_output=True,
        timeout=2 * WAIT_S,
        check=False,
    )
    assert done.stdout.decode().strip() == str(RECORDS), done.stderr
    assert "capabilities" not in repr(part) + part._repr_html_()


def test_a_capability_of_another_log_gives_nothing(
    cluster: TlsCluster, nameless: TlsFiles, log: str
) -> None:
    """It has other ledgers."""
    other = f"other-{log}"
    with open_namespace(cluster.uri, tls=cluster.client) as namespace:
        namespace.create_log(other)
        with namespace.open_log(other) as manager, manager.open_writer() as writer:
            writer.write(LogRecord(txid=1, payload=b"x"))
    part, another = planned(cluster, log), planned(cluster, other)
    denied = replace(part, capabilities=another.capabilities)
    require_denied(denied, nameless, "the connection has no certificate, and presented no")
    assert payloads(another, nameless) == [b"x"]


def test_truncated_ledgers_stay_closed(cluster: TlsCluster, nameless: TlsFiles, log: str) -> None:
    """The capability of what is left, used for the range of before."""
    before = planned(cluster, log)
    with (
        open_namespace(cluster.uri, tls=cluster.client) as namespace,
        namespace.open_log(log) as manager,
    ):
        manager.truncate(DLSN(1, 1, 0))
    after = planned(cluster, log, start=DLSN(1, 1, 0))
    assert payloads(after, nameless) == RECORDS[1:]
    require_denied(replace(before, capabilities=after.capabilities), nameless, "the connection")


def test_capabilities_that_do_not_verify_give_nothing(
    cluster: TlsCluster, nameless: TlsFiles, log: str
) -> None:
    """Expired, altered, of another key: each answer says which; then a good one is taken."""
    part = planned(cluster, log)
    signer = on_keys(cluster).signer(time.time())
    expired = signer.sign_all(part.grants(), expires_s=int(time.time()) - SKEW_S - 5)
    strange = Signer(new_private_key()).sign_all(part.grants(), expires_s=int(time.time()) + 60)
    (token,) = part.capabilities
    altered = token[:-1] + bytes([token[-1] ^ 1])
    for tokens, reason in (
        (expired, r"it expired \d+ s ago"),
        ((altered,), "its signature is wrong"),
        (strange, "it is signed by the key"),
    ):
        refused = replace(part, capabilities=tokens)
        require_denied(refused, nameless, f"the last capability was refused: {reason}")
    assert payloads(part, nameless) == RECORDS


def test_a_task_whose_capability_expired_signs_for_itself(
    cluster: TlsCluster, nameless: TlsFiles, log: str
) -> None:
    """If it gets the namespace, and may read the keys there; else it fails."""
    part = planned(cluster, log)
    signer = on_keys(cluster).signer(time.time())
    expired = signer.sign_all(part.grants(), expires_s=int(time.time()) - SKEW_S - 5)
    late = replace(part, capabilities=expired)
    require_denied(late, nameless, r"the last capability was refused: it expired")
    batches = scan([late], uri=cluster.uri, config=IMPATIENT, tls=nameless)
    assert [value for each in batches for value in each.batch["value"].to_pylist()] == RECORDS


def test_a_right_to_read_is_none_to_write(
    cluster: TlsCluster, nameless: TlsFiles, log: str
) -> None:
    """Nor to fence, nor to add as a recovery does; nothing is changed."""
    part = planned(cluster, log)
    (ledger_id,) = part.ledgers
    bookie = next(iter(part.addresses))
    purse = CarriedPurse()
    purse.learn(part.capabilities)

    async def resolve(_: BookieId) -> str:
        return part.addresses[bookie]

    async def scenario() -> None:
        client = WireBookieClient(
            resolve,
            cluster_id=part.cluster_id,
            config=IMPATIENT,
            tls=TlsInUse(nameless),
            purse=purse,
        )
        assert await client.read_lac(bookie, ledger_id=ledger_id, fence=False) >= 0
        frame = frame_of(ledger_id, 0)
        for call in (
            client.add_entry(bookie, frame),
            client.add_entry(bookie, frame, is_recovery=True),
            client.write_lac(bookie, ledger_id=ledger_id, last_add_confirmed=9),
            client.read_lac(bookie, ledger_id=ledger_id, fence=True),
            client.read_entry(bookie, ledger_id=ledger_id, entry_id=0, fence=True),
        ):
            with pytest.raises(BookieAccessDeniedError, match=r"the capability gives READ$"):
                await call
        assert await client.read_lac(bookie, ledger_id=ledger_id, fence=False) >= 0
        await client.aclose()

    run(scenario)


def test_a_reader_of_the_keys_needs_no_certificate(cluster: TlsCluster, nameless: TlsFiles) -> None:
    """It signs for itself: it writes, reads, and recovers what another left open."""
    name = f"own-{uuid4().hex}"
    with open_namespace(cluster.uri, tls=nameless, capabilities=True) as namespace:
        namespace.create_log(name)
        with namespace.open_log(name) as manager:
            writer = manager.open_writer()
            writer.write(LogRecord(txid=1, payload=b"x"))
            writer.flush()
            writer.abort()
            manager.recover()
            with manager.open_reader(dlsn=DLSN.INITIAL) as reader:
                assert [record.payload for record in reader.read_bulk(10)] == [b"x"]
    with (
        open_namespace(cluster.uri, tls=nameless, client_config=IMPATIENT) as namespace,
        namespace.open_log(name) as manager,
        pytest.raises(DLError, match="no right to ADD"),
    ):
        write(manager, b"y")


def test_keys_are_rotated_while_capabilities_are_in_use(
    zookeeper: EmbeddedZooKeeper, cluster: TlsCluster, nameless: TlsFiles, log: str
) -> None:
    """Earlier capabilities go on until their keys are withdrawn; later ones are accepted."""
    part = planned(cluster, log)
    assert len(on_keys(cluster, rotate=True).keys) == 2
    assert payloads(part, nameless) == RECORDS
    with open_namespace(cluster.uri, tls=nameless, capabilities=True) as namespace:
        on_keys(cluster, withdraw=True)

        def is_denied() -> bool:
            try:
                payloads(part, nameless)
            except LedgerReadError as error:
                return "was withdrawn" in str(error) or "not known" in str(error)
            return False

        wait_until(is_denied, timeout_s=WAIT_S)
        wait_until(lambda: payloads(planned(cluster, log), nameless) == RECORDS, timeout_s=WAIT_S)
        with namespace.open_log(log) as manager, manager.open_reader(dlsn=DLSN.INITIAL) as reader:
            assert reader.read_next() is not None


def test_the_command_shows_and_rotates_the_keys(cluster: TlsCluster) -> None:
    """Public ones only, and the last one signs in a moment."""

    def keys(*options: str) -> list[dict[str, str]]:
        command = [sys.executable, "-m", "dlcore.ops.cli", "--uri", cluster.uri, "--json"]
        command += ["namespace", "keys", *options]
        done = subprocess.run(
            command, cwd=REPOSITORY, text=True, capture_output=True, timeout=2 * WAIT_S, check=False
        )
        assert done.returncode == 0, done.stderr
        assert not any(key.private and key.private in done.stdout for key in on_keys(cluster).keys)
        found: list[dict[str, str]] = json.loads(done.stdout)
        return found

    before = keys()
    after = keys("--rotate")
    assert after[: len(before)] == before
    assert [each["public_key"] for each in after] == [key.public for key in on_keys(cluster).keys]
    (new,) = keys("--withdraw")
    assert new["public_key"] not in {each["public_key"] for each in after}


def test_the_control_service_is_for_certificates(
    cluster: TlsCluster, nameless: TlsFiles, log: str
) -> None:
    """A capability is no way to it."""
    (ledger_id,) = planned(cluster, log).ledgers
    command = [sys.executable, "-m", "dlcore.ops.cli", "--uri", cluster.uri]
    command += ["--tls-ca", nameless.ca, "ledger", "check", str(ledger_id)]
    done = subprocess.run(
        command, cwd=REPOSITORY, text=True, capture_output=True, timeout=2 * WAIT_S, check=False
    )
    assert done.returncode != 0
    assert "a server that asks for a certificate closes so" in done.stdout, done.stderr
