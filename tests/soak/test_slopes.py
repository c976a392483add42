"""The rule by which a series grows: leaks are found, and what swings is none."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest

from tests.soak.slopes import POINTS_MAX, POINTS_MIN, Point, slope_of

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH = 300


def series(
    value: Callable[[int], float], *, life_s: int = 10_000, count: int = LENGTH
) -> list[Point]:
    """Return a point each second; a new life begins every `life_s`."""
    return [Point(float(at), str(at // life_s), value(at)) for at in range(count)]


def test_a_leak_is_found_below_noise_spikes_and_restarts() -> None:
    """A tenth in the run's length; one point in ten is far off."""
    rng = random.Random(1)

    def leaks(at: int) -> float:
        spike = 500.0 if at % 10 == 3 else 0.0
        return 1000 + at / 3 + rng.gauss(0, 2) + spike

    found = slope_of(series(leaks), warm_s=0)
    assert found is not None
    assert found.grows
    assert found.per_hour == pytest.approx(1200, rel=0.05)
    # Each life begins at the same level, so that the whole stays where it is.
    restarted = slope_of(series(lambda at: 1000 + at % 100, life_s=100), warm_s=0)
    assert restarted is not None
    assert restarted.grows
    assert restarted.per_hour == pytest.approx(3600)
    assert restarted.growth == pytest.approx(99)


@pytest.mark.parametrize(
    "value",
    [
        lambda at: 1000.0,
        lambda at: 1000 - at,
        lambda at: 1000 + 300 * math.sin(at / 5),
        lambda at: 1000.0 + at % 40 * 20,  # garbage is collected again and again
        lambda at: 1000 + at / 20,  # less than the share
        lambda at: 1000.0 + 400 * (at < 60),  # it was higher in the beginning
    ],
)
def test_a_constant_series_is_no_leak(value: Callable[[int], float]) -> None:
    """Constant, falling, swinging, or growing less than the rule asks."""
    found = slope_of(series(value), warm_s=0)
    assert found is not None
    assert not found.grows


def test_the_first_part_of_each_life_is_left_out() -> None:
    """Caches fill in it."""

    def fills(at: int) -> float:
        return 1000.0 + 20 * min(at % 150, 30)

    warm = slope_of(series(fills, life_s=150), warm_s=30)
    assert warm is not None
    assert warm.per_hour == 0
    assert warm.level == 1600


def test_too_short_a_series_says_nothing() -> None:
    """Without points, with few, and with few in each life."""
    assert slope_of([], warm_s=0) is None
    assert slope_of(series(float, count=POINTS_MIN - 1), warm_s=0) is None
    assert slope_of(series(float, life_s=POINTS_MIN - 1), warm_s=0) is None
    assert slope_of(series(float, count=POINTS_MIN), warm_s=0) is not None


def test_a_long_life_is_thinned() -> None:
    """The slope is that of all of it."""
    found = slope_of(series(lambda at: at / 2, count=20 * POINTS_MAX), warm_s=0)
    assert found is not None
    assert found.per_hour == pytest.approx(1800)
