"""Reads a range of entries from the replicas of a write set: which to ask, and when it failed.

Theory of operation.  A range of one ensemble is read in *lanes*: entries with the same write set.
If every bookie has every entry (E = Qw), that is one lane.  If entries are striped, there are E
lanes, each with every E-th entry.  A lane has one open stream at a time, which starts at the next
needed entry.  A stream that fails, ends early or sends damaged bytes is replaced by one from
another replica, at the first entry still needed.  If a stream is silent, a second one is opened
beside it, and the one that delivers first stays.  The lane fails only when every replica has failed
for the same entry; the error names the answer of each.

A failure counts against a replica only for the entry that it was about.

`RangeReader` verifies what arrives, measures silence, and merges the lanes.  A lane whose entries
wait for their turn is not read on.  Damage counts as an answer, not as silence.  The caller's time
is not the bookies' silence: that is measured from when the caller took entries last.

The driver is `dlcore.ledger.reading.range_read_driver`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, assert_never

from dlcore.base.errors import (
    BookieStorageError,
    BookieUnavailableError,
    DigestMismatchError,
    DLError,
    LedgerReadError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from dlcore.base.machines import Machine, State, Transitions
from dlcore.ledger.metadata.values import write_set
from dlcore.wire.frames import FrameRun, decode_frame, decode_run

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dlcore.base.config import QuorumConfig
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import Ensemble
    from dlcore.wire.frames import EntryFrame


class RangeState(State):
    """The state of the machine; FAILING and READ are final."""

    READY = "no stream is open yet"
    READING = "the next entries are read, or wait to be taken"
    FAILING = "no replica of a lane has its next entry; those before it may still be taken"
    READ = "all entries were taken"


_S = RangeState
TRANSITIONS = Transitions(
    _S.READY,
    {
        _S.READY: {_S.READING: "begin"},
        _S.READING: {_S.READ: "the last entry is taken", _S.FAILING: "every replica failed"},
        _S.FAILING: {},
        _S.READ: {},
    },
)


Frames: TypeAlias = "Sequence[bytes | memoryview]"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStream:
    """Effect: read from `bookie`, starting with `first_entry_id`, and fetch the first chunk."""

    bookie: BookieId
    first_entry_id: int
    lane: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStream:
    """Effect: nothing more is needed of `bookie`'s stream."""

    bookie: BookieId
    lane: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Effect: these entries come next."""

    entries: Sequence[EntryFrame]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRead:
    """Effect: no replica could give the next entry."""

    error: LedgerReadError


LaneEffect: TypeAlias = OpenStream | CloseStream | Deliver | FailRead


class ReadLane:
    """Entries `first_entry_id`, + `stride`, … up to `last_entry_id` from the given replicas."""

    def __init__(
        self,
        *,
        ledger_id: int,
        replicas: Sequence[BookieId],
        first_entry_id: int,
        last_entry_id: int,
        stride: int,
        number: int = 0,
    ) -> None:
        assert replicas
        assert stride >= 1
        self.next_entry_id = first_entry_id
        self.last_entry_id = last_entry_id
        self.stride = stride
        self.number = number
        self._ledger_id = ledger_id
        self._order = list(replicas)  # the order to ask in; one that fails goes to the end
        self._open: set[BookieId] = set()
        self._answers: dict[BookieId, DLError] = {}  # failures for the next entry

    @property
    def is_done(self) -> bool:
        """Whether every entry was delivered."""
        return self.next_entry_id > self.last_entry_id

    def start(self) -> list[LaneEffect]:
        """Open the first stream."""
        return [] if self.is_done else self._ask_another()

    def received(self, bookie: BookieId, entries: Sequence[EntryFrame]) -> list[LaneEffect]:
        """Take verified entries of an open stream, in the stream's order."""
        if bookie not in self._open:
            return []
        fresh = [entry for entry in entries if entry.entry_id >= self.next_entry_id]
        if not fresh:
            return []
        assert fresh[0].entry_id == self.next_entry_id
        self.next_entry_id = fresh[-1].entry_id + self.stride
        self._answers.clear()
        keep = set() if self.is_done else {bookie}
        closed = [each for each in self._order if each in self._open - keep]
        self._open &= keep
        return [
            Deliver(entries=fresh),
            *(CloseStream(bookie=each, lane=self.number) for each in closed),
        ]

    def failed(self, bookie: BookieId, error: DLError) -> list[LaneEffect]:
        """Take the end of an open stream before its last entry, whatever the reason."""
        if bookie not in self._open:
            return []
        self._open.discard(bookie)
        self._answers[bookie] = error
        self._order.remove(bookie)
        self._order.append(bookie)
        return self._ask_another() or self._give_up()

    def silent(self) -> list[LaneEffect]:
        """Nothing came for a while: ask another replica too, if one is left."""
        # A lane that is done hears of the silence of others, too.
        return [] if self.is_done else self._ask_another()

    def _ask_another(self) -> list[LaneEffect]:
        for bookie in self._order:
            if bookie not in self._open and bookie not in self._answers:
                self._open.add(bookie)
                first = self.next_entry_id
                return [OpenStream(bookie=bookie, first_entry_id=first, lane=self.number)]
        return []

    def _give_up(self) -> list[LaneEffect]:
        if self._open:
            return []  # one may still answer
        answers = "; ".join(
            f"{bookie}: {type(error).__name__}: {error}" for bookie, error in self._answers.items()
        )
        return [
            FailRead(
                error=LedgerReadError(
                    f"ledger {self._ledger_id}: no replica returned entry {self.next_entry_id}: "
                    f"{answers}",
                    is_damaged=all(
                        isinstance(error, DigestMismatchError | BookieStorageError)
                        for error in self._answers.values()
                    ),
                )
            )
        ]


