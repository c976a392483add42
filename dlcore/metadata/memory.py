"""The metadata store in memory: ZooKeeper's semantics, with faults on demand, on one event loop.

A `MemoryTree` is the server; each `connect` opens one session, a `MemoryStore`.  There are no
threads and no clock but the loop's, so a run on a virtual-time loop is a function of its inputs.

With a `lag` each session reads from a server that follows the leader.  It may read old values, but
none older than its previous reads, its own writes, or its last `sync`.  A new session begins with
all earlier writes.  After a lost reply, reading back needs a `sync`.  Watches fire when the
session's server applies the change, and before the session can read it.

Faults: `disconnect`/`reconnect` (requests in flight fail as unknown), `expire` (the server ends the
session; a disconnected store learns this when it reconnects) and `lose_next_reply`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from dlcore.base.errors import (
    AlreadyClosedError,
    MetadataConnectionError,
    MetadataError,
    MetadataSessionExpiredError,
)
from dlcore.metadata.port import (
    ANY_VERSION,
    Create,
    Delete,
    Op,
    Put,
    SessionState,
    StoreFigures,
    Unsubscribe,
    Versioned,
    require_request_size,
)
from dlcore.metadata.session_states import SessionStates
from dlcore.metadata.tree import Node, Tree, session_token_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

T = TypeVar("T")


_LOG_MAX = 1000
"""Most transactions that may wait for a server without requests."""


class _Transaction(NamedTuple):
    """A transaction that the leader applied, and its time."""

    at: float
    ops: tuple[Op, ...]
    session: int


class MemoryTree:
    """The tree that all its sessions share.

    Args:
        latency: returns the travel time in seconds of each request, reply and watch event; without
            it they take one turn of the loop.  Messages of a session stay in order in each
            direction, as in ZooKeeper.
        lag: returns by how many seconds the server of a session is behind the leader; after it has
            caught up, another time is drawn.  Without it every session sees every write at once.
    """

    def __init__(
        self,
        *,
        latency: Callable[[], float] | None = None,
        lag: Callable[[], float] | None = None,
    ) -> None:
        self.latency = latency
        self.lag = lag
        self._leader = Tree()
        # Transactions that some server may not have applied.
        self._log: deque[_Transaction] = deque()
        self._applied = 0  # number of transactions
        self._servers: dict[int, _Server] = {}
        self._sessions = 0

    def connect(self) -> MemoryStore:
        """Open a session; call it inside the event loop that will use it."""
        return MemoryStore(self, asyncio.get_running_loop())

    def dump(self) -> dict[str, Versioned]:
        """Return every node by path, for checkers that compare it with their own truth."""
        return self._leader.dump()

    def _open_session(self, server: _Server) -> int:
        self._sessions += 1
        self._servers[self._sessions] = server
        return self._sessions

    def _end_session(self, session: int) -> None:
        self._servers.pop(session, None)
        self._apply([Delete(path) for path in self._leader.owned_by(session)], session)

    def _find(self, path: str) -> Node | None:
        return self._leader.find(path)

    def _apply(self, ops: Sequence[Op], session: int) -> None:
        changed = self._leader.apply(ops, session)
        if self.lag is None:
            for server in list(self._servers.values()):
                server.watches.tell_of(changed)
            return
        now = asyncio.get_running_loop().time()
        self._log.append(_Transaction(now, tuple(ops), session))
        self._applied += 1
        for server in list(self._servers.values()):
            server.expect(changed)
        self._trim()

    def _trim(self) -> None:
        """Forget transactions that all servers have applied; make slow servers apply theirs."""
        if len(self._log) > _LOG_MAX:
            for server in self._servers.values():
                server.follow()
        needed = min((each.position for each in self._servers.values()), default=self._applied)
        while self._applied - len(self._log) < needed:
            self._log.popleft()

    def _transactions_from(self, position: int) -> Iterator[_Transaction]:
        """Return the transactions after the first `position` ones."""
        start = position - (self._applied - len(self._log))
        return islice(self._log, start, None)


@dataclass(slots=True, eq=False)
class _Watch:
    path: str
    callback: Callable[[], None]
    is_due: bool = False


class _Watches:
    """The callbacks of one session; any number of changes before its turn make one call of each."""

    def __init__(self, states: SessionStates, later: Callable[[Callable[[], None]], None]) -> None:
        self._states = states
        self._later = later
        self._watches: dict[_Watch, None] = {}

    def __iter__(self) -> Iterator[_Watch]:
        return iter(list(self._watches))

    def add(self, watch: _Watch) -> Unsubscribe:
        self._watches[watch] = None

        def unsubscribe() -> None:
            self._watches.pop(watch, None)

        return unsubscribe

    def clear(self) -> None:
        self._watches.clear()

    def tell_of(self, changed: Container[str]) -> None:
        if self._states.now is SessionState.CONNECTED:
            for watch in self:
                if watch.path in changed:
                    self.make_due(watch)

    def make_due(self, watch: _Watch) -> None:
        if not watch.is_due:
            watch.is_due = True
            self._later(lambda: self._tell(watch))

    def _tell(self, watch: _Watch) -> None:
        watch.is_due = False
        # Without a connection no change arrives; a reconnection makes every watch due.
        if watch in self._watches and self._states.now is SessionState.CONNECTED:
            watch.callback()


class _Server:
    """The server that a session is connected to: a copy of the tree, which follows the leader."""

    def __init__(
        self, tree: MemoryTree, loop: asyncio.AbstractEventLoop, watches: _Watches
    ) -> None:
        self._tree = tree
        self._loop = loop
        self.watches = watches
        self._learning: asyncio.TimerHandle | None = None
        self.open_session()

    def open_session(self) -> None:
        tree = self._tree
        self.session = tree._open_session(self)
        # The session's start is a transaction, which its server has applied.
        self.view = tree._leader if tree.lag is None else tree._leader.copy()
        self.position = tree._applied
        self._lag_s = 0.0 if tree.lag is None else tree.lag()

    def look(
        self, paths: Sequence[str], view: Callable[[Node], T], *, fresh: bool = False
    ) -> list[T | None]:
        """Return a view of the node of each path, None if there is none."""
        self.follow(fresh=fresh)
        nodes = map(self.view.find, paths)
        return [None if node is None else view(node) for node in nodes]

    def catch_up(self) -> None:
        """Apply everything that the leader has applied."""
        self._advance(self._tree._applied)

    def follow(self, *, fresh: bool = False) -> None:
        """Apply the transactions that are older than the lag, or all."""
        if fresh:
            return self.catch_up()
        now = self._loop.time()
        new = self._tree._transactions_from(self.position)
        due = sum(1 for _ in takewhile(lambda each: each.at + self._lag_s <= now, new))
        return self._advance(self.position + due)

    def _advance(self, position: int) -> None:
        if self._tree.lag is None or position <= self.position:
            return
        fresh = self._tree._transactions_from(self.position)
        changed: dict[str, None] = {}
        for each in islice(fresh, position - self.position):
            changed |= self.view.apply(each.ops, each.session)
        self.position = position
        if position == self._tree._applied:
            self._lag_s = self._tree.lag()
        self.watches.tell_of(changed)

    def expect(self, changed: Container[str]) -> None:
        """Apply in time a change that a callback watches for."""
        if any(watch.path in changed for watch in self.watches):
            self.learn_later()

    def learn_later(self) -> None:
        if self._learning is None and self.position < self._tree._applied:
            first = next(self._tree._transactions_from(self.position))
            self._learning = self._loop.call_at(first.at + self._lag_s, self._learn)

    def _learn(self) -> None:
        self._learning = None
        if self._tree._servers.get(self.session) is self:  # the session still exists
            self.follow()
            self.learn_later()


@dataclass(slots=True, eq=False)
class _Request(Generic[T]):
    action: Callable[[], T]
    reply: asyncio.Future[T]
    catch_up: Callable[[], None] | None
    connection: int


class _Connection:
    """The way of requests to a session's server, and of replies and events back, each in order."""

    def __init__(self, tree: MemoryTree, loop: asyncio.AbstractEventLoop) -> None:
        self._tree = tree
        self._loop = loop
        self._number = 0  # requests on an earlier connection are lost
        self.lost_replies: list[bool] = []  # for each following write: is it applied?
        self._in_flight: dict[asyncio.Future[Any], None] = {}
        self._request_arrives_at = -math.inf
        self._reply_arrives_at = -math.inf

    def drop(self) -> None:
        """Fail the requests in flight as unknown; the next ones go over a new connection."""
        self._number += 1
        self._request_arrives_at = self._reply_arrives_at = -math.inf
        for reply in list(self._in_flight):
            _fail(reply, _connection_lost())
        self._in_flight.clear()

    def send(
        self, action: Callable[[], T], *, catch_up: Callable[[], None] | None
    ) -> asyncio.Future[T]:
        """Send a request; for a write, `catch_up` makes the server apply it before it answers."""
        reply: asyncio.Future[T] = self._loop.create_future()
        self._in_flight[reply] = None
        request = _Request(action, reply, catch_up, self._number)
        # A caller that stops waiting does not cancel its request, which still arrives.
        if self._tree.latency is None:
            self._arrive(request)
        else:
            self._request_arrives_at = self._next_arrival(self._request_arrives_at)
            self._loop.call_at(self._request_arrives_at, self._arrive, request)
        return reply

    def later(self, action: Callable[[], None]) -> None:
        """Act when a message that the server sends now arrives."""
        if self._tree.latency is None:
            self._loop.call_soon(action)
        else:
            self._reply_arrives_at = self._next_arrival(self._reply_arrives_at)
            self._loop.call_at(self._reply_arrives_at, action)

    def _next_arrival(self, previous: float) -> float:
        assert self._tree.latency is not None
        arrival = self._loop.time() + self._tree.latency()
        return max(arrival, math.nextafter(previous, math.inf))

    def _arrive(self, request: _Request[Any]) -> None:
        if request.connection != self._number:
            return
        lost = request.catch_up is not None and bool(self.lost_replies)
        is_applied = self.lost_replies.pop(0) if lost else True
        error: MetadataError | None = None
        result: object = None
        if is_applied:
            try:
                result = request.action()
            except MetadataError as failure:
                error = failure
        if lost:
            error = _connection_lost()
        elif request.catch_up is not None:
            request.catch_up()
        self.later(lambda: self._answer(request, result, error))

    def _answer(self, request: _Request[Any], result: object, error: MetadataError | None) -> None:
        if request.reply not in self._in_flight:
            return  # the connection was lost in between
        del self._in_flight[request.reply]
        if error is not None:
            _fail(request.reply, error)
        elif not request.reply.done():
            request.reply.set_result(result)


