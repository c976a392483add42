"""From records to entries: records and batches in groups, one entry of each group.  No I/O.

Theory of operation.  Accepted records gather in the *open* group.  It is sealed when the next
record would make it larger than an entry should be, or when a caller waits for it (`seal`).  Sealed
groups are sent in order, as fast as the ledger takes them.  The open group is sent too as soon as
nothing is in flight.  Therefore a lone record leaves at once, and a busy writer fills its entries
while it waits for acks.

`tickets` identify the records at some `slots` of the group.  Records that are written one by one
are its *singles*; `dlcore.log.entries.batches` says how they are accepted.

A `Run` makes the entries of groups: consecutive ones of one log in a ledger, which are its extent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa
from msgspec.structs import replace
from typing_extensions import override

from dlcore.base.config import MIB, require
from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.log.entries.batcher import RECORD_TICKET_BYTES, Batcher, Lists
from dlcore.log.entries.batches import check_txids, cut
from dlcore.log.entries.body import (
    BYTES_SCHEMA_ID,
    batch_of,
    encode_entry,
    encode_entry_header,
    plain_format,
)
from dlcore.log.metadata.segment import Extent
from dlcore.log.writing.port import MarkedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlcore.log.entries.body import Compressor
    from dlcore.log.entries.encryption import EntryEncryptor
    from dlcore.log.metadata.changes import SegmentLimits
    from dlcore.log.metadata.values import LogHead
    from dlcore.log.typed.rows import TypedRows
    from dlcore.log.writing.port import RowMark
    from dlcore.wire.frames import BytesLike


_Ticket = TypeVar("_Ticket")
WHOLE_BYTES_MAX = MIB
"""Size up to which a batch can be one entry, so that all of it is in the log or nothing."""


@dataclass(slots=True)
class _Singles:
    """Records that were written one by one."""

    txids: list[int] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Group(Generic[_Ticket]):
    """Records that become one entry."""

    first_txid: int
    schema_id: int = BYTES_SCHEMA_ID
    record_count: int = 0
    size_bytes: int = 0
    goes_on: bool = False
    """Whether its first rows belong to a batch that began in the group before."""
    slots: list[int] = field(default_factory=list)
    tickets: list[_Ticket] = field(default_factory=list)
    marked: list[MarkedRows[Any]] = field(default_factory=list)
    """The rows that came with a mark."""
    singles: _Singles | None = None
    """The list of further single records, if the group ends with such records."""
    _parts: list[_Singles | pa.RecordBatch] = field(default_factory=list)

    @property
    def last_txid(self) -> int:
        """The highest transaction id in it."""
        last = self._parts[-1]
        txid: int = last.txids[-1] if isinstance(last, _Singles) else last.column(0)[-1].as_py()
        return txid

    @property
    def memory_bytes(self) -> int:
        """Its memory while it is pending."""
        singles = sum(len(part.txids) for part in self._parts if isinstance(part, _Singles))
        return self.size_bytes + RECORD_TICKET_BYTES * singles

    def add_ticket(self, ticket: _Ticket) -> None:
        """Attach a ticket to its last record."""
        self.slots.append(self.record_count - 1)
        self.tickets.append(ticket)

    def batch(self) -> pa.RecordBatch:
        """Return its records as one batch."""
        batches = [
            batch_of(part.txids, part.payloads) if isinstance(part, _Singles) else part
            for part in self._parts
        ]
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    def plain_records(self) -> tuple[list[int], list[bytes]] | None:
        """Return transaction ids and payloads if all its records were written one by one."""
        part = self._parts[0]
        if len(self._parts) > 1 or not isinstance(part, _Singles):
            return None
        return part.txids, part.payloads

    def begin_singles(self) -> _Singles:
        """Start a list of records that are written one by one, and return it."""
        singles = self.singles = _Singles()
        self._parts.append(singles)
        return singles

    def count_singles(self, records: int, size_bytes: int) -> None:
        """Count records added to the list, each with a ticket; this is their size in the entry."""
        self.slots.extend(range(self.record_count, self.record_count + records))
        self.record_count += records
        self.size_bytes += size_bytes

    def _add_batch(self, batch: pa.RecordBatch, size_bytes: int) -> None:
        self._parts.append(batch)
        self.singles = None
        self.record_count += batch.num_rows
        self.size_bytes += size_bytes


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Records that a writer accepted and that are not known to be written."""

    record_count: int
    first_txid: int
    last_txid: int

    def __str__(self) -> str:
        one = self.record_count == 1
        records = f"{self.record_count} record{'' if one else 's'}"
        txids = f"transaction id{'' if one else 's'} {self.first_txid}"
        return f"{records}, {txids}" + ("" if one else f" to {self.last_txid}")

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Unwritten:
        """Return the description of a batch for an entry, which has at least one row."""
        txids = batch.column(0)
        return cls(batch.num_rows, txids[0].as_py(), txids[-1].as_py())

    @classmethod
    def joined(cls, parts: Iterable[Unwritten | None]) -> Unwritten | None:
        """Return all of `parts`, which are in order, as one; None if there are none."""
        given = [part for part in parts if part is not None]
        if not given:
            return None
        count = sum(part.record_count for part in given)
        return cls(count, given[0].first_txid, given[-1].last_txid)