def plan_lanes(
    *,
    ledger_id: int,
    ensemble: Ensemble,
    quorum: QuorumConfig,
    first_entry_id: int,
    last_entry_id: int,
    suspects: Collection[BookieId] = (),
) -> list[ReadLane]:
    """Return the lanes of a range within one ensemble: entry e is in lane (e - first) % count.

    Neighbouring ranges and ledgers start at different replicas, so that readers spread over them.
    Bookies that are `suspects` are asked last.
    """
    size = quorum.ensemble_size
    is_striped = size > quorum.write_quorum_size
    lane_count = min(size if is_striped else 1, last_entry_id - first_entry_id + 1)
    lanes: list[ReadLane] = []
    for first in range(first_entry_id, first_entry_id + lane_count):
        positions = write_set(quorum, first)
        start = 0 if is_striped else ledger_id % len(positions)
        replicas = [ensemble.bookies[p] for p in (*positions[start:], *positions[:start])]
        replicas.sort(key=lambda bookie: bookie in suspects)  # stable: keeps the order of the rest
        lanes.append(
            ReadLane(
                ledger_id=ledger_id,
                replicas=replicas,
                first_entry_id=first,
                last_entry_id=last_entry_id,
                stride=size if is_striped else 1,
                number=len(lanes),
            )
        )
    return lanes


# The whole range.  `now` is any clock's time in seconds.


class Begin(NamedTuple):
    """Event: open the first streams."""

    now: float


class Arrived(NamedTuple):
    """Event: the next chunk of an open stream, its error, or None, if it has ended."""

    lane: int
    bookie: BookieId
    outcome: Frames | DLError | None
    now: float


class Tick(NamedTuple):
    """Event: it is so late; say it when `deadline_s` has come."""

    now: float


class Taken(NamedTuple):
    """Event: the caller has done what it does with the entries of `take`."""

    now: float


Event: TypeAlias = Begin | Arrived | Tick | Taken


class FetchNext(NamedTuple):
    """Effect: fetch the next chunk of an open stream."""

    bookie: BookieId
    lane: int


class NoteRead(NamedTuple):
    """Effect: note how a bookie answered, for the next choice of a replica."""

    bookie: BookieId
    is_good: bool


class TellFailure(NamedTuple):
    """Effect: log why a stream is given up."""

    bookie: BookieId
    entry_id: int
    error: DLError


