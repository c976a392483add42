"""One client's session at the bookie: which requests are taken, and when its answers are sent.

Theory of operation.  Received bytes ask for a turn, and in its turn a session takes the requests
that its bounds allow.  Bounds give back-pressure.  While too many bytes of adds are in flight, too
many reads run, or the client does not take its answers, the connection is not read, and TCP stops
the client.  Answers of adds are collected: one message acknowledges thousands.  Entries of streams
are read one message after the other, within the window of each reader.

A client is trusted with a number of requests: so many are taken in one turn, and, below the most,
so many may be in flight.  Requests of no use halve the number: those that it should have known to
be refused, and signs of life.  A request that succeeds doubles it.  A client that is trusted with
few waits for its turns among the distrusted (`turns.py`).

Invariants:

* Every request of a client that keeps to the protocol has one answer, unless the client cancels it
  or the connection is lost.
* A connection that is not read has something under way that ends the wait, such as an answer or a
  turn that comes.
* A client that breaks the protocol gets the answers to its accepted writes, then the reason, and
  then nothing.
* From the beginning of a drain on no write and no fence is accepted.  A session is settled once
  every accepted write is answered.
* A stream has one step at a time, and in each iteration of the event loop the streams have at most
  `_STEPS_PER_TURN` steps, so that large reads do not hold up other clients.
* A client that is silent, or receives nothing, for the time of `Bounds.silence_s` is disconnected.

docs/architecture/machines.md shows `TRANSITIONS` as a diagram.  The wire itself is another machine
(`BookieEnd`), which this one asks for messages.  The driver (`connection.py`) performs the effects
and feeds the answers back.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, assert_never, cast

import msgspec

from dlcore.base.errors import (
    BadRequestError,
    BookieAccessDeniedError,
    BookieOverloadedError,
    BookieUnavailableError,
    DigestMismatchError,
    DLError,
    EntryTooLargeError,
    LedgerFencedError,
)
from dlcore.base.machines import Machine, State, Transitions
from dlcore.wire.frames import FrameRun
from dlcore.wire.keepalive import LEAST_S, Keepalive
from dlcore.wire.messages import (
    CHUNK_BYTES_MAX,
    DURABLE_IDS_MAX,
    Add,
    Authorize,
    Buffer,
    Cancel,
    Chunk,
    Credit,
    Failed,
    Follow,
    Held,
    Hello,
    Lac,
    Ping,
    Pong,
    ReadEntries,
    ReadEntry,
    ReadHeld,
    ReadLac,
    Update,
    WriteLac,
    encode,
    encode_durable,
)
from dlcore.wire.statuses import status_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bookie.serving.access import Access
    from dlcore.wire.bookie_end import BookieEnd, BookieEvent
    from dlcore.wire.statuses import Status

IN_FLIGHT_BYTES_MIN = 64 * 1024
"""Bytes of adds that each connection may have in flight, whatever the others have."""
_IN_FLIGHT_CONNECTIONS = 4
"""All connections together may have as many bytes of adds in flight as this number of connections
at their bound."""
_REQUEST_BYTES = 2048
"""Bytes that a request in flight counts beside its payload: about its own use of memory."""
_TRUST_MAX = 32
"""Most requests in a turn; then the next connection is served."""
_TRUST_AT_FIRST = _TRUST_MAX // 2
"""Few: a stranger has no more in flight before the first of them is refused."""
_DISTRUST = _TRUST_MAX // 4
"""A client that is trusted with so few is distrusted."""
_OF_NO_USE = (
    BadRequestError,
    BookieAccessDeniedError,
    DigestMismatchError,
    EntryTooLargeError,
    LedgerFencedError,
)
_FORGIVEN_S = 1.0
"""A client that sends nothing for so long is trusted again: a sign of life comes less often."""
_READS_MAX = 256
"""Most reads of single entries and LACs in progress; beyond it the connection is not read."""
_STREAMS_MAX = 16 * 1024
_STEPS_MAX = 4
"""Concurrent reads for streams, and for single entries: one for each read thread of the disk.
Uncached entries of 512 KB: 440 a second one by one, 810 a second with four or more."""
_STEPS_PER_TURN = 16
"""Messages of streams that are begun in one iteration of the event loop."""
_STEPS_LOW = _STEPS_PER_TURN // 2
"""With so few of them left, more are asked for: rarely, if a stream has a message now and then."""
_SHUTTING_DOWN = "the bookie is shutting down"


class SessionState(State):
    """The state of the machine; CLOSED is final."""

    GREETING = "the client has not said HELLO yet"
    OPEN = "requests are taken"
    REFUSING = "the client is refused, and told so when its accepted writes are answered"
    REFUSED = "the reason was sent; later bytes are thrown away until the client hangs up"
    CLOSED = "the connection is over"


_S = SessionState
_LOST = {_S.CLOSED: "connection lost"}
TRANSITIONS = Transitions(
    _S.GREETING,
    {
        _S.GREETING: {
            _S.OPEN: "HELLO",
            _S.REFUSING: "another HELLO than expected, or none in time",
            **_LOST,
        },
        _S.OPEN: {_S.REFUSING: "the client breaks the protocol", **_LOST},
        _S.REFUSING: {_S.REFUSED: "no write is in flight", **_LOST},
        _S.REFUSED: _LOST,
        _S.CLOSED: {},
    },
)
_TAKING = (_S.GREETING, _S.OPEN)
_OVER = (_S.REFUSED, _S.CLOSED)


class Room(Protocol):
    """The memory for a large payload, of which all sessions share a bound."""

    @property
    def is_waiting(self) -> bool:
        """Whether the next payload waits for its memory; `READ_ON` says that it has it."""
        ...


class Bounds:
    """Bounds of the sessions of one bookie, with the memory that they share.

    Args:
        connection_bytes_max: most bytes of unanswered adds of one connection.
        chunk_bytes_max: most bytes of one message to a reader, unless a single entry is larger.
        silence_s: seconds for which a client may be silent, or take no answer.
        handshake_s: most seconds from a connection's acceptance to its HELLO.
    """

    def __init__(
        self,
        *,
        connection_bytes_max: int,
        chunk_bytes_max: int,
        silence_s: float,
        handshake_s: float,
    ) -> None:
        self.connection_bytes_max = connection_bytes_max
        self.chunk_bytes_max = chunk_bytes_max
        self.silence_s = silence_s
        self.handshake_s = handshake_s
        self.in_flight_bytes = 0
        """Bytes of unanswered adds, of all connections."""

    def in_flight_share(self) -> int:
        """Return how many bytes of adds one connection may have in flight.

        A connection alone gets its whole bound.  If many have adds in flight, each gets a share of
        the bytes that are left, and at least `IN_FLIGHT_BYTES_MIN`.
        """
        free = _IN_FLIGHT_CONNECTIONS * self.connection_bytes_max - self.in_flight_bytes
        share = free // (_IN_FLIGHT_CONNECTIONS - 1)
        return min(self.connection_bytes_max, max(share, IN_FLIGHT_BYTES_MIN))


class Signal(enum.Enum):
    """Events that carry nothing."""

    TURN = "the session's turn has come"
    TURN_WAITS = "the turn of `TAKE_TURN` comes later"
    READ_ON = "a payload that waited has its memory"
    WRITE_RESUMED = "the client has received most of its answers"
    FLUSH = "the moment of `FLUSH_SOON` has come"
    BEGIN_STEPS = "the moment of `STEPS_SOON` has come"
    STEP_WAITS = "the last `Step` waits for something; `Stepped` comes later"
    DRAIN = "the bookie shuts down"
    LOST = "the connection is over"


class Received(msgspec.Struct, frozen=True):
    """Event: so many bytes are in the buffer that `BookieEnd.get_buffer` returned.

    `is_turn`: no other session waits, so that this is the session's turn as well.
    """

    size_bytes: int
    now_s: float
    is_turn: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """The end of a write of the storage: its requests are durable, or failed with `error`."""

    request_ids: Sequence[int]
    payload_bytes: int
    error: BaseException | None = None


class Stored(msgspec.Struct, frozen=True):
    """Event: these writes are over, all that ended together."""

    outcomes: Sequence[Outcome]


class RunNotTaken(msgspec.Struct, frozen=True):
    """Event: the entries of a `StoreRun` cannot be stored together; none of them was stored."""

    add: Add


class MessageRead(msgspec.Struct, frozen=True):
    """Event: the answer to a read, or a stream's next message."""

    message: Lac | Held | Chunk | Update


