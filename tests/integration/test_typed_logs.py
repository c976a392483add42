"""Typed logs from Python on a real cluster: Arrow, pandas, Polars and DuckDB, blocking."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import UTC, datetime
from decimal import Decimal

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dlcore import LogConfig, LogRecord
from dlcore.base.errors import SchemaMismatchError
from dlcore.sync import open_namespace, scan

pytestmark = pytest.mark.integration

TRIPS = pa.schema(
    [
        ("id", pa.int64()),
        ("city", pa.string()),
        ("fare", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("stops", pa.list_(pa.struct([("x", pa.float64())]))),
    ]
)


def rows(ids: range) -> list[dict[str, object]]:
    """Return trips of these numbers."""
    return [
        {
            "id": n,
            "city": "Paris" if n % 2 else "Oslo",
            "fare": Decimal(n) / 4,
            "at": datetime(2024, 1, 1, n % 24, tzinfo=UTC),
            "stops": [{"x": float(n)}] * (n % 3),
        }
        for n in ids
    ]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_frames_of_all_kinds(namespace_uri: str, compression: str) -> None:
    """One log, written and read by each of them."""
    name = f"typed/frames-{compression}"
    config = LogConfig(compression=compression, entry_bytes=5000)
    with open_namespace(namespace_uri, config=config) as namespace:
        namespace.create_log(name, schema=TRIPS)
        log = namespace.open_log(name)
        assert log.get_schema() == TRIPS
        with log.open_writer() as writer:
            writer.write_batch(pa.RecordBatch.from_pylist(rows(range(100)), schema=TRIPS))
            writer.write_table(pa.Table.from_pylist(rows(range(100, 200)), schema=TRIPS))
            writer.write_table(pd.DataFrame(rows(range(200, 300))))
            writer.write_table(pl.from_arrow(pa.Table.from_pylist(rows(range(300, 400)), TRIPS)))
            writer.write_table(pl.DataFrame({"city": ["Rom"], "id": [400]}))
            writer.commit()
            with pytest.raises(SchemaMismatchError, match="takes no records of bytes"):
                writer.write(LogRecord(1, b"x"))
            with pytest.raises(SchemaMismatchError, match="has no column 'tip'"):
                writer.write_table(pd.DataFrame({"tip": [1]}))
            other = namespace.open_log(name)
            assert other.update_schema([("tip", pa.int8())], merge=True).names[-1] == "tip"
            writer.write_table(pd.DataFrame({"id": [401], "tip": [5]}))
        table = log.read().to_arrow()
        assert table.schema.names == [*TRIPS.names, "tip"]
        assert table.drop_columns(["tip"])[:400] == pa.Table.from_pylist(rows(range(400)), TRIPS)
        assert table["id"].to_pylist() == list(range(402))
        assert table["tip"].to_pylist() == [None] * 401 + [5]
        paris = log.read(columns=["fare", "id"], where=pc.field("city") == "Paris")
        assert paris.to_pandas()["id"].tolist() == list(range(1, 400, 2))
        assert paris.to_polars()["fare"].sum() == sum(Decimal(n) / 4 for n in range(1, 400, 2))
        trips = log.read()
        with duckdb.connect() as duck:
            duck.register("trips", trips)
            duck.execute("select city, count(*), max(id) from trips group by 1 order by 1")
            found = duck.fetchall()
        assert found == [
            ("Oslo", 200, 398), ("Paris", 200, 399), ("Rom", 1, 400), (None, 1, 401)
        ]  # fmt: skip
        assert pl.DataFrame(trips).height == 402
        with log.open_reader() as reader:
            with pytest.raises(SchemaMismatchError, match="the log is typed"):
                reader.read_next()
            assert sum(batch.num_rows for batch in reader.batches()) == 402
        namespace.delete_log(name)


def test_a_follower_sees_new_columns(namespace_uri: str) -> None:
    """Along the tail, while another process's writer goes on by the schema that it knows."""
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log("typed/tail", schema=pa.schema([("id", pa.int8())]))
        log = namespace.open_log("typed/tail")
        seen: list[pa.RecordBatch] = []

        def follow() -> None:
            with log.open_reader() as reader:
                seen.extend(reader.batches(follow=True))

        follower = threading.Thread(target=follow)
        follower.start()
        with log.open_writer() as writer:
            writer.write_batch(pa.record_batch({"id": [1]}))
            writer.commit()
            log.update_schema([("id", pa.int64()), ("name", pa.string())])
            writer.write_batch(pa.record_batch({"id": [2]}))
            writer.write_batch(pa.record_batch({"id": [2**40], "name": ["x"]}))
            writer.mark_end_of_stream()
        follower.join(60)
        assert [n for batch in seen for n in batch.column("id").to_pylist()] == [1, 2, 2**40]
        assert seen[-1].column("name").to_pylist() == ["x"]


def test_a_scan_in_another_process_knows_the_schema(namespace_uri: str) -> None:
    """Ranges carry it: their readers ask bookies only."""
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log("typed/scan", schema=TRIPS)
        with namespace.begin_append("typed-scan", 1) as append:
            append.write_batch(
                "typed/scan", pa.RecordBatch.from_pylist(rows(range(50)), schema=TRIPS)
            )
            append.commit()
        snapshot = namespace.open_log("typed/scan").get_snapshot()
        batches = [each.batch for each in scan(snapshot.scans(snapshot.first, snapshot.end))]
        assert [n for batch in batches for n in batch.column("id").to_pylist()] == list(range(50))


def test_typed_logs_load_no_pandas(namespace_uri: str) -> None:
    """Writing and reading batches does not import it."""
    script = """
import sys, pyarrow as pa
from dlcore.sync import open_namespace
with open_namespace(sys.argv[1]) as namespace:
    namespace.create_log("typed/light", schema=pa.schema([("a", pa.int8())]))
    log = namespace.open_log("typed/light")
    with log.open_writer() as writer:
        one = pa.Array.from_buffers(pa.int8(), 1, [None, pa.py_buffer(bytes([1]))])
        writer.write_batch(pa.RecordBatch.from_arrays([one], names=["a"]))
    print(sum(batch.num_rows for batch in log.read()))
print([name for name in sys.modules if name in ("grpc", "pandas")])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, namespace_uri],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["1", "[]"]
