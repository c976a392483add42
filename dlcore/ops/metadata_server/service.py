"""The decisions of the metadata server: sessions, requests, watches; pure.

Promises, in ZooKeeper's terms: a transaction is applied as a whole or not at all, in one order for
all; an answer and the news of a change are sent after the change is stored (`Store` comes before
them among the effects); a session that is silent for its time-out ends with its ephemeral nodes; a
watch tells the next change once, and before its session can read the change.

Sessions are stored, so that none ends because the server was restarted: after a start each has its
whole time-out again.  Watches belong to a connection and end with it; clients set them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, assert_never

from dlcore.base.errors import (
    MetadataVersionError,
    NodeExistsError,
    NodeNotEmptyError,
    NoNodeError,
)
from dlcore.base.machines import Machine, State, Transitions
from dlcore.metadata.port import Check, Create, Delete, Put
from dlcore.metadata.tree import Refusal, parent_of
from dlcore.ops.metadata_server import jute
from dlcore.ops.metadata_server.jute import Change, Code, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dlcore.base.errors import MetadataError
    from dlcore.metadata.port import Op
    from dlcore.metadata.tree import Node, Tree

_TIMEOUT_S_MIN = 1.0
_TIMEOUT_S_MAX = 60.0
_STALL_S = 2.0
"""A longer pause between two turns is this server's own, and no silence of its clients."""
_WATCHES_MAX = 100_000
"""Most watches of one connection, which ends beyond."""
_READS = {Kind.EXISTS: jute.stat_of, Kind.GET: jute.value_of, Kind.CHILDREN: jute.names_of}
_CODES: tuple[tuple[type[MetadataError], Code], ...] = (
    (NoNodeError, Code.NO_NODE),
    (MetadataVersionError, Code.WRONG_VERSION),
    (NodeExistsError, Code.NODE_EXISTS),
    (NodeNotEmptyError, Code.NOT_EMPTY),
)


@dataclass(frozen=True, slots=True)
class Session:
    """A session as it is stored; its number is never given again."""

    number: int
    password: bytes
    timeout_s: float


# Events


@dataclass(frozen=True, slots=True)
class Received:
    """A frame came on a connection; `password` is drawn, for a session that it may begin."""

    connection: int
    frame: bytes
    now_s: float
    password: bytes = b""


@dataclass(frozen=True, slots=True)
class Lost:
    """A connection has ended."""

    connection: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Some time has passed; it comes several times in the shortest time-out."""

    now_s: float


Event: TypeAlias = Received | Lost | Turn


# Effects


@dataclass(frozen=True, slots=True)
class Store:
    """Write to disk in one transaction, before any later effect."""

    number: int
    """The number of the latest transaction."""
    nodes: Mapping[str, Node | None] = field(default_factory=dict)
    """The nodes as they are now, None for one that is gone."""
    begun: Session | None = None
    ended: int | None = None
    """The number of a session that ended."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send bytes on a connection."""

    connection: int
    data: bytes


@dataclass(frozen=True, slots=True)
class End:
    """End a connection; `reason` is for the log, "" where the client asked for it."""

    connection: int
    reason: str = ""


Effect: TypeAlias = Store | Send | End


class SessionState(State):
    """The state of one session; ENDED is final."""

    AWAY = "its client has no connection"
    CONNECTED = "its client has a connection"
    ENDED = "its ephemeral nodes are gone"


_S = SessionState
TRANSITIONS = Transitions(
    _S.AWAY,
    {
        _S.AWAY: {_S.CONNECTED: "its client connects", _S.ENDED: "silent for its time-out"},
        _S.CONNECTED: {
            _S.AWAY: "the connection ends, or its client has another one",
            _S.ENDED: "its client ends it, or is silent for its time-out",
        },
        _S.ENDED: {},
    },
)
"""The transitions of each session.  The service itself has no states: it holds any number."""


