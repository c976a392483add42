"""Whether a series grows without end: a robust slope beside its noise.

A series is cut into lives, such as those of a process between two restarts; within a life its
first part is left out, in which caches fill.  The rule: the slope is the median of the slopes
between all pairs of points of one life that are at least a quarter of it apart (Theil and Sen);
the growth is what this slope gives over the longest life; the noise is the scaled median of the
absolute distances from the lines of this slope through the lives' medians.  The series grows if the
growth is more than `SHARE` of its median level, and more than `NOISES` times the noise.  A life
with fewer than `POINTS_MIN` points is left out; a series without one is too short to say.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SHARE = 0.05
NOISES = 3.0
POINTS_MIN = 20
POINTS_MAX = 200
"""A longer life is thinned to so many: pairs grow as the square."""
_SCALE = 1.4826
"""The factor of the median of absolute distances that gives normal noise its deviation."""


class Point(NamedTuple):
    """A value of one life at a time."""

    at_s: float
    life: str
    value: float


@dataclass(frozen=True, slots=True)
class Slope:
    """The trend of a series."""

    level: float
    per_hour: float
    growth: float
    noise: float

    @property
    def grows(self) -> bool:
        """Whether the growth is more than the rule allows."""
        return self.growth > max(SHARE * abs(self.level), NOISES * self.noise)


def slope_of(points: Iterable[Point], *, warm_s: float) -> Slope | None:
    """Return the slope of a series without the first `warm_s` of each life; None: too short."""
    lives = [life for life in _lives(points, warm_s) if len(life) >= POINTS_MIN]
    if not lives:
        return None
    slopes = [each for life in lives for each in _slopes(_thinned(life))]
    per_s = median(slopes)
    distances = []
    for life in lives:
        level = [value - per_s * at_s for at_s, value in life]
        middle = median(level)
        distances += [abs(each - middle) for each in level]
    longest_s = max(life[-1][0] - life[0][0] for life in lives)
    return Slope(
        level=median([value for life in lives for _, value in life]),
        per_hour=per_s * 3600,
        growth=per_s * longest_s,
        noise=_SCALE * median(distances),
    )


def _lives(points: Iterable[Point], warm_s: float) -> list[list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    begun_s: dict[str, float] = {}
    for point in points:
        begun = begun_s.setdefault(point.life, point.at_s)
        if point.at_s - begun >= warm_s:
            found[point.life].append((point.at_s, point.value))
    return list(found.values())


def _thinned(life: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    step = -(-len(life) // POINTS_MAX)
    return life[::step]


def _slopes(life: Sequence[tuple[float, float]]) -> list[float]:
    apart_s = (life[-1][0] - life[0][0]) / 4
    return [
        (value - before) / (at_s - then_s)
        for number, (then_s, before) in enumerate(life)
        for at_s, value in life[number + 1 :]
        if at_s - then_s >= apart_s
    ]
