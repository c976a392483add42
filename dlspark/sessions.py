"""What this process keeps open between calls of Spark: namespaces and staging writers.

Spark pickles readers and writers and forks the processes that run them, so neither holds a
connection: they ask here, when they are called.  Everything is keyed by process id; a forked child
sees nothing of its parent's.  `dlcore.sync` is imported at first use, because what lies below it
must not be loaded in a process that Spark forks from.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.errors import DLError, LogNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.sync import Namespace, StagingWriter
    from dlspark.commit import AppendIdentity

WRITERS_KEPT_MAX = 64
"""Staging writers a process keeps open, one for each identity, whatever the number of its logs; the
one unused for longest is closed for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WriterKey:
    """Whose staging writer it is."""

    pid: int
    uri: str
    identity: str


_lock = threading.RLock()
_namespaces: dict[tuple[int, str], Namespace] = {}
_writers: OrderedDict[_WriterKey, StagingWriter] = OrderedDict()
_known_logs: set[tuple[int, str, str]] = set()


def open_shared_namespace(uri: str) -> Namespace:
    """Return this process's namespace at `uri`, opened at the first call."""
    from dlcore.sync import open_namespace

    with _lock:
        key = (os.getpid(), uri)
        if key not in _namespaces:
            _namespaces[key] = open_namespace(uri)
        return _namespaces[key]


def close_shared_namespace(uri: str) -> None:
    """Close this process's namespace at `uri`, if it is open."""
    with _lock:
        namespace = _namespaces.pop((os.getpid(), uri), None)
        for key in [key for key in _writers if (key.pid, key.uri) == (os.getpid(), uri)]:
            _close_quietly(_writers.pop(key))
    if namespace is not None:
        namespace.close()


def require_log(uri: str, log: str) -> None:
    """Raise `LogNotFoundError` unless `log` exists; a log once found is not looked up again."""
    key = (os.getpid(), uri, log)
    if key in _known_logs:
        return
    if not open_shared_namespace(uri).log_exists(log):
        raise LogNotFoundError(describe_missing(log, uri))
    _known_logs.add(key)


def describe_missing(log: str, uri: str) -> str:
    """Return what to tell who names a log that does not exist."""
    return f"there is no log {log!r} in {uri}; create it with: dlog log create {log}"


@contextlib.contextmanager
def staging_writer(uri: str, append: AppendIdentity) -> Iterator[StagingWriter]:
    """Lend a staging writer for any logs; what an interrupted use did not stage is dropped.

    The writer of an append that recurs stays open for the next use in this process, so that the
    number of ledgers does not grow with the number of micro-batches.
    """
    key = _WriterKey(pid=os.getpid(), uri=uri, identity=append.identity)
    keep = append.recurs
    with _lock:
        writer = _writers.pop(key, None)
    if writer is None:
        writer = open_shared_namespace(uri).open_staging_writer(identity=append.identity)
    try:
        yield writer
    except BaseException:
        _give_up(key, writer, keep=keep)
        raise
    if keep:
        _put_back(key, writer)
    else:
        writer.close()


def _give_up(key: _WriterKey, writer: StagingWriter, *, keep: bool) -> None:
    if not keep:
        _close_quietly(writer, delete=True)
        return
    # Earlier tasks of the same batch may have staged extents in this ledger that are not committed
    # yet, so it must not be deleted, only what came after them forgotten.
    try:
        writer.discard()
    except DLError:
        _close_quietly(writer)
    else:
        _put_back(key, writer)


def _put_back(key: _WriterKey, writer: StagingWriter) -> None:
    with _lock:
        # Another task of this process may have used one of its own meanwhile.
        other = _writers.pop(key, None)
        _writers[key] = writer
        unused = [] if other is None else [other]
        unused += [_writers.popitem(last=False)[1] for _ in range(len(_writers) - WRITERS_KEPT_MAX)]
    for other in unused:
        _close_quietly(other)


def _close_quietly(writer: StagingWriter, *, delete: bool = False) -> None:
    # Whoever calls this has an error of its own to report, or nothing to lose: what stays behind is
    # reaped with the other leftovers of dead processes.
    with contextlib.suppress(DLError):
        writer.close(delete=delete)