Effect: TypeAlias = OpenStream | CloseStream | FetchNext | NoteRead | TellFailure


@dataclass(slots=True)
class _Stream:
    next_entry_id: int
    since: float  # when its present chunk began to be fetched


class _Lane:
    def __init__(self, machine: ReadLane) -> None:
        self.machine = machine
        self.quiet_since = 0.0
        self.streams: dict[BookieId, _Stream] = {}
        self.ready: deque[Sequence[EntryFrame]] = deque()  # chunks that wait for their turn
        self.taken = 0  # entries of the first ready chunk that are merged already
        self.error: DLError | None = None


class RangeReader(Machine[RangeState]):
    """Reads one range in its lanes, and merges them.

    Args:
        lanes: those of `plan_lanes`.
        silence_s: after this time without a chunk a lane asks another replica, too.
        timeout_s: after this time without a chunk a stream has failed.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        lanes: Iterable[ReadLane],
        *,
        ledger_id: int,
        first_entry_id: int,
        last_entry_id: int,
        silence_s: float,
        timeout_s: float,
    ) -> None:
        self.state = RangeState.READY
        self._lanes = [_Lane(machine) for machine in lanes]
        self._ledger_id = ledger_id
        self._first = self._next = first_entry_id
        self._last = last_entry_id
        self._silence_s = silence_s
        self._timeout_s = timeout_s

    @property
    def is_done(self) -> bool:
        """Whether every entry was taken."""
        return self.state is RangeState.READ

    def is_waiting(self, lane: int) -> bool:
        """Return whether a lane has no entries that wait for their turn: then it is read on."""
        return not self._lanes[lane].ready

    @property
    def deadline_s(self) -> float:
        """When a stream that is silent until then should be given up, or another one be opened."""
        deadline_s = math.inf
        for lane in self._lanes:
            if lane.streams and not lane.ready:
                deadline_s = min(deadline_s, lane.quiet_since + self._silence_s)
                for stream in lane.streams.values():
                    deadline_s = min(deadline_s, stream.since + self._timeout_s)
        return deadline_s

    def take(self) -> Sequence[EntryFrame]:
        """Return the entries that come next, as far as they have arrived.

        Raises: LedgerReadError: every replica failed for the next one.
        """
        entries = self._merged() if len(self._lanes) > 1 else self._next_chunk(self._lanes[0])
        if entries:
            self._next = entries[-1].entry_id + 1
            if self._next > self._last:
                self._become(RangeState.READ)
        return entries

    @staticmethod
    def _next_chunk(lane: _Lane) -> Sequence[EntryFrame]:
        if lane.ready:
            return lane.ready.popleft()
        if lane.error is not None:
            raise lane.error
        return ()

    def _merged(self) -> Sequence[EntryFrame]:
        """Return entries of several lanes: lane k reads every n-th entry from the k-th on."""
        merged: list[EntryFrame] = []
        for entry_id in range(self._next, self._last + 1):
            lane = self._lanes[(entry_id - self._first) % len(self._lanes)]
            if not lane.ready:
                return merged or self._next_chunk(lane)
            chunk = lane.ready[0]
            merged.append(chunk[lane.taken])
            lane.taken += 1
            if lane.taken == len(chunk):
                lane.ready.popleft()
                lane.taken = 0
        return merged

    def handle(self, event: Event) -> list[Effect]:
        """Return the effects of an event."""
        match event:
            case Arrived(number, bookie, outcome, now):
                if outcome is None:
                    outcome = BookieStorageError("the stream ended before its last entry")
                lane = self._lanes[number]
                if isinstance(outcome, DLError):
                    return self._failed(lane, bookie, outcome, now)
                return self._arrived(lane, bookie, outcome, now)
            case Tick(now):
                waiting = (lane for lane in self._lanes if not lane.ready)
                return [effect for lane in waiting for effect in self._on_time(lane, now)]
            case Taken(now):
                for lane in self._lanes:
                    lane.quiet_since = now
                    for stream in lane.streams.values():
                        stream.since = now
                return []
            case Begin(now):
                self._become(RangeState.READING)
                effects: list[Effect] = []
                for lane in self._lanes:
                    lane.quiet_since = now
                    effects += self._perform(lane, lane.machine.start(), now)
                return effects
            case _:
                assert_never(event)

    def _arrived(self, lane: _Lane, bookie: BookieId, frames: Frames, now: float) -> list[Effect]:
        stream = lane.streams[bookie]
        entries, damage = self._verified(stream, frames, lane.machine.stride)
        lane.quiet_since = now
        effects: list[Effect] = [NoteRead(bookie, is_good=True)] if entries else []
        effects += self._perform(lane, lane.machine.received(bookie, entries), now)
        if bookie not in lane.streams:
            return effects
        if damage is not None:
            return effects + self._failed(lane, bookie, damage, now)
        stream.since = now
        return [*effects, FetchNext(bookie, lane.machine.number)]

    def _verified(
        self, stream: _Stream, frames: Frames, stride: int
    ) -> tuple[Sequence[EntryFrame], DLError | None]:
        """Return the good entries at the head of a chunk, and the error of the next one, if any."""
        ledger_id, first = self._ledger_id, stream.next_entry_id
        # All frames in one pass over their memory; only a run with damage goes frame by frame.
        if isinstance(frames, FrameRun):
            sound = decode_run(frames, ledger_id=ledger_id, first_entry_id=first, stride=stride)
            if sound is not None:
                stream.next_entry_id += stride * len(sound)
                return sound, None
        entries: list[EntryFrame] = []
        for frame in frames:
            try:
                entry = decode_frame(frame, ledger_id=ledger_id, entry_id=stream.next_entry_id)
            except DLError as error:
                return entries, error
            entries.append(entry)
            stream.next_entry_id += stride
        return entries, None

    def _failed(self, lane: _Lane, bookie: BookieId, error: DLError, now: float) -> list[Effect]:
        stream = lane.streams.pop(bookie)
        effects: list[Effect] = [
            TellFailure(bookie, stream.next_entry_id, error),
            CloseStream(bookie=bookie, lane=lane.machine.number),
        ]
        if not isinstance(error, NoSuchEntryError | NoSuchLedgerError):  # these are valid answers
            effects.append(NoteRead(bookie, is_good=False))
        return effects + self._perform(lane, lane.machine.failed(bookie, error), now)

    def _on_time(self, lane: _Lane, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for bookie, stream in list(lane.streams.items()):
            if now >= stream.since + self._timeout_s:
                late = BookieUnavailableError(f"no answer within {self._timeout_s} s")
                effects += self._failed(lane, bookie, late, now)
        if now >= lane.quiet_since + self._silence_s:
            # Not yet an error: the next replica is asked too, and the first answer is taken.
            lane.quiet_since = now
            silent = list(lane.streams)
            if asked := lane.machine.silent():
                effects += [NoteRead(bookie, is_good=False) for bookie in silent]
            effects += self._perform(lane, asked, now)
        return effects

    def _perform(self, lane: _Lane, asked: Iterable[LaneEffect], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for effect in asked:
            match effect:
                case OpenStream(bookie=bookie, first_entry_id=first):
                    lane.streams[bookie] = _Stream(first, now)
                    effects.append(effect)
                case CloseStream(bookie=bookie):
                    del lane.streams[bookie]
                    effects.append(effect)
                case Deliver(entries=entries):
                    lane.ready.append(entries)
                case FailRead(error=error):
                    lane.error = error
                    if self.state is RangeState.READING:
                        self._become(RangeState.FAILING)
                case _:
                    assert_never(effect)
        return effects

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        has_failed = any(lane.error is not None for lane in self._lanes)
        assert has_failed == (self.state is RangeState.FAILING)
        assert (self._next > self._last) == (self.state is RangeState.READ)
        for lane in self._lanes:
            assert set(lane.streams) == lane.machine._open
            assert (lane.error is None) or not lane.streams
            assert not lane.taken or lane.taken < len(lane.ready[0])
            is_at_work = bool(lane.streams) or lane.error is not None
            assert is_at_work != lane.machine.is_done
