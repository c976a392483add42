"""Goal: all that a `RangeReader` decides.

Method: feed events, and compare exact effects; then bookies and a caller by seeded chance.
"""

from __future__ import annotations

import random
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
    Broke,
    CloseStream,
    Deliver,
    Effect,
    Event,
    Fail,
    FetchNext,
    NoteRead,
    OpenStream,
    RangeReader,
    RangeState,
    TellFailure,
    Tick,
    TickAt,
    Wanted,
)
from dlcore.wire.frames import FrameRun
from tests.fixtures.ledgers import LEDGER_ID, bookie, bookies, frame_of, quorum_of
from tests.fixtures.lengths import for_each

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.base.config import QuorumConfig
    from dlcore.base.ids import BookieId

SILENCE_S, TIMEOUT_S = 2.0, 7.0
END = "the end"


class Bench:
    """A machine that is validated after each event; entries 0 to `last` of one ensemble."""

    def __init__(self, names: str, quorum: QuorumConfig, last: int) -> None:
        self.machine = RangeReader(
            ledger_id=LEDGER_ID,
            ensemble=Ensemble(0, bookies(names)),
            quorum=quorum,
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

    def wanted(self, now: float = 0.0) -> list[Any]:
        """Say that the caller waits; return the effects, entries by their ids."""
        return [shown(each) for each in self.handle(Wanted(now))]

    def arrived(
        self, name: str, outcome: Sequence[int] | DLError | None, now: float = 0.0, lane: int = 0
    ) -> list[Any]:
        """Say that a stream brought entries of these ids, has failed, or has ended."""
        given = outcome if outcome is None or isinstance(outcome, DLError) else frames(*outcome)
        return [shown(each) for each in self.handle(Arrived(lane, bookie(name), given, now))]


def shown(effect: Effect) -> Any:
    """Return an effect, or the ids of the entries that it hands over, and whether they end."""
    if isinstance(effect, Deliver):
        return [*(entry.entry_id for entry in effect.entries), *([END] if effect.is_last else [])]
    return effect


def frames(*entry_ids: int) -> list[bytes | memoryview]:
    """Return the frames of entries."""
    return [frame_of(each) for each in entry_ids]


def whole(last: int = 9) -> Bench:
    """Return a machine whose bookies have all entries, and whose caller waits; B is asked first."""
    bench = Bench("ABC", quorum_of(3, 3, 2), last)
    opened = OpenStream(bookie=bookie("B"), first_entry_id=0, lane=0)
    assert bench.wanted() == [opened, TickAt(SILENCE_S)]
    return bench


def striped(last: int = 8) -> Bench:
    """Return one with a lane for each of three bookies; each entry is on two of them."""
    bench = Bench("ABC", quorum_of(3, 2, 2), last)
    *opened, _ = bench.wanted()
    assert [(each.bookie, each.lane) for each in opened] == [
        (bookie(name), lane) for lane, name in enumerate("ABC")
    ]
    return bench


def good(name: str) -> NoteRead:
    """Return the effect that notes a good answer."""
    return NoteRead(bookie(name), is_good=True)


def bad(name: str) -> NoteRead:
    """Return the effect that notes a bad answer, or none."""
    return NoteRead(bookie(name), is_good=False)


def fetch(name: str, lane: int = 0) -> FetchNext:
    """Return the effect that reads a stream on."""
    return FetchNext(bookie(name), lane)


def closed(name: str, lane: int = 0) -> CloseStream:
    """Return the effect that closes a stream."""
    return CloseStream(bookie=bookie(name), lane=lane)


def opened(name: str, first: int, lane: int = 0, stride: int = 1) -> OpenStream:
    """Return the effect that opens a stream."""
    return OpenStream(bookie=bookie(name), first_entry_id=first, stride=stride, lane=lane)


def test_a_stream_is_read_on_until_the_last_entry() -> None:
    """The next chunk is fetched while the caller works at the one before."""
    bench = whole(last=3)
    assert bench.arrived("B", []) == [fetch("B")]
    assert bench.arrived("B", [0, 1]) == [good("B"), fetch("B"), [0, 1]]
    assert bench.wanted() == []
    assert bench.arrived("B", [2, 3]) == [good("B"), closed("B"), [2, 3, END]]
    assert bench.machine.state is RangeState.READ


def test_one_chunk_is_read_ahead_while_the_caller_works() -> None:
    """It takes no more memory, and the fetch goes on when the caller has it."""
    bench = whole()
    bench.arrived("B", [0, 1])
    assert bench.arrived("B", [2, 3]) == [good("B")]
    assert bench.wanted() == [fetch("B"), [2, 3]]
    assert bench.arrived("B", [4]) == [good("B")]


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
    failure, *effects = bench.arrived("B", outcome)  # also while the caller works
    assert isinstance(failure, TellFailure)
    assert (failure.bookie, failure.entry_id, type(failure.error)) == (bookie("B"), 2, error)
    assert effects == [*([bad("B")] if is_blamed else []), closed("B"), opened("C", 2)]
    assert bench.arrived("B", [2]) == [], "its stream is closed"


def run_of(frames: Sequence[bytes]) -> FrameRun:
    """Return frames that lie in one buffer, as they come from a socket."""
    return FrameRun.of_sizes(memoryview(b"".join(frames)), np.array(list(map(len, frames))))


def test_frames_in_one_buffer_are_read_as_others_are() -> None:
    """Each stream knows which entry comes next."""
    bench = whole(last=3)
    for first in (0, 2):
        run = run_of([frame_of(first), frame_of(first + 1)])
        *_, given = bench.handle(Arrived(0, bookie("B"), run, 0.0))
        assert shown(given) == [first, first + 1, *([END] if first else [])]
        if not first:
            bench.wanted()


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
    assert [first, *map(shown, effects)] == [
        good("B"),
        bad("B"),
        closed("B"),
        opened("C", 1),
        [0],
    ]


def test_damage_at_the_head_of_a_chunk_is_no_silence() -> None:
    """The bookie did answer, and the next one has its time."""
    bench = whole()
    bench.handle(Arrived(0, bookie("B"), [b"damaged"], 1.5))
    assert bench.handle(Tick(SILENCE_S)) == [TickAt(1.5 + SILENCE_S)]


def test_damage_after_the_last_entry_is_of_no_use() -> None:
    """All that was asked for is there."""
    bench = whole(last=0)
    effects = bench.handle(Arrived(0, bookie("B"), [frame_of(0), b"damaged"], 0.0))
    assert [*map(shown, effects)] == [good("B"), closed("B"), [0, END]]


def test_silence_opens_a_second_stream_and_then_ends_the_first() -> None:
    """It is counted against those that are silent, as long as another one can be asked."""
    bench = whole()
    assert bench.handle(Tick(1.9)) == [TickAt(SILENCE_S)]
    assert bench.handle(Tick(2.0)) == [bad("B"), opened("C", 0), TickAt(4.0)]
    assert bench.handle(Tick(4.0)) == [bad("B"), bad("C"), opened("A", 0), TickAt(6.0)]
    assert bench.handle(Tick(6.0)) == [TickAt(TIMEOUT_S)]
    failure, *effects = bench.handle(Tick(TIMEOUT_S))
    assert isinstance(failure, TellFailure)
    assert isinstance(failure.error, BookieUnavailableError)
    assert effects == [bad("B"), closed("B"), TickAt(8.0)]
    assert bench.arrived("A", [0], 7.5) == [good("A"), closed("C"), fetch("A"), [0]]


def test_a_timer_is_set_once_and_not_at_each_chunk() -> None:
    """It costs more than the rest; it comes early, and is set again for the rest of the time."""
    bench = whole()
    for entry_id in range(5):
        bench.arrived("B", [entry_id], 1.0)
        assert bench.wanted(1.0) == []
    assert bench.handle(Tick(SILENCE_S)) == [TickAt(1.0 + SILENCE_S)]


def test_the_time_of_the_caller_is_no_silence() -> None:
    """However long it took with the entries that it got; there is no tick while it works."""
    bench = whole()
    bench.arrived("B", [0, 1], 1.0)
    assert bench.handle(Tick(100.0)) == []
    assert bench.wanted(100.0) == [TickAt(100.0 + SILENCE_S)]
    assert bench.handle(Tick(101.0)) == [TickAt(100.0 + SILENCE_S)]


def test_the_time_out_of_a_stream_too_begins_when_the_caller_waits() -> None:
    """The silence of the lane is over first."""
    bench = whole()
    bench.arrived("B", [0, 1], 1.0)
    bench.wanted(100.0)
    assert bench.handle(Tick(102.0)) == [bad("B"), opened("C", 2), TickAt(104.0)]


def test_a_stream_that_sends_chunks_without_entries_is_not_silent() -> None:
    """Its time-out begins at each chunk."""
    bench = whole()
    bench.arrived("B", [], TIMEOUT_S - 1)
    assert bench.handle(Tick(TIMEOUT_S)) == [TickAt(TIMEOUT_S - 1 + SILENCE_S)]


def fail_all(bench: Bench, names: str, lane: int = 0) -> Any:
    """Let each replica of a lane say no; return the last effect."""
    for name in names:
        effects = bench.arrived(name, NoSuchEntryError("not here"), lane=lane)
    return effects[-1]


def test_when_all_have_failed_the_error_follows_the_received_entries() -> None:
    """The caller gets it when it comes back; no replica is asked before it needs one."""
    bench = whole()
    bench.arrived("B", [0])
    effects = bench.handle(Arrived(0, bookie("B"), [frame_of(1), b"damaged"], 0.0))
    assert effects[-1] == closed("B")
    assert bench.wanted() == [opened("C", 2), [1]]
    assert fail_all(bench, "CA") == closed("A")
    (failed,) = bench.wanted()
    assert isinstance(failed, Fail)
    assert "no replica returned entry 2" in str(failed.error)
    assert bench.machine.state is RangeState.FAILED
    assert bench.arrived("B", [2]) == []


def test_the_error_is_handed_to_a_caller_that_waits() -> None:
    """At once, since no entry comes before it."""
    bench = whole()
    failed = fail_all(bench, "BCA")
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, LedgerReadError)


