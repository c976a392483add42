"""The Spark driver under test: four queries from logs that stay and logs that go, for ever.

    python -m tests.chaos_spark.driver '{"address": …, "master": …, "host": …, "folder": …}'

A query that fails is started again from its checkpoint, as an operator would do.  SIGTERM stops the
queries and ends it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from tests.chaos_spark.churn import PREFIX
from tests.fixtures.spark import start_session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SOURCES = ("source-1", "source-2")
PLAIN, EVEN, ODD, TWICE, ONCE = "plain", "even", "odd", "twice", "once"
TARGETS = (PLAIN, EVEN, ODD, TWICE, ONCE)
SURVIVORS = "survivors"
"""Holds what a limited query by pattern found of the logs that come and go."""
_POLL_S = 0.3
_SETTLING_S_MAX = 30.0
_RECORDS_PER_TRIGGER = 400
"""Less than what gathers while a driver starts, more than what is written in a slow trigger."""
_SETTINGS = {
    "spark.driver.memory": "640m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "2",
    "spark.task.maxFailures": "8",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.2",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "50ms",
    "spark.network.timeout": "20s",
    "spark.network.timeoutInterval": "5s",
    "spark.executor.heartbeatInterval": "3s",
    "spark.python.worker.faulthandler.enabled": "false",
}


class Job:
    """The queries of one life of the driver."""

    def __init__(
        self,
        spark: SparkSession,
        address: Mapping[str, str],
        folder: Path,
        stopped: threading.Event,
    ) -> None:
        self._spark = spark
        self._stopped = stopped
        self._address = address
        self._folder = folder
        self._starts: dict[str, Callable[[], StreamingQuery]] = {
            "plain": lambda: self._sink("plain", self._records(), log=PLAIN),
            "column": lambda: self._sink("column", self._by_log(self._records())),
            "each": self._each,
            "survivors": lambda: self._sink("survivors", self._survivors(), log=SURVIVORS),
        }
        self._queries: dict[str, StreamingQuery] = {}

    def _records(self) -> DataFrame:
        """Follow both sources; more partitions than cores, so that some are speculated about."""
        return self._follow(logs=",".join(SOURCES), minPartitions="3")

    def _survivors(self) -> DataFrame:
        return self._follow(
            logsPattern=f"{PREFIX}.*",
            failOnDataLoss="false",
            maxRecordsPerTrigger=str(_RECORDS_PER_TRIGGER),
        )

    def _follow(self, **options: str) -> DataFrame:
        reader = self._spark.readStream.format("dlog").options(**self._address, **options)
        return reader.option("startingOffsets", "earliest").load().select("value")

    @staticmethod
    def _by_log(records: DataFrame) -> DataFrame:
        number = F.split(F.col("value").cast("string"), ":")[1].cast("long")
        return records.withColumn("log", F.when(number % 2 == 0, EVEN).otherwise(ODD))

    def _sink(self, name: str, frame: DataFrame, **options: str) -> StreamingQuery:
        writer = frame.writeStream.format("dlog").options(**self._address, **options)
        return self._start(name, writer)

    def _start(self, name: str, writer: object) -> StreamingQuery:
        checkpoint = str(self._folder / "checkpoints" / name)
        named = writer.queryName(name).option("checkpointLocation", checkpoint)  # type: ignore[attr-defined]
        started: StreamingQuery = named.trigger(processingTime="300 milliseconds").start()
        return started

    def _each(self) -> StreamingQuery:
        def take(batch: DataFrame, _batch_id: int) -> None:
            for mark in ("a", "b"):
                marked = F.concat(F.lit(f"{mark}:"), F.col("value").cast("string"))
                self._save(batch.select(marked.alias("value")), TWICE)
            self._save(batch, ONCE)

        return self._start("each", self._records().writeStream.foreachBatch(take))

    def _save(self, frame: DataFrame, log: str) -> None:
        frame.write.format("dlog").options(**self._address, log=log).mode("append").save()

    def keep_running(self) -> None:
        """Start what does not run, one query after the other.

        Spark gives each of a query's first Python processes 10 s, in which many at once on a busy
        machine do not start.
        """
        for name, start in self._starts.items():
            query = self._queries.get(name)
            if query is not None and query.isActive:
                continue
            if query is not None:
                print(f"query {name} failed: {_first_lines(query.exception())}", flush=True)
            try:
                query = self._queries[name] = start()
            except PySparkException as error:  # for example: no ZooKeeper answers just now
                print(f"query {name} does not start: {_first_lines(error)}", flush=True)
                continue
            until_s = time.monotonic() + _SETTLING_S_MAX
            while query.isActive and query.lastProgress is None and time.monotonic() < until_s:
                if self._stopped.wait(_POLL_S):
                    return

    def stop(self) -> None:
        """Stop all queries."""
        for query in self._queries.values():
            query.stop()


def _first_lines(error: object) -> str:
    lines = [line for line in str(error).splitlines() if "Error" in line or "Exception" in line]
    return " | ".join(lines[-3:] or [str(error)])[:600]


def main(argument: str) -> None:
    """Run until SIGTERM."""
    work = json.loads(argument)
    folder = Path(work["folder"])
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    network = {"spark.driver.host": work["host"], "spark.driver.bindAddress": work["host"]}
    os.environ["SPARK_LOCAL_IP"] = work["host"]
    spark = start_session(folder / "spark", master=work["master"], options=_SETTINGS | network)
    job = Job(spark, work["address"], folder, stopped)
    print("driver runs", flush=True)
    while not stopped.wait(_POLL_S):
        job.keep_running()
    job.stop()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
