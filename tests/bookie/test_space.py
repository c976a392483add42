"""Read-only mode has hysteresis and keeps a reserve for recovery."""

from __future__ import annotations

import pytest

from bookie.config import GarbageConfig, SpaceConfig, StorageConfig
from bookie.membership.registration import SpaceReport
from bookie.storage.status import Claim, SpaceGuard
from dlcore.base.errors import ConfigurationError

CONFIG = SpaceConfig(read_only_below_bytes=100, writable_above_bytes=150, minimum_bytes=20)


def test_hysteresis() -> None:
    """Goal: between the two marks the state stays what it was."""
    guard = SpaceGuard(CONFIG, free_bytes=130, claimed_bytes=10)
    states = []
    for free_bytes in (100, 99, 120, 149, 150, 120, 0):
        guard.observe(free_bytes + 10, claimed_bytes=10)
        states.append(guard.is_read_only)
    assert states == [False, True, True, True, False, False, True]


def test_everybody_leaves_what_is_kept_for_those_after_him() -> None:
    """Goal: adds, recovery with LACs, fences: each stops at its floor; what is claimed counts."""
    guard = SpaceGuard(CONFIG, free_bytes=99, claimed_bytes=0)
    assert CONFIG.fence_floor_bytes == 2

    def most(claim: Claim, claimed_bytes: int) -> int:
        return max(
            size
            for size in range(-1, 200)
            if size < 0 or guard.allows(size, claimed_bytes=claimed_bytes, claim=claim)
        )

    assert [most(claim, 0) for claim in Claim] == [-1, 79, 97]
    assert [most(claim, 10) for claim in Claim] == [-1, 69, 87]
    guard.observe(150, claimed_bytes=0)
    assert [most(claim, 0) for claim in Claim] == [130, 130, 148]
    guard.is_stalled = True
    assert guard.is_read_only
    assert [most(claim, 0) for claim in Claim] == [-1, -1, -1]
    guard.is_stalled = False
    assert not guard.is_read_only


def test_the_reserve_is_taken_only_where_there_is_plenty() -> None:
    """Goal: to hold space back does not itself fill the disk."""
    guard = SpaceGuard(CONFIG, free_bytes=25, claimed_bytes=0)
    assert CONFIG.held_bytes == 5
    assert guard.missing_reserve(held_bytes=0, claimed_bytes=0)
    assert guard.missing_reserve(held_bytes=4, claimed_bytes=0)
    assert not guard.missing_reserve(held_bytes=5, claimed_bytes=0)
    assert not guard.missing_reserve(held_bytes=0, claimed_bytes=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpaceConfig(minimum_bytes=2**40), "expected 0 <= minimum <= read-only"),
        (lambda: SpaceConfig(check_interval_s=0), "check_interval_s=0: expected a number > 0"),
        (lambda: GarbageConfig(age_ms=-1), "age_ms=-1: expected ms >= 0"),
        (lambda: GarbageConfig(brake_share=0), "brake_share=0: expected 0 < share <= 1"),
        (lambda: GarbageConfig(brake_count=-1), "brake_count=-1: expected a number >= 0"),
        (lambda: StorageConfig(batch_bytes_max=0), "batch_bytes_max=0: expected a number > 0"),
        (lambda: StorageConfig(file_bytes_max=2**32), "file_bytes_max=4294967296: expected 1"),
        (lambda: StorageConfig(entry_size_bytes_max=2**30), "entry_size_bytes_max=1073741824"),
    ],
)
def test_wrong_limits_are_named(make: object, message: str) -> None:
    """Goal: key, value and rule."""
    with pytest.raises(ConfigurationError, match=message):
        make()  # type: ignore[operator]  # a table of lambdas


def test_space_is_reported_seldom() -> None:
    """Goal: at once, when the disk moved by some share, and after a while if it moved at all."""
    report = SpaceReport()

    def is_due(free_bytes: int, now: float) -> bool:
        return report.is_due(free_bytes=free_bytes, total_bytes=1000, now=now)

    assert is_due(500, 0)
    assert not is_due(500, 10_000)
    assert [is_due(free, 10_001) for free in (499, 481, 480)] == [True, False, False]
    assert is_due(479, 10_002)
    assert not is_due(498, 10_003)
    assert is_due(499, 10_004)
    assert not is_due(498, 10_004 + 599)
    assert is_due(498, 10_004 + 600)


def test_writes_to_the_metadata_store_are_few() -> None:
    """Goal: filling a whole disk in small steps, in an hour, takes some fifty reports."""
    report = SpaceReport()
    steps = 3600
    count = sum(
        report.is_due(free_bytes=steps - step, total_bytes=steps, now=step) for step in range(steps)
    )
    assert 10 <= count <= 60
