"""Planning: whatever options say, partitions hold exactly the ranges asked for, in order.

Goal: no record is dropped, doubled or moved by splitting and grouping.  Method: exact cases, and
random segments and options (Hypothesis) whose entries are listed before and after.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from hypothesis import given, settings, strategies as st

from dlcore.base.ids import DLSN
from dlspark.option_table import PARTITION_BYTES_MAX
from dlspark.options import Division
from dlspark.planning import (
    COUNTED_ROWS_MAX,
    PARTITIONS_BEFORE_GROUPING,
    CountedRange,
    DlogPartition,
    plan_counts,
    plan_partitions,
)
from tests.fixtures.lengths import amount
from tests.fixtures.snapshots import snapshot_of

if TYPE_CHECKING:
    from dlcore.sync import ScanRange


def scans_of(*segments: tuple[int, ...], log: str = "clicks") -> list[ScanRange]:
    """Return the ranges of everything in such a snapshot."""
    snapshot = snapshot_of(*segments, log=log)
    return snapshot.scans(snapshot.first, snapshot.end)


def plan(
    scans: list[ScanRange],
    *,
    least: int | None = None,
    most: int | None = None,
    size: int = PARTITION_BYTES_MAX,
) -> list[DlogPartition]:
    """Plan, and check that the entries are the same, in order."""
    partitions = plan_partitions(
        scans, Division(min_partitions=least, max_records=most, max_bytes=size)
    )
    planned = [scan for partition in partitions for scan in partition.scans]
    assert list_entries(planned) == list_entries(scans)
    return partitions


def list_entries(scans: list[ScanRange]) -> list[tuple[str, int, int]]:
    """Return (log, segment, entry) of every entry read."""
    return [
        (scan.log, scan.lssn, entry)
        for scan in scans
        for extent in scan.extents
        for entry in range(extent.base_entry_id, extent.end_entry_id)
    ]


def test_one_partition_per_segment_by_default() -> None:
    """Many extents in a segment are one partition; a segment without entries is none."""
    partitions = plan(scans_of((5, 7, 1), (3,), (), (900,)))
    assert [len(partition.scans) for partition in partitions] == [1, 1, 1]


def test_nothing_to_read_is_no_partition() -> None:
    """Also with options."""
    assert plan([]) == []
    assert plan([], least=4, most=10) == []


def test_min_partitions_splits_the_biggest_most() -> None:
    """In proportion to bytes; small segments stay whole."""
    partitions = plan(scans_of((100,), (10,), (1,)), least=12)
    by_segment = [partition.scans[0].lssn for partition in partitions]
    assert len(partitions) == 12
    assert (by_segment.count(1), by_segment.count(2), by_segment.count(3)) == (10, 1, 1)


def test_min_partitions_cannot_split_an_entry() -> None:
    """Fewer entries than partitions asked for: one entry each."""
    assert len(plan(scans_of((2,), (1,)), least=50)) == 3


def test_partitions_are_of_even_size() -> None:
    """Ten entries in six parts: one or two entries each."""
    sizes = [
        sum(scan.entry_count for scan in partition.scans)
        for partition in plan(scans_of((10,)), least=6)
    ]
    assert sorted(sizes) == [1, 1, 2, 2, 2, 2]


def test_max_records_per_partition() -> None:
    """Ten records per entry: at most three entries for 35 records, never less than one entry."""
    assert [p.scans[0].entry_count for p in plan(scans_of((10,)), most=35)] == [3, 3, 3, 1]
    assert len(plan(scans_of((10,)), most=1)) == 10


def test_small_segments_are_grouped_when_there_are_many() -> None:
    """A log of a thousand small segments does not need a thousand tasks."""
    many = [(1,)] * 1000
    scans = scans_of(*many) + scans_of((1,), log="views")
    partitions = plan(scans)
    assert PARTITIONS_BEFORE_GROUPING // 2 <= len(partitions) <= PARTITIONS_BEFORE_GROUPING * 2
    assert len(plan(scans, least=300)) >= 300
    limited = plan(scans, most=50)
    assert all(sum(s.record_count_estimate for s in p.scans) <= 50 for p in limited)


def test_small_logs_are_grouped_when_there_are_many() -> None:
    """A thousand logs do not need a thousand tasks either; each log's ranges stay together."""
    partitions = plan([scan for n in range(1000) for scan in scans_of((1, 2), log=f"log-{n:03}")])
    assert len(partitions) <= PARTITIONS_BEFORE_GROUPING * 2
    names = [scan.log for partition in partitions for scan in partition.scans]
    assert names == sorted(names)


