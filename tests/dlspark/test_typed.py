"""Typed logs through the source without Spark: its types, its shapes, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.sql import types as T
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual

from dlcore.api.schemas import merge_schemas, schema_from_text
from dlcore.base.errors import ConfigurationError, LogNotFoundError, SchemaMismatchError
from dlcore.sync import open_namespace
from dlspark.arrow import RowBuilder, batches_by_log
from dlspark.batch import FilteringDlogReader
from dlspark.commit import AppendIdentity
from dlspark.options import Mode, WriteOptions
from dlspark.pruning import Comparison
from dlspark.schema import WriteColumns, is_of_typed
from dlspark.source import DistributedLogDataSource
from dlspark.staging import commit_staged, stage_rows
from dlspark.typed import arrow_type, log_schema_of, read_schema, shape_of, spark_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.sync import Namespace

TRIPS = pa.schema(
    [
        ("id", pa.int32()),
        ("tags", pa.list_(pa.string())),
        ("by", pa.map_(pa.string(), pa.struct([("x", pa.float64())]))),
        ("at", pa.timestamp("ms", "Europe/Paris")),
    ]
)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.uint8(), T.ShortType()),
        (pa.uint16(), T.IntegerType()),
        (pa.uint32(), T.LongType()),
        (pa.uint64(), T.DecimalType(20, 0)),
        (pa.float16(), T.FloatType()),
        (pa.binary(4), T.BinaryType()),
        (pa.date64(), T.DateType()),
        (pa.timestamp("s"), T.TimestampNTZType()),
        (pa.timestamp("ns", "Asia/Tokyo"), T.TimestampType()),
        (pa.duration("s"), T.DayTimeIntervalType()),
        (pa.null(), T.NullType()),
        (pa.decimal256(20, 3), T.DecimalType(20, 3)),
        (pa.time32("s"), T.TimeType()),
    ],
)
def test_types_that_spark_has_not(kind: pa.DataType, expected: T.DataType) -> None:
    """They become those that hold their values."""
    assert spark_type("a", kind) == expected
    nested = spark_type("a", pa.list_(pa.struct([("x", kind)])))
    assert nested == T.ArrayType(T.StructType([T.StructField("x", expected)]))


def test_types_there_and_back() -> None:
    """Spark hands over the schema of the log, except nullability."""
    for kind in [*TRIPS.types, pa.bool_(), pa.int8(), pa.int64(), pa.decimal128(38, 18)]:
        again = arrow_type("a", spark_type("a", kind))
        assert spark_type("a", again) == spark_type("a", kind)
    udt = type("Udt", (T.UserDefinedType,), {"sqlType": classmethod(lambda _: T.LongType())})
    assert arrow_type("a", udt()) == pa.int64()
    required = T.ArrayType(T.LongType(), containsNull=False)
    assert not arrow_type("a", required).value_field.nullable
    # As of `array()` and `map('k', array())`, in which Spark says that there is no null.
    nothing = T.ArrayType(T.NullType(), containsNull=False)
    assert arrow_type("a", T.MapType(T.StringType(), nothing)).item_type == pa.list_(pa.null())


@pytest.mark.parametrize("kind", [pa.month_day_nano_interval(), pa.decimal256(50, 2)])
def test_types_that_spark_cannot_hold(kind: pa.DataType) -> None:
    """The column is named, and how to read the others."""
    with pytest.raises(SchemaMismatchError, match=r"column 'a' has the type .* option columns"):
        read_schema(pa.schema([("a", kind)]), None, include_metadata=False)


@pytest.mark.parametrize(
    "kind",
    [T.YearMonthIntervalType(), T.VariantType(), T.MapType(T.NullType(), T.NullType())],
)
def test_types_that_no_log_holds(kind: T.DataType) -> None:
    """The column is named, and what to do."""
    with pytest.raises(ConfigurationError, match=r"column 'a' is .* cast it"):
        log_schema_of(T.StructType([T.StructField("a", kind)]))


def test_filters_of_typed_rows() -> None:
    """Columns of the log say nothing of where records are, also where they are called so."""
    assert Comparison("EqualTo", ("_txid",), 1).of_typed().column == ("txid",)
    assert Comparison("EqualTo", ("_dlsn", "lssn"), 1).of_typed().column == ("dlsn", "lssn")
    for column in [("txid",), ("_other",), ()]:
        assert Comparison("EqualTo", column, 1).of_typed().column == ()


def test_schemas_of_logs_that_are_read_together() -> None:
    """The columns that hold all of them, or both shown."""
    wide = pa.schema([("id", pa.int64()), ("name", pa.string())])
    assert merge_schemas({}) is None
    assert merge_schemas({"a": None, "b": None}) is None
    merged = merge_schemas({"a": TRIPS, "b": wide})
    assert merged is not None
    assert merged.names == [*TRIPS.names, "name"]
    with pytest.raises(SchemaMismatchError, match="log 'a' is typed, log 'b' is one of bytes"):
        merge_schemas({"a": TRIPS, "b": None})
    text = pa.schema([("id", pa.string())])
    with pytest.raises(SchemaMismatchError, match=r"log 'a' has \(id int64, .*log 'b' has \(id s"):
        merge_schemas({"a": wide, "b": text})


class Bench:
    """A typed log, and the source over it."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.uri = namespace.uri
        self.log = f"typed-source/{uuid4().hex}"
        namespace.create_log(self.log, schema=TRIPS)

    def source(self, **options: str) -> DistributedLogDataSource:
        """Return the source with these options."""
        return DistributedLogDataSource({"uri": self.uri, "log": self.log, **options})

    def write(self, ids: range) -> None:
        """Append rows as one segment."""
        rows = [
            {"id": n, "tags": [str(n), None], "by": [("k", {"x": n / 2})], "at": n} for n in ids
        ]
        with self.namespace.open_log(self.log) as log, log.open_writer() as writer:
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=TRIPS))

    def rows(self, reader: Any) -> list[dict[str, Any]]:
        """Return what a reader gives."""
        return [
            row
            for part in reader.partitions()
            for batch in reader.read(part)
            for row in batch.to_pylist()
        ]

    def stage(self, options: dict[str, str], schema: T.StructType, batch: pa.RecordBatch) -> None:
        """Write a batch as a task and its driver do."""
        parsed = WriteOptions.parse({"uri": self.uri, **options}, Mode.BATCH)
        source = DistributedLogDataSource({"uri": self.uri, **options})
        columns = source.writer(schema, overwrite=False)._columns
        assert columns.typed == schema
        append = AppendIdentity(identity=f"write:{uuid4().hex}", version=0, is_unique=True)
        task = stage_rows([batch], options=parsed, columns=columns, append=append, partition_id=0)
        commit_staged([task], options=parsed)


