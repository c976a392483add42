"""Each method of a namespace gives the same over all ways to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore.base.config import LogConfig, LogSettings, QuorumConfig
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    EndOfStreamError,
    LedgerNotFoundError,
    LogExistsError,
    LogNotFoundError,
    OwnershipAcquireFailedError,
    UnsupportedError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord, NotLessThan, RecordField
from dlcore.log.metadata.names import LogChangeKind
from tests.fixtures.ways import new_name

if TYPE_CHECKING:
    from tests.fixtures.ways import Way

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def test_logs_come_and_go(way: Way) -> None:
    """By their names, of which each has one log; a slash before a name says nothing."""
    namespace, name, other = way.namespace, new_name(), new_name()
    assert namespace.uri
    assert namespace.uri in repr(namespace)
    assert not namespace.log_exists(name)
    with pytest.raises(LogNotFoundError, match=name):
        namespace.open_log(name)
    namespace.create_log("/" + name)
    assert namespace.log_exists(name)
    log = namespace.open_log("/" + name, create_if_missing=True)
    assert (log.name, log.log_id) == (name, namespace.open_log(name).log_id)
    assert namespace.open_log(other, create_if_missing=True).log_id != log.log_id
    with pytest.raises(LogExistsError, match=name):
        namespace.create_log(name)
    assert {name, other} <= set(namespace.get_logs())
    assert namespace.get_logs() == sorted(namespace.get_logs())
    assert namespace.get_logs(name) == namespace.get_logs("/" + name) == [name]
    for taken in (name, other):
        with pytest.raises(LogExistsError):
            namespace.rename_log(other, taken)
    namespace.delete_log(other)
    namespace.rename_log(name, other)
    assert namespace.open_log(other).log_id == log.log_id
    assert not namespace.log_exists(name)
    namespace.delete_log(other)
    for gone in (namespace.delete_log, namespace.open_log):
        with pytest.raises(LogNotFoundError, match=other):
            gone(other)


def test_a_log_is_created_with_its_definition(way: Way) -> None:
    """Settings and columns are those of the log, for all who open it."""
    settings = LogSettings(retention_s=60, entry_bytes=4096)
    log = way.new_log(settings=settings, schema=SCHEMA)
    assert log.get_settings() == settings
    assert log.get_schema() == SCHEMA
    assert way.new_log().get_schema() is None
    with way.only_directly():
        way.namespace.create_log(new_name(), config=LogConfig(quorum=QuorumConfig()))


def test_an_owned_log_keeps_its_name(way: Way) -> None:
    """A direct writer owns it; a proxy that does so releases it."""
    namespace, log = way.namespace, way.new_log()
    with log.open_writer() as writer:
        writer.write(LogRecord(1, b"1"))
        writer.flush()
        if not way.has_proxies:
            for change in (namespace.delete_log, lambda name: namespace.rename_log(name, "new")):
                with pytest.raises(OwnershipAcquireFailedError, match="is owned by"):
                    change(log.name)
    new = new_name()
    namespace.rename_log(log.name, new)
    assert namespace.open_log(new).get_log_record_count() == 1


def test_names_are_listed_by_pages_and_watched(way: Way) -> None:
    """Only directly: proxies list all at once."""
    namespace, prefix = way.namespace, new_name() + "/"
    names = [f"{prefix}{number}" for number in range(5)]
    for name in names:
        namespace.create_log(name)
    with way.only_directly():
        pages = list(namespace.list_logs(prefix, page_size=2))
        assert [len(page) for page in pages] == [2, 2, 1]
        listed = [name for page in pages for name in page]
        assert sorted(listed) == names
        after = list(namespace.list_logs(prefix, after=listed[1]))
        assert [name for page in after for name in page] == listed[2:]
    with way.only_directly(), namespace.watch_logs(prefix) as watch:
        changes = watch.take(timeout_s=10)
        assert {(each.kind, each.name) for each in changes} <= {
            (LogChangeKind.CREATED, name) for name in names
        }
        assert changes


def test_snapshots_and_schemas_of_many_logs(way: Way) -> None:
    """By name; of one that does not exist there is none."""
    namespace, log, typed = way.namespace, way.new_log(1, 2), way.new_log(schema=SCHEMA)
    missing, names = new_name(), ["/" + log.name, typed.name]
    for fresh in (False, True):
        found = namespace.get_snapshots([*names, missing], fresh=fresh)
        assert set(found) == {log.name, typed.name, missing}
        assert found[missing] is None
        assert found[log.name].log_id == log.log_id
        assert (found[log.name].first, found[log.name].end) == (DLSN(1, 0, 0), DLSN(1, 2, 0))
        assert namespace.get_snapshots([], fresh=fresh) == {}
    with way.only_directly():
        surveyed = namespace.survey_logs([log.name, missing])
        assert surveyed == {log.name: found[log.name]}
    assert namespace.get_schemas([*names, missing]) == {log.name: None, typed.name: SCHEMA}
    log.mark_end_of_stream()
    assert namespace.get_schemas([log.name]) == {log.name: None}
    assert namespace.get_schemas([typed.name], for_write=True) == {typed.name: SCHEMA}
    with pytest.raises(EndOfStreamError, match=log.name):
        namespace.get_schemas(names, for_write=True)


def test_a_scan_has_the_records_of_its_range(way: Way) -> None:
    """As they were planned, at the places that were searched."""
    namespace, log = way.namespace, way.new_log(1, 2, 3)
    (snapshot,) = namespace.get_snapshots([log.name], fresh=True).values()
    searches = [
        DLSN(1, 1, 0),
        NotLessThan(RecordField.TXID, 2),
        NotLessThan(RecordField.SEQUENCE_ID, 1),
        NotLessThan(RecordField.TIMESTAMP_MS, 2**50),
    ]
    places = namespace.find_places([(snapshot, each) for each in searches])
    assert [each.dlsn for each in places] == [DLSN(1, 1, 0)] * 3 + [snapshot.end]
    assert [each.sequence_id for each in places] == [1, 1, 1, 3]
    (part,) = snapshot.scans(places[0].dlsn, snapshot.end)
    batches = list(namespace.scan(part))
    assert [value for each in batches for value in each.batch["value"].to_pylist()] == [b"2", b"3"]
    with way.only_directly():
        capabilities = namespace.grant([[part]], lifetime_s=60)
        assert [len(each) > 0 for each in capabilities] == [True]
    if not way.has_proxies:
        with pytest.raises(ConfigurationError, match="lifetime_s=0"):
            namespace.grant([], lifetime_s=0)


def test_a_merged_reader_has_many_logs_as_one(way: Way) -> None:
    """By transaction id, from a start or from positions."""
    namespace, odd, even = way.namespace, way.new_log(1, 3, 5), way.new_log(2, 4, 6)
    names = [odd.name, even.name]
    with namespace.open_merged_reader(names) as merged:
        assert "2 logs" in repr(merged)
        assert [each.record.txid for each in merged.read_bulk(2)] == [1, 2]
        for log_name, record in merged:
            assert (log_name, record.payload) == (odd.name, b"3")
            break
        assert [each.record.txid for each in merged.records()] == [4, 5, 6]
        assert merged.read_bulk(1) == []
        positions = merged.positions
    assert positions == {odd.name: DLSN(1, 3, 0), even.name: DLSN(1, 3, 0)}
    with namespace.open_merged_reader(names, txid=4) as merged:
        assert [each.log for each in merged.records()] == [even.name, odd.name, even.name]
    with namespace.open_merged_reader(names, txid=6, positions={odd.name: DLSN(1, 2, 0)}) as merged:
        assert [each.record.txid for each in merged.records()] == [5, 6]
    with namespace.open_merged_reader(names, timestamp_ms=2**50) as merged:
        for log in (odd, even):
            log.mark_end_of_stream()
        assert list(merged.records(follow=True)) == []


def test_a_fork_ends_where_objects_do(way: Way) -> None:
    """A log that has none yet says what to do; `test_forks.py` has logs with objects."""
    namespace, log = way.namespace, way.new_log(1, 2)
    for at in (None, DLSN(1, 1, 0)):
        with pytest.raises(ConfigurationError, match=log.name):
            namespace.fork_log(log.name, new_name(), at=at)


def test_rules_of_access_are_added_and_removed(way: Way) -> None:
    """In one step, and in their order."""
    namespace, rules = (
        way.namespace,
        ["allow * manage namespace", "allow user:alice read prefix pay/"],
    )
    assert namespace.get_access_rules() == []
    assert namespace.change_access_rules(add=rules) == rules
    assert namespace.get_access_rules() == rules
    with pytest.raises(ConfigurationError, match="bob"):
        namespace.change_access_rules(remove=["allow user:bob read prefix pay/"])
    assert namespace.change_access_rules(remove=rules[1:]) == rules[:1]
    assert namespace.change_access_rules(remove=rules[:1]) == []


def test_the_cluster_is_seen_directly(way: Way) -> None:
    """Bookies and ledgers, this client's work, and its metrics; proxies also through themselves."""
    namespace, log = way.namespace, way.new_log(1)
    assert len(namespace.get_proxies()) == way.has_proxies
    with way.only_directly():
        assert len(namespace.get_bookies()) >= 3
    with way.only_directly():
        ledgers = namespace.list_ledgers(first=0, count=1000)
        ledger_id = log.get_log_segments()[-1].extents[0].ledger_id
        assert namespace.get_ledger(ledger_id) == ledgers[ledger_id]
        assert set(namespace.list_ledgers(first=ledger_id, count=1)) == {ledger_id}
        with pytest.raises(LedgerNotFoundError):
            namespace.get_ledger(2**40)
    with log.open_writer() as writer:  # the records before came through another client
        writer.write(LogRecord(2, b"2"))
    with way.only_directly():
        assert namespace.get_statistics().entries_written > 0
    with way.only_directly():
        assert list(namespace.get_collector().collect())