def test_max_bytes_per_partition() -> None:
    """A skewed log is split inside its segment, evenly; an entry of 1,000 bytes never is."""
    sizes = [p.scans[0].entry_count for p in plan(scans_of((100,), (2,)), size=30_000)]
    assert sizes == [25, 25, 25, 25, 2]
    assert len(plan(scans_of((5,)), size=1)) == 5
    assert [p.scans[0].entry_count for p in plan(scans_of((10,)), size=5_000, most=20)] == [2] * 5


def test_rows_that_are_counted_only() -> None:
    """Their partitions are numbers: all of them, in order, as large as options say."""
    ranges = [CountedRange("a", 5, 10), CountedRange("b", 0, 0), CountedRange("c", 7, 25)]
    (whole,) = plan_counts(ranges, Division())
    assert whole.ranges == (CountedRange("a", 5, 10), CountedRange("c", 7, 25))
    assert repr(whole) == "CountedPartition(a #5 + 10, c #7 + 25)"
    parts = plan_counts(ranges, Division(max_records=15))
    assert [part.ranges for part in parts] == [
        (CountedRange("a", 5, 10), CountedRange("c", 7, 5)),
        (CountedRange("c", 12, 15),),
        (CountedRange("c", 27, 5),),
    ]
    assert len(plan_counts(ranges, Division(min_partitions=7))) == 7
    assert len(plan_counts([CountedRange("a", 0, 3 * COUNTED_ROWS_MAX)], Division())) == 3
    assert plan_counts([], Division(min_partitions=4)) == []


def test_partitions_are_picklable_and_readable() -> None:
    """They cross to other processes, and show up in error messages."""
    partition = plan(scans_of((5,), (3,)))[0]
    again = pickle.loads(pickle.dumps(partition))
    assert again.scans == partition.scans
    assert repr(again) == "DlogPartition(clicks 1:0:0 … 1:5:0)"
    granted = DlogPartition(partition.scans, (b"secret",))
    again = pickle.loads(pickle.dumps(granted))
    assert (again.scans, again.capabilities) == (partition.scans, (b"secret",))
    assert "secret" not in repr(again) + repr([again.scans])
    (many,) = plan(scans_of((3,) * 1000))
    assert len(pickle.dumps(many)) < 50_000, "extents and their ledgers travel packed"


@settings(max_examples=amount(150, sampled=50))
@given(
    segments=st.lists(st.lists(st.integers(1, 40), max_size=4).map(tuple), min_size=1, max_size=90),
    least=st.none() | st.integers(1, 120),
    most=st.none() | st.integers(1, 500),
    cut=st.tuples(st.integers(1, 20), st.integers(0, 30), st.integers(0, 9)),
)
def test_any_plan_holds_what_was_asked_for(
    segments: list[tuple[int, ...]],
    least: int | None,
    most: int | None,
    cut: tuple[int, int, int],
) -> None:
    """Every entry once and in order, edges kept, options obeyed as far as entries allow."""
    snapshot = snapshot_of(*segments)
    scans = snapshot.scans(DLSN(*cut), snapshot.end)
    partitions = plan(scans, least=least, most=most)
    planned = [scan for partition in partitions for scan in partition.scans]
    if scans:
        assert planned[0].start == scans[0].start
        assert planned[-1].end == scans[-1].end
    if least is not None:
        assert len(partitions) >= min(least, sum(scan.entry_count for scan in scans))
    if most is not None:
        for partition in partitions:
            records = sum(scan.record_count_estimate for scan in partition.scans)
            assert records <= most or sum(s.entry_count for s in partition.scans) == 1
