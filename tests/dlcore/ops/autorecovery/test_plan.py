"""Goal: plans touch what may be touched, and copy each missing entry once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.ledger.metadata.quorum import write_set
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ops.autorecovery.check import Answer, Held, Unknown, expected_ranges, fragments_of
from dlcore.ops.autorecovery.plan import copy_lanes, plan_repair
from dlcore.wire.port import EntryRange
from tests.fixtures.ledgers import bookie, bookies, metadata_of, quorum_of

if TYPE_CHECKING:
    from dlcore.base.config import QuorumConfig
    from dlcore.base.ids import BookieId
    from dlcore.ops.autorecovery.check import Fragment


def whole_position(quorum: QuorumConfig, fragment: Fragment, position: int) -> list[EntryRange]:
    """Return all that a position of a fragment should hold."""
    return list(
        expected_ranges(
            quorum,
            position=position,
            first_entry_id=fragment.first_entry_id,
            last_entry_id=fragment.last_entry_id,
        )
    )


def held(first: int, last: int) -> Held:
    """Return an answer of one range."""
    return Held([EntryRange(first_entry_id=first, last_entry_id=last)])


def test_a_complete_ledger_needs_nothing() -> None:
    """Nothing to do, nothing to wait for."""
    metadata = metadata_of((0, "ABC"), state=LedgerState.CLOSED, last_entry_id=9)
    plan = plan_repair(metadata, lost=(), answers={each: held(0, 9) for each in bookies("ABC")})
    assert plan.is_done


def test_lost_members_are_replaced_in_every_ensemble_of_a_closed_ledger() -> None:
    """Also where no entry is left, so that the metadata forgets them."""
    metadata = metadata_of((0, "ABC"), (5, "ABD"), state=LedgerState.CLOSED, last_entry_id=4)
    answers = {each: held(0, 9) for each in bookies("BCD")}
    plan = plan_repair(metadata, lost=bookies("A"), answers=answers)
    assert [(r.fragment.first_entry_id, r.position, r.old) for r in plan.replaces] == [
        (0, 0, bookie("A")),
        (5, 0, bookie("A")),
    ]
    assert not plan.refills
    assert not plan.is_done


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
def test_the_last_ensemble_of_a_ledger_that_is_not_closed_is_left_alone(
    state: LedgerState,
) -> None:
    """Completed ones are repaired at once."""
    metadata = metadata_of((0, "ABC"), (5, "ABD"), state=state)
    plan = plan_repair(metadata, lost=bookies("A"), answers={bookie("B"): held(0, 9)})
    assert [r.fragment.first_entry_id for r in plan.replaces] == [0]
    assert plan.lost_in_tail == bookies("A")
    assert plan.is_in_recovery is (state is LedgerState.IN_RECOVERY)
    assert plan.unknown == (f"{bookie('C')}: it was not asked",)
    with pytest.raises(AssertionError):
        metadata.with_replaced(first_entry_id=5, old=bookie("A"), new=bookie("E"))
    swapped = metadata.with_replaced(first_entry_id=0, old=bookie("A"), new=bookie("E"))
    assert [each.bookies for each in swapped.ensembles] == [bookies("EBC"), bookies("ABD")]


def test_living_members_get_what_they_lack_and_silent_ones_are_waited_for() -> None:
    """An unknown answer moves nothing, and keeps the ledger on the list."""
    metadata = metadata_of((0, "ABC"), state=LedgerState.CLOSED, last_entry_id=9)
    answers: dict[BookieId, Answer] = {
        bookie("A"): held(0, 9),
        bookie("B"): held(2, 9),
        bookie("C"): Unknown("late"),
    }
    plan = plan_repair(metadata, lost=(), answers=answers)
    (refill,) = plan.refills
    assert refill.bookie == bookie("B")
    assert refill.ranges == (EntryRange(first_entry_id=0, last_entry_id=1),)
    assert plan.unknown == (f"{bookie('C')}: late",)
    assert not plan.replaces


@pytest.mark.parametrize("shape", [(3, 3), (4, 2), (5, 3), (3, 1)])
def test_lanes_hold_each_entry_once_and_name_those_who_should_have_it(
    shape: tuple[int, int],
) -> None:
    """For the whole of each position, and for ranges with holes."""
    size, width = shape
    quorum = quorum_of(size, width, 1)
    metadata = metadata_of(
        (0, "ABCDE"[:size]), quorum=quorum, state=LedgerState.CLOSED, last_entry_id=40
    )
    (fragment,) = fragments_of(metadata)
    members = fragment.ensemble.bookies
    for position, target in enumerate(members):
        whole = whole_position(quorum, fragment, position)
        for ranges in (whole, whole[1:3] + whole[5:]):
            wanted = [e for r in ranges for e in range(r.first_entry_id, r.last_entry_id + 1)]
            lanes = copy_lanes(quorum, fragment, ranges=ranges, target=target, lost=(), answers={})
            copied = []
            for lane in lanes:
                for e in range(lane.first_entry_id, lane.last_entry_id + 1, lane.stride):
                    copied.append(e)
                    others = {members[p] for p in write_set(quorum, e)} - {target}
                    assert set(lane.sources) == others
            assert sorted(copied) == wanted


def test_sources_that_answered_come_first_and_lost_ones_last() -> None:
    """A lost bookie may have the only copy."""
    quorum = quorum_of(4, 4, 2)
    metadata = metadata_of((0, "ABCD"), quorum=quorum, state=LedgerState.CLOSED, last_entry_id=0)
    (fragment,) = fragments_of(metadata)
    (lane,) = copy_lanes(
        quorum,
        fragment,
        ranges=whole_position(quorum, fragment, 0),
        target=bookie("E"),
        lost=bookies("A"),
        answers={bookie("B"): Unknown("late"), bookie("D"): held(0, 0)},
    )
    assert [each.name for each in lane.sources] == ["D", "B", "C", "A"]
