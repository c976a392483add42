"""The data source without Spark, on a real cluster: what it reads, and what it refuses.

Goal: in this process, what Spark does in processes of its own: parse options, plan, read.
"""

from __future__ import annotations

import datetime
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, InputPartition, LessThan
from pyspark.sql.types import StringType, StructField, StructType

from dlcore.base.errors import (
    AlreadyTruncatedError,
    ConfigurationError,
    EndOfStreamError,
    LogNotFoundError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace
from dlspark.batch import DlogReader, FilteringDlogReader
from dlspark.commit import AppendIdentity, StagedTask, batch_identity
from dlspark.options import Address, Mode, ReadOptions, WriteOptions
from dlspark.schema import WriteColumns, check_write_schema
from dlspark.sessions import close_shared_namespace, log_id_of
from dlspark.source import DistributedLogDataSource
from dlspark.staging import abort_staged, commit_staged, stage_rows
from tests.fixtures.spark import list_staged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.sync import Namespace
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration
VALUES = StructType([StructField("value", StringType())])
TO_LOGS = StructType([*VALUES.fields, StructField("log", StringType())])


class Bench:
    """A log of two segments, one entry per record, and the source over it."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.uri = namespace.uri
        self.where = {"uri": self.uri}
        self.log = f"source/{uuid4().hex}"
        namespace.create_log(self.log)
        for start in (0, 5):
            with namespace.open_log(self.log) as log, log.open_writer() as writer:
                for txid in range(start, start + 5):
                    writer.write(LogRecord(txid=txid, payload=b"%d" % txid))
                    writer.flush()

    def source(self, **options: str) -> DistributedLogDataSource:
        """Return the source with these options."""
        return DistributedLogDataSource({**self.where, **options})

    def read(self, **options: str) -> list[int]:
        """Return the transaction ids that a batch read of the log gives."""
        source = self.source(**options)
        reader: Any = source.reader(source.schema())
        parts = reader.partitions()
        return [
            txid
            for part in parts
            for batch in reader.read(part)
            for txid in batch.column("txid").to_pylist()
        ]

    def truncate(self, dlsn: DLSN) -> None:
        """Drop the records before a position."""
        with self.namespace.open_log(self.log) as log, log.open_writer() as writer:
            writer.truncate(dlsn)

    def payloads(self) -> list[bytes]:
        """Return what the log holds."""
        with self.namespace.open_log(self.log) as log, log.open_reader() as reader:
            return [record.payload for record in reader.read_bulk(1_000)]


@pytest.fixture
def bench(namespace_uri: str) -> Iterator[Bench]:
    """A fresh log; what this process opened for the source is closed."""
    with open_namespace(namespace_uri) as namespace:
        yield Bench(namespace)
    close_shared_namespace(Address(uri=namespace_uri))


@pytest.fixture(params=["bookies", "proxies"])
def bench_anywhere(
    bench: Bench, proxy: ProxyProcess, request: pytest.FixtureRequest
) -> Iterator[Bench]:
    """The same, read over bookies, and over proxies."""
    if request.param == "proxies":
        bench.where = {"endpoint": proxy.location}
    yield bench
    close_shared_namespace(Address(uri=proxy.location))


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({}, range(10)),
        ({"startingOffsets": "1:3:0"}, range(3, 10)),
        ({"startingOffsets": "2:0:0", "endingOffsets": "2:2:0"}, range(5, 7)),
        ({"startingTxid": "7"}, range(7, 10)),
        ({"startingTxid": "2", "endingTxid": "8"}, range(2, 8)),
        ({"startingTimestamp": "0"}, range(10)),
        ({"endingTimestamp": "1"}, range(0)),
        ({"startingOffsets": "latest"}, range(0)),
        ({"minPartitions": "4"}, range(10)),
        ({"maxRecordsPerPartition": "3"}, range(10)),
    ],
    ids=str,
)
def test_a_batch_reads_what_its_bounds_say(
    bench: Bench, bounds: dict[str, str], expected: range
) -> None:
    """By positions, transaction ids and times; however it is divided."""
    if bounds.get("startingOffsets") == "latest":
        with pytest.raises(ConfigurationError, match="latest"):
            bench.read(log=bench.log, **bounds)
    else:
        assert bench.read(log=bench.log, **bounds) == list(expected)


def test_bounds_that_leave_nothing_to_read_are_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """An end before the start, each said in its own way; a start where no record is yet."""
    caplog.set_level(logging.WARNING)  # programs that ran in this process may have set another
    assert bench.read(log=bench.log, startingTxid="7", endingOffsets="1:2:0") == []
    (line,) = caplog.messages
    assert line == (
        f"log '{bench.log}': no record is read, because the end 1:2:0 in the options lies "
        "before the start 2:2:0 in the options; to do: correct the two options"
    )
    assert bench.read(log=bench.log, startingTxid="99", endingOffsets="1:2:0") == []
    assert len(caplog.messages) == 1
    assert bench.read(log=bench.log, startingOffsets="2:7:0") == []
    source = bench.source(log=bench.log, startingOffsets="2:7:0")
    reader = source.streamReader(source.schema())
    reader.initialOffset()
    reader.stop()
    beyond = f"log '{bench.log}': the start 2:7:0 lies beyond its end, 2:5:0: no record is read"
    assert [beyond in message for message in caplog.messages[1:]] == [True, True]


def test_positions_by_log_and_logs_by_pattern(bench: Bench) -> None:
    """Each log has its own start; a pattern takes what there is, and must match something."""
    positions = f'{{"{bench.log}": "2:3:0"}}'
    assert bench.read(log=bench.log, startingOffsets=positions) == [8, 9]
    assert bench.read(logsPattern=bench.log) == list(range(10))
    with pytest.raises(LogNotFoundError, match=r"no log in .* matches logsPattern='nothing-"):
        bench.read(logsPattern="nothing-.*")
    with pytest.raises(LogNotFoundError, match="dlog log create"):
        bench.read(log=f"{bench.log}-missing")


def entries_read(bench: Bench, *filters: Any, **options: str) -> tuple[list[int], int]:
    """Return the numbers of the records that a filtered read gives, and the entries it read."""
    source = bench.source(log=bench.log, **options)
    reader = FilteringDlogReader(ReadOptions.parse(source.options, Mode.BATCH))
    assert list(reader.pushFilters(list(filters))) == list(filters)
    numbers, entries = [], 0
    for part in reader.partitions():
        entries += sum(scan.entry_count for scan in getattr(part, "scans", ()))
        for batch in reader.read(part):
            numbers += batch.column("sequence_id").to_pylist()
    return numbers, entries


def test_filters_read_no_entry_outside(bench: Bench) -> None:
    """Only those of ten entries that can pass are read; Spark evaluates filters again."""
    assert entries_read(bench) == (list(range(10)), 10)
    txids = GreaterThanOrEqual(("txid",), 3), LessThan(("txid",), 5)
    assert entries_read(bench, *txids) == ([3, 4], 2)
    assert entries_read(bench, EqualTo(("sequence_id",), 7)) == ([7], 1)
    assert entries_read(bench, In(("txid",), (1, 8))) == ([1, 8], 2)
    assert entries_read(bench, EqualTo(("dlsn", "lssn"), 2)) == (list(range(5, 10)), 5)
    with bench.namespace.open_log(bench.log) as log, log.open_reader() as reader:
        times = [record.timestamp_ms for record in reader.read_bulk(10)]
    moment = datetime.datetime.fromtimestamp(times[6] / 1000, datetime.UTC)
    late = [n for n, time_ms in enumerate(times) if time_ms >= times[6]]
    assert entries_read(bench, GreaterThanOrEqual(("timestamp",), moment)) == (late, len(late))
    assert entries_read(bench, EqualTo(("log",), "another")) == ([], 0)


def test_rows_that_are_counted_read_no_entry(bench: Bench) -> None:
    """Their log and number follow from metadata, within any bounds and filters."""
    given = {"columns": "sequence_id,log"}
    assert entries_read(bench, **given) == (list(range(10)), 0)
    bounds = given | {"startingTxid": "2", "endingOffsets": "2:3:0"}
    assert entries_read(bench, **bounds) == (list(range(2, 8)), 0)
    assert entries_read(bench, GreaterThanOrEqual(("sequence_id",), 8), **given) == ([8, 9], 0)


def test_a_class_with_filters_is_used_where_spark_offers_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere Spark refuses it; the worker that offers them is known by its module."""
    source = bench.source(log=bench.log)
    assert type(source.reader(source.schema())) is DlogReader
    name = "pyspark.sql.worker.data_source_pushdown_filters"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert type(source.reader(source.schema())) is FilteringDlogReader


def test_truncated_records_fail_a_batch_or_are_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """A start below the first record asks for what is gone."""
    bench.truncate(DLSN(1, 3, 0))
    options = {"log": bench.log, "startingOffsets": "1:1:0"}
    with pytest.raises(AlreadyTruncatedError, match="failOnDataLoss"):
        bench.read(**options)
    with caplog.at_level(logging.WARNING):
        assert bench.read(**options, failOnDataLoss="false") == list(range(3, 10))
    assert "data loss" in caplog.text
    assert bench.read(log=bench.log, startingOffsets="1:3:0") == list(range(3, 10))
    assert bench.read(log=bench.log) == list(range(3, 10))


@pytest.mark.parametrize("place", [DLSN(1, 3, 0), DLSN(2, 0, 0)], ids=["within", "a segment"])
def test_a_start_that_names_a_truncated_record(
    bench_anywhere: Bench, place: DLSN, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused, or reported, by position and transaction id; the first names mean all."""
    bench = bench_anywhere
    bench.truncate(place)
    left = list(range(3 if place.lssn == 1 else 5, 10))
    for beginning in ({"startingOffsets": "1:0:0"}, {"startingTxid": "0"}, {}):
        assert bench.read(log=bench.log, **beginning) == left
        stream = bench.source(log=bench.log, **{"startingOffsets": "earliest", **beginning})
        assert stream.streamReader(stream.schema()).initialOffset()["logs"] == {
            bench.log: str(place)
        }
    assert bench.read(log=bench.log, startingTxid=str(left[0])) == left
    for lost in ({"startingOffsets": "1:1:0"}, {"startingTxid": "2"}):
        with pytest.raises(AlreadyTruncatedError, match=r"truncated; it holds .*failOnDataLoss"):
            bench.read(log=bench.log, **lost)
        with caplog.at_level(logging.WARNING):
            assert bench.read(log=bench.log, failOnDataLoss="false", **lost) == left
        assert "data loss" in caplog.text
        caplog.clear()
    stream = bench.source(log=bench.log, startingTxid="2")
    with pytest.raises(AlreadyTruncatedError, match="ids of 2 or more were truncated"):
        stream.streamReader(stream.schema()).initialOffset()


def test_records_truncated_after_they_were_planned_at_an_endpoint(
    bench: Bench, proxy: ProxyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of a partition is read, under the log's new name, too; else the task fails."""
    where = {"endpoint": proxy.location, "logsPattern": f"{bench.log}(-renamed)?"}

    def planned(fail: str) -> tuple[DlogReader, Sequence[InputPartition]]:
        source = DistributedLogDataSource({**where, "failOnDataLoss": fail})
        reader: Any = source.reader(source.schema())
        return reader, reader.partitions()

    def txids(reader: DlogReader, parts: Sequence[InputPartition]) -> list[int]:
        batches = [batch for part in parts for batch in reader.read(part)]
        return [txid for batch in batches for txid in batch.column("txid").to_pylist()]

    strict, lenient = planned("true"), planned("false")
    try:
        bench.truncate(DLSN(1, 2, 0))
        with pytest.raises(AlreadyTruncatedError, match=r"2 of them.* holds 1:2:0 … 2:5:0"):
            txids(*strict)
        bench.namespace.rename_log(bench.log, f"{bench.log}-renamed")
        with caplog.at_level(logging.WARNING):
            assert txids(*lenient) == list(range(2, 10))
        assert "from 1:0:0 up to 1:2:0 (exclusive), 2 of them" in caplog.text
    finally:
        close_shared_namespace(Address(uri=proxy.location))


def test_a_stream_reads_on_from_its_offsets(bench: Bench) -> None:
    """Batch after batch; one that is planned again gives the same; stop closes what is open."""
    source = bench.source(log=bench.log, startingOffsets="earliest")
    reader = source.streamReader(source.schema())
    start = reader.initialOffset()
    end = reader.latestOffset(start)

    def txids(first: dict[str, Any], last: dict[str, Any]) -> list[int]:
        return [
            txid
            for part in reader.partitions(first, last)
            for batch in reader.read(part)
            for txid in batch.column("txid").to_pylist()
        ]

    assert txids(start, end) == list(range(10))
    with bench.namespace.open_log(bench.log) as log, log.open_writer() as writer:
        writer.write(LogRecord(txid=10, payload=b"10"))
    later = reader.latestOffset(end)
    assert txids(end, later) == [10]
    assert txids(start, end) == list(range(10))
    assert reader.latestOffset(later) == later
    assert list(reader.read(InputPartition(None))) == []  # what Spark passes for nothing
    reader.commit(later)
    reader.stop()
    reader.stop()
    assert txids(start, end) == list(range(10))


def test_a_stream_goes_on_with_a_log_that_is_renamed(bench: Bench) -> None:
    """Under another name that its pattern matches; a batch that is planned again is the same."""
    source = bench.source(logsPattern=f"{bench.log}(-2)?", startingOffsets="earliest")
    reader: Any = source.streamReader(source.schema())

    def rows(first: dict[str, Any], last: dict[str, Any]) -> list[int]:
        parts = reader.partitions(first, last)
        batches = [batch for part in parts for batch in reader.read(part)]
        return [txid for batch in batches for txid in batch.column("txid").to_pylist()]

    start = reader.initialOffset()
    end = reader.latestOffset(start)
    bench.namespace.rename_log(bench.log, f"{bench.log}-2")
    assert rows(start, end) == list(range(10))
    for log, txid in ((f"{bench.log}-2", 10), (bench.log, 100)):
        if log == bench.log:
            bench.namespace.create_log(log)
        with bench.namespace.open_log(log) as manager, manager.open_writer() as writer:
            writer.write(LogRecord(txid=txid, payload=b"x"))
    later = reader.latestOffset(end)
    assert sorted(rows(end, later)) == [10, 100]
    bench.namespace.rename_log(f"{bench.log}-2", f"{bench.log}-3")
    with pytest.raises(LogNotFoundError, match="renamed to a name that the query does not read"):
        reader.latestOffset(later)
    reader.stop()


def test_a_stream_of_a_log_that_goes(bench: Bench) -> None:
    """It stops, and says which option lets it go on."""
    source = bench.source(log=bench.log, startingOffsets="earliest")
    reader = source.streamReader(source.schema())
    end = reader.latestOffset(reader.initialOffset())
    bench.namespace.delete_log(bench.log)
    with pytest.raises(LogNotFoundError, match="failOnDataLoss"):
        reader.latestOffset(end)
    reader.stop()


@pytest.mark.parametrize("kind", ["writer", "streamWriter"])
def test_writers_are_made_for_logs_that_exist_and_to_append(bench: Bench, kind: str) -> None:
    """Each mistake is reported before a task runs."""

    def make(schema: StructType, *, overwrite: bool = False, **options: str) -> object:
        return getattr(bench.source(**options), kind)(schema, overwrite)

    assert make(VALUES, log=bench.log) is not None
    assert make(TO_LOGS) is not None
    assert make(VALUES, overwrite=True, log=bench.log) is not None
    with pytest.raises(ConfigurationError, match="an overwrite needs the option log"):
        make(TO_LOGS, overwrite=True)
    with pytest.raises(ConfigurationError, match="log"):
        make(VALUES)
    with pytest.raises(LogNotFoundError, match="dlog log create"):
        make(VALUES, log=f"{bench.log}-missing")
    with pytest.raises(ConfigurationError, match="value"):
        make(StructType([StructField("other", StringType())]), log=bench.log)


@pytest.mark.parametrize("kind", ["writer", "streamWriter"])
def test_no_writer_is_made_for_a_sealed_log(bench: Bench, kind: str) -> None:
    """Before a task runs; a transaction, which may be repeated, fails at its end."""
    with bench.namespace.open_log(bench.log) as log:
        log.mark_end_of_stream()

    def make(**options: str) -> object:
        return getattr(bench.source(log=bench.log, **options), kind)(VALUES, False)

    with pytest.raises(EndOfStreamError, match=f"log '{bench.log}' .* is sealed: .* another log"):
        make()
    if kind == "writer":
        assert make(txnAppId=uuid4().hex, txnVersion="1") is not None


def test_rows_of_which_some_have_txids_are_refused(bench: Bench) -> None:
    """Tasks, or batches of one, whose rows have none are those of an INSERT, or a mistake."""
    options = WriteOptions.parse({"uri": bench.uri, "log": bench.log}, Mode.BATCH)
    append = batch_identity(options, {}, token=uuid4().hex)
    columns = WriteColumns(has_txid=True, has_log=False)

    def stage(*txids: int | None) -> Any:
        rows = [
            pa.record_batch({"value": [b"x"], "txid": pa.array([txid], pa.int64())})
            for txid in txids
        ]
        return stage_rows(rows, options=options, columns=columns, append=append, partition_id=0)

    with pytest.raises(ConfigurationError, match="null in all rows of some batches"):
        stage(100, None)
    with pytest.raises(ConfigurationError, match="null in all rows of some tasks"):
        commit_staged([stage(100), stage(None)], options=options)
    assert len(bench.payloads()) == 10
    commit_staged([stage(None)], options=options)
    assert bench.payloads()[-1] == b"x"


def test_overwrite_replaces_what_the_log_held(bench: Bench) -> None:
    """In one transaction, once; also by nothing at all."""
    options = WriteOptions.parse(
        {"uri": bench.uri, "log": bench.log, "txnAppId": uuid4().hex, "txnVersion": "1"}, Mode.BATCH
    )
    log_id = log_id_of(options.address, bench.log)
    append = batch_identity(options, {}, token=uuid4().hex, log_id=log_id)

    def overwrite(*values: bytes) -> None:
        rows = [pa.record_batch({"value": list(values)})] if values else []
        columns = check_write_schema(VALUES, needs_log=False)
        staged = stage_rows(rows, options=options, columns=columns, append=append, partition_id=0)
        commit_staged([staged], options=options, replaces=True)

    overwrite(b"a", b"b")
    assert bench.payloads() == [b"a", b"b"]
    overwrite(b"never", b"seen")  # the same version again
    assert bench.payloads() == [b"a", b"b"]
    writer = bench.source(log=bench.log).writer(VALUES, overwrite=True)
    plain = WriteOptions.parse({"uri": bench.uri, "log": bench.log}, Mode.BATCH)
    append = batch_identity(plain, {}, token=uuid4().hex)
    writer.commit([StagedTask(append=append, partition_id=0, extents=[])])
    assert bench.payloads() == []


@pytest.mark.parametrize("kind", ["writer", "streamWriter"])
def test_create_log_makes_the_log_that_is_named(bench: Bench, kind: str) -> None:
    """Before a task runs; one that is there is left as it is."""
    new = f"{bench.log}-{kind}"
    for log in (new, new, bench.log):
        source = bench.source(log=log, createLog="true")
        assert getattr(source, kind)(VALUES, overwrite=False) is not None
        assert bench.namespace.log_exists(log)
    assert len(bench.payloads()) == 10


def test_options_that_logs_of_bytes_do_not_have(bench: Bench) -> None:
    """They are refused, not passed over."""
    with pytest.raises(ConfigurationError, match="includeMetadata=true is for typed logs"):
        bench.source(log=bench.log, includeMetadata="true").schema()
    with pytest.raises(ConfigurationError, match="mergeSchema=true: logs of bytes"):
        bench.source(log=bench.log, mergeSchema="true").writer(VALUES, overwrite=False)


def test_create_log_makes_the_logs_that_rows_name(bench: Bench) -> None:
    """By the task that meets them first; without the option the error tells of it."""
    names = [f"{bench.log}/{letter}" for letter in "ab"]
    rows = pa.record_batch({"value": [b"1", b"2", b"3"], "log": [*names, names[0]]})
    columns = check_write_schema(TO_LOGS, needs_log=True)

    def write(**more: str) -> None:
        options = WriteOptions.parse({"uri": bench.uri, **more}, Mode.BATCH)
        append = batch_identity(options, {}, token=uuid4().hex)
        staged = stage_rows([rows], options=options, columns=columns, append=append, partition_id=0)
        commit_staged([staged], options=options)

    with pytest.raises(LogNotFoundError, match=r"dlog log create .* option createLog"):
        write()
    write(createLog="true")
    assert len(bench.read(log=names[0], columns="txid")) == 2
    assert len(bench.read(log=names[1])) == 1


def test_a_write_of_no_rows_and_one_that_fails(bench: Bench) -> None:
    """Neither is seen, and neither leaves a ledger."""
    options = WriteOptions.parse({"uri": bench.uri, "log": bench.log}, Mode.BATCH)
    append = batch_identity(options, {}, token=uuid4().hex)
    assert append == AppendIdentity(identity=append.identity, version=0, is_unique=True)
    source = bench.source(log=bench.log)
    writer = source.writer(VALUES, overwrite=False)

    def stage(*batches: Any) -> Any:
        return stage_rows(
            batches, options=options, columns=writer._columns, append=append, partition_id=0
        )

    commit_staged([stage()], options=options)
    writer.commit([])
    writer.commit([None])
    writer.abort([None])
    abort_staged([stage()], address=options.address)
    assert list_staged(bench.uri, append.identity)[0] == set()
    assert bench.payloads() == [b"%d" % txid for txid in range(10)]
