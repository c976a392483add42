"""Each method of staged writes and atomic appends gives the same over all ways to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore.base.config import RECORD_SIZE_BYTES_MAX
from dlcore.base.errors import (
    AlreadyClosedError,
    AppendAbortedError,
    AppendMismatchError,
    ConfigurationError,
    EndOfStreamError,
    LogNotFoundError,
    LogRecordTooLongError,
    OwnershipAcquireFailedError,
    SchemaMismatchError,
    TransactionIdOutOfOrderError,
    TransactionTooLargeError,
)
from dlcore.log.metadata.commits import AppendRun, SharedStaging
from tests.fixtures.staged_records import batch
from tests.fixtures.ways import new_name

if TYPE_CHECKING:
    from tests.fixtures.ways import Way

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])


def written(staging: Any, *parts: tuple[str, pa.RecordBatch]) -> None:
    """Write, and stage: a proxy may refuse records after the call that wrote them."""
    staging.write_batches(parts)
    staging.stage()


def test_logs_get_the_records_together(way: Way) -> None:
    """At the commit, each once; a repetition says that it was done."""
    namespace, first, second = way.namespace, way.new_log(), way.new_log(schema=SCHEMA)
    identity = new_name()
    with namespace.begin_append(identity, 1) as append:
        assert identity in repr(append)
        append.write_batch(first.name, batch("a", "b"))
        append.write_batch(first.name, batch("c"))
        extents = append.stage()
        assert [each.record_count for each in extents] == [3]
        assert way.payloads(first) == []
        result = append.commit()
        assert (result.committed, result.already_committed) == (True, False)
    assert way.payloads(first) == [b"a", b"b", b"c"]
    for version in (0, 1):
        with namespace.begin_append(identity, version) as append:
            append.write_batch(first.name, batch("again"))
            result = append.commit()
            assert (result.committed, result.already_committed) == (False, True)
    with namespace.begin_append(identity, 2) as append:
        append.write_batch(second.name, pa.record_batch({"id": [1]}))
        append.commit()
    assert second.read().to_arrow().to_pylist() == [{"id": 1}]
    assert way.payloads(first) == [b"a", b"b", b"c"]


def test_extents_of_tasks_are_committed(way: Way) -> None:
    """In the order that the commit names, also instead of what a log held."""
    namespace, first, second = way.namespace, way.new_log(1), way.new_log(1)
    names, identity = [first.name, second.name], new_name()
    staged = []
    for task in "ab":
        with namespace.open_staging_writer(identity=identity) as staging:
            assert identity in repr(staging)
            assert staging.stage() == []
            staging.write_batches([(name, batch(task + name[-3:])) for name in names])
            staging.write_batch(names[0], batch(task + "!"))
            staged += staging.stage()
    with namespace.begin_append(identity, 1) as append:
        assert append.commit(staged[::-1], replaces=[second.name]).committed
    assert sorted(way.payloads(first)[1:]) == sorted(
        task.encode() + end.encode() for task in "ab" for end in (names[0][-3:], "!")
    )
    assert way.payloads(second) == [b"b" + names[1][-3:].encode(), b"a" + names[1][-3:].encode()]


def test_discarded_records_are_not_staged(way: Way) -> None:
    """Neither are refused ones; the writer stays usable."""
    log, typed = way.new_log(), way.new_log(schema=SCHEMA)
    identity, missing = new_name(), new_name()
    with way.namespace.open_staging_writer(identity=identity) as staging:
        staging.write_batch(log.name, batch("never"))
        staging.discard()
        for error, name, rows in (
            (LogNotFoundError, missing, batch("x")),
            (LogRecordTooLongError, log.name, batch("x" * (RECORD_SIZE_BYTES_MAX + 1))),
            (TransactionIdOutOfOrderError, log.name, batch("x", "y", txids=[2, 1])),
            (SchemaMismatchError, typed.name, pa.record_batch({"id": ["x"]})),
            (
                SchemaMismatchError,
                typed.name,
                pa.record_batch({"id": pa.array([None], pa.int64())}),
            ),
            (SchemaMismatchError, typed.name, pa.record_batch({"name": ["x"]})),
            (ConfigurationError, log.name, pa.record_batch({"city": ["x"]})),
        ):
            with pytest.raises(error):
                written(staging, (name, rows))
            staging.discard()
        with pytest.raises((TransactionTooLargeError, LogNotFoundError)):
            written(staging, *((f"{missing}/{n}", batch("x")) for n in range(1001)))
        staging.discard()
        staging.write_batch(log.name, batch("kept"))
        staged = staging.stage()
    with way.namespace.begin_append(identity, 1) as append:
        append.commit(staged)
    assert way.payloads(log) == [b"kept"]


def test_an_aborted_append_leaves_nothing(way: Way) -> None:
    """Its staged records are not committed later."""
    log, identity = way.new_log(), new_name()
    with way.namespace.begin_append(identity, 1) as append:
        append.write_batch(log.name, batch("never"))
        staged = append.stage()
        append.abort()
    with way.namespace.begin_append(identity, 1) as append:
        with pytest.raises(AppendAbortedError, match="is gone"):
            append.commit(staged)
        append.close()
    assert way.payloads(log) == []


def test_a_strict_append_is_repeated_as_it_was(way: Way) -> None:
    """The latest one, to the same logs."""
    namespace, log, identity = way.namespace, way.new_log(), new_name()
    for version in (1, 2):
        with namespace.begin_append(identity, version, strict=True) as append:
            append.write_batch(log.name, batch("x"))
            assert append.commit().committed
    with (
        namespace.begin_append(identity, 1, strict=True) as append,
        pytest.raises(AppendMismatchError),
    ):
        append.commit([])
    with way.only_directly():
        namespace.begin_append(identity, 3, after=2).close()


def test_runs_count_their_appends(way: Way) -> None:
    """A repetition of two appends of a version skips both, and appends a third one."""
    log, identity = way.new_log(), new_name()
    shared = SharedStaging(identity=f"s{identity}", round="1")
    begun_ns = 0
    for run, count in (("first", 2), ("second", 3)):
        for number in range(count):
            at = AppendRun(token=run, begun_ns=begun_ns)
            begun_ns = 2**62 if number == 0 else begun_ns
            with way.namespace.begin_append(
                identity, 1, run=at, shared=shared, strict=True
            ) as append:
                append.write_batch(log.name, batch(str(number)))
                done = append.commit().already_committed
            assert done == (run == "second" and number < 2)
        begun_ns = 0
    assert way.payloads(log) == [b"0", b"1", b"2"]


def test_rounds_of_shared_ledgers(way: Way) -> None:
    """A later round begins with ledgers of its own."""
    log, identity = way.new_log(), new_name()
    with way.namespace.open_staging_writer(identity=identity, shared=True) as staging:
        staging.begin_round(1)
        staging.write_batch(log.name, batch("a"))
        staged = staging.stage()
        shared = SharedStaging(identity=identity, round="1")
        with way.namespace.begin_append(f"{identity}>x", 1, shared=shared) as append:
            assert append.commit(staged).committed
        staging.begin_round(2)
        staging.write_batch(log.name, batch("b"))
        staged = staging.stage()
        shared = SharedStaging(identity=identity, round="2")
        with way.namespace.begin_append(f"{identity}>x", 2, shared=shared) as append:
            assert append.commit(staged).committed
    assert way.payloads(log) == [b"a", b"b"]


def test_logs_that_take_no_append(way: Way) -> None:
    """One that a writer owns, and one that is sealed."""
    namespace, log, identity = way.namespace, way.new_log(), new_name()
    making = way.making.open_log(log.name)
    with making.open_writer(), namespace.begin_append(identity, 1, lock_timeout_s=0.1) as append:
        append.write_batch(log.name, batch("held"))
        with pytest.raises(OwnershipAcquireFailedError, match=log.name):
            append.commit()
    log.mark_end_of_stream()
    with namespace.begin_append(identity, 2) as append:
        append.write_batch(log.name, batch("late"))
        with pytest.raises(EndOfStreamError, match=log.name):
            append.commit()
    assert way.payloads(log) == []


def test_a_closed_writer_says_so(way: Way) -> None:
    """Its staged records stay, unless they are deleted with it."""
    log, identity = way.new_log(), new_name()
    staging = way.namespace.open_staging_writer(identity=identity)
    staging.write_batch(log.name, batch("a"))
    staged = staging.stage()
    staging.close()
    staging.close(delete=False)
    for call, given in (
        (staging.write_batch, (log.name, batch("b"))),
        (staging.write_batches, ([(log.name, batch("b"))],)),
        (staging.stage, ()),
    ):
        with pytest.raises(AlreadyClosedError, match=identity):
            call(*given)
    with way.namespace.begin_append(identity, 1) as append:
        append.commit(staged)
    assert way.payloads(log) == [b"a"]
    dropped = way.namespace.open_staging_writer(identity=identity)
    dropped.write_batch(log.name, batch("never"))
    dropped.close(delete=True)
    assert way.payloads(log) == [b"a"]
