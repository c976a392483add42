"""The form of a log's Iceberg table: its metadata, its columns, and its position.

A position is in the summary of each snapshot that dlog makes, with the ids of the cluster and of
the log.  The tag ``dlog`` marks the newest one: no program that expires snapshots removes one that
has a tag, whatever its age.  Nothing here does I/O.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from dlcore.base.errors import TableError, UnsupportedError
from dlcore.log.cold.parquet import POSITIONS
from dlcore.log.cold.table_format import (
    Field,
    Place,
    TableFile,
    TableForm,
    boundary_of,
    description_of,
    file_of,
    number_of,
    place_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

FOLDER = "metadata"
FIRST_METADATA = "00000-dlog.metadata.json"
"""The table's first metadata, which is not deleted: it says where the table is in the catalog."""
REGISTERED_METADATA = "00000-registered.metadata.json"
"""A copy, which is registered: catalogs delete metadata that newer ones have taken the place of."""
METADATA_SUFFIX = ".metadata.json"
TAG = "dlog"
LOG, POSITION, END, VERSION = "dlog.log", "dlog.position", "dlog.end", "dlog.version"
NAMESPACE, NAME = "dlog.namespace", "dlog.name"
ANCESTORS_MAX = 1_000
SNAPSHOTS_KEPT = 200
"""Each commit writes the table's metadata, which has all snapshots, 700 bytes for each."""

# Programs other than dlog may only rewrite manifests, which leaves all files as they are.
_HARMLESS = "replace"
_REQUIRED = {
    # After a refused commit the library would go on from the newer snapshot, and add files again.
    "commit.retry.num-retries": "0",
}
_PROPERTIES = {
    **_REQUIRED,
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "20",
    # Each twentieth commit writes the newest files' manifest again, which is smaller than this.
    "commit.manifest.target-size-bytes": str(2**18),
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    # For maintenance by other programs: it keeps as many snapshots as dlog, and all files.
    "history.expire.min-snapshots-to-keep": str(SNAPSHOTS_KEPT),
    "gc.enabled": "false",
}
_ARROW_ID = b"PARQUET:field_id"
_ENTRY_ID = POSITIONS.get_field_index("_entry") + 1
_PLAIN = {
    "bool": "boolean",
    "int8": "int",
    "int16": "int",
    "int32": "int",
    "int64": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date32[day]": "date",
    "time64[us]": "time",
}
_GROWS = {("int", "long"), ("float", "double")}
_LIST = re.compile(r"(?P<folder>.*/)snap-\d+-\d+-(?P<commit>[0-9a-f-]{36})\.avro")
_NOT_IN_PATHS = re.compile(r"[/\\%;]")
_DECIMAL = re.compile(r"decimal\((\d+), ?(\d+)\)")


class SnapshotSeen(NamedTuple):
    """A snapshot's number, the operation that made it, and the properties of its summary."""

    snapshot_id: int
    operation: str
    summary: Mapping[str, str]


# Columns


def fields_of(columns: pa.Schema) -> tuple[Field, ...]:
    """Return the fields of a table: positions, then a log's own columns, with their field ids.

    Own columns allow nulls, which costs nothing and never needs to change.

    Raises:
        UnsupportedError: Iceberg has no such column.
    """
    return (
        *(_field(each) for each in POSITIONS),
        *({**_field(each), "required": False} for each in columns),
    )


def _field(field: pa.Field) -> Field:
    return {
        "id": _id(field),
        "name": field.name,
        "required": not field.nullable,
        "type": _type_of(field),
    }


def _id(field: pa.Field) -> int:
    return int(field.metadata[_ARROW_ID])


def _type_of(field: pa.Field) -> str | Field:
    kind = field.type
    types = pa.types
    if types.is_struct(kind):
        return {"type": "struct", "fields": [{**_field(each), "required": False} for each in kind]}
    if types.is_list(kind):
        return {
            "type": "list",
            "element-id": _id(kind.value_field),
            "element": _type_of(kind.value_field),
            "element-required": False,
        }
    if types.is_map(kind):
        return {
            "type": "map",
            "key-id": _id(kind.key_field),
            "key": _type_of(kind.key_field),
            "value-id": _id(kind.item_field),
            "value": _type_of(kind.item_field),
            "value-required": False,
        }
    if types.is_timestamp(kind) and kind.unit != "ns" and kind.tz in (None, "UTC"):
        # pyiceberg does not read objects whose columns have another zone.
        return "timestamp" if kind.tz is None else "timestamptz"
    if types.is_decimal128(kind) and kind.scale >= 0:
        return f"decimal({kind.precision}, {kind.scale})"
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind):
        return f"fixed[{kind.byte_width}]"
    if str(kind) not in _PLAIN:
        raise UnsupportedError(
            f"column {field.name!r} has the type {kind}, which Iceberg tables do not have; "
            "dlog log settings --unset table, or a log with another type"
        )
    return _PLAIN[str(kind)]


