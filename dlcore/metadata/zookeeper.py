"""The metadata store on ZooKeeper: with `requests.py` the only file that uses kazoo.

kazoo has its own threads; `call_soon_threadsafe` passes its callbacks to the event loop, which
never waits for kazoo.  Requests are sent in order, while connected, `_OUTSTANDING_MAX` at a time:
kazoo wakes its thread through a socket that would block the loop if too many were queued.

A write whose reply is lost is never sent again (`MetadataConnectionError`: unknown), reads are.
`MetadataSessionExpiredError` from a write means that ZooKeeper refused it: it did not happen.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from kazoo import exceptions as kazoo_errors
from kazoo.exceptions import KazooException
from kazoo.protocol.states import EventType, KazooState, KeeperState, WatchedEvent

from dlcore.access.zookeeper import EVERYBODY
from dlcore.base.background import BackgroundTasks, outcome_of, told_to_callers
from dlcore.base.config import SESSION_TIMEOUT_S
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    MetadataConnectionError,
    MetadataError,
    MetadataSessionExpiredError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.metadata.answers import ConnectionHandler, answer_in_time, in_thread, tell_if_large
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
    RemoveWatches,
    Request,
    Sync,
    Watch,
    session_token_of,
    transaction_of,
    translate,
    versioned,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.access.zookeeper import ZooKeeperAccess

logger = logging.getLogger(__name__)

_OUTSTANDING_MAX = 100
"""Linux lets about 270 wake-up bytes wait in kazoo's socket pair before a send blocks."""
_READS_AT_ONCE = 500
"""Nodes read in one request; they have at most 1 KB, and readers of larger ones ask for fewer."""
_LISTS_AT_ONCE = 16
"""Lists of children read in one request: at a million logs these have some hundred KB."""
_READ_ATTEMPTS_MAX = 4
_ARMED_AGAIN_S = 1.0
"""Pause before a watch that a server refused is set again, if the connection has stayed."""
_NOT_TO_BLAME = (kazoo_errors.RolledBackError, kazoo_errors.RuntimeInconsistency)
"""ZooKeeper's errors for the operations of a failed transaction that did not cause the failure."""


