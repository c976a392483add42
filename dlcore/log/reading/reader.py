"""The log's reader: records in order, each once, from a position on, up to and along the tail."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Unpack, cast

from dlcore.base.errors import (
    AlreadyClosedError,
    EndOfStreamError,
    InvalidEntryError,
)
from dlcore.log.entries.batches import first_row_not_less
from dlcore.log.entries.body import (
    PARSED_RECORDS_MAX,
    batch_message_of,
    decode_entry_batch,
    plain_format,
    with_txid,
)
from dlcore.log.entries.encryption import EntryDecryptor
from dlcore.log.reading.entry_rows import EntryRows, TypedEntryRows
from dlcore.log.reading.rows_reader import AsyncLogReader, ReadStart

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pyarrow as pa

    from dlcore.base.ids import DLSN
    from dlcore.log.context import LogContext
    from dlcore.log.reading.broken_entries import BrokenEntries
    from dlcore.log.reading.rows_reader import RowsWanted
    from dlcore.log.reading.schemas import KnownSchemas
    from dlcore.log.reading.subscriptions import SubscriptionHold
    from dlcore.log.reading.tail import FetchedEntry
    from dlcore.log.reading.tail_driver import Fetcher

logger = logging.getLogger(__name__)


class Fetching(NamedTuple):
    """A fetcher, and the position at which it begins."""

    fetcher: Fetcher
    position: DLSN


class EntryDecoder:
    """Makes rows of the entries of one log, in their order.

    Args:
        decryptor: decrypts those that are encrypted.
        schemas: the versions of the schema that are known, of a typed log.
        start: rows before it are left out.
    """

    def __init__(
        self, decryptor: EntryDecryptor, schemas: KnownSchemas | None, start: ReadStart
    ) -> None:
        self.schemas = schemas
        self.start: ReadStart | None = start
        """The start of the wanted rows; None once there was one."""
        self.waiting: FetchedEntry | None = None
        """An entry until its schema and key are known: a cancelled call must not lose it."""
        self._decryptor = decryptor

    async def learn(self, entry: FetchedEntry) -> None:
        """Learn what is needed to decode an entry.  Raises: EncryptionKeyError, MetadataError."""
        self.waiting = entry
        if self.schemas is not None:
            await self.schemas.learn(entry.header.schema_id)
        with contextlib.suppress(InvalidEntryError):  # to decrypt it raises it again
            await self._decryptor.learn(entry.body, entry.header)
        self.waiting = None

    def decode(self, entry: FetchedEntry) -> EntryRows | None:
        """Return the wanted rows of an entry for which all is learnt; None: there is none.

        Raises: InvalidEntryError.
        """
        if entry.header.encrypted:
            body, header = self._decryptor.decrypt(entry.body, entry.header)
            entry = replace(entry, body=body, header=header)
        start = self.start
        if start is None:
            plain = _plain_rows_of(entry)
            if plain is not None:
                return plain
        else:
            if start.timestamp_ms is not None and entry.place.timestamp_ms < start.timestamp_ms:
                return None
            if start.txid is not None and entry.last_txid < start.txid:
                return None
        batch = _batch_of(entry, self.schemas)
        first_row = entry.first_slot
        if start is not None and start.txid is not None:
            first_row = max(first_row, first_row_not_less(batch, start.txid))
        self.start = None  # later transaction ids and timestamps are not lower
        kind = EntryRows if self.schemas is None else TypedEntryRows
        return kind(batch, entry.place, first_row, size_bytes=entry.body.nbytes)


class DirectReader(AsyncLogReader):
    """Reads one log; use `DistributedLogManager.open_reader`.  Requests are served in order.

    A read that is cancelled, or fails, takes nothing: the next one returns it.

    `async for record in reader` yields every record that is readable, and ends there; `records` and
    `batches` can also follow the log.
    """

    _hold: SubscriptionHold | None

    def __init__(
        self,
        context: LogContext,
        name: str,
        log_id: str,
        fetch_from: Callable[[ReadStart], Awaitable[Fetching]],
        start: ReadStart,
        fetching: Fetching,
        broken: BrokenEntries,
        hold: SubscriptionHold | None = None,
        schemas: KnownSchemas | None = None,
    ) -> None:
        self._context = context
        self.log_name = name
        self._fetch_from = fetch_from
        self._broken = broken
        self._hold = hold
        decryptor = EntryDecryptor(context.encryption_keys, name, log_id)
        self._decoder = EntryDecoder(decryptor, schemas, start)
        super().__init__(fetching.position)
        self._fetcher = fetching.fetcher
        self._closed = False
        context.open_objects.add(self)

    def __repr__(self) -> str:
        state = "CLOSED" if self._closed else "OPEN"
        return f"<AsyncLogReader {self.log_name!r} at {self.position} {state}>"

    @property
    def is_typed(self) -> bool:
        """Whether the log is typed: it has batches then, and no records."""
        return self._decoder.schemas is not None

    @property
    def broken_entries(self) -> int:
        """How many broken entries were skipped, if that was requested."""
        return self._broken.count

    async def take_entries(self, **wanted: Unpack[RowsWanted]) -> list[EntryRows]:
        """Return rows as `_gather_rows` gathers them: each object has the rows of one entry."""
        await self._gather_rows(**wanted)
        return cast("list[EntryRows]", self._take_gathered())

    async def _move(self, start: ReadStart) -> None:
        self._require_open()
        fetching = await self._fetch_from(start)
        if self._closed:  # while the position was looked up
            await fetching.fetcher.aclose()
            self._require_open()
        left = self._fetcher
        self._fetcher, self._position = fetching
        self._decoder.start = start
        self._drop_rows()
        await left.aclose()

    def _require_open(self) -> None:
        if self._closed:
            raise AlreadyClosedError(f"the reader of log {self.log_name!r} is closed")

    async def _require_usable(self) -> None:
        self._require_open()
        if self._hold is not None:
            await self._hold.ensure_locked()

    async def _add(self, *, non_blocking: bool, until_caught_up: bool) -> EntryRows | None:
        """Add rows of the next entry that has any, and return them; None: see `_fill`."""
        await self._require_usable()
        reads, decoder = self._context.reads, self._decoder
        while True:
            entry = decoder.waiting or self._fetcher.take()
            if entry is not None:
                if decoder.schemas is not None or entry.header.encrypted:
                    await decoder.learn(entry)
                    self._require_open()
                reads.entries += 1
                reads.size_bytes += entry.body.nbytes
                rows = self._decode_unbroken(entry)
                if rows is not None:
                    self._rows.append(rows)
                self._position = entry.end
                if rows is not None:
                    return rows
                continue
            if self._fetcher.error is not None:
                raise self._fetcher.error.with_traceback(None)  # else it grows with each call
            if self._fetcher.has_ended:
                raise EndOfStreamError(f"log {self.log_name!r} is sealed and was read to its end")
            if non_blocking or (until_caught_up and not await self._fetcher.has_more()):
                return None
            await self._fetcher.wait()
            self._require_open()

    def _decode_unbroken(self, entry: FetchedEntry) -> EntryRows | None:
        """Return the entry's rows; None if none is wanted, or the entry is skipped as broken."""
        try:
            rows = self._decoder.decode(entry)
        except InvalidEntryError as error:
            self._fetcher.reject(entry.place, error)
            if self._fetcher.error is error:
                raise  # later entries must not be read as if this one were not there
            return None
        return rows if rows is not None and rows.rows_left else None

    def _drop_rows(self) -> None:
        self._decoder.waiting = None
        super()._drop_rows()

    async def aclose(self) -> None:
        """Stop reading; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        # The position of the first row that was not taken, before the rows are dropped.
        self._position = self.position
        self._drop_rows()
        self._context.open_objects.discard(self)
        try:
            await self._fetcher.aclose()
        finally:
            if self._hold is not None:
                await self._hold.release()

    async def abandon(self, reason: str) -> None:
        """Stop reading; nothing is lost."""
        logger.debug("reader of log=%s left: %s", self.log_name, reason)
        await self.aclose()


def _batch_of(entry: FetchedEntry, schemas: KnownSchemas | None = None) -> pa.RecordBatch:
    """Return all rows of an entry, decoded, by the latest known schema."""
    known = None if schemas is None else schemas.entries
    batch = decode_entry_batch(entry.body, entry.header, known)
    if known is not None:
        batch = known.promote(batch, entry.header.schema_id)
    return batch if entry.assigned_txid is None else with_txid(batch, entry.assigned_txid)


def _plain_rows_of(entry: FetchedEntry) -> EntryRows | None:
    """Return the entry's rows, if its records can be decoded without Arrow; else None."""
    header, form = entry.header, plain_format()
    if header.record_count > PARSED_RECORDS_MAX or header.schema_id or form is None:
        return None
    found = form.parse(batch_message_of(entry.body, header), header.record_count)
    if found is None:
        return None
    txid = header.first_txid if header.txid_assigned else None
    if entry.assigned_txid is not None:
        txid = entry.assigned_txid
    if txid is not None:
        found = found._replace(txids=[txid] * header.record_count)
    return EntryRows.plain(
        found,
        entry.place,
        entry.first_slot,
        decode=partial(_batch_of, entry),
        size_bytes=entry.body.nbytes,
    )
