"""A client's session with a bookie: when each request is sent, and which answer it gets.

Theory of operation.  Requests that come before the bookie's WELCOME wait.  Then each is sent in the
call, except for adds while others are unanswered: those of one iteration of the event loop share a
message, which costs both ends less.  Explicit LACs and adds keep the order of their calls.  While
the bookie does not receive what was sent, writes wait here, and reads, which are small, do not.
A capability is presented before the first request that needs it.

Invariants:

* Every write has one answer: the bookie's, or an error after `add_timeout_s`, or the error that
  ended the session.  One that stays unanswered fails alone.
* Every read gets the bookie's answers in order, and an error if the session ends before them,
  unless its caller gives it up.
* Requests and their bytes are bounded, and a write beyond the bound is refused at once.
* A session that received no byte for `add_timeout_s` is over: PINGs make sure that a healthy bookie
  sends something.
* A session that is over takes no request, and sends nothing.

docs/architecture/machines.md shows `TRANSITIONS` as a diagram.  The driver (`connection.py`)
performs the effects and feeds the answers back.

The session asks its `ClientEnd` for messages, and for the meaning of received ones.  Every message
of a bookie must answer a request, in a form that the request allows and within the window that it
gave.  If not, the bookie or something between breaks the protocol, and the connection ends.  An
answer to a request that was given up is allowed, and is dropped.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar, assert_never

import msgspec

from dlcore.base.config import ENTRY_SIZE_BYTES_MAX, MIB
from dlcore.base.errors import (
    BadRequestError,
    BookieError,
    BookieOverloadedError,
    BookieUnavailableError,
    DLError,
    WrongIncarnationError,
    copied,
)
from dlcore.base.machines import Machine, State, Transitions
from dlcore.wire.fields import error_of
from dlcore.wire.messages import (
    ADD_FRAMES_MAX,
    FEATURE_AUTHORIZE,
    FEATURE_HELD,
    FEATURES,
    PROTOCOL_VERSION,
    REQUEST_ID_MAX,
    Authorize,
    Buffer,
    Cancel,
    Chunk,
    Credit,
    Durable,
    Failed,
    Follow,
    Frame,
    Held,
    Hello,
    Kind,
    Lac,
    Ping,
    Pong,
    ReadEntries,
    ReadEntry,
    ReadHeld,
    ReadLac,
    Update,
    Welcome,
    WireError,
    WriteLac,
    cost_of,
    decode,
    encode,
    encode_add,
    kinds,
)
from dlcore.wire.port import OnAnswer
from dlcore.wire.receiving import Assembly, Keepalive

if TYPE_CHECKING:
    from dlcore.base.config import LedgerClientConfig
    from dlcore.base.ids import BookieId
    from dlcore.wire.capabilities import Presenter
    from dlcore.wire.receiving import ReceiveMemory


W = TypeVar("W")
R = TypeVar("R")
"""The type by which the caller knows a read."""
Read: TypeAlias = ReadLac | ReadHeld | ReadEntry | ReadEntries | Follow


class NotSpokenError(BadRequestError):
    """The bookie is of an earlier release, which does not know this request; it was not sent."""


class Welcomed(NamedTuple):
    """Event: the bookie is the right one; requests may be sent."""


class Stored(NamedTuple, Generic[W]):
    """Event: these adds and LACs are durable."""

    writes: Sequence[W]


class WriteRefused(NamedTuple, Generic[W]):
    """Event: an add or LAC failed."""

    write: W
    error: BookieError


class LacReceived(NamedTuple, Generic[R]):
    """Event: a ledger's LAC."""

    read: R
    last_add_confirmed: int


class Brought(NamedTuple, Generic[R]):
    """Event: entries of a read, or the entries that a bookie holds."""

    read: R
    message: Chunk | Update | Held


class ReadRefused(NamedTuple, Generic[R]):
    """Event: a read failed."""

    read: R
    error: BookieError


ClientEvent: TypeAlias = (
    Welcomed
    | Stored[W]
    | WriteRefused[W]
    | LacReceived[R]
    | Brought[R]
    | ReadRefused[R]
    | Ping
    | Pong
)


