"""Spark's own connector for Kafka reads one topic, as its arguments say; see README.md."""

from __future__ import annotations

import json
import os
import struct
import sys
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BATCH_RECORDS = 20_000
"""At most so many are in a micro-batch."""
PARTITIONS = "3"
"""Into so many a batch query divides the only one of a topic."""


class Output:
    """The standard output, which only frames reach: what Spark prints goes to the errors."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(self, rows: DataFrame) -> None:
        """Write a frame for each row, by offset."""
        table = rows.select("offset", "value").toArrow().sort_by("offset")
        for offset, value in zip(*(each.to_pylist() for each in table.columns), strict=True):
            self._out.write(struct.pack(">qi", offset, len(value)) + value)
        self._out.flush()


def main() -> None:
    """Read as the arguments say."""
    jars, what, addresses, topic, offset = sys.argv[1:]
    out = Output()
    session = SparkSession.builder.master("local[2]").config("spark.jars", jars)
    spark = session.config("spark.ui.enabled", "false").getOrCreate()
    options = {
        "kafka.bootstrap.servers": addresses,
        "assign": json.dumps({topic: [0]}),
        "startingOffsets": json.dumps({topic: {"0": int(offset)}}),
        "failOnDataLoss": "false",  # begin with the earliest record if an offset is out of range
    }
    if what == "batch":
        found = spark.read.format("kafka").options(**options, minPartitions=PARTITIONS).load()
        out.write(found)
        return
    options["maxOffsetsPerTrigger"] = str(BATCH_RECORDS)
    stream = spark.readStream.format("kafka").options(**options).load()
    query = stream.writeStream.foreachBatch(lambda rows, _: out.write(rows)).start()
    sys.stdin.read()  # its end is the end of the work
    query.stop()
    if (error := query.exception()) is not None:
        raise error


if __name__ == "__main__":
    main()
