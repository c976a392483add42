"""The read cursor: what comes next, without leaving anything out or reading it twice."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import AlreadyTruncatedError, UnexpectedError
from dlcore.base.ids import DLSN
from dlcore.log.metadata.changes import (
    SegmentLimits,
    plan_append,
    plan_complete,
    plan_remove,
    plan_start,
    plan_truncate,
)
from dlcore.log.metadata.values import LogState
from dlcore.log.reading.cursor import (
    EndOfStream,
    FollowExtent,
    LearnSegments,
    ReadCursor,
    ReadExtent,
    Step,
    TruncationRule,
    WaitForChange,
)
from tests.fixtures.lengths import for_each
from tests.fixtures.log_states import PATHS, Tree, final, removable, staged, written

if TYPE_CHECKING:
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import VersionedHead

LIMITS = SegmentLimits(size_bytes_max=150, age_max_ms=1000)


def cursor_at(
    position: DLSN, *, skips_truncated: bool = True, end: DLSN | None = None
) -> ReadCursor:
    """Return a cursor that has read nothing."""
    rule = TruncationRule.SKIP if skips_truncated else TruncationRule.REFUSE
    return ReadCursor("clicks", position, truncated=rule, end=end)


def deliver_all(cursor: ReadCursor, step: ReadExtent) -> None:
    """Read an extent of 3 entries and 10 records to its end: 4, 4 and 2 records."""
    last = step.extent.last_entry_id
    assert last is not None
    for entry_id in range(step.first_entry_id, last + 1):
        count = 2 if entry_id == last else 4
        cursor.deliver(step, entry_id, records_before=4 * entry_id, record_count=count)


def test_an_empty_log_is_waited_for() -> None:
    """And so is a position beyond the end."""
    assert cursor_at(DLSN.INITIAL).plan(Tree().state) == WaitForChange()
    assert cursor_at(DLSN(9, 0, 0)).plan(written(7).state) == WaitForChange()


def test_completed_segments_follow_each_other() -> None:
    """The position moves on only when all entries were delivered."""
    tree = written(7, 8)
    cursor = cursor_at(DLSN.INITIAL)
    for ledger_id, sequence_id in ((7, 0), (8, 10)):
        step = cursor.plan(tree.state)
        assert isinstance(step, ReadExtent)
        assert (step.extent.ledger_id, step.first_entry_id) == (ledger_id, 0)
        assert step.start_sequence_id == sequence_id
        deliver_all(cursor, step)
    assert cursor.plan(tree.state) == WaitForChange()
    assert cursor.position == DLSN(2, 3, 0)
    tree.apply(plan_complete(PATHS, tree.at, now_ms=9, closing=None, seal=True))
    assert cursor.plan(tree.state) == EndOfStream()


def test_the_next_extent_is_known_before_it_is_read() -> None:
    """As long as the log stays the same; asking moves nothing."""
    tree = written(7, 8)
    cursor = cursor_at(DLSN(1, 1, 2))
    first = cursor.plan(tree.state)
    assert isinstance(first, ReadExtent)
    second = cursor.plan_after(first, tree.state)
    assert isinstance(second, ReadExtent)
    assert (second.extent.ledger_id, second.first_entry_id, second.lssn) == (8, 0, 2)
    assert cursor.plan_after(second, tree.state) == WaitForChange()
    assert cursor.position == DLSN(1, 1, 2)
    assert cursor.plan(tree.state) == first
    deliver_all(cursor, first)
    assert cursor.plan(tree.state) == second


@pytest.mark.parametrize(
    ("end", "lasts"),
    [
        (DLSN(1, 0, 1), [0]),
        (DLSN(1, 2, 0), [1]),
        (DLSN(1, 2, 1), [2]),
        (DLSN(2, 0, 0), [2]),
        (DLSN(2, 0, 1), [2, 0]),
        (DLSN(2, 9, 0), [2, 2]),
    ],
)
def test_a_part_ends_with_the_entry_in_which_its_end_lies_or_before(
    end: DLSN, lasts: list[int]
) -> None:
    """Nothing follows it, also for a reader that looks ahead."""
    tree = written(7, 8, 9)
    cursor = cursor_at(DLSN.INITIAL, skips_truncated=False, end=end)
    found = []
    while isinstance(step := cursor.plan(tree.state), ReadExtent):
        assert step.last_entry_id is not None
        found.append(step.last_entry_id)
        following = cursor.plan_after(step, tree.state)
        for entry_id in range(step.first_entry_id, step.last_entry_id + 1):
            count = 2 if entry_id == 2 else 4
            cursor.deliver(step, entry_id, records_before=4 * entry_id, record_count=count)
        assert cursor.plan(tree.state) == following
    assert (step, found) == (EndOfStream(), lasts)
    assert cursor_at(end, end=end).plan(tree.state) == EndOfStream()


def test_a_caught_up_reader_goes_over_a_roll() -> None:
    """From following the old extent to following the next segment's."""
    tree = Tree().apply(plan_start(PATHS, Tree().at, ledger_id=7, now_ms=1))
    cursor = cursor_at(DLSN.INITIAL)
    step = cursor.plan(tree.state)
    assert isinstance(step, FollowExtent)
    for entry_id, count in enumerate((4, 4, 2)):
        cursor.deliver(step, entry_id, records_before=4 * entry_id, record_count=count)
    tree.apply(plan_start(PATHS, tree.at, ledger_id=8, now_ms=1, closing=final(7)))
    after = cursor.plan(tree.state)
    assert isinstance(after, FollowExtent)
    assert (after.extent.ledger_id, after.first_entry_id, after.start_sequence_id) == (8, 0, 10)


