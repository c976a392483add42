"""The bookie's end of a connection: the handshake, requests in order, windows of readers.

A message of a client is refused as a whole or belongs to one request.  A client that breaks the
protocol loses its connection, which does not affect other clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from dlcore.base.access.entrances import Entrance
from dlcore.base.errors import BadRequestError, BookieAccessDeniedError, WrongIncarnationError
from dlcore.wire.messages import (
    FEATURES,
    PROTOCOL_VERSION,
    REQUEST_ID_MAX,
    WINDOW_BYTES_MAX,
    Add,
    Authorize,
    Buffer,
    Cancel,
    Chunk,
    Credit,
    Durable,
    Failed,
    Follow,
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
    kinds,
)
from dlcore.wire.receiving import Assembly

if TYPE_CHECKING:
    from dlcore.base.ids import BookieId
    from dlcore.wire.receiving import ReceiveMemory, Room

BookieEvent: TypeAlias = (
    Hello
    | Add
    | WriteLac
    | ReadLac
    | ReadHeld
    | ReadEntry
    | ReadEntries
    | Follow
    | Credit
    | Cancel
    | Authorize
    | Ping
    | Pong
)

_GREETING = kinds(Kind.HELLO)
_REQUESTS = kinds(*(kind for kind in Kind if Kind.HELLO < kind < Kind.WELCOME))
_CALLERS = "a machine's certificate; a capability; without TLS every caller that can connect"
_REFUSED = "one frame of at most 5 MiB within the budget of the bookie, and an answer"


def _request(kind: Kind, right: str, resource: str = "entries of one ledger") -> Entrance:
    return Entrance(name=kind.name, resource=resource, right=right, callers=_CALLERS, cost=_REFUSED)


def _connection(kind: Kind, cost: str) -> Entrance:
    return Entrance(
        name=kind.name,
        resource="the connection itself",
        right="none",
        callers="every caller that can connect",
        cost=cost,
        logged="refusals, at a limited rate",
    )


ENTRANCES = (
    _connection(Kind.HELLO, "a connection for 10 s at most; the answer names cluster and bookie"),
    _connection(Kind.AUTHORIZE, "one check of a signature; the eighth refusal ends the connection"),
    _request(Kind.ADD, "ADD; with RECOVER for a recovery's add"),
    _request(Kind.WRITE_LAC, "ADD"),
    _request(Kind.READ_LAC, "READ; with FENCE if it fences"),
    _request(Kind.READ_HELD, "READ"),
    _request(Kind.READ_ENTRY, "READ of this entry; with FENCE if it fences"),
    _request(Kind.READ_ENTRIES, "READ of all its entries"),
    _request(Kind.FOLLOW, "READ of all entries from its first one on"),
    _connection(Kind.CREDIT, "one frame of 28 bytes"),
    _connection(Kind.CANCEL, "one frame of 24 bytes"),
    _connection(Kind.PING, "one frame and its answer"),
    _connection(Kind.PONG, "one frame of 24 bytes"),
)
"""The messages that a client may send, in the order in which a connection uses them.

