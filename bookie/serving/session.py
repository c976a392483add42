"""One client's session at the bookie: which requests are taken, and when its answers are sent.

Theory of operation.  Received bytes ask for a turn, and in its turn a session takes the requests
that its bounds allow.  Bounds give back-pressure.  While too many bytes of adds are in flight, too
many reads run, or the client does not take its answers, the connection is not read, and TCP stops
the client.  Answers of adds are collected: one message acknowledges thousands.  Entries of streams
are read one message after the other, within the window of each reader.

A client's trust is a number of requests: at most so many are taken in one turn, and, unless the
trust is the highest, at most so many may be in flight.  Useless requests halve it: PINGs, and
requests that the client should have known to be refused.  A request that succeeds doubles it.  A
client with little trust waits for its turns among the distrusted (`connection.py`).

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

The session owns the parts that these rules are about: `Intake` (requests, turns, reading), `Trust`,
`Writes` (in flight, and answers), `SingleReads`, `Streams` and their steps, `Patience` (silence).

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
from dlcore.wire.fields import status_of
from dlcore.wire.frames import FrameRun
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
from dlcore.wire.receiving import LEAST_S, Keepalive

if TYPE_CHECKING:
    from bookie.serving.access import Access
    from dlcore.wire.bookie_end import BookieEnd, BookieEvent
    from dlcore.wire.fields import Status

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
"""Not the most: it bounds what a stranger has in flight before the first refusal."""
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
"""A client that sends nothing for so long is trusted again; honest PINGs are further apart."""
_READS_MAX = 256
"""Most reads of single entries and LACs in progress; beyond it the connection is not read."""
_STREAMS_MAX = 16 * 1024
"""Most open streams of a connection, because each takes memory while it waits for news."""
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
    REFUSING = "the client is refused, and learns it when its accepted writes are answered"
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
        # One less than the connections of the bound: a connection that is alone leaves the bytes of
        # three others free, and so keeps its whole bound.
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


class Trust:
    """How many requests of the client may be taken at once: few after requests of no use."""

    def __init__(self, now_s: float) -> None:
        self.level = _TRUST_AT_FIRST
        self._heard_s = now_s

    @property
    def is_low(self) -> bool:
        """Whether many of the client's last requests were of no use."""
        return self.level <= _DISTRUST

    def heard(self, now_s: float) -> None:
        """Forgive a client that has sent nothing for a while."""
        if now_s >= self._heard_s + _FORGIVEN_S:
            self.level = max(self.level, _TRUST_AT_FIRST)
        self._heard_s = now_s

    def weigh(self, error: BaseException | None, count: int) -> None:
        """Trust the client more after requests that succeeded, less after those of no use."""
        if error is None:
            if self.level < _TRUST_MAX:
                # The level is always a power of two, so doubling ends exactly at the most.
                self.level *= 2
        elif isinstance(error, _OF_NO_USE):
            self.doubt(count)

    def doubt(self, count: int) -> None:
        """Note requests of no use."""
        self.level = max(1, self.level >> count)


class Writes:
    """The writes that the storage has not ended yet, and the answers that are not sent yet."""

    def __init__(self, bounds: Bounds, *, is_draining: bool) -> None:
        self.is_draining = is_draining
        """Whether writes, and fences, are refused."""
        self.in_flight = 0
        """Writes that the storage has not ended yet."""
        self.is_flush_due = False
        """Whether `FLUSH` comes."""
        self.in_flight_bytes = 0
        self._bounds = bounds
        self._durable: list[int] = []
        self._others: list[Failed | Pong] = []

    @property
    def has_room(self) -> bool:
        """Whether another write may be given to the storage."""
        return self.in_flight_bytes < self._bounds.in_flight_share()

    def check_fence(self, *, is_fence: bool) -> None:
        """Raise `BookieUnavailableError` for a fence during a drain; asked before the storage is.

        A read may have waited since it was taken, for room or for the client.
        """
        if is_fence and self.is_draining:
            raise BookieUnavailableError(_SHUTTING_DOWN)

    def fly(self, count: int, payload_bytes: int) -> None:
        """Count writes that the storage gets, or, with negative numbers, has ended."""
        size = payload_bytes + count * _REQUEST_BYTES
        # Each request costs memory beside its payload, so empty ones must count too.
        self.in_flight += count
        self.in_flight_bytes += size
        self._bounds.in_flight_bytes += size

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

    def flush_soon(self) -> list[Effect]:
        """Send the answers together with others of this iteration of the event loop."""
        if self.is_flush_due:
            return []
        self.is_flush_due = True
        return [Call.FLUSH_SOON]

    def take_answers(self) -> list[Buffer]:
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


