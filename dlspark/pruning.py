"""The records that can pass the filters that Spark pushes down; without Spark.

Positions, numbers, transaction ids and timestamps never decrease along a log.  Therefore a filter
on one of them is a range of the log, and records outside of it are not read.  Filters only reduce
the reading: Spark evaluates every filter again.  A filter that is not understood here costs time,
but the rows are still right.
"""

from __future__ import annotations

import datetime
import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dlcore.base.ids import DLSN
from dlcore.base.records import NotLessThan, RecordField

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlcore.sync import LogSnapshot, SegmentView

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
_SEARCHED: dict[tuple[str, ...], RecordField] = {
    ("sequence_id",): RecordField.SEQUENCE_ID,
    ("txid",): RecordField.TXID,
    ("timestamp",): RecordField.TIMESTAMP_MS,
}
_TYPED_NAMES = ("_log", "_dlsn", "_txid", "_sequence_id", "_timestamp")
ALTERNATIVES_MAX = 16
"""Most separate runs of values of a filter `IN`; if there are more, the closest ones are joined."""
_PARTS = (("dlsn", "lssn"), ("dlsn", "entry"), ("dlsn", "slot"))
_NUMBER_MAX = 2**63 - 1


class Comparison(NamedTuple):
    """A filter: its kind (the name of Spark's class), its column, and its value."""

    kind: str
    column: tuple[str, ...]
    value: Any
    is_negated: bool = False

    def of_typed(self) -> Comparison:
        """Return a filter of a typed log's rows by the names of this module.

        The log's own columns do not restrict positions, whatever their names are.
        """
        first, *rest = self.column or ("",)
        if first not in _TYPED_NAMES:
            return self._replace(column=())
        return self._replace(column=(first.removeprefix("_"), *rest))


@dataclass(frozen=True, slots=True)
class Interval:
    """Integers from `low` to `high`, both included; None for no bound."""

    low: int | None = None
    high: int | None = None

    def meet(self, other: Interval) -> Interval:
        """Return the values that are in both."""
        lows = [bound for bound in (self.low, other.low) if bound is not None]
        highs = [bound for bound in (self.high, other.high) if bound is not None]
        return Interval(max(lows, default=None), min(highs, default=None))

    @property
    def is_empty(self) -> bool:
        """Whether it contains no value."""
        return self.low is not None and self.high is not None and self.low > self.high


Intervals = tuple[Interval, ...]
"""The union of intervals: ascending, not empty, not overlapping."""
_ALL: Intervals = (Interval(),)


