"""The auditor: finds ledgers that lack replicas and puts them on the list."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.base.clock import steady_s
from dlcore.base.config import DEFAULT_QUORUM
from dlcore.base.errors import CorruptMetadataError, LedgerNotFoundError
from dlcore.base.isolating import Troubles
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ops.autorecovery.audit import (
    BookieAudit,
    Shortage,
    is_sound,
    lacks_copies,
    lost_members,
    wanted_copies,
)
from dlcore.ops.autorecovery.check import check_ledger
from dlcore.ops.autorecovery.listing import CheckProgress
from dlcore.ops.autorecovery.metrics import AuditFigures
from dlcore.ops.autorecovery.replicas import ask_replicas, members_of, read_cookies
from dlcore.ops.autorecovery.runner import run_together

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from dlcore.backends.direct.ports import NamespacePorts
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ops.autorecovery.config import AutoRecoveryConfig
    from dlcore.ops.autorecovery.listing import RepairList

logger = logging.getLogger(__name__)

_LOOK_S_MIN = 0.05
"""Shortest pause: the rest of a delay may be too short for the clock to move."""
_REGISTERED_FOR_S = 5.0
"""How long a full check uses a list of registered bookies before it reads the list again."""
_NOTED_EVERY_S = 10.0
"""How often a full check stores its progress; work after that is repeated after an interruption."""


class Auditor:
    """One term in the auditor's role; `on_publish` is called after ledgers were put on the list."""

    def __init__(
        self,
        context: NamespacePorts,
        repairs: RepairList,
        config: AutoRecoveryConfig,
        *,
        on_publish: Callable[[], None],
        figures: AuditFigures | None = None,
    ) -> None:
        self._context = context
        self._repairs = repairs
        self._config = config
        self._on_publish = on_publish
        self._figures = figures or AuditFigures()
        self._audit = BookieAudit(lost_bookie_delay_s=config.lost_bookie_delay_s)
        self._shortage = Shortage()
        self._members: set[BookieId] = set()  # of any ledger, at the last scan
        self._published: set[BookieId] = set()  # lost bookies whose ledgers are on the list
        self._scan_due = 0.0

    async def run(self) -> None:
        """Audit until cancelled.

        Raises:
            MetadataError: the store failed.
        """
        self._figures.is_auditor = True
        try:
            await run_together(self._audit_bookies(), self._check_replicas())
        finally:
            self._figures.is_auditor, self._figures.ended_s = False, None

    async def _audit_bookies(self) -> None:
        changed = asyncio.Event()
        store, paths = self._context.store, self._context.paths
        unsubscribes = [
            store.watch(path, changed.set)
            for path in (paths.bookies_available, paths.bookies_readonly)
        ]
        try:
            while True:
                changed.clear()
                pause_s = await self._audit_once()
                try:
                    async with asyncio.timeout(pause_s):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            for unsubscribe in unsubscribes:
                unsubscribe()

    async def _audit_once(self) -> float:
        """Look at the bookies, and maybe at all ledgers; return the seconds to the next look."""
        lost, again_s = await self._look()
        now = _now_s()
        self._published.intersection_update(lost)
        if now >= self._scan_due or not self._published.issuperset(lost):
            await self._scan(lost)
            self._scan_due = _now_s() + self._config.audit_interval_s
            # The scan may have found bookies without a cookie.
            lost, again_s = await self._look()
            if not self._published.issuperset(lost):
                return _LOOK_S_MIN
        until_scan_s = max(self._scan_due - _now_s(), 0.0)
        due_s = until_scan_s if again_s is None else min(again_s, until_scan_s)
        return max(due_s, _LOOK_S_MIN)

    async def _look(self) -> tuple[tuple[BookieId, ...], float | None]:
        infos = await self._context.registry.get_bookies()
        registered = [info.bookie for info in infos]
        if self._shortage.has_eased(sum(not info.read_only for info in infos)):
            self._scan_due = _now_s()
        known = {each.bookie for each in await read_cookies(self._context)}
        result = self._audit.look(known=known | self._members, registered=registered, now=_now_s())
        self._figures.lost_bookies = len(result.lost)
        return result.lost, result.look_again_s

    async def _scan(self, lost: tuple[BookieId, ...]) -> None:
        members: set[BookieId] = set()
        count = small = unended = wanted = 0
        troubles = Troubles()
        async for metadata in self._ledgers(troubles):
            with troubles.isolated(f"auditing ledger {metadata.ledger_id}"):
                members |= members_of(metadata)
                wanted = max(wanted, wanted_copies(metadata))
                missing = lost_members(metadata, lost)
                # The recoverer of one without an end may have died, and until another one ends it
                # the last acknowledged entry is unknown.  The worker gives the first a grace.
                if missing or not is_sound(metadata):
                    await self._repairs.publish(metadata.ledger_id, missing=missing)
                    count += bool(missing)
                    small += lacks_copies(metadata)
                    unended += metadata.state is LedgerState.IN_RECOVERY
        self._figures.ended_s = steady_s()
        self._figures.left_out = troubles.count
        await self._repairs.tell("audit", troubles)
        self._members = members
        self._shortage.wanted = max(wanted, DEFAULT_QUORUM.write_quorum_size)
        self._published = set(lost)
        if lost:
            logger.info("lost bookies=%s ledgers=%d", ",".join(map(str, lost)), count)
        if small:
            logger.info("closed ledgers with fewer bookies than wanted: %d", small)
        if unended:
            logger.info("ledgers whose recovery has not ended: %d", unended)
        if count or small or unended:
            self._on_publish()

    async def _ledgers(
        self, troubles: Troubles, *, first: int = 0
    ) -> AsyncIterator[LedgerMetadata]:
        """Yield every ledger from `first` on; leave out a ledger that cannot be read."""
        async for ledger_id in self._context.ledger_store.list_ledgers(first=first):
            try:
                stored = await self._context.ledger_store.read(ledger_id)
            except LedgerNotFoundError:
                continue
            except CorruptMetadataError as error:
                logger.warning(
                    "ledger left out of the audit: %s; to do: dlog ledger show for its metadata; "
                    "its replicas are not watched",
                    error,
                )
                troubles.note(f"ledger {ledger_id}", error)
                continue
            yield stored.metadata

    async def _check_replicas(self) -> None:
        while True:
            await asyncio.sleep(await self._check_due_s())
            await self._check_all()

    async def _check_due_s(self) -> float:
        last = await self._repairs.read_last_check()
        if last is None:
            return 0.0
        # After a step back of the clock the next check must still begin some day.
        age_s = max(self._context.clock.now_ms() - last.finished_ms, 0) / 1000
        return max(self._config.check_interval_s - age_s, 0.0)

    async def _check_all(self) -> None:
        """Ask every bookie of every ledger for its entries; continue an interrupted check.

        Raises:
            MetadataError: the store failed, or another auditor is checking.
        """
        repairs, clock = self._repairs, self._context.clock
        progress = await repairs.begin_check(age_ms_max=self._config.check_interval_s * 1000)
        run = progress.run
        logger.info("full replica check begins ledger=%d", run.next_ledger_id)
        registered: list[BookieId] = []
        listed_at = -math.inf
        noted_at = _now_s()
        troubles = Troubles()
        async for metadata in self._ledgers(troubles, first=run.next_ledger_id):
            await asyncio.sleep(1 / self._config.check_ledgers_per_s)
            if _now_s() >= listed_at + _REGISTERED_FOR_S:
                listed_at = _now_s()
                infos = await self._context.registry.get_bookies()
                registered = [info.bookie for info in infos]
            is_missing, is_unknown = False, True
            with troubles.isolated(f"checking ledger {metadata.ledger_id}"):
                is_missing, is_unknown = await self._check_one(metadata, registered)
            if is_missing:
                # The worker finds it at its next poll.
                await repairs.publish(metadata.ledger_id, missing=())
            run = replace(
                run,
                finished_ms=clock.now_ms(),
                ledgers=run.ledgers + 1,
                under_replicated=run.under_replicated + is_missing,
                unknown=run.unknown + is_unknown,
                next_ledger_id=metadata.ledger_id + 1,
            )
            if _now_s() >= noted_at + _NOTED_EVERY_S:
                noted_at = _now_s()
                progress = await repairs.note_check(CheckProgress(run, progress.version))
        run = replace(run, finished_ms=clock.now_ms())
        await repairs.end_check(CheckProgress(run, progress.version))
        await repairs.tell("check", troubles)
        logger.info(
            "full replica check ended ledgers=%d under_replicated=%d unknown=%d",
            run.ledgers,
            run.under_replicated,
            run.unknown,
        )

    async def _check_one(
        self, metadata: LedgerMetadata, registered: Collection[BookieId]
    ) -> tuple[bool, bool]:
        """Return whether entries are missing, and whether any bookie did not answer."""
        answers = await ask_replicas(self._context, metadata, registered=registered)
        final = [each for each in check_ledger(metadata, answers) if each.fragment.is_final]
        return (
            not is_sound(metadata) or any(each.missing for each in final),
            any(each.unknown is not None for each in final),
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
