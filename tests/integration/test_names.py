"""Names of logs on a real cluster, with the blocking face."""

from __future__ import annotations

import queue

import pytest

from dlcore import LogChange, LogChangeKind
from dlcore.base.errors import (
    AlreadyClosedError,
)
from dlcore.sync import open_namespace


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
