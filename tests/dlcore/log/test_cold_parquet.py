"""Objects of cold ledgers: what goes in comes out, and other programs read it too."""

from __future__ import annotations

import datetime
import math
import struct
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from dlcore.base.errors import ObjectStoreError, UnsupportedError
from dlcore.log.cold import parquet
from dlcore.log.cold.parquet import (
    ColdEntry,
    FactsCounter,
    ObjectEncoder,
    ObjectLayout,
    columns_of_object,
    footer_bytes,
)
from dlcore.log.entries.body import byte_log_schema
from dlcore.log.typed.arrow import columns_of, entry_schemas
from dlcore.log.typed.schema import LogSchema

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dlcore.log.cold.facts import ObjectFacts

ORIGIN: dict[str, Any] = {"cluster_id": "cluster", "log_id": "log", "lssn": 3}
DAY = datetime.datetime(2026, 11, 26, 12, 30, 1, tzinfo=datetime.UTC)
TYPES = {
    "bool": (pa.bool_(), True),
    "int8": (pa.int8(), -128),
    "uint8": (pa.uint8(), 255),
    "uint32": (pa.uint32(), 2**32 - 1),
    "uint64": (pa.uint64(), 2**64 - 1),
    "half": (pa.float16(), np.float16(1.5)),
    "float": (pa.float32(), -0.0),
    "double": (pa.float64(), math.inf),
    "text": (pa.string(), "grüezi"),
    "bytes": (pa.binary(), b"\0\xff"),
    "fixed": (pa.binary(4), b"abcd"),
    "date32": (pa.date32(), DAY.date()),
    "date64": (pa.date64(), DAY.date()),
    "time_s": (pa.time32("s"), DAY.time()),
    "time_ns": (pa.time64("ns"), DAY.time()),
    "timestamp_s": (pa.timestamp("s"), DAY.replace(tzinfo=None)),
    "timestamp_ns": (pa.timestamp("ns", tz="Europe/Zurich"), DAY),
    "duration": (pa.duration("s"), datetime.timedelta(days=3)),
    "decimal": (pa.decimal128(38, 3), Decimal("-1.500")),
    "wide": (pa.decimal256(70, 3), Decimal("1e60")),
    "nothing": (pa.null(), None),
    "list": (pa.list_(pa.list_(pa.int16())), [[1, None], None, []]),
    "map": (pa.map_(pa.string(), pa.list_(pa.date32())), [("k", [DAY.date()]), ("l", None)]),
    "struct": (pa.struct([("a", pa.string()), ("b", pa.list_(pa.bool_()))]), {"a": "x", "b": None}),
}
SCHEMA = LogSchema.first(
    columns_of(
        pa.schema(
            [
                *((name, kind) for name, (kind, _) in TYPES.items()),
                pa.field("required", pa.struct([pa.field("n", pa.int64(), nullable=False)]), False),
            ]
        )
    )
)


def made(
    batches: Sequence[pa.RecordBatch], schema: LogSchema | None = None, schema_id: int = 0
) -> tuple[bytes, ObjectFacts]:
    """Return an object of entries, from entry 7 and sequence id 100 on."""
    encoder = ObjectEncoder(
        **ORIGIN,
        schema_id=schema_id,
        schema=byte_log_schema() if schema is None else entry_schemas(schema).of(schema_id),
        columns=columns_of_object(schema, schema_id),
    )
    for entry in entries_of(batches):
        if encoder.add(entry):
            encoder.flush()
    data, facts = encoder.finish()
    return bytes(data), facts


def entries_of(batches: Sequence[pa.RecordBatch]) -> list[ColdEntry]:
    """Return the entries of batches."""
    found, sequence_id = [], 100
    for number, batch in enumerate(batches):
        found.append(ColdEntry(7 + number, batch, sequence_id, 1_700_000_000_000 + number))
        sequence_id += batch.num_rows
    return found


