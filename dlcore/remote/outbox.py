"""The accepted records of a remote writer that are not known to be durable.  No I/O, no clock.

Theory of operation.  Records get sequence numbers in the order of acceptance, and are gathered into
messages.  Records that were written one by one become a message as soon as one may be sent.  A
batch becomes one message, or several if it is large.  A message stays until it is acknowledged.
When a stream is lost, all messages are sent again, in their order and with their sequence numbers,
by which the log takes each record once.  Messages that the lost stream had sent are then in doubt:
the log may hold them or not.

Invariants: sequence numbers rise by one from record to record.  The messages in flight are the
first ones of the queue.  The messages in doubt are the first ones as well.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from dlcore.base.errors import OverCapacityError, UnexpectedError
from dlcore.base.ids import DLSN
from dlcore.log.entries.batches import batch_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    from dlcore.flight.replies import End

_Ticket = TypeVar("_Ticket")

MESSAGE_BYTES = 256 * 1024
"""Size of a message of records that were written one by one.  While other messages are in flight,
records wait for others until this size is reached."""
_BATCH_BYTES_MAX = 2 * 1024 * 1024
_RECORD_BYTES = 256
"""Memory that a record written by itself takes beside its payload."""


@dataclass(slots=True)
class Message(Generic[_Ticket]):
    """Records from sequence `first` on; `tickets` pairs rows with callers that want a position."""

    first: int
    batch: pa.RecordBatch
    size_bytes: int
    tickets: list[tuple[int, _Ticket]]

    @property
    def last(self) -> int:
        """The sequence of the message's last record."""
        return self.first + int(self.batch.num_rows) - 1


@dataclass(slots=True)
class _Run(Generic[_Ticket]):
    txids: list[int] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    tickets: list[_Ticket] = field(default_factory=list)
    size_bytes: int = 0


