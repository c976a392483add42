"""Tables about the system: logs, their segments and extents, ledgers, bookies, commits.

One task reads a table from the metadata store, some rows at a time.  No entries are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from dlcore.base.errors import DLError, LogNotFoundError
from dlspark.options import MetadataOptions, MetadataTable
from dlspark.reading import list_selected
from dlspark.sessions import describe_missing, open_shared_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from dlcore.sync import LogSnapshot, Namespace

ROWS_PER_BATCH = 1_000
_LOGS_AT_ONCE = 500
"""Bounds the snapshots in memory; so many are read from the metadata store together."""

_TEXT, _NUMBER, _TIME, _TRUTH = StringType(), LongType(), TimestampType(), BooleanType()
_COUNTS = {"records": _NUMBER, "size_bytes": _NUMBER}
_TXIDS = {"first_txid": _NUMBER, "last_txid": _NUMBER, "last_timestamp": _TIME}
_ERROR = {"error": _TEXT}
COLUMNS: dict[MetadataTable, dict[str, DataType]] = {
    MetadataTable.LOGS: {
        "log": _TEXT,
        "log_id": _TEXT,
        "sealed": _TRUTH,
        "first_dlsn": _TEXT,
        "end_dlsn": _TEXT,
        "segments": _NUMBER,
        "extents": _NUMBER,
        **_COUNTS,
        **_TXIDS,
        **_ERROR,
    },
    MetadataTable.SEGMENTS: {
        "log": _TEXT,
        "lssn": _NUMBER,
        "first_sequence_id": _NUMBER,
        "extents": _NUMBER,
        "entries": _NUMBER,
        **_COUNTS,
        **_TXIDS,
        **_ERROR,
    },
    MetadataTable.EXTENTS: {
        "log": _TEXT,
        "lssn": _NUMBER,
        "first_entry": _NUMBER,
        "entries": _NUMBER,
        "first_sequence_id": _NUMBER,
        **_COUNTS,
        **_TXIDS,
        "ledger_id": _NUMBER,
        "ledger_first_entry": _NUMBER,
        "ledger_last_entry": _NUMBER,
        **_ERROR,
    },
    MetadataTable.LEDGERS: {
        "ledger_id": _NUMBER,
        "state": _TEXT,
        "created": _TIME,
        "ensemble_size": _NUMBER,
        "write_quorum": _NUMBER,
        "ack_quorum": _NUMBER,
        "last_entry": _NUMBER,
        "size_bytes": _NUMBER,
        "ensembles": _NUMBER,
        "bookies": ArrayType(_TEXT),
        **_ERROR,
    },
    MetadataTable.BOOKIES: {
        "bookie": _TEXT,
        "incarnation": _TEXT,
        "address": _TEXT,
        "rack": _TEXT,
        "read_only": _TRUTH,
        "free_bytes": _NUMBER,
        "total_bytes": _NUMBER,
    },
    MetadataTable.COMMITS: {
        "identity": _TEXT,
        "version": _NUMBER,
        "appends": _NUMBER,
        "committed": _TIME,
    },
}
"""The columns of each table.  Counts are of stored records and bytes: a partly truncated segment
counts whole.  If nothing can be read of a log, because its metadata is damaged or no bookie
answers, its row has its name and the error.  The same holds for a ledger whose metadata is damaged.
"""


def schema_of(table: MetadataTable) -> StructType:
    """Return the schema of a table."""
    return StructType([StructField(name, kind) for name, kind in COLUMNS[table].items()])


class MetadataReader(DataSourceReader):
    """Reads a table about the system."""

    def __init__(self, options: MetadataOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """Return one partition."""
        return [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows; runs in a task."""
        import pyarrow as pa

        schema = pa.schema([(n, _arrow(kind)) for n, kind in COLUMNS[self._options.table].items()])
        rows: list[dict[str, Any]] = []
        for row in self._rows():
            rows.append(row)
            if len(rows) == ROWS_PER_BATCH:
                yield pa.RecordBatch.from_pylist(rows, schema=schema)
                rows = []
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=schema)

    def _rows(self) -> Iterator[dict[str, Any]]:
        namespace = open_shared_namespace(self._options.address)
        match self._options.table:
            case MetadataTable.LEDGERS:
                yield from _ledgers(namespace)
            case MetadataTable.BOOKIES:
                yield from _bookies(namespace)
            case MetadataTable.COMMITS:
                yield from _commits(namespace)
            case table:
                rows_of = {
                    MetadataTable.LOGS: _log,
                    MetadataTable.SEGMENTS: _segments,
                    MetadataTable.EXTENTS: _extents,
                }[table]
                found: set[str] = set()
                for name, snapshot in self._snapshots(namespace):
                    found.add(name)
                    if isinstance(snapshot, DLError):
                        yield {"log": name, "error": str(snapshot)}
                    else:
                        yield from rows_of(snapshot)
                self._require_named(found)

    def _require_named(self, found: set[str]) -> None:
        """Raise if a named log does not exist: an empty result would not show this."""
        logs = self._options.logs
        names = () if logs is None or logs.pattern is not None else logs.names
        for name in names:
            if name not in found:
                raise LogNotFoundError(describe_missing(name, self._options.address))

    def _snapshots(self, namespace: Namespace) -> Iterator[tuple[str, LogSnapshot | DLError]]:
        address, logs = self._options.address, self._options.logs
        names = namespace.get_logs() if logs is None else list_selected(address, logs)
        for start in range(0, len(names), _LOGS_AT_ONCE):
            yield from namespace.survey_logs(names[start : start + _LOGS_AT_ONCE]).items()