def layout_of(data: bytes) -> ObjectLayout:
    """Return the layout of an object, of which only the footer is read."""
    return ObjectLayout(data[-footer_bytes(data, "it") :], len(data), "it")


def read(data: bytes) -> list[ColdEntry]:
    """Return the entries of an object, by the bytes of each row group alone."""
    layout = layout_of(data)
    return [
        entry
        for number, group in enumerate(layout.row_groups)
        for entry in layout.decode(number, data[group.start : group.end])
    ]


def check(batches: Sequence[pa.RecordBatch], schema: LogSchema | None, schema_id: int) -> bytes:
    """Require that an object returns these entries, and the facts by its rows."""
    data, facts = made(batches, schema, schema_id)
    found, counter = read(data), FactsCounter()
    for entry, expected in zip(found, entries_of(batches), strict=True):
        assert entry[0] == expected[0]
        assert entry[2:] == expected[2:]
        assert entry.batch.schema.equals(expected.batch.schema)
        assert entry.batch.to_pylist() == expected.batch.to_pylist()
        counter.add(entry)
    assert counter.facts(tuple(ORIGIN.values()), schema_id) == facts == layout_of(data).facts
    return data


def typed_batch(rows: Sequence[dict[str, Any]], *, cut: int = 0) -> pa.RecordBatch:
    """Return a batch of the typed log; with `cut` a part of a larger one."""
    given = [{"_txid": 5 + n, "required": {"n": n}, **row} for n, row in enumerate(rows)]
    batch = pa.RecordBatch.from_pylist(given, schema=entry_schemas(SCHEMA).of(1))
    return batch.slice(cut)


ROW = {name: value for name, (_, value) in TYPES.items()}


def test_each_type_comes_back() -> None:
    """Values, nulls and empty ones of every type, at every depth, also in parts of batches."""
    rows: list[dict[str, Any]] = [ROW, {}, {"list": [], "map": [], "text": ""}, ROW]
    check([typed_batch(rows), typed_batch(rows, cut=1), typed_batch([{}])], SCHEMA, 1)


payloads = st.lists(st.binary(max_size=40), min_size=1, max_size=6)
texts = st.none() | st.text(max_size=5)
nested = st.none() | st.lists(st.none() | st.lists(st.none() | st.integers(-9, 9), max_size=3))
maps = st.none() | st.dictionaries(st.text(max_size=2), st.none(), max_size=3).map(
    lambda found: list(found.items())
)