def test_appenders_are_remembered(way: Way) -> None:
    """By their last version."""
    namespace, log, identity = way.namespace, way.new_log(), new_name()
    with namespace.begin_append(identity, 7) as append:
        append.write_batch(log.name, pa.record_batch({"value": [b"x"]}))
        append.commit()
    with way.only_directly():
        assert namespace.last_version(identity) == 7
        assert namespace.last_version(new_name()) == -1
    with way.only_directly():
        (status,) = (each for each in namespace.list_commits() if each.identity == identity)
        assert (status.version, status.appends) == (7, 1)


def test_a_damaged_log_is_deleted_by_request(way: Way) -> None:
    """Only if it is damaged, and only directly."""
    log = way.new_log(1)
    refusal = UnsupportedError if way.has_proxies else ConfigurationError
    with pytest.raises(refusal):
        way.namespace.delete_log(log.name, damaged=True)
    assert log.get_log_record_count() == 1


def test_a_closed_namespace_says_so(way: Way) -> None:
    """Also to its logs, readers and writers; it may be closed again."""
    log = way.new_log(1)
    namespace = way.open_another()
    opened = namespace.open_log(log.name)
    reader = opened.open_reader()
    for _ in range(2):
        namespace.close()
    with pytest.raises(AlreadyClosedError):
        namespace.get_logs()
    with pytest.raises(AlreadyClosedError):
        opened.get_snapshot()
    with pytest.raises(AlreadyClosedError):
        list(reader.records())
    assert log.get_log_record_count() == 1
