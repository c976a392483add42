"""The schema of a log as it is stored, and how it may change: values without Arrow.

A typed log has a schema from its creation on.  Each change makes a version, whose number (from 1)
is in the header of each entry written with it.  No version is ever changed or removed, so every
entry is decoded by its own version, and shown by the latest one.

The latest version holds every value of an older one.  A change may add columns, which must allow
nulls because older records have null there, and widen types:

- int8, int16, int32, int64, each to a later one; also uint8 to uint64, halffloat to double
- a decimal to more digits at the same scale
- null, of a column that held nothing yet, to any type
- a column that cannot be null to one that can
- in the same way the parts of lists, structs and values of maps; structs may get more fields

Any other change is refused, and the error shows both schemas.  Types are spelled as in Arrow.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from dlcore.base.errors import ConfigurationError, EndOfStreamError, SchemaMismatchError
from dlcore.metadata.stored import LAYOUT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa


METADATA_COLUMNS = ("_log", "_dlsn", "_txid", "_sequence_id", "_timestamp")
"""The metadata of each record, beside its columns, which cannot have these names."""
VERSIONS_MAX = 100
SCHEMA_BYTES_MAX = 500_000
"""Size of all versions together: they are one node of the metadata store."""

LIST, STRUCT, MAP, NULL = "list", "struct", "map", "null"
_CHAINS = (
    ("int8", "int16", "int32", "int64"),
    ("uint8", "uint16", "uint32", "uint64"),
    ("halffloat", "float", "double"),
)
_DECIMAL = re.compile(r"decimal(?:128|256)\((\d+), (-?\d+)\)")
_DIGITS_OF_128_BITS = 38


class Column(msgspec.Struct, frozen=True, omit_defaults=True):
    """A column, or a part of a nested type.

    A list has one part in `fields`, a map two, a struct any number.  The key of a map cannot be
    null, whatever its `nullable` says; for all others `nullable` counts.
    """

    name: str
    type: str
    fields: tuple[Column, ...] = ()
    nullable: bool = True

    def __str__(self) -> str:
        return f"{self.name} {describe_type(self)}"

    @property
    def has_required(self) -> bool:
        """Whether some part of it cannot be null."""
        return any(not each.nullable or each.has_required for each in self.fields)


class LogSchema(msgspec.Struct, frozen=True, kw_only=True):
    """All versions of a log's schema: entries of version n have the columns `versions[n - 1]`."""

    layout: int = LAYOUT
    versions: tuple[tuple[Column, ...], ...]

    @property
    def latest_id(self) -> int:
        """The number of the version that is written now."""
        return len(self.versions)

    @property
    def latest(self) -> tuple[Column, ...]:
        """The columns of the latest version."""
        return self.versions[-1]

    @classmethod
    def first(cls, columns: Sequence[Column]) -> LogSchema:
        """Return the schema of a new log.

        Raises:
            ConfigurationError: a log cannot have these columns.
        """
        check_columns(columns)
        return _bounded(cls(versions=(tuple(columns),)))

    def evolved(self, log: str, columns: Sequence[Column]) -> LogSchema:
        """Return the schema with a new version of these columns; itself if they are the latest.

        Raises:
            SchemaMismatchError: a column is missing, or has a narrower type, or another one.
            ConfigurationError: a log cannot have these columns.
        """
        after = self.merged(log, columns)
        wanted = {column.name: column for column in columns}
        for column in after.latest:
            given = wanted.get(column.name)
            if given is None:
                raise _refused(log, self.latest, columns, f"column {column.name!r} is missing")
            if given == column:
                continue
            why = f"{given} would hold less than {column} does"
            if all(known.name != column.name for known in self.latest):
                why = f"{given} is new, and null in older records: it needs to be {column}"
            raise _refused(log, self.latest, columns, why)
        return after

    def merged(self, log: str, columns: Sequence[Column]) -> LogSchema:
        """Return the schema with a new version that holds its own values and those of `columns`.

        Raises: the same errors as `evolved`, but not for missing columns or narrower types.
        """
        check_columns(columns)
        latest = merge_columns(self.latest, columns)
        if latest is None:
            known = {column.name: column for column in self.latest}
            clash = next(
                f"{known[column.name]} cannot become {column}"
                for column in columns
                if column.name in known and join_types(known[column.name], column) is None
            )
            raise _refused(log, self.latest, columns, clash)
        if latest == self.latest:
            return self
        if self.latest_id == VERSIONS_MAX:
            raise ConfigurationError(
                f"log {log!r}: its schema has changed {VERSIONS_MAX - 1} times, the limit: write "
                "to a new log"
            )
        return _bounded(LogSchema(versions=(*self.versions, latest)))


def _bounded(schema: LogSchema) -> LogSchema:
    size = len(msgspec.json.encode(schema))
    if size > SCHEMA_BYTES_MAX:
        raise ConfigurationError(
            f"a schema of {len(schema.latest)} columns, in {schema.latest_id} versions, takes "
            f"{size} bytes, the limit is {SCHEMA_BYTES_MAX}"
        )
    return schema


