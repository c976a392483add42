"""The blocking API: the same names as the async one, over one background event loop.

Each method only runs its async twin on the portal, and raises the twin's errors.  Any method raises
`AlreadyClosedError` once its object or namespace is closed, and `MetadataError` or `BookieError`
while the cluster does not answer.  Only one thing is added: `LogWriter.write` buffers records in
the calling thread and passes them on in bulk.

Objects that are open when the process exits are closed once all non-daemon threads have ended, but
not after `os._exit` or a signal's default action.  For SIGTERM, ``signal.signal(signal.SIGTERM,
lambda *_: sys.exit(143))`` makes it a normal exit.  In a forked child the use of the parent's
objects raises `ConfigurationError`, and closing them does nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dlcore.base.config import SESSION_TIMEOUT_S
from dlcore.base.statistics import NamespaceStatistics
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
from dlcore.sync.buffering import WritersNamespace
from dlcore.sync.log_range import LogRange
from dlcore.sync.manager import DistributedLogManager
from dlcore.sync.merged import MergedReader
from dlcore.sync.portal import Portal, shared_portal
from dlcore.sync.prefetch import scan
from dlcore.sync.reader import LogReader
from dlcore.sync.staging import StagedAppend, StagingWriter
from dlcore.sync.stream import AppendOnlyStreamReader, AppendOnlyStreamWriter
from dlcore.sync.twin import iterate
from dlcore.sync.watch import LogWatch
from dlcore.sync.writer import LogWriter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from dlcore.api import namespace as aio
    from dlcore.base.config import LedgerClientConfig, LogConfig, LogSettings
    from dlcore.base.errors import DLError
    from dlcore.base.ids import DLSN
    from dlcore.base.records import LogRecordWithDLSN, NotLessThan, RecordPlace
    from dlcore.base.tls import TlsFiles
    from dlcore.ledger.metadata.bookies import BookieRegistration
    from dlcore.ledger.metadata.store import ReadLedgers
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.log.metadata.watching import LogWatch as AsyncLogWatch

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


def open_namespace(
    uri: str,
    *,
    config: LogConfig | None = None,
    client_config: LedgerClientConfig | None = None,
    create: bool = False,
    client_id: str | None = None,
    tls: TlsFiles | None = None,
    session_timeout_s: float = SESSION_TIMEOUT_S,
    connect_timeout_s: float = SESSION_TIMEOUT_S,
) -> Namespace:
    """Open the namespace at `uri`, ``distributedlog://zk1:2181,zk2:2181/path``.

    Arguments and errors are those of `dlcore.open_namespace`.
    """
    from dlcore.api.namespace import open_namespace as open_async  # loads kazoo

    opening = open_async(
        uri,
        config=config,
        client_config=client_config,
        create=create,
        client_id=client_id,
        tls=tls,
        session_timeout_s=session_timeout_s,
        connect_timeout_s=connect_timeout_s,
    )
    portal = shared_portal()
    return Namespace(portal, portal.call(opening))


class Namespace(WritersNamespace):
    """A collection of logs."""

    def __init__(self, portal: Portal, namespace: aio.Namespace) -> None:
        super().__init__(portal, namespace)
        self._namespace = namespace

    def __repr__(self) -> str:
        return repr(self._namespace)

    @property
    def uri(self) -> str:
        """The URI that it was opened with."""
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

        With a `schema`, an Arrow schema, it is a typed log; otherwise a byte log.

        Raises: InvalidLogNameError, LogExistsError, MetadataError.
        """
        creating = self._namespace.create_log(name, config=config, settings=settings, schema=schema)
        self._call(creating)

    def delete_log(self, name: str, *, damaged: bool = False) -> None:
        """Delete a log and its data, unless a writer owns it; of a `damaged` log its known parts.

        Raises: LogNotFoundError, OwnershipAcquireFailedError, MetadataError.
        """
        self._call(self._namespace.delete_log(name, damaged=damaged))

    def rename_log(self, name: str, new_name: str) -> None:
        """Give a log another name, at once for all clients, unless a writer owns it.

        Raises: LogNotFoundError, LogExistsError, OwnershipAcquireFailedError, MetadataError.
        """
        self._call(self._namespace.rename_log(name, new_name))

    def log_exists(self, name: str) -> bool:
        """Return whether the log exists.  Raises: MetadataError."""
        return self._call(self._namespace.log_exists(name))

    def get_logs(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of all logs, or of those that start with `prefix`.

        Raises: MetadataError.
        """
        return self._call(self._namespace.get_logs(prefix))

    def list_logs(
        self, prefix: str | None = None, *, after: str | None = None, page_size: int = PAGE_SIZE
    ) -> Iterator[list[str]]:
        """Return pages of the names of all logs, or of those that start with `prefix`.

        They are not sorted, but always in the same order; `after` is the last name of a page.

        Raises: MetadataError.
        """
        return iterate(
            self._portal, self._namespace.list_logs(prefix, after=after, page_size=page_size)
        )

    def watch_logs(self, prefix: str | None = None) -> LogWatch:
        """Return a watch of all logs, or of those whose names start with `prefix`.

        Raises: AlreadyClosedError.
        """

        async def watch() -> AsyncLogWatch:
            return self._namespace.watch_logs(prefix)

        return LogWatch(self._portal, self._call(watch()))

    def open_log(
        self, name: str, *, config: LogConfig | None = None, create_if_missing: bool = False
    ) -> DistributedLogManager:
        """Open a log; if it does not exist, create it with `create_if_missing`.

        Raises: InvalidLogNameError, LogNotFoundError, MetadataError.
        """
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

        It commits extents that were staged under its own identity, or that are `shared` with
        others.  With a `run`, each of the run's appends of the version commits once.  Without
        `keep_record`, for an identity with only one append, no record of it is kept.  With
        `strict`, an append is refused, not skipped, if the version is not the latest, or was
        committed to other logs.  With `after`, it is refused if the last committed version is
        another one.

        Raises: ConfigurationError: the identity or version is invalid.
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
        """Open a writer whose records enter logs when an append commits their extents.

        Raises: ConfigurationError: `identity` is empty, or too long.
        """
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
    ) -> MergedReader[LogRecordWithDLSN]:
        """Open a reader over several logs, whose records come by transaction id.

        Raises: AlreadyTruncatedError, ConfigurationError, LogNotFoundError, MetadataError,
            SchemaMismatchError: see the async method.
        """
        opening = self._namespace.open_merged_reader(
            names, txid=txid, timestamp_ms=timestamp_ms, positions=positions
        )
        return MergedReader(self._portal, self._call(opening))

    def get_snapshots(
        self, names: Sequence[str], *, fresh: bool = False
    ) -> dict[str, LogSnapshot | None]:
        """Return a snapshot of each log, None if it does not exist; `fresh` as in the async method.

        Raises: LedgerReadError, MetadataError.
        """
        return self._call(self._namespace.get_snapshots(names, fresh=fresh))

    def survey_logs(self, names: Sequence[str]) -> dict[str, LogSnapshot | DLError]:
        """Return a snapshot of each existing log, or the error that prevents it.

        Raises: MetadataError.
        """
        return self._call(self._namespace.survey_logs(names))

    def get_schemas(self, names: Sequence[str]) -> dict[str, pa.Schema | None]:
        """Return the columns of each existing log; None for a byte log.

        Raises: InvalidLogNameError.
        """
        return self._call(self._namespace.get_schemas(names))

    def find_places(
        self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]
    ) -> list[RecordPlace]:
        """Return the place of the first record of each search, in its snapshot.

        Raises: LedgerReadError: no replica of an entry is readable.
        """
        return self._call(self._namespace.find_places(wanted))

    def get_statistics(self) -> NamespaceStatistics:
        """Return counts of this client's work so far, and its open objects.

        Raises: AlreadyClosedError.
        """

        async def statistics() -> NamespaceStatistics:
            return self._namespace.get_statistics()

        return self._call(statistics())

    def get_bookies(self) -> list[BookieRegistration]:
        """Return the bookies that are registered now.  Raises: MetadataError."""
        return self._call(self._namespace.get_bookies())

    def get_ledger(self, ledger_id: int) -> LedgerMetadata:
        """Return the metadata of a ledger.  Raises: LedgerNotFoundError, MetadataError."""
        return self._call(self._namespace.get_ledger(ledger_id))

    def list_ledgers(self, *, first: int = 0, count: int = 1000) -> ReadLedgers:
        """Return the metadata of up to `count` ledgers by id, ascending from `first` on.

        A damaged ledger has its error instead.  Raises: MetadataError.
        """
        return self._call(self._namespace.list_ledgers(first=first, count=count))

    def list_commits(self) -> list[CommitStatus]:
        """Return the last commit of each appender whose record is kept, in no order.

        Raises: MetadataError.
        """
        return self._call(self._namespace.list_commits())


def copy_log(source: DistributedLogManager, namespace: Namespace, target: str) -> int:
    """Copy the readable records of a log to another, each once however often this is called.

    Return how many records this call copied.  Errors are those of `dlcore.copy_log`.
    """
    from dlcore.api.copying import copy_log as copy_async

    return source._call(copy_async(source._manager, namespace._namespace, target))
