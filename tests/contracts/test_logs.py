"""Each method of a log gives the same over all ways to it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dlcore.base.config import LogConfig, LogSettings
from dlcore.base.errors import (
    AlreadyClosedError,
    AlreadyTruncatedError,
    ConditionFailedError,
    ConfigurationError,
    EndOfStreamError,
    LogEmptyError,
    LogExistsError,
    LogNotFoundError,
    UnsupportedError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord, NotLessThan, RecordField
from tests.fixtures.waiting import wait_until
from tests.fixtures.ways import new_name

if TYPE_CHECKING:
    from tests.fixtures.ways import Way

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
WIDER = SCHEMA.append(pa.field("km", pa.int64()))
YEARS = timedelta(days=3650)


def test_a_log_without_records_has_none_to_tell_of(way: Way) -> None:
    """Neither does one that was truncated to its end."""
    empty, truncated = way.new_log(), way.new_log(1, 2)
    assert truncated.truncate(truncated.get_snapshot().end)
    for log in (empty, truncated):
        for asked in (
            log.get_first_dlsn,
            log.get_last_dlsn,
            log.get_first_txid,
            log.get_last_txid,
            log.get_first_record,
            log.get_last_record,
        ):
            with pytest.raises(LogEmptyError, match=log.name):
                asked()
        assert log.get_log_record_count() == 0
        assert log.get_dlsn_not_less_than_txid(0) == log.get_snapshot().end
        assert log.get_dlsn_not_less_than_timestamp(0) == log.get_snapshot().end
        assert log.read().to_arrow().num_rows == 0
        status = log.status()
        assert (status.record_count, status.first, status.last, status.sealed) == (
            0,
            None,
            None,
            False,
        )
        assert not log.truncate(txid=1)


def test_records_are_found(way: Way) -> None:
    """By position, transaction id and time; the end answers for one that is yet to come."""
    log = way.new_log(10, 12, 14)
    way.write(log.name, 16, 18)
    places = [DLSN(1, 0, 0), DLSN(1, 1, 0), DLSN(1, 2, 0), DLSN(2, 0, 0), DLSN(2, 1, 0)]
    end = log.get_snapshot().end
    assert end == DLSN(2, 2, 0)
    assert (log.get_first_dlsn(), log.get_last_dlsn()) == (places[0], places[-1])
    assert (log.get_first_txid(), log.get_last_txid()) == (10, 18)
    first, last = log.get_first_record(), log.get_last_record()
    assert (first.dlsn, first.txid, first.payload) == (places[0], 10, b"10")
    assert (last.dlsn, last.sequence_id, last.payload) == (places[-1], 4, b"18")
    for number, place in enumerate([*places, end]):
        for txid in (9 + 2 * number, 10 + 2 * number):
            assert log.get_dlsn_not_less_than_txid(txid) == place
        assert log.get_log_record_count(place) == 5 - number
        assert log.get_log_record_count(end=place) == number
        if way.is_async:
            found = log.find_place(NotLessThan(RecordField.SEQUENCE_ID, number))
            assert (found.dlsn, found.sequence_id) == (place, number)
            assert log.find_place(place) == found
    assert log.get_log_record_count() == 5
    assert log.get_log_record_count(places[3], places[1]) == 0
    assert log.get_log_record_count(DLSN(9, 0, 0)) == 0
    assert log.get_dlsn_not_less_than_timestamp(0) == places[0]
    assert log.get_dlsn_not_less_than_timestamp(2**50) == end
    status = log.status()
    assert (status.name, status.log_id) == (log.name, log.log_id)
    assert (status.first, status.last, status.last_txid) == (places[0], places[-1], 18)
    assert (status.record_count, status.segment_count, status.sealed) == (5, 2, False)


def test_a_range_is_read(way: Way) -> None:
    """Half-open, by each kind of bound, with the wanted columns and rows."""
    log = way.new_log(10, 12, 14, 16)
    now = datetime.now(UTC)

    def values(*bounds: object, **options: object) -> list[bytes]:
        found: list[bytes] = log.read(*bounds, **options).to_arrow()["value"].to_pylist()
        return found

    assert values() == [b"10", b"12", b"14", b"16"]
    assert values(DLSN.INITIAL) == values(0) == values(now - YEARS) == values()
    assert values(DLSN(1, 1, 0), DLSN(1, 3, 0)) == values(11, 15) == [b"12", b"14"]
    assert values(13, DLSN(1, 3, 0)) == [b"14"]
    assert values(now + YEARS) == values(14, 12) == values(None, DLSN.INITIAL) == []
    assert values(where=pc.field("txid") > 12) == [b"14", b"16"]
    records = log.read(columns=["txid", "value"])
    assert records.schema.names == ["txid", "value"]
    assert records.to_arrow().to_pylist()[0] == {"txid": 10, "value": b"10"}
    assert records.to_pandas().txid.tolist() == [10, 12, 14, 16]
    assert records.to_polars()["txid"].to_list() == [10, 12, 14, 16]
    assert sum(batch.num_rows for batch in records) == 4
    assert records.extent.start == DLSN(1, 0, 0)
    assert log.name in f"{records!r} {records._repr_html_()}"
    if not way.is_async:
        assert pa.table(records)["txid"].to_pylist() == [10, 12, 14, 16]
    log.truncate(DLSN(1, 2, 0))
    assert values() == values(DLSN.INITIAL) == values(0) == [b"14", b"16"]
    for start in (DLSN(1, 1, 0), 12):
        with pytest.raises(AlreadyTruncatedError):
            log.read(start)


def test_records_are_dropped_from_the_beginning(way: Way) -> None:
    """By position, transaction id and time; each once."""
    log = way.new_log(10, 12, 14)
    way.write(log.name, 16)
    assert log.truncate(DLSN(1, 1, 0))
    assert log.get_first_txid() == 12
    assert not log.truncate(DLSN(1, 1, 0))
    assert log.truncate(txid=13)
    assert log.get_first_txid() == 14
    assert not log.truncate(timestamp_ms=0)
    assert not log.purge_logs_older_than(14)  # only whole segments go
    assert log.get_first_txid() == 14
    assert log.purge_logs_older_than(16)
    assert log.get_first_txid() == 16
    with way.only_directly():
        assert log.get_first_active_dlsn() == DLSN(2, 0, 0)
    assert log.truncate(timestamp_ms=2**50)
    assert log.get_log_record_count() == 0
    assert way.payloads(log) == []


def test_segments_are_seen_directly(way: Way) -> None:
    """As they are, and after each change."""
    log = way.new_log(1)
    way.write(log.name, 2)
    with way.only_directly():
        assert [each.lssn for each in log.get_log_segments()] == [1, 2]
    with way.only_directly():
        watch = log.watch_segments()
        assert [each.lssn for each in next(watch)] == [1, 2]
        way.write(log.name, 3)
        assert [each.lssn for each in next(watch)][-1] == 3
        watch.close()
    with way.only_directly():
        log.recover()


def test_settings_are_changed_by_name(way: Way) -> None:
    """None unsets one; all who have the log open see it."""
    log = way.new_log()
    other = way.open_another().open_log(log.name)
    changed = log.update_settings(retention_s=60, entry_bytes=4096)
    assert (changed.retention_s, changed.entry_bytes) == (60, 4096)
    assert log.get_settings() == other.get_settings() == changed
    again = log.update_settings(entry_bytes=None)
    assert (again.retention_s, again.entry_bytes) == (60, None)
    assert other.update_settings() == again


def test_columns_are_added(way: Way) -> None:
    """To those of a typed log, and to no other log that has its name later."""
    log, plain = way.new_log(schema=SCHEMA), way.new_log()
    assert log.get_schema() == SCHEMA
    assert log.update_schema(WIDER, merge=True) == WIDER
    assert log.update_schema(SCHEMA, merge=True) == WIDER
    assert log.get_schema() == WIDER
    with way.only_directly():
        assert log.update_schema(WIDER.append(pa.field("fare", pa.float64()))).names[-1] == "fare"
    assert plain.get_schema() is None
    log.delete()
    way.making.create_log(log.name, schema=SCHEMA)
    with pytest.raises(LogNotFoundError):
        log.update_schema(WIDER, merge=True)
    assert way.namespace.open_log(log.name).get_schema() == SCHEMA


def test_subscriptions_are_moved_and_forgotten(way: Way) -> None:
    """Without a reader."""
    log = way.new_log(1, 2, 3)
    assert log.get_subscriptions() == {}
    assert log.move_subscription("s", txid=2) == DLSN(1, 1, 0)
    assert log.move_subscription("t", dlsn=DLSN(1, 2, 0)) == DLSN(1, 2, 0)
    assert log.move_subscription("u", timestamp_ms=0) == DLSN(1, 0, 0)
    assert log.move_subscription("v") == DLSN.INITIAL
    assert log.get_subscriptions() == {
        "s": DLSN(1, 1, 0),
        "t": DLSN(1, 2, 0),
        "u": DLSN(1, 0, 0),
        "v": DLSN.INITIAL,
    }
    for name in "tuv":
        assert log.delete_subscription(name)
        assert not log.delete_subscription(name)
    log.truncate(DLSN(1, 2, 0))
    with pytest.raises(AlreadyTruncatedError):
        log.move_subscription("s", txid=2)
    assert log.get_subscriptions() == {"s": DLSN(1, 1, 0)}


def test_a_sealed_log_takes_no_more(way: Way) -> None:
    """And is sealed once."""
    log = way.new_log(1, 2)
    assert not log.is_end_of_stream_marked()
    log.mark_end_of_stream()
    assert log.is_end_of_stream_marked()
    assert log.status().sealed
    for refused in (log.mark_end_of_stream, log.open_writer, log.open_stream_writer):
        with pytest.raises(EndOfStreamError, match=log.name):
            refused()
    assert way.payloads(log) == [b"1", b"2"]


def test_a_manager_renames_and_deletes_its_log(way: Way) -> None:
    """It goes on under the new name; a log that is gone is no error to delete."""
    log, new = way.new_log(1), new_name()
    old = log.name
    with pytest.raises(LogExistsError):
        log.rename(old)
    log.rename(new)
    assert log.name == new
    assert new in repr(log)
    way.write(log.name, 2)
    assert way.payloads(log) == [b"1", b"2"]
    assert not way.namespace.log_exists(old)
    for _ in range(2):
        log.delete()
    with pytest.raises(LogNotFoundError):
        log.rename(old)


def test_a_manager_of_a_deleted_log_has_nothing_of_another_one(way: Way) -> None:
    """Nothing tells of the log that was made under its name, or changes it."""
    log = way.new_log(1, 2)
    found = log.read()
    assert found.to_arrow().num_rows == 2
    log.delete()
    way.making.create_log(log.name)
    way.write(log.name, 7, 8, 9)
    log.delete()  # which is done
    for gone in (
        found.to_arrow,
        log.read,
        lambda: log.read(DLSN(1, 1, 0)),
        log.get_snapshot,
        log.status,
        log.get_first_dlsn,
        log.get_last_txid,
        log.get_log_record_count,
        lambda: log.get_log_record_count(DLSN(1, 1, 0)),
        lambda: log.get_dlsn_not_less_than_txid(1),
        log.get_settings,
        lambda: log.update_settings(retention_s=60),
        log.get_schema,
        log.get_subscriptions,
        lambda: log.move_subscription("s", dlsn=DLSN(1, 1, 0)),
        lambda: log.truncate(DLSN(1, 1, 0)),
        log.is_end_of_stream_marked,
        log.mark_end_of_stream,
        log.open_reader,
        lambda: log.open_reader(dlsn=DLSN(1, 1, 0)),
        log.open_writer,
        log.open_stream_reader,
        log.open_stream_writer,
    ):
        with pytest.raises(LogNotFoundError):
            gone()
    other = way.namespace.open_log(log.name)
    assert other.log_id != log.log_id
    assert way.payloads(other) == [b"7", b"8", b"9"]
    assert (other.status().sealed, other.get_settings().retention_s) == (False, None)
    assert other.get_subscriptions() == {}


def test_a_running_writer_takes_new_settings(way: Way) -> None:
    """As another client changed them."""
    log = way.new_log(settings=LogSettings(entry_bytes=200))
    with log.open_writer() as writer:
        writer.write(LogRecord(1, b"x" * 88))
        writer.flush()
        changed = way.open_another().open_log(log.name).update_settings(segment_bytes_max=400)
        assert changed == LogSettings(entry_bytes=200, segment_bytes_max=400)

        def is_taken() -> bool:
            writer.write(LogRecord(1, b"x" * 88))
            writer.flush()
            return bool(log.status().segment_count > 1)

        wait_until(is_taken, timeout_s=30)


@pytest.mark.parametrize("way", ["blocking"], indirect=True)
@pytest.mark.parametrize("config", [LogConfig(flush_interval_s=0.02), LogConfig(buffer_bytes=0)])
def test_waiting_records_are_written_without_a_call(way: Way, config: LogConfig) -> None:
    """After an interval, or at once; without an interval they wait for a call."""
    log, waits = way.new_log(), LogConfig(flush_interval_s=0)
    patient = way.namespace.open_log(way.new_log().name, config=waits)
    with patient.open_writer() as waiting:
        waiting.write(LogRecord(1, b"a"))
        with way.namespace.open_log(log.name, config=config).open_writer() as writer:
            for txid in (1, 2):
                writer.write(LogRecord(txid, b"a"))
            wait_until(lambda: log.get_log_record_count() == 2, timeout_s=30)
        assert patient.get_log_record_count() == 0
    assert patient.get_log_record_count() == 1


def test_records_are_appended_on_a_condition(way: Way) -> None:
    """That the caller knows the last one; only through proxies."""
    log = way.new_log()
    with way.only_by_proxies():
        last = log.append([LogRecord(1, b"1"), LogRecord(2, b"2")], expected=None)
        assert last == DLSN(1, 0, 1)
        batch = pa.record_batch({"txid": [3], "value": [b"3"]})
        last = log.append(batch, expected=last)
        with pytest.raises(ConditionFailedError) as failed:
            log.append([LogRecord(4, b"4")], expected=None)
        assert failed.value.last == str(last)
        assert way.payloads(log) == [b"1", b"2", b"3"]
        assert last == log.get_last_dlsn()
        with pytest.raises(ConfigurationError, match="has no records"):
            log.append([], expected=last)


def test_a_closed_manager_says_so(way: Way) -> None:
    """But its readers go on."""
    log = way.new_log(1)
    reader = log.open_reader()
    log.close()
    for call in (log.get_snapshot, log.open_reader, log.open_writer, log.status, log.get_settings):
        with pytest.raises(AlreadyClosedError):
            call()
    assert len(list(reader.records())) == 1
    reader.close()


def test_a_writer_is_of_its_kind(way: Way) -> None:
    """Arguments of the other kind are refused by name."""
    log = way.new_log()
    with way.only_by_proxies():
        log.open_writer(producer="p").close()
    with way.only_directly():
        log.open_writer(ledger_metadata={"owner": "me"}).close()
    with way.only_by_proxies():
        log.open_reader(columns=["txid"]).close()
    for option in ("skip_broken_entries", "ignore_truncation"):
        with way.only_directly():
            log.open_reader(**{option: True}).close()
    if not way.has_proxies:
        with pytest.raises(UnsupportedError, match="producer='p' is for clients of proxies"):
            log.open_writer(producer="p")
