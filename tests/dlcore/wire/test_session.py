"""Goal: when a client's session sends its requests, what answers them, and how it ends.

Method: exact effects for each way; the wire is the real one, and the bookie sends whole messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.access.capability import (
    EVERYTHING,
    CarriedPurse,
    Grant,
    LedgerRight,
    OwnPurse,
    Signer,
    new_private_key,
)
from dlcore.base.config import ENTRY_SIZE_BYTES_MAX, MIB, LedgerClientConfig
from dlcore.base.errors import (
    BookieOverloadedError,
    BookieUnavailableError,
    DLError,
    LedgerFencedError,
    NoSuchEntryError,
    WrongIncarnationError,
)
from dlcore.wire.capabilities import Presenter
from dlcore.wire.fields import Status
from dlcore.wire.messages import (
    ADD_FRAMES_MAX,
    REQUEST_ID_MAX,
    Add,
    Authorize,
    Cancel,
    Chunk,
    Credit,
    Durable,
    Failed,
    Lac,
    Ping,
    Pong,
    ReadHeld,
    ReadLac,
    WriteLac,
)
from dlcore.wire.session import (
    UNSENT_BYTES_HIGH,
    AddWrite,
    Ask,
    Bring,
    Call,
    Cancelled,
    Confirm,
    EndRead,
    Expire,
    ExpireAt,
    GivenUp,
    LacWrite,
    Lost,
    NoteFailure,
    NotSpokenError,
    Refuse,
    SessionState,
    Signal,
    Taken,
    Tick,
    TickAt,
)
from tests.fixtures.client_session_bench import (
    FRAME,
    RANGE,
    READ,
    SIZE,
    TIMEOUT_S,
    Bench,
    ignore,
    only,
    sent,
)
from tests.fixtures.raw_wire import HELLO, WELCOME
from tests.fixtures.served_bookie import BOOKIE

if TYPE_CHECKING:
    from dlcore.wire.messages import Message


def test_requests_wait_for_the_handshake() -> None:
    """Reads first, then the writes in their order; nothing is sent before WELCOME but HELLO."""
    bench = Bench(opened=False)
    assert bench.add(FRAME) == [ExpireAt(TIMEOUT_S)]
    unheard = [bench.session.is_unheard]
    assert sent(bench.handle(Signal.CONNECTED)) == [HELLO]
    assert [*unheard, bench.session.is_unheard] == [False, True]
    assert [*bench.lac(), *bench.add(FRAME), *bench.handle(Ask(READ, "read"))] == []
    assert bench.handle(Tick(6.0)) == [TickAt(11.0)]  # what is asked before WELCOME says nothing
    for signal in (Signal.WRITE_PAUSED, Signal.WRITE_RESUMED, Signal.FLUSH):
        assert bench.handle(signal) == []
    effects = bench.receive(WELCOME)
    assert effects[0] is Call.NOTE_WELCOME
    assert [type(each) for each in sent(effects)] == [ReadLac, Add, WriteLac, Add]
    assert bench.state is SessionState.OPEN


def test_adds_of_one_iteration_share_a_message() -> None:
    """The first one leaves in the call, and one moment is asked for, for all behind it."""
    bench = Bench()
    first = bench.add(FRAME)
    assert [len(each.frames) for each in sent(first) if isinstance(each, Add)] == [1]
    assert only(first, ExpireAt) == [ExpireAt(TIMEOUT_S)]
    assert bench.add(FRAME, FRAME, FRAME) == [Call.FLUSH_SOON]
    (add,) = sent(bench.handle(Signal.FLUSH))
    assert isinstance(add, Add)
    assert (add.first_request_id, len(add.frames)) == (2, 3)
    (confirm,) = bench.receive(Durable((1, 2, 3, 4)))
    assert isinstance(confirm, Confirm)
    assert confirm.writes == [(ignore, SIZE, 0.0)] * 4
    assert len(sent(bench.add(FRAME))) == 1  # no other is unanswered


def test_different_capabilities_do_not_share_a_message() -> None:
    """Adds of recovery, LACs, and what is too much for one; all in the order of the calls."""
    bench = Bench()
    bench.add(FRAME)
    large = bytes(MIB)
    bench.add(FRAME, is_recovery=True)
    bench.add(FRAME)
    bench.lac(7)
    bench.add(FRAME, FRAME, large, large)
    messages = sent(bench.handle(Signal.FLUSH))
    assert messages[2] == WriteLac(4, 1, 7)
    adds = [each for each in messages if isinstance(each, Add)]
    assert [each.is_recovery for each in adds] == [True, *[False] * 4]
    assert [len(each.frames) for each in adds] == [1, 1, 2, 1, 1]
    many = LedgerClientConfig(pending_entries_max=ADD_FRAMES_MAX)
    bench = Bench(many)
    bench.add(*[FRAME] * (ADD_FRAMES_MAX + 2))
    counts = [
        len(each.frames) for each in sent(bench.handle(Signal.FLUSH)) if isinstance(each, Add)
    ]
    assert counts == [ADD_FRAMES_MAX, 1]


def test_a_lac_waits_for_no_answer_to_another() -> None:
    """Alone in the queue it leaves in the call; behind an add that waits it stays behind it."""
    bench = Bench()
    assert len(sent(bench.lac())) == 1
    assert len(sent(bench.lac())) == 1
    bench.add(FRAME)
    assert len(sent(bench.lac())) == 1
    assert bench.add(FRAME) == [Call.FLUSH_SOON]
    assert bench.lac() == []
    assert [type(each) for each in sent(bench.handle(Signal.FLUSH))] == [Add, WriteLac]


def test_writes_wait_while_the_bookie_does_not_receive() -> None:
    """Reads do not, and a PING is answered only when the bookie receives again."""
    bench = Bench()
    assert bench.receive(Pong(1)) == []
    assert sent(bench.receive(Ping(1))) == [Pong(1)]
    bench.handle(Signal.WRITE_PAUSED)
    assert bench.state is SessionState.BLOCKED
    bench.handle(Signal.WRITE_PAUSED)
    assert [*bench.add(FRAME), *bench.lac()] == [ExpireAt(TIMEOUT_S)]
    assert bench.receive(Ping(2)) == []
    assert len(sent(bench.handle(Ask(READ, "read")))) == 1
    assert [type(e) for e in sent(bench.handle(Signal.WRITE_RESUMED))] == [Add, WriteLac]


def test_no_more_is_sent_at_once_than_a_transport_holds() -> None:
    """Only after the effects does the machine hear that the transport is full."""
    bench = Bench()
    bench.handle(Signal.WRITE_PAUSED)
    frame = bytes(MIB)
    bench.add(*[frame] * 6)
    effects = bench.handle(Signal.WRITE_RESUMED)
    assert len(sent(effects)) == UNSENT_BYTES_HIGH // MIB
    assert effects[-1] is Call.FLUSH_SOON
    bench.handle(Signal.WRITE_PAUSED)
    assert bench.handle(Signal.FLUSH) == []
    assert len(sent(bench.handle(Signal.WRITE_RESUMED))) == 2
    bench.handle(Signal.WRITE_PAUSED)
    bench.add(*[frame] * 9)
    assert bench.handle(Signal.WRITE_RESUMED)[-1] is Call.FLUSH_SOON
    # Another iteration is asked for once.
    assert only(bench.handle(Signal.WRITE_RESUMED), Call) == []
    assert len(sent(bench.handle(Signal.FLUSH))) == 1


def test_a_write_beyond_the_bounds_is_refused() -> None:
    """Requests and bytes are bounded; a refused one does not count."""
    few = Bench(LedgerClientConfig(pending_entries_max=1), opened=False)
    few.add(FRAME, FRAME, FRAME, FRAME)
    (refused,) = few.lac()
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, BookieOverloadedError)
    assert str(refused.error) == f"{BOOKIE}: 4 requests of {4 * SIZE} bytes are pending"
    small = Bench(LedgerClientConfig(pending_bytes_max=SIZE), opened=False)
    assert only(small.add(bytes(ENTRY_SIZE_BYTES_MAX), *[FRAME] * 4), Refuse) == []
    assert len(only(small.add(FRAME), Refuse)) == 1
    assert only(small.lac(), Refuse) == []


def test_a_write_that_stays_unanswered_fails_alone() -> None:
    """Sent or not; the next one has its own time, and a late answer is dropped."""
    bench = Bench()
    bench.add(FRAME, now_s=0.0)
    bench.add(FRAME, now_s=1.0)
    bench.lac(now_s=3.0)
    assert bench.handle(Expire(9.0)) == [ExpireAt(10.0)]
    first, second, soon = bench.handle(Expire(11.0))
    for each in (first, second):
        assert isinstance(each, Refuse)
        assert isinstance(each.error, BookieUnavailableError)
        assert str(each.error) == f"{BOOKIE}: no answer within 10.0 s"
    assert soon == ExpireAt(13.0)
    assert len(only(bench.handle(Expire(13.0)), Refuse)) == 1
    assert bench.handle(Signal.FLUSH) == []
    assert bench.receive(Durable((1,))) == [Confirm([])]
    assert only(bench.add(FRAME, now_s=14.0), ExpireAt) == [ExpireAt(24.0)]


def test_a_read_gets_its_answers_in_order() -> None:
    """Those of other reads are theirs, and the bookie's error has its name."""
    bench = Bench()
    for request, read in ((RANGE, "range"), (READ, "lac"), (ReadHeld(0, 1), "no")):
        assert len(sent(bench.handle(Ask(request, read)))) == 1
    chunk, last = Chunk(1, [FRAME], is_last=False), Chunk(1, [FRAME], is_last=True)
    effects = bench.receive(chunk, Lac(2, 4), last, Failed(3, Status.NO_SUCH_ENTRY, "not here"))
    one, lac, other, end = effects
    assert lac == Bring("lac", 4)
    assert isinstance(end, EndRead)
    assert (end.read, type(end.error), str(end.error)) == (
        "no",
        NoSuchEntryError,
        f"{BOOKIE}: not here",
    )
    for bring, is_last in ((one, False), (other, True)):
        assert isinstance(bring, Bring)
        assert isinstance(bring.answer, Chunk)
        assert (bring.read, bring.answer.is_last) == ("range", is_last)


