"""The checker: each record that the source wrote is in each channel once, in the source's order.

After a truncation or deletion, rows that the channel did not hold by then may be missing, and
nothing else may.

It trusts what the source noted while it wrote, and nothing that Spark or dlog say of themselves.
A record is (source, number).  Numbers of a source go up; one whose write failed is not written
again, and may be there or not, but then in every channel alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set
    from typing import TypeAlias

    Channel: TypeAlias = Sequence[Sequence[tuple[str, int]]]
    """The logs that together hold every record, each in its order."""

EXAMPLES_MAX = 20


@dataclass(slots=True)
class Written:
    """The notes of one source: the numbers it tried, and those that were acknowledged."""

    attempted: int = 0
    """All numbers below this were tried."""
    acked: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    """Those that may be missing: truncated, or about to be, before the channel held them."""


@dataclass(slots=True)
class Verdict:
    """How many promises were broken, by kind, and examples."""

    KINDS = ("lost", "doubled", "out of order", "never written", "not in every channel")
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    checked: int = 0
    excused: int = 0
    """Acknowledged records that are missing and may be."""

    @property
    def is_clean(self) -> bool:
        """Whether none was broken."""
        return not self.counts

    def add(self, kind: str, what: str, count: int = 1) -> None:
        """Note what was broken."""
        assert kind in self.KINDS
        self.counts[kind] += count
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(f"{kind}: {what}")

    def __str__(self) -> str:
        return ", ".join(f"{kind} {self.counts[kind]}" for kind in self.KINDS)


def judge(sources: Mapping[str, Written], channels: Mapping[str, Channel]) -> Verdict:
    """Judge what was read of each channel."""
    verdict = Verdict()
    for source, written in sources.items():
        found: dict[str, Set[int]] = {}
        for channel, logs in channels.items():
            where = f"{channel}, {source}"
            numbers = [[number for name, number in log if name == source] for log in logs]
            for log in numbers:
                _judge_order(verdict, where, log)
            every = [number for log in numbers for number in log]
            found[channel] = set(every)
            verdict.checked += len(every)
            _judge_numbers(verdict, where, every, written)
        everywhere = set[int]().union(*found.values())
        for channel, present in found.items():
            if missing := everywhere - present - written.acked:
                what = f"{channel}, {source}: {sorted(missing)[:5]}"
                verdict.add("not in every channel", what, len(missing))
    for channel, logs in channels.items():
        if strange := [each for log in logs for each in log if each[0] not in sources]:
            verdict.add("never written", f"{channel}: {strange[:5]}", len(strange))
    return verdict


def _judge_numbers(verdict: Verdict, where: str, numbers: Sequence[int], written: Written) -> None:
    counts = Counter(numbers)
    if doubled := sorted(number for number, count in counts.items() if count > 1):
        verdict.add("doubled", f"{where}: {doubled[:5]}", sum(counts[n] - 1 for n in doubled))
    missing = written.acked - counts.keys()
    verdict.excused += len(missing & written.gone)
    if lost := sorted(missing - written.gone):
        verdict.add("lost", f"{where}: {lost[:5]} … {lost[-1]}", len(lost))
    if strange := sorted(n for n in counts if not 0 <= n < written.attempted):
        verdict.add("never written", f"{where}: {strange[:5]}", len(strange))


def _judge_order(verdict: Verdict, where: str, numbers: Sequence[int]) -> None:
    highest = -1
    for number in numbers:
        if number < highest:
            verdict.add("out of order", f"{where}: {number} after {highest}")
        highest = max(highest, number)
