"""Watches of ZooKeeper's nodes: one there stands for all that callers have on a path.

ZooKeeper's fire once, so each is set again before its callbacks run: their reads are at least as
new as the watch.  A new connection sets all of them, and tells all callers.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from kazoo import exceptions as kazoo_errors
from kazoo.protocol.states import EventType

from dlcore.base.errors import MetadataConnectionError, MetadataSessionExpiredError, NoNodeError
from dlcore.metadata.requests import RemoveWatches, Watch, call

if TYPE_CHECKING:
    from collections.abc import Callable

    from kazoo.client import KazooClient
    from kazoo.protocol.states import WatchedEvent

    from dlcore.metadata.port import Unsubscribe
    from dlcore.metadata.sending import Post, Requests

logger = logging.getLogger(__name__)

_ARMED_AGAIN_S = 1.0
"""Pause before a watch that a server refused is set again, if the connection has stayed."""


class Watches:
    """The watches of one store; used on its event loop.

    Args:
        client: kazoo's.
        requests: sends.
        is_connected: whether there is a connection; call `set_all` at each new one.
        post: passes kazoo's callbacks to the event loop.
    """

    def __init__(
        self,
        client: KazooClient,
        requests: Requests,
        *,
        is_connected: Callable[[], bool],
        post: Post,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._requests = requests
        self._is_connected = is_connected
        self._post = post
        self._paths: dict[str, dict[Watch, None]] = {}
        self._unarmed: set[str] = set()  # paths whose watches could not be set
        self._arming_again: asyncio.TimerHandle | None = None
        self._is_closed = False
        # kazoo compares watchers for equality: one object for all keeps its sets small.
        self._watcher = self._on_watch_event

    def add(self, path: str, callback: Callable[[], None], *, children: bool) -> Unsubscribe:
        """Call `callback` soon, and after each change; without `children`, of the node only."""
        watch = Watch(callback, children)
        others = self._paths.setdefault(path, {})
        is_armed = any(other.children or not children for other in others)
        others[watch] = None
        if not is_armed:
            self._arm(path)
        self._make_due(path, watch)

        def unsubscribe() -> None:
            watches = self._paths.get(path, {})
            watches.pop(watch, None)
            if not watches and self._paths.pop(path, None) is not None:
                self._disarm(path)

        return unsubscribe

    def set_all(self) -> None:
        """Set the watches of a new connection, and tell all callers that something may differ."""
        self._unarmed.clear()
        for path in self._paths:
            self._on_change(path)

    def close(self) -> None:
        """Call no callback any more."""
        self._is_closed = True
        self._paths.clear()
        if self._arming_again is not None:
            self._arming_again.cancel()

    def _arm(self, path: str) -> None:
        if not self._is_connected():
            return  # a new connection sets every watch
        self._requests.enqueue(
            f"watch {path}", lambda: self._client.exists_async(path, watch=self._watcher)
        ).add_done_callback(partial(self._on_armed, path))
        if any(watch.children for watch in self._paths[path]):
            self._requests.enqueue(
                f"watch children of {path}",
                lambda: self._client.get_children_async(path, watch=self._watcher),
            ).add_done_callback(partial(self._on_armed, path))

    def _disarm(self, path: str) -> None:
        """Remove a watch without callbacks, also from the lists of the server and of kazoo."""
        if self._is_connected():
            request = RemoveWatches(path, self._forget)
            reply = self._requests.enqueue(f"unwatch {path}", lambda: call(self._client, request))
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
        if self._is_connected():
            for path in paths:
                self._on_change(path)

    def _on_watch_event(self, event: WatchedEvent) -> None:
        # In a thread of kazoo.  NONE reports a lost connection, which also comes as a state.
        if event.type != EventType.NONE:
            self._post(self._on_change, event.path)

    def _on_change(self, path: str) -> None:
        if path in self._paths:
            # Set before the callbacks run: their reads are at least as new as the watch.
            self._arm(path)
            self._make_all_due(path)

    def _make_all_due(self, path: str) -> None:
        for watch in self._paths[path]:
            self._make_due(path, watch)

    def _make_due(self, path: str, watch: Watch) -> None:
        if not watch.is_due:
            watch.is_due = True
            self._loop.call_soon(self._tell, path, watch)

    def _tell(self, path: str, watch: Watch) -> None:
        watch.is_due = False
        if watch in self._paths.get(path, {}):
            watch.callback()
