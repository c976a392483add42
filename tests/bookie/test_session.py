"""Goal: what a session takes of its client, when it answers writes, and how it ends.

Method: exact effects for each way; the wire is the real one, and the client sends whole messages.
"""

from __future__ import annotations

import pytest

from bookie.serving import session as module
from bookie.serving.session import (
    IN_FLIGHT_BYTES_MIN,
    Abort,
    Bounds,
    Call,
    CancelRead,
    CloseStream,
    Effect,
    MessageRead,
    News,
    NoteRefusal,
    Outcome,
    Read,
    ReadEnded,
    Received,
    Relieve,
    RunNotTaken,
    SessionState,
    Signal,
    Step,
    Stepped,
    Stored,
    StoreEach,
    StoreLac,
    StoreRun,
    Tick,
    TickAt,
    WritePaused,
)
from dlcore.base.errors import (
    BadRequestError,
    BookieStorageError,
    BookieUnavailableError,
)
from dlcore.wire.messages import (
    Add,
    Chunk,
    Durable,
    Failed,
    Follow,
    Ping,
    Pong,
    ReadEntries,
    ReadEntry,
    ReadLac,
    Welcome,
    WriteLac,
    encode,
)
from tests.fixtures.raw_wire import HELLO, adds
from tests.fixtures.served_bookie import frame_of
from tests.fixtures.session_bench import (
    FRAME,
    HANDSHAKE_S,
    RUN,
    SILENCE_S,
    SMALL,
    WINDOW,
    Bench,
    only,
    refusals,
    sent,
)


def test_a_client_is_welcomed() -> None:
    """Goal: HELLO, its answer, and the connection is read on."""
    bench = Bench(greeted=False)
    effects = bench.take(HELLO)
    assert [type(each) for each in sent(effects)] == [Welcome]
    assert bench.session.state is SessionState.OPEN
    assert bench.session.intake.is_reading


def test_writes_are_answered_together() -> None:
    """Goal: a run goes to the storage as one, and what ends together is one message."""
    bench = Bench()
    lac = WriteLac(RUN + 1, 1, 0)
    run = adds(*[FRAME] * RUN)
    store, store_lac = bench.take(run, lac)
    assert isinstance(store, StoreRun)
    assert store.add.first_request_id == 1
    assert store_lac == StoreLac(lac)
    assert bench.bounds.in_flight_bytes > RUN * SMALL
    failed = Outcome([RUN + 1], 0, BookieStorageError("broken"))
    effects = bench.handle(Stored([failed, Outcome(range(1, RUN + 1), RUN * SMALL)]))
    assert len(effects) == 1
    assert refusals(effects) == {RUN + 1: BookieStorageError}
    assert sent(effects)[0] == Durable(tuple(range(1, RUN + 1)))
    assert bench.bounds.in_flight_bytes == 0


def test_a_write_that_ends_takes_other_answers_along() -> None:
    """Goal: it does not wait for the flush that is due, and that one finds nothing."""
    bench = Bench()
    bench.take(adds(FRAME), Ping(7))
    assert sent(bench.stored(1)) == [Durable((1,)), Pong(7)]
    assert bench.handle(Signal.FLUSH) == []


def test_a_lone_write_is_answered_at_once() -> None:
    """Goal: no other answer is expected, so this one does not wait for a turn."""
    bench = Bench()
    (store,) = bench.take(adds(FRAME))
    assert isinstance(store, StoreEach)
    assert sent(bench.stored(1)) == [Durable((1,))]


def test_a_run_that_the_storage_does_not_take_goes_one_by_one() -> None:
    """Goal: each entry has its own answer, and everything that was counted is given back."""
    bench = Bench()
    (store,) = bench.take(adds(*[FRAME] * RUN))
    assert isinstance(store, StoreRun)
    assert bench.handle(RunNotTaken(store.add)) == [StoreEach(store.add)]
    assert sent(bench.stored(1)) == [Durable((1,))]
    assert refusals(bench.stored(2, error=BadRequestError("no"))) == {2: BadRequestError}
    for number in range(3, RUN + 1):
        assert sent(bench.stored(number)) == [Durable((number,))]
    assert bench.bounds.in_flight_bytes == 0


