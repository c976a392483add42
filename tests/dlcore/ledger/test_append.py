"""Goal: every transition of the append machine.  Method: feed answers, compare exact effects."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from dlcore.base.errors import (
    BadRequestError,
    BookieAccessDeniedError,
    BookieReadOnlyError,
    CorruptMetadataError,
    DLError,
    EntryTooLargeError,
    LedgerClosedError,
    LedgerFencedError,
    NotEnoughBookiesError,
)
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState
from dlcore.ledger.writing.appender import (
    AppenderState,
    AppendRecovered,
    Call,
    CloseEnded,
    Effect,
    Fail,
    FailAdds,
    GoOnWithout,
    SendAdd,
    Signal,
)
from dlcore.wire.frames import decode_frame
from tests.fixtures.append_bench import (
    Bench,
    complete,
    targets,
)
from tests.fixtures.ledgers import bookie, bookies, entry_of, metadata_of, quorum_of

STRIPES = quorum_of(5, 3, 2)


def test_an_entry_goes_to_its_write_set_with_the_lac_of_the_moment() -> None:
    """Striping, first to the bookie that is followed (of ledger 7 it is C), and what is carried."""
    bench = Bench("ABCDE", quorum=quorum_of(5, 3, 2))
    first = bench.append()
    assert targets(first) == [(0, "C"), (0, "A"), (0, "B")]
    assert targets(bench.append()) == [(1, "C"), (1, "B"), (1, "D")]
    bench.ok(0, "A")
    assert not bench.has_news()
    bench.ok(0, "C")
    assert bench.has_news()
    (sent,) = bench.append()
    assert not bench.has_news()
    assert isinstance(sent, SendAdd)
    frame = decode_frame(bytes(sent.frame), ledger_id=7, entry_id=2)
    assert (frame.last_add_confirmed, frame.ledger_bytes) == (0, 30)
    assert [position for position, _ in sent.targets] == [2, 3, 4]


def test_acks_come_in_order_and_once() -> None:
    """An entry at Qa waits for those before it."""
    bench = Bench()
    bench.append(3)
    assert bench.ok(1, "A") == []
    assert bench.ok(1, "B") == []
    assert bench.ok(0, "B") == []
    assert bench.ok(0, "B") == []  # repeated
    assert not bench.is_idle()
    assert bench.ok(0, "C") == [complete(0, 1)]
    assert bench.ok(2, "A") == []
    assert bench.ok(2, "C") == [complete(2, 2)]
    assert bench.is_idle()
    assert bench.machine.window.confirmed_bytes == bench.machine.window.pushed_bytes == 30


def test_bytes_are_pending_until_the_whole_write_set_answered() -> None:
    """A slow third replica counts as memory in use."""
    bench = Bench()
    bench.append(2)
    size = bench.machine.window.pending_bytes
    for entry_id in (0, 1):
        for name in "AB":
            bench.ok(entry_id, name)
    assert bench.is_idle()
    assert bench.machine.window.pending_bytes == size
    assert bench.machine.window.pending_count == 2
    bench.ok(0, "C")
    assert bench.machine.window.pending_bytes == size // 2
    bench.ok(0, "C")  # late and repeated
    bench.ok(1, "C")
    assert (bench.machine.window.pending_bytes, bench.machine.window.pending_count) == (0, 0)


def test_an_ensemble_change_starts_after_the_lac_and_holds_acks_back() -> None:
    """The rule that BookKeeper broke in #1591 and #4651."""
    bench = Bench()
    bench.append(3)
    bench.ok(0, "A")
    bench.ok(0, "B")
    bench.ok(1, "A")
    assert bench.fail(1, "C") == [Call.LIST_BOOKIES]
    assert bench.fail(2, "C") == []  # folded in
    planned = bench.planned(bench.listed("ABCD"))
    assert planned == metadata_of((0, "ABC"), (1, "ABD"))
    assert bench.is_changing()
    assert bench.ok(1, "B") == []  # at Qa, and not reported
    assert bench.machine.window.last_add_confirmed == 0
    sent = bench.append()
    assert sorted(targets(sent)) == [(3, "A"), (3, "B")]
    effects = bench.stored(planned)
    assert targets(effects) == [(3, "D")]
    assert not bench.awaits(1, 2, "C")  # no one waits for its answers
    assert bench.awaits(3, 2, "D")
    assert effects[-1] == complete(1, 1)
    assert bench.ok(2, "A") == [complete(2, 2)]  # the copy counts
    assert bench.machine.metadata == planned
    assert not bench.is_changing()
    assert bench.failed == ""