def missing_fields(known: Sequence[Field], wanted: Sequence[Field]) -> list[Field]:
    """Return the wanted fields that a table lacks whole, in part, or in the wider type.

    Raises:
        UnsupportedError: it has one of another type, which Iceberg does not change.
    """
    by_id = {each["id"]: each for each in known}
    missing = []
    for field in wanted:
        there = by_id.get(field["id"])
        if there is None or merged(there["name"], there["type"], field["type"]) != there["type"]:
            missing.append(field)
    return missing


def with_fields(known: Sequence[Field], missing: Sequence[Field]) -> list[Field]:
    """Return the fields of a table with missing ones; what the table has beside them stays."""
    wanted = {each["id"]: each for each in missing}
    fields = []
    for each in known:
        new = wanted.pop(each["id"], None)
        kind = each["type"] if new is None else merged(each["name"], each["type"], new["type"])
        fields.append({**each, "type": kind})
    return [*fields, *wanted.values()]


def merged(name: str, known: str | Field, wanted: str | Field) -> str | Field:
    """Return the type that has all values of a known one and of a wanted one.

    Raises:
        UnsupportedError: there is none that the known one can become.
    """
    if isinstance(known, str) or isinstance(wanted, str):
        if known == wanted or _fits(wanted, known):
            return known
        if _fits(known, wanted):
            return wanted
    elif known["type"] == wanted["type"]:
        if known["type"] == "struct":
            return {**known, "fields": with_fields(known["fields"], wanted["fields"])}
        parts = ("element",) if known["type"] == "list" else ("key", "value")
        return {**known, **{each: merged(name, known[each], wanted[each]) for each in parts}}
    raise UnsupportedError(
        f"column {name!r} of the table has the type {known}, which cannot become {wanted}; to have "
        f"the table made again from the log's beginning, {ICEBERG.remake}"
    )


def _fits(small: str | Field, large: str | Field) -> bool:
    """Return whether the values of a plain type are among those of another one, for Iceberg."""
    if not isinstance(small, str) or not isinstance(large, str):
        return False
    if (small, large) in _GROWS:
        return True
    one, other = _DECIMAL.fullmatch(small), _DECIMAL.fullmatch(large)
    if one is None or other is None:
        return False
    return one[2] == other[2] and int(one[1]) <= int(other[1])


def ids_of(fields: Iterable[Field]) -> dict[int, str]:
    """Return the ids of all fields and of all their parts, with the type of each."""
    found: dict[int, str] = {}
    for field in fields:
        _note(found, field["id"], field["type"])
    return found


def _note(found: dict[int, str], number: int, kind: str | Field) -> None:
    if isinstance(kind, str):
        found[number] = kind
        return
    found[number] = kind["type"]
    if kind["type"] == "struct":
        found.update(ids_of(kind["fields"]))
    for part in ("element", "key", "value"):
        if part in kind:
            _note(found, kind[f"{part}-id"], kind[part])


# The table


def first_metadata(
    *,
    url: str,
    uuid: str,
    now_ms: int,
    app_id: str,
    place: tuple[str, str],
    fields: Sequence[Field],
) -> dict[str, Any]:
    """Return the metadata of a table without a snapshot, in version 2 of the format.

    Args:
        url: the folder of the table.
        uuid: its identity, which no other table has.
        now_ms: the time.
        app_id: the log.
        place: its namespace and name in the catalog.
        fields: its columns, with the ids that they have in the files.
    """
    namespace, name = place
    return {
        "format-version": 2,
        "table-uuid": uuid,
        "location": url,
        "last-sequence-number": 0,
        "last-updated-ms": now_ms,
        "last-column-id": max(ids_of(fields)),
        "current-schema-id": 0,
        "schemas": [{"type": "struct", "schema-id": 0, "fields": list(fields)}],
        "default-spec-id": 0,
        "partition-specs": [{"spec-id": 0, "fields": []}],
        "last-partition-id": 999,
        "default-sort-order-id": 0,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "properties": {
            **_PROPERTIES,
            "comment": description_of(app_id),
            LOG: app_id,
            NAMESPACE: namespace,
            NAME: name,
        },
        "snapshots": [],
        "refs": {},
        "snapshot-log": [],
        "metadata-log": [],
    }


def table_name(log_name: str) -> str:
    """Return the name of a log's table: without what servers refuse within a path, encoded too."""
    return _NOT_IN_PATHS.sub("_", log_name)


def require_properties(properties: Mapping[str, str]) -> None:
    """Require that a table's properties keep commits from being made twice.

    Raises:
        TableError: another program changed them.
    """
    for name, value in _REQUIRED.items():
        if properties.get(name) != value:
            raise TableError(
                f"the table's property {name} is {properties.get(name)!r}, and must be {value!r}: "
                "another program changed it; to do: set it back"
            )


