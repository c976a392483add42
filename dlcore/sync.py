"""The blocking face: the same names as the async one, over one background event loop.

Nothing here decides anything: each method runs its async twin on the portal, and raises what that
one raises; any of them raises `AlreadyClosedError` once its object or namespace was closed, and
`MetadataError` or `BookieError` while the cluster does not answer.  Only this is added:
`LogWriter.write` buffers records in the calling thread and hands them over in bulk.

What is open when the process exits is closed once all threads that are no daemons have ended, but
not after `os._exit` or a signal's default action.  For SIGTERM,
``signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))`` makes an exit of it.  In a forked child
the use of what its parent opened is a `ConfigurationError`, and closing it does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from dlcore._blocking import Blocking, iterate
from dlcore._portal import Portal, close_at_exit, forget, shared_portal
from dlcore._prefetch import scan
from dlcore._sync_merged import MergedReader
from dlcore._sync_range import LogRange
from dlcore._sync_reader import LogReader
from dlcore._sync_staging import StagedAppend, StagingWriter
from dlcore._sync_stream import AppendOnlyStreamReader, AppendOnlyStreamWriter
from dlcore._sync_watch import LogWatch
from dlcore._sync_writer import LogWriter, TimedLogWriter
from dlcore.log.metadata.commits import AppendRun, CommitStatus, SharedStaging
from dlcore.log.metadata.listing import PAGE_SIZE
from dlcore.log.metadata.names import LogChange, LogChangeKind
from dlcore.log.reading.scan import (
    CommitResult,
    ExtentView,
    LogSnapshot,
    ScanBatch,
    ScanRange,
    SegmentView,
    StagedExtent,
)
from dlcore.log.reading.status import LogStatus
from dlcore.statistics import NamespaceStatistics

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    import pyarrow as pa
    import pyarrow.compute as pc

    from dlcore import namespace as aio
    from dlcore.config import LedgerClientConfig, LogConfig, LogSettings
    from dlcore.errors import DLError
    from dlcore.ids import DLSN
    from dlcore.ledger.metadata.bookies import BookieRegistration
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.log.manager import DistributedLogManager as AsyncManager
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.metadata.watching import LogWatch as AsyncLogWatch
    from dlcore.log.reading.inspecting import SegmentWatch
    from dlcore.log.reading.ranges import Bound
    from dlcore.records import LogRecordWithDLSN, NotLessThan, RecordPlace
    from dlcore.tls import TlsFiles

__all__ = [
    "AppendOnlyStreamReader",
    "AppendOnlyStreamWriter",
    "AppendRun",
    "CommitResult",
    "CommitStatus",
    "DistributedLogManager",
    "ExtentView",
    "LogChange",
    "LogChangeKind",
    "LogRange",
    "LogReader",
    "LogSnapshot",
    "LogStatus",
    "LogWatch",
    "LogWriter",
    "MergedReader",
    "Namespace",
    "NamespaceStatistics",
    "ScanBatch",
    "ScanRange",
    "SegmentView",
    "SharedStaging",
    "StagedAppend",
    "StagedExtent",
    "StagingWriter",
    "copy_log",
    "open_namespace",
    "scan",
]

logger = logging.getLogger(__name__)

_EXIT_CLOSE_S = 10.0
"""How long at exit a namespace may take, after its writers."""


def open_namespace(
    uri: str,
    *,
    config: LogConfig | None = None,
    client_config: LedgerClientConfig | None = None,
    create: bool = False,
    client_id: str | None = None,
    tls: TlsFiles | None = None,
) -> Namespace:
    """Open the namespace at `uri`, ``distributedlog://zk1:2181,zk2:2181/path``.

    Arguments and errors are those of `dlcore.open_namespace`.
    """
    from dlcore.namespace import open_namespace as open_async  # loads kazoo

    opening = open_async(
        uri, config=config, client_config=client_config, create=create, client_id=client_id, tls=tls
    )
    portal = shared_portal()
    return Namespace(portal, portal.call(opening))


class Namespace(Blocking):
    """A collection of logs."""

    def __init__(self, portal: Portal, namespace: aio.Namespace) -> None:
        super().__init__(portal, namespace.aclose)
        self._namespace = namespace
        self._writers: dict[LogWriter, None] = {}  # those that are open, in order
        close_at_exit(self, self._finish)

    def close(self) -> None:
        """Close the writers that are still open, and every connection; readers stop working."""
        forget(self)
        with contextlib.ExitStack() as steps:  # from the last to the first, whichever of them fails
            steps.callback(super().close)
            for writer in reversed(self._writers):
                steps.callback(writer.close)

    async def _finish(self) -> None:
        """Close it, since the process ends and nobody else will."""
        await asyncio.gather(*(writer.finish() for writer in list(self._writers)))
        async with asyncio.timeout(_EXIT_CLOSE_S):
            await self._namespace.aclose()

    def __repr__(self) -> str:
        return repr(self._namespace)

    @property
    def uri(self) -> str:
        """The URI it was opened with."""
        return self._namespace.uri

    def create_log(
        self,
        name: str,
        *,
        config: LogConfig | None = None,
        settings: LogSettings | None = None,
        schema: Any = None,
    ) -> None:
        """Create a log; the quorums of `config`, and `settings`, are stored with it.

        With a `schema`, an Arrow schema, it is a typed log; else one of bytes.
        """
        creating = self._namespace.create_log(name, config=config, settings=settings, schema=schema)
        self._call(creating)

    def delete_log(self, name: str, *, damaged: bool = False) -> None:
        """Delete a log and its data, unless a writer owns it; of a `damaged` one what is told."""
        self._call(self._namespace.delete_log(name, damaged=damaged))

    def rename_log(self, name: str, new_name: str) -> None:
        """Give a log another name, at once for everybody, unless a writer owns it."""
        self._call(self._namespace.rename_log(name, new_name))

    def log_exists(self, name: str) -> bool:
        """Return whether the log exists."""
        return self._call(self._namespace.log_exists(name))

    def get_logs(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of all logs, or of those that start with `prefix`."""
        return self._call(self._namespace.get_logs(prefix))

    def list_logs(
        self, prefix: str | None = None, *, after: str | None = None, page_size: int = PAGE_SIZE
    ) -> Iterator[list[str]]:
        """Return pages of the names of all logs, or of those that start with `prefix`.

        They are in no order, but always in the same one; `after` is the last name of a page.
        """
        return iterate(
            self._portal, self._namespace.list_logs(prefix, after=after, page_size=page_size)
        )

    def watch_logs(self, prefix: str | None = None) -> LogWatch:
        """Return a watch of all logs, or of those whose names start with `prefix`."""

        async def watch() -> AsyncLogWatch:
            return self._namespace.watch_logs(prefix)

        return LogWatch(self._portal, self._call(watch()))

    def open_log(
        self, name: str, *, config: LogConfig | None = None, create_if_missing: bool = False
    ) -> DistributedLogManager:
        """Open a log; one that does not exist is created if wanted, else a `LogNotFoundError`."""
        opening = self._namespace.open_log(name, config=config, create_if_missing=create_if_missing)
        manager = self._call(opening)
        return DistributedLogManager(self._portal, manager, self._writers)

    def begin_append(
        self,
        identity: str,
        version: int,
        *,
        shared: SharedStaging | None = None,
        run: AppendRun | None = None,
        lock_timeout_s: float | None = None,
        keep_record: bool = True,
        strict: bool = False,
        after: int | None = None,
    ) -> StagedAppend:
        """Begin an atomic append to any number of logs; (identity, version) commits once.

        It commits what was staged under its own identity, or is `shared` with others.  With a
        `run`, each of its appends of the version commits once.  Without `keep_record`, for an
        identity of one append only, nothing of it is kept.  A `strict` one is refused, not skipped,
        if the version is not the latest, or was committed to other logs only; one that names what
        it comes `after`, if the last version committed is another.
        """
        append = self._call(
            self._namespace.begin_append(
                identity,
                version,
                shared=shared,
                run=run,
                lock_timeout_s=lock_timeout_s,
                keep_record=keep_record,
                strict=strict,
                after=after,
            )
        )
        return StagedAppend(self._portal, append)

    def open_staging_writer(self, *, identity: str) -> StagingWriter:
        """Open a writer whose records enter logs when an append that finds them there commits."""
        return StagingWriter(
            self._portal, self._call(self._namespace.open_staging_writer(identity=identity))
        )

    def open_merged_reader(
        self,
        names: Sequence[str],
        *,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        positions: Mapping[str, DLSN] | None = None,
    ) -> MergedReader:
        """Open a reader over several logs, whose records come by transaction id."""
        opening = self._namespace.open_merged_reader(
            names, txid=txid, timestamp_ms=timestamp_ms, positions=positions
        )
        return MergedReader(self._portal, self._call(opening))

    def get_snapshots(
        self, names: Sequence[str], *, fresh: bool = False
    ) -> dict[str, LogSnapshot | None]:
        """Return what each log holds now; `fresh` as in the async method, None for no log."""
        return self._call(self._namespace.get_snapshots(names, fresh=fresh))

    def survey_logs(self, names: Sequence[str]) -> dict[str, LogSnapshot | DLError]:
        """Return what each log that exists holds now, or the error why that cannot be told."""
        return self._call(self._namespace.survey_logs(names))

    def find_places(
        self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]
    ) -> list[RecordPlace]:
        """Return the place of each first record that is wanted, in its snapshot."""
        return self._call(self._namespace.find_places(wanted))

    def get_statistics(self) -> NamespaceStatistics:
        """Return what this client has done until now, and what it holds."""

        async def statistics() -> NamespaceStatistics:
            return self._namespace.get_statistics()

        return self._call(statistics())

    def get_bookies(self) -> list[BookieRegistration]:
        """Return the bookies that are registered now."""
        return self._call(self._namespace.get_bookies())

    def get_ledger(self, ledger_id: int) -> LedgerMetadata:
        """Return the metadata of a ledger."""
        return self._call(self._namespace.get_ledger(ledger_id))

    def list_ledgers(self, *, first: int = 0, count: int = 1000) -> list[LedgerMetadata]:
        """Return the metadata of up to `count` ledgers with ids from `first` on, ascending."""
        return self._call(self._namespace.list_ledgers(first=first, count=count))

    def list_commits(self) -> list[CommitStatus]:
        """Return the last commit of each appender whose record is kept, in no order."""
        return self._call(self._namespace.list_commits())


