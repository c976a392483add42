"""The rings of a proxy against plain lists: readers get their records, and memory is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dlcore.base.errors import ConfigurationError, UnexpectedError
from dlcore.base.ids import DLSN
from dlcore.proxy.reading.ring import SKIPS_MAX, Ring, RingBudget, RingReader, Run
from tests.fixtures.lengths import amount

BUDGET = 40


def run_of(first: int, count: int = 1, *, lssn: int = 1, rows: int = 2, size: int = 10) -> Run:
    """Return a run of `count` entries."""
    firsts = tuple((DLSN(lssn, entry, 0), rows) for entry in range(first, first + count))
    end = DLSN(lssn, first + count, 0)
    return Run(firsts[0][0], end, firsts, f"{lssn}:{first}", size)


def taken(reader: RingReader) -> list[Any]:
    """Return all that a reader gets now."""
    found = []
    while (got := reader.peek()) is not None:
        found.append((got[0].data, got[1]))
        reader.advance()
    return found


class Followed:
    """A log, and its readers, the obvious way."""

    def __init__(self, ring: Ring, name: int) -> None:
        self.ring = ring
        self.name = name
        self.runs: list[Run] = []
        self.readers: list[tuple[RingReader, list[DLSN]]] = []
        self.lssn, self.entry_id = 1, 0


class Rings(RuleBasedStateMachine):
    """Appends, readers that come, read, stand still and leave, over several logs."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = RingBudget(BUDGET)
        self.logs = [Followed(self.budget.open_ring(DLSN.INITIAL), name) for name in range(3)]
        self.order: list[tuple[Followed, int, int]] = []  # log, index, skips
        self.kept_from = {id(log): 0 for log in self.logs}

    @rule(
        which=st.integers(0, 2),
        entries=st.integers(1, 3),
        size=st.sampled_from([1, 9, 15, BUDGET, BUDGET + 1]),
        rolls=st.booleans(),
    )
    def append(self, which: int, entries: int, size: int, rolls: bool) -> None:
        """A log goes on, perhaps in the next segment."""
        log = self.logs[which]
        if rolls:
            log.lssn, log.entry_id = log.lssn + 1, 0
        run = run_of(log.entry_id, entries, lssn=log.lssn, size=size)
        log.entry_id += entries
        log.runs.append(run)
        self.order.append((log, len(log.runs) - 1, 0))
        self.make_room()
        log.ring.append(run)

    def make_room(self) -> None:
        """Do what the budget does, by lists."""
        while sum(log.runs[index].size_bytes for log, index, _ in self.order) > BUDGET:
            log, index, skips = self.order.pop(0)
            begin, end = self.begin_of(log), log.runs[index].end
            is_wanted = any(begin <= got[-1] < end for _, got in log.readers)
            if is_wanted and skips < SKIPS_MAX:
                self.order.append((log, index, skips + 1))
            else:
                self.kept_from[id(log)] = index + 1
                self.order = [each for each in self.order if each[0] is not log or each[1] > index]

    def begin_of(self, log: Followed) -> DLSN:
        """Return from where on a log is kept."""
        kept_from = self.kept_from[id(log)]
        return log.runs[kept_from - 1].end if kept_from else DLSN.INITIAL

    @rule(which=st.integers(0, 2), data=st.data())
    def join(self, which: int, data: Any) -> None:
        """A reader comes, anywhere in the log or beyond its end."""
        log = self.logs[which]
        ends = [DLSN.INITIAL, *(run.end for run in log.runs)]
        position = data.draw(st.sampled_from([*ends, *(DLSN(e.lssn, e.entry_id, 1) for e in ends)]))
        reader = log.ring.join(position)
        assert (reader is None) == (position < self.begin_of(log))
        if reader is not None:
            log.readers.append((reader, [position]))

    @precondition(lambda self: any(log.readers for log in self.logs))
    @rule(data=st.data())
    def read(self, data: Any) -> None:
        """A reader takes one run: the first in the log that holds records at or behind it."""
        log = data.draw(st.sampled_from([log for log in self.logs if log.readers]))
        reader, got = data.draw(st.sampled_from(log.readers))
        following = next((run for run in log.runs if run.end > got[-1]), None)
        if reader.is_behind:
            assert following is not None
            assert got[-1] < self.begin_of(log)
            with pytest.raises(UnexpectedError, match="behind"):
                reader.peek()
            return
        found = reader.peek()
        if found is None:
            assert following is None
            return
        assert following is not None
        run, skipped = found
        assert run is following
        wanted = [
            DLSN(first.lssn, first.entry_id, slot)
            for first, count in run.firsts
            for slot in range(count)
        ]
        assert skipped == sum(each < got[-1] for each in wanted)
        got.append(run.end)
        reader.advance()
        assert reader.position == got[-1]

    @precondition(lambda self: any(log.readers for log in self.logs))
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        """A reader goes."""
        log = data.draw(st.sampled_from([log for log in self.logs if log.readers]))
        index = data.draw(st.integers(0, len(log.readers) - 1))
        log.readers.pop(index)[0].leave()

    @rule(which=st.integers(0, 2))
    def close(self, which: int) -> None:
        """A log is not followed any more, and later again, from its end on."""
        log = self.logs[which]
        log.ring.close()
        assert len(log.ring) == 0
        self.order = [each for each in self.order if each[0] is not log]
        self.logs[which] = Followed(self.budget.open_ring(DLSN.INITIAL), which)
        self.kept_from[id(self.logs[which])] = 0

    @invariant()
    def is_as_the_lists_are(self) -> None:
        """The kept bytes and runs are those that the lists keep."""
        assert self.budget.size_bytes <= BUDGET
        sizes = [log.runs[index].size_bytes for log, index, _ in self.order]
        assert self.budget.size_bytes == sum(sizes)
        for log in self.logs:
            assert log.ring.begin == self.begin_of(log)
            assert len(log.ring) == sum(each[0] is log for each in self.order)
            on_time = [reader for reader, _ in log.readers if not reader.is_behind]
            assert sum(log.ring._waiting.values()) == len(on_time), "a slow reader leaves nothing"


