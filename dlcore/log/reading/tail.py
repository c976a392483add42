"""The tail of a log: buffers the log's entries from a position on, and waits for more.

It promises entries in order, each once, none left out, as `ReadCursor` defines them; a buffer that
exceeds its bound by one entry at most; and that a caller waits only while its cluster answers.
docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

Theory of operation.  The cursor and the segment list say what is next.  A final extent is *read*;
near its end the next one is opened, so that its first entries arrive in time.  An open extent is
*followed* until its ledger is closed and the segment list shows what comes after it.  Entries are
buffered while there is room; then the stream of entries stands still, and each entry that the
caller takes may make room.  A followed entry that finds room is taken as it comes.

The segment list is read again when it may have changed and something depends on it: at the end of
what is known, while an extent is followed, and after a ledger could not be read.  Truncation,
recovery and merges remove ledgers, and each of them changes the list; if the list did not change,
the failure is an error.  A broken entry is an error, too, or is skipped on request,
also if only the caller finds it broken.

The caller takes entries, or waits.  A wait ends with an entry, an error, the log's end, and each
time that everything known was read.  It fails if the metadata store, or all followed bookies, are
silent for too long, or if no record came for too long; the caller may wait again.

The driver (`tail_driver.py`) reads ledgers and metadata, and keeps the time.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, assert_never

from dlcore.base.config import MIB
from dlcore.base.errors import (
    BookieUnavailableError,
    DLError,
    InvalidEntryError,
    LedgerNotFoundError,
    LedgerReadError,
    MetadataConnectionError,
    ReaderIdleError,
    UnexpectedError,
)
from dlcore.base.machines import Machine, State, Transitions
from dlcore.base.records import EntryPlace
from dlcore.log.entries.body import EntryHeader, decode_entry_header
from dlcore.log.reading.cursor import (
    EndOfStream,
    FollowExtent,
    LearnSegments,
    ReadCursor,
    ReadExtent,
    WaitForChange,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.config import LogConfig
    from dlcore.base.ids import DLSN
    from dlcore.log.metadata.values import LogState
    from dlcore.wire.frames import EntryFrame


class IdleStep(enum.Enum):
    """The step that is due."""

    NOTHING = 1
    LOOK = 2
    FAIL = 3


class IdleWatch:
    """Measures how long a reader has been idle; times are of one monotonic clock, in s.

    Being idle begins when a reader waits, and ends with the next record; waits that callers cut
    short add up.  After each `warn_s` of it the reader reads the log's metadata again, in case the
    notification of a change was lost.  After `error_s` it fails, and the next wait begins anew.
    """

    def __init__(self, *, warn_s: float, error_s: float) -> None:
        self._warn_s = warn_s
        self._error_s = error_s
        self._since: float | None = None
        self._next_look = 0.0

    def waits(self, now: float) -> None:
        """Note that a reader waits from now on, or still."""
        if self._since is None:
            self._since = now
            self._next_look = now + self._warn_s

    def received(self) -> None:
        """Note that a record came."""
        self._since = None

    def idle_s(self, now: float) -> float:
        """Return for how long the reader has been idle."""
        return 0.0 if self._since is None else now - self._since

    @property
    def deadline(self) -> float:
        """When the next step is due."""
        if self._since is None:
            return math.inf
        return min(self._next_look, self._since + self._error_s)

    def due(self, now: float) -> IdleStep:
        """Return the step that is due, once."""
        if now < self.deadline or self._since is None:
            return IdleStep.NOTHING
        if now >= self._since + self._error_s:
            self._since = None
            return IdleStep.FAIL
        self._next_look = now + self._warn_s
        return IdleStep.LOOK


_OPENED_AHEAD_BYTES = 12 * MIB
"""With this much left of an extent, the next one is opened, and its first entries are requested.
Its ledger and first chunk arrive after some milliseconds, in which a reader reads about as much."""


class TailState(State):
    """The state of the machine; CLOSED is final."""

    LEARNING = "the segment list is being read, and says what is next"
    READING = "a final extent is being read"
    FOLLOWING = "an open extent is followed"
    LEAVING = "the followed ledger is closed, and the segment list does not show it yet"
    CAUGHT_UP = "everything known was read; the segment list must change"
    CHECKING = "a ledger cannot be read; the segment list shows whether it was removed"
    ENDED = "the log is sealed, or was read up to the wanted end"
    FAILED = "no entry follows those in the buffer, but an error"
    CLOSED = "the caller reads no more"


_LEARNING, _READING, _FOLLOWING, _LEAVING, _CAUGHT_UP, _CHECKING, _ENDED, _FAILED, _CLOSED = (
    TailState
)

_PLANS = {
    _READING: "a final extent is next",
    _FOLLOWING: "an open extent is next",
    _LEARNING: "later segments are not known",
    _CAUGHT_UP: "nothing is next",
    _ENDED: "the end",
    _FAILED: "truncated, or contradicted",
}
_CLOSES = {_CLOSED: "closed by the caller"}

TRANSITIONS = Transitions(
    _LEARNING,
    {
        _LEARNING: _PLANS | _CLOSES | {_FAILED: "truncated, or not to be read"},
        _READING: _PLANS | _CLOSES | {_CHECKING: "no replica", _FAILED: "a broken entry"},
        _FOLLOWING: _PLANS
        | _CLOSES
        | {
            _CHECKING: "no replica",
            _LEAVING: "the ledger is closed",
            _FAILED: "a broken entry",
        },
        _LEAVING: _PLANS | _CLOSES,
        _CAUGHT_UP: {_LEARNING: "a change", _FAILED: "a broken entry"} | _CLOSES,
        _CHECKING: _PLANS | _CLOSES | {_FAILED: "the list is the same"},
        _ENDED: {_FAILED: "a broken entry"} | _CLOSES,
        _FAILED: {_FAILED: "a broken entry"} | _CLOSES,
        _CLOSED: {},
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedEntry:
    """An entry on its way to the reader's caller; rows before `first_slot` are left out."""

    place: EntryPlace
    end: DLSN
    """The position after it."""
    first_slot: int
    assigned_txid: int | None
    header: EntryHeader
    body: memoryview

    @property
    def last_txid(self) -> int:
        """The highest transaction id in it."""
        return self.header.last_txid if self.assigned_txid is None else self.assigned_txid


