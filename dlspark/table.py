"""A log as one DataFrame: cold rows by Spark's own reader of Parquet, the others by ``dlog``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN
from dlspark.options import Mode, ReadOptions
from dlspark.sessions import open_shared_namespace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import Column, DataFrame, SparkSession

    from dlcore.sync import LogSnapshot

_POSITIONS = (
    "_lssn LONG, _entry LONG, _slot INT, _txid LONG, _sequence_id LONG, _timestamp TIMESTAMP"
)
_MADE_OF = {"dlsn", "log", "txid", "sequence_id", "timestamp"}
_NATIVE = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float", "double", "string", "binary", "date32[day]", "date64[ms]"),
        *("list", "struct", "map"),
    }
)
_NATIVE_PREFIXES = ("timestamp[ms", "timestamp[us", "timestamp[s", "decimal128")


def table(spark: SparkSession, uri: str, log: str, **options: str) -> DataFrame:
    """Return all records of a log, as ``format("dlog")`` does, with its cold rows read by Spark.

    Cold rows are read from the objects by Spark's own reader, which pushes filters down and skips
    columns; ``format("dlog")`` reads the records after that.  One snapshot of the log, taken now,
    decides where the one ends and the other begins, so each row comes once.  Spark needs access to
    the store: ``s3://`` is read as ``s3a://``.  If Spark's reader does not know a type of the
    log's columns, ``format("dlog")`` reads all of it.

    Args:
        spark: the session.
        uri: the namespace, ``distributedlog://…``.
        log: the log.
        options: further options of ``format("dlog")``, but for bounds.

    Raises:
        ConfigurationError: an option is wrong, or is a bound.
        DLError: the log cannot be read now.
    """
    for name in options:
        if name.lower().startswith(("starting", "ending", "logs")):
            raise ConfigurationError(f"option {name}: a table has all records of one log")
    given = {**options, "uri": uri, "log": log}
    address = ReadOptions.parse({k.lower(): v for k, v in given.items()}, Mode.LOAD).address
    with open_shared_namespace(address).open_log(log) as manager:
        snapshot = manager.get_snapshot()
    urls, boundary = cold_part(snapshot)
    if not _is_native(snapshot):
        urls, boundary = [], snapshot.first
    reader = spark.read.format("dlog").options(**given)
    bounds = {"startingOffsets": str(boundary), "endingOffsets": str(snapshot.end)}
    if not urls:
        return reader.options(**bounds).load()
    if boundary >= snapshot.end:
        # Only the schema is asked for: the source reads no row here.
        return _cold(spark, snapshot, urls, reader.load().schema)
    tail = reader.options(**bounds).load()
    return _cold(spark, snapshot, urls, tail.schema).unionByName(tail)


def cold_part(snapshot: LogSnapshot) -> tuple[list[str], DLSN]:
    """Return the objects with the cold beginning of a log, and the position after it."""
    urls: dict[str, None] = {}
    for segment in snapshot.segments:
        for extent in segment.extents:
            # Truncated, and not removed from the chain yet.
            if DLSN(segment.lssn, extent.end_entry_id, 0) <= snapshot.first:
                continue
            ledger = segment.ledgers[extent.ledger_id]
            if not ledger.is_cold:
                start = DLSN(segment.lssn, extent.base_entry_id, 0)
                return list(urls), max(start, snapshot.first)
            urls |= dict.fromkeys(f"{ledger.folder}/{each.name}" for each in ledger.objects)
    return list(urls), snapshot.end


def cut_ends(snapshot: LogSnapshot) -> dict[int, int]:
    """Return, for each segment of a fork whose objects have more rows, the entry to end at."""
    return {
        segment.lssn: segment.entry_count
        for segment in snapshot.segments
        for extent in segment.extents
        if segment.ledgers[extent.ledger_id].is_cold
        and extent.last_entry_id < segment.ledgers[extent.ledger_id].last_entry_id
    }


def _is_native(snapshot: LogSnapshot) -> bool:
    """Return whether Spark's reader of Parquet knows all types of the log's columns."""

    def are_known(columns: Iterable[Any]) -> bool:
        return all(
            (each.type in _NATIVE or each.type.startswith(_NATIVE_PREFIXES))
            and are_known(each.fields)
            for each in columns
        )

    return snapshot.schema is None or are_known(snapshot.schema.latest)


def _cold(spark: SparkSession, snapshot: LogSnapshot, urls: list[str], wanted: Any) -> DataFrame:
    """Return the rows of objects that are in the log, with the columns of `wanted`."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    prefix = "" if snapshot.schema is None else "_"
    made = {prefix + name for name in _MADE_OF}
    own = [field for field in wanted.fields if field.name not in made]
    positions = cast("StructType", StructType.fromDDL(_POSITIONS))
    schema = StructType([*positions.fields, *own])
    # Hadoop's client of S3 has the scheme s3a.
    paths = [f"s3a{url[2:]}" if url.startswith("s3://") else url for url in urls]
    rows = spark.read.schema(schema).parquet(*paths)
    lssn, entry = F.col("_lssn"), F.col("_entry")
    for cut, end in cut_ends(snapshot).items():  # an object may go on after the end of a fork
        rows = rows.where((lssn != cut) | (entry < end))
    first = snapshot.first
    if first > DLSN(first.lssn, 0, 0):  # an object may begin with truncated rows
        in_entry = (entry == first.entry_id) & (F.col("_slot") >= first.slot_id)
        in_segment = (lssn == first.lssn) & ((entry > first.entry_id) | in_entry)
        rows = rows.where((lssn > first.lssn) | in_segment)

    def column(name: str) -> Column:
        if name == f"{prefix}log":
            return F.lit(snapshot.log).alias(name)
        if name == f"{prefix}dlsn":
            slot = F.col("_slot").cast("long").alias("slot")
            parts = (F.col("_lssn").alias("lssn"), F.col("_entry").alias("entry"), slot)
            return F.struct(*parts).alias(name)
        return F.col(f"_{name.removeprefix(prefix)}" if name in made else name).alias(name)

    return rows.select(*map(column, wanted.names))