TestRings = Rings.TestCase
TestRings.settings = settings(
    max_examples=amount(60, sampled=20), stateful_step_count=30, deadline=None
)


def test_readers_share_runs_and_hold_positions() -> None:
    """Each gets the same objects, from the position that it asked for."""
    ring = RingBudget(100).open_ring(DLSN.INITIAL)
    early = ring.join(DLSN.INITIAL)
    for entry in range(3):
        ring.append(run_of(entry))
    inside, late = ring.join(DLSN(1, 1, 1)), ring.join(ring.end)
    assert early is not None
    assert inside is not None
    assert late is not None
    assert taken(early) == [("1:0", 0), ("1:1", 0), ("1:2", 0)]
    assert taken(inside) == [("1:1", 1), ("1:2", 0)]
    assert taken(late) == []
    ring.append(run_of(0, lssn=2))
    assert taken(early) == taken(inside) == taken(late) == [("2:0", 0)]


def test_one_from_beyond_the_end_waits_for_its_record() -> None:
    """Earlier entries are passed over."""
    ring = RingBudget(100).open_ring(DLSN.INITIAL)
    reader = ring.join(DLSN(1, 3, 1))
    assert reader is not None
    ring.append(run_of(0))
    ring.append(run_of(1, 3))
    assert taken(reader) == [("1:0", 2), ("1:1", 5)]
    assert reader.position == DLSN(1, 4, 0)


def test_one_who_stands_still_is_spared_five_times_and_then_left_behind() -> None:
    """Meanwhile runs of other readers leave before its own, though they are newer."""
    budget = RingBudget(30)
    slow, fast = budget.open_ring(DLSN.INITIAL), budget.open_ring(DLSN.INITIAL)
    reader = slow.join(DLSN.INITIAL)
    assert reader is not None
    slow.append(run_of(0))
    appended = 0
    while not reader.is_behind:
        fast.append(run_of(appended))
        appended += 1
    # Two fit in beside it; then it is the oldest, and spared, at every third.
    assert appended == 2 + 3 * SKIPS_MAX + 1
    with pytest.raises(UnexpectedError, match="its reader is behind"):
        reader.peek()
    assert slow.begin == slow.end == DLSN(1, 1, 0)
    assert slow.join(DLSN.INITIAL) is None
    reader.leave()
    again = slow.join(slow.begin)
    assert again is not None
    slow.append(run_of(1))
    assert taken(again) == [("1:1", 0)]


