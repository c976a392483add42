"""The form of Iceberg tables: columns with their ids, the position, and what readers see."""

from __future__ import annotations

import datetime as dt
import warnings
from typing import TYPE_CHECKING, Any

import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlcore.base.errors import TableError, UnsupportedError
from dlcore.log.cold.iceberg_format import (
    ICEBERG,
    LOG,
    POSITION,
    SnapshotSeen,
    fields_of,
    first_metadata,
    ids_of,
    merged_away,
    missing_fields,
    newest_in,
    position_of,
    require_properties,
    summary_of,
    table_file,
    table_name,
    version_of,
    with_fields,
    without_floats,
)
from dlcore.log.cold.iceberg_tables import IcebergTables
from dlcore.log.cold.parquet import POSITIONS, columns_of_object
from dlcore.log.cold.stores import StoredObjects
from dlcore.log.cold.table_format import AddedFile, number_of
from dlcore.log.typed.arrow import first_schema
from tests.dlcore.log.test_table_format import VALUES, columns_with
from tests.fixtures.lateness import run_in_own_time as run
from tests.fixtures.table_readers import make_catalog, own_catalog

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.log.cold.table_format import Field

LACKING = ("uint8", "uint16", "uint32", "half", "zoned")
KNOWN = {
    **{name: value for name, value in VALUES.items() if name not in LACKING},
    "utc": (pa.timestamp("us", "UTC"), VALUES["zoned"][1]),
}
REFUSED = {
    **{name: VALUES[name][0] for name in LACKING},
    "uint64": pa.uint64(),
    "date64": pa.date64(),
    "nanoseconds": pa.timestamp("ns"),
    "duration": pa.duration("s"),
    "time": pa.time32("s"),
    "zoned": VALUES["zoned"][0],
    "null": pa.null(),
    "large": pa.decimal256(50, 2),
    "in a list": pa.list_(pa.duration("s")),
}


