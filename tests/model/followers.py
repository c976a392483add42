"""A follower of the ledger as a part of a model: the real `LedgerFollow`, and what its driver does.

Its caller waits all the time, and takes whatever it is given.  Reads are one step each: replicas
that a read asks one after the other are asked at once here, and answer what is durable.  Every look
at the clock finds that a silence has lasted long enough.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

from dlcore.base.errors import LedgerReadError
from dlcore.ledger.reading.confirmed import confirmed_of, judge_end
from dlcore.ledger.reading.follow import (
    AskMembers,
    Call,
    CallFailed,
    Checked,
    CheckLac,
    Control,
    EndRead,
    Fail,
    Follow,
    FollowStep,
    LedgerFollow,
    MembersAnswered,
    MetadataRead,
    Offer,
    Pause,
    Pushed,
    RangeRead,
    ReadRange,
    Signal,
    TellDamage,
    Tick,
    TickAt,
)
from dlcore.wire.frames import decode_frame
from dlcore.wire.port import ENTRY_ID_MAX, EntryRange, HeldEntries
from tests.model.clients import BOOKIES, Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ledger.reading.follow import Effect, Event
    from dlcore.wire.frames import EntryFrame
    from tests.model.bookie import Bookie

_NUMBERS = {bookie: number for number, bookie in enumerate(BOOKIES)}
_LATE = math.inf
"""The time of every event: it is never before the end of a silence."""
_LOST = LedgerReadError("no replica")


class Read(NamedTuple):
    """Event: this is the next entry of the range that is read, if any replica has it."""

    frame: bytes | None


class Stored(NamedTuple):
    """Event: the metadata store holds this."""

    metadata: Frozen


class Held(NamedTuple):
    """Event: the bookies that were asked know this."""

    answers: tuple[tuple[BookieId, HeldEntries], ...]


class End(NamedTuple):
    """Event: entries up to this one may be read; None: it could not be decided."""

    last_entry_id: int | None
    metadata: Frozen


class Follower:
    """The machine, its caller, and what it waits for."""

    def __init__(self, metadata: LedgerMetadata) -> None:
        self.machine = LedgerFollow(metadata, first=0, now=_LATE)
        self.got: list[int] = []
        self.has_ended = False
        self.error: BaseException | None = None
        self.followed: Follow | None = None
        self.heard: tuple[int, bool] | None = None
        """The LAC that the followed bookie sent, and whether it was fenced."""
        self.listens = False
        self.range: ReadRange | None = None
        self.is_reading = False
        """Whether the next entry of the range is wanted."""
        self.asked: list[Call | AskMembers | CheckLac | Pause] = []
        self._hear(Signal.STEP_WANTED)

    def take(self, event: Any) -> Sequence[Any]:
        """Change by an event; it sends nothing out, but waits."""
        match event:
            case Pushed():
                self.heard, self.listens = (event.last_add_confirmed, event.fenced), False
            case Signal.STREAM_ENDED:
                self.followed = None
            case Signal.PAUSE_OVER:
                self._answered(Pause)
            case Checked():
                self._answered(CheckLac)
        self._hear(self._event_of(event))
        return ()

    def _event_of(self, event: Any) -> Event:
        match event:
            case Read(frame):
                wanted, self.is_reading = self.range, False
                assert wanted is not None
                if frame is None:
                    self.range = None
                    return CallFailed(wanted, _LOST)
                rest = ReadRange(wanted.first + 1, wanted.last)
                self.range = rest if rest.first <= rest.last else None
                return RangeRead([decode_frame(frame)])
            case Stored(metadata):
                self.asked.remove(Call.READ_METADATA)
                return MetadataRead(metadata.value)
            case Held(answers):
                self._answered(AskMembers)
                return MembersAnswered(answers)
            case End(last_entry_id, metadata):
                self.asked.remove(Call.READ_END)
                if last_entry_id is None:
                    return CallFailed(Call.READ_END, _LOST)
                return EndRead(last_entry_id, metadata.value)
        known: Event = event
        return known

    def _answered(self, kind: type[object]) -> None:
        self.asked = [each for each in self.asked if not isinstance(each, kind)]

    def _hear(self, event: Event) -> None:
        effects = self.machine.handle(event)
        self.machine.validate()
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:  # noqa: C901 - one case for each kind
        match effect:
            case Offer(entries):
                self._get(entries)
                self.listens = True
            case FollowStep(entries, _, closed):
                self._get(entries)
                self.has_ended = closed
                if not closed:
                    self._hear(Signal.STEP_WANTED)
            case Follow():
                self.followed, self.heard, self.listens = effect, None, True
            case Control.LISTEN:
                self.listens = True
            case Control.UNFOLLOW:
                self.followed = None
            case ReadRange():
                self.range, self.is_reading = effect, True
            case Control.READ_ON:
                self.is_reading = self.range is not None
            case Call() | AskMembers() | CheckLac() | Pause():
                self.asked.append(effect)
            case Fail(error):
                self.error = error
            case TickAt():
                pass
            case TellDamage():
                raise AssertionError(effect)
            case _:
                assert_never(effect)

    def _get(self, entries: Sequence[EntryFrame]) -> None:
        self.got += [each.entry_id for each in entries]


def events(
    follower: Follower, bookies: Sequence[Bookie], metadata: Frozen
) -> Iterator[tuple[str, Any]]:
    """Yield what may happen to it now, each in words and as its event."""
    if follower.has_ended or follower.error is not None:
        return
    if follower.followed is not None and follower.listens:
        number = _NUMBERS[follower.followed.bookie]
        update = _news(follower, bookies[number])
        if update is not None:
            yield f"bookie {number} pushes LAC {update.last_add_confirmed}", update
    if follower.is_reading:
        assert follower.range is not None
        yield "the next entry is read", Read(_read(follower, bookies))
    if follower.machine.metadata != metadata.value:
        yield "the metadata has changed", Signal.METADATA_CHANGED
    for asked in follower.asked:
        yield from _answers(follower, asked, bookies, metadata)
    yield "silence", Tick(_LATE)


def _news(follower: Follower, bookie: Bookie) -> Pushed | None:
    """Return what a bookie pushes; see `bookie.storage.reads`."""
    assert follower.followed is not None
    state = bookie.state
    known = (state.last_add_confirmed, state.is_fence_durable)
    if follower.heard == known:
        return None
    first = follower.followed.first_entry_id
    if follower.heard is not None:
        first = max(first, follower.heard[0] + 1)
    found = (bookie.find(entry_id) for entry_id in range(first, known[0] + 1))
    frames = tuple(bookie.records[place] for place in found if place is not None)
    return Pushed(frames, *known, _LATE)  # type: ignore[arg-type]  # of entries there are frames


def _read(follower: Follower, bookies: Sequence[Bookie]) -> bytes | None:
    assert follower.range is not None
    entry_id = follower.range.first
    for member in follower.machine.metadata.ensemble_of(entry_id).bookies:
        bookie = bookies[_NUMBERS[member]]
        if bookie.holds(entry_id):
            frame = bookie.records[bookie.find(entry_id) or 0]
            assert isinstance(frame, bytes)
            return frame
    return None


def _answers(
    follower: Follower,
    asked: Call | AskMembers | CheckLac | Pause,
    bookies: Sequence[Bookie],
    metadata: Frozen,
) -> Iterator[tuple[str, Any]]:
    match asked:
        case Call.READ_METADATA:
            yield "the metadata is read", Stored(metadata)
        case Call.READ_END:
            ensemble, quorum = metadata.value.last_ensemble, metadata.value.quorum
            held = {at: _held(bookies[_NUMBERS[each]]) for at, each in enumerate(ensemble.bookies)}
            end = judge_end(quorum, ensemble.first_entry_id, held)
            is_known = end is not None and end.is_vouched and end.is_decided
            yield "the end is read", End(end.held if end and is_known else None, metadata)
        case AskMembers(members):
            answers = tuple((each, _held(bookies[_NUMBERS[each]])) for each in members)
            yield "all members answer", Held(answers)
        case CheckLac(ensemble, vouched, claimed):
            lists = {at: _list(bookies[_NUMBERS[each]]) for at, each in enumerate(ensemble.bookies)}
            quorum = follower.machine.metadata.quorum
            confirmed = confirmed_of(quorum, lists, vouched=vouched, claimed=claimed)
            yield "the LAC is checked", Checked(claimed, confirmed)
        case Pause():
            yield "the pause is over", Signal.PAUSE_OVER
        case _:
            assert_never(asked)


def _list(bookie: Bookie) -> list[EntryRange]:
    ids = [decode_frame(each).entry_id for each in bookie.records if isinstance(each, bytes)]
    held = sorted(each for each in ids if bookie.holds(each))
    return [EntryRange(first_entry_id=each, last_entry_id=each) for each in held]


def _held(bookie: Bookie) -> HeldEntries:
    lac = bookie.state.last_add_confirmed
    ranges = ((each.first_entry_id, each.last_entry_id) for each in _list(bookie))
    return HeldEntries(lac, ENTRY_ID_MAX, tuple(each for each in ranges if each[0] > lac))
