"""Reads a range of entries from the replicas of a write set: which to ask, and when it failed.

Theory of operation.  A range of one ensemble is read in *lanes*: entries with the same write set.
If every bookie has every entry (E = Qw), that is one lane.  If entries are striped, there are E
lanes, each with every E-th entry.  A lane has one open stream at a time, which starts at the next
needed entry.  A stream that fails, ends early or sends damaged bytes is replaced by one from
another replica, at the first entry still needed.  If a stream is silent, a second one is opened
beside it, and the one that delivers first stays.  The lane fails only when every replica has failed
for the same entry; the error names the answer of each.

A failure counts against a replica only for the entry that it was about.

The caller asks for entries, works at them, and asks again.  Lanes are read ahead meanwhile, each by
one chunk.  While the caller waits, a lane whose chunk waits for those of other lanes is read on by
one more.  An error is handed over after the entries before it.  Silence is measured while the
caller waits: the time that it works is not the bookies' silence, and damage is an answer.

The driver is `dlcore.ledger.reading.range_read_driver`.
"""

from __future__ import annotations

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
    from collections.abc import Collection, Sequence

    from dlcore.base.config import QuorumConfig
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import Ensemble
    from dlcore.wire.frames import EntryFrame


class RangeState(State):
    """The state of the machine; READ and FAILED are final."""

    READY = "no stream is open yet"
    WAITING = "the caller waits for the entries that come next"
    READING_AHEAD = "the caller works at entries, and the next ones are read ahead"
    READ = "the last entries were handed over"
    FAILED = "the caller got an error"


_READY, _WAITING, _READING_AHEAD, _READ, _FAILED = RangeState

TRANSITIONS = Transitions(
    _READY,
    {
        _READY: {_WAITING: "entries are wanted"},
        _WAITING: {
            _READING_AHEAD: "entries are handed over",
            _READ: "the last entries are handed over",
            _FAILED: "every replica failed for the next one, or a defect",
        },
        _READING_AHEAD: {_WAITING: "more entries are wanted"},
        _READ: {},
        _FAILED: {},
    },
)

_READY_MAX = 2
"""The chunks of a lane that wait for their turn, at most."""

Frames: TypeAlias = "Sequence[bytes | memoryview]"

# Times are of any clock, in seconds.


class Wanted(NamedTuple):
    """Event: the caller waits for the entries that come next; the first one opens the streams."""

    now: float


class Arrived(NamedTuple):
    """Event: the next chunk of an open stream, its error, or None, if it has ended."""

    lane: int
    bookie: BookieId
    outcome: Frames | DLError | None
    now: float


class Tick(NamedTuple):
    """Event: the time of `TickAt` has come."""

    now: float


class Broke(NamedTuple):
    """Event: nothing can go on, because of a defect."""

    error: BaseException


Event: TypeAlias = Wanted | Arrived | Tick | Broke


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStream:
    """Effect: read entries first, first + `stride`, … from `bookie`, and fetch the first chunk."""

    bookie: BookieId
    first_entry_id: int
    stride: int = 1
    lane: int = 0


class FetchNext(NamedTuple):
    """Effect: fetch the next chunk of an open stream."""

    bookie: BookieId
    lane: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStream:
    """Effect: nothing more is needed of `bookie`'s stream."""

    bookie: BookieId
    lane: int = 0


class Deliver(NamedTuple):
    """Effect: these entries come next, for the waiting caller."""

    entries: Sequence[EntryFrame]
    is_last: bool


class Fail(NamedTuple):
    """Effect: the waiting caller gets this error; nothing follows."""

    error: BaseException


class TickAt(NamedTuple):
    """Effect: feed a `Tick` at this time; there is one such time at most."""

    at_s: float


class NoteRead(NamedTuple):
    """Effect: note how a bookie answered, for the next choice of a replica."""

    bookie: BookieId
    is_good: bool


class TellFailure(NamedTuple):
    """Effect: log why a stream is given up."""

    bookie: BookieId
    entry_id: int
    error: DLError


