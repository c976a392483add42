"""The blocking classes beside their async twins: the same calls, with the same arguments.

Goal: a user that knows one face knows the other one.  Method: compare their signatures; what
differs on purpose is listed here, with the reason.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from dlcore import sync
from dlcore.api.log import DistributedLogManager
from dlcore.api.namespace import Namespace
from dlcore.log.reading.log_range import LogRange
from dlcore.log.reading.merged import AsyncMergedReader
from dlcore.log.reading.rows_reader import AsyncLogReader
from dlcore.log.reading.watching import LogWatch
from dlcore.log.staging.faces import StagedAppend, StagingWriter
from dlcore.log.streams import AsyncAppendOnlyStreamReader, AsyncAppendOnlyStreamWriter
from dlcore.log.writing.records_writer import AsyncLogWriter

TWINS: list[tuple[type[Any], type[Any]]] = [
    (sync.Namespace, Namespace),
    (sync.DistributedLogManager, DistributedLogManager),
    (sync.LogReader, AsyncLogReader),
    (sync.LogWriter, AsyncLogWriter),
    (sync.LogRange, LogRange),
    (sync.LogWatch, LogWatch),
    (sync.MergedReader, AsyncMergedReader),
    (sync.StagedAppend, StagedAppend),
    (sync.StagingWriter, StagingWriter),
    (sync.AppendOnlyStreamReader, AsyncAppendOnlyStreamReader),
    (sync.AppendOnlyStreamWriter, AsyncAppendOnlyStreamWriter),
]
OF_ONE_FACE = {
    # Closed by `close` and `aclose`; a thread writes a table itself, a task waits for room.
    *("close", "aclose", "write_table", "submit_table", "submit_batch", "wait_for_capacity"),
    # The blocking twins are made of these: rows and records gathered in bulk, writers at exit.
    *("gather", "gathered", "take_rows", "finish", "config"),
    *("fitted", "write_fitted", "is_typed", "last_dlsn"),
    # For the command and for maintenance, which are async.
    *("clean_staging", "list_staged", "last_version", "find_place", "get_stream_end"),
    # A watch is iterated by `async for`, or listened to by a thread; its names need the loop.
    *("listen", "get_names", "names"),
    # A file of Python.
    *("readable", "seekable", "writable", "read", "readall"),
    # Attributes of an async instance, which a class does not show.
    *("AsyncLogReader.log_name", "LogRange.extent"),
    # The blocking range reads by it; async objects are made and left by them.
    *("LogRange.open_reader", "LogWatch.abandon", "AsyncMergedReader.open"),
    *("AsyncAppendOnlyStreamReader.open", "AsyncAppendOnlyStreamReader.start_at_first"),
}
"""Names that one of two twins has, and why; those of one class behind its name."""
ARGUMENTS_OF_ONE_FACE = {
    # An async read waits, unless it shall not; a blocking one returns what there is, unless it
    # is given a time.
    ("read_next", "until_caught_up"),
    ("read_bulk", "until_caught_up"),
    ("read_batch", "until_caught_up"),
    ("read_batch", "timeout_s"),
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
    unlisted = {f"{twin.__name__}.{name}" for name in different} - OF_ONE_FACE
    assert not unlisted, "run make sync; name in OF_ONE_FACE what only one of the two has"
    for name in one.keys() & other.keys():
        if not callable(one[name]):
            assert not callable(other[name]), f"{name} is a property of the blocking twin only"
            continue
        mine, its = arguments(one[name]), arguments(other[name])
        different = {each for each in mine.keys() | its.keys() if mine.get(each) != its.get(each)}
        different -= {each for call, each in ARGUMENTS_OF_ONE_FACE if call == name}
        assert not different, f"{name}: {mine} differs from {its}"
        assert [each for each in mine if each in its] == [each for each in its if each in mine]
