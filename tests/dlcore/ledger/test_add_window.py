"""Goal: the parts of the append machine by themselves.  Method: short histories, exact results."""

from __future__ import annotations

import random

from dlcore.base.errors import BadRequestError, BookieUnavailableError
from dlcore.ledger.placing.health import Choice
from dlcore.ledger.placing.placement import Topology
from dlcore.ledger.writing.appender import (
    AddWindow,
    After,
    ChoiceDue,
    CompleteAdds,
    GoOnWithout,
    LacPublication,
    Replacements,
    SendAdd,
    SendLac,
    Signal,
)
from dlcore.wire.frames import decode_frame
from tests.fixtures.append_bench import EVEN_LUCK, GivenChoice
from tests.fixtures.ledgers import bookie, bookies, metadata_of, quorum_of

MEMBERS = bookies("ABC")
A, B, C, D = bookies("ABCD")
AWAY = BookieUnavailableError("no answer")


def window_of(ensemble: str = "ABC", ack_quorum_size: int = 2) -> AddWindow:
    """Return an empty window; bookie A is followed."""
    size = len(ensemble)
    metadata = metadata_of((0, ensemble), quorum=quorum_of(size, size, ack_quorum_size))
    return AddWindow(metadata, followed=0, last_add_confirmed=-1)


def test_a_window_numbers_entries_and_confirms_them_in_order() -> None:
    """The LAC passes an entry once it and all before it are at Qa."""
    window = window_of()
    first, second = window.append([b"12345"]), window.append([b"678"])
    frame = decode_frame(bytes(second.frame), ledger_id=7, entry_id=1)
    assert (frame.last_add_confirmed, frame.ledger_bytes) == (-1, 8)
    second.acks |= {0, 1}
    assert window.confirm() is None
    first.acks |= {0, 2}
    assert window.confirm() == CompleteAdds(0, 1)
    assert (window.is_idle, window.confirmed_bytes, window.pending_count) == (True, 8, 0)
    window.validate()


def test_an_entry_stays_until_its_whole_write_set_answered() -> None:
    """Its frame may be needed again, and counts as memory."""
    window = window_of()
    add = window.append([b"x"])
    assert add.send(window.positions(0), MEMBERS, {}) == [
        SendAdd(0, add.frame, [(0, A), (1, B), (2, C)])
    ]
    assert add.send(window.positions(0), MEMBERS, {}) == []  # on its way
    for position, name in ((0, "A"), (1, "B")):
        assert add.take_answer(position, bookie(name))
        assert not add.take_answer(position, bookie(name))
        add.acks.add(position)
    assert window.confirm() == CompleteAdds(0, 0)
    assert window.pending_bytes == len(add.frame)
    assert add.take_answer(2, C)
    window.release(add)
    assert (window.pending_bytes, window.pending_count) == (0, 0)


def test_an_entry_is_stuck_without_positions_that_failed() -> None:
    """A possible answer of a failed bookie is no hope."""
    window = window_of()
    add = window.append([b"x"])
    add.send(window.positions(0), MEMBERS, {})
    assert window.first_stuck({2: C}) is None
    assert window.first_stuck({1: B, 2: C}) is add
    add.acks.add(1)
    assert window.first_stuck({1: B, 2: C}) is None
    window.clear()
    assert window.first_stuck({0: A, 1: B, 2: C}) is None
    window.validate()


def test_copies_are_kept_though_the_change_is_given_up() -> None:
    """A bookie that joins in the next attempt gets only what it lacks."""
    window = window_of()
    adds = [window.append([b"x"]) for _ in range(2)]
    assert len(window.copy_to({1: D})) == window.copies_left == 2
    assert adds[0].owes(1, D)
    assert not adds[0].owes(1, B)
    del adds[0].owed[1]
    adds[0].copied.add(D)
    window.drop_copies()
    assert (window.copies_left, adds[1].owes(1, D)) == (0, False)
    assert window.copy_to({1: D}) == [SendAdd(1, adds[1].frame, [(1, D)])]
    window.validate()


def test_a_change_counts_copies_and_asks_no_bookie_that_left() -> None:
    """Acks of replaced bookies are gone, those of the copies count."""
    window = window_of()
    adds = [window.append([b"x"]) for _ in range(2)]
    for add in adds:
        add.send(window.positions(add.entry_id), MEMBERS, {})
    adds[0].copied.add(D)
    assert window.move({1}, (A, D, C), {}) == [SendAdd(1, adds[1].frame, [(1, D)])]
    assert (adds[0].acks, adds[0].awaits(1, B), adds[1].awaits(1, D)) == ({1}, False, True)