class ReadEnded(msgspec.Struct, frozen=True):
    """Event: a `Read` is over; with an error it has no other answer."""

    request_id: int
    error: BaseException | None


class News(msgspec.Struct, frozen=True):
    """Event: a stream that had all may have a new message."""

    request_id: int


class Stepped(msgspec.Struct, frozen=True):
    """Event: a `Step` is over; `has_news`: the stream may have another message."""

    request_id: int
    has_news: bool
    error: BaseException | None


class WritePaused(msgspec.Struct, frozen=True):
    """Event: the client does not receive its answers; so many bytes wait for it."""

    unsent_bytes: int
    now_s: float


class Tick(msgspec.Struct, frozen=True):
    """Event: the time of `TickAt` has come."""

    unsent_bytes: int
    now_s: float


@dataclass(frozen=True, slots=True)
class Relieve:
    """Event: others wait for a budget: of reads, of large payloads, or of both.

    A client that moves no byte for `stall_s` is to be disconnected, and one whose payload is still
    incomplete after `held_s_max`; the payload has had its memory for `held_s`.
    """

    unsent_bytes: int
    now_s: float
    held_s: float
    reads_wait: bool
    adds_wait: bool
    stall_s: float
    held_s_max: float


Event: TypeAlias = (
    Signal
    | Received
    | Stored
    | RunNotTaken
    | MessageRead
    | ReadEnded
    | News
    | Stepped
    | WritePaused
    | Tick
    | Relieve
)


