"""Goal: the parts of a session by themselves.  Method: short histories, exact effects."""

from __future__ import annotations

import pytest

from bookie.serving.session import (
    Abort,
    Bounds,
    Call,
    CancelRead,
    CloseStream,
    Intake,
    OpenStream,
    Patience,
    Read,
    Relieve,
    SingleReads,
    Step,
    Streams,
    Trust,
    Writes,
)
from dlcore.base.errors import BadRequestError, BookieUnavailableError
from dlcore.wire.messages import Add, Chunk, ReadEntries, ReadEntry, ReadLac
from tests.fixtures.session_bench import FakeRoom

MOST = 32


class FakeEnd:
    """A wire that gives each stream the window that a test sets."""

    def __init__(self) -> None:
        self.windows: dict[int, int] = {}
        self.ended: list[int] = []

    def window_of(self, request_id: int) -> int:
        """Return the window; 1 unless the test set another."""
        return self.windows.get(request_id, 1)

    def end(self, request_id: int) -> None:
        """Note that the request is over."""
        self.ended.append(request_id)


def streams_of() -> tuple[Streams, FakeEnd]:
    """Return no streams, and their wire."""
    end = FakeEnd()
    return Streams(end, 1000), end  # type: ignore[arg-type]


def reading(request_id: int) -> ReadEntries:
    """Return a request for a stream."""
    return ReadEntries(request_id, 7, 0, 9, 1, 500, 1)


def bounds_of() -> Bounds:
    """Return bounds of one bookie."""
    return Bounds(connection_bytes_max=1 << 20, chunk_bytes_max=1000, silence_s=4, handshake_s=2)


def test_trust_halves_with_requests_of_no_use_and_doubles_with_others() -> None:
    """An error that the client could not foresee changes nothing."""
    trust = Trust(0.0)
    first = trust.level
    trust.weigh(BadRequestError("no such entry"), 1)
    assert trust.level == first // 2
    trust.weigh(BookieUnavailableError("shutting down"), 5)
    assert trust.level == first // 2
    trust.weigh(None, 1)
    assert trust.level == first
    for _ in range(3):
        trust.weigh(None, 1)
    assert trust.level == MOST
    trust.doubt(10)
    assert trust.level == 1
    assert trust.is_low


def test_a_client_that_was_quiet_is_trusted_again() -> None:
    """As a stranger, not more."""
    trust = Trust(0.0)
    trust.doubt(10)
    trust.heard(0.5)
    assert trust.level == 1
    trust.heard(2.0)
    assert trust.level == MOST // 2


def test_writes_count_what_is_in_flight_for_all_sessions() -> None:
    """The bound is shared; each write counts a constant beside its payload."""
    bounds = bounds_of()
    writes = Writes(bounds, is_draining=False)
    writes.fly(2, 1000)
    assert (writes.in_flight, writes.in_flight_bytes) == (2, bounds.in_flight_bytes)
    rooms = [writes.has_room]
    writes.fly(1, 1 << 22)
    assert [*rooms, writes.has_room] == [True, False]
    writes.fly(-3, -1000 - (1 << 22))
    assert (writes.in_flight, bounds.in_flight_bytes) == (0, 0)


def test_answers_leave_together() -> None:
    """One flush is asked for, and one message tells all durable writes."""
    writes = Writes(bounds_of(), is_draining=False)
    writes.note([1, 2], None)
    assert writes.flush_soon() == [Call.FLUSH_SOON]
    writes.note([3], None)
    assert writes.flush_soon() == []
    assert len(writes.take_answers()) == 1
    assert writes.take_answers() == []


def test_the_rest_of_a_message_is_the_next_request() -> None:
    """Its request ids go on; a session that is over forgets it."""
    intake = Intake(FakeRoom())
    add = Add(10, False, [b"a", b"b", b"c"])
    assert intake.first_of(add, 3) == add
    assert intake.first_of(add, 2) == Add(10, False, [b"a", b"b"])
    assert list(intake.rest) == [Add(12, False, [b"c"])]
    intake.close()
    assert not intake.rest
    assert intake.stop_reading() == []
    assert intake.is_reading


def test_reading_stops_and_goes_on_once() -> None:
    """Unread input asks for a turn, in which reading may start again."""
    intake = Intake(FakeRoom())
    assert intake.go_on() == []
    assert intake.stop_reading() == [Call.SET_READING]
    assert intake.stop_reading() == []
    assert intake.go_on() == [Call.TAKE_TURN]
    assert intake.go_on() == []
    assert intake.start_reading() == [Call.SET_READING]
    assert intake.start_reading() == []


