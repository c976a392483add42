"""The machine of redaction: no step before the one that it needs, and no good end too early."""

from __future__ import annotations

import random

from dlcore.base.errors import DLError, LogNotFoundError, ObjectStoreError, UnsupportedError
from dlcore.base.steps import CallFailed, Ended
from dlcore.log.metadata.segment import ColdExtent, Extent
from dlcore.ops.upkeep.config import MergePolicy
from dlcore.ops.upkeep.redaction import (
    SCANS_MAX,
    Call,
    Effect,
    Event,
    Left,
    Redaction,
    RedactionState,
    Rewrite,
    Rewritten,
    Run,
    Scanned,
    Signal,
    Wait,
    plan_runs,
)
from tests.fixtures.lengths import amount, for_each


def extent(ledger_id: int, *, cold: bool = False, size: int = 100) -> Extent:
    """Return an extent of one entry."""
    return (ColdExtent if cold else Extent)(
        ledger_id=ledger_id, first_entry_id=0, last_entry_id=0, record_count=1, size_bytes=size
    )


def run_of(lssn: int, first: int = 0, rows: int = 1) -> Run:
    """Return a run of one extent."""
    return Run(lssn=lssn, first=first, parts=(extent(lssn),), rows=rows)


class Steps:
    """A machine that is validated after each event."""

    def __init__(self) -> None:
        self.machine = Redaction()

    def send(self, event: Event) -> Effect:
        """Send an event, and return the effect."""
        effect = self.machine.handle(event)
        self.machine.validate()
        return effect

    def send_all(self, *events: Event) -> Effect:
        """Send events, and return the last effect."""
        effects = [self.send(event) for event in events]
        return effects[-1]


DONE = (Left(), Left(), Left(), Left())


def test_a_log_without_such_rows_is_left_alone() -> None:
    """Goal: nothing is asked of bookies for nothing."""
    steps = Steps()
    assert steps.send(Signal.BEGIN) is Call.SCAN
    assert steps.send(Scanned(obstacles=("an obstacle of no interest",))) == Ended(True)
    assert steps.machine.state is RedactionState.CLEAN


def test_runs_are_rewritten_from_the_last_one_on_and_scanned_again() -> None:
    """Goal: the place of a run does not depend on swaps before it; the end is seen, not assumed."""
    steps = Steps()
    steps.send(Signal.BEGIN)
    runs = (run_of(2), run_of(1, 3), run_of(1))
    assert steps.send(Scanned(runs=runs)) == Rewrite(run_of(2))
    assert steps.send(Rewritten(True)) == Rewrite(run_of(1, 3))
    assert steps.send(Rewritten(True)) == Rewrite(run_of(1))
    assert steps.send(Rewritten(True)) is Call.SCAN
    assert steps.send(Scanned()) is Call.FOLLOW
    assert steps.send(Left()) is Call.DROP
    assert steps.send(Left()) is Call.DELETE
    assert steps.send(Left()) is Call.ASK
    assert steps.send(Left()) is Call.FINISH
    assert steps.send(Signal.FINISHED) == Ended(True)
    assert steps.machine.state is RedactionState.DONE


def test_after_a_crash_the_rounds_go_on() -> None:
    """Goal: with nothing left in the chain, old copies are still removed."""
    steps = Steps()
    assert steps.send_all(Signal.BEGIN, Scanned(is_begun=True)) is Call.FOLLOW
    assert steps.send_all(*DONE) is Call.FINISH


def test_an_overtaken_run_is_scanned_again() -> None:
    """Goal: what another change moved is found where it is now."""
    steps = Steps()
    steps.send_all(Signal.BEGIN, Scanned(runs=(run_of(1), run_of(2))))
    assert steps.send(Rewritten(False)) is Call.SCAN
    assert steps.send(Scanned(runs=(run_of(1),))) == Rewrite(run_of(1))


def test_the_segment_in_progress_is_completed_first() -> None:
    """Goal: it is refused, if it must be, before anything is changed."""
    steps = Steps()
    assert (
        steps.send_all(Signal.BEGIN, Scanned(runs=(run_of(1),), open_rows=1, must_complete=True))
        is Call.COMPLETE
    )
    assert steps.send(Signal.COMPLETED) is Call.SCAN
    error = UnsupportedError("a writer has it")
    steps = Steps()
    steps.send_all(Signal.BEGIN, Scanned(open_rows=1, must_complete=True))
    assert steps.send(CallFailed(error)) == Ended(error)
    assert steps.machine.state is RedactionState.FAILED


def test_an_obstacle_forbids_to_begin() -> None:
    """Goal: all obstacles are reported at once."""
    steps = Steps()
    steps.send(Signal.BEGIN)
    effect = steps.send(Scanned(runs=(run_of(1),), obstacles=("a fork", "a table")))
    assert isinstance(effect, Ended)
    assert str(effect.outcome) == "a fork; a table"


