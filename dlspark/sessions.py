"""Namespaces and staging writers that this process keeps open between calls of Spark.

Spark pickles readers and writers, and forks the processes that run them.  Therefore these hold no
connection, and get one here when they are called.  A forked child uses nothing of its parent, and
starts with nothing open.  `dlcore.sync` is imported at first use, because its dependencies must not
be loaded in a process that Spark forks from.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from dlcore.base.errors import DLError, EndOfStreamError, LogExistsError, LogNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa

    from dlcore.sync import Namespace, ScanRange, ScanRun, StagingWriter
    from dlspark.commit import AppendIdentity
    from dlspark.options import Address

logger = logging.getLogger(__name__)
WRITER_IDLE_NS_MAX = 600 * 10**9
"""A staging writer that is unused for this long is closed: its query has stopped, or is idle.  A
process keeps one for each streaming query that it writes for, whatever the targets and batches are.
"""


class _Kept:
    """The open objects; `lock` guards the dicts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.namespaces: dict[Address, Namespace] = {}
        self.writers: dict[tuple[Address, str], tuple[StagingWriter, int]] = {}
        """Staging writers that are not in use, and since when, by namespace and staging identity.
        """


_kept = _Kept()


def _start_afresh() -> None:
    # Another thread may have held the lock during the fork, and connections belong to the parent.
    global _kept
    _kept = _Kept()


os.register_at_fork(after_in_child=_start_afresh)


def open_shared_namespace(address: Address) -> Namespace:
    """Return this process's namespace at `address`, opened at the first call."""
    with _kept.lock:
        # Under the lock: two threads that open at once would leave one namespace without an owner.
        if address not in _kept.namespaces:
            from dlcore.sync import open_namespace

            _kept.namespaces[address] = open_namespace(
                address.uri,
                tls=address.tls,
                token=_token_of(address),
                zookeeper=address.zookeeper,
                encryption_keys=address.encryption_keys,
                capabilities=address.capabilities_s is not None,
            )
        return _kept.namespaces[address]


def scan_range(address: Address, part: ScanRange) -> Iterator[ScanRun]:
    """Return the records of a range, read from bookies or through proxies."""
    from dlcore.sync import scan_runs

    return scan_runs(
        [part],
        uri=address.uri,
        tls=address.tls,
        token=_token_of(address),
        zookeeper=address.zookeeper,
        encryption_keys=address.encryption_keys,
    )


def _token_of(address: Address) -> Callable[[], str] | None:
    if address.token_file is None:
        return None
    from dlcore.backends.flight.bearer import token_file

    return token_file(address.token_file)


def close_shared_namespace(address: Address) -> None:
    """Close this process's namespace at `address`, if it is open."""
    with _kept.lock:
        namespace = _kept.namespaces.pop(address, None)
        writers = [_kept.writers.pop(key)[0] for key in list(_kept.writers) if key[0] == address]
    for writer in writers:
        _close_quietly(writer)
    if namespace is not None:
        namespace.close()


def find_schemas(address: Address, logs: Iterable[str]) -> dict[str, pa.Schema | None]:
    """Return the schemas of the existing ones of `logs`, None for a byte log."""
    wanted = sorted(logs)
    return open_shared_namespace(address).get_schemas(wanted) if wanted else {}


def find_unsealed(address: Address, log: str) -> dict[str, pa.Schema | None]:
    """Return the schema of a log, as `find_schemas` does; raise `EndOfStreamError` if it is sealed.

    Each micro-batch asks this before its first task.  A call of its own for the seal would double
    the time.
    """
    try:
        return open_shared_namespace(address).get_schemas([log], for_write=True)
    # The error of the lower layers does not know the namespace, nor what the user can do.
    except EndOfStreamError as error:
        raise EndOfStreamError(
            f"log {log!r} in {address} is sealed: no record can follow; write to another log"
        ) from error


