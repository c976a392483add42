"""The tail of a ledger: hands out entries once they are confirmed, until the ledger is closed.

It promises every entry from the first one on, in order, each once, none above the LAC, and a last
step that says so when the ledger is closed.  docs/architecture/machines.md shows `TRANSITIONS` as a
diagram.

Theory of operation.  One bookie is *followed*: it pushes the entries that it holds, and the LAC.  A
pushed entry that comes next and is confirmed is handed out.  A confirmed entry that was not pushed,
or came damaged, is a gap, which is read from any replica.  The followed bookie is asked for its
next update only when everything before was handed out, so a slow caller slows the bookie down.

A bookie that fails, or leaves the ensemble, is replaced by the next member; after a round of
failures there is a pause.  If nothing is heard for a while, all members are asked what they know.
The followed bookie is asked, too: a pushed message may be lost.  If one of them knows a higher LAC,
it is followed.  If entries are held above every known LAC, the writer may be dead and its last LAC
lost; then the entries themselves decide.

A LAC is a claim.  If no replica has an entry below it, the bookies' lists of entries decide whether
the claim is true.  A bookie that sent a false one is neither followed nor believed any more, unless
all are like that.

The caller takes steps one at a time.  Mostly a pushed entry comes while the caller waits, and is
the last confirmed one.  Then it is offered: a taken entry is in no step, which spares most of the
work.

The driver (`follow_driver.py`) talks to bookies and the metadata store.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, assert_never

from dlcore.base.errors import DigestMismatchError, LedgerReadError, MetadataError
from dlcore.base.machines import Machine, State, Transitions
from dlcore.ledger.metadata.values import LedgerState, first_followed
from dlcore.wire.frames import decode_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.errors import DLError
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata
    from dlcore.wire.frames import EntryFrame
    from dlcore.wire.port import HeldEntries

_SILENCE_S = 1.0
"""After this long without news all bookies are asked whether they know more."""
_FIRST_SILENCE_S = 0.02
"""The first such interval: a live writer sends its LAC sooner, and a dead one never does."""
_BACKOFF_S = 0.1
_BACKOFF_S_MAX = 1.0


class FollowState(State):
    """The state of the machine; ENDED is final."""

    IDLE = "the caller works at a step, or has not asked for the first one"
    WAITING = "the caller waits, and every confirmed entry was handed out"
    READING = "the caller waits for entries that were not pushed, and are read from any replica"
    CHECKING = "no replica has the next entry; the bookies' lists show whether the LAC is true"
    ENDED = "the last step was handed out, or an error"


_IDLE, _WAITING, _READING, _CHECKING, _ENDED = FollowState

TRANSITIONS = Transitions(
    _IDLE,
    {
        _IDLE: {_WAITING: "a step is wanted"},
        _WAITING: {
            _IDLE: "a step is due",
            _READING: "the next entry was not pushed",
            _ENDED: "the ledger is closed, or deleted",
        },
        _READING: {
            _IDLE: "entries were read",
            _WAITING: "the ledger was closed before them",
            _CHECKING: "no replica has the next one",
            _ENDED: "the last entry was read, or is lost",
        },
        _CHECKING: {
            _WAITING: "the LAC is false, or not the end",
            _ENDED: "the LAC is true, and the entry lost",
        },
        _ENDED: {},
    },
)


@dataclass(frozen=True, slots=True)
class FollowStep:
    """Effect: confirmed entries that come next, and the LAC known now, for the waiting caller.

    `closed` is True in the last step only: the ledger is closed, and every entry was delivered.
    """

    frames: Sequence[EntryFrame]
    last_add_confirmed: int
    closed: bool


class Signal(enum.Enum):
    """Events that carry nothing."""

    STEP_WANTED = "the caller waits for a step"
    METADATA_CHANGED = "the ledger's metadata is another one, or may be"
    PAUSE_OVER = "the pause of `Pause` is over"
    STREAM_ENDED = "the followed bookie's stream ended"


class Call(enum.Enum):
    """Effects that carry nothing: calls with one answer."""

    READ_METADATA = "read the ledger's metadata; answer with `MetadataRead`"
    READ_END = "find the last entry that may be read; answer with `EndRead`"


class Control(enum.Enum):
    """Effects that carry nothing, about what earlier effects began."""

    LISTEN = "take the next update of the followed bookie"
    READ_ON = "read the next entries of the range; after its last ones, let the reading end"
    UNFOLLOW = "end the stream of the followed bookie"


# Events and effects of every pushed entry are named tuples, which cost least to make.


class Pushed(NamedTuple):
    """Event: the followed bookie sent an update, whose frames are not verified."""

    frames: Sequence[bytes | memoryview]
    last_add_confirmed: int
    fenced: bool
    now: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Event: the caller did not take these entries, the last ones of those that it was offered."""

    entries: Sequence[EntryFrame]


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: it is `now`, in seconds of the clock of `Pushed`; the first one starts the ticks."""

    now: float


@dataclass(frozen=True, slots=True)
class MembersAnswered:
    """Event: what the bookies know that were asked by `AskMembers`, and answered."""

    held: Sequence[tuple[BookieId, HeldEntries]]


@dataclass(frozen=True, slots=True)
class EndRead:
    """Event: entries may be read up to this one, by a read that left this metadata behind."""

    last_entry_id: int
    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True)
class EndFound:
    """Event: a read of the caller found that entries may be read up to this one."""

    last_entry_id: int


@dataclass(frozen=True, slots=True)
class MetadataRead:
    """Event: the metadata store was read."""

    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True)
class RangeRead:
    """Event: the next entries of the range that is read, verified."""

    entries: Sequence[EntryFrame]


@dataclass(frozen=True, slots=True)
class Checked:
    """Event: by the bookies' lists the claimed LAC holds up to `confirmed`."""

    claimed: int
    confirmed: int