Effect: TypeAlias = (
    OpenStream | FetchNext | CloseStream | Deliver | Fail | TickAt | NoteRead | TellFailure
)


@dataclass(slots=True)
class _Stream:
    next_entry_id: int
    since: float  # when its present chunk began to be fetched
    is_fetching: bool = True


class ReadLane:
    """Entries `first_entry_id`, + `stride`, … up to `last_entry_id` from the given replicas.

    It chooses the replicas to ask, and keeps the chunks that wait for their turn.
    """

    def __init__(
        self,
        *,
        replicas: Sequence[BookieId],
        first_entry_id: int,
        last_entry_id: int,
        stride: int,
        number: int = 0,
    ) -> None:
        assert replicas
        assert stride >= 1
        self.next_entry_id = first_entry_id  # the next one to arrive
        self.last_entry_id = last_entry_id
        self.stride = stride
        self.number = number
        self.streams: dict[BookieId, _Stream] = {}  # the open ones
        self.ready: deque[Sequence[EntryFrame]] = deque()  # chunks that wait for their turn
        self.taken = 0  # entries of the first ready chunk that are handed over already
        self.quiet_since = 0.0
        self._order = list(replicas)  # the order to ask in; one that fails goes to the end
        self._answers: dict[BookieId, DLError] = {}  # failures for the next entry

    @property
    def is_done(self) -> bool:
        """Whether every entry has arrived."""
        return self.next_entry_id > self.last_entry_id

    @property
    def is_awaited(self) -> bool:
        """Whether only a bookie can go on, so that its silence counts."""
        return bool(self.streams) and not self.ready

    @property
    def has_failed(self) -> bool:
        """Whether every replica has failed for the next entry to arrive."""
        return len(self._answers) == len(self._order)

    def restart_clocks(self, now: float) -> None:
        """Measure all silence from now on."""
        self.quiet_since = now
        for stream in self.streams.values():
            stream.since = now

    def received(self, bookie: BookieId, entries: Sequence[EntryFrame]) -> list[CloseStream]:
        """Take verified entries of an open stream; no other stream is needed after new ones."""
        if not entries or entries[-1].entry_id < self.next_entry_id:
            return []
        if entries[0].entry_id < self.next_entry_id:  # another stream was faster
            entries = [entry for entry in entries if entry.entry_id >= self.next_entry_id]
        assert entries[0].entry_id == self.next_entry_id
        self.next_entry_id = entries[-1].entry_id + self.stride
        self._answers.clear()
        self.ready.append(entries)
        return [self._close(each) for each in [*self.streams] if self.is_done or each != bookie]

    def failed(self, bookie: BookieId, error: DLError) -> CloseStream:
        """Take the end of an open stream before its last entry, whatever the reason."""
        self._answers[bookie] = error
        self._order.remove(bookie)
        self._order.append(bookie)
        return self._close(bookie)

    def silent(self, now: float) -> list[OpenStream]:
        """Nothing came for a while: ask another replica too, if one is left."""
        return self._ask_another(now)

    def read_on(self, now: float, *, ready_max: int) -> list[OpenStream | FetchNext]:
        """Have a chunk fetched of each open stream, or one opened, while too few chunks wait."""
        if len(self.ready) >= ready_max:
            return []
        if not self.streams:
            return [] if self.is_done else [*self._ask_another(now)]
        idle = [bookie for bookie, stream in self.streams.items() if not stream.is_fetching]
        for bookie in idle:
            self.streams[bookie].is_fetching = True
        return [FetchNext(bookie, self.number) for bookie in idle]

    def _ask_another(self, now: float) -> list[OpenStream]:
        for bookie in self._order:
            if bookie not in self.streams and bookie not in self._answers:
                first = self.next_entry_id
                self.streams[bookie] = _Stream(first, now)
                opened = OpenStream(
                    bookie=bookie, first_entry_id=first, stride=self.stride, lane=self.number
                )
                return [opened]
        return []

    def _close(self, bookie: BookieId) -> CloseStream:
        del self.streams[bookie]
        return CloseStream(bookie=bookie, lane=self.number)

    def failure(self, ledger_id: int) -> LedgerReadError:
        """Return the error that names the answer of each replica."""
        answers = "; ".join(
            f"{bookie}: {type(error).__name__}: {error}" for bookie, error in self._answers.items()
        )
        return LedgerReadError(
            f"ledger {ledger_id}: no replica returned entry {self.next_entry_id}: {answers}",
            is_damaged=all(
                isinstance(error, DigestMismatchError | BookieStorageError)
                for error in self._answers.values()
            ),
        )

    def validate(self) -> None:
        """Assert all that holds between two events, once the lane has begun."""
        assert not self.taken or self.taken < len(self.ready[0])
        assert len(self.ready) <= _READY_MAX
        assert not (self.streams and self.is_done)
        assert self.streams.keys().isdisjoint(self._answers)
        # It is at work, unless it has enough, or all that it can get.
        is_fetching = all(each.is_fetching for each in self.streams.values())
        is_at_work = bool(self.streams) and is_fetching
        assert is_at_work or self.ready or self.is_done or self.has_failed


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
                replicas=replicas,
                first_entry_id=first,
                last_entry_id=last_entry_id,
                stride=size if is_striped else 1,
                number=len(lanes),
            )
        )
    return lanes


