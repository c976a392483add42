"""Arrow: rows as Spark wants them, joined or not, and rows as a log takes them.

Goal: every column of every row is right however entries are joined.  Method: compare with rows made
one by one in plain Python, on random entries.
"""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from dlcore.base.errors import ConfigurationError
from dlcore.sync import ScanBatch, ScanRun
from dlspark import arrow
from dlspark.arrow import (
    BYTES_PER_BATCH,
    ROW_SCHEMA,
    ROWS_PER_BATCH,
    WRITE_SCHEMA,
    WRITE_SCHEMA_WITH_TXID,
    RowBuilder,
    RowShape,
    batches_by_log,
)
from dlspark.options import READ_COLUMNS
from dlspark.schema import WriteColumns
from tests.fixtures.lengths import amount

BYTES = RowShape.of_bytes(READ_COLUMNS)
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def scanned(
    payloads: list[bytes], *, lssn: int = 1, entry: int = 0, slot: int = 0, sequence_id: int = 0
) -> ScanRun:
    """Return an entry with these payloads; transaction ids and times follow from its position."""
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([entry * 10 + row for row in range(len(payloads))], pa.int64()),
            pa.array(payloads, pa.binary()),
        ],
        names=["txid", "value"],
    )
    return ScanRun.of(
        ScanBatch(
            batch=batch,
            lssn=lssn,
            entry_id=entry,
            first_slot=slot,
            sequence_id=sequence_id,
            timestamp_ms=1_700_000_000_000 + entry,
        )
    )


def joined(parts: list[ScanRun]) -> ScanRun:
    """Return entries as one run."""
    return ScanRun(
        batch=pa.concat_batches([part.batch for part in parts]),
        lssn=parts[0].lssn,
        entry_ids=np.concatenate([part.entry_ids for part in parts]),
        records=np.concatenate([part.records for part in parts]),
        first_slots=np.concatenate([part.first_slots for part in parts]),
        sequence_ids=np.concatenate([part.sequence_ids for part in parts]),
        timestamps_ms=np.concatenate([part.timestamps_ms for part in parts]),
    )


def expected_rows(log: str, run: ScanRun) -> list[dict[str, Any]]:
    """Return the rows of a run, made one by one."""
    return [
        {
            "log": log,
            "dlsn": {"lssn": part.lssn, "entry": part.entry_id, "slot": part.first_slot + row},
            "txid": part.batch.column("txid")[row].as_py(),
            "sequence_id": part.sequence_id + row,
            "timestamp": EPOCH + datetime.timedelta(milliseconds=part.timestamp_ms),
            "value": part.batch.column("value")[row].as_py(),
        }
        for part in run.entries()
        for row in range(part.batch.num_rows)
    ]


@settings(max_examples=amount(100, sampled=40))
@given(
    st.lists(
        st.tuples(
            st.lists(st.binary(max_size=5), min_size=1, max_size=6),
            st.integers(0, 2**40),
            st.integers(0, 100),
            st.integers(0, 2**50),
        ),
        max_size=12,
    ),
    st.integers(1, 4),
)
def test_rows_are_those_made_one_by_one(
    entries: list[tuple[list[bytes], int, int, int]], together: int
) -> None:
    """All columns, over any sequence of entries, in any runs."""
    parts = [
        scanned(payloads, lssn=3, entry=entry, slot=slot, sequence_id=sequence_id)
        for payloads, entry, slot, sequence_id in entries
    ]
    runs = [joined(parts[at : at + together]) for at in range(0, len(parts), together)]
    batches = list(RowBuilder("clïcks", BYTES).build(iter(runs)))
    assert all(batch.schema.equals(ROW_SCHEMA) for batch in batches)
    for batch in batches:
        batch.validate(full=True)
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert rows == [row for part in parts for row in expected_rows("clïcks", part)]