@given(st.lists(payloads, min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_a_log_of_bytes_comes_back(entries: list[list[bytes]]) -> None:
    """Whatever its payloads, and whatever goes into one entry."""
    batches = [
        pa.RecordBatch.from_pydict(
            {"txid": range(10 * n, 10 * n + len(each)), "value": each}, schema=byte_log_schema()
        )
        for n, each in enumerate(entries)
    ]
    check(batches, None, 0)


@given(
    st.lists(st.fixed_dictionaries({"text": texts, "list": nested, "map": maps}), min_size=1),
    st.integers(0, 3),
)
@settings(max_examples=50, deadline=None)
def test_nested_columns_come_back(rows: list[dict[str, Any]], cut: int) -> None:
    """Also those of a part of a batch, whose arrays begin in the middle of their buffers."""
    check([typed_batch(rows, cut=min(cut, len(rows) - 1))], SCHEMA, 1)


def test_floats_come_back_bit_by_bit() -> None:
    """Other bits that are no number, and both zeros, are not made equal."""
    bits = [0x7FF8000000000001, 0x7FF8000000000002, 0x8000000000000000, 0]
    floats = [struct.unpack("<d", struct.pack("<Q", each))[0] for each in bits] * 3
    schema = LogSchema.first(columns_of(pa.schema([("x", pa.float64())])))
    batch = pa.RecordBatch.from_pydict(
        {"_txid": range(12), "x": np.array(floats)}, schema=entry_schemas(schema).of(1)
    )
    data, facts = made([batch], schema, 1)
    (entry,) = read(data)
    assert entry.batch.column(1).buffers()[1].to_pybytes()[:96] == np.array(floats).tobytes()
    counter = FactsCounter()
    counter.add(entry)
    assert counter.facts(tuple(ORIGIN.values()), 1) == facts


def test_an_entry_is_in_one_row_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each row group says which entries it has."""
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 100)
    batches = [
        pa.RecordBatch.from_pydict(
            {"txid": range(n + 1), "value": [b"x" * 30] * (n + 1)}, schema=byte_log_schema()
        )
        for n in range(9)
    ]
    groups = layout_of(check(batches, None, 0)).row_groups
    assert len(groups) > 4
    ends = [group.last_entry + 1 for group in groups]
    assert [group.first_entry for group in groups] == [7, *ends[:-1]]
    assert ends[-1] == 16


@pytest.mark.parametrize(
    "change",
    [
        {"value": [b"other"]},
        {"txid": [2]},
        {"value": [b""]},
    ],
)
def test_the_sum_notices_each_change(change: dict[str, Any]) -> None:
    """One other value gives another sum; also a null where there was a value."""
    columns = {"txid": [1], "value": [b"value"]}
    facts = []
    for each in (columns, {**columns, **change}):
        counter = FactsCounter()
        batch = pa.RecordBatch.from_pydict(each, schema=byte_log_schema())
        counter.add(ColdEntry(0, batch, 0, 0))
        facts.append(counter.facts(("", "", 0), 0).crc32c)
    assert facts[0] != facts[1]


@pytest.mark.parametrize("place", ["entry", "sequence_id", "timestamp_ms"])
def test_the_sum_covers_positions_and_times(place: str) -> None:
    """An entry at another place is another one."""
    batch = pa.RecordBatch.from_pydict({"txid": [1], "value": [b""]}, schema=byte_log_schema())
    facts = []
    for entry in (ColdEntry(1, batch, 1, 1), ColdEntry(1, batch, 1, 1)._replace(**{place: 2})):
        counter = FactsCounter()
        counter.add(entry)
        facts.append(counter.facts(("", "", 0), 0).crc32c)
    assert facts[0] != facts[1]


def test_ids_of_fields_stay() -> None:
    """Under later versions of the schema, and at any depth; no two columns have the same."""

    def ids(kind: Any, into: dict[str, bytes], above: str = "") -> dict[str, bytes]:
        fields = (
            list(kind)
            if isinstance(kind, pa.Schema)
            else [kind.field(n) for n in range(kind.num_fields)]
        )
        for field in fields:
            name = f"{above}.{field.name}"
            if field.metadata is not None:
                into[name] = field.metadata[b"PARQUET:field_id"]
            ids(field.type, into, name)
        return into

    first = LogSchema.first(
        columns_of(pa.schema([("s", pa.struct([("a", pa.int8())])), ("z", pa.int8())]))
    )
    later = first.merged(
        "log",
        columns_of(
            pa.schema(
                [
                    ("s", pa.struct([("a", pa.int8()), ("b", pa.map_(pa.string(), pa.int8()))])),
                    ("y", pa.list_(pa.int8())),
                ]
            )
        ),
    )
    before, after = (ids(columns_of_object(later, n), {}) for n in (1, 2))
    assert before == {".s": b"101", ".s.a": b"102", ".z": b"103"}
    assert before.items() <= after.items()
    assert len(set(after.values())) == len(after) == 8
    assert ids(columns_of_object(first, 1), {}) == before
    assert ids(columns_of_object(None, 0), {}) == {".value": b"101"}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (pa.schema([("_lssn", pa.int64())]), "'_lssn'"),
        (pa.schema([("m", pa.month_day_nano_interval())]), "Parquet cannot hold"),
    ],
)
def test_a_type_that_parquet_lacks_is_refused(schema: pa.Schema, why: str) -> None:
    """Such a log stays on bookies."""
    with pytest.raises(UnsupportedError, match=why):
        made([], LogSchema.first(columns_of(schema)), 1)


def test_a_struct_without_fields_is_refused() -> None:
    """Parquet has none."""
    schema = LogSchema.first(columns_of(pa.schema([("s", pa.struct([]))])))
    batch = pa.RecordBatch.from_pylist([{"_txid": 1, "s": {}}], schema=entry_schemas(schema).of(1))
    with pytest.raises(UnsupportedError, match="Parquet cannot hold"):
        made([batch], schema, 1)


def test_damage_is_an_error() -> None:
    """No footer, another file's, a later format, and damaged or missing bytes of rows."""
    data, facts = made([typed_batch([ROW] * 20)], SCHEMA, 1)
    for tail in (b"", b"PAR1", data[:-1]):
        with pytest.raises(ObjectStoreError, match="does not end as a Parquet file"):
            footer_bytes(tail, "it")
    with pytest.raises(ObjectStoreError, match="no object of a cold ledger"):
        ObjectLayout(data[-9:], len(data), "it")
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1]}), sink)
    with pytest.raises(ObjectStoreError, match="no object of a cold ledger"):
        layout_of(sink.getvalue().to_pybytes())
    layout = layout_of(data)
    group = layout.row_groups[0]
    for damaged in (data[group.start : group.end - 60], bytes(group.end - group.start)):
        with pytest.raises(ObjectStoreError, match="it, row group 0"):
            layout.decode(0, damaged)
    assert facts.format == 1


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_damaged_byte_is_returned_as_data(data: st.DataObject) -> None:
    """Whatever byte of a row group changes: an error, or the same rows."""
    whole, facts = _sample()
    layout = layout_of(whole)
    group = layout.row_groups[0]
    rows = bytearray(whole[group.start : group.end])
    rows[data.draw(st.integers(0, len(rows) - 1))] ^= data.draw(st.integers(1, 255))
    counter = FactsCounter()
    try:
        for entry in layout.decode(0, bytes(rows)):
            counter.add(entry)
    except ObjectStoreError:
        return
    assert counter.facts(tuple(ORIGIN.values()), 1) == facts


