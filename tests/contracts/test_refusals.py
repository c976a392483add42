"""The public API refuses the same arguments by the same errors, over all ways to it.

Goal: a mistake is reported where it is made, and not by the error of another back end.  Method:
each call gets a wrong argument; its error names the value and what would be right.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore.base.errors import (
    ConfigurationError,
    InvalidLogNameError,
    LogNotFoundError,
    SchemaMismatchError,
)
from dlcore.base.ids import DLSN, TXID_MAX
from dlcore.base.records import NotLessThan, RecordField
from tests.fixtures.ways import new_name

if TYPE_CHECKING:
    from tests.fixtures.ways import Way

INITIAL = DLSN.INITIAL
NO_NAMES = [b"clicks", "", "a//b", "a/../b", "tail/", ".hidden", "a b", 5, None]
NO_LISTS = ["clicks", b"clicks", 5, None]
NO_NUMBERS = ["5", 1.5, True]
NO_POSITIONS = ["1:0:0", 5, (1, 0, 0)]
NO_IDENTITIES = ["", "x" * 201, b"job", 5, None]
NO_VERSIONS = [-1, 2**63, "1", 1.5, True, None]
NO_SUBSCRIBERS = ["", "x" * 201, b"s", 5]
SCHEMA = pa.schema({"id": pa.int64()})


def refuse(
    way: Way, error: type[Exception], shown: object, call: Any, *given: Any, **named: Any
) -> None:
    """Require that a call is refused by an error that shows a value."""
    with pytest.raises(error) as refused:
        call(*given, **named)
    assert type(refused.value) is error, (way, refused.value)
    assert repr(shown) in str(refused.value), refused.value


@pytest.mark.parametrize("name", NO_NAMES)
def test_no_log_has_such_a_name(way: Way, name: Any) -> None:
    """Whichever call gets it, also one that would create a log."""
    namespace, log = way.namespace, way.new_log()
    before = namespace.get_logs()
    calls = [
        namespace.create_log,
        namespace.open_log,
        namespace.delete_log,
        namespace.log_exists,
        log.rename,
    ]
    for call in calls:
        refuse(way, InvalidLogNameError, name, call, name)
    for call in (namespace.rename_log, namespace.fork_log):
        refuse(way, InvalidLogNameError, name, call, log.name, name)
        refuse(way, InvalidLogNameError, name, call, name, "other")
    for call in (namespace.get_snapshots, namespace.get_schemas, namespace.open_merged_reader):
        refuse(way, InvalidLogNameError, name, call, [name])
    if not way.has_proxies and name is not None:
        refuse(way, InvalidLogNameError, name, namespace.list_logs, after=name)
    assert namespace.get_logs() == before


@pytest.mark.parametrize("names", NO_LISTS)
def test_names_are_a_list(way: Way, names: Any) -> None:
    """One text is none, whose letters would be names."""
    namespace = way.namespace
    for call in (namespace.get_snapshots, namespace.get_schemas, namespace.open_merged_reader):
        refuse(way, ConfigurationError, names, call, names)


@pytest.mark.parametrize("prefix", [5, b"a", ["a"]])
def test_a_prefix_is_text(way: Way, prefix: Any) -> None:
    """In all calls that list names."""
    namespace = way.namespace
    refuse(way, InvalidLogNameError, prefix, namespace.get_logs, prefix)
    if not way.has_proxies:
        refuse(way, InvalidLogNameError, prefix, namespace.list_logs, prefix)
        refuse(way, InvalidLogNameError, prefix, namespace.watch_logs, prefix)


def test_a_log_is_created_with_what_is_meant(way: Way) -> None:
    """Settings, a configuration, and columns that a log may have."""
    namespace, name = way.namespace, new_name()
    for settings in (5, {"retention_s": 5}):
        refuse(way, ConfigurationError, settings, namespace.create_log, name, settings=settings)
    refuse(way, ConfigurationError, 5, namespace.create_log, name, config=5)
    with pytest.raises(ConfigurationError, match="schema=5"):
        namespace.create_log(name, schema=5)
    for columns in ({}, {"_txid": pa.int64()}):
        with pytest.raises(ConfigurationError):
            namespace.create_log(name, schema=pa.schema(columns))
    assert not namespace.log_exists(name)
    log = way.new_log()
    refuse(way, ConfigurationError, 5, namespace.open_log, log.name, config=5)


@pytest.mark.parametrize("identity", NO_IDENTITIES)
def test_an_appender_has_a_name(way: Way, identity: Any) -> None:
    """Before anything is staged under it."""
    namespace = way.namespace
    refuse(way, ConfigurationError, identity, namespace.begin_append, identity, 0)
    refuse(way, ConfigurationError, identity, namespace.open_staging_writer, identity=identity)


@pytest.mark.parametrize("version", NO_VERSIONS)
def test_a_version_is_a_number(way: Way, version: Any) -> None:
    """That can be stored; before anything is staged for it."""
    refuse(way, ConfigurationError, version, way.namespace.begin_append, "job", version)


def test_an_append_takes_values_of_their_kinds(way: Way) -> None:
    """And a time that is not over before it begins."""
    begin = way.namespace.begin_append
    for key, value in (
        ("shared", 5),
        ("run", 5),
        ("lock_timeout_s", "1"),
        ("lock_timeout_s", -1),
    ):
        refuse(way, ConfigurationError, value, begin, "job", 0, **{key: value})


@pytest.mark.parametrize("subscriber", NO_SUBSCRIBERS)
def test_a_subscriber_has_a_name(way: Way, subscriber: Any) -> None:
    """In each call that gets one."""
    log = way.new_log()
    refuse(way, ConfigurationError, subscriber, log.open_reader, subscriber=subscriber)
    move = log.move_subscription
    refuse(way, ConfigurationError, subscriber, move, subscriber, dlsn=INITIAL)
    refuse(way, ConfigurationError, subscriber, log.delete_subscription, subscriber)
    assert log.get_subscriptions() == {}


@pytest.mark.parametrize("number", NO_NUMBERS)
def test_ids_and_times_are_whole_numbers(way: Way, number: Any) -> None:
    """In each call that gets one."""
    log = way.new_log()
    for key in ("txid", "timestamp_ms"):
        named = {key: number}
        refuse(way, ConfigurationError, number, log.open_reader, **named)
        refuse(way, ConfigurationError, number, log.truncate, **named)
        refuse(way, ConfigurationError, number, log.move_subscription, "s", **named)
        refuse(
            way, ConfigurationError, number, way.namespace.open_merged_reader, [log.name], **named
        )
    refuse(way, ConfigurationError, number, log.get_dlsn_not_less_than_txid, number)
    refuse(way, ConfigurationError, number, log.get_dlsn_not_less_than_timestamp, number)
    refuse(way, ConfigurationError, number, log.purge_logs_older_than, number)
    refuse(way, ConfigurationError, number, log.read, number)
    refuse(way, ConfigurationError, number, log.read, None, number)
    refuse(way, ConfigurationError, number, log.open_stream_reader, number)
    for field in RecordField:
        refuse(way, ConfigurationError, number, NotLessThan, field, number)


@pytest.mark.parametrize("position", NO_POSITIONS)
def test_positions_are_dlsns(way: Way, position: Any) -> None:
    """Text of one is none, so that a position is never a guess."""
    log = way.new_log(1, 2)
    refuse(way, ConfigurationError, position, log.open_reader, dlsn=position)
    refuse(way, ConfigurationError, position, log.truncate, position)
    refuse(way, ConfigurationError, position, log.move_subscription, "s", dlsn=position)
    refuse(way, ConfigurationError, position, log.get_log_record_count, position)
    refuse(way, ConfigurationError, position, log.get_log_record_count, end=position)
    searches = [(log.get_snapshot(), position)]
    with pytest.raises(ConfigurationError, match="expected a DLSN or NotLessThan"):
        way.namespace.find_places(searches)
    if way.is_async:  # the blocking face has `get_dlsn_not_less_than_…` only
        refuse(way, ConfigurationError, position, log.find_place, position)
    if not isinstance(position, int):  # which is a transaction id there
        refuse(way, ConfigurationError, position, log.read, position)
        refuse(way, ConfigurationError, position, log.read, None, position)
    positions = {log.name: position}
    merge = way.namespace.open_merged_reader
    refuse(way, ConfigurationError, position, merge, [log.name], positions=positions)
    assert log.get_log_record_count() == 2


def test_a_start_is_named_once(way: Way) -> None:
    """And a truncation has one, within the log."""
    log = way.new_log(1, 2)
    both = {"dlsn": INITIAL, "txid": 1}
    for call in (log.open_reader, log.truncate):
        with pytest.raises(ConfigurationError, match="expected one of dlsn, txid and timestamp_ms"):
            call(**both)
    with pytest.raises(ConfigurationError, match="expected one of dlsn, txid and timestamp_ms"):
        log.move_subscription("s", **both)
    with pytest.raises(ConfigurationError, match=r"expected one of dlsn, .* not none"):
        log.truncate()
    with pytest.raises(ConfigurationError, match="position 9:0:0 lies past the end"):
        log.truncate(DLSN(9, 0, 0))
    with log.open_reader() as reader:
        with pytest.raises(ConfigurationError, match="expected one of dlsn, txid and timestamp_ms"):
            reader.seek(**both)
        for position in NO_POSITIONS:
            refuse(way, ConfigurationError, position, reader.seek, dlsn=position)
        assert len(list(reader.records())) == 2


@pytest.mark.parametrize("txid", [2**63 - 1, 10**30])
def test_no_record_has_a_higher_transaction_id(way: Way, txid: int) -> None:
    """No reader waits for it, and the highest one is named; a range may end there."""
    log = way.new_log(1, 2)
    rule = f"txid={txid}: expected at most {TXID_MAX}"
    with pytest.raises(ConfigurationError, match=rule):
        log.open_reader(txid=txid)
    with pytest.raises(ConfigurationError, match=rule):
        log.truncate(txid=txid)
    with pytest.raises(ConfigurationError, match=rule):
        log.move_subscription("s", txid=txid)
    with log.open_reader() as reader, pytest.raises(ConfigurationError, match=rule):
        reader.seek(txid=txid)
    with pytest.raises(ConfigurationError, match=rule):
        way.namespace.open_merged_reader([log.name], txid=txid)
    end = log.get_snapshot().end
    assert log.get_dlsn_not_less_than_txid(txid) == end
    assert log.read(0, txid).to_arrow().num_rows == 2
    assert log.read(txid).to_arrow().num_rows == 0
    for field in (RecordField.TXID, RecordField.SEQUENCE_ID):
        (place,) = way.namespace.find_places([(log.get_snapshot(), NotLessThan(field, txid))])
        assert (place.dlsn, place.sequence_id) == (end, 2)


def test_a_number_below_all_means_the_first_record(way: Way) -> None:
    """As 0 does."""
    log = way.new_log(1, 2)
    first = log.get_first_dlsn()
    assert log.get_dlsn_not_less_than_txid(-1) == first
    assert log.get_dlsn_not_less_than_timestamp(-1) == first
    assert log.read(-1).to_arrow().num_rows == 2
    assert not log.truncate(txid=-1)
    for named in ({"txid": -1}, {"timestamp_ms": -1}):
        with log.open_reader(**named) as reader:
            assert reader.position == first


def test_a_range_has_bounds_and_columns(way: Way) -> None:
    """Times have a zone, and columns are a list of those that the log has."""
    log = way.new_log(1, 2)
    local = datetime(2024, 1, 1)  # noqa: DTZ001  # refused
    refuse(way, ConfigurationError, local, log.read, local)
    refuse(way, ConfigurationError, local, log.read, None, local)
    for columns in ("value", 5):
        refuse(way, ConfigurationError, columns, log.read, columns=columns)
    refuse(way, SchemaMismatchError, "nothing", log.read, columns=["nothing"])
    with pytest.raises(SchemaMismatchError, match="where=5"):
        log.read(where=5)
    assert log.read(datetime(1, 1, 1, tzinfo=UTC)).to_arrow().num_rows == 2
    assert log.read(datetime(9999, 1, 1, tzinfo=UTC)).to_arrow().num_rows == 0


def test_settings_have_names_and_kinds(way: Way) -> None:
    """None is changed with a wrong one."""
    log = way.new_log()
    before = log.get_settings()
    for key, value in (
        ("speed", 1),
        ("self", 1),
        ("retention_s", "long"),
        ("retention_s", object()),
        ("retention_s", -1),
        ("mode", "no"),
    ):
        with pytest.raises(ConfigurationError, match=key):
            log.update_settings(entry_bytes=4096, **{key: value})
    assert log.get_settings() == before


def test_columns_of_a_log_are_its_own(way: Way) -> None:
    """A byte log has none, and those of a typed log only widen."""
    log, typed = way.new_log(), way.new_log(schema=SCHEMA)
    for each in (log, typed):
        with pytest.raises(ConfigurationError, match="schema=5"):
            each.update_schema(5, merge=True)
    refuse(way, SchemaMismatchError, log.name, log.update_schema, SCHEMA, merge=True)
    text = pa.schema({"id": pa.string()})
    refuse(way, SchemaMismatchError, typed.name, typed.update_schema, text, merge=True)
    for call in (typed.open_stream_reader, typed.open_stream_writer):
        refuse(way, SchemaMismatchError, typed.name, call)
    with pytest.raises(SchemaMismatchError):
        way.namespace.open_merged_reader([typed.name])
    assert typed.get_schema() == SCHEMA


def test_rules_of_access_are_texts_of_rules(way: Way) -> None:
    """In a list."""
    namespace = way.namespace
    rule = "allow user:alice read prefix pay/"
    for add in (["nonsense"], [5], rule):
        with pytest.raises(ConfigurationError):
            namespace.change_access_rules(add=add)
    assert namespace.get_access_rules() == []


def test_a_log_that_is_not_there(way: Way) -> None:
    """Is named by the error; `test_namespaces.py` has the other calls."""
    namespace, name = way.namespace, new_name()
    refuse(way, LogNotFoundError, name, namespace.rename_log, name, new_name())
    refuse(way, LogNotFoundError, name, namespace.open_merged_reader, [name])
    with pytest.raises((LogNotFoundError, ConfigurationError), match=name):
        namespace.fork_log(name, new_name())


def test_a_merged_reader_names_logs_once(way: Way) -> None:
    """One at least, and positions only of these."""
    log = way.new_log(1)
    merge = way.namespace.open_merged_reader
    for names in ([], [log.name, log.name]):
        with pytest.raises(ConfigurationError):
            merge(names)
    with pytest.raises(ConfigurationError, match="other"):
        merge([log.name], positions={"other": INITIAL})
    with pytest.raises(ConfigurationError):
        merge([log.name], txid=1, timestamp_ms=1)