class Transmitter(Batcher[_Ticket]):
    """The queue between a writer's callers and its ledger."""

    def __init__(
        self,
        *,
        entry_bytes: int,
        last_txid: int = -1,
        admit: Callable[[], bool] = lambda: True,
    ) -> None:
        require(
            condition=entry_bytes > 0, key="entry_bytes", value=entry_bytes, rule="expected > 0"
        )
        super().__init__(admit=admit, last_txid=last_txid)
        self.entry_bytes = entry_bytes
        """Size at which an entry is full."""
        self._sealed: deque[Group[_Ticket]] = deque()
        self._open: Group[_Ticket] | None = None
        self._in_flight: deque[Group[_Ticket]] = deque()
        self._sealed_bytes = 0

    @property
    def queued_bytes(self) -> int:
        """Size in entries of all records that were accepted and are not in flight."""
        self._count()
        return self._sealed_bytes + (0 if self._open is None else self._open.size_bytes)

    @property
    def is_idle(self) -> bool:
        """Whether every accepted record is acknowledged."""
        return not (self._sealed or self._open or self._in_flight)

    @property
    def has_in_flight(self) -> bool:
        """Whether a group was sent and is not acknowledged."""
        return bool(self._in_flight)

    @override
    def _batch_for(self, txid: int, size_bytes: int) -> Lists[_Ticket]:
        group = self._group_for(txid, size_bytes)
        singles = group.singles or group.begin_singles()
        return singles.txids, singles.payloads, group.tickets, self.entry_bytes - group.size_bytes

    @override
    def _counted(self, records: int, size_bytes: int) -> None:
        assert self._open is not None
        self._open.count_singles(records, size_bytes)

    def add_batch(
        self,
        batch: pa.RecordBatch | LogRecord,
        ticket: _Ticket | None = None,
        *,
        mark: RowMark | None = None,
        whole: bool = False,
    ) -> None:
        """Accept at least one row of a byte log, cut to entries; the last row has the ticket.

        One row with a ticket is a record, and may be passed as that: it costs a small part of a
        batch.  With a `mark` its rows are passed on with that.  With `whole` it becomes part of one
        entry.

        Raises (nothing of it is accepted):
            The error of `admit`,
            TransactionIdOutOfOrderError, LogRecordTooLongError, ConfigurationError.
        """
        if ticket is not None and not isinstance(batch, LogRecord) and batch.num_rows == 1:
            batch = LogRecord(batch.column(0)[0].as_py(), batch.column(1)[0].as_py())
        if isinstance(batch, LogRecord):
            assert ticket is not None
            self._add_row(batch, ticket, mark)
            return
        self._admit()  # `add_record` does this for single records
        check_txids(batch, last_txid=self.last_txid)
        parts = cut(batch, entry_bytes=WHOLE_BYTES_MAX if whole else self.entry_bytes)
        self._add_parts(_whole(parts) if whole else parts, ticket, BYTES_SCHEMA_ID, mark)

    def _add_row(self, record: LogRecord, ticket: _Ticket, mark: RowMark | None) -> None:
        self.add_record(record.txid, record.payload, ticket)
        if mark is not None:
            self._count()
            assert self._open is not None
            self._open.marked.append(MarkedRows(mark, 1, self._open.record_count - 1))

    def add_rows(
        self,
        rows: TypedRows,
        ticket: _Ticket | None = None,
        *,
        mark: RowMark | None = None,
        whole: bool = False,
    ) -> None:
        """Accept at least one row of a typed log, as `add_batch` does."""
        self._admit()
        check_txids(rows.batch, last_txid=self.last_txid)
        parts = rows.cut(WHOLE_BYTES_MAX if whole else self.entry_bytes)
        self._add_parts(_whole(parts) if whole else parts, ticket, rows.schema_id, mark)

    def _add_parts(
        self,
        parts: Iterable[tuple[pa.RecordBatch, int]],
        ticket: _Ticket | None,
        schema_id: int,
        mark: RowMark | None,
    ) -> None:
        self.revoke()
        before: Group[_Ticket] | None = None
        for part, size_bytes in parts:
            txids = part.column(0)
            first_txid, self.last_txid = txids[0].as_py(), txids[-1].as_py()
            group = self._group_for(first_txid, size_bytes, schema_id)
            # If this group is never sent, the rows before it may still be in the log.
            group.goes_on |= before is not None and group is not before
            before = group
            group._add_batch(part, size_bytes)
            if mark is not None:
                count = part.num_rows
                group.marked.append(MarkedRows(mark, count, group.record_count - 1))
                mark = mark.after(count)
            self._pending.size_bytes += size_bytes
            self._pending.records += part.num_rows
        if ticket is not None:
            group.add_ticket(ticket)

    def _group_for(
        self, first_txid: int, size_bytes: int, schema_id: int = BYTES_SCHEMA_ID
    ) -> Group[_Ticket]:
        group = self._open
        # An entry has one schema id, by which readers find its columns.
        if group is not None and (
            group.size_bytes + size_bytes > self.entry_bytes or group.schema_id != schema_id
        ):
            self.seal()
            group = None
        if group is None:
            group = self._open = Group(first_txid, schema_id)
        return group

    def seal(self) -> None:
        """Let all accepted records be sent, in full groups or not."""
        self.revoke()
        if self._open is not None:
            self._sealed.append(self._open)
            self._sealed_bytes += self._open.size_bytes
            self._open = None

    def add_barrier(self, ticket: _Ticket) -> bool:
        """Attach a ticket to the last accepted record; False if that is acknowledged already."""
        self.seal()
        for queue in (self._sealed, self._in_flight):
            if queue:
                queue[-1].add_ticket(ticket)
                return True
        return False

    @property
    def has_sealed(self) -> bool:
        """Whether a group is complete; `next_group` returns it."""
        return bool(self._sealed)

    @property
    def has_next(self) -> bool:
        """Whether a group should be sent now."""
        # Nagle's rule: a group that is not full waits while another one is in flight.
        return bool(self._sealed) or (self._open is not None and not self._in_flight)

    @property
    def next_txid(self) -> int:
        """The first transaction id of the group to send now."""
        assert self.has_next
        group = self._sealed[0] if self._sealed else self._open
        assert group is not None
        return group.first_txid

    def next_group(self) -> Group[_Ticket]:
        """Take the group to send now; it counts as in flight."""
        assert self.has_next
        if not self._sealed:
            self.seal()
        group = self._sealed.popleft()
        self._sealed_bytes -= group.size_bytes
        self._in_flight.append(group)
        return group

    def acknowledged(self) -> Group[_Ticket]:
        """Take the oldest group in flight, which is durable now."""
        group = self._in_flight.popleft()
        self._pending.size_bytes -= group.memory_bytes
        self._pending.records -= group.record_count
        assert self._pending.size_bytes >= 0
        return group

    def unacknowledged(self) -> Unwritten | None:
        """Return the records that were accepted and not acknowledged."""
        self._count()
        open_groups = [] if self._open is None else [self._open]
        return Unwritten.joined(
            Unwritten(group.record_count, group.first_txid, group.last_txid)
            for group in (*self._in_flight, *self._sealed, *open_groups)
        )

    def drain(self) -> tuple[list[Group[_Ticket]], list[Group[_Ticket]]]:
        """Give all records up: return the groups in flight, and those never sent."""
        self.seal()
        in_flight, queued = list(self._in_flight), list(self._sealed)
        self._in_flight.clear()
        self._sealed.clear()
        self._pending.size_bytes = self._pending.records = self._sealed_bytes = 0
        return in_flight, queued


