"""A figure beside its limit: rounds of both in turn, their medians, and the ratio."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The ratio to reach: at least `ratio` for rates, at most `ratio` for times."""

    ratio: float
    is_rate: bool

    def is_met_by(self, ratio: float) -> bool:
        """Whether a measured ratio reaches the target."""
        return ratio >= self.ratio if self.is_rate else ratio <= self.ratio

    def __str__(self) -> str:
        return f"{'>=' if self.is_rate else '<='} {self.ratio:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure; `value` and `limit` have the same unit."""

    name: str
    unit: str
    value: float
    limit: float
    target: Target

    @property
    def ratio(self) -> float:
        """The value as a share, or as a multiple, of its limit."""
        return self.value / self.limit

    def as_json(self) -> dict[str, str | float]:
        """Return what goes to results.json."""
        return {
            "name": self.name,
            "unit": self.unit,
            "value": self.value,
            "limit": self.limit,
            "ratio": self.ratio,
        }


def measure(
    *,
    name: str,
    unit: str,
    target: Target,
    value: Callable[[], float],
    limit: Callable[[], float],
    rounds: int = ROUNDS,
) -> Figure:
    """Measure `limit` and `value` in turn, so that what slows the machine slows both.

    Each is called once before, to warm up, and that call is not counted.
    """
    limit()
    value()
    limits, values = [], []
    for _ in range(rounds):
        limits.append(limit())
        values.append(value())
    return Figure(
        name=name,
        unit=unit,
        value=statistics.median(values),
        limit=statistics.median(limits),
        target=target,
    )
