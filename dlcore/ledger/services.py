"""What the ledger client's drivers share: the ports, the limits and the sources of chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from dlcore.config import LedgerClientConfig
    from dlcore.ledger.placer import Placer
    from dlcore.ledger.port import BookieClient
    from dlcore.ledger.store import LedgerStore


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerServices:
    """Ports of a client that creates, writes and recovers ledgers."""

    ledgers: LedgerStore
    placer: Placer
    bookies: BookieClient
    config: LedgerClientConfig
    rng: random.Random
