"""Goal: all that a read lane decides.  Method: say what streams bring, compare exact effects."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import BookieStorageError, NoSuchEntryError
from dlcore.ledger.metadata.values import Ensemble
from dlcore.ledger.reading.range_read import (
    CloseStream,
    FetchNext,
    OpenStream,
    ReadLane,
    plan_lanes,
)
from tests.fixtures.ledgers import LEDGER_ID, bookie, bookies, entry_of, quorum_of
from tests.fixtures.lengths import for_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.errors import DLError
    from dlcore.wire.frames import EntryFrame

MISSING = NoSuchEntryError("not here")
DAMAGED = BookieStorageError("damaged")


def lane_of(names: str = "ABC", first: int = 0, last: int = 9, stride: int = 1) -> ReadLane:
    """Return a lane over some replicas."""
    return ReadLane(
        replicas=bookies(names),
        first_entry_id=first,
        last_entry_id=last,
        stride=stride,
    )


def entries(first: int, last: int, stride: int = 1) -> list[EntryFrame]:
    """Return the entries of a range."""
    return [entry_of(entry_id) for entry_id in range(first, last + 1, stride)]


def open_at(name: str, entry_id: int, lane: int = 0, stride: int = 1) -> OpenStream:
    """Return the effect that opens a stream."""
    return OpenStream(bookie=bookie(name), first_entry_id=entry_id, stride=stride, lane=lane)


def closed(name: str) -> CloseStream:
    """Return the effect that closes a stream."""
    return CloseStream(bookie=bookie(name))


def read_on(lane: ReadLane) -> list[OpenStream | FetchNext]:
    """Let a lane fetch what comes next, however many chunks wait."""
    return lane.read_on(0.0, ready_max=1000)


def ready(lane: ReadLane) -> list[int]:
    """Return the entries that wait for their turn."""
    return [entry.entry_id for chunk in lane.ready for entry in chunk]


def test_one_stream_delivers_all() -> None:
    """The plain case."""
    lane = lane_of()
    assert read_on(lane) == [open_at("A", 0)]
    assert lane.received(bookie("A"), entries(0, 4)) == []
    assert lane.received(bookie("A"), entries(5, 9)) == [closed("A")]
    assert lane.is_done
    assert ready(lane) == list(range(10))


def test_a_failure_goes_on_from_the_next_needed_entry_elsewhere() -> None:
    """Nothing is read twice."""
    lane = lane_of()
    read_on(lane)
    lane.received(bookie("A"), entries(0, 2))
    assert lane.failed(bookie("A"), MISSING) == closed("A")
    assert read_on(lane) == [open_at("B", 3)]
    lane.received(bookie("B"), entries(3, 4))
    # Progress forgives, but a bookie that failed is asked last.
    for name, other in ("BC", "CA"):
        assert lane.failed(bookie(name), MISSING) == closed(name)
        assert read_on(lane) == [open_at(other, 5)]


@pytest.mark.parametrize(("last", "is_damaged"), [(MISSING, False), (DAMAGED, True)])
def test_only_when_all_failed_for_one_entry_the_lane_fails_naming_them(
    last: DLError, *, is_damaged: bool
) -> None:
    """Each replica with its answer; the entry is damaged if no answer says another thing."""
    lane = lane_of("AB")
    read_on(lane)
    lane.failed(bookie("A"), DAMAGED)
    assert read_on(lane) == [open_at("B", 0)]
    assert lane.failed(bookie("B"), last) == closed("B")
    assert read_on(lane) == []
    assert lane.has_failed
    error = lane.failure(LEDGER_ID)
    text = str(error)
    assert "ledger 7: no replica returned entry 0" in text
    assert "A/00000000: BookieStorageError: damaged" in text
    assert f"B/00000000: {type(last).__name__}: {last}" in text
    assert error.is_damaged == is_damaged


def test_silence_asks_another_and_the_first_to_deliver_stays() -> None:
    """The others must stop."""
    lane = lane_of()
    read_on(lane)
    assert lane.silent(0.0) == [open_at("B", 0)]
    assert lane.silent(0.0) == [open_at("C", 0)]
    assert lane.silent(0.0) == []
    assert lane.received(bookie("B"), entries(0, 3)) == [closed("A"), closed("C")]


def test_nothing_fails_while_a_bookie_may_still_answer() -> None:
    """One failure of two is none."""
    lane = lane_of("AB")
    read_on(lane)
    lane.silent(0.0)
    has_failed = []
    for name in "AB":
        assert lane.failed(bookie(name), MISSING) == closed(name)
        has_failed.append(lane.has_failed)
    assert has_failed == [False, True]


def test_a_second_stream_may_repeat_what_has_arrived() -> None:
    """Nothing arrives twice."""
    lane = lane_of()
    read_on(lane)
    lane.silent(0.0)
    assert lane.received(bookie("A"), []) == []
    assert lane.received(bookie("A"), entries(0, 3)) == [closed("B")]
    lane.silent(0.0)
    assert lane.received(bookie("B"), entries(0, 3)) == []
    assert lane.received(bookie("B"), entries(2, 6)) == [closed("A")]
    assert ready(lane) == list(range(7))


def test_a_lane_is_read_on_until_enough_chunks_wait() -> None:
    """A stream fetches one chunk at a time; a failed one is replaced when its chunk is needed."""
    lane = lane_of()
    read_on(lane)
    assert lane.read_on(0.0, ready_max=1) == []
    lane.received(bookie("A"), entries(0, 3))
    lane.streams[bookie("A")].is_fetching = False
    assert lane.read_on(0.0, ready_max=1) == []
    assert lane.read_on(0.0, ready_max=2) == [FetchNext(bookie("A"), 0)]
    assert lane.read_on(0.0, ready_max=2) == []
    lane.failed(bookie("A"), MISSING)
    assert lane.read_on(0.0, ready_max=1) == []
    assert lane.read_on(0.0, ready_max=2) == [open_at("B", 4)]


def test_an_empty_range_needs_no_bookie() -> None:
    """It is done before it begins."""
    lane = lane_of(first=3, last=2)
    assert lane.is_done
    assert read_on(lane) == []


def test_lanes_of_an_unstriped_ledger() -> None:
    """One lane, and ledgers spread over the replicas."""
    (lane,) = plan_lanes(
        ledger_id=1,
        ensemble=Ensemble(0, bookies("ABC")),
        quorum=quorum_of(3, 3, 2),
        first_entry_id=10,
        last_entry_id=20,
    )
    assert (lane.next_entry_id, lane.last_entry_id, lane.stride) == (10, 20, 1)
    assert read_on(lane) == [
        open_at("C", 10)
    ]  # 10 mod 3 is B, and the ledger's turn is one further


def test_lanes_of_a_striped_ledger() -> None:
    """Each lane begins at another bookie."""
    lanes = plan_lanes(
        ledger_id=1,
        ensemble=Ensemble(0, bookies("ABCDE")),
        quorum=quorum_of(5, 3, 2),
        first_entry_id=7,
        last_entry_id=100,
    )
    assert [read_on(lane) for lane in lanes] == [
        [open_at(name, 7 + lane, lane, stride=5)] for lane, name in enumerate("CDEAB")
    ]
    assert {lane.stride for lane in lanes} == {5}
    few = plan_lanes(
        ledger_id=1,
        ensemble=Ensemble(0, bookies("ABCDE")),
        quorum=quorum_of(5, 3, 2),
        first_entry_id=7,
        last_entry_id=8,
    )
    assert len(few) == 2


class RandomRead:
    """Replicas miss entries and fall silent at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        last, self.stride = self.rng.randint(0, 20), self.rng.choice((1, 3))
        self.whole = list(range(0, last + 1, self.stride))
        self.held = {
            name: {each for each in self.whole if self.rng.random() < 0.7} for name in "ABC"
        }
        self.lane = lane_of(first=0, last=last, stride=self.stride)
        self.streams: dict[str, int] = {}

    def perform(self, effects: Sequence[OpenStream | FetchNext | CloseStream]) -> None:
        """Keep the streams that a driver would have."""
        for effect in effects:
            match effect:
                case OpenStream():
                    assert effect.bookie.name not in self.streams
                    self.streams[effect.bookie.name] = effect.first_entry_id
                case CloseStream():
                    del self.streams[effect.bookie.name]

    def step(self) -> Sequence[OpenStream | CloseStream]:
        """Let one stream go on, or all be silent."""
        if self.rng.random() < 0.2:
            return self.lane.silent(0.0)
        name = self.rng.choice(sorted(self.streams))
        position = self.streams[name]
        if position in self.held[name]:
            self.streams[name] += self.stride
            return self.lane.received(bookie(name), [entry_of(position)])
        return [self.lane.failed(bookie(name), MISSING)]


@for_each(range(100))
def test_random_streams_deliver_everything_that_a_bookie_has(seed: int) -> None:
    """The lane fails only where no bookie has the entry."""
    run = RandomRead(seed)
    run.perform(read_on(run.lane))
    while not run.lane.is_done and not run.lane.has_failed:
        run.perform(run.step())
        run.perform(read_on(run.lane))
    delivered = ready(run.lane)
    assert delivered == run.whole[: len(delivered)]
    assert run.streams == {}
    if run.lane.has_failed:
        missing = run.whole[len(delivered)]
        assert all(missing not in held for held in run.held.values())
    else:
        assert delivered == run.whole
