"""The form of Delta tables: positions as integers, columns, statistics, and what readers see."""

from __future__ import annotations

import datetime as dt
import io
import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from hypothesis import given, strategies as st

from dlcore.base.errors import TableError, UnsupportedError
from dlcore.base.ids import DLSN
from dlcore.log.cold import table_format
from dlcore.log.cold.delta_format import fields_of, files_of, missing_fields, statistics_of
from dlcore.log.cold.delta_tables import DeltaTables
from dlcore.log.cold.parquet import POSITIONS, columns_of_object
from dlcore.log.cold.stores import StoredObjects
from dlcore.log.cold.table_format import (
    AddedFile,
    boundary_of,
    number_of,
    place_of,
    segment_of,
)
from dlcore.log.typed.arrow import first_schema
from tests.fixtures.aio import run
from tests.fixtures.table_readers import rows_of

if TYPE_CHECKING:
    from pathlib import Path

DAY = dt.date(2026, 2, 3)
UTC = dt.datetime(2026, 2, 3, 4, 5, 6, 789_123, tzinfo=dt.UTC)
TIME = UTC.replace(tzinfo=None)
VALUES: dict[str, tuple[pa.DataType, Any]] = {
    "bool": (pa.bool_(), True),
    "int8": (pa.int8(), -5),
    "int16": (pa.int16(), -5),
    "int32": (pa.int32(), -5),
    "int64": (pa.int64(), -(2**62)),
    "uint8": (pa.uint8(), 200),
    "uint16": (pa.uint16(), 60_000),
    "uint32": (pa.uint32(), 4_000_000_000),
    "half": (pa.float16(), 1.5),
    "float": (pa.float32(), 1.5),
    "double": (pa.float64(), float("inf")),
    "string": (pa.string(), "größer"),
    "binary": (pa.binary(), b"\0\xff"),
    "fixed": (pa.binary(3), b"abc"),
    "date": (pa.date32(), DAY),
    "time_s": (pa.timestamp("s"), TIME.replace(microsecond=0)),
    "time_ms": (pa.timestamp("ms"), TIME.replace(microsecond=789_000)),
    "time_us": (pa.timestamp("us"), TIME),
    "zoned": (pa.timestamp("us", "Europe/Berlin"), UTC),
    "decimal": (pa.decimal128(10, 2), Decimal("1.25")),
    "list": (pa.list_(pa.int32()), [1, None, 2]),
    "struct": (pa.struct([("a", pa.int32()), ("b", pa.string())]), {"a": 1, "b": None}),
    "map": (pa.map_(pa.string(), pa.int32()), [("a", 1), ("b", None)]),
}
REFUSED = {
    "uint64": pa.uint64(),
    "date64": pa.date64(),
    "nanoseconds": pa.timestamp("ns"),
    "duration": pa.duration("s"),
    "time": pa.time32("s"),
    "null": pa.null(),
    "large": pa.decimal256(50, 2),
    "in a list": pa.list_(pa.duration("s")),
}


def columns_with(kind: pa.DataType, name: str = "x") -> pa.Schema:
    """Return a log's column in an object."""
    return columns_of_object(first_schema(pa.schema([(name, kind)])), 1)


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1))
def test_positions_grow_as_places_do(lssn: int, entry: int) -> None:
    """And are made again of the integer."""
    number = number_of((lssn, entry))
    assert place_of(number) == (lssn, entry)
    assert 0 <= number < 2**63
    assert entry == 0 or number > number_of((lssn, entry - 1))
    assert boundary_of((3, 17)) == DLSN(3, 17, 0)


@pytest.mark.parametrize("place", [(2**31, 0), (1, 2**32)])
def test_places_beyond_what_a_table_holds(place: tuple[int, int]) -> None:
    """The error names them."""
    with pytest.raises(TableError, match="a table holds segments below"):
        number_of(place)


@pytest.mark.parametrize("name", VALUES)
def test_each_type_as_readers_of_delta_give_it(name: str, tmp_path: Path) -> None:
    """Three readers give the value that the object has, and null."""
    kind, value = VALUES[name]
    columns = columns_with(kind)
    positions = [pa.array([0, 0]).cast(each.type) for each in POSITIONS]
    rows = pa.Table.from_arrays(
        [*positions, pa.array([value, None], kind).cast(columns.field(0).type)],
        schema=pa.schema([*POSITIONS, *columns]),
    )
    file = tmp_path / "1" / "7-t-0-1.parquet"
    file.parent.mkdir()
    pq.write_table(rows, file, compression="zstd")
    url = f"file://{tmp_path}"
    added = AddedFile("1/7-t-0-1.parquet", file.stat().st_size, 0, pq.read_metadata(file), 1)
    table = DeltaTables(url, "c/l", StoredObjects())
    run(table.create("log", fields_of(columns), [added], (1, 1)))
    seen = run(table.look())
    assert seen is not None
    assert missing_fields(seen.fields, fields_of(columns)) == []
    expected = rows["x"].cast(pa.schema([("x", kind)]).field(0).type).to_pylist()
    found = {
        "arrow": rows_of(DeltaTable(url))["x"].to_pylist(),
        "polars": polars.scan_delta(url).collect()["x"].to_list(),
        "datafusion": pa.table(
            QueryBuilder().register("t", DeltaTable(url)).execute("SELECT x FROM t")
        )["x"].to_pylist(),
    }
    for reader, values in found.items():
        assert [_plain(each) for each in values] == [_plain(each) for each in expected], reader


def _plain(value: Any) -> Any:
    """Return a value as all readers could give it."""
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(dt.UTC)
    return dict(value) if isinstance(value, list) and value[:1] == [("a", 1)] else value


