"""The client's end of a connection: sends requests, and matches answers to them.

Every message of a bookie must answer a request, in a form that the request allows and within the
window that it gave.  If not, the bookie or something between breaks the protocol, and the
connection ends.  An answer to a request that was given up is allowed, and is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from dlcore.base.errors import (
    BadRequestError,
    BookieError,
    BookieUnavailableError,
    WrongIncarnationError,
)
from dlcore.wire.assembly import Assembly
from dlcore.wire.messages import (
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
from dlcore.wire.statuses import error_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.wire.receive_memory import ReceiveMemory

W = TypeVar("W")
R = TypeVar("R")
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


_GREETING = kinds(Kind.WELCOME, Kind.FAILED)
_ALL_ELSE = kinds(*(kind for kind in Kind if kind >= Kind.PING and kind != Kind.WELCOME))
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
        self._assembly = Assembly(memory, _GREETING)
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
                self._assembly.expected = _ALL_ELSE
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
        if not 0 < request_id < self._next_id:
            raise WireError(f"an answer to request {request_id}, which was never sent")

    def _take_ids(self, count: int) -> int:
        first = self._next_id
        if first + count > REQUEST_ID_MAX:
            raise BookieUnavailableError("the connection has used all its request ids")
        self._next_id += count
        return first
