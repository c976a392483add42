"""The client's half of writing to a log through proxies: each accepted record is in the log once.

Promise.  Records get sequence numbers in the order of acceptance.  Whatever breaks, they are in the
log once and in this order, without a gap, and a caller gets success only for a durable record.  If
this cannot be known any more, the machine fails and says so.

Theory of operation.  Records are gathered into messages.  Records that were written one by one
become a message as soon as one may be sent.  A batch becomes one message, or several if it is
large.  A message stays until it is acknowledged.  One stream at a time is open to the proxy that
owns the log.  When a stream is lost, the next one sends all remaining messages again, in their
order and with their sequence numbers, by which the log takes each record once.  Messages that a
lost stream had sent are in doubt: the log may hold them or not.

A log forgets a producer that writes nothing for long.  A machine with a generated name then
continues under a new name.  If a record is in doubt, it cannot: the log may hold the record, and
could not recognize it under another name.  A machine with a given name fails in both cases.

An append on a condition, or with a claim of the caller's own, is the same machine with one message,
after which it is closed.  The message is sent again although the log says that it holds it, because
only the reply to it has its position.  A message that was written already is recognized by its
claim, although it has moved the log's end.

The other half is `dlcore.proxy.writing`; the driver is `dlcore.backends.flight.producer_driver`.
docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

The machine owns an `Outbox` (records until they are durable), an `Identity` (name, claim, and what
the log may forget) and one `PutStream` after the other.

Invariants: sequence numbers rise by one from record to record.  The messages in flight are the
first ones of the queue, and there are none without a stream.  The messages in doubt are the first
ones as well.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar, assert_never

import msgspec
from typing_extensions import override

from dlcore.base.errors import (
    AlreadyClosedError,
    DLError,
    LogRecordTooLongError,
    ProducerFencedError,
    ProxyUnavailableError,
    UnexpectedError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.base.machines import Machine, State, Transitions
from dlcore.flight.put import Numbered
from dlcore.flight.sending import framed
from dlcore.log.entries.batcher import RECORD_OVERHEAD_BYTES, RECORD_TICKET_BYTES, Batcher, Lists
from dlcore.log.entries.body import batch_of, byte_log_schema
from dlcore.log.entries.stamp import GENERATED_KEPT_MS, KEPT_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pyarrow as pa

    from dlcore.flight.replies import Draining, End, PutReply, Ready
    from dlcore.log.entries.stamp import Claim

_Ticket = TypeVar("_Ticket")
Answers: TypeAlias = "Sequence[tuple[_Ticket, DLSN | None]]"

SILENCE_S = 15.0
"""If a proxy sends nothing for this time while it owes a reply, its stream is given up."""
PENDING_BYTES_MAX = 32 * 1024 * 1024
MESSAGE_BYTES = 256 * 1024
"""Size of a message of records that were written one by one.  While other messages are in flight,
records wait for others until this size is reached."""
# Half of what a proxy and gRPC accept by default (4 MiB), because the encoded message is larger
# than its columns.
_BATCH_BYTES_MAX = 2 * 1024 * 1024


class ClientState(State):
    """The state of the machine; CLOSED and FAILED are final."""

    IDLE = "no stream is open, and nothing waits to be sent"
    OPENING = "a stream is begun, and its proxy is not ready yet"
    SENDING = "the proxy takes messages, and acknowledges durable ones"
    DRAINED = "the proxy releases the log: it acknowledges what it took, and takes no more"
    ENDING = "no message follows: the proxy acknowledges the rest, and ends the stream"
    PAUSED = "the stream was lost, and another one begins after a pause"
    CLOSED = "every accepted record is durable, and no more are accepted"
    FAILED = "what is not acknowledged may be in the log or not"


(
    _IDLE,
    _OPENING,
    _SENDING,
    _DRAINED,
    _ENDING,
    _PAUSED,
    _CLOSED,
    _FAILED,
) = ClientState
_READY = (_SENDING, _DRAINED, _ENDING)

TRANSITIONS = Transitions(
    _IDLE,
    {
        _IDLE: {
            _OPENING: "begin, or a record",
            _CLOSED: "close",
            _FAILED: "aborted",
        },
        _OPENING: {
            _SENDING: "ready",
            _PAUSED: "lost, silent, or forgotten with nothing in doubt",
            _CLOSED: "lost, and closed with nothing pending",
            _FAILED: "refused, fenced, or aborted",
        },
        _SENDING: {
            _OPENING: "the next message has another schema",
            _DRAINED: "draining",
            _ENDING: "close and all durable, or the only message sent",
            _PAUSED: "lost, silent, redirected, or forgotten with nothing in doubt",
            _CLOSED: "lost, and closed with nothing pending",
            _FAILED: "refused, fenced, or aborted",
        },
        _DRAINED: {
            _PAUSED: "the stream ends, or is silent",
            _CLOSED: "the stream ends, and closed with nothing pending",
            _FAILED: "refused, fenced, or aborted",
        },
        _ENDING: {
            _CLOSED: "all acknowledged, and the stream ends",
            _PAUSED: "lost before the acknowledgement",
            _FAILED: "refused, fenced, or aborted",
        },
        _PAUSED: {
            _OPENING: "the pause ends",
            _IDLE: "the pause ends, nothing to send",
            _CLOSED: "close with nothing pending",
            _FAILED: "patience ends, or aborted",
        },
        _CLOSED: {},
        _FAILED: {},
    },
)


# Events; those of every record or message are named tuples, which cost least to make.  `now` is any
# clock's time in seconds.


class WriteBatch(NamedTuple, Generic[_Ticket]):
    """Event: a caller writes a batch with rows; the last position is answered to `ticket`."""

    batch: pa.RecordBatch
    ticket: _Ticket


class Flush(NamedTuple, Generic[_Ticket]):
    """Event: answer `ticket` once every accepted record is durable."""

    ticket: _Ticket


class Begin(NamedTuple):
    """Event: open a stream although there is nothing to send, to begin the producer."""

    now: float


class SendDue(NamedTuple):
    """Event: the turn of the loop has come that `SEND_SOON` asked for."""

    now: float


class Sent(NamedTuple):
    """Event: the transport took the message of `Send`."""

    now: float


class Replied(NamedTuple):
    """Event: the proxy sent a reply on the open stream."""

    reply: PutReply
    now: float


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """Event: the open stream has ended, with an error or in order.

    `again`: a retry may succeed.  `location` is the proxy that owns the log, and `retry_after_s`
    the pause that the proxy asks for, if it sent them.
    """

    error: DLError
    again: bool
    location: str | None = None
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RetryDue:
    """Event: the pause of `Retry` is over."""

    now: float


@dataclass(frozen=True, slots=True)
class SilenceDue:
    """Event: the time of `After` is over."""

    now: float


@dataclass(frozen=True, slots=True)
class Close:
    """Event: no more records come; close once the accepted ones are durable."""

    now: float


@dataclass(frozen=True, slots=True)
class Abort:
    """Event: the caller gives up."""

    error: DLError


@dataclass(frozen=True, slots=True)
class Fail:
    """Event: another attempt is useless, or a defect makes it so."""

    error: DLError


Event: TypeAlias = (
    WriteBatch[_Ticket]
    | Flush[_Ticket]
    | Begin
    | SendDue
    | Sent
    | Replied
    | StreamEnded
    | RetryDue
    | SilenceDue
    | Close
    | Abort
    | Fail
)


class Call(enum.Enum):
    """Effects that carry nothing."""

    SEND_SOON = "say `SendDue` in a later turn of the loop, unless the stream is closed before"
    OPENED = "a proxy has accepted the producer"
    END_SENDING = "tell the proxy, after all messages, that none follows"
    CLOSE_STREAM = "cancel the stream, if one is open, and its time of `After`; forget its events"


class OpenStream(NamedTuple):
    """Effect: begin a stream for a producer, by its name or claim, and for batches of a schema.

    Answer with `Replied` or `StreamEnded`.
    """

    producer: str | Claim
    schema: pa.Schema
    expected: str | msgspec.UnsetType | None


class Send(NamedTuple):
    """Effect: send a message on the stream, and say `Sent`; there is one such effect at a time."""

    data: bytes


class Progress(NamedTuple, Generic[_Ticket]):
    """Effect: answer these callers; earlier failures of streams count no more."""

    answers: Answers[_Ticket]


@dataclass(frozen=True, slots=True)
class After:
    """Effect: say `SilenceDue` after so many seconds; there is one such effect at a time."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Retry:
    """Effect: say `RetryDue` when the next attempt is due, or `Fail` if it is useless.

    The next stream goes to `location` if it is known.
    """

    error: DLError
    location: str | None
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Ended(Generic[_Ticket]):
    """Effect: the machine is closed, or failed with `error`; refuse these callers with it."""

    error: DLError | None
    tickets: Sequence[_Ticket] = ()


