"""Each method of a namespace gives the same over all ways to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore.base.access.capability import LIFETIME_S_MAX
from dlcore.base.config import LogConfig, LogSettings, QuorumConfig
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    EndOfStreamError,
    LedgerNotFoundError,
    LogExistsError,
    LogNotFoundError,
    UnsupportedError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord, NotLessThan, RecordField
from dlcore.log.metadata.names import LogChangeKind
from tests.fixtures.staged_records import batch
from tests.fixtures.ways import new_name

if TYPE_CHECKING:
    from collections.abc import Callable

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
    quorum = QuorumConfig(ensemble_size=2, write_quorum_size=2, ack_quorum_size=2)
    with way.only_directly():
        namespace, name = way.namespace, new_name()
        namespace.create_log(name, config=LogConfig(quorum=quorum))
        way.write(name, 1)  # each writer uses it
        (segment,) = namespace.open_log(name).get_log_segments()
        assert namespace.get_ledger(segment.extents[0].ledger_id).quorum == quorum


def test_names_are_listed_by_pages_and_watched(way: Way) -> None:
    """Each once, also those with long names; only directly, for proxies list all at once."""
    namespace, prefix = way.namespace, new_name() + "/"
    names = sorted(
        {*(f"{prefix}{n}" for n in range(12)), *(f"{prefix}{'ä' * 200}{n}" for n in "ab")}
    )
    for name in names:
        namespace.create_log(name)
    assert namespace.get_logs(prefix) == names
    assert namespace.get_logs(prefix + "1") == [f"{prefix}{n}" for n in ("1", "10", "11")]
    with way.only_directly():
        pages = list(namespace.list_logs("/" + prefix, page_size=5))
        assert [len(page) for page in pages] == [5, 5, 4]
        listed = [name for page in pages for name in page]
        assert sorted(listed) == names
        for at in (0, 4, 12, 13):
            after = list(namespace.list_logs(prefix, after=listed[at]))
            assert [name for page in after for name in page] == listed[at + 1 :]
        assert list(namespace.list_logs(prefix + "nothing")) == []
        with pytest.raises(ConfigurationError, match="page_size=0"):
            list(namespace.list_logs(prefix, page_size=0))
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
        for lifetime_s in (0, -1, LIFETIME_S_MAX + 1):
            with pytest.raises(ConfigurationError, match=f"lifetime_s={lifetime_s}: expected 1 … "):
                namespace.grant([], lifetime_s=lifetime_s)


def test_a_merged_reader_has_many_logs_as_one(way: Way) -> None:
    """By transaction id, from a start or from positions."""
    namespace, odd, even = way.namespace, way.new_log(1, 3, 5), way.new_log(2, 4, 6)
    names = [odd.name, even.name]
    with namespace.open_merged_reader(names) as merged:
        assert "2 logs" in repr(merged)
        taken: list[int] = []
        while len(taken) < 2:  # a call returns up to so many, of the entries that have arrived
            taken += [each.record.txid for each in merged.read_bulk(2 - len(taken))]
        assert taken == [1, 2]
        for log_name, record in merged:
            assert (log_name, record.payload) == (odd.name, b"3")
            break
        assert [each.record.txid for each in merged.records()] == [4, 5, 6]
        assert merged.read_bulk(1) == []
        with pytest.raises(ConfigurationError, match="count=0"):
            merged.read_bulk(0)
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
    namespace = way.open_another()  # which has done nothing yet
    with namespace.open_log(log.name).open_writer() as writer:
        writer.write(LogRecord(2, b"2" * 100))
        writer.flush()
        with way.only_directly():
            now = namespace.get_statistics()
            assert (now.entries_written, now.open_ledgers, now.sessions_lost) == (1, 1, 0)
            assert now.bytes_written > 100
            assert now.open_objects == {"AsyncLogWriter": 1}
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


def test_snapshots_that_are_taken_again(way: Way) -> None:
    """They are those of another client, after writes, truncation, deletion and a new log."""
    namespace, log, missing = way.namespace, way.new_log(1, 2), new_name()
    name = log.name

    def same() -> Any:
        found = namespace.get_snapshots([name, missing], fresh=True)
        assert found == {**way.making.get_snapshots([name], fresh=True), missing: None}
        return found[name]

    first = same()
    assert same() == first
    for txid in (3, 4, 5):
        way.write(name, txid)
        assert same() != first
    for truncated in (DLSN(2, 0, 0), DLSN(3, 1, 0)):
        log.truncate(truncated)
        assert same().first >= truncated
    way.making.delete_log(name)
    assert same() is None
    way.making.create_log(name)
    assert same().log_id != first.log_id
    way.write(name, 1)
    assert same().first == DLSN(1, 0, 0)


def calls_of_namespace(way: Way, namespace: Any, name: str) -> list[Callable[[], object]]:
    """Return what can be asked of a namespace."""
    calls: list[Callable[[], object]] = [
        lambda: namespace.create_log(new_name()),
        lambda: namespace.delete_log(name),
        lambda: namespace.rename_log(name, new_name()),
        lambda: namespace.log_exists(name),
        lambda: namespace.open_log(name, create_if_missing=True),
        lambda: namespace.get_snapshots([name]),
        lambda: namespace.begin_append("job", 2),
        lambda: namespace.open_staging_writer(identity="job"),
        lambda: namespace.open_merged_reader([name]),
        namespace.get_logs,
        namespace.get_access_rules,
    ]
    if not way.has_proxies:
        calls += [
            lambda: next(namespace.list_logs()),
            namespace.watch_logs,
            namespace.get_bookies,
            lambda: namespace.get_ledger(1),
            lambda: namespace.grant([]),
        ]
    return calls


def calls_of_log(way: Way, log: Any) -> list[Callable[[], object]]:
    """Return what can be asked of a log."""
    calls: list[Callable[[], object]] = [
        log.open_writer,
        log.open_reader,
        log.open_stream_writer,
        log.open_stream_reader,
        log.read,
        log.status,
        log.get_snapshot,
        log.get_first_dlsn,
        log.get_last_dlsn,
        log.get_last_txid,
        log.get_log_record_count,
        log.get_schema,
        log.get_settings,
        log.get_subscriptions,
        log.is_end_of_stream_marked,
        lambda: log.update_settings(compression="lz4"),
        lambda: log.get_dlsn_not_less_than_txid(1),
        lambda: log.get_dlsn_not_less_than_timestamp(1),
        lambda: log.truncate(DLSN(1, 0, 1)),
        lambda: log.purge_logs_older_than(1),
        lambda: log.move_subscription("s"),
        log.mark_end_of_stream,
        lambda: log.rename(new_name()),
        log.delete,
    ]
    if not way.has_proxies:
        calls += [log.get_log_segments, log.get_first_active_dlsn, log.recover]
    return calls


def test_a_closed_namespace_says_so(way: Way) -> None:
    """Also to all that was opened on it, by one error; it may be closed again."""
    making, namespace = way.new_log(1), way.open_another()
    log = namespace.open_log(making.name)
    reader = log.open_reader()
    append = namespace.begin_append(new_name(), 1)
    staging = namespace.open_staging_writer(identity=new_name())
    for writing in (append, staging):
        writing.write_batch(log.name, batch("a"))
    calls = [
        *calls_of_namespace(way, namespace, log.name),
        *calls_of_log(way, log),
        lambda: reader.read_next(**way.caught_up),
        lambda: reader.seek(txid=1),
        lambda: list(reader.records()),
        lambda: append.write_batch(log.name, batch("a")),
        append.commit,
        append.abort,
        lambda: staging.write_batch(log.name, batch("a")),
        staging.stage,
    ]
    if not way.has_proxies:
        watch = namespace.watch_logs()
        calls.append(watch.take)
    for _ in range(2):
        namespace.close()
    for call in calls:
        with pytest.raises(AlreadyClosedError, match="closed") as caught:
            call()
        assert "metadata store" not in str(caught.value)
    for opened in (reader, append, staging, log):
        opened.close()
    assert making.get_log_record_count() == 1
