"""What all parts of auto-recovery share: the ports, the clock and the source of chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from dlcore.clock import Clock
    from dlcore.config import LedgerClientConfig
    from dlcore.ledger.client import LedgerClient
    from dlcore.ledger.port import BookieClient
    from dlcore.ledger.registry import BookieRegistry
    from dlcore.ledger.store import LedgerStore
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryServices:
    """Ports of one namespace; they stay their opener's."""

    store: MetadataStore
    paths: NamespacePaths
    ledgers: LedgerStore
    registry: BookieRegistry
    bookies: BookieClient
    client: LedgerClient
    client_config: LedgerClientConfig
    clock: Clock
    rng: random.Random
