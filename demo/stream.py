"""The Spark half of the demo: flights in, statistics through, tables out; JSON and typed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, functions as F

from demo.flights import FLIGHT_SCHEMA, STATISTICS_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pyspark.sql.streaming.query import StreamingQuery

FLIGHTS_LOG = "flights"
DELAYS_LOG = "delays"
TYPED_LOG = "flights-typed"
CLOSING_ID = -1
"""The id of the record behind the last flight, which moves the watermark past all hours."""

_FLIGHT_FIELDS = [field.split()[0] for field in FLIGHT_SCHEMA.split(", ")]
_STATISTIC_FIELDS = [field.split()[0] for field in STATISTICS_SCHEMA.split(", ")]
_MS_PER_HOUR = 3_600_000
_CLOSING_AFTER_MS = 72 * _MS_PER_HOUR
"""Far more than the watermark's hour, so that the last hours of the flights are passed as well."""
_POLL_S = 0.1


_ASKED = "carrier string, dep_delay bigint, distance bigint"
"""The fields that the same question to both logs needs."""


class FlightJobs:
    """Jobs over the logs `flights`, `delays` and `flights-typed` of the namespace of options."""

    def __init__(self, spark: SparkSession, namespace: Mapping[str, str], checkpoint: Path) -> None:
        self._spark = spark
        self._namespace = namespace
        self._checkpoint = checkpoint

    def write_flights(self, table: Path, *, start: int, stop: int) -> None:
        """Append the rows start … stop-1 of the Parquet file `table` to the log `flights`."""
        rows = self._spark.read.parquet(str(table)).where(F.col("row").between(start, stop - 1))
        value = F.to_json(F.struct(*_FLIGHT_FIELDS))
        self._append(rows.orderBy("row").select("txid", value.alias("value")))

    def write_closing_record(self, last_txid: int) -> None:
        """Append one record far behind the last flight.

        Append mode emits an hour when the watermark has passed it, so the last hours need a later
        record.  Its own hour is never passed, so it appears in no statistic.
        """
        rows = self._spark.range(1).select(
            F.lit(last_txid + _CLOSING_AFTER_MS).alias("txid"),
            F.to_json(F.struct(F.lit(CLOSING_ID).alias("id"))).alias("value"),
        )
        self._append(rows)

    def write_typed_flights(self, table: Path) -> None:
        """Write the Parquet file `table` to a new log whose columns are the flights' own."""
        rows = self._spark.read.parquet(str(table)).orderBy("row")
        columns = rows.select(F.col("txid").alias("_txid"), *_FLIGHT_FIELDS)
        self._append(columns, TYPED_LOG, createLog="true")

    def _append(self, rows: DataFrame, log: str = FLIGHTS_LOG, **options: str) -> None:
        target = rows.write.format("dlog").options(log=log, **self._namespace, **options)
        target.mode("append").save()

    def start_statistics(self) -> StreamingQuery:
        """Start, or go on with, the query that computes `delays` from `flights`."""
        records = (
            self._spark.readStream.format("dlog")
            .options(**self._namespace)
            .option("log", FLIGHTS_LOG)
            .option("startingOffsets", "earliest")
            .load()
        )
        return (
            statistics_of(records)
            .writeStream.format("dlog")
            .queryName("delays")
            .options(**self._namespace)
            .option("log", DELAYS_LOG)
            .option("checkpointLocation", str(self._checkpoint))
            .outputMode("append")
            .start()
        )

    def read_flights(self) -> pd.DataFrame:
        """Return the log `flights` as a table; partitions come in the order of its records."""
        return self._read(FLIGHTS_LOG, FLIGHT_SCHEMA)

    def read_statistics(self) -> pd.DataFrame:
        """Return the log `delays` as a table in the order of its records."""
        return self._read(DELAYS_LOG, STATISTICS_SCHEMA)

    def read_typed_flights(self) -> pd.DataFrame:
        """Return the log `flights-typed` as a table in the order of its records."""
        records = self._load(
            TYPED_LOG, columns=",".join(("_sequence_id", "_txid", *_FLIGHT_FIELDS))
        )
        table = records.withColumnsRenamed({"_sequence_id": "sequence_id", "_txid": "txid"})
        return _nullable(table.toArrow())

    def ask_json(self) -> list[tuple[object, ...]]:
        """Return flights, mean delay and miles of each carrier, from the JSON of `flights`."""
        records = self._load(FLIGHTS_LOG, columns="value")
        parsed = F.from_json(F.col("value").cast("string"), _ASKED).alias("flight")
        return _answer(records.select(parsed).select("flight.*").where("carrier IS NOT NULL"))

    def ask_typed(self) -> list[tuple[object, ...]]:
        """Return the same from the columns of `flights-typed`."""
        asked = [field.split()[0] for field in _ASKED.split(", ")]
        return _answer(self._load(TYPED_LOG, columns=",".join(asked)))

    def _load(self, log: str, **options: str) -> DataFrame:
        return self._spark.read.format("dlog").options(log=log, **self._namespace, **options).load()

    def _read(self, log: str, schema: str) -> pd.DataFrame:
        parsed = F.from_json(F.col("value").cast("string"), schema).alias("parsed")
        records = self._load(log, columns="sequence_id,txid,value")
        table = records.select("sequence_id", "txid", parsed)
        # Over Arrow, so that a gap in a column of whole numbers does not turn it into floats.
        return _nullable(table.select("sequence_id", "txid", "parsed.*").toArrow())


