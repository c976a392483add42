"""The plan of faults, drawn from the seed alone; whom a kill meets is decided when it comes."""

from __future__ import annotations

import random
from dataclasses import dataclass

KILLS = ("kill driver", "kill JVM", "kill executor", "kill Python worker", "kill bookie")
CUTS = ("cut off host", "cut link")
KINDS = (*KILLS, "pause ZooKeeper", *CUTS)
_WEIGHTS = {
    "kill driver": 2,
    "kill JVM": 2,
    "kill executor": 5,
    "kill Python worker": 12,
    "kill bookie": 7,
    "pause ZooKeeper": 2,
    "cut off host": 2,
    "cut link": 2,
}
# Seconds until it is undone: a pause ends before or after a session of 10 s does.
_LASTS_S = {
    "kill bookie": (0.2, 6.0),
    "pause ZooKeeper": (2.0, 14.0),
    "cut off host": (1.0, 14.0),
    "cut link": (1.0, 14.0),
}
GAP_S = (0.8, 3.6)
"""Between two faults."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: what, when after the start, for how long; `choice` in 0 … 1 says whom it meets."""

    kind: str
    at_s: float
    lasts_s: float
    choice: float

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.kind}, {self.lasts_s:.1f} s"


def make_plan(
    seed: int, *, seconds: float, kinds: tuple[str, ...], gap_s: tuple[float, float] = GAP_S
) -> list[Fault]:
    """Return faults over `seconds`, in order of time: each kind once, and then by weight."""
    rng = random.Random(f"chaos of Spark {seed}")
    first_round = list(kinds)
    rng.shuffle(first_round)
    faults: list[Fault] = []
    at_s = gap_s[0]
    while at_s < seconds:
        if first_round:
            kind = first_round.pop()
        else:
            kind = rng.choices(kinds, [_WEIGHTS[each] for each in kinds])[0]
        lasts_s = rng.uniform(*_LASTS_S.get(kind, (0.0, 0.0)))
        faults.append(Fault(kind, at_s, lasts_s, rng.random()))
        at_s += rng.uniform(*gap_s)
    return faults