`reach_of` says exactly what a capability must give for each request.
"""


class Greeting:
    """The handshake: which clients are meant for this bookie, and let in.

    Args:
        bookie: this bookie; a client that names another one is refused.
        cluster_id: the cluster of the bookie.
    """

    def __init__(self, bookie: BookieId, cluster_id: str) -> None:
        self.is_over = False
        """Whether the client is let in."""
        self.refusal: str | None = None
        """Why the client is not let in, whatever its HELLO says."""
        self._bookie = bookie
        self._cluster_id = cluster_id
        self._features = 0

    def enter(self, hello: Hello) -> None:
        """Let the client in, or raise the error for which it is not."""
        if self.refusal is not None:
            raise BookieAccessDeniedError(self.refusal)
        if hello.version != PROTOCOL_VERSION:
            raise BadRequestError(f"protocol version {hello.version}, expected {PROTOCOL_VERSION}")
        if hello.cluster_id != self._cluster_id:
            raise BadRequestError(
                f"this bookie is of cluster {self._cluster_id}, not {hello.cluster_id}"
            )
        bookie = self._bookie
        if (hello.bookie_name, hello.incarnation) != (bookie.name, bookie.incarnation):
            raise WrongIncarnationError(
                f"this is {bookie.name}, incarnation {bookie.incarnation}; "
                f"not {hello.bookie_name}, incarnation {hello.incarnation}"
            )
        # A newer client may know more features; both ends use only those that both know.
        self._features = hello.features & FEATURES
        self.is_over = True

    def welcome(self) -> list[Buffer]:
        """Return the answer to the HELLO of a client that is let in."""
        name, incarnation = self._bookie.name, self._bookie.incarnation
        return encode(Welcome(PROTOCOL_VERSION, self._features, name, incarnation))


class BookieEnd:
    """One connection.

    Args:
        bookie, cluster_id: for its greeting.
        memory: the memory for received bytes.
        room: the bound on the memory of big payloads.
    """

    def __init__(
        self, bookie: BookieId, cluster_id: str, memory: ReceiveMemory, room: Room | None = None
    ) -> None:
        self.greeting = Greeting(bookie, cluster_id)
        self._assembly = Assembly(memory, _GREETING, room)
        self.get_buffer = self._assembly.get_buffer
        self.received = self._assembly.received
        self.close = self._assembly.close
        self._last_id = 0
        self._windows: dict[int, int] = {}

    def next_event(self) -> BookieEvent | None:
        """Return the client's next message; None if none is whole.

        The caller answers a HELLO with `Greeting.welcome`.  CREDIT and CANCEL may name reads that
        ended.

        Raises:
            WireError: the client broke the protocol.
            WrongIncarnationError, BadRequestError: the client names another bookie or cluster, or
                speaks another version.
            BookieAccessDeniedError: the client is not let in.
        """
        frame = self._assembly.next_frame()
        if frame is None:
            return None
        message = decode(*frame)
        match message:
            case Hello():
                self.greeting.enter(message)
                self._assembly.expected = _REQUESTS
            case Add():
                self._take_ids(message.first_request_id, len(message.frames))
            case WriteLac() | ReadLac() | ReadHeld() | ReadEntry():
                self._take_ids(message.request_id, 1)
            case ReadEntries() | Follow():
                self._take_ids(message.request_id, 1)
                self._open_window(message.request_id, message.window_bytes)
            case Credit(request_id, size):
                # A CREDIT for a read that has ended was sent before its end arrived.
                if request_id in self._windows:
                    self._open_window(request_id, self._windows[request_id] + size)
            case _:
                assert isinstance(message, (Cancel, Authorize, Ping, Pong))
        return message

    def window_of(self, request_id: int) -> int:
        """Return the bytes left in a read's window; if any, a whole message may go out."""
        return self._windows.get(request_id, 0)

    def send(
        self, message: Durable | Failed | Lac | Held | Chunk | Update | Ping | Pong
    ) -> list[Buffer]:
        """Return a message's buffers, and take its size from its read's window."""
        buffers = encode(message)
        # LAC, HELD and DURABLE are small, so no window bounds them.
        if isinstance(message, (Chunk, Update)) and message.request_id in self._windows:
            self._windows[message.request_id] -= cost_of(message)
        return buffers

    def end(self, request_id: int) -> None:
        """Forget the window of a read that has ended."""
        self._windows.pop(request_id, None)

    def _take_ids(self, first: int, count: int) -> None:
        # Ids only ascend, so an id names one request for as long as the connection lives, and a
        # late CREDIT or CANCEL cannot reach another read.
        if not self._last_id < first <= REQUEST_ID_MAX - count:
            raise WireError(
                f"request id {first}: expected {self._last_id + 1} … {REQUEST_ID_MAX - count}"
            )
        self._last_id = first + count - 1

    def _open_window(self, request_id: int, window: int) -> None:
        if window > WINDOW_BYTES_MAX:
            raise WireError(
                f"read {request_id} with a window of {window} bytes: expected at most "
                f"{WINDOW_BYTES_MAX}"
            )
        self._windows[request_id] = window
