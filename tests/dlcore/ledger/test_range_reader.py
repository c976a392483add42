"""Goal: all that a `RangeReader` decides.  Method: feed events, compare exact effects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dlcore.base.errors import (
    BookieOverloadedError,
    BookieStorageError,
    BookieUnavailableError,
    DigestMismatchError,
    DLError,
    LedgerReadError,
    NoSuchEntryError,
)
from dlcore.ledger.metadata.values import Ensemble
from dlcore.ledger.reading.range_read import (
    Arrived,
    Begin,
    CloseStream,
    Effect,
    Event,
    FetchNext,
    NoteRead,
    OpenStream,
    RangeReader,
    RangeState,
    Taken,
    TellFailure,
    Tick,
    plan_lanes,
)
from dlcore.wire.frames import FrameRun
from tests.fixtures.ledgers import LEDGER_ID, bookie, bookies, frame_of, quorum_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.base.config import QuorumConfig

SILENCE_S, TIMEOUT_S = 2.0, 7.0


class Bench:
    """A machine that is validated after each event; entries 0 to `last` of one ensemble."""

    def __init__(self, names: str, quorum: QuorumConfig, last: int) -> None:
        lanes = plan_lanes(
            ledger_id=LEDGER_ID,
            ensemble=Ensemble(0, bookies(names)),
            quorum=quorum,
            first_entry_id=0,
            last_entry_id=last,
        )
        self.machine = RangeReader(
            lanes,
            ledger_id=LEDGER_ID,
            first_entry_id=0,
            last_entry_id=last,
            silence_s=SILENCE_S,
            timeout_s=TIMEOUT_S,
        )

    def handle(self, event: Event) -> list[Effect]:
        """Feed an event."""
        effects = self.machine.handle(event)
        self.machine.validate()
        return effects

    def arrived(
        self, name: str, outcome: Sequence[int] | DLError | None, now: float = 0.0, lane: int = 0
    ) -> list[Effect]:
        """Say that a stream brought entries of these ids, has failed, or has ended."""
        given = outcome if outcome is None or isinstance(outcome, DLError) else frames(*outcome)
        return self.handle(Arrived(lane, bookie(name), given, now))

    def taken(self) -> list[int]:
        """Take what comes next."""
        return [entry.entry_id for entry in self.machine.take()]


def frames(*entry_ids: int) -> list[bytes | memoryview]:
    """Return the frames of entries."""
    return [frame_of(each) for each in entry_ids]


def whole(last: int = 9) -> Bench:
    """Return a machine whose bookies have all entries, and that has begun; B is asked first."""
    bench = Bench("ABC", quorum_of(3, 3, 2), last)
    (opened,) = bench.handle(Begin(0.0))
    assert opened == OpenStream(bookie=bookie("B"), first_entry_id=0, lane=0)
    return bench


def striped() -> Bench:
    """Return one with a lane for each of three bookies; each entry is on two of them."""
    bench = Bench("ABC", quorum_of(3, 2, 2), 8)
    assert [each.lane for each in bench.handle(Begin(0.0)) if isinstance(each, OpenStream)] == [
        0,
        1,
        2,
    ]
    return bench


def closed(name: str, lane: int = 0) -> CloseStream:
    """Return the effect that closes a stream."""
    return CloseStream(bookie=bookie(name), lane=lane)


def test_a_stream_is_read_on_until_the_last_entry() -> None:
    """The next chunk is fetched at once, and what came waits to be taken."""
    bench = whole(last=3)
    assert bench.machine.is_waiting(0)
    assert bench.arrived("B", [0, 1]) == [NoteRead(bookie("B"), True), FetchNext(bookie("B"), 0)]
    assert not bench.machine.is_waiting(0)
    assert bench.taken() == [0, 1]
    assert bench.taken() == []
    assert bench.arrived("B", []) == [FetchNext(bookie("B"), 0)]
    assert bench.arrived("B", [2, 3]) == [NoteRead(bookie("B"), True), closed("B")]
    assert not bench.machine.is_done
    assert bench.taken() == [2, 3]
    assert bench.machine.is_done


@pytest.mark.parametrize(
    ("outcome", "error", "is_blamed"),
    [
        (NoSuchEntryError("not here"), NoSuchEntryError, False),
        (BookieOverloadedError("busy"), BookieOverloadedError, True),
        (None, BookieStorageError, True),
    ],
)
def test_a_stream_that_fails_is_replaced(
    outcome: DLError | None, error: type[DLError], *, is_blamed: bool
) -> None:
    """A proven no is an answer like another, and nothing to avoid the bookie for."""
    bench = whole()
    bench.arrived("B", [0, 1])
    failure, *effects = bench.arrived("B", outcome)
    assert isinstance(failure, TellFailure)
    assert (failure.bookie, failure.entry_id, type(failure.error)) == (bookie("B"), 2, error)
    opened = OpenStream(bookie=bookie("C"), first_entry_id=2, lane=0)
    blamed = [NoteRead(bookie("B"), False)] if is_blamed else []
    assert effects == [closed("B"), *blamed, opened]


def run_of(frames: Sequence[bytes]) -> FrameRun:
    """Return frames that lie in one buffer, as they come from a socket."""
    return FrameRun.of_sizes(memoryview(b"".join(frames)), np.array(list(map(len, frames))))


def test_frames_in_one_buffer_are_read_as_others_are() -> None:
    """Each stream knows which entry comes next."""
    bench = whole(last=3)
    for first in (0, 2):
        run = run_of([frame_of(first), frame_of(first + 1)])
        bench.handle(Arrived(0, bookie("B"), run, 0.0))
        assert bench.taken() == [first, first + 1]
    assert bench.machine.is_done


@pytest.mark.parametrize("frames_of", [list, run_of])
def test_entries_before_damage_are_good(frames_of: Callable[[list[bytes]], Any]) -> None:
    """The stream ends at the damage; damage is an answer, and no silence."""
    bench = whole()
    damaged = bytearray(frame_of(1))
    damaged[-1] ^= 1
    given = frames_of([frame_of(0), bytes(damaged), frame_of(2)])
    first, failure, *effects = bench.handle(Arrived(0, bookie("B"), given, 1.5))
    assert isinstance(failure, TellFailure)
    assert (failure.entry_id, type(failure.error)) == (1, DigestMismatchError)
    opened = OpenStream(bookie=bookie("C"), first_entry_id=1, lane=0)
    assert [first, *effects] == [
        NoteRead(bookie("B"), True),
        closed("B"),
        NoteRead(bookie("B"), False),
        opened,
    ]
    assert bench.taken() == [0]
    assert bench.machine.deadline_s == 1.5 + SILENCE_S


def test_silence_opens_a_second_stream_and_then_ends_the_first() -> None:
    """It is counted against those that are silent, as long as another one can be asked."""
    bench = whole()
    assert bench.machine.deadline_s == SILENCE_S
    assert bench.handle(Tick(1.9)) == []
    second = [NoteRead(bookie("B"), False), OpenStream(bookie=bookie("C"), first_entry_id=0)]
    assert bench.handle(Tick(2.0)) == second
    assert bench.machine.deadline_s == 4.0
    third = bench.handle(Tick(4.0))
    assert third[:2] == [NoteRead(bookie("B"), False), NoteRead(bookie("C"), False)]
    assert bench.handle(Tick(6.0)) == []
    assert bench.machine.deadline_s == TIMEOUT_S
    failure, *effects = bench.handle(Tick(7.0))
    assert isinstance(failure, TellFailure)
    assert isinstance(failure.error, BookieUnavailableError)
    assert effects == [closed("B"), NoteRead(bookie("B"), False)]
    assert bench.arrived("A", [0], 7.5) == [
        NoteRead(bookie("A"), True),
        closed("C"),
        FetchNext(bookie("A"), 0),
    ]


def test_the_time_of_the_caller_is_no_silence() -> None:
    """However long it took with the entries that it got, or while others wait for their turn."""
    bench = whole()
    bench.arrived("B", [0, 1], 1.0)
    assert bench.handle(Tick(100.0)) == []
    bench.taken()
    assert bench.handle(Taken(100.0)) == []
    assert bench.machine.deadline_s == 100.0 + SILENCE_S
    assert bench.handle(Tick(101.0)) == []


def test_when_all_have_failed_the_error_follows_the_received_entries() -> None:
    """The error is that of the lane."""
    bench = whole()
    bench.arrived("B", [0])
    for name in "BCA":
        bench.arrived(name, NoSuchEntryError("not here"))
    assert bench.taken() == [0]
    with pytest.raises(LedgerReadError, match="no replica returned entry 1"):
        bench.taken()


def test_lanes_are_merged_in_order() -> None:
    """A lane whose entries wait is not read on; an error is reported when it is its turn."""
    bench = striped()
    bench.arrived("B", [1, 4], lane=1)
    assert bench.taken() == []
    assert [bench.machine.is_waiting(lane) for lane in range(3)] == [True, False, True]
    for lane, name in ((0, "A"), (2, "C")):
        bench.arrived(name, [], now=5.0, lane=lane)
    assert bench.machine.deadline_s == 5.0 + SILENCE_S
    bench.arrived("A", [0, 3, 6], lane=0)
    assert bench.taken() == [0, 1]
    for name in "CA":
        bench.arrived(name, NoSuchEntryError("not here"), lane=2)
    with pytest.raises(LedgerReadError, match="no replica returned entry 2"):
        bench.taken()
    bench = striped()
    for lane, name in enumerate("ABC"):
        bench.arrived(name, [lane, lane + 3, lane + 6], lane=lane)
    assert bench.taken() == list(range(9))
    assert bench.machine.is_done


def test_a_lane_that_is_done_asks_no_more_while_another_one_is_silent() -> None:
    """Its next entry is beyond the range, and no replica may have it."""
    bench = striped()
    bench.arrived("A", [0, 3, 6], lane=0)
    bench.arrived("B", [1, 4, 7], lane=1)
    assert bench.taken() == [0, 1]
    bench.arrived("C", [2], lane=2)
    assert bench.taken() == [2, 3, 4]
    bench.arrived("C", [5], now=1.0, lane=2)
    assert bench.taken() == [5, 6, 7]
    asked = [each for each in bench.handle(Tick(3.0)) if isinstance(each, OpenStream)]
    assert [(each.lane, each.first_entry_id) for each in asked] == [(2, 8)]
    bench.arrived("C", [8], now=3.0, lane=2)
    assert bench.taken() == [8]
    assert bench.machine.is_done


def test_lanes_that_fail_one_after_the_other() -> None:
    """The error of the first entry that is missing is raised, whichever lane failed first."""
    bench = striped()
    for lane, names in ((2, "CA"), (1, "BC")):
        for name in names:
            bench.arrived(name, NoSuchEntryError("not here"), lane=lane)
        assert bench.machine.state is RangeState.FAILING
    bench.arrived("A", [0], lane=0)
    assert bench.taken() == [0]
    with pytest.raises(LedgerReadError, match="no replica returned entry 1"):
        bench.taken()
    assert bench.machine.state is RangeState.FAILING
