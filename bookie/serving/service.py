"""The bookie's data service: what its connections share, and how they end together.

Whatever a client sends gets an answer of its own and harms nobody else: a request that makes no
sense is BAD_REQUEST, and nothing of it is stored.  A failure of the service itself is never "no".
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from bookie.serving.connection import IN_FLIGHT_BYTES_MIN, Connection
from bookie.serving.read_budget import ReadBudget
from bookie.serving.receive_budget import ReceiveBudget
from bookie.serving.turns import Turns
from dlcore.base.config import MIB
from dlcore.base.kept_memory import give_back_what_is_free
from dlcore.base.tls_refusals import tell_refusals
from dlcore.wire.memory import ReceiveMemory
from dlcore.wire.messages import CHUNK_BYTES_MAX

if TYPE_CHECKING:
    import ssl

    from bookie.storage.ledger_storage import LedgerStorage
    from dlcore.base.ids import BookieId

logger = logging.getLogger(__name__)

SILENCE_S = 20.0
"""After so long without a byte a client is given up; it is asked for a sign of life before."""
HANDSHAKE_S = 10.0
READ_BYTES_MAX = 64 * MIB
RECEIVE_BYTES_MAX = 64 * MIB
_IN_FLIGHT_CONNECTIONS = 4
"""All connections together have as many bytes of adds in flight as so many that use their bound."""
_RELIEF_INTERVAL_S = 0.5
_STALL_S_MAX = 2.0
"""While others wait for a budget, a client that moves nothing for so long loses its share."""
_HELD_S_MAX = 5.0
"""Likewise one whose payload is not whole by then: half of the patience of those who wait."""
_CALM_S = 60.0
"""Once nobody has waited for a budget for so long, freed memory is given back to the system."""


class BookieService:
    """Serves one storage to any number of connections.

    Args:
        storage: what to serve; stays its opener's.
        bookie: who this is; requests meant for another incarnation are refused.
        cluster_id: of the namespace.
        connection_bytes_max: bytes of adds of one connection that are not yet durable; beyond it
            the connection is not read.
        read_bytes_max: bytes on their way to readers, of all connections.
        receive_bytes_max: bytes of large payloads that are not whole yet, of all connections;
            beyond it the next ones are not read.
        chunk_bytes_max: of one message to a reader, unless a single entry is larger.
        silence_s: how long a client may be silent.
        handshake_s: how long it may take to say whom it means, with TLS or without.
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
    ) -> None:
        self.bookie = bookie
        self.cluster_id = cluster_id
        self.connection_bytes_max = connection_bytes_max
        self.chunk_bytes_max = chunk_bytes_max
        self.silence_s = silence_s
        self.handshake_s = handshake_s
        self.read_budget = ReadBudget(read_bytes_max, on_wait=self._relieve_later)
        self.receive_budget = ReceiveBudget(receive_bytes_max, on_wait=self._relieve_later)
        self._relief: asyncio.TimerHandle | None = None
        self._calm: asyncio.TimerHandle | None = None
        self.turns = Turns()
        self.in_flight_bytes = 0
        """Of adds that were taken and are not answered, of all connections."""
        self.memory = ReceiveMemory()
        self.connections: dict[Connection, None] = {}
        self.is_draining = False
        self._storage = storage

    async def listen(
        self, host: str, port: int, *, tls: ssl.SSLContext | None = None
    ) -> asyncio.Server:
        """Take connections at an address.

        Raises:
            OSError: the port is taken, or the address none of this machine.
        """
        if tls is not None:
            tell_refusals(tls)
        return await asyncio.get_running_loop().create_server(
            self.new_connection,
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.handshake_s,
        )

    def new_connection(self, storage: LedgerStorage | None = None) -> Connection:
        """Return the protocol of a connection that was accepted, on a view of the storage."""
        return Connection(self, storage or self._storage)

    def in_flight_share(self) -> int:
        """Return how many bytes of adds one connection may have in flight.

        One alone has all of its own bound; where many do, each has a share of what is left, and
        always a little.
        """
        free = _IN_FLIGHT_CONNECTIONS * self.connection_bytes_max - self.in_flight_bytes
        share = free // (_IN_FLIGHT_CONNECTIONS - 1)
        return min(self.connection_bytes_max, max(share, IN_FLIGHT_BYTES_MIN))

    def _relieve_later(self) -> None:
        if self._relief is None:
            if self._calm is not None:
                self._calm.cancel()
            loop = asyncio.get_running_loop()
            self._relief = loop.call_later(_RELIEF_INTERVAL_S, self._relieve)

    def _give_back(self) -> None:
        """Give back the memory that was freed since clients waited for a budget."""
        self.memory.forget_free()
        asyncio.get_running_loop().run_in_executor(None, give_back_what_is_free)

    def _relieve(self) -> None:
        """End connections that hold room and do not move, while others wait for it."""
        self._relief = None
        reads_wait, adds_wait = self.read_budget.is_exhausted, self.receive_budget.is_exhausted
        if not (reads_wait or adds_wait):
            self._calm = asyncio.get_running_loop().call_later(_CALM_S, self._give_back)
            return
        for connection in list(self.connections):
            if reads_wait and connection.stalled_s() >= _STALL_S_MAX:
                logger.info("client does not read, and others wait peer=%s", connection.peer)
                connection.abort()
            elif adds_wait and connection.sends_slowly(_STALL_S_MAX, _HELD_S_MAX):
                logger.info("client sends slowly, and others wait peer=%s", connection.peer)
                connection.abort()
        self._relieve_later()

    async def drain(self) -> None:
        """Take nothing more that writes; return when all that was taken is durable and answered."""
        self.is_draining = True
        for connection in list(self.connections):
            connection.begin_drain()
        for connection in list(self.connections):
            await connection.settled.wait()

    async def aclose(self, *, grace_s: float) -> None:
        """End every connection, with some time for what is on its way."""
        for timer in (self._relief, self._calm):
            if timer is not None:
                timer.cancel()
        for connection in list(self.connections):
            connection.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                for connection in list(self.connections):
                    await connection.closed.wait()
        for connection in list(self.connections):
            connection.abort()
