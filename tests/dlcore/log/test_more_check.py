"""Goal: a reader that ends when it has caught up leaves out no record that was readable.

Method: the exact effect of each event of the check, with a tail in each of its states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import AlreadyTruncatedError, LedgerReadError
from dlcore.base.machines import CallFailed, Ended
from dlcore.log.metadata.changes import plan_complete
from dlcore.log.reading.cursor import FollowExtent, TruncationRule
from dlcore.log.reading.more_check import AskEnd, CheckState, EndAsked, MoreCheck, Signal
from dlcore.log.reading.tail import Broke, Fetched, ReadState, StateRead
from tests.fixtures.log_states import PATHS, Tree, written
from tests.fixtures.tail_bench import (
    AWAY,
    CHANGED,
    ENDED,
    GONE,
    START,
    Bench,
    completed,
    entries,
    entry,
    sealed,
    started,
    truncated,
)

if TYPE_CHECKING:
    from dlcore.log.metadata.values import LogState
    from dlcore.log.reading.more_check import Effect, Event

BEGIN = Signal.BEGIN


def at_the_end() -> Bench:
    """Return a bench that has read, but not taken, all entries of the only segment."""
    bench = Bench(written(7))
    bench.handle(START)
    bench.handle(Fetched(entries(0, 1, 2)))
    bench.handle(ENDED)
    return bench


def caught_up() -> Bench:
    """Return a bench from which all of them were taken, too."""
    bench = at_the_end()
    for _ in range(3):
        bench.take()
    assert bench.machine.buffer.take() is None
    return bench


def fed(check: MoreCheck, event: Event | CallFailed) -> Effect | Ended[bool]:
    """Return the effect of an event."""
    effect = check.handle(event)
    check.validate()
    return effect


def looked(bench: Bench) -> MoreCheck:
    """Return a check that looks at the list, which the known segments do not spare it."""
    check = MoreCheck(bench.machine)
    assert isinstance(fed(check, BEGIN), ReadState)
    assert check.state is CheckState.LOOKING
    return check


def outcome(bench: Bench) -> object:
    """Return what a check says of the log as it is stored."""
    return fed(looked(bench), StateRead(bench.tree.state))


def test_known_segments_spare_a_look() -> None:
    """They have more than the tail has buffered."""
    bench = Bench(written(7))
    check = MoreCheck(bench.machine)
    assert fed(check, BEGIN) == Ended(True)
    assert check.state is CheckState.ANSWERED
    check = MoreCheck(caught_up().machine)
    assert fed(check, BEGIN) == ReadState(1)


def test_the_segment_list_decides() -> None:
    """By what was not taken: buffered entries, later segments, or the end of a sealed log."""
    assert outcome(at_the_end()) == Ended(True)
    bench = caught_up()
    assert outcome(bench) == Ended(False)
    completed(started(bench.tree))
    assert outcome(bench) == Ended(True)
    bench = caught_up()
    sealed(bench.tree)
    assert outcome(bench) == Ended(True)


def test_the_bookies_of_an_open_extent_decide() -> None:
    """Or its follower, which may have brought the entry meanwhile."""
    bench = caught_up()
    started(bench.tree)
    step = bench.step(2)
    assert isinstance(step, FollowExtent)
    for is_readable in (True, False):
        check = looked(bench)
        assert fed(check, StateRead(bench.tree.state)) == AskEnd(step)
        assert check.state is CheckState.ASKING
        assert fed(check, EndAsked(is_readable)) == Ended(is_readable)
    check = looked(bench)
    fed(check, StateRead(bench.tree.state))
    assert bench.handle(CHANGED) == [ReadState(1)]
    assert bench.learn() == [bench.follows(2)]
    bench.push(entry(0))
    assert fed(check, EndAsked(False)) == Ended(True)


def test_an_error_of_the_tail_comes_next() -> None:
    """There is no more to wait for."""
    bench = caught_up()
    bench.handle(Broke(AWAY))
    assert outcome(bench) == Ended(True)


def test_a_failure_is_the_outcome() -> None:
    """The list cannot be read, or too few bookies answer."""
    bench = caught_up()
    started(bench.tree)
    assert fed(looked(bench), CallFailed(AWAY)) == Ended(AWAY)
    check = looked(bench)
    fed(check, StateRead(bench.tree.state))
    error = LedgerReadError("too few bookies")
    assert fed(check, CallFailed(error)) == Ended(error)
    assert check.state is CheckState.ANSWERED


def test_a_ledger_that_is_gone_is_an_error_unless_the_list_has_changed() -> None:
    """It was recovered as empty, or merged; the list shows what came of it, and is read again."""
    bench = caught_up()
    started(bench.tree)
    before = bench.tree.state

    def after_loss(state: LogState) -> object:
        check = looked(bench)
        assert isinstance(fed(check, StateRead(before)), AskEnd)
        assert fed(check, CallFailed(GONE)) == ReadState(1)
        assert check.state is CheckState.LOOKING
        return fed(check, StateRead(state))

    assert after_loss(before) == Ended(GONE)
    empty = plan_complete(PATHS, bench.tree.at, now_ms=5, closing=None, empty_ledger_id=9)
    assert after_loss(bench.tree.apply(empty).state) == Ended(False)
    completed(started(bench.tree))
    assert after_loss(bench.tree.state) == Ended(True)


def test_a_truncated_position_is_an_error() -> None:
    """A caller that named it gets that, by what is known or by the list as it is now."""
    bench = Bench(started(Tree()), rule=TruncationRule.REFUSE)
    bench.handle(START)
    bench.push(entry(0))
    bench.take()
    truncated(bench.tree, 1, 2)
    by_the_list = outcome(bench)
    bench.handle(CHANGED)
    bench.learn()
    by_what_is_known = fed(MoreCheck(bench.machine), BEGIN)
    for ended in (by_the_list, by_what_is_known):
        assert isinstance(ended, Ended)
        assert isinstance(ended.outcome, AlreadyTruncatedError)


@pytest.mark.parametrize("state", CheckState)
def test_every_state_is_on_the_way_to_the_answer(state: CheckState) -> None:
    """ANSWERED is final."""
    assert bool(MoreCheck.transitions.causes[state]) == (state is not CheckState.ANSWERED)