def _whole(parts: Iterable[tuple[pa.RecordBatch, int]]) -> list[tuple[pa.RecordBatch, int]]:
    found = list(parts)
    if len(found) > 1:
        raise ConfigurationError(
            f"{sum(size for _, size in found)} bytes do not fit into one entry, as all or none "
            f"requires: expected {WHOLE_BYTES_MAX} at most"
        )
    return found


_NEARLY_FULL = 0.75
"""With this share of its size or age a segment will soon be completed."""


class Run:
    """Keeps the counts for the headers of its entries, and for its extent.

    Write times are never below `timestamp_ms`, the last one of the segment or ledger before.
    """

    def __init__(self, *, first_entry_id: int = 0, timestamp_ms: int = 0) -> None:
        self.first_entry_id = first_entry_id
        self.timestamp_ms = timestamp_ms
        self.entry_count = 0
        self.record_count = 0
        self.size_bytes = 0
        self.first_txid = -1
        self.last_txid = -1
        self.is_stamped = False

    @property
    def last_entry_id(self) -> int:
        """Its last entry; one below the first while there are none."""
        return self.first_entry_id + self.entry_count - 1

    def extent(self, ledger_id: int) -> Extent:
        """Return its entries as a final extent of the ledger."""
        return Extent(
            ledger_id=ledger_id,
            first_entry_id=self.first_entry_id,
            last_entry_id=self.last_entry_id,
            record_count=self.record_count,
            size_bytes=self.size_bytes,
            first_txid=self.first_txid,
            last_txid=self.last_txid,
            last_timestamp_ms=self.timestamp_ms,
            stamped=self.is_stamped,
        )

    def encode(
        self,
        group: Group[Any],
        *,
        now_ms: int,
        compressor: Compressor,
        stamp: bytes = b"",
        encryptor: EntryEncryptor | None = None,
    ) -> list[BytesLike]:
        """Return the parts of the next entry's body, which holds `group`, and count it."""
        # Readers search by time, so it never decreases, even if the clock is set back.
        self.timestamp_ms = max(self.timestamp_ms, now_ms)
        body = self._encode(group, compressor, stamp)
        if encryptor is not None:
            body = encryptor.encrypt(body)
        if not self.entry_count:
            self.first_txid = group.first_txid
        self.last_txid = group.last_txid
        self.is_stamped = bool(stamp)
        self.entry_count += 1
        self.record_count += group.record_count
        self.size_bytes += sum(memoryview(part).nbytes for part in body)
        return body

    def _encode(self, group: Group[Any], compressor: Compressor, stamp: bytes) -> list[BytesLike]:
        # Records written one by one are encoded without a batch, which costs more than they do.
        plain, form = group.plain_records(), plain_format()
        if plain is not None and form is not None and compressor.leaves_bytes:
            header = encode_entry_header(
                record_count=group.record_count,
                first_txid=group.first_txid,
                last_txid=group.last_txid,
                records_before=self.record_count,
                write_time_ms=self.timestamp_ms,
                stamp=stamp,
            )
            return [header, *form.message(*plain)]
        return encode_entry(
            group.batch(),
            first_txid=group.first_txid,
            last_txid=group.last_txid,
            records_before=self.record_count,
            write_time_ms=self.timestamp_ms,
            compressor=compressor,
            schema_id=group.schema_id,
            stamp=stamp,
        )