class Signal(enum.Enum):
    """Events that carry nothing."""

    START = "begin to read"
    CHANGED = "the segment list is another one, or may be"
    ROOM = "the caller took an entry, as `AWAIT_ROOM` asked to be informed"
    STREAM_ENDED = "all entries of the step came; a followed ledger is closed"
    WAIT_LEFT = "the caller waits no more"
    CLOSE = "the caller reads no more"


# Events of every entry or wait are named tuples, which cost least to make.


class Fetched(NamedTuple):
    """Event: the next entries of the step, which may be none."""

    frames: Sequence[EntryFrame]


class Pushed(NamedTuple):
    """Event: the next entry of a followed extent came beside its stream."""

    step: FollowExtent
    frame: EntryFrame


class Waits(NamedTuple):
    """Event: the caller waits; a followed bookie was last heard at `heard_s`, of the same clock.

    Bookies are heard as often as entries come, too often for an event each; only the last time
    counts, and only when a wait is judged.
    """

    now: float
    heard_s: float


class Alarm(NamedTuple):
    """Event: the time of `AlarmAt` is reached; else as `Waits`."""

    now: float
    heard_s: float


@dataclass(frozen=True, slots=True)
class FollowBegan:
    """Event: the open extent is followed from now on, so its bookies must be heard."""

    now: float


@dataclass(frozen=True, slots=True)
class SessionChanged:
    """Event: the metadata store is, or is not, within reach."""

    is_connected: bool
    now: float


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """Event: the step's next entry cannot be read."""

    error: DLError


