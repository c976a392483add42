"""The state that the connections of a bookie share: budgets, turns, memory, and each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from bookie.serving.turns import Turns
from dlcore.wire.receiving import ReceiveMemory

if TYPE_CHECKING:
    from bookie.serving.admission import Admission
    from bookie.serving.read_budget import ReadBudget
    from bookie.serving.receive_budget import ReceiveBudget
    from bookie.serving.session import Bounds
    from dlcore.base.ids import BookieId

_Connection = TypeVar("_Connection")


class Shared(Generic[_Connection]):
    """The part of the service that its connections use; the arguments are the service's."""

    def __init__(
        self,
        *,
        bookie: BookieId,
        cluster_id: str,
        bounds: Bounds,
        read_budget: ReadBudget,
        receive_budget: ReceiveBudget,
        admission: Admission,
    ) -> None:
        self.bookie = bookie
        self.cluster_id = cluster_id
        self.bounds = bounds
        self.read_budget = read_budget
        self.receive_budget = receive_budget
        self.admission = admission
        self.turns = Turns()
        self.memory = ReceiveMemory()
        self.connections: dict[_Connection, None] = {}
        self.is_draining = False

    def leave(self, connection: _Connection) -> None:
        """Forget a connection that has ended."""
        self.connections.pop(connection, None)
