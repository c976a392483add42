"""Columns that cannot be null: a null is refused, and the schema of readers promises it.

Goal: no null is acknowledged where the schema says that there is none, however deep it lies and by
whichever way it comes.  Method: batches with one null each, by every way into a log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dlcore.api.schemas import merge_schemas, schema_from_text
from dlcore.base.errors import ConfigurationError, SchemaMismatchError
from dlcore.base.records import EntryPlace
from dlcore.log.entries.batches import typed_read_batch
from dlcore.log.reading.ranges import RangeView
from dlcore.log.reading.scan_driver import scan_range
from dlcore.log.typed.arrow import columns_of, schema_of
from dlcore.log.typed.schema import Column, LogSchema, as_required
from dlcore.metadata.stored import decode, encode
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.memory_namespace import memory_cluster

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace

ORDERS = schema_from_text(
    "id int32 not null, note string, lines list<struct<sku string not null, count int8> not null>, "
    "prices map<string, double not null>, buyer struct<name string not null, town string>"
)
LOOSE = schema_from_text(
    "id int32, note string, lines list<struct<sku string, count int8>>, "
    "prices map<string, double>, buyer struct<name string, town string>"
)
GOOD: dict[str, Any] = {
    "id": 1,
    "note": None,
    "lines": [{"sku": "a", "count": None}],
    "prices": [("a", 0.5)],
    "buyer": {"name": "n", "town": None},
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "column": ({"id": None}, "column id is null"),
    "element": ({"lines": [{"sku": "a"}, None]}, "column lines.item is null"),
    "field": ({"lines": [{"sku": "a"}, {"sku": None}]}, "column lines.item.sku is null"),
    "value": ({"prices": [("a", 1.0), ("b", None)]}, "column prices.value is null"),
    "struct": ({"buyer": {"name": None}}, "column buyer.name is null"),
}


def rows_of(*changes: dict[str, Any], schema: pa.Schema = LOOSE) -> pa.RecordBatch:
    """Return good rows with these changes."""
    return pa.RecordBatch.from_pylist([GOOD | change for change in changes], schema=schema)


def on_orders(body: Callable[[DirectNamespace, DirectLog], Awaitable[None]]) -> None:
    """Run `body` with the typed log "orders"."""

    async def run() -> None:
        async with memory_cluster() as cluster:
            namespace = await cluster.open("a")
            await namespace.create_log("orders", schema=ORDERS)
            await body(namespace, await namespace.open_log("orders"))

    run_in_own_time(run())


async def by_batch(namespace: DirectNamespace, rows: pa.RecordBatch) -> None:
    """Write by the call that waits for nothing."""
    async with await (await namespace.open_log("orders")).open_writer() as writer:
        await writer.write_batch(rows)


async def by_submitted_batch(namespace: DirectNamespace, rows: pa.RecordBatch) -> None:
    """Write by the call that waits for room."""
    async with await (await namespace.open_log("orders")).open_writer() as writer:
        await writer.submit_batch(rows)
        await writer.commit()


async def by_table(namespace: DirectNamespace, rows: Any) -> None:
    """Write a table, or a frame."""
    async with await (await namespace.open_log("orders")).open_writer() as writer:
        await writer.submit_table(pa.table(rows) if isinstance(rows, pa.RecordBatch) else rows)
        await writer.commit()


async def by_append(namespace: DirectNamespace, rows: pa.RecordBatch) -> None:
    """Write by an atomic append."""
    async with await namespace.begin_append("job", 1) as append:
        await append.write_batch("orders", rows)
        await append.commit()


WAYS = [by_batch, by_submitted_batch, by_table, by_append]


@pytest.mark.parametrize("way", WAYS)
def test_a_null_is_refused(
    way: Callable[[DirectNamespace, pa.RecordBatch], Awaitable[None]],
) -> None:
    """Nothing of its batch is written; the writer, and the next one, goes on."""

    async def body(namespace: DirectNamespace, log: DirectLog) -> None:
        for change, reason in BAD.values():
            with pytest.raises(SchemaMismatchError, match=reason):
                await way(namespace, rows_of({}, {"id": 2}, change))
        with pytest.raises(SchemaMismatchError, match="column id int32 not null is missing"):
            await way(namespace, rows_of({}).drop_columns(["id"]))
        await way(namespace, rows_of({}, {"lines": None, "prices": None, "buyer": None}))
        assert (await (await log.read()).to_arrow()).num_rows == 2

    on_orders(body)


def test_values_cut_off_or_below_a_null_do_not_count() -> None:
    """Only the rows of a slice count, and no field of a null struct, however it is spelled."""

    async def body(namespace: DirectNamespace, log: DirectLog) -> None:
        changes = [change for change, _ in BAD.values()]
        await by_batch(namespace, rows_of(*changes, {}, {"id": 7}, *changes).slice(5, 2))
        buyers = pa.StructArray.from_arrays(
            [pa.array([None, "n"]), pa.array(["t", "t"])],
            names=["name", "town"],
            mask=pa.array([True, False]),
        )
        await by_batch(namespace, pa.record_batch({"id": pa.array([3, 4]), "buyer": buyers}))
        coded = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array([5, None]))
        with pytest.raises(SchemaMismatchError, match="column id is null"):
            await by_batch(namespace, pa.record_batch({"id": coded}))
        await by_batch(namespace, pa.record_batch({"id": coded.slice(0, 1)}))
        large = pa.array([[{"sku": "a"}]], pa.large_list(ORDERS.field("lines").type.value_type))
        await by_batch(namespace, pa.record_batch({"id": pa.array([6]), "lines": large}))
        assert (await (await log.read()).to_arrow())["id"].to_pylist() == [1, 7, 3, 4, 5, 6]

    on_orders(body)


def test_frames_are_refused_for_the_same_reasons() -> None:
    """A missing value of pandas is a null."""

    async def body(namespace: DirectNamespace, log: DirectLog) -> None:
        counted = pd.DataFrame({"id": pd.array([1, None], "Int64")})
        for frame in (counted, pl.DataFrame({"id": [1, None]})):
            with pytest.raises(SchemaMismatchError, match="column id is null"):
                await by_table(namespace, frame)
        await by_table(namespace, pd.DataFrame({"id": [1, 2]}))
        await by_table(namespace, pl.DataFrame({"id": [3]}))
        assert (await (await log.read()).to_arrow())["id"].to_pylist() == [1, 2, 3]

    on_orders(body)


@pytest.mark.parametrize("schema", [LOOSE, ORDERS], ids=["loose", "strict"])
def test_the_schema_is_given_back(schema: pa.Schema) -> None:
    """By every reader, whatever the batches said that were written."""

    async def body(namespace: DirectNamespace, log: DirectLog) -> None:
        assert await log.get_schema() == ORDERS
        rows = rows_of({}, {"id": 2}, schema=schema)
        await by_batch(namespace, rows)
        await by_append(namespace, rows)
        expected = pa.Table.from_batches([rows_of(*[{}, {"id": 2}] * 2, schema=ORDERS)])
        for where in (None, pc.field("id") > 0):
            table = await (await log.read(where=where)).to_arrow()
            assert table.schema == ORDERS
            assert table == expected
        async with await log.open_reader() as reader:
            batch = await reader.read_batch()
        assert batch is not None
        assert pa.schema(list(batch.schema)[4:]) == ORDERS
        snapshot = await log.get_snapshot()
        for part in snapshot.scans(snapshot.first, snapshot.end):
            async for scanned in scan_range(part, namespace.ports.ledgers):
                assert pa.schema(list(scanned.batch.schema)[1:]) == ORDERS

    on_orders(body)


def test_a_column_that_can_be_null_from_now_on() -> None:
    """A writer learns of it by the null, a read that has begun refuses it, and none goes back."""

    async def body(namespace: DirectNamespace, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write_batch(rows_of({}))
            strict = await log.read()
            assert await log.update_schema(LOOSE) == LOOSE
            await writer.submit_batch(rows_of(*(change for change, _ in BAD.values())))
            await writer.commit()
        assert (await (await log.read()).to_arrow()).num_rows == 6
        assert (await strict.to_arrow()).schema == ORDERS, "it ends where it could be read to"
        for columns in (["id"], ["lines"], ["prices"], ["buyer"]):
            view = await log.read(columns=columns)
            assert (await view.to_arrow()).schema == pa.schema([LOOSE.field(columns[0])])
        with pytest.raises(SchemaMismatchError, match="id int32 not null would hold less than id"):
            await log.update_schema(ORDERS)
        assert await log.update_schema(ORDERS, merge=True) == LOOSE

    on_orders(body)


def test_a_read_that_has_begun_gives_what_it_said() -> None:
    """Rows written since are included while none has a null, with the types that it reported."""
    view = RangeView("orders", schema_of(columns_of(ORDERS)))
    place = EntryPlace(lssn=1, entry_id=0, sequence_id=0, segment_sequence_id=0, timestamp_ms=0)

    def read(*changes: dict[str, Any]) -> pa.RecordBatch:
        rows = rows_of(*changes)
        rows = rows.add_column(0, "_txid", pa.array([0] * rows.num_rows))
        return view.of(typed_read_batch(rows, place, first_slot=0))

    found = read({}, {"id": 2}, {"lines": [], "prices": None})
    found.validate(full=True)
    assert found.schema == ORDERS
    assert found.to_pylist() == rows_of({}, {"id": 2}, {"lines": [], "prices": None}).to_pylist()
    for change, reason in BAD.values():
        name = reason.removeprefix("column ").removesuffix(" is null")
        with pytest.raises(SchemaMismatchError, match=f"column {name} was .* begin a new read"):
            read({}, change)


def test_columns_that_are_added_can_be_null() -> None:
    """Older records have none; a merge says so for callers that cannot know it."""

    async def body(namespace: DirectNamespace, log: DirectLog) -> None:
        more = pa.field("more", pa.int8(), nullable=False)
        with pytest.raises(SchemaMismatchError, match="more int8 not null is new, and null in old"):
            await log.update_schema(ORDERS.append(more))
        after = await log.update_schema(pa.schema([more]), merge=True)
        assert after == ORDERS.append(more.with_nullable(True))
        with pytest.raises(ConfigurationError, match="nothing null not null could hold no value"):
            schema_from_text("nothing null not null")

    on_orders(body)


def test_logs_that_are_read_together() -> None:
    """A column that one of them lacks, or may have as null, may be null."""
    one = schema_from_text("a int8 not null, b int8 not null, s struct<x int8 not null> not null")
    two = schema_from_text("a int8 not null, b int8, s struct<y int8 not null> not null")
    expected = schema_from_text("a int8 not null, b int8, s struct<x int8, y int8> not null")
    assert merge_schemas({"one": one, "two": two}) == expected
    assert merge_schemas({"one": one, "three": pa.schema([("c", "int8")])}) == schema_from_text(
        "a int8, b int8, s struct<x int8 not null>, c int8"
    )


def test_schemas_stored_before_say_nothing_of_nulls() -> None:
    """In them all columns can be null; and one of such columns is stored as it was."""
    schema = LogSchema(versions=((Column("a", "int8"),),))
    assert b"null" not in encode(schema)
    assert decode(LogSchema, encode(schema), source="/x").latest[0].nullable


def test_a_column_of_another_type_is_required_as_the_known_one() -> None:
    """The new type decides about its fields."""
    known = Column(name="a", type="int32", nullable=False)
    wider = Column(name="a", type="int64")
    required = Column(name="a", type="int64", nullable=False)
    assert as_required([known], [wider]) == (required,)
