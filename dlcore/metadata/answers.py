"""Waits for events outside the event loop: in a thread, or at ZooKeeper."""

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

from dlcore.base.errors import MetadataConnectionError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

logger = logging.getLogger(__name__)

_ANSWER_BYTES_MAX = 1_000_000
"""A larger answer delays the server and all clients whose answers come after it."""


class ConnectionHandler(SequentialThreadingHandler):  # type: ignore[misc]
    """Handler that knows kazoo's connection, and calls all callbacks in one thread.

    kazoo waits for a silent server for as long as a session lasts; `give_up` ends this. kazoo
    itself has two threads for callbacks.  Therefore an answer could be reported before a change
    that came earlier.  With one thread both come in the order of their arrival.
    """

    _connection: socket.socket | None = None

    def create_connection(self, *args: Any, **kwargs: Any) -> socket.socket:
        """Create the connection for kazoo, and keep it."""
        self._connection = super().create_connection(*args, **kwargs)
        return self._connection

    def dispatch_callback(self, callback: Any) -> None:
        """Report a change, after all events that came before it."""
        self.completion_queue.put(partial(callback.func, *callback.args))

    def give_up(self) -> None:
        """Close the connection, so that waits for an answer end."""
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the connection is lost or closed already
                self._connection.shutdown(socket.SHUT_RDWR)


async def in_thread(work: Callable[[], object]) -> None:
    """Run `work` in its own thread, because executors accept no work when a process exits.

    Python 3.12 starts no thread after the main thread has ended.  Then `work` runs on the event
    loop, which waits.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001  # raised again in the awaiting caller
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
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
    """Warn of an answer of `size_bytes` if it is too large."""
    if size_bytes > _ANSWER_BYTES_MAX:
        logger.warning("a large answer of ZooKeeper: %s, %d bytes", what, size_bytes)
