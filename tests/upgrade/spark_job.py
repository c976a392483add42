"""A streaming query of any release, from one log into another: ``URI SOURCE COPY CHECKPOINT``.

It reads what there is, and ends.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

import dlspark

if __name__ == "__main__":
    uri, source, copy, checkpoint = sys.argv[1:]
    print(f"of {dlspark.__file__}", flush=True)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    dlspark.register(spark)
    live = spark.readStream.format("dlog").options(uri=uri, log=source, startingOffsets="earliest")
    query = (
        live.load()
        .select("value")
        .writeStream.format("dlog")
        .options(uri=uri, log=copy, checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()
    print("at 1")
