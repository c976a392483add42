"""Gathers records that are written one by one into batches, within bounds.  No I/O.

Theory of operation.  Two queues derive from `Batcher`: that of a log's writer, whose batches become
entries (`dlcore.log.writing.transmit`), and that of a producer, whose batches become messages to a
proxy (`dlcore.flight.producer_client`).  A batcher accepts single records and counts what is
pending.  The queue says to which batch a record belongs, and how many bytes that has left.

A record has one price.  Its size is that of its payload and `RECORD_OVERHEAD_BYTES`: so much it
takes of a batch.  While its caller waits, it costs `RECORD_TICKET_BYTES` more of memory.

A number of bytes is granted at once, and records within a grant are counted only when a count is
needed.  Then a record costs a comparison, a subtraction and its places in three lists.  A change of
what the queue may accept needs a call of `revoke`.

`tickets` belong to the caller: each identifies one record.  They are in a list of their own, not in
pairs with records, because the garbage collector would visit each pair.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from dlcore.base.config import RECORD_SIZE_BYTES_MAX
from dlcore.base.errors import (
    ConfigurationError,
    LogRecordTooLongError,
    OverCapacityError,
    TransactionIdOutOfOrderError,
)
from dlcore.base.ids import TXID_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.base.records import LogRecord

TicketT = TypeVar("TicketT")
Lists: TypeAlias = tuple[list[int], list[bytes], list[TicketT], int]
"""Transaction ids, payloads and tickets of a batch, and the bytes that it has left."""

RECORD_OVERHEAD_BYTES = 12
"""Bytes of a record in a batch beyond its payload: its transaction id and its offset."""
RECORD_TICKET_BYTES = 256
"""Memory of a record whose caller waits for it, beyond its size."""
_LONGEST_BYTES = RECORD_SIZE_BYTES_MAX + RECORD_OVERHEAD_BYTES


def parts_of(record: LogRecord) -> tuple[int, bytes]:
    """Return transaction id and payload of an object passed as a record.

    Raises: ConfigurationError: it is no record.
    """
    try:
        return record.txid, record.payload
    except AttributeError as error:
        raise no_record(record) from error


def no_record(given: object) -> ConfigurationError:
    """Return the error for an object that is no record."""
    return ConfigurationError(f"{given!r:.100}: expected a LogRecord(txid=…, payload=…)")


def checked_payload(txid: int, payload: bytes, *, last_txid: int) -> bytes:
    """Return the payload as bytes that cannot change while the record waits to be sent.

    Raises the error for which the record cannot follow `last_txid`, if it cannot.
    """
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise ConfigurationError(
            f"payload={payload!r:.100}: expected bytes; text becomes bytes by text.encode()"
        )
    if not isinstance(txid, int):
        raise ConfigurationError(f"txid={txid!r}: expected an integer")
    if not 0 <= txid <= TXID_MAX:
        raise txid_out_of_range(txid)
    if txid < last_txid:
        raise txid_out_of_order(txid, last_txid)
    stored = payload if type(payload) is bytes else bytes(payload)
    check_payload_size(len(stored))
    return stored


def check_payload_size(size: int) -> None:
    """Raise `LogRecordTooLongError` if a payload of `size` bytes is too large."""
    if size > RECORD_SIZE_BYTES_MAX:
        raise LogRecordTooLongError(
            f"a record of {size} bytes exceeds the limit of {RECORD_SIZE_BYTES_MAX}"
        )


def txid_out_of_range(txid: int) -> ConfigurationError:
    """Return the error for a transaction id outside 0 … TXID_MAX."""
    return ConfigurationError(f"transaction id {txid} is out of range, expected 0 … {TXID_MAX}")


def txid_out_of_order(txid: int, last_txid: int) -> TransactionIdOutOfOrderError:
    """Return the error for a decreasing transaction id."""
    return TransactionIdOutOfOrderError(
        f"transaction id {txid} is lower than {last_txid}, the one before it"
    )


class Pending:
    """The accepted records of a queue that are not acknowledged yet, and their bounds."""

    __slots__ = ("bytes_max", "records", "records_max", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = self.records = 0
        """Memory of the records, and how many they are."""
        self.bytes_max = self.records_max = sys.maxsize

    def require_room(self, log: str) -> None:
        """Raise if the bounds are reached.  Raises: OverCapacityError."""
        size, count = self.size_bytes, self.records
        if size > self.bytes_max or count >= self.records_max:
            limits = [f"{self.bytes_max} bytes"]
            limits += [f"{self.records_max} records"] * (self.records_max < sys.maxsize)
            raise OverCapacityError(
                f"log {log!r}: {size} bytes in {count} records are pending, the limits are "
                f"{' and '.join(limits)}: await wait_for_capacity() between writes"
            )

    def grant_bytes(self) -> int:
        """Return the bytes of records that may be accepted before the bounds are looked at."""
        # The smallest records are the most numerous.
        least, left_bytes = RECORD_OVERHEAD_BYTES, self.bytes_max - self.size_bytes
        left_records = self.records_max - self.records
        return min(left_bytes * least // (least + RECORD_TICKET_BYTES), left_records * least)


class Batcher(ABC, Generic[TicketT]):
    """Accepts single records, and counts all that is pending; transaction ids never fall.

    Args:
        admit: is called before a record is accepted; raises if none may be.  False: it is called
            for each record; true: it need not be called again before `revoke`.
        last_txid: the highest transaction id before these records; -1 if there is none.
    """

    def __init__(self, *, admit: Callable[[], bool] = lambda: True, last_txid: int = -1) -> None:
        self._admit = admit
        self.last_txid = last_txid
        """The highest transaction id accepted, or before; -1 if there is none."""
        self._pending = Pending()
        self._granted_bytes = self._left_bytes = 0
        # The lists of the batch, as long as records fit the grant.
        self._txids: list[int] = []
        self._payloads: list[bytes] = []
        self._tickets: list[TicketT] = []
        self._counted_to = 0  # records of the lists that are counted

    def limit(self, *, bytes_max: int, records_max: int = sys.maxsize) -> None:
        """Set the bounds of what may be pending when another record or batch is accepted."""
        self.revoke()
        self._pending.bytes_max, self._pending.records_max = bytes_max, records_max

    @property
    def pending_bytes(self) -> int:
        """Memory of all records that were accepted and not acknowledged."""
        self._count()
        return self._pending.size_bytes

    @property
    def pending_records(self) -> int:
        """How many records were accepted and are not acknowledged."""
        self._count()
        return self._pending.records

    @property
    def has_room(self) -> bool:
        """Whether at most a quarter of the bounds is used, so that a woken caller writes a lot."""
        self._count()
        pending = self._pending
        return (
            pending.size_bytes <= pending.bytes_max // 4
            and pending.records <= pending.records_max // 4
        )

    def require_room(self, log: str) -> None:
        """Raise if the bounds are reached.  Raises: OverCapacityError."""
        self._count()
        self._pending.require_room(log)

    def add_record(self, txid: int, payload: bytes, ticket: TicketT) -> None:
        """Accept one record.

        Raises the error of `checked_payload` for it, or that of `admit` for any record.
        """
        # The checks are in this order so that each is safe; nearly every record passes all.
        if (
            type(payload) is not bytes
            or type(txid) is not int
            or not self.last_txid <= txid <= TXID_MAX
            or (left := self._left_bytes - len(payload)) < RECORD_OVERHEAD_BYTES
        ):
            payload, left = self._granted(txid, payload)
        self._txids.append(txid)
        self._payloads.append(payload)
        self._tickets.append(ticket)
        self.last_txid = txid
        self._left_bytes = left - RECORD_OVERHEAD_BYTES

    def _granted(self, txid: int, payload: bytes) -> tuple[bytes, int]:
        """Return the payload as it is kept, and the rest of a new grant after it."""
        self.revoke()
        granted = self._pending.grant_bytes() if self._admit() else 0
        payload = checked_payload(txid, payload, last_txid=self.last_txid)
        size_bytes = len(payload) + RECORD_OVERHEAD_BYTES
        lists = self._batch_for(txid, size_bytes)
        self._txids, self._payloads, self._tickets, room_bytes = lists
        self._counted_to = len(self._txids)
        # A record beyond the limit never fits a grant.  Therefore it comes here, where it is
        # checked, and `add_record` needs no check of its own.
        self._granted_bytes = max(min(granted, room_bytes, _LONGEST_BYTES), size_bytes)
        return payload, self._granted_bytes - len(payload)

    def revoke(self) -> None:
        """Drop the grant: `admit` is called before the next record is accepted."""
        self._count()
        self._granted_bytes = self._left_bytes = 0
        self._txids, self._payloads, self._tickets = [], [], []

    def _count(self) -> None:
        """Count the records that were accepted since the last count."""
        added_bytes = self._granted_bytes - self._left_bytes
        if added_bytes:
            self._granted_bytes = self._left_bytes
            added = len(self._txids) - self._counted_to
            self._counted_to += added
            self._pending.size_bytes += added_bytes + RECORD_TICKET_BYTES * added
            self._pending.records += added
            self._counted(added, added_bytes)

    @abstractmethod
    def _batch_for(self, txid: int, size_bytes: int) -> Lists[TicketT]:
        """Return the lists of the batch for a record of this size, and how many bytes are left.

        Others follow it there, as long as these bytes last and there is no other call.
        """

    @abstractmethod
    def _counted(self, records: int, size_bytes: int) -> None:
        """Note that so many records were added to the last batch that `_batch_for` returned."""
