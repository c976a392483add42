"""A job as a user submits it: writes a log and reads it, by batch, then copies it by a stream.

    spark-submit … job.py '{"uri": …, "log": …, "checkpoint": …, "artifacts": […]}'

It prints one line of JSON: what each part came to, how many executors ran it, and a setting that
only the files of settings have.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

ROWS = 1000


def batch(spark: SparkSession, log: dict[str, str]) -> object:
    """Write and read; return how many rows there are and the highest transaction id."""
    rows = spark.range(0, ROWS, 1, 4).selectExpr("id AS txid", "string(id) AS value")
    rows.write.format("dlog").options(**log).mode("append").save()
    found = spark.read.format("dlog").options(**log).load()
    return list(found.selectExpr("count(*)", "max(txid)").first() or ())


def stream(spark: SparkSession, log: dict[str, str], checkpoint: str) -> object:
    """Copy the log to another; return how many rows that has then."""
    copy = {**log, "log": log["log"] + "-copy"}
    rows = spark.readStream.format("dlog").options(**log, startingOffsets="earliest").load()
    writer = rows.select("txid", "value").writeStream.format("dlog").options(**copy)
    query = writer.option("createLog", "true").option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()
    return spark.read.format("dlog").options(**copy).load().count()


def main(work: dict[str, Any]) -> None:
    """Do both, and tell."""
    spark = SparkSession.builder.appName("dlog deployed").getOrCreate()
    if work["artifacts"]:
        spark.addArtifacts(*work["artifacts"], pyfile=True)
    if work["registers"]:
        import dlspark

        dlspark.register(spark)
    log = {"uri": work["uri"], "log": work["log"]}
    report: dict[str, object] = {}
    for name, part in (
        ("batch", lambda: batch(spark, log)),
        ("stream", lambda: stream(spark, log, work["checkpoint"])),
    ):
        try:
            report[name] = part()  # type: ignore[no-untyped-call]
        except PySparkException as error:
            report[name] = str(error)
    status: Any = spark.sparkContext._jsc.sc().getExecutorMemoryStatus()
    report["executors"] = status.size() - 1
    report["pushes_filters"] = spark.conf.get("spark.sql.python.filterPushdown.enabled")
    print(json.dumps(report), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
