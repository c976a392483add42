"""Over all ways a log keeps its records when it is renamed, and has one name at a time.

Goal: a client that knows a log by an earlier name goes on with the same log, or gets an error, and
never another log with that name.  Method: each test renames a log that something has open.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    AppendAbortedError,
    AppendMismatchError,
    LogNotFoundError,
    LogRenamedError,
    OwnershipAcquireFailedError,
)
from dlcore.base.records import LogRecord
from tests.contracts.test_writers import flushed
from tests.fixtures.staged_records import batch
from tests.fixtures.ways import new_name

if TYPE_CHECKING:
    from tests.fixtures.ways import Way


def test_a_log_that_another_client_writes_keeps_its_name(way: Way) -> None:
    """It is neither renamed nor deleted nor sealed, and its writer goes on."""
    namespace, log, new = way.namespace, way.new_log(), new_name()
    with way.making.open_log(log.name).open_writer() as writer:
        for call, given in (
            (namespace.delete_log, (log.name,)),
            (namespace.rename_log, (log.name, new)),
            (log.mark_end_of_stream, ()),
        ):
            with pytest.raises(OwnershipAcquireFailedError, match="is owned by"):
                call(*given)
        writer.write(LogRecord(1, b"1"))
    assert way.payloads(log) == [b"1"]
    namespace.rename_log(log.name, new)
    assert namespace.get_logs(new) == [new]


@pytest.mark.parametrize("back_end", ["proxies"], indirect=True)
def test_a_proxy_that_owns_a_log_renames_it(way: Way) -> None:
    """Its clients share the log; a writer that goes on by the old name learns the new one."""
    log, new = way.new_log(), new_name()
    writer = log.open_writer()
    writer.write(LogRecord(1, b"1"))
    writer.flush()
    way.open_another().rename_log(log.name, new)
    with pytest.raises(LogRenamedError, match=f"is called '{new}' by now"):
        flushed(writer, lambda each: each.write(LogRecord(2, b"2")))
    writer.abort()
    assert way.payloads(way.namespace.open_log(new)) == [b"1"]


def test_a_reader_that_waits_goes_on_over_a_rename(way: Way) -> None:
    """It gets what is written under the new name."""
    log, new = way.new_log(1), new_name()
    with log.open_reader() as reader, ThreadPoolExecutor(1) as thread:
        records = reader.records(follow=True)
        assert next(records).txid == 1
        waiting = thread.submit(next, records)
        way.open_another().rename_log(log.name, new)
        way.write(new, 2)
        assert waiting.result(60).txid == 2


def test_a_manager_goes_on_after_a_rename_by_another(way: Way) -> None:
    """It finds its log by the id; only what needs the name is refused, and says the new one."""
    log = way.new_log(1, 2, 3)
    old, new = log.name, new_name()
    with log.open_reader() as reader:
        way.open_another().rename_log(old, new)
        status = log.status()
        assert (status.record_count, status.sealed) == (3, False)
        assert log.get_first_dlsn() == log.get_snapshot().first
        assert (log.get_first_txid(), log.get_last_txid()) == (1, 3)
        assert log.get_log_record_count() == 3
        assert log.get_last_record().payload == b"3"
        assert len(list(reader.records())) == 3
        assert log.read(2).to_arrow().num_rows == 2
        assert log.move_subscription("s", txid=2) == log.get_dlsn_not_less_than_txid(2)
        assert log.get_subscriptions() == {"s": log.get_dlsn_not_less_than_txid(2)}
        assert log.update_settings(retention_s=60).retention_s == 60
        assert log.truncate(txid=2)
        assert not log.purge_logs_older_than(2)
        way.namespace.create_log(old)  # which is another log
        for call, given in ((log.rename, (new_name(),)), (log.delete, ())):
            with pytest.raises(LogRenamedError, match=new):
                call(*given)
        if way.has_proxies:  # which own a log by its name
            with pytest.raises(LogRenamedError, match=f"is called '{new}' by now"):
                log.open_writer()
        else:
            with log.open_writer() as writer:
                writer.write(LogRecord(4, b"4"))
            assert log.get_last_txid() == 4
        assert way.namespace.open_log(old).get_log_record_count() == 0
        log.mark_end_of_stream()
        assert log.is_end_of_stream_marked()
    way.namespace.delete_log(new)
    for call in (log.get_snapshot, log.status, log.get_first_dlsn, log.mark_end_of_stream):
        with pytest.raises(LogNotFoundError):
            call()


def test_snapshots_are_of_the_log_that_has_the_name_now(way: Way) -> None:
    """Also for a client that asked by the old name before."""
    namespace, log, new = way.namespace, way.new_log(1), new_name()
    old = log.name
    assert namespace.get_snapshots([old])[old].log_id == log.log_id
    way.open_another().rename_log(old, new)
    after = namespace.get_snapshots([old, new], fresh=True)
    assert after[old] is None
    assert after[new].log_id == log.log_id
    namespace.create_log(old)
    assert namespace.get_snapshots([old], fresh=True)[old].log_id != log.log_id


def test_records_that_were_staged_before_enter_the_log_under_its_new_name(way: Way) -> None:
    """Once, as of the log that was meant."""
    log, new = way.new_log(), new_name()
    with way.namespace.begin_append(new_name(), 1) as append:
        append.write_batch(log.name, batch("a", "b"))
        if way.has_proxies:  # which look names up when they stage
            append.stage()
        log.rename(new)
        assert append.commit().committed
    assert way.payloads(log) == [b"a", b"b"]


@pytest.mark.parametrize("is_committed", [False, True])
def test_an_append_is_repeated_after_a_rename(way: Way, *, is_committed: bool) -> None:
    """By the new name it is the same append to the same log; by the old one it is refused."""
    namespace, log, new, identity = way.namespace, way.new_log(), new_name(), new_name()
    old = log.name
    with namespace.begin_append(identity, 7, strict=True) as first:
        first.write_batch(old, batch("a", "b"))
        if is_committed:
            assert first.commit().committed
    log.rename(new)
    if is_committed:
        namespace.create_log(old)
        with namespace.begin_append(identity, 7, strict=True) as wrong:
            wrong.write_batch(old, batch("a", "b"))
            with pytest.raises(AppendMismatchError, match=f"nothing of it to '{old}'"):
                wrong.commit()
    with namespace.begin_append(identity, 7, strict=True) as second:
        second.write_batch(new, batch("a", "b"))
        assert second.commit().already_committed is is_committed
    assert way.payloads(log) == [b"a", b"b"]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_one_append_of_records_staged_by_two_names(way: Way, *, is_replaced: bool) -> None:
    """They enter one log, in the order given; an append to two logs of one name is refused."""
    namespace, log, new, identity = way.namespace, way.new_log(), new_name(), new_name()
    old, extents = log.name, []
    for name, payload in ((old, "a"), (old if is_replaced else new, "b")):
        with namespace.open_staging_writer(identity=identity) as staging:
            staging.write_batch(name, batch(payload))
            extents += staging.stage()
        if payload == "a":
            log.rename(new)
            if is_replaced:
                namespace.create_log(old)
    with namespace.begin_append(identity, 1) as append:
        if is_replaced:
            with pytest.raises(AppendAbortedError, match=f"two logs '{old}'"):
                append.commit(extents)
        else:
            assert append.commit(extents[::-1]).committed
    assert way.payloads(log) == ([] if is_replaced else [b"b", b"a"])