def require_logs(
    address: Address, logs: Iterable[str], *, create: bool = False, schema: pa.Schema | None = None
) -> None:
    """Raise `LogNotFoundError` unless `logs` exist; with `create`, create the missing ones.

    With a `schema` they are created as typed logs.  The result is not cached: a log may be deleted,
    or created again with the other kind, while this process lives.
    """
    wanted = sorted(logs)
    found = find_schemas(address, wanted)
    for log in wanted:
        if log in found:
            continue
        if not create:
            raise LogNotFoundError(describe_missing(log, address))
        with contextlib.suppress(LogExistsError):  # another process was faster
            open_shared_namespace(address).create_log(log, schema=schema)
            logger.info("log=%s created, for the option createLog is true", log)


def describe_missing(log: str, address: Address) -> str:
    """Return the error text for a log that does not exist."""
    return (
        f"there is no log {log!r} in {address}; create it with: dlog log create {log}, or let a "
        "write create it with the option createLog"
    )


def log_id_of(address: Address, log: str) -> str:
    """Return the id of a log.  Raises: LogNotFoundError."""
    with open_shared_namespace(address).open_log(log) as manager:
        return manager.log_id


def merge_schema(address: Address, log: str, schema: pa.Schema) -> None:
    """Add columns to a typed log, or widen them.  Raises: SchemaMismatchError."""
    with open_shared_namespace(address).open_log(log) as manager:
        manager.update_schema(schema, merge=True)


@contextlib.contextmanager
def staging_writer(address: Address, append: AppendIdentity) -> Iterator[StagingWriter]:
    """Lend a staging writer for any logs; rows of an interrupted use are dropped.

    The writer of a streaming query stays open for the next use in this process, whatever its
    target.  Therefore the number of ledgers does not grow with micro-batches or targets.
    """
    key = (address, append.staged_as)
    keep = append.shared is not None
    # Taken out while it is in use: concurrent tasks of one process must not share a writer.
    with _kept.lock:
        writer, _ = _kept.writers.pop(key, (None, 0))
    if writer is None:
        writer = _open_staging_writer(address, append)
    try:
        if append.shared is not None:
            writer.begin_round(int(append.shared.round))  # the round is the number of a batch
        yield writer
    except BaseException:
        _give_up(key, writer, keep=keep)
        raise
    if keep:
        _put_back(key, writer)
    else:
        writer.close()


def _open_staging_writer(address: Address, append: AppendIdentity) -> StagingWriter:
    return open_shared_namespace(address).open_staging_writer(
        identity=append.staged_as, shared=append.shared is not None
    )


def _give_up(key: tuple[Address, str], writer: StagingWriter, *, keep: bool) -> None:
    if not keep:
        _close_quietly(writer, delete=True)
        return
    # Earlier tasks of the same batch may have staged extents in this ledger that are not committed
    # yet.  Therefore the ledger must not be deleted; only the rows after these extents are dropped.
    try:
        writer.discard()
    except DLError:
        _close_quietly(writer)
    else:
        _put_back(key, writer)


def _put_back(key: tuple[Address, str], writer: StagingWriter) -> None:
    now_ns = time.monotonic_ns()
    with _kept.lock:
        # Meanwhile another task of this process may have used another writer.
        unused = [_kept.writers.pop(key)[0]] if key in _kept.writers else []
        _kept.writers[key] = (writer, now_ns)
        for idle, (_, since_ns) in list(_kept.writers.items()):
            if now_ns - since_ns > WRITER_IDLE_NS_MAX:
                unused.append(_kept.writers.pop(idle)[0])
    for other in unused:
        _close_quietly(other)


def _close_quietly(writer: StagingWriter, *, delete: bool = False) -> None:
    # The caller reports another error, or loses nothing.  Leftovers of the writer are removed with
    # those of dead processes.
    with contextlib.suppress(DLError):
        writer.close(delete=delete)