def _meet(some: Intervals, others: Intervals) -> Intervals:
    met = (one.meet(other) for one in some for other in others)
    return tuple(each for each in met if not each.is_empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The records that can pass filters."""

    intervals: dict[tuple[str, ...], Intervals] = field(default_factory=dict)
    log_tests: tuple[Callable[[str], bool], ...] = ()

    @classmethod
    def of(cls, comparisons: Iterable[Comparison]) -> Wanted:
        """Return the condition for records that pass all of `comparisons`."""
        wanted = cls()
        for comparison in comparisons:
            if comparison.column == ("log",):
                test = _log_test(comparison)
                if test is not None:
                    wanted = replace(wanted, log_tests=(*wanted.log_tests, test))
            elif comparison.column in _SEARCHED or comparison.column in _PARTS:
                found = _intervals(comparison)
                if found is not None:
                    met = _meet(wanted.intervals.get(comparison.column, _ALL), found)
                    wanted = replace(wanted, intervals={**wanted.intervals, comparison.column: met})
        return wanted

    def takes_log(self, log: str) -> bool:
        """Whether any record of a log can be wanted."""
        return all(self.intervals.values()) and all(test(log) for test in self.log_tests)

    def searches(self) -> list[list[tuple[NotLessThan | None, NotLessThan | None]]]:
        """Return for each column the searches for both ends of each of its intervals."""
        return [
            [
                (
                    None if each.low is None or each.low <= 0 else NotLessThan(key, each.low),
                    None if each.high is None else NotLessThan(key, max(0, each.high + 1)),
                )
                for each in intervals
            ]
            for column, intervals in self.intervals.items()
            if (key := _SEARCHED.get(column)) is not None
        ]

    def cut(self, snapshot: LogSnapshot, start: DLSN, end: DLSN) -> list[tuple[DLSN, DLSN]]:
        """Return the parts of [start, end) whose positions can pass, in order."""
        if self.intervals.keys().isdisjoint(_PARTS):
            return [(start, end)] if start < end else []
        segments, entries, slots = (self.intervals.get(part, _ALL) for part in _PARTS)
        parts = []
        for segment in snapshot.segments:
            if not any(_holds(each, segment.lssn) for each in segments):
                continue
            for each in entries:
                low, high = _positions(segment, each, slots)
                low, high = max(low, start), min(high, end)
                if low < high:
                    parts.append((low, high))
        return parts


def _positions(segment: SegmentView, entries: Interval, slots: Intervals) -> tuple[DLSN, DLSN]:
    """Return the range of a segment that `entries` select; for a single entry, of its `slots`."""
    first = _number(entries.low or 0)
    last = segment.entry_count - 1
    last = last if entries.high is None else min(last, entries.high)
    low, high = DLSN(segment.lssn, first, 0), DLSN(segment.lssn, _number(last + 1), 0)
    if first == last:
        low = DLSN(segment.lssn, first, _number(slots[0].low or 0))
        if (slot := slots[-1].high) is not None:
            high = DLSN(segment.lssn, first, _number(slot + 1))
    return low, high


def _number(value: int) -> int:
    """Return the number of an entry or slot that is closest to the end of an interval.

    Next to Spark's largest number there is an end that no position has, and no record either.
    """
    return min(max(0, value), _NUMBER_MAX)


def _holds(interval: Interval, value: int) -> bool:
    return (interval.low is None or value >= interval.low) and (
        interval.high is None or value <= interval.high
    )


def _log_test(comparison: Comparison) -> Callable[[str], bool] | None:
    value, is_negated = comparison.value, comparison.is_negated
    match comparison.kind, value:
        case (("EqualTo" | "EqualNullSafe"), str()):
            return lambda log: (log == value) is not is_negated
        case "In", tuple() | list():
            return lambda log: (log in value) is not is_negated
        case "StringStartsWith", str():
            return lambda log: log.startswith(value) is not is_negated
        case "StringEndsWith", str():
            return lambda log: log.endswith(value) is not is_negated
        case "StringContains", str():
            return lambda log: (value in log) is not is_negated
    return None


def _intervals(comparison: Comparison) -> Intervals | None:
    """Return the values that pass a filter; None if the filter is not understood."""
    if comparison.is_negated:
        return None  # nearly all values pass, so a search would leave out little
    if comparison.kind == "In" and isinstance(comparison.value, tuple | list):
        bounds = [_bounds(value) for value in comparison.value if value is not None]
        known = [each for each in bounds if each is not None]
        return _runs(known) if known and len(known) == len(bounds) else None
    found = _interval(comparison)
    if found is None:
        return None
    return () if found.is_empty else (found,)


def _runs(values: Iterable[tuple[int, int]]) -> Intervals:
    """Return the values as intervals; join adjacent ones, and the closest if there are many."""
    ordered = sorted((low, high) for low, high in values if low <= high)
    gaps = sorted(
        (after[0] - before[1] for before, after in itertools.pairwise(ordered)), reverse=True
    )
    # Each interval costs two searches in each log.  Joining the closest ones reads some records in
    # vain, which Spark filters out again.
    gap_max = max(1, gaps[ALTERNATIVES_MAX - 1] if len(gaps) >= ALTERNATIVES_MAX else 1)
    runs: list[tuple[int, int]] = []
    for low, high in ordered:
        if runs and low - runs[-1][1] <= gap_max:
            runs[-1] = (runs[-1][0], high)
        else:
            runs.append((low, high))
    return tuple(Interval(low, high) for low, high in runs)


def _interval(comparison: Comparison) -> Interval | None:
    found = _bounds(comparison.value)
    if found is None:
        return None
    low, high = found  # for a time within a millisecond: the next and the previous millisecond
    match comparison.kind:
        case "EqualTo" | "EqualNullSafe":
            return Interval(low, high)
        case "GreaterThan":
            return Interval(low=high + 1)
        case "GreaterThanOrEqual":
            return Interval(low=low)
        case "LessThan":
            return Interval(high=low - 1)
        case "LessThanOrEqual":
            return Interval(high=high)
    return None


def _bounds(value: object) -> tuple[int, int] | None:
    """Return the first integer not below a value, and the last one not above it; times in ms."""
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            return None
        microseconds = (value - _EPOCH) // _MICROSECOND
        return -(-microseconds // 1000), microseconds // 1000
    if isinstance(value, int) and not isinstance(value, bool):
        return value, value
    return None