@cache
def _sample() -> tuple[bytes, ObjectFacts]:
    return made([typed_batch([ROW, {}] * 5)], SCHEMA, 1)


def test_a_later_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows may mean something else."""
    data, _ = made([typed_batch([ROW])], SCHEMA, 1)
    monkeypatch.setattr(parquet, "FORMAT", 2)
    with pytest.raises(ObjectStoreError, match="has the format 1, this release reads 2"):
        layout_of(data)


def test_other_programs_read_it(tmp_path: Path) -> None:
    """DuckDB, Polars, pandas and pyarrow see columns and positions."""
    schema = pa.schema([(n, k) for n, (k, _) in TYPES.items() if n not in ("wide", "nothing")])
    stored = LogSchema.first(columns_of(schema))
    rows = [{"_txid": 5, **{name: ROW[name] for name in schema.names}}] * 3
    batch = pa.RecordBatch.from_pylist(rows, schema=entry_schemas(stored).of(1))
    data, _ = made([batch, batch], stored, 1)
    path = tmp_path / "it.parquet"
    path.write_bytes(data)
    query = f"SELECT _lssn, _entry, _slot, _sequence_id, text FROM '{path}' WHERE _entry = 8"
    with duckdb.connect() as connection:
        assert connection.sql(query).fetchall() == [(3, 8, n, 103 + n, "grüezi") for n in range(3)]
    assert pl.read_parquet(path)["_sequence_id"].to_list() == list(range(100, 106))
    assert pd.read_parquet(path)["_slot"].to_list() == [0, 1, 2] * 2
    assert pq.read_table(path)["uint64"].to_pylist() == [2**64 - 1] * 6