def test_entries_of_a_recovery_are_stored_singly() -> None:
    """Goal: a recovery may write entries that are held already."""
    bench = Bench()
    (store,) = bench.take(Add(1, is_recovery=True, frames=[FRAME] * RUN))
    assert isinstance(store, StoreEach)


def test_a_session_with_too_much_in_flight_is_not_read() -> None:
    """Goal: it goes on once something is answered, with what it had sent."""
    bench = Bench(bytes_max=IN_FLIGHT_BYTES_MIN)
    body = bytes(IN_FLIGHT_BYTES_MIN // 2)
    large = frame_of(1, 0, body)
    effects = bench.take(*(adds(large, first=number) for number in range(1, 5)))
    assert [type(each) for each in effects] == [StoreEach, StoreEach, Call]
    assert effects[-1] is Call.SET_READING
    assert not bench.session.intake.is_reading
    assert bench.session.intake.left_some
    assert bench.handle(Stored([Outcome([1], len(large))]))[-1] is Call.TAKE_TURN
    assert [type(each) for each in bench.handle(Signal.TURN)] == [StoreEach]
    for number in (2, 3):
        assert bench.handle(Stored([Outcome([number], len(large))]))[-1] is Call.TAKE_TURN
        effects = bench.handle(Signal.TURN)
    assert effects == [Call.SET_READING]
    assert bench.session.intake.is_reading


def test_a_turn_has_an_end() -> None:
    """Goal: after some requests another session has its turn; this one is not read till then."""
    bench = Bench()
    effects = bench.take(*(ReadLac(number, 1, fence=False) for number in range(1, 41)))
    assert len(only(effects, Read)) == module._TRUST_MAX
    assert effects[-1] is Call.SET_READING
    assert bench.session.intake.is_turn_due
    assert bench.handle(Signal.READ_ON) == []
    effects = bench.handle(Signal.TURN)
    assert len(only(effects, Read)) == 8
    assert effects[-1] is Call.SET_READING
    assert bench.session.intake.is_reading


def test_a_turn_that_comes_later_stops_the_client() -> None:
    """Goal: bytes that the bookie has no time for stay with the client."""
    bench = Bench()
    assert bench.receive(Ping(1), Pong(7)) == [Call.TAKE_TURN]
    assert bench.handle(Signal.TURN_WAITS) == [Call.SET_READING]
    assert bench.receive(Ping(2)) == []
    assert bench.handle(Signal.TURN) == [Call.FLUSH_SOON, Call.SET_READING]
    assert sent(bench.handle(Signal.FLUSH)) == [Pong(1), Pong(2)]


def test_a_session_alone_takes_requests_as_they_come() -> None:
    """Goal: no turn is asked for; if too many come at once, the rest has a turn later."""
    bench = Bench()
    assert bench.receive(Pong(1), is_turn=True) == []
    assert bench.receive(*[Pong(2)] * 40, is_turn=True) == [Call.SET_READING]
    assert bench.session.intake.is_turn_due
    assert bench.receive(Ping(3), is_turn=True) == []
    assert bench.handle(Signal.TURN) == [Call.FLUSH_SOON, Call.SET_READING]
    assert sent(bench.handle(Signal.FLUSH)) == [Pong(3)]


def test_a_payload_that_waits_for_memory_stops_the_client() -> None:
    """Goal: nothing is read till the memory is there."""
    bench = Bench()
    bench.room.is_free = False
    large = adds(frame_of(1, 0, bytes(100_000)))
    data = b"".join(bytes(each) for each in encode(large))
    head = len(data) - 100_000
    bench.end.get_buffer()[:head] = data[:head]
    bench.handle(Received(head, 0.0))
    assert bench.handle(Signal.TURN) == [Call.SET_READING]
    assert bench.session.intake.left_some
    bench.room.is_free, bench.room.is_waiting = True, False
    assert bench.session.handle(Signal.READ_ON) == [Call.TAKE_TURN]
    assert bench.handle(Signal.TURN) == [Call.SET_READING]
    assert bench.session.intake.is_reading


def test_a_drain_refuses_writes_and_followers() -> None:
    """Goal: ranges go on, accepted writes are answered, and then it is settled."""
    bench = Bench()
    bench.take(adds(FRAME), ReadEntries(2, 1, 0, 9, 1, 500, WINDOW), Follow(3, 1, 0, WINDOW))
    bench.session.writes.check_fence(is_fence=True)
    assert bench.handle(Signal.DRAIN) == [CloseStream(3), Call.FLUSH_SOON]
    with pytest.raises(BookieUnavailableError):
        bench.session.writes.check_fence(is_fence=True)
    bench.session.writes.check_fence(is_fence=False)
    requests = (adds(FRAME, FRAME, first=4), WriteLac(6, 1, 0), Follow(7, 1, 0, WINDOW))
    assert bench.take(*requests) == []
    effects = bench.handle(Signal.FLUSH)
    assert refusals(effects) == dict.fromkeys((3, 4, 5, 6, 7), BookieUnavailableError)
    assert Call.NOTE_SETTLED not in effects
    assert bench.stored(1)[-1] is Call.NOTE_SETTLED
    assert bench.handle(Stepped(2, has_news=True, error=None)) == [Call.STEPS_SOON]


def test_a_session_with_nothing_in_flight_is_settled_at_once() -> None:
    """Goal: a drain does not wait for a client that only reads."""
    assert Bench().handle(Signal.DRAIN) == [Call.NOTE_SETTLED]
    bench = Bench(is_draining=True)
    assert bench.take(WriteLac(1, 1, 0)) == [Call.FLUSH_SOON]
    assert bench.handle(Signal.FLUSH)[-1] is Call.NOTE_SETTLED


def test_a_client_that_breaks_the_protocol_is_refused_after_its_answers() -> None:
    """Goal: accepted writes first, then the reason, then nothing at all."""
    bench = Bench()
    effects = bench.take(
        adds(FRAME), Follow(2, 1, 0, WINDOW), ReadEntry(3, 1, 0, fence=False), Durable((1,))
    )
    assert [type(each) for each in effects[-3:]] == [NoteRefusal, Step, Call]
    assert bench.session.state is SessionState.REFUSING
    effects = bench.stored(1)
    assert sent(effects)[0] == Durable((1,))
    assert refusals(effects) == {0: BadRequestError}
    assert only(effects, CloseStream) == [CloseStream(2)]
    assert only(effects, CancelRead) == [CancelRead(3)]
    assert effects[-2:] == [Call.SET_READING, Call.END_SENDING]
    assert (SessionState.REFUSING, SessionState.REFUSED) in bench.moves
    assert bench.receive(Ping(1)) == []
    for event in (
        Signal.TURN,
        News(2),
        Stepped(2, has_news=True, error=BookieStorageError("x")),
        MessageRead(Chunk(3, [FRAME], is_last=True)),
        ReadEnded(3, BookieStorageError("x")),
        Signal.FLUSH,
        WritePaused(1, 0.0),
    ):
        assert bench.handle(event) == []
    assert bench.handle(Tick(0, 1.0)) == [Abort("it was refused, and does not hang up")]


def test_a_refused_client_with_nothing_in_flight_gets_the_error_at_once() -> None:
    """Goal: the client gets the reason and the end, and its bytes are thrown away."""
    bench = Bench()
    effects = bench.take(Durable((1,)))
    assert refusals(effects) == {0: BadRequestError}
    assert effects[-1] is Call.END_SENDING
    assert bench.session.intake.is_reading


def test_a_refusal_waits_for_answers_that_are_due() -> None:
    """Goal: a PING before the mistake has its PONG before the reason."""
    bench = Bench()
    bench.take(Ping(1), Durable((1,)))
    assert bench.session.state is SessionState.REFUSING
    effects = bench.handle(Signal.FLUSH)
    assert [type(each) for each in sent(effects)] == [Pong, Failed]


def test_a_client_without_hello_is_refused() -> None:
    """Goal: however much it is heard of; with HELLO in time it is not."""
    bench = Bench(greeted=False)
    assert bench.handle(Tick(0, 0.0)) == [TickAt(HANDSHAKE_S)]
    effects = bench.handle(Tick(0, HANDSHAKE_S))
    assert refusals(effects) == {0: BadRequestError}
    assert bench.session.state is SessionState.REFUSED
    bench = Bench()
    assert isinstance(bench.handle(Tick(0, HANDSHAKE_S))[0], TickAt)
    assert bench.session.state is SessionState.OPEN


def test_a_silent_client_is_asked_and_then_given_up() -> None:
    """Goal: a PING after half of the time, the end after the other half."""
    bench = Bench()
    assert bench.handle(Tick(0, 1.0)) == [TickAt(SILENCE_S / 2)]
    effects = bench.handle(Tick(0, SILENCE_S / 2))
    assert [type(each) for each in sent(effects)] == [Ping]
    assert only(effects, TickAt) == [TickAt(SILENCE_S)]
    (abort,) = bench.handle(Tick(0, SILENCE_S))
    assert isinstance(abort, Abort)
    assert "silent" in abort.reason


def test_a_client_that_is_not_read_is_not_silent() -> None:
    """Goal: the bookie does not blame it for what itself does not do."""
    bench = Bench()
    bench.take(*(ReadLac(number, 1, fence=False) for number in range(1, 41)))
    assert bench.handle(Tick(0, SILENCE_S)) == [TickAt(SILENCE_S * 1.5)]


def test_a_client_that_receives_nothing_is_given_up() -> None:
    """Goal: each byte that it takes gives it the whole time again."""
    bench = Bench()
    bench.handle(WritePaused(70_000, 1.0))
    assert bench.handle(Tick(70_000, 19.0)) == [TickAt(21.0)]
    assert bench.handle(Tick(69_999, 20.0)) == [TickAt(30.0)]
    assert bench.handle(Tick(69_999, 40.0)) == [Abort("it receives no answers")]


def relieve(
    bench: Bench, now_s: float, held_s: float, *, reads: bool = False, adds: bool = False
) -> list[Effect]:
    """Let others wait, which give a client a second, and five for a payload."""
    return bench.handle(
        Relieve(
            unsent_bytes=70_000,
            now_s=now_s,
            held_s=held_s,
            reads_wait=reads,
            adds_wait=adds,
            stall_s=1.0,
            held_s_max=5.0,
        )
    )


def test_a_slow_client_is_given_up_while_others_wait() -> None:
    """Goal: one that receives nothing if reads wait, one that sends slowly if adds wait."""
    bench = Bench()
    assert relieve(bench, 100.0, 0.5, reads=True, adds=True) == []
    assert relieve(bench, 100.0, 1.0, reads=True) == []
    assert only(relieve(bench, 100.0, 1.0, adds=True), Abort)
    bench.receive(Ping(1), now_s=100.0)
    bench.handle(Signal.TURN)
    assert relieve(bench, 100.5, 4.0, adds=True) == []
    assert only(relieve(bench, 100.5, 5.0, adds=True), Abort)
    bench.handle(Signal.TURN_WAITS)
    assert relieve(bench, 100.5, 5.0, adds=True) == []  # it is not read
    bench.handle(WritePaused(70_000, 100.0))
    assert only(relieve(bench, 100.5, 5.0, adds=True), Abort)
    assert relieve(bench, 100.5, 5.0, reads=True) == []
    assert only(relieve(bench, 101.0, 0.0, reads=True), Abort)


def test_a_connection_that_is_lost_leaves_nothing() -> None:
    """Goal: reads and streams end; writes that the storage has are counted until they end."""
    bench = Bench()
    bench.take(
        adds(FRAME),
        Follow(2, 1, 0, WINDOW),
        *(ReadEntry(number, 1, 0, fence=False) for number in range(3, 9)),
    )
    effects = bench.handle(Signal.LOST)
    assert effects[0] == CloseStream(2)
    assert {each.request_id for each in only(effects, CancelRead)} == {3, 4, 5, 6}
    assert effects[-1] is Call.NOTE_SETTLED
    assert bench.bounds.in_flight_bytes > 0
    assert bench.stored(1) == []
    assert bench.bounds.in_flight_bytes == 0
    assert bench.handle(Stepped(2, has_news=False, error=None)) == []
    assert bench.handle(Tick(0, 99.0)) == []
    assert bench.handle(Signal.LOST) == []


def test_many_sessions_share_what_is_in_flight() -> None:
    """Goal: one alone has its whole bound; of many each has a share, and at least some."""
    bounds = Bounds(connection_bytes_max=3 << 20, chunk_bytes_max=1, silence_s=1, handshake_s=1)
    assert bounds.in_flight_share() == 3 << 20
    bounds.in_flight_bytes = 9 << 20
    assert bounds.in_flight_share() == 1 << 20
    bounds.in_flight_bytes = 12 << 20
    assert bounds.in_flight_share() == IN_FLIGHT_BYTES_MIN
