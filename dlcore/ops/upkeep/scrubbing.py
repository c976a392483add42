"""Scrubbing of cold objects: a share is read each day, to find damage while it can be mended.

Theory of operation.  A pass goes over the objects of all cold ledgers, in the order of their ids,
and lasts one period.  Its place is one small node for the whole namespace, however many logs there
are.  Ids ascend, so what becomes cold meanwhile lies ahead of it.  Once a day the bytes that lie
ahead are counted, by metadata alone, and the pace is such that they are read when the period ends:
an object of n bytes is followed by a pause of n / pace, or until the next count.  The pace has an
upper bound; a pass that this makes late goes on until it is through.  One round reads what is due
now, and not for longer than its length, so that the next one may be another worker's.

An object that is damaged gets a line in the log, and the pass goes on.  An object that cannot be
read now is tried again in the next rounds, for the store may be away; after `TRIES_MAX` it is
skipped and counted.
docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

Promises:

* Each pass reads every object that was there when it began, and is still, unless it was skipped.
* The place moves past an object only after it was read, listed as damaged, or skipped.
* No more than `bytes_per_s` is read on average, whatever was left undone before.

The driver is `scrubber.py`.  Each event has one effect.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from msgspec.structs import replace

from dlcore.base.machines import Machine, State, Transitions
from dlcore.ops.autorecovery.values import ScrubProgress

if TYPE_CHECKING:
    from dlcore.ops.upkeep.config import UpkeepConfig

TRIES_MAX = 10
"""Rounds in which an object that cannot be read is tried, until it is skipped."""
COUNT_AGAIN_MS = 24 * 3600 * 1000
"""How often the bytes that lie ahead are counted."""


class ScrubState(State):
    """The state of the machine; ENDED is final."""

    READY = "nothing has begun"
    COUNTING = "the bytes that lie ahead are counted"
    FINDING = "the next object is looked for"
    READING = "an object is read, and compared with what the chain says"
    TELLING = "its ledger is put on the list of what is to be repaired"
    ENDED = "nothing is due now, or the round was long enough"


_S = ScrubState
TRANSITIONS = Transitions(
    _S.READY,
    {
        _S.READY: {
            _S.COUNTING: "a pass begins, or the count is old",
            _S.FINDING: "something is due",
            _S.ENDED: "nothing is",
        },
        _S.COUNTING: {_S.FINDING: "something is due", _S.ENDED: "nothing is"},
        _S.FINDING: {_S.READING: "there is one", _S.ENDED: "there is none ahead"},
        _S.READING: {
            _S.FINDING: "it is whole or skipped, and more is due",
            _S.TELLING: "it is damaged",
            _S.ENDED: "nothing more is due, or it cannot be read now",
        },
        _S.TELLING: {_S.FINDING: "more is due", _S.ENDED: "nothing more is"},
        _S.ENDED: {},
    },
)


class Verdict(enum.Enum):
    """The result of reading an object."""

    WHOLE = "it is what the chain says, or nothing names it any more"
    DAMAGED = "it is missing, or another one than the chain says"
    UNKNOWN = "it cannot be read now"


class Signal(enum.Enum):
    """Events that carry nothing."""

    LISTED = "the ledger is on the list"


@dataclass(frozen=True, slots=True)
class Begin:
    """Event: the round begins at this time."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class Counted:
    """Event: so many bytes lie ahead, as was known at this time."""

    size_bytes: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class Found:
    """Event: the next object is this one of a ledger."""

    ledger_id: int
    number: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class NoneAhead:
    """Event: no object lies ahead."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Event: the object was read, or could not be, at this time."""

    verdict: Verdict
    now_ms: int


Event: TypeAlias = Begin | Counted | Found | NoneAhead | Examined | Signal


@dataclass(frozen=True, slots=True)
class Count:
    """Effect: count the bytes of objects from this place on; answer with `Counted`."""

    ledger_id: int
    number: int


@dataclass(frozen=True, slots=True)
class Find:
    """Effect: find the first object at this place or after it; answer `Found` or `NoneAhead`."""

    ledger_id: int
    number: int


@dataclass(frozen=True, slots=True)
class Examine:
    """Effect: read the object as a whole, and compare it; answer with `Examined`."""

    ledger_id: int
    number: int


@dataclass(frozen=True, slots=True)
class ListLedger:
    """Effect: put the ledger on the list of what is to be repaired; answer with `LISTED`."""

    ledger_id: int


@dataclass(frozen=True, slots=True)
class End:
    """Effect: the round has ended; store its progress."""

    progress: ScrubProgress


Effect: TypeAlias = Count | Find | Examine | ListLedger | End