class RangeReader(Machine[RangeState]):
    """Reads one range within one ensemble in the lanes of `plan_lanes`, and merges them.

    Args:
        ledger_id, ensemble, quorum, first_entry_id, last_entry_id, suspects: as for `plan_lanes`.
        silence_s: after this time without a chunk a lane asks another replica, too.
        timeout_s: after this time without a chunk a stream has failed.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        *,
        ledger_id: int,
        ensemble: Ensemble,
        quorum: QuorumConfig,
        first_entry_id: int,
        last_entry_id: int,
        suspects: Collection[BookieId] = (),
        silence_s: float,
        timeout_s: float,
    ) -> None:
        self.state = _READY
        self._lanes = plan_lanes(
            ledger_id=ledger_id,
            ensemble=ensemble,
            quorum=quorum,
            first_entry_id=first_entry_id,
            last_entry_id=last_entry_id,
            suspects=suspects,
        )
        self._ledger_id = ledger_id
        self._first = self._next = first_entry_id
        self._last = last_entry_id
        self._silence_s = silence_s
        self._timeout_s = timeout_s
        self._is_timed = False  # whether a tick will come
        self._error: BaseException | None = None  # of a defect

    @property
    def _is_over(self) -> bool:
        return self.state is _READ or self.state is _FAILED

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; those that come late do no harm."""
        if self._is_over:
            return []
        effects: list[Effect] = []
        match event:
            case Arrived(number, bookie, outcome, now):
                lane = self._lanes[number]
                if bookie in lane.streams:
                    effects = self._arrived(lane, bookie, outcome, now)
            case Wanted(now):
                self._become(_WAITING)
                for lane in self._lanes:
                    lane.restart_clocks(now)
            case Tick(now):
                self._is_timed = False
                if self.state is _WAITING:
                    awaited = [lane for lane in self._lanes if lane.is_awaited]
                    effects = [effect for lane in awaited for effect in self._on_time(lane, now)]
            case Broke(error):
                self._error = error
                return self._given() if self.state is _WAITING else []
            case _:
                assert_never(event)
        return effects + self._go_on(now)

    # The caller

    def _go_on(self, now: float) -> list[Effect]:
        """Hand over what comes next, if it is awaited, and read on."""
        given = self._given() if self.state is _WAITING else []
        if self._is_over:
            return given
        is_waiting = self.state is _WAITING
        # A chunk that waits for those of slower lanes does not slow its own lane down.
        ready_max = _READY_MAX if is_waiting else 1
        effects: list[Effect] = []
        for lane in self._lanes:
            effects += lane.read_on(now, ready_max=ready_max)
        # Deadlines only move on, so that a tick may come too early, and is never needed sooner.
        if is_waiting and not self._is_timed:
            self._is_timed = True
            effects.append(TickAt(self._deadline_s()))
        return effects + given

    def _given(self) -> list[Effect]:
        """Return the entries that come next, or an error; nothing while none is there."""
        if self._error is not None:
            return self._fail(self._error)
        entries = self._merged() if len(self._lanes) > 1 else self._next_chunk()
        if entries:
            self._next = entries[-1].entry_id + 1
            is_last = self._next > self._last
            self._become(_READ if is_last else _READING_AHEAD)
            return [Deliver(entries, is_last)]
        lane = self._lane_of(self._next)
        return self._fail(lane.failure(self._ledger_id)) if lane.has_failed else []

    def _fail(self, error: BaseException) -> list[Effect]:
        self._become(_FAILED)
        return [Fail(error)]

    def _next_chunk(self) -> Sequence[EntryFrame]:
        ready = self._lanes[0].ready
        return ready.popleft() if ready else ()

    def _merged(self) -> Sequence[EntryFrame]:
        """Return the entries of several lanes that come next."""
        merged: list[EntryFrame] = []
        for entry_id in range(self._next, self._last + 1):
            lane = self._lane_of(entry_id)
            if not lane.ready:
                break
            chunk = lane.ready[0]
            merged.append(chunk[lane.taken])
            lane.taken += 1
            if lane.taken == len(chunk):
                lane.ready.popleft()
                lane.taken = 0
        return merged

    def _lane_of(self, entry_id: int) -> ReadLane:
        """Return the lane of an entry: lane k reads every n-th one from the k-th on."""
        return self._lanes[(entry_id - self._first) % len(self._lanes)]

    # The bookies

    def _arrived(
        self, lane: ReadLane, bookie: BookieId, outcome: Frames | DLError | None, now: float
    ) -> list[Effect]:
        if outcome is None:
            outcome = BookieStorageError("the stream ended before its last entry")
        if isinstance(outcome, DLError):
            return self._failed(lane, bookie, outcome)
        stream = lane.streams[bookie]
        stream.is_fetching = False
        stream.since = lane.quiet_since = now
        entries, damage = self._verified(stream, outcome, lane.stride)
        effects: list[Effect] = [NoteRead(bookie, is_good=True)] if entries else []
        effects += lane.received(bookie, entries)
        if damage is not None and bookie in lane.streams:
            effects += self._failed(lane, bookie, damage)
        return effects

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

    def _failed(self, lane: ReadLane, bookie: BookieId, error: DLError) -> list[Effect]:
        effects: list[Effect] = [TellFailure(bookie, lane.streams[bookie].next_entry_id, error)]
        if not isinstance(error, NoSuchEntryError | NoSuchLedgerError):  # these are valid answers
            effects.append(NoteRead(bookie, is_good=False))
        return [*effects, lane.failed(bookie, error)]

    # Silence

    def _deadline_s(self) -> float:
        """Return when a stream that is silent until then is given up, or another one is opened."""
        return min(
            deadline_s
            for lane in self._lanes
            if lane.is_awaited
            for deadline_s in (
                lane.quiet_since + self._silence_s,
                *(stream.since + self._timeout_s for stream in lane.streams.values()),
            )
        )

    def _on_time(self, lane: ReadLane, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for bookie, stream in list(lane.streams.items()):
            if now >= stream.since + self._timeout_s:
                late = BookieUnavailableError(f"no answer within {self._timeout_s} s")
                effects += self._failed(lane, bookie, late)
        if now >= lane.quiet_since + self._silence_s:
            # Not yet an error: the next replica is asked too, and the first answer is taken.
            lane.quiet_since = now
            silent = list(lane.streams)
            if opened := lane.silent(now):
                effects += [NoteRead(bookie, is_good=False) for bookie in silent]
                effects += opened
        return effects

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert (self._next > self._last) == (self.state is _READ)
        if self.state is _WAITING:
            assert self._is_timed
            assert self._lane_of(self._next).is_awaited
        if self.state in (_WAITING, _READING_AHEAD):
            for lane in self._lanes:
                lane.validate()