@pytest.fixture
def bench(namespace_uri: str) -> Iterator[Bench]:
    """Return a fresh log."""
    with open_namespace(namespace_uri) as namespace:
        yield Bench(namespace)


@pytest.mark.integration
def test_rows_as_spark_expects_them(bench: Bench) -> None:
    """With the names and types of its schema, which says how Spark's Arrow looks."""
    bench.write(range(3))
    bench.write(range(3, 5))
    source = bench.source(includeMetadata="true")
    schema = source.schema()
    assert is_of_typed(schema)
    assert schema.simpleString() == (
        "struct<id:int,tags:array<string>,by:map<string,struct<x:double>>,at:timestamp,_log:string,"
        "_dlsn:struct<lssn:bigint,entry:bigint,slot:bigint>,_txid:bigint,_sequence_id:bigint,"
        "_timestamp:timestamp>"
    )
    reader = source.reader(schema)
    rows = bench.rows(reader)
    assert [row["id"] for row in rows] == list(range(5))
    assert [row["_sequence_id"] for row in rows] == list(range(5))
    assert rows[1]["by"] == [("k", {"x": 0.5})]
    assert rows[4]["_dlsn"] == {"lssn": 2, "entry": 0, "slot": 1}
    assert {row["_log"] for row in rows} == {bench.log}
    (part, *_) = reader.partitions()
    batch: Any = next(iter(reader.read(part)))
    assert batch.schema.equals(shape_of(schema).schema)
    counted = bench.source(columns="_sequence_id,_log")
    assert bench.rows(counted.reader(counted.schema()))[4] == {"_sequence_id": 4, "_log": bench.log}
    more = bench.source(columns="_txid,id", includeMetadata="true").schema()
    assert more.names == ["_txid", "id", "_log", "_dlsn", "_sequence_id", "_timestamp"]
    few = bench.source(columns="id,_txid")
    plain: Any = few.reader(few.schema())
    filtering = FilteringDlogReader(plain._options)
    filters = [GreaterThanOrEqual(("_sequence_id",), 4), EqualTo(("sequence_id",), 9)]
    assert list(filtering.pushFilters(filters)) == filters
    assert [row["id"] for row in bench.rows(filtering)] == [4]


