"""One log: one class for its users, whatever reaches it.

`DirectLog` talks to the metadata store and the bookies, `FlightLog` to proxies.  Each operation is
declared once, with its promise: here, or in the class of its field, which this one inherits.  An
operation that follows from others is there, too.  One that a back end does not have raises
UnsupportedError.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dlcore.api.byte_stream import ByteStream
from dlcore.api.contents import LogContents
from dlcore.api.definition import LogDefinition
from dlcore.api.subscriptions import Subscriptions
from dlcore.base.errors import UnsupportedError
from dlcore.base.ids import DLSN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from dlcore.base.records import LogRecord
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.reading.inspecting import SegmentWatch
    from dlcore.log.reading.status import LogStatus
    from dlcore.log.writing.records_writer import AsyncLogWriter


class DistributedLogManager(LogContents, ByteStream, Subscriptions, LogDefinition):
    """One log.  Use `Namespace.open_log`.

    Each method may raise LogNotFoundError, MetadataError and LedgerReadError; over proxies also
    ProxyUnavailableError, if no proxy answers for as long as the namespace waits.  A change may
    then have happened, or not.
    """

    def __repr__(self) -> str:
        return f"<DistributedLogManager {self.name!r}>"

    # Writers

    @abstractmethod
    async def open_writer(
        self, *, producer: str | None = None, ledger_metadata: Mapping[str, str] | None = None
    ) -> AsyncLogWriter:
        """Open a writer.

        A direct writer is the only one of its log: it takes the writer lock, and recovers a dead
        writer's segment.  A proxy that holds the lock is asked to release it.  Through proxies any
        number of writers share a log, and each record of a producer is in the log once.

        Args:
            producer: through proxies, the name under which the writer numbers its records.  An
                earlier writer of this name is fenced.  `next_sequence` of the writer is the number
                of records of this name, so that a restarted program knows where to go on.  Without
                a name the writer makes one for itself.
            ledger_metadata: of a direct writer, is stored with its ledgers.

        Raises:
            ConfigurationError: `ledger_metadata` has keys that dlog itself uses, or over 4 KiB.
            EndOfStreamError: the log is sealed: no record can follow.
            LogModeError: the log's mode does not allow this kind of writer.
            OwnershipAcquireFailedError: another writer owned the log during `lock_timeout_s`.
            LedgerRecoveryError: too few bookies answer to recover a dead writer's segment.
            UnsupportedError: an argument is of the other kind of writer.
        """

    async def append(
        self, records: Sequence[LogRecord] | pa.RecordBatch, *, expected: DLSN | None
    ) -> DLSN | None:
        """Append records, all or none, if the log's last record is the one at `expected`.

        Only through proxies: a direct writer is alone with its log.

        Args:
            records: at most 1 MiB of records; they become a part of one entry.
            expected: the position of the last record; None: the log holds no record.

        Returns: the position of the last appended record; None if it is not known any more.

        Raises:
            ConditionFailedError: another record is the last one; nothing is written.
            ProxyUnavailableError: no proxy answered; the records may be in the log or not.
            ConfigurationError, TransactionIdOutOfOrderError, EndOfStreamError: the records are
                refused.
            UnsupportedError: the namespace was opened directly.
        """
        raise UnsupportedError(
            f"log {self.name!r}: only proxies offer `append`; open the namespace by grpc://…, or "
            "use `open_writer`, which excludes other writers"
        )

    # State

    @abstractmethod
    async def is_end_of_stream_marked(self) -> bool:
        """Return whether the log is sealed.

        Raises: LogNotFoundError, MetadataError.
        """

    @abstractmethod
    async def status(self) -> LogStatus:
        """Return the contents of the log, how they are stored, and who writes it.

        Over proxies the facts that only ZooKeeper has are None.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """

    async def get_log_segments(self) -> list[LogSegment]:
        """Return the segments that are not wholly truncated, in order.

        Raises: UnsupportedError over proxies; `get_snapshot` has what scans need of them.
        """
        self._unsupported("get_log_segments")

    def watch_segments(self) -> SegmentWatch:
        """Return an async iterator over the log's segments: the present ones, then each change.

        Raises: UnsupportedError over proxies.
        """
        self._unsupported("watch_segments")

    async def get_first_active_dlsn(self) -> DLSN:
        """Return the position below which everything is truncated.

        Raises: UnsupportedError over proxies.
        """
        self._unsupported("get_first_active_dlsn")

    # Changes

    @abstractmethod
    async def truncate(
        self,
        dlsn: DLSN | None = None,
        *,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> bool:
        """Drop the records below a position, a transaction id or a time.

        It works beside a live writer, and inside the segment that is being written.

        Args:
            dlsn: the first position to keep; the position after the last record drops all records.
            txid: the first record with this transaction id or a higher one is kept.
            timestamp_ms: the first record written at that time or later is kept.

        Returns: whether this call dropped anything.

        Raises:
            ConfigurationError: `dlsn` is past the readable end, which the message names; or not
                exactly one of the three is given.
        """

    async def purge_logs_older_than(self, txid: int) -> bool:
        """Drop segments whose records all have transaction ids below `txid`, except the last one.

        Returns: whether this call dropped anything.

        Raises: as `get_snapshot` and `truncate`.
        """
        position = await self.get_dlsn_not_less_than_txid(txid)
        return await self.truncate(DLSN(position.lssn, 0, 0))

    async def recover(self) -> None:
        """Fence and complete the segment of a dead writer.

        Raises:
            OwnershipAcquireFailedError: a writer owns the log.
            UnsupportedError: over proxies, which do this when they open the log.
        """
        self._unsupported("recover")

    @abstractmethod
    async def rename(self, name: str) -> None:
        """Give the log another name, at once for all clients; this manager goes on under it.

        Writers and readers that others have opened go on too, by the log's id.

        Raises:
            InvalidLogNameError: a log cannot have that name.
            LogExistsError: there is a log of that name.
            OwnershipAcquireFailedError: a writer that is no proxy owns the log.
            LogRenamedError: it was renamed since this manager was opened.
        """

    @abstractmethod
    async def mark_end_of_stream(self) -> None:
        """Seal the log: no record can follow, and readers get the end of stream.

        A proxy that owns the log first makes all accepted records durable, and releases it.

        Raises:
            EndOfStreamError: it is sealed already.
            OwnershipAcquireFailedError: a direct writer owned the log during `lock_timeout_s`; it
                can seal the log itself.
        """

    @abstractmethod
    async def delete(self) -> None:
        """Delete the log and its data; a log that is gone is no error.

        Raises:
            OwnershipAcquireFailedError: a writer that is no proxy owns the log.
            LogRenamedError: it was renamed since this manager was opened.
        """
