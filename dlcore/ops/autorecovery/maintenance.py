"""Operations on replicas for operators: status, checks, and manual work."""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.base.errors import (
    ConfigurationError,
    CorruptMetadataError,
    DecommissionError,
    LedgerNotFoundError,
    MetadataConnectionError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.ledger.metadata.values import BookieCookie, BookieRegistration
from dlcore.metadata.one_node import change_node
from dlcore.metadata.port import ANY_VERSION, Create, Delete
from dlcore.metadata.stored import decode
from dlcore.ops.autorecovery.audit import is_sound
from dlcore.ops.autorecovery.check import ReplicaCheck, check_ledger
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.autorecovery.replicas import ask_replicas, members_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from dlcore.backends.direct.ports import NamespacePorts
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.metadata.port import Op
    from dlcore.ops.autorecovery.values import (
        ElectedAuditor,
        LastExport,
        ReplicaCheckRun,
        ScrubProgress,
        SweepTroubles,
        UnderReplicatedLedger,
    )

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_WARNING_S = 60.0
"""How often a decommission repeats what keeps it from an end."""
_REASONS_SHOWN_MAX = 3
_REASONS_SOUGHT_MAX = 100
"""Most ledgers whose failure is read to find reasons: most repairs fail for the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryStatus:
    """Status of auto-recovery; `ledgers` lack replicas, ascending by id."""

    auditor: ElectedAuditor | None
    is_paused: bool
    ledgers: tuple[UnderReplicatedLedger, ...]
    last_check: ReplicaCheckRun | None
    troubles: tuple[SweepTroubles, ...] = ()
    scrub: ScrubProgress | None = None
    """The pass over the objects of cold segments."""
    export: LastExport | None = None
    """The newest periodic export of the metadata."""

    @property
    def left_out(self) -> list[str]:
        """Items that the last sweeps left out, each once, and last how many are not named."""
        named = list(dict.fromkeys(text for each in self.troubles for text in each.found))
        more = sum(each.count - len(each.found) for each in self.troubles)
        return [*named, f"{more} more, which the logs of auto-recovery name"] if more else named


class Maintenance:
    """Operations on the replicas of one namespace."""

    def __init__(self, context: NamespacePorts) -> None:
        self._context = context
        self._repairs = RepairList(context.store, context.paths, context.clock)

    async def read_status(self) -> RecoveryStatus:
        """Return the status of auto-recovery."""
        await self._context.store.sync(self._context.paths.root)
        ledgers: list[UnderReplicatedLedger] = []
        async for ledger_id in self._repairs.ledger_ids():
            listed = await self._repairs.read(ledger_id)
            if listed is not None:
                ledgers.append(listed.entry)
        return RecoveryStatus(
            auditor=await self._repairs.read_auditor(),
            is_paused=await self._repairs.is_paused(),
            ledgers=tuple(ledgers),
            last_check=await self._repairs.read_last_check(),
            scrub=await self._repairs.read_scrub(),
            export=await self._repairs.read_last_export(),
            troubles=tuple(await self._repairs.read_troubles()),
        )

    async def check_ledger(self, ledger_id: int) -> tuple[LedgerMetadata, list[ReplicaCheck]]:
        """Compare the entries of each bookie of each ensemble with those that it should hold.

        In a ledger that is not closed, the last ensemble is checked up to the LAC.

        Raises:
            LedgerNotFoundError: there is no such ledger.
            LedgerReadError: too few bookies answered with its LAC.
        """
        reader = await self._context.ledgers.open_ledger(ledger_id)
        lac = await reader.read_last_add_confirmed()
        metadata = reader.metadata
        infos = await self._context.registry.get_bookies()
        answers = await ask_replicas(
            self._context, metadata, registered={info.bookie for info in infos}
        )
        return metadata, check_ledger(metadata, answers, last_add_confirmed=lac)

    async def decommission(
        self,
        name: str,
        *,
        timeout_s: float,
        report: Callable[[str], None],
        warn: Callable[[str], None] | None = None,
    ) -> int:
        """Decommission a stopped bookie: its ledgers get other replicas, and its cookie is deleted.

        Auto-recovery does the work, at once and without the delay for lost bookies.  This call
        waits for it, and reports progress in sentences.  It warns of what keeps it from an end:
        at once, when this changes, and each minute.  It may be called again after any result.

        Returns:
            Number of ledgers that were moved.

        Raises:
            ConfigurationError: no bookie of that name is known.
            DecommissionError: the bookie is registered, or was set up again meanwhile, or ledgers
                still need it after `timeout_s`.
        """
        await self._require_stopped(name)
        cookie = await self._read_cookie(name)
        left = await self.ledgers_of(name)
        if cookie is None and not left:
            raise ConfigurationError(f"name={name!r}: no bookie of that name has a cookie or data")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        moved = 0
        while left:
            report(f"{len(left)} ledgers refer to {name}")
            moved += len(left)
            for ledger_id, members in left.items():
                await self._repairs.publish(ledger_id, missing=members)
            await self._wait_until_moved(
                name, dict(left), deadline=deadline, report=report, warn=warn or report
            )
            left = await self.ledgers_of(name)  # a writer may have chosen it meanwhile
        if cookie is not None:
            await self._delete_cookie(name, incarnation=cookie.incarnation)
        return moved

    async def hold_read_only(self, name: str, *, is_held: bool) -> None:
        """Exclude a bookie from new ledgers, also after a restart, or end the exclusion.

        A running bookie registers as read-only within moments; writes to its existing ledgers
        continue.

        Raises:
            ConfigurationError: no bookie of that name is known.
        """
        await self._require_cookie(name)
        path = self._context.paths.bookie_held(name)
        try:
            if is_held:
                await self._context.store.create(path, make_parents=True)
            else:
                await self._context.store.delete(path, version=ANY_VERSION)
        except (NodeExistsError, NoNodeError):
            return  # it has this state already

    async def release_garbage(self, name: str) -> None:
        """Let a bookie collect once the garbage that its brake holds back.

        Raises:
            ConfigurationError: no bookie of that name is known.
        """
        cookie = await self._require_cookie(name)
        path = self._context.paths.garbage_release(name)
        value = cookie.incarnation.encode()
        await change_node(self._context.store, path, lambda _: (None, value), make_parents=True)

    async def _require_stopped(self, name: str) -> Sequence[BookieRegistration]:
        """Return the bookies that are registered; raise if one of them has that name."""
        infos = await self._context.registry.get_bookies()
        for info in infos:
            if info.bookie.name == name:
                raise DecommissionError(
                    f"bookie {name} is registered at {info.address}: stop it first, and wait until "
                    "its registration is gone"
                )
        return infos

    async def _read_cookie(self, name: str) -> BookieCookie | None:
        path = self._context.paths.cookie(name)
        node = await self._context.store.get(path, fresh=True)
        return None if node is None else decode(BookieCookie, node.value, source=path)

    async def _require_cookie(self, name: str) -> BookieCookie:
        cookie = await self._read_cookie(name)
        if cookie is None:
            raise ConfigurationError(f"name={name!r}: no bookie of that name has a cookie")
        return cookie

    async def _delete_cookie(self, name: str, *, incarnation: str) -> None:
        """Delete the cookie of that incarnation, if its bookie is still not registered."""
        found = await self._read_cookie(name)
        if found is None:
            return  # another process deleted it
        if found.incarnation != incarnation:
            raise DecommissionError(
                f"bookie {name} was set up anew as another incarnation, {found.incarnation}, while "
                f"{incarnation} was decommissioned: its cookie stays"
            )
        store, paths = self._context.store, self._context.paths
        places = (paths.bookie_available(name), paths.bookie_readonly(name))
        # A node that can be created does not exist.  A transaction has no other way to check this.
        proof: list[Op] = [each for path in places for each in (Create(path), Delete(path))]
        try:
            await store.multi([*proof, Delete(paths.cookie(name))])
        except NodeExistsError:
            raise DecommissionError(
                f"bookie {name} was started meanwhile: stop it, and decommission it again"
            ) from None
        except NoNodeError:
            return  # another process deleted it
        except MetadataConnectionError:
            # The answer was lost: the cookie may be gone all the same.
            if await self._read_cookie(name) is not None:
                raise

    async def delete_cookie(self, name: str) -> str:
        """Forget the disk of a stopped bookie; return its incarnation.

        Raises:
            ConfigurationError: no bookie of that name has a cookie.
            DecommissionError: it is registered.
        """
        await self._require_stopped(name)
        cookie = await self._require_cookie(name)
        await self._delete_cookie(name, incarnation=cookie.incarnation)
        return cookie.incarnation

    async def ledgers_of(
        self, name: str, *, report: Callable[[int], None] = lambda _: None
    ) -> dict[int, tuple[BookieId, ...]]:
        """Return the ledgers that refer to a bookie of that name, and its incarnations in each.

        `report` gets the number of ledgers read so far.
        """
        found: dict[int, tuple[BookieId, ...]] = {}
        looked_at = 0
        await self._context.store.sync(self._context.paths.ledgers)
        async for ledger_id in self._context.ledger_store.list_ledgers():
            members = _named(await self._metadata_of(ledger_id), name)
            if members:
                found[ledger_id] = members
            looked_at += 1
            report(looked_at)
        return found

    async def _metadata_of(self, ledger_id: int) -> LedgerMetadata | None:
        """Return the metadata of a ledger; None if it is gone, or is damaged, which is logged."""
        try:
            return (await self._context.ledger_store.read(ledger_id)).metadata
        except LedgerNotFoundError:
            return None
        except CorruptMetadataError as error:
            logger.warning(
                "cannot read the bookies of ledger %d: %s; to do: dlog ledger show for its "
                "metadata; it is not counted",
                ledger_id,
                error,
            )
            return None

    async def _wait_until_moved(
        self,
        name: str,
        left: dict[int, tuple[BookieId, ...]],
        *,
        deadline: float,
        report: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        warned, warned_s = "", loop.time()
        while True:
            # Auto-recovery does not move ledgers of a bookie that is back.
            infos = await self._require_stopped(name)
            count = len(left)
            stuck: list[LedgerMetadata] = []
            for ledger_id in list(left):
                metadata = await self._metadata_of(ledger_id)
                members = _named(metadata, name)
                if metadata is None or not members:
                    del left[ledger_id]
                    continue
                if _has_no_candidate(metadata, members, infos):
                    stuck.append(metadata)
                listed = await self._repairs.read(ledger_id)
                if listed is None or not set(members).issubset(listed.entry.missing):
                    # A worker removed the ledger from the list because the bookie was registered
                    # for a moment.
                    await self._repairs.publish(ledger_id, missing=members)
            if not left:
                return
            if len(left) != count:
                report(f"{len(left)} ledgers left")
            blocked = await self._what_blocks() or _too_few(name, len(left), stuck, infos)
            blocked = blocked or await self._failures(left)
            if blocked and (blocked != warned or loop.time() - warned_s >= _WARNING_S):
                warn(blocked)
                warned, warned_s = blocked, loop.time()
            if loop.time() >= deadline:
                raise DecommissionError(
                    f"{len(left)} ledgers still need bookie {name}: "
                    f"{blocked or 'auto-recovery is at work: try again'}"
                )
            await asyncio.sleep(_POLL_S)

    async def _what_blocks(self) -> str:
        """Return why auto-recovery does not work, if it does not."""
        if await self._repairs.is_paused():
            return "auto-recovery is paused: dlog autorecovery pause --off lets it go on"
        if await self._repairs.read_auditor() is None:
            return "no auto-recovery runs: start one with dlog autorecovery run"
        return ""

    async def _failures(self, left: Mapping[int, object]) -> str:
        """Return why the last attempts of auto-recovery to move some of the ledgers failed."""
        reasons: list[str] = []
        for ledger_id in itertools.islice(left, _REASONS_SOUGHT_MAX):
            listed = await self._repairs.read(ledger_id)
            if listed is not None and listed.entry.reason:
                reasons.append(f"ledger {ledger_id}: {listed.entry.reason}")
            if len(reasons) == _REASONS_SHOWN_MAX:
                break
        return "; ".join(reasons)


def _named(metadata: LedgerMetadata | None, name: str) -> tuple[BookieId, ...]:
    """Return the members of a ledger that have that name."""
    members = members_of(metadata) if metadata is not None else ()
    return tuple(sorted(each for each in members if each.name == name))


def _has_no_candidate(
    metadata: LedgerMetadata, gone: Collection[BookieId], infos: Iterable[BookieRegistration]
) -> bool:
    """Return whether no bookie can take the place of a `gone` one in one of the ensembles."""
    writable = {info.bookie for info in infos if not info.read_only}
    return any(
        writable.issubset(ensemble.bookies)
        for ensemble in metadata.ensembles
        if not set(gone).isdisjoint(ensemble.bookies)
    )


def _too_few(
    name: str, left: int, stuck: Sequence[LedgerMetadata], infos: Sequence[BookieRegistration]
) -> str:
    """Return why the `stuck` ones of so many ledgers get no other copy; empty if there is none."""
    if not stuck:
        return ""
    first = stuck[0]
    writable = sum(not info.read_only for info in infos)
    return (
        f"too few bookies: {len(stuck)} of {left} ledgers, such as ledger {first.ledger_id} with "
        f"E/Qw/Qa {first.quorum}, need another bookie in the place of {name}; {writable} are "
        f"registered and writable, {len(infos) - writable} read-only, and all that are writable "
        "hold them already; to do: start another bookie, and this goes on by itself"
    )


def is_replicated(metadata: LedgerMetadata, checks: list[ReplicaCheck]) -> bool:
    """Return whether every bookie is proven complete, and the ledger has an end or a writer.

    A closed ledger with fewer bookies than wanted is not fully replicated.
    """
    return is_sound(metadata) and all(check.is_complete for check in checks)