@pytest.mark.integration
def test_streams_plan_typed_rows(bench: Bench) -> None:
    """An offset is as it is for logs of bytes."""
    bench.write(range(3))
    source = bench.source(startingOffsets="earliest")
    reader = source.streamReader(source.schema())
    start = reader.initialOffset()
    end = reader.latestOffset()
    batches = [b for part in reader.partitions(start, end) for b in reader.read(part)]
    assert [n for batch in batches for n in batch.column("id").to_pylist()] == [0, 1, 2]
    reader.stop()


@pytest.mark.integration
def test_reads_that_do_not_fit(bench: Bench) -> None:
    """Schemas that users give, logs of the other kind, values that Spark's type does not hold."""
    schema = bench.source().schema()
    plain = T.StructType([T.StructField(f.name, f.dataType) for f in schema])
    bench.source().reader(plain)
    with pytest.raises(ConfigurationError, match="schema of a dlog read is fixed"):
        bench.source().reader(T.StructType(plain.fields[:1]))
    same = bench.log + "/same"
    bench.stage(
        {"log": same, "createLog": "true"},
        T.StructType([T.StructField("txid", T.LongType())]),
        pa.record_batch({"txid": [5]}),
    )
    named = bench.source(log=same, columns="txid")
    assert bench.rows(named.reader(named.schema())) == [{"txid": 5}]
    with pytest.raises(ConfigurationError, match="no column 'none', it has id, tags, by, at, and"):
        bench.source(columns="none").schema()
    bytes_log = bench.log + "/bytes"
    bench.namespace.create_log(bytes_log)
    for name in (bytes_log, bench.log):
        with bench.namespace.begin_append(name, 1) as append:
            column = {"value": [b"x"]} if name == bytes_log else {"id": [1]}
            append.write_batch(name, pa.record_batch(column))
            append.commit()
    reader = bench.source(log=bytes_log).reader(schema)
    with pytest.raises(SchemaMismatchError, match="is one of bytes, and rows of typed columns"):
        reader.partitions()
    reader = bench.source().reader(bench.source(log=bytes_log).schema())
    with pytest.raises(SchemaMismatchError, match="is typed, and rows of bytes are expected"):
        reader.partitions()
    early = bench.source().reader(schema)
    with bench.namespace.open_log(bench.log) as log:
        log.update_schema([("id", pa.int64())], merge=True)
        with log.open_writer() as writer:
            writer.write_batch(pa.record_batch({"id": [7]}))
            writer.commit()
            assert bench.rows(early)[1]["id"] == 7
            writer.write_batch(pa.record_batch({"id": [2**40]}))
    with pytest.raises(SchemaMismatchError, match="column 'id' is int64, and not all of its value"):
        bench.rows(early)


