"""The state that the connections of a bookie share: budgets, turns, memory, and each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from bookie.serving.turns import Turns
from dlcore.wire.memory import ReceiveMemory

if TYPE_CHECKING:
    from bookie.serving.read_budget import ReadBudget
    from bookie.serving.receive_budget import ReceiveBudget
    from dlcore.base.ids import BookieId

_Connection = TypeVar("_Connection")
IN_FLIGHT_BYTES_MIN = 64 * 1024
"""Bytes of adds that each connection may have in flight, whatever the others have."""
_IN_FLIGHT_CONNECTIONS = 4
"""All connections together may have as many bytes of adds in flight as this number of connections
at their bound."""


class Shared(Generic[_Connection]):
    """The part of the service that its connections use; the arguments are the service's."""

    def __init__(
        self,
        *,
        bookie: BookieId,
        cluster_id: str,
        connection_bytes_max: int,
        read_budget: ReadBudget,
        receive_budget: ReceiveBudget,
        chunk_bytes_max: int,
        silence_s: float,
        handshake_s: float,
    ) -> None:
        self.bookie = bookie
        self.cluster_id = cluster_id
        self.connection_bytes_max = connection_bytes_max
        self.read_budget = read_budget
        self.receive_budget = receive_budget
        self.chunk_bytes_max = chunk_bytes_max
        self.silence_s = silence_s
        self.handshake_s = handshake_s
        self.turns = Turns()
        self.in_flight_bytes = 0
        """Bytes of unanswered adds, of all connections."""
        self.memory = ReceiveMemory()
        self.connections: dict[_Connection, None] = {}
        self.is_draining = False

    def in_flight_share(self) -> int:
        """Return how many bytes of adds one connection may have in flight.

        A connection alone gets its whole bound.  If many have adds in flight, each gets a share of
        the bytes that are left, and at least `IN_FLIGHT_BYTES_MIN`.
        """
        free = _IN_FLIGHT_CONNECTIONS * self.connection_bytes_max - self.in_flight_bytes
        share = free // (_IN_FLIGHT_CONNECTIONS - 1)
        return min(self.connection_bytes_max, max(share, IN_FLIGHT_BYTES_MIN))