class _OpenRead(Generic[R]):
    """A read that has not ended, and the bytes that the bookie may still send for it."""

    __slots__ = ("answers", "read", "taken", "window")

    def __init__(self, read: R, answers: type, window: int) -> None:
        self.read = read
        self.answers = answers
        self.window = window
        self.taken = 0


_GREETING_KINDS = kinds(Kind.WELCOME, Kind.FAILED)
_LATER_KINDS = kinds(*(kind for kind in Kind if kind >= Kind.PING and kind != Kind.WELCOME))
_ANSWERS: dict[type, type] = {
    ReadLac: Lac,
    ReadHeld: Held,
    ReadEntry: Chunk,
    ReadEntries: Chunk,
    Follow: Update,
}


class ClientEnd(Generic[W, R]):
    """One connection; `W` and `R` are the types of the caller's writes and reads in events.

    Args:
        hello: the first message, which names the bookie.
        memory: the memory for received bytes.
    """

    def __init__(self, hello: Hello, memory: ReceiveMemory) -> None:
        self._hello = hello
        self._assembly = Assembly(memory, _GREETING_KINDS)
        self.get_buffer = self._assembly.get_buffer
        self.received = self._assembly.received
        self.close = self._assembly.close
        self._is_welcome = False
        self._features = 0
        self._next_id = 1
        self.writes: dict[int, W] = {}
        """Unanswered adds and LACs, in the order of sending."""
        self._reads: dict[int, _OpenRead[R]] = {}

    @property
    def reads(self) -> list[R]:
        """Reads that have not ended."""
        return [each.read for each in self._reads.values()]

    def hello(self) -> list[Buffer]:
        """Return the message that opens the connection."""
        return encode(self._hello)

    def authorize(self, token: bytes) -> list[Buffer]:
        """Return the message that presents a capability; none if the bookie asks for none."""
        return encode(Authorize(token)) if self._features & FEATURE_AUTHORIZE else []

    def add(
        self, frames: Sequence[Frame], writes: Sequence[W], *, is_recovery: bool
    ) -> list[Buffer]:
        """Return a message of adds."""
        first = self._take_ids(len(frames))
        self.writes.update(enumerate(writes, first))
        return encode_add(first, frames, is_recovery=is_recovery)

    def write_lac(self, ledger_id: int, last_add_confirmed: int, write: W) -> list[Buffer]:
        """Return a message with an explicit LAC."""
        request_id = self._take_ids(1)
        self.writes[request_id] = write
        return encode(WriteLac(request_id, ledger_id, last_add_confirmed))

    def read(self, request: Read, read: R) -> tuple[int, list[Buffer]]:
        """Return a new id for a read, which replaces that of `request`, and its message.

        Raises:
            NotSpokenError: the bookie does not know this request.
        """
        # An older bookie would take the unknown kind for a broken protocol, and end the connection.
        if isinstance(request, ReadHeld) and not self._features & FEATURE_HELD:
            raise NotSpokenError("it cannot list its entries: it is of an earlier release")
        request_id = self._take_ids(1)
        # The answer to any other read is one message, and a window of 1 byte admits one message.
        window = request.window_bytes if isinstance(request, ReadEntries | Follow) else 1
        self._reads[request_id] = _OpenRead(read, _ANSWERS[type(request)], window)
        return request_id, encode(request._replace(request_id=request_id))

    def take(self, request_id: int, size: int) -> list[Buffer]:
        """Give back the window of a message of `size` bytes, in a CREDIT now or with later ones."""
        read = self._reads.get(request_id)
        if read is None:
            return []
        # One CREDIT for about half of the window: a message for each chunk would cost more.
        read.taken += size
        if read.taken < read.window:
            return []
        taken, read.taken = read.taken, 0
        read.window += taken
        return encode(Credit(request_id, taken))

    def cancel(self, request_id: int) -> list[Buffer]:
        """Give up a read."""
        return encode(Cancel(request_id)) if self._reads.pop(request_id, None) else []

    def next_event(self) -> ClientEvent[W, R] | None:
        """Return the next event; None if no message is whole.

        Raises:
            BookieError: the connection is of no use: another bookie answers, or the bookie refuses
                the connection or breaks the protocol.
        """
        while (frame := self._assembly.next_frame()) is not None:
            event = self._judge(decode(*frame))
            if event is not None:
                return event
        return None

    def _judge(self, message: object) -> ClientEvent[W, R] | None:
        match message:
            case Durable(request_ids):
                return self._store(request_ids)
            # Id 0 belongs to no request: the bookie refuses the connection as a whole.
            case Failed(0, status, detail):
                raise self._refusal(error_of(status, detail))
            case Welcome():
                welcomed = self._enter(message)
                self._assembly.expected = _LATER_KINDS
                return welcomed
            case Failed():
                return self._refuse(message)
            case Lac() | Held() | Chunk() | Update():
                return self._bring(message)
            case _:
                assert isinstance(message, (Ping, Pong))
                return message

    def _refusal(self, error: BookieError) -> BookieError:
        """Return why the bookie ends the connection; the error is about no request."""
        # During the handshake these two are about the address or the release, and trying again
        # does not help.  Later every refusal only ends the connection.
        if not self._is_welcome and isinstance(error, WrongIncarnationError | BadRequestError):
            return error
        return BookieUnavailableError(f"it ended the connection: {error}")

    def _enter(self, welcome: Welcome) -> Welcomed:
        hello = self._hello
        if welcome.version != PROTOCOL_VERSION or welcome.features & ~FEATURES:
            raise WireError(
                f"protocol version {welcome.version} with features {welcome.features:#x}: expected "
                f"{PROTOCOL_VERSION} and {FEATURES:#x}"
            )
        if (welcome.bookie_name, welcome.incarnation) != (hello.bookie_name, hello.incarnation):
            raise WrongIncarnationError(
                f"{welcome.bookie_name}, incarnation {welcome.incarnation} answers"
            )
        self._is_welcome = True
        self._features = welcome.features
        return Welcomed()

    def _store(self, request_ids: Sequence[int]) -> Stored[W]:
        stored: list[W] = []
        for request_id in request_ids:
            write = self.writes.pop(request_id, None)
            if write is not None:
                stored.append(write)
            else:
                # A write without an entry here was refused or answered before; its id is known.
                self._check_sent(request_id)
                if request_id in self._reads:
                    raise WireError(f"DURABLE for read {request_id}: expected only writes")
        return Stored(stored)

    def _refuse(self, failed: Failed) -> WriteRefused[W] | ReadRefused[R] | None:
        self._check_sent(failed.request_id)
        error = error_of(failed.status, failed.detail)
        write = self.writes.pop(failed.request_id, None)
        if write is not None:
            return WriteRefused(write, error)
        read = self._reads.pop(failed.request_id, None)
        return None if read is None else ReadRefused(read.read, error)

    def _bring(self, message: Lac | Held | Chunk | Update) -> LacReceived[R] | Brought[R] | None:
        request_id = message.request_id
        self._check_sent(request_id)
        read = self._reads.get(request_id)
        if read is None:
            if request_id in self.writes:
                raise WireError(f"{type(message).__name__} for the write {request_id}")
            return None  # the read was cancelled while this message was in transit
        if not isinstance(message, read.answers):
            raise WireError(f"{type(message).__name__} for read {request_id}")
        if isinstance(message, Lac):
            del self._reads[request_id]
            return LacReceived(read.read, message.last_add_confirmed)
        if isinstance(message, Held):
            del self._reads[request_id]
            return Brought(read.read, message)
        # A bookie may send one whole message while any byte of the window is left.
        if read.window <= 0:
            raise WireError(f"read {request_id} has more bytes than its window")
        read.window -= cost_of(message)
        if isinstance(message, Chunk) and message.is_last:
            del self._reads[request_id]
        return Brought(read.read, message)

    def _check_sent(self, request_id: int) -> None:
        # Ids ascend, so this also admits late answers to requests that were given up.
        if not 0 < request_id < self._next_id:
            raise WireError(f"an answer to request {request_id}, which was never sent")

    def _take_ids(self, count: int) -> int:
        first = self._next_id
        if first + count > REQUEST_ID_MAX:
            raise BookieUnavailableError("the connection has used all its request ids")
        self._next_id += count
        return first


