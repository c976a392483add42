"""Each method of a writer gives the same over all ways to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore.base.config import RECORD_SIZE_BYTES_MAX
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    EndOfStreamError,
    LogRecordTooLongError,
    OwnershipAcquireFailedError,
    ProducerFencedError,
    SchemaMismatchError,
    TransactionIdOutOfOrderError,
    UnsupportedError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.ways import Way

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
ROWS = pa.record_batch({"id": pa.array([1, 2], pa.int64()), "name": ["a", "b"]})


def numbered(*numbers: int) -> list[LogRecord]:
    """Return records whose transaction ids are their numbers."""
    return [LogRecord(number, b"%d" % number) for number in numbers]


def refused_by(error: type[Exception], log: Any, write: Callable[[Any], object]) -> None:
    """Require that a log takes no records that `write` writes."""
    writer = log.open_writer()
    with pytest.raises(error):
        flushed(writer, write)
    writer.abort()


def flushed(writer: Any, write: Callable[[Any], object]) -> None:
    """Write, and wait: a proxy may refuse records after the call."""
    write(writer)
    writer.flush()


def test_records_keep_their_order(way: Way) -> None:
    """One by one, in bulk, as batches and tables; the last one has the last position."""
    log = way.new_log()
    with log.open_writer() as writer:
        assert (writer.log_name, writer.log_id) == (log.name, log.log_id)
        assert log.name in repr(writer)
        assert writer.commit() is None
        writer.write(LogRecord(1, b"1"))
        bulk = writer.write_bulk(numbered(2, 3))
        assert (len(bulk) if way.is_async else bulk) == 2
        writer.write_batch(pa.record_batch({"txid": [4, 4], "value": [b"4", b"5"]}))
        assert writer.last_txid == (3 if way.has_proxies else 4)
        if way.is_async:
            writer.submit_batch(pa.record_batch({"value": pa.array([], pa.binary())}))
            writer.wait_for_capacity()
            writer.submit_table(pa.table({"txid": [6], "value": [b"6"]}))
        else:
            writer.write_table(pa.table({"txid": [6], "value": [b"6"]}))
        writer.flush()
        last = writer.commit()
        assert last == log.get_last_dlsn()
        if way.is_async:
            assert writer.last_dlsn == last
    with log.open_reader() as reader:
        txids = [each.txid for each in reader.records()]
    assert txids == [1, 2, 3, 4, 4, 6]
    writer.close()
    with pytest.raises(AlreadyClosedError):
        writer.write(LogRecord(7, b""))


def test_a_record_that_cannot_follow_is_refused_at_once(way: Way) -> None:
    """The writer stays usable."""
    log = way.new_log()
    with log.open_writer() as writer:
        writer.write(LogRecord(5, b"5"))
        with pytest.raises(TransactionIdOutOfOrderError):
            writer.write(LogRecord(4, b"4"))
        with pytest.raises(LogRecordTooLongError):
            writer.write(LogRecord(5, bytes(RECORD_SIZE_BYTES_MAX + 1)))
        for no_record in ("6", b"6"):
            for write, given in ((writer.write, no_record), (writer.write_bulk, [no_record])):
                with pytest.raises(
                    ConfigurationError, match=f"{no_record!r}: expected a LogRecord"
                ):
                    write(given)
        with pytest.raises(ConfigurationError, match="transaction id -1 is out of range"):
            writer.write(LogRecord(-1, b""))
        with pytest.raises(TransactionIdOutOfOrderError):
            writer.write_bulk(numbered(6, 3, 9))
        writer.write(LogRecord(7, b"7"))
        writer.commit()
    assert way.payloads(log) == [b"5", b"6", b"7"]


def test_rows_get_the_time_as_transaction_id(way: Way) -> None:
    """If they have none."""
    log = way.new_log()
    with log.open_writer() as writer:
        writer.write_batch(pa.record_batch({"value": [b"a", b"b"]}))
        writer.flush()
    (batch,) = log.read().to_arrow().to_batches()
    assert batch["value"].to_pylist() == [b"a", b"b"]
    assert min(batch["txid"].to_pylist()) > 1_600_000_000_000


def test_columns_are_those_of_the_log(way: Way) -> None:
    """A typed log takes no bytes, and a byte log no columns."""
    log = way.new_log(schema=SCHEMA)
    with log.open_writer() as writer:
        writer.write_batch(ROWS)
        writer.flush()
        if way.is_async:
            assert writer.is_typed or way.has_proxies  # which only the proxy knows
    assert log.read().to_arrow().to_pylist() == ROWS.to_pylist()
    null = pa.record_batch({"id": pa.array([None], pa.int64())})
    refused_by(SchemaMismatchError, log, lambda writer: writer.write(LogRecord(2**62, b"bytes")))
    refused_by(SchemaMismatchError, log, lambda writer: writer.write_batch(null))
    assert log.get_log_record_count() == 2
    plain = way.new_log()
    refused_by(ConfigurationError, plain, lambda writer: writer.write_batch(ROWS))
    assert plain.get_log_record_count() == 0


def test_a_writer_seals_its_log(way: Way) -> None:
    """After its records; then it takes no more."""
    log = way.new_log()
    writer = log.open_writer()
    writer.write(LogRecord(1, b"1"))
    writer.mark_end_of_stream()
    assert log.is_end_of_stream_marked()
    with pytest.raises((EndOfStreamError, AlreadyClosedError)):
        flushed(writer, lambda each: each.write(LogRecord(2, b"2")))
    writer.abort()
    assert way.payloads(log) == [b"1"]
    with pytest.raises(EndOfStreamError):
        log.open_writer()


def test_a_writer_that_was_aborted_writes_no_more(way: Way) -> None:
    """Records that were acknowledged stay."""
    log = way.new_log()
    writer = log.open_writer()
    writer.write(LogRecord(1, b"1"))
    writer.flush()
    writer.abort()
    with pytest.raises(AlreadyClosedError):
        writer.flush()
    writer.abort()
    with log.open_writer() as writer:
        writer.write(LogRecord(2, b"2"))
    assert way.payloads(log) == [b"1", b"2"]


def test_a_writer_drops_records(way: Way) -> None:
    """Only directly: beside proxies the log itself does it."""
    log = way.new_log()
    with log.open_writer() as writer:
        for record in numbered(1, 2, 3):
            writer.write(record)
            writer.flush()
        with way.only_directly():
            assert writer.truncate(DLSN(1, 1, 0))
            assert writer.truncate(txid=3)
            assert not writer.truncate(timestamp_ms=0)
            with pytest.raises(ConfigurationError, match="not none"):
                writer.truncate()
            with pytest.raises(ConfigurationError, match="dlsn='1:0:0'"):
                writer.truncate("1:0:0")
            assert log.get_first_txid() == 3


def test_a_writer_is_alone_or_has_a_producer(way: Way) -> None:
    """A direct one owns its log; through proxies many write, and each name numbers its records."""
    log = way.new_log()
    with log.open_writer() as writer:
        writer.write(LogRecord(1, b"1"))
        writer.flush()
        if not way.has_proxies:
            assert writer.producer is None
            assert log.status().writer is not None
            with pytest.raises(UnsupportedError, match="has no producer"):
                _ = writer.next_sequence
            other = way.open_another().open_log(log.name)
            with pytest.raises(OwnershipAcquireFailedError, match="is owned by"):
                other.open_writer()
            return
        assert writer.producer
        assert writer.next_sequence == 1
    old = log.open_writer(producer="meter")
    old.write(LogRecord(2, b"2"))
    old.flush()
    with log.open_writer(producer="meter") as new:
        assert (new.producer, new.next_sequence) == ("meter", 1)
        with pytest.raises(ProducerFencedError):
            flushed(old, lambda each: each.write(LogRecord(3, b"3")))
        old.abort()
    assert way.payloads(log) == [b"1", b"2"]


def test_a_writer_has_the_configuration_it_was_opened_with(way: Way) -> None:
    """The async one shows it."""
    log = way.new_log()
    with log.open_writer() as writer:
        if way.is_async:
            assert writer.config.buffer_bytes > 0