def test_entries_are_read_a_few_at_a_time() -> None:
    """Reads of LACs need no slot; one that waits is given up without a word."""
    reads = SingleReads()
    requests = [ReadEntry(number, 7, number, False) for number in range(6)]
    begun = [reads.begin(each, is_stalled=False) for each in requests]
    assert begun == [*([Read(each)] for each in requests[:4]), [], []]
    assert reads.begin(ReadLac(9, 7, False), is_stalled=True) == [Read(ReadLac(9, 7, False))]
    reads.validate(is_over=False, is_stalled=False)
    assert reads.cancel(4) == []
    assert reads.cancel(0) == [CancelRead(0)]
    assert reads.cancel(77) == []
    reads.end(0)
    assert reads.go_on(is_stalled=True) == []
    assert reads.go_on(is_stalled=False) == [Read(requests[5])]
    assert {each.request_id for each in reads.drop() if isinstance(each, CancelRead)} == {
        1, 2, 3, 5, 9
    }  # fmt: skip
    reads.validate(is_over=True, is_stalled=False)


def test_streams_have_steps_in_turn() -> None:
    """One begins at a time; a stream without a window, or without news, waits for either."""
    streams, end = streams_of()
    assert streams.begin(reading(1)) == [OpenStream(reading(1), 500)]
    streams.begin(reading(2))
    end.windows[3] = 0
    streams.begin(reading(3))
    assert streams.begin_round()
    first = streams.next_stream(is_stalled=False)
    assert first is not None
    assert streams.step(first) == [Step(1)]
    assert not streams.begin_round()
    streams.step_waits()
    second = streams.next_stream(is_stalled=False)
    assert second is not None
    assert second.request_id == 2
    assert streams.next_stream(is_stalled=False) is None
    end.windows[3] = 1
    streams.credit(3)
    streams.credit(77)
    assert [each.request_id for each in streams.queue] == [3]


def test_a_stream_ends_with_its_last_message() -> None:
    """And its place in the queue is passed over."""
    streams, end = streams_of()
    streams.begin(reading(1))
    assert streams.note_sent(Chunk(1, [b"x"], is_last=False)) == []
    assert streams.note_sent(Chunk(1, [b"x"], is_last=True)) == [CloseStream(1)]
    assert streams.note_sent(Chunk(1, [b"x"], is_last=True)) == []
    assert end.ended == [1]
    assert streams.begin_round()
    assert streams.next_stream(is_stalled=False) is None
    streams.news(1)
    assert not streams.queue


def test_steps_of_one_iteration_are_bounded() -> None:
    """Half of them are left when more are asked for."""
    streams, _ = streams_of()
    asked = 0
    for number in range(20):
        streams.begin(reading(number))
    for _ in range(16):
        streams.begun = None
        assert streams.begin_round()
        stream = streams.next_stream(is_stalled=False)
        assert stream is not None
        asked += Call.STEPS_SOON in streams.step(stream)
    assert asked == 1
    streams.begun = None
    assert streams.begin_round()
    assert streams.next_stream(is_stalled=False) is None
    streams.begin_steps()
    assert streams.begin_round()
    assert streams.next_stream(is_stalled=True) is None
    assert streams.next_stream(is_stalled=False) is not None


def test_patience_ends_with_silence_and_with_answers_that_no_client_takes() -> None:
    """A connection that is not read is not silent."""
    patience = Patience(bounds_of(), 0.0)
    assert patience.late_greeting(1.9) is None
    assert "2" in str(patience.late_greeting(2.0))
    assert patience.due_s(0.0, is_greeting=True) == 2.0
    assert patience.check(0, 3.0, is_reading=False) is None
    assert patience.check(0, 5.0, is_reading=True) is not None
    with pytest.raises(BookieUnavailableError, match="silent"):
        patience.check(0, 7.0, is_reading=True)
    patience.heard(7.0)
    patience.stall = (100, 7.0)
    assert patience.stalled_s(90, 8.0) == 0.0  # it took some
    with pytest.raises(BookieUnavailableError, match="receives no answers"):
        patience.check(90, 12.0, is_reading=True)


def test_a_connection_without_progress_makes_room_for_others() -> None:
    """Only when others wait, and never for what is not the client's fault."""
    patience = Patience(bounds_of(), 0.0)

    def relieve(*, reads: bool, adds: bool, is_reading: bool = True) -> bool:
        event = Relieve(50, 3.0, 3.0, reads_wait=reads, adds_wait=adds, stall_s=2.0, held_s_max=9.0)
        return any(
            isinstance(each, Abort) for each in patience.relieve(event, is_reading=is_reading)
        )

    assert not relieve(reads=True, adds=False)
    assert not relieve(reads=False, adds=True, is_reading=False)
    assert relieve(reads=False, adds=True)
    patience.stall = (50, 0.5)
    assert relieve(reads=True, adds=False)
    assert not relieve(reads=False, adds=False)