@pytest.mark.integration
def test_columns_that_cannot_be_null(bench: Bench) -> None:
    """Spark knows that, and nulls are refused; what a DataFrame says of nulls changes no log."""
    strict = bench.log + "/strict"
    known = schema_from_text("id int64 not null, name string, tags list<string not null>")
    bench.namespace.create_log(strict, schema=known)
    log = bench.namespace.open_log(strict)
    source = bench.source(log=strict)
    assert [field.nullable for field in source.schema()] == [False, True, True]
    ids = T.StructType([T.StructField("id", T.LongType(), nullable=False)])
    bench.stage({"log": strict}, ids, pa.record_batch({"id": [1]}))
    null = pa.record_batch({"id": pa.array([2, None], pa.int64())})
    with pytest.raises(SchemaMismatchError, match=r"column id is null .* id int64 not null"):
        bench.stage({"log": strict}, ids, null)
    names = T.StructType([T.StructField("name", T.StringType())])
    with pytest.raises(SchemaMismatchError, match="column id int64 not null is missing"):
        source.writer(names, overwrite=False)
    wide = T.StructType([*T.StructType.fromJson(ids.jsonValue()), *names.fields])
    wide = wide.add("tags", T.ArrayType(T.StringType())).add("new", T.LongType(), nullable=False)
    rows = pa.record_batch({"id": [3], "name": ["x"], "tags": [["t"]], "new": [4]})
    loose = T.StructType([T.StructField(f.name, f.dataType) for f in wide])
    for schema in (wide, loose):
        bench.stage({"log": strict, "mergeSchema": "true"}, schema, rows)
        assert log.get_schema() == known.append(pa.field("new", pa.int64()))
    early = source.reader(source.schema())
    given = T.StructType([T.StructField(f.name, f.dataType) for f in source.schema()])
    assert [row["id"] for row in bench.rows(source.reader(given))] == [1, 3, 3]
    assert [row["id"] for row in bench.rows(early)] == [1, 3, 3]
    log.update_schema([("id", pa.int64())], merge=True)
    bench.stage({"log": strict}, ids, null)
    with pytest.raises(SchemaMismatchError, match="'id' is not nullable in this read"):
        bench.rows(early)
    bench.stage({"log": strict + "/made", "createLog": "true"}, ids, pa.record_batch({"id": [1]}))
    made = bench.namespace.open_log(strict + "/made").get_schema()
    assert made == pa.schema([("id", pa.int64())])


