"""Arrow's side of typed logs: types there and back, batches made to fit, rows measured and cut.

Goal: a value comes back as what it was, whatever program spelled it how.  Method: every type that a
log can hold, drawn batches, and other spellings of the same values.
"""

from __future__ import annotations

import datetime
import re
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from dlcore.base.config import RECORD_SIZE_BYTES_MAX
from dlcore.base.errors import (
    ConfigurationError,
    InvalidEntryError,
    LogRecordTooLongError,
    SchemaMismatchError,
)
from dlcore.log.entries.batches import batches_from
from dlcore.log.entries.body import (
    Compressor,
    decode_entry_batch,
    decode_entry_header,
    encode_entry,
    move_entry,
)
from dlcore.log.typed.arrow import (
    EntrySchemas,
    columns_of,
    entry_schemas,
    schema_from,
    schema_of,
    type_of,
)
from dlcore.log.typed.rows import TypedRows, row_sizes
from dlcore.log.typed.schema import Column, LogSchema
from tests.fixtures.lengths import amount

DAY = datetime.date(2024, 2, 29)
TIME = datetime.datetime(2024, 2, 29, 1, 2, 3, 4)  # noqa: DTZ001  # a column without a zone
UTC_TIME = TIME.replace(tzinfo=datetime.UTC)
VALUES: dict[str, tuple[pa.DataType, Any]] = {
    "nothing": (pa.null(), None),
    "yes": (pa.bool_(), True),
    "i8": (pa.int8(), -128),
    "i16": (pa.int16(), 2**15 - 1),
    "i32": (pa.int32(), -(2**31)),
    "i64": (pa.int64(), 2**63 - 1),
    "u8": (pa.uint8(), 255),
    "u64": (pa.uint64(), 2**64 - 1),
    "f16": (pa.float16(), 1.5),
    "f32": (pa.float32(), 1.5),
    "f64": (pa.float64(), 1e300),
    "dec": (pa.decimal128(38, 10), Decimal("1234567890123456789012345678.0123456789")),
    "dec256": (pa.decimal256(60, -2), Decimal("12300")),
    "text": (pa.string(), "é\0"),
    "bytes": (pa.binary(), b"\0\xff"),
    "fixed": (pa.binary(3), b"abc"),
    "day": (pa.date32(), DAY),
    "day64": (pa.date64(), DAY),
    "at_noon": (pa.time64("us"), datetime.time(12)),
    "at": (pa.timestamp("us"), TIME),
    "at_utc": (pa.timestamp("us", "UTC"), UTC_TIME),
    "in_paris": (pa.timestamp("ms", "Europe/Paris"), UTC_TIME.replace(microsecond=0)),
    "took": (pa.duration("us"), datetime.timedelta(days=-1, microseconds=1)),
    "span": (pa.month_day_nano_interval(), pa.MonthDayNano([1, -2, 3])),
    "tags": (pa.list_(pa.string()), ["a", None, "b"]),
    "by": (pa.map_(pa.string(), pa.list_(pa.int8())), [("a", [1]), ("b", None)]),
    "where": (
        pa.struct([("x", pa.float64()), ("in", pa.struct([("y", pa.list_(pa.date32()))]))]),
        {"x": None, "in": {"y": [DAY]}},
    ),
}
ALL_TYPES = pa.schema([(name, kind) for name, (kind, _) in VALUES.items()])


def batch_of_all(rows: int = 3) -> pa.RecordBatch:
    """Return rows that have all values, then none, by turns."""
    arrays = [
        pa.array([None if n % 2 else value for n in range(rows)], kind)
        for kind, value in VALUES.values()
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=ALL_TYPES)


def schemas_of(*versions: pa.Schema) -> EntrySchemas:
    """Return the schemas of a log that had these, one after the other."""
    schema = LogSchema.first(columns_of(versions[0]))
    for each in versions[1:]:
        schema = schema.evolved("trips", columns_of(each))
    return entry_schemas(schema)