def test_a_change_takes_acks_of_the_replaced_bookie_away() -> None:
    """An entry may need Qa anew."""
    bench = Bench()
    bench.append(2)
    bench.ok(0, "A")
    bench.fail(1, "A")
    planned = bench.planned(bench.listed("D"))
    assert planned == metadata_of((0, "DBC"))  # in place: it starts at the same entry
    bench.machine.window.adds[0].copied.clear()  # as if it had none
    assert bench.ok(0, "B") == []
    effects = bench.stored(planned)
    assert targets(effects) == [(0, "D")]
    assert complete(0, 0) not in effects
    assert bench.ok(0, "D") == [complete(0, 0)]


def test_acks_go_on_while_replacements_are_looked_for() -> None:
    """Nothing is planned yet, so the stored ensemble still counts."""
    bench = Bench()
    bench.append(1)
    bench.fail(0, "A")
    bench.ok(0, "B")
    assert bench.ok(0, "C") == [complete(0, 0)]
    assert bench.planned(bench.listed("D")) == metadata_of((0, "ABC"), (1, "DBC"))


def test_confirmed_entries_are_not_sent_again_and_are_given_up() -> None:
    """Their ensemble stays what it was."""
    bench = Bench()
    bench.append(2)
    for name in "AB":
        bench.ok(0, name)
    bench.fail(1, "C")
    planned = bench.planned(bench.listed("D"))
    effects = bench.stored(planned)
    assert targets(effects) == []
    assert bench.machine.window.pending_count == 1
    assert bench.ok(0, "C") == []  # of a replaced bookie


def test_failures_during_a_change_start_the_next_one() -> None:
    """They are not forgotten when the first one is stored."""
    bench = Bench()
    bench.append(1)
    bench.fail(0, "A")
    effects = bench.listed("DE")
    assert bench.fail(0, "C") == []
    planned = bench.planned(effects)
    assert bench.fail(0, "B") == []
    effects = bench.stored(planned)
    assert effects[-1] == Call.LIST_BOOKIES
    assert bench.failed == "BC"


def test_two_failures_are_one_change() -> None:
    """Failures that are known when planning are replaced together."""
    bench = Bench()
    bench.append(1)
    bench.fail(0, "A")
    bench.fail(0, "C")
    planned = bench.planned(bench.listed("ABCDE"))
    assert {each.name for each in planned.last_ensemble.bookies} == set("BDE")
    assert planned.last_ensemble.bookies[1] == bookie("B")


def test_without_replacement_it_goes_on_as_long_as_qa_can_be_reached() -> None:
    """A delayed change."""
    bench = Bench()
    bench.append(1)
    bench.fail(0, "A")
    assert bench.listed("ABC") == [GoOnWithout(frozenset(bookies("A")), 1.0)]
    bench.ok(0, "B")
    assert bench.ok(0, "C") == [complete(0, 0)]
    assert targets(bench.append()) == [(1, "B"), (1, "C")]
    assert bench.retry() == [Call.LIST_BOOKIES]
    assert bench.retry() == []  # under way
    assert bench.planned(bench.listed("D")) == metadata_of((0, "ABC"), (1, "DBC"))


def test_a_known_failure_is_not_looked_at_again_while_qa_can_be_reached() -> None:
    """One dead bookie does not mean one lookup per entry."""
    bench = Bench()
    bench.append(2)
    bench.fail(0, "A")
    bench.listed("ABC")
    assert bench.fail(1, "A") == []


