"""The metadata store on ZooKeeper: the session, and the operations of the port.

kazoo has its own threads; `call_soon_threadsafe` passes its callbacks to the event loop, which
never waits for kazoo.  `sending.py` has how requests reach it, `watches.py` how changes are heard.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from kazoo import exceptions as kazoo_errors
from kazoo.exceptions import KazooException
from kazoo.protocol.states import KazooState, KeeperState

from dlcore.access.zookeeper import EVERYBODY
from dlcore.base.background import BackgroundTasks, outcome_of, told_to_callers
from dlcore.base.config import SESSION_TIMEOUT_S
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    MetadataConnectionError,
    MetadataError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.metadata.answers import ConnectionHandler, in_thread, tell_if_large
from dlcore.metadata.kazoo_client import client_of
from dlcore.metadata.kazoo_log import KazooLog
from dlcore.metadata.port import (
    ANY_VERSION,
    Create,
    Op,
    Put,
    SessionState,
    StoreFigures,
    Unsubscribe,
    Versioned,
    require_request_size,
)
from dlcore.metadata.requests import (
    MultiRead,
    call,
    session_token_of,
    transaction_of,
    translate,
    versioned,
)
from dlcore.metadata.sending import Requests
from dlcore.metadata.session_states import SessionStates
from dlcore.metadata.watches import Watches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.access.zookeeper import ZooKeeperAccess

logger = logging.getLogger(__name__)

_READS_AT_ONCE = 500
"""Nodes read in one request; they have at most 1 KB, and readers of larger ones ask for fewer."""
_LISTS_AT_ONCE = 16
"""Lists of children read in one request: at a million logs these have some hundred KB."""
_NOT_TO_BLAME = (kazoo_errors.RolledBackError, kazoo_errors.RuntimeInconsistency)
"""ZooKeeper's errors for the operations of a failed transaction that did not cause the failure."""


