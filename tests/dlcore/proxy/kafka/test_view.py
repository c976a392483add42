"""Entries as record batches: which go together, and what their records have."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pyarrow as pa
import pytest
from kio.records.readers import read_batch

from dlcore.base.ids import DLSN
from dlcore.base.records import EntryPlace
from dlcore.log.entries.body import batch_of
from dlcore.log.reading.entry_rows import EntryRows, StoredRows
from dlcore.proxy.kafka.records import HEADERS
from dlcore.proxy.kafka.view import BATCH_BYTES, RecordView, is_keyed
from dlcore.proxy.reading.ring import fetched
from dlcore.proxy.reading.rows import RowView

VALUE, KEY = ("value", pa.binary()), ("key", pa.binary())
END = DLSN(9, 0, 0)


def rows(entry_id: int, sequence_id: int, *values: bytes, first_slot: int = 0) -> StoredRows:
    """Return rows of an entry; `sequence_id` is that of the entry's first record."""
    txids = [10 * (sequence_id + first_slot + each) for each in range(len(values))]
    place = EntryPlace(1, entry_id, sequence_id, 0, 1000 + entry_id)
    return StoredRows(batch_of(txids, values), place, first_slot)


def view(*, has_headers: bool = False) -> RecordView:
    """Return a view of a log of bytes."""
    return RecordView("a", None, is_arrow=False, has_headers=has_headers)


def test_small_entries_go_together() -> None:
    """Each record has the time of its entry; an offset counts on where the entry before ended."""
    entries = [rows(0, 7, b"x", b"y", b"z", first_slot=2), rows(1, 12, b"w")]
    data = view(has_headers=True).message(entries, END)
    assert [each.end for each in data.each] == [13]
    batch, _ = read_batch(b"".join(data.parts), 0)
    assert batch.base_offset == 9
    assert [each.value for each in batch.records] == [b"x", b"y", b"z", b"w"]
    assert (batch.base_timestamp, batch.max_timestamp) == (1000, 1001)
    assert [each.headers[0].value for each in batch.records] == [
        b"1:0:2", b"1:0:3", b"1:0:4", b"1:1:0",
    ]  # fmt: skip
    assert [each.headers[1].value for each in batch.records] == [b"90", b"100", b"110", b"120"]


def test_large_entries_are_batches_of_their_own() -> None:
    """A client that asks for little finds little."""
    large = bytes(BATCH_BYTES)
    data = view().message([rows(0, 0, large), rows(1, 1, b"x"), rows(2, 2, large)], END)
    assert [each.end for each in data.each] == [1, 2, 3]
    half = bytes(BATCH_BYTES // 2 - 100)
    data = view().message([rows(each, each, half) for each in range(3)], END)
    assert [each.end for each in data.each] == [2, 3]
    assert view().message([], END).parts == []


@pytest.mark.parametrize("has_headers", [False, True])
def test_a_message_for_one_reader_is_one_batch(*, has_headers: bool) -> None:
    """It is as large as what a client asks for, and no larger."""
    made, count = view(has_headers=has_headers), 2000
    stored = [rows(each, each * count, *[bytes(100)] * count) for each in range(10)]
    entries = [EntryRows(each.batch, each.place, 0, size_bytes=1) for each in stored]
    sizes = repeat(made.part_bytes)
    parts = list(fetched(entries, row_bytes=made.row_bytes, sizes=sizes))
    messages: list[Any] = [each.part(made, END) for each in parts]
    assert [len(each.each) for each in messages] == [1] * len(messages)
    assert BATCH_BYTES // 2 < max(map(len, messages)) <= BATCH_BYTES


def test_views_with_other_records_do_not_meet() -> None:
    """Each has a schema of its own, by which rings are shared."""
    views = [view(), view(has_headers=True), RecordView("a", None, is_arrow=True, has_headers=True)]
    known = {each.schema.serialize().to_pybytes() for each in views}
    known.add(RowView("a", None, None).schema.serialize().to_pybytes())
    known.add(RowView("a", None, []).schema.serialize().to_pybytes())
    assert len(known) == 5
    assert view().schema.equals(view().schema, check_metadata=True)


@pytest.mark.parametrize(
    ("expected", "columns"),
    [
        (True, [VALUE]),
        (True, [KEY, VALUE, ("headers", HEADERS)]),
        (True, [VALUE, ("headers", pa.list_(pa.field("element", HEADERS.value_type)))]),
        (False, [KEY]),
        (False, [KEY, VALUE, ("more", pa.int64())]),
        (False, [("key", pa.string()), VALUE]),
        (False, [VALUE, ("headers", pa.list_(pa.string()))]),
        (False, [VALUE, ("headers", pa.string())]),
    ],
)
def test_which_logs_have_the_parts_of_records(expected: bool, columns: list[Any]) -> None:
    """Those that have `value`, and nothing but `key` and `headers` beside it."""
    assert is_keyed(pa.schema(columns)) is expected
