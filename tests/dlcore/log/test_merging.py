"""Which extents are merged: never more than pays, until little is left to merge."""

from __future__ import annotations

import math
import random

import pytest

from dlcore.errors import ConfigurationError
from dlcore.log.merging import ENTRY_WEIGHT, MergePolicy, MergeRun, plan_merge, weight_of
from dlcore.log.segment import Extent

POLICY = MergePolicy(
    large_weight=1_000_000,
    fan_in=4,
    run_weight_max=4_000_000,
    run_extents_max=100,
    run_ledgers_max=50,
)


def extent(weight: int, *, ledger_id: int = 1) -> Extent:
    """Return an extent of one entry."""
    return Extent(
        ledger_id=ledger_id,
        first_entry_id=0,
        last_entry_id=0,
        record_count=1,
        size_bytes=weight - ENTRY_WEIGHT,
    )


def plan(*weights: int, policy: MergePolicy = POLICY) -> tuple[int, int] | None:
    """Return the run over extents of such weights."""
    run = plan_merge([extent(weight) for weight in weights], policy)
    return None if run is None else (run.first, run.end)


@pytest.mark.parametrize(
    ("weights", "run"),
    [
        ((), None),
        ((2_000,), None),
        ((2_000, 2_000, 2_000), None),  # together three times the heaviest, not four
        ((2_000,) * 4, (0, 4)),
        ((2_000,) * 9, (0, 9)),
        ((1_000_000,) * 9, None),  # large already
        ((9_000, 2_000, 2_000, 2_000, 2_000, 9_000), (1, 5)),
        ((1_000_000, 9_000, 2_000, 8_000, 9_000, 9_000, 1_000_000), (1, 6)),
        ((900_000,) * 9, (0, 4)),  # as much as one step may copy
        ((2_000, 1_000_000, 2_000, 1_000_000, 2_000, 2_000), None),
    ],
)
def test_what_is_merged(weights: tuple[int, ...], run: tuple[int, int] | None) -> None:
    """Adjacent ones that together weigh four times the heaviest of them; the lightest first."""
    assert plan(*weights) == run


def test_a_step_is_bounded() -> None:
    """By extents and by ledgers."""
    assert plan(*[2_000] * 150) == (0, 100)
    run = plan_merge([extent(2_000, ledger_id=i) for i in range(80)], POLICY)
    assert run == MergeRun(first=0, end=50)


@pytest.mark.parametrize("seed", range(6))
def test_a_record_is_copied_few_times_and_few_extents_are_left(seed: int) -> None:
    """Merge as soon as it pays, after each append of any weight: the worst that can be asked for.

    Copies are counted per record by a list beside each extent.
    """
    rng = random.Random(seed)
    extents: list[Extent] = []
    copies: list[list[int]] = []
    lightest, heaviest = 2_000, rng.choice([4_000, 60_000, 1_500_000])
    appended = 0
    for _ in range(800):
        weight = rng.choice([lightest, rng.randint(lightest, heaviest)])
        appended += weight
        extents.append(extent(weight, ledger_id=rng.randint(1, 9)))
        copies.append([0])
        while (run := plan_merge(extents, POLICY)) is not None:
            part = extents[run.first : run.end]
            assert len(part) >= 2
            merged = Extent(
                ledger_id=100,
                first_entry_id=0,
                last_entry_id=sum(each.entry_count for each in part) - 1,
                size_bytes=sum(each.size_bytes for each in part),
            )
            assert weight_of(merged) == sum(map(weight_of, part)) <= POLICY.run_weight_max
            extents[run.first : run.end] = [merged]
            copies[run.first : run.end] = [
                [count + 1 for each in copies[run.first : run.end] for count in each]
            ]
    assert sum(map(weight_of, extents)) == appended
    orders = math.ceil(math.log(POLICY.large_weight / lightest, POLICY.fan_in))
    assert max(count for each in copies for count in each) <= orders
    large = sum(weight_of(each) >= POLICY.large_weight for each in extents)
    assert len(extents) - large <= (large + 1) * POLICY.fan_in * orders


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("large_weight", ENTRY_WEIGHT),
        ("fan_in", 1),
        ("run_weight_max", 1),
        ("run_extents_max", 15),
        ("run_ledgers_max", 15),
    ],
)
def test_a_policy_that_never_merges_is_refused(key: str, value: int) -> None:
    """With the name of what is wrong."""
    with pytest.raises(ConfigurationError, match=f"{key}={value}"):
        MergePolicy(**{key: value})
