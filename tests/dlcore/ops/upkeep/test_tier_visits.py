"""The choice of logs that a round looks at, and of what is due there: no I/O."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlcore.base.config import LogSettings
from dlcore.log.metadata.values import LogHead, LogKey, OpenSegment, SegmentEnd, Totals, pack
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.tier_visits import (
    LOOK_AGAIN_S,
    LogVisits,
    Look,
    TierRule,
    TierVisits,
    look_at,
    rule_of,
)
from tests.dlcore.ops.upkeep.test_tiering import extent

OWN, OTHER = "s3://own/logs", "s3://other/logs"
LATER_MS = int(LOOK_AGAIN_S * 1000)
DAY = TierRule(OWN, 86_400, None)


def end(last_ms: int = 6, *, cold: bool = False, chunks: int = 0) -> SegmentEnd:
    """Return the end of a segment of 100 bytes, whose last record is of a time."""
    part = replace(extent(1, cold=cold), last_timestamp_ms=last_ms)
    return SegmentEnd(
        created_ms=0,
        completed_ms=1_000,
        start_sequence_id=0,
        chunk_count=chunks,
        chunked=Totals(),
        packed=pack([part]),
    )


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (LogSettings(), TierRule(OTHER, 50, None)),
        (LogSettings(tier="none"), None),
        (LogSettings(encrypted=True), None),
        (LogSettings(tier=OWN), TierRule(OWN, 50, None)),
        (LogSettings(tier=OWN, tier_after_s=0), TierRule(OWN, 0, None)),
        (LogSettings(tier_after_s=7, tier_after_bytes=8), TierRule(OTHER, 7, 8)),
    ],
)
def test_the_rule_of_a_log(settings: LogSettings, rule: TierRule | None) -> None:
    """Its own settings first, then the namespace's; it may want none."""
    assert rule_of(settings, UpkeepConfig(tier=OTHER, tier_after_s=50)) == rule


def test_without_a_tier_a_log_stays() -> None:
    """Neither the log nor the namespace has one."""
    assert rule_of(LogSettings(tier_after_s=1), UpkeepConfig()) is None


@pytest.mark.parametrize(
    ("head", "is_due"),
    [
        (LogHead(max_lssn=9), True),
        (LogHead(max_lssn=9, first_active=(4, 0, 0)), True),
        (LogHead(max_lssn=9, first_active=(4, 0, 1)), False),
        (LogHead(max_lssn=9, first_active=(5, 0, 0)), False),
        (LogHead(max_lssn=9, producers_lssn=4), False),
        (LogHead(max_lssn=9, producers_lssn=5), True),
    ],
)
def test_which_segments_are_due(head: LogHead, is_due: bool) -> None:
    """Whole ones that are old enough, and not the one with the last stamps of producers."""
    rule, ends = TierRule(OWN, 2, None), [(4, end())]
    look = look_at(head, ends, rule, settled=(), now_ms=2_006)
    assert look == (Look(4, 4, 2_006) if is_due else Look(None, 4, 4_006))
    young = look_at(head, ends, rule, settled=(), now_ms=2_005)
    assert young == Look(None, 4, 2_006 if is_due else 4_005)


def test_a_finished_object_is_not_read_again() -> None:
    """Cold segments, and those that no object can hold, up to the first other one."""
    ends = [(4, end(cold=True)), (5, end()), (6, end()), (7, end(cold=True)), (8, None)]
    head = LogHead(max_lssn=8)
    assert look_at(head, ends, DAY, settled={5}, now_ms=10).done == 6
    with_chunks = [(4, end(cold=True, chunks=1))]
    assert look_at(head, with_chunks, DAY, settled=(), now_ms=10).done == 4
    gone = [(4, None), (5, end(cold=True))]  # a segment that is being removed may come back
    assert look_at(head, gone, DAY, settled=(), now_ms=10).done == 4
    known = LogVisits(settled={4, 5, 9})
    known.advance(6)
    known.advance(3)
    assert known == LogVisits(done=6, settled={9})