def test_small_entries_are_joined_and_batches_bounded() -> None:
    """Rows and bytes are bounded, unless a single entry has more; the first batches are small."""
    small = [scanned([b"x"] * 1000, entry=number) for number in range(400)]
    rows = [batch.num_rows for batch in RowBuilder("a", BYTES).build(small)]
    assert sum(rows) == 400_000
    assert max(rows) <= ROWS_PER_BATCH
    assert rows[:4] == [5_000, 10_000, 20_000, 40_000]
    assert min(rows[4:-1]) > ROWS_PER_BATCH - 1000
    wide = [scanned([b"x" * (1 << 20)] * 3, entry=number) for number in range(12)]
    sizes = [batch.column("value").nbytes for batch in RowBuilder("a", BYTES).build(wide)]
    assert len(sizes) == 10
    assert max(sizes) <= BYTES_PER_BATCH
    big = [scanned([b"x"] * (ROWS_PER_BATCH + 1))]
    assert [batch.num_rows for batch in RowBuilder("a", BYTES).build(big)] == [ROWS_PER_BATCH + 1]


def test_a_single_entry_is_not_copied() -> None:
    """The payload that Spark gets is the memory that was received."""
    part = scanned([b"abc"] * 10)
    (batch,) = RowBuilder("a", BYTES).build([part])
    given_buffer = part.batch.column("value").buffers()[2]
    assert batch.column("value").buffers()[2].address == given_buffer.address


def test_reading_is_lazy() -> None:
    """Rows go out while later entries are not fetched yet."""
    taken = []

    def entries() -> Any:
        for number in range(100):
            taken.append(number)
            yield scanned([b"x"] * ROWS_PER_BATCH, entry=number)

    rows = RowBuilder("a", BYTES).build(entries())
    next(rows)
    assert len(taken) <= 2


