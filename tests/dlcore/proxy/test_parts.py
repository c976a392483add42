"""The parts of a range: all of it, in order, few of them, and the tail apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from dlcore.base.ids import DLSN
from dlcore.proxy.reading.parts import PARTS_MAX, Part, parts_of
from tests.fixtures.snapshots import snapshot_of


def check(parts: list[Part], start: DLSN, end: DLSN, records: int) -> None:
    """They are what the range holds."""
    assert parts[0].start == start
    assert parts[-1].end == end
    assert all(one.end < other.start for one, other in pairwise(parts))
    assert sum(part.record_count for part in parts) == records


@pytest.mark.parametrize("count", [1, 2, PARTS_MAX, PARTS_MAX + 1, 1000])
def test_segments_become_parts(count: int) -> None:
    """Each one, while they are few; else neighbours together, about as many bytes in each."""
    snapshot = snapshot_of(*([(3,)] * count))
    parts = parts_of(snapshot, snapshot.first, snapshot.end)
    check(parts, snapshot.first, snapshot.end, count * 30)
    assert len(parts) == min(count, PARTS_MAX)
    assert [part.is_tail for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].record_count == 30
    sizes = [part.size_bytes for part in parts[:-1]]
    assert not sizes or max(sizes) <= min(sizes) + 2 * 3000
    sealed = parts_of(replace(snapshot, sealed=True), snapshot.first, snapshot.end)
    check(sealed, snapshot.first, snapshot.end, count * 30)
    assert len(sealed) <= PARTS_MAX
    assert not any(part.is_tail for part in sealed)


def test_a_large_segment_among_small_ones() -> None:
    """It takes its share, and the others go together."""
    snapshot = snapshot_of(*[(1,)] * 100, (10_000,), *[(1,)] * 100)
    parts = parts_of(snapshot, snapshot.first, snapshot.end)
    check(parts, snapshot.first, snapshot.end, (10_000 + 200) * 10)
    assert len(parts) <= PARTS_MAX


def test_a_part_of_a_log() -> None:
    """Bounds may lie inside segments; an empty range has no part, one before the tail no tail."""
    snapshot = snapshot_of((4,), (4,), (4,))
    start, end = DLSN(1, 2, 3), DLSN(2, 1, 0)
    parts = parts_of(snapshot, start, end)
    assert (parts[0].start, parts[-1].end) == (start, end)
    assert not any(part.is_tail for part in parts)
    assert parts_of(snapshot, snapshot.end, snapshot.end) == []
    empty = snapshot_of(())
    assert parts_of(empty, empty.first, empty.end) == []
