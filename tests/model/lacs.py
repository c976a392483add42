"""The publication of the LAC: every interleaving in a small scope.

The machines are the real ones: the writer's `LedgerAppender`, and `LedgerFollow`
(`followers.py`); so are the rules of the bookies (`bookie.py`).  A step is: the writer appends, or
wants its LAC published; a request or an answer arrives, late or never; a timer ends; bookies are
listed; the changed ensemble is stored; a bookie is fenced, or crashes, and forgets what was not
durable; the followed bookie pushes what it knows, or its stream ends; the follower gets an answer,
or waits in vain.  Without a follower the promises look at the bookies alone, from which followers
get all.

A recovery only fences here.  With the real `LedgerRecovery`, one entry and no publication have more
than 1,500,000 states; `system.py` explores it against the appender, with 95,000 states.

Promises, looked at in every state:

* NoDirtyLac: an entry up to a LAC that any bookie knows, or is being sent, is durable on Qa bookies
  of its stored ensemble.
* OneMessageAtATime: at most one message with a LAC is on its way to a bookie.
* PublishedIsSeen: once the publication of a LAC has succeeded, no read can reach coverage without a
  bookie that knows it, after crashes as well.
* EveryMemberLearnsTheLac, NoPublicationWaitsForEver: when all messages have arrived and all timers
  have ended, every member knows the LAC of a writer that has not failed, or the metadata shows it,
  and no publication waits.
* InOrderOnce, EntriesStay: a follower gets each entry once, in order, and none that is not durable
  on Qa bookies.
* FollowersGetAll: when nothing more can happen, a follower has every confirmed entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import BookieUnavailableError, LedgerFencedError
from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata, LedgerState, is_covered
from dlcore.ledger.placing.placement import Topology
from dlcore.ledger.reading.follow import Signal as FollowSignal
from dlcore.ledger.writing.appender import (
    AddFailed,
    AddSucceeded,
    After,
    Append,
    BookiesListed,
    Call,
    CompleteAdds,
    GoOnWithout,
    LacAccepted,
    LacFailed,
    MetadataStored,
    SendAdd,
    SendLac,
    Signal,
    StoreMetadata,
)
from dlcore.wire.frames import decode_frame
from tests.fixtures.append_bench import GivenChoice, appender_of
from tests.model.bookie import LEDGER_ID, Bookie, Crash, Deliver, Message
from tests.model.clients import BOOKIES, Ask, Do, Frozen
from tests.model.followers import Follower, events
from tests.model.parts import Parts
from tests.model.system import Register

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.ledger.writing.appender import Effect, Event

_NUMBERS = {bookie: number for number, bookie in enumerate(BOOKIES)}
_QUORUM = QuorumConfig(ensemble_size=3, write_quorum_size=3, ack_quorum_size=2)
_CREATED = LedgerMetadata(
    ledger_id=LEDGER_ID,
    quorum=_QUORUM,
    state=LedgerState.OPEN,
    ensembles=(Ensemble(0, BOOKIES[: _QUORUM.ensemble_size]),),
    token="0" * 32,
    created_ms=0,
)
_REQUESTS = ("add", "lac")
_AWAY = BookieUnavailableError("no answer")
_MAY_COME_NEVER = (Call.LIST_BOOKIES, Signal.RETRY_DUE)
"""Without another bookie they come again and again, and change nothing."""
_FOLLOWS_MAX = 20
"""Events after which a follower has all, if nothing else happens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The extent of one search."""

    appends: int = 1
    publishes: int = 1
    losses: int = 0
    """Requests and answers that are lost."""
    crashes: int = 0
    fences: int = 0
    spares: int = 0
    """Bookies that may replace members."""
    followers: int = 0
    """At most one."""
    failures: int = 0
    """Streams of the follower that end."""


SMALL = {
    "one entry": Scope(),
    "one entry, a message is lost": Scope(losses=1),
    "one entry, a bookie crashes": Scope(crashes=1),
    "one entry, a follower": Scope(publishes=0, followers=1),
}
LARGE = {
    "two entries": Scope(appends=2, publishes=0),
    "one entry, a bookie is fenced and a message lost": Scope(losses=1, fences=1),
    "one entry, a bookie is replaced": Scope(losses=1, spares=1),
    "two entries, a message is lost": Scope(appends=2, publishes=0, losses=1),
    "two entries, a publication": Scope(appends=2),
    "one entry, a publication, a follower": Scope(followers=1),
    "one entry, a follower whose stream ends": Scope(followers=1, failures=1),
}


class Listed(NamedTuple):
    """Event: these bookies may replace members."""

    bookies: tuple[int, ...]


class Stored(NamedTuple):
    """Event: the metadata store holds the changed ensemble."""


class Writer:
    """The appender, and what its driver does for it."""

    def __init__(self) -> None:
        self.appender = appender_of(_CREATED, GivenChoice())
        self.storing: StoreMetadata | None = None
        self.must_answer = False
        """Whether callers have yet to run, after entries were acknowledged."""

    def take(self, event: Any) -> Sequence[Any]:
        """Return messages, timers and calls."""
        if event is Signal.CALLERS_ANSWERED:
            self.must_answer = False
        effects = self.appender.handle(self._event_of(event))
        self.appender.validate()
        return [each for effect in effects for each in self._outputs_of(effect)]

    def _event_of(self, event: Any) -> Event:
        match event:
            case Message("added", _, position, bookie, entry_id):
                return AddSucceeded(entry_id, position, BOOKIES[bookie])
            case Message("refused", _, position, bookie, entry_id):
                error = LedgerFencedError("fenced")
                return AddFailed(entry_id, position, BOOKIES[bookie], error, now=0.0)
            case Message("lost add", _, position, bookie, entry_id):
                return AddFailed(entry_id, position, BOOKIES[bookie], _AWAY, now=0.0)
            case Message("lac accepted", _, _, bookie, _, lac):
                assert isinstance(lac, int)
                return LacAccepted(BOOKIES[bookie], lac)
            case Message("lost lac", _, _, bookie):
                return LacFailed(BOOKIES[bookie], _AWAY)
            case Listed(bookies):
                return BookiesListed([BOOKIES[each] for each in bookies], Topology(), 0.0)
            case Stored():
                stored, self.storing = self.storing, None
                assert stored is not None
                return MetadataStored(stored.metadata, stored.version + 1)
            case Do("append"):
                return Append([b"."])
            case Signal():
                return event
        raise AssertionError(event)

    def _outputs_of(self, effect: Effect) -> list[Any]:
        match effect:
            case SendAdd(entry_id, frame, targets):
                return [
                    Message("add", 0, position, _NUMBERS[bookie], entry_id, bytes(frame))
                    for position, bookie in targets
                ]
            case SendLac(bookie, lac):
                return [Message("lac", 0, -1, _NUMBERS[bookie], -1, lac)]
            case CompleteAdds():
                self.must_answer = True
            case After(_, Signal() as due):
                return [due]
            case GoOnWithout():
                return [Signal.RETRY_DUE]
            case StoreMetadata():
                self.storing = effect
            case Call():
                return [effect]
        return []


class State(NamedTuple):
    """All of it; clients, bookies and the metadata store are numbers of contents."""

    writer: int
    bookies: tuple[int, ...]
    store: int
    follower: int | None
    flights: frozenset[Message] = frozenset()
    due: frozenset[Signal | Call] = frozenset()
    """Timers that run, and calls without an answer."""
    wanted: int = -1
    """The LAC that is to be published."""
    appends: int = 0
    publishes: int = 0
    losses: int = 0
    crashes: int = 0
    fences: int = 0
    failures: int = 0


class Model:
    """The steps of one scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.parts = Parts()

    def initial(self) -> State:
        """Return where it begins: a ledger without entries."""
        scope, number = self.scope, self.parts.number
        bookies = [Bookie() for _ in range(_QUORUM.ensemble_size + scope.spares)]
        return State(
            number(Writer()),
            tuple(map(number, bookies)),
            number(Register(_CREATED)),
            number(Follower(_CREATED)) if scope.followers else None,
        )

    def _writer(self, state: State) -> Writer:
        found: Writer = self.parts.content(state.writer)
        return found

    def _bookies(self, state: State) -> list[Bookie]:
        return [self.parts.content(number) for number in state.bookies]

    # Promises

    def check(self, state: State) -> str:
        """Return which promise is broken, "" if none is."""
        bookies = self._bookies(state)
        lacs = [each.state.last_add_confirmed for each in bookies]
        lacs += [_lac_of(each) for each in state.flights if each.kind in _REQUESTS]
        sent = [each.bookie for each in state.flights if "lac" in each.kind]
        if (dirty := self._dirty_entry(state, max(lacs))) is not None:
            return f"NoDirtyLac: entry {dirty} is not on Qa bookies, and a LAC is {max(lacs)}"
        if len(sent) != len(set(sent)):
            return f"OneMessageAtATime: {sorted(sent)}"
        broken = self._check_publication(state) or self._check_rest(state)
        return broken or self._check_follower(state)

    def _dirty_entry(self, state: State, lac: int) -> int | None:
        metadata, bookies = self._writer(state).appender.metadata, self._bookies(state)
        for entry_id in range(lac + 1):
            members = metadata.ensemble_of(entry_id).bookies
            holders = sum(bookies[_NUMBERS[each]].holds(entry_id) for each in members)
            if holders < _QUORUM.ack_quorum_size:
                return entry_id
        return None

    def _check_publication(self, state: State) -> str:
        appender, lac = self._writer(state).appender, state.wanted
        ensemble = appender.metadata.last_ensemble
        if lac < ensemble.first_entry_id or not appender.is_published(lac):
            return ""
        bookies = self._bookies(state)
        unaware = {
            position
            for position, bookie in enumerate(ensemble.bookies)
            if bookies[_NUMBERS[bookie]].durable_lac() < lac
        }
        if is_covered(_QUORUM, unaware):
            return f"PublishedIsSeen: LAC {lac} is published, and unknown at {unaware}"
        return ""

    def _check_follower(self, state: State) -> str:
        if state.follower is None:
            return ""
        follower: Follower = self.parts.content(state.follower)
        got = follower.got
        if follower.error is not None:
            return f"NoFollowerFails: {follower.error!r}"
        if got != list(range(len(got))):
            return f"InOrderOnce: {got}"
        if (dirty := self._dirty_entry(state, len(got) - 1)) is not None:
            return f"EntriesStay: entry {dirty} was delivered, and is not on Qa bookies"
        return self._check_end(state, follower) if self._rests(state) else ""

    def _check_end(self, state: State, follower: Follower) -> str:
        """Let the follower go on alone; a silence comes when it waits for nothing else."""
        confirmed = self._writer(state).appender.window.last_add_confirmed
        metadata: Frozen = self.parts.content(state.store).metadata
        for _ in range(_FOLLOWS_MAX):
            if len(follower.got) > confirmed:
                return ""
            _, event = next(events(follower, self._bookies(state), metadata))
            state = self._inform(state, event)
            assert state.follower is not None
            follower = self.parts.content(state.follower)
        return f"FollowersGetAll: the follower has {follower.got}, and nothing more happens"

    def _rests(self, state: State) -> bool:
        """Return whether nothing is on its way, and no timer runs that changes anything."""
        writer = self._writer(state)
        is_busy = bool(state.flights or writer.must_answer or writer.storing)
        return not is_busy and state.due.issubset(_MAY_COME_NEVER)

    def _check_rest(self, state: State) -> str:
        writer = self._writer(state)
        appender = writer.appender
        if appender.error is not None or not self._rests(state):
            return ""
        if not appender.is_published(state.wanted):
            return f"NoPublicationWaitsForEver: LAC {state.wanted} is not published"
        ensemble, lac = appender.metadata.last_ensemble, appender.window.last_add_confirmed
        bookies = self._bookies(state)
        known = [bookies[_NUMBERS[each]].state.last_add_confirmed for each in ensemble.bookies]
        # The metadata shows that entries before the last ensemble are confirmed.
        if lac < ensemble.first_entry_id or set(known) == {lac}:
            return ""
        return f"EveryMemberLearnsTheLac: {lac}, known are {known}"

    # Steps

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield every step, and the state after it."""
        writer, scope = self._writer(state), self.scope
        if writer.appender.error is None:
            if state.appends < scope.appends:
                after = self._feed(state._replace(appends=state.appends + 1), Do("append"))
                yield "the writer appends", after
            lac = writer.appender.window.last_add_confirmed
            if state.publishes < scope.publishes and lac >= 0:
                after = state._replace(publishes=state.publishes + 1, wanted=lac)
                yield f"LAC {lac} is to be published", self._feed(after, Signal.PUBLISH_LAC)
        if writer.must_answer:
            yield "callers have run", self._feed(state, Signal.CALLERS_ANSWERED)
        if writer.storing is not None:
            ask = Ask(Frozen(writer.storing.metadata), writer.storing.version)
            store, _ = self.parts.step(state.store, ask)
            yield "the ensemble is stored", self._feed(state._replace(store=store), Stored())
        for due in state.due:
            yield f"{due.name} comes", self._end(state, due)
        # A connection keeps the order of adds.  LACs overtake them, and are overtaken.
        first = {
            each: min(
                other.entry_id
                for other in state.flights
                if (other.kind, other.bookie) == (each.kind, each.bookie)
            )
            for each in state.flights
        }
        for message in (each for each, entry_id in first.items() if each.entry_id == entry_id):
            yield from self._travel(state, message)
        for number in range(len(state.bookies)):
            yield from self._suffer(state, number)
        yield from self._follow(state)

    def _follow(self, state: State) -> Iterator[tuple[str, State]]:
        if state.follower is None:
            return
        follower: Follower = self.parts.content(state.follower)
        metadata: Frozen = self.parts.content(state.store).metadata
        for what, event in events(follower, self._bookies(state), metadata):
            yield f"the follower: {what}", self._inform(state, event)
        if follower.followed is not None and state.failures < self.scope.failures:
            after = state._replace(failures=state.failures + 1)
            yield "the follower's stream ends", self._inform(after, FollowSignal.STREAM_ENDED)

    def _inform(self, state: State, event: Any) -> State:
        """Return the state after an input of the follower."""
        assert state.follower is not None
        number, _ = self.parts.step(state.follower, event)
        return state._replace(follower=number)

    def _feed(self, state: State, event: Any) -> State:
        number, outputs = self.parts.step(state.writer, event)
        flights = {each for each in outputs if isinstance(each, Message)}
        due = {each for each in outputs if not isinstance(each, Message)}
        return state._replace(writer=number, flights=state.flights | flights, due=state.due | due)

    def _end(self, state: State, due: Signal | Call) -> State:
        after = state._replace(due=state.due - {due})
        if isinstance(due, Signal):
            return self._feed(after, due)
        members = self._writer(state).appender.metadata.last_ensemble.bookies
        spares = {*range(len(state.bookies))} - {_NUMBERS[each] for each in members}
        return self._feed(after, Listed(tuple(sorted(spares))))

    def _travel(self, state: State, message: Message) -> Iterator[tuple[str, State]]:
        left = state._replace(flights=state.flights - {message})
        lost = message._replace(kind="lost lac" if "lac" in message.kind else "lost add", data=b"")
        if message.kind not in _REQUESTS:
            yield f"{_words(message)} arrives", self._feed(left, message)
        else:
            yield f"{_words(message)} arrives", self._deliver(left, message, lost)
            if state.crashes < self.scope.crashes:
                after = left._replace(crashes=state.crashes + 1)
                after = self._deliver(after, message, lost, doomed=True)
                yield f"{_words(message)} arrives, and never at the disk", after
        if message != lost and state.losses < self.scope.losses:
            after = left._replace(flights=left.flights | {lost}, losses=state.losses + 1)
            yield f"{_words(message)} is lost", after

    def _deliver(
        self, state: State, message: Message, lost: Message, *, doomed: bool = False
    ) -> State:
        after, answers = self._at(state, message.bookie, Deliver(message, doomed))
        # A request without an answer ends by its time-out.
        return after._replace(flights=after.flights.union(answers or [lost]))

    def _suffer(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        bookie: Bookie = self.parts.content(state.bookies[number])
        if bookie.is_doomed:
            for kept in range(len(bookie.records) - bookie.durable + 1):
                after, _ = self._at(state, number, Crash(kept))
                after = self._break_stream(after, number)
                yield f"bookie {number} crashes, {kept} records survive", after
        if state.fences < self.scope.fences and not bookie.state.fenced:
            fence = Message("fence", 1, number, number)
            after, _ = self._at(state, number, Deliver(fence))
            yield f"bookie {number} is fenced", after._replace(fences=state.fences + 1)

    def _break_stream(self, state: State, bookie: int) -> State:
        """Return the state after a crash of a bookie, which may be followed."""
        if state.follower is not None:
            followed = self.parts.content(state.follower).followed
            if followed is not None and _NUMBERS[followed.bookie] == bookie:
                return self._inform(state, FollowSignal.STREAM_ENDED)
        return state

    def _at(
        self, state: State, bookie: int, event: Deliver | Crash
    ) -> tuple[State, tuple[Message, ...]]:
        number, answers = self.parts.step(state.bookies[bookie], event)
        bookies = (*state.bookies[:bookie], number, *state.bookies[bookie + 1 :])
        return state._replace(bookies=bookies), answers


def _lac_of(request: Message) -> int:
    if isinstance(request.data, int):
        return request.data
    return decode_frame(request.data).last_add_confirmed


def _words(message: Message) -> str:
    about = f"entry {message.entry_id}" if message.entry_id >= 0 else f"LAC {message.data!r}"
    return f"{message.kind} of bookie {message.bookie} ({about})"