@pytest.mark.parametrize(
    ("after_bytes", "lssn"), [(None, None), (301, None), (300, 4), (200, 4), (199, 4), (0, 4)]
)
def test_newer_segments_push_older_ones_out(after_bytes: int | None, lssn: int | None) -> None:
    """The bytes of later segments on bookies, and of the one in progress."""
    tail = OpenSegment(created_ms=9, start_sequence_id=0, packed=pack([extent(9)]))
    ends = [(3, end(cold=True)), (4, end()), (5, end()), (6, end(cold=True)), (7, end())]
    head = LogHead(max_lssn=8, segment=tail)
    look = look_at(head, ends, TierRule(OWN, 86_400, after_bytes), settled=(), now_ms=50)
    assert look.lssn == lssn
    assert look.done == 4
    if after_bytes is not None:
        assert look.next_ms == 50  # more may be written at any time


@pytest.mark.parametrize(
    ("created_ms", "after_s", "next_ms"),
    [
        (None, 0, 1_000),  # a segment may be completed at once
        (None, 100, 101_000),
        (None, 86_400, 1_000 + LATER_MS),  # settings may change
        (400, 100, 100_400),
        (400, 0.1, 1_000),  # the segment in progress has old records already
    ],
)
def test_when_to_look_again(created_ms: int | None, after_s: float, next_ms: int) -> None:
    """When a segment that is in progress, or begins now, might be old enough."""
    segment = (
        None if created_ms is None else OpenSegment(created_ms=created_ms, start_sequence_id=0)
    )
    head = LogHead(max_lssn=1, segment=segment)
    look = look_at(head, [], TierRule(OWN, after_s, None), settled=(), now_ms=1_000)
    assert look == Look(None, 0, next_ms)


def test_logs_are_listed_in_rounds() -> None:
    """A log is known from its listing on, visited when it is time, and forgotten without one."""
    visits = TierVisits()
    visits.begin()
    assert visits.listed(["a", "b"]) == ["a", "b"]
    a, b = (LogKey(name=name, log_id=f"id-{name}") for name in "ab")
    visits.add("a", a)
    visits.add("b", b)
    assert visits.end() == {"id-a", "id-b"}
    assert visits.due(0) == [("a", a), ("b", b)]
    visits.looked("a", next_ms=10)
    assert visits.due(9) == [("b", b)]
    assert visits.due(10) == [("a", a), ("b", b)]
    visits.begin()
    assert visits.listed(["a"]) == []
    assert visits.end() == {"id-a"}
    assert visits.due(10) == [("a", a)]
    visits.forget("a")
    visits.begin()
    assert visits.listed(["a"]) == ["a"]
    assert visits.end() == set()


def test_logs_that_wait_less_than_for_a_round() -> None:
    """Once it is known how long their segments wait, and when it is time."""
    visits = TierVisits()
    visits.begin()
    logs = {node: LogKey(name=node, log_id=f"id-{node}") for node in ("a", "b", "c")}
    for node, log in logs.items():
        visits.add(node, log)
    assert visits.due_below(60, 0) == []
    visits.waits("a", 59)
    visits.waits("b", 60)
    assert visits.due_below(60, 0) == [("a", logs["a"])]
    visits.looked("a", next_ms=10)
    assert visits.due_below(60, 9) == []
    assert visits.due_below(60, 10) == [("a", logs["a"])]


def test_a_log_whose_tier_failed_comes_last() -> None:
    """From the next visit on; one that was forgotten meanwhile stays forgotten."""
    visits = TierVisits()
    visits.begin()
    logs = {node: LogKey(name=node, log_id=f"id-{node}") for node in ("a", "b", "c")}
    for node, log in logs.items():
        visits.add(node, log)
    visits.come_last("a")
    assert [node for node, _ in visits.due(0)] == ["b", "c", "a"]
    visits.forget("b")
    visits.come_last("b")
    assert [node for node, _ in visits.due(0)] == ["c", "a"]
