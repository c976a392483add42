"""Goal: reads and streams of a session: slots, turns, windows, and a client that does not receive.

Method: exact effects for each way; then seeded chance, with a storage that answers when it likes.
"""

from __future__ import annotations

import pytest

from bookie.serving import session as module
from bookie.serving.session import (
    Call,
    CancelRead,
    CloseStream,
    MessageRead,
    News,
    OpenStream,
    Read,
    ReadEnded,
    Signal,
    Step,
    Stepped,
    WritePaused,
)
from dlcore.base.errors import (
    BookieOverloadedError,
    BookieStorageError,
)
from dlcore.wire.messages import (
    MESSAGE_BYTES,
    Cancel,
    Chunk,
    Credit,
    Follow,
    Held,
    Lac,
    ReadEntries,
    ReadEntry,
    ReadHeld,
    ReadLac,
    Update,
)
from tests.fixtures.session_bench import FRAME, WINDOW, Bench, only, refusals, sent


def test_single_reads() -> None:
    """Goal: a few entries at a time, LACs at once; each has its answer or its error."""
    bench = Bench()
    entries = [ReadEntry(number, 1, number, fence=False) for number in range(1, 7)]
    others: list[ReadLac | ReadHeld] = [ReadLac(7, 1, fence=False), ReadHeld(8, 1)]
    effects = bench.take(*entries, *others)
    assert effects == [Read(each) for each in (*entries[:4], *others)]
    chunk = Chunk(1, [FRAME], is_last=True)
    assert sent(bench.handle(MessageRead(chunk))) == [chunk]
    assert bench.handle(ReadEnded(1, None)) == [Read(entries[4])]
    error = BookieStorageError("damaged")
    assert bench.handle(ReadEnded(2, error)) == [Call.FLUSH_SOON, Read(entries[5])]
    assert refusals(bench.handle(Signal.FLUSH)) == {2: BookieStorageError}
    assert sent(bench.handle(MessageRead(Lac(7, 3)))) == [Lac(7, 3)]
    held = Held(8, 3, 5, [(4, 5)])
    assert sent(bench.handle(MessageRead(held))) == [held]
    for number in (3, 4, 5, 6, 7, 8):
        assert bench.handle(ReadEnded(number, None)) == []


def test_too_many_reads_stop_the_client() -> None:
    """Goal: it is read on when one has ended."""
    bench = Bench()
    requests = [ReadLac(number, 1, fence=False) for number in range(1, module._READS_MAX + 2)]
    effects = bench.take(*requests)
    while bench.session.intake.is_turn_due:
        effects += bench.handle(Signal.TURN)
    assert only(effects, Read) == [Read(each) for each in requests[:-1]]
    assert not bench.session.intake.is_reading
    assert bench.handle(ReadEnded(1, None)) == [Call.TAKE_TURN]
    assert bench.handle(Signal.TURN)[0] == Read(requests[-1])


def test_cancelled_reads() -> None:
    """Goal: one that was begun is cancelled; one that waits is dropped; a late one is nothing."""
    bench = Bench()
    bench.take(*(ReadEntry(number, 1, 0, fence=False) for number in range(1, 6)))
    assert bench.take(Cancel(1), Cancel(5), Cancel(9)) == [CancelRead(1)]
    assert bench.handle(ReadEnded(1, None)) == []


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_client_that_does_not_receive_gets_no_entries(is_begun: bool) -> None:
    """Goal: reads wait, and go on when it receives."""
    bench = Bench()
    bench.take(ReadEntries(1, 1, 0, 9, 1, 500, WINDOW))
    if is_begun:
        bench.handle(Signal.STEP_WAITS)
    else:
        bench.handle(Stepped(1, has_news=True, error=None))
    assert bench.handle(WritePaused(70_000, 0.0)) == [Call.SET_READING]
    if is_begun:
        assert bench.handle(Stepped(1, has_news=True, error=None)) == []
    else:
        assert bench.handle(Signal.BEGIN_STEPS) == []
    assert bench.session.patience.is_stalled
    effects = bench.handle(Signal.WRITE_RESUMED)
    assert only(effects, Step) == [Step(1)]
    assert effects[-1] is Call.TAKE_TURN


def test_entries_wait_for_a_client_that_does_not_receive() -> None:
    """Goal: what is not begun stays where it is."""
    bench = Bench()
    requests = [ReadEntry(number, 1, 0, fence=False) for number in range(1, 6)]
    bench.take(*requests)
    bench.handle(WritePaused(70_000, 0.0))
    assert bench.handle(ReadEnded(1, None)) == [Call.TAKE_TURN]
    assert bench.handle(Signal.TURN) == []
    assert bench.handle(Signal.WRITE_RESUMED) == [Read(requests[4]), Call.TAKE_TURN]