@pytest.mark.parametrize("name", REFUSED)
def test_types_that_some_reader_lacks(name: str) -> None:
    """The error names the column and its type."""
    field = pa.field("x", REFUSED[name])
    with pytest.raises(UnsupportedError, match=r"column '.*' has the type .*readers of Delta"):
        fields_of(pa.schema([field]))


@pytest.mark.parametrize("name", ["a b", "a,b", "a=b", "(a)"])
def test_names_that_delta_lacks(name: str) -> None:
    """The error names it."""
    with pytest.raises(UnsupportedError, match="cannot have a column called"):
        fields_of(columns_with(pa.int8(), name))


@pytest.mark.parametrize(
    ("known", "wanted", "outcome"),
    [
        (pa.int8(), pa.int8(), "there"),
        (pa.int8(), pa.int16(), "refused"),
        (pa.list_(pa.int8()), pa.list_(pa.int8()), "there"),
        (pa.list_(pa.int8()), pa.list_(pa.int16()), "refused"),
        (pa.list_(pa.int8()), pa.map_(pa.string(), pa.int8()), "refused"),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int16())]), "refused"),
        (pa.struct([("a", pa.int8()), ("b", pa.int8())]), pa.struct([("a", pa.int8())]), "there"),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int8()), ("b", pa.int8())]), "missing"),
        (
            pa.map_(pa.string(), pa.list_(pa.struct([("a", pa.int8())]))),
            pa.map_(pa.string(), pa.list_(pa.struct([("a", pa.int8()), ("b", pa.int8())]))),
            "missing",
        ),
        (pa.struct([("a", pa.int8())]), pa.int8(), "refused"),
    ],
)
def test_how_columns_change(known: pa.DataType, wanted: pa.DataType, outcome: str) -> None:
    """New columns and parts are missing; another type is refused, with what to do."""
    known_fields = fields_of(pa.schema([("x", known)]))
    wanted_fields = fields_of(pa.schema([("x", wanted)]))
    if outcome == "refused":
        with pytest.raises(UnsupportedError, match=r"cannot become .*delete its folder _delta_log"):
            missing_fields(known_fields, wanted_fields)
    else:
        expected = list(wanted_fields[-1:]) if outcome == "missing" else []
        assert missing_fields(known_fields, wanted_fields) == expected
    assert missing_fields(known_fields[:-1], wanted_fields) == [wanted_fields[-1]]


def statistics(rows: dict[str, pa.Array], end: int = 2, **options: Any) -> dict[str, Any]:
    """Return those of a file with these columns beside the entries 0 and 1, a group for each."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"_entry": [0, 1], **rows}), sink, row_group_size=1, **options)
    found = statistics_of(pq.read_metadata(io.BytesIO(sink.getvalue())), end)
    decoded: dict[str, Any] = json.loads(found)
    assert decoded.pop("numRecords") == 2
    return decoded


def test_statistics_have_bounds_that_hold_for_all_readers() -> None:
    """Numbers, days, moments and short texts have some; floats and the like have none."""
    zoned = pa.timestamp("us", "UTC")
    found = statistics(
        {
            "n": pa.array([5, None]),
            "none": pa.array([None, None], pa.int64()),
            "day": pa.array([DAY, dt.date(2025, 1, 1)]),
            "at": pa.array([UTC, UTC], zoned),
            "whole": pa.array([UTC.replace(microsecond=0)] * 2, zoned),
            "local": pa.array([TIME, TIME]),
            "text": pa.array(["b", "a"]),
            "long": pa.array(["b" * 33, "a"]),
            "float": pa.array([1.0, float("nan")]),
            "flag": pa.array([True, False]),
            "list": pa.array([[1], [2]]),
            "struct": pa.array([{"a": 1}, {"a": 2}]),
        }
    )
    second = "2026-02-03T04:05:06"
    assert found["minValues"] == {
        "_entry": 0,
        "n": 5,
        "day": "2025-01-01",
        "at": f"{second}.789Z",
        "whole": f"{second}.000Z",
        "text": "a",
    }
    assert found["maxValues"] == {
        "_entry": 1,
        "n": 5,
        "day": "2026-02-03",
        "at": f"{second}.790Z",
        "whole": f"{second}.000Z",
        "text": "b",
    }
    assert found["nullCount"]["n"] == 1
    assert found["nullCount"]["none"] == 2
    assert not {"list", "struct"} & found["nullCount"].keys()


def test_columns_without_statistics() -> None:
    """Nothing is said of them; a text in one row group without bounds has none at all."""
    found = statistics({"v": pa.array([b"a", b"b"])}, write_statistics=["_entry"])
    assert found == {
        "minValues": {"_entry": 0},
        "maxValues": {"_entry": 1},
        "nullCount": {"_entry": 0},
    }


def test_files_that_dlog_did_not_add() -> None:
    """By their names, or because they say nothing of entries."""
    row = {"path": "3/7-t-0-1.parquet", "size_bytes": 5, "num_records": 2, "max._entry": 8}
    (file,) = files_of([row])
    assert file == ("3/7-t-0-1.parquet", 5, (3, 9), 2)
    for change in ({"path": "part-1.parquet"}, {"max._entry": None}, {"num_records": None}):
        with pytest.raises(TableError, match="which dlog did not add"):
            files_of([{**row, **change}])
    assert segment_of("3/7-a-b-0-1.parquet") == 3
    assert segment_of("_delta_log/00000000000000000100.checkpoint.parquet") is None
    assert table_format.app_id_of("c", "l") == "c/l"