class Call(enum.Enum):
    """Effects that carry nothing."""

    TAKE_TURN = "ask for a turn; say `TURN`, or at first `TURN_WAITS`"
    SET_READING = "read the connection, or do not, as `is_reading` says"
    FLUSH_SOON = "say `FLUSH` in the next iteration of the event loop"
    STEPS_SOON = "say `BEGIN_STEPS` in the next iteration of the event loop"
    END_SENDING = "tell the client that nothing more comes"
    NOTE_SETTLED = "the session drains, and every accepted write is answered"


class Send(msgspec.Struct, frozen=True):
    """Effect: send this; say `WritePaused` if the client does not receive it."""

    buffers: list[Buffer]


class StoreRun(msgspec.Struct, frozen=True):
    """Effect: store the entries all together; say `Stored` later, or `RunNotTaken` at once."""

    add: Add


class StoreEach(msgspec.Struct, frozen=True):
    """Effect: store each entry; say `Stored` for each later."""

    add: Add


class StoreLac(msgspec.Struct, frozen=True):
    """Effect: store a LAC; say `Stored` later."""

    request: WriteLac


class Read(msgspec.Struct, frozen=True):
    """Effect: begin a read; say `MessageRead` if it has an answer, and `ReadEnded` later."""

    request: ReadLac | ReadHeld | ReadEntry


class CancelRead(msgspec.Struct, frozen=True):
    """Effect: cancel a read that was begun."""

    request_id: int


class OpenStream(msgspec.Struct, frozen=True):
    """Effect: open a stream whose messages are of about this size; say `News` of it."""

    request: ReadEntries | Follow
    chunk_bytes: int


class Step(msgspec.Struct, frozen=True):
    """Effect: read the next message of a stream; say `MessageRead` if there is one.

    Say `Stepped` at the end, or at once `STEP_WAITS` and then `Stepped` later.
    """

    request_id: int


class CloseStream(msgspec.Struct, frozen=True):
    """Effect: close a stream; a message that is being read is dropped."""

    request_id: int


class TickAt(msgspec.Struct, frozen=True):
    """Effect: say `Tick` at this time."""

    at_s: float


class NoteRefusal(msgspec.Struct, frozen=True):
    """Effect: report that the client is refused."""

    reason: str


class NoteDenial(msgspec.Struct, frozen=True):
    """Effect: report that a request is denied, or some of a message."""

    reason: str


class Abort(msgspec.Struct, frozen=True):
    """Effect: end the connection at once."""

    reason: str


Effect: TypeAlias = (
    Call
    | Send
    | StoreRun
    | StoreEach
    | StoreLac
    | Read
    | CancelRead
    | OpenStream
    | Step
    | CloseStream
    | TickAt
    | NoteRefusal
    | NoteDenial
    | Abort
)


class _Answers:
    """Answers to writes, and to pings, that are not sent yet."""

    def __init__(self) -> None:
        self._durable: list[int] = []
        self._others: list[Failed | Pong] = []
        self.is_due = False
        """Whether `FLUSH` comes."""

    def note(self, request_ids: Sequence[int], error: BaseException | None) -> None:
        """Settle requests: all of them are durable, or all failed with `error`."""
        if error is None:
            # Durable adds need no detail: one message acknowledges thousands of them.
            self._durable += request_ids
        else:
            status = status_of(error)
            self._others += (Failed(request_id, *status) for request_id in request_ids)

    def note_alive(self, token: int) -> None:
        """Answer a keep-alive."""
        self._others.append(Pong(token))

    def take(self) -> list[Buffer]:
        """Return the messages to send, and clear them."""
        durable, self._durable = self._durable, []
        others, self._others = self._others, []
        buffers: list[Buffer] = [
            encode_durable(durable[at : at + DURABLE_IDS_MAX])
            for at in range(0, len(durable), DURABLE_IDS_MAX)
        ]
        for each in others:
            buffers += encode(each)
        return buffers


class _Stream:
    __slots__ = ("has_news", "is_follower", "is_queued", "request", "request_id")

    def __init__(self, request: ReadEntries | Follow) -> None:
        self.request = request
        self.request_id = request.request_id
        self.is_follower = isinstance(request, Follow)
        self.is_queued = False  # it waits for a step, or has one
        self.has_news = True