def test_lanes_are_merged_in_order() -> None:
    """A lane is read on by one chunk while its entries wait for those of others."""
    bench = striped()
    assert bench.arrived("B", [1], lane=1) == [good("B"), fetch("B", 1)]
    assert bench.arrived("B", [4], lane=1) == [good("B")]
    assert bench.arrived("A", [0, 3, 6], lane=0) == [good("A"), closed("A", 0), [0, 1]]
    assert bench.wanted() == [fetch("B", 1)]
    assert bench.arrived("C", [2, 5, 8], lane=2) == [good("C"), closed("C", 2), [2, 3, 4, 5, 6]]
    assert bench.wanted() == []
    assert bench.arrived("B", [7], lane=1) == [good("B"), closed("B", 1), [7, 8, END]]


def test_the_error_of_a_lane_waits_for_its_turn() -> None:
    """Entries of other lanes come before it."""
    bench = striped()
    fail_all(bench, "CA", lane=2)
    bench.arrived("B", [1], lane=1)
    assert bench.machine.state is RangeState.WAITING
    assert bench.arrived("A", [0], lane=0)[-1] == [0, 1]
    (failed,) = bench.wanted()
    assert isinstance(failed, Fail)
    assert "no replica returned entry 2" in str(failed.error)


def test_lanes_that_fail_one_after_the_other() -> None:
    """The error of the first entry that is missing is raised, whichever lane failed first."""
    bench = striped()
    for lane, names in ((2, "CA"), (1, "BC")):
        assert not isinstance(fail_all(bench, names, lane), Fail)
    bench.arrived("A", [0], lane=0)
    (failed,) = bench.wanted()
    assert isinstance(failed, Fail)
    assert "no replica returned entry 1" in str(failed.error)


