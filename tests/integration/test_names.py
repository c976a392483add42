"""Names of logs on a real cluster, with the blocking face."""

from __future__ import annotations

import dataclasses
import queue

import pytest

from dlcore import LogChange, LogChangeKind, LogRecord
from dlcore.base.errors import (
    AlreadyClosedError,
    LogExistsError,
    LogNotFoundError,
    OwnershipAcquireFailedError,
)
from dlcore.sync import open_namespace


def test_a_log_is_renamed(namespace_uri: str) -> None:
    """Not while it is written; a reader that waits goes on over it."""
    with open_namespace(namespace_uri) as namespace, open_namespace(namespace_uri) as other:
        namespace.create_log("names/a")
        namespace.create_log("names/taken")
        log = namespace.open_log("names/a")
        with log.open_writer() as writer:
            writer.write(LogRecord(1, b"a"))
            with pytest.raises(OwnershipAcquireFailedError):
                other.rename_log("names/a", "names/b")
        with log.open_reader() as reader:
            assert [record.txid for record in reader.read_bulk(1)] == [1]
            with pytest.raises(LogExistsError):
                other.rename_log("names/a", "names/taken")
            other.rename_log("names/a", "names/b")
            with other.open_log("names/b").open_writer() as writer:
                writer.write(LogRecord(2, b"b"))
            while not (records := reader.read_bulk(1)):
                pass
            assert [record.txid for record in records] == [2]
        with pytest.raises(LogNotFoundError):
            namespace.open_log("names/a")
        renamed = namespace.open_log("names/b")
        renamed.rename("names/c")
        assert renamed.name == "names/c"
        assert namespace.get_logs("names/") == ["names/c", "names/taken"]
        renamed.delete()


def test_logs_are_watched(namespace_uri: str) -> None:
    """Changes of another client reach loops, takes and listeners."""
    with open_namespace(namespace_uri) as namespace, open_namespace(namespace_uri) as other:
        other.create_log("watched/a")
        heard: queue.Queue[LogChange] = queue.Queue()

        def hear(changes: list[LogChange]) -> None:
            for change in changes:
                heard.put(change)
            raise ValueError("planted: the next changes must still come")

        with namespace.watch_logs("watched/") as watch, namespace.watch_logs("watched/") as second:
            second.listen(hear)
            first = next(watch)
            assert first.name == "watched/a"
            assert heard.get(timeout=60) == first
            assert watch.take(timeout_s=0.1) == []
            other.rename_log("watched/a", "watched/b")
            renamed = next(watch)
            assert (renamed.kind, renamed.old_name) == (LogChangeKind.RENAMED, "watched/a")
            assert heard.get(timeout=60) == renamed  # unseen logs are not reported
            other.delete_log("watched/b")
            deleted = next(watch)
            assert deleted.kind is LogChangeKind.DELETED
            assert heard.get(timeout=60) == deleted
            other.create_log("watched/c")
            assert [change.name for change in watch.take()] == ["watched/c"]
            assert watch.get_names() == ["watched/c"]
            other.create_log("watched/d")
            for change in watch:
                assert change.name == "watched/d"
                break
            else:
                raise AssertionError("the watch ended")
            assert {heard.get(timeout=60).name for _ in "cd"} == {"watched/c", "watched/d"}
        with pytest.raises(AlreadyClosedError):
            watch.take()
        assert list(watch) == []


def test_logs_are_listed_in_pages(namespace_uri: str) -> None:
    """Each once; a loop may end early, and another goes on after the last name of a page."""
    with open_namespace(namespace_uri) as namespace:
        names = {f"pages/{i}" for i in range(30)} | {f"pages/{'x' * 400}{i}" for i in range(5)}
        for name in names:
            namespace.create_log(name)
        for page in namespace.list_logs("pages/", page_size=20):
            first = page
            break
        assert len(first) == 20
        rest = [n for p in namespace.list_logs("pages/", after=first[-1]) for n in p]
        assert len(rest) == 15
        assert {*first, *rest} == names


def test_statistics(namespace_uri: str) -> None:
    """Numbers by name, of the blocking face too."""
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log("names/counted")
        with namespace.open_log("names/counted").open_writer() as writer:
            writer.write(LogRecord(1, b"x" * 100))
            writer.flush()
            statistics = dataclasses.asdict(namespace.get_statistics())
    assert (
        statistics["entries_written"],
        statistics["open_ledgers"],
        statistics["sessions_lost"],
    ) == (1, 1, 0)
    assert statistics["bytes_written"] > 100
    assert statistics["open_objects"] == {"AsyncLogWriter": 1}