Effect: TypeAlias = Call | OpenStream | Send | Progress[_Ticket] | After | Retry | Ended[_Ticket]

_NOTHING: tuple[()] = ()
_SEND_SOON = (Call.SEND_SOON,)


@dataclass(slots=True)
class Message(Generic[_Ticket]):
    """Records from sequence `first` on; `tickets` pairs rows with callers that want a position."""

    first: int
    batch: pa.RecordBatch
    size_bytes: int
    tickets: list[tuple[int, _Ticket]]
    is_run: bool = False
    """Whether its records were written one by one."""

    @property
    def memory_bytes(self) -> int:
        """Its memory while it is pending."""
        singles = self.batch.num_rows if self.is_run else 0
        return self.size_bytes + RECORD_TICKET_BYTES * singles

    @property
    def last(self) -> int:
        """The sequence of the message's last record."""
        return self.first + int(self.batch.num_rows) - 1


@dataclass(slots=True)
class _Run(Generic[_Ticket]):
    """Records that were written one by one; their size as far as it is counted."""

    txids: list[int] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    tickets: list[_Ticket] = field(default_factory=list)
    size_bytes: int = 0


class Outbox(Batcher[_Ticket]):
    """The records of one writer: at most `bytes_max` bytes, and one more batch."""

    def __init__(self, *, bytes_max: int, admit: Callable[[], bool] = lambda: True) -> None:
        super().__init__(admit=admit)
        self.limit(bytes_max=bytes_max)
        self._run: _Run[_Ticket] = _Run()
        self._messages: deque[Message[_Ticket]] = deque()
        self._sent = 0  # number of messages in flight
        self._doubted = 0  # number of messages that lost streams have sent
        self._next_sequence = 0
        self.sent_bytes = 0
        """Bytes in flight."""

    def __repr__(self) -> str:
        return f"<Outbox {len(self)} records, {self._sent} messages in flight>"

    def __len__(self) -> int:
        return self._next_sequence - self.first + len(self._run.txids)

    @property
    def next_sequence(self) -> int:
        """The sequence of the next record that is accepted."""
        return self._next_sequence + len(self._run.txids)

    def begin(self, sequence: int) -> None:
        """Number the records from `sequence` on, the present ones first; none may be in doubt."""
        # A log that has a record in doubt would take it a second time under its new sequence.
        assert not self._sent + self._doubted
        for message in self._messages:
            message.first = sequence
            sequence += message.batch.num_rows
        self._next_sequence = sequence

    @override
    def _batch_for(self, txid: int, size_bytes: int) -> Lists[_Ticket]:
        if self._run.size_bytes + size_bytes > MESSAGE_BYTES:
            self._end_run()
        run = self._run
        return run.txids, run.payloads, run.tickets, MESSAGE_BYTES - run.size_bytes

    @override
    def _counted(self, records: int, size_bytes: int) -> None:
        self._run.size_bytes += size_bytes

    def add_batch(
        self, batch: pa.RecordBatch, ticket: _Ticket | None = None, *, whole: bool = False
    ) -> None:
        """Accept a batch with rows, the ticket for the last one; `whole`: as one message."""
        # The records of the run were accepted before the batch, so their sequences come first.
        self._end_run()
        for part in [batch] if whole else _cut(batch):
            self._add(Message(self._next_sequence, part, part.nbytes, []))
            self._pending.size_bytes += part.nbytes
            self._pending.records += part.num_rows
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

    def _end_run(self) -> None:
        if not self._run.txids:
            return
        # The grant still names the lists of this run: a later record would be added to a sent
        # message.
        self.revoke()
        run, self._run = self._run, _Run()
        batch, tickets = batch_of(run.txids, run.payloads), list(enumerate(run.tickets))
        self._add(Message(self._next_sequence, batch, run.size_bytes, tickets, is_run=True))

    def _add(self, message: Message[_Ticket]) -> None:
        self._messages.append(message)
        self._next_sequence += message.batch.num_rows

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
            message.is_run,
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

    def begin_again(self) -> None:
        """Note that the stream is lost: its messages are in doubt, and are sent again."""
        # The lost stream may have sent fewer messages than an earlier one, whose messages stay in
        # doubt.
        self._doubted = max(self._doubted, self._sent)
        self._sent = self.sent_bytes = 0

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
        sent = self._messages[self._sent - 1].last if self._sent else self.first - 1
        # Otherwise records that no proxy has would be removed as durable.
        if last > sent:
            raise UnexpectedError(
                f"a proxy acknowledged records up to sequence {last}, but {sent} is the last sent"
            )
        return self._take(last, dict(ends))

    @property
    def first(self) -> int:
        """The sequence of the first record that is not known to be durable."""
        return self._messages[0].first if self._messages else self._next_sequence

    def durable_before(self, last: int) -> list[tuple[_Ticket, DLSN | None]]:
        """Remove the messages that a new stream reports as durable; their positions are unknown."""
        # A stream learns what is durable from its first reply, and sends nothing before that.
        assert not self._sent
        return self._take(last, {})

    def _take(self, last: int, ends: dict[int, End]) -> list[tuple[_Ticket, DLSN | None]]:
        taken: list[tuple[_Ticket, DLSN | None]] = []
        while self._messages and self._messages[0].last <= last:
            message = self._messages.popleft()
            self._pending.size_bytes -= message.memory_bytes
            self._pending.records -= message.batch.num_rows
            self._doubted = max(self._doubted - 1, 0)
            if self._sent:
                self._sent -= 1
                self.sent_bytes -= message.size_bytes
            taken += _positions(message, ends.get(message.last))
        return taken

    def drain(self) -> list[_Ticket]:
        """Remove all records; return all tickets."""
        self._end_run()
        tickets = [ticket for message in self._messages for _, ticket in message.tickets]
        self._messages.clear()
        self._sent = self._doubted = self.sent_bytes = 0
        self._pending.size_bytes = self._pending.records = 0
        return tickets

    def validate(self) -> None:
        """Assert the invariants."""
        assert 0 <= self._sent <= len(self._messages)
        assert 0 <= self._doubted <= len(self._messages)
        sequence = self.first
        for message in self._messages:
            assert message.first == sequence
            sequence += message.batch.num_rows
        assert sequence == self._next_sequence
        in_flight = list(self._messages)[: self._sent]
        assert self.sent_bytes == sum(message.size_bytes for message in in_flight)
        singles = len(self._run.txids)
        pending_bytes = sum(message.memory_bytes for message in self._messages)
        run_bytes = sum(map(len, self._run.payloads)) + RECORD_OVERHEAD_BYTES * singles
        assert self.pending_bytes == pending_bytes + run_bytes + RECORD_TICKET_BYTES * singles
        assert self._run.size_bytes == run_bytes
        assert self.pending_records == len(self)


