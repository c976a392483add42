"""The plan for one ledger that lacks replicas: copies with source and target, and steps that wait.

Rules:

* A lost bookie is replaced, ensemble by ensemble, in every ensemble that is final.
* An entry that a live bookie is proven not to hold is added there again; the ensemble stays.
* The last ensemble of a ledger that is not CLOSED is left to its writer or recoverer; if this takes
  too long, the ledger is recovered first.
* A closed ledger that was created with fewer bookies than wanted gets one more, once its members
  are complete.  All ensembles get one at once, because their size is stored once per ledger.
* A member without an answer is neither replaced nor refilled: the ledger stays on the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.ledger.metadata.quorum import write_set
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState
from dlcore.ops.autorecovery.audit import lacks_copies
from dlcore.ops.autorecovery.check import Answer, Fragment, Held, check_ledger, fragments_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dlcore.base.config import QuorumConfig
    from dlcore.base.ids import BookieId
    from dlcore.wire.port import EntryRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """A lost bookie's place in a final ensemble, whose entries are copied to another bookie."""

    fragment: Fragment
    position: int
    old: BookieId


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """Entries that a live member should hold and does not hold."""

    fragment: Fragment
    position: int
    bookie: BookieId
    ranges: Sequence[EntryRange]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A new place at the end of one ensemble, for a bookie that will hold all its entries."""

    fragment: Fragment
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """The steps that one ledger needs; without any step it has all its replicas.

    `lost_in_tail` are lost members of the last ensemble of a ledger that is not CLOSED.
    `is_in_recovery` means that its recovery was begun.  `lacks_copies` means that one more bookie
    should store every entry; see `joins_of`.
    """

    replaces: tuple[Replace, ...]
    refills: tuple[Refill, ...]
    lacks_copies: bool
    lost_in_tail: tuple[BookieId, ...]
    is_in_recovery: bool
    unknown: tuple[str, ...]

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to do and nothing to wait for."""
        return not (
            self.replaces
            or self.refills
            or self.lacks_copies
            or self.lost_in_tail
            or self.is_in_recovery
            or self.unknown
        )


def joins_of(metadata: LedgerMetadata) -> list[Join]:
    """Return the new places in a closed ledger, one for each ensemble.

    Each member of such a ledger holds all entries of its ensemble, and so will the new ones; see
    `LedgerMetadata.with_joined`.
    """
    size = metadata.quorum.ensemble_size
    return [Join(fragment=each, position=size) for each in fragments_of(metadata)]


def plan_repair(
    metadata: LedgerMetadata, *, lost: Collection[BookieId], answers: Mapping[BookieId, Answer]
) -> RepairPlan:
    """Plan the repair of a ledger whose `lost` members will not come back."""
    is_closed = metadata.state is LedgerState.CLOSED
    replaces: list[Replace] = []
    refills: list[Refill] = []
    unknown: list[str] = []
    for check in check_ledger(metadata, answers):
        if not check.fragment.is_final:
            continue
        if check.bookie in lost:
            replaces.append(
                Replace(fragment=check.fragment, position=check.position, old=check.bookie)
            )
        elif check.unknown is not None:
            unknown.append(f"{check.bookie}: {check.unknown}")
        elif check.missing:
            refills.append(
                Refill(
                    fragment=check.fragment,
                    position=check.position,
                    bookie=check.bookie,
                    ranges=check.missing,
                )
            )
    tail = () if is_closed else metadata.last_ensemble.bookies
    return RepairPlan(
        replaces=tuple(replaces),
        refills=tuple(refills),
        lacks_copies=lacks_copies(metadata),
        lost_in_tail=tuple(each for each in tail if each in lost),
        is_in_recovery=metadata.state is LedgerState.IN_RECOVERY,
        unknown=tuple(dict.fromkeys(unknown)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLane:
    """Entries first, first + stride, … ≤ last; each of the `sources` should hold all of them.

    The sources are in the order to try.  First come bookies that report the entries, then bookies
    without an answer.  Last come the lost ones, which may still answer.
    """

    first_entry_id: int
    last_entry_id: int
    stride: int
    sources: tuple[BookieId, ...]


def copy_lanes(
    quorum: QuorumConfig,
    fragment: Fragment,
    *,
    ranges: Iterable[EntryRange],
    target: BookieId,
    lost: Collection[BookieId],
    answers: Mapping[BookieId, Answer],
) -> list[CopyLane]:
    """Return lanes that together hold exactly the entries of `ranges`, each entry once.

    Without striping, a lane is a range.  With striping, the entries of a lane have the same write
    set, so they are E apart.
    """
    size = quorum.ensemble_size
    is_striped = size != quorum.write_quorum_size
    lanes: list[CopyLane] = []
    open_lanes: dict[int, tuple[int, int]] = {}  # first and last entry, by residue

    def sources_of(entry_id: int) -> tuple[BookieId, ...]:
        members = [fragment.ensemble.bookies[p] for p in write_set(quorum, entry_id)]
        return tuple(
            sorted(
                (each for each in members if each != target),
                key=lambda each: (each in lost, not isinstance(answers.get(each), Held)),
            )
        )

    def close(first: int, last: int, stride: int) -> None:
        lanes.append(
            CopyLane(
                first_entry_id=first, last_entry_id=last, stride=stride, sources=sources_of(first)
            )
        )

    for each in ranges:
        if not is_striped:
            close(each.first_entry_id, each.last_entry_id, 1)
            continue
        for entry_id in range(each.first_entry_id, each.last_entry_id + 1):
            residue = entry_id % size
            first, last = open_lanes.get(residue, (entry_id, entry_id - size))
            if last + size != entry_id:
                close(first, last, size)
                first = entry_id
            open_lanes[residue] = first, entry_id
    for residue in sorted(open_lanes):
        close(*open_lanes[residue], size)
    return lanes
