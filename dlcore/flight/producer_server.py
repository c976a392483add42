"""The proxy's half of writing to a log: one stream of a client, from its target to its end.

Promise.  Batches are written in the order of their arrival.  A record is acknowledged only when it
is durable.  All accepted records are acknowledged before a stream ends, with an error or without,
unless its log is lost; then the error says so.  A stream ends well only if no record was dropped.

Theory of operation.  Messages are received one at a time, and written when rates, memory and the
log allow it.  Batches become durable in this order.  An acknowledgement is cumulative: it has the
number of durable records of the stream, and the position of the last one.  Therefore several due
acknowledgements become one, and nothing piles up for a client that reads none.  The window bounds
the records that are accepted and not durable.  A batch is accepted while the window has any room,
so that one larger than the window passes alone.

A producer first begins an incarnation or continues one.  Its batches continue the sequence of the
batch before, or say where they begin.  A conditional write is one message: it is written when the
client has ended its half of the stream.  If the log is released, further messages are dropped.  The
client gets a message, and some time to end the stream: if the stream ended at once, some clients
would not read the last acknowledgements.

The other half is `dlcore.flight.producer_client`; the driver is
`dlcore.proxy.writing.producer_driver`.  docs/architecture/machines.md shows `TRANSITIONS` as a
diagram.

Invariants: the acknowledged number never falls; acknowledged <= durable <= accepted.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, assert_never

import msgspec

from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    DLError,
    LogElsewhereError,
    SequenceGapError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.base.machines import Machine, State, Transitions
from dlcore.flight.put import sequence_of
from dlcore.flight.replies import Draining, End, PutReply
from dlcore.log.entries.stamp import Mark

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from dlcore.flight.put import PutDecoder, PutMessage, PutTarget
    from dlcore.flight.replies import Ready
    from dlcore.log.entries.stamp import Claim

PARTING_S = 1.0
"""The time that a client has to end the stream after the message of a release."""


class ServerState(State):
    """The state of the machine; ENDED is final."""

    BEGINNING = "an incarnation of the producer is begun or continued"
    TAKING = "messages are received, and written one after the other"
    SETTLING = "no more messages are taken, and accepted records are acknowledged"
    DRAINING = "the log is released: messages are dropped, accepted records are acknowledged"
    PARTING = "the client knows of the release, and has some time to end the stream"
    ENDED = "the stream is over"


_BEGINNING, _TAKING, _SETTLING, _DRAINING, _PARTING, _ENDED = ServerState

TRANSITIONS = Transitions(
    _BEGINNING,
    {
        _BEGINNING: {
            _TAKING: "begun",
            _DRAINING: "begun, but the log is released",
            _ENDED: "refused, or the log is lost",
        },
        _TAKING: {
            _SETTLING: "the client has sent all, or a message is refused",
            _DRAINING: "the log is released",
            _ENDED: "the log is lost",
        },
        _SETTLING: {_ENDED: "all acknowledged, or the log is lost"},
        _DRAINING: {
            _SETTLING: "the client has sent all, or a message is refused",
            _PARTING: "all acknowledged",
            _ENDED: "the log is lost",
        },
        _PARTING: {
            _SETTLING: "the client has sent all, or a message is refused",
            _ENDED: "the time is over, or the log is lost",
        },
        _ENDED: {},
    },
)


class Signal(enum.Enum):
    """Events that carry nothing."""

    BEGIN = "the log is found"
    ALL_SENT = "the client has ended its half of the stream"
    REPLIED = "the reply of `Reply` was sent"
    PARTING_OVER = "the time of `After` is over"


# Events of each message are named tuples, which cost least to make.


class Received(NamedTuple):
    """Event: a message came."""

    message: PutMessage


class Accepted(NamedTuple):
    """Event: the log accepted the batch of `Write`; only its last `fresh` records are new.

    It waited `throttled_s` seconds because of limits of rates.
    """

    fresh: int
    throttled_s: float


class BatchDurable(NamedTuple):
    """Event: the oldest accepted batch is durable; its last record is at `dlsn`, if known."""

    dlsn: DLSN | None


@dataclass(frozen=True, slots=True)
class Begun:
    """Event: the producer writes with `claim`, behind its durable record `last` (-1: none)."""

    claim: Claim
    last: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Event: what `BeginProducer`, `RECEIVE`, `AwaitEnd` or `Write` asked for failed."""

    error: DLError


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """Event: it is not known whether an accepted batch is in the log."""

    error: DLError


