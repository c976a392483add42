"""Spark and encrypted logs: driver and executors read the file of keys, and plans have its path."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore.sync import open_namespace
from tests.fixtures.encrypted import key_line, write_keys
from tests.integration.test_encryption import files_with

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = [pytest.mark.spark, pytest.mark.integration]

WORD = "a-word-of-sparks-rows"


def test_a_batch_and_a_stream(spark: SparkSession, sandbox: Sandbox, tmp_path: Path) -> None:
    """Rows are written, streamed to another log and read; no bookie has any, nor a plan the key."""
    where, home = write_keys(tmp_path / "keys", "k"), uuid4().hex
    with open_namespace(sandbox.uri) as namespace:
        for name in ("a", "b"):
            namespace.create_log(f"{home}/{name}")
            namespace.open_log(f"{home}/{name}").update_settings(encrypted=True)
    bare = {"uri": sandbox.uri}
    options = bare | {"encryptionKeys": where}
    frame = spark.createDataFrame([(f"{WORD} {n}",) for n in range(10)], "value string")
    writing = frame.write.format("dlog").mode("append").option("log", f"{home}/a")
    with pytest.raises(Exception, match=f"log '{home}/a' has the setting encrypted, and there are"):
        writing.options(**bare).save()
    writing.options(**options).save()
    source = spark.readStream.format("dlog").options(**options, log=f"{home}/a")
    live = source.option("startingOffsets", "earliest").load()
    sink = live.select("value").writeStream.format("dlog").options(**options, log=f"{home}/b")
    sink = sink.option("checkpointLocation", str(tmp_path / "checkpoint"))
    sink.trigger(availableNow=True).start().awaitTermination()
    copied = spark.read.format("dlog").options(**options, log=f"{home}/b").load()
    found = sorted(bytes(row.value).decode() for row in copied.collect())
    assert found == [f"{WORD} {n}" for n in range(10)]
    secret = key_line("k").split()[1]
    assert secret not in copied._jdf.queryExecution().toString()
    unread = spark.read.format("dlog").options(**bare, log=f"{home}/b").load()
    with pytest.raises(Exception, match=f"log '{home}/b' is encrypted, here with the key 'k', and"):
        unread.collect()
    assert files_with(WORD.encode(), sandbox.data_dir) == []
    assert files_with(secret.encode(), tmp_path / "checkpoint") == []