class _Steps:
    """Turns of the streams: which has the next step."""

    def __init__(self) -> None:
        self.queue: deque[_Stream] = deque()
        self.begun: int | None = None  # the stream whose `Step` has no answer yet
        self.waiting: set[int] = set()  # streams whose step waits for something
        self.round = 0  # streams that may begin a step in this round; the others come behind it
        self.left = _STEPS_PER_TURN  # steps until `BEGIN_STEPS`
        self.is_due = False  # `BEGIN_STEPS` comes

    def clear(self) -> None:
        """Begin no further step."""
        self.queue.clear()
        self.round = 0


class Session(Machine[SessionState]):
    """The session of one connection.

    Args:
        end: the wire.
        room: the memory for a large payload that the wire waits for.
        bounds: shared with the other sessions.
        opened_s: when the connection was accepted; any clock's time in seconds.
        is_draining: whether the bookie shuts down already.
    """

    transitions = TRANSITIONS

    def __init__(
        self, end: BookieEnd, room: Room, bounds: Bounds, *, opened_s: float, is_draining: bool
    ) -> None:
        self.state = _S.GREETING
        self.access: Access | None = None
        """The rights of the connection; None: it may do everything."""
        # No error, which would refer to the frames that it passed, and so to the session itself.
        self.refusal: tuple[Status, str] | None = None
        """Why the client is refused."""
        self.is_reading = True
        """Whether the connection is read."""
        self.is_draining = is_draining
        """Whether writes are refused."""
        self.is_turn_due = False
        """Whether a turn comes without being asked for again."""
        self.left_some = False
        """Whether the last turn left requests because of a bound of this session."""
        self.in_flight = 0
        """Writes that the storage has not ended yet."""
        self._end = end
        self._room = room
        self._bounds = bounds
        self._opened_s = opened_s
        self._keepalive = Keepalive(bounds.silence_s, now_s=opened_s)
        self._stall: tuple[int, float] | None = None  # unsent bytes and since when, if paused
        self._in_flight_bytes = 0
        self._trust = _TRUST_AT_FIRST
        self._heard_s = opened_s
        self._rest: deque[Add] = deque()  # what turns left of messages; it is taken first
        self._answers = _Answers()
        self._reads: set[int] = set()  # single reads without an end
        self._entries: deque[ReadEntry] = deque()  # those of them that wait for a slot
        self._slots: set[int] = set()  # reads of entries in progress
        self._streams: dict[int, _Stream] = {}
        self._steps = _Steps()

    @property
    def is_distrusted(self) -> bool:
        """Whether many of the client's last requests were of no use."""
        return self._trust <= _DISTRUST

    @property
    def is_write_paused(self) -> bool:
        """Whether the client does not receive its answers."""
        return self._stall is not None

    def check_fence(self, *, is_fence: bool) -> None:
        """Raise `BookieUnavailableError` for a fence during a drain; asked before the storage is.

        A read may have waited since it was taken, for room or for the client.
        """
        if is_fence and self.is_draining:
            raise BookieUnavailableError(_SHUTTING_DOWN)

    def handle(self, event: Event) -> list[Effect]:  # noqa: C901 - one case for each kind
        """Take one event."""
        match event:
            # The most frequent ones first, because the cases are tried one after the other.
            case Received():
                return self._received(event)
            case Stored():
                return self._stored(event)
            case News():
                return self._news(event.request_id)
            case MessageRead():
                return self._message_read(event.message)
            case Stepped():
                return self._stepped(event)
            case Signal.BEGIN_STEPS:
                self._steps.left, self._steps.is_due = _STEPS_PER_TURN, False
                return self._advance()
            case Signal.FLUSH:
                self._answers.is_due = False
                return self._flush()
            case Signal.TURN:
                return self._take_requests()
            case RunNotTaken(add):
                return self._run_not_taken(add)
            case Signal.STEP_WAITS:
                return self._step_waits()
            case ReadEnded(request_id, error):
                return self._read_ended(request_id, error)
            case Signal.TURN_WAITS:
                self.is_turn_due = True
                return self._stop_reading()
            case Signal.READ_ON:
                return self._read_on()
            case WritePaused(unsent_bytes, now_s):
                self._stall = (unsent_bytes, now_s)
                return self._stop_reading()
            case Signal.WRITE_RESUMED:
                self._stall = None
                return [*self._start_entries(), *self._advance(), *self._read_on()]
            case Tick(unsent_bytes, now_s):
                return self._tick(unsent_bytes, now_s)
            case Relieve():
                return self._relieve(event)
            case Signal.DRAIN:
                return self._drain()
            case Signal.LOST:
                return self._lost()
            case _:
                assert_never(event)

    # Admission

    def _received(self, event: Received) -> list[Effect]:
        if self.state in _OVER:
            return []
        if event.now_s >= self._heard_s + _FORGIVEN_S:
            self._trust = max(self._trust, _TRUST_AT_FIRST)
        self._heard_s = event.now_s
        self._keepalive.heard(event.now_s)
        self._end.received(event.size_bytes)
        if event.is_turn and not self.is_turn_due:
            return self._take_requests()
        return self._ask_for_turn()

    def _ask_for_turn(self) -> list[Effect]:
        if self.is_turn_due:
            return []
        self.is_turn_due = True
        return [Call.TAKE_TURN]

    def _read_on(self) -> list[Effect]:
        return [] if self.is_reading else self._ask_for_turn()

    def _take_requests(self) -> list[Effect]:
        """Take requests up to the bounds; read the connection if none is left."""
        self.is_turn_due = False
        if self.state in _OVER:
            return []
        effects: list[Effect] = []
        left = self._trust
        try:
            while self._has_room():
                if left <= 0:
                    self.is_turn_due = True
                    break
                event = self._rest.popleft() if self._rest else self._end.next_event()
                if event is None:
                    self.left_some = self._room.is_waiting
                    if self.left_some:
                        break
                    if self._steps.queue:
                        effects += self._advance()
                    if not self.is_reading:
                        effects += self._start_reading()
                    return effects
                effects += self._take(event)
                left -= len(event.frames) if isinstance(event, Add) else 1
            else:
                self.left_some = True
        except DLError as error:
            effects += self._refuse(error)
        # Steps come behind all openings: a step may be over, and begin others, at once.
        return [*effects, *self._advance(), *self._stop_reading()]

    def _has_room(self) -> bool:
        in_flight, trust = self._in_flight_bytes, self._trust
        return (
            self.state in _TAKING
            and (trust == _TRUST_MAX or self.in_flight + len(self._reads) < trust)
            # First the cheap check, which is True for most connections.
            and (in_flight < IN_FLIGHT_BYTES_MIN or in_flight < self._bounds.in_flight_share())
            and self._stall is None
            and len(self._reads) < _READS_MAX
        )

    def _start_reading(self) -> list[Effect]:
        if self.is_reading:
            return []
        self.is_reading = True
        return [Call.SET_READING]

    def _stop_reading(self) -> list[Effect]:
        if not self.is_reading or self.state in _OVER:
            return []
        self.is_reading = False
        return [Call.SET_READING]

    def _take(self, event: BookieEvent) -> list[Effect]:  # noqa: C901 - one case for each kind
        access = self.access
        if access is not None and not access.has_all():
            denied = self._deny(event, access)
            if denied is not None:
                return denied
        match event:
            case Add():
                return self._add(event)
            case WriteLac():
                if self.is_draining:
                    error = BookieUnavailableError(_SHUTTING_DOWN)
                    return self._settle([event.request_id], error)
                self._fly(1, 0)
                return [StoreLac(event)]
            case ReadLac() | ReadHeld() | ReadEntry():
                return self._read(event)
            case ReadEntries() | Follow():
                return self._open_stream(event)
            case Credit(request_id):
                if request_id in self._streams:
                    self._enqueue(self._streams[request_id])
                return []
            case Cancel(request_id):
                return self._cancel(request_id)
            case Authorize(token):
                if access is not None:
                    access.present(token)
                return []
            case Hello():
                self._become(_S.OPEN)
                return [Send(self._end.welcome())]
            case Ping(token):
                self._doubt(1)
                self._answers.note_alive(token)
                return self._flush_soon()
            case Pong():
                return []
            case _:
                assert_never(event)

    def _deny(self, event: BookieEvent, access: Access) -> list[Effect] | None:
        """Answer what the connection has no right to; None if it has the right to all of it."""
        match event:
            case Add() if not access.may_add_all(event):
                part = self._first_of(event)
                errors = access.judge_adds(part)
                return self._deny_some(part, errors) if errors else self._add(part)
            case WriteLac() | ReadLac() | ReadHeld() | ReadEntry() | ReadEntries() | Follow():
                error = access.judge(event)
                if error is None:
                    return None
                self._end.end(event.request_id)
                return [NoteDenial(str(error)), *self._settle([event.request_id], error)]
            case _:
                return None

    def _deny_some(self, add: Add, errors: Mapping[int, DLError]) -> list[Effect]:
        """Store those adds of a message that have no error."""
        effects: list[Effect] = [NoteDenial(str(next(iter(errors.values()))))]
        for number, frame in enumerate(add.frames):
            request_id = add.first_request_id + number
            effects += (
                self._settle([request_id], errors[number])
                if number in errors
                else self._add(Add(request_id, add.is_recovery, [frame]))
            )
        return effects

    # Writes and their answers

    def _add(self, add: Add) -> list[Effect]:
        frames = add.frames
        if self.is_draining:
            ids = range(add.first_request_id, add.first_request_id + len(frames))
            return self._settle(ids, BookieUnavailableError(_SHUTTING_DOWN))
        if len(frames) > 1 and isinstance(frames, FrameRun) and not add.is_recovery:
            self._fly(1, len(frames.payload))
            return [StoreRun(add)]
        return self._store_each(add)

    def _store_each(self, add: Add) -> list[Effect]:
        add = self._first_of(add)
        self._fly(len(add.frames), sum(map(len, add.frames)))
        return [StoreEach(add)]

    def _first_of(self, add: Add) -> Add:
        """Return as many adds of a message as the client is trusted with; the rest comes next."""
        first_id, is_recovery, frames = add
        count = self._trust
        if len(frames) <= count:
            return add
        self._rest.appendleft(Add(first_id + count, is_recovery, frames[count:]))
        return Add(first_id, is_recovery, frames[:count])

    def _run_not_taken(self, add: Add) -> list[Effect]:
        """Store the entries singly, some in each turn: they cost far more than a run."""
        self._fly(-1, -len(cast("FrameRun", add.frames).payload))
        effects = self._store_each(add)
        if not self._rest:
            return effects
        self.is_turn_due = True
        return [*effects, *self._stop_reading()]

    def _fly(self, count: int, payload_bytes: int) -> None:
        """Count writes that the storage gets."""
        size = payload_bytes + count * _REQUEST_BYTES
        self.in_flight += count
        self._in_flight_bytes += size
        self._bounds.in_flight_bytes += size

    def _stored(self, event: Stored) -> list[Effect]:
        for outcome in event.outcomes:
            self._fly(-1, -outcome.payload_bytes)
            self._weigh(outcome.error, len(outcome.request_ids))
            self._answers.note(outcome.request_ids, outcome.error)
        return self._flush()

    def _weigh(self, error: BaseException | None, count: int) -> None:
        """Trust the client more after requests that succeeded, less after those of no use."""
        if error is None:
            if self._trust < _TRUST_MAX:
                self._trust *= 2
        elif isinstance(error, _OF_NO_USE):
            self._doubt(count)

    def _doubt(self, count: int) -> None:
        self._trust = max(1, self._trust >> count)

    def _settle(self, request_ids: Sequence[int], error: BaseException) -> list[Effect]:
        self._weigh(error, len(request_ids))
        self._answers.note(request_ids, error)
        return self._flush_soon()

    def _flush_soon(self) -> list[Effect]:
        if self._answers.is_due:
            return []
        self._answers.is_due = True
        return [Call.FLUSH_SOON]

    def _flush(self) -> list[Effect]:
        """Send the answers of settled requests."""
        if self.state in _OVER:
            return []
        effects = self._send(self._answers.take())
        if self.is_draining and not self.in_flight:
            effects.append(Call.NOTE_SETTLED)
        if self.state is _S.REFUSING:
            effects += self._end_if_refused()
        if not self.is_reading:
            effects += self._ask_for_turn()
        return effects

    def _send(self, buffers: list[Buffer]) -> list[Effect]:
        return [Send(buffers)] if buffers and self.state not in _OVER else []

    # Single reads

    def _read(self, request: ReadLac | ReadHeld | ReadEntry) -> list[Effect]:
        self._reads.add(request.request_id)
        if not isinstance(request, ReadEntry):
            return [Read(request)]
        self._entries.append(request)
        return self._start_entries()

    def _start_entries(self) -> list[Effect]:
        """Begin reads of entries, a few at a time, while the client receives."""
        effects: list[Effect] = []
        while self._entries and len(self._slots) < _STEPS_MAX and self._stall is None:
            request = self._entries.popleft()
            self._slots.add(request.request_id)
            effects.append(Read(request))
        return effects

    def _read_ended(self, request_id: int, error: BaseException | None) -> list[Effect]:
        self._reads.discard(request_id)
        self._slots.discard(request_id)
        if self.state in _OVER:
            return []
        effects: list[Effect] = []
        if error is not None:
            effects = self._settle([request_id], error)
        else:
            self._weigh(None, 1)
        if self._entries:
            effects += self._start_entries()
        if not self.is_reading:
            effects += self._ask_for_turn()
        return effects

    def _message_read(self, message: Lac | Held | Chunk | Update) -> list[Effect]:
        effects = self._send(self._end.send(message))
        if isinstance(message, Chunk) and message.is_last and message.request_id in self._streams:
            effects += self._forget(message.request_id)
        return effects

    def _cancel(self, request_id: int) -> list[Effect]:
        if request_id in self._streams:
            return self._forget(request_id)
        waiting = next((each for each in self._entries if each.request_id == request_id), None)
        if waiting is not None:
            self._entries.remove(waiting)
            self._reads.remove(request_id)
            return []
        return [CancelRead(request_id)] if request_id in self._reads else []

    # Streams

    def _open_stream(self, request: ReadEntries | Follow) -> list[Effect]:
        request_id = request.request_id
        error: DLError | None = None
        if len(self._streams) >= _STREAMS_MAX:
            error = BookieOverloadedError(f"a connection has at most {_STREAMS_MAX} open reads")
        elif isinstance(request, Follow) and self.is_draining:
            error = BookieUnavailableError(_SHUTTING_DOWN)
        if error is not None:
            self._end.end(request_id)
            return self._settle([request_id], error)
        chunk_bytes = min(self._bounds.chunk_bytes_max, CHUNK_BYTES_MAX)
        if isinstance(request, ReadEntries):
            chunk_bytes = min(request.chunk_bytes, chunk_bytes)
        stream = self._streams[request_id] = _Stream(request)
        self._enqueue(stream)
        return [OpenStream(request, chunk_bytes)]

    def _may_go_on(self, stream: _Stream) -> bool:
        return stream.has_news and self._end.window_of(stream.request_id) > 0

    def _enqueue(self, stream: _Stream) -> None:
        """Queue the stream for its next message, if it may have one and its window allows one."""
        if not stream.is_queued and self._may_go_on(stream):
            stream.is_queued = True
            self._steps.queue.append(stream)

    def _advance(self) -> list[Effect]:
        """Begin a round: a step of each queued stream, up to the bound of one iteration."""
        steps = self._steps
        if steps.begun is not None or not steps.queue:
            return []
        steps.round = min(len(steps.queue), steps.left)
        return self._begin_step()

    def _begin_step(self) -> list[Effect]:
        """Begin one step of the round; the next one comes when this one is over, or waits."""
        steps = self._steps
        steps.begun = None
        effects: list[Effect] = []
        while steps.round and self._can_step():
            steps.round -= 1
            stream = steps.queue.popleft()
            if stream.request_id not in self._streams:
                continue
            # A capability may have expired since the stream was opened.
            error = None if self.access is None else self.access.judge(stream.request)
            if error is not None:
                effects += [NoteDenial(str(error)), *self._end_stream(stream, error)]
            else:
                steps.left -= 1
                steps.begun = stream.request_id
                stream.has_news = False
                effects.append(Step(stream.request_id))
                return effects if steps.left > _STEPS_LOW else [*effects, *self._steps_soon()]
        return [*effects, *self._steps_soon()] if steps.queue and self._can_step() else effects

    def _steps_soon(self) -> list[Effect]:
        if self._steps.is_due:
            return []
        self._steps.is_due = True
        return [Call.STEPS_SOON]

    def _can_step(self) -> bool:
        return len(self._steps.waiting) < _STEPS_MAX and self._stall is None

    def _step_waits(self) -> list[Effect]:
        begun = self._steps.begun
        assert begun is not None
        self._steps.waiting.add(begun)
        return self._begin_step()

    def _stepped(self, event: Stepped) -> list[Effect]:
        request_id = event.request_id
        steps, stream = self._steps, self._streams.get(request_id)
        effects: list[Effect] = []
        if stream is not None:
            stream.is_queued = False
            stream.has_news = event.has_news
            if event.error is not None:
                effects += self._end_stream(stream, event.error)
            else:
                self._enqueue(stream)
        if steps.begun == request_id:
            steps.begun = None
            return [*effects, *self._begin_step()] if steps.queue else effects
        steps.waiting.remove(request_id)
        return [*effects, *self._advance()]

    def _news(self, request_id: int) -> list[Effect]:
        stream = self._streams.get(request_id)
        if stream is None:
            return []
        stream.has_news = True
        self._enqueue(stream)
        return self._advance()

    def _end_stream(self, stream: _Stream, error: BaseException) -> list[Effect]:
        return [*self._forget(stream.request_id), *self._settle([stream.request_id], error)]

    def _forget(self, request_id: int) -> list[Effect]:
        del self._streams[request_id]
        self._end.end(request_id)
        return [CloseStream(request_id)]

    # Silence

    def _tick(self, unsent_bytes: int, now_s: float) -> list[Effect]:
        """Disconnect a client that is silent; ask one that is quiet for a sign of life."""
        if self.state is _S.CLOSED:
            return []
        if self.state is _S.REFUSED:
            return [Abort("it was refused, and does not hang up")]
        effects: list[Effect] = []
        bounds = self._bounds
        if self.state is _S.GREETING and now_s >= self._opened_s + bounds.handshake_s:
            effects += self._refuse(BadRequestError(f"no HELLO within {bounds.handshake_s} s"))
        if not self.is_reading:
            self._keepalive.heard(now_s)  # it may have sent bytes that we do not read now
        if self.stalled_s(unsent_bytes, now_s) >= bounds.silence_s:
            return [*effects, Abort("it receives no answers")]
        try:
            ping = self._keepalive.check(now_s)
        except BookieUnavailableError as error:
            return [*effects, Abort(str(error))]
        due_s = self._keepalive.due_s(now_s)
        if self._stall is not None:
            due_s = min(due_s, self._stall[1] + bounds.silence_s)
        if self.state is _S.GREETING:
            due_s = min(due_s, self._opened_s + bounds.handshake_s)
        effects.append(TickAt(max(due_s, now_s + LEAST_S)))
        return effects if ping is None else [*effects, *self._send(self._end.send(ping))]

    def stalled_s(self, unsent_bytes: int, now_s: float) -> float:
        """Return the seconds for which the client has received no byte of its waiting answers."""
        if self._stall is None:
            return 0.0
        if unsent_bytes != self._stall[0]:
            self._stall = (unsent_bytes, now_s)
        return now_s - self._stall[1]

    def sends_slowly(self, event: Relieve) -> bool:
        """Return whether the client is too slow with a large payload."""
        # If we do not read, the client is not to blame, unless it takes no answers.
        if not self.is_reading and self._stall is None:
            return False
        quiet_s = self._keepalive.quiet_s(event.now_s)
        return min(event.held_s, quiet_s) >= event.stall_s or event.held_s >= event.held_s_max

    def _relieve(self, event: Relieve) -> list[Effect]:
        stalled_s = self.stalled_s(event.unsent_bytes, event.now_s)
        if event.reads_wait and stalled_s >= event.stall_s:
            return [Abort("it receives nothing, and others wait")]
        if event.adds_wait and self.sends_slowly(event):
            return [Abort("it sends slowly, and others wait")]
        return []

    # The end

    def _refuse(self, error: DLError) -> list[Effect]:
        """End the session with a reason, after the answers to accepted writes."""
        self._become(_S.REFUSING)
        self.refusal = status_of(error)
        return [NoteRefusal(str(error)), *self._end_if_refused()]

    def _end_if_refused(self) -> list[Effect]:
        if self.state is not _S.REFUSING or self.in_flight or self._answers.is_due:
            return []
        assert self.refusal is not None
        sent = self._send(self._end.send(Failed(0, *self.refusal)))
        self._become(_S.REFUSED)
        # If we closed with unread bytes, TCP would reset, and the client could miss the reason.
        return [*self._drop_all(), *sent, *self._start_reading(), Call.END_SENDING]

    def _drain(self) -> list[Effect]:
        """Refuse writes from now on, and end the streams that follow a ledger."""
        self.is_draining = True
        effects: list[Effect] = []
        for stream in list(self._streams.values()):
            if stream.is_follower:
                effects += self._end_stream(stream, BookieUnavailableError(_SHUTTING_DOWN))
        if not self.in_flight and not self._answers.is_due:
            effects.append(Call.NOTE_SETTLED)
        return effects

    def _lost(self) -> list[Effect]:
        """Drop everything; the storage completes the writes that it has accepted."""
        if self.state is _S.CLOSED:
            return []
        self._become(_S.CLOSED)
        self._stall = None
        return [*self._drop_all(), Call.NOTE_SETTLED]

    def _drop_all(self) -> list[Effect]:
        """Give reads up: nothing will be sent to the client any more."""
        effects: list[Effect] = []
        for request_id in list(self._streams):
            effects += self._forget(request_id)
        self._steps.clear()
        self._rest.clear()
        self._reads -= {each.request_id for each in self._entries}
        self._entries.clear()
        return [*effects, *(CancelRead(request_id) for request_id in self._reads)]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state, steps = self.state, self._steps
        waiting = {each.request_id for each in self._entries}
        assert 0 <= self.in_flight * _REQUEST_BYTES <= self._in_flight_bytes
        assert self._in_flight_bytes <= self._bounds.in_flight_bytes
        assert 1 <= self._trust <= _TRUST_MAX
        assert not (self._rest and self.is_reading)
        assert (self.refusal is not None) == (state in (_S.REFUSING, _S.REFUSED)) or (
            state is _S.CLOSED
        )
        assert len(waiting) == len(self._entries)
        assert waiting | self._slots <= self._reads
        assert not waiting & self._slots
        assert max(len(self._slots), len(steps.waiting)) <= _STEPS_MAX
        assert steps.round <= len(steps.queue)
        if state in _OVER:
            assert not self._rest
            assert not self._streams
            assert not steps.queue
            assert not waiting
            assert state is _S.CLOSED or not self.in_flight
            return
        assert not (waiting and len(self._slots) < _STEPS_MAX and self._stall is None)
        for stream in self._streams.values():
            assert stream.is_queued or not self._may_go_on(stream)
        if steps.queue and steps.begun is None and self._can_step():
            assert steps.is_due
        ends_the_wait = (
            self.in_flight
            or self._answers.is_due
            or self._reads
            or self._stall is not None
            or self._room.is_waiting
            or self.is_turn_due
        )
        assert self.is_reading or ends_the_wait
        assert state is not _S.REFUSING or self.in_flight or self._answers.is_due