class Intake:
    """The turns in which requests are taken, what they left, and whether more is read."""

    def __init__(self, room: Room) -> None:
        self.is_reading = True
        """Whether the connection is read."""
        self.is_turn_due = False
        """Whether a turn comes without being asked for again."""
        self.left_some = False
        """Whether the last turn left requests because of a bound of this session."""
        self.rest: deque[Add] = deque()
        """The parts of messages that turns left; they are taken first."""
        self._room = room
        self._is_over = False

    @property
    def is_waiting(self) -> bool:
        """Whether the next payload waits for its memory."""
        return self._room.is_waiting

    def first_of(self, add: Add, count: int) -> Add:
        """Return the first `count` adds of a message; the rest is the next request."""
        first_id, is_recovery, frames = add
        if len(frames) <= count:
            return add
        self.rest.appendleft(Add(first_id + count, is_recovery, frames[count:]))
        return Add(first_id, is_recovery, frames[:count])

    def ask_for_turn(self) -> list[Effect]:
        """Ask for a turn, unless one comes."""
        if self.is_turn_due:
            return []
        self.is_turn_due = True
        return [Call.TAKE_TURN]

    def go_on(self) -> list[Effect]:
        """Ask for a turn if the connection is not read: one of its bounds may have room now."""
        # While the connection is read, received bytes ask for the turn.
        return [] if self.is_reading else self.ask_for_turn()

    def start_reading(self) -> list[Effect]:
        """Read the connection again."""
        if self.is_reading:
            return []
        self.is_reading = True
        return [Call.SET_READING]

    def stop_reading(self) -> list[Effect]:
        """Leave what the client sends to TCP; a session that is over throws it away."""
        # A session that is over reads on, because TCP would reset a connection with unread bytes.
        if not self.is_reading or self._is_over:
            return []
        self.is_reading = False
        return [Call.SET_READING]

    def close(self) -> None:
        """Take no request any more."""
        self._is_over = True
        self.rest.clear()