@dataclass(frozen=True, slots=True)
class Broke:
    """Event: nothing can go on, because of a defect."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class CallFailed:
    """Event: what this effect asks for failed, or has no answer; a stream or a range ends so."""

    asked: Asked
    error: DLError


Event: TypeAlias = (
    Signal
    | Pushed
    | Refused
    | Tick
    | MembersAnswered
    | EndRead
    | EndFound
    | MetadataRead
    | CallFailed
    | RangeRead
    | Checked
    | Broke
)


class Offer(NamedTuple):
    """Effect, the last one of its event: offer these entries, which are all, to the caller.

    If it takes them, take the next update of the followed bookie, as for `LISTEN`; if not, answer
    with `Refused`.
    """

    entries: Sequence[EntryFrame]


@dataclass(frozen=True, slots=True)
class Follow:
    """Effect: take updates of `bookie`, from `first_entry_id` on, one at each `LISTEN`."""

    bookie: BookieId
    first_entry_id: int


@dataclass(frozen=True, slots=True)
class TickAt:
    """Effect: feed a `Tick` at this time."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Effect: say `PAUSE_OVER` after so many seconds."""

    after_s: float


@dataclass(frozen=True, slots=True)
class AskMembers:
    """Effect: ask these bookies for their LAC, and what they hold above it."""

    bookies: Sequence[BookieId]


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Effect: read entries `first` to `last` from any replica, the next ones at each `READ_ON`."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class CheckLac:
    """Effect: find out up to where `claimed` holds; entries up to `vouched` were read."""

    ensemble: Ensemble
    vouched: int
    claimed: int


@dataclass(frozen=True, slots=True)
class TellDamage:
    """Effect: log that `bookie` sent a damaged entry."""

    bookie: BookieId
    error: DigestMismatchError


@dataclass(frozen=True, slots=True)
class Fail:
    """Effect: the waiting caller gets this error; nothing follows."""

    error: BaseException


Asked: TypeAlias = Call | Follow | ReadRange | AskMembers | CheckLac | TickAt | Pause
"""Effects that are answered with events, at last maybe with `CallFailed`."""
Effect: TypeAlias = Asked | Control | Offer | FollowStep | TellDamage | Fail


class _Metadata(enum.Enum):
    KNOWN = "as last read"
    READING = "being read"
    STALE = "being read, and changed since"


class _Source:
    """The bookie that is followed, which one is next, and which are believed."""

    def __init__(self, metadata: LedgerMetadata) -> None:
        self.followed: BookieId | None = None
        self.position = first_followed(metadata.ledger_id, metadata.quorum.ensemble_size)
        self.failures = 0  # in a row
        self.is_pausing = False
        self.lac_from: BookieId | None = None  # the bookie that sent the LAC
        self.distrusted: set[BookieId] = set()  # they sent a false LAC

    def choose(self, members: Sequence[BookieId]) -> BookieId:
        """Return the bookie to follow now; `position` counts modulo the ensemble's size."""
        # Some bookie must be followed: each LAC is checked again when an entry is missing.
        if self.distrusted.issuperset(members):
            self.distrusted.clear()
        while members[self.position % len(members)] in self.distrusted:
            self.position += 1
        self.followed = members[self.position % len(members)]
        return self.followed


