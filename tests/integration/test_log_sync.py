"""The blocking face on a real cluster: ZooKeeper and bookies are processes."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import threading

import pyarrow as pa
import pytest

from dlcore import DLSN, LogConfig, LogRecord
from dlcore.base.errors import (
    ConfigurationError,
    EndOfStreamError,
    ReaderIdleError,
    WriteError,
)
from dlcore.sync import copy_log, open_namespace, portal as portals, scan
from tests.fixtures.forking import LOADED_PYTHON

pytestmark = pytest.mark.integration


def test_a_program_that_only_writes_and_reads_loads_no_grpc_and_no_pandas(
    namespace_uri: str,
) -> None:
    """The threads of the one would end a child that forks beside it; the other takes its time."""
    script = """
import sys
from dlcore import DLSN, LogRecord
from dlcore.sync import open_namespace
with open_namespace(sys.argv[1]) as namespace:
    namespace.create_log("sync/light")
    with namespace.open_log("sync/light") as log, log.open_writer() as writer:
        for txid in range(1000):
            writer.write(LogRecord(txid, payload=b"a"))
        writer.commit()
        with log.open_reader(dlsn=DLSN.INITIAL) as reader:
            print(reader.read_next().payload)
print([name for name in sys.modules if name in ("grpc", "pandas")])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, namespace_uri],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["b'a'", "[]"]


def test_a_scan_in_another_process(namespace_uri: str) -> None:
    """Ranges are pickled to a process that knows nothing of the metadata store."""
    with open_namespace(namespace_uri, config=LogConfig(entry_bytes=10_000)) as namespace:
        namespace.create_log("sync/scan")
        log = namespace.open_log("sync/scan")
        with log.open_writer() as writer:
            for txid in range(10_000):
                writer.write(LogRecord(txid, b"%d" % txid))
        with namespace.begin_append("sync-scan", 1) as append:
            append.write_batch(
                "sync/scan",
                pa.record_batch({"value": [b"%d" % i for i in range(10_000, 20_000)]}),
            )
            assert append.commit().committed
        snapshot = log.get_snapshot()
        ranges = [
            part
            for each in snapshot.scans(DLSN(1, 0, 7), snapshot.end)
            for part in each.split(entries_per_part=3)
        ]
    assert len(ranges) > 5
    code = """
import pickle, sys
from dlcore.sync import scan
ranges = pickle.load(sys.stdin.buffer)
rows = [v for b in scan(ranges) for v in b.batch.column(1).to_pylist()]
assert rows == [b"%d" % i for i in range(7, 20000)], len(rows)
"""
    subprocess.run([LOADED_PYTHON, "-c", code], input=pickle.dumps(ranges), check=True, timeout=60)
    batches = scan(ranges)
    assert next(batches).sequence_id == 7
    batches.close()  # type: ignore[attr-defined]
    assert sum(b.batch.num_rows for b in scan(ranges)) == 20_000 - 7


def test_a_scan_learns_of_new_addresses(namespace_uri: str) -> None:
    """With stale addresses the scan fails without a URI, and asks the metadata store with one."""
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log("sync/stale")
        log = namespace.open_log("sync/stale")
        with log.open_writer() as writer:
            writer.write(LogRecord(1, b"a"))
        snapshot = log.get_snapshot()
    stale = type(snapshot)(
        **{
            **{name: getattr(snapshot, name) for name in snapshot.__slots__},
            "cluster_id": snapshot.cluster_id,
            "addresses": dict.fromkeys(snapshot.addresses, "127.0.0.1:1"),
        }
    )
    code = """
import pickle, sys
from dlcore.base.errors import DLError
from dlcore.sync import scan
ranges = pickle.load(sys.stdin.buffer)
try:
    list(scan(ranges))
except DLError:
    pass
else:
    sys.exit("no error without a URI")
assert [b.batch.num_rows for b in scan(ranges, uri=sys.argv[1])] == [1]
"""
    subprocess.run(
        [LOADED_PYTHON, "-c", code, namespace_uri],
        input=pickle.dumps(stale.scans(stale.first, stale.end)),
        check=True,
        timeout=100,
    )


def test_a_namespace_that_does_not_exist(namespace_uri: str) -> None:
    """The error names the path; with `create` it is made."""
    uri = f"{namespace_uri}-other"
    with pytest.raises(ConfigurationError, match="-other"):
        open_namespace(uri)
    with open_namespace(uri, create=True) as namespace:
        assert namespace.get_logs() == []