@dataclass(frozen=True, slots=True)
class StateRead:
    """Event: the segment list, read after its `ReadState`."""

    state: LogState


@dataclass(frozen=True, slots=True)
class Broke:
    """Event: nothing can go on; buffered entries remain."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Rejected:
    """Event: the entry that the caller took last is broken."""

    place: EntryPlace
    error: DLError


Event: TypeAlias = (
    Signal
    | Fetched
    | Pushed
    | Waits
    | Alarm
    | FollowBegan
    | SessionChanged
    | StreamFailed
    | StateRead
    | Broke
    | Rejected
)


class Control(enum.Enum):
    """Effects that carry nothing, about what earlier effects began."""

    GO_ON = "let the stream of the step give its next entries"
    AWAIT_ROOM = "say `ROOM` for each entry that is taken, until `GO_ON` or `STOP`"
    REFUSE = "let the stream of the step give the entry that was pushed"
    STOP = "end the stream of the step"
    DROP = "end the stream that was opened before its turn"


class WaitOver(NamedTuple):
    """Effect: the caller's wait ends, with an error or without."""

    error: DLError | None


@dataclass(frozen=True, slots=True)
class Open:
    """Effect: open the stream of a final extent, and fetch its first entries."""

    step: ReadExtent


@dataclass(frozen=True, slots=True)
class Read:
    """Effect: let the opened stream give its entries, as `Fetched`, one chunk at each `GO_ON`.

    A failure of the stream is said then, too.
    """

    step: ReadExtent


@dataclass(frozen=True, slots=True)
class Follow:
    """Effect: follow an open extent; its entries come as those of `Read`, or as `Pushed`."""

    step: FollowExtent


@dataclass(frozen=True, slots=True)
class ReadState:
    """Effect: read the segment list from `from_lssn` on; answer with `StateRead`."""

    from_lssn: int


