"""Staged writes and atomic appends: one class each for their users, whatever takes the records."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING

from dlcore.base.closing import AsyncClosing
from dlcore.base.config import require, require_bounded, require_kind
from dlcore.base.errors import AlreadyClosedError
from dlcore.base.ids import require_identity
from dlcore.log.metadata.commits import AppendRun, SharedStaging

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import pyarrow as pa

    from dlcore.log.metadata.segment import StagedExtent
    from dlcore.log.reading.scan import CommitResult


class StagingWriter(AsyncClosing):
    """Writes durable records for any number of logs, which enter them when an append commits.

    Calls may come at once: each waits until those before it are over.  Each `stage` ends the
    extents.  A log that is renamed meanwhile still gets its records, by its id, for a minute; then
    its old name leads nowhere, or to another log.  Use `Namespace.open_staging_writer`.

    Over proxies each method may also raise ProxyUnavailableError.  Records that were sent and not
    staged are sent again after the loss of a proxy, unless they were more than 8 MiB.
    """

    def __init__(self, identity: str) -> None:
        self._identity = require_identity("identity", identity)
        self._closed = False
        # A call awaits ledgers or proxies between its steps.  Steps of another call between them
        # would mix the entries of two logs, or those of two ledgers, in one extent.
        self._one_call = asyncio.Lock()

    def _require_open(self) -> None:
        if self._closed:
            raise AlreadyClosedError(f"the staging writer of {self._identity!r} is closed")

    async def write_batches(self, parts: Sequence[tuple[str, pa.RecordBatch]]) -> None:
        """Write rows for several logs like `write_batch`.

        If one part is refused, the parts before it are written: stage or discard them.  Too many
        logs are refused before any part is written.  Raises: as `write_batch`.
        """
        async with self._one_call:
            await self._write_batches(parts)

    @abstractmethod
    async def _write_batches(self, parts: Sequence[tuple[str, pa.RecordBatch]]) -> None: ...

    async def write_batch(self, log: str, batch: pa.RecordBatch) -> None:
        """Write rows for `log`: value (binary), and txid (int64) if they have their own.

        For a typed log: columns of its schema, and `_txid` if the rows have their own.

        The records of one log in one stage either all have transaction ids, or none has; then they
        get one when the append commits.

        Raises:
            LogNotFoundError: there is no such log.
            TransactionTooLargeError: more logs than one append takes, since the last `stage`.
            TransactionIdOutOfOrderError, LogRecordTooLongError, ConfigurationError: the batch is
                refused as a whole, and the writer stays usable.
            WriteError: the ledger failed; records that were not staged are lost.
        """
        async with self._one_call:
            await self._write_batch(log, batch)

    @abstractmethod
    async def _write_batch(self, log: str, batch: pa.RecordBatch) -> None: ...

    async def begin_round(self, number: int) -> None:
        """Begin a round of appends for the records written next; rounds have rising numbers.

        All appends of lower rounds are decided or given up: no log takes more from the ledgers that
        were filled for them, and these are settled.  Raises: MetadataError.
        """
        async with self._one_call:
            await self._begin_round(number)

    @abstractmethod
    async def _begin_round(self, number: int) -> None: ...

    async def stage(self) -> list[StagedExtent]:
        """Wait until all records since the last call are durable; return their extents, log by log.

        Raises:
            WriteError: the ledger failed, or the proxy is lost; records that were not staged are
                lost.
        """
        async with self._one_call:
            return await self._stage()

    @abstractmethod
    async def _stage(self) -> list[StagedExtent]: ...

    async def discard(self) -> None:
        """Forget the records since the last `stage`; entries already sent stay unused.

        Raises: as `write_batch`.
        """
        async with self._one_call:
            await self._discard()

    @abstractmethod
    async def _discard(self) -> None: ...

    async def aclose(self, *, delete: bool = False) -> None:
        """Close the ledgers; staged entries stay until they are committed or settled.

        With `delete` the ledgers are dropped at once, except those with entries in a log.  Proxies
        do this by themselves.  A call that failed or was cancelled may be repeated.

        Raises: MetadataError: the remaining ledgers are settled like those of a dead process.
        """
        self._closed = True
        # The call that is running is refused at its next step.  A ledger that it begins just now
        # is closed with the others.
        async with self._one_call:
            await self._aclose(delete=delete)

    @abstractmethod
    async def _aclose(self, *, delete: bool) -> None: ...


class StagedAppend(AsyncClosing):
    """One atomic append, named by an identity, a version, and its place among the run's appends.

    The versions of one identity go up.  If an append of a version was committed before, it is not
    committed again, and the result of `commit` says so.  Use `Namespace.begin_append`.
    """

    def __init__(
        self,
        identity: str,
        version: int,
        *,
        shared: SharedStaging | None,
        run: AppendRun | None,
        lock_timeout_s: float | None,
    ) -> None:
        require_identity("identity", identity)
        require_kind("version", version, int)
        is_stored = 0 <= version < 2**63
        require(condition=is_stored, key="version", value=version, rule="expected 0 … 2**63-1")
        if shared is not None:
            require_kind("shared", shared, SharedStaging)
        if run is not None:
            require_kind("run", run, AppendRun)
        if lock_timeout_s is not None:
            require_kind("lock_timeout_s", lock_timeout_s, float)
            require_bounded("lock_timeout_s", lock_timeout_s, may_be_endless=True)
            is_time = lock_timeout_s >= 0
            rule = "expected a number >= 0"
            require(condition=is_time, key="lock_timeout_s", value=lock_timeout_s, rule=rule)

    @abstractmethod
    async def write_batch(self, log: str, batch: pa.RecordBatch) -> None:
        """Stage rows for a log; `commit` without extents appends all of them.

        Raises: as `StagingWriter.write_batch`.
        """

    @abstractmethod
    async def stage(self) -> list[StagedExtent]:
        """Make all rows written here durable, and return their extents, the default of `commit`.

        Raises: as `StagingWriter.stage`.
        """

    @abstractmethod
    async def commit(
        self, extents: Sequence[StagedExtent] | None = None, *, replaces: Collection[str] = ()
    ) -> CommitResult:
        """Append `extents`, in the given order per log: all or nothing, once.

        Through proxies the result has no positions, and the request is retried until a proxy
        reports the result.

        Args:
            extents: the extents to append; None: those of this append's own writers.
            replaces: the names of logs whose earlier records are all truncated in the same
                transaction; those of them without an extent are empty afterwards.

        Raises:
            AppendAbortedError: it was aborted, or staged data or one of the logs is gone.
            TransactionTooLargeError: more logs or extents than one transaction takes.
            DuplicateAppendError: appends of this version overlapped, and it is unknown which of
                them are committed.
            AppendSupersededError: a later run of the appender appends this version.
            AppendMismatchError: a strict append is older than the last one committed, or its
                version was committed to other logs.
            OwnershipAcquireFailedError: a writer owned one of the logs during `lock_timeout_s`.
            EndOfStreamError: one of the logs is sealed.
            LogNotFoundError: there is no log of a name in `replaces`.
            TransactionIdOutOfOrderError: the extents' own transaction ids do not follow the log's.
            MetadataConnectionError, ProxyUnavailableError: it is unknown whether it was committed;
                call again to find out.
        """

    @abstractmethod
    async def abort(self, extents: Sequence[StagedExtent] | None = None) -> None:
        """Give the append up: it can never commit.

        It drops the ledgers of this append's writers, and those ledgers of `extents` whose process
        is gone or has closed its writer; a live writer drops its own.  It settles shared ledgers
        only if an earlier round found them abandoned.  Raises: MetadataError.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close the writer; staged records that were not committed are dropped."""
