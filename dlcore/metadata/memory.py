"""The metadata store in memory: ZooKeeper's semantics, on one event loop.

A `MemoryTree` is the server; each `connect` opens one session, a `MemoryStore`.  A request is
carried out at once, and its answer comes in the next turn of the loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from dlcore.base.errors import AlreadyClosedError
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


class MemoryTree:
    """The tree that all its sessions share."""

    def __init__(self) -> None:
        self._leader = Tree()
        self._watches: dict[int, Watches] = {}
        self._sessions = 0

    def connect(self) -> MemoryStore:
        """Open a session; call it inside the event loop that will use it."""
        return MemoryStore(self)

    def _open_session(self, watches: Watches) -> int:
        self._sessions += 1
        self._watches[self._sessions] = watches
        return self._sessions

    def _end_session(self, session: int) -> None:
        self._watches.pop(session, None)
        self._apply([Delete(path) for path in self._leader.owned_by(session)], session)

    def _apply(self, ops: Sequence[Op], session: int) -> None:
        changed = self._leader.apply(ops, session)
        for watches in list(self._watches.values()):
            watches.tell_of(changed)


@dataclass(slots=True, eq=False)
class _Watch:
    path: str
    callback: Callable[[], None]
    is_due: bool = False


class Watches:
    """The callbacks of one session; any number of changes before its turn make one call of each."""

    def __init__(self, states: SessionStates, later: Callable[[Callable[[], None]], None]) -> None:
        self._states = states
        self._later = later
        self._watches: dict[_Watch, None] = {}

    def __iter__(self) -> Iterator[_Watch]:
        return iter(list(self._watches))

    def add(self, path: str, callback: Callable[[], None]) -> Unsubscribe:
        """Watch a path; the first call comes soon."""
        watch = _Watch(path, callback)
        self._watches[watch] = None
        self.make_due(watch)

        def unsubscribe() -> None:
            self._watches.pop(watch, None)

        return unsubscribe

    def clear(self) -> None:
        """Forget all."""
        self._watches.clear()

    def tell_of(self, changed: Container[str]) -> None:
        """Call those whose paths have changed."""
        if self._states.now is SessionState.CONNECTED:
            for watch in self:
                if watch.path in changed:
                    self.make_due(watch)

    def make_due(self, watch: _Watch) -> None:
        """Make one call, unless one is due."""
        if not watch.is_due:
            watch.is_due = True
            self._later(lambda: self._tell(watch))

    def _tell(self, watch: _Watch) -> None:
        watch.is_due = False
        # Without a connection no change arrives; a reconnection makes every watch due.
        if watch in self._watches and self._states.now is SessionState.CONNECTED:
            watch.callback()


class MemoryStore:
    """One session with a `MemoryTree`; implements `MetadataStore`."""

    def __init__(self, tree: MemoryTree) -> None:
        self._tree = tree
        self.figures = StoreFigures()
        self._states = SessionStates(SessionState.CONNECTED, self.figures)
        self._watches = Watches(self._states, self._later)
        self._session = self._open_session()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_token} {self._states.now.name}>"

    async def get(self, path: str, *, fresh: bool = False) -> Versioned | None:
        """Return the node, or None if there is none."""
        return (await self.get_many([path], fresh=fresh))[0]

    async def get_many(
        self, paths: Sequence[str], *, fresh: bool = False
    ) -> list[Versioned | None]:
        """Return the node of each path, None if there is none, all from the same moment."""
        return await self._request(partial(self._look, tuple(paths), Node.versioned, fresh=fresh))

    async def get_children(self, path: str, *, fresh: bool = False) -> list[str] | None:
        """Return the sorted names of the node's children, or None if there is no node."""
        return (await self._request(partial(self._look, (path,), _names_in, fresh=fresh)))[0]

    async def get_children_many(self, paths: Sequence[str]) -> list[list[str] | None]:
        """Return the sorted names of each node's children, all from the same moment."""
        return await self._request(partial(self._look, tuple(paths), _names_in))

    async def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, make_parents: bool = False
    ) -> None:
        """Create a node, at version 0; with `make_parents` also the missing ones above it."""

        def write() -> None:
            if make_parents:
                missing = self._tree._leader.missing_above(path)
                self._tree._apply([Create(each) for each in missing], self._session)
            self._tree._apply([Create(path, value, ephemeral)], self._session)

        await self._write([Create(path, value)], write)

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        """Compare-and-set the value; return the new version."""
        ops = [Put(path, value, version)]

        def write() -> int:
            self._tree._apply(ops, self._session)
            node = self._tree._leader.find(path)
            assert node is not None
            return node.version

        return await self._write(ops, write)

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        """Delete a node without children."""
        await self.multi([Delete(path, version)])

    async def multi(self, ops: Sequence[Op]) -> None:
        """Apply all of `ops` in order, or none; raise the error of the first that fails."""
        frozen = tuple(ops)
        await self._write(frozen, lambda: self._tree._apply(frozen, self._session))

    async def sync(self, path: str) -> None:
        """Make all later reads and watches see every write completed before this call."""
        await self._request(lambda: None)

    def watch(
        self, path: str, callback: Callable[[], None], *, children: bool = True
    ) -> Unsubscribe:
        """Call `callback` on the loop after `path` or its list of children may have changed."""
        self._require_open()
        return self._watches.add(path, callback)

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
        return session_token_of(self._session)

    async def aclose(self) -> None:
        """End the session; its ephemeral nodes vanish at once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._watches.clear()
        self._states.close()
        self._tree._end_session(self._session)

    def _open_session(self) -> int:
        return self._tree._open_session(self._watches)

    def _look(
        self, paths: Sequence[str], view: Callable[[Node], T], *, fresh: bool = False
    ) -> list[T | None]:
        nodes = map(self._tree._leader.find, paths)
        return [None if node is None else view(node) for node in nodes]

    async def _write(self, ops: Sequence[Op], write: Callable[[], T]) -> T:
        require_request_size(ops)
        return await self._request(write)

    async def _request(self, action: Callable[[], T]) -> T:
        self._require_open()
        try:
            return action()
        finally:
            await asyncio.sleep(0)

    def _later(self, action: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(action)

    def _require_open(self) -> None:
        if self._is_closed:
            raise AlreadyClosedError("the metadata store is closed")


def _names_in(node: Node) -> list[str]:
    return sorted(node.children)
