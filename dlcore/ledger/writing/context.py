"""The ports, the limits and the source of chance that the ledger client's drivers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlcore.base.metrics import Durations

if TYPE_CHECKING:
    import random

    from dlcore.base.clock import Clock
    from dlcore.base.config import LedgerClientConfig
    from dlcore.ledger.metadata.store import LedgerStore
    from dlcore.ledger.placing.placer import Placer
    from dlcore.ledger.writing.appender import InFlight
    from dlcore.wire.port import BookieClient


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
    append_times: Durations = field(default_factory=Durations)
    """Times of entries, from the call until they and all before them are acknowledged."""
    recovery_times: Durations = field(default_factory=Durations)
    """Times of recoveries of ledgers that other clients had left open, with those of the store."""