@dataclass(slots=True)
class OwnExtent:
    """The extent that a writer has open, until its end is in the metadata, and its segment.

    Extents of others may come before it in the segment: `first_entry_id` is its first entry's id
    there.  `acknowledged` is the first entry id of the segment that is not acknowledged, and
    `acknowledged_records` the sequence id of its first record.
    """

    lssn: int
    ledger_id: int
    first_entry_id: int
    started_ms: int
    bytes_before: int
    run: Run
    acknowledged: int
    acknowledged_records: int
    closing: Extent | None = None
    """The final form, once its ledger is closed."""

    @classmethod
    def opened(cls, ledger_id: int, head: LogHead) -> OwnExtent:
        """Return the extent over this ledger that a head opens."""
        segment, lssn = head.segment, head.max_lssn
        assert segment is not None
        first = head.end[1] if head.end[0] == lssn else 0
        run = Run(timestamp_ms=head.last_timestamp_ms)
        before = segment.size_bytes
        return cls(
            lssn,
            ledger_id,
            first,
            segment.created_ms,
            before,
            run,
            acknowledged=first,
            acknowledged_records=head.next_sequence_id,
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of its segment."""
        return self.bytes_before + self.run.size_bytes

    @property
    def end(self) -> DLSN | None:
        """The position after its last acknowledged record, if there is one."""
        if self.acknowledged == self.first_entry_id:
            return None
        return DLSN(self.lssn, self.acknowledged, 0)

    def is_full(self, limits: SegmentLimits, *, now_ms: int) -> bool:
        """Return whether the segment must be completed before another entry.

        One without an entry is never completed, however long its start took.
        """
        return self.run.entry_count > 0 and limits.is_reached(
            size_bytes=self.size_bytes, age_ms=now_ms - self.started_ms
        )

    def is_nearly_full(self, limits: SegmentLimits, *, now_ms: int) -> bool:
        """Return whether the segment will soon be completed at the present rate."""
        return limits.is_reached(
            size_bytes=int(self.size_bytes / _NEARLY_FULL),
            age_ms=int((now_ms - self.started_ms) / _NEARLY_FULL),
        )

    def close(self, last_entry_id: int, size_bytes: int) -> None:
        """Note where its ledger ends, once all of it is acknowledged."""
        closing = self.run.extent(self.ledger_id)
        end = self.first_entry_id + last_entry_id + 1
        assert (last_entry_id, end) == (closing.last_entry_id, self.acknowledged)
        self.closing = replace(closing, size_bytes=size_bytes)