class SingleReads:
    """Reads of single entries and of LACs; entries are read a few at a time."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        """The reads without an end."""
        self._waiting: deque[ReadEntry] = deque()  # those of them that wait for a slot
        self._slots: set[int] = set()  # reads of entries in progress

    def begin(self, request: ReadLac | ReadHeld | ReadEntry, *, is_stalled: bool) -> list[Effect]:
        """Begin a read, or queue it."""
        self.open.add(request.request_id)
        # Slots stand for the read threads of the disk; a LAC and lists are mostly in memory.
        if not isinstance(request, ReadEntry):
            return [Read(request)]
        self._waiting.append(request)
        return self.go_on(is_stalled=is_stalled)

    def go_on(self, *, is_stalled: bool) -> list[Effect]:
        """Begin reads that wait for a slot."""
        effects: list[Effect] = []
        while self._waiting and len(self._slots) < _STEPS_MAX and not is_stalled:
            request = self._waiting.popleft()
            self._slots.add(request.request_id)
            effects.append(Read(request))
        return effects

    def end(self, request_id: int) -> None:
        """A read is over."""
        self.open.discard(request_id)
        self._slots.discard(request_id)

    def cancel(self, request_id: int) -> list[Effect]:
        """Give a read up, if there is one of this number."""
        # No request was begun for it yet, so the driver has nothing to cancel.
        waiting = next((each for each in self._waiting if each.request_id == request_id), None)
        if waiting is not None:
            self._waiting.remove(waiting)
            self.open.remove(request_id)
            return []
        return [CancelRead(request_id)] if request_id in self.open else []

    def drop(self) -> list[Effect]:
        """Give all reads up."""
        self.open -= {each.request_id for each in self._waiting}
        self._waiting.clear()
        return [CancelRead(request_id) for request_id in self.open]

    def validate(self, *, is_over: bool, is_stalled: bool) -> None:
        """Assert all that holds between two events."""
        waiting = {each.request_id for each in self._waiting}
        assert len(waiting) == len(self._waiting)
        assert waiting | self._slots <= self.open
        assert not waiting & self._slots
        assert len(self._slots) <= _STEPS_MAX
        assert not waiting or is_stalled or (not is_over and len(self._slots) == _STEPS_MAX)


class Stream:
    """A read of many entries, or one that follows a ledger."""

    __slots__ = ("has_news", "is_follower", "is_queued", "request", "request_id")

    def __init__(self, request: ReadEntries | Follow) -> None:
        self.request = request
        self.request_id = request.request_id
        self.is_follower = isinstance(request, Follow)
        self.is_queued = False  # it waits for a step, or has one
        self.has_news = True


class Streams:
    """The open streams, and whose step is next.  One step at a time begins, and some may wait.

    In a round each queued stream has a step, up to the bound of one iteration of the event loop.
    """

    def __init__(self, end: BookieEnd, chunk_bytes_max: int) -> None:
        self.open: dict[int, Stream] = {}
        self.queue: deque[Stream] = deque()
        self.begun: int | None = None
        """The stream whose `Step` has no answer yet."""
        self.waiting: set[int] = set()
        """Streams whose step waits for something."""
        self._end = end
        self._chunk_bytes_max = chunk_bytes_max
        self._round = 0  # streams that may begin a step in this round; the others come behind it
        self._left = _STEPS_PER_TURN  # steps until `BEGIN_STEPS`
        self._is_due = False  # `BEGIN_STEPS` comes

    def refusal(self, request: ReadEntries | Follow, *, is_draining: bool) -> DLError | None:
        """Return the error of a request for a stream that may not be opened."""
        if len(self.open) >= _STREAMS_MAX:
            return BookieOverloadedError(f"a connection has at most {_STREAMS_MAX} open reads")
        if isinstance(request, Follow) and is_draining:
            return BookieUnavailableError(_SHUTTING_DOWN)
        return None

    def begin(self, request: ReadEntries | Follow) -> list[Effect]:
        """Open a stream."""
        stream = self.open[request.request_id] = Stream(request)
        self.enqueue(stream)
        chunk_bytes = self._chunk_bytes_max
        if isinstance(request, ReadEntries):
            # The client names the size that suits its memory; the bookie's own bound counts too.
            chunk_bytes = min(request.chunk_bytes, chunk_bytes)
        return [OpenStream(request, chunk_bytes)]

    def close(self, request_id: int) -> list[Effect]:
        """Close a stream: it has no message any more."""
        del self.open[request_id]
        self._end.end(request_id)
        return [CloseStream(request_id)]

    def credit(self, request_id: int) -> None:
        """The window of a stream has grown."""
        stream = self.open.get(request_id)
        if stream is not None:
            self.enqueue(stream)

    def news(self, request_id: int) -> None:
        """The ledger of a stream has more."""
        stream = self.open.get(request_id)
        if stream is not None:
            stream.has_news = True
            self.enqueue(stream)

    def note_sent(self, message: Lac | Held | Chunk | Update) -> list[Effect]:
        """Close a stream if this message is its last one."""
        is_last = isinstance(message, Chunk) and message.is_last
        return self.close(message.request_id) if is_last and message.request_id in self.open else []

    def enqueue(self, stream: Stream) -> None:
        """Queue the stream for its next message, if it may have one and its window allows one."""
        if not stream.is_queued and self._may_go_on(stream):
            stream.is_queued = True
            self.queue.append(stream)

    def begin_round(self) -> bool:
        """Begin a round, unless a step is about to go on with one, or no request waits."""
        if self.begun is not None or not self.queue:
            return False
        # Streams that queue again during the round come behind it, so each has one step in a round.
        self._round = min(len(self.queue), self._left)
        return True

    def next_stream(self, *, is_stalled: bool) -> Stream | None:
        """Take the next stream of the round that may have a step now."""
        while self._round and self.can_step(is_stalled=is_stalled):
            self._round -= 1
            stream = self.queue.popleft()
            # A closed stream stays queued, because removing it from the middle would be a search.
            if stream.request_id in self.open:
                return stream
        return None

    def step(self, stream: Stream) -> list[Effect]:
        """Begin a step of the stream."""
        # Reset before the step: news that come while it reads must not be lost.
        self._left -= 1
        self.begun = stream.request_id
        stream.has_news = False
        effects: list[Effect] = [Step(stream.request_id)]
        return effects if self._left > _STEPS_LOW else [*effects, *self.steps_soon()]

    def step_waits(self) -> None:
        """The step that was begun last waits for something."""
        assert self.begun is not None
        self.waiting.add(self.begun)

    def steps_soon(self) -> list[Effect]:
        """Let more steps begin in the next iteration of the event loop."""
        if self._is_due:
            return []
        self._is_due = True
        return [Call.STEPS_SOON]

    def begin_steps(self) -> None:
        """The next iteration has come."""
        self._left, self._is_due = _STEPS_PER_TURN, False

    def can_step(self, *, is_stalled: bool) -> bool:
        """Whether a step may begin: not while too many wait, or the client does not receive."""
        return len(self.waiting) < _STEPS_MAX and not is_stalled

    def drop(self) -> list[Effect]:
        """Close all streams, and begin no further step."""
        effects = [effect for request_id in list(self.open) for effect in self.close(request_id)]
        self.queue.clear()
        self._round = 0
        return effects

    def _may_go_on(self, stream: Stream) -> bool:
        return stream.has_news and self._end.window_of(stream.request_id) > 0

    def validate(self, *, is_over: bool, is_stalled: bool) -> None:
        """Assert all that holds between two events."""
        assert len(self.waiting) <= _STEPS_MAX
        assert self._round <= len(self.queue)
        assert not is_over or not (self.open or self.queue)
        for stream in self.open.values():
            assert stream.is_queued or not self._may_go_on(stream)
        if self.queue and self.begun is None and self.can_step(is_stalled=is_stalled):
            assert self._is_due


class Patience:
    """How long the session waits for a client that says nothing, or receives nothing."""

    def __init__(self, bounds: Bounds, opened_s: float) -> None:
        self.stall: tuple[int, float] | None = None
        """The unsent bytes, and since when, if the client does not receive its answers."""
        self._keepalive = Keepalive(bounds.silence_s, now_s=opened_s)
        self._bounds = bounds
        self._opened_s = opened_s

    @property
    def is_stalled(self) -> bool:
        """Whether the client does not receive its answers."""
        return self.stall is not None

    def heard(self, now_s: float) -> None:
        """Note that the client has sent something."""
        self._keepalive.heard(now_s)

    def late_greeting(self, now_s: float) -> BadRequestError | None:
        """Return the error of a client that has not said HELLO; None before its time is over."""
        if now_s < self._opened_s + self._bounds.handshake_s:
            return None
        return BadRequestError(f"no HELLO within {self._bounds.handshake_s} s")

    def check(self, unsent_bytes: int, now_s: float, *, is_reading: bool) -> Ping | None:
        """Return the PING to send now, if any.

        Raises:
            BookieUnavailableError: the client is silent, or receives nothing.
        """
        if not is_reading:
            self.heard(now_s)  # it may have sent bytes that we do not read now
        if self.stalled_s(unsent_bytes, now_s) >= self._bounds.silence_s:
            raise BookieUnavailableError("it receives no answers")
        return self._keepalive.check(now_s)

    def due_s(self, now_s: float, *, is_greeting: bool) -> float:
        """Return when to check next."""
        due_s = self._keepalive.due_s(now_s)
        if self.stall is not None:
            due_s = min(due_s, self.stall[1] + self._bounds.silence_s)
        if is_greeting:
            due_s = min(due_s, self._opened_s + self._bounds.handshake_s)
        return max(due_s, now_s + LEAST_S)

    def stalled_s(self, unsent_bytes: int, now_s: float) -> float:
        """Return the seconds for which the client has received no byte of its waiting answers."""
        if self.stall is None:
            return 0.0
        # Any change counts as progress: the transport says only how much is left, not what was
        # taken.
        if unsent_bytes != self.stall[0]:
            self.stall = (unsent_bytes, now_s)
        return now_s - self.stall[1]

    def sends_slowly(self, event: Relieve, *, is_reading: bool) -> bool:
        """Return whether the client is too slow with a large payload."""
        # If we do not read, the client is not to blame, unless it takes no answers.
        if not is_reading and self.stall is None:
            return False
        # The silence may have begun before the payload had its memory, so the shorter time counts.
        quiet_s = self._keepalive.quiet_s(event.now_s)
        return min(event.held_s, quiet_s) >= event.stall_s or event.held_s >= event.held_s_max

    def relieve(self, event: Relieve, *, is_reading: bool) -> list[Effect]:
        """Disconnect a client that makes no progress while others wait."""
        stalled_s = self.stalled_s(event.unsent_bytes, event.now_s)
        if event.reads_wait and stalled_s >= event.stall_s:
            return [Abort("it receives nothing, and others wait")]
        if event.adds_wait and self.sends_slowly(event, is_reading=is_reading):
            return [Abort("it sends slowly, and others wait")]
        return []


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
        self.intake = Intake(room)
        self.trust = Trust(opened_s)
        self.writes = Writes(bounds, is_draining=is_draining)
        self.patience = Patience(bounds, opened_s)
        self._end = end
        self._reads = SingleReads()
        self._streams = Streams(end, min(bounds.chunk_bytes_max, CHUNK_BYTES_MAX))

    def handle(self, event: Event) -> list[Effect]:  # noqa: C901 - one case for each kind
        """Take one event."""
        match event:
            # The most frequent ones first, because the cases are tried one after the other.
            case Received():
                return self._received(event)
            case Stored():
                return self._stored(event)
            case News(request_id):
                self._streams.news(request_id)
                return self._advance()
            case MessageRead(message):
                sent = self._send(self._end.send(message))
                return [*sent, *self._streams.note_sent(message)]
            case Stepped():
                return self._stepped(event)
            case Signal.BEGIN_STEPS:
                self._streams.begin_steps()
                return self._advance()
            case Signal.FLUSH:
                self.writes.is_flush_due = False
                return self._flush()
            case Signal.TURN:
                return self._take_requests()
            case RunNotTaken(add):
                return self._run_not_taken(add)
            case Signal.STEP_WAITS:
                self._streams.step_waits()
                return self._begin_step()
            case ReadEnded(request_id, error):
                return self._read_ended(request_id, error)
            case Signal.TURN_WAITS:
                self.intake.is_turn_due = True
                return self.intake.stop_reading()
            case Signal.READ_ON:
                return self.intake.go_on()
            case WritePaused(unsent_bytes, now_s):
                self.patience.stall = (unsent_bytes, now_s)
                return self.intake.stop_reading()
            case Signal.WRITE_RESUMED:
                self.patience.stall = None
                entries = self._reads.go_on(is_stalled=False)
                return [*entries, *self._advance(), *self.intake.go_on()]
            case Tick(unsent_bytes, now_s):
                return self._tick(unsent_bytes, now_s)
            case Relieve():
                return self.patience.relieve(event, is_reading=self.intake.is_reading)
            case Signal.DRAIN:
                return self._drain()
            case Signal.LOST:
                if self.state is _S.CLOSED:
                    return []
                self.patience.stall = None
                # The storage completes the writes that it has accepted.
                return [*self._drop_all(_S.CLOSED), Call.NOTE_SETTLED]
            case _:
                assert_never(event)

    # Admission

    def _received(self, event: Received) -> list[Effect]:
        if self.state in _OVER:
            return []
        self.trust.heard(event.now_s)
        self.patience.heard(event.now_s)
        self._end.received(event.size_bytes)
        # A turn that comes anyway takes these bytes as well, in the order of the queue.
        if event.is_turn and not self.intake.is_turn_due:
            return self._take_requests()
        return self.intake.ask_for_turn()

    def _take_requests(self) -> list[Effect]:
        """Take requests up to the bounds; read the connection if none is left."""
        intake = self.intake
        intake.is_turn_due = False
        if self.state in _OVER:
            return []
        effects: list[Effect] = []
        left = self.trust.level
        try:
            while self._has_room():
                # The driver sees that a turn is due and queues the connection behind the others,
                # unasked.
                if left <= 0:
                    intake.is_turn_due = True
                    break
                event = intake.rest.popleft() if intake.rest else self._end.next_event()
                if event is None:
                    intake.left_some = intake.is_waiting
                    if intake.left_some:
                        break
                    if self._streams.queue:
                        effects += self._advance()
                    return effects if intake.is_reading else [*effects, *intake.start_reading()]
                effects += self._take(event)
                # A message is taken whole, so it may use more than is left; then it ends the turn.
                left -= len(event.frames) if isinstance(event, Add) else 1
            else:
                intake.left_some = True
        except DLError as error:
            effects += self._refuse(error)
        # Steps come behind all openings: a step may be over, and begin others, at once.
        return [*effects, *self._advance(), *intake.stop_reading()]

    def _has_room(self) -> bool:
        trust, writes, reads = self.trust.level, self.writes, len(self._reads.open)
        return (
            self.state in _TAKING
            # With full trust only bytes count: a writer of small entries has thousands in flight.
            and (trust == _TRUST_MAX or writes.in_flight + reads < trust)
            # First the cheap check, which is True for most connections.
            and (writes.in_flight_bytes < IN_FLIGHT_BYTES_MIN or writes.has_room)
            and self.patience.stall is None
            and reads < _READS_MAX
        )

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
                if self.writes.is_draining:
                    return self._settle([event.request_id], BookieUnavailableError(_SHUTTING_DOWN))
                self.writes.fly(1, 0)
                return [StoreLac(event)]
            case ReadLac() | ReadHeld() | ReadEntry():
                return self._reads.begin(event, is_stalled=self.patience.is_stalled)
            case ReadEntries() | Follow():
                error = self._streams.refusal(event, is_draining=self.writes.is_draining)
                if error is None:
                    return self._streams.begin(event)
                # The wire keeps a window for each stream that was asked for.
                self._end.end(event.request_id)
                return self._settle([event.request_id], error)
            case Credit(request_id):
                self._streams.credit(request_id)
                return []
            case Cancel(request_id):
                is_stream = request_id in self._streams.open
                return (self._streams.close if is_stream else self._reads.cancel)(request_id)
            case Authorize(token):
                if access is not None:
                    access.present(token)
                return []
            case Hello():
                self._become(_S.OPEN)
                return [Send(self._end.greeting.welcome())]
            case Ping(token):
                # A PING costs a turn and an answer, and stores or reads nothing.
                self.trust.doubt(1)
                self.writes.note_alive(token)
                return self.writes.flush_soon()
            case Pong():
                return []
            case _:
                assert_never(event)

    def _deny(self, event: BookieEvent, access: Access) -> list[Effect] | None:
        """Answer what the connection has no right to; None if it has the right to all of it."""
        match event:
            case Add() if not access.may_add_all(event):
                # Each add is judged by itself from here on, so no more of them than may fit in one
                # turn.
                part = self.intake.first_of(event, self.trust.level)
                errors = access.judge_adds(part)
                if not errors:
                    return self._add(part)
                effects: list[Effect] = [NoteDenial(str(next(iter(errors.values()))))]
                for number, frame in enumerate(part.frames):
                    request_id = part.first_request_id + number
                    effects += (
                        self._settle([request_id], errors[number])
                        if number in errors
                        else self._add(Add(request_id, part.is_recovery, [frame]))
                    )
                return effects
            case WriteLac() | ReadLac() | ReadHeld() | ReadEntry() | ReadEntries() | Follow():
                error = access.judge(event)
                if error is None:
                    return None
                self._end.end(event.request_id)
                return [NoteDenial(str(error)), *self._settle([event.request_id], error)]
            case _:
                return None

    # Writes and their answers

    def _add(self, add: Add) -> list[Effect]:
        frames = add.frames
        if self.writes.is_draining:
            ids = range(add.first_request_id, add.first_request_id + len(frames))
            return self._settle(ids, BookieUnavailableError(_SHUTTING_DOWN))
        if len(frames) > 1 and isinstance(frames, FrameRun) and not add.is_recovery:
            # The storage ends a run as one write, whatever the number of its entries.
            self.writes.fly(1, len(frames.payload))
            return [StoreRun(add)]
        return self._store_each(add)

    def _store_each(self, add: Add) -> list[Effect]:
        add = self.intake.first_of(add, self.trust.level)
        self.writes.fly(len(add.frames), sum(map(len, add.frames)))
        return [StoreEach(add)]

    def _run_not_taken(self, add: Add) -> list[Effect]:
        """Store the entries singly, some in each turn: they cost far more than a run."""
        # The run was counted when it was offered; its entries are counted singly now.
        self.writes.fly(-1, -len(cast("FrameRun", add.frames).payload))
        effects = self._store_each(add)
        # The driver finds this turn due, as after a turn that left requests.
        if not self.intake.rest:
            return effects
        self.intake.is_turn_due = True
        return [*effects, *self.intake.stop_reading()]

    def _stored(self, event: Stored) -> list[Effect]:
        writes = self.writes
        for outcome in event.outcomes:
            writes.fly(-1, -outcome.payload_bytes)
            self.trust.weigh(outcome.error, len(outcome.request_ids))
            writes.note(outcome.request_ids, outcome.error)
        return self._flush()

    def _settle(self, request_ids: Sequence[int], error: BaseException) -> list[Effect]:
        self.trust.weigh(error, len(request_ids))
        self.writes.note(request_ids, error)
        return self.writes.flush_soon()

    def _flush(self) -> list[Effect]:
        """Send the answers of settled requests."""
        if self.state in _OVER:
            return []
        writes = self.writes
        effects = self._send(writes.take_answers())
        # Behind the answers: the service may close the socket once this is noted.
        if writes.is_draining and not writes.in_flight:
            effects.append(Call.NOTE_SETTLED)
        # The last accepted write may just have been answered, which the reason waits for.
        if self.state is _S.REFUSING:
            effects += self._end_if_refused()
        return effects if self.intake.is_reading else [*effects, *self.intake.ask_for_turn()]

    def _send(self, buffers: list[Buffer]) -> list[Effect]:
        return [Send(buffers)] if buffers and self.state not in _OVER else []

    # Reads

    def _read_ended(self, request_id: int, error: BaseException | None) -> list[Effect]:
        self._reads.end(request_id)
        if self.state in _OVER:
            return []
        effects: list[Effect] = []
        if error is not None:
            effects = self._settle([request_id], error)
        else:
            self.trust.weigh(None, 1)
        effects += self._reads.go_on(is_stalled=self.patience.is_stalled)
        return [*effects, *self.intake.go_on()]

    def _advance(self) -> list[Effect]:
        """Begin a round of steps."""
        return self._begin_step() if self._streams.begin_round() else []

    def _begin_step(self) -> list[Effect]:
        """Begin one step of the round; the next one comes when this one is over, or waits."""
        streams, is_stalled = self._streams, self.patience.is_stalled
        streams.begun = None
        effects: list[Effect] = []
        while (stream := streams.next_stream(is_stalled=is_stalled)) is not None:
            # A capability may have expired since the stream was opened.
            error = None if self.access is None else self.access.judge(stream.request)
            if error is None:
                return [*effects, *streams.step(stream)]
            effects += [NoteDenial(str(error)), *self._end_stream(stream, error)]
        if streams.queue and streams.can_step(is_stalled=is_stalled):
            effects += streams.steps_soon()
        return effects

    def _stepped(self, event: Stepped) -> list[Effect]:
        request_id = event.request_id
        streams, stream = self._streams, self._streams.open.get(event.request_id)
        effects: list[Effect] = []
        if stream is not None:
            stream.is_queued = False
            stream.has_news = event.has_news
            if event.error is not None:
                effects += self._end_stream(stream, event.error)
            else:
                streams.enqueue(stream)
        # Else the step had to wait, and the streams behind it went on meanwhile.
        if streams.begun == request_id:
            streams.begun = None
            return [*effects, *self._begin_step()] if streams.queue else effects
        streams.waiting.remove(request_id)
        return [*effects, *self._advance()]

    def _end_stream(self, stream: Stream, error: BaseException) -> list[Effect]:
        request_id = stream.request_id
        return [*self._streams.close(request_id), *self._settle([request_id], error)]

    # The end

    def _tick(self, unsent_bytes: int, now_s: float) -> list[Effect]:
        """Disconnect a client that is silent; ask one that is quiet for a sign of life."""
        if self.state is _S.CLOSED:
            return []
        # It had the time until this tick to read the reason and to hang up.
        if self.state is _S.REFUSED:
            return [Abort("it was refused, and does not hang up")]
        effects: list[Effect] = []
        patience = self.patience
        if self.state is _S.GREETING and (late := patience.late_greeting(now_s)) is not None:
            effects += self._refuse(late)
        try:
            ping = patience.check(unsent_bytes, now_s, is_reading=self.intake.is_reading)
        except BookieUnavailableError as error:
            return [*effects, Abort(str(error))]
        effects.append(TickAt(patience.due_s(now_s, is_greeting=self.state is _S.GREETING)))
        return effects if ping is None else [*effects, *self._send(self._end.send(ping))]

    def _refuse(self, error: DLError) -> list[Effect]:
        """End the session with a reason, after the answers to accepted writes."""
        self._become(_S.REFUSING)
        self.refusal = status_of(error)
        return [NoteRefusal(str(error)), *self._end_if_refused()]

    def _end_if_refused(self) -> list[Effect]:
        writes = self.writes
        if self.state is not _S.REFUSING or writes.in_flight or writes.is_flush_due:
            return []
        assert self.refusal is not None
        # Made before the state changes, because a session that is over sends nothing.
        sent = self._send(self._end.send(Failed(0, *self.refusal)))
        dropped = self._drop_all(_S.REFUSED)
        # If we closed with unread bytes, TCP would reset, and the client could miss the reason.
        return [*dropped, *sent, *self.intake.start_reading(), Call.END_SENDING]

    def _drain(self) -> list[Effect]:
        """Refuse writes from now on, and end the streams that follow a ledger."""
        self.writes.is_draining = True
        effects: list[Effect] = []
        for stream in list(self._streams.open.values()):
            # A range ends by itself; a follower would wait until the process ends, and can go to
            # another bookie now.
            if stream.is_follower:
                effects += self._end_stream(stream, BookieUnavailableError(_SHUTTING_DOWN))
        if not self.writes.in_flight and not self.writes.is_flush_due:
            effects.append(Call.NOTE_SETTLED)
        return effects

    def _drop_all(self, state: SessionState) -> list[Effect]:
        """Give reads up, and what was not taken: nothing will be sent to the client any more."""
        self._become(state)
        self.intake.close()
        return [*self._streams.drop(), *self._reads.drop()]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state, intake, writes = self.state, self.intake, self.writes
        is_over, is_stalled = state in _OVER, self.patience.is_stalled
        assert 0 <= writes.in_flight * _REQUEST_BYTES <= writes.in_flight_bytes
        assert 1 <= self.trust.level <= _TRUST_MAX
        assert not (intake.rest and (intake.is_reading or is_over))
        assert (self.refusal is not None) == (state in (_S.REFUSING, _S.REFUSED)) or (
            state is _S.CLOSED
        )
        self._reads.validate(is_over=is_over, is_stalled=is_stalled)
        self._streams.validate(is_over=is_over, is_stalled=is_stalled)
        if is_over:
            assert state is _S.CLOSED or not writes.in_flight
            return
        ends_the_wait = (
            writes.in_flight
            or writes.is_flush_due
            or self._reads.open
            or is_stalled
            or intake.is_waiting
            or intake.is_turn_due
        )
        assert intake.is_reading or ends_the_wait
        assert state is not _S.REFUSING or writes.in_flight or writes.is_flush_due
