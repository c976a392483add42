"""The blocking face on a real cluster: ZooKeeper and bookies are processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading

import pyarrow as pa
import pytest

from dlcore import DLSN, LogConfig, LogRecord
from dlcore.errors import (
    AlreadyClosedError,
    ConfigurationError,
    EndOfStreamError,
    LogEmptyError,
    LogNotFoundError,
    TransactionIdOutOfOrderError,
)
from dlcore.sync import open_namespace, scan

pytestmark = pytest.mark.integration


def test_who_only_writes_and_reads_loads_no_grpc(namespace_uri: str) -> None:
    """Its threads would end a child that forks beside it."""
    script = """
import sys
from dlcore import DLSN, LogRecord
from dlcore.sync import open_namespace
with open_namespace(sys.argv[1]) as namespace:
    namespace.create_log("sync/light")
    with namespace.open_log("sync/light") as log, log.open_writer() as writer:
        writer.write(LogRecord(txid=1, payload=b"a"))
        writer.commit()
        with log.open_reader(dlsn=DLSN.INITIAL) as reader:
            print(reader.read_next().payload)
print([name for name in sys.modules if name.split(".")[0] == "grpc"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, namespace_uri],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["b'a'", "[]"]


def test_the_readme_example(namespace_uri: str) -> None:
    """Write, flush, commit, read; everything is a context manager."""
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log("sync/readme")
        log = namespace.open_log("sync/readme")
        with pytest.raises(LogEmptyError):
            log.get_last_dlsn()
        with log.open_writer() as writer:
            writer.write(LogRecord(txid=1, payload=b"a"))
            assert writer.write_bulk([LogRecord(2, b"b"), LogRecord(2, b"c")]) == 2
            with pytest.raises(TransactionIdOutOfOrderError):
                writer.write(LogRecord(1, b"late"))
            writer.flush()
            writer.write_batch(pa.record_batch({"txid": [3, 4], "payload": [b"d", b"e"]}))
            last = writer.commit()
            assert last == log.get_last_dlsn()
            with log.open_reader(dlsn=DLSN.INITIAL) as reader:
                first = reader.read_next()
                assert first is not None
                assert (first.txid, first.payload, first.sequence_id) == (1, b"a", 0)
                rest = reader.read_batch()
                assert rest is not None
                assert rest.column("payload").to_pylist() == [b"b", b"c"]
                assert [r.txid for r in reader.read_bulk(100)] == [3, 4]
                assert reader.read_next() is None
                assert reader.read_next(non_blocking=True) is None
            assert writer.truncate(DLSN(1, 0, 2))
            writer.mark_end_of_stream()
        assert log.get_first_dlsn() == DLSN(1, 0, 2)
        assert log.get_log_record_count() == 3
        assert log.is_end_of_stream_marked()
        with log.open_reader() as reader:
            assert len(reader.read_bulk(100)) == 3
            with pytest.raises(EndOfStreamError):
                reader.read_next()
        namespace.delete_log("sync/readme")
        with pytest.raises(LogNotFoundError):
            namespace.open_log("sync/readme")
    with pytest.raises(AlreadyClosedError):
        namespace.get_logs()


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
                pa.record_batch({"payload": [b"%d" % i for i in range(10_000, 20_000)]}),
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
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(ranges), check=True, timeout=60)
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
from dlcore.errors import DLError
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
        [sys.executable, "-c", code, namespace_uri],
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
