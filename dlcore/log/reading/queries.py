"""Queries that are the same for a log and for one over an endpoint."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import Any, Generic, TypeVar

from dlcore.base.closing import AsyncClosing
from dlcore.base.errors import EndOfStreamError, LogEmptyError
from dlcore.base.ids import DLSN

_Record = TypeVar("_Record")


class LogQueries(AsyncClosing, Generic[_Record]):
    """A log with records of this type."""

    @abstractmethod
    async def get_last_dlsn(self) -> DLSN:
        """Return the position of the last readable record, or raise `LogEmptyError`."""

    @abstractmethod
    async def get_dlsn_not_less_than_txid(self, txid: int) -> DLSN:
        """Return the position of the first record with `txid` or more, or the end of the log."""

    @abstractmethod
    async def open_reader(self, *, dlsn: DLSN | None = None) -> Any:
        """Open a reader at a position."""

    @abstractmethod
    async def truncate(self, dlsn: DLSN | None = None) -> bool:
        """Drop the records below a position; return whether this dropped anything."""

    async def get_first_record(self) -> _Record:
        """Return the first record that is not truncated, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `AsyncLogReader.read_next`.
        """
        return await self._record_at(None)

    async def get_last_record(self) -> _Record:
        """Return the last readable record, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `AsyncLogReader.read_next`.
        """
        return await self._record_at(await self.get_last_dlsn())

    async def _record_at(self, dlsn: DLSN | None) -> _Record:
        record: _Record | None = None
        async with await self.open_reader(dlsn=dlsn) as reader:
            with contextlib.suppress(EndOfStreamError):
                record = await reader.read_next(until_caught_up=True)
        if record is None:
            raise LogEmptyError(f"log {reader.log_name!r} holds no record")
        return record

    async def get_first_txid(self) -> int:
        """Return the transaction id of the first record, or raise `LogEmptyError`.

        Raises: LogEmptyError, and as `AsyncLogReader.read_next`.
        """
        first: Any = await self.get_first_record()
        txid: int = first.txid
        return txid

    async def purge_logs_older_than(self, txid: int) -> bool:
        """Drop segments whose records all have transaction ids below `txid`, except the last one.

        Returns: whether this call dropped anything.

        Raises: as `get_snapshot` and `truncate`.
        """
        position = await self.get_dlsn_not_less_than_txid(txid)
        return await self.truncate(DLSN(position.lssn, 0, 0))
