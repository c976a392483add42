"""Goal: every transition of a read lane.  Method: feed streams' events, compare exact effects."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from dlcore.base.errors import BookieStorageError, NoSuchEntryError
from dlcore.ledger.metadata.values import Ensemble
from dlcore.ledger.reading.range_read import (
    CloseStream,
    Deliver,
    FailRead,
    LaneEffect,
    OpenStream,
    ReadLane,
    plan_lanes,
)
from tests.fixtures.ledgers import LEDGER_ID, bookie, bookies, entry_of, quorum_of
from tests.fixtures.lengths import for_each

if TYPE_CHECKING:
    from dlcore.wire.frames import EntryFrame

MISSING = NoSuchEntryError("not here")
DAMAGED = BookieStorageError("damaged")


def lane_of(names: str = "ABC", first: int = 0, last: int = 9, stride: int = 1) -> ReadLane:
    """Return a lane over some replicas."""
    return ReadLane(
        ledger_id=LEDGER_ID,
        replicas=bookies(names),
        first_entry_id=first,
        last_entry_id=last,
        stride=stride,
    )


def entries(first: int, last: int, stride: int = 1) -> list[EntryFrame]:
    """Return the entries of a range."""
    return [entry_of(entry_id) for entry_id in range(first, last + 1, stride)]


def open_at(name: str, entry_id: int, lane: int = 0) -> OpenStream:
    """Return the effect that opens a stream."""
    return OpenStream(bookie=bookie(name), first_entry_id=entry_id, lane=lane)


def test_one_stream_delivers_all() -> None:
    """The plain case."""
    lane = lane_of()
    assert lane.start() == [open_at("A", 0)]
    head = entries(0, 4)
    assert lane.received(bookie("A"), head) == [Deliver(entries=head)]
    tail = entries(5, 9)
    assert lane.received(bookie("A"), tail) == [
        Deliver(entries=tail),
        CloseStream(bookie=bookie("A")),
    ]
    assert lane.is_done


def test_a_failure_goes_on_from_the_next_needed_entry_elsewhere() -> None:
    """Nothing is read twice."""
    lane = lane_of()
    lane.start()
    lane.received(bookie("A"), entries(0, 2))
    assert lane.failed(bookie("A"), MISSING) == [open_at("B", 3)]
    lane.received(bookie("B"), entries(3, 4))
    # Progress forgives, but a bookie that failed is asked last.
    assert lane.failed(bookie("B"), MISSING) == [open_at("C", 5)]
    assert lane.failed(bookie("C"), MISSING) == [open_at("A", 5)]


def test_only_when_all_failed_for_one_entry_the_read_fails_naming_them() -> None:
    """Each replica with its answer."""
    lane = lane_of()
    lane.start()
    lane.failed(bookie("A"), MISSING)
    lane.failed(bookie("B"), DAMAGED)
    (effect,) = lane.failed(bookie("C"), MISSING)
    assert isinstance(effect, FailRead)
    text = str(effect.error)
    assert "ledger 7: no replica returned entry 0" in text
    assert "A/00000000: NoSuchEntryError: not here" in text
    assert "B/00000000: BookieStorageError: damaged" in text


def test_silence_asks_another_and_the_first_to_deliver_stays() -> None:
    """The others must stop."""
    lane = lane_of()
    lane.start()
    assert lane.silent() == [open_at("B", 0)]
    assert lane.silent() == [open_at("C", 0)]
    assert lane.silent() == []
    got = entries(0, 3)
    assert lane.received(bookie("B"), got) == [
        Deliver(entries=got),
        CloseStream(bookie=bookie("A")),
        CloseStream(bookie=bookie("C")),
    ]
    assert lane.received(bookie("A"), entries(0, 5)) == []  # closed: too late
    assert lane.failed(bookie("A"), MISSING) == []


def test_nothing_fails_while_a_bookie_may_still_answer() -> None:
    """One failure of two is none."""
    lane = lane_of("AB")
    lane.start()
    lane.silent()
    assert lane.failed(bookie("A"), MISSING) == []
    assert isinstance(lane.failed(bookie("B"), MISSING)[0], FailRead)


def test_a_company_stream_may_repeat_what_was_delivered() -> None:
    """Nothing is delivered twice."""
    lane = lane_of()
    lane.start()
    lane.received(bookie("A"), entries(0, 3))
    lane.silent()
    assert lane.received(bookie("A"), []) == []
    got = entries(4, 6)
    assert lane.received(bookie("B"), got) == [
        Deliver(entries=got),
        CloseStream(bookie=bookie("A")),
    ]


def test_an_empty_range_needs_no_bookie() -> None:
    """It is done before it begins."""
    lane = lane_of(first=3, last=2)
    assert lane.is_done
    assert lane.start() == []


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
    assert lane.start() == [open_at("C", 10)]  # 10 mod 3 is B, and the ledger's turn is one further


def test_lanes_of_a_striped_ledger() -> None:
    """Each lane begins at another bookie."""
    lanes = plan_lanes(
        ledger_id=1,
        ensemble=Ensemble(0, bookies("ABCDE")),
        quorum=quorum_of(5, 3, 2),
        first_entry_id=7,
        last_entry_id=100,
    )
    assert [lane.start() for lane in lanes] == [
        [open_at(name, 7 + lane, lane)] for lane, name in enumerate("CDEAB")
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
        self.delivered: list[int] = []
        self.has_failed = False

    def perform(self, effects: list[LaneEffect]) -> None:
        """Keep the streams that a driver would have."""
        for effect in effects:
            match effect:
                case OpenStream():
                    assert effect.bookie.name not in self.streams
                    self.streams[effect.bookie.name] = effect.first_entry_id
                case CloseStream():
                    del self.streams[effect.bookie.name]
                case Deliver():
                    self.delivered.extend(each.entry_id for each in effect.entries)
                case FailRead():
                    self.has_failed = True

    def step(self) -> list[LaneEffect]:
        """Let one stream go on, or all be silent."""
        if self.rng.random() < 0.2:
            return self.lane.silent()
        name = self.rng.choice(sorted(self.streams))
        position = self.streams[name]
        if position in self.held[name]:
            self.streams[name] += self.stride
            return self.lane.received(bookie(name), [entry_of(position)])
        del self.streams[name]
        return self.lane.failed(bookie(name), MISSING)


@for_each(range(100))
def test_random_streams_deliver_everything_that_a_bookie_has(seed: int) -> None:
    """The read fails only where no bookie has the entry."""
    run = RandomRead(seed)
    run.perform(run.lane.start())
    while not run.lane.is_done and not run.has_failed:
        run.perform(run.step())
    assert run.delivered == run.whole[: len(run.delivered)]
    if run.has_failed:
        missing = run.whole[len(run.delivered)]
        assert all(missing not in held for held in run.held.values())
    else:
        assert run.delivered == run.whole
        assert run.streams == {}