@dataclass(frozen=True, slots=True)
class LogEnding:
    """Event: the log accepts no more records; if it is lost, no more become durable either."""

    error: DLError
    is_lost: bool


Event: TypeAlias = (
    Signal | Received | Accepted | BatchDurable | Begun | Refused | BatchFailed | LogEnding
)


class Call(enum.Enum):
    """Effects that carry nothing."""

    RECEIVE = "receive a message when the log has room; answer `Received`, ALL_SENT or `Refused`"


class Write(NamedTuple):
    """Effect: write a batch when rates, memory and log allow it; say `Accepted` or `Refused`.

    With `expected` it is written if this is the position of the log's last record.
    """

    batch: pa.RecordBatch
    size_bytes: int
    mark: Mark | None
    expected: DLSN | msgspec.UnsetType | None


class Reply(NamedTuple):
    """Effect: send a reply, and say REPLIED; there is one such effect at a time."""

    reply: PutReply


@dataclass(frozen=True, slots=True)
class BeginProducer:
    """Effect: begin or continue an incarnation; answer with `Begun` or `Refused`."""

    producer: str | Claim


@dataclass(frozen=True, slots=True)
class AwaitEnd:
    """Effect: receive what follows a message of so many bytes, which waits: as RECEIVE."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class LoseLog:
    """Effect: the log cannot be written any more; release it, and say `LogEnding`: it is lost."""

    error: DLError


@dataclass(frozen=True, slots=True)
class After:
    """Effect: say PARTING_OVER after so many seconds."""

    after_s: float


@dataclass(frozen=True, slots=True)
class EndStream:
    """Effect: end the stream after the replies, with an error or in order."""

    error: DLError | None


Effect: TypeAlias = Call | Write | Reply | BeginProducer | AwaitEnd | LoseLog | After | EndStream


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """The end of a batch: its last record is number `records` of the stream, at `dlsn`.

    The last `together` records of the batch are consecutive in one entry.  `dlsn` is None if the
    position is not known any more, because the batch was durable already when it came again.
    """

    records: int
    dlsn: DLSN | None
    together: int


@dataclass(frozen=True, slots=True)
class Ack:
    """The first `records` records of the stream are durable; `dlsn` is the last position, if known.

    `ends` has the batches since the last acknowledgement, if the client wants positions, and
    `throttled_s` is for how long limits of rates delayed batches since then.
    """

    records: int
    dlsn: DLSN | None
    ends: tuple[BatchEnd, ...] = ()
    throttled_s: float = 0.0


class StreamAcks:
    """The counts of one stream."""

    def __init__(self, *, window_records: int, window_bytes: int, positions: bool = False) -> None:
        self._window_records = window_records
        self._window_bytes = window_bytes
        # For each batch: its records, the number of new ones among them, and its bytes.
        self._pending: deque[tuple[int, int, int]] = deque()
        self._ends: list[BatchEnd] | None = [] if positions else None  # since the last ack
        self._pending_records = 0
        self._pending_bytes = 0
        self._durable: Ack | None = None
        self._sent = 0
        self._throttled_s = 0.0  # since the last acknowledgement

    def __repr__(self) -> str:
        durable = 0 if self._durable is None else self._durable.records
        return f"<StreamAcks durable={durable} pending={self._pending_records} sent={self._sent}>"

    @property
    def has_room(self) -> bool:
        """Whether the next batch may be accepted."""
        return (
            self._pending_records < self._window_records
            and self._pending_bytes < self._window_bytes
        )

    @property
    def is_settled(self) -> bool:
        """Whether all accepted records are durable and acknowledged."""
        return not self._pending and (self._durable is None or self._durable.records == self._sent)

    def accepted(self, records: int, size_bytes: int, *, fresh: int | None = None) -> None:
        """Note a batch that was handed to the writer; only its last `fresh` records are new."""
        assert records > 0
        self._pending.append((records, records if fresh is None else fresh, size_bytes))
        self._pending_records += records
        self._pending_bytes += size_bytes

    def throttled(self, after_s: float) -> None:
        """Note that limits of rates delayed the last batch for so long."""
        self._throttled_s += after_s

    def durable(self, dlsn: DLSN | None) -> None:
        """Note that the oldest batch is durable; its last record is at `dlsn`, if known."""
        records, fresh, size_bytes = self._pending.popleft()
        self._pending_records -= records
        self._pending_bytes -= size_bytes
        before = 0 if self._durable is None else self._durable.records
        self._durable = Ack(before + records, dlsn)
        if self._ends is not None:
            # The last entry has `slot_id + 1` records up to this one.  Fewer are new ones of this
            # batch if the entry begins with records of other batches.
            together = 0 if dlsn is None else min(fresh, dlsn.slot_id + 1)
            self._ends.append(BatchEnd(before + records, dlsn, together))

    def next_ack(self) -> Ack | None:
        """Return the acknowledgement to send now; None if the client knows all durable records."""
        ack = self._durable
        if ack is None or ack.records == self._sent:
            return None
        self._sent = ack.records
        throttled_s, self._throttled_s = self._throttled_s, 0.0
        if self._ends is None:
            return Ack(ack.records, ack.dlsn, (), throttled_s)
        ends, self._ends = tuple(self._ends), []
        return Ack(ack.records, ack.dlsn, ends, throttled_s)

    def validate(self) -> None:
        """Assert the invariants."""
        durable = 0 if self._durable is None else self._durable.records
        assert 0 <= self._sent <= durable
        assert self._pending_records == sum(records for records, _, _ in self._pending)
        assert self._pending_bytes == sum(size_bytes for _, _, size_bytes in self._pending)


class _Waiting(NamedTuple):
    """A batch that is being written, or waits for the end of its stream."""

    batch: pa.RecordBatch
    size_bytes: int
    mark: Mark | None


class _Numbering:
    """The sequences of a stream's records; without a producer there are none."""

    def __init__(self, producer: str | Claim | None) -> None:
        self.producer = producer
        """The producer as the client named it."""
        self._claim: Claim | None = None
        self._next = 0
        self._has_begun = False

    def begin(self, claim: Claim, last: int) -> None:
        """Go on behind the producer's durable record `last` (-1: none)."""
        self._claim, self._next = claim, last + 1

    def mark_of(self, given: int | None, count: int) -> Mark | None:
        """Return the claim and first sequence of a batch; they continue those of the last batch.

        `given` is the first sequence by the client's word, if it gives one.

        Raises:
            SequenceGapError: it does not follow.
        """
        if self._claim is None:
            return None
        if given is not None and given != self._next and self._has_begun:
            raise SequenceGapError(
                f"producer {self._claim.name!r}: sequence {given} does not follow in this stream, "
                f"expected {self._next}",
                expected=self._next,
            )
        mark = Mark(self._claim, self._next if given is None else given)
        self._next = mark.first + count
        self._has_begun = True
        return mark