@pytest.mark.parametrize("name", KNOWN)
def test_each_type_as_readers_of_iceberg_give_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two readers give the value that the object has, and null; columns are found by their ids."""
    make_catalog(tmp_path / "catalog", monkeypatch)
    kind, value = KNOWN[name]
    columns = columns_with(kind)
    positions = [pa.array([0, 0]).cast(each.type) for each in POSITIONS]
    rows = pa.Table.from_arrays(
        [*positions, pa.array([value, None], kind).cast(columns.field(0).type)],
        schema=pa.schema([*POSITIONS, *columns]),
    )
    file = tmp_path / "tier" / "1" / "7-t-0-1.parquet"
    file.parent.mkdir(parents=True)
    pq.write_table(rows, file, compression="zstd")
    url = f"file://{tmp_path}/tier"
    added = AddedFile("1/7-t-0-1.parquet", file.stat().st_size, 0, pq.read_metadata(file), 1)
    table = IcebergTables(url, "c/l", StoredObjects())
    run(table.create("types", fields_of(columns), [added], (1, 1)))
    seen = run(table.look())
    assert seen is not None
    assert seen.position == (1, 1)
    assert missing_fields(seen.fields, fields_of(columns)) == []
    assert ids_of(seen.fields) == ids_of(fields_of(columns))
    found = own_catalog().load_table(("dlog", "types"))
    expected = rows["x"].cast(pa.schema([("x", kind)]).field(0).type).to_pylist()
    assert plain(found.scan().to_arrow()["x"].to_pylist()) == plain(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", polars.exceptions.PerformanceWarning)
        others = polars.scan_iceberg(found).collect()["x"].to_list()
    assert plain(others) == plain(expected)


def plain(values: list[Any]) -> list[Any]:
    """Return values as all readers could give them."""
    changed: list[Any] = []
    for each in values:
        if isinstance(each, dt.datetime) and each.tzinfo is not None:
            changed.append(each.timestamp())
        elif isinstance(each, list) and each and isinstance(each[0], dict | tuple):
            pairs = [tuple(pair.values()) if isinstance(pair, dict) else pair for pair in each]
            changed.append(dict(pairs))
        else:
            changed.append(each)
    return changed


@pytest.mark.parametrize("name", REFUSED)
def test_types_that_iceberg_lacks(name: str) -> None:
    """The error names the column and its type."""
    with pytest.raises(UnsupportedError, match=r"column '.*' has the type .*Iceberg tables do not"):
        fields_of(with_ids(REFUSED[name]))


def test_names_of_tables() -> None:
    """They have no part of a path; else they are those of the logs."""
    assert table_name("team/rides") == "team_rides"
    assert table_name("a\\b%2F;c") == "a_b_2F_c"
    assert table_name("fares.2026-ü") == "fares.2026-ü"


def test_times_of_a_day_in_microseconds() -> None:
    """Iceberg has these."""
    assert fields_of(with_ids(pa.time64("us")))[-1]["type"] == "time"


def with_ids(kind: pa.DataType, first: int = 101) -> pa.Schema:
    """Return a column, and its parts, with ids as objects have them."""
    number = first

    def field(found: pa.Field) -> pa.Field:
        nonlocal number
        metadata = {"PARQUET:field_id": str(number)}
        number += 1
        inner = found.type
        if pa.types.is_struct(inner):
            inner = pa.struct([field(each) for each in inner])
        elif pa.types.is_list(inner):
            inner = pa.list_(field(inner.value_field))
        elif pa.types.is_map(inner):
            inner = pa.map_(field(inner.key_field), field(inner.item_field))
        return pa.field(found.name, inner, found.nullable, metadata=metadata)

    return pa.schema([field(pa.field("x", kind))])


def test_positions_need_a_value_and_own_columns_do_not() -> None:
    """A column of the log that allows no null allows it in the table."""
    columns = columns_of_object(
        first_schema(pa.schema([pa.field("x", pa.int64(), nullable=False)])), 1
    )
    required = [each["required"] for each in fields_of(columns)]
    assert required == [True] * 6 + [False]


STRUCT_A = pa.struct([("a", pa.int8())])
STRUCT_AB = pa.struct([("a", pa.int8()), ("b", pa.int8())])


@pytest.mark.parametrize(
    ("known", "wanted", "outcome"),
    [
        (pa.int8(), pa.int32(), "there"),
        (pa.int64(), pa.int32(), "there"),
        (pa.int32(), pa.int64(), "missing"),
        (pa.float32(), pa.float64(), "missing"),
        (pa.int32(), pa.float64(), "refused"),
        (pa.decimal128(5, 2), pa.decimal128(9, 2), "missing"),
        (pa.decimal128(9, 2), pa.decimal128(5, 2), "there"),
        (pa.decimal128(5, 2), pa.decimal128(9, 3), "refused"),
        (pa.decimal128(5, 2), pa.int64(), "refused"),
        (pa.list_(pa.int32()), pa.list_(pa.int32()), "there"),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), "missing"),
        (pa.list_(pa.int8()), pa.map_(pa.string(), pa.int8()), "refused"),
        (pa.map_(pa.string(), pa.int32()), pa.map_(pa.string(), pa.int64()), "missing"),
        (STRUCT_AB, STRUCT_A, "there"),
        (STRUCT_A, STRUCT_AB, "missing"),
        (STRUCT_A, pa.struct([("a", pa.string())]), "refused"),
        (STRUCT_A, pa.int8(), "refused"),
    ],
)
def test_how_columns_change(known: pa.DataType, wanted: pa.DataType, outcome: str) -> None:
    """New columns, parts and wider types come; another type is refused, with what to do."""
    there, new = fields_of(with_ids(known)), fields_of(with_ids(wanted))
    if outcome == "refused":
        with pytest.raises(UnsupportedError, match=r"cannot become .*drop it in the catalog"):
            missing_fields(there, new)
        return
    missing = missing_fields(there, new)
    assert missing == ([new[-1]] if outcome == "missing" else [])
    grown = with_fields(there, missing)
    assert missing_fields(grown, new) == missing_fields(grown, there) == []
    assert missing_fields(there[:-1], new) == [new[-1]]
    assert with_fields(there[:-1], [new[-1]])[-1] == new[-1]


def test_ids_of_all_parts() -> None:
    """Also of those within maps, lists and structs, so that the table gives none away."""
    inner = pa.map_(pa.string(), pa.list_(STRUCT_AB))
    found = ids_of(fields_of(with_ids(inner)))
    assert sorted(found) == [*range(1, 7), *range(101, 107)]
    assert [found[each] for each in (101, 103, 104, 106)] == ["map", "list", "struct", "int"]


def first(fields: tuple[Field, ...]) -> dict[str, Any]:
    """Return the first metadata of a table."""
    return first_metadata(
        url="file:///t", uuid="u", now_ms=5, app_id="c/l", place=("n", "clicks"), fields=fields
    )


def test_the_first_metadata_say_whose_table_it_is_and_where() -> None:
    """And keep the library from trying a commit again on top of another one."""
    found = first(fields_of(with_ids(pa.list_(pa.int8()))))
    properties = found["properties"]
    assert (properties[LOG], properties["dlog.namespace"]) == ("c/l", "n")
    assert properties["dlog.name"] == "clicks"
    assert found["last-column-id"] == 102
    require_properties(properties)
    for changed in ({}, {**properties, "commit.retry.num-retries": "4"}):
        with pytest.raises(TableError, match=r"property commit\.retry\.num-retries is"):
            require_properties(changed)


def snapshot(number: int, place: tuple[int, int] | None, *, by: str = "append") -> SnapshotSeen:
    """Return a snapshot of this log, or of another program."""
    summary = {"added-records": "5"} if place is None else summary_of("c/l", place, number)
    return SnapshotSeen(number, by, summary)


def test_the_position_is_that_of_the_newest_snapshot_of_the_log() -> None:
    """Also below others that only rewrote manifests, and by the tag if those before are gone."""
    assert newest_in([], None, "c/l") is None
    one, two = snapshot(1, (1, 4)), snapshot(2, (3, 7))
    assert newest_in([two, one], two, "c/l") is two
    assert newest_in([two, one], None, "c/l") is two
    rewritten = snapshot(3, None, by="replace")
    assert newest_in([rewritten, two, one], two, "c/l") is two
    assert newest_in([rewritten], two, "c/l") is two
    assert newest_in([rewritten], None, "c/l") is None
    assert position_of(two, "c/l") == (3, 7)
    assert (version_of(two), version_of(None)) == (2, 0)
    assert two.summary["dlog.end"] == "3:7:0"


def test_a_position_of_another_log_or_cluster_is_none() -> None:
    """Ids are compared, not names: a log that was made again has another id."""
    assert position_of(snapshot(1, (1, 4)), "c/l") == (1, 4)
    assert position_of(snapshot(1, (1, 4)), "c/other") is None
    for wrong in ("", "x", "-5", "²"):
        broken = SnapshotSeen(9, "append", {LOG: "c/l", POSITION: wrong})
        with pytest.raises(TableError, match=r"snapshot 9 of the table has the dlog\.position"):
            position_of(broken, "c/l")


def test_changes_of_another_program_are_refused() -> None:
    """It changed files, or went back to an older snapshot, as after an import of the table."""
    one, two = snapshot(1, (1, 4)), snapshot(2, (3, 7))
    for by in ("append", "overwrite", "delete"):
        with pytest.raises(TableError, match=rf"snapshot 3 of the table \({by}\) was not made by"):
            newest_in([snapshot(3, None, by=by), two], two, "c/l")
    with pytest.raises(TableError, match=r"up to 1:4:0, and had some up to 3:7:0"):
        newest_in([one], two, "c/l")


def test_files_that_dlog_did_not_add() -> None:
    """By their names, their folder, or because they say nothing of entries."""
    bounds = {2: (8).to_bytes(8, "little")}
    url = "file:///t/c/l"
    found = table_file(url, f"{url}/3/7-t-0-1.parquet", 5, 2, bounds)
    assert found == ("3/7-t-0-1.parquet", 5, (3, 9), 2)
    for path, known in (
        (f"{url}/data/1.parquet", bounds),
        ("file:///elsewhere/3/7-t-0-1.parquet", bounds),
        (f"{url}/3/7-t-0-1.parquet", {}),
        (f"{url}/3/7-t-0-1.parquet", None),
    ):
        with pytest.raises(TableError, match=r"which dlog did not add.*drop it in the catalog"):
            table_file(url, path, 5, 2, known)


def test_manifests_that_a_commit_merged_away() -> None:
    """By their numbers; those of other commits, and of other programs, are left."""
    commit, other = "0c579496-eb6b-4902-9853-98bfd9b811a3", "1c579496-eb6b-4902-9853-98bfd9b811a3"
    own = f"file:///t/metadata/snap-5-0-{commit}.avro"
    name = f"file:///t/metadata/{commit}-m%d.avro"
    elsewhere = f"file:///t/metadata/{other}-m7.avro"
    assert merged_away(own, {name % 2, elsewhere}) == [name % 0, name % 1]
    assert merged_away(own, {name % 0, name % 2}) == [name % 1]
    assert merged_away(own, {name % 0}) == merged_away(own, {elsewhere}) == []
    assert merged_away(own, {f"file:///t/metadata/{commit}-mx.avro"}) == []
    assert merged_away("file:///t/metadata/list.avro", {name % 2}) == []


def test_floats_have_no_bounds() -> None:
    """Parquet leaves NaN out of its bounds, and a reader may take that for greater than all."""
    fields = fields_of(with_ids(pa.struct([("a", pa.float64()), ("b", pa.int8())])))
    assert without_floats({1: b"a", 102: b"b", 103: b"c"}, fields) == {1: b"a", 103: b"c"}


def test_the_position_is_the_same_number_as_that_of_delta() -> None:
    """Anybody turns it into a DLSN."""
    assert summary_of("c/l", (3, 17), 1)[POSITION] == str(number_of((3, 17))) == str(3 * 2**32 + 17)
    assert ICEBERG.kind == "iceberg"
