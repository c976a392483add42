"""Rounds over the logs that may have a tier: performs what `tier_visits.py` decides.

A round lists the nodes of logs, reads those that it does not know, and heads and settings of those
that may have something due, many at once.  Only a log where something is due costs a lock.  Early
rounds, between others, read heads and settings of logs that want to be tiered sooner.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.clock import steady_s
from dlcore.base.errors import LogNotFoundError, ObjectStoreError
from dlcore.base.features import COLD_SEGMENTS
from dlcore.log.metadata.values import LogKey, LogMetadata, RetainedLog
from dlcore.log.upkeep.removal import listed_log
from dlcore.metadata.binding import ClusterFeatures
from dlcore.metadata.one_node import persistently
from dlcore.metadata.paths import BUCKETS
from dlcore.metadata.stored import decode_or_tell
from dlcore.ops.upkeep.tier_visits import TierVisits, rule_of
from dlcore.ops.upkeep.tierer import LogTierer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from dlcore.base.isolating import Troubles
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.metadata.port import Versioned
    from dlcore.ops.autorecovery.metrics import TieringFigures
    from dlcore.ops.upkeep.config import UpkeepConfig
    from dlcore.ops.upkeep.table_keeper import TableKeeper
    from dlcore.ops.upkeep.tier_visits import Look, TierRule

logger = logging.getLogger(__name__)

_LOGS_AT_ONCE = 250


class _Work(NamedTuple):
    """The work that a look at a log has found."""

    node: str
    log: LogKey
    rule: TierRule
    look: Look
    has_table: bool


class TierRounds:
    """The rounds of one worker.

    Args:
        context: the namespace's adapters.
        owner: the owner of the ledgers that are being filled.
        config: how much at a time, and the namespace's own tier.
        lock: takes a lock by name, and yields whether it was free.
        figures: those of its work in this process.
    """

    def __init__(
        self,
        context: LogContext,
        owner: StagingOwner,
        config: UpkeepConfig,
        lock: Callable[[str], AbstractAsyncContextManager[bool]],
        figures: TieringFigures,
    ) -> None:
        self._context = context
        self._owner = owner
        self._wanted = config
        self._lock = lock
        self._figures = figures
        # Without the namespace's own tier, which `tier` uses once the feature is finalized.
        self._use(replace(config, tier=""))
        self._visits = TierVisits()
        self._features = ClusterFeatures(context.store, context.paths)

    @cached_property
    def _tables(self) -> TableKeeper:
        from dlcore.ops.upkeep.table_keeper import TableKeeper  # it loads Arrow

        every_s = self._wanted.stray_interval_s
        return TableKeeper(self._context, self._owner, compare_every_s=every_s)

    def _use(self, config: UpkeepConfig) -> None:
        self._config = config
        self._tierer = LogTierer(self._context, self._owner, config)

    async def tier(self, troubles: Troubles) -> int:
        """Tier what is due; return how many runs.

        Raises:
            MetadataError: the store failed.
        """
        self._figures.round_s = steady_s()
        try:
            if self._config.tier != self._wanted.tier:
                with troubles.isolated("the tier of all logs is not used"):
                    await self._features.require(COLD_SEGMENTS)
                    self._use(self._wanted)
            await self._tierer.tidy()
            await self._list()
            due = self._visits.due(self._context.clock.now_ms())
            return await self._visit(due, troubles, is_early=False)
        finally:
            self._figures.round_s = None

    async def tier_early(self, troubles: Troubles) -> int:
        """Tier what is due in logs whose segments wait less than for a round; return how many runs.

        The other logs are not looked at, and no table is unless its log had something due: that is
        left for rounds.  A log that fails, or whose store does, is left for them, too.

        Raises:
            MetadataError: the store failed.
        """
        now_ms = self._context.clock.now_ms()
        due = self._visits.due_below(self._config.tier_interval_s, now_ms)
        return await self._visit(due, troubles, is_early=True)

    async def _visit(
        self, due: Sequence[tuple[str, LogKey]], troubles: Troubles, *, is_early: bool
    ) -> int:
        count = 0
        away: dict[str, int] = {}
        for start in range(0, len(due), _LOGS_AT_ONCE):
            some = due[start : start + _LOGS_AT_ONCE]
            paths = [self._context.logs.paths_of(log) for _, log in some]
            nodes = await self._read(
                [path for each in paths for path in (each.head, each.settings)]
            )
            for index, (node, log) in enumerate(some):
                found, before = None, troubles.count
                with troubles.isolated(
                    f"tiering log {log.name}", partial(self._figures.tier.failed, log.log_id)
                ):
                    head, settings = nodes[2 * index : 2 * index + 2]
                    found = await self._look(node, log, head, settings, is_early=is_early)
                    if found is not None and found.rule.url not in away:
                        count += await self._work(found, away, troubles)
                is_away = found is not None and found.rule.url in away
                has_failed = troubles.count > before
                if has_failed:  # it may fail alone, and others of its tier wait for it
                    self._visits.come_last(node)
                elif found is not None and is_away:
                    away[found.rule.url] += 1
                    if found.look.lssn is not None:
                        self._figures.tier.waits(log.log_id)
                if is_early and (is_away or has_failed):
                    self._visits.waits(node, math.inf)
        for url, others in away.items():
            if others:
                error = ObjectStoreError(f"{url} failed before; the next round tries another first")
                troubles.note(f"{others} more logs wait", error)
        return count

    async def _read(self, paths: Sequence[str]) -> list[Versioned | None]:
        # An old view would count until the next look, which may be minutes later.
        return await persistently(lambda: self._context.store.get_many(paths, fresh=True))

    async def _list(self) -> None:
        """Take over which logs there are: all, if the namespace has a tier."""
        paths, kind = self._context.paths, LogMetadata if self._config.tier else RetainedLog
        parent = paths.retained_logs if kind is RetainedLog else paths.logs
        parents = [f"{parent}/{bucket}" for bucket in BUCKETS]
        lists = await persistently(lambda: self._context.store.get_children_many(parents))
        self._visits.begin()
        unknown: list[str] = []
        for above, names in zip(parents, lists, strict=True):
            unknown += self._visits.listed(f"{above}/{name}" for name in names or ())
        for start in range(0, len(unknown), _LOGS_AT_ONCE):
            some = unknown[start : start + _LOGS_AT_ONCE]
            for path, node in zip(some, await self._read(some), strict=True):
                log = None if node is None else _log_in(kind, path, node)
                if log is not None:
                    self._visits.add(path, log)
        log_ids = self._visits.end()
        self._tierer.forget_others(log_ids)
        self._figures.tier.forget_others(log_ids)
        self._figures.table.forget_others(log_ids)

    async def _look(
        self,
        node: str,
        log: LogKey,
        head: Versioned | None,
        settings: Versioned | None,
        *,
        is_early: bool,
    ) -> _Work | None:
        """Look at a log; return the work that is there."""
        logs = self._context.logs
        try:
            at = logs.head_of(log, head)
            known = logs.settings_of(log, settings)
            rule = rule_of(known, self._config)
            if rule is None or known.table is None:
                self._figures.table.ended(log.log_id)
            if rule is None:
                self._figures.tier.ended(log.log_id)
                return None
            look = await self._tierer.look(at, rule)
        except LogNotFoundError:
            self._visits.forget(node)  # its name may be that of another log by now
            return None
        if look.lssn is None:
            self._figures.tier.ended(log.log_id)
        work = _Work(node, log, rule, look, has_table=known.table is not None)
        if is_early:  # a round decides when the table is looked at again
            return None if look.lssn is None else work
        self._visits.looked(node, next_ms=look.next_ms)
        self._visits.waits(node, rule.after_s)
        return work if work.has_table or look.lssn is not None else None

    async def _work(self, work: _Work, away: dict[str, int], troubles: Troubles) -> int:
        """Tier what is due in a log, then let its table follow; return how many runs.

        `away` are the tiers whose stores failed, and how many logs wait for them.
        """
        log, count, figures = work.log, 0, self._figures
        async with self._lock(log.log_id) as is_ours:
            if not is_ours:
                return 0
            with troubles.isolated(
                f"tiering log {log.name}", partial(figures.tier.failed, log.log_id)
            ):
                try:
                    count = 0 if work.look.lssn is None else await self._tierer.tier(log)
                    figures.tier.ended(log.log_id)
                except ObjectStoreError:
                    away[work.rule.url] = 0
                    raise
            if work.has_table and work.rule.url not in away:
                with troubles.isolated(
                    f"the table of log {log.name}", partial(figures.table.failed, log.log_id)
                ):
                    self._visits.looked(work.node, next_ms=0)  # again soon, unless it goes well
                    await self._tables.follow(log)
                    figures.table.ended(log.log_id)
                    if not self._tables.is_comparing(log):
                        self._visits.looked(work.node, next_ms=work.look.next_ms)
        return count


def _log_in(kind: type[LogKey], path: str, node: Versioned) -> LogKey | None:
    """Return the log of a node; None if the node of its name is damaged, which others report."""
    if kind is RetainedLog:
        return listed_log(kind, path, node)
    found = decode_or_tell(kind, node, source=path, tell=partial(logger.info, "not tiered: %s"))
    return None if found is None else LogKey(name=found.name, log_id=found.log_id)
