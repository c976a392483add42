"""The schema of a typed log: which changes it takes, and which it refuses.

Goal: what an older version held the newer one holds, whatever the types.  Method: drawn columns and
changes, beside the Arrow casts that they allow.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from dlcore.base.errors import ConfigurationError, SchemaMismatchError
from dlcore.log.typed.schema import (
    VERSIONS_MAX,
    Column,
    LogSchema,
    describe,
    join_types,
    loosened,
    merge_columns,
)
from dlcore.metadata.stored import decode, encode

LEAVES = ["int8", "int64", "uint8", "uint32", "float", "double", "string", "null", "bool"]
LEAVES += ["decimal128(5, 2)", "decimal128(38, 2)", "decimal256(60, 2)", "decimal128(9, 3)"]


def column(name: str) -> st.SearchStrategy[Column]:
    """Return a strategy for columns of a name, nested to some depth; some cannot be null."""

    def leaf(kind: str, is_nullable: bool) -> Column:
        return Column(name, kind, nullable=is_nullable or kind == "null")

    return st.recursive(
        st.builds(leaf, st.sampled_from(LEAVES), st.booleans()),
        lambda inner: st.one_of(
            st.builds(
                lambda each, is_nullable: Column(
                    name, "list", (named(each, "item"),), nullable=is_nullable
                ),
                inner,
                st.booleans(),
            ),
            inner.map(
                lambda each: Column(name, "map", (Column("key", "string"), named(each, "value")))
            ),
            st.lists(inner, min_size=1, max_size=3).map(
                lambda fields: Column(
                    name, "struct", tuple(named(each, f"f{n}") for n, each in enumerate(fields))
                )
            ),
        ),
        max_leaves=4,
    )


def named(each: Column, name: str) -> Column:
    """Return a column under another name."""
    return replace(each, name=name)


@given(column("a"), column("a"))
def test_a_join_holds_both(first: Column, second: Column) -> None:
    """There is one from both sides or from none, and joining again adds nothing."""
    joined = join_types(first, second)
    other = join_types(second, first)
    assert (joined is None) == (other is None)
    if joined is not None:
        assert joined.name == "a"
        assert join_types(joined, first) == joined
        assert join_types(joined, second) == joined
    assert join_types(first, first) is first


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.data()), min_size=1, max_size=3))
def test_merging_goes_one_way(drawn: list[tuple[str, st.DataObject]]) -> None:
    """Each version takes everything of those before it, and is itself what it is merged with."""
    schema = LogSchema.first([Column("a", "int8")])
    for name, data in drawn:
        wanted = [data.draw(column(name))]
        try:
            after = schema.merged("log", wanted)
        except SchemaMismatchError:
            assert merge_columns(schema.latest, wanted) is None
            continue
        assert after.versions[: schema.latest_id] == schema.versions
        assert after.merged("log", schema.latest) is after
        assert after.evolved("log", after.latest) is after
        if after is not schema:
            with pytest.raises(SchemaMismatchError):
                after.evolved("log", schema.latest)
        schema = after
    assert decode(LogSchema, encode(schema), source="/x") == schema


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Column("a", "int32"), Column("a", "int64")),
        (Column("a", "uint8"), Column("a", "uint64")),
        (Column("a", "halffloat"), Column("a", "double")),
        (Column("a", "decimal128(10, 2)"), Column("a", "decimal128(20, 2)")),
        (Column("a", "decimal128(38, 2)"), Column("a", "decimal256(39, 2)")),
        (Column("a", "null"), Column("a", "list", (Column("item", "string"),))),
        (Column("a", "int8", nullable=False), Column("a", "int8")),
        (Column("a", "int8", nullable=False), Column("a", "int64", nullable=False)),
        (
            Column("a", "list", (Column("item", "int8", nullable=False),), nullable=False),
            Column("a", "list", (Column("item", "int8"),), nullable=False),
        ),
        (
            Column("a", "list", (Column("item", "int8"),)),
            Column("a", "list", (Column("item", "int16"),)),
        ),
        (
            Column("a", "struct", (Column("x", "int8"),)),
            Column("a", "struct", (Column("x", "int32"), Column("y", "string"))),
        ),
    ],
)
def test_changes_that_are_allowed(before: Column, after: Column) -> None:
    """The list in the module's docstring, one by one; never back."""
    schema = LogSchema.first([before]).evolved("log", [after])
    assert schema.versions == ((before,), (after,))
    with pytest.raises(SchemaMismatchError, match="would hold less than"):
        schema.evolved("log", [before])
    assert schema.merged("log", [before]) is schema


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ([Column("a", "int64")], "column 'b' is missing"),
        ([Column("a", "int32"), Column("b", "string")], "a int32 would hold less than a int64"),
        (
            [Column("a", "int64", nullable=False), Column("b", "string")],
            "a int64 not null would hold less than a int64",
        ),
        (
            [Column("a", "int64"), Column("b", "string"), Column("c", "int8", nullable=False)],
            "c int8 not null is new, and null in older records: it needs to be c int8",
        ),
        ([Column("a", "double"), Column("b", "string")], "a int64 cannot become a double"),
        ([Column("a", "int64"), Column("b", "binary")], "b string cannot become b binary"),
        (
            [Column("a", "map", (Column("key", "string"), Column("value", "int8")))],
            "a int64 cannot become a map<string, int8>",
        ),
    ],
)
def test_changes_that_are_refused(wanted: list[Column], why: str) -> None:
    """Both schemas are shown."""
    schema = LogSchema.first([Column("a", "int64"), Column("b", "string")])
    with pytest.raises(SchemaMismatchError, match=re.escape(why)) as raised:
        schema.evolved("trips", wanted)
    assert "log 'trips'" in str(raised.value)
    assert "(a int64, b string)" in str(raised.value)
    assert f"({describe(wanted)})" in str(raised.value)