def test_a_read_is_cancelled_at_the_bookie_only_while_it_runs() -> None:
    """Its window is given back until then."""
    bench = Bench(opened=False)
    bench.handle(Ask(READ, "early"))
    assert bench.handle(Cancelled("early")) == []
    bench.handle(Signal.CONNECTED)
    assert bench.receive(WELCOME) == [Call.NOTE_WELCOME]
    bench.handle(Ask(RANGE, "range"))
    bench.handle(Ask(READ, "lac"))
    assert bench.handle(Taken("range", 100)) == []
    assert sent(bench.handle(Taken("range", 900))) == [Credit(1, 1000)]
    assert sent(bench.handle(Cancelled("range"))) == [Cancel(1)]
    assert bench.handle(Taken("range", 5000)) == []
    bench.receive(Lac(2, 4))
    assert bench.handle(Cancelled("lac")) == []


def test_a_bookie_of_an_earlier_release_is_not_asked_for_what_it_does_not_know() -> None:
    """The caller gets an error; nothing is sent."""
    bench = Bench(opened=False)
    bench.handle(Signal.CONNECTED)
    bench.receive(WELCOME._replace(features=0))
    (end,) = bench.handle(Ask(ReadHeld(0, 1), "held"))
    assert isinstance(end, EndRead)
    assert isinstance(end.error, NotSpokenError)


