"""Pruning by filters: never a row too few, whatever Spark hands over.

Goal: what is cut away no filter lets through.  Method: exact cases; random filters (Hypothesis) on
a made-up log, compared with looking at every record.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings, strategies as st
from pyspark.sql import datasource as by

from dlcore.base.ids import DLSN
from dlspark.batch import comparison_of
from dlspark.planning import Stretch
from dlspark.pruning import ALTERNATIVES_MAX, Comparison, Interval, Wanted
from dlspark.reading import LOGS_SEARCHED_MAX, LogSnapshots, narrow
from tests.fixtures.lengths import amount
from tests.fixtures.snapshots import place_in, snapshot_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.records import NotLessThan, RecordPlace
    from dlcore.sync import LogSnapshot

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
SNAPSHOT = snapshot_of((3, 2), (4,), (), (1,))


class MadeUp(LogSnapshots):
    """Finds records in made-up snapshots."""

    def __init__(self) -> None:
        self.sought = 0

    def find(self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]) -> list[RecordPlace]:
        """Return where the records are."""
        self.sought += len(wanted)
        return [place_in(snapshot, key) for snapshot, key in wanted]


def read(*filters: Any, source: MadeUp | None = None) -> list[str]:
    """Return what is left to read of the snapshot."""
    wanted = Wanted.of(comparison_of(each) for each in filters)
    whole = Stretch(snapshot=SNAPSHOT, start=SNAPSHOT.first, end=SNAPSHOT.end)
    if not wanted.takes_log("clicks"):
        return []
    parts = narrow(source or MadeUp(), [whole], wanted)
    return [f"{part.start}-{part.end}" for part in parts]


def at(milliseconds: float) -> datetime.datetime:
    """Return a time."""
    return EPOCH + datetime.timedelta(microseconds=round(milliseconds * 1000))


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ([], ["1:0:0-4:1:0"]),
        ([by.GreaterThanOrEqual(("txid",), 35)], ["1:3:5-4:1:0"]),
        ([by.GreaterThan(("txid",), 35)], ["1:3:6-4:1:0"]),
        ([by.LessThan(("txid",), 35)], ["1:0:0-1:3:5"]),
        ([by.LessThanOrEqual(("sequence_id",), 35)], ["1:0:0-1:3:6"]),
        ([by.EqualTo(("sequence_id",), 50)], ["2:0:0-2:0:1"]),
        ([by.In(("txid",), (70, 52, 61, None, 71))], ["2:0:2-2:0:3", "2:1:1-2:1:2", "2:2:0-2:2:2"]),
        ([by.EqualTo(("timestamp",), at(60))], ["2:1:0-2:1:1"]),
        ([by.GreaterThan(("timestamp",), at(59.5))], ["2:1:0-4:1:0"]),
        ([by.LessThan(("timestamp",), at(59.5))], ["1:0:0-2:1:0"]),
        ([by.LessThan(("txid",), -5)], []),
        ([by.EqualTo(("dlsn", "lssn"), 2)], ["2:0:0-2:4:0"]),
        ([by.GreaterThan(("dlsn", "lssn"), 1)], ["2:0:0-2:4:0", "4:0:0-4:1:0"]),
        (
            [
                by.LessThan(("dlsn", "entry"), 2),
                by.EqualTo(("dlsn", "lssn"), 1),
            ],
            ["1:0:0-1:2:0"],
        ),
        (
            [
                by.EqualTo(("dlsn", "entry"), 3),
                by.EqualTo(("dlsn", "slot"), 7),
            ],
            ["1:3:7-1:3:8", "2:3:7-2:3:8"],
        ),
        ([by.GreaterThan(("dlsn", "entry"), 2**63 - 1)], []),
        (
            [by.LessThanOrEqual(("dlsn", "slot"), 2**63 - 1), by.EqualTo(("dlsn", "lssn"), 4)],
            [f"4:0:0-4:0:{2**63 - 1}"],
        ),
        (
            [by.GreaterThan(("dlsn", "slot"), 2**63 - 1), by.EqualTo(("dlsn", "lssn"), 4)],
            [f"4:0:{2**63 - 1}-4:1:0"],
        ),
        ([by.EqualTo(("log",), "views")], []),
        ([by.StringStartsWith(("log",), "cli")], ["1:0:0-4:1:0"]),
        ([by.Not(by.EqualTo(("log",), "clicks"))], []),
        ([by.In(("log",), ("a", "clicks"))], ["1:0:0-4:1:0"]),
        ([by.StringEndsWith(("log",), "x")], []),
        ([by.StringContains(("log",), "lick")], ["1:0:0-4:1:0"]),
        (
            [by.GreaterThan(("txid",), 20), by.LessThan(("txid",), 10)],
            [],
        ),
        ([by.IsNotNull(("txid",))], ["1:0:0-4:1:0"]),
        ([by.IsNull(("log",))], ["1:0:0-4:1:0"]),
        ([by.EqualTo(("value",), b"x")], ["1:0:0-4:1:0"]),
        ([by.Not(by.EqualTo(("txid",), 5))], ["1:0:0-4:1:0"]),
        ([by.EqualTo(("txid",), None)], ["1:0:0-4:1:0"]),
        ([by.In(("txid",), ("x",))], ["1:0:0-4:1:0"]),
        ([by.EqualTo(("timestamp",), datetime.datetime(2024, 5, 1))], ["1:0:0-4:1:0"]),  # noqa: DTZ001
    ],
    ids=str,
)
def test_rows_that_filters_leave(filters: list[Any], left: list[str]) -> None:
    """On each column that can be searched, alone and together; others narrow nothing."""
    assert read(*filters) == left


def test_nothing_is_sought_without_need() -> None:
    """A filter on positions, or none, asks no bookie."""
    source = MadeUp()
    read(by.EqualTo(("dlsn", "lssn"), 2), source=source)
    read(by.GreaterThanOrEqual(("txid",), 0), source=source)
    assert source.sought == 0


def test_values_far_apart_are_looked_for_apart() -> None:
    """As far as they are few, and the logs; those in one entry are read together."""
    source, values = MadeUp(), (5, 7, 42, 101)
    few = read(by.In(("txid",), values), by.LessThan(("txid",), 100), source=source)
    assert few == ["1:0:5-1:0:8", "1:4:2-1:4:3"]
    many = Wanted.of([Comparison("In", ("txid",), (*range(0, 2000, 100), 2005, 10**6))])
    runs = many.intervals[("txid",)]
    assert len(runs) <= ALTERNATIVES_MAX
    assert (runs[0].low, runs[-1]) == (0, Interval(10**6, 10**6))
    assert many.takes_log("clicks")
    whole = Stretch(snapshot=SNAPSHOT, start=SNAPSHOT.first, end=SNAPSHOT.end)
    wanted = Wanted.of([Comparison("In", ("txid",), values)])
    logs = [whole] * (LOGS_SEARCHED_MAX + 1)
    parts = narrow(source, logs, wanted)
    assert [(str(part.start), part.end) for part in parts] == [("1:0:5", whole.end)] * len(logs)
    positions = read(by.In(("dlsn", "lssn"), (1, 4)), by.In(("dlsn", "entry"), (0, 3)))
    assert positions == ["1:0:0-1:1:0", "1:3:0-1:4:0", "4:0:0-4:1:0"]


def test_a_kind_of_filter_that_is_not_known_narrows_nothing() -> None:
    """A later Spark may have others."""
    unknown = [Comparison("Near", column, 5) for column in (("txid",), ("log",))]
    assert Wanted.of(unknown) == Wanted()


def test_intervals_meet() -> None:
    """The higher low, the lower high."""
    assert Interval(1, None).meet(Interval(3, 9)).meet(Interval(None, 5)) == Interval(3, 5)
    assert Interval(6, 5).is_empty
    assert not Interval(None, 5).is_empty


COLUMNS: list[tuple[str, ...]] = [
    ("txid",),
    ("sequence_id",),
    ("timestamp",),
    ("dlsn", "lssn"),
    ("dlsn", "entry"),
]
COLUMNS += [("dlsn", "slot")]
COMPARISONS: dict[str, Any] = {
    "EqualTo": lambda a, b: a == b,
    "GreaterThan": lambda a, b: a > b,
    "GreaterThanOrEqual": lambda a, b: a >= b,
    "LessThan": lambda a, b: a < b,
    "LessThanOrEqual": lambda a, b: a <= b,
    "In": lambda a, b: a in values_of(b),
}


def values_of(value: int) -> tuple[int, ...]:
    """Return values of a filter IN, some of them far apart."""
    return (value, 2 * value, value // 7, value + 1)


def operand(column: tuple[str, ...], kind: str, value: int) -> Any:
    """Return what a filter compares with."""
    as_column = at if column == ("timestamp",) else int
    if kind == "In":
        return tuple(as_column(each) for each in values_of(value))
    return as_column(value)


@settings(max_examples=amount(300, sampled=100))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(COLUMNS), st.sampled_from(sorted(COMPARISONS)), st.integers(-3, 110)
        ),
        max_size=4,
    )
)
def test_no_record_that_passes_is_cut_away(filters: list[tuple[Any, str, int]]) -> None:
    """And on one searched column nothing else is left either."""
    comparisons = [
        Comparison(kind, column, operand(column, kind, value)) for column, kind, value in filters
    ]
    wanted = Wanted.of(comparisons)
    whole = Stretch(snapshot=SNAPSHOT, start=SNAPSHOT.first, end=SNAPSHOT.end)
    parts = narrow(MadeUp(), [whole], wanted) if wanted.takes_log("clicks") else []
    left = set()
    passing = set()
    number = 0
    for segment in SNAPSHOT.segments:
        for entry in range(segment.entry_count):
            for slot in range(10):
                dlsn = DLSN(segment.lssn, entry, slot)
                values: dict[tuple[str, ...], int] = {
                    ("txid",): number,
                    ("sequence_id",): number,
                    ("timestamp",): number,
                }
                values |= {("dlsn", "lssn"): segment.lssn, ("dlsn", "entry"): entry}
                values[("dlsn", "slot")] = slot
                if all(COMPARISONS[kind](values[column], value) for column, kind, value in filters):
                    passing.add(dlsn)
                if any(part.start <= dlsn < part.end for part in parts):
                    left.add(dlsn)
                number += 1
    assert passing <= left
    is_exact = not any(kind == "In" or column in COLUMNS[4:] for column, kind, _ in filters)
    if len(filters) <= 1 and is_exact:
        assert passing == left
