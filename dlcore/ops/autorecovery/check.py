"""The check of replicas: the entries that each bookie should hold, against those that it reports.

An answer is a list of ranges, or unknown.  Only entries that a bookie has proven not to hold are
missing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata, LedgerState
from dlcore.wire.port import EntryRange, EntryRanges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dlcore.base.config import QuorumConfig
    from dlcore.base.ids import BookieId


@dataclass(frozen=True, slots=True)
class Held:
    """An answer: the bookie holds these ranges, ascending, and nothing else."""

    ranges: Sequence[EntryRange]


@dataclass(frozen=True, slots=True)
class Unknown:
    """No answer, and the reason."""

    reason: str


_RUNS_AT_ONCE = 65_536

Answer: TypeAlias = Held | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """The entries `first_entry_id` to `last_entry_id` of one ensemble; none if last < first.

    `is_final` means that any client may change the metadata of the ensemble: it is not the last
    ensemble of a ledger with a writer or a recoverer.
    """

    ensemble: Ensemble
    last_entry_id: int
    is_final: bool

    @property
    def first_entry_id(self) -> int:
        """The first entry, which identifies the ensemble."""
        return self.ensemble.first_entry_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCheck:
    """One bookie of one ensemble: ranges that it should hold and does not hold, or unknown."""

    fragment: Fragment
    position: int
    bookie: BookieId
    missing: Sequence[EntryRange] = ()
    unknown: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the bookie is proven to hold all entries that it should."""
        return not self.missing and self.unknown is None


def fragments_of(metadata: LedgerMetadata, *, last_add_confirmed: int = -1) -> list[Fragment]:
    """Return the ledger's fragments in order.

    In a CLOSED ledger, entries count up to its end.  In other ledgers they count up to
    `last_add_confirmed`, and completed ensembles count whole, because an ensemble change happens
    only after the last entry before it was confirmed.
    """
    is_closed = metadata.state is LedgerState.CLOSED
    end = metadata.last_entry_id if is_closed else last_add_confirmed
    fragments: list[Fragment] = []
    for index, ensemble in enumerate(metadata.ensembles):
        is_last = index == len(metadata.ensembles) - 1
        last = end if is_last else metadata.ensembles[index + 1].first_entry_id - 1
        if is_closed:
            last = min(last, end)
        fragments.append(
            Fragment(
                ensemble=ensemble,
                last_entry_id=max(last, ensemble.first_entry_id - 1),
                is_final=is_closed or not is_last,
            )
        )
    return fragments


def expected_ranges(
    quorum: QuorumConfig, *, position: int, first_entry_id: int, last_entry_id: int
) -> Iterator[EntryRange]:
    """Yield the ranges of entries that a position of an ensemble stores, ascending.

    Entry e belongs to the positions (e + i) mod E for i below Qw.
    """
    size, width = quorum.ensemble_size, quorum.write_quorum_size
    if first_entry_id > last_entry_id:
        return
    if size == width:
        yield EntryRange(first_entry_id=first_entry_id, last_entry_id=last_entry_id)
        return
    # Runs of Qw entries; the last entry of each has e mod E = position.
    last_of_run = first_entry_id + (position - first_entry_id) % size
    while last_of_run - width + 1 <= last_entry_id:
        yield EntryRange(
            first_entry_id=max(last_of_run - width + 1, first_entry_id),
            last_entry_id=min(last_of_run, last_entry_id),
        )
        last_of_run += size


def missing_ranges(
    quorum: QuorumConfig, fragment: Fragment, position: int, held: Sequence[EntryRange]
) -> EntryRanges:
    """Return the ranges that the position should hold of the fragment, without those in `held`.

    A striped ledger has many expected runs and many held ranges.  They are compared many at a time;
    only runs that are partly held are compared singly.
    """
    missing = EntryRanges()
    if quorum.ensemble_size == quorum.write_quorum_size:
        first, last = fragment.first_entry_id, fragment.last_entry_id
        _add_missing(missing, quorum, position, held, first=first, last=last)
    else:
        compact = held if isinstance(held, EntryRanges) else EntryRanges(held)
        _add_missing_runs(missing, quorum, fragment, position, compact)
    return missing


def _add_missing(
    missing: EntryRanges,
    quorum: QuorumConfig,
    position: int,
    held: Iterable[EntryRange],
    *,
    first: int,
    last: int,
) -> None:
    next_entry_id = first
    within = itertools.takewhile(lambda each: each.first_entry_id <= last, held)
    beyond = EntryRange(first_entry_id=last + 1, last_entry_id=last + 1)
    for each in itertools.chain(within, (beyond,)):
        for gap in expected_ranges(
            quorum,
            position=position,
            first_entry_id=next_entry_id,
            last_entry_id=each.first_entry_id - 1,
        ):
            missing.add(gap.first_entry_id, gap.last_entry_id)
        next_entry_id = max(next_entry_id, each.last_entry_id + 1)


def _add_missing_runs(
    missing: EntryRanges,
    quorum: QuorumConfig,
    fragment: Fragment,
    position: int,
    held: EntryRanges,
) -> None:
    if fragment.first_entry_id > fragment.last_entry_id:
        return
    size, width = quorum.ensemble_size, quorum.write_quorum_size
    held_firsts, held_lasts = held.columns()
    next_run = fragment.first_entry_id + (position - fragment.first_entry_id) % size
    while next_run - width + 1 <= fragment.last_entry_id:
        # The last entries of some runs; see `expected_ranges`.
        stop = min(next_run + _RUNS_AT_ONCE * size, fragment.last_entry_id + width)
        ends = np.arange(next_run, stop, size)
        firsts = np.maximum(ends - width + 1, fragment.first_entry_id)
        lasts = np.minimum(ends, fragment.last_entry_id)
        before = np.searchsorted(held_firsts, firsts, side="right") - 1
        beyond = np.searchsorted(held_firsts, lasts, side="right")
        reach = np.full(len(firsts), -1)
        reach[before >= 0] = held_lasts[before[before >= 0]]
        is_whole = (reach < firsts) & (beyond == before + 1)  # no entry of the run is held
        done = 0
        for index in np.flatnonzero((reach < lasts) & ~is_whole).tolist():
            part = slice(done, index)
            missing.extend(firsts[part][is_whole[part]], lasts[part][is_whole[part]])
            near = held[max(int(before[index]), 0) : int(beyond[index])]
            first, last = int(firsts[index]), int(lasts[index])
            _add_missing(missing, quorum, position, near, first=first, last=last)
            done = index + 1
        missing.extend(firsts[done:][is_whole[done:]], lasts[done:][is_whole[done:]])
        next_run = int(ends[-1]) + size


def check_ledger(
    metadata: LedgerMetadata,
    answers: Mapping[BookieId, Answer],
    *,
    last_add_confirmed: int = -1,
) -> list[ReplicaCheck]:
    """Compare every bookie of every ensemble with its answer; a missing answer is unknown."""
    checks: list[ReplicaCheck] = []
    for fragment in fragments_of(metadata, last_add_confirmed=last_add_confirmed):
        for position, bookie in enumerate(fragment.ensemble.bookies):
            answer = answers.get(bookie, Unknown("it was not asked"))
            missing: Sequence[EntryRange] = ()
            unknown = None
            if isinstance(answer, Held):
                missing = missing_ranges(metadata.quorum, fragment, position, answer.ranges)
            else:
                unknown = answer.reason
            checks.append(
                ReplicaCheck(
                    fragment=fragment,
                    position=position,
                    bookie=bookie,
                    missing=missing,
                    unknown=unknown,
                )
            )
    return checks