def test_the_rest_is_tried_again_until_patience_is_over() -> None:
    """Goal: a store that is away stops no other step; the reasons are those of the last round."""
    steps = Steps()
    steps.send_all(Signal.BEGIN, Scanned(is_begun=True, kept=("a truncated segment",)))
    steps.send(CallFailed(ObjectStoreError("503")))
    effect = steps.send_all(Left(("ledger 7",)), Left(), Left(("bookie-1",)))
    left = ("a truncated segment", "ObjectStoreError: 503", "ledger 7", "bookie-1")
    assert effect == Wait(1.0, left)
    assert steps.send(Signal.PAUSE_OVER) is Call.FOLLOW
    steps.send_all(Left(), Left(), Left(), CallFailed(ObjectStoreError("504")))
    assert steps.send(Signal.PATIENCE_OVER) == Ended(False)
    assert steps.machine.left == ("a truncated segment", "ObjectStoreError: 504")
    assert steps.machine.state is RedactionState.WAITING


def test_kept_rows_are_no_good_end() -> None:
    """Goal: a truncated segment that stays keeps its rows, and that is reported."""
    steps = Steps()
    seen = Scanned(kept=("kept",))
    assert steps.send_all(Signal.BEGIN, seen, *DONE) == Ended(False)
    assert steps.machine.state is RedactionState.WAITING
    assert steps.machine.left == ("kept",)


def test_errors_end_it_and_a_log_that_always_has_rows_too() -> None:
    """Goal: no loop without an end; errors of scans and copies are the caller's."""
    error = LogNotFoundError("gone")
    for events in (
        (Signal.BEGIN,),
        (Signal.BEGIN, Scanned(runs=(run_of(1),))),
        (Signal.BEGIN, Scanned(is_begun=True), *DONE),
    ):
        steps = Steps()
        steps.send_all(*events)
        assert steps.send(CallFailed(error)) == Ended(error)
    steps = Steps()
    effect = steps.send(Signal.BEGIN)
    for _ in range(SCANS_MAX):
        effect = steps.send_all(Scanned(runs=(run_of(1),)), Rewritten(False))
    assert isinstance(effect, Ended)
    assert "scanned 10 times" in str(effect.outcome)


@for_each(range(amount(500, sampled=50)))
def test_a_good_end_means_that_nothing_was_left(seed: int) -> None:  # noqa: C901  one answer each
    """Method: answers at random, of a world that the machine sees through its effects only."""
    rng = random.Random(seed)
    rows = {number: rng.random() < 0.5 for number in range(rng.randint(0, 4))}
    is_open = rng.random() < 0.3
    is_begun, old_copies = False, 0
    steps = Steps()
    effect = steps.send(Signal.BEGIN)
    while not isinstance(effect, Ended):
        event: Event
        match effect:
            case Call.SCAN:
                runs = tuple(run_of(number) for number, has in rows.items() if has)
                event = Scanned(
                    runs=runs, open_rows=int(is_open), must_complete=is_open, is_begun=is_begun
                )
            case Call.COMPLETE:
                rows[9], is_open = True, False
                event = Signal.COMPLETED
            case Rewrite(run):
                rows[run.lssn], is_there = False, rng.random() < 0.8
                if is_there:
                    is_begun, old_copies = True, old_copies + 1
                else:
                    rows[run.lssn] = True
                event = Rewritten(is_there)
            case Wait():
                event = Signal.PAUSE_OVER if rng.random() < 0.9 else Signal.PATIENCE_OVER
            case Call.FINISH:
                event = Signal.FINISHED
            case Call.DROP if old_copies and rng.random() < 0.5:
                old_copies -= 1
                event = Left(("more",))
            case Call.DROP:
                event = Left(("old copies",) if old_copies else ())
            case _:
                event = CallFailed(DLError("away")) if rng.random() < 0.2 else Left()
        effect = steps.send(event)
    if effect.outcome is True:
        assert not any(rows.values())
        assert not is_open
        assert not old_copies


def test_runs_have_all_extents_of_ledgers_with_rows_within_limits() -> None:
    """Goal: a ledger goes as a whole; hot and cold extents are apart; a step is bounded."""
    policy = MergePolicy(
        large_weight=2000, fan_in=2, run_weight_max=4000, run_extents_max=3, run_ledgers_max=2
    )

    def planned(extents: list[Extent], rows: list[int], tainted: set[int]) -> list[object]:
        found = plan_runs(extents, rows, policy, lssn=5, tainted=tainted)
        assert all(
            each.parts == tuple(extents[each.first : each.first + len(each.parts)])
            and each.lssn == 5
            and each.is_cold is each.parts[0].is_cold
            for each in found
        )
        return [(each.first, len(each.parts), each.rows) for each in found]

    hot = [extent(number) for number in (1, 2, 1, 3, 1, 4)]
    assert planned(hot, [0] * 6, set()) == []
    assert planned(hot, [2, 0, 0, 0, 0, 0], {1}) == [(0, 1, 2), (2, 1, 0), (4, 1, 0)]
    assert planned(hot, [1] * 6, {1, 2, 3, 4}) == [(0, 3, 3), (3, 2, 2), (5, 1, 1)]
    mixed = [extent(1), extent(2, cold=True), extent(3)]
    assert planned(mixed, [1, 1, 1], {1, 2, 3}) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    large = [extent(1, size=3000), extent(1, size=3000), extent(1, size=9000)]
    assert planned(large, [1, 1, 1], {1}) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    three = [extent(1)] * 4
    assert planned(three, [1] * 4, {1}) == [(0, 3, 3), (3, 1, 1)]
