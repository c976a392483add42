"""The upkeep of logs: merges small extents, and removes data that is no longer needed.

A writer or commit that gave a log many extents asks for upkeep: it creates a node below ``upkeep``
that names the log.  Any number of workers read these nodes.  A worker takes a log under a lock,
merges, removes truncated parts, and deletes the node.  No other log is read, however many there
are.  From time to time one of the workers sweeps: ledgers that dead processes staged or half
merged, ledgers emptied by merges, deleted logs whose removal was interrupted, old records of
commits, and too old records of logs that have a retention.

Only space and speed depend on this: all of it may be done twice, late or never.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.background import together
from dlcore.base.backoff import Backoff
from dlcore.base.errors import (
    DLError,
    LogNotFoundError,
    NoNodeError,
)
from dlcore.base.isolating import Troubles, report_defect
from dlcore.log.metadata.commit_records import sweep_commits
from dlcore.log.metadata.values import LogKey, LogMetadata, UpkeepRequest
from dlcore.log.upkeep.removal import listed_log, remove_deleted, remove_truncated
from dlcore.log.upkeep.staged import drop_merged, list_staged, settle, settle_abandoned
from dlcore.metadata.one_node import persistently
from dlcore.metadata.session_node import session_lock
from dlcore.metadata.stored import decode
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.autorecovery.metrics import RecoveryFigures
from dlcore.ops.autorecovery.runner import run_together
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.expiry import expire_logs
from dlcore.ops.upkeep.exporter import PeriodicExporter
from dlcore.ops.upkeep.mender import ColdMender
from dlcore.ops.upkeep.merger import LogMerger
from dlcore.ops.upkeep.scrubber import ColdScrubber
from dlcore.ops.upkeep.strays import delete_strays
from dlcore.ops.upkeep.swap import MERGING_IDENTITY
from dlcore.ops.upkeep.tier_rounds import TierRounds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.owner import StagingOwner

logger = logging.getLogger(__name__)

_RETRY_S_MAX = 600.0
_EXPORT_LOOK_S = 60.0
_EARLY_S = 5.0
_PAUSES_PER_LOOK = 10
_SWEEP = "sweep"


class RequestedUpkeep:
    """Serves the nodes that ask for the upkeep of a log.

    Args:
        context: the namespace's adapters.
        owner: the node that shows that this process lives.
        config: pauses, and the pace of merges.
        lock: takes the lock of a log by its id; yields whether it was free.
    """

    def __init__(
        self,
        context: LogContext,
        owner: StagingOwner,
        config: UpkeepConfig,
        lock: Callable[[str], AbstractAsyncContextManager[bool]],
    ) -> None:
        self._context = context
        self._config = config
        self._lock = lock
        self._retries: dict[str, Backoff] = {}  # of logs whose upkeep failed
        self._mergers = [
            LogMerger(
                context,
                owner,
                policy=config.merge,
                bytes_per_s=config.merge_bytes_per_s / config.logs_at_once,
            )
            for _ in range(config.logs_at_once)
        ]

    async def serve(self) -> int:
        """Serve every log that is asked for now; return how many merges were made."""
        requests = await self._context.logs.list_names(self._context.paths.upkeep_requests)
        self._retries = {each: self._retries[each] for each in requests if each in self._retries}
        now = asyncio.get_running_loop().time()
        requests = [r for r in requests if r not in self._retries or self._retries[r].due_s <= now]
        self._context.rng.shuffle(requests)  # several workers begin at different ends
        waiting = iter(requests)
        counts = await together(*(self._serve_some(merger, waiting) for merger in self._mergers))
        return sum(counts)

    async def _serve_some(self, merger: LogMerger, requests: Iterator[str]) -> int:
        count = 0
        for log_id in requests:
            try:
                count += await self._serve_log(merger, log_id)
            except DLError as error:
                # Bookies are away, or metadata is damaged: other logs go on, and the request stays.
                pause_s = self._back_off(log_id)
                logger.warning(
                    "upkeep of log id=%s failed, next try in %.0f s: %s: %s; to do: see to the "
                    "reason if it comes again; small extents stay until then",
                    log_id,
                    pause_s,
                    type(error).__name__,
                    error,
                )
            except Exception as error:  # noqa: BLE001  # reported, with its traceback
                self._back_off(log_id)
                report_defect(f"upkeep of log id {log_id}", error)
            else:
                self._retries.pop(log_id, None)
        return count

    def _back_off(self, log_id: str) -> float:
        backoff = Backoff(self._config.upkeep_interval_s, _RETRY_S_MAX)
        return self._retries.setdefault(log_id, backoff).failed(asyncio.get_running_loop().time())

    async def _serve_log(self, merger: LogMerger, log_id: str) -> int:
        context = self._context
        path = context.paths.upkeep_request(log_id)
        async with self._lock(log_id) as is_ours:
            node = await context.store.get(path) if is_ours else None
            if node is None:
                return 0
            request = decode(UpkeepRequest, node.value, source=path)
            log = LogKey(name=request.name, log_id=request.log_id)
            count = await merger.merge(log, from_lssn=request.from_lssn)
            with contextlib.suppress(LogNotFoundError):
                await remove_truncated(context, await context.logs.read(log))
            # Deleted last: if this worker dies before, another one serves the request again.
            with contextlib.suppress(NoNodeError):
                await context.store.delete(path)
        return count


class LogUpkeep:
    """One worker, on one event loop; `owner` is the node that shows that its process lives."""

    def __init__(
        self,
        context: LogContext,
        owner: StagingOwner,
        config: UpkeepConfig,
        figures: RecoveryFigures | None = None,
    ) -> None:
        self._context = context
        self._config = config
        self._repairs = RepairList(context.store, context.paths, context.clock)
        self._token = context.clock.new_token()
        figures = figures or RecoveryFigures()
        self._tiers = TierRounds(context, owner, config, self._lock, figures.tiering)
        self._scrubber = ColdScrubber(context, config, self._repairs, self._lock, figures.cold)
        self._exporter = PeriodicExporter(context, config, self._lock, figures.export)
        self.mend = ColdMender(context, owner, figures.cold).mend
        """Mends a cold ledger that is on the list of repairs."""
        self._requests = RequestedUpkeep(context, owner, config, self._lock)
        self._strays_due_s = 0.0  # by the event loop's clock

    @classmethod
    def of(
        cls,
        namespace: DirectNamespace,
        config: UpkeepConfig | None = None,
        figures: RecoveryFigures | None = None,
    ) -> LogUpkeep:
        """Return a worker for the logs of a namespace, which closes what the worker uses."""
        owner = namespace.staging_owner
        return cls(namespace.log_context, owner, config or UpkeepConfig(), figures)

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            MetadataError: the store failed.
        """
        config = self._config
        await run_together(
            _now_and_then(self.serve, config.upkeep_interval_s),
            _now_and_then(self.sweep, config.sweep_interval_s),
            self._tier_now_and_then(),
            _now_and_then(self.scrub, config.scrub_interval_s),
            _now_and_then(self.export, min(config.export_every_s, _EXPORT_LOOK_S)),
        )

    async def _tier_now_and_then(self) -> None:
        while True:
            await self.tier()
            await self.tier_early(self._config.tier_interval_s)

    async def export(self) -> bool:
        """Export the metadata if that is due; return whether it was done."""
        troubles = Troubles()
        done = await self._exporter.export(troubles)
        if done is not None:
            await self._repairs.tell("export", troubles)
        return bool(done)

    async def scrub(self) -> int:
        """Read the objects of cold segments that are due; return how many were damaged."""
        troubles = Troubles()
        found = await self._scrubber.scrub(troubles)
        if found is not None:
            await self._repairs.tell("scrub", troubles)
        return found or 0

    async def serve(self) -> int:
        """Serve every log that is asked for now; return how many merges were made."""
        return await self._requests.serve()

    def _lock(self, what: str) -> AbstractAsyncContextManager[bool]:
        """Take the lock of a log, by its id, or of a job; yield whether it was free."""
        path = self._context.paths.upkeep_lock(what)
        return session_lock(self._context.store, path, self._token.encode())

    async def tier(self) -> int:
        """Tier what is old enough, of every log that has a tier; return how many runs.

        A log that fails is tried again by the next call, and so is a store, with all of its logs.
        """
        troubles = Troubles()
        count = await self._tiers.tier(troubles)
        # 0.2.0 had one node for all workers, where each replaced what another one had left out.
        await self._repairs.tell("tiers", Troubles())
        await self._repairs.tell("tiers", troubles, worker=self._token)
        return count

    async def tier_early(self, for_s: float) -> None:
        """Tier for some time what is due in logs whose segments wait less than for a round.

        Nothing else is looked at.  The next round tries again what failed, and tells it.  A pause
        is as long as the work before it, which is due anyway, and ten times as long as looks
        that found nothing.
        """
        loop = asyncio.get_running_loop()
        end_s, pause_s = loop.time() + for_s, _EARLY_S
        while loop.time() + pause_s < end_s:
            await asyncio.sleep(pause_s)
            began_s = loop.time()
            count = await self._tiers.tier_early(Troubles())
            pause_s = max(_EARLY_S, (loop.time() - began_s) * (1 if count else _PAUSES_PER_LOOK))
        await asyncio.sleep(max(0.0, end_s - loop.time()))

    async def _delete_strays(self) -> int:
        now = asyncio.get_running_loop().time()
        if now < self._strays_due_s:
            return 0
        self._strays_due_s = now + self._config.stray_interval_s
        return await delete_strays(self._context, age_s=self._config.stray_age_s)

    async def sweep(self) -> None:
        """Remove data that is no longer needed, unless another worker does it now.

        A damaged node, or one that cannot be removed now, does not stop the rest.
        """
        context, config = self._context, self._config

        def ms_before(age_s: float) -> int:
            return context.clock.now_ms() - int(age_s * 1000)

        grace_ms = int(config.merged_grace_s * 1000)
        cold_grace_ms = int(max(config.merged_grace_s, config.tier_grace_s) * 1000)
        leftovers_ms = ms_before(config.leftovers_age_s)
        commits_ms = ms_before(config.commits_age_s)
        steps: dict[str, Callable[[], Awaitable[int]]] = {
            "half merged ledgers": self._settle_merging,
            "merged ledgers": partial(
                drop_merged, context, grace_ms=grace_ms, cold_grace_ms=cold_grace_ms
            ),
            "leftovers": partial(settle_abandoned, context, created_before_ms=leftovers_ms),
            "deleted logs": self._remove_deleted,
            "expired logs": partial(expire_logs, context),
            "stray objects": self._delete_strays,
            "commit records": partial(
                sweep_commits, context.store, context.paths, before_ms=commits_ms
            ),
        }
        swept = []
        troubles = Troubles()
        async with self._lock(_SWEEP) as is_ours:
            for what, step in steps.items() if is_ours else ():
                with troubles.isolated(f"sweeping {what}"):
                    swept.append(f"{what}={await step()}")
            if is_ours:
                await self._repairs.tell("upkeep", troubles)
        logger.info("swept %s", " ".join(swept) or "nothing: another worker sweeps")

    async def _settle_merging(self) -> int:
        return await settle(self._context, await list_staged(self._context, MERGING_IDENTITY))

    async def _remove_deleted(self) -> int:
        context, count = self._context, 0
        troubles = Troubles()
        parent = context.paths.deleted_logs
        for component in await persistently(lambda: context.store.get_children(parent)) or []:
            path = f"{parent}/{component}"
            node = await persistently(partial(context.store.get, path))
            if node is None:
                continue
            with troubles.isolated(f"deleted log at {path} stays"):
                await remove_deleted(context, listed_log(LogMetadata, path, node))
                count += 1
        return count


async def _now_and_then(work: Callable[[], Awaitable[object]], pause_s: float) -> None:
    while True:
        await work()
        await asyncio.sleep(pause_s)