def test_many_threads_share_a_namespace(namespace_uri: str) -> None:
    """Each with a log of its own, over one loop."""
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            name = f"sync/thread-{index}"
            namespace.create_log(name)
            with namespace.open_log(name).open_writer() as writer:
                for txid in range(500):
                    writer.write(LogRecord(txid, b"x"))
            assert namespace.open_log(name).get_log_record_count() == 500
        except BaseException as error:  # noqa: BLE001  # raised in the test's own thread below
            errors.append(error)

    with open_namespace(namespace_uri) as namespace:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def test_batches_and_records_in_turn(namespace_uri: str) -> None:
    """More than is buffered, empty batches, the rest of an entry as a batch, the end of a log."""
    count, size = 3_000, 1_000
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log("sync/turns")
        with namespace.open_log("sync/turns") as log:
            writer = log.open_writer()
            assert writer.write_bulk(LogRecord(n, b"x" * size) for n in range(count)) == count
            empty = pa.record_batch(
                {"txid": pa.array([], pa.int64()), "value": pa.array([], pa.binary())}
            )
            writer.write_batch(empty)
            writer.write_batch(pa.record_batch({"txid": [count], "value": [b"last"]}))
            assert writer.last_txid == count
            writer.mark_end_of_stream()
            writer.close()
            writer.close()
            reader = log.open_reader()
            first = reader.read_next(non_blocking=True) or reader.read_next()
            assert first is not None
            assert first.txid == 0
            rest = reader.read_batch()
            assert rest is not None
            txids = [0, *rest.column("txid").to_pylist()]
            whole = reader.read_batch()
            assert whole is not None
            txids += whole.column("txid").to_pylist()
            records = reader.read_bulk(count * 2)  # fewer, at the end
            txids += [record.txid for record in records]
            assert txids == list(range(count + 1))
            for read in (reader.read_next, lambda: reader.read_bulk(1), reader.read_batch):
                with pytest.raises(EndOfStreamError):
                    read()
            reader.close()
            reader.close()


def test_idle_readers_and_truncated_records(namespace_uri: str) -> None:
    """A reader that follows gives up in time; what is truncated is read as long as it is stored."""
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log("sync/idle")
        with namespace.open_log("sync/idle") as log:
            with log.open_writer() as writer:
                for txid in range(4):
                    writer.write(LogRecord(txid, b"x"))
                    writer.flush()
            log.truncate(DLSN(1, 2, 0))
            assert [r.txid for r in log.open_reader()] == [2, 3]
            with log.open_reader(ignore_truncation=True, skip_broken_entries=True) as reader:
                records = reader.records(follow=True)
                assert [next(records).txid for _ in range(4)] == [0, 1, 2, 3]
                assert reader.broken_entries == 0
            impatient = namespace.open_log("sync/idle", config=LogConfig(reader_idle_error_s=0.2))
            with (
                impatient.open_reader(dlsn=reader.position) as idle,
                pytest.raises(ReaderIdleError),
            ):
                next(idle.records(follow=True))


def test_a_log_is_copied_once(namespace_uri: str) -> None:
    """However often it is asked for; what comes later is added."""
    with open_namespace(namespace_uri) as namespace:
        for name in ("sync/source", "sync/target"):
            namespace.create_log(name)
        with namespace.open_log("sync/source") as log:
            for first in (0, 100):
                with log.open_writer() as writer:
                    writer.write_bulk(LogRecord(first + n, b"%d" % n) for n in range(100))
                assert copy_log(log, namespace, "sync/target") == 100
                assert copy_log(log, namespace, "sync/target") == 0
            columns = ["txid", "value", "sequence_id"]
            with namespace.open_log("sync/target") as target:
                copied = target.read().to_arrow().select(columns)
            assert copied == log.read().to_arrow().select(columns)


def test_objects_inherited_by_a_forked_child_are_left_to_its_parent(namespace_uri: str) -> None:
    """Closing it there ends neither a writer's buffer nor its lock."""
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log("sync/forked")
        log = namespace.open_log("sync/forked")
        writer = log.open_writer()
        writer.write(LogRecord(1, b"kept"))
        portal = writer._portal
        portal._pid -= 1  # what a child finds
        for each in (log.open_reader, writer.flush):
            with pytest.raises(ConfigurationError, match="after a fork"):
                each()
        other = type(log)(portal, log._manager, {})
        other.close()
        portal._pid += 1
        writer.commit()
        assert log.get_log_record_count() == 1
        writer.close()
        staging = namespace.open_staging_writer(identity="sync/forked")
        staging.close()
        staging.close(delete=True)


def test_a_writer_that_cannot_write_at_exit_says_what_is_lost(
    namespace_uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log, the number of records, and the reason are logged; a complete one is silent."""
    caplog.set_level(logging.WARNING)  # programs that ran in this process may have set another
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log("sync/exit")
        with namespace.open_log("sync/exit") as log:
            writer = log.open_writer()
            writer._report_unwritten("nothing is")
            assert caplog.text == ""
            monkeypatch.setattr(portals, "_exit_fails", False)
            for txid in (1, 2):
                writer.write(LogRecord(txid, b"x"))

            async def fail(*_: object, **__: object) -> None:
                raise WriteError("made to fail")

            monkeypatch.setattr(writer._outbox, "empty", fail)
            writer._call(writer.finish())
            assert "log 'sync/exit': not written: 2 records" in caplog.text
            assert "WriteError: made to fail" in caplog.text
            assert portals._exit_fails
            monkeypatch.setattr(portals, "_exit_fails", False)