def test_a_write_that_the_bookie_refuses_fails_with_its_error() -> None:
    """The error names the bookie."""
    bench = Bench()
    bench.add(FRAME)
    (refuse,) = bench.receive(Failed(1, Status.FENCED, "fenced"))
    assert isinstance(refuse, Refuse)
    assert isinstance(refuse.error, LedgerFencedError)
    assert str(refuse.error) == f"{BOOKIE}: fenced"


def test_a_capability_is_presented_before_the_request_that_needs_it() -> None:
    """Adds, LACs and reads; a bookie that keeps it is not sent it again."""
    signer, purse = Signer(new_private_key()), CarriedPurse()
    grant = Grant.of(1, LedgerRight.READ | LedgerRight.ADD)
    token = signer.sign([grant], expires_s=9)
    purse.learn([token])
    for requests, kind in (
        ([AddWrite(FRAME, SIZE, False, ignore, 0.0)], Add),
        ([LacWrite(1, 0, ignore, 0.0)], WriteLac),
        ([Ask(READ, "read")], ReadLac),
    ):
        bench = Bench(presenter=Presenter(purse))
        messages = [each for event in requests * 2 for each in sent(bench.handle(event))]
        assert messages[0] == Authorize(token)
        assert {type(each) for each in messages[1:]} == {kind}
        assert bench.handle(Tick(1.0)) == [
            TickAt(5.0)
        ]  # nothing for all requests is there to renew


