"""The base of what one log offers, and its contents: the records that can be read."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import TYPE_CHECKING

from dlcore.base.closing import AsyncClosing
from dlcore.base.config import require_kind
from dlcore.base.errors import (
    AlreadyClosedError,
    EndOfStreamError,
    LogEmptyError,
    SchemaMismatchError,
    UnsupportedError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import NotLessThan, RecordField, require_search
from dlcore.log.reading.ranges import require_bound, require_columns

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    import pyarrow.compute as pc

    from dlcore.base.records import LogRecordWithDLSN, RecordPlace
    from dlcore.log.metadata.values import LogKey
    from dlcore.log.reading.log_range import LogRange
    from dlcore.log.reading.ranges import Bound
    from dlcore.log.reading.rows_reader import AsyncLogReader
    from dlcore.log.reading.scan import LogSnapshot


class OpenedLog(AsyncClosing):
    """The base of all that a log offers; a back end sets `_log`."""

    _log: LogKey
    _closed = False

    @property
    def name(self) -> str:
        """The log's name."""
        return self._log.name

    @property
    def log_id(self) -> str:
        """The log's identity; a log that is deleted and created again has another one."""
        return self._log.log_id

    def _require_open(self) -> None:
        if self._closed:
            raise AlreadyClosedError(f"the manager of log {self.name!r} is closed")

    def _unsupported(self, operation: str) -> NoReturn:
        raise UnsupportedError(
            f"log {self.name!r}: proxies do not offer `{operation}`; open the namespace directly, "
            "as distributedlog://…"
        )

    def _of_another_kind(self, *, typed: bool) -> SchemaMismatchError:
        """Return the error for a use of a log that is `typed`, or is not, as the other kind."""
        return SchemaMismatchError(
            f"log {self.name!r} was created {'with' if typed else 'without'} a schema, which "
            f"makes it a log of {'typed columns' if typed else 'bytes'} for good"
        )

    async def aclose(self) -> None:
        """Stop using the log; its writers and readers must be closed by themselves."""
        self._closed = True


