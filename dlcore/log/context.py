"""The adapters of one open namespace, given to every part of the log layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from dlcore.base.errors import AlreadyClosedError
from dlcore.base.statistics import ReadCounts

if TYPE_CHECKING:
    import random

    from dlcore.base.access.encryption_keys import EncryptionKeys
    from dlcore.base.clock import Clock
    from dlcore.base.config import LogConfig
    from dlcore.ledger.client import LedgerClient
    from dlcore.ledger.metadata.registry import BookieRegistry
    from dlcore.ledger.metadata.store import LedgerStore
    from dlcore.log.cold.reading import ColdLedgers
    from dlcore.log.metadata.ledger_cache import LedgerCache
    from dlcore.log.metadata.store import LogStore
    from dlcore.log.tidying import Tidier
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore


class Abandonable(Protocol):
    """An object with tasks of its own."""

    async def abandon(self, reason: str) -> None:
        """Stop at once, and log what is lost; a closed object ignores it."""
        ...


class Lifetime:
    """Whether the namespace is open, for everything that was opened on it."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self.has_ended = False

    def require_open(self) -> None:
        """Raise `AlreadyClosedError` once the namespace is closed."""
        if self.has_ended:
            raise AlreadyClosedError(f"the namespace {self._uri} is closed")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogContext:
    """Adapters and defaults; nothing here belongs to one log."""

    store: MetadataStore
    paths: NamespacePaths
    logs: LogStore
    ledger_store: LedgerStore
    ledger_cache: LedgerCache
    ledgers: LedgerClient
    tidier: Tidier
    registry: BookieRegistry
    clock: Clock
    rng: random.Random
    config: LogConfig
    client_id: str
    cluster_id: str
    lifetime: Lifetime
    encryption_keys: EncryptionKeys | None = None
    """The keys of encrypted logs, if it was opened with any."""
    reads: ReadCounts = field(default_factory=ReadCounts)
    open_objects: set[Abandonable] = field(default_factory=set)
    """Open writers and readers, which the namespace stops when it is closed."""

    @property
    def cold(self) -> ColdLedgers:
        """Reads cold ledgers, for the ledger client too."""
        return cast("ColdLedgers", self.ledgers.cold)
