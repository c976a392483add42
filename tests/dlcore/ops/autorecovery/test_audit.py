"""Goal: bookies count as lost when they should, and never because no bookie can be seen."""

from __future__ import annotations

from dlcore.base.ids import BookieId
from dlcore.ops.autorecovery.audit import BookieAudit, lost_members
from tests.fixtures.ledgers import bookie, bookies, metadata_of

DELAY_S = 10.0
KNOWN = bookies("ABCD")


def audit() -> BookieAudit:
    """Return an audit that has seen all of `KNOWN` at time 0."""
    made = BookieAudit(lost_bookie_delay_s=DELAY_S)
    assert made.look(known=KNOWN, registered=KNOWN, now=0.0).lost == ()
    return made


def test_one_absent_bookie_is_lost_after_the_delay() -> None:
    """Not a moment before, and it says when to look again."""
    made = audit()
    result = made.look(known=KNOWN, registered=bookies("ABC"), now=5.0)
    assert (result.lost, result.look_again_s) == ((), DELAY_S)
    result = made.look(known=KNOWN, registered=bookies("ABC"), now=14.9)
    assert result.lost == ()
    result = made.look(known=KNOWN, registered=bookies("ABC"), now=15.0)
    assert (result.lost, result.look_again_s) == (bookies("D"), None)


def test_one_that_comes_back_has_the_whole_delay_the_next_time() -> None:
    """Also one that was lost."""
    made = audit()
    made.look(known=KNOWN, registered=bookies("ABC"), now=0.0)
    assert made.look(known=KNOWN, registered=bookies("ABC"), now=20.0).lost == bookies("D")
    assert made.look(known=KNOWN, registered=KNOWN, now=21.0).lost == ()
    result = made.look(known=KNOWN, registered=bookies("ABC"), now=22.0)
    assert (result.lost, result.look_again_s) == ((), DELAY_S)


def test_two_that_vanish_together_are_lost_at_once() -> None:
    """And stay lost until they are back."""
    made = audit()
    made.look(known=KNOWN, registered=bookies("ABC"), now=1.0)
    assert made.look(known=KNOWN, registered=bookies("AB"), now=2.0).lost == bookies("CD")
    assert made.look(known=KNOWN, registered=bookies("ABC"), now=3.0).lost == bookies("D")


def test_one_that_is_gone_for_long_does_not_make_the_next_one_urgent() -> None:
    """A cookie that was not removed must not shorten everybody's delay."""
    made = audit()
    made.look(known=KNOWN, registered=bookies("ABC"), now=0.0)
    assert made.look(known=KNOWN, registered=bookies("ABC"), now=50.0).lost == bookies("D")
    result = made.look(known=KNOWN, registered=bookies("AB"), now=60.0)
    assert (result.lost, result.look_again_s) == (bookies("D"), DELAY_S)


def test_no_bookie_is_lost_while_none_is_registered() -> None:
    """However long it lasts; a bookie that is absent afterwards has the whole delay."""
    made = audit()
    made.look(known=KNOWN, registered=bookies("ABC"), now=0.0)
    assert made.look(known=KNOWN, registered=bookies("ABC"), now=30.0).lost == bookies("D")
    result = made.look(known=KNOWN, registered=(), now=1000.0)
    assert (result.lost, result.look_again_s) == ((), None)
    result = made.look(known=KNOWN, registered=bookies("A"), now=1001.0)
    assert (result.lost, result.look_again_s) == ((), DELAY_S)
    assert made.look(known=KNOWN, registered=bookies("A"), now=1011.0).lost == bookies("BCD")


def test_a_new_auditor_gives_everybody_the_delay() -> None:
    """It may be the first process of a cluster that starts."""
    made = BookieAudit(lost_bookie_delay_s=DELAY_S)
    result = made.look(known=KNOWN, registered=bookies("A"), now=7.0)
    assert (result.lost, result.look_again_s) == ((), DELAY_S)


def test_another_incarnation_under_the_name_means_lost() -> None:
    """Its disk was replaced: there is nothing to wait for."""
    made = audit()
    replaced = BookieId("D", "f" * 32)
    result = made.look(known=KNOWN, registered=(*bookies("ABC"), replaced), now=1.0)
    assert (result.lost, result.look_again_s) == (bookies("D"), None)


def test_without_a_delay_absence_is_loss() -> None:
    """The setting 0."""
    made = BookieAudit(lost_bookie_delay_s=0.0)
    assert made.look(known=KNOWN, registered=bookies("ABC"), now=0.0).lost == bookies("D")


def test_a_ledger_lacks_replicas_by_the_lost_members_of_any_ensemble() -> None:
    """In order; others do not matter."""
    metadata = metadata_of((0, "ABC"), (10, "ABD"))
    assert lost_members(metadata, bookies("DCX")) == bookies("CD")
    assert lost_members(metadata, {bookie("X")}) == ()