def test_too_few_bookies_end_the_writer() -> None:
    """The message says which bookies failed and what is needed."""
    bench = Bench()
    bench.append(1)
    bench.fail(0, "A")
    bench.listed("")
    assert bench.fail(0, "B") == [Call.LIST_BOOKIES]
    assert bench.machine.window.first_stuck(bench.machine._replacements.failed) is not None
    (effect,) = bench.listed("")
    assert isinstance(effect, FailAdds)
    assert isinstance(effect.error, NotEnoughBookiesError)
    assert "entry 0 cannot reach 2 of 3" in str(effect.error)
    assert bench.machine.error is effect.error
    assert bench.machine.window.first_stuck(bench.machine._replacements.failed) is None
    assert bench.machine.window.pending_bytes == 0
    assert bench.listed("D") == []
    assert bench.retry() == []


def test_an_append_that_cannot_reach_qa_asks_for_replacements_at_once() -> None:
    """No answer will come that could start it."""
    bench = Bench(quorum=quorum_of(3, 3, 3))
    bench.append(1)
    for name in "BC":
        bench.ok(0, name)
    bench.fail(0, "A")
    (effect,) = bench.listed("")
    assert isinstance(effect, FailAdds)

    bench = Bench()
    bench.append(1)
    for name in "BC":
        bench.ok(0, name)
    bench.fail(0, "A", BookieReadOnlyError("full"))
    bench.listed("")
    bench.append(1)
    bench.fail(1, "B")
    bench.copy(bench.listed("D"))
    assert bench.is_changing()


def test_all_failed_at_once_sends_nothing() -> None:
    """An entry that no bookie got goes to the replacement."""
    bench = Bench("A", quorum=quorum_of(1, 1, 1))
    bench.append(1)
    bench.ok(0, "A")
    assert bench.append() != []
    bench.fail(1, "A")
    assert bench.append() == []  # no bookie left to send to; already looking
    planned = bench.planned(bench.listed("B"))
    effects = bench.stored(planned)
    assert effects == [complete(1, 2)]


def test_a_change_waits_until_those_who_join_hold_what_readers_may_have_been_shown() -> None:
    """B may hold entry 1, with A, so that a reader shows it: in the next ensemble A and D do."""
    bench = Bench()
    bench.append(3)
    for name in "AB":
        bench.ok(0, name)
    bench.ok(1, "A")
    bench.fail(1, "B")
    effects = bench.listed("D")
    assert targets(effects) == [(1, "D"), (2, "D")]
    assert not bench.is_changing()
    assert bench.awaits(1, 1, "D")
    assert bench.ok(1, "D", 1) == []
    assert not bench.awaits(1, 1, "D")
    assert bench.ok(1, "D", 1) == []  # repeated
    assert sorted(targets(bench.append())) == [
        (3, "A"),
        (3, "C"),
    ]  # B never gets it: no copy is needed
    planned = bench.planned(bench.ok(2, "D", 1))
    assert planned == metadata_of((0, "ABC"), (1, "ADC"))
    assert bench.stored(planned)[-1] == complete(1, 1)


def test_an_entry_confirmed_meanwhile_needs_no_copy() -> None:
    """It stays in the ensemble that has it."""
    bench = Bench()
    bench.append(1)
    bench.fail(0, "B")
    assert targets(bench.listed("D")) == [(0, "D")]
    bench.ok(0, "A")
    confirmed, change = bench.ok(0, "C")
    assert confirmed == complete(0, 0)
    assert bench.planned([change]) == metadata_of((0, "ABC"), (1, "ADC"))
    assert bench.ok(0, "D", 1) == []  # late


def test_one_who_joins_and_fails_is_replaced_before_it_is_named() -> None:
    """Nothing of it reaches the metadata; the bookie that comes next gets all copies."""
    bench = Bench()
    bench.append(2)
    bench.fail(0, "B")
    assert targets(bench.listed("D")) == [(0, "D"), (1, "D")]
    bench.ok(0, "D", 1)

    def fail() -> list[Effect]:
        return bench.fail(1, "D", position=1)

    assert fail() == [Call.LIST_BOOKIES]
    assert fail() == []  # it is out already
    effects = bench.listed("E")
    assert targets(effects) == [(0, "E"), (1, "E")]
    assert bench.planned(effects) == metadata_of((0, "AEC"))