def test_a_capability_for_all_is_renewed_with_the_time() -> None:
    """Also if nothing is asked; during the handshake it is not."""
    now_s = 1000.0
    signer = Signer(new_private_key())
    purse = OwnPurse(
        lambda expires_s: signer.sign([EVERYTHING], expires_s=expires_s),
        lambda: now_s,
        lifetime_s=100,
    )
    bench = Bench(presenter=Presenter(purse), opened=False)
    bench.handle(Signal.CONNECTED)
    assert bench.handle(Tick(0.0)) == [TickAt(5.0)]
    bench.receive(WELCOME)
    assert [type(each) for each in sent(bench.handle(Tick(1.0)))] == [Authorize]
    assert sent(bench.handle(Tick(2.0))) == []
    now_s = 1060.0
    assert [type(each) for each in sent(bench.handle(Tick(6.0)))] == [Ping, Authorize]


def test_a_silent_bookie_is_given_up() -> None:
    """It is asked for a sign of life first."""
    bench = Bench()
    bench.add(FRAME)
    assert bench.handle(Tick(0.0)) == [TickAt(5.0)]
    tick, ping = bench.handle(Tick(5.0))
    assert tick == TickAt(10.0)
    assert [type(each) for each in sent([ping])] == [Ping]
    failure, refuse, *calls = bench.handle(Tick(10.0))
    assert isinstance(failure, NoteFailure)
    assert "not a byte for 10.0 s" in failure.reason
    assert isinstance(refuse, Refuse)
    assert calls == [Call.NOTE_BROKEN, Call.ABORT]
    assert bench.handle(Tick(11.0)) == []


@pytest.mark.parametrize(
    ("messages", "error", "reason"),
    [
        ([Durable((1,))], BookieUnavailableError, "it breaks the protocol: "),
        ([WELCOME._replace(bookie_name="other")], WrongIncarnationError, "other, incarnation"),
        ([WELCOME, Lac(9, 1)], BookieUnavailableError, "it breaks the protocol: an answer to"),
        ([WELCOME, Failed(0, Status.OVERLOADED, "")], BookieUnavailableError, "it ended the"),
    ],
)
def test_a_bookie_that_is_not_the_right_one_ends_the_session(
    messages: list[Message], error: type[DLError], reason: str
) -> None:
    """Every request fails with the reason, also those that were not sent."""
    bench = Bench(opened=False)
    bench.add(FRAME, FRAME)
    bench.handle(Ask(READ, "read"))
    bench.handle(Signal.CONNECTED)
    effects = bench.receive(*messages)
    (failure,), refused, (end,) = (
        only(effects, NoteFailure),
        only(effects, Refuse),
        only(effects, EndRead),
    )
    assert failure.reason.startswith(reason)
    assert len(refused) == 2
    errors = [*(each.error for each in refused), end.error]
    assert len(set(map(id, errors))) == 3
    assert set(map(type, errors)) == {error}
    assert str(end.error).startswith(f"{BOOKIE}: {reason}")
    assert effects[-2:] == [Call.NOTE_BROKEN, Call.ABORT]
    assert bench.receive(Ping(1)) == []
    assert bench.handle(Lost("")) == [Call.NOTE_CLOSED]


