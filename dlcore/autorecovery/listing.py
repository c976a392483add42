"""The list of under-replicated ledgers in the metadata store, its locks, and the pause.

Anybody may put a ledger on the list, any number of times; only who holds its lock takes it off, and
only by the version that was read before the ledger was found whole: a finding made meanwhile has
changed the version and stays.  The lock spares double work and no more: two workers at one ledger
do no harm.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.autorecovery.values import (
    ElectedAuditor,
    ReplicaCheckRun,
    SweepTroubles,
    UnderReplicatedLedger,
)
from dlcore.errors import (
    CorruptMetadataError,
    MetadataConnectionError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.metadata.paths import is_number
from dlcore.metadata.port import ANY_VERSION, Create, Delete, Op, Put
from dlcore.metadata.stored import decode, decode_or_tell, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from dlcore.clock import Clock
    from dlcore.ids import BookieId
    from dlcore.isolating import Troubles
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, Versioned

logger = logging.getLogger(__name__)

LOCK_VERSION = 0
"""Of a lock that a repair took; garbage collection takes the same, as another version."""
_ATTEMPTS_MAX = 20
"""Lost races and lost replies of one write; each race that is lost shows somebody's success."""


@dataclass(frozen=True, slots=True)
class ListedLedger:
    """A ledger on the list, and the version that says nothing was found since."""

    entry: UnderReplicatedLedger
    version: int


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """A full replica check under way, and the version that says nobody else is at it."""

    run: ReplicaCheckRun
    version: int


