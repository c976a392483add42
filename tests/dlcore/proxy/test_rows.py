"""Rows of logs as a proxy sends them, of bytes and typed."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from dlcore.errors import SchemaMismatchError
from dlcore.log.entries.batches import batch_of, read_batch, typed_read_batch
from dlcore.log.typed.arrow import columns_of
from dlcore.log.typed.schema import LogSchema
from dlcore.proxy.reading.rows import RowView
from dlcore.records import EntryPlace

PLACES = [EntryPlace(2, 0, 40, 40, 5), EntryPlace(2, 1, 42, 40, 7)]


def test_rows_of_bytes() -> None:
    """All columns, of two entries together; or some, in the order asked for."""
    batches = [read_batch(batch_of([1, 2], [b"a", b"b"]), p, first_slot=0) for p in PLACES]
    assert RowView("a/b", None, None).of(batches).to_pylist() == [
        {
            "log": "a/b",
            "dlsn": {"lssn": 2, "entry": entry, "slot": slot},
            "txid": slot + 1,
            "sequence_id": 40 + 2 * entry + slot,
            "timestamp": datetime.fromtimestamp(0.005 + 0.002 * entry, UTC),
            "value": b"ab"[slot : slot + 1],
        }
        for entry in range(2)
        for slot in range(2)
    ]
    some = RowView("a/b", None, ["value", "log"]).of(batches[:1])
    assert some.to_pylist() == [{"value": b"a", "log": "a/b"}, {"value": b"b", "log": "a/b"}]


def test_rows_of_a_typed_log() -> None:
    """Its own columns; what is known of records only if it is named; by the schema known then."""
    columns = pa.schema([("city", pa.string())])
    schema = LogSchema.first(columns_of(columns))
    rows = pa.record_batch([pa.array([3]), pa.array(["x"]), pa.array([1])], ["txid", "city", "new"])
    batches = [typed_read_batch(rows, place, first_slot=4) for place in PLACES]
    whole = RowView("a", schema, None)
    assert whole.schema.equals(columns)
    assert whole.of(batches).to_pylist() == [{"city": "x"}, {"city": "x"}]
    named = RowView("a", schema, ["_log", "_dlsn", "city"]).of(batches[1:])
    dlsn = {"lssn": 2, "entry": 1, "slot": 4}
    assert named.to_pylist() == [{"_log": "a", "_dlsn": dlsn, "city": "x"}]


@pytest.mark.parametrize("columns", [["speed"], ["txid", "txid"], ["payload"]])
def test_a_column_that_is_not_there(columns: list[str]) -> None:
    """Or there twice."""
    with pytest.raises(SchemaMismatchError, match=f"log 'a'.*'{columns[0]}'.*sequence_id"):
        RowView("a", None, columns)
