"""A log that a pipeline fills from another one: each record once, whatever is killed.

Run it with ``spark-pipelines run`` in the folder of `spark-pipeline.yml`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark import pipelines as dp
from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

spark = SparkSession.active()
uri = spark.conf.get("clicks.uri")
assert uri is not None


@dp.temporary_view
def clicks() -> DataFrame:
    """Read the log `clicks` from its beginning."""
    reader = spark.readStream.format("dlog").options(uri=uri, log="clicks")
    return reader.options(startingOffsets="earliest", maxRecordsPerTrigger="1000").load()


dp.create_sink("words", "dlog", {"uri": uri, "log": "words", "createLog": "true"})


@dp.append_flow(target="words")
def words_of_clicks() -> DataFrame:
    """Append a record for each click to the log `words`."""
    return spark.readStream.table("clicks").selectExpr("upper(string(value)) AS value")
