"""Metrics as values: buckets, samples, and the names with the highest rates."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dlcore.base.metrics import BOUNDS_S, Durations, Kind, TopRates, counter, gauge, histogram


def test_a_duration_is_in_the_bucket_that_prometheus_expects() -> None:
    """A bound is part of its own bucket, and what is above all bounds is in the last one."""
    durations = Durations()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[-1], BOUNDS_S[-1] + 1):
        durations.note(seconds)
    found = dict(durations.cumulative())
    assert found[str(BOUNDS_S[0])] == 2
    assert found[str(BOUNDS_S[-1])] == 3
    assert found["+Inf"] == durations.count == 4
    assert durations.total_s == BOUNDS_S[0] + 2 * BOUNDS_S[-1] + 1


@given(st.lists(st.floats(0, 100)))
def test_buckets_count_what_a_plain_comparison_counts(seconds: list[float]) -> None:
    """Each bound has the durations that are not above it."""
    durations = Durations()
    for each in seconds:
        durations.note(each)
    for bound, count in durations.cumulative():
        assert count == sum(each <= float(bound.replace("+Inf", "inf")) for each in seconds)


def test_a_sample_has_what_its_metric_says() -> None:
    """The kinds have their names; a wrong number of labels or kind of value is a defect."""
    written = counter("written_total", "Written", "log")
    assert (written.name, written.kind) == ("dlog_written_total", Kind.COUNTER)
    assert written.of(3, "a").labels == ("a",)
    with pytest.raises(AssertionError):
        written.of(3)
    with pytest.raises(AssertionError):
        gauge("free_bytes", "Free").of(Durations())
    with pytest.raises(AssertionError):
        histogram("sync_seconds", "Sync").of(3)


def test_only_the_busiest_names_are_exported() -> None:
    """The first call knows no rates; a new name and one that began again count from 0."""
    top = TopRates(2)
    assert top.take({"a": 100.0, "b": 50.0}, now_s=10.0) == []
    taken = top.take({"a": 110.0, "b": 30.0, "c": 10.0, "d": 0.0}, now_s=20.0)
    assert taken == [("b", 3.0), ("c", 1.0)]
    assert top.take({"a": 111.0}, now_s=20.0) == []
    assert top.take({"a": 121.0}, now_s=25.0) == [("a", 2.0)]
