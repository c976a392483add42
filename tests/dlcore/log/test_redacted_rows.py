"""Redacted entries: the rows that fulfil the conditions are null, and nothing else has changed."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from dlcore.base.errors import UnsupportedError
from dlcore.log.entries.body import (
    Compressor,
    decode_entry_batch,
    decode_entry_header,
    encode_entry,
    marked_encrypted,
    stamp_of,
)
from dlcore.log.entries.redacted_rows import RowRedactor
from dlcore.log.typed.arrow import columns_of, entry_schemas
from dlcore.log.typed.conditions import parse_conditions
from dlcore.log.typed.schema import LogSchema
from tests.dlcore.log.test_typed_arrow import VALUES

FIRST = pa.schema([pa.field("user_id", pa.int64(), nullable=False), ("name", pa.string())])
SECOND = pa.schema([("user_id", pa.int64()), ("name", pa.string()), ("city", pa.string())])
SCHEMA = LogSchema.first(columns_of(FIRST)).evolved("clicks", columns_of(SECOND))
STAMP = b"stamp of producers..."
NAMES = [f"the name of number {number}" for number in range(50)]


def entry(schema_id: int, batch: pa.RecordBatch, *, compression: str = "none") -> memoryview:
    """Return an entry with a stamp."""
    parts = encode_entry(
        batch,
        first_txid=7,
        last_txid=9,
        records_before=3,
        write_time_ms=1234,
        compressor=Compressor(compression),
        schema_id=schema_id,
        stamp=STAMP,
    )
    return memoryview(b"".join(parts))


def batch_of(schema: pa.Schema, columns: list[list[object]]) -> pa.RecordBatch:
    """Return a batch with transaction ids."""
    fields = pa.schema([pa.field("_txid", pa.int64()), *schema])
    rows = len(columns[0])
    return pa.RecordBatch.from_arrays(
        [
            pa.array(values, field.type)
            for values, field in zip([list(range(rows)), *columns], fields, strict=True)
        ],
        schema=fields,
    )


def rows_of(body: memoryview) -> Any:
    """Return the rows of an entry, as it stores them."""
    return decode_entry_batch(body, decode_entry_header(body), entry_schemas(SCHEMA)).to_pylist()


def redactor(text: str, schema: LogSchema = SCHEMA) -> RowRedactor:
    """Return the redactor of a log."""
    return RowRedactor("clicks", schema, parse_conditions(text))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_rows_become_null_and_all_else_stays(compression: str) -> None:
    """Goal: header, stamp, order and other rows are as before; the old bytes are gone."""
    batch = batch_of(SECOND, [list(range(50)), list(NAMES), [None] * 50])
    before = entry(2, batch, compression=compression)
    found = redactor("user_id >= 40 and city is null")
    assert found.count(before) == 10
    after, rows = found.redact(before)
    after = memoryview(after)
    assert rows == 10
    assert found.count(after) == 0
    assert found.redact(after) == (after, 0)
    header, old = decode_entry_header(after), decode_entry_header(before)
    assert header == old
    assert header.compressed is (compression != "none")
    assert bytes(stamp_of(after, header)) == STAMP
    kept = batch.to_pylist()
    for row in kept[40:]:
        row.update(user_id=None, name=None)
    assert rows_of(after) == kept
    if compression == "none":
        for number, name in enumerate(NAMES):
            assert (name.encode() in bytes(before), name.encode() in bytes(after)) == (
                True,
                number < 40,
            )


def test_conditions_see_what_readers_see_and_versions_stay_if_they_can() -> None:
    """Goal: a later column is null; an entry whose version allows no null gets the latest."""
    old = entry(1, batch_of(FIRST, [[1, 2], ["a", "b"]]))
    found = redactor("user_id = 2 and city is null")
    after = memoryview(found.redact(old).body)
    assert decode_entry_header(after).schema_id == 2
    assert rows_of(after) == [
        {"_txid": 0, "user_id": 1, "name": "a", "city": None},
        {"_txid": 1, "user_id": None, "name": None, "city": None},
    ]
    later = SCHEMA.evolved("clicks", columns_of(SECOND.append(pa.field("x", pa.int8()))))
    entry_2 = entry(2, batch_of(SECOND, [[2], ["b"], [None]]))
    body = redactor("x is null", later).redact(entry_2).body
    assert decode_entry_header(body).schema_id == 2


def test_every_type_of_a_log_can_be_redacted() -> None:
    """Goal: no type keeps its value; neighbours keep theirs, NaN included."""
    schema = pa.schema([("key", pa.int64()), *((name, each[0]) for name, each in VALUES.items())])
    columns = [[1, 2, 3], *([value] * 3 for _, value in VALUES.values())]
    stored = LogSchema.first(columns_of(schema))
    batch = batch_of(schema, columns)
    body = entry(1, batch)
    found = RowRedactor("clicks", stored, parse_conditions("key = 2"))
    after = found.redact(body).body
    shown = decode_entry_batch(after, decode_entry_header(after), entry_schemas(stored))
    before = decode_entry_batch(body, decode_entry_header(body), entry_schemas(stored))
    assert shown.schema == before.schema
    for name in schema.names:
        column, known = shown.column(name), before.column(name)
        assert not column[1].is_valid
        assert [str(column[0]), str(column[2])] == [str(known[0]), str(known[2])]


def test_a_log_that_cannot_be_redacted_is_refused() -> None:
    """Goal: required columns and encrypted entries, by name."""
    required = LogSchema.first(columns_of(FIRST))
    with pytest.raises(UnsupportedError, match="its columns user_id cannot be null"):
        redactor("user_id = 2", required)
    body = entry(2, batch_of(SECOND, [[2], ["b"], [None]]))
    encrypted = marked_encrypted(body[:48], encrypted=True) + bytes(body[48:])
    for call in (redactor("user_id = 2").count, redactor("user_id = 2").redact):
        with pytest.raises(UnsupportedError, match="encrypted entries"):
            call(memoryview(encrypted))