class ScrubRound(Machine[ScrubState]):
    """One round.

    Args:
        progress: what the last round stored; None: there was none.
        config: the period, the pace and the length of a round.
    """

    transitions = TRANSITIONS

    def __init__(self, progress: ScrubProgress | None, config: UpkeepConfig) -> None:
        self.state = ScrubState.READY
        self.progress = progress or ScrubProgress(started_ms=0)
        self._is_first = progress is None
        self._config = config
        self._now_ms = 0
        self._begun_ms = 0
        self._object: Found | None = None

    def handle(self, event: Event) -> Effect:
        """Take one event."""
        match event:
            case Begin(now_ms):
                return self._begin(now_ms)
            case Counted(size_bytes, now_ms):
                self._now_ms = now_ms
                # A pause that was meant for fewer bytes ends.
                due_ms = min(self.progress.due_ms, now_ms)
                self._note(left_bytes=size_bytes, counted_ms=now_ms, due_ms=due_ms)
                return self._next()
            case Found():
                self._object = event
                self._become(ScrubState.READING)
                return Examine(event.ledger_id, event.number)
            case NoneAhead():
                self._note(left_bytes=0)
                return self._end()
            case Examined(verdict, now_ms):
                self._now_ms = now_ms
                return self._judge(verdict)
            case Signal.LISTED:
                return self._next()
            case _:
                assert_never(event)

    def _begin(self, now_ms: int) -> Effect:
        self._now_ms = self._begun_ms = now_ms
        known = self.progress
        period_ms = int(self._config.scrub_period_s * 1000)
        is_over = now_ms - known.started_ms >= period_ms and not known.left_bytes
        # A clock that went back would make a pass last for as long.
        if self._is_first or is_over or known.started_ms > now_ms:
            self.progress = ScrubProgress(started_ms=now_ms, due_ms=now_ms)
            return self._count()
        if not 0 <= now_ms - known.counted_ms < COUNT_AGAIN_MS:
            return self._count()
        return self._next()

    def _count(self) -> Effect:
        self._become(ScrubState.COUNTING)
        return Count(self.progress.ledger_id, self.progress.number)

    def _next(self) -> Effect:
        known = self.progress
        length_ms = int(self._config.scrub_interval_s * 1000)
        is_long = self._now_ms - self._begun_ms >= length_ms
        if is_long or not known.left_bytes or known.due_ms > self._now_ms:
            return self._end()
        self._become(ScrubState.FINDING)
        return Find(known.ledger_id, known.number)

    def _judge(self, verdict: Verdict) -> Effect:
        found, known = self._object, self.progress
        assert found is not None
        if verdict is Verdict.UNKNOWN and known.tries + 1 < TRIES_MAX:
            # Its place is kept: what lies between was looked through, and has no object.
            self._note(ledger_id=found.ledger_id, number=found.number, tries=known.tries + 1)
            return self._end()
        size = found.size_bytes
        is_read = verdict is not Verdict.UNKNOWN
        self._note(
            due_ms=self._due_after(size),
            ledger_id=found.ledger_id,
            number=found.number + 1,
            left_bytes=max(0, known.left_bytes - size),
            objects=known.objects + is_read,
            read_bytes=known.read_bytes + (size if is_read else 0),
            damaged=known.damaged + (verdict is Verdict.DAMAGED),
            skipped=known.skipped + (not is_read),
            tries=0,
        )
        if verdict is Verdict.DAMAGED:
            self._become(ScrubState.TELLING)
            return ListLedger(found.ledger_id)
        return self._next()

    def _due_after(self, size_bytes: int) -> int:
        """Return when the object after one of so many bytes is due."""
        known, config = self.progress, self._config
        length_ms = int(config.scrub_interval_s * 1000)
        end_ms = known.started_ms + int(config.scrub_period_s * 1000)
        left_ms = max(1, end_ms - self._now_ms)
        pace = min(config.scrub_bytes_per_s / 1000, max(known.left_bytes, size_bytes) / left_ms)
        # Bytes that were not read while no worker ran are no reason to read more at a time.
        from_ms = max(known.due_ms, self._now_ms - length_ms)
        return int(from_ms + size_bytes / pace)

    def _end(self) -> Effect:
        self._become(ScrubState.ENDED)
        return End(self.progress)

    def _note(self, **changes: int) -> None:
        self.progress = replace(self.progress, **changes)

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert self.progress.tries < TRIES_MAX
        assert self.progress.damaged <= self.progress.objects
        assert (self._object is not None) or self.state not in (
            ScrubState.READING,
            ScrubState.TELLING,
        )
