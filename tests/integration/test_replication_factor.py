"""`replication_factor=N`: a log loses nothing while any one of its N bookies lives.

A writer is killed in an open segment; N - 1 of its bookies are killed and their folders wiped.
Acknowledged records are read from the survivor alone.  Then the bookies are brought back as
their messages say, or others are started, and the log is opened, recovered and written again.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dlcore import LogConfig, LogRecord, QuorumConfig
from dlcore.base.errors import BookieUnavailableError, NotEnoughBookiesError
from dlcore.sync import open_namespace
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.lengths import sample
from tests.fixtures.zookeeper import ask_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore import LogRecordWithDLSN
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.zookeeper import ZooKeeperStore
    from dlcore.ops.sandbox.cluster import Bookie, Sandbox

pytestmark = pytest.mark.integration

LOG = "replicated"
COMMITS = 30
RECORDS_PER_COMMIT = 10

WRITER = """
import sys
from dlcore import LogConfig, LogRecord, QuorumConfig
from dlcore.sync import open_namespace
config = LogConfig(
    quorum=QuorumConfig.of_replication_factor(int(sys.argv[2])), segment_bytes_max=20_000
)
with open_namespace(sys.argv[1], config=config) as namespace:
    namespace.create_log(sys.argv[3])
    writer = namespace.open_log(sys.argv[3]).open_writer()
    for txid in range(10**9):
        writer.write(LogRecord(txid, b"%d " % txid * 50))
        if txid % int(sys.argv[4]) == 0:
            print(txid, writer.commit(), flush=True)
"""


def write_until_killed(uri: str, copies: int) -> list[tuple[int, str]]:
    """Run the writer, kill it in an open segment; return (txid, DLSN) of all reported commits."""
    command = [LOADED_PYTHON, "-c", WRITER, uri, str(copies), LOG, str(RECORDS_PER_COMMIT)]
    acknowledged: list[tuple[int, str]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("\n"):
                txid, dlsn = line.split()
                acknowledged.append((int(txid), dlsn))
            if len(acknowledged) == COMMITS:
                process.kill()
    assert len(acknowledged) >= COMMITS
    return acknowledged


def read_acknowledged(uri: str, acknowledged: Sequence[tuple[int, str]]) -> list[LogRecordWithDLSN]:
    """Read every acknowledged record, and check positions and bytes; the order is the log's."""
    with open_namespace(uri) as namespace, namespace.open_log(LOG).open_reader() as reader:
        records: list[LogRecordWithDLSN] = []
        while len(records) <= acknowledged[-1][0]:
            records += reader.read_bulk(acknowledged[-1][0] + 1 - len(records))
    assert [record.txid for record in records] == list(range(len(records)))
    assert [record.sequence_id for record in records] == list(range(len(records)))
    assert all(record.payload == b"%d " % record.txid * 50 for record in records)
    dlsns = [record.dlsn for record in records]
    assert dlsns == sorted(set(dlsns))
    assert [(txid, str(records[txid].dlsn)) for txid, _ in acknowledged] == acknowledged
    assert records[-1].dlsn.lssn > 1
    return records


def lose(cluster: Sandbox, bookie: Bookie) -> None:
    """Kill a bookie and wipe its disk; its registration is gone, as it soon would be."""
    bookie.kill()
    shutil.rmtree(bookie.folder)
    delete_node(cluster, lambda paths: paths.bookie_available(bookie.name))


def delete_node(cluster: Sandbox, path_of: Callable[[NamespacePaths], str]) -> None:
    """Delete a node of the namespace."""

    async def delete(store: ZooKeeperStore, paths: NamespacePaths) -> None:
        await store.delete(path_of(paths))

    ask_store(cluster.uri, delete)


def bring_back_empty(cluster: Sandbox, bookie: Bookie) -> None:
    """Do what the bookie's message asks for: it refuses to start, until its cookie is deleted."""
    lost = bookie.incarnation
    with pytest.raises(BookieUnavailableError) as refused:
        bookie.restart()
    found = re.search(r"lost for good, dlog bookie cookie delete (\S+) lets", str(refused.value))
    assert found, str(refused.value)
    name = found[1]
    delete_node(cluster, lambda paths: paths.cookie(name))
    bookie.restart()
    assert bookie.incarnation != lost


def check_recovery(
    cluster: Sandbox, copies: int, records: list[LogRecordWithDLSN], *, with_lock: bool = False
) -> None:
    """Open the log for writing, write, and read all of it.

    The lock would only add waiting for the dead writer's session: fencing keeps writers apart.
    """
    config = LogConfig(
        quorum=QuorumConfig.of_replication_factor(copies),
        segment_bytes_max=20_000,
        lock_enabled=with_lock,
        lock_timeout_s=60.0,
    )
    with open_namespace(cluster.uri, config=config) as namespace:
        log = namespace.open_log(LOG)
        with log.open_writer() as writer:
            last_txid = writer.last_txid
            for txid in range(last_txid + 1, last_txid + 101):
                writer.write(LogRecord(txid, b"%d " % txid * 50))
        with log.open_reader() as reader:
            everything = reader.read_bulk(last_txid + 101)
    assert everything[: len(records)] == records
    assert [record.txid for record in everything] == list(range(last_txid + 101))
    assert all(record.payload == b"%d " % record.txid * 50 for record in everything)


@pytest.mark.parametrize(
    ("copies", "survivor"),
    sample([(3, 1), (1, 0), (2, 1), (3, 0), (3, 2), (4, 3), (5, 2)], 1),
)
def test_one_survivor_serves_all_and_wiped_bookies_come_back(
    fresh_sandbox: Callable[..., Sandbox], copies: int, survivor: int
) -> None:
    """Goal: nothing acknowledged is lost, and the log goes on once there are N bookies again."""
    cluster = fresh_sandbox(copies)
    acknowledged = write_until_killed(cluster.uri, copies)
    lost = [bookie for bookie in cluster.bookies if bookie is not cluster.bookies[survivor]]
    for bookie in lost:
        lose(cluster, bookie)
    records = read_acknowledged(cluster.uri, acknowledged)
    for bookie in lost:
        bring_back_empty(cluster, bookie)
    check_recovery(cluster, copies, records)


def test_other_bookies_take_the_place_of_those_lost(fresh_sandbox: Callable[..., Sandbox]) -> None:
    """Goal: the wiped ones need not come back; until there are enough the writer says so."""
    copies = 3
    cluster = fresh_sandbox(2 * copies - 1)
    spares = cluster.bookies[copies:]
    for bookie in spares:
        bookie.terminate()
    acknowledged = write_until_killed(cluster.uri, copies)
    for bookie in cluster.bookies[1:copies]:
        lose(cluster, bookie)
    records = read_acknowledged(cluster.uri, acknowledged)
    spares[0].restart()
    with pytest.raises(NotEnoughBookiesError):
        check_recovery(cluster, copies, records, with_lock=True)
    assert read_acknowledged(cluster.uri, acknowledged) == records
    spares[1].restart()
    check_recovery(cluster, copies, records, with_lock=True)
    assert read_acknowledged(cluster.uri, acknowledged) == records