_BATCH_BYTES_MAX = MIB
"""Adds that wait together are sent in one message of about this size."""
_BACKLOG_FACTOR = 4
"""A session holds at most this many times the ledger client's own limits on pending adds."""
UNSENT_BYTES_HIGH = 4 * MIB
"""Bytes that the transport holds unsent; beyond this writes wait in the queue."""


class SessionState(State):
    """The state of the machine; CLOSED is final."""

    CONNECTING = "there is no connection yet"
    GREETING = "HELLO was sent"
    OPEN = "requests are sent"
    BLOCKED = "the bookie does not receive, and writes wait"
    BROKEN = "every request has its answer or an error, and the connection ends"
    CLOSED = "the connection is gone, or there never was one"


_CONNECTING, _GREETING, _OPEN, _BLOCKED, _BROKEN, _CLOSED = SessionState
_BREAKS = {_BROKEN: "failed, given up, or lost"}
TRANSITIONS = Transitions(
    _CONNECTING,
    {
        _CONNECTING: {_GREETING: "connected", _CLOSED: "not connected in time, lost, or given up"},
        _GREETING: {_OPEN: "WELCOME", **_BREAKS},
        _OPEN: {_BLOCKED: "too many bytes are unsent", **_BREAKS},
        _BLOCKED: {_OPEN: "most bytes are sent", **_BREAKS},
        _BROKEN: {_CLOSED: "connection lost"},
        _CLOSED: {},
    },
)
_BEFORE = (_CONNECTING, _GREETING)
_OVER = (_BROKEN, _CLOSED)