def test_an_extent_that_was_not_followed_is_read_when_it_is_final() -> None:
    """A roll that comes before the entries were seen leaves none out."""
    tree = Tree().apply(plan_start(PATHS, Tree().at, ledger_id=7, now_ms=1))
    cursor = cursor_at(DLSN.INITIAL)
    step = cursor.plan(tree.state)
    assert isinstance(step, FollowExtent)
    cursor.deliver(step, 0, records_before=0, record_count=4)
    tree.apply(plan_complete(PATHS, tree.at, now_ms=1, closing=final(7)))
    after = cursor.plan(tree.state)
    assert isinstance(after, ReadExtent)
    assert after.first_entry_id == 1


def test_extents_of_staged_appends() -> None:
    """Entry ids in the segment go on over extents that lie anywhere in their ledgers."""
    cursor = cursor_at(DLSN.INITIAL)
    tree = Tree()
    tree.apply(plan_append(PATHS, tree.at, [staged(8)], now_ms=1, limits=LIMITS)[0])
    step = cursor.plan(tree.state)
    assert isinstance(step, ReadExtent)
    assert cursor.deliver(step, 6, records_before=0, record_count=2) == (0, 0)
    assert cursor.deliver(step, 7, records_before=2, record_count=2) == (1, 2)
    assert cursor.plan(tree.state) == WaitForChange()
    tree.apply(plan_append(PATHS, tree.at, [staged(9)], now_ms=1, limits=LIMITS)[0])
    step = cursor.plan(tree.state)
    assert isinstance(step, ReadExtent)
    assert (step.extent.ledger_id, step.first_entry_id, step.base_entry_id) == (9, 6, 2)
    assert cursor.deliver(step, 6, records_before=0, record_count=2) == (2, 4)


def test_an_entry_out_of_turn_is_an_error() -> None:
    """Left out, twice, or with a gap in the sequence ids."""
    tree = written(7)
    cursor = cursor_at(DLSN.INITIAL)
    step = cursor.plan(tree.state)
    assert isinstance(step, ReadExtent)
    with pytest.raises(UnexpectedError, match="entry 1 of segment 1 was read, expected 1:0:0"):
        cursor.deliver(step, 1, records_before=0, record_count=1)
    cursor.deliver(step, 0, records_before=0, record_count=4)
    with pytest.raises(UnexpectedError, match="entry 0 of segment 1"):
        cursor.deliver(step, 0, records_before=0, record_count=4)
    with pytest.raises(UnexpectedError, match="sequence id 5, expected 4"):
        cursor.deliver(step, 1, records_before=5, record_count=1)


def test_a_segment_that_shrank_is_an_error() -> None:
    """Entries that were read must not vanish when the segment is recovered."""
    tree = Tree().apply(plan_start(PATHS, Tree().at, ledger_id=7, now_ms=1))
    cursor = cursor_at(DLSN.INITIAL)
    step = cursor.plan(tree.state)
    assert isinstance(step, FollowExtent)
    for entry_id in range(4):
        cursor.deliver(step, entry_id, records_before=entry_id, record_count=1)
    tree.apply(plan_complete(PATHS, tree.at, now_ms=1, closing=final(7, entries=3)))
    with pytest.raises(UnexpectedError, match="has 3 entries, but entry 3 of it was read"):
        cursor.plan(tree.state)