@pytest.mark.integration
def test_writes_to_typed_logs(bench: Bench) -> None:
    """Created, added to, by a column, and what is refused before any task."""
    ids = T.StructType([T.StructField("id", T.LongType())])
    new = bench.log + "/new"
    bench.stage({"log": new, "createLog": "true"}, ids, pa.record_batch({"id": [1, 2]}))
    more = T.StructType([*ids.fields, T.StructField("name", T.StringType())])
    named = pa.record_batch({"id": [3], "name": ["x"]})
    with pytest.raises(SchemaMismatchError, match=r"no column 'name': it has \(id int64\), the Da"):
        bench.stage({"log": new}, more, named)
    text = T.StructType([T.StructField("id", T.StringType())])
    other = r"id int64 cannot hold id string: it has \(id int64\), the DataFrame has \(id string\)"
    with pytest.raises(SchemaMismatchError, match=other):
        bench.source(log=new).writer(text, overwrite=False)
    narrow = T.StructType([T.StructField("id", T.IntegerType())])
    assert bench.source(log=new).writer(narrow, overwrite=False)._columns.typed == narrow
    bench.stage({"log": new, "mergeSchema": "true"}, more, named)
    assert bench.namespace.open_log(new).read().to_arrow().to_pylist() == [
        {"id": 1, "name": None}, {"id": 2, "name": None}, {"id": 3, "name": "x"}
    ]  # fmt: skip
    by_log = T.StructType([*ids.fields, T.StructField("_log", T.StringType())])
    rows = pa.record_batch({"id": [4, 5, 6], "_log": [new, new + "/b", new]})
    with pytest.raises(LogNotFoundError, match="option createLog"):
        bench.stage({}, by_log, rows)
    bench.stage({"createLog": "true"}, by_log, rows)
    assert bench.namespace.open_log(new + "/b").read().to_arrow().to_pylist() == [{"id": 5}]
    for options, schema, why in [
        ({"log": new}, T.StructType([*ids.fields, *ids.fields]), "'id' occurs more than once"),
        ({"typed": "true"}, ids, "string column _log"),
        ({"typed": "true", "mergeSchema": "true"}, by_log, "name the log with the option log"),
    ]:
        with pytest.raises(ConfigurationError, match=why):
            bench.stage(options, schema, rows)
    bytes_log = bench.log + "/bytes"
    bench.namespace.create_log(bytes_log)
    with pytest.raises(SchemaMismatchError, match="exists, and is one of bytes"):
        bench.source(log=bytes_log, typed="true").writer(ids, overwrite=False)
    with pytest.raises(SchemaMismatchError, match=r"typed=false: .*exists, and is typed: leave"):
        bench.source(log=new, typed="false").writer(ids, overwrite=False)
    plain = bench.source(log=bench.log + "/plain", createLog="true", typed="false")
    with pytest.raises(ConfigurationError, match="a log of bytes has no column 'id'"):
        plain.writer(ids, overwrite=False)
    with pytest.raises(LogNotFoundError, match="there is no log"):
        bench.source(log=bench.log + "/none").writer(ids, overwrite=False)
    by_column = DistributedLogDataSource({"uri": bench.uri, "typed": "false"})
    with pytest.raises(ConfigurationError, match="a log of bytes has no column 'id'"):
        by_column.writer(by_log, overwrite=False)
    source = bench.source(log=bench.log + "/third", createLog="true")
    assert source.writer(ids, overwrite=False)._columns.typed == ids
    columns = source.streamWriter(ids, overwrite=False)._columns
    assert columns is not None
    assert columns.typed == ids


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["writer", "streamWriter"])
def test_columns_that_differ_by_case_only(bench: Bench, kind: str) -> None:
    """Spark would take one for the other: refused, and no log made or added to, unless it is so."""

    def make(options: dict[str, str], *names: str) -> Any:
        schema = T.StructType([T.StructField(name, T.StringType()) for name in names])
        source = DistributedLogDataSource({"uri": bench.uri, "createLog": "true", **options})
        return getattr(source, kind)(schema, overwrite=False)._columns.typed

    new, both = {"log": bench.log + "/new"}, {"log": bench.log + "/both"}
    schema = pa.schema([("a", pa.string()), ("A", pa.string()), ("City", pa.string())])
    bench.namespace.create_log(both["log"], schema=schema)
    for options, names, words in [
        (new, ["VALUE"], "'VALUE' differs from 'value'"),
        (new, ["a", "A"], "'a' differs from 'A'"),
        (new, ["a", "_TXID"], "'_TXID' differs from '_txid'"),
        ({}, ["a", "_Log"], "'_Log' differs from '_log'"),
        ({}, ["value", "LOG"], "'LOG' differs from 'log'"),
        (both, ["city"], "'city' differs from 'City'"),
        ({**both, "mergeSchema": "true"}, ["a", "A", "CITY"], "'CITY' differs from 'City'"),
        ({**both, "mergeSchema": "true"}, ["b", "B"], "'b' differs from 'B'"),
    ]:
        with pytest.raises(ConfigurationError, match=f"column {words} by case only"):
            make(options, *names)
    assert not bench.namespace.log_exists(new["log"])
    assert bench.namespace.get_schemas([both["log"]]) == {both["log"]: schema}
    assert make(both, "A", "a")
    assert make({**new, "typed": "true"}, "VALUE")


def test_transaction_ids_that_are_all_null() -> None:
    """As SQL's INSERT fills a column that it does not name: they are assigned."""
    schema = T.StructType([T.StructField("id", T.LongType()), T.StructField("_txid", T.LongType())])
    columns = WriteColumns(has_txid=True, has_log=False, typed=schema)
    batch = pa.record_batch({"id": [1], "_txid": pa.nulls(1, pa.int64())})
    ((log, rows),) = batches_by_log(batch, columns, log="trips")
    assert (log, rows.schema.names) == ("trips", ["id"])
    batch = pa.record_batch({"id": [1, 2], "_txid": pa.array([7, None], pa.int64())})
    with pytest.raises(ConfigurationError, match="'_txid' is null in 1 of 2 rows"):
        batches_by_log(batch, columns, log="trips")


def test_a_column_that_a_log_has_not() -> None:
    """It is null in the rows of that log, where several are read together."""
    schema = read_schema(pa.schema([("a", pa.int64())]), None, include_metadata=False)
    assert list(RowBuilder("log", shape_of(schema)).build([])) == []
