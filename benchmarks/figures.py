"""A figure beside its limit: rounds of both in turn, their medians, and the ratio."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
    """One measured figure; `value` and `limit` have the same unit.

    Where there are several limits, `limits` has them by name, and `limit` is the strictest.  A
    figure without a target is shown, and not judged.
    """

    name: str
    unit: str
    value: float
    limit: float
    target: Target | None
    limits: Mapping[str, float] = field(default_factory=dict)
    cpu_s_per_gb: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds for a GB of user data, by the process that used them."""

    @property
    def ratio(self) -> float:
        """The value as a share, or as a multiple, of its limit."""
        return self.value / self.limit

    @property
    def notes(self) -> list[str]:
        """A remark that no column of a table has."""
        parts = [f"{name} {limit:,.1f} {self.unit}" for name, limit in self.limits.items()]
        notes = [f"{self.name}: limits {', '.join(parts)}"] if parts else []
        parts = [f"{name} {seconds:.1f}" for name, seconds in self.cpu_s_per_gb.items()]
        return [*notes, f"{self.name}: CPU s/GB {', '.join(parts)}"] if parts else notes

    def as_json(self) -> dict[str, object]:
        """Return what goes to results.json."""
        return {
            "name": self.name,
            "unit": self.unit,
            "value": self.value,
            "limit": self.limit,
            "ratio": self.ratio,
            "limits": dict(self.limits),
            "cpu_s_per_gb": dict(self.cpu_s_per_gb),
        }


def measure(
    *,
    name: str,
    unit: str,
    target: Target,
    value: Callable[[], float],
    limit: Callable[[], float] | Mapping[str, Callable[[], float]],
    rounds: int = ROUNDS,
) -> Figure:
    """Measure `limit`, or each of several, and `value` in turn: what slows the machine slows all.

    Each is called once before, to warm up, and that call is not counted.  The strictest of
    several limits counts.
    """
    named = {"": limit} if callable(limit) else dict(limit)
    runs: dict[str, list[float]] = {which: [] for which in named}
    values = []
    for number in range(rounds + 1):
        for which, measured in named.items():
            runs[which].append(measured())
        values.append(value())
        if number == 0:
            values.clear()
            for found in runs.values():
                found.clear()
    limits = {which: statistics.median(found) for which, found in runs.items()}
    strictest = min if target.is_rate else max
    return Figure(
        name=name,
        unit=unit,
        value=statistics.median(values),
        limit=strictest(limits.values()),
        target=target,
        limits={} if callable(limit) else limits,
    )
