"""Reads planned and performed through proxies give what those give that reach bookies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pytest

from dlcore.base.errors import AlreadyTruncatedError, LedgerReadError, LogNotFoundError
from dlcore.base.ids import DLSN
from dlcore.base.records import NotLessThan, RecordField
from dlcore.sync import open_namespace, open_namespace as open_remote, scan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.sync import LogSnapshot, Namespace, ScanBatch, ScanRange
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration
COLUMNS = pa.schema([("fare", pa.float64()), ("city", pa.string())])


@pytest.fixture
def direct(namespace_uri: str) -> Iterator[Namespace]:
    """A client that reaches bookies."""
    with open_namespace(namespace_uri) as namespace:
        yield namespace


@pytest.fixture
def remote(proxy: ProxyProcess) -> Iterator[Namespace]:
    """One that reaches the proxy only."""
    with open_remote(proxy.location) as namespace:
        yield namespace


@pytest.fixture
def logs(direct: Namespace) -> list[str]:
    """A log of bytes in three segments with truncated records, and a typed one."""
    home = uuid4().hex
    direct.create_log(f"{home}/bytes")
    bytes_log = direct.open_log(f"{home}/bytes")
    for segment in range(3):
        with bytes_log.open_writer() as writer:
            for entry in range(4):
                txids = [100 * segment + 10 * entry + n for n in range(5)]
                payloads = [f"{segment}.{entry}.{n}".encode() for n in range(5)]
                writer.write_batch(pa.record_batch({"txid": txids, "value": payloads}))
                writer.flush()
    bytes_log.truncate(DLSN(1, 1, 2))
    direct.create_log(f"{home}/typed", schema=COLUMNS)
    with direct.open_log(f"{home}/typed").open_writer() as writer:
        writer.write_batch(pa.record_batch({"fare": [1.5, 2.5, None], "city": ["a", None, "c"]}))
    return [f"{home}/bytes", f"{home}/typed"]


def parts_of(snapshot: LogSnapshot | None) -> list[ScanRange]:
    """Return all that is readable, each segment in parts that begin and end within entries."""
    assert snapshot is not None
    start = snapshot.first
    middle = DLSN(start.lssn, start.entry_id, start.slot_id + 1)
    return [*snapshot.scans(start, middle), *snapshot.scans(middle, snapshot.end)]


def as_values(batches: Iterator[ScanBatch]) -> list[object]:
    """Return what batches say of each record."""
    return [
        (
            each.lssn,
            each.entry_id,
            each.first_slot + n,
            each.sequence_id + n,
            each.timestamp_ms,
            row,
        )
        for each in batches
        for n, row in enumerate(each.batch.to_pylist())
    ]


def test_planned_and_read_remotely(
    direct: Namespace, remote: Namespace, logs: list[str], namespace_uri: str
) -> None:
    """Snapshots, schemas, places, and the records of ranges, also of some columns only."""
    known, names = direct.get_snapshots(logs, fresh=True), [*logs, "no/such/log"]
    found = remote.get_snapshots(names)
    assert found.pop("no/such/log") is None
    assert found == known
    schemas = remote.get_schemas(names)
    assert schemas == {logs[0]: None, logs[1]: COLUMNS}
    snapshot = known[logs[0]]
    assert snapshot is not None
    wanted: list[tuple[LogSnapshot, DLSN | NotLessThan]] = [
        (snapshot, DLSN(2, 0, 0)),
        (snapshot, snapshot.end),
        *((snapshot, NotLessThan(RecordField.TXID, txid)) for txid in (0, 112, 5000)),
        (snapshot, NotLessThan(RecordField.SEQUENCE_ID, 33)),
        (snapshot, NotLessThan(RecordField.TIMESTAMP_MS, 0)),
    ]
    assert remote.find_places(wanted) == direct.find_places(wanted)
    shorter = replace(snapshot, end=DLSN(2, 0, 0), segments=snapshot.segments[:1])
    beyond: list[tuple[LogSnapshot, DLSN | NotLessThan]] = [
        (shorter, NotLessThan(RecordField.TXID, 150))
    ]
    (place,) = remote.find_places(beyond)
    assert (place.dlsn, place.sequence_id) == (DLSN(2, 0, 0), 20)
    for name, columns in (
        (logs[0], None),
        (logs[0], frozenset[str]()),
        (logs[1], None),
        (logs[1], frozenset({"city", "unknown"})),
    ):
        for part in parts_of(known[name]):
            part = replace(part, columns=columns)
            there = as_values(scan([part], uri=namespace_uri))
            here = as_values(remote.scan(part))
            if columns == frozenset():  # more may be there than is asked for
                assert len(here) == len(there) > 0
            else:
                assert here == there
                assert here


def test_logs_that_are_gone_or_unknown(
    direct: Namespace, remote: Namespace, proxy: ProxyProcess, logs: list[str]
) -> None:
    """Truncated, deleted, created again; and records that no proxy comes to know of."""
    snapshot = remote.get_snapshots(logs)[logs[0]]
    assert snapshot is not None
    parts = snapshot.scans(snapshot.first, snapshot.end)
    with open_remote(proxy.location, patience_s=1.0) as impatient:
        later = replace(parts[-1], end=DLSN(3, 99, 0))
        with pytest.raises(LedgerReadError, match=r"up to 3:99:0 were readable .* after 3:4:0"):
            list(impatient.scan(later))
        ahead = replace(snapshot, end=DLSN(9, 0, 0))
        with pytest.raises(Exception, match="try again"):
            impatient.find_places([(ahead, DLSN(2, 0, 0))])
    direct.open_log(logs[0]).truncate(DLSN(3, 0, 0))
    with pytest.raises(AlreadyTruncatedError, match="truncated away"):
        list(remote.scan(parts[0]))
    direct.delete_log(logs[0])
    direct.create_log(logs[0])
    with pytest.raises(LogNotFoundError, match="was deleted"):
        list(remote.scan(parts[-1]))
    with pytest.raises(LogNotFoundError, match="is gone"):
        remote.find_places([(snapshot, DLSN(2, 0, 0))])
