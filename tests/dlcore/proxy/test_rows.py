"""Rows of logs as a proxy sends them, of bytes and typed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from dlcore.base.errors import SchemaMismatchError
from dlcore.base.ids import DLSN
from dlcore.base.proto import flight_pb2 as pb
from dlcore.base.records import EntryPlace
from dlcore.log.entries.body import batch_of
from dlcore.log.reading.entry_rows import StoredRows
from dlcore.proxy.reading.rows import RowView
from tests.dlcore.flight.test_sending import arrow_message

PLACES = [EntryPlace(2, 0, 40, 40, 5), EntryPlace(2, 1, 42, 40, 7)]


def rows_of(view: RowView, entries: list[StoredRows]) -> list[dict[str, Any]]:
    """Return what a message with these entries holds, read back by Arrow."""
    data = pb.FlightData.FromString(view.message(entries, DLSN(2, 7, 0)))
    assert data.app_metadata == b'{"next":"2:7:0"}'
    batch = pa.ipc.read_record_batch(arrow_message(data), view.schema)
    batch.validate(full=True)
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def test_rows_of_bytes() -> None:
    """All columns, of two entries together; or some, in the order asked for."""
    entries = [StoredRows(batch_of([1, 2], [b"a", b"b"]), place, 0) for place in PLACES]
    assert rows_of(RowView("a/b", None, None), entries) == [
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
    some = rows_of(RowView("a/b", None, ["value", "log"]), [entries[0].slice(1, 1)])
    assert some == [{"value": b"b", "log": "a/b"}]


@given(st.lists(st.lists(st.binary(max_size=20), min_size=1), min_size=1, max_size=4), st.data())
def test_any_rows_of_bytes(entries: list[list[bytes]], data: st.DataObject) -> None:
    """With any payloads, of parts of entries, too, and of such without a byte."""
    stored, expected = [], []
    for number, payloads in enumerate(entries):
        first = data.draw(st.integers(0, len(payloads) - 1))
        count = data.draw(st.integers(1, len(payloads) - first))
        place = EntryPlace(1, number, 0, 0, 0)
        whole = StoredRows(batch_of(range(len(payloads)), payloads), place, 0)
        stored.append(whole.slice(first, count))
        expected += [
            {"dlsn": {"lssn": 1, "entry": number, "slot": slot}, "txid": slot, "value": value}
            for slot, value in enumerate(payloads[first : first + count], first)
        ]
    assert rows_of(RowView("a", None, ["dlsn", "txid", "value"]), stored) == expected


def test_rows_of_a_typed_log() -> None:
    """Its own columns; what is known of records only if it is named; by the schema known then."""
    columns = pa.schema([("city", pa.string())])
    rows = pa.record_batch([pa.array([3]), pa.array(["x"]), pa.array([1])], ["txid", "city", "new"])
    entries = [StoredRows(rows, place, 4) for place in PLACES]
    whole = RowView("a", columns, None)
    assert whole.schema.equals(columns)
    assert rows_of(whole, entries) == [{"city": "x"}, {"city": "x"}]
    named = rows_of(RowView("a", columns, ["_log", "_dlsn", "city"]), entries[1:])
    dlsn = {"lssn": 2, "entry": 1, "slot": 4}
    assert named == [{"_log": "a", "_dlsn": dlsn, "city": "x"}]


@pytest.mark.parametrize("columns", [["speed"], ["txid", "txid"], ["payload"]])
def test_a_column_that_is_not_there(columns: list[str]) -> None:
    """Or there twice."""
    with pytest.raises(SchemaMismatchError, match=f"log 'a'.*'{columns[0]}'.*sequence_id"):
        RowView("a", None, columns)
