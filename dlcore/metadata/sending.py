"""Requests to ZooKeeper: sent in order while connected, `_OUTSTANDING_MAX` at a time.

kazoo wakes its thread through a socket that would block the loop if too many were queued.

A write whose reply is lost is never sent again (`MetadataConnectionError`: unknown), reads are.
`MetadataSessionExpiredError` from a write means that ZooKeeper refused it: it did not happen.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from dlcore.base.background import outcome_of
from dlcore.base.errors import MetadataConnectionError, MetadataSessionExpiredError
from dlcore.metadata.answers import answer_in_time
from dlcore.metadata.requests import Request, Sync, translate

if TYPE_CHECKING:
    from collections.abc import Callable

    from kazoo.client import KazooClient

    from dlcore.base.metrics import Durations

logger = logging.getLogger(__name__)

_OUTSTANDING_MAX = 100
"""Linux lets about 270 wake-up bytes wait in kazoo's socket pair before a send blocks."""
_READ_ATTEMPTS_MAX = 4


class Post(Protocol):
    """Runs a callback on the event loop, from any thread."""

    def __call__(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Return at once."""
        ...


class Requests:
    """The requests of one store; used on its event loop.

    Args:
        client: kazoo's.
        times: notes how long each takes.
        timeout_s: how long each waits for its answer.
        is_connected: whether requests may be sent now; call `pump` once they may.
        require_open: raises if the store cannot be used.
        post: passes kazoo's callbacks to the event loop.
    """

    def __init__(
        self,
        client: KazooClient,
        times: Durations,
        *,
        timeout_s: float,
        is_connected: Callable[[], bool],
        require_open: Callable[[], None],
        post: Post,
    ) -> None:
        self.timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._times = times
        self._is_connected = is_connected
        self._require_open = require_open
        self._post = post
        self._backlog: deque[Request] = deque()
        self._outstanding: set[Request] = set()
        self._sync: Sync | None = None  # of the reads that began in this turn of the loop

    async def read(self, what: str, start: Callable[[], Any], *, sync: str | None = None) -> Any:
        """Send a read, again if its answer is lost; with `sync` behind a sync of that path."""
        send = partial(self._send if sync is None else partial(self._send_after_sync, sync), what)
        async with answer_in_time(what, self.timeout_s, self._times):
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
        self.pump()

    async def write(self, what: str, start: Callable[[], Any]) -> Any:
        """Send a write once; without an answer its outcome is unknown."""
        async with answer_in_time(what, self.timeout_s, self._times):
            return await self._send(what, start)

    async def _send(self, what: str, start: Callable[[], Any]) -> Any:
        self._require_open()
        return await self.enqueue(what, start)

    def enqueue(self, what: str, start: Callable[[], Any]) -> asyncio.Future[Any]:
        """Send a request behind those that wait; only the caller gives up its answer."""
        request = Request(what, start, self._loop.create_future())
        self._backlog.append(request)
        self.pump()
        return request.reply

    def pump(self) -> None:
        """Send what waits, as far as is allowed now."""
        while self._backlog and self._is_connected() and len(self._outstanding) < _OUTSTANDING_MAX:
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
        self.pump()

    def close(self) -> None:
        """Fail all that have no answer yet."""
        for request in (*self._outstanding, *self._backlog):
            if not request.reply.done():
                request.reply.set_exception(
                    MetadataConnectionError("the metadata store was closed: result unknown")
                )
        self._outstanding.clear()
        self._backlog.clear()