def copy_log(source: DistributedLogManager, namespace: Namespace, target: str) -> int:
    """Copy what is readable of a log to another, each record once however often it is called.

    Return how many records this call copied.  Errors are those of `dlcore.copy_log`.
    """
    from dlcore.copying import copy_log as copy_async

    return source._call(copy_async(source._manager, namespace._namespace, target))


class DistributedLogManager(Blocking):
    """One log: its writers, its readers, and what is known about it."""

    def __init__(
        self, portal: Portal, manager: AsyncManager, writers: dict[LogWriter, None]
    ) -> None:
        super().__init__(portal, manager.aclose)
        self._manager = manager
        self._writers = writers

    def __repr__(self) -> str:
        return repr(self._manager)

    @property
    def name(self) -> str:
        """The log's name."""
        return self._manager.name

    @property
    def log_id(self) -> str:
        """The log's identity; a log that is deleted and created again has another one."""
        return self._manager.log_id

    def open_writer(self, *, ledger_metadata: Mapping[str, str] | None = None) -> LogWriter:
        """Take the writer lock, recover what a dead writer left, and return the writer.

        `ledger_metadata` is stored with each ledger that it creates.
        """
        opened = self._call(self._manager.open_writer(ledger_metadata=ledger_metadata))
        kind = TimedLogWriter if opened.config.flush_interval_s else LogWriter
        writer = kind(self._portal, opened, self._writers)
        self._writers[writer] = None
        return writer

    def open_reader(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        subscriber: str | None = None,
        skip_broken_entries: bool = False,
        ignore_truncation: bool = False,
    ) -> LogReader:
        """Open a reader at a position; at the first readable record if none is given.

        For a `subscriber` it starts at the position that is stored for him, and is his only one.
        With `skip_broken_entries` it leaves out what no replica holds undamaged, and counts it;
        with `ignore_truncation` it reads what is truncated and still stored.
        """
        reader = self._call(
            self._manager.open_reader(
                dlsn=dlsn,
                txid=txid,
                timestamp_ms=timestamp_ms,
                subscriber=subscriber,
                skip_broken_entries=skip_broken_entries,
                ignore_truncation=ignore_truncation,
            )
        )
        return LogReader(self._portal, reader)

    def get_subscriptions(self) -> dict[str, DLSN]:
        """Return the positions that are stored for subscribers: of the next record each reads."""
        return self._call(self._manager.get_subscriptions())

    def move_subscription(
        self,
        subscriber: str,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> DLSN:
        """Store where a subscriber that has no reader goes on, forward or back, and return it."""
        return self._call(
            self._manager.move_subscription(
                subscriber, dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms
            )
        )

    def delete_subscription(self, subscriber: str) -> bool:
        """Forget a subscriber that has no reader; return whether there was one."""
        return self._call(self._manager.delete_subscription(subscriber))

    def read(
        self,
        start: Bound | None = None,
        end: Bound | None = None,
        *,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
    ) -> LogRange:
        """Return the records in [start, end), as batches, tables, frames, or an Arrow stream.

        A bound is a position, a transaction id (int) or a time (datetime with a time zone); without
        one it is the first record that is not truncated, or the end of what is readable now.
        `columns` are those wanted, `where` what rows must fulfil.
        """
        reading = self._manager.read(start, end, columns=columns, where=where)
        return LogRange(self._portal, self._call(reading))

    def get_schema(self) -> pa.Schema | None:
        """Return the columns of a typed log; None of a log of bytes."""
        return self._call(self._manager.get_schema())

    def update_schema(self, schema: Any, *, merge: bool = False) -> pa.Schema:
        """Add columns to a typed log, or widen their types; return all, as they are then.

        `schema` says all columns; with `merge` the log keeps those that it says nothing of.
        """
        return self._call(self._manager.update_schema(schema, merge=merge))

    def open_stream_writer(self) -> AppendOnlyStreamWriter:
        """Open the log's writer as a binary file, which begins where the bytes of the log end."""
        return AppendOnlyStreamWriter(self.open_writer())

    def open_stream_reader(self, position: int | None = None) -> AppendOnlyStreamReader:
        """Open the log's bytes as a binary file, at `position` or at the first byte there is."""
        reader = self._call(self._manager.open_stream_reader(position))
        return AppendOnlyStreamReader(self._portal, reader)

    def get_first_dlsn(self) -> DLSN:
        """Return the position of the first record, or raise `LogEmptyError`."""
        return self._call(self._manager.get_first_dlsn())

    def get_last_dlsn(self) -> DLSN:
        """Return the position of the last readable record, or raise `LogEmptyError`."""
        return self._call(self._manager.get_last_dlsn())

    def get_last_txid(self) -> int:
        """Return the transaction id of the last readable record, or raise `LogEmptyError`."""
        return self._call(self._manager.get_last_txid())

    def get_first_record(self) -> LogRecordWithDLSN:
        """Return the first record that is not truncated, or raise `LogEmptyError`."""
        return self._call(self._manager.get_first_record())

    def get_last_record(self) -> LogRecordWithDLSN:
        """Return the last readable record, or raise `LogEmptyError`."""
        return self._call(self._manager.get_last_record())

    def get_first_txid(self) -> int:
        """Return the transaction id of the first record, or raise `LogEmptyError`."""
        return self._call(self._manager.get_first_txid())

    def status(self) -> LogStatus:
        """Return what the log holds, how it is stored, and who writes it."""
        return self._call(self._manager.status())

    def watch_segments(self) -> Generator[list[LogSegment], None, None]:
        """Yield the log's segments: as they are now, and again after each change.

        It waits for the next one; deletion of the log is a `LogNotFoundError`.
        """

        async def watch() -> SegmentWatch:
            return self._manager.watch_segments()

        watching = self._call(watch())
        try:
            while True:
                yield self._call(anext(watching))
        finally:
            self._call(watching.aclose())

    def get_dlsn_not_less_than_txid(self, txid: int) -> DLSN:
        """Return the position of the first record with `txid` or more, or the end of the log."""
        return self._call(self._manager.get_dlsn_not_less_than_txid(txid))

    def get_dlsn_not_less_than_timestamp(self, timestamp_ms: int) -> DLSN:
        """Return the position of the first record not older than `timestamp_ms`, or the end."""
        return self._call(self._manager.get_dlsn_not_less_than_timestamp(timestamp_ms))

    def get_log_record_count(self, start: DLSN | None = None, end: DLSN | None = None) -> int:
        """Return the exact number of readable records, or of those in [start, end)."""
        return self._call(self._manager.get_log_record_count(start, end))

    def get_log_segments(self) -> list[LogSegment]:
        """Return the segments, in order."""
        return self._call(self._manager.get_log_segments())

    def get_snapshot(self) -> LogSnapshot:
        """Return what is readable now, with all that scans need."""
        return self._call(self._manager.get_snapshot())

    def get_first_active_dlsn(self) -> DLSN:
        """Return the position below which everything is truncated."""
        return self._call(self._manager.get_first_active_dlsn())

    def is_end_of_stream_marked(self) -> bool:
        """Return whether the log is sealed."""
        return self._call(self._manager.is_end_of_stream_marked())

    def get_settings(self) -> LogSettings:
        """Return what is stored with the log for whoever writes it."""
        return self._call(self._manager.get_settings())

    def update_settings(self, **changes: object) -> LogSettings:
        """Change settings that are stored with the log, by name; None unsets one; return all."""
        return self._call(self._manager.update_settings(**changes))

    def recover(self) -> None:
        """Fence and complete what a dead writer left."""
        self._call(self._manager.recover())

    def rename(self, name: str) -> None:
        """Give the log another name, at once for everybody, unless a writer owns it."""
        self._call(self._manager.rename(name))

    def delete(self) -> None:
        """Delete the log and its data; harmless when it is gone."""
        self._call(self._manager.delete())

    def truncate(
        self,
        dlsn: DLSN | None = None,
        *,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> bool:
        """Drop the records below a position, id or time; return whether that changed anything."""
        truncating = self._manager.truncate(dlsn, txid=txid, timestamp_ms=timestamp_ms)
        return self._call(truncating)

    def purge_logs_older_than(self, txid: int) -> bool:
        """Drop the segments that lie wholly below a transaction id, but for the last."""
        return self._call(self._manager.purge_logs_older_than(txid))

    def mark_end_of_stream(self) -> None:
        """Seal a log that nobody writes to: no record can follow."""
        self._call(self._manager.mark_end_of_stream())