def test_a_range_is_sent_message_by_message() -> None:
    """Goal: one step at a time; the last message closes the stream."""
    bench = Bench()
    request = ReadEntries(1, 1, 0, 1, 1, 500, WINDOW)
    assert bench.take(request) == [OpenStream(request, 500), Step(1)]
    first = Chunk(1, [FRAME], is_last=False)
    assert sent(bench.handle(MessageRead(first))) == [first]
    assert bench.handle(Stepped(1, has_news=True, error=None)) == [Call.STEPS_SOON]
    assert bench.handle(Signal.BEGIN_STEPS) == [Step(1)]
    last = Chunk(1, [FRAME], is_last=True)
    effects = bench.handle(MessageRead(last))
    assert sent(effects) == [last]
    assert effects[1:] == [CloseStream(1)]
    assert bench.handle(Stepped(1, has_news=True, error=None)) == []
    assert bench.handle(Signal.BEGIN_STEPS) == []


def test_a_stream_waits_for_credit() -> None:
    """Goal: a message may go beyond the window, and the next one waits."""
    bench = Bench()
    request = ReadEntries(1, 1, 0, 9, 1, 5000, MESSAGE_BYTES)
    assert bench.take(request)[0] == OpenStream(request, 1000)  # the bookie's own bound
    bench.handle(MessageRead(Chunk(1, [FRAME], is_last=False)))
    bench.handle(Stepped(1, has_news=True, error=None))
    bench.handle(Signal.BEGIN_STEPS)
    assert bench.take(Credit(1, 1)) == []
    assert bench.take(Credit(7, 1)) == []
    assert bench.take(Credit(1, 1000)) == [Step(1)]


def test_a_follower_waits_for_news() -> None:
    """Goal: no step without news; news during a step is not forgotten."""
    bench = Bench()
    request = Follow(1, 1, 0, WINDOW)
    assert bench.take(request) == [OpenStream(request, 1000), Step(1)]
    bench.handle(MessageRead(Update(1, [], -1, fenced=False)))
    assert bench.handle(Stepped(1, has_news=False, error=None)) == []
    assert bench.handle(News(1)) == [Step(1)]
    assert bench.handle(News(1)) == []
    assert bench.handle(Signal.STEP_WAITS) == []
    assert bench.handle(Stepped(1, has_news=True, error=None)) == [Step(1)]
    assert bench.handle(News(8)) == []


def test_a_follower_with_rare_news_asks_rarely_for_more_steps() -> None:
    """Goal: news that come one by one cost no further event, and wait for none."""
    bench = Bench()
    effects = bench.take(Follow(1, 1, 0, WINDOW))
    asked = 0
    for _ in range(3 * module._STEPS_PER_TURN):
        assert only(effects, Step) == [Step(1)]
        asked += Call.STEPS_SOON in effects
        if bench.handle(Stepped(1, has_news=False, error=None)) or Call.STEPS_SOON in effects:
            assert bench.handle(Signal.BEGIN_STEPS) == []
        effects = bench.handle(News(1))
    assert asked == 3 * module._STEPS_PER_TURN // module._STEPS_LOW


def test_streams_take_turns() -> None:
    """Goal: a round has one step of each stream, some wait, and an iteration has its bound."""
    bench = Bench()
    effects = bench.take(*(ReadEntries(n, 1, 0, 99, 1, 500, WINDOW) for n in range(1, 21)))
    assert only(effects, Step) == [Step(1)]
    done = 0
    while only(effects, Step):
        done += 1
        (step,) = only(effects, Step)
        assert step.request_id == done
        effects = bench.handle(Stepped(done, has_news=True, error=None))
    assert done == module._STEPS_PER_TURN
    effects = bench.handle(Signal.BEGIN_STEPS)
    for number in range(17, 17 + module._STEPS_MAX):
        assert only(effects, Step) == [Step(number)]
        effects = bench.handle(Signal.STEP_WAITS)
    assert effects == []
    assert bench.handle(Stepped(18, has_news=True, error=None)) == [Step(1)]


def test_a_stream_that_fails_is_answered_and_closed() -> None:
    """Goal: as it begins, and later; the others go on."""
    bench = Bench()
    bench.take(Follow(1, 1, 0, WINDOW), Follow(2, 1, 0, WINDOW))
    error = BookieStorageError("damaged")
    effects = bench.handle(Stepped(1, has_news=True, error=error))
    assert effects == [CloseStream(1), Call.FLUSH_SOON, Step(2)]
    assert refusals(bench.handle(Signal.FLUSH)) == {1: BookieStorageError}
    bench.handle(Signal.STEP_WAITS)
    assert bench.handle(Stepped(2, has_news=False, error=error))[0] == CloseStream(2)


def test_a_stream_that_is_cancelled_gives_its_place_to_the_next() -> None:
    """Goal: it has no answer, and no step any more."""
    bench = Bench()
    bench.take(*(Follow(number, 1, 0, WINDOW) for number in (1, 2, 3)))
    assert bench.take(Cancel(1), Cancel(2)) == [CloseStream(1), CloseStream(2)]
    assert bench.handle(Stepped(1, has_news=False, error=None)) == [Step(3)]


def test_too_many_streams_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: one more has an error."""
    monkeypatch.setattr(module, "_STREAMS_MAX", 1)
    bench = Bench()
    effects = bench.take(Follow(1, 1, 0, WINDOW), Follow(2, 1, 0, WINDOW))
    assert len(only(effects, OpenStream)) == 1
    assert refusals(bench.handle(Signal.FLUSH)) == {2: BookieOverloadedError}