def test_types_there_and_back() -> None:
    """The readable text says all that Arrow needs."""
    columns = columns_of(ALL_TYPES)
    assert schema_of(columns) == ALL_TYPES
    assert {c.name: c.type for c in columns}["in_paris"] == "timestamp[ms, tz=Europe/Paris]"
    assert columns_of(schema_of(columns)) == columns


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_entries_keep_every_value(compression: str) -> None:
    """Through an entry's body, moved by merging, and shown by a later version of the schema."""
    wider = [*ALL_TYPES, pa.field("more", pa.list_(pa.int8()))]
    wider[ALL_TYPES.get_field_index("i8")] = pa.field("i8", pa.int16())
    schemas = schemas_of(ALL_TYPES, pa.schema(wider))
    first = schemas_of(ALL_TYPES)
    rows = pa.concat_batches([batch_of_all()] * 40)
    batch, has_txids = first.fit("trips", rows)
    assert not has_txids
    parts = encode_entry(
        batch.slice(1),
        first_txid=0,
        last_txid=0,
        records_before=0,
        write_time_ms=5,
        compressor=Compressor(compression),
        schema_id=1,
    )
    body = b"".join(move_entry(b"".join(parts), records_before=9, floor_ms=0, assigned_txid=7))
    header = decode_entry_header(body)
    assert (header.schema_id, header.records_before, header.record_count) == (1, 9, 119)
    assert header.compressed is (compression != "none")
    found = decode_entry_batch(body, header, schemas)
    assert found.column("_txid").to_pylist() == [7] * 119
    assert found.drop_columns(["_txid"]).equals(rows.slice(1))
    latest = schemas.promote(found, 1)
    assert latest.schema == schemas.latest
    assert latest.column("more").null_count == 119
    assert latest.column("i8").slice(0, 2).to_pylist() == [None, -128]
    assert latest.column("where").equals(found.column("where"))
    assert schemas.promote(latest, 2) is latest


def test_an_entry_of_another_schema() -> None:
    """It is never read by a schema that it does not have."""
    schemas = schemas_of(pa.schema([("a", pa.int8())]))
    compressor = Compressor("none")
    batch, _ = schemas.fit("trips", pa.record_batch({"a": pa.array([1], pa.int8())}))

    def body(schema_id: int) -> bytes:
        parts = encode_entry(
            batch, first_txid=0, last_txid=0, records_before=0, write_time_ms=0,
            compressor=compressor, schema_id=schema_id,
        )  # fmt: skip
        return b"".join(parts)

    for schema_id, given_schemas, why in [
        (2, schemas, "an entry has schema 2, the log has 1 … 1"),
        (1, None, "an entry of a byte log has schema 1"),
        (0, schemas, "an entry of a typed log has no schema"),
    ]:
        data = body(schema_id)
        with pytest.raises(InvalidEntryError, match=why):
            decode_entry_batch(data, decode_entry_header(data), given_schemas)


def test_other_spellings_of_the_same_values() -> None:
    """Dictionaries, views, large and fixed-size types, and extensions are stored plainly."""
    spelled = {
        "word": pa.array(["a", "b"]).dictionary_encode(),
        "view": pa.array(["a", "b"], pa.string_view()),
        "large": pa.array(["a", "b"], pa.large_string()),
        "raw": pa.array([b"a", b"b"], pa.large_binary()),
        "seen": pa.array([b"a", b"b"], pa.binary_view()),
        "many": pa.array([[1], []], pa.large_list(pa.int8())),
        "pair": pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)),
        "id": pa.array([b"0" * 16] * 2, pa.uuid()),
    }
    batch = pa.record_batch(spelled)
    columns = columns_of(batch.schema)
    assert [column.type for column in columns] == [
        *["string"] * 3, *["binary"] * 2, *["list"] * 2, "fixed_size_binary[16]"
    ]  # fmt: skip
    fitted, _ = schemas_of(batch.schema).fit("trips", batch)
    assert fitted.schema.field("word").type == pa.string()
    for name in batch.schema.names:
        if name != "id":
            assert fitted.column(name).to_pylist() == batch.column(name).to_pylist()


