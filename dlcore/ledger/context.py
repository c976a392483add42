"""The ports, the limits and the source of chance that the ledger client's drivers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from dlcore.base.clock import Clock
    from dlcore.base.config import LedgerClientConfig
    from dlcore.ledger.metadata.store import LedgerStore
    from dlcore.ledger.placing.placer import Placer
    from dlcore.ledger.port import BookieClient
    from dlcore.ledger.writing.in_flight import InFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerContext:
    """Ports of a client that creates, writes and recovers ledgers."""

    ledger_store: LedgerStore
    placer: Placer
    bookies: BookieClient
    config: LedgerClientConfig
    clock: Clock
    rng: random.Random
    in_flight: InFlight