def replacements_of() -> Replacements:
    """Return a search without luck of its own."""
    search: object = GivenChoice()
    return Replacements(MEMBERS, search, EVEN_LUCK, 1.0)  # type: ignore[arg-type]


def chosen(*candidates: str, readmitted: str = "") -> ChoiceDue:
    """Return a choice among these."""
    return ChoiceDue(
        Choice(bookies("".join(candidates)), bookies(readmitted), 0.0, False), Topology(), 0.0
    )


def test_a_bookie_that_refuses_entries_neither_joins_nor_returns() -> None:
    """Such a bookie would refuse the next entry, too."""
    replacements = replacements_of()
    replacements.fail(1, B, AWAY)
    replacements.unfit[D] = BadRequestError("too large")
    assert not replacements.choose(chosen("D"), 3)
    assert "no answer" in replacements.missing()
    assert "too large" in replacements.missing()
    replacements.unfit[B] = BadRequestError("too large")
    assert replacements.readmit([B]) == set()
    del replacements.unfit[B]
    assert replacements.readmit([B, C]) == {1}
    assert replacements.failed == {}


def test_a_stored_change_leaves_other_failures() -> None:
    """A member that failed meanwhile is to be replaced by the next change."""
    replacements = replacements_of()
    replacements.fail(1, B, AWAY)
    assert replacements.choose(chosen("D"), 3)
    assert replacements.changed() == (A, D, C)
    replacements.fail(2, C, AWAY)
    assert replacements.replaced((A, D, C)) == {1}
    assert (replacements.failed, replacements.joining) == ({2: C}, {})
    assert replacements.members == (A, D, C)


def test_one_look_is_due_at_a_time() -> None:
    """Each entry that goes on without a member would add a timer."""
    replacements = replacements_of()
    replacements.fail(1, B, AWAY)
    assert replacements.later(0.0) == [GoOnWithout(frozenset({B}), 1.0)]
    assert replacements.later(0.0) == []
    replacements.look_again()
    assert replacements.later(0.0) != []


def test_a_bookie_has_one_lac_on_its_way_and_gets_the_newest_next() -> None:
    """However many are published meanwhile."""
    publication = LacPublication(-1, followed=0)
    assert publication.tell(0, MEMBERS) == [SendLac(A, 0)]
    assert publication.publish(1, MEMBERS, MEMBERS) == [SendLac(B, 1), SendLac(C, 1)]
    assert publication.tell(2, MEMBERS) == []
    again = publication.note_accepted(A, 0)
    assert again == [SendLac(A, 2)]
    assert publication.unaware(0, MEMBERS) == {1, 2}


def test_failed_messages_are_repeated_once_for_all() -> None:
    """One pause serves all bookies."""
    publication = LacPublication(-1, followed=0)
    publication.publish(0, MEMBERS, MEMBERS)
    fail = [publication.note_failed(each) for each in (A, B)]
    assert [len(each) for each in fail] == [1, 0]
    assert publication.retry() == [SendLac(A, 0), SendLac(B, 0)]


def test_a_lac_is_spread_unless_an_add_carries_it() -> None:
    """A newer LAC than the one that waited waits anew: an add may still carry it."""
    publication = LacPublication(-1, followed=0)
    (later,) = publication.callers_answered(0, MEMBERS, is_idle=False)
    assert isinstance(later, After)
    assert later.event is Signal.SPREAD_DUE
    assert publication.callers_answered(0, MEMBERS, is_idle=False) == []  # it comes already
    publication.carried = 0
    assert publication.spread(1, MEMBERS) == [later]
    assert publication.spread(1, MEMBERS) == [SendLac(each, 1) for each in MEMBERS]
    publication.carried = 1
    assert publication.callers_answered(1, MEMBERS, is_idle=False) == []
    assert publication.is_answered


def test_random_windows_confirm_only_what_enough_bookies_hold() -> None:
    """The invariants of the window, under acks in any order."""
    rng = random.Random(7)
    window, confirmed = window_of("ABCD", 3), -1
    for _ in range(500):
        if rng.random() < 0.2:
            add = window.append([b"x" * rng.randrange(9)])
            add.send(window.positions(add.entry_id), bookies("ABCD"), {})
        elif asked := [each for each in window.adds.values() if each.waiting]:
            add = rng.choice(asked)
            position = rng.choice(list(add.waiting))
            assert add.take_answer(position, add.waiting[position])
            add.acks.add(position)
            window.release(add)
        step = window.confirm()
        if step is not None:
            assert step.first_entry_id == confirmed + 1
            confirmed = step.last_entry_id
        window.validate()
        assert all(len(add.acks) < 3 for add in window.unconfirmed()[:1])
    assert confirmed == window.last_add_confirmed > 50