class LogContents(OpenedLog):
    """The readable records of one log.

    A back end reads them: `open_reader`, `read`, `get_snapshot`, `get_last_dlsn` and `_places`.
    All other answers follow from these, and are the same over every back end.
    """

    @abstractmethod
    async def open_reader(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        subscriber: str | None = None,
        columns: Sequence[str] | None = None,
        skip_broken_entries: bool = False,
        ignore_truncation: bool = False,
    ) -> AsyncLogReader:
        """Open a reader; at the first record that is not truncated, unless a start is given.

        Args:
            dlsn: the position of the first record wanted; `DLSN.INITIAL`, the default, means the
                first one that is not truncated.  A position beyond the end waits for its record.
            txid: the first record with this transaction id or a higher one; 0 means the first one.
            timestamp_ms: the first remaining record that was written at that time or later, in
                epoch milliseconds.
            subscriber: the name for which it reads.  It starts at the stored position of the
                subscriber, unless another is given, stores positions with `commit`, and is the
                only reader of the subscriber.  Through proxies a later reader takes the
                subscription over, and the earlier one gets an error at its next `commit`.
            columns: names of the columns that proxies send, to spare the others their way; only
                through proxies.  Records need all columns.
            skip_broken_entries: leave out entries that have no undamaged replica, and count them
                in `broken_entries`; otherwise they are an error.  Not over proxies.
            ignore_truncation: read also truncated records, as long as their segment is stored.  Not
                over proxies.

        Raises:
            AlreadyTruncatedError: `dlsn`, or the stored position, was truncated away, or a record
                with `txid` or a higher one was.
            ConfigurationError: more than one position is given.
            OwnershipAcquireFailedError: the subscriber had another direct reader for
                `lock_timeout_s`, of this client or of the proxy.
            OverCapacityError: the log keeps as many positions as it may.
            UnsupportedError: this back end does not offer an argument.
        """

    async def read(
        self,
        start: Bound | None = None,
        end: Bound | None = None,
        *,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
    ) -> LogRange:
        """Return the records from `start` up to but not including `end`, as Arrow, or as a frame.

        Args:
            start: a position, a transaction id (int) or a time (datetime with a time zone): the
                first record that is not below it; None: the first one that is not truncated.
            end: the same kinds of value; None: the present end of the readable records.
            columns: the names of the columns; by default all of a byte log (docs/python.md).  A
                typed log also has `_log`, `_dlsn`, `_txid`, `_sequence_id` and `_timestamp`, which
                are returned only on request.
            where: a filter of rows, such as ``pc.field("fare") > 20``.

        Raises:
            SchemaMismatchError: the log has no such column.
            AlreadyTruncatedError: `start` is a position or transaction id that was truncated away;
                the first position and 0 mean the beginning.
            ConfigurationError: a bound is of another kind, or a time has no time zone.
            LogNotFoundError, LedgerReadError, MetadataError.
        """
        for bound in (start, end):
            require_bound(bound)
        require_columns(columns)
        return await self._open_range(start, end, columns, where)

    @abstractmethod
    async def _open_range(
        self,
        start: Bound | None,
        end: Bound | None,
        columns: Sequence[str] | None,
        where: pc.Expression | None,
    ) -> LogRange:
        """Return the records from `start` up to but not including `end`."""

    @abstractmethod
    async def get_snapshot(self) -> LogSnapshot:
        """Return the readable state of the log, with everything that scans need.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """

    @abstractmethod
    async def _places(
        self, snapshot: LogSnapshot, *wanted: DLSN | NotLessThan
    ) -> list[RecordPlace]:
        """Return, in the snapshot, the place of the first record of each search, or the end."""

    async def get_first_dlsn(self) -> DLSN:
        """Return the position of the first record that is not truncated.  Raises: LogEmptyError."""
        snapshot = await self.get_snapshot()
        self._require_records(snapshot)
        return snapshot.first

    @abstractmethod
    async def get_last_dlsn(self) -> DLSN:
        """Return the position of the last readable record.  Raises: LogEmptyError."""

    async def get_last_txid(self) -> int:
        """Return the transaction id of the last readable record.  Raises: LogEmptyError."""
        return self._last_txid(await self.get_snapshot())

    def _last_txid(self, snapshot: LogSnapshot) -> int:
        self._require_records(snapshot)
        return next(s.extents[-1].last_txid for s in reversed(snapshot.segments) if s.extents)

    def _require_records(self, snapshot: LogSnapshot) -> None:
        if snapshot.is_empty:
            raise self._no_record()

    def _no_record(self) -> LogEmptyError:
        return LogEmptyError(f"log {self.name!r} holds no record")

    async def find_place(self, wanted: DLSN | NotLessThan) -> RecordPlace:
        """Return the place of the first readable record that is not below `wanted`, or the end.

        Raises: ConfigurationError, LogNotFoundError, LedgerReadError, MetadataError.
        """
        require_search(wanted)
        (place,) = await self._places(await self.get_snapshot(), wanted)
        return place

    async def get_dlsn_not_less_than_txid(self, txid: int) -> DLSN:
        """Return the position of the first record with `txid` or more, or the end of the log.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        return await self._dlsn_of(NotLessThan(RecordField.TXID, txid))

    async def get_dlsn_not_less_than_timestamp(self, timestamp_ms: int) -> DLSN:
        """Return the position of the first record not older than `timestamp_ms`, or the end.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        return await self._dlsn_of(NotLessThan(RecordField.TIMESTAMP_MS, timestamp_ms))

    async def _dlsn_of(self, wanted: NotLessThan) -> DLSN:
        return (await self.find_place(wanted)).dlsn

    async def get_log_record_count(self, start: DLSN | None = None, end: DLSN | None = None) -> int:
        """Return the exact number of readable records, or of those in [start, end).

        Raises: ConfigurationError, LogNotFoundError, LedgerReadError, MetadataError.
        """
        for key, bound in (("start", start), ("end", end)):
            if bound is not None:
                require_kind(key, bound, DLSN)
        snapshot = await self.get_snapshot()
        low = snapshot.first if start is None else max(start, snapshot.first)
        high = snapshot.end if end is None else min(end, snapshot.end)
        if low >= high:
            return 0
        before, after = await self._places(snapshot, low, high)
        return after.sequence_id - before.sequence_id

    async def get_first_record(self) -> LogRecordWithDLSN:
        """Return the first record that is not truncated.

        Raises: LogEmptyError, and as `AsyncLogReader.read_next`.
        """
        return await self._record_at(None)

    async def get_last_record(self) -> LogRecordWithDLSN:
        """Return the last readable record.

        Raises: LogEmptyError, and as `AsyncLogReader.read_next`.
        """
        return await self._record_at(await self.get_last_dlsn())

    async def _record_at(self, dlsn: DLSN | None) -> LogRecordWithDLSN:
        record: LogRecordWithDLSN | None = None
        async with await self.open_reader(dlsn=dlsn) as reader:
            with contextlib.suppress(EndOfStreamError):
                record = await reader.read_next(until_caught_up=True)
        if record is None:
            raise self._no_record()
        return record

    async def get_first_txid(self) -> int:
        """Return the transaction id of the first record.

        Raises: LogEmptyError, and as `AsyncLogReader.read_next`.
        """
        return (await self.get_first_record()).txid