Answer: TypeAlias = int | Held | Chunk | Update
"""An answer to a read; an int is a LAC."""


class Signal(enum.Enum):
    """Events that carry nothing."""

    CONNECTED = "there is a connection"
    WRITE_PAUSED = "the bookie does not receive what was sent"
    WRITE_RESUMED = "it has received most of that"
    FLUSH = "the moment of `FLUSH_SOON` has come"


class AddWrite(msgspec.Struct, frozen=True):
    """Event: add an entry of this size behind all earlier writes."""

    frame: Frame
    size_bytes: int
    is_recovery: bool
    on_answer: OnAnswer
    submitted_s: float


class LacWrite(msgspec.Struct, frozen=True):
    """Event: write an explicit LAC behind all earlier writes."""

    size_bytes: ClassVar[int] = 0

    ledger_id: int
    last_add_confirmed: int
    on_answer: OnAnswer
    submitted_s: float


Write: TypeAlias = AddWrite | LacWrite
Sent: TypeAlias = tuple[OnAnswer, int, float]
"""A write that was sent: whom to answer, its size, and when it was submitted.

It does not keep its entry, which the answer does not need.  A tuple costs a quarter of an object.
"""


class Ask(msgspec.Struct, Generic[R], frozen=True):
    """Event: send a read."""

    request: Read
    read: R


class Taken(msgspec.Struct, Generic[R], frozen=True):
    """Event: the caller has taken so many bytes of a read's answers; the bookie may send more."""

    read: R
    size_bytes: int


class Cancelled(msgspec.Struct, Generic[R], frozen=True):
    """Event: the caller is done with a read, or gives it up."""

    read: R


class Received(msgspec.Struct, frozen=True):
    """Event: so many bytes are in the buffer that `ClientEnd.get_buffer` returned."""

    size_bytes: int
    now_s: float


class Tick(msgspec.Struct, frozen=True):
    """Event: the time of `TickAt` has come."""

    now_s: float


class Expire(msgspec.Struct, frozen=True):
    """Event: the time of `ExpireAt` has come."""

    now_s: float


class GivenUp(msgspec.Struct, frozen=True):
    """Event: the session's owner ends it; unanswered requests fail like `error`."""

    error: DLError


class Lost(msgspec.Struct, frozen=True):
    """Event: the connection is gone; `reason` continues a sentence."""

    reason: str


Event: TypeAlias = (
    Signal
    | AddWrite
    | LacWrite
    | Ask[R]
    | Taken[R]
    | Cancelled[R]
    | Received
    | Tick
    | Expire
    | GivenUp
    | Lost
)


