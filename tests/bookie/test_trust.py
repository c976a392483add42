"""Goal: requests of no use make a client's turns small; useful ones make them large again.

Method: exact effects of a session, as in `test_session.py`.
"""

from __future__ import annotations

import pytest

from bookie.serving import session as module
from bookie.serving.access import Access
from bookie.serving.session import (
    Call,
    Effect,
    NoteDenial,
    Outcome,
    Read,
    ReadEnded,
    Received,
    RunNotTaken,
    Signal,
    Stored,
    StoreEach,
    StoreRun,
)
from dlcore.base.access.capability import Verifier
from dlcore.base.errors import BadRequestError, BookieAccessDeniedError
from dlcore.wire.messages import Add, Ping, ReadLac
from tests.fixtures.raw_wire import adds
from tests.fixtures.session_bench import FRAME, SMALL, Bench, only, refusals

MOST = module._TRUST_MAX
NO = BadRequestError("no")


def stored_ids(effects: list[Effect]) -> list[int]:
    """Return the requests that the storage gets."""
    return [
        each.add.first_request_id + number
        for each in only(effects, StoreEach)
        for number in range(len(each.add.frames))
    ]


def distrusted() -> Bench:
    """Return a session whose first add was refused, with others before it."""
    bench = Bench()
    bench.take(*(adds(FRAME, first=number) for number in range(1, 6)))
    bench.handle(Stored([Outcome([number], SMALL, NO) for number in range(1, 6)]))
    assert bench.session.trust.is_low
    return bench


def test_refused_adds_are_taken_one_by_one() -> None:
    """The next is taken when the one before has its answer; meanwhile the client is not read."""
    bench = distrusted()
    effects = bench.take(*(adds(FRAME, first=number) for number in range(6, 10)))
    assert stored_ids(effects) == [6]
    for number in range(6, 9):
        assert not bench.session.intake.is_reading
        assert bench.stored(number, error=NO)[-1] is Call.TAKE_TURN
        assert stored_ids(bench.handle(Signal.TURN)) == [number + 1]
    bench.stored(9, error=NO)
    assert bench.handle(Signal.TURN) == [Call.SET_READING]
    assert bench.session.intake.is_reading


def test_a_new_client_has_few_in_flight_until_the_first_has_succeeded() -> None:
    """A client that was trusted before a pause still is."""
    bench = Bench(is_new=True)
    effects = bench.take(*(adds(FRAME, first=number) for number in range(1, 101)))
    assert len(stored_ids(effects)) == MOST // 2
    assert not bench.session.trust.is_low
    assert not bench.session.intake.is_reading
    bench.stored(1)
    for _ in range(3):
        effects += bench.handle(Signal.TURN)
    assert len(stored_ids(effects)) == 100
    for number in range(2, 101):
        bench.stored(number)
    bench.handle(Signal.TURN)
    effects = bench.take(*(adds(FRAME, first=number) for number in range(101, 161)), now_s=4.0)
    assert len(stored_ids(effects)) == MOST


def test_each_success_doubles_what_is_taken() -> None:
    """Writes and reads alike, until the client has its full turn again."""
    bench = distrusted()
    reads = (ReadLac(number, 1, fence=False) for number in range(6, 100))
    taken = [each.request.request_id for each in only(bench.take(*reads), Read)]
    counts = [len(taken)]
    while bench.session.trust.is_low and len(counts) < MOST:
        bench.handle(ReadEnded(taken.pop(0), None))
        more = [each.request.request_id for each in only(bench.handle(Signal.TURN), Read)]
        taken += more
        counts.append(len(taken))
    assert counts[:5] == [1, 2, 4, 8, 16]
    bench = distrusted()
    bench.take(adds(FRAME, first=6))
    bench.handle(Signal.TURN)
    bench.stored(6)
    bench.handle(Signal.TURN)
    assert stored_ids(bench.take(*(adds(FRAME, first=number) for number in (7, 8, 9)))) == [7, 8]