def test_keys_of_maps_and_scales_of_decimals_stay() -> None:
    """A key that changed its type would be another key; other scales are other values."""

    def of(key: str, value: str) -> Column:
        return Column("a", "map", (Column("key", key), Column("value", value)))

    assert join_types(of("int8", "int8"), of("int16", "int8")) is None
    assert join_types(of("int8", "int8"), of("int8", "string")) is None
    assert join_types(of("int8", "int8"), of("int8", "int16")) == of("int8", "int16")
    assert join_types(Column("a", "decimal128(5, 2)"), Column("a", "decimal128(5, 3)")) is None
    assert join_types(Column("a", "int8"), Column("a", "uint8")) is None


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ([], "a schema has no columns"),
        ([Column("_TxId", "int64")], "a column cannot be called '_TxId'"),
        ([Column("a", "int8"), Column("a", "int8")], "the schema has the name 'a' twice"),
        ([Column("", "int8")], "the schema has the name '' for a column"),
        (
            [Column("s", "struct", (Column("x", "int8"), Column("x", "int8")))],
            "column 's' has the name 'x' twice",
        ),
        ([Column("a", "null", nullable=False)], "a null not null could hold no value"),
        ([Column(f"{n:0600}", "int8") for n in range(1000)], "takes 6.* bytes, the limit is"),
    ],
)
def test_types_that_no_log_can_have(columns: list[Column], why: str) -> None:
    """It is refused when the log is created."""
    with pytest.raises(ConfigurationError, match=why):
        LogSchema.first(columns)


def test_versions_are_bounded() -> None:
    """They are one node of the metadata store."""
    schema = LogSchema.first([Column("c", "int8")])
    columns = [Column("c", "int8")]
    for number in range(VERSIONS_MAX - 1):
        columns.append(Column(f"c{number}", "int8"))
        schema = schema.evolved("log", columns)
    with pytest.raises(ConfigurationError, match="has changed 99 times, the limit"):
        schema.evolved("log", [*columns, Column("more", "int8")])


def test_columns_are_read_by_people() -> None:
    """Nested types say what they are made of."""
    fields = (Column("x", "int8"), Column("tags", "list", (Column("item", "string"),)))
    assert describe([Column("s", "struct", fields), Column("t", "timestamp[us, tz=UTC]")]) == (
        "s struct<x int8, tags list<string>>, t timestamp[us, tz=UTC]"
    )


def test_columns_that_a_merge_adds_can_be_null() -> None:
    """Older records have nulls there; and what one side may leave out both may."""
    known = Column("s", "struct", (Column("x", "int8", nullable=False),), nullable=False)
    more = Column("s", "struct", (*known.fields, Column("y", "int8", nullable=False)), False)
    schema = LogSchema.first([known]).merged("log", [more, Column("b", "int8", nullable=False)])
    assert describe(schema.latest) == "s struct<x int8 not null, y int8> not null, b int8"
    assert loosened(schema.latest, schema.latest) == schema.latest
    assert describe(loosened([known, more], [Column("s", "struct", (Column("z", "int8"),))])) == (
        "s struct<x int8> not null, s struct<x int8, y int8> not null"
    )
    assert describe(loosened([known], [Column("b", "int8")])) == "s struct<x int8 not null>"