class Call(enum.Enum):
    """Effects that carry nothing."""

    FLUSH_SOON = "say `FLUSH` in the next iteration of the event loop"
    NOTE_WELCOME = "the bookie is there, and is the right one"
    NOTE_BROKEN = "the session is of no use: stop its timers, and use another one"
    ABORT = "end the connection at once"
    NOTE_CLOSED = "nothing is left of the connection"


class Send(msgspec.Struct, frozen=True):
    """Effect: send this; say `WRITE_PAUSED` if the bookie does not receive it."""

    buffers: list[Buffer]


class Confirm(msgspec.Struct, frozen=True):
    """Effect: these writes are durable; answer each now."""

    writes: Sequence[Sent]


class Refuse(msgspec.Struct, frozen=True):
    """Effect: a write failed; answer it soon.  Now its caller might write again in the middle."""

    on_answer: OnAnswer
    error: DLError


class Bring(msgspec.Struct, Generic[R], frozen=True):
    """Effect: give an answer to a read."""

    read: R
    answer: Answer


class EndRead(msgspec.Struct, Generic[R], frozen=True):
    """Effect: a read failed."""

    read: R
    error: DLError


class TickAt(msgspec.Struct, frozen=True):
    """Effect: say `Tick` at this time."""

    at_s: float


class ExpireAt(msgspec.Struct, frozen=True):
    """Effect: say `Expire` at this time."""

    at_s: float


class NoteFailure(msgspec.Struct, frozen=True):
    """Effect: report that the session failed, and count it as a failure of the bookie."""

    reason: str


Effect: TypeAlias = (
    Call | Send | Confirm | Refuse | Bring[R] | EndRead[R] | TickAt | ExpireAt | NoteFailure
)


class PendingWrites:
    """The writes without an answer: how many there may be, their order, and their time.

    Those that were sent are in `sent`, which the wire keeps; those that wait are behind them.

    Args:
        sent: the writes that were sent, by request.
        config: time-outs and bounds.
    """

    def __init__(self, bookie: BookieId, sent: dict[int, Sent], config: LedgerClientConfig) -> None:
        self.queue: deque[Write] = deque()
        """Those that were not sent."""
        self.size_bytes = 0
        """Bytes of all of them."""
        self._sent = sent
        self._bookie = bookie
        self._entries_max = _BACKLOG_FACTOR * config.pending_entries_max
        self._bytes_max = _BACKLOG_FACTOR * config.pending_bytes_max + ENTRY_SIZE_BYTES_MAX
        self._timeout_s = config.add_timeout_s
        self._is_expiry_due = False  # `Expire` comes

    def __bool__(self) -> bool:
        return bool(self._sent or self.queue)

    def overload(self, write: Write) -> BookieOverloadedError | None:
        """Return the error of a write that is one too many."""
        count, size = len(self._sent) + len(self.queue), self.size_bytes
        if count < self._entries_max and size + write.size_bytes <= self._bytes_max:
            return None
        held = f"{count} requests of {size} bytes are pending"
        return BookieOverloadedError(f"{self._bookie}: {held}")

    def add(self, write: Write) -> list[ExpireAt]:
        """Queue a write."""
        self.size_bytes += write.size_bytes
        self.queue.append(write)
        if self._is_expiry_due:
            return []
        self._is_expiry_due = True
        return [ExpireAt(write.submitted_s + self._timeout_s)]

    def confirmed(self, writes: Sequence[Sent]) -> None:
        """These are durable."""
        size_bytes = self.size_bytes
        for _, size, _ in writes:
            size_bytes -= size
        self.size_bytes = size_bytes

    def refuse(self, write: Sent, error: DLError) -> Refuse:
        """This one has failed."""
        on_answer, size, _ = write
        self.size_bytes -= size
        return Refuse(on_answer, error)

    def expire(self, now_s: float) -> list[Refuse | ExpireAt]:
        """Fail the writes that waited too long."""
        self._is_expiry_due = False
        timeout_s, writes, queue = self._timeout_s, self._sent, self.queue
        # Both are in the order of submission; the sent ones come before the queued ones.
        ids = list(takewhile(lambda each: writes[each][2] + timeout_s <= now_s, writes))
        expired = [writes.pop(request_id) for request_id in ids]
        while queue and queue[0].submitted_s + timeout_s <= now_s:
            expired.append(_as_sent(queue.popleft()))
        reason = f"{self._bookie}: no answer within {timeout_s} s"
        effects: list[Refuse | ExpireAt] = [
            self.refuse(write, BookieUnavailableError(reason)) for write in expired
        ]
        oldest = next(chain(writes.values(), map(_as_sent, queue)), None)
        if oldest is not None:
            self._is_expiry_due = True
            effects.append(ExpireAt(oldest[2] + timeout_s))
        return effects

    def fail(self, error: DLError) -> list[Refuse]:
        """Fail all of them."""
        writes = [*self._sent.values(), *map(_as_sent, self.queue)]
        self._sent.clear()
        self.queue.clear()
        # A copy for each, because each caller that raises it adds its own traceback.
        return [self.refuse(write, copied(error)) for write in writes]

    def validate(self) -> None:
        """Assert all that holds between two events."""
        sizes = [size for _, size, _ in (*self._sent.values(), *map(_as_sent, self.queue))]
        assert self.size_bytes == sum(sizes)
        assert len(sizes) <= self._entries_max
        assert self.size_bytes <= self._bytes_max
        assert self._is_expiry_due or not sizes