@pytest.mark.parametrize(
    ("known", "array"),
    [
        (pa.int32(), pa.array([1, None, -5], pa.int64())),
        (pa.int64(), pa.array([1, 2, 3], pa.uint8())),
        (pa.float64(), pa.array([1.5, 2.0, None], pa.float32())),
        (pa.timestamp("us"), pa.array([1000, 2000, 0], pa.timestamp("ns"))),
        (pa.timestamp("us", "UTC"), pa.array([1, 2, 3], pa.timestamp("s", "Asia/Tokyo"))),
        (pa.duration("us"), pa.array([1000, 0, 0], pa.duration("ns"))),
        (pa.date32(), pa.array([DAY, DAY, None], pa.date64())),
        (pa.decimal128(9, 2), pa.array([Decimal("1.10"), None, None], pa.decimal128(20, 4))),
        (pa.string(), pa.nulls(3)),
        (pa.binary(), pa.array([b"abc"] * 3, pa.binary(3))),
        (pa.list_(pa.int8()), pa.array([[1], None, [2, 3]], pa.list_(pa.int64()))),
        (
            pa.struct([("x", pa.int8()), ("y", pa.string())]),
            pa.array([{"x": 1}, None, {"x": None}], pa.struct([("x", pa.int64())])),
        ),
    ],
)
def test_values_that_keep_what_they_are(known: pa.DataType, array: pa.Array) -> None:
    """Narrower types, and wider ones where no value needs that: frames have one type of integer."""
    fitted, _ = schemas_of(pa.schema([("a", known)])).fit("trips", pa.record_batch({"a": array}))
    assert fitted.column("a").equals(array.cast(known))
    assert fitted.column("a").null_count == array.null_count


@pytest.mark.parametrize(
    ("known", "array", "why"),
    [
        (pa.int8(), pa.array([300]), "column a int8 cannot hold all values of a int64"),
        (pa.float32(), pa.array([0.1]), "column a float cannot hold a double"),
        (pa.int64(), pa.array([1.0]), "column a int64 cannot hold a double"),
        (pa.string(), pa.array([1]), "column a string cannot hold a int64"),
        (pa.string(), pa.array([b"a"]), "column a string cannot hold a binary"),
        (pa.timestamp("us"), pa.array([1], pa.timestamp("ns")), "would lose data"),
        (pa.timestamp("us"), pa.array([1], pa.timestamp("us", "UTC")), "cannot hold a timestamp"),
        (pa.decimal128(5, 2), pa.array([Decimal("0.001")]), "cannot hold all values"),
        (pa.list_(pa.int8()), pa.array([1]), "cannot hold a int64"),
        (pa.struct([("x", pa.int8())]), pa.array([{"z": 1}]), "cannot hold a struct<z int64>"),
    ],
)
def test_values_that_would_change(known: pa.DataType, array: pa.Array, why: str) -> None:
    """The batch is refused, with the log, the column and its type."""
    with pytest.raises(SchemaMismatchError, match=f"log 'trips': .*{re.escape(why)}"):
        schemas_of(pa.schema([("a", known)])).fit("trips", pa.record_batch({"a": array}))


def test_columns_of_a_batch() -> None:
    """By name in any order; missing ones are null, what was read beside them is passed over."""
    schemas = schemas_of(pa.schema([("a", pa.int8()), ("b", pa.string())]))
    batch = pa.record_batch({"b": ["x"], "_log": ["l"], "_timestamp": [1], "_txid": [9]})
    fitted, has_txids = schemas.fit("trips", batch)
    assert has_txids
    assert fitted.to_pylist() == [{"_txid": 9, "a": None, "b": "x"}]
    for wrong, why in [
        (pa.record_batch({"b": ["x"], "c": [1]}), "it has no column 'c'; the log's columns are"),
        (pa.record_batch({"_txid": [1]}), "the batch has none of them"),
        (pa.RecordBatch.from_arrays([[1], [2]], names=["a", "a"]), "has a name twice"),
        (pa.record_batch({"a": [1], "_txid": ["x"]}), "column _txid has 0 nulls and the type str"),
        (pa.record_batch({"a": [1], "_txid": pa.nulls(1)}), "column _txid has 1 nulls"),
    ]:
        with pytest.raises(SchemaMismatchError, match=why):
            schemas.fit("trips", wrong)
    small = pa.record_batch({"a": [1], "_txid": pa.array([1], pa.uint8())})
    assert schemas.fit("trips", small)[0].column(0).to_pylist() == [1]