@dataclass(frozen=True, slots=True)
class AlarmAt:
    """Effect: say `Alarm` at this time, and at no other."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Skipped:
    """Effect: count an entry that is broken, and was skipped."""

    lssn: int
    entry_id: int
    error: DLError


@dataclass(frozen=True, slots=True)
class WarnIdle:
    """Effect: report that no record came for so long."""

    position: DLSN
    idle_s: float


Effect: TypeAlias = (
    Control | WaitOver | Open | Read | Follow | ReadState | AlarmAt | Skipped | WarnIdle
)


class _Wait:
    """The caller's wait, and all that bounds it; times are of the events' clock, in s."""

    def __init__(self, log: str, config: LogConfig) -> None:
        self._log = log
        self.is_on = False
        self._began = 0.0
        self._timeout_s = config.read_unavailable_timeout_s
        self.idle = IdleWatch(warn_s=config.reader_idle_warn_s, error_s=config.reader_idle_error_s)
        self._alarm_s = math.inf  # the alarm is kept for later waits: most waits end much sooner
        self._metadata_lost_at: float | None = None
        self.heard_s: float | None = None  # of a followed bookie; None: none is followed

    def begin(self, now: float) -> None:
        """Note that the caller waits from now on."""
        self.is_on, self._began = True, now
        self.idle.waits(now)

    def end(self, error: DLError | None = None) -> list[Effect]:
        """End the wait, if there is one."""
        if not self.is_on:
            return []
        self.is_on = False
        return [WaitOver(error)]

    def heard(self, heard_s: float) -> None:
        """Note when a followed bookie was last heard, if one is followed."""
        if self.heard_s is not None:
            self.heard_s = heard_s

    def session_changed(self, now: float, *, is_connected: bool) -> None:
        """Note whether the metadata store answers."""
        if is_connected:
            self._metadata_lost_at = None
        elif self._metadata_lost_at is None:
            self._metadata_lost_at = now

    def alarmed(self) -> None:
        """Note that no alarm is set any more."""
        self._alarm_s = math.inf

    def judge(self, now: float, position: DLSN) -> list[Effect]:
        """End the wait if it lasted too long; else see that it is judged again in time."""
        if not self.is_on:
            return []
        if now >= self._deadline:
            return self.end(self._unavailable(now))
        if now < self.idle.deadline:
            return self._set_alarm()
        idle_s = self.idle.idle_s(now)
        if self.idle.due(now) is IdleStep.LOOK:
            return [WarnIdle(position, idle_s), *self._set_alarm()]
        return self.end(
            ReaderIdleError(f"log {self._log!r}: no record came for {idle_s:.3g} s at {position}")
        )

    @property
    def _deadline(self) -> float:
        """When the cluster has been silent for too long."""
        since, heard_s = self._metadata_lost_at, self.heard_s
        if since is None or (heard_s is not None and heard_s < since):
            since = heard_s
        return math.inf if since is None else max(self._began, since) + self._timeout_s

    def _set_alarm(self) -> list[Effect]:
        at_s = min(self._deadline, self.idle.deadline)
        if at_s >= self._alarm_s:
            return []
        self._alarm_s = at_s
        return [AlarmAt(at_s)]

    def _unavailable(self, now: float) -> DLError:
        """Return the error that says which part of the cluster was silent."""
        lost = [] if self._metadata_lost_at is None else ["ZooKeeper"]
        if self.heard_s is not None and now - self.heard_s >= self._timeout_s:
            lost.append("the bookies that it follows")
        kind = BookieUnavailableError if self._metadata_lost_at is None else MetadataConnectionError
        return kind(
            f"log {self._log!r}: a reader that waits for records has heard nothing of "
            f"{' and '.join(lost)} for {self._timeout_s:g} s"
        )


class EntryBuffer:
    """The entries for the caller, and the fetched ones that wait for room.

    It has more bytes than its bound by one entry at most: an entry larger than the bound must pass,
    too.
    """

    def __init__(self, bytes_max: int) -> None:
        self.entries: deque[FetchedEntry] = deque()
        self.size_bytes = 0
        """Bytes of these entries."""
        self.waiting: deque[EntryFrame] = deque()
        """Fetched ones that wait for room."""
        self._bytes_max = bytes_max

    @property
    def is_full(self) -> bool:
        """Whether it takes no entry now."""
        return self.size_bytes > self._bytes_max

    def add(self, entry: FetchedEntry) -> None:
        """Keep an entry for the caller."""
        self.entries.append(entry)
        self.size_bytes += entry.body.nbytes

    def take(self) -> FetchedEntry | None:
        """Take the first entry, if there is one.

        It is no event, because a caller takes very many: `AWAIT_ROOM` asks for events.
        """
        if not self.entries:
            return None
        entry = self.entries.popleft()
        self.size_bytes -= entry.body.nbytes
        return entry

    def clear(self) -> None:
        """Drop the entries for the caller."""
        self.entries.clear()
        self.size_bytes = 0

    def validate(self) -> None:
        """Assert all that holds between two events."""
        assert self.size_bytes == sum(each.body.nbytes for each in self.entries)


class SegmentList:
    """The segment list as it was read last, and whether it is read again."""

    def __init__(self, state: LogState) -> None:
        self.state = state
        self.is_learning = False
        """Whether it is being read."""
        self.is_stale = False
        """Whether it may have changed since a read began."""

    def learn(self, position: DLSN) -> list[Effect]:
        """Read it from this position on, unless it is being read."""
        if self.is_learning:
            return []
        # Cleared before the list is read, so that no change meanwhile is missed.
        self.is_learning, self.is_stale = True, False
        return [ReadState(position.lssn)]

    def learnt(self, state: LogState) -> None:
        """Note what was read."""
        self.is_learning = False
        self.state = state


class LogTail(Machine[TailState]):
    """Reads one log's entries from the position of `cursor` on, for one caller.

    Args:
        segments: the log's state as it was read for the cursor's position.
        cursor: belongs to the machine from now on.
        config: the bounds of the buffer and of waits.
        skips_broken: whether entries that have no undamaged replica are skipped.
    """

    transitions = TRANSITIONS

    def __init__(
        self, segments: LogState, cursor: ReadCursor, config: LogConfig, *, skips_broken: bool
    ) -> None:
        self.state = _LEARNING
        self.segments = SegmentList(segments)
        self.cursor = cursor
        self.buffer = EntryBuffer(config.read_ahead_bytes)
        self.error: DLError | None = None
        """The error after the buffered entries."""
        self._skips_broken = skips_broken
        self._step: ReadExtent | FollowExtent | None = None
        self._opened: ReadExtent | None = None  # before its turn
        self._lost: tuple[DLError, int] | None = None  # and the version of the segment list
        self._wait = _Wait(segments.name, config)

    def handle(self, event: Event) -> list[Effect]:  # noqa: C901 - one case for each kind
        """Take one event; what comes after `CLOSE` has no effect but an answer."""
        if self.state is _CLOSED:
            return _answer_of_closed(event)
        match event:
            case Pushed():
                return self._pushed(event)
            case Waits():
                self._wait.begin(event.now)
                if self.buffer.entries or self.state in (_ENDED, _FAILED):
                    return self._wait.end()
                self._wait.heard(event.heard_s)
                return self._judge_wait(event.now)
            case Fetched(frames):
                return self._fetched(frames)
            case Signal.ROOM:
                return self._fill()
            case Signal.STREAM_ENDED:
                return self._stream_ended()
            case Signal.CHANGED:
                return self._changed()
            case Signal.START:
                return self._plan()
            case Signal.WAIT_LEFT:
                self._wait.is_on = False
                return []
            case Signal.CLOSE:
                self.buffer.clear()
                return [*self._end(_CLOSED), *self._wait.end()]
            case Alarm(now, heard_s):
                self._wait.alarmed()
                self._wait.heard(heard_s)
                return self._judge_wait(now)
            case FollowBegan(now):
                if self.state is not _FOLLOWING:
                    return []
                self._wait.heard_s = now  # silence counts from here on
                return self._judge_wait(now)
            case SessionChanged(is_connected, now):
                self._wait.session_changed(now, is_connected=is_connected)
                return self._judge_wait(now)
            case StreamFailed(error):
                return self._stream_failed(error)
            case StateRead(state):
                return self._state_read(state)
            case Broke(error):
                return self._fail(self._known(error))
            case Rejected(place, error):
                if self._skips_broken:
                    return [Skipped(place.lssn, place.entry_id, error)]
                # Buffered entries follow the rejected one: delivered, they would leave a gap.
                self.buffer.clear()
                return self._fail(error)
            case _:
                assert_never(event)

    # The next step

    def _plan(self) -> list[Effect]:
        """Begin what the cursor says is next."""
        self._step = None
        try:
            step = self.cursor.plan(self.segments.state)
        except DLError as error:
            return self._fail(error)
        effects: list[Effect] = []
        if self._opened is not None and self._opened != step:
            effects = self._drop()
        match step:
            case ReadExtent():
                self._become(_READING)
                self._step = step
                opens = [] if self._opened is not None else [Open(step)]
                self._opened = None
                return [*effects, *opens, Read(step)]
            case FollowExtent():
                self._become(_FOLLOWING)
                self._step = step
                # The extent may have ended while an earlier one was read, or the list was: no
                # other change need come, and its ledger brings no entry any more.
                return [*effects, Follow(step), *(self._learn() if self.segments.is_stale else [])]
            case LearnSegments():
                self._become(_LEARNING)
                return [*effects, *self._learn()]
            case WaitForChange():
                self._become(_CAUGHT_UP)
                effects += self._wait.end()
                if not (self.segments.is_stale or self.segments.is_learning):
                    return effects
                self._become(_LEARNING)
                return [*effects, *self._learn()]
            case EndOfStream():
                return [*effects, *self._end(_ENDED), *self._wait.end()]
            case _:
                assert_never(step)

    def _stop(self) -> list[Effect]:
        """Give the step up, with its entries that were not buffered."""
        is_active = self._step is not None and self.state is not _LEAVING
        self._step = self._wait.heard_s = None
        self.buffer.waiting.clear()
        return [Control.STOP] if is_active else []

    def _drop(self) -> list[Effect]:
        self._opened = None
        return [Control.DROP]

    def _end(self, state: TailState) -> list[Effect]:
        """End all streams."""
        effects = self._stop()
        if self._opened is not None:
            effects += self._drop()
        self._lost = None
        self._become(state)
        return effects

    def _fail(self, error: DLError) -> list[Effect]:
        effects = self._end(_FAILED)
        self.error = error
        return [*effects, *self._wait.end()]

    def _known(self, error: Exception) -> DLError:
        """Return an error for the caller, who must not wait for ever because of a defect."""
        if isinstance(error, DLError):
            return error
        return UnexpectedError(f"reader of log {self.segments.state.name!r} broke: {error!r}")

    # Entries

    def _pushed(self, event: Pushed) -> list[Effect]:
        """Buffer an entry that is next and finds room; else it comes with the stream."""
        buffer = self.buffer
        is_next = event.step is self._step and self.state is _FOLLOWING and not buffer.waiting
        if not is_next or buffer.is_full:
            return [Control.REFUSE]
        return self._deliver(event.frame)

    def _fetched(self, frames: Sequence[EntryFrame]) -> list[Effect]:
        effects: list[Effect] = []
        if isinstance(self._step, ReadExtent) and self._opened is None:
            effects = self._open_next(self._step, frames[-1].entry_id)
        self.buffer.waiting.extend(frames)
        effects += self._fill()
        return [*effects, Control.AWAIT_ROOM] if self.buffer.waiting else effects

    def _open_next(self, step: ReadExtent, fetched_entry_id: int) -> list[Effect]:
        """Open the extent after `step`, if it is known and final, and `step` is nearly read."""
        # The first chunk of the next extent is then here in time: else the reader would wait for a
        # round trip between any two small extents.
        assert step.last_entry_id is not None
        entry_bytes = step.extent.size_bytes / step.extent.entry_count
        if entry_bytes * (step.last_entry_id - fetched_entry_id) > _OPENED_AHEAD_BYTES:
            return []
        try:
            following = self.cursor.plan_after(step, self.segments.state)
        except DLError:
            return []  # its own turn raises it
        if not isinstance(following, ReadExtent):
            return []
        self._opened = following
        return [Open(following)]

    def _fill(self) -> list[Effect]:
        """Buffer fetched entries while there is room, and then let the stream go on."""
        effects: list[Effect] = []
        buffer, waiting = self.buffer, self.buffer.waiting
        while waiting:
            if buffer.is_full:
                return effects
            effects += self._deliver(waiting.popleft())
            if self.error is not None:
                return effects
        effects.append(Control.GO_ON)
        return effects

    def _deliver(self, frame: EntryFrame) -> list[Effect]:
        """Buffer an entry and move the cursor past it, or skip it if it is broken."""
        step, cursor = self._step, self.cursor
        assert step is not None
        first_slot = cursor.position.slot_id
        try:
            header = decode_entry_header(frame.body)
            entry_id, sequence_id = cursor.deliver(
                step,
                frame.entry_id,
                records_before=header.records_before,
                record_count=header.record_count,
            )
        except InvalidEntryError as error:
            return self._skip(step, error)
        except DLError as error:
            return self._fail(error)
        extent = step.extent
        place = EntryPlace(
            step.lssn,
            entry_id,
            sequence_id,
            step.segment_sequence_id,
            extent.timestamp_ms(header.write_time_ms),
        )
        entry = FetchedEntry(
            place=place,
            end=cursor.position,
            first_slot=first_slot,
            assigned_txid=extent.assigned_txid,
            header=header,
            body=frame.body,
        )
        self.buffer.add(entry)
        wait = self._wait
        wait.idle.received()
        return wait.end() if wait.is_on else []

    def _skip(self, step: ReadExtent | FollowExtent, error: DLError) -> list[Effect]:
        """Skip the next entry, which is broken, or fail with `error`."""
        if not self._skips_broken:
            return self._fail(error)
        position = self.cursor.position
        self.cursor.skip(step)
        return [Skipped(position.lssn, position.entry_id, error)]

    def _stream_ended(self) -> list[Effect]:
        if self.state is _READING:
            return self._plan()
        self._become(_LEAVING)
        self._wait.heard_s = None
        return []

    def _stream_failed(self, error: DLError) -> list[Effect]:
        """Skip a broken entry; else read the segment list, which says whether it is an error."""
        step = self._step
        assert step is not None
        self._wait.heard_s = None
        self._step = None  # its stream has ended
        if isinstance(error, LedgerReadError) and error.is_damaged:
            effects = self._skip(step, error)
            return effects if self.error is not None else effects + self._plan()
        if not isinstance(error, LedgerReadError | LedgerNotFoundError):
            return self._fail(error)
        self._become(_CHECKING)
        self._lost = (error, self.segments.state.version)
        self.segments.is_stale = True  # what is being read may be older than the failure
        return self._learn()

    # The segment list

    def _changed(self) -> list[Effect]:
        self.segments.is_stale = True
        if self.state is _CAUGHT_UP:
            self._become(_LEARNING)
        return self._learn() if self.state in (_LEARNING, _FOLLOWING, _LEAVING) else []

    def _learn(self) -> list[Effect]:
        return self.segments.learn(self.cursor.position)

    def _state_read(self, state: LogState) -> list[Effect]:
        if self.state in (_ENDED, _FAILED):
            return []
        self.segments.learnt(state)
        if self.state is _LEARNING:
            return self._plan()
        if self.state is _CHECKING:
            assert self._lost is not None
            error, version = self._lost
            is_same = state.version == version
            if is_same and self.segments.is_stale:
                return self._learn()
            self._lost = None
            return self._fail(error) if is_same else self._plan()
        assert self.state in (_FOLLOWING, _LEAVING)
        assert self._step is not None
        if not self.cursor.is_at(self._step.extent, state):
            return [*self._stop(), *self._plan()]
        return self._learn() if self.segments.is_stale else []

    def _judge_wait(self, now: float) -> list[Effect]:
        effects = self._wait.judge(now, self.cursor.position)
        if effects and isinstance(effects[0], WarnIdle):
            effects[1:1] = self._changed()  # the notification of a change may have been lost
        return effects

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state, buffer, segments = self.state, self.buffer, self.segments
        buffer.validate()
        assert (self._step is not None) == (state in (_READING, _FOLLOWING, _LEAVING))
        assert not buffer.waiting or state in (_READING, _FOLLOWING)
        assert self._opened is None or state in (_READING, _CHECKING)
        assert (self._lost is not None) == (state is _CHECKING)
        assert segments.is_learning or state not in (_LEARNING, _CHECKING)
        assert not segments.is_learning or state not in (_READING, _CAUGHT_UP)
        # Each of these states waits for the list, so none may know that it changed and not read it.
        depends = state in (_LEARNING, _FOLLOWING, _LEAVING, _CAUGHT_UP, _CHECKING)
        assert segments.is_learning or not (segments.is_stale and depends)
        assert self.error is not None or state is not _FAILED
        assert self.error is None or state in (_FAILED, _CLOSED)
        assert self._wait.heard_s is None or state is _FOLLOWING
        assert not (self._wait.is_on and (buffer.entries or state in (_ENDED, _FAILED, _CLOSED)))


def _answer_of_closed(event: Event) -> list[Effect]:
    """Return the effects of an event of a machine that is closed."""
    match event:
        case Waits():
            return [WaitOver(None)]
        case Pushed():
            return [Control.REFUSE]
        case _:
            return []