def written(to: str | None = "clicks", /, **columns: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the rows by log of a batch to write."""
    batch = pa.RecordBatch.from_pydict(columns)
    kinds = WriteColumns(has_txid="txid" in columns, has_log="log" in columns)
    return {name: rows.to_pylist() for name, rows in batches_by_log(batch, kinds, log=to)}


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string(), pa.large_binary()])
def test_values_of_any_string_or_binary_type(kind: pa.DataType) -> None:
    """Strings become their UTF-8 bytes."""
    values = pa.array(["a", "ü"], pa.string()).cast(kind)
    batch = pa.RecordBatch.from_arrays([values], names=["value"])
    kinds = WriteColumns(has_txid=False, has_log=False)
    ((log, rows),) = batches_by_log(batch, kinds, log="clicks")
    assert log == "clicks"
    assert rows.schema.equals(WRITE_SCHEMA)
    assert rows.column("value").to_pylist() == [b"a", "ü".encode()]


def test_txids_go_along() -> None:
    """In the order of the columns that a log wants."""
    rows = written(value=["a"], txid=pa.array([5], pa.int64()))
    assert rows == {"clicks": [{"txid": 5, "value": b"a"}]}
    assert WRITE_SCHEMA_WITH_TXID.names == ["txid", "value"]


def test_rows_go_where_their_log_column_says() -> None:
    """In their order; the option wins over the column."""
    columns = {"value": list("abcd"), "log": ["x", "y", "x", "y"]}
    assert written(None, **columns) == {
        "x": [{"value": b"a"}, {"value": b"c"}],
        "y": [{"value": b"b"}, {"value": b"d"}],
    }
    assert list(written("z", **columns)) == ["z"]
    assert written(None, value=["a", "b"], log=["x", "x"]) == {
        "x": [{"value": b"a"}, {"value": b"b"}]
    }


def test_rows_of_very_many_logs() -> None:
    """The batch is gone through once, not once for each of them."""
    count = 20_000
    names = [f"log-{n % (count // 2)}" for n in range(count)]
    found = written(None, value=[str(n) for n in range(count)], log=names)
    assert list(found) == names[: count // 2]
    assert found["log-7"] == [{"value": b"7"}, {"value": b"10007"}]


def test_empty_batches_write_nothing() -> None:
    """Spark may send them."""
    empty = pa.array([], pa.string())
    assert written(value=empty) == {}


@pytest.mark.parametrize("column", ["value", "txid", "log"])
def test_nulls_are_refused(column: str) -> None:
    """The message names the column and the row."""
    columns: dict[str, Any] = {
        "value": ["a", "b"],
        "txid": pa.array([1, 2], pa.int64()),
        "log": ["x", "x"],
    }
    columns[column] = pa.array([columns[column][0], None], pa.array(columns[column]).type)
    with pytest.raises(
        ConfigurationError, match=f"'{column}' is null in 1 of 2 rows .first in row 1"
    ):
        written(None, **columns)


def test_null_in_an_ignored_log_column() -> None:
    """With the option log the column does not matter."""
    assert written("z", value=["a"], log=pa.array([None], pa.string()))


def test_columns_that_are_wanted_only() -> None:
    """In their order; the others are not made."""
    (batch,) = RowBuilder("a", RowShape.of_bytes(["value", "sequence_id"])).build(
        [scanned([b"x", b"y"])]
    )
    assert batch.schema == pa.schema([ROW_SCHEMA.field("value"), ROW_SCHEMA.field("sequence_id")])
    assert batch.column("value").to_pylist() == [b"x", b"y"]


def test_rows_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers and their log, in batches of a size that suits Spark."""
    monkeypatch.setattr(arrow, "COUNTED_ROWS_PER_BATCH", 4)
    batches = list(RowBuilder("a", RowShape.of_bytes(["log", "sequence_id"])).count(7, 10))
    assert [batch.num_rows for batch in batches] == [4, 4, 2]
    table = pa.Table.from_batches(batches)
    assert table.column("sequence_id").to_pylist() == list(range(7, 17))
    assert set(table.column("log").to_pylist()) == {"a"}


def test_counted_rows_of_a_log_with_a_long_name_come_in_smaller_batches() -> None:
    """Each row repeats the name, which would else make a batch of half a gigabyte."""
    batches = list(RowBuilder("a" * 512, RowShape.of_bytes(["log"])).count(0, 100_000))
    assert sum(batch.num_rows for batch in batches) == 100_000
    assert max(batch.nbytes for batch in batches) < 40 * 1024 * 1024


def test_rows_without_any_txid_get_theirs_from_the_log() -> None:
    """SQL's INSERT fills a column that it does not name with nulls; some nulls are a mistake."""
    columns = WriteColumns(has_txid=True, has_log=False)
    rows = pa.record_batch({"value": [b"a", b"b"], "txid": pa.array([None, None], pa.int64())})
    ((_, written),) = batches_by_log(rows, columns, log="clicks")
    assert written.schema.names == ["value"]
    some = pa.record_batch({"value": [b"a", b"b"], "txid": pa.array([1, None], pa.int64())})
    with pytest.raises(ConfigurationError, match="'txid' is null in 1 of 2 rows"):
        batches_by_log(some, columns, log="clicks")


def test_a_column_that_a_log_lacks_is_null() -> None:
    """Logs that are read together need not have the same columns; a known one keeps its place."""
    wanted = pa.schema([("_sequence_id", pa.int64()), ("name", pa.string()), ("n", pa.int64())])
    part = ScanBatch(
        batch=pa.record_batch({"_txid": [1, 2], "n": [3, 4]}),
        lssn=1,
        entry_id=0,
        first_slot=0,
        sequence_id=7,
        timestamp_ms=0,
    )
    (batch,) = RowBuilder("a", RowShape.of_typed(wanted)).build([ScanRun.of(part)])
    assert batch.schema == wanted
    assert batch.to_pydict() == {"_sequence_id": [7, 8], "name": [None, None], "n": [3, 4]}
