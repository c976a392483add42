"""Tiers completed segments of a log: performs what a `TierRun` decides."""

from __future__ import annotations

import contextlib
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from dlcore.base.errors import (
    LedgerNotFoundError,
    LedgerReadError,
    LogNotFoundError,
    NodeExistsError,
    UnsupportedError,
)
from dlcore.base.machines import run_to_end
from dlcore.log.cold.facts import noted_origin
from dlcore.log.metadata.values import SegmentEnd
from dlcore.log.upkeep.staged import create_cold_ledger
from dlcore.metadata.one_node import persistently
from dlcore.metadata.stored import decode
from dlcore.ops.autorecovery.copying import Throttle
from dlcore.ops.upkeep.objects_made import ColdEntries, ObjectMaker
from dlcore.ops.upkeep.rewriting import SegmentRewriter
from dlcore.ops.upkeep.swap import MERGING_IDENTITY, Swap, is_there
from dlcore.ops.upkeep.tier_visits import LogVisits, look_at, rule_of
from dlcore.ops.upkeep.tiering import (
    Check,
    Close,
    Create,
    Created,
    PutInPlace,
    ReadBack,
    RunPlace,
    Signal,
    Swapped,
    TierRun,
    Write,
    Written,
    plan_tier,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from dlcore.ledger.metadata.store import VersionedLedger
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.log.metadata.segment import ColdExtent, Extent
    from dlcore.log.metadata.values import LogKey, LogMetadata, VersionedHead
    from dlcore.metadata.port import Versioned
    from dlcore.ops.upkeep.config import UpkeepConfig
    from dlcore.ops.upkeep.merging import MergeRun, StoredSegment
    from dlcore.ops.upkeep.tier_visits import Look, TierRule
    from dlcore.ops.upkeep.tiering import Event, Work

logger = logging.getLogger(__name__)

_SEGMENTS_AT_ONCE = 100


class LogTierer(SegmentRewriter):
    """Tiers segments of any logs, one run after the other.

    Args:
        context: the namespace's adapters.
        owner: the owner of the ledgers that are being filled.
        config: how much at a time, and how long old ledgers stay.
    """

    def __init__(self, context: LogContext, owner: StagingOwner, config: UpkeepConfig) -> None:
        kept_s = max(0.0, config.tier_grace_s - config.merged_grace_s)
        super().__init__(context, owner, kept_ms=int(kept_s * 1000))
        self._config = config
        self._throttle = Throttle(bytes_per_s=config.tier_bytes_per_s)
        self._known: dict[str, LogVisits] = {}  # by log id

    async def tier(self, log: LogKey) -> int:
        """Tier the segments of a log that are old enough; return how many runs.

        A segment that objects cannot hold gets one line in the log, and is left.

        Raises:
            DLError: the store or bookies did not answer; nothing is lost.
        """
        await self._drop_unused()
        count = 0
        with contextlib.suppress(LogNotFoundError):
            while True:
                at, settings = await self._context.logs.open(log)
                rule = rule_of(settings, self._config)
                lssn = None if rule is None else (await self.look(at, rule)).lssn
                if rule is None or lssn is None:
                    break
                stored = await self._read_segment(at, lssn)
                run = None if stored is None else plan_tier(stored.extents, self._config.merge)
                if stored is None or run is None:
                    self._known[log.log_id].settled.add(lssn)
                    continue
                try:
                    count += await self._tier_run(at, stored, run, rule.url)
                except UnsupportedError as error:
                    self._known[log.log_id].settled.add(lssn)
                    logger.warning(
                        "segment %d of log=%s stays on bookies: %s; to do: dlog log settings "
                        "--set tier=none, if none of its segments should go",
                        lssn,
                        at.name,
                        error,
                    )
        return count

    async def look(self, at: VersionedHead, rule: TierRule) -> Look:
        """Look at a log: return what is due, and when the next look is."""
        head, paths = at.head, self._context.logs.paths_of(at.log)
        known = self._known.setdefault(at.log.log_id, LogVisits())
        known.advance(max(head.first_lssn, head.first_active[0]))
        end = head.max_lssn + (head.segment is None)
        ends: list[tuple[int, SegmentEnd | None]] = []
        now_ms = self._context.clock.now_ms()
        look = look_at(head, ends, rule, settled=known.settled, now_ms=now_ms)
        for start in range(known.done, end, _SEGMENTS_AT_ONCE):
            lssns = range(start, min(end, start + _SEGMENTS_AT_ONCE))
            wanted = [paths.segment(lssn) for lssn in lssns]
            nodes = await persistently(lambda wanted=wanted: self._context.store.get_many(wanted))  # type: ignore[misc]
            ends += zip(lssns, map(_end_in, wanted, nodes), strict=True)
            look = look_at(head, ends, rule, settled=known.settled, now_ms=now_ms)
            if look.lssn is not None and rule.after_bytes is None:
                break
            ends = [each for each in ends if each[0] >= look.done]
        known.advance(look.done)
        return look

    async def tidy(self) -> None:
        """Delete the cold ledgers of runs that failed; those that cannot be deleted stay noted."""
        await self._drop_unused()

    def forget_others(self, log_ids: Collection[str]) -> None:
        """Forget the logs that are not among these."""
        self._known = {each: known for each, known in self._known.items() if each in log_ids}

    async def _tier_run(
        self, at: VersionedHead, stored: StoredSegment, run: MergeRun, tier: str
    ) -> bool:
        """Tier a run; return False if another change overtook it."""
        context = self._context
        log = await context.logs.find_again(at.log)
        # Before the first object: sweeps look only into tiers that are noted.
        await self._note(tier)
        parts = stored.extents[run.first : run.end]
        start = _start_of(stored, run)
        (schema,) = await context.logs.read_schemas([log])
        entries = self._entries(parts)
        async with aclosing(entries):
            job = _Job(
                context,
                self._owner,
                ObjectMaker(
                    context,
                    ColdEntries(
                        entries, log=log, schema=schema, start=start, take=self._throttle.take
                    ),
                    bytes_max=self._config.tier_object_bytes,
                ),
                log,
                noted_origin(start.entry, start.sequence_id, parts),
                f"{tier}/{context.cluster_id}/{log.log_id}/{stored.lssn}",
                lambda extent: self._swap(
                    Swap(context.paths, at.log, stored, run, extent, merges=at.head.merges)
                ),
            )
            machine = TierRun(start, parts)
            try:
                is_swapped = await job.run(machine)
            except (LedgerNotFoundError, LedgerReadError):
                # A truncation or a merge may have deleted a ledger while it was read.
                now = await context.logs.read(at.log)
                if is_there(now, stored, merges=at.head.merges):
                    raise  # no change of the log explains it
                is_swapped = False
            finally:
                # The swap may have been made before an error: `_drop_unused` finds out.
                if job.ledger is not None:
                    self._unused.add(job.ledger.metadata.ledger_id)
        await self._drop_unused()
        if is_swapped:
            _tell(at, stored, parts, f"{tier}/{context.cluster_id}/{log.log_id}")
        return is_swapped

    async def _note(self, tier: str) -> None:
        """Remember that objects are below a URL; an operator may have let the cluster forget it."""
        with contextlib.suppress(NodeExistsError):
            await self._context.store.create(self._context.paths.tier(tier), make_parents=True)


def _end_in(path: str, node: Versioned | None) -> SegmentEnd | None:
    if node is None or not node.value:
        return None
    return decode(SegmentEnd, node.value, source=path)


def _start_of(stored: StoredSegment, run: MergeRun) -> RunPlace:
    assert stored.end is not None
    before = stored.removed.plus(stored.extents[: run.first])
    return RunPlace(stored.lssn, before.entries, stored.end.start_sequence_id + before.records)


def _tell(at: VersionedHead, stored: StoredSegment, parts: Sequence[Extent], where: str) -> None:
    logger.info(
        "tiered log=%s segment=%d extents=%d records=%d bytes=%d to=%s",
        at.name,
        stored.lssn,
        len(parts),
        sum(part.record_count for part in parts),
        sum(part.size_bytes for part in parts),
        where,
    )


class _Job:
    """The driver of one run's machine."""

    def __init__(
        self,
        context: LogContext,
        owner: StagingOwner,
        maker: ObjectMaker,
        log: LogMetadata,
        origin: Mapping[str, str],
        folder: str,
        swap: Callable[[ColdExtent], Awaitable[bool]],
    ) -> None:
        self._context = context
        self._owner = owner
        self._maker = maker
        self._log = log
        self._origin = origin
        self._folder = folder
        self._swap = swap
        self.ledger: VersionedLedger | None = None

    async def run(self, machine: TierRun) -> bool:
        """Return whether the cold extent is in the log."""
        return await run_to_end(machine, Signal.BEGIN, self._answer_of)

    async def _answer_of(self, work: Work) -> Event:
        match work:
            case Create():
                return await self._create()
            case Write(name, _, again):
                made = self._maker.made if again else None
                data, facts = made or await self._maker.make()
                await self._context.cold.objects.put_new(f"{self._folder}/{name}", data)
                return Written(facts, len(data))
            case Check(name, size_bytes):
                return await self._read_back(name, size_bytes)
            case Close():
                await self._close(work)
                return Signal.CLOSED
            case PutInPlace(extent):
                return Swapped(await self._swap(extent))
            case _:
                assert_never(work)

    async def _create(self) -> Created:
        self.ledger = await create_cold_ledger(
            self._context,
            self._owner,
            self._log.quorum,
            identity=MERGING_IDENTITY,
            folder=self._folder,
            custom={"log": self._log.name, **self._origin},
        )
        return Created(self.ledger.metadata.ledger_id, self.ledger.metadata.token)

    async def _read_back(self, name: str, size_bytes: int) -> ReadBack:
        assert self._maker.made is not None
        sent, _ = self._maker.made
        url = f"{self._folder}/{name}"
        return ReadBack(await self._context.cold.facts_of(url, size_bytes, sent=sent))

    async def _close(self, close: Close) -> None:
        """Give the ledger its objects; a repeated call whose answer was lost does nothing more."""
        assert self.ledger is not None
        ledger = self.ledger
        metadata = replace(
            ledger.metadata,
            objects=close.objects,
            last_entry_id=close.extent.entry_count - 1,
            length_bytes=close.extent.size_bytes,
        )
        await self._context.ledger_store.write(metadata, version=ledger.version)