def test_a_lost_connection_fails_what_is_unanswered() -> None:
    """With the reason of the transport."""
    bench = Bench()
    bench.handle(Ask(READ, "read"))
    failure, end, *calls = bench.handle(Lost(": reset"))
    assert failure == NoteFailure("the connection was closed: reset")
    assert isinstance(end, EndRead)
    assert str(end.error) == f"{BOOKIE}: the connection was closed: reset"
    assert calls == [Call.NOTE_BROKEN, Call.ABORT, Call.NOTE_CLOSED]


def test_a_session_that_is_over_takes_nothing_more() -> None:
    """The first reason stays, and each request is answered with an error of its own."""
    bench = Bench()
    bench.add(FRAME)
    error = BookieUnavailableError("closed")
    refuse, *calls = bench.handle(GivenUp(error))
    assert isinstance(refuse, Refuse)
    assert (str(refuse.error), refuse.error is error) == ("closed", False)
    assert calls == [Call.NOTE_BROKEN, Call.ABORT]
    assert bench.handle(GivenUp(BookieUnavailableError("again"))) == []
    (refuse,) = bench.add(FRAME)
    (end,) = bench.handle(Ask(READ, "read"))
    for each in (refuse, end):
        assert isinstance(each, (Refuse, EndRead))
        assert str(each.error) == f"{BOOKIE}: the connection is broken"
    for event in (Signal.WRITE_PAUSED, Signal.WRITE_RESUMED, Signal.FLUSH, Expire(99.0)):
        assert bench.handle(event) == []
    for ended in (Taken("read", 9), Cancelled("read")):
        assert bench.handle(ended) == []
    assert bench.handle(Lost("")) == [Call.NOTE_CLOSED]


def test_a_connection_that_comes_too_late_is_ended() -> None:
    """Nothing is left of it: callers that wait for the end got it before."""
    bench = Bench(opened=False)
    bench.handle(Ask(READ, "read"))
    end, *calls = bench.handle(GivenUp(BookieUnavailableError("not connected")))
    assert isinstance(end, EndRead)
    assert calls == [Call.NOTE_BROKEN, Call.NOTE_CLOSED]
    assert bench.state is SessionState.CLOSED
    assert bench.handle(Signal.CONNECTED) == [Call.ABORT]
    assert bench.handle(Lost("")) == []


def test_a_connection_that_is_lost_before_the_notice_ends_the_session_once() -> None:
    """A transport may end what it has not handed over; closing the client waits for the end."""
    bench = Bench(opened=False)
    bench.handle(Ask(READ, "read"))
    failure, end, *calls = bench.handle(Lost(""))
    assert isinstance(failure, NoteFailure)
    assert isinstance(end, EndRead)
    assert calls == [Call.NOTE_BROKEN, Call.NOTE_CLOSED]
    assert bench.state is SessionState.CLOSED


def test_writes_for_which_no_id_is_left_fail() -> None:
    """All of them, in the queue too, and with them the session."""
    bench = Bench()
    bench.add(FRAME)
    bench.end._next_id = REQUEST_ID_MAX - 1
    bench.add(FRAME, FRAME, FRAME)
    effects = bench.handle(Signal.FLUSH)
    assert [type(each) for each in effects[:5]] == [NoteFailure, *[Refuse] * 4]
    assert bench.state is SessionState.BROKEN