class _Silence:
    """The time in which nothing is heard; times are of the events' clock, in s."""

    def __init__(self, now: float) -> None:
        self.heard_s = now
        self.interval_s = _FIRST_SILENCE_S
        """After so long without news all members are asked."""
        self.is_asking = False
        """Whether they are being asked."""

    @property
    def ends_s(self) -> float:
        """When it has lasted long enough."""
        return self.heard_s + self.interval_s


class _Coming:
    """The entries that come next for the caller: those that were pushed, and those to be read."""

    def __init__(self, first: int) -> None:
        self.first = first
        """The next one to hand out."""
        self.pushed: Sequence[EntryFrame] = ()
        """Not handed out yet, ascending."""
        self.range_end = -1
        """The last entry of the range that is read."""

    def run(self, lac: int) -> Sequence[EntryFrame]:
        """Return the pushed entries that come next and are confirmed; forget those of no use."""
        pushed, first = self.pushed, self.first
        last = first + len(pushed) - 1
        # Mostly all of them are: their ids ascend, so the first and the last one prove it.
        if pushed and pushed[0].entry_id == first and pushed[-1].entry_id == last <= lac:
            return pushed
        pushed = [each for each in pushed if first <= each.entry_id <= lac]
        self.pushed = pushed
        count = 0
        while count < len(pushed) and pushed[count].entry_id == first + count:
            count += 1
        return pushed[:count]

    def gap(self, lac: int) -> ReadRange:
        """Return the read of the confirmed entries that were not pushed."""
        self.range_end = self.pushed[0].entry_id - 1 if self.pushed else lac
        return ReadRange(self.first, self.range_end)

    def validate(self) -> None:
        """Assert all that holds between two events."""
        ids = [each.entry_id for each in self.pushed]
        assert ids == sorted(set(ids))