def test_values_that_are_no_schema_and_no_table() -> None:
    """A clear error, and not Arrow's."""
    with pytest.raises(ConfigurationError, match="expected an Arrow schema"):
        schema_from(5)
    with pytest.raises(ConfigurationError, match="column 'u': a log cannot hold values of the"):
        columns_of(pa.schema([("u", pa.dense_union([pa.field("x", pa.int8())]))]))
    for wrong in (Column("a", "int7"), Column("a", "list"), Column("a", "map")):
        with pytest.raises(InvalidEntryError, match="which this release does not know"):
            type_of(wrong)
    with pytest.raises(ConfigurationError, match="expected a table or frame"):
        batches_from(5)
    assert [b.num_rows for b in batches_from({"a": range(100_000)})] == [65536, 34464]


def size_of(value: Any, kind: pa.DataType) -> int:
    """Return what `row_sizes` says of a value, by its definition."""
    if pa.types.is_struct(kind):
        return sum(size_of((value or {}).get(f.name), f.type) for f in kind)
    if pa.types.is_list(kind):
        return 4 + sum(size_of(each, kind.value_type) for each in value or [])
    if pa.types.is_map(kind):
        pairs = [(size_of(k, kind.key_type), size_of(v, kind.item_type)) for k, v in value or []]
        return 4 + sum(k + v for k, v in pairs)
    if pa.types.is_string(kind):
        return 4 + len((value or "").encode())
    if pa.types.is_binary(kind):
        return 4 + len(value or b"")
    return 0 if pa.types.is_null(kind) else max(1, kind.bit_width // 8)


NESTED = pa.schema(
    [
        ("n", pa.int16()),
        ("s", pa.string()),
        ("l", pa.list_(pa.list_(pa.string()))),
        ("m", pa.map_(pa.string(), pa.binary())),
        ("t", pa.struct([("x", pa.bool_()), ("y", pa.list_(pa.int64())), ("z", pa.null())])),
    ]
)
words = st.none() | st.text(max_size=5)
rows = st.fixed_dictionaries(
    {
        "n": st.none() | st.integers(-9, 9),
        "s": words,
        "l": st.none() | st.lists(st.none() | st.lists(words, max_size=3), max_size=3),
        "m": st.none()
        | st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=9)), max_size=3),
        "t": st.fixed_dictionaries(
            {"x": st.none(), "y": st.none() | st.lists(st.integers(0, 5), max_size=3)}
        ),
    }
)


@settings(max_examples=amount(60, sampled=20))
@given(st.lists(rows, max_size=8), st.integers(0, 5), st.integers(1, 200))
def test_rows_are_measured_and_cut(drawn: list[Any], skipped: int, entry_bytes: int) -> None:
    """As a loop over values says, also of slices; slices have at most the bytes, or one row."""
    batch = pa.RecordBatch.from_pylist(drawn, schema=NESTED).slice(skipped)
    expected = [
        sum(size_of(row[field.name], field.type) for field in NESTED) for row in drawn[skipped:]
    ]
    sizes = row_sizes(batch)
    assert sizes.tolist() == expected
    measured = TypedRows.of("trips", batch, 1)
    parts = list(measured.cut(entry_bytes))
    assert sum(size for _, size in parts) == sum(expected)
    assert all(size <= entry_bytes or part.num_rows == 1 for part, size in parts)
    if parts:
        assert pa.concat_batches([part for part, _ in parts]).equals(batch)
    for (_, size), (following, _) in pairwise(parts):
        assert size + int(row_sizes(following.slice(0, 1))[0]) > entry_bytes


def test_a_row_that_is_too_large() -> None:
    """It is named by log, row and size before anything is sent."""
    big = "x" * RECORD_SIZE_BYTES_MAX
    batch = pa.record_batch({"a": ["", big]})
    why = f"log 'trips': row 1 of the batch has {len(big) + 4} bytes, which exceeds"
    with pytest.raises(LogRecordTooLongError, match=why):
        TypedRows.of("trips", batch, 1)
    assert np.array_equal(TypedRows.of("trips", batch.slice(0, 0), 1).ends, [0])


def test_equal_schemas_share_their_arrow_side() -> None:
    """It is made once, also for a schema that came with each of many partitions."""
    one = LogSchema.first([Column("a", "int8")])
    assert entry_schemas(one) is entry_schemas(LogSchema.first([Column("a", "int8")]))