class ZooKeeperStore:
    """A session with ZooKeeper; implements `MetadataStore`.  Created by `connect`."""

    def __init__(self, servers: str, *, session_timeout_s: float, access: ZooKeeperAccess) -> None:
        self._loop = asyncio.get_running_loop()
        self._session_token = ""
        self.figures = StoreFigures()
        self._states = SessionStates(SessionState.SUSPENDED, self.figures)
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        self._closings = BackgroundTasks(told_to_callers)
        self._revivals = BackgroundTasks()
        self._is_stopping = False  # by `aclose`, or at exit in another thread
        self._is_connected = asyncio.Event()
        self._kazoo_log = log = KazooLog(self._is_connected.is_set)
        self._client = client_of(servers, access, log, session_timeout_s=session_timeout_s)
        self._handler: ConnectionHandler = self._client.handler
        self._servers = servers
        self._pid = os.getpid()
        self._requests = Requests(
            self._client,
            self.figures.requests,
            timeout_s=session_timeout_s,
            is_connected=self._may_send,
            require_open=self._require_open,
            post=self._post,
        )
        self._watches = Watches(
            self._client, self._requests, is_connected=self._may_send, post=self._post
        )
        _left_open.add(self)

    @classmethod
    async def connect(
        cls,
        servers: str,
        *,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        connect_timeout_s: float = SESSION_TIMEOUT_S,
        access: ZooKeeperAccess = EVERYBODY,
    ) -> ZooKeeperStore:
        """Open a session with ZooKeeper at `servers` (``host:port,host:port``).

        `session_timeout_s` is also how long a request waits for its answer.

        Raises:
            MetadataConnectionError: no server answered within `connect_timeout_s`.
            ConfigurationError: a file of `access` cannot be read, or has wrong content.
        """
        times = {"session_timeout_s": session_timeout_s, "connect_timeout_s": connect_timeout_s}
        for key, value in times.items():
            if value <= 0:
                raise ConfigurationError(f"{key}={value!r}: expected seconds > 0")
        store = cls(servers, session_timeout_s=session_timeout_s, access=access)
        try:
            store._client.add_listener(store._on_kazoo_state)
            store._client.start_async()
            async with asyncio.timeout(connect_timeout_s):
                await store._is_connected.wait()
        except TimeoutError:
            await store.aclose()
            raise MetadataConnectionError(
                f"no ZooKeeper answers at {servers} (waited {connect_timeout_s:g} s)"
                + store._kazoo_log.explain(tls=store._handler.tls_failure)
            ) from None
        except BaseException:
            await store.aclose()
            raise
        return store

    def __repr__(self) -> str:
        return f"<ZooKeeperStore {self._servers} {self._session_token} {self._states.now.name}>"

    # MetadataStore

    async def get(self, path: str, *, fresh: bool = False) -> Versioned | None:
        """Return the node, or None if there is none."""
        try:
            value, stat = await self._requests.read(
                f"get {path}", lambda: self._client.get_async(path), sync=path if fresh else None
            )
        except NoNodeError:
            return None
        return versioned(value, stat)

    async def get_many(
        self, paths: Sequence[str], *, fresh: bool = False
    ) -> list[Versioned | None]:
        """Return the node of each path, None if there is none."""
        parts = [paths[at : at + _READS_AT_ONCE] for at in range(0, len(paths), _READS_AT_ONCE)]
        results = await asyncio.gather(*(self._get_some(tuple(part), fresh) for part in parts))
        return [node for part in results for node in part]

    async def _get_some(self, paths: tuple[str, ...], fresh: bool) -> list[Versioned | None]:
        found: list[Versioned | None] = await self._requests.read(
            f"get {len(paths)} nodes from {paths[0]}",
            lambda: call(self._client, MultiRead(paths)),
            sync=paths[0] if fresh else None,
        )
        sizes = (len(node.value) for node in found if node is not None)
        tell_if_large(f"{len(paths)} nodes from {paths[0]}", sum(sizes))
        return found

    async def get_children_many(self, paths: Sequence[str]) -> list[list[str] | None]:
        """Return the sorted names of each node's children, None where there is no node."""
        parts = [paths[at : at + _LISTS_AT_ONCE] for at in range(0, len(paths), _LISTS_AT_ONCE)]
        results = await asyncio.gather(*(self._list_some(tuple(part)) for part in parts))
        return [names for part in results for names in part]

    async def _list_some(self, paths: tuple[str, ...]) -> list[list[str] | None]:
        what = f"children of {len(paths)} nodes from {paths[0]}"
        request = MultiRead(paths, children=True)
        found = await self._requests.read(f"get {what}", lambda: call(self._client, request))
        tell_if_large(f"the {what}", sum(len(name) for names in found for name in names or ()))
        return [None if names is None else sorted(names) for names in found]

    async def get_children(self, path: str, *, fresh: bool = False) -> list[str] | None:
        """Return the sorted names of the node's children, or None if there is no node."""
        try:
            names = await self._requests.read(
                f"get children of {path}",
                lambda: self._client.get_children_async(path),
                sync=path if fresh else None,
            )
        except NoNodeError:
            return None
        tell_if_large(f"the children of {path}", sum(map(len, names)))
        return sorted(names)

    async def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, make_parents: bool = False
    ) -> None:
        """Create a node, at version 0; with `make_parents` also the missing ones above it."""

        def start() -> Any:
            return self._client.create_async(path, value, ephemeral=ephemeral)

        require_request_size([Create(path, value)])
        try:
            await self._requests.write(f"create {path}", start)
        except NoNodeError as error:
            above = path.rpartition("/")[0]
            if not make_parents or not above:
                raise NoNodeError(f"cannot create {path}: {above} does not exist") from error
            await self._make_parents(above)
            await self._requests.write(f"create {path}", start)

    async def _make_parents(self, path: str) -> None:
        try:
            await self.create(path, make_parents=True)
        except NodeExistsError:
            logger.debug("created by another client: path=%s", path)

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        """Compare-and-set the value; return the new version."""
        require_request_size([Put(path, value, version)])
        stat = await self._requests.write(
            f"put {path}", lambda: self._client.set_async(path, value, version)
        )
        return int(stat.version)

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        """Delete a node without children."""
        await self._requests.write(
            f"delete {path}", lambda: self._client.delete_async(path, version)
        )

    async def multi(self, ops: Sequence[Op]) -> None:
        """Apply all of `ops` in order, or none; raise the error of the first that fails."""
        if not ops:
            return
        require_request_size(frozen := tuple(ops))
        results = await self._requests.write(
            f"a transaction of {len(frozen)} operations from {frozen[0].path}",
            lambda: transaction_of(self._client, frozen).commit_async(),
        )
        for op, result in zip(frozen, results, strict=True):
            if isinstance(result, Exception) and not isinstance(result, _NOT_TO_BLAME):
                raise translate(result, f"{type(op).__name__.lower()} {op.path}") from result
        if any(isinstance(result, Exception) for result in results):
            raise MetadataError(f"a transaction of {len(frozen)} operations failed: {results}")

    async def secure(self, path: str) -> None:
        """Give a node to the user of this session alone, as those that it makes."""
        assert self._client.default_acl
        await self._requests.write(
            f"secure {path}", lambda: self._client.set_acls_async(path, self._client.default_acl)
        )

    async def sync(self, path: str) -> None:
        """Make all later reads and watches see every write completed before this call."""
        await self._requests.read(f"sync {path}", lambda: self._client.sync_async(path))

    def watch(
        self, path: str, callback: Callable[[], None], *, children: bool = True
    ) -> Unsubscribe:
        """Call `callback` on the loop after `path` or its list of children may have changed."""
        self._require_open()
        return self._watches.add(path, callback, children=children)

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
        return self._session_token

    async def aclose(self) -> None:
        """End the session; its ephemeral nodes vanish at once."""
        if self._closing is None:
            self._is_closed = True
            self._states.close()
            self._watches.close()
            self._closing = self._closings.start(self._close())
        # A cancelled caller must not leave kazoo's threads behind.
        await outcome_of(self._closing)

    async def _close(self) -> None:
        await self._revivals.finish()
        await in_thread(self._stop_client)
        _left_open.discard(self)  # not earlier: a child forked meanwhile must forget it
        self._requests.close()

    def _stop_client(self) -> None:
        self._is_stopping = True
        if not self._client.connected:
            self._handler.give_up()
        try:
            self._client.stop()
            self._client.close()
        except (KazooException, OSError) as error:
            # The session ends by its time-out then; the threads are daemons.
            logger.info("kazoo did not stop cleanly: servers=%s error=%r", self._servers, error)

    # The session

    def _on_kazoo_state(self, state: str) -> None:
        # In kazoo's connection thread, so the session id belongs to this state.
        session = self._client.client_id
        token = "" if session is None else session_token_of(session[0])
        is_dead = self._client.client_state == KeeperState.CLOSED
        self._post(self._on_state, state, token, is_dead)

    def _on_state(self, state: str, token: str, is_dead: bool) -> None:
        if self._is_closed:
            return
        if state == KazooState.CONNECTED:
            self._session_token = token
            self._set_state(SessionState.CONNECTED)
            self._watches.set_all()
            self._is_connected.set()
            self._requests.pump()
        elif state == KazooState.SUSPENDED:
            self._set_state(SessionState.SUSPENDED)
        else:
            self._set_state(SessionState.EXPIRED)
            if is_dead and not self._is_stopping:
                self._revivals.start(self._revive(), name="reviving kazoo")

    async def _revive(self) -> None:
        logger.error("kazoo's thread died, servers=%s; to do: report this defect", self._servers)
        await in_thread(self._client.start_async)

    def _set_state(self, state: SessionState) -> None:
        about = (state.value, self._servers, self._session_token)
        if state is SessionState.CONNECTED:
            logger.info("metadata session: state=%s servers=%s session=%s", *about)
        else:
            logger.warning(
                "metadata session: state=%s servers=%s session=%s; to do: wait, or see to the "
                "metadata server",
                *about,
            )
        self._states.become(state)

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The loop ended without aclose: there is no receiver.
            if not self._loop.is_closed():
                raise

    def _may_send(self) -> bool:
        return self._states.now is SessionState.CONNECTED

    def _require_open(self) -> None:
        if self._pid != os.getpid():
            raise ConfigurationError(
                f"this connection to ZooKeeper was opened in process {self._pid} and used after a "
                f"fork, in process {os.getpid()}: open the namespace in the process that uses it"
            )
        if self._is_closed:
            raise AlreadyClosedError("the metadata store is closed")


_left_open: weakref.WeakSet[ZooKeeperStore] = weakref.WeakSet()


def _end_sessions() -> None:
    """End at exit the sessions that are still open, so that their locks are free at once."""
    for store in list(_left_open):
        if not store._is_stopping:  # in a thread whose caller did not wait
            store._stop_client()


def _forget_sessions() -> None:
    """Leave the sessions to the parent process, also at exit."""
    for store in list(_left_open):
        # A thread that is gone here may have held a lock that it would use.
        atexit.unregister(store._client.handler.stop)
    _left_open.clear()


atexit.register(_end_sessions)
os.register_at_fork(after_in_child=_forget_sessions)