class _Reasons:
    """The errors for which a stream may end before its client ends it."""

    def __init__(self) -> None:
        self.refusal: DLError | None = None
        """The error of a message that was refused."""
        self.ending: DLError | None = None
        """The reason why the log takes no more."""
        self.is_lost = False
        """Whether nothing more becomes durable."""
        self.has_dropped = False
        """Whether messages were dropped that came during the log's release."""

    def last_word(self) -> DLError | None:
        """Return the error of a stream that ends when all accepted records are durable."""
        return self.refusal or (self.ending if self.has_dropped else None)


class ProducerServer(Machine[ServerState]):
    """One stream to a log that the proxy owns.

    Args:
        target: what the client opened the stream for.
        decoder: decodes its messages.
        ready: the reply to a client without a producer; it has the stream's window.
    """

    transitions = TRANSITIONS

    def __init__(self, target: PutTarget, decoder: PutDecoder, ready: Ready) -> None:
        self.state = TRANSITIONS.start
        self._decoder = decoder
        self._ready = ready
        expected = target.expected
        self._expected = DLSN.parse(expected) if isinstance(expected, str) else expected
        self._acks = StreamAcks(
            window_records=ready.window_records,
            window_bytes=ready.window_bytes,
            positions=target.positions,
        )
        self._numbering = _Numbering(target.producer)
        self._is_taking = False  # a RECEIVE, AwaitEnd or Write is under way
        self._waiting: _Waiting | None = None
        self._is_replying = False  # a Reply is under way
        self._reasons = _Reasons()

    def __repr__(self) -> str:
        return f"<ProducerServer {self.state.name} {self._acks!r}>"

    def handle(self, event: Event) -> Sequence[Effect]:
        """Return the effects of an event."""
        match event:
            case Received(message):
                return self._received(message)
            case Accepted(fresh, throttled_s):
                return self._accepted(fresh, throttled_s)
            case BatchDurable(dlsn):
                self._acks.durable(dlsn)
                return [*self._go_on(), *self._receive()]
            case Signal():
                return self._signalled(event)
            case Begun(claim, last):
                self._numbering.begin(claim, last)
                return self._begun(
                    msgspec.structs.replace(self._ready, producer=claim, sequence=last)
                )
            case Refused(error):
                return self._refused(error)
            case BatchFailed(error):
                return self._lose(error)
            case LogEnding(error, is_lost):
                return self._log_ending(error, is_lost=is_lost)
            case _:
                assert_never(event)

    def _signalled(self, signal: Signal) -> Sequence[Effect]:
        match signal:
            case Signal.REPLIED:
                self._is_replying = False
                return self._go_on()
            case Signal.ALL_SENT:
                return self._all_sent()
            case Signal.BEGIN:
                producer = self._numbering.producer
                return self._begun(self._ready) if producer is None else [BeginProducer(producer)]
            case Signal.PARTING_OVER:
                return self._end(self._reasons.ending) if self.state is _PARTING else []
            case _:
                assert_never(signal)

    def _begun(self, ready: Ready) -> Sequence[Effect]:
        # The log was lost while the producer was begun.
        if self.state is _ENDED:
            return []
        self._become(_TAKING if self._reasons.ending is None else _DRAINING)
        return [self._reply(PutReply(ready=ready)), *self._receive()]

    # Messages

    def _receive(self) -> Sequence[Effect]:
        """Receive the next message, if there is room for it, or it is dropped."""
        if self._is_taking or self.state in (_SETTLING, _ENDED):
            return []
        # During a release there is no such bound: messages are dropped, and must be received so
        # that the end of the client's half is heard.
        if self.state is _TAKING and not self._acks.has_room:
            return []
        self._is_taking = True
        return [Call.RECEIVE]

    def _received(self, message: PutMessage) -> Sequence[Effect]:
        self._is_taking = False
        if self._waiting is not None:
            return self._refuse(
                ConfigurationError(
                    "a conditional write comes in one message, but a second one arrived"
                )
            )
        if self.state is not _TAKING:
            self._reasons.has_dropped = True
            return self._receive()
        try:
            batch = self._decoder.decode(message)
            # An empty batch has no last record whose position could be acknowledged.
            if not batch.num_rows:
                return self._receive()
            mark = self._numbering.mark_of(sequence_of(message), batch.num_rows)
        except DLError as error:
            return self._refuse(error)
        self._waiting = waiting = _Waiting(batch, len(message.body), mark)
        self._is_taking = True
        if isinstance(self._expected, msgspec.UnsetType):
            return [Write(*waiting, self._expected)]
        return [AwaitEnd(waiting.size_bytes)]

    def _all_sent(self) -> Sequence[Effect]:
        waiting = self._waiting
        if waiting is not None and self.state is _TAKING:
            return [Write(*waiting, self._expected)]
        self._is_taking = False
        if waiting is not None:
            self._waiting, self._reasons.has_dropped = None, True
        return self._settle()

    def _accepted(self, fresh: int, throttled_s: float) -> Sequence[Effect]:
        assert self._waiting is not None
        waiting = self._waiting
        self._acks.accepted(waiting.batch.num_rows, waiting.size_bytes, fresh=fresh)
        # The batch is written by now, but the next acknowledgement says for how long rates held it.
        self._acks.throttled(throttled_s)
        self._waiting, self._is_taking = None, False
        return self._receive()

    def _refused(self, error: DLError) -> Sequence[Effect]:
        self._is_taking = False
        if self._waiting is not None:
            self._waiting = None
            is_closed = isinstance(error, AlreadyClosedError)
            if self._reasons.ending is not None and (is_closed or error is self._reasons.ending):
                self._reasons.has_dropped = (
                    True  # the log was released in order while the batch waited
                )
                return self._receive()
            if isinstance(error, (WriteError, AlreadyClosedError)):
                return self._lose(error)
        return self._refuse(error)

    # Replies, and the end

    def _reply(self, reply: PutReply) -> Reply:
        self._is_replying = True
        return Reply(reply)

    def _go_on(self) -> Sequence[Effect]:
        """Send the next reply, or end the stream, if that is due."""
        acks = self._acks
        if self._is_replying or self.state is _ENDED:
            return []
        ack = acks.next_ack()
        if ack is not None:
            return [self._reply(self._acknowledgement(ack))]
        if self.state is _SETTLING and acks.is_settled:
            return self._end(self._reasons.last_word())
        if self.state is _DRAINING and acks.is_settled:
            self._become(_PARTING)
            ending = self._reasons.ending
            location = ending.location if isinstance(ending, LogElsewhereError) else None
            return [self._reply(PutReply(draining=Draining(location))), After(PARTING_S)]
        return []

    def _acknowledgement(self, ack: Ack) -> PutReply:
        return PutReply(
            acked=ack.records,
            dlsn=_text(ack.dlsn),
            ends=[End(each.records, _text(each.dlsn), each.together) for each in ack.ends],
            throttled_ms=math.ceil(ack.throttled_s * 1000),
        )

    def _settle(self) -> Sequence[Effect]:
        self._become(_SETTLING)
        return self._go_on()

    def _refuse(self, error: DLError) -> Sequence[Effect]:
        """Take no more messages, and end with `error` when all accepted records are durable."""
        self._waiting = None
        if self.state is _ENDED:
            return []
        _forget_frames(error)
        if self.state is _BEGINNING:
            return self._end(error)
        self._reasons.refusal = error
        return self._settle()

    def _lose(self, error: DLError) -> Sequence[Effect]:
        if self._reasons.is_lost:
            return []
        # Set before the log answers with `LogEnding`: several batches may fail, and the log is lost
        # once.
        self._reasons.is_lost = True
        return [LoseLog(error)]

    def _log_ending(self, error: DLError, *, is_lost: bool) -> Sequence[Effect]:
        self._reasons.ending = error
        self._reasons.is_lost |= is_lost
        if is_lost:
            return [] if self.state is _ENDED else self._end(error)
        # While BEGINNING, `_begun` looks at `ending`; a stream that settles takes nothing more
        # anyway.
        if self.state is not _TAKING:
            return []
        self._become(_DRAINING)
        return [*self._go_on(), *self._receive()]

    def _end(self, error: DLError | None) -> Sequence[Effect]:
        self._become(_ENDED)
        return [EndStream(error)]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state = self.state
        self._acks.validate()
        assert state is not _TAKING or self._reasons.ending is None
        assert state not in (_DRAINING, _PARTING) or self._reasons.ending is not None
        is_held_up = self._reasons.is_lost or not self._acks.has_room
        assert self._is_taking or state is not _TAKING or is_held_up
        assert self._is_taking or state not in (_DRAINING, _PARTING)
        assert not self._is_taking or state is not _SETTLING
        assert self._waiting is None or self._is_taking
        assert self._reasons.refusal is None or state in (_SETTLING, _ENDED)


def _text(dlsn: DLSN | None) -> str | None:
    return None if dlsn is None else str(dlsn)


def _forget_frames(error: BaseException | None) -> None:
    """Remove the tracebacks of an error and of its causes.

    Their frames would keep the refused message in memory until the stream ends.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