def test_positions_that_were_truncated() -> None:
    """An explicit one is an error, the earliest one moves on."""
    tree = written(7, 8)
    change = plan_truncate(PATHS, tree.at, DLSN(2, 1, 3))
    assert change is not None
    tree.apply(change)
    tree.apply(plan_remove(PATHS, tree.at, removable(tree), ()))
    for truncated in (DLSN(1, 2, 0), DLSN(2, 0, 0), DLSN(2, 1, 2)):
        with pytest.raises(AlreadyTruncatedError, match="the first one left is at 2:1:3"):
            cursor_at(truncated, skips_truncated=False).plan(tree.state)
    for cursor in (
        cursor_at(DLSN.INITIAL),
        cursor_at(DLSN(2, 1, 3), skips_truncated=False),
    ):
        step = cursor.plan(tree.state)
        assert isinstance(step, ReadExtent)
        assert (step.first_entry_id, cursor.position) == (1, DLSN(2, 1, 3))


@pytest.mark.parametrize("removed", [False, True])
def test_truncation_of_what_was_read_is_no_loss(*, removed: bool) -> None:
    """A reader at the end of a segment that is truncated goes on with the next one."""
    cursor = cursor_at(DLSN(1, 0, 0), skips_truncated=False)
    tree = Tree().apply(plan_start(PATHS, Tree().at, ledger_id=7, now_ms=1))
    step = cursor.plan(tree.state)
    assert isinstance(step, FollowExtent)
    for entry_id, count in enumerate((4, 4, 2)):
        cursor.deliver(step, entry_id, records_before=4 * entry_id, record_count=count)
    tree.apply(plan_start(PATHS, tree.at, ledger_id=8, now_ms=1, closing=final(7)))
    change = plan_truncate(PATHS, tree.at, DLSN(2, 0, 0))
    assert change is not None
    tree.apply(change)
    if removed:
        tree.apply(plan_remove(PATHS, tree.at, removable(tree), ()))
    after = cursor.plan(tree.state)
    assert isinstance(after, FollowExtent)
    assert after.extent.ledger_id == 8


