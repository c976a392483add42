"""The blocking classes beside their async twins: the same calls, with the same arguments.

Goal: whoever knows one face knows the other one.  Method: compare their signatures; what differs on
purpose is listed here, with the reason.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import dlcore.remote.sync as remote_sync
import dlcore.sync as direct_sync
from dlcore.api.manager import DistributedLogManager
from dlcore.api.namespace import Namespace
from dlcore.log.metadata.watching import LogWatch
from dlcore.log.reading.log_range import LogRange
from dlcore.log.reading.merged import AsyncMergedReader
from dlcore.log.reading.reader import AsyncLogReader
from dlcore.log.staging.append import StagedAppend
from dlcore.log.staging.writer import StagingWriter
from dlcore.log.streams import AsyncAppendOnlyStreamReader, AsyncAppendOnlyStreamWriter
from dlcore.log.writing.writer import AsyncLogWriter
from dlcore.remote.log import RemoteLog, RemoteRange
from dlcore.remote.namespace import RemoteNamespace
from dlcore.remote.reader import RemoteReader
from dlcore.remote.staging import RemoteStagedAppend, RemoteStagingWriter
from dlcore.remote.writing import RemoteWriter

TWINS: list[tuple[type[Any], type[Any]]] = [
    (direct_sync.Namespace, Namespace),
    (direct_sync.DistributedLogManager, DistributedLogManager),
    (direct_sync.LogReader, AsyncLogReader),
    (direct_sync.LogWriter, AsyncLogWriter),
    (direct_sync.LogRange, LogRange),
    (direct_sync.LogWatch, LogWatch),
    (direct_sync.MergedReader, AsyncMergedReader),
    (direct_sync.StagedAppend, StagedAppend),
    (direct_sync.StagingWriter, StagingWriter),
    (direct_sync.AppendOnlyStreamReader, AsyncAppendOnlyStreamReader),
    (direct_sync.AppendOnlyStreamWriter, AsyncAppendOnlyStreamWriter),
    (remote_sync.RemoteNamespace, RemoteNamespace),
    (remote_sync.RemoteLog, RemoteLog),
    (remote_sync.RemoteReader, RemoteReader),
    (remote_sync.RemoteWriter, RemoteWriter),
    (remote_sync.RemoteRange, RemoteRange),
    (direct_sync.StagedAppend, RemoteStagedAppend),
    (direct_sync.StagingWriter, RemoteStagingWriter),
]
OF_ONE_FACE = {
    # Closed by `close` and `aclose`; a thread writes a table itself, a task waits for room.
    *("close", "aclose", "write_table", "submit_table", "submit_batch", "wait_for_capacity"),
    # What the blocking twins are made of: rows and records gathered in bulk, writers at exit.
    *("gather", "gathered", "gather_rows", "take_gathered", "take_rows", "is_typed"),
    *("finish", "abandon", "lost", "report_unwritten", "unwritten", "config", "has_capacity"),
    *("fitted", "write_fitted", "verify", "begin_stream", "begin"),
    *("messages", "open", "open_part", "start_at_first", "last_dlsn", "find_last"),
    # What proxies, workers and the command are made of.
    *("clean_staging", "list_staged", "followers", "last_version", "ledgers", "log_context"),
    *("ports", "staging_owner", "tidied", "find_place", "get_stream_end", "tell_when_wanted"),
    # A watch is iterated by `async for`, or listened to by a thread; its names need the loop.
    *("listen", "get_names", "names"),
    # A file of Python.
    *("readable", "seekable", "writable", "read", "readall"),
    # Attributes of an async instance, which a class does not show.
    *("AsyncLogReader.log_name", "RemoteReader.log_name", "RemoteReader.schema"),
    *("RemoteWriter.log_name", "RemoteWriter.producer", "LogRange.extent"),
    # What the blocking range reads by.
    "LogRange.open_reader",
}
"""Names that one of two twins has, and why; those of one class behind its name."""
ARGUMENTS_OF_ONE_FACE = {
    # An async read waits, unless it is told not to; a blocking one returns what there is, unless it
    # is given a time.
    ("read_next", "until_caught_up"),
    ("read_bulk", "until_caught_up"),
    ("read_batch", "until_caught_up"),
    ("read_batch", "timeout_s"),
    # For proxies, which ask again where an answer was lost, and know who wrote a record.
    ("begin_append", "token"),
    ("create_log", "log_id"),
    ("open_writer", "producers"),
    # A blocking writer gathers records for so long; an async one sends them at once.
    ("open_writer", "flush_interval_s"),
}


def public(kind: type[Any]) -> dict[str, Any]:
    """Return what a class has for its users; of a file only what is its own."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("dlcore")]
    names = {name for base in bases for name in vars(base) if not name.startswith("_")}
    return {name: getattr(kind, name) for name in names}


def arguments(call: Any) -> dict[str, tuple[Any, bool]]:
    """Return what a call takes, by name: the default, and whether it is given by name only."""
    found = list(inspect.signature(call).parameters.values())
    return {each.name: (each.default, each.kind is each.KEYWORD_ONLY) for each in found}


@pytest.mark.parametrize(
    ("blocking", "twin"), TWINS, ids=[f"{one.__name__}-{two.__module__}" for one, two in TWINS]
)
def test_both_faces_have_the_same_calls(blocking: type[Any], twin: type[Any]) -> None:
    """With the same arguments and defaults, but for what is listed."""
    one, other = public(blocking), public(twin)
    different = {name for name in one.keys() ^ other.keys() if name not in OF_ONE_FACE}
    assert {f"{twin.__name__}.{name}" for name in different} <= OF_ONE_FACE
    for name in one.keys() & other.keys():
        if not callable(one[name]):
            assert not callable(other[name]), f"{name} is a property of the blocking twin only"
            continue
        mine, its = arguments(one[name]), arguments(other[name])
        different = {each for each in mine.keys() | its.keys() if mine.get(each) != its.get(each)}
        different -= {each for call, each in ARGUMENTS_OF_ONE_FACE if call == name}
        assert not different, f"{name}: {mine} differs from {its}"
        assert [each for each in mine if each in its] == [each for each in its if each in mine]
