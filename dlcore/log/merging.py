"""Which small extents of a segment to merge: pure planning, no I/O.

Theory of operation.  Each extent has a weight: its bytes, and something for each entry, so that
weights add up when extents are merged.  From `large_weight` on an extent is left alone.  Adjacent
lighter ones are merged where together they weigh at least `fan_in` times the heaviest of them.  So
a record that is copied lies in an extent at least `fan_in` times as heavy afterwards: it is copied
at most log(large_weight / lightest) / log(fan_in) times, rounded up, however long the log lives.

A run lies within one segment, so that no position changes.  It is bounded by weight and by the
numbers of its extents and ledgers, so that one step is bounded in time and in the size of its
transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.config import MIB, require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.log.segment import Extent

ENTRY_WEIGHT = 1024
"""What an entry costs a reader beside its bytes, in bytes that it could have read meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePolicy:
    """What is small, and how much is merged in one step."""

    large_weight: int = 4 * MIB
    """Extents of this weight are read nearly as fast as any: they are left alone."""
    fan_in: int = 16
    """A merged extent weighs at least so many times what the heaviest of its parts weighed."""
    run_weight_max: int = 64 * MIB
    run_extents_max: int = 4_096
    run_ledgers_max: int = 500
    """Each has a registration, which is written when the log gives up extents of it."""

    def __post_init__(self) -> None:
        for key, least in (
            ("large_weight", ENTRY_WEIGHT + 1),
            ("fan_in", 2),
            ("run_weight_max", self.large_weight * self.fan_in),
            ("run_extents_max", self.fan_in),
            ("run_ledgers_max", self.fan_in),
        ):
            value = getattr(self, key)
            require(
                condition=value >= least, key=key, value=value, rule=f"expected {least} or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRun:
    """The extents [first, end) of those that were given: two at least."""

    first: int
    end: int


def weight_of(extent: Extent) -> int:
    """Return the weight of a final extent."""
    return extent.size_bytes + ENTRY_WEIGHT * extent.entry_count


def plan_merge(extents: Sequence[Extent], policy: MergePolicy) -> MergeRun | None:
    """Return the run to merge next; None if nothing is to be merged.

    The lightest come first: what they become may be part of a heavier run later.

    Args:
        extents: final and adjacent ones of one segment, in order.
        policy: what is small.
    """
    weights = [weight_of(extent) for extent in extents]
    for bound in _bounds(min(weights, default=policy.large_weight), policy):
        for run in _windows(extents, weights, bound, policy):
            part = weights[run.first : run.end]
            if sum(part) >= policy.fan_in * max(part):
                return run
    return None


def _bounds(lightest: int, policy: MergePolicy) -> list[int]:
    """Return weights, ascending by orders of `fan_in`, up to those that are not large."""
    bounds = []
    bound = policy.large_weight - 1
    while bound >= lightest:
        bounds.append(bound)
        bound //= policy.fan_in
    return bounds[::-1]


def _windows(
    extents: Sequence[Extent], weights: Sequence[int], bound: int, policy: MergePolicy
) -> Iterator[MergeRun]:
    """Yield the stretches of extents not heavier than `bound`, cut to what one step may do."""
    first = weight = 0
    ledgers: set[int] = set()
    for index, (extent, each) in enumerate(zip(extents, weights, strict=True)):
        is_end = (
            each > bound
            or weight + each > policy.run_weight_max
            or index - first == policy.run_extents_max
            or len(ledgers | {extent.ledger_id}) > policy.run_ledgers_max
        )
        if is_end:
            if index > first:
                yield MergeRun(first=first, end=index)
            first, weight, ledgers = index, 0, set()
        if each > bound:
            first = index + 1
            continue
        weight += each
        ledgers.add(extent.ledger_id)
    if len(extents) > first:
        yield MergeRun(first=first, end=len(extents))