def summary_of(app_id: str, position: Place, version: int) -> dict[str, str]:
    """Return what a snapshot says of the log: its end is the position for people.

    The version counts dlog's commits, one of which may make two snapshots.
    """
    return {
        LOG: app_id,
        POSITION: str(number_of(position)),
        END: str(boundary_of(position)),
        VERSION: str(version),
    }


def position_of(snapshot: SnapshotSeen, app_id: str) -> Place | None:
    """Return the position that a snapshot has of a log; None if it has none.

    Raises:
        TableError: it is no number.
    """
    if snapshot.summary.get(LOG) != app_id:
        return None
    return place_of(_number_in(snapshot, POSITION))


def version_of(snapshot: SnapshotSeen | None) -> int:
    """Return how many commits dlog had made when it made a snapshot; 0 for none.

    Raises:
        TableError: it is no number.
    """
    return 0 if snapshot is None else _number_in(snapshot, VERSION)


def _number_in(snapshot: SnapshotSeen, name: str) -> int:
    number = snapshot.summary.get(name) or ""
    if not number.isascii() or not number.isdigit():
        raise TableError(
            f"snapshot {snapshot.snapshot_id} of the table has the {name} {number!r}, expected a "
            f"number; to do: {ICEBERG.remake}, and it is made again"
        )
    return int(number)


def newest_in(
    ancestors: Iterable[SnapshotSeen], tagged: SnapshotSeen | None, app_id: str
) -> SnapshotSeen | None:
    """Return the newest snapshot of a table that has a position; None if none has one.

    Args:
        ancestors: the current snapshot and those before it, newest first, `ANCESTORS_MAX` at most.
        tagged: the one with the tag.
        app_id: the log.

    Raises:
        TableError: another program changed the files, or went back to an older snapshot.
    """
    marked = None if tagged is None else position_of(tagged, app_id)
    for each in ancestors:
        found = position_of(each, app_id)
        if found is None and each.operation != _HARMLESS:
            raise TableError(
                f"snapshot {each.snapshot_id} of the table ({each.operation}) was not made by "
                "dlog: another program changed it; to do: go back to the snapshot with the tag "
                f"{TAG}, or keep what it wrote elsewhere, then {ICEBERG.remake}, and the table is "
                "made again"
            )
        if found is not None:
            if marked is not None and marked > found:
                raise TableError(
                    f"the table has records up to {boundary_of(found)}, and had some up to "
                    f"{boundary_of(marked)} before: another program went back to an older "
                    f"snapshot; to do: go to the snapshot with the tag {TAG}"
                )
            return each
    return None if marked is None else tagged


def table_file(
    url: str, path: str, size_bytes: int, records: int, upper_bounds: Mapping[int, bytes] | None
) -> TableFile:
    """Return a file of the table; `upper_bounds` are those of its columns, by their ids.

    Raises:
        TableError: it is not one that dlog made.
    """
    bound = (upper_bounds or {}).get(_ENTRY_ID)
    last = None if bound is None else int.from_bytes(bound, "little", signed=True)
    return file_of(path.removeprefix(f"{url}/"), size_bytes, last, records, ICEBERG)


def merged_away(manifest_list: str, manifests: Collection[str]) -> list[str]:
    """Return the manifests that a commit wrote and then merged into others.

    No snapshot has them, and the library leaves them.  All that a commit writes has its number.

    Args:
        manifest_list: the URL of the snapshot's list.
        manifests: those of the manifests that are in it.
    """
    found = _LIST.fullmatch(manifest_list)
    if found is None:
        return []
    start = f"{found['folder']}{found['commit']}-m"
    last = max((int(n) for each in manifests if (n := _number(each, start))), default=0)
    return [name for n in range(last) if (name := f"{start}{n}.avro") not in manifests]


def _number(manifest: str, start: str) -> str:
    """Return the number of a manifest of the commit whose names begin so, or nothing."""
    number = manifest.removeprefix(start).removesuffix(".avro")
    return number if manifest.startswith(start) and number.isdigit() else ""


def without_floats(bounds: Mapping[int, bytes], fields: Iterable[Field]) -> dict[int, bytes]:
    """Return the bounds of columns but for floats: Parquet leaves NaN out, readers may not."""
    floats = {number for number, kind in ids_of(fields).items() if kind in ("float", "double")}
    return {number: bound for number, bound in bounds.items() if number not in floats}


ICEBERG = TableForm(
    kind="iceberg",
    folder=FOLDER,
    remake="drop it in the catalog and delete its folder metadata",
    away="rename it in the catalog and move its folder metadata away",
    fields_of=fields_of,
    missing_fields=missing_fields,
)
"""Iceberg, by the library pyiceberg."""
