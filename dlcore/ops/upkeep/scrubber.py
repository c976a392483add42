"""Reads the objects of cold ledgers, some each day: performs what a `ScrubRound` decides."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, assert_never

from dlcore.base.errors import (
    CorruptMetadataError,
    LedgerNotFoundError,
    MetadataVersionError,
    NodeExistsError,
)
from dlcore.metadata.one_node import persistently
from dlcore.metadata.stored import decode_or_tell, encode
from dlcore.ops.autorecovery.values import ScrubProgress
from dlcore.ops.upkeep.mender import damage_of
from dlcore.ops.upkeep.scrubbing import (
    Begin,
    Count,
    Counted,
    End,
    Examine,
    Examined,
    Find,
    Found,
    ListLedger,
    NoneAhead,
    ScrubRound,
    Signal,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractAsyncContextManager

    from dlcore.base.isolating import Troubles
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.log.context import LogContext
    from dlcore.metadata.port import Versioned
    from dlcore.ops.autorecovery.listing import RepairList
    from dlcore.ops.autorecovery.metrics import ColdFigures
    from dlcore.ops.upkeep.config import UpkeepConfig
    from dlcore.ops.upkeep.scrubbing import Effect, Event

logger = logging.getLogger(__name__)

_LEDGERS_AT_ONCE = 500
_LOCK = "scrub"


class ColdScrubber:
    """The rounds of one worker.

    Args:
        context: the namespace's adapters.
        config: the period and the pace.
        repairs: the list on which ledgers with damaged objects are put.
        lock: takes a lock by name, and yields whether it was free.
        figures: those of its work in this process.
    """

    def __init__(
        self,
        context: LogContext,
        config: UpkeepConfig,
        repairs: RepairList,
        lock: Callable[[str], AbstractAsyncContextManager[bool]],
        figures: ColdFigures,
    ) -> None:
        self._context = context
        self._config = config
        self._repairs = repairs
        self._lock = lock
        self._figures = figures
        self._ledger: LedgerMetadata | None = None  # of the object that was found last

    async def scrub(self, troubles: Troubles) -> int | None:
        """Read what is due, unless another worker does; return how many objects were damaged.

        Returns: None if nothing was due.

        Raises:
            MetadataError: the store failed.
        """
        if not self._config.scrub_period_s:
            return None
        _, progress = await self._read()
        # Most rounds find nothing due, and cost this one read.
        if isinstance(self._round(progress)[1], End):
            return None
        async with self._lock(_LOCK) as is_ours:
            if not is_ours:
                return None
            node, progress = await self._read(fresh=True)
            machine, effect = self._round(progress)
            before = machine.progress.damaged
            while not isinstance(effect, End):
                effect = machine.handle(await self._answer_of(effect, troubles))
            await self._store(node, effect.progress)
            return effect.progress.damaged - before

    def _round(self, progress: ScrubProgress | None) -> tuple[ScrubRound, Effect]:
        machine = ScrubRound(progress, self._config)
        return machine, machine.handle(Begin(self._context.clock.now_ms()))

    async def _read(self, *, fresh: bool = False) -> tuple[Versioned | None, ScrubProgress | None]:
        path = self._context.paths.scrub_progress
        node = await persistently(lambda: self._context.store.get(path, fresh=fresh))
        tell = partial(logger.warning, "scrubbing begins anew: %s; to do: nothing")
        return node, decode_or_tell(ScrubProgress, node, source=path, tell=tell)

    async def _store(self, node: Versioned | None, progress: ScrubProgress) -> None:
        store, path = self._context.store, self._context.paths.scrub_progress
        value = encode(progress)
        try:
            if node is None:
                await store.create(path, value, make_parents=True)
            else:
                await store.put(path, value, version=node.version)
        except (NodeExistsError, MetadataVersionError) as error:
            logger.info("another worker scrubs, too: %s", error)

    async def _answer_of(self, effect: Effect, troubles: Troubles) -> Event:
        match effect:
            case Count(ledger_id, number):
                size_bytes = 0
                async for ledger in self._cold_from(ledger_id):
                    start = number if ledger.ledger_id == ledger_id else 0
                    size_bytes += sum(each.size_bytes for each in ledger.objects[start:])
                return Counted(size_bytes, self._context.clock.now_ms())
            case Find(ledger_id, number):
                return await self._find(ledger_id, number)
            case Examine(_, number):
                assert self._ledger is not None
                verdict = await self._examine(self._ledger, number, troubles)
                return Examined(verdict, self._context.clock.now_ms())
            case ListLedger(ledger_id):
                self._figures.damaged_objects += 1
                await self._repairs.publish(ledger_id, missing=())
                return Signal.LISTED
            case End():
                raise AssertionError("nothing follows")
            case _:
                assert_never(effect)

    async def _find(self, ledger_id: int, number: int) -> Found | NoneAhead:
        known = self._ledger
        if known is not None and known.ledger_id == ledger_id and number < len(known.objects):
            return Found(ledger_id, number, known.objects[number].size_bytes)
        async for ledger in self._cold_from(ledger_id):
            at = number if ledger.ledger_id == ledger_id else 0
            if at < len(ledger.objects):
                self._ledger = ledger
                return Found(ledger.ledger_id, at, ledger.objects[at].size_bytes)
        return NoneAhead()

    async def _cold_from(self, first: int) -> AsyncGenerator[LedgerMetadata, None]:
        """Yield the cold ledgers from an id on, ascending."""
        store = self._context.ledger_store
        while True:
            start = first
            found = await persistently(lambda: store.read_from(start, _LEDGERS_AT_ONCE))  # noqa: B023
            if not found:
                return
            first = max(found) + 1
            for ledger in found.values():
                # The audit tells of damaged metadata.
                if not isinstance(ledger, CorruptMetadataError) and ledger.is_cold:
                    yield ledger

    async def _examine(self, ledger: LedgerMetadata, number: int, troubles: Troubles) -> Verdict:
        stored = ledger.objects[number]
        found: list[str] = []
        with troubles.isolated(f"scrubbing object {stored.name}"):
            found.append(await damage_of(self._context, ledger, number))
            self._figures.scrubbed_bytes += stored.size_bytes
        if found == [""] or not await self._is_named(ledger, number):
            return Verdict.WHOLE
        if not found:
            return Verdict.UNKNOWN
        logger.warning(
            "object %d of cold ledger=%d is damaged: %s; to do: dlog autorecovery status, which "
            "tells whether it could be made again",
            number,
            ledger.ledger_id,
            found[0],
        )
        return Verdict.DAMAGED

    async def _is_named(self, ledger: LedgerMetadata, number: int) -> bool:
        """Return whether the ledger is still there, and has that object."""
        try:
            stored = await self._context.ledger_store.read(ledger.ledger_id, fresh=True)
        except LedgerNotFoundError:
            return False
        return ledger.objects[number] in stored.metadata.objects
