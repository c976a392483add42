"""Waits for events outside the event loop: in a thread, or at ZooKeeper."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from kazoo.handlers.threading import SequentialThreadingHandler

from dlcore.base.access.tls_refusals import closed_unheard, explained
from dlcore.base.background import answer
from dlcore.base.clock import steady_s
from dlcore.base.errors import MetadataConnectionError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.base.metrics import Durations

logger = logging.getLogger(__name__)

_ANSWER_BYTES_MAX = 1_000_000
"""A larger answer delays the server and all clients whose answers come after it."""


class ConnectionHandler(SequentialThreadingHandler):  # type: ignore[misc]
    """Handler that knows kazoo's connection, and calls all callbacks in one thread.

    kazoo waits for a silent server for as long as a session lasts; `give_up` ends this. kazoo
    itself has two threads for callbacks.  Therefore an answer could be reported before a change
    that came earlier.  With one thread both come in the order of their arrival.

    kazoo's own TLS also trusts the authorities of the system, allows TLS 1.0, and by default does
    not compare the host with the certificate.  Therefore connections of TLS are made here.
    """

    def __init__(self, tls: TlsInUse | None) -> None:
        super().__init__()
        self._tls = tls
        self._connection: socket.socket | None = None
        self.tls_failure = ""
        """Why the latest attempt failed, if it was for TLS."""

    def create_connection(
        self, address: tuple[str, int], hostname: str, timeout: float, **_: object
    ) -> socket.socket:
        """Create the connection for kazoo, and keep it."""
        connection: socket.socket = super().create_connection(address, timeout=timeout)
        self._connection = connection
        if self._tls is not None:
            context = self._tls.client_context()
            connection = context.wrap_socket(
                connection, server_hostname=hostname, do_handshake_on_connect=False
            )
            self._connection = connection
            try:
                connection.do_handshake()
            except OSError as error:
                # A later reset, for example by `give_up`, says less.
                if isinstance(error, ssl.SSLCertVerificationError) or not self.tls_failure:
                    self.tls_failure = explained(error, self._tls.files)
                connection.close()
                raise
            # With TLS 1.3 a server refuses our certificate only after the handshake.
            self.tls_failure = closed_unheard(self._tls.files)
        return connection

    def select(
        self, readers: Sequence[Any], writers: Sequence[Any], others: Sequence[Any], timeout: float
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Wait for sockets; kazoo does not see what TLS has received and not given out yet."""
        ready = [each for each in readers if isinstance(each, ssl.SSLSocket) and each.pending()]
        found = super().select(readers, writers, others, 0 if ready else timeout)
        readable = [*ready, *(each for each in found[0] if each not in ready)]
        return readable, found[1], found[2]

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
            loop.call_soon_threadsafe(answer, done, error)

    try:
        threading.Thread(target=run, name="zookeeper-stop", daemon=True).start()
    except RuntimeError:
        run()
    await done


@asynccontextmanager
async def answer_in_time(what: str, timeout_s: float, durations: Durations) -> AsyncIterator[None]:
    """Raise `MetadataConnectionError`, which names `what`, if the block takes longer.

    Its duration is counted in `durations`, whether it fails or not.
    """
    begun_s = steady_s()
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise MetadataConnectionError(
            f"{what}: no answer from ZooKeeper within {timeout_s:g} s, result unknown"
        ) from None
    finally:
        durations.note(steady_s() - begun_s)


def tell_if_large(what: str, size_bytes: int) -> None:
    """Warn of an answer of `size_bytes` if it is too large."""
    if size_bytes > _ANSWER_BYTES_MAX:
        logger.warning(
            "a large answer of ZooKeeper: %s, %d bytes; to do: see which logs or ledgers became "
            "so many, and remove what is not needed",
            what,
            size_bytes,
        )