def test_a_smaller_budget_drops_the_oldest_at_once() -> None:
    """And a larger one keeps more from then on."""
    budget = RingBudget(30)
    ring = budget.open_ring(DLSN.INITIAL)
    for entry in range(3):
        ring.append(run_of(entry))
    budget.resize(10)
    assert (len(ring), ring.begin, budget.size_bytes) == (1, DLSN(1, 2, 0), 10)
    budget.resize(20)
    ring.append(run_of(3))
    assert (len(ring), ring.begin) == (2, DLSN(1, 2, 0))


def test_one_who_joins_late_is_spared_too() -> None:
    """Also in a ring that was known to have no waiter."""
    budget = RingBudget(30)
    other, ring = budget.open_ring(DLSN.INITIAL), budget.open_ring(DLSN.INITIAL)
    ring.append(run_of(0))
    ring.append(run_of(1))
    other.append(run_of(0))
    other.append(run_of(1))
    assert ring.begin == DLSN(1, 1, 0)
    reader = ring.join(ring.begin)
    assert reader is not None
    other.append(run_of(2))
    assert (reader.is_behind, other.begin) == (False, DLSN(1, 1, 0))


def test_a_message_sent_twice_or_after_the_end_is_refused() -> None:
    """A ring takes the runs of its log in order, until it is closed."""
    ring = RingBudget(100).open_ring(DLSN(1, 2, 0))
    for wrong in (run_of(1), Run(DLSN(1, 3, 0), DLSN(1, 3, 0), (), "", 1)):
        with pytest.raises(UnexpectedError, match="ends at 1:2:0"):
            ring.append(wrong)
    ring.append(run_of(2))
    ring.close()
    with pytest.raises(UnexpectedError, match="1:3:0"):
        ring.append(run_of(3))


def test_a_budget_has_room() -> None:
    """None would keep nothing."""
    with pytest.raises(ConfigurationError, match="bytes_max=0"):
        RingBudget(0)


def test_the_last_run_grows_until_a_reader_is_past_it() -> None:
    """Those before it get the longer one, and the budget counts that alone."""
    budget = RingBudget(BUDGET)
    ring = budget.open_ring(DLSN(1, 0, 0))
    assert not ring.may_grow, "there is none"
    reader = ring.join(DLSN(1, 0, 0))
    assert reader is not None
    ring.append(run_of(0))
    ring.append(run_of(1, size=10))
    ring.grow(run_of(1, 2, size=15))
    assert (len(ring), ring.end, budget.size_bytes) == (2, DLSN(1, 3, 0), 25)
    assert taken(reader) == [("1:0", 0), ("1:1", 0)]
    assert not ring.may_grow
    with pytest.raises(UnexpectedError, match="cannot become one from 1:1:0 to 1:4:0"):
        ring.grow(run_of(1, 3))
    ring.append(run_of(3))
    for wrong in (run_of(2, 3), run_of(4, 1)):
        with pytest.raises(UnexpectedError, match="the last run of a ring that ends at 1:4:0"):
            ring.grow(wrong)
    ring.grow(run_of(3, 2))
    assert taken(reader) == [("1:3", 0)]


def test_a_reader_in_the_midst_of_a_run_that_grows_wants_its_later_part() -> None:
    """As of a run that was as long from the beginning."""
    ring = RingBudget(BUDGET).open_ring(DLSN(1, 0, 0))
    ring.append(run_of(0, 2))
    reader = ring.join(DLSN(1, 1, 0))
    ring.grow(run_of(0, 3))
    assert reader is not None
    assert taken(reader) == [("1:0", 2)]


def test_a_run_that_grows_above_the_budget_leaves() -> None:
    """Its reader is behind, as with any run that is too large."""
    budget = RingBudget(BUDGET)
    ring = budget.open_ring(DLSN(1, 0, 0))
    ring.append(run_of(0))
    reader = ring.join(DLSN(1, 0, 0))
    ring.grow(run_of(0, 2, size=BUDGET + 1))
    assert reader is not None
    assert reader.is_behind
    assert (len(ring), ring.begin, budget.size_bytes) == (0, DLSN(1, 2, 0), 0)
