"""The metadata store in memory: ZooKeeper's semantics, with faults on demand, on one event loop.

A `MemoryTree` is the server; each `connect` opens one session, a `MemoryStore`.  There are no
threads and no clock but the loop's, so a run on a virtual-time loop is a function of its inputs.

Faults: `disconnect`/`reconnect` (what is in flight fails as unknown), `expire` (the server ends the
session; a disconnected store learns it when it reconnects) and `lose_next_reply`.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, assert_never

from dlcore.errors import (
    AlreadyClosedError,
    MetadataConnectionError,
    MetadataError,
    MetadataSessionExpiredError,
    MetadataVersionError,
    NodeExistsError,
    NodeNotEmptyError,
    NoNodeError,
)
from dlcore.metadata.port import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    Op,
    Put,
    SessionState,
    Unsubscribe,
    Versioned,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

T = TypeVar("T")


@dataclass(slots=True)
class _Node:
    value: bytes
    version: int = 0
    owner: int | None = None  # the session that an ephemeral node dies with
    children: dict[str, None] = field(default_factory=dict)  # a set that keeps its order


def parent_of(path: str) -> str:
    """Return the path of the node above `path`."""
    assert path.startswith("/")
    assert path != "/"
    return path.rpartition("/")[0] or "/"


class MemoryTree:
    """The tree that all its sessions share.

    `latency` gives the travel time in seconds of each request, reply and watch event; without it
    they take one turn of the loop.  Requests and replies of one session stay in order, as in
    ZooKeeper.
    """

    def __init__(self, *, latency: Callable[[], float] | None = None) -> None:
        self.latency = latency
        self._nodes: dict[str, _Node] = {"/": _Node(b"")}
        self._stores: dict[int, MemoryStore] = {}
        self._sessions = 0

    def connect(self) -> MemoryStore:
        """Open a session; call it inside the event loop that will use it."""
        return MemoryStore(self, asyncio.get_running_loop())

    def dump(self) -> dict[str, Versioned]:
        """Return every node by path: what a checker compares with its own truth."""
        return {path: _versioned(node) for path, node in sorted(self._nodes.items())}

    def _open_session(self, store: MemoryStore) -> int:
        self._sessions += 1
        self._stores[self._sessions] = store
        return self._sessions

    def _end_session(self, session: int) -> None:
        self._stores.pop(session, None)
        owned = [path for path, node in self._nodes.items() if node.owner == session]
        self._apply([Delete(path) for path in owned], session)

    def _find(self, path: str) -> _Node | None:
        return self._nodes.get(path)

    def _apply(self, ops: Sequence[Op], session: int) -> None:
        undo: list[Callable[[], None]] = []
        changed: dict[str, None] = {}
        try:
            for op in ops:
                changed.update(dict.fromkeys(self._apply_one(op, session, undo)))
        except MetadataError:
            for step in reversed(undo):
                step()
            raise
        for store in list(self._stores.values()):
            store._tell_watchers(changed)

    def _apply_one(self, op: Op, session: int, undo: list[Callable[[], None]]) -> Iterable[str]:
        match op:
            case Create():
                return self._create(op, session, undo)
            case Put():
                node = self._require(op.path, op.version)
                before = (node.value, node.version)
                undo.append(lambda: _restore(node, *before))
                node.value, node.version = op.value, node.version + 1
                return (op.path,)
            case Delete():
                return self._delete(op, undo)
            case Check():
                self._require(op.path, op.version)
                return ()
            case _:
                assert_never(op)

    def _create(self, op: Create, session: int, undo: list[Callable[[], None]]) -> Iterable[str]:
        above = parent_of(op.path)
        parent = self._nodes.get(above)
        if parent is None:
            raise NoNodeError(f"cannot create {op.path}: {above} does not exist")
        if op.path in self._nodes:
            raise NodeExistsError(f"{op.path} exists")
        if parent.owner is not None:
            raise MetadataError(f"cannot create {op.path}: {above} is ephemeral")
        name = op.path.rpartition("/")[2]
        parent.children[name] = None
        self._nodes[op.path] = _Node(op.value, owner=session if op.ephemeral else None)
        undo.append(lambda: parent.children.pop(name))
        undo.append(lambda: _discard(self._nodes, op.path))
        return (op.path, above)

    def _delete(self, op: Delete, undo: list[Callable[[], None]]) -> Iterable[str]:
        node = self._require(op.path, op.version)
        if node.children:
            raise NodeNotEmptyError(f"cannot delete {op.path}: it has children")
        above = parent_of(op.path)
        parent = self._nodes[above]
        name = op.path.rpartition("/")[2]
        children = dict(parent.children)
        del parent.children[name]
        del self._nodes[op.path]
        undo.append(lambda: setattr(parent, "children", children))
        undo.append(lambda: self._nodes.__setitem__(op.path, node))
        return (op.path, above)

    def _require(self, path: str, version: int) -> _Node:
        node = self._nodes.get(path)
        if node is None:
            raise NoNodeError(f"{path} does not exist")
        if version not in (ANY_VERSION, node.version):
            raise MetadataVersionError(f"{path} has version {node.version}, not {version}")
        return node


def _restore(node: _Node, value: bytes, version: int) -> None:
    node.value, node.version = value, version


def _discard(nodes: dict[str, _Node], path: str) -> None:
    del nodes[path]


def _versioned(node: _Node) -> Versioned:
    return Versioned(node.value, node.version, node.owner is not None)


@dataclass(slots=True, eq=False)
class _Watch:
    path: str
    callback: Callable[[], None]
    is_due: bool = False


@dataclass(slots=True, eq=False)
class _Request(Generic[T]):
    action: Callable[[], T]
    reply: asyncio.Future[T]
    is_write: bool
    connection: int


class MemoryStore:
    """One session with a `MemoryTree`; implements `MetadataStore`."""

    def __init__(self, tree: MemoryTree, loop: asyncio.AbstractEventLoop) -> None:
        self._tree = tree
        self._loop = loop
        self._session = tree._open_session(self)
        self._state = SessionState.CONNECTED
        self._connection = 0  # counts connections: what was sent on an earlier one is lost
        self._is_closed = False
        self._is_expired_unseen = False
        self._lost_replies: list[bool] = []  # for each write to come: is it applied?
        self._in_flight: dict[asyncio.Future[Any], None] = {}
        self._request_arrives_at = -math.inf
        self._reply_arrives_at = -math.inf
        self._watches: dict[_Watch, None] = {}
        self._session_callbacks: dict[int, Callable[[SessionState], None]] = {}
        self._subscriptions = 0

    def __repr__(self) -> str:
        return f"<MemoryStore {self.session_token} {self._state.name}>"

    # Faults

    def lose_next_reply(self, *, applied: bool) -> None:
        """Let the next write end in `MetadataConnectionError`, `applied` or not; calls queue up."""
        self._lost_replies.append(applied)

    def disconnect(self) -> None:
        """Cut the connection: requests fail as unknown, the session lives on at the server."""
        if self._is_closed or self._state is SessionState.SUSPENDED:
            return
        if self._state is SessionState.EXPIRED:
            self._is_expired_unseen = True  # its new session was not open yet: it still needs one
        self._drop_connection()
        self._set_state(SessionState.SUSPENDED)

    def reconnect(self) -> None:
        """Restore the connection; an expiry meanwhile is noticed now."""
        if self._is_closed or self._state is not SessionState.SUSPENDED:
            return
        if self._is_expired_unseen:
            self._is_expired_unseen = False
            self._begin_new_session()
        else:
            self._set_connected()

    def expire(self) -> None:
        """End the session at the server; its ephemeral nodes vanish now."""
        if self._is_closed or self._state is SessionState.EXPIRED or self._is_expired_unseen:
            return
        self._tree._end_session(self._session)
        if self._state is SessionState.SUSPENDED:
            self._is_expired_unseen = True
        else:
            self._drop_connection()
            self._begin_new_session()

    def _begin_new_session(self) -> None:
        self._set_state(SessionState.EXPIRED)
        self._later(self._open_new_session)

    def _open_new_session(self) -> None:
        if not self._is_closed and self._state is SessionState.EXPIRED:
            self._session = self._tree._open_session(self)
            self._set_connected()

    def _set_connected(self) -> None:
        self._set_state(SessionState.CONNECTED)
        for watch in list(self._watches):
            self._make_due(watch)

    def _set_state(self, state: SessionState) -> None:
        self._state = state
        for key in list(self._session_callbacks):
            self._loop.call_soon(self._tell_state, key, state)

    def _tell_state(self, key: int, state: SessionState) -> None:
        callback = self._session_callbacks.get(key)
        if callback is not None and not self._is_closed:
            callback(state)

    def _drop_connection(self) -> None:
        self._connection += 1
        self._request_arrives_at = self._reply_arrives_at = -math.inf
        for reply in list(self._in_flight):
            _fail(reply, _connection_lost())
        self._in_flight.clear()

    # MetadataStore

    async def get(self, path: str) -> Versioned | None:
        """Return the node, or None if there is none."""

        def read() -> Versioned | None:
            node = self._tree._find(path)
            return None if node is None else _versioned(node)

        return await self._request(read)

    async def get_children(self, path: str) -> list[str] | None:
        """Return the sorted names of the node's children, or None if there is no node."""

        def read() -> list[str] | None:
            node = self._tree._find(path)
            return None if node is None else sorted(node.children)

        return await self._request(read)

    async def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, make_parents: bool = False
    ) -> None:
        """Create a node, at version 0; with `make_parents` also the missing ones above it."""

        def write() -> None:
            if make_parents:
                self._make_parents(path)
            self._tree._apply([Create(path, value, ephemeral)], self._session)

        await self._request(write, is_write=True)

    def _make_parents(self, path: str) -> None:
        missing: list[str] = []
        above = parent_of(path)
        while self._tree._find(above) is None:
            missing.append(above)
            above = parent_of(above)
        self._tree._apply([Create(each) for each in reversed(missing)], self._session)

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        """Compare-and-set the value; return the new version."""

        def write() -> int:
            self._tree._apply([Put(path, value, version)], self._session)
            node = self._tree._find(path)
            assert node is not None
            return node.version

        return await self._request(write, is_write=True)

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        """Delete a node without children."""
        await self.multi([Delete(path, version)])

    async def multi(self, ops: Sequence[Op]) -> None:
        """Apply all of `ops` in order, or none; raise the error of the first that fails."""
        frozen = tuple(ops)
        await self._request(lambda: self._tree._apply(frozen, self._session), is_write=True)

    async def sync(self, path: str) -> None:
        """Wait for a round trip; the tree has one copy, so reads are never behind."""
        await self._request(lambda: None)

    def watch(self, path: str, callback: Callable[[], None]) -> Unsubscribe:
        """Call `callback` on the loop after `path` or its list of children may have changed."""
        self._require_open()
        watch = _Watch(path, callback)
        self._watches[watch] = None
        self._make_due(watch)

        def unsubscribe() -> None:
            self._watches.pop(watch, None)

        return unsubscribe

    def on_session(self, callback: Callable[[SessionState], None]) -> Unsubscribe:
        """Call `callback` on the loop with every change of the session's state."""
        self._require_open()
        self._subscriptions += 1
        key = self._subscriptions
        self._session_callbacks[key] = callback

        def unsubscribe() -> None:
            self._session_callbacks.pop(key, None)

        return unsubscribe

    @property
    def session_state(self) -> SessionState:
        """The state right now."""
        return self._state

    @property
    def session_token(self) -> str:
        """Text that differs between any two sessions."""
        return f"memory-{self._session}"

    async def aclose(self) -> None:
        """End the session; its ephemeral nodes vanish at once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._drop_connection()
        self._watches.clear()
        self._session_callbacks.clear()
        self._state = SessionState.EXPIRED
        self._tree._end_session(self._session)

    # Requests and events

    async def _request(self, action: Callable[[], T], *, is_write: bool = False) -> T:
        self._require_open()
        if self._state is SessionState.SUSPENDED:
            raise _connection_lost()
        if self._state is SessionState.EXPIRED:
            raise MetadataSessionExpiredError("the metadata session expired; a new one is opening")
        reply: asyncio.Future[T] = self._loop.create_future()
        self._in_flight[reply] = None
        request = _Request(action, reply, is_write, self._connection)
        # A caller that stops waiting does not take its request back: it arrives all the same.
        if self._tree.latency is None:
            self._arrive(request)
        else:
            self._request_arrives_at = self._next_arrival(self._request_arrives_at)
            self._loop.call_at(self._request_arrives_at, self._arrive, request)
        return await reply

    def _next_arrival(self, previous: float) -> float:
        assert self._tree.latency is not None
        arrival = self._loop.time() + self._tree.latency()
        return max(arrival, math.nextafter(previous, math.inf))

    def _arrive(self, request: _Request[Any]) -> None:
        if request.connection != self._connection:
            return
        lost = request.is_write and bool(self._lost_replies)
        is_applied = self._lost_replies.pop(0) if lost else True
        error: MetadataError | None = None
        result: object = None
        if is_applied:
            try:
                result = request.action()
            except MetadataError as failure:
                error = failure
        if lost:
            error = _connection_lost()
        if self._tree.latency is None:
            self._loop.call_soon(self._answer, request, result, error)
        else:
            self._reply_arrives_at = self._next_arrival(self._reply_arrives_at)
            self._loop.call_at(self._reply_arrives_at, self._answer, request, result, error)

    def _answer(self, request: _Request[Any], result: object, error: MetadataError | None) -> None:
        if request.reply not in self._in_flight:
            return  # the connection was lost on the way
        del self._in_flight[request.reply]
        if error is not None:
            _fail(request.reply, error)
        elif not request.reply.done():
            request.reply.set_result(result)

    def _tell_watchers(self, changed: Container[str]) -> None:
        if self._state is SessionState.CONNECTED:
            for watch in list(self._watches):
                if watch.path in changed:
                    self._make_due(watch)

    def _make_due(self, watch: _Watch) -> None:
        if not watch.is_due:
            watch.is_due = True
            self._later(lambda: self._tell(watch))

    def _tell(self, watch: _Watch) -> None:
        watch.is_due = False
        # Without a connection nothing is heard; the reconnection makes every watch due.
        if watch in self._watches and self._state is SessionState.CONNECTED:
            watch.callback()

    def _later(self, action: Callable[[], None]) -> None:
        if self._tree.latency is None:
            self._loop.call_soon(action)
        else:
            self._loop.call_later(self._tree.latency(), action)

    def _require_open(self) -> None:
        if self._is_closed:
            raise AlreadyClosedError("the metadata store is closed")


def _fail(reply: asyncio.Future[Any], error: MetadataError) -> None:
    if not reply.done():
        reply.set_exception(error)


def _connection_lost() -> MetadataConnectionError:
    return MetadataConnectionError("the connection to the metadata store was lost: result unknown")