@pytest.mark.parametrize("error", [EntryTooLargeError("big"), BadRequestError("what?")])
def test_one_who_refuses_a_copy_that_others_hold_is_left_out(error: DLError) -> None:
    """Its limits are lower: asked again it would refuse again, for ever."""
    bench = Bench()
    bench.append(2)
    bench.ok(0, "A")
    bench.fail(0, "B")
    assert targets(bench.listed("D")) == [(0, "D"), (1, "D")]
    assert bench.fail(0, "D", error, position=1) == [Call.LIST_BOOKIES]
    assert bench.listed("D", readmitted="D") == [GoOnWithout(frozenset(bookies("B")), 1.0)]
    assert bench.ok(0, "C") == [complete(0, 0)], "without a replacement it goes on"
    assert bench.retry() == [Call.LIST_BOOKIES]
    effects = bench.listed("DE")
    assert targets(effects) == [(1, "E")]
    assert bench.planned(effects) == metadata_of((0, "ABC"), (1, "AEC"))


def test_without_others_the_error_says_what_those_who_are_left_out_refused() -> None:
    """With the sizes, which an operator is to make equal."""
    bench = Bench()
    bench.append(1)
    bench.fail(0, "A")
    bench.listed("D")
    error = EntryTooLargeError("entry of 30 bytes, expected at most 20")
    bench.fail(0, "D", error, position=0)
    bench.fail(0, "B")
    bench.listed("D")
    assert isinstance(bench.machine.error, NotEnoughBookiesError)
    reason = (
        r"take the place, for new ones refused entries: D.* \(entry of 30 bytes, expected at mos"
    )
    assert re.search(reason, str(bench.machine.error))


def test_one_who_failed_to_join_and_joins_later_gets_only_what_it_lacks() -> None:
    """Links that lose one answer in some would let no change come to its end."""
    bench = Bench("ABCDE", quorum=STRIPES)
    bench.append(3)
    bench.fail(0, "B")
    assert targets(bench.listed("F")) == [(0, "F"), (1, "F")]
    bench.ok(0, "F", 1)
    bench.fail(1, "F", position=1)
    effects = bench.listed("F")
    assert targets(effects) == [(1, "F")]
    bench.ok(1, "F", 1)
    assert bench.stored(metadata_of((0, "AFCDE"), quorum=STRIPES)) == []
    assert [bench.machine.window.adds[each].acks for each in (0, 1, 2)] == [{1}, {1}, set()]


def test_a_copy_counts_for_entries_that_have_a_place_there_only() -> None:
    """Entry 0 was copied to F for the place of B; F takes the place of D, where it has none."""
    bench = Bench("ABCDE", quorum=STRIPES)
    bench.append(3)
    bench.fail(0, "B")
    bench.listed("F")
    bench.ok(0, "F", 1)
    bench.fail(1, "F", position=1)
    bench.listed("", readmitted="B")
    bench.fail(1, "D")
    bench.copy(bench.listed("F"))
    bench.stored(metadata_of((0, "ABCFE"), quorum=STRIPES))
    assert [bench.machine.window.adds[each].acks for each in (0, 1, 2)] == [set(), {3}, {3}]


def test_a_failed_bookie_is_readmitted_when_no_other_replaces_it() -> None:
    """It gets what it missed and is still unconfirmed."""
    bench = Bench()
    bench.append(1)
    bench.fail(0, "A")
    bench.listed("")
    bench.append(1)
    bench.retry()
    effects = bench.listed("ABC", readmitted="ABC")
    assert targets(effects) == [(0, "A"), (1, "A")]
    assert bench.failed == ""
    assert bench.retry() == []


def test_readmission_is_of_registered_bookies_only() -> None:
    """The others stay failed."""
    bench = Bench("ABCD", quorum=quorum_of(4, 3, 1))
    bench.append(2)
    bench.fail(0, "A")
    bench.fail(1, "B")
    effects = bench.listed("", readmitted="B")
    assert targets(effects) == [(1, "B")]
    assert effects[-1] == GoOnWithout(frozenset(bookies("A")), 1.0)