def test_silence_counts_for_lanes_without_entries_only() -> None:
    """Others wait for their turn, and a lane that is done has nothing to ask for."""
    bench = striped()
    bench.arrived("A", [0, 3, 6], lane=0)
    bench.wanted()
    bench.arrived("B", [1], lane=1)
    bench.wanted()
    bench.arrived("B", [4], lane=1)
    asked = [each for each in bench.handle(Tick(SILENCE_S)) if isinstance(each, OpenStream)]
    assert asked == [opened("A", 2, lane=2, stride=3)]


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_defect_is_raised_in_the_caller(*, is_waiting: bool) -> None:
    """At once, or when it comes back."""
    bench = whole()
    defect = RuntimeError("a defect")
    if not is_waiting:
        bench.arrived("B", [0])
        bench.arrived("B", [1])
        assert bench.handle(Broke(defect)) == []
        assert bench.wanted() == [Fail(defect)]
    else:
        assert bench.handle(Broke(defect)) == [Fail(defect)]


class RandomRange:
    """Bookies that miss, damage and withhold entries, and a caller that is slow at times."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.last = rng.randint(0, 20)
        quorum, self.stride = rng.choice(((quorum_of(3, 3, 2), 1), (quorum_of(3, 2, 2), 3)))
        self.bench = Bench("ABC", quorum, self.last)
        self.lost = {
            (name, each) for name in "ABC" for each in range(self.last + 1) if rng.random() < 0.2
        }
        self.fetches: dict[tuple[int, BookieId], int] = {}  # what is fetched, and its first entry
        self.idle: dict[tuple[int, BookieId], int] = {}
        self.tick_at: float | None = None
        self.now = 0.0
        self.is_waiting = False
        self.end: Deliver | Fail | None = None
        self.delivered: list[int] = []

    def perform(self, effects: Sequence[Effect]) -> None:
        """Do what a driver does, and check that it may be asked for."""
        for effect in effects:
            match effect:
                case OpenStream():
                    key = (effect.lane, effect.bookie)
                    assert key not in self.fetches | self.idle
                    assert effect.first_entry_id <= self.last
                    assert effect.stride == self.stride
                    self.fetches[key] = effect.first_entry_id
                case FetchNext(name, lane):
                    self.fetches[lane, name] = self.idle.pop((lane, name))
                case CloseStream():
                    streams = self.fetches | self.idle
                    del streams[effect.lane, effect.bookie]
                    self.fetches = {key: streams[key] for key in self.fetches if key in streams}
                    self.idle = {key: streams[key] for key in self.idle if key in streams}
                case Deliver(entries, is_last):
                    assert self.is_waiting
                    assert entries
                    self.is_waiting = False
                    self.end = effect if is_last else None
                    self.delivered += [entry.entry_id for entry in entries]
                case Fail():
                    assert self.is_waiting
                    self.end = effect
                case TickAt(at_s):
                    assert self.tick_at is None
                    self.tick_at = at_s
                case NoteRead() | TellFailure():
                    pass

    def step(self) -> Event:
        """Return what happens next."""
        events: list[Callable[[], Event]] = [self.arrival for _ in self.fetches]
        if not self.is_waiting:
            events.append(self.want)
        if self.tick_at is not None:
            events.append(self.tick)
        return self.rng.choice(events)()

    def want(self) -> Event:
        """Let the caller come back after a while."""
        self.is_waiting = True
        self.now += self.rng.choice((0.0, 10.0))
        return Wanted(self.now)

    def tick(self) -> Event:
        """Let the time of the timer come, or a little more."""
        assert self.tick_at is not None
        self.now = max(self.now, self.tick_at + self.rng.choice((0.0, 0.1)))
        self.tick_at = None
        return Tick(self.now)

    def arrival(self) -> Event:
        """Let a fetch end with some entries up to the first one that is lost."""
        lane, name = key = self.rng.choice(sorted(self.fetches))
        first = self.idle[key] = self.fetches.pop(key)
        found = []
        for entry_id in range(first, self.last + 1, self.stride):
            if (name.name, entry_id) in self.lost or self.rng.random() < 0.2:
                break
            found.append(entry_id)
        self.idle[key] = after = first + self.stride * len(found)
        given = frames(*found)
        if (name.name, after) in self.lost:
            if not given:
                answers = (NoSuchEntryError("not here"), BookieOverloadedError("busy"), None)
                return Arrived(lane, name, self.rng.choice(answers), self.now)
            if self.rng.random() < 0.5:
                given.append(b"damaged")
        return Arrived(lane, name, given, self.now)


@for_each(range(300))
def test_each_entry_that_a_bookie_has_is_handed_over_once_and_in_order(seed: int) -> None:
    """The read fails only at an entry that no bookie of its lane has given."""
    world = RandomRange(seed)
    world.perform(world.bench.handle(world.want()))
    for _ in range(2000):
        if world.end is not None:
            break
        world.perform(world.bench.handle(world.step()))
    delivered = world.delivered
    assert delivered == list(range(len(delivered)))
    if isinstance(world.end, Fail):
        assert isinstance(world.end.error, LedgerReadError)
        assert f"no replica returned entry {len(delivered)}:" in str(world.end.error)
    else:
        assert world.end is not None
        assert delivered == list(range(world.last + 1))
        assert not world.fetches | world.idle, "each stream is closed"