class LedgerFollow(Machine[FollowState]):
    """One caller that follows one ledger.

    Args:
        metadata: the ledger's metadata as last read.
        first: the first entry to hand out.
        now: the time of the events' clock.
    """

    transitions = TRANSITIONS

    def __init__(self, metadata: LedgerMetadata, *, first: int, now: float) -> None:
        self.state = _IDLE
        self.metadata = metadata
        self._metadata_is = _Metadata.KNOWN
        self._coming = _Coming(first)
        self._lac = metadata.last_entry_id if self.is_closed else -1
        self._source = _Source(metadata)
        self._is_first = True  # the first step, which reports the LAC, is due
        self._is_fenced = False
        self._silence = _Silence(now)
        self._error: BaseException | None = None  # kept while the LAC is checked, or in IDLE

    @property
    def is_closed(self) -> bool:
        """Whether the ledger is known to have its end."""
        return self.metadata.state is LedgerState.CLOSED

    def handle(self, event: Event) -> list[Effect]:  # noqa: C901 - one case for each kind
        """Take one event; answers that come late do no harm."""
        if self.state is _ENDED:
            return []
        match event:
            case Pushed():
                return self._on_pushed(event)
            case Refused(entries):
                return self._hand_out(entries)
            case Signal.STEP_WANTED:
                return self._wanted()
            case RangeRead(entries):
                return self._range_read(entries)
            case Tick(now):
                return self._tick(now)
            case Signal.STREAM_ENDED:
                return self._stream_ended()
            case Signal.PAUSE_OVER:
                self._source.is_pausing = False
                return [*self._refresh(), *self._go_on()]
            case Signal.METADATA_CHANGED:
                return self._refresh()
            case MetadataRead(metadata):
                return [*self._metadata_read(), *self._learn(metadata)]
            case MembersAnswered(held):
                return self._members_answered(held)
            case EndRead(last_entry_id, metadata):
                self._silence.is_asking = False
                return [*self._learn(metadata), *self._claimed(last_entry_id, None)]
            case EndFound(last_entry_id):
                return self._claimed(last_entry_id, None)
            case CallFailed(asked, error):
                return self._call_failed(asked, error)
            case Checked(claimed, confirmed):
                return self._checked(claimed, confirmed)
            case Broke(error):
                return self._fail(error)
            case _:
                assert_never(event)

    # Entries for the caller

    def _wanted(self) -> list[Effect]:
        self._become(_WAITING)
        error, self._error = self._error, None
        if error is not None:
            return self._fail(error)
        if self._coming.first <= min(self._coming.range_end, self._lac):
            self._become(_READING)
            return [Control.READ_ON]
        return self._go_on()

    def _go_on(self) -> list[Effect]:
        """Hand out entries that come next, or the ledger's end; else wait for news."""
        if self.state is not _WAITING:
            return []
        coming, lac = self._coming, self._lac
        if coming.first > lac:
            return self._hand_out(()) if self.is_closed else self._listen()
        run = coming.run(lac)
        if run:
            may_offer = self._source.followed is not None and not self._is_first
            if not may_offer or run[-1].entry_id != lac:
                return self._hand_out(run)
            coming.first, coming.pushed = lac + 1, ()
            return [Offer(run)]
        self._become(_READING)
        return [coming.gap(lac)]

    def _hand_out(self, entries: Sequence[EntryFrame]) -> list[Effect]:
        if entries:
            self._coming.first = entries[-1].entry_id + 1
        self._is_first = False
        is_last = self.is_closed and self._coming.first > self._lac
        self._become(_ENDED if is_last else _IDLE)
        return [FollowStep(entries, self._lac, closed=is_last)]

    def _range_read(self, entries: Sequence[EntryFrame]) -> list[Effect]:
        is_last = entries[-1].entry_id == self._coming.range_end
        effects: list[Effect] = [Control.READ_ON] if is_last else []
        if entries[-1].entry_id > self._lac:
            # A recovery closed the ledger before them, so they are no entries of it.
            entries = [each for each in entries if each.entry_id <= self._lac]
        if entries:
            return effects + self._hand_out(entries)
        self._become(_WAITING)
        return effects + self._go_on()

    def _read_failed(self, error: DLError) -> list[Effect]:
        self._coming.range_end = -1
        if self._coming.first > self._lac:  # a recovery closed the ledger before the entry
            self._become(_WAITING)
            return self._go_on()
        if self.is_closed or not isinstance(error, LedgerReadError):
            return self._fail(error)
        self._become(_CHECKING)
        self._error = error
        return [CheckLac(self.metadata.last_ensemble, self._coming.first - 1, self._lac)]

    def _checked(self, claimed: int, confirmed: int) -> list[Effect]:
        """Fail if the LAC is true; else count up to the entry that may be confirmed."""
        assert self._error is not None
        if confirmed >= claimed and not self.is_closed:
            return self._fail(self._error)
        self._error = None
        self._become(_WAITING)
        if self.is_closed:
            return self._go_on()  # a recovery decided the end meanwhile
        self._lac = confirmed
        if self._source.lac_from is not None:
            self._source.distrusted.add(self._source.lac_from)
        return [*self._unfollow(), *self._go_on()]

    def _fail(self, error: BaseException) -> list[Effect]:
        """End with this error, which waits for a caller that works at a step."""
        self._error = None
        if self.state is _IDLE:
            self._error = error
            return []
        self._become(_ENDED)
        return [Fail(error)]

    # The followed bookie

    def _listen(self) -> list[Effect]:
        source = self._source
        if source.followed is not None:
            return [Control.LISTEN]
        if source.is_pausing:
            return []
        return [Follow(source.choose(self.metadata.last_ensemble.bookies), self._coming.first)]

    def _unfollow(self) -> list[Effect]:
        if self._source.followed is None:
            return []
        self._source.followed = None
        return [Control.UNFOLLOW]

    def _on_pushed(self, update: Pushed) -> list[Effect]:
        frames, lac, fenced, self._silence.heard_s = update
        source = self._source
        entries, effects = self._verified(frames)
        source.failures = 0
        if lac > self._lac:
            self._lac, source.lac_from = lac, source.followed
        if len(entries) > 1:
            by_id = {each.entry_id: each for each in entries}
            entries = [by_id[entry_id] for entry_id in sorted(by_id)]
        self._coming.pushed = entries
        # A fence announces a recovery, which changes the metadata; the watch may come late.
        if fenced and not self._is_fenced:
            self._is_fenced = True
            effects += self._refresh()
            return effects + self._news()
        return effects + (self._news() if self._is_first else self._go_on())

    def _verified(
        self, frames: Sequence[bytes | memoryview]
    ) -> tuple[list[EntryFrame], list[Effect]]:
        """Return the good entries; a damaged one is a gap, since another replica has it, too."""
        ledger_id = self.metadata.ledger_id
        entries: list[EntryFrame] = []
        effects: list[Effect] = []
        for frame in frames:
            try:
                entries.append(decode_frame(frame, ledger_id=ledger_id))
            except DigestMismatchError as error:
                assert self._source.followed is not None
                effects.append(TellDamage(self._source.followed, error))
        return entries, effects

    def _news(self) -> list[Effect]:
        """Go on after a bookie sent something; the first step reports the LAC, also alone."""
        if self._is_first and self.state is _WAITING and self._coming.first > self._lac:
            return self._hand_out(())
        return self._go_on()

    def _stream_ended(self) -> list[Effect]:
        """Go on to the next bookie; after a round without success, pause, and read the metadata."""
        source = self._source
        source.followed = None
        source.position += 1
        source.failures += 1
        rounds, rest = divmod(source.failures, self.metadata.quorum.ensemble_size)
        if rest:
            return self._go_on()
        source.is_pausing = True
        return [Pause(min(_BACKOFF_S * 2 ** min(rounds - 1, 10), _BACKOFF_S_MAX))]

    # Silence

    def _tick(self, now: float) -> list[Effect]:
        silence = self._silence
        if now < silence.ends_s:
            return [TickAt(silence.ends_s)]
        silence.heard_s = now
        effects: list[Effect] = [TickAt(now + _SILENCE_S)]
        # A caller that works is no silence of bookies; bookies that fail do answer.
        if self.state is not _WAITING or silence.is_asking or self._source.followed is None:
            return effects
        silence.interval_s = _SILENCE_S
        silence.is_asking = True
        effects.append(AskMembers(self.metadata.last_ensemble.bookies))
        return effects + self._refresh() if self._is_fenced else effects

    def _members_answered(self, answers: Sequence[tuple[BookieId, HeldEntries]]) -> list[Effect]:
        best, by = self._lac, None
        for bookie, held in answers:
            if held.last_add_confirmed > best and bookie not in self._source.distrusted:
                best, by = held.last_add_confirmed, bookie
        # Bookies hold entries above every known LAC: their writer may be dead, and its last LAC
        # may never arrive.
        if by is None and any(last > best for _, held in answers for _, last in held.ranges):
            return [Call.READ_END]
        self._silence.is_asking = False
        return self._claimed(best, by)

    def _claimed(self, last_entry_id: int, by: BookieId | None) -> list[Effect]:
        """Use a higher LAC than the followed bookie sent; follow the bookie that knows it."""
        if self.is_closed or last_entry_id <= self._lac:
            return []
        self._lac, self._source.lac_from = last_entry_id, by
        members = self.metadata.last_ensemble.bookies
        if by not in members:
            return self._news()
        self._source.position = members.index(by)
        return [*self._unfollow(), *self._news()]

    # Metadata

    def _refresh(self) -> list[Effect]:
        if self._metadata_is is not _Metadata.KNOWN:
            self._metadata_is = _Metadata.STALE
            return []
        self._metadata_is = _Metadata.READING
        return [Call.READ_METADATA]

    def _metadata_read(self) -> list[Effect]:
        was, self._metadata_is = self._metadata_is, _Metadata.KNOWN
        return self._refresh() if was is _Metadata.STALE else []

    def _learn(self, metadata: LedgerMetadata) -> list[Effect]:
        """Follow another bookie if the followed one was replaced, none if the ledger is closed."""
        self.metadata = metadata
        effects: list[Effect] = []
        if self.is_closed:
            self._lac = metadata.last_entry_id
            effects = self._unfollow()
        elif self._source.followed not in metadata.last_ensemble.bookies:
            effects = self._unfollow()
        return [*effects, *self._go_on()]

    def _call_failed(self, asked: Asked, error: DLError) -> list[Effect]:
        """Ask again when there is a later cause; without its ledger nothing can go on."""
        match asked:
            case Follow():
                return self._stream_ended()
            case ReadRange():
                return self._read_failed(error)
            case Call.READ_METADATA if isinstance(error, LedgerReadError | MetadataError):
                # The watch fires again after a reconnection; until then the bookies go on.
                return self._metadata_read()
            case Call.READ_END if isinstance(error, LedgerReadError | MetadataError):
                self._silence.is_asking = False
                return []
            case _:
                return self._fail(error)

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert self._error is None or self.state in (_IDLE, _CHECKING)
        assert self.state is not _CHECKING or self._error is not None
        assert not (self._source.is_pausing and self._source.followed)
        self._coming.validate()
        assert not self.is_closed or self._source.followed is None
        assert self.state is not _READING or self._coming.first <= self._coming.range_end
        is_waiting = self._coming.first > self._lac and not self.is_closed
        assert self.state is not _WAITING or is_waiting