class RepairList:
    """The list of one namespace."""

    def __init__(self, store: MetadataStore, paths: NamespacePaths, clock: Clock) -> None:
        self._store = store
        self._paths = paths
        self._clock = clock

    async def publish(self, ledger_id: int, *, missing: Collection[BookieId]) -> None:
        """Put a ledger on the list, or add to what is known of it; its version always changes."""
        path = self._paths.under_replicated_ledger(ledger_id)
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            try:
                listed = await self.read(ledger_id)
                if listed is None:
                    entry = UnderReplicatedLedger(
                        ledger_id=ledger_id,
                        missing=tuple(sorted(set(missing))),
                        since_ms=self._clock.now_ms(),
                    )
                    value = encode(entry)
                    await self._store.create(path, value, make_parents=True)
                else:
                    entry = replace(
                        listed.entry,
                        missing=tuple(sorted({*listed.entry.missing, *missing})),
                        findings=listed.entry.findings + 1,
                    )
                    value = encode(entry)
                    await self._store.put(path, value, version=listed.version)
            except (NodeExistsError, NoNodeError, MetadataVersionError, MetadataConnectionError):
                # Somebody else wrote it, or we did and the reply was lost: once more does no harm.
                if attempt == _ATTEMPTS_MAX:
                    raise
            else:
                return

    async def read(self, ledger_id: int) -> ListedLedger | None:
        """Return the ledger as it is on the list, if it is.

        One whose node is damaged is on the list all the same: what it lacks is found out anew.
        """
        path = self._paths.under_replicated_ledger(ledger_id)
        node = await self._store.get(path)
        if node is None:
            return None
        try:
            entry = decode(UnderReplicatedLedger, node.value, source=path)
        except CorruptMetadataError as error:
            logger.warning("on the list of repairs: %s", error)
            entry = UnderReplicatedLedger(
                ledger_id=ledger_id, missing=(), since_ms=self._clock.now_ms(), reason=str(error)
            )
        return ListedLedger(entry, node.version)

    async def ledger_ids(self) -> AsyncIterator[int]:
        """Yield the ids of the ledgers on the list, ascending."""
        root = self._paths.under_replicated
        for high in sorted(await self._numbers_below(root), key=int):
            for middle in await self._numbers_below(f"{root}/{high}"):
                for low in await self._numbers_below(f"{root}/{high}/{middle}"):
                    yield self._paths.ledger_id_of(high, middle, low)

    async def _numbers_below(self, parent: str) -> list[str]:
        """Return the names of the nodes below one that are part of a ledger's path."""
        return [n for n in await self._store.get_children(parent) or () if is_number(n)]

    async def note_failure(
        self, listed: ListedLedger, reason: str, *, missing: Collection[BookieId] | None = None
    ) -> int | None:
        """Write down why a repair did not finish; return the version, or None if it changed.

        `missing` is who is still lost: who came back has the whole delay again the next time.
        """
        entry = replace(
            listed.entry,
            missing=listed.entry.missing if missing is None else tuple(sorted(missing)),
            attempts=listed.entry.attempts + 1,
            reason=reason,
        )
        path = self._paths.under_replicated_ledger(entry.ledger_id)
        try:
            return await self._store.put(path, encode(entry), version=listed.version)
        except (MetadataVersionError, NoNodeError):
            return None  # found again meanwhile: that comes first

    async def remove(self, listed: ListedLedger) -> bool:
        """Take a ledger off the list; False if it was found again since it was read."""
        path = self._paths.under_replicated_ledger(listed.entry.ledger_id)
        try:
            await self._store.delete(path, version=listed.version)
        except MetadataVersionError:
            return False
        except NoNodeError:
            return True
        return True

    async def lock(self, ledger_id: int, *, owner: str) -> bool:
        """Take the ledger's lock for this session, as `owner`; False if somebody else has it."""
        path = self._paths.repair_lock(ledger_id)
        with contextlib.suppress(NodeExistsError, MetadataConnectionError):
            try:
                await self._store.create(path, owner.encode(), ephemeral=True)
            except NoNodeError:
                with contextlib.suppress(NodeExistsError):
                    parent = path.rpartition("/")[0]
                    await self._store.create(parent, make_parents=True)
                await self._store.create(path, owner.encode(), ephemeral=True)
            return True
        node = await self._store.get(path)  # ours, too, if a reply was lost
        return node is not None and node.value == owner.encode()

    async def unlock(self, ledger_id: int, *, owner: str) -> None:
        """Give `owner`'s lock up; without an answer it goes with the session.

        One that somebody else has taken since, because our session was lost, stays.
        """
        path = self._paths.repair_lock(ledger_id)
        node = await self._store.get(path)
        if node is not None and node.value == owner.encode():
            with contextlib.suppress(NoNodeError, MetadataVersionError):
                await self._store.delete(path, version=node.version)

    async def is_paused(self) -> bool:
        """Whether auto-recovery is paused."""
        return await self._store.get(self._paths.autorecovery_paused) is not None

    async def set_paused(self, *, is_paused: bool) -> None:
        """Pause auto-recovery everywhere, or let it go on; lasts until it is changed."""
        path = self._paths.autorecovery_paused
        with contextlib.suppress(NodeExistsError, NoNodeError):
            if is_paused:
                await self._store.create(path, make_parents=True)
            else:
                await self._store.delete(path)

    async def read_auditor(self) -> ElectedAuditor | None:
        """Return who is the auditor."""
        path = self._paths.auditor
        node = await self._store.get(path)
        tell = partial(logger.warning, "who is the auditor cannot be read: %s")
        return decode_or_tell(ElectedAuditor, node, source=path, tell=tell)

    async def tell(self, sweep: str, troubles: Troubles) -> None:
        """Let operators see what a sweep had to leave out, until one leaves nothing out.

        It is for people: where it cannot be stored the sweep goes on, and the log tells.
        """
        path = self._paths.troubles_of(sweep)
        told = SweepTroubles(
            sweep=sweep,
            at_ms=self._clock.now_ms(),
            count=troubles.count,
            found=tuple(troubles.found),
        )
        try:
            if await self._store.get(path) is None:
                if troubles.count:
                    await self._store.create(path, encode(told), make_parents=True)
            elif troubles.count:
                await self._store.put(path, encode(told), version=ANY_VERSION)
            else:
                await self._store.delete(path)
        except (NodeExistsError, NoNodeError, MetadataConnectionError) as error:
            logger.info("troubles of %s are not told: %s", sweep, error)

    async def read_troubles(self) -> list[SweepTroubles]:
        """Return what the last sweeps had to leave out."""
        parent = self._paths.troubles
        paths = [f"{parent}/{name}" for name in await self._store.get_children(parent) or ()]
        tell = partial(logger.warning, "troubles cannot be read: %s")
        found = (
            decode_or_tell(SweepTroubles, node, source=path, tell=tell)
            for path, node in zip(paths, await self._store.get_many(paths), strict=True)
        )
        return list(filter(None, found))

    async def read_last_check(self) -> ReplicaCheckRun | None:
        """Return the last full replica check that came to its end."""
        _, run = await self._read_check(self._paths.last_check)
        return run

    async def begin_check(self, *, age_ms_max: float) -> CheckProgress:
        """Return the full replica check to go on with, or one that begins now.

        One that is older is not worth going on with: what it looked at is long ago.
        """
        path, now_ms = self._paths.check_progress, self._clock.now_ms()
        node, run = await self._read_check(path)
        if node is not None and run is not None and 0 <= now_ms - run.started_ms <= age_ms_max:
            return CheckProgress(run, node.version)
        run = ReplicaCheckRun(
            started_ms=now_ms, finished_ms=now_ms, ledgers=0, under_replicated=0, unknown=0
        )
        if node is None:
            await self._store.create(path, encode(run), make_parents=True)
            return CheckProgress(run, 0)
        return await self.note_check(CheckProgress(run, node.version))

    async def note_check(self, progress: CheckProgress) -> CheckProgress:
        """Store how far a check is; return it with its new version.

        Raises:
            MetadataVersionError, NoNodeError: another auditor checks now, or has ended the check.
        """
        version = await self._store.put(
            self._paths.check_progress, encode(progress.run), version=progress.version
        )
        return CheckProgress(progress.run, version)

    async def end_check(self, progress: CheckProgress) -> None:
        """Store a check that came to its end, in one transaction with the end of its progress.

        Raises:
            MetadataVersionError, NoNodeError: another auditor checks now, or has ended the check.
        """
        path, value = self._paths.last_check, encode(progress.run)
        node = await self._store.get(path)
        store: Op = Create(path, value) if node is None else Put(path, value, node.version)
        await self._store.multi([Delete(self._paths.check_progress, progress.version), store])

    async def _read_check(self, path: str) -> tuple[Versioned | None, ReplicaCheckRun | None]:
        """Return a node and the check that it tells of; a damaged one counts as none."""
        node = await self._store.get(path)
        tell = partial(logger.warning, "a full replica check counts as none: %s")
        return node, decode_or_tell(ReplicaCheckRun, node, source=path, tell=tell)
