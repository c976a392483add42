"""Examines objects of cold ledgers, and mends damaged ones: performs what a `MendRun` decides."""

from __future__ import annotations

import logging
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, assert_never

from typing_extensions import override

from dlcore.base.errors import (
    CorruptMetadataError,
    LedgerNotFoundError,
    MetadataVersionError,
    ObjectStoreError,
)
from dlcore.base.machines import run_to_end
from dlcore.log.cold.facts import difference, end_entry_of, origin_of, url_of
from dlcore.log.metadata.values import LogKey
from dlcore.ops.upkeep.mending import (
    Check,
    Have,
    List,
    Listed,
    Make,
    MendRun,
    Name,
    Named,
    Read,
    ReadBack,
    Signal,
    Write,
    Written,
)
from dlcore.ops.upkeep.objects_made import ColdEntries, ObjectMaker
from dlcore.ops.upkeep.rewriting import SegmentRewriter
from dlcore.ops.upkeep.tiering import RunPlace

if TYPE_CHECKING:
    from dlcore.ledger.metadata.store import VersionedLedger
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.log.cold.facts import ObjectFacts
    from dlcore.log.cold.parquet import ColdEntry
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.ops.autorecovery.metrics import ColdFigures
    from dlcore.ops.upkeep.mending import Event, Work
    from dlcore.wire.frames import BytesLike

logger = logging.getLogger(__name__)


async def damage_of(context: LogContext, ledger: LedgerMetadata, number: int) -> str:
    """Read a whole object of a cold ledger; return how it is damaged, or empty.

    Raises:
        ObjectStoreError: it cannot be read now, so that nothing is known of it.
    """
    url, size_bytes = url_of(ledger, number), ledger.objects[number].size_bytes
    try:
        facts = await context.cold.facts_of(url, size_bytes)
    except ObjectStoreError as error:
        if error.is_damaged:
            return str(error)
        # Stores answer in many ways that an object is shorter; their lists tell sizes.
        listed = [each for each in await _listed(context, ledger) if each[0] == url]
        if not listed:
            return f"{url} is missing"
        if listed[0][1] != size_bytes:
            return f"{url} has {listed[0][1]} bytes, and the chain says {size_bytes}"
        raise
    differs = difference(ledger, number, facts)
    return differs and f"{url}: {differs}"


async def _listed(context: LogContext, ledger: LedgerMetadata) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    async with aclosing(context.cold.objects.list_below(ledger.folder)) as pages:
        async for page in pages:
            found += [(each.url, each.size_bytes) for each in page]
    return found


class ColdMender(SegmentRewriter):
    """Mends the cold ledgers of any logs.

    Args:
        context: the namespace's adapters.
        owner: the owner of ledgers that are being filled; mending fills none.
        figures: those of its work in this process.
    """

    def __init__(self, context: LogContext, owner: StagingOwner, figures: ColdFigures) -> None:
        super().__init__(context, owner)
        self._figures = figures

    async def mend(self, ledger_id: int) -> str | None:
        """Examine all objects of a cold ledger, and mend those that are damaged.

        Returns: why some of it is lost; empty: it is whole, or gone; None: it is not cold.

        Raises:
            DLError: the store or the metadata did not answer.
        """
        lost: list[str] = []
        number = 0
        while True:
            try:
                stored = await self._context.ledger_store.read(ledger_id, fresh=True)
            except LedgerNotFoundError:
                return ""
            if not stored.metadata.is_cold:
                return None
            if number >= len(stored.metadata.objects):
                if lost:
                    self._figures.holes.add(ledger_id)
                else:
                    self._figures.holes.discard(ledger_id)
                return "; ".join(lost)
            damage = await damage_of(self._context, stored.metadata, number)
            if damage:
                try:
                    await self._mend(stored, number, damage)
                except ObjectStoreError as error:
                    if not error.is_damaged:
                        raise
                    lost.append(str(error))
            number += 1

    async def _mend(self, stored: VersionedLedger, number: int, damage: str) -> None:
        ledger = stored.metadata
        logger.info("object %d of cold ledger=%d: %s", number, ledger.ledger_id, damage)
        unique = self._context.clock.now_ms()  # far above the attempts of tiering
        machine = MendRun(ledger, number, damage=damage, unique=unique)
        job = _Job(self, self._context, stored, number)
        if await run_to_end(machine, Signal.BEGIN, job.answer_of):
            self._figures.mended_objects += 1
            logger.info("mended object %d of cold ledger=%d", number, ledger.ledger_id)

    async def remake(self, ledger: LedgerMetadata, number: int) -> tuple[BytesLike, ObjectFacts]:
        """Make an object of what bookies have.

        Raises:
            DLError: the ledgers are gone, or are not what the chain says.
        """
        origin = origin_of(ledger)
        if origin is None:
            raise CorruptMetadataError(f"ledger {ledger.ledger_id} does not note what it was")
        log_id, lssn = ledger.folder.split("/")[-2:]
        key = LogKey(name=ledger.custom.get("log", ""), log_id=log_id)
        log = await self._context.logs.find_again(key)
        (schema,) = await self._context.logs.read_schemas([log])
        async with aclosing(self._entries(origin.extents)) as entries:
            start = RunPlace(int(lssn), origin.entry, origin.sequence_id)
            part = _PartOfRun(entries, log=log, schema=schema, start=start, take=_at_once)
            part.first = origin.entry + ledger.objects[number].first_entry_id
            part.end = origin.entry + end_entry_of(ledger, number)
            return await ObjectMaker(self._context, part, bytes_max=sys.maxsize).make()


async def _at_once(_: int) -> None:
    """Set no pace: one object is little."""


class _PartOfRun(ColdEntries):
    """The entries of a run from `first` up to `end`, which is not among them."""

    first = 0
    end = 0

    @override
    async def next(self) -> tuple[int, ColdEntry] | None:
        while (found := await super().next()) is not None and found[1].entry < self.end:
            if found[1].entry >= self.first:
                return found
        return None


class _Job:
    """The driver of one run's machine."""

    def __init__(
        self, mender: ColdMender, context: LogContext, stored: VersionedLedger, number: int
    ) -> None:
        self._mender = mender
        self._context = context
        self._stored = stored
        self._number = number
        self._data: BytesLike = b""

    async def answer_of(self, effect: Work) -> Event:
        """Perform an effect; return its answer."""
        ledger, cold = self._stored.metadata, self._context.cold
        match effect:
            case Make():
                self._data, facts = await self._mender.remake(ledger, self._number)
                return Have(facts, len(self._data))
            case List():
                return Listed(await _listed(self._context, ledger))
            case Read(url, size_bytes):
                self._data = await cold.objects.read(url, 0, size_bytes)
                return Have(await cold.facts_of(url, size_bytes, sent=self._data), size_bytes)
            case Write(name):
                await cold.objects.put_new(f"{ledger.folder}/{name}", self._data)
                return Written()
            case Check(name, size_bytes):
                url = f"{ledger.folder}/{name}"
                return ReadBack(await cold.facts_of(url, size_bytes, sent=self._data))
            case Name(changed):
                return Named(await self._name(changed))
            case _:
                assert_never(effect)

    async def _name(self, changed: LedgerMetadata) -> bool:
        store, version = self._context.ledger_store, self._stored.version
        try:
            await store.write(changed, version=version)
        except (MetadataVersionError, LedgerNotFoundError):
            return False
        self._context.ledger_cache.correct(changed)
        return True
