"""The ports, the clock and the source of chance of an open namespace, for maintenance and tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from dlcore.base.clock import Clock
    from dlcore.base.config import LedgerClientConfig
    from dlcore.ledger.client import LedgerClient
    from dlcore.ledger.metadata.registry import BookieRegistry
    from dlcore.ledger.metadata.store import LedgerStore
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore
    from dlcore.wire.port import BookieClient


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacePorts:
    """Ports of one namespace; the owner that opened them closes them."""

    store: MetadataStore
    paths: NamespacePaths
    ledger_store: LedgerStore
    registry: BookieRegistry
    bookies: BookieClient
    ledgers: LedgerClient
    client_config: LedgerClientConfig
    clock: Clock
    rng: random.Random