def test_signs_of_life_make_turns_small() -> None:
    """A client needs few of them; one that sends many is served one in a turn."""
    bench = Bench()
    bench.take(*[Ping(1)] * 5)
    assert bench.session.trust.is_low
    bench.take(*[Ping(1)] * 2)
    for _ in range(2):
        assert bench.session.intake.is_turn_due
        assert not bench.session.intake.is_reading
        bench.handle(Signal.TURN)
    assert bench.session.intake.is_reading


def test_a_client_that_was_quiet_for_a_while_is_trusted_again() -> None:
    """A client that only reads sends a sign of life now and then."""
    bench = Bench()
    bench.take(*[Ping(1)] * 5)
    bench.take(Ping(1), now_s=0.9)
    assert bench.session.trust.is_low
    bench.handle(Received(0, 1.9))
    assert not bench.session.trust.is_low


@pytest.mark.parametrize("is_recovery", [False, True])
def test_a_long_message_of_single_adds_takes_several_turns(is_recovery: bool) -> None:
    """Whether it is a run that the storage does not take, or a recovery's; nothing overtakes it."""
    bench = Bench()
    count = 2 * MOST + 3
    effects = bench.take(Add(1, is_recovery, [FRAME] * count), adds(FRAME, first=count + 1))
    if not is_recovery:
        (run,) = only(effects, StoreRun)
        effects = bench.handle(RunNotTaken(run.add))
    turns = [stored_ids(effects)]
    while len(turns[-1]):
        assert bench.session.intake.is_turn_due
        turns.append(stored_ids(bench.handle(Signal.TURN)))
        if bench.session.intake.is_reading:
            break
    assert [len(each) for each in turns] == [MOST, MOST, 4]
    assert [id_ for turn in turns for id_ in turn] == list(range(1, count + 2))
    bench.handle(Stored([Outcome([number], SMALL) for number in range(1, count + 2)]))
    assert bench.bounds.in_flight_bytes == 0


def test_a_run_that_is_refused_goes_on_one_by_one() -> None:
    """The rest of it waits for the answers to the first ones."""
    bench = distrusted()
    (run,) = only(bench.take(adds(*[FRAME] * 16, first=6)), StoreRun)
    effects = bench.handle(RunNotTaken(run.add))
    for number in range(6, 22):
        assert stored_ids(effects) == [number]
        assert bench.handle(Signal.TURN) == []
        assert bench.stored(number, error=NO)[-1] is Call.TAKE_TURN
        effects = bench.handle(Signal.TURN)
    assert bench.session.intake.is_reading


def test_a_run_that_is_not_taken_stops_the_client_in_any_case() -> None:
    """Also one that left room in its turn, whose client asked for something useless behind it."""
    bench = Bench()
    (run,) = only(bench.take(adds(*[FRAME] * 16), *[Ping(1)] * 3), StoreRun)
    assert bench.session.intake.is_reading
    effects = bench.handle(RunNotTaken(run.add))
    assert stored_ids(effects) == [1, 2, 3, 4]
    assert effects[-1] is Call.SET_READING
    assert bench.session.intake.is_turn_due


def test_a_long_message_without_a_right_is_denied_in_parts() -> None:
    """A client that was denied something has the next denials one by one."""
    bench = Bench()
    bench.session.access = Access(Verifier(lambda: 0.0))
    bench.take(ReadLac(1, 1, fence=False), ReadLac(2, 1, fence=False))
    effects = bench.take(adds(*[FRAME] * 40, first=3))
    assert len(only(effects, NoteDenial)) == 1
    denied = refusals(bench.handle(Signal.FLUSH))
    assert denied == dict.fromkeys(range(1, 3 + 8), BookieAccessDeniedError)
    while bench.session.intake.is_turn_due:
        bench.handle(Signal.TURN)
    assert len(refusals(bench.handle(Signal.FLUSH))) == 40 - 8


def test_a_lost_connection_keeps_nothing_of_its_messages() -> None:
    """The rest of a message is dropped."""
    bench = Bench()
    bench.take(Add(1, True, [FRAME] * (MOST + 1)))
    bench.handle(Signal.LOST)
    assert bench.handle(Signal.TURN) == []
