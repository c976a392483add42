"""Read-only mode has hysteresis and keeps a reserve for recovery."""

from __future__ import annotations

import pytest

from bookie.config import GarbageConfig, SpaceConfig, StorageConfig
from bookie.space import SpaceGuard, SpaceReport
from dlcore.errors import ConfigurationError

CONFIG = SpaceConfig(read_only_below_bytes=100, writable_above_bytes=150, minimum_bytes=20)


def test_hysteresis() -> None:
    """Goal: between the two marks the state stays what it was."""
    guard = SpaceGuard(CONFIG, free_bytes=120)
    states = []
    for free_bytes in (100, 99, 120, 149, 150, 120, 0):
        guard.observe(free_bytes)
        states.append(guard.is_read_only)
    assert states == [False, True, True, True, False, False, True]


def test_recovery_writes_into_the_reserve_and_nobody_beyond_it() -> None:
    """Goal: the last bytes are for fences and footers; bytes under way are counted."""
    guard = SpaceGuard(CONFIG, free_bytes=99)
    assert not guard.allows(1, pending_bytes=0, is_recovery=False)
    assert guard.allows(79, pending_bytes=0, is_recovery=True)
    assert not guard.allows(80, pending_bytes=0, is_recovery=True)
    assert not guard.allows(79, pending_bytes=1, is_recovery=True)
    guard.observe(150)
    assert guard.allows(130, pending_bytes=0, is_recovery=False)
    assert not guard.allows(130, pending_bytes=1, is_recovery=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpaceConfig(minimum_bytes=2**40), "expected 0 <= minimum <= read-only"),
        (lambda: SpaceConfig(check_interval_s=0), "check_interval_s=0: expected seconds > 0"),
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
