"""A Delta table that follows a log of changes: each change has its effect once, in order.

Run it with ``python into_table.py URI LOG TABLE CHECKPOINT``; it needs `deltalake`, which the extra
`table` brings.  The log is typed, with the columns of `COLUMNS` and `gone`, which says that a row
is no more.

A log numbers its records without gaps (`_sequence_id`), so of two changes it is always known which
came later.  Each commit of the table says, as the version of a transaction, up to which number it
has the changes.  A batch leaves out what the table has: one that Spark repeats after a crash, and
all those of a query that was started again from the log's beginning.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction
from pyspark.sql import SparkSession, functions as F

from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

KEY = "id"
COLUMNS = pa.schema([(KEY, pa.int64()), ("city", pa.string()), ("amount", pa.float64())])
ROW = pa.schema([*COLUMNS, ("_sequence_id", pa.int64())])
"""The table's columns: those of the log, and the number of the change that made the row."""


def follow(
    spark: SparkSession, uri: str, log: str, folder: str, checkpoint: str, *, batch_records: int
) -> StreamingQuery:
    """Start a query that applies all changes that the log has; it ends by itself.

    Args:
        spark: the session.
        uri: the log's namespace.
        log: its name.
        folder: of the table, which is made if it is not there.
        checkpoint: the query's folder.
        batch_records: most changes that are merged at once.
    """
    DeltaTable.create(folder, ROW, mode="ignore")
    with open_namespace(uri) as namespace, namespace.open_log(log) as opened:
        # Not its name: a log that is deleted and created again numbers its records anew.
        application = f"dlog/{opened.log_id}"
    reader = spark.readStream.format("dlog").options(uri=uri, log=log, includeMetadata="true")
    changes = reader.options(startingOffsets="earliest", maxRecordsPerTrigger=batch_records).load()
    writer = changes.writeStream.foreachBatch(partial(apply, folder, application))
    return writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()


def apply(folder: str, application: str, batch: DataFrame, _number: int) -> None:
    """Merge the changes of a batch that the table does not have yet, in one commit."""
    table = DeltaTable(folder)
    done = table.transaction_version(application)
    fresh = batch if done is None else batch.where(F.col("_sequence_id") > done)
    # Of several changes of a row the last one counts.
    last = F.max_by(F.struct(*ROW.names, "gone"), "_sequence_id").alias("last")
    changes = fresh.groupBy(KEY).agg(last).select("last.*").toArrow()
    if not changes.num_rows:
        return
    version = pc.max(changes["_sequence_id"]).as_py()
    merge = table.merge(
        changes,
        predicate=f"new.{KEY} = old.{KEY}",
        source_alias="new",
        target_alias="old",
        commit_properties=CommitProperties(app_transactions=[Transaction(application, version)]),
    )
    values = {name: f"new.{name}" for name in ROW.names}
    merge = merge.when_matched_delete("new.gone").when_matched_update(values)
    merge.when_not_matched_insert(values, "NOT new.gone").execute()


if __name__ == "__main__":
    session = SparkSession.builder.getOrCreate()
    follow(session, *sys.argv[1:5], batch_records=100_000).awaitTermination()
