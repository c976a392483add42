"""The bookie's data service: the state that its connections share, and how they end together.

Every request gets its own answer, and an invalid one does not affect other clients: the answer is
BAD_REQUEST, and nothing is stored.  A failure of the service is never answered with a proven no.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from bookie.serving.access import Admission
from bookie.serving.connection import Connection, Shared
from bookie.serving.reads_in_progress import ReadBudget
from bookie.serving.receive_budget import ReceiveBudget
from bookie.serving.session import Bounds
from dlcore.base.access.client_names import EVERY_CLIENT, ClientNames
from dlcore.base.config import MIB
from dlcore.base.listening.listener import Listener
from dlcore.base.server_process import give_back_what_is_free
from dlcore.wire.messages import CHUNK_BYTES_MAX

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from bookie.ledger_storage import LedgerStorage
    from bookie.serving.access import Access
    from dlcore.base.ids import BookieId

logger = logging.getLogger(__name__)

SILENCE_S = 20.0
"""A client that is silent for this time is disconnected; after half of it, it gets a PING."""
HANDSHAKE_S = 10.0
"""Most seconds from the acceptance of a connection to its HELLO, TLS included: a stranger can hold
a connection for no longer."""
READ_BYTES_MAX = 64 * MIB
RECEIVE_BYTES_MAX = 64 * MIB
_RELIEF_INTERVAL_S = 0.5
"""How often slow clients are looked for while others wait."""
_STALL_S_MAX = 2.0
"""While others wait for a budget, a client is disconnected if it moves no byte for this time."""
_HELD_S_MAX = 5.0
"""While others wait for a budget, a client is disconnected if its payload is still incomplete after
this time, which is half of the time that the others wait before they give up."""
_CALM_S = 60.0
"""Freed memory goes back to the system so long after a client left, or waited for a budget."""


class BookieService(Shared[Connection]):
    """Serves one storage to any number of connections.

    Args:
        storage: the storage to serve; the caller closes it.
        bookie: this bookie; requests for another incarnation are refused.
        cluster_id: identity of the namespace's cluster.
        connection_bytes_max: most bytes of adds of one connection that are not yet durable; beyond
            it the connection is not read.
        read_bytes_max: most bytes in transit to readers, of all connections.
        receive_bytes_max: most bytes of incomplete large payloads, of all connections; beyond it
            the next payloads are not read.
        chunk_bytes_max: most bytes of one message to a reader, unless a single entry is larger.
        silence_s: seconds for which a client may be silent.
        handshake_s: most seconds from a connection's acceptance, TLS included, to its HELLO.
        client_names: the names of clients that are let in.
        new_access: returns the rights of a connection without a certificate; None: it may do
            everything.
    """

    def __init__(
        self,
        storage: LedgerStorage,
        *,
        bookie: BookieId,
        cluster_id: str,
        connection_bytes_max: int,
        read_bytes_max: int = READ_BYTES_MAX,
        receive_bytes_max: int = RECEIVE_BYTES_MAX,
        chunk_bytes_max: int = CHUNK_BYTES_MAX,
        silence_s: float = SILENCE_S,
        handshake_s: float = HANDSHAKE_S,
        client_names: ClientNames = EVERY_CLIENT,
        new_access: Callable[[], Access] | None = None,
    ) -> None:
        super().__init__(
            bookie=bookie,
            cluster_id=cluster_id,
            bounds=Bounds(
                connection_bytes_max=connection_bytes_max,
                chunk_bytes_max=chunk_bytes_max,
                silence_s=silence_s,
                handshake_s=handshake_s,
            ),
            read_budget=ReadBudget(read_bytes_max, on_wait=self._relieve_later),
            receive_budget=ReceiveBudget(receive_bytes_max, on_wait=self._relieve_later),
            admission=Admission(client_names, new_access),
        )
        self._relief: asyncio.TimerHandle | None = None
        self._calm: asyncio.TimerHandle | None = None
        self._storage = storage

    async def listen(
        self, host: str, port: int, *, tls: Callable[[], ssl.SSLContext] | None = None
    ) -> Listener:
        """Listen for connections at an address; `tls` returns the context for the next ones.

        Raises:
            OSError: it cannot listen there; see `listening_error`.
        """
        listener = Listener(self.new_connection, tls, handshake_s=self.bounds.handshake_s)
        await listener.open(host, port)
        return listener

    def new_connection(self, storage: LedgerStorage | None = None) -> Connection:
        """Return the protocol of an accepted connection, on `storage` or on the service's own."""
        return Connection(self, storage or self._storage)

    def _relieve_later(self) -> None:
        if self._relief is None:
            if self._calm is not None:
                self._calm.cancel()
                self._calm = None
            loop = asyncio.get_running_loop()
            # A wait that ends within the interval needs no relief.
            self._relief = loop.call_later(_RELIEF_INTERVAL_S, self._relieve)

    def leave(self, connection: Connection) -> None:
        """Forget a connection that has ended; its memory goes back to the system later."""
        super().leave(connection)
        if not self.is_draining:
            self._give_back_later()

    def _give_back_later(self) -> None:
        if self._calm is None and self._relief is None:
            self._calm = asyncio.get_running_loop().call_later(_CALM_S, self._give_back)

    def _give_back(self) -> None:
        """Give memory back to the system that was freed since."""
        self._calm = None
        self.memory.forget_free()
        # In a thread: the C library walks its whole heap for this.
        asyncio.get_running_loop().run_in_executor(None, give_back_what_is_free)

    def _relieve(self) -> None:
        """End connections that hold a part of a budget and make no progress, if others wait."""
        self._relief = None
        reads_wait, adds_wait = self.read_budget.is_exhausted, self.receive_budget.is_exhausted
        if not (reads_wait or adds_wait):
            self._give_back_later()
            return
        for connection in list(self.connections):
            connection.relieve(
                reads_wait=reads_wait,
                adds_wait=adds_wait,
                stall_s=_STALL_S_MAX,
                held_s_max=_HELD_S_MAX,
            )
        self._relieve_later()

    async def drain(self) -> None:
        """Refuse new writes; return when all accepted writes are durable and answered."""
        self.is_draining = True
        # All are asked before any is waited for, so that none accepts writes meanwhile.
        for connection in list(self.connections):
            connection.begin_drain()
        for connection in list(self.connections):
            await connection.writes.settled.wait()

    async def aclose(self, *, grace_s: float) -> None:
        """End every connection; answers in transit get up to `grace_s` seconds."""
        self.is_draining = True
        for timer in (self._relief, self._calm):
            if timer is not None:
                timer.cancel()
        for connection in list(self.connections):
            # Not an abort yet: answers that are under way still have their grace.
            connection.socket.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                for connection in list(self.connections):
                    await connection.closed.wait()
        for connection in list(self.connections):
            connection.abort()