def _arrow(kind: DataType) -> pa.DataType:
    import pyarrow as pa

    if isinstance(kind, ArrayType):
        return pa.list_(_arrow(kind.elementType))
    types = {
        StringType: pa.string(),
        LongType: pa.int64(),
        BooleanType: pa.bool_(),
        TimestampType: pa.timestamp("us", tz="UTC"),
    }
    return types[type(kind)]


def _log(snapshot: LogSnapshot) -> Iterator[dict[str, Any]]:
    segments = list(_segments(snapshot))
    filled = [segment for segment in segments if segment["extents"]]
    yield {
        "log": snapshot.log,
        "log_id": snapshot.log_id,
        "sealed": snapshot.sealed,
        "first_dlsn": str(snapshot.first),
        "end_dlsn": str(snapshot.end),
        "segments": len(segments),
        "extents": sum(segment["extents"] for segment in segments),
        "records": sum(segment["records"] for segment in segments),
        "size_bytes": sum(segment["size_bytes"] for segment in segments),
        "first_txid": filled[0]["first_txid"] if filled else None,
        "last_txid": filled[-1]["last_txid"] if filled else None,
        "last_timestamp": filled[-1]["last_timestamp"] if filled else None,
    }


def _segments(snapshot: LogSnapshot) -> Iterator[dict[str, Any]]:
    for segment in snapshot.segments:
        extents = segment.extents
        yield {
            "log": snapshot.log,
            "lssn": segment.lssn,
            "first_sequence_id": segment.start_sequence_id,
            "extents": len(extents),
            "entries": segment.entry_count,
            "records": segment.record_count,
            "size_bytes": segment.size_bytes,
            "first_txid": extents[0].first_txid if extents else None,
            "last_txid": extents[-1].last_txid if extents else None,
            "last_timestamp": extents[-1].last_timestamp_ms * 1000 if extents else None,
        }


def _extents(snapshot: LogSnapshot) -> Iterator[dict[str, Any]]:
    for segment in snapshot.segments:
        for extent in segment.extents:
            yield {
                "log": snapshot.log,
                "lssn": segment.lssn,
                "first_entry": extent.base_entry_id,
                "entries": extent.entry_count,
                "first_sequence_id": extent.start_sequence_id,
                "records": extent.record_count,
                "size_bytes": extent.size_bytes,
                "first_txid": extent.first_txid,
                "last_txid": extent.last_txid,
                "last_timestamp": extent.last_timestamp_ms * 1000,
                "ledger_id": extent.ledger_id,
                "ledger_first_entry": extent.first_entry_id,
                "ledger_last_entry": extent.last_entry_id,
            }


def _ledgers(namespace: Namespace) -> Iterator[dict[str, Any]]:
    first = 0
    while found := namespace.list_ledgers(first=first, count=ROWS_PER_BATCH):
        for ledger_id, ledger in found.items():
            if isinstance(ledger, DLError):
                yield {"ledger_id": ledger_id, "error": str(ledger)}
                continue
            is_closed = ledger.last_entry_id >= 0 or ledger.state.name == "CLOSED"
            yield {
                "ledger_id": ledger_id,
                "state": ledger.state.name,
                "created": ledger.created_ms * 1000,
                "ensemble_size": ledger.quorum.ensemble_size,
                "write_quorum": ledger.quorum.write_quorum_size,
                "ack_quorum": ledger.quorum.ack_quorum_size,
                "last_entry": ledger.last_entry_id if is_closed else None,
                "size_bytes": ledger.length_bytes if is_closed else None,
                "ensembles": len(ledger.ensembles),
                "bookies": ledger.home,
            }
        first = ledger_id + 1


def _bookies(namespace: Namespace) -> Iterator[dict[str, Any]]:
    for info in namespace.get_bookies():
        yield {
            "bookie": info.bookie.name,
            "incarnation": info.bookie.incarnation,
            "address": info.address,
            "rack": info.rack,
            "read_only": info.read_only,
            "free_bytes": info.free_bytes if info.total_bytes else None,
            "total_bytes": info.total_bytes or None,
        }


def _commits(namespace: Namespace) -> Iterator[dict[str, Any]]:
    for commit in sorted(namespace.list_commits(), key=lambda each: each.identity):
        yield {
            "identity": commit.identity,
            "version": commit.version,
            "appends": commit.appends,
            "committed": commit.committed_ms * 1000,
        }