def test_an_unneeded_listing_does_nothing() -> None:
    """The failure may be gone when the answer comes."""
    bench = Bench()
    assert bench.listed("D") == []


@pytest.mark.parametrize(
    "error",
    [EntryTooLargeError("big"), BadRequestError("what?"), BookieAccessDeniedError("no right")],
)
def test_an_entry_that_every_bookie_would_refuse_ends_the_writer(error: DLError) -> None:
    """Replacing bookies would go on for ever."""
    bench = Bench()
    bench.append(1)
    assert bench.fail(0, "A", error) == [FailAdds(error=error)]


def test_a_fence_of_any_bookie_ends_the_writer() -> None:
    """Even a bookie that is no member any more."""
    bench = Bench()
    bench.append(1)
    error = LedgerFencedError("fenced")
    assert bench.fail(99, "Z", error) == [FailAdds(error=error)]
    assert bench.handle(Fail(LedgerClosedError("later"))) == []
    assert bench.machine.error is error
    assert bench.ok(0, "A") == []
    assert bench.fail(0, "A") == []


def planned_bench() -> tuple[Bench, LedgerMetadata]:
    """Return a machine whose change is planned, and the plan."""
    bench = Bench()
    bench.append(1)
    bench.fail(0, "A")
    return bench, bench.planned(bench.listed("D"))


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (LedgerState.CLOSED, LedgerClosedError),
        (LedgerState.IN_RECOVERY, LedgerFencedError),
    ],
)
def test_a_change_that_lost_to_another_client_ends_the_writer(
    state: LedgerState, error: type[DLError]
) -> None:
    """The metadata decides."""
    bench, _ = planned_bench()
    (effect,) = bench.read(metadata_of((0, "ABC"), state=state))
    assert isinstance(effect, FailAdds)
    assert isinstance(effect.error, error)
    assert bench.read(metadata_of((0, "ABC"))) == []
    assert bench.stored(metadata_of((0, "DBC"))) == []


def test_a_change_whose_reply_was_lost_is_recognised() -> None:
    """Only this writer changes the last ensemble."""
    bench, planned = planned_bench()
    effects = bench.read(planned)
    assert effects == []
    assert bench.machine.metadata == planned


def test_a_change_is_made_again_on_top_of_another_clients_value() -> None:
    """A foreign change of something else is kept."""
    bench, planned = planned_bench()
    stored = replace(metadata_of((0, "ABC")), custom={"moved": "yes"})
    again = bench.planned(bench.read(stored))
    assert again == replace(planned, custom={"moved": "yes"})
    assert bench.is_changing()


def test_an_impossible_ensemble_is_not_believed() -> None:
    """It would leave entries without an owner."""
    bench, _ = planned_bench()
    (effect,) = bench.stored(metadata_of((0, "ABC"), (5, "DBC")))
    assert isinstance(effect, FailAdds)
    assert isinstance(effect.error, CorruptMetadataError)


def test_recovery_changes_ensembles_in_memory_and_keeps_frames() -> None:
    """Nothing is stored before the closing write."""
    bench = Bench(is_recovery=True)
    entry = entry_of(0)
    (sent,) = bench.handle(AppendRecovered(entry))
    assert isinstance(sent, SendAdd)
    assert sent.frame == bytes(entry.data)
    bench.fail(0, "A")
    effects = bench.listed("D")
    assert targets(effects) == [(0, "D")]
    assert not bench.is_changing()
    assert bench.machine.metadata == metadata_of((0, "DBC"))


def test_a_sealed_machine_starts_no_change() -> None:
    """The closing write is about to happen."""
    bench = Bench()
    bench.append(1)
    for name in "AB":
        bench.ok(0, name)
    assert bench.handle(Signal.PREPARE_CLOSE) == [CloseEnded(None)]
    assert bench.fail(0, "C") == []
    assert bench.listed("D") == []
    assert bench.is_in(AppenderState.SEALED)