class World:
    """A log that is changed at random, and a cursor that reads it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tree = Tree()
        self.cursor = cursor_at(DLSN.INITIAL)
        self.pushed: dict[int, int] = {}  # entries of ordinary writers' ledgers
        self.delivered: list[tuple[int, int]] = []
        self.expected: tuple[VersionedHead, Step] | None = None  # while the log stays the same
        self.ledgers = 0

    @property
    def open_ledger(self) -> int | None:
        """The ledger of the open extent."""
        extent = self.tree.at.head.open_extent
        return None if extent is None else extent.ledger_id

    def closing(self) -> Extent | None:
        """Return the final form of the open extent, if it has entries."""
        ledger = self.open_ledger
        if ledger is None or not self.pushed[ledger]:
            return None
        count = self.pushed[ledger]
        return final(ledger, entries=count, records=count, txid=max(5, self.tree.at.head.max_txid))

    def start(self) -> None:
        """Start or roll a segment."""
        closing = self.closing()
        if self.open_ledger is None or closing is not None:
            self.ledgers += 1
            self.pushed[self.ledgers] = 0
            self.tree.apply(
                plan_start(PATHS, self.tree.at, ledger_id=self.ledgers, now_ms=1, closing=closing)
            )

    def complete(self) -> None:
        """Complete the segment in progress."""
        closing, ledger = self.closing(), self.open_ledger
        if ledger is not None:
            self.tree.apply(
                plan_complete(
                    PATHS, self.tree.at, now_ms=1, closing=closing, empty_ledger_id=ledger
                )
            )

    def append(self) -> None:
        """Append a staged extent."""
        if self.open_ledger is None:
            self.ledgers += 1
            self.tree.apply(
                plan_append(PATHS, self.tree.at, [staged(self.ledgers)], now_ms=1, limits=LIMITS)[0]
            )

    def push(self) -> None:
        """Acknowledge an entry of the open ledger."""
        if self.open_ledger is not None:
            self.pushed[self.open_ledger] += 1

    def truncate(self) -> None:
        """Truncate what was read."""
        change = plan_truncate(PATHS, self.tree.at, self.cursor.position)
        if change is not None:
            self.tree.apply(change)
            pieces = removable(self.tree)
            self.tree.apply(plan_remove(PATHS, self.tree.at, pieces, ()))

    def read(self) -> None:
        """Read one entry, if there is one."""
        step = self.cursor.plan(self.tree.state)
        if self.expected is not None and self.expected[0] == self.tree.at:
            assert step == self.expected[1]
        self.expected = None
        if isinstance(step, ReadExtent):
            if step.first_entry_id == step.extent.last_entry_id:
                self.expected = self.tree.at, self.cursor.plan_after(step, self.tree.state)
            per_entry = step.extent.record_count // step.extent.entry_count
            entry_id = step.first_entry_id
            before = per_entry * (entry_id - step.extent.first_entry_id)
            self.cursor.deliver(step, entry_id, records_before=before, record_count=per_entry)
        elif isinstance(step, FollowExtent):
            entry_id = step.first_entry_id
            if entry_id >= self.pushed[step.extent.ledger_id]:
                return
            self.cursor.deliver(step, entry_id, records_before=entry_id, record_count=1)
        else:
            return
        self.delivered.append((step.extent.ledger_id, entry_id))


@for_each(range(200))
def test_random_changes_and_reads(seed: int) -> None:
    """Whatever the writers do in between, the cursor delivers every entry once, in order."""
    world = World(random.Random(seed))
    actions = [
        world.start,
        world.complete,
        world.append,
        world.push,
        world.truncate,
        world.read,
        world.read,
    ]
    for _ in range(80):
        world.rng.choice(actions)()
    delivered = world.delivered
    assert delivered == sorted(set(delivered))
    for ledger in {ledger for ledger, _ in delivered}:
        entries = [entry for each, entry in delivered if each == ledger]
        assert entries == list(range(entries[0], entries[0] + len(entries)))
        assert entries[0] == (0 if ledger in world.pushed else 6)


def test_a_segment_that_vanished_is_not_passed_over() -> None:
    """A state that begins later than the reader stands, although nothing was truncated."""
    state = written(7, 8).state
    later = LogState(
        log=state.log, head=state.head, version=state.version, segments=state.segments[1:]
    )
    with pytest.raises(UnexpectedError, match="log 'clicks': segment 1 is missing before 2"):
        cursor_at(DLSN.INITIAL).plan(later)


def test_whether_truncated_records_were_read_is_not_guessed() -> None:
    """Truncated into a segment that the state leaves out: it is unknown whether all was read."""
    tree = written(7, 8)
    cursor = cursor_at(DLSN.INITIAL, skips_truncated=False)
    step = cursor.plan(tree.state)
    assert isinstance(step, ReadExtent)
    deliver_all(cursor, step)
    change = plan_truncate(PATHS, tree.at, DLSN(2, 1, 0))
    assert change is not None
    state = tree.apply(change).state
    head = state.head
    without = LogState(log=state.log, head=head, version=state.version, segments=())
    with pytest.raises(AlreadyTruncatedError, match=r"position 1:3:0 was truncated away, .*2:1:0"):
        cursor.plan(without)


def test_segments_that_are_not_known_yet_are_asked_for() -> None:
    """A state that ends early is no state in which segments are missing."""
    tree = written(1, 2, 3)
    known = LogState(
        log=tree.state.log,
        head=tree.state.head,
        version=tree.state.version,
        segments=tree.state.segments[:2],
        known_lssn=2,
    )
    cursor = cursor_at(DLSN(2, 0, 0))
    step = cursor.plan(known)
    assert isinstance(step, ReadExtent)
    deliver_all(cursor, step)
    assert cursor.plan(known) == LearnSegments()
    assert cursor.position == DLSN(3, 0, 0)
    assert isinstance(cursor.plan(tree.state), ReadExtent)
    assert cursor_at(DLSN(4, 0, 0)).plan(tree.state) == WaitForChange()
    with pytest.raises(UnexpectedError, match="missing before 3"):
        cursor_at(DLSN(1, 0, 0)).plan(
            LogState(
                log=tree.state.log,
                head=tree.state.head,
                version=1,
                segments=tree.state.segments[1:2],
                known_lssn=2,
            )
        )
