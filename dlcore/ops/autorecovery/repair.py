"""Repair of one ledger: missing entries are copied and verified before the metadata changes.

This order makes repair safe.  A bookie enters an ensemble after it has proved that it holds, on its
disk, every entry of its place.  Until then readers find the old ensemble.  The change is a
compare-and-set on the current metadata, whatever was planned before.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from dlcore.base.errors import (
    BookieError,
    DLError,
    LedgerError,
    LedgerNotFoundError,
    LedgerReadError,
    MetadataVersionError,
    NotEnoughBookiesError,
    ObjectStoreError,
)
from dlcore.ledger.metadata.values import LedgerState
from dlcore.metadata.port import Check
from dlcore.ops.autorecovery.check import Fragment, Held, fragments_of, missing_ranges
from dlcore.ops.autorecovery.copying import EntryCopier
from dlcore.ops.autorecovery.listing import LOCK_VERSION
from dlcore.ops.autorecovery.plan import (
    Join,
    Refill,
    RepairPlan,
    Replace,
    copy_lanes,
    joins_of,
    plan_repair,
)
from dlcore.ops.autorecovery.replicas import ask_replica, ask_replicas

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
    from typing import Any

    from dlcore.backends.direct.ports import NamespacePorts
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import BookieRegistration, LedgerMetadata
    from dlcore.ops.autorecovery.check import Answer
    from dlcore.ops.autorecovery.config import AutoRecoveryConfig
    from dlcore.ops.autorecovery.listing import ListedLedger
    from dlcore.wire.port import EntryRange

logger = logging.getLogger(__name__)

Mend: TypeAlias = "Callable[[int], Awaitable[str | None]]"
"""Mends a cold ledger, and returns why some of it is lost; empty: it is whole; None: not cold."""

_ROUNDS_MAX = 20
"""Most rounds of a repair.  Each round decides again from the current state; a repair that needs
more rounds does not converge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The reason why the ledger does not have all its replicas yet; empty: it has them.

    `retry_s` is the time until the next try, and `missing` are the bookies that are still lost, if
    they are known.
    """

    reason: str = ""
    retry_s: float | None = None
    missing: tuple[BookieId, ...] | None = None

    @property
    def is_done(self) -> bool:
        """Whether the ledger may be removed from the list."""
        return not self.reason


@dataclass(slots=True)
class _Round:
    """One decision about one ledger, and its result."""

    metadata: LedgerMetadata
    infos: Sequence[BookieRegistration]
    lost: frozenset[BookieId]
    answers: Mapping[BookieId, Answer]
    problems: list[str] = field(default_factory=list)
    retry_s: float | None = None
    has_progressed: bool = False
    lock: str = ""


@dataclass(frozen=True, slots=True)
class _Grace:
    """Since when a writer keeps each lost bookie; key None: since when a recovery is unfinished."""

    tail: object
    since: dict[BookieId | None, float]


class LedgerRepairer:
    """Repairs ledgers, one call each; remembers since when a writer keeps a lost bookie."""

    def __init__(
        self, context: NamespacePorts, config: AutoRecoveryConfig, mend: Mend | None = None
    ) -> None:
        self._context = context
        self._mend = mend
        self._config = config
        self._copier = EntryCopier(context, config)
        self._loop = asyncio.get_running_loop()
        self._graces: dict[int, _Grace] = {}  # by ledger
        # Targets of copies that were begun, by ledger, ensemble, and the bookie that is replaced
        # (None: it is a new place).
        self._chosen: dict[tuple[int, int, BookieId | None], BookieId] = {}

    async def repair(self, listed: ListedLedger, *, lock: str = "") -> Outcome:
        """Do all possible steps for a ledger.

        With `lock`, the path of the caller's repair lock, members are changed only while the lock
        is held: without the lock a bookie may drop the entries that it has proved to hold.

        Raises:
            MetadataError: the store failed; completed steps are kept.
        """
        if self._mend is not None:
            try:
                reason = await self._mend(listed.entry.ledger_id)
            except ObjectStoreError as error:
                return Outcome(reason=str(error))
            if reason is not None:
                return Outcome(reason=reason)
        for _ in range(_ROUNDS_MAX):
            try:
                decision = await self._decide(listed)
                if decision is None:
                    break
                current, plan = decision
                current.lock = lock
                await self._perform(current, plan)
            except LedgerNotFoundError:
                break  # the ledger was deleted
            if not current.has_progressed:
                return Outcome(
                    reason="; ".join(current.problems),
                    retry_s=current.retry_s,
                    missing=tuple(sorted(current.lost)),
                )
        else:
            return Outcome(reason=f"it is not whole after {_ROUNDS_MAX} rounds")
        self._graces.pop(listed.entry.ledger_id, None)
        return Outcome()

    def forget_graces(self) -> None:
        """Give every writer the whole grace again, because it was not observed meanwhile."""
        self._graces.clear()

    def keep_only(self, ledger_ids: Collection[int]) -> None:
        """Forget the state of other ledgers."""
        self._graces = {key: each for key, each in self._graces.items() if key in ledger_ids}
        self._chosen = {key: each for key, each in self._chosen.items() if key[0] in ledger_ids}

    async def _decide(self, listed: ListedLedger) -> tuple[_Round, RepairPlan] | None:
        """Plan from the current state; None if nothing is missing."""
        ledger_id = listed.entry.ledger_id
        stored = await self._context.ledger_store.read(ledger_id, fresh=True)
        infos = await self._context.registry.get_bookies()
        registered = {info.bookie for info in infos}
        current = _Round(
            metadata=stored.metadata,
            infos=infos,
            # A bookie that is back is not lost any more.  The auditor judges bookies that vanished
            # just now.
            lost=frozenset(each for each in listed.entry.missing if each not in registered),
            answers=await ask_replicas(self._context, stored.metadata, registered=registered),
        )
        plan = plan_repair(current.metadata, lost=current.lost, answers=current.answers)
        if plan.is_done:
            return None
        if not registered:
            current.problems.append("no bookie is registered")
            return current, RepairPlan(
                replaces=(),
                refills=(),
                lacks_copies=False,
                lost_in_tail=(),
                is_in_recovery=False,
                unknown=(),
            )
        return current, plan

    async def _perform(self, current: _Round, plan: RepairPlan) -> None:
        current.problems += plan.unknown
        for refill in plan.refills:
            await self._attempt(current, self._refill(current, refill))
        for replace in plan.replaces:
            await self._attempt(current, self._replace(current, replace))
        if plan.lacks_copies and not (plan.refills or plan.replaces):
            await self._attempt(current, self._join(current))
        if plan.lost_in_tail or plan.is_in_recovery:
            await self._attempt(current, self._end_tail(current, plan))
        else:
            self._graces.pop(current.metadata.ledger_id, None)

    async def _attempt(self, current: _Round, step: Coroutine[Any, Any, bool]) -> None:
        """Do one step; a failure does not prevent the other steps."""
        try:
            current.has_progressed |= await step
        except LedgerNotFoundError:
            raise
        except (BookieError, LedgerError) as error:
            logger.info("repair ledger=%d: %s", current.metadata.ledger_id, error)
            # An empty reason would mean that there is nothing left to do.
            current.problems.append(str(error) or type(error).__name__)

    async def _refill(self, current: _Round, refill: Refill) -> bool:
        await self._copy(current, refill.fragment, ranges=refill.ranges, target=refill.bookie)
        logger.info(
            "refilled ledger=%d first_entry=%d bookie=%s ranges=%d",
            current.metadata.ledger_id,
            refill.fragment.first_entry_id,
            refill.bookie,
            len(refill.ranges),
        )
        return True  # the next round verifies that the bookie holds them

    async def _replace(self, current: _Round, replace: Replace) -> bool:
        """Copy a lost bookie's entries to another one, and replace it by that one."""
        new = await self._bring(current, replace, replace.old)
        if await self._swap(current.metadata.ledger_id, replace, new, current.lock):
            self._chosen.pop(_key(current, replace, replace.old), None)
        # Also if another process changed the ensemble: then the next round decides again.
        return True

    async def _join(self, current: _Round) -> bool:
        """Copy a closed ledger to one more bookie for each ensemble, and let all of them join.

        The size of the ensembles is stored once per ledger.  Therefore the bookies join in one
        change, after each of them has proved that it holds its whole ensemble.
        """
        joined: dict[int, BookieId] = {}
        joins = joins_of(current.metadata)
        for join in joins:
            new = await self._bring(current, join, None)
            joined[join.fragment.first_entry_id] = new
        if await self._enlarge(current.metadata, joined, current.lock):
            for join in joins:
                self._chosen.pop(_key(current, join, None), None)
        return True  # as in `_replace`

    async def _bring(
        self, current: _Round, place: Replace | Join, old: BookieId | None
    ) -> BookieId:
        """Return the bookie for a place, once it has proved to hold all entries of the place."""
        key = _key(current, place, old)
        new = self._choose(current, place, old, begun=self._chosen.get(key))
        self._chosen[key] = new
        try:
            await self._bring_to(current, place, new)
        except LedgerReadError:
            raise  # the target is not at fault
        except (BookieError, LedgerError):
            self._chosen.pop(key, None)  # another target may succeed
            raise
        return new

    async def _bring_to(self, current: _Round, place: Replace | Join, new: BookieId) -> None:
        # Entries that an earlier attempt copied are not copied again.
        missing = await self._missing_on(new, current.metadata, place.fragment, place.position)
        if missing:
            await self._copy(current, place.fragment, ranges=missing, target=new)
            missing = await self._missing_on(new, current.metadata, place.fragment, place.position)
        if missing:
            raise NotEnoughBookiesError(
                f"{new} acknowledged the entries of place {place.position} but does not hold entry "
                f"{missing[0].first_entry_id}"
            )

    def _choose(
        self,
        current: _Round,
        place: Replace | Join,
        old: BookieId | None,
        *,
        begun: BookieId | None,
    ) -> BookieId:
        """Return the bookie for the place: the target of an earlier copy, if still possible."""
        members = place.fragment.ensemble.bookies
        candidates = [
            info.bookie
            for info in current.infos
            if not info.read_only and info.bookie not in members
        ]
        if begun is not None and begun in candidates:
            return begun
        quorum = current.metadata.quorum
        places: tuple[BookieId | None, ...] = members
        if old is None:
            places, quorum = (*members, None), quorum.enlarged()
        chosen = self._context.ledgers.placer.choose_replacements(
            current.infos, ensemble=places, positions=[place.position], quorum=quorum
        )
        if not chosen:
            raise _no_bookie(current, old, members)
        return chosen[place.position]

    async def _missing_on(
        self, bookie: BookieId, metadata: LedgerMetadata, fragment: Fragment, position: int
    ) -> Sequence[EntryRange]:
        answer = await ask_replica(self._context, bookie, metadata.ledger_id)
        if not isinstance(answer, Held):
            raise NotEnoughBookiesError(f"{bookie} cannot take entries: {answer.reason}")
        return missing_ranges(metadata.quorum, fragment, position, answer.ranges)

    async def _copy(
        self, current: _Round, fragment: Fragment, *, ranges: Sequence[EntryRange], target: BookieId
    ) -> None:
        lanes = copy_lanes(
            current.metadata.quorum,
            fragment,
            ranges=ranges,
            target=target,
            lost=current.lost,
            answers=current.answers,
        )
        for lane in lanes:
            await self._copier.copy(current.metadata.ledger_id, lane, target=target)

    async def _swap(self, ledger_id: int, replace: Replace, new: BookieId, lock: str) -> bool:
        """Compare-and-set the ensemble; False if its current state does not fit the copies."""
        first = replace.fragment.first_entry_id
        while True:
            stored = await self._context.ledger_store.read(ledger_id, fresh=True)
            found = next(
                (each for each in fragments_of(stored.metadata) if each.first_entry_id == first),
                None,
            )
            if (
                found is None
                or not found.is_final
                or found.last_entry_id != replace.fragment.last_entry_id
                or found.ensemble.bookies[replace.position] != replace.old
                or new in found.ensemble.bookies
            ):
                return False
            infos = await self._context.registry.get_bookies()
            if any(info.bookie == replace.old for info in infos):
                return False  # the bookie is back, with all its entries
            changed = stored.metadata.with_replaced(first_entry_id=first, old=replace.old, new=new)
            guards = [Check(lock, LOCK_VERSION)] if lock else []
            try:
                await self._context.ledger_store.write(
                    changed, version=stored.version, guards=guards
                )
            except (MetadataVersionError, LedgerNotFoundError):
                if lock:
                    await self._check_lock(lock)
                continue
            logger.info(
                "replaced ledger=%d first_entry=%d old=%s new=%s",
                ledger_id,
                first,
                replace.old,
                new,
            )
            return True

    async def _enlarge(
        self, planned: LedgerMetadata, joined: Mapping[int, BookieId], lock: str
    ) -> bool:
        """Compare-and-set the ledger with the joined bookies; False if it changed meanwhile."""
        ledger_id = planned.ledger_id
        stored = await self._context.ledger_store.read(ledger_id, fresh=True)
        # The new bookies have proved to hold the ensembles as they were planned.
        if stored.metadata != planned:
            return False
        changed = planned.with_joined(joined)
        guards = [Check(lock, LOCK_VERSION)] if lock else []
        try:
            await self._context.ledger_store.write(changed, version=stored.version, guards=guards)
        except (MetadataVersionError, LedgerNotFoundError):
            if lock:
                await self._check_lock(lock)
            return False
        new = ",".join(map(str, joined.values()))
        logger.info("enlarged ledger=%d to %s new=%s", ledger_id, changed.quorum, new)
        return True

    async def _check_lock(self, lock: str) -> None:
        """Raise if the lock is not in the state of a repair any more."""
        node = await self._context.store.get(lock, fresh=True)
        if node is None or node.version != LOCK_VERSION:
            raise NotEnoughBookiesError(
                f"the lock {lock} was lost while entries were copied: what the new member proved "
                "to hold may be gone"
            )

    async def _end_tail(self, current: _Round, plan: RepairPlan) -> bool:
        """Recover a ledger that has no working owner, after the grace.

        Until then its writer may still replace the lost bookie, or its recoverer may finish.
        """
        metadata = current.metadata
        if metadata.state is LedgerState.OPEN:
            self._check_successor(current, plan.lost_in_tail)
        left_s = self._grace_left_s(metadata, plan.lost_in_tail)
        lost = ", ".join(map(str, plan.lost_in_tail))
        what = f"{lost} lost" if lost else "recovery begun"
        if left_s > 0:
            current.retry_s = left_s
            current.problems.append(
                f"the ledger is {metadata.state.name} with {what}: it is recovered in "
                f"{left_s:.0f} s unless its owner does it"
            )
            return False
        if metadata.state is LedgerState.OPEN and not await self._is_still_kept(plan, metadata):
            return True  # the next round sees the writer's change
        logger.info("recovering ledger=%d: %s", metadata.ledger_id, what)
        await self._context.ledgers.recover_ledger(metadata.ledger_id)
        return True

    async def _is_still_kept(self, plan: RepairPlan, metadata: LedgerMetadata) -> bool:
        """Whether the writer still keeps the same lost bookies, after perhaps long copying."""
        stored = await self._context.ledger_store.read(metadata.ledger_id, fresh=True)
        if stored.metadata.state is not metadata.state:
            return False
        if stored.metadata.last_ensemble != metadata.last_ensemble:
            return False
        registered = {info.bookie for info in await self._context.registry.get_bookies()}
        return registered.isdisjoint(plan.lost_in_tail)

    def _grace_left_s(self, metadata: LedgerMetadata, lost: Sequence[BookieId]) -> float:
        """Return the rest of the grace, which begins when the first of these was seen lost."""
        now = self._loop.time()
        tail = (metadata.state, metadata.last_ensemble)
        known = self._graces.get(metadata.ledger_id)
        since = {} if known is None or known.tail != tail else known.since
        is_open = metadata.state is LedgerState.OPEN
        awaited: Sequence[BookieId | None] = lost if is_open else (None,)
        since = {each: since.get(each, now) for each in awaited}
        self._graces[metadata.ledger_id] = _Grace(tail, since)
        return min(since.values()) + self._config.open_ledger_grace_s - now

    def _check_successor(self, current: _Round, lost: Sequence[BookieId]) -> None:
        """Raise if no bookie can replace the lost ones, so that their writer is not fenced.

        The writer may be able to continue without them.  The grace begins when there is a bookie to
        take their place.
        """
        members = current.metadata.last_ensemble.bookies
        if not any(not i.read_only and i.bookie not in members for i in current.infos):
            self._graces.pop(current.metadata.ledger_id, None)
            raise _no_bookie(current, lost[0], members)


def _key(
    current: _Round, place: Replace | Join, old: BookieId | None
) -> tuple[int, int, BookieId | None]:
    return current.metadata.ledger_id, place.fragment.first_entry_id, old


def _no_bookie(current: _Round, lost: BookieId | None, members: Sequence[BookieId]) -> DLError:
    writable = [info.bookie for info in current.infos if not info.read_only]
    where = (
        "all of them in the ensemble; start another one"
        if set(members).issuperset(writable)
        else "none of them in a rack that is needed (enforce_racks is set); start one there"
    )
    metadata = current.metadata
    what = (
        f"join the {metadata.quorum.ensemble_size} that hold the ledger, where {metadata.wanted} "
        "is wanted"
        if lost is None
        else f"take the place of {lost}"
    )
    return NotEnoughBookiesError(
        f"no bookie can {what}: {len(writable)} are registered and writable, {where}"
    )