def _answer(flights: DataFrame) -> list[tuple[object, ...]]:
    asked = F.count("*"), F.avg("dep_delay"), F.sum("distance")
    return sorted(tuple(row) for row in flights.groupBy("carrier").agg(*asked).collect())


def statistics_of(records: DataFrame) -> DataFrame:
    """Return one JSON value per carrier and hour, from the rows of the log `flights`."""
    flights = records.select(
        F.timestamp_millis("txid").alias("scheduled"),
        F.from_json(F.col("value").cast("string"), FLIGHT_SCHEMA).alias("flight"),
    ).select("scheduled", "flight.carrier", "flight.dep_delay", "flight.arr_delay")
    hours = (
        flights.withWatermark("scheduled", "1 hour")
        .groupBy("carrier", F.window("scheduled", "1 hour").alias("hour"))
        .agg(
            F.count("*").alias("flights"),
            F.count("dep_delay").alias("departed"),
            F.min("dep_delay").alias("dep_delay_min"),
            F.max("dep_delay").alias("dep_delay_max"),
            F.avg("dep_delay").alias("dep_delay_mean"),
            F.count("arr_delay").alias("arrived"),
            F.avg("arr_delay").alias("arr_delay_mean"),
        )
        .withColumn("hour_ms", F.unix_millis("hour.start"))
    )
    return hours.select(F.to_json(F.struct(*_STATISTIC_FIELDS)).alias("value"))


def _nullable(table: pa.Table) -> pd.DataFrame:
    """Convert an Arrow table with pandas' nullable types."""
    kinds = {
        pa.int64(): pd.Int64Dtype(),
        pa.float64(): pd.Float64Dtype(),
        pa.string(): pd.StringDtype(),
    }
    frame: pd.DataFrame = table.to_pandas(types_mapper=kinds.get)
    return frame


def rows_read(query: StreamingQuery) -> int:
    """Return how many records the run of a query has read so far."""
    return sum(int(progress["numInputRows"]) for progress in query.recentProgress)


def wait_for_rows(query: StreamingQuery, count: int, timeout_s: float) -> None:
    """Wait until the run of a query has read at least `count` records.

    Raises:
        TimeoutError: it has not.
    """
    deadline = time.monotonic() + timeout_s
    while rows_read(query) < count:
        check_running(query)
        if time.monotonic() > deadline:
            raise TimeoutError(f"the stream read {rows_read(query)} of {count} records in time")
        time.sleep(_POLL_S)


def check_running(query: StreamingQuery) -> None:
    """Raise what ended a query, if something did."""
    error = query.exception()
    if error is not None:
        raise error


def wait_until_drained(
    query: StreamingQuery, count_output: Callable[[], int], expected: int, timeout_s: float
) -> None:
    """Wait until `expected` records are out and the query has nothing more to do.

    Raises:
        TimeoutError: they did not come.
    """
    deadline = time.monotonic() + timeout_s
    while count_output() < expected:
        check_running(query)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count_output()} of {expected} statistics came in time")
        time.sleep(_POLL_S)
    query.processAllAvailable()  # what came twice would come now