class MemoryStore:
    """One session with a `MemoryTree`; implements `MetadataStore`."""

    def __init__(self, tree: MemoryTree, loop: asyncio.AbstractEventLoop) -> None:
        self._tree = tree
        self.figures = StoreFigures()
        self._states = SessionStates(SessionState.CONNECTED, self.figures)
        self._connection = _Connection(tree, loop)
        self._watches = _Watches(self._states, self._connection.later)
        self._server = _Server(tree, loop, self._watches)
        self._is_closed = False
        self._is_expired_unseen = False

    def __repr__(self) -> str:
        return f"<MemoryStore {self.session_token} {self._states.now.name}>"

    # Faults

    def lose_next_reply(self, *, applied: bool) -> None:
        """Make the next write raise `MetadataConnectionError`, `applied` or not; calls queue up."""
        self._connection.lost_replies.append(applied)

    def disconnect(self) -> None:
        """Cut the connection: requests fail as unknown, the session remains at the server."""
        if self._is_closed or self._states.now is SessionState.SUSPENDED:
            return
        if self._states.now is SessionState.EXPIRED:
            # Its new session was not open yet, so it still needs one.
            self._is_expired_unseen = True
        self._connection.drop()
        self._states.become(SessionState.SUSPENDED)

    def reconnect(self) -> None:
        """Restore the connection; an expiry in between is reported now."""
        if self._is_closed or self._states.now is not SessionState.SUSPENDED:
            return
        if self._is_expired_unseen:
            self._is_expired_unseen = False
            self._begin_new_session()
        else:
            self._set_connected()

    def expire(self) -> None:
        """End the session at the server; its ephemeral nodes vanish now."""
        if self._is_closed or self._states.now is SessionState.EXPIRED or self._is_expired_unseen:
            return
        self._tree._end_session(self._server.session)
        if self._states.now is SessionState.SUSPENDED:
            self._is_expired_unseen = True
        else:
            self._connection.drop()
            self._begin_new_session()

    def _begin_new_session(self) -> None:
        self._states.become(SessionState.EXPIRED)
        self._connection.later(self._open_new_session)

    def _open_new_session(self) -> None:
        if not self._is_closed and self._states.now is SessionState.EXPIRED:
            self._server.open_session()
            self._set_connected()

    def _set_connected(self) -> None:
        self._states.become(SessionState.CONNECTED)
        for watch in self._watches:
            self._watches.make_due(watch)

    # MetadataStore

    async def get(self, path: str, *, fresh: bool = False) -> Versioned | None:
        """Return the node, or None if there is none."""
        return (await self.get_many([path], fresh=fresh))[0]

    async def get_many(
        self, paths: Sequence[str], *, fresh: bool = False
    ) -> list[Versioned | None]:
        """Return the node of each path, None if there is none, all from the same moment."""
        look = partial(self._server.look, tuple(paths), Node.versioned, fresh=fresh)
        return await self._request(look)

    async def get_children(self, path: str, *, fresh: bool = False) -> list[str] | None:
        """Return the sorted names of the node's children, or None if there is no node."""
        return (await self._request(partial(self._server.look, (path,), _names_in, fresh=fresh)))[0]

    async def get_children_many(self, paths: Sequence[str]) -> list[list[str] | None]:
        """Return the sorted names of each node's children, all from the same moment."""
        return await self._request(partial(self._server.look, tuple(paths), _names_in))

    async def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, make_parents: bool = False
    ) -> None:
        """Create a node, at version 0; with `make_parents` also the missing ones above it."""

        require_request_size([Create(path, value)])

        def write() -> None:
            if make_parents:
                missing = self._tree._leader.missing_above(path)
                self._tree._apply([Create(each) for each in missing], self._server.session)
            self._tree._apply([Create(path, value, ephemeral)], self._server.session)

        await self._request(write, is_write=True)

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        """Compare-and-set the value; return the new version."""

        require_request_size([Put(path, value, version)])

        def write() -> int:
            self._tree._apply([Put(path, value, version)], self._server.session)
            node = self._tree._find(path)
            assert node is not None
            return node.version

        return await self._request(write, is_write=True)

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        """Delete a node without children."""
        await self.multi([Delete(path, version)])

    async def multi(self, ops: Sequence[Op]) -> None:
        """Apply all of `ops` in order, or none; raise the error of the first that fails."""
        require_request_size(frozen := tuple(ops))
        await self._request(lambda: self._tree._apply(frozen, self._server.session), is_write=True)

    async def sync(self, path: str) -> None:
        """Make all later reads and watches see every write completed before this call."""
        await self._request(self._server.catch_up)

    def watch(
        self, path: str, callback: Callable[[], None], *, children: bool = True
    ) -> Unsubscribe:
        """Call `callback` on the loop after `path` or its list of children may have changed."""
        self._require_open()
        watch = _Watch(path, callback)
        unsubscribe = self._watches.add(watch)
        self._server.learn_later()
        self._watches.make_due(watch)
        return unsubscribe

    def on_session(self, callback: Callable[[SessionState], None]) -> Unsubscribe:
        """Call `callback` on the loop at every change of the session's state."""
        self._require_open()
        return self._states.subscribe(callback)

    @property
    def session_state(self) -> SessionState:
        """The current state."""
        return self._states.now

    @property
    def session_token(self) -> str:
        """Text that differs between any two sessions."""
        return session_token_of(self._server.session)

    async def aclose(self) -> None:
        """End the session; its ephemeral nodes vanish at once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._connection.drop()
        self._watches.clear()
        self._states.close()
        self._tree._end_session(self._server.session)

    # Requests and events

    async def _request(self, action: Callable[[], T], *, is_write: bool = False) -> T:
        self._require_open()
        if self._states.now is SessionState.SUSPENDED:
            raise _connection_lost()
        if self._states.now is SessionState.EXPIRED:
            raise MetadataSessionExpiredError("the metadata session expired; a new one is opening")
        catch_up = self._server.catch_up if is_write else None
        return await self._connection.send(action, catch_up=catch_up)

    def _require_open(self) -> None:
        if self._is_closed:
            raise AlreadyClosedError("the metadata store is closed")


def _names_in(node: Node) -> list[str]:
    return sorted(node.children)


def _fail(reply: asyncio.Future[Any], error: MetadataError) -> None:
    if not reply.done():
        reply.set_exception(error)


def _connection_lost() -> MetadataConnectionError:
    return MetadataConnectionError("the connection to the metadata store was lost: result unknown")