class _Held(Machine[SessionState]):
    """A session that is held: its connection, and when it ends."""

    transitions = TRANSITIONS

    def __init__(self, session: Session, due_s: float) -> None:
        self.state = SessionState.AWAY
        self.session = session
        self.due_s = due_s
        self.connection: int | None = None

    def connect(self, connection: int) -> None:
        """Go on with a connection."""
        self._become(SessionState.CONNECTED)
        self.connection = connection

    def disconnect(self) -> None:
        """Wait for another connection, unless it has ended."""
        self.connection = None
        if self.state is not SessionState.ENDED:
            self._become(SessionState.AWAY)

    def end(self) -> None:
        """End it; its connection ends later."""
        self._become(SessionState.ENDED)


class _Watches:
    """The watches of all connections, by path, and by connection."""

    def __init__(self) -> None:
        self._by_path: dict[str, dict[int, None]] = {}
        self._by_connection: dict[int, dict[str, None]] = {}

    def add(self, path: str, connection: int) -> bool:
        """Add a watch; return whether its connection may have it."""
        paths = self._by_connection.setdefault(connection, {})
        if len(paths) >= _WATCHES_MAX:
            return False
        paths[path] = None
        self._by_path.setdefault(path, {})[connection] = None
        return True

    def take(self, path: str) -> list[int]:
        """Remove the watches of a path, and return their connections."""
        connections = list(self._by_path.pop(path, ()))
        for connection in connections:
            del self._by_connection[connection][path]
        return connections

    def remove(self, path: str, connection: int) -> bool:
        """Remove one watch; return whether there was one."""
        if path not in self._by_connection.get(connection, ()):
            return False
        del self._by_connection[connection][path]
        self._drop(path, connection)
        return True

    def forget(self, connection: int) -> None:
        """Remove all watches of a connection."""
        for path in self._by_connection.pop(connection, ()):
            self._drop(path, connection)

    def _drop(self, path: str, connection: int) -> None:
        connections = self._by_path[path]
        del connections[connection]
        if not connections:
            del self._by_path[path]


