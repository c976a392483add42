"""The ledger client: create, open, recover and delete replicated ledgers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from dlcore.base.background import all_of, end_tasks, outcome_of, start_task
from dlcore.base.errors import AlreadyClosedError, ConfigurationError
from dlcore.base.statistics import WriteStatistics
from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata, LedgerState
from dlcore.ledger.placing.health import BookieHealth, Conduct
from dlcore.ledger.placing.placer import Placer
from dlcore.ledger.reading.reader import LedgerReader
from dlcore.ledger.recovering.recovery_driver import recover
from dlcore.ledger.writing.appender import InFlight
from dlcore.ledger.writing.context import LedgerContext
from dlcore.ledger.writing.writer import LedgerWriter

if TYPE_CHECKING:
    import asyncio
    import random
    from collections.abc import Callable, Mapping, Sequence

    from dlcore.base.clock import Clock
    from dlcore.base.config import LedgerClientConfig, QuorumConfig
    from dlcore.base.ids import BookieId
    from dlcore.base.metrics import Durations
    from dlcore.ledger.metadata.registry import BookieRegistry
    from dlcore.ledger.metadata.store import LedgerStore
    from dlcore.ledger.port import ColdEntries
    from dlcore.metadata.port import Op
    from dlcore.wire.port import BookieClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LedgerPlace:
    """The id and the bookies for a ledger that can be created; no other client gets the id.

    `quorum` is the wanted one, or a smaller one if too few bookies were writable.
    """

    ledger_id: int
    quorum: QuorumConfig
    bookies: tuple[BookieId, ...]


class OpenWriters:
    """The open writers of a client, and what those that ended have written."""

    def __init__(self) -> None:
        self.open: set[LedgerWriter] = set()
        self._entries = self._bytes = 0  # of those that ended

    def add(self, writer: LedgerWriter) -> None:
        """Add a new one."""
        self.open.add(writer)

    def ended(self, writer: LedgerWriter) -> None:
        """Count what a writer has written, once."""
        if writer in self.open:
            self.open.discard(writer)
            self._entries += writer.last_add_confirmed + 1
            self._bytes += writer.confirmed_bytes

    def statistics(self) -> WriteStatistics:
        """Return counts of the entries and bytes that were written until now."""
        writers = list(self.open)  # a copy: a collector may ask in another thread
        return WriteStatistics(
            open_ledgers=len(writers),
            pending_bytes=sum(each.pending_bytes for each in writers),
            entries=self._entries + sum(each.last_add_confirmed + 1 for each in writers),
            size_bytes=self._bytes + sum(each.confirmed_bytes for each in writers),
        )

    async def aclose(self) -> None:
        """Abandon those that are open."""
        # A copy, because `abandon` removes the writer.
        for writer in list(self.open):
            await writer.abandon()


class LedgerClient:
    """All ledgers of one namespace; used on one event loop.

    Without `ledger_store` and `registry` it only reads ledgers whose metadata the caller passes.
    Without `cold` it reads no cold ledgers.
    The caller that opened the ports closes them.
    """

    def __init__(
        self,
        *,
        ledger_store: LedgerStore | None,
        registry: BookieRegistry | None,
        bookies: BookieClient,
        config: LedgerClientConfig,
        clock: Clock,
        rng: random.Random,
        cold: ColdEntries | None = None,
    ) -> None:
        self._bookies = bookies
        self.cold = cold
        """Reads cold ledgers."""
        self._config = config
        conduct_s = 4 * config.add_timeout_s
        self._health = BookieHealth(
            adds=Conduct(config.quarantine, conduct_s=conduct_s, rng=rng),
            reads=Conduct(config.quarantine, conduct_s=conduct_s, rng=rng),
        )
        self._ledgers: LedgerContext | None = None
        if ledger_store is not None and registry is not None:
            self._ledgers = LedgerContext(
                ledger_store=ledger_store,
                placer=Placer(registry, config=config.placement, health=self._health, rng=rng),
                bookies=bookies,
                config=config,
                clock=clock,
                rng=rng,
                in_flight=InFlight(
                    bytes_max=config.pending_bytes_max, entries_max=config.pending_entries_max
                ),
            )
        self.writers = OpenWriters()
        self._recoveries: dict[int, asyncio.Task[LedgerMetadata]] = {}
        self._is_short = False  # too few bookies were writable when the last ledger was created
        self._is_closed = False

    @property
    def placer(self) -> Placer:
        """The placer of this client's ledgers, also for auto-recovery.

        Raises:
            ConfigurationError: the client has no metadata store.
        """
        return self._context().placer

    async def find_place(self, quorum: QuorumConfig, *, wait_s: float = 0.0) -> LedgerPlace:
        """Return an id and an ensemble for a ledger that may be created soon.

        If too few bookies are writable, it waits for others, up to `wait_s`.

        Raises: the same errors as `create_ledger`.
        """
        context = self._context()
        chosen, ledger_id = await all_of(
            context.placer.choose_ensemble(quorum, wait_s=wait_s),
            context.ledger_store.new_ledger_id(),
        )
        return LedgerPlace(ledger_id, *chosen)

    async def create_ledger(
        self,
        quorum: QuorumConfig,
        *,
        custom: Mapping[str, str] = MappingProxyType({}),
        extra_ops: Callable[[int], Sequence[Op]] | None = None,
        place: LedgerPlace | None = None,
    ) -> LedgerWriter:
        """Create a ledger on writable bookies that the placer chooses, and return its writer.

        With a `place` from `find_place` this is a single transaction.  If fewer bookies are
        writable than `quorum` asks for, the ledger begins with a smaller quorum, unless the client
        enforces the size of ensembles.  Auto-recovery brings the ledger to `quorum` after it was
        closed and once bookies are back.  If fewer than Qa bookies are writable, it waits for
        others, up to `bookies_wait_s`.

        The operations that `extra_ops` returns for the new ledger's id join the creating
        transaction.

        Raises:
            NotEnoughBookiesError: fewer writable bookies are registered than Qa, or than the
                ensemble size if the client enforces that; or they are in fewer racks than the
                client enforces.
            MetadataError: the error of the store, or of the first of the extra operations that
                failed.
        """
        context = self._context()
        if place is None:
            place = await self.find_place(quorum, wait_s=self._config.bookies_wait_s)
        metadata = LedgerMetadata(
            ledger_id=place.ledger_id,
            quorum=place.quorum,
            state=LedgerState.OPEN,
            ensembles=(Ensemble(0, place.bookies),),
            token=context.clock.new_token(),
            created_ms=context.clock.now_ms(),
            custom=dict(custom),
            wanted=None if place.quorum == quorum else quorum,
        )
        self._tell_of_shortage(metadata)
        ops = extra_ops(place.ledger_id) if extra_ops is not None else ()
        versioned = await context.ledger_store.create(metadata, extra_ops=ops)
        writer = LedgerWriter(
            versioned, context, recover=self.recover_ledger, on_end=self.writers.ended
        )
        self.writers.add(writer)
        return writer

    def _tell_of_shortage(self, metadata: LedgerMetadata) -> None:
        """Warn once while too few bookies are writable: many ledgers may begin meanwhile."""
        was_short, self._is_short = self._is_short, metadata.wanted is not None
        if self._is_short:
            logger.log(
                logging.INFO if was_short else logging.WARNING,
                "too few bookies: ledger %d begins with quorum %s instead of %s; to do: start more "
                "bookies, or free disks; auto-recovery then adds the copies that lack",
                metadata.ledger_id,
                metadata.quorum,
                metadata.wanted,
            )

    @property
    def durations(self) -> tuple[Durations, Durations]:
        """The durations of appends and of recoveries.

        Raises:
            ConfigurationError: the client has no metadata store.
        """
        context = self._context()
        return context.append_times, context.recovery_times

    async def open_ledger(self, ledger_id: int) -> LedgerReader:
        """Return a reader of a ledger in whatever state it is; its writer is not disturbed.

        Raises:
            LedgerNotFoundError: there is no such ledger.
        """
        versioned = await self._context().ledger_store.read(ledger_id)
        return self.open_ledger_of(versioned.metadata)

    def open_ledger_of(self, metadata: LedgerMetadata) -> LedgerReader:
        """Return a reader of a ledger by its metadata, without asking the metadata store.

        The store, if there is one, is asked again only after a failure and for ledgers not closed.
        """
        self._require_open()
        return LedgerReader(
            metadata,
            bookies=self._bookies,
            ledger_store=None if self._ledgers is None else self._ledgers.ledger_store,
            config=self._config,
            health=self._health,
            cold=self.cold,
        )

    async def recover_ledger(self, ledger_id: int) -> LedgerMetadata:
        """Fence the ledger's writer, recover every entry it may have acknowledged, and close it.

        Idempotent, and safe beside other recoverers: all of them end with the same metadata.

        Raises:
            LedgerRecoveryError: a bookie's answer that decides the end is unknown: try again later.
            LedgerNotFoundError: there is no such ledger.
            MetadataError: the metadata store failed.
        """
        context = self._context()
        task = self._recoveries.get(ledger_id)
        if task is None:
            on_end = partial(self._on_recovered, ledger_id)
            task = self._recoveries[ledger_id] = start_task(recover(ledger_id, context), on_end)
        # Several callers may wait for one recovery; one that is cancelled does not end it.
        return await outcome_of(task)

    def _on_recovered(self, ledger_id: int, task: asyncio.Task[LedgerMetadata]) -> None:
        del self._recoveries[ledger_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            # Log it also if every caller that waited was cancelled.
            logger.info("recovery failed ledger=%d: %s", ledger_id, error)

    def forget_free_memory(self) -> None:
        """Release memory that is kept for receiving from bookies and that nothing uses."""
        self._bookies.forget_free_memory()

    async def aclose(self) -> None:
        """Abandon writers and recoveries that are still at work.  Idempotent."""
        self._is_closed = True
        await self.writers.aclose()
        await end_tasks(*self._recoveries.values())

    def _context(self) -> LedgerContext:
        self._require_open()
        if self._ledgers is None:
            raise ConfigurationError("this ledger client has no metadata store: it can only read")
        return self._ledgers

    def _require_open(self) -> None:
        if self._is_closed:
            raise AlreadyClosedError("the ledger client is closed")
