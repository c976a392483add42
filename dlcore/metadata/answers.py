"""Waiting for what happens outside the event loop: in a thread, or at ZooKeeper."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from kazoo.handlers.threading import SequentialThreadingHandler

from dlcore.errors import MetadataConnectionError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

logger = logging.getLogger(__name__)

_ANSWER_BYTES_MAX = 1_000_000
"""A larger answer holds up a server, and all who wait for theirs behind it."""


class ConnectionHandler(SequentialThreadingHandler):  # type: ignore[misc]
    """Knows kazoo's connection, which waits for a silent server for as long as a session lasts.

    And tells of changes and answers in one thread, in the order in which they came: kazoo's own has
    two, so that an answer may be heard before a change that came ahead of it.
    """

    _connection: socket.socket | None = None

    def create_connection(self, *args: Any, **kwargs: Any) -> socket.socket:
        """Connect, for kazoo."""
        self._connection = super().create_connection(*args, **kwargs)
        return self._connection

    def dispatch_callback(self, callback: Any) -> None:
        """Tell of a change, behind what came before it."""
        self.completion_queue.put(partial(callback.func, *callback.args))

    def give_up(self) -> None:
        """Let who waits for an answer meet the end of the connection."""
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it is lost or closed already
                self._connection.shutdown(socket.SHUT_RDWR)


async def in_thread(work: Callable[[], object]) -> None:
    """Run `work` in a thread of its own: executors take no more work when a process exits.

    Python 3.12 starts no thread any more when the main one has ended: then the event loop waits.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001  # raised again where it is waited for
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
            loop.call_soon_threadsafe(finish, error)

    def finish(error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    try:
        threading.Thread(target=run, name="zookeeper-stop", daemon=True).start()
    except RuntimeError:
        run()
    await done


@asynccontextmanager
async def answer_in_time(what: str, timeout_s: float) -> AsyncIterator[None]:
    """Raise `MetadataConnectionError`, which names `what`, if the block takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise MetadataConnectionError(
            f"{what}: no answer from ZooKeeper within {timeout_s:g} s, result unknown"
        ) from None


def tell_if_large(what: str, size_bytes: int) -> None:
    """Warn of an answer of so many bytes if that is too much."""
    if size_bytes > _ANSWER_BYTES_MAX:
        logger.warning("a large answer of ZooKeeper: %s, %d bytes", what, size_bytes)
