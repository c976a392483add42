"""The blocking API of staged appends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.sync.twin import Blocking

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import pyarrow as pa

    from dlcore.log.reading.scan import CommitResult, StagedExtent
    from dlcore.log.staging.append import StagedAppend as AsyncStagedAppend
    from dlcore.log.staging.writer import StagingWriter as AsyncStaging
    from dlcore.remote.staging import RemoteStagedAppend, RemoteStagingWriter
    from dlcore.sync.portal import Portal


class StagingWriter(Blocking):
    """Writes durable records that belong to no log until an append commits them."""

    def __init__(self, portal: Portal, writer: AsyncStaging | RemoteStagingWriter) -> None:
        super().__init__(portal, writer.aclose)
        self._writer = writer

    def __repr__(self) -> str:
        return repr(self._writer)

    def write_batch(self, log: str, batch: pa.RecordBatch) -> None:
        """Write rows for `log`: value (binary), and optionally txid (int64).

        Raises: LogNotFoundError, TransactionTooLargeError, TransactionIdOutOfOrderError,
            LogRecordTooLongError, ConfigurationError, WriteError.
        """
        self._call(self._writer.write_batch(log, batch))

    def write_batches(self, parts: Sequence[tuple[str, pa.RecordBatch]]) -> None:
        """Write rows for several logs.  Raises: as `write_batch`."""
        self._call(self._writer.write_batches(parts))

    def begin_round(self, number: int) -> None:
        """Begin a round of appends, to which the next records belong; rounds have rising numbers.

        All appends of lower rounds are committed or abandoned.  Raises: MetadataError.
        """
        self._call(self._writer.begin_round(number))

    def stage(self) -> list[StagedExtent]:
        """Wait until the records since the last call are durable; return their extents, log by log.

        Raises: WriteError.
        """
        return self._call(self._writer.stage())

    def discard(self) -> None:
        """Drop the records written since the last `stage`.  Raises: as `write_batch`."""
        self._call(self._writer.discard())

    def close(self, *, delete: bool = False) -> None:
        """Close the ledgers; with `delete` delete them, unless a log holds entries of them.

        Raises: MetadataError: the leftovers are cleaned up as those of a dead process.
        """
        if self._closed:
            return
        self._closed = True
        if not self._portal.is_inherited:  # else the process that opened it closes it
            self._call(self._writer.aclose(delete=delete))


class StagedAppend(Blocking):
    """One atomic append to any number of logs."""

    def __init__(self, portal: Portal, append: AsyncStagedAppend | RemoteStagedAppend) -> None:
        super().__init__(portal, append.aclose)
        self._append = append

    def __repr__(self) -> str:
        return repr(self._append)

    def write_batch(self, log: str, batch: pa.RecordBatch) -> None:
        """Stage rows for a log; `commit` without extents commits all of them.

        Raises: as `StagingWriter.write_batch`.
        """
        self._call(self._append.write_batch(log, batch))

    def stage(self) -> list[StagedExtent]:
        """Make the written records durable, and return their extents, the default of `commit`.

        Raises: as `StagingWriter.stage`.
        """
        return self._call(self._append.stage())

    def commit(
        self, extents: Sequence[StagedExtent] | None = None, *, replaces: Collection[str] = ()
    ) -> CommitResult:
        """Append `extents`, by default all written records, to their logs: all or nothing.

        The earlier records of the logs in `replaces` are truncated in the same transaction.

        Raises: AppendAbortedError, TransactionTooLargeError, DuplicateAppendError,
            AppendSupersededError, AppendMismatchError, OwnershipAcquireFailedError,
            LogNotFoundError, TransactionIdOutOfOrderError, MetadataError.
        """
        return self._call(self._append.commit(extents, replaces=replaces))

    def abort(self, extents: Sequence[StagedExtent] | None = None) -> None:
        """Drop the staged records.  Raises: MetadataError."""
        self._call(self._append.abort(extents))
