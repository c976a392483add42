"""Spark's sink writes logs that proxies are writing meanwhile: all records once, and in order."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pytest

from dlcore.sync import open_namespace
from tests.fixtures.proxies import produce

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.fixtures.proxies import ProxyProcess

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.prove]
PRODUCERS, ROWS, PER_BATCH = 3, 300, 100
WAIT_S = 60


def test_a_stream_is_written_beside_producers(
    spark: SparkSession, namespace_uri: str, proxy: ProxyProcess, tmp_path: Path
) -> None:
    """Several micro-batches, while each producer waits for each of its acknowledgements."""
    source, target = (f"beside/{uuid4().hex}" for _ in range(2))
    with open_namespace(namespace_uri) as namespace:
        for name in (source, target):
            namespace.create_log(name)
        with namespace.open_log(source).open_writer() as writer:
            for first in range(0, ROWS, 10):
                payloads = [b"s:%d" % number for number in range(first, first + 10)]
                writer.write_batch(pa.record_batch({"txid": [first] * 10, "value": payloads}))
                writer.flush()
        stop = threading.Event()
        sent: dict[str, list[bytes]] = {f"p{number}": [] for number in range(PRODUCERS)}
        threads = [
            threading.Thread(target=produce, args=(proxy.location, target, name, stop, rows))
            for name, rows in sent.items()
        ]
        for thread in threads:
            thread.start()
        try:
            options = {"uri": namespace_uri, "maxRecordsPerTrigger": str(PER_BATCH)}
            live = spark.readStream.format("dlog").options(**options, log=source)
            frame = live.option("startingOffsets", "earliest").load().select("value")
            sink = frame.coalesce(1).writeStream.format("dlog").option("uri", namespace_uri)
            sink = sink.option("log", target).option("checkpointLocation", str(tmp_path / "to"))
            query = sink.trigger(processingTime="0 seconds").start()
            try:
                query.processAllAvailable()
            finally:
                query.stop()
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
        table = namespace.open_log(target).read().to_arrow()
    found = [bytes(each) for each in table["value"].to_pylist()]
    assert [each for each in found if each.startswith(b"s:")] == [
        b"s:%d" % number for number in range(ROWS)
    ]
    for name, rows in sent.items():
        assert rows
        assert [each for each in found if each.startswith(f"{name}:".encode())] == rows
    assert table["txid"].to_pylist() == sorted(table["txid"].to_pylist())
