"""The example of a Delta table that follows a log of changes, killed at each of its steps.

Goal: the table is what the changes make of it, in the order of their sequence ids, and no batch is
merged twice, wherever the job died, and also if it starts from the log's beginning again.
Method: the example as it stands, ended by SIGKILL before and after its merges, beside the same
changes applied to a dictionary.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.table import TableMerger
from pyspark.errors import StreamingQueryException

from tests.fixtures.spark import ROOT, spark_environment
from tests.fixtures.table_readers import rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from dlcore.sync import Namespace

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.timeout(900)]

BATCH_RECORDS = 100
KEYS = 40
EXAMPLE = ROOT / "examples" / "changes"
STEPS = ("before the batch", "before the merge", "after the merge")
JOB = """
import os
import signal
import sys

sys.path.insert(0, "examples/changes")
import into_table
from deltalake.table import TableMerger
from tests.fixtures.spark import start_session
from pathlib import Path

uri, log, table, checkpoint, folder, batch_records, step, count = sys.argv[1:]
left = int(count)


def die_before(wrapped):
    def run(*arguments, **more):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return wrapped(*arguments, **more)

    return run


def die_after(wrapped):
    def run(*arguments, **more):
        found = wrapped(*arguments, **more)
        die_before(lambda: None)()
        return found

    return run


if step == "before the batch":
    into_table.apply = die_before(into_table.apply)
elif step == "before the merge":
    TableMerger.execute = die_before(TableMerger.execute)
elif step == "after the merge":
    TableMerger.execute = die_after(TableMerger.execute)
spark = start_session(Path(folder))
of_query = {"batch_records": int(batch_records)}
into_table.follow(spark, uri, log, table, checkpoint, **of_query).awaitTermination()
spark.stop()
"""


class Changes:
    """A log of changes, and what they make of a table."""

    def __init__(self, namespace: Namespace, name: str) -> None:
        self._namespace = namespace
        self._random = random.Random(7)
        self._count = 0
        self.name = name
        self.rows: dict[int, tuple[str | None, float | None, int]] = {}
        columns = [("id", pa.int64()), ("city", pa.string()), ("amount", pa.float64())]
        self._schema = pa.schema([*columns, ("gone", pa.bool_())])
        namespace.create_log(name, schema=self._schema)

    def append(self, count: int) -> None:
        """Append changes at random, of which a third removes its row."""
        rows: list[dict[str, Any]] = []
        for number in range(self._count, self._count + count):
            key, gone = self._random.randrange(KEYS), self._random.random() < 1 / 3
            city, amount = (None, None) if gone else (f"c{number}", float(number))
            rows.append({"id": key, "city": city, "amount": amount, "gone": gone})
            self.rows.pop(key, None)
            if not gone:
                self.rows[key] = (city, amount, number)
        self._count += count
        with self._namespace.open_log(self.name) as log, log.open_writer() as writer:
            writer.write_table(pa.Table.from_pylist(rows, self._schema))


def rows_in(folder: Path) -> dict[int, tuple[str | None, float | None, int]]:
    """Return the rows of a table by their keys."""
    found = rows_of(DeltaTable(folder)).to_pylist()
    rows = {each["id"]: (each["city"], each["amount"], each["_sequence_id"]) for each in found}
    assert len(rows) == len(found)
    return rows


def merged_in(folder: Path) -> list[int]:
    """Return up to which number each commit of a table has the changes."""
    found = list[int]()
    for path in sorted(folder.glob("_delta_log/*.json")):
        actions = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        found += [each["txn"]["version"] for each in actions if "txn" in each]
    return found


def run(arguments: Sequence[object], folder: Path, step: str = "", count: int = 0) -> int:
    """Run the job to its end; return its status."""
    more = (folder / "spark", BATCH_RECORDS, step, count)
    process = subprocess.Popen(
        [sys.executable, "-c", JOB, *map(str, (*arguments, *more))],
        cwd=ROOT,
        env=spark_environment(),
        start_new_session=True,
    )
    try:
        return process.wait(300)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # Java, if it was killed
        process.wait()


@pytest.fixture
def changes(spark_namespace: Namespace) -> Changes:
    """A log of its own."""
    return Changes(spark_namespace, f"changes/{uuid4().hex}")


@pytest.mark.prove
def test_a_killed_job_merges_each_change_once(
    spark_namespace: Namespace, changes: Changes, tmp_path: Path
) -> None:
    """At each step of its second batch; and from the log's beginning nothing is merged again."""
    table = tmp_path / "table"
    arguments = (spark_namespace.uri, changes.name, table, tmp_path / "checkpoint")
    for step in STEPS:
        changes.append(3 * BATCH_RECORDS)
        assert run(arguments, tmp_path, step, 2) == -signal.SIGKILL
    assert run(arguments, tmp_path) == 0
    assert rows_in(table) == changes.rows
    whole = merged_in(table)
    assert whole == sorted(set(whole))
    assert whole[-1] == 3 * len(STEPS) * BATCH_RECORDS - 1
    of_another = (EXAMPLE / "into_table.py", *arguments[:3], tmp_path / "another")
    command = [sys.executable, *map(str, of_another)]
    subprocess.run(command, cwd=ROOT, env=spark_environment(), check=True, timeout=300)
    assert merged_in(table) == whole


def test_a_batch_that_comes_again_is_left_out(
    spark: SparkSession,
    spark_namespace: Namespace,
    changes: Changes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the checkpoint, after a failure behind the merge, and from the log's beginning."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    example = importlib.import_module("into_table")
    table, merge = tmp_path / "table", TableMerger.execute

    def follow(checkpoint: str) -> None:
        folders = (str(table), str(tmp_path / checkpoint))
        query = example.follow(
            spark, spark_namespace.uri, changes.name, *folders, batch_records=BATCH_RECORDS
        )
        query.awaitTermination()

    def fail_after(merger: TableMerger) -> None:
        merge(merger)
        raise OSError("the test says so")

    changes.append(BATCH_RECORDS + 50)
    monkeypatch.setattr(TableMerger, "execute", fail_after)
    with pytest.raises(StreamingQueryException, match="the test says so"):
        follow("first")
    monkeypatch.undo()
    assert merged_in(table) == [BATCH_RECORDS - 1]
    follow("first")
    assert rows_in(table) == changes.rows
    assert merged_in(table) == [BATCH_RECORDS - 1, BATCH_RECORDS + 49]
    changes.append(7)
    follow("second")
    assert rows_in(table) == changes.rows
    assert merged_in(table) == [BATCH_RECORDS - 1, BATCH_RECORDS + 49, BATCH_RECORDS + 56]


def test_one_of_two_jobs_merges(tmp_path: Path) -> None:
    """The second of two concurrent merges that go on from the same change is refused."""
    folder = str(tmp_path)
    row = pa.table({"id": [1]})
    DeltaTable.create(folder, row.schema)
    tables = [DeltaTable(folder), DeltaTable(folder)]

    def merge(table: DeltaTable) -> None:
        of = CommitProperties(app_transactions=[Transaction("one", 1)])
        merger = table.merge(
            row, "a.id = b.id", source_alias="a", target_alias="b", commit_properties=of
        )
        merger.when_not_matched_insert({"id": "a.id"}).execute()

    merge(tables[0])
    with pytest.raises(CommitFailedError, match=r"(?i)concurrent"):
        merge(tables[1])
