"""The list of under-replicated ledgers in the metadata store, its locks, and the pause.

Any process may put a ledger on the list, any number of times.  Only the holder of the ledger's lock
removes it, and only by the version that was read before the ledger was found complete.  A finding
in between changes the version, so that the ledger stays on the list.  The lock only avoids double
work: two workers at one ledger do no harm.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.base.errors import (
    CorruptMetadataError,
    MetadataConnectionError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.metadata.one_node import change_node
from dlcore.metadata.paths import is_number
from dlcore.metadata.port import ANY_VERSION, Create, Delete, Op, Put
from dlcore.metadata.stored import decode, decode_or_tell, encode
from dlcore.ops.autorecovery.values import (
    ElectedAuditor,
    LastExport,
    ReplicaCheckRun,
    ScrubProgress,
    SweepTroubles,
    UnderReplicatedLedger,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection

    from dlcore.base.clock import Clock
    from dlcore.base.ids import BookieId
    from dlcore.base.isolating import Troubles
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, Versioned

logger = logging.getLogger(__name__)

LOCK_VERSION = 0
"""Version of a lock that a repair took; garbage collection leaves the same lock with another
version."""


@dataclass(frozen=True, slots=True)
class ListedLedger:
    """A ledger on the list, and the version that proves that nothing was found since."""

    entry: UnderReplicatedLedger
    version: int


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """A full replica check in progress, and its version: no other auditor has continued it."""

    run: ReplicaCheckRun
    version: int


class RepairList:
    """The list of one namespace."""

    def __init__(self, store: MetadataStore, paths: NamespacePaths, clock: Clock) -> None:
        self._store = store
        self._paths = paths
        self._clock = clock

    async def publish(self, ledger_id: int, *, missing: Collection[BookieId]) -> None:
        """Put a ledger on the list, or add to its entry; its version always changes."""
        path = self._paths.under_replicated_ledger(ledger_id)

        def change(node: Versioned | None) -> tuple[None, bytes]:
            if node is None:
                entry = UnderReplicatedLedger(
                    ledger_id=ledger_id,
                    missing=tuple(sorted(set(missing))),
                    since_ms=self._clock.now_ms(),
                )
            else:
                known = self._entry_in(ledger_id, node)
                entry = replace(
                    known,
                    missing=tuple(sorted({*known.missing, *missing})),
                    findings=known.findings + 1,
                )
            return None, encode(entry)

        await change_node(self._store, path, change, make_parents=True)

    async def read(self, ledger_id: int) -> ListedLedger | None:
        """Return the ledger's entry on the list, None if it is not listed.

        A ledger with a damaged node is still listed: its missing replicas are determined again.
        """
        node = await self._store.get(self._paths.under_replicated_ledger(ledger_id))
        return None if node is None else ListedLedger(self._entry_in(ledger_id, node), node.version)

    def _entry_in(self, ledger_id: int, node: Versioned) -> UnderReplicatedLedger:
        path = self._paths.under_replicated_ledger(ledger_id)
        try:
            return decode(UnderReplicatedLedger, node.value, source=path)
        except CorruptMetadataError as error:
            logger.warning(
                "on the list of repairs: %s; to do: dlog autorecovery status; what is damaged "
                "there is not repaired",
                error,
            )
            return UnderReplicatedLedger(
                ledger_id=ledger_id, missing=(), since_ms=self._clock.now_ms(), reason=str(error)
            )

    async def ledger_ids(self) -> AsyncGenerator[int, None]:
        """Yield the ids of the ledgers on the list, ascending."""
        root = self._paths.under_replicated
        for high in sorted(await self._numbers_below(root), key=int):
            for middle in await self._numbers_below(f"{root}/{high}"):
                for low in await self._numbers_below(f"{root}/{high}/{middle}"):
                    yield self._paths.ledger_id_of(high, middle, low)

    async def _numbers_below(self, parent: str) -> list[str]:
        """Return the child nodes of `parent` that are part of a ledger's path."""
        return [n for n in await self._store.get_children(parent) or () if is_number(n)]

    async def note_failure(
        self, listed: ListedLedger, reason: str, *, missing: Collection[BookieId] | None = None
    ) -> int | None:
        """Store why a repair did not finish; return the new version, or None if it had changed.

        `missing` are the bookies that are still lost.  A bookie that came back gets the whole delay
        the next time.
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
            return None  # the ledger was found again meanwhile: the new finding stays

    async def remove(self, listed: ListedLedger) -> bool:
        """Remove a ledger from the list; False if it was found again since it was read."""
        path = self._paths.under_replicated_ledger(listed.entry.ledger_id)
        try:
            await self._store.delete(path, version=listed.version)
        except MetadataVersionError:
            return False
        except NoNodeError:
            return True
        return True

    async def lock(self, ledger_id: int, *, owner: str) -> bool:
        """Take the ledger's lock for this session, as `owner`; False if another process has it."""
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
        node = await self._store.get(path)  # it may be ours, if a reply was lost
        return node is not None and node.value == owner.encode()

    async def unlock(self, ledger_id: int, *, owner: str) -> None:
        """Release `owner`'s lock; without an answer it is removed with the session.

        A lock that another process has taken since, because our session was lost, stays.
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
        """Pause auto-recovery in all processes, or resume it; the setting is permanent."""
        path = self._paths.autorecovery_paused
        with contextlib.suppress(NodeExistsError, NoNodeError):
            if is_paused:
                await self._store.create(path, make_parents=True)
            else:
                await self._store.delete(path)

    async def read_auditor(self) -> ElectedAuditor | None:
        """Return the current auditor, None if there is none."""
        path = self._paths.auditor
        node = await self._store.get(path)
        tell = partial(logger.warning, "the node of the auditor cannot be read: %s")
        return decode_or_tell(ElectedAuditor, node, source=path, tell=tell)

    async def tell(self, sweep: str, troubles: Troubles, *, worker: str = "") -> None:
        """Store for operators what a sweep had to leave out; delete it after one without problems.

        `worker` tells several apart that sweep at the same time, each a part.  The node of each
        vanishes with its session.

        The information is for people only: if it cannot be stored, the sweep continues, and the log
        has it.
        """
        path = self._paths.troubles_of(f"{sweep}-{worker}" if worker else sweep)
        stored = SweepTroubles(
            sweep=sweep,
            at_ms=self._clock.now_ms(),
            count=troubles.count,
            found=tuple(troubles.found),
        )
        try:
            if await self._store.get(path) is None:
                if troubles.count:
                    await self._store.create(
                        path, encode(stored), ephemeral=bool(worker), make_parents=True
                    )
            elif troubles.count:
                await self._store.put(path, encode(stored), version=ANY_VERSION)
            else:
                await self._store.delete(path)
        except (NodeExistsError, NoNodeError, MetadataConnectionError) as error:
            logger.info("the failures of %s are not published: %s", sweep, error)

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
        """Return the last full replica check that was completed."""
        _, run = await self._read_check(self._paths.last_check)
        return run

    async def read_scrub(self) -> ScrubProgress | None:
        """Return the pass of scrubbing over cold objects, or the last one."""
        path = self._paths.scrub_progress
        node = await self._store.get(path)
        tell = partial(logger.warning, "what was scrubbed cannot be read: %s")
        return decode_or_tell(ScrubProgress, node, source=path, tell=tell)

    async def read_last_export(self) -> LastExport | None:
        """Return the newest periodic export of the metadata."""
        path = self._paths.last_export
        node = await self._store.get(path)
        tell = partial(logger.warning, "which export is the newest cannot be read: %s")
        return decode_or_tell(LastExport, node, source=path, tell=tell)

    async def begin_check(self, *, age_ms_max: float) -> CheckProgress:
        """Return the full replica check to continue, or a new one.

        A check that began more than `age_ms_max` ago is not continued, because its results are too
        old.
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
        """Store the progress of a check; return it with its new version.

        Raises:
            MetadataVersionError, NoNodeError: another auditor checks now, or has ended the check.
        """
        version = await self._store.put(
            self._paths.check_progress, encode(progress.run), version=progress.version
        )
        return CheckProgress(progress.run, version)

    async def end_check(self, progress: CheckProgress) -> None:
        """Store a completed check, and delete its progress, in one transaction.

        Raises:
            MetadataVersionError, NoNodeError: another auditor checks now, or has ended the check.
        """
        path, value = self._paths.last_check, encode(progress.run)
        node = await self._store.get(path)
        store: Op = Create(path, value) if node is None else Put(path, value, node.version)
        await self._store.multi([Delete(self._paths.check_progress, progress.version), store])

    async def _read_check(self, path: str) -> tuple[Versioned | None, ReplicaCheckRun | None]:
        """Return a node and the check in it; a damaged one counts as none."""
        node = await self._store.get(path)
        tell = partial(logger.warning, "a full replica check counts as none: %s")
        return node, decode_or_tell(ReplicaCheckRun, node, source=path, tell=tell)