class MetadataService:
    """Serves a tree of nodes to sessions.

    Args:
        tree: the nodes as they are stored.
        sessions: the sessions as they are stored.
        number: the number of the latest transaction; sessions are numbered by it, too.
        now_s: the time of the start; each session has its whole time-out from then on.
    """

    transitions = TRANSITIONS

    def __init__(
        self, tree: Tree, sessions: Iterable[Session], *, number: int, now_s: float
    ) -> None:
        self._tree = tree
        self._number = number
        self._sessions = {each.number: _Held(each, now_s + each.timeout_s) for each in sessions}
        self._connections: dict[int, _Held] = {}
        self._values = _Watches()
        self._children = _Watches()
        self._turn_s = now_s

    @property
    def node_count(self) -> int:
        """The number of nodes, with the root."""
        return len(self._tree)

    @property
    def session_count(self) -> int:
        """The number of sessions, with those whose clients are away."""
        return len(self._sessions)

    @property
    def number(self) -> int:
        """The number of the latest transaction."""
        return self._number

    def handle(self, event: Event) -> list[Effect]:
        """Return the effects of an event, to be performed in their order."""
        match event:
            case Received(connection, frame, now_s):
                try:
                    held = self._connections.get(connection)
                    if held is None:
                        return self._connect(event, jute.connect_of(frame))
                    held.due_s = now_s + held.session.timeout_s
                    return self._serve(held, connection, frame)
                except jute.MalformedFrameError as error:
                    return self._hang_up(connection, str(error))
            case Lost(connection):
                self._forget(connection)
                return []
            case Turn(now_s):
                return self._turn(now_s)
            case _:
                assert_never(event)

    # Sessions

    def _connect(self, event: Received, request: jute.Connect) -> list[Effect]:
        connection = event.connection
        # As ZooKeeper: the client's view of the tree would go back in time.
        if request.last_seen > self._number:
            reason = f"it has seen transaction {request.last_seen}, the latest here is "
            return [End(connection, reason + f"{self._number}: this data is an older copy")]
        effects: list[Effect] = []
        if request.session == 0:
            self._number += 1
            wanted_s = request.timeout_ms / 1000
            timeout_s = min(max(wanted_s, _TIMEOUT_S_MIN), _TIMEOUT_S_MAX)
            session = Session(self._number, event.password, timeout_s)
            held = self._sessions[session.number] = _Held(session, 0.0)
            effects.append(Store(self._number, begun=session))
        else:
            found = self._sessions.get(request.session)
            if found is None or found.session.password != request.password:
                return [Send(connection, jute.connected(0, 0, bytes(16))), End(connection)]
            held, session = found, found.session
            if held.connection is not None:
                effects += self._hang_up(held.connection, "its session came by another connection")
        held.due_s = event.now_s + session.timeout_s
        held.connect(connection)
        self._connections[connection] = held
        timeout_ms = round(session.timeout_s * 1000)
        return [
            *effects,
            Send(connection, jute.connected(timeout_ms, session.number, session.password)),
        ]

    def _turn(self, now_s: float) -> list[Effect]:
        stall_s, self._turn_s = now_s - self._turn_s, now_s
        if stall_s > _STALL_S:
            for held in self._sessions.values():
                held.due_s += stall_s
        effects: list[Effect] = []
        for held in [each for each in self._sessions.values() if each.due_s <= now_s]:
            effects += self._end(held)
            if held.connection is not None:
                effects += self._hang_up(held.connection, "its session was silent for too long")
        return effects

    def _end(self, held: _Held) -> list[Effect]:
        """End a session: its ephemeral nodes vanish."""
        number = held.session.number
        held.end()
        del self._sessions[number]
        paths = self._tree.owned_by(number)
        self._number += 1
        ops = [Delete(path) for path in paths]
        self._tree.apply(ops, number)
        stored = Store(self._number, dict.fromkeys(paths), ended=number)
        return [stored, *self._news(ops)]

    def _hang_up(self, connection: int, reason: str) -> list[Effect]:
        self._forget(connection)
        return [End(connection, reason)]

    def _forget(self, connection: int) -> None:
        held = self._connections.pop(connection, None)
        if held is not None:
            held.disconnect()
        self._values.forget(connection)
        self._children.forget(connection)

    # Requests

    def _serve(self, held: _Held, connection: int, frame: bytes) -> list[Effect]:
        try:
            request = jute.request_of(frame)
        except jute.RefusedRequestError as refused:
            return [self._answer(connection, refused.request_id, refused.code)]
        match request:
            case jute.Write():
                return self._write(held, connection, request)
            case jute.Read():
                return self._read(connection, request)
            case jute.ReadMany(request_id, wanted):
                body = jute.joined([self._part(kind, path) for kind, path in wanted])
                return [self._answer(connection, request_id, Code.OK, body)]
            case jute.Plain():
                return self._plain(held, connection, request)
            case _:
                assert_never(request)

    def _plain(self, held: _Held, connection: int, request: jute.Plain) -> list[Effect]:
        code, body, effects = Code.OK, b"", []
        if request.kind is Kind.SYNC:
            body = jute.text(request.path)
        elif request.kind is Kind.REMOVE_WATCHES:
            had_value = self._values.remove(request.path, connection)
            had_children = self._children.remove(request.path, connection)
            code = Code.OK if had_value or had_children else Code.NO_WATCHER
        elif request.kind is Kind.CLOSE:
            effects = self._end(held)
        done: list[Effect] = [*effects, self._answer(connection, request.request_id, code, body)]
        return done + (self._hang_up(connection, "") if request.kind is Kind.CLOSE else [])

    def _read(self, connection: int, request: jute.Read) -> list[Effect]:
        node = self._tree.find(request.path)
        # As in ZooKeeper: only `exists` leaves a watch on a node that is not there.
        is_watched = request.watches and (node is not None or request.kind is Kind.EXISTS)
        watches = self._children if request.kind is Kind.CHILDREN else self._values
        if is_watched and not watches.add(request.path, connection):
            return self._hang_up(connection, f"it asked for more than {_WATCHES_MAX} watches")
        if node is None:
            return [self._answer(connection, request.request_id, Code.NO_NODE)]
        body = _READS[request.kind](node)
        return [self._answer(connection, request.request_id, Code.OK, body)]

    def _part(self, kind: Kind, path: str) -> bytes:
        node = self._tree.find(path)
        if node is None:
            return jute.failed_part(Code.NO_NODE)
        return jute.part(kind, _READS[kind](node))

    def _write(self, held: _Held, connection: int, request: jute.Write) -> list[Effect]:
        applied = self._tree.attempt(request.ops, held.session.number)
        if isinstance(applied, Refusal):
            code = _code_of(applied.error)
            if not request.is_multi:
                return [self._answer(connection, request.request_id, code)]
            after = len(request.ops) - applied.index - 1
            codes = [*[Code.OK] * applied.index, code, *[Code.INCONSISTENT] * after]
            body = jute.joined([jute.failed_part(each) for each in codes])
            return [self._answer(connection, request.request_id, Code.OK, body)]
        self._number += 1
        paths = {op.path: None for op in request.ops if not isinstance(op, Check)}
        nodes = {path: self._tree.find(path) for path in paths}
        results = [self._result(op) for op in request.ops]
        body = (
            jute.joined([jute.part(kind, result) for kind, result in results])
            if request.is_multi
            else results[0][1]
        )
        return [
            Store(self._number, nodes),
            *self._news(request.ops),
            self._answer(connection, request.request_id, Code.OK, body),
        ]

    def _result(self, op: Op) -> tuple[Kind, bytes]:
        match op:
            case Create():
                return Kind.CREATE, jute.text(op.path)
            case Put():
                node = self._tree.find(op.path)
                # A later part of the transaction may have deleted it.
                return Kind.PUT, jute.NO_STAT if node is None else jute.stat_of(node)
            case Delete():
                return Kind.DELETE, b""
            case Check():
                return Kind.CHECK, b""
            case _:
                assert_never(op)

    def _answer(self, connection: int, request_id: int, code: Code, body: bytes = b"") -> Send:
        return Send(connection, jute.answer(request_id, self._number, code, body))

    # Watches

    def _news(self, ops: Sequence[Op]) -> list[Effect]:
        """Return what the watches tell of a transaction."""
        effects: list[Effect] = []
        for op in ops:
            match op:
                case Create():
                    effects += self._tell(self._values.take(op.path), Change.CREATED, op.path)
                    effects += self._tell_parent(op.path)
                case Put():
                    effects += self._tell(self._values.take(op.path), Change.VALUE, op.path)
                case Delete():
                    # A connection that watches both gets one event, as from ZooKeeper.
                    watching = self._values.take(op.path) + self._children.take(op.path)
                    effects += self._tell(dict.fromkeys(watching), Change.DELETED, op.path)
                    effects += self._tell_parent(op.path)
                case Check():
                    pass
                case _:
                    assert_never(op)
        return effects

    def _tell_parent(self, path: str) -> list[Effect]:
        above = parent_of(path)
        return self._tell(self._children.take(above), Change.CHILDREN, above)

    def _tell(self, connections: Iterable[int], change: Change, path: str) -> list[Effect]:
        return [Send(each, jute.event(change, path)) for each in connections]

    def validate(self) -> None:
        """Assert what holds after each event; for tests."""
        for connection, held in self._connections.items():
            assert held.connection == connection
            assert self._sessions[held.session.number] is held
        for held in self._sessions.values():
            is_connected = held.state is SessionState.CONNECTED
            assert is_connected == (held.connection in self._connections)
            assert held.state is not SessionState.ENDED
        for watches in (self._values, self._children):
            assert set(watches._by_connection) <= set(self._connections)
            pairs = {(path, at) for path, each in watches._by_path.items() for at in each}
            assert pairs == {
                (path, at) for at, each in watches._by_connection.items() for path in each
            }
            assert all(watches._by_path.values())


def _code_of(error: MetadataError) -> Code:
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return Code.NO_CHILDREN_OF_EPHEMERALS  # the only other reason of a tree