def _positions(message: Message[_Ticket], end: End | None) -> list[tuple[_Ticket, DLSN | None]]:
    if end is None or end.dlsn is None:
        return [(ticket, None) for _, ticket in message.tickets]
    # The proxy reports one position.  Others follow from it only within the same entry, where
    # slots are consecutive.
    last, count = DLSN.parse(end.dlsn), message.batch.num_rows
    found: list[tuple[_Ticket, DLSN | None]] = []
    for row, ticket in message.tickets:
        back = count - 1 - row
        is_known = back < end.together
        at = DLSN(last.lssn, last.entry_id, last.slot_id - back) if is_known else None
        found.append((ticket, at))
    return found


def _cut(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Return the rows of a batch in parts that fit into messages."""
    if batch.nbytes <= _BATCH_BYTES_MAX or batch.num_rows == 1:
        return [batch]
    half = batch.num_rows // 2
    return _cut(batch.slice(0, half)) + _cut(batch.slice(half))


class Identity:
    """How the log knows the producer: by its name and claim, and what it may write.

    Args: those of `ProducerClient`.
    """

    def __init__(
        self,
        name: str,
        claim: Claim | None,
        expected: str | msgspec.UnsetType | None,
        *,
        is_named: bool,
    ) -> None:
        self.name = name
        self.claim = claim
        """Given, or what the log has said in its first reply."""
        self.expected = expected
        self.is_named = is_named or claim is not None
        """Whether the machine may not change the name."""
        self.is_single = claim is not None or expected is not msgspec.UNSET
        """Whether all of it is one message."""
        self.heard_at = 0.0
        """When a proxy was last heard, or was first sent something again."""
        self._generated = name
        self._renamed = 0  # how often

    def begin_anew(self) -> None:
        """Take another name."""
        self._renamed += 1
        self.name, self.claim = f"{self._generated}-{self._renamed}", None

    def is_forgotten(self, outbox: Outbox[Any], claim: Claim, last: int, now: float) -> bool:
        """Return whether the log may have forgotten acknowledged or doubtful records of the claim.

        It would then take them a second time.  `last` is the last sequence that it knows.
        """
        first = outbox.first
        # With an acknowledged record the log must know at least that one.  With none in doubt the
        # same comparison is safe, since the log cannot take a record twice that was never sent.
        if first > claim.base or not outbox.is_in_doubt:
            return last < first - 1
        # No record was acknowledged yet, so a log that never had one and a log that forgot them
        # answer the same.  Only the time since the last message shows which of them it can be.
        kept_ms = KEPT_MS if self.is_named else GENERATED_KEPT_MS
        return last < first and 1000 * (now - self.heard_at) > kept_ms

    def forgotten(self, log: str, outbox: Outbox[Any]) -> ProducerFencedError:
        """Return the error of a producer that the log has forgotten."""
        text = f"log {log!r} does not know producer {self.name!r} any more"
        if outbox.is_in_doubt:
            text += f", and may hold some of {counted(len(outbox))} that it sent, or not"
        return ProducerFencedError(text)


class PutStream:
    """A stream to a proxy, from its opening on."""

    def __init__(self, schema: pa.Schema, now: float, *, is_due: bool = False) -> None:
        self.schema = schema
        self.ready: Ready | None = None
        self.first = 0
        """The sequence of its first record."""
        self.draining: Draining | None = None
        self.owed_since = now
        """When the proxy was last heard, or began to owe a reply."""
        self.is_due = is_due
        """Whether SEND_SOON is under way."""
        self.is_sending = False
        """Whether a `Send` is under way."""
        self.is_timed = False
        """Whether an `After` is under way."""

    def timed(self, now: float) -> Sequence[After]:
        """Have the silence of the proxy checked when it would be too long."""
        if self.is_timed:
            return ()
        self.is_timed = True
        return [After(self.owed_since + SILENCE_S - now)]

    def close(self) -> None:
        """Wait for nothing any more."""
        self.is_sending = self.is_timed = self.is_due = False


class ProducerClient(Machine[ClientState], Generic[_Ticket]):
    """One producer of one log; a `_Ticket` identifies a caller.

    Args:
        log: the log's name, for messages.
        name: the producer's name.
        is_named: the name was given, so that the machine may not change it.
        expected: with a value the append is conditional, and `WriteBatch` comes once: the batch is
            written if this is the position of the log's last record (None: the log is empty).
        claim: with a claim `WriteBatch` comes once, too.  Its base is 0: a writer that makes the
            same claim for the same records later, anywhere, does not write them again.
        bytes_max: most bytes that may be pending when a record is accepted.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        log: str,
        name: str,
        *,
        is_named: bool = False,
        expected: str | msgspec.UnsetType | None = msgspec.UNSET,
        claim: Claim | None = None,
        bytes_max: int = PENDING_BYTES_MAX,
    ) -> None:
        self.state = TRANSITIONS.start
        self.identity = Identity(name, claim, expected, is_named=is_named)
        self.outbox: Outbox[_Ticket] = Outbox(bytes_max=bytes_max, admit=self._admit)
        self.error: DLError | None = None
        self.is_closing = False
        """Whether no more records are accepted, because of `Close` or `Abort`."""
        self.is_error_reported = False
        """Whether a caller got the error."""
        self.last_dlsn: DLSN | None = None
        """The highest known position of a durable record."""
        self._log = log
        self._failed_with = 0  # number of records that were unacknowledged at the failure
        self._stream = PutStream(None, 0.0)  # the last one; none is open yet

    def __repr__(self) -> str:
        return f"{self.outbox!r} {self.state.name}"

    @property
    def lost(self) -> int:
        """The number of accepted records that are not known to be durable."""
        return self._failed_with + len(self.outbox)

    @property
    def _is_done(self) -> bool:
        return self.is_closing and not len(self.outbox)

    def write(self, txid: int, payload: bytes, ticket: _Ticket) -> Sequence[Effect[_Ticket]]:
        """Return the effects of a record; its position is answered to `ticket`.

        It is a call and no event, because an event for each record would cost a third of a write.

        Raises: AlreadyClosedError, WriteError, OverCapacityError, and as `checked_payload`; nothing
        is changed then.
        """
        self.outbox.add_record(txid, payload, ticket)
        return _NOTHING if self._stream.is_due else self._send_soon()

    def handle(  # noqa: C901 - one case for each kind
        self, event: Event[_Ticket]
    ) -> Sequence[Effect[_Ticket]]:
        """Return the effects of an event.

        Raises (for a batch; nothing is changed then):
            AlreadyClosedError, WriteError, OverCapacityError.
        """
        match event:
            case SendDue(now):
                self._stream.is_due = False
                return self._go_on(now)
            case Sent(now):
                self._stream.is_sending = False
                return self._go_on(now)
            case Replied(reply, now):
                return self._replied(reply, now)
            case WriteBatch(batch, ticket):
                self._admit()
                self.outbox.add_batch(batch, ticket, whole=self.identity.is_single)
                self.is_closing |= self.identity.is_single
                return self._send_soon()
            case Flush(ticket):
                if not self.outbox.add_barrier(ticket):
                    return [Progress([(ticket, None)])]
                return self._send_soon()
            case Begin(now):
                return self._open(now)
            case StreamEnded():
                return self._stream_ended(event)
            case RetryDue(now):
                # `Close`, `Abort` or `Fail` may have come during the pause.
                return self._retry(now) if self.state is _PAUSED else _NOTHING
            case SilenceDue(now):
                self._stream.is_timed = False
                return self._check_silence(now)
            case Close(now):
                self.is_closing = True
                self.outbox.revoke()
                return self._go_on(now)
            case Abort(error):
                self.is_closing = True
                return self._fail(error)
            case Fail(error):
                return self._fail(error)
            case _:
                assert_never(event)

    def require_open(self) -> None:
        """Raise if no record can follow; a failure then counts as reported.

        Raises: AlreadyClosedError, WriteError.
        """
        if self.is_closing:
            raise AlreadyClosedError(f"the writer of log {self._log!r} is closed")
        if self.error is not None:
            self.is_error_reported = True
            raise WriteError(
                f"the writer of log {self._log!r} failed and takes no more records: "
                f"{type(self.error).__name__}: {self.error}"
            ) from self.error

    def _admit(self) -> bool:
        self.require_open()
        self.outbox.require_room(self._log)
        return True

    # Sending

    def _send_soon(self) -> Sequence[Effect[_Ticket]]:
        if self._stream.is_due or self._stream.is_sending:
            return _NOTHING  # more records may come in this turn, and become one message
        assert self.state not in (_CLOSED, _FAILED)
        # In each other state an event is due that looks at the outbox: the proxy's first reply, the
        # end of the stream, or the end of the pause.
        if self.state not in (_IDLE, _SENDING):
            return _NOTHING
        self._stream.is_due = True
        return _SEND_SOON

    def _go_on(self, now: float) -> Sequence[Effect[_Ticket]]:
        """Do all that is due in this state."""
        if self.state is _SENDING:
            return _NOTHING if self._stream.is_sending else self._send_next(now)
        if self.state in (_IDLE, _PAUSED) and self._is_done:
            return self._close()
        return self._open(now) if self.state is _IDLE and len(self.outbox) else _NOTHING

    def _open(self, now: float) -> Sequence[Effect[_Ticket]]:
        message = self.outbox.look()
        # The first stream of a writer has nothing to send yet: its records may be of any schema.
        schema = byte_log_schema() if message is None else message.batch.schema
        self._become(_OPENING)
        self._stream = PutStream(schema, now, is_due=self._stream.is_due)
        identity = self.identity
        opening = OpenStream(identity.claim or identity.name, schema, identity.expected)
        return [opening, *self._stream.timed(now)]

    def _send_next(self, now: float) -> Sequence[Effect[_Ticket]]:
        outbox, ready = self.outbox, self._stream.ready
        assert ready is not None
        message = outbox.look()
        if message is None:
            return self._end_sending(now) if self._is_done else _NOTHING
        if message.batch.schema != self._stream.schema:
            # A stream has one schema: the next stream gets this message.
            # Wait for the acknowledgements first: a stream that is closed before leaves its
            # messages in doubt.
            return _NOTHING if outbox.has_in_flight else [*self._close_stream(), *self._open(now)]
        if outbox.sent_bytes >= ready.window_bytes:
            return _NOTHING
        while len(data := _encoded(message)) > ready.message_bytes_max:
            if self.identity.is_single or not outbox.split():
                return self._fail(too_long(data, ready.message_bytes_max))
        if not outbox.has_in_flight:
            # A proxy without unacknowledged messages may be silent: its time starts now.
            self.identity.heard_at = self._stream.owed_since = now
        outbox.sent()
        self._stream.is_sending = True
        effects: Sequence[Effect[_Ticket]] = [Send(data), *self._stream.timed(now)]
        # The proxy writes a conditional message only when no second one can follow.
        return [*effects, *self._end_sending(now)] if self.identity.is_single else effects

    def _end_sending(self, now: float) -> Sequence[Effect[_Ticket]]:
        self._become(_ENDING)
        self._stream.owed_since = now
        return [Call.END_SENDING, *self._stream.timed(now)]

    # Replies

    def _replied(self, reply: PutReply, now: float) -> Sequence[Effect[_Ticket]]:
        self._stream.owed_since = now
        if self.state is _OPENING:
            return self._take_up(reply.ready, now)
        self.identity.heard_at = now
        if reply.acked is not None:
            return self._acknowledged(reply.acked, reply.ends, now)
        if reply.draining is not None:
            self._stream.draining = reply.draining
            if self.state is _SENDING:
                self._become(_DRAINED)
                return [Call.END_SENDING, *self._stream.timed(now)]
        return _NOTHING

    def _take_up(self, ready: Ready | None, now: float) -> Sequence[Effect[_Ticket]]:
        """Go on behind the last durable record, whose sequence `ready` reports."""
        if ready is None or ready.producer is None or ready.sequence is None:
            silent = "a proxy did not say that it is ready for a producer"
            return self._fail(UnexpectedError(silent))
        identity = self.identity
        if identity.claim is None:
            identity.claim = ready.producer
            self.outbox.begin(ready.producer.base)
        elif identity.is_forgotten(self.outbox, ready.producer, ready.sequence, now):
            error = identity.forgotten(self._log, self.outbox)
            return [Call.OPENED, *self._stream_ended(StreamEnded(error, again=False))]
        effects: list[Effect[_Ticket]] = [Call.OPENED]
        # A single message is sent again in any case, because only its reply has its position.
        if not self.identity.is_single and (durable := self.outbox.durable_before(ready.sequence)):
            effects.append(self._progress(durable))
        self._become(_SENDING)
        self._stream.ready = ready
        self._stream.first = self.outbox.first
        self.identity.heard_at = now
        return [*effects, *self._send_next(now)]

    def _acknowledged(
        self, acked: int, ends: Iterable[End], now: float
    ) -> Sequence[Effect[_Ticket]]:
        first = self._stream.first
        by_sequence = [(first + end.records - 1, end) for end in ends]
        try:
            durable = self.outbox.acknowledged(first + acked - 1, by_sequence)
        except DLError as error:
            return self._fail(error)
        progress = self._progress(durable)
        # The reply has the position: the end of the stream can add nothing.
        if self.identity.is_single and self._is_done:
            return [progress, *self._close()]
        return [progress, *self._go_on(now)]

    def _progress(self, answers: Answers[_Ticket]) -> Progress[_Ticket]:
        known = (dlsn for _, dlsn in reversed(answers) if dlsn is not None)
        self.last_dlsn = next(known, self.last_dlsn)
        return Progress(answers)

    # The end of a stream

    def _stream_ended(self, end: StreamEnded) -> Sequence[Effect[_Ticket]]:
        # All records are durable, so the error of the stream concerns no caller.
        if self._is_done:
            return self._close()
        again = end.again
        if isinstance(end.error, ProducerFencedError) and not self.identity.is_named:
            again = self._begins_anew()
        if not again:
            return self._fail(end.error)
        drained_to = None if self._stream.draining is None else self._stream.draining.location
        self._become(_PAUSED)
        retry = Retry(end.error, end.location or drained_to, end.retry_after_s)
        return [*self._close_stream(), retry]

    def _begins_anew(self) -> bool:
        """Take another name, because the log forgot this one; False if a record is in doubt.

        Messages of the last stream are not in doubt: a proxy acknowledges all messages that it took
        before it refuses the stream.
        """
        if self.outbox.is_in_doubt:
            return False
        self.outbox.refused()
        self.identity.begin_anew()
        return True

    def _close_stream(self) -> Sequence[Effect[_Ticket]]:
        self.outbox.begin_again()
        self._stream.close()
        return [Call.CLOSE_STREAM]

    def _retry(self, now: float) -> Sequence[Effect[_Ticket]]:
        # Without a claim no proxy has accepted the producer yet, and `Begin` must still be
        # answered.
        if len(self.outbox) or self.identity.claim is None:
            return self._open(now)
        self._become(_IDLE)
        return [Progress(())]

    def _check_silence(self, now: float) -> Sequence[Effect[_Ticket]]:
        if self.state is _SENDING and not self.outbox.has_in_flight:
            return _NOTHING
        # The proxy was heard since the timer was set; only one timer runs, so that a reply sets
        # none.
        if now < self._stream.owed_since + SILENCE_S:
            return self._stream.timed(now)
        silence = ProxyUnavailableError(f"a proxy said nothing for {SILENCE_S:g} s")
        return self._stream_ended(StreamEnded(silence, again=True))

    # The end

    def _close(self) -> Sequence[Effect[_Ticket]]:
        self._become(_CLOSED)
        return [*self._close_stream(), Ended(None)]

    def _fail(self, error: DLError) -> Sequence[Effect[_Ticket]]:
        if self.state in (_CLOSED, _FAILED):
            return _NOTHING
        self._become(_FAILED)
        self.error = error
        # Before `drain` below, after which the outbox has no records to count.
        self._failed_with = len(self.outbox)
        effects = self._close_stream()
        return [*effects, Ended(error, self.outbox.drain())]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        outbox, state = self.outbox, self.state
        outbox.validate()
        assert not outbox.has_in_flight or state in _READY
        assert not self._stream.is_sending or state in _READY
        assert not self._stream.is_timed or state is _OPENING or state in _READY
        assert (
            self._stream.is_timed
            or state in (_IDLE, _PAUSED, _CLOSED, _FAILED)
            or (state is _SENDING and not outbox.has_in_flight)
        )
        assert (self._stream.ready is not None) or state not in _READY
        assert (self.error is not None) == (state is _FAILED)
        assert state not in (_CLOSED, _FAILED) or not len(outbox)
        assert state is not _CLOSED or self.is_closing


def counted(records: int) -> str:
    """Return a number of records, for a message."""
    return "1 record" if records == 1 else f"{records} records"


def too_long(message: bytes, bytes_max: int) -> LogRecordTooLongError:
    """Return the error for a message that exceeds a proxy's limit and cannot be split."""
    return LogRecordTooLongError(
        f"a message of {len(message)} bytes that cannot be split: the proxy accepts {bytes_max} "
        "bytes at most (message_bytes_max)"
    )


def _encoded(message: Message[_Ticket]) -> bytes:
    return framed(message.batch.serialize(), msgspec.json.encode(Numbered(message.first)))