class ClientSession(Machine[SessionState], Generic[R]):
    """The session of one connection; `R` identifies the caller's reads in events and effects.

    Args:
        bookie: the bookie's name in errors.
        end: the wire.
        config: time-outs and bounds.
        presenter: presents capabilities before the requests that need them; None: none are needed.
        now_s: the time.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        bookie: BookieId,
        end: ClientEnd[Sent, R],
        config: LedgerClientConfig,
        presenter: Presenter | None,
        *,
        now_s: float,
    ) -> None:
        self.state = _CONNECTING
        self.bookie = bookie
        self._end = end
        self._presenter = presenter
        self._keepalive = Keepalive(config.add_timeout_s, now_s=now_s)
        self._writes = PendingWrites(bookie, end.writes, config)
        self._unasked: dict[R, Read] = {}  # reads that wait for WELCOME
        self._ids: dict[R, int] = {}  # those that were sent, until their callers are done with them
        self._is_flush_due = False  # `FLUSH` comes

    @property
    def has_writes(self) -> bool:
        """Whether a write waits for its answer."""
        return bool(self._writes)

    @property
    def is_unheard(self) -> bool:
        """Whether there is a connection, and the bookie has not said WELCOME."""
        return self.state is _GREETING

    def handle(self, event: Event[R]) -> list[Effect[R]]:  # noqa: C901 - one case for each kind
        """Take one event."""
        match event:
            # The most frequent ones first, because the cases are tried one after the other.
            case AddWrite():
                return self._write(event)
            case Received():
                return self._received(event)
            case LacWrite():
                return self._write(event)
            case Signal.FLUSH:
                self._is_flush_due = False
                return self._flush()
            case Taken(read, size_bytes):
                # Id 0 belongs to no read: one that was not sent has no window to give back.
                return self._send(self._end.take(self._ids.get(read, 0), size_bytes))
            case Ask(request, read):
                return self._ask(request, read)
            case Cancelled(read):
                self._unasked.pop(read, None)
                return self._send(self._end.cancel(self._ids.pop(read, 0)))
            case Tick(now_s):
                return self._tick(now_s)
            case Expire(now_s):
                return [*self._writes.expire(now_s)]
            case Signal.WRITE_PAUSED:
                if self.state is _OPEN:
                    self._become(_BLOCKED)
                return []
            case Signal.WRITE_RESUMED:
                if self.state is _BLOCKED:
                    self._become(_OPEN)
                return self._flush()
            case Signal.CONNECTED:
                return self._connected()
            case GivenUp(error):
                return self._end_all(error)
            case Lost(reason):
                return self._lost(reason)
            case _:
                assert_never(event)

    # Writes

    def _write(self, write: Write) -> list[Effect[R]]:
        writes, state, bytes_before = self._writes, self.state, self._writes.size_bytes
        error = writes.overload(write)
        if error is not None:
            return [Refuse(write.on_answer, error)]
        if state in _OVER:
            return [Refuse(write.on_answer, self._broken())]
        due = writes.add(write)
        if state is not _OPEN or self._is_flush_due:
            return [*due]
        if not bytes_before or (not write.size_bytes and len(writes.queue) == 1):
            return [*self._flush(), *due]  # there is no other add to share a message with
        return [*self._flush_soon(), *due]

    def _flush_soon(self) -> list[Effect[R]]:
        self._is_flush_due = True
        return [Call.FLUSH_SOON]

    def _flush(self) -> list[Effect[R]]:
        """Send waiting writes, adds of one kind together.

        The machine hears that the transport is full only after these effects.  Therefore they have
        at most so many bytes as the transport holds, and the rest follows soon.
        """
        effects: list[Effect[R]] = []
        if self.state is not _OPEN:
            return effects
        left_bytes = UNSENT_BYTES_HIGH
        try:
            queue = self._writes.queue
            while queue and left_bytes > 0:
                first = queue[0]
                if isinstance(first, LacWrite):
                    effects.append(Send(self._lac_message(first)))
                else:
                    buffers, size = self._add_message(is_recovery=first.is_recovery)
                    effects.append(Send(buffers))
                    left_bytes -= size
        except BookieError as error:
            return effects + self._break(error)
        if self._writes.queue and not self._is_flush_due:
            effects += self._flush_soon()
        return effects

    def _lac_message(self, write: LacWrite) -> list[Buffer]:
        ledger_id, lac = write.ledger_id, write.last_add_confirmed
        buffers = self._end.write_lac(ledger_id, lac, _as_sent(write))
        self._writes.queue.popleft()
        if self._presenter is not None:
            buffers = self._authorize(self._presenter.before_lac(ledger_id, lac)) + buffers
        return buffers

    def _add_message(self, *, is_recovery: bool) -> tuple[list[Buffer], int]:
        """Return a message with the adds at the queue's head, and the size of their frames."""
        queue, size = self._writes.queue, 0
        frames: list[Frame] = []
        sent: list[Sent] = []
        for write in queue:
            if isinstance(write, LacWrite) or write.is_recovery != is_recovery:
                break
            length = write.size_bytes
            # The first one goes in any case: it may be larger than a batch alone.
            if frames and (size + length > _BATCH_BYTES_MAX or len(frames) == ADD_FRAMES_MAX):
                break
            size += length
            frames.append(write.frame)
            sent.append((write.on_answer, length, write.submitted_s))
        # First the ids: if none is left, the writes still wait, and fail.
        buffers = self._end.add(frames, sent, is_recovery=is_recovery)
        if len(frames) == len(queue):
            queue.clear()
        else:
            for _ in frames:
                queue.popleft()
        if self._presenter is not None:
            tokens = self._presenter.before_adds(frames, is_recovery=is_recovery)
            buffers = self._authorize(tokens) + buffers
        return buffers, size

    def _authorize(self, tokens: Sequence[bytes]) -> list[Buffer]:
        return [buffer for token in tokens for buffer in self._end.authorize(token)]

    def _send(self, buffers: list[Buffer]) -> list[Effect[R]]:
        return [Send(buffers)] if buffers else []

    # Reads

    def _ask(self, request: Read, read: R) -> list[Effect[R]]:
        if self.state in _OVER:
            return [EndRead(read, self._broken())]
        if self.state in _BEFORE:
            self._unasked[read] = request
            return []
        try:
            self._ids[read], buffers = self._end.read(request, read)
        except BookieError as error:
            return [EndRead(read, _named(self.bookie, error))]
        if self._presenter is not None:
            buffers = self._authorize(self._presenter.before_read(request)) + buffers
        return [Send(buffers)]

    # The bookie's messages

    def _connected(self) -> list[Effect[R]]:
        if self.state is _CLOSED:  # it broke while the connection was made
            return [Call.ABORT]
        self._become(_GREETING)
        return [Send(self._end.hello())]

    def _received(self, event: Received) -> list[Effect[R]]:
        if self.state in _OVER:
            return []
        self._keepalive.heard(event.now_s)
        self._end.received(event.size_bytes)
        effects: list[Effect[R]] = []
        try:
            while (message := self._end.next_event()) is not None:
                effects += self._take(message)
        except WireError as error:
            effects += self._break(BookieUnavailableError(f"it breaks the protocol: {error}"))
        except BookieError as error:
            effects += self._break(error)
        return effects

    def _take(self, message: ClientEvent[Sent, R]) -> list[Effect[R]]:
        match message:
            case Stored():
                self._writes.confirmed(message.writes)
                return [Confirm(message.writes)]
            case Brought(read, answer):
                return [Bring(read, answer)]
            case LacReceived(read, lac):
                return [Bring(read, lac)]
            case WriteRefused(write, error):
                return [self._writes.refuse(write, _named(self.bookie, error))]
            case ReadRefused(read, error):
                return [EndRead(read, _named(self.bookie, error))]
            case Ping(token):
                # A bookie that does not receive hears from us once it does.
                return [] if self.state is _BLOCKED else [Send(encode(Pong(token)))]
            case Pong():
                return []
            case Welcomed():
                return self._start()
            case _:
                assert_never(message)

    def _start(self) -> list[Effect[R]]:
        """Send the requests that waited for the handshake."""
        self._become(_OPEN)
        effects: list[Effect[R]] = [Call.NOTE_WELCOME]
        unasked, self._unasked = self._unasked, {}
        for read, request in unasked.items():
            effects += self._ask(request, read)
        return effects + self._flush()

    # Time

    def _tick(self, now_s: float) -> list[Effect[R]]:
        if self.state in _OVER:
            return []
        try:
            ping = self._keepalive.check(now_s)
        except BookieUnavailableError as error:
            return self._break(error)
        effects: list[Effect[R]] = [TickAt(self._keepalive.due_s(now_s))]
        if self.state in _BEFORE:
            return effects
        if ping is not None:
            effects.append(Send(encode(ping)))
        if self._presenter is not None:
            effects += self._send(self._authorize(self._presenter.renew()))
        return effects

    # The end

    def _lost(self, reason: str) -> list[Effect[R]]:
        if self.state is _CLOSED:  # the connection came too late
            return []
        effects = self._break(BookieUnavailableError(f"the connection was closed{reason}"))
        if self.state is _CLOSED:  # it was lost before its making was reported
            return effects
        self._become(_CLOSED)
        return [*effects, Call.NOTE_CLOSED]

    def _break(self, error: BookieError) -> list[Effect[R]]:
        """End the session because the bookie or the connection failed."""
        if self.state in _OVER:
            return []
        return [NoteFailure(str(error)), *self._end_all(_named(self.bookie, error))]

    def _end_all(self, error: DLError) -> list[Effect[R]]:
        """End the session: every unanswered request fails like `error`."""
        if self.state in _OVER:
            return []
        had_none = self.state is _CONNECTING
        # Without a connection no `Lost` will come that could end the state BROKEN.
        self._become(_CLOSED if had_none else _BROKEN)
        reads = [*self._end.reads, *self._unasked]
        self._unasked.clear()
        self._ids.clear()
        return [
            *self._writes.fail(error),
            *(EndRead(read, copied(error)) for read in reads),
            Call.NOTE_BROKEN,
            Call.NOTE_CLOSED if had_none else Call.ABORT,
        ]

    def _broken(self) -> BookieUnavailableError:
        return BookieUnavailableError(f"{self.bookie}: the connection is broken")

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state, sent, queue = self.state, self._end.writes, self._writes.queue
        self._writes.validate()
        assert not self._unasked.keys() & self._ids.keys()
        assert not self._unasked or state in _BEFORE
        assert not (sent or self._ids) or state not in _BEFORE
        assert not (sent or queue or self._ids) or state not in _OVER
        assert not queue or self._is_flush_due or state is not _OPEN


def _as_sent(write: Write) -> Sent:
    return write.on_answer, write.size_bytes, write.submitted_s


def _named(bookie: BookieId, error: BookieError) -> BookieError:
    return type(error)(f"{bookie}: {error}")
