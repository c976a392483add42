"""Goal: the append machine closes its ledger once, and asks no store or bookie without end.

Method: feed answers and the ends of pauses, compare exact effects.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlcore.base.errors import (
    BadRequestError,
    BookieError,
    BookieOverloadedError,
    DLError,
    LedgerClosedError,
    LedgerFencedError,
    LedgerNotFoundError,
    LedgerRecoveryError,
    MetadataConnectionError,
    MetadataError,
    MetadataVersionError,
)
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ledger.placing.health import Choice
from dlcore.ledger.placing.placement import Topology
from dlcore.ledger.writing.appender import (
    METADATA_PATIENCE_S,
    AddDue,
    After,
    AppenderState,
    AppendRecovered,
    Call,
    CallFailed,
    ChoiceDue,
    CloseEnded,
    Fail,
    FailAdds,
    GoOnWithout,
    LedgerClosed,
    Signal,
    StoreMetadata,
)
from tests.fixtures.append_bench import OVERLOAD_PATIENCE_S, Bench, targets
from tests.fixtures.ledgers import bookie, bookies, entry_of, metadata_of, quorum_of

AWAY = MetadataConnectionError("no answer")


def idle_bench() -> Bench:
    """Return a machine with one confirmed entry."""
    bench = Bench()
    bench.append()
    for name in "ABC":
        bench.ok(0, name)
    return bench


def storing_bench() -> tuple[Bench, StoreMetadata]:
    """Return a machine whose end is being stored, and what is to be stored."""
    bench = idle_bench()
    (store,) = bench.handle(Signal.CLOSE)
    assert isinstance(store, StoreMetadata)
    assert bench.is_in(AppenderState.STORING)
    return bench, store


def changing_bench() -> tuple[Bench, StoreMetadata]:
    """Return a machine whose change is being stored, and what is to be stored."""
    bench = Bench()
    bench.append()
    bench.fail(0, "A")
    (store,) = bench.copy(bench.listed("D"))
    assert isinstance(store, StoreMetadata)
    return bench, store


# The close


def test_a_close_waits_for_entries_and_stores_the_end() -> None:
    """No entry is taken meanwhile; the caller is answered once the store holds the end."""
    bench = Bench()
    bench.append()
    assert bench.handle(Signal.CLOSE) == []
    assert bench.machine.is_closing
    bench.ok(0, "A")
    _, store = bench.ok(0, "B")
    end = metadata_of((0, "ABC")).closed(last_entry_id=0, length_bytes=10)
    assert store == StoreMetadata(end, 1)
    assert bench.handle(Signal.CLOSE) == []  # of another caller, when the first was cancelled
    failed, ended = bench.stored(end)
    assert isinstance(failed, FailAdds)
    assert isinstance(failed.error, LedgerClosedError)
    assert ended == CloseEnded(None)
    assert bench.machine.metadata == end
    assert bench.handle(Signal.CLOSE) == [CloseEnded(None)]
    assert bench.handle(Signal.PREPARE_CLOSE) == [CloseEnded(bench.machine.error)]
    assert bench.handle(LedgerClosed(end)) == []


def test_a_close_waits_for_a_change() -> None:
    """The end that is stored has the new ensemble."""
    bench, change = changing_bench()
    bench.handle(Signal.CLOSE)
    bench.ok(0, "B")
    bench.ok(0, "C")
    *_, store = bench.stored(change.metadata)
    assert store == StoreMetadata(change.metadata.closed(last_entry_id=0, length_bytes=10), 2)


def test_a_caller_may_store_the_end_in_a_transaction_of_its_own() -> None:
    """Until then the machine only takes no more entries."""
    bench = idle_bench()
    assert bench.handle(Signal.PREPARE_CLOSE) == [CloseEnded(None)]
    assert bench.is_in(AppenderState.SEALED)
    (effect,) = bench.handle(LedgerClosed(bench.machine.window.closed(bench.machine.metadata)))
    assert isinstance(effect, FailAdds)
    assert bench.is_in(AppenderState.CLOSED)


def test_a_failed_writer_is_closed_by_a_recovery() -> None:
    """Readers may have been shown entries behind its LAC."""
    bench = Bench()
    bench.append()
    bench.handle(Fail(BookieError("no bookies today")))
    assert bench.handle(Signal.PREPARE_CLOSE) == [CloseEnded(bench.machine.error)]
    assert bench.handle(Signal.CLOSE) == [Call.RECOVER_LEDGER]
    error = LedgerRecoveryError("unknown")
    assert bench.handle(CallFailed(Call.RECOVER_LEDGER, error, 0.0)) == [CloseEnded(error)]
    assert bench.handle(CallFailed(Call.RECOVER_LEDGER, error, 0.0)) == []
    assert bench.handle(Signal.CLOSE) == [Call.RECOVER_LEDGER]
    end = metadata_of((0, "ABC")).closed(last_entry_id=0, length_bytes=10)
    assert bench.handle(LedgerClosed(end)) == [CloseEnded(None)]
    assert bench.machine.metadata == end


def test_a_writer_that_is_given_up_while_it_closes_answers_its_caller() -> None:
    """No caller waits for an answer that no bookie gives."""
    error = LedgerClosedError("abandoned")
    bench, _ = storing_bench()
    assert bench.handle(Fail(error)) == [FailAdds(error), CloseEnded(error)]
    bench = Bench()
    bench.append()
    bench.handle(Signal.CLOSE)
    assert bench.handle(Fail(error)) == [FailAdds(error), CloseEnded(error)]
    bench = Bench()
    bench.append()
    bench.handle(Signal.CLOSE)
    assert bench.handle(Fail(DLError("a defect")))[1:] == [Call.RECOVER_LEDGER]


def test_a_lost_reply_of_the_end_is_read_back() -> None:
    """The store says whether it holds the end; if not, it is stored on top of what it holds."""
    bench, store = storing_bench()
    lost = CallFailed(store, AWAY, 0.0)
    assert bench.handle(lost) == [After(0.1, Signal.READ_DUE)]
    assert bench.handle(Signal.READ_DUE) == [Call.READ_METADATA]
    other = replace(metadata_of((0, "ABC")), custom={"moved": "yes"})
    (again,) = bench.read(other)
    end = other.closed(last_entry_id=0, length_bytes=10)
    assert again == StoreMetadata(end, 2)
    refused = CallFailed(store, MetadataVersionError("another"), 0.0)
    assert bench.handle(refused) == [Call.READ_METADATA]
    assert bench.read(end)[-1] == CloseEnded(None)
    assert bench.read(end) == []
    assert bench.handle(Signal.READ_DUE) == []
    assert bench.handle(lost) == []


@pytest.mark.parametrize(
    ("state", "last", "error"),
    [
        (LedgerState.IN_RECOVERY, -1, LedgerFencedError),
        (LedgerState.CLOSED, 7, LedgerClosedError),
    ],
)
def test_a_close_that_comes_too_late_ends_the_machine(
    state: LedgerState, last: int, error: type[DLError]
) -> None:
    """Another client decides about the end; asking again changes nothing."""
    bench, _ = storing_bench()
    stored = replace(metadata_of((0, "ABC")), state=state, last_entry_id=last)
    failed, ended = bench.read(stored)
    assert isinstance(failed, FailAdds)
    assert isinstance(failed.error, error)
    assert ended == CloseEnded(failed.error)
    assert bench.handle(Signal.CLOSE) == [ended]


def test_a_store_that_stays_away_ends_the_call_and_not_the_ledger() -> None:
    """The caller may close it again later."""
    bench, store = storing_bench()
    assert bench.handle(CallFailed(store, AWAY, 0.0)) != []
    late = CallFailed(Call.READ_METADATA, AWAY, METADATA_PATIENCE_S)
    assert bench.handle(late) == [CloseEnded(AWAY)]
    assert bench.is_in(AppenderState.SEALED)
    assert bench.machine.error is None
    gone = LedgerNotFoundError("deleted")
    assert bench.handle(Signal.CLOSE) == [store]
    assert bench.handle(CallFailed(store, gone, 60.0)) == [FailAdds(gone), CloseEnded(gone)]


def test_a_fence_while_the_end_is_stored_leaves_it_to_the_store() -> None:
    """If the end was stored first, the recovery finds the ledger closed."""
    bench, store = storing_bench()
    error = LedgerFencedError("fenced")
    assert bench.fail(0, "C", error) == [FailAdds(error)]
    assert bench.is_in(AppenderState.STORING)
    assert bench.stored(store.metadata) == [CloseEnded(None)]


# The metadata store


def test_a_change_whose_outcome_is_unknown_is_read_and_stored_again_for_so_long() -> None:
    """A store that loses every reply of a write does not keep an entry waiting without end."""
    bench, store = changing_bench()
    now = 0.0
    for _ in range(100):
        effects = bench.handle(CallFailed(store, AWAY, now))
        if isinstance(effects[0], FailAdds):
            break
        (pause,) = effects
        assert isinstance(pause, After)
        now += pause.after_s
        assert bench.handle(Signal.READ_DUE) == [Call.READ_METADATA]
        version = bench.machine.version + 1
        assert bench.read(bench.machine.metadata) == [StoreMetadata(store.metadata, version)]
    assert METADATA_PATIENCE_S - 2.0 <= now <= METADATA_PATIENCE_S
    assert bench.machine.error is AWAY


def test_an_answer_to_a_change_that_was_given_up_counts_for_nothing_else() -> None:
    """Its version is known from then on; the end of the ledger is still to be stored."""
    bench, change = changing_bench()
    bench.ok(0, "B")
    bench.handle(Fail(BookieError("no bookies today")))
    bench.handle(Signal.CLOSE)
    assert bench.stored(change.metadata) == []
    assert bench.is_in(AppenderState.RECOVERING)
    assert bench.machine.version == 2


def test_a_list_that_cannot_be_read_is_asked_for_again_while_an_entry_waits() -> None:
    """An entry that can reach Qa goes on without the store."""
    bench = Bench(quorum=quorum_of(3, 3, 3))
    bench.append()
    bench.fail(0, "A")
    assert bench.handle(CallFailed(Call.LIST_BOOKIES, AWAY, 0.0)) == [After(0.1, Signal.LIST_DUE)]
    assert bench.handle(Signal.LIST_DUE) == [Call.LIST_BOOKIES]
    late = CallFailed(Call.LIST_BOOKIES, AWAY, METADATA_PATIENCE_S + 0.1)
    assert bench.handle(late) == [FailAdds(AWAY)]
    assert bench.handle(late) == []
    assert bench.handle(CallFailed(Call.READ_METADATA, AWAY, 0.0)) == []
    assert bench.handle(Signal.LIST_DUE) == []


@pytest.mark.parametrize("error", [MetadataError("no"), BookieError("no bookies today")])
def test_a_list_that_is_refused_ends_an_entry_that_waits_for_it(error: DLError) -> None:
    """To ask again would change nothing."""
    bench = Bench(quorum=quorum_of(3, 3, 3))
    bench.append()
    bench.fail(0, "A")
    assert bench.handle(CallFailed(Call.LIST_BOOKIES, error, 0.0)) == [FailAdds(error)]


def test_a_list_without_a_waiting_caller_may_fail() -> None:
    """It is tried again with the next look."""
    bench = Bench()
    bench.append()
    bench.fail(0, "A")
    effects = bench.handle(CallFailed(Call.LIST_BOOKIES, AWAY, 0.0))
    assert effects == [GoOnWithout(frozenset(bookies("A")), 1.0)]


# Bookies


def test_an_overloaded_bookie_is_asked_again_at_longer_and_longer_intervals() -> None:
    """It is replaced when the patience is over, and not asked once its answer matters no more."""
    bench = Bench()
    bench.append()
    busy = BookieOverloadedError("later")
    now, pauses = 0.0, []
    while effects := bench.fail(0, "A", busy, now=now):
        (pause,) = effects
        if pause is Call.LIST_BOOKIES:
            break
        assert isinstance(pause, After)
        assert pause.event == AddDue(0, 0, bookie("A"))
        pauses.append(pause.after_s)
        now += pause.after_s
        assert targets(bench.handle(pause.event)) == [(0, "A")]
    assert pauses[:3] == [0.02, 0.04, 0.08]
    assert now < OVERLOAD_PATIENCE_S
    assert bench.failed == "A"
    assert bench.handle(AddDue(0, 0, bookie("A"))) == []
    assert bench.handle(AddDue(9, 0, bookie("A"))) == []


def test_bookies_that_failed_a_moment_ago_are_tried_after_a_pause() -> None:
    """The choice stands; if it is not needed any more by then, it counts for nothing."""
    bench = Bench()
    bench.append()
    bench.fail(0, "A")
    bench.search.pause_s = 0.5
    (pause,) = bench.listed("D")
    due = ChoiceDue(Choice(bookies("D"), (), 0.5), Topology(), 0.5)
    assert pause == After(0.5, due)
    assert targets(bench.handle(due)) == [(0, "D")]
    assert bench.handle(due) == []


def test_in_recovery_a_bookie_that_refuses_an_entry_is_left_out_too() -> None:
    """Two that refuse it would else take each other's place for ever."""
    bench = Bench(is_recovery=True)
    bench.handle(AppendRecovered(entry_of(0)))
    assert bench.fail(0, "A", BadRequestError("other bytes")) == [Call.LIST_BOOKIES]
    assert targets(bench.listed("D")) == [(0, "D")]
    assert bench.fail(0, "D", BadRequestError("other bytes")) == [Call.LIST_BOOKIES]
    effects = bench.listed("A", readmitted="AD")
    assert effects == [GoOnWithout(frozenset(bookies("D")), 1.0)]


def test_an_entry_that_no_member_takes_is_noticed_at_once() -> None:
    """No answer will come that could start the search."""
    bench = Bench("ABCD", quorum=quorum_of(4, 2, 1))
    bench.append(2)
    bench.ok(0, "B")
    bench.fail(0, "A")
    later = [GoOnWithout(frozenset(bookies("A")), 1.0)]
    assert bench.listed("") == later
    bench.ok(1, "C")
    bench.fail(1, "B")
    assert bench.listed("") == []  # the next look is due already
    bench.append(2)
    assert bench.is_in(AppenderState.SHORT)
    assert bench.append() == [Call.LIST_BOOKIES]


def test_an_entry_that_a_failed_member_took_after_all_waits_for_no_bookie() -> None:
    """The next one that cannot reach Qa is noticed at once again."""
    bench = Bench()
    bench.append(2)
    bench.ok(0, "B")
    bench.ok(0, "C")
    bench.fail(0, "A")
    bench.listed("")
    bench.fail(1, "B")
    bench.listed("", may_wait=True)
    assert bench.is_in(AppenderState.STUCK)
    bench.ok(1, "A")
    assert bench.is_in(AppenderState.SHORT)
    assert bench.append()[-1] == Call.LIST_BOOKIES
