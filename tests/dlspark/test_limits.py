"""Limits of a micro-batch: kept, shared fairly, and never so that nothing moves.

Goal: whatever is waiting, a batch takes no more than its limits and something of each log.  Method:
exact cases, and random backlogs (Hypothesis).
"""

from __future__ import annotations

from hypothesis import given, strategies as st

from dlspark.limits import Backlog, Limits, share
from tests.fixtures.snapshots import snapshot_of


def backlog(*runs: tuple[int, int]) -> Backlog:
    """Return a backlog of runs of (records, bytes)."""
    return Backlog(start=0, runs=runs)


def shares(limits: Limits, **records: int) -> dict[str, int]:
    """Return the shares of logs with so many records of 100 bytes."""
    waiting = {log: backlog((n, n * 100)) if n else backlog() for log, n in records.items()}
    return share(waiting, limits)


def test_without_limits_all_is_taken() -> None:
    """And a log without records has no share."""
    assert shares(Limits(), a=3, b=0, c=1_000_000) == {"a": 3, "c": 1_000_000}


def test_max_records_per_trigger_is_shared_fairly() -> None:
    """A small log is read up; what it leaves goes to the others, in equal parts."""
    assert shares(Limits(max_records=100), a=10, b=10_000, c=500) == {"a": 10, "b": 45, "c": 45}
    assert shares(Limits(max_records=100), a=1_000_000) == {"a": 100}
    assert shares(Limits(max_records=2**63 - 1), a=7, b=2**62) == {"a": 7, "b": 2**62}


def test_no_log_starves_and_a_stream_always_advances() -> None:
    """With less to give than there are logs, or than one record has bytes."""
    assert shares(Limits(max_records=1), a=5, b=7, c=1) == {"a": 1, "b": 1, "c": 1}
    assert shares(Limits(max_bytes=1), a=5, b=7) == {"a": 1, "b": 1}


def test_max_bytes_per_trigger() -> None:
    """By the bytes of extents, whose records count alike."""
    assert shares(Limits(max_bytes=1_000), a=2, b=500) == {"a": 2, "b": 8}
    mixed = {"a": backlog((10, 100), (10, 10_000), (10, 100))}
    assert share(mixed, Limits(max_bytes=5_100)) == {"a": 15}
    assert share(mixed, Limits(max_bytes=10_200)) == {"a": 30}


def test_limits_together() -> None:
    """The limit that is reached first counts."""
    assert shares(Limits(max_records=10, max_bytes=500), a=50) == {"a": 5}
    assert shares(Limits(max_records=4, max_bytes=500), a=50) == {"a": 4}


def test_min_records_per_trigger_waits_for_no_longer_than_max_trigger_delay() -> None:
    """The first batch of a run does not wait, and neither does one that is large enough."""
    limits = Limits(min_records=100, max_delay_s=60)
    assert limits.is_enough(1, waited_s=None)
    assert not limits.is_enough(99, waited_s=59.9)
    assert limits.is_enough(100, waited_s=0)
    assert limits.is_enough(1, waited_s=60)
    assert Limits().is_enough(1, waited_s=0)
    assert not limits.bounds_batches


def test_backlog_of_a_snapshot() -> None:
    """From any record on, over segments and extents, of ten records with 100 bytes an entry."""
    snapshot = snapshot_of((2, 3), (), (1,))
    assert Backlog.of(snapshot, 0).runs == ((20, 2000), (30, 3000), (10, 1000))
    assert Backlog.of(snapshot, 5).runs == ((15, 1500), (30, 3000), (10, 1000))
    assert Backlog.of(snapshot, 20).runs == ((30, 3000), (10, 1000))
    assert Backlog.of(snapshot, 49).runs == ((1, 100), (10, 1000))
    assert Backlog.of(snapshot, 59).runs == ((1, 100),)
    assert Backlog.of(snapshot, 60).runs == ()
    assert Backlog.of(snapshot, 99).records == 0
    assert Backlog.of(snapshot, 15, 25).runs == ((5, 500), (5, 500))
    assert Backlog.of(snapshot, 50, 50).runs == ()


def test_records_within_a_size() -> None:
    """Whole runs while they fit, then a part of one in proportion; at least one record."""
    runs = backlog((10, 100), (5, 5_000))
    assert [runs.records_within(size) for size in (1, 100, 1_100, 5_100, 9_000)] == [
        1,
        10,
        11,
        15,
        15,
    ]


RUNS = st.lists(st.tuples(st.integers(1, 1_000), st.integers(1, 100_000)), max_size=4).map(
    lambda runs: backlog(*runs)
)


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), RUNS),
    st.none() | st.integers(1, 5_000),
    st.none() | st.integers(1, 500_000),
)
def test_shares_of_random_backlogs(
    waiting: dict[str, Backlog], max_records: int | None, max_bytes: int | None
) -> None:
    """Limits hold but for one record of each log; whose share is cut has no less than others."""
    limits = Limits(max_records=max_records, max_bytes=max_bytes)
    taken = share(waiting, limits)
    assert taken.keys() == {log for log, each in waiting.items() if each.runs}
    assert all(1 <= count <= waiting[log].records for log, count in taken.items())
    if max_records is not None:
        assert sum(taken.values()) <= max(max_records, len(taken))
    if max_records is not None and max_bytes is None:
        cut = [count for log, count in taken.items() if count < waiting[log].records]
        assert all(max(taken.values()) - count <= 1 for count in cut)