def _refused(
    log: str, known: Sequence[Column], wanted: Sequence[Column], why: str
) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"log {log!r}: {why}; columns may be added, and types may get wider. The log has "
        f"({describe(known)}), the new schema has ({describe(wanted)})"
    )


def check_columns(columns: Sequence[Column]) -> None:
    """Raise `ConfigurationError` if a log cannot have these columns."""
    if not columns:
        raise ConfigurationError("a schema has no columns: expected one at least")
    for column in columns:
        if column.name.lower() in METADATA_COLUMNS:
            raise ConfigurationError(
                f"a column cannot be called {column.name!r}: {', '.join(METADATA_COLUMNS)} are "
                "columns that a log adds itself; rename the column"
            )
    _check_names(columns, "the schema")


def _check_names(columns: Sequence[Column], where: str) -> None:
    seen: set[str] = set()
    for column in columns:
        if column.type == NULL and not column.nullable:
            raise ConfigurationError(
                f"{where}: {column} could hold no value: give it a type, or leave not null out"
            )
        if not column.name or column.name in seen:
            raise ConfigurationError(
                f"{where} has the name {column.name!r} {'twice' if column.name else 'for a column'}"
            )
        seen.add(column.name)
        if column.fields:
            _check_names(column.fields, f"column {column.name!r}")


def merge_columns(known: Sequence[Column], columns: Sequence[Column]) -> tuple[Column, ...] | None:
    """Return columns that hold the values of both, new ones last; None if some cannot."""
    given = {column.name: column for column in columns}
    merged: list[Column] = []
    for column in known:
        other = given.pop(column.name, column)
        joined = join_types(column, other)
        if joined is None:
            return None
        merged.append(joined)
    return (*merged, *(replace(column, nullable=True) for column in given.values()))


def as_required(known: Sequence[Column], columns: Sequence[Column]) -> tuple[Column, ...]:
    """Return columns, nullable only if they are so in `known`, or if they are new."""
    found = []
    for column in columns:
        like = next((each for each in known if each.name == column.name), None)
        if like is not None and column.type != NULL:
            fields = column.fields
            if like.type == column.type:
                fields = as_required(like.fields, fields)
            column = replace(column, fields=fields, nullable=like.nullable)
        found.append(column)
    return tuple(found)


def loosened(known: Sequence[Column], others: Sequence[Column]) -> tuple[Column, ...]:
    """Return `known` with nulls allowed in the columns that `others` lack."""
    given = {column.name: column for column in others}
    found = []
    for column in known:
        other = given.get(column.name)
        if other is None:
            column = replace(column, nullable=True)
        elif column.type == other.type and column.fields:
            column = replace(column, fields=loosened(column.fields, other.fields))
        found.append(column)
    return tuple(found)


def join_types(known: Column, other: Column) -> Column | None:
    """Return `known` with the narrowest type for the values of both; None if there is none."""
    nullable = known.nullable or other.nullable
    if known.type == other.type and known.fields == other.fields:
        return known if known.nullable is nullable else replace(known, nullable=True)
    if NULL in (known.type, other.type):
        wider = other if known.type == NULL else known
        return Column(known.name, wider.type, wider.fields)
    if known.type != other.type:
        leaf = _join_leaves(known.type, other.type)
        return None if leaf is None else Column(known.name, leaf, nullable=nullable)
    if known.type == STRUCT:
        fields = merge_columns(known.fields, other.fields)
        return None if fields is None else Column(known.name, STRUCT, fields, nullable)
    # The parts of a list are its element; of a map its key, which must not change, and its value.
    if known.fields[:-1] != other.fields[:-1]:
        return None
    last = join_types(known.fields[-1], other.fields[-1])
    if last is None:
        return None
    return Column(known.name, known.type, (*known.fields[:-1], last), nullable)


def _join_leaves(known: str, other: str) -> str | None:
    for chain in _CHAINS:
        if known in chain and other in chain:
            return max(known, other, key=chain.index)
    first, second = _DECIMAL.fullmatch(known), _DECIMAL.fullmatch(other)
    if first is None or second is None or first[2] != second[2]:
        return None
    digits = max(int(first[1]), int(second[1]))
    return f"decimal{128 if digits <= _DIGITS_OF_128_BITS else 256}({digits}, {first[2]})"


def describe(columns: Sequence[Column]) -> str:
    """Return columns as text for people."""
    return ", ".join(map(str, columns))


def describe_type(column: Column) -> str:
    """Return a column's type as text for people."""
    kind = column.type
    if column.type == STRUCT:
        kind = f"struct<{describe(column.fields)}>"
    elif column.fields:
        kind = f"{column.type}<{', '.join(describe_type(field) for field in column.fields)}>"
    return kind if column.nullable else f"{kind} not null"


class Target(NamedTuple):
    """A log that may be written to."""

    schema: pa.Schema | None
    """Its columns; None for a byte log."""
    sealed: bool


def schemas_to_write(targets: Mapping[str, Target]) -> dict[str, pa.Schema | None]:
    """Return the columns of each log; raise `EndOfStreamError` if one of them is sealed."""
    for name, target in targets.items():
        if target.sealed:
            raise EndOfStreamError(f"log {name!r} is sealed: no record can follow")
    return {name: target.schema for name, target in targets.items()}