class ZooKeeperStore:
    """A session with ZooKeeper; implements `MetadataStore`.  Created by `connect`."""

    def __init__(self, servers: str, *, session_timeout_s: float, access: ZooKeeperAccess) -> None:
        self._loop = asyncio.get_running_loop()
        self._request_timeout_s = session_timeout_s
        self._state = SessionState.SUSPENDED
        self._session_token = ""
        self.figures = StoreFigures()
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        self._closings = BackgroundTasks(told_to_callers)
        self._revivals = BackgroundTasks()
        self._is_stopping = False  # by `aclose`, or at exit in another thread
        self._backlog: deque[Request] = deque()
        self._outstanding: set[Request] = set()
        self._sync: Sync | None = None  # of the reads that began in this turn of the loop
        self._watches: dict[str, dict[Watch, None]] = {}
        self._unarmed: set[str] = set()  # paths whose watches could not be set
        self._arming_again: asyncio.TimerHandle | None = None
        self._session_callbacks: dict[object, Callable[[SessionState], None]] = {}
        self._is_connected = asyncio.Event()
        self._kazoo_log = log = KazooLog(self._is_connected.is_set)
        self._client = client_of(servers, access, log, session_timeout_s=session_timeout_s)
        self._handler: ConnectionHandler = self._client.handler
        self._servers = servers
        self._pid = os.getpid()
        _left_open.add(self)
        # kazoo compares watchers for equality: one object for all keeps its sets small.
        self._watcher = self._on_watch_event

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
        return f"<ZooKeeperStore {self._servers} {self._session_token} {self._state.name}>"

    # MetadataStore

    async def get(self, path: str, *, fresh: bool = False) -> Versioned | None:
        """Return the node, or None if there is none."""
        try:
            value, stat = await self._read(
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
        found: list[Versioned | None] = await self._read(
            f"get {len(paths)} nodes from {paths[0]}",
            lambda: self._call(MultiRead(paths)),
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
        found = await self._read(f"get {what}", lambda: self._call(request))
        tell_if_large(f"the {what}", sum(len(name) for names in found for name in names or ()))
        return [None if names is None else sorted(names) for names in found]

    def _call(self, request: MultiRead | RemoveWatches) -> Any:
        answer = self._client.handler.async_result()
        self._client._call(request, answer)
        return answer

    async def get_children(self, path: str, *, fresh: bool = False) -> list[str] | None:
        """Return the sorted names of the node's children, or None if there is no node."""
        try:
            names = await self._read(
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
            await self._write(f"create {path}", start)
        except NoNodeError as error:
            above = path.rpartition("/")[0]
            if not make_parents or not above:
                raise NoNodeError(f"cannot create {path}: {above} does not exist") from error
            await self._make_parents(above)
            await self._write(f"create {path}", start)

    async def _make_parents(self, path: str) -> None:
        try:
            await self.create(path, make_parents=True)
        except NodeExistsError:
            logger.debug("created by another client: path=%s", path)

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        """Compare-and-set the value; return the new version."""
        require_request_size([Put(path, value, version)])
        stat = await self._write(
            f"put {path}", lambda: self._client.set_async(path, value, version)
        )
        return int(stat.version)

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        """Delete a node without children."""
        await self._write(f"delete {path}", lambda: self._client.delete_async(path, version))

    async def multi(self, ops: Sequence[Op]) -> None:
        """Apply all of `ops` in order, or none; raise the error of the first that fails."""
        if not ops:
            return
        require_request_size(frozen := tuple(ops))
        results = await self._write(
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
        await self._write(
            f"secure {path}", lambda: self._client.set_acls_async(path, self._client.default_acl)
        )

    async def sync(self, path: str) -> None:
        """Make all later reads and watches see every write completed before this call."""
        await self._read(f"sync {path}", lambda: self._client.sync_async(path))

    def watch(
        self, path: str, callback: Callable[[], None], *, children: bool = True
    ) -> Unsubscribe:
        """Call `callback` on the loop after `path` or its list of children may have changed."""
        self._require_open()
        watch = Watch(callback, children)
        others = self._watches.setdefault(path, {})
        is_armed = any(other.children or not children for other in others)
        others[watch] = None
        if not is_armed:
            self._arm(path)
        self._make_due(path, watch)

        def unsubscribe() -> None:
            watches = self._watches.get(path, {})
            watches.pop(watch, None)
            if not watches and self._watches.pop(path, None) is not None:
                self._disarm(path)

        return unsubscribe

    def on_session(self, callback: Callable[[SessionState], None]) -> Unsubscribe:
        """Call `callback` on the loop at every change of the session's state."""
        self._require_open()
        key = object()
        self._session_callbacks[key] = callback

        def unsubscribe() -> None:
            self._session_callbacks.pop(key, None)

        return unsubscribe

    @property
    def session_state(self) -> SessionState:
        """The current state."""
        return self._state

    @property
    def session_token(self) -> str:
        """Text that differs between any two sessions."""
        return self._session_token

    async def aclose(self) -> None:
        """End the session; its ephemeral nodes vanish at once."""
        if self._closing is None:
            self._is_closed = True
            self._state = SessionState.EXPIRED
            self._watches.clear()
            self._session_callbacks.clear()
            if self._arming_again is not None:
                self._arming_again.cancel()
            self._closing = self._closings.start(self._close())
        # A cancelled caller must not leave kazoo's threads behind.
        await outcome_of(self._closing)

    async def _close(self) -> None:
        await self._revivals.finish()
        await in_thread(self._stop_client)
        _left_open.discard(self)  # not earlier: a child forked meanwhile must forget it
        for request in (*self._outstanding, *self._backlog):
            if not request.reply.done():
                request.reply.set_exception(
                    MetadataConnectionError("the metadata store was closed: result unknown")
                )
        self._outstanding.clear()
        self._backlog.clear()

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

    # Requests

    async def _read(self, what: str, start: Callable[[], Any], *, sync: str | None = None) -> Any:
        send = partial(self._send if sync is None else partial(self._send_after_sync, sync), what)
        async with answer_in_time(what, self._request_timeout_s, self.figures.requests):
            for _ in range(_READ_ATTEMPTS_MAX - 1):
                try:
                    return await send(start)
                except (MetadataConnectionError, MetadataSessionExpiredError):
                    logger.debug("read again: operation=%s", what)
            return await send(start)

    async def _send_after_sync(self, path: str, what: str, start: Callable[[], Any]) -> Any:
        """Send a read right behind a sync: both are answered in this order, or both fail.

        Reads that begin in one turn of the loop share a sync, which is sent after all have begun.
        """
        self._require_open()
        if self._sync is None:
            self._sync = Sync(self._loop.create_future())
            self._loop.call_soon(self._send_begun, path)
        sync, read = self._sync, Request(what, start, self._loop.create_future())
        sync.reads[read] = None
        try:
            await outcome_of(sync.reply)
            return await read.reply
        finally:
            read.reply.cancel()  # no caller waits for it any more
            del sync.reads[read]
            if not sync.reads:
                sync.reply.cancel()

    def _send_begun(self, path: str) -> None:
        sync, self._sync = self._sync, None
        assert sync is not None
        start = partial(self._client.sync_async, path)
        self._backlog += [Request(f"sync {path}", start, sync.reply), *sync.reads]
        self._pump()

    async def _write(self, what: str, start: Callable[[], Any]) -> Any:
        async with answer_in_time(what, self._request_timeout_s, self.figures.requests):
            return await self._send(what, start)

    async def _send(self, what: str, start: Callable[[], Any]) -> Any:
        self._require_open()
        return await self._enqueue(what, start)

    def _enqueue(self, what: str, start: Callable[[], Any]) -> asyncio.Future[Any]:
        request = Request(what, start, self._loop.create_future())
        self._backlog.append(request)
        self._pump()
        return request.reply

    def _pump(self) -> None:
        while (
            self._backlog
            and self._state is SessionState.CONNECTED
            and len(self._outstanding) < _OUTSTANDING_MAX
        ):
            request = self._backlog.popleft()
            if request.reply.done():
                continue  # no caller waits for it any more, so it is not sent
            self._outstanding.add(request)
            try:
                request.start().rawlink(partial(self._on_kazoo_answer, request))
            except Exception as error:  # noqa: BLE001  # kazoo checks arguments by raising anything
                self._on_answer(request, None, error)

    def _on_kazoo_answer(self, request: Request, answer: Any) -> None:
        # In a thread of kazoo, and sometimes twice for one request.
        self._post(self._on_answer, request, answer.value, answer.exception)

    def _on_answer(self, request: Request, value: Any, error: Exception | None) -> None:
        if request not in self._outstanding:
            return
        self._outstanding.remove(request)
        if not request.reply.done():
            if error is None:
                request.reply.set_result(value)
            else:
                translated = translate(error, request.what)
                translated.__cause__ = error
                request.reply.set_exception(translated)
        self._pump()

    # Watches

    def _arm(self, path: str) -> None:
        if self._state is not SessionState.CONNECTED:
            return  # a new connection sets every watch
        self._enqueue(
            f"watch {path}", lambda: self._client.exists_async(path, watch=self._watcher)
        ).add_done_callback(partial(self._on_armed, path))
        if any(watch.children for watch in self._watches[path]):
            self._enqueue(
                f"watch children of {path}",
                lambda: self._client.get_children_async(path, watch=self._watcher),
            ).add_done_callback(partial(self._on_armed, path))

    def _disarm(self, path: str) -> None:
        """Remove a watch without callbacks, also from the lists of the server and of kazoo."""
        if self._state is SessionState.CONNECTED:
            request = RemoveWatches(path, self._forget)
            reply = self._enqueue(f"unwatch {path}", lambda: self._call(request))
            reply.add_done_callback(partial(self._on_armed, path))

    def _forget(self, path: str) -> None:
        # In kazoo's connection thread, like all changes of these dicts.
        self._client._data_watchers.pop(path, None)
        self._client._child_watchers.pop(path, None)

    def _on_armed(self, path: str, reply: asyncio.Future[Any]) -> None:
        error = None if reply.cancelled() else reply.exception()
        # A missing node has no children to watch; a watch that fired is removed.
        is_removed = error is not None and isinstance(error.__cause__, kazoo_errors.NoWatcherError)
        if error is None or isinstance(error, NoNodeError) or is_removed or self._is_closed:
            return
        if not isinstance(error, MetadataConnectionError | MetadataSessionExpiredError):
            logger.error("a watch is not armed: %s; to do: nothing, it is tried again", error)
        # Mostly the connection is lost, and the next one sets every watch.
        self._unarmed.add(path)
        if self._arming_again is None:
            self._arming_again = self._loop.call_later(_ARMED_AGAIN_S, self._arm_again)

    def _arm_again(self) -> None:
        paths, self._unarmed, self._arming_again = self._unarmed, set(), None
        if self._state is SessionState.CONNECTED:
            for path in paths:
                self._on_change(path)

    def _on_watch_event(self, event: WatchedEvent) -> None:
        # In a thread of kazoo.  NONE reports a lost connection, which also comes as a state.
        if event.type != EventType.NONE:
            self._post(self._on_change, event.path)

    def _on_change(self, path: str) -> None:
        if path in self._watches:
            # Set before the callbacks run: their reads are at least as new as the watch.
            self._arm(path)
            self._make_all_due(path)

    def _make_all_due(self, path: str) -> None:
        for watch in self._watches[path]:
            self._make_due(path, watch)

    def _make_due(self, path: str, watch: Watch) -> None:
        if not watch.is_due:
            watch.is_due = True
            self._loop.call_soon(self._tell, path, watch)

    def _tell(self, path: str, watch: Watch) -> None:
        watch.is_due = False
        if watch in self._watches.get(path, {}):
            watch.callback()

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
            self._unarmed.clear()
            for path in self._watches:
                self._on_change(path)
            self._is_connected.set()
            self._pump()
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
        self._state = state
        self.figures.sessions_lost += state is SessionState.EXPIRED
        for key in list(self._session_callbacks):
            self._loop.call_soon(self._tell_state, key, state)

    def _tell_state(self, key: object, state: SessionState) -> None:
        if (callback := self._session_callbacks.get(key)) is not None:
            callback(state)

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The loop ended without aclose: there is no receiver.
            if not self._loop.is_closed():
                raise

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
