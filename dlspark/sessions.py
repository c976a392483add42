"""What this process keeps open between calls of Spark: namespaces and staging writers.

Spark pickles readers and writers and forks the processes that run them, so neither holds a
connection: they ask here, when they are called.  A forked child has nothing of its parent's, and
begins anew.  `dlcore.sync` is imported at first use, because what lies below it must not be loaded
in a process that Spark forks from.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

from dlcore.errors import DLError, LogNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.sync import Namespace, StagingWriter
    from dlspark.commit import AppendIdentity

WRITER_IDLE_NS_MAX = 600 * 10**9
"""A staging writer unused for so long is closed: its query has stopped, or rests.  A process keeps
one for each streaming query that it writes for, whatever its targets and batches."""


class _Kept:
    """What is open; `lock` guards the two dicts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.namespaces: dict[str, Namespace] = {}
        self.writers: dict[tuple[str, str], tuple[StagingWriter, int]] = {}
        """By URI and staging identity: a writer that nobody uses now, and since when."""
        self.known_logs: set[tuple[str, str]] = set()


_kept = _Kept()


def _start_afresh() -> None:
    # A fork may have happened while another thread held the lock.
    global _kept
    _kept = _Kept()


os.register_at_fork(after_in_child=_start_afresh)


def open_shared_namespace(uri: str) -> Namespace:
    """Return this process's namespace at `uri`, opened at the first call."""
    from dlcore.sync import open_namespace

    with _kept.lock:
        if uri not in _kept.namespaces:
            _kept.namespaces[uri] = open_namespace(uri)
        return _kept.namespaces[uri]


def close_shared_namespace(uri: str) -> None:
    """Close this process's namespace at `uri`, if it is open."""
    with _kept.lock:
        namespace = _kept.namespaces.pop(uri, None)
        writers = [_kept.writers.pop(key)[0] for key in list(_kept.writers) if key[0] == uri]
    for writer in writers:
        _close_quietly(writer)
    if namespace is not None:
        namespace.close()


def require_log(uri: str, log: str) -> None:
    """Raise `LogNotFoundError` unless `log` exists; a log once found is not looked up again."""
    if (uri, log) in _kept.known_logs:
        return
    if not open_shared_namespace(uri).log_exists(log):
        raise LogNotFoundError(describe_missing(log, uri))
    _kept.known_logs.add((uri, log))


def describe_missing(log: str, uri: str) -> str:
    """Return what to tell who names a log that does not exist."""
    return f"there is no log {log!r} in {uri}; create it with: dlog log create {log}"


@contextlib.contextmanager
def staging_writer(uri: str, append: AppendIdentity) -> Iterator[StagingWriter]:
    """Lend a staging writer for any logs; what an interrupted use did not stage is dropped.

    That of a streaming query stays open for the next use in this process, whatever its target, so
    that the number of ledgers grows with neither micro-batches nor targets.
    """
    key = (uri, append.staged_as)
    keep = append.shared is not None
    with _kept.lock:
        writer, _ = _kept.writers.pop(key, (None, 0))
    if writer is None:
        writer = open_shared_namespace(uri).open_staging_writer(identity=append.staged_as)
    try:
        yield writer
    except BaseException:
        _give_up(key, writer, keep=keep)
        raise
    if keep:
        _put_back(key, writer)
    else:
        writer.close()


def _give_up(key: tuple[str, str], writer: StagingWriter, *, keep: bool) -> None:
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


def _put_back(key: tuple[str, str], writer: StagingWriter) -> None:
    now_ns = time.monotonic_ns()
    with _kept.lock:
        # Another task of this process may have used one of its own meanwhile.
        unused = [_kept.writers.pop(key)[0]] if key in _kept.writers else []
        _kept.writers[key] = (writer, now_ns)
        for idle, (_, since_ns) in list(_kept.writers.items()):
            if now_ns - since_ns > WRITER_IDLE_NS_MAX:
                unused.append(_kept.writers.pop(idle)[0])
    for other in unused:
        _close_quietly(other)


def _close_quietly(writer: StagingWriter, *, delete: bool = False) -> None:
    # Whoever calls this has an error of its own to report, or nothing to lose: what stays behind is
    # reaped with the other leftovers of dead processes.
    with contextlib.suppress(DLError):
        writer.close(delete=delete)