class Outbox(Generic[_Ticket]):
    """The records of one writer: at most `bytes_max` bytes, and one more batch."""

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._run: _Run[_Ticket] = _Run()
        self._messages: deque[Message[_Ticket]] = deque()
        self._sent = 0  # number of messages in flight
        self._doubted = 0  # number of messages that lost streams have sent
        self._next_sequence = 0
        self._bytes = 0
        self.sent_bytes = 0
        """Bytes in flight."""

    def __repr__(self) -> str:
        return f"<Outbox {len(self)} records, {self._sent} messages in flight>"

    def __len__(self) -> int:
        return self._next_sequence - self._first + len(self._run.txids)

    @property
    def next_sequence(self) -> int:
        """The sequence of the next record that is accepted."""
        return self._next_sequence + len(self._run.txids)

    @property
    def has_room(self) -> bool:
        """Whether at most a quarter of the limit is used, so that a woken caller writes a lot."""
        return self._bytes <= self._bytes_max // 4

    def begin(self, sequence: int) -> None:
        """Number the records from `sequence` on, the present ones first; none may be in doubt."""
        assert not self._sent + self._doubted
        for message in self._messages:
            message.first = sequence
            sequence += message.batch.num_rows
        self._next_sequence = sequence

    def add_record(self, txid: int, payload: bytes, ticket: _Ticket) -> None:
        """Accept a record.  Raises: OverCapacityError."""
        self._require_room()
        run, size = self._run, len(payload) + _RECORD_BYTES
        run.txids.append(txid)
        run.payloads.append(payload)
        run.tickets.append(ticket)
        run.size_bytes += size
        self._bytes += size
        if run.size_bytes >= MESSAGE_BYTES:
            self._end_run()

    def add_batch(self, batch: pa.RecordBatch, ticket: _Ticket | None = None) -> None:
        """Accept a batch with rows, the ticket for the last one.  Raises: as `add_record`."""
        self._require_room()
        self._end_run()
        for part in _cut(batch):
            self._add(part, part.nbytes, [])
            self._bytes += part.nbytes
        if ticket is not None:
            self.add_barrier(ticket)

    def add_barrier(self, ticket: _Ticket) -> bool:
        """Attach a ticket to the last accepted record; False if this record is acknowledged."""
        self._end_run()
        if not self._messages:
            return False
        last = self._messages[-1]
        last.tickets.append((last.batch.num_rows - 1, ticket))
        return True

    def _require_room(self) -> None:
        if self._bytes > self._bytes_max:
            raise OverCapacityError(
                f"{self._bytes} bytes in {len(self)} records are not acknowledged, the limit is "
                f"{self._bytes_max}: await wait_for_capacity() between writes"
            )

    def _end_run(self) -> None:
        if self._run.txids:
            run, self._run = self._run, _Run()
            tickets = list(enumerate(run.tickets))
            self._add(batch_of(run.txids, run.payloads), run.size_bytes, tickets)

    def _add(self, batch: pa.RecordBatch, size: int, tickets: list[tuple[int, _Ticket]]) -> None:
        self._messages.append(Message(self._next_sequence, batch, size, tickets))
        self._next_sequence += batch.num_rows

    # Sending

    @property
    def has_in_flight(self) -> bool:
        """Whether a message of this stream is sent and not acknowledged."""
        return self._sent > 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether an earlier stream sent a message that is not known to be durable."""
        return self._doubted > 0

    def look(self) -> Message[_Ticket] | None:
        """Return the next message to send; None if there is none."""
        # Records written one by one are sent now only if no other message waits to be sent.
        if self._sent == len(self._messages):
            self._end_run()
        return self._messages[self._sent] if self._sent < len(self._messages) else None

    def split(self) -> bool:
        """Split the next message, which is too large, in two; False if it has one record."""
        message = self._messages[self._sent]
        half = message.batch.num_rows // 2
        if not half:
            return False
        rest = Message(
            message.first + half,
            message.batch.slice(half),
            message.size_bytes // 2,
            [(row - half, ticket) for row, ticket in message.tickets if row >= half],
        )
        message.batch = message.batch.slice(0, half)
        message.size_bytes -= rest.size_bytes
        message.tickets = [each for each in message.tickets if each[0] < half]
        self._messages.insert(self._sent + 1, rest)
        self._doubted += self._sent < self._doubted  # both halves of a message in doubt are
        return True

    def sent(self) -> None:
        """Note that the next message is in flight."""
        self.sent_bytes += self._messages[self._sent].size_bytes
        self._sent += 1

    def begin_again(self) -> int:
        """Note that the stream is lost; return the first sequence that the next one sends."""
        self._doubted = max(self._doubted, self._sent)
        self._sent = self.sent_bytes = 0
        return self._first

    def refused(self) -> None:
        """Note that the proxy took no message in flight, so this stream adds none in doubt."""
        self._sent = self.sent_bytes = 0

    def acknowledged(
        self, last: int, ends: Iterable[tuple[int, End]] = ()
    ) -> list[tuple[_Ticket, DLSN | None]]:
        """Remove the durable messages, up to the sequence `last`; return tickets and positions.

        `ends` has the ends of messages by their last sequence.  A repeated acknowledgement changes
        nothing.

        Raises:
            UnexpectedError: the record `last` was never sent.
        """
        sent = self._messages[self._sent - 1].last if self._sent else self._first - 1
        if last > sent:
            raise UnexpectedError(
                f"a proxy acknowledged records up to sequence {last}, but {sent} is the last sent"
            )
        return self._take(last, dict(ends))

    @property
    def _first(self) -> int:
        return self._messages[0].first if self._messages else self._next_sequence

    def durable_before(self, last: int) -> list[tuple[_Ticket, DLSN | None]]:
        """Remove the messages that a new stream reports as durable; their positions are unknown."""
        assert not self._sent
        return self._take(last, {})

    def _take(self, last: int, ends: dict[int, End]) -> list[tuple[_Ticket, DLSN | None]]:
        told: list[tuple[_Ticket, DLSN | None]] = []
        while self._messages and self._messages[0].last <= last:
            message = self._messages.popleft()
            self._bytes -= message.size_bytes
            self._doubted = max(self._doubted - 1, 0)
            if self._sent:
                self._sent -= 1
                self.sent_bytes -= message.size_bytes
            told += _positions(message, ends.get(message.last))
        return told

    def drain(self) -> list[_Ticket]:
        """Remove all records; return all tickets."""
        tickets = [ticket for message in self._messages for _, ticket in message.tickets]
        tickets += self._run.tickets
        self._messages.clear()
        self._run = _Run()
        self._sent = self._doubted = self._bytes = self.sent_bytes = 0
        return tickets


def _positions(message: Message[_Ticket], end: End | None) -> list[tuple[_Ticket, DLSN | None]]:
    if end is None or end.dlsn is None:
        return [(ticket, None) for _, ticket in message.tickets]
    # The proxy reports one position.  Others follow from it only within the same entry, where
    # slots are consecutive.
    last, count = DLSN.parse(end.dlsn), message.batch.num_rows
    told: list[tuple[_Ticket, DLSN | None]] = []
    for row, ticket in message.tickets:
        back = count - 1 - row
        is_known = back < end.together
        at = DLSN(last.lssn, last.entry_id, last.slot_id - back) if is_known else None
        told.append((ticket, at))
    return told


def _cut(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Return the rows of a batch in parts that fit into messages."""
    if batch.nbytes <= _BATCH_BYTES_MAX or batch.num_rows == 1:
        return [batch]
    half = batch.num_rows // 2
    return _cut(batch.slice(0, half)) + _cut(batch.slice(half))
