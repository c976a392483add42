"""All parts together: which steps there are from a global state, and what must hold in each.

A global state is a tuple of numbers: contents of the parts (`parts.py`), and messages in flight as
the bits of one number.  Steps are: a message arrives; a bookie crashes; a client does something, or
gives up waiting; the metadata store applies a write, or its reply arrives or is lost.  Messages
arrive in any order or never.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dlcore.base.config import QuorumConfig
from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata, LedgerState
from dlcore.ledger.reading.confirmed import judge_end
from dlcore.wire.port import ENTRY_ID_MAX, HeldEntries
from tests.model.bookie import LEDGER_ID, Bookie, Crash, Deliver, Message
from tests.model.clients import (
    BOOKIES,
    Answer,
    Ask,
    Frozen,
    Listed,
    Recoverer,
    Writer,
)
from tests.model.parts import Parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WRITER = 0
_REQUESTS = ("add", "recovery add", "fence", "read")
_HEALER = 9
_KNOWN_TUPLES: dict[tuple[int, ...], tuple[int, ...]] = {}


class InvariantBrokenError(AssertionError):
    """A promise was broken; the message names which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The extent of one search: more of anything is a larger search."""

    ensemble_size: int = 3
    ack_quorum_size: int = 2
    entries: int = 1
    spares: int = 0
    recoverers: int = 1
    crashes: int = 0
    """Bookies that lose power."""
    time_outs: int = 0
    """Adds that the writer gives up; the messages stay in flight."""
    recovery_time_outs: int = 0
    """Adds and reads that recoverers give up."""
    lost_replies: int = 0
    """Answers of the metadata store that the writer does not get, to writes applied or not."""
    closes: bool = False
    """Whether the writer may close the ledger."""


class State(NamedTuple):
    """One global state."""

    register: int
    clients: tuple[int, ...]
    bookies: tuple[int, ...]
    in_flight: int
    reply: Answer | None = None
    """The metadata store's answer on its way to the writer."""
    late: Ask | None = None
    """A write that the writer gave up, and that may still be applied."""
    left: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Crashes, time-outs, recovery's time-outs and lost replies that may still happen."""
    unlucky: int = 0
    """Number of bookies that crashed or were given up; the others are still all alike."""
    shown: int = -1
    """The highest entry that readers were shown: one reads in every state."""


class Step(NamedTuple):
    """The step, described by `describe`."""

    kind: str
    client: int
    what: Any


class Register:
    """The ledger's metadata in a store with compare-and-set."""

    def __init__(self, metadata: LedgerMetadata) -> None:
        self.metadata = Frozen(metadata)
        self.version = 1

    def take(self, ask: Ask) -> Sequence[Answer]:
        """Return the answer."""
        if ask.metadata is None:
            return [Answer(self.version, self.metadata)]
        if ask.version != self.version:
            return [Answer(self.version, error="refused")]
        self.metadata = ask.metadata
        self.version += 1
        return [Answer(self.version)]


class Protocol:
    """The steps of one scope; `bookie_class` and `recoverer_class` are changed by mutants."""

    bookie_class: type[Bookie] = Bookie
    recoverer_class: type[Recoverer] = Recoverer

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.parts = Parts()
        self._messages: list[Message] = []
        self._of_client = [0] * (_HEALER + 1)
        self._to_bookie = [0] * len(BOOKIES)
        self._needed: dict[tuple[int, int, int], bool] = {}
        self._bits: dict[Message, int] = {}
        self._judged: set[tuple[int, ...]] = set()
        self._reads: dict[tuple[int, tuple[int, ...]], int] = {}
        self._ends: dict[tuple[int, tuple[int, ...]], int] = {}
        self._metadata = LedgerMetadata(
            ledger_id=LEDGER_ID,
            quorum=QuorumConfig(
                ensemble_size=scope.ensemble_size,
                write_quorum_size=scope.ensemble_size,
                ack_quorum_size=scope.ack_quorum_size,
            ),
            state=LedgerState.OPEN,
            ensembles=(Ensemble(0, BOOKIES[: scope.ensemble_size]),),
            token="0" * 32,
            created_ms=0,
        )

    def initial(self) -> State:
        """Return the state after the ledger was created."""
        scope = self.scope
        number = self.parts.number
        writer = Writer(self._metadata, entry_count=scope.entries, closes=scope.closes)
        recoverers = [self.recoverer_class(each + 1) for each in range(scope.recoverers)]
        bookies = [self.bookie_class() for _ in range(scope.ensemble_size + scope.spares)]
        clients = (number(writer), *map(number, recoverers))
        self._unbegun = dict(enumerate(clients))
        return State(
            register=number(Register(self._metadata)),
            clients=clients,
            bookies=tuple(map(number, bookies)),
            in_flight=0,
            left=(scope.crashes, scope.time_outs, scope.recovery_time_outs, scope.lost_replies),
        )

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        """Yield every step from `state`; none once nothing can change what was promised."""
        if self._is_settled(state):
            return
        for step, after in self._all_steps(state):
            shown = max(state.shown, self._read(after))
            yield step, after if after.shown == shown else after._replace(shown=shown)

    def _all_steps(self, state: State) -> Iterator[tuple[Step, State]]:
        yield from self._arrivals(state)
        yield from self._crashes(state)
        for client in range(len(state.clients)):
            yield from self._own_steps(state, client)
            yield from self._metadata_steps(state, client)

    def _read(self, state: State) -> int:
        """Return what a reader may be shown that gets all answers in this state."""
        key = (state.register, state.bookies)
        end = self._reads.get(key)
        if end is None:
            metadata: LedgerMetadata = self.parts.content(state.register).metadata.value
            bookies = [self.parts.content(each) for each in state.bookies]
            end = self._reads[key] = _read_end(metadata, bookies, self.scope.entries)
        return end

    def _is_settled(self, state: State) -> bool:
        """Whether the ledger is closed and all its clients have ended."""
        metadata = self.parts.content(state.register).metadata.value
        if metadata.state is not LedgerState.CLOSED:
            return False
        return all(self.parts.content(each).is_over for each in state.clients)

    # Messages

    def _arrivals(self, state: State) -> Iterator[tuple[Step, State]]:
        rest = state.in_flight
        while rest:
            bit = rest & -rest
            rest ^= bit
            message = self._messages[bit.bit_length() - 1]
            without = state.in_flight ^ bit
            if message.kind not in _REQUESTS:
                yield self._client_step(state, message.client, message, in_flight=without)
                continue
            place = message.bookie
            number, answers = self.parts.step(state.bookies[place], Deliver(message))
            yield self._serve(state, without, message, number, answers, state.left, state.unlucky)
            if state.left[0] and place <= state.unlucky:
                if self.parts.content(state.bookies[place]).is_doomed:
                    continue
                number, answers = self.parts.step(state.bookies[place], Deliver(message, True))
                if self.parts.content(number).is_doomed:
                    left = _put(state.left, 0, state.left[0] - 1)
                    unlucky = self._unlucky(state, place)
                    yield self._serve(state, without, message, number, answers, left, unlucky)

    def _serve(
        self,
        state: State,
        in_flight: int,
        message: Message,
        number: int,
        answers: Sequence[Message],
        left: tuple[int, int, int, int],
        unlucky: int,
    ) -> tuple[Step, State]:
        bookies = _put(state.bookies, message.bookie, number)
        in_flight = self._send(in_flight, answers)
        touched = self._to_bookie[message.bookie]
        in_flight = self._forget(in_flight, touched, state.clients, bookies)
        kind = "arrives" if left is state.left else "arrives, un-synced"
        return (
            Step(kind, message.client, message),
            State(
                state.register,
                state.clients,
                bookies,
                in_flight,
                state.reply,
                state.late,
                left,
                unlucky,
            ),
        )

    def _client_step(
        self,
        state: State,
        client: int,
        event: Any,
        *,
        kind: str = "arrives",
        in_flight: int | None = None,
        **changes: Any,
    ) -> tuple[Step, State]:
        number, sent = self.parts.step(state.clients[client], event)
        clients = _put(state.clients, client, number)
        in_flight = self._send(state.in_flight if in_flight is None else in_flight, sent)
        in_flight = self._forget(in_flight, self._of_client[client], clients, state.bookies)
        after = State(
            state.register,
            clients,
            state.bookies,
            in_flight,
            state.reply,
            state.late,
            state.left,
            state.unlucky,
        )
        return Step(kind, client, event), after._replace(**changes) if changes else after

    def _send(self, in_flight: int, messages: Sequence[Message]) -> int:
        for message in messages:
            bit = self._bits.get(message)
            if bit is None:
                bit = self._bits[message] = 1 << len(self._messages)
                self._messages.append(message)
                self._of_client[message.client] |= bit
                self._to_bookie[message.bookie] |= bit
            in_flight |= bit
        return in_flight

    def _forget(
        self, in_flight: int, touched: int, clients: tuple[int, ...], bookies: tuple[int, ...]
    ) -> int:
        """Drop those of the `touched` messages that can never change anything any more."""
        rest = in_flight & touched
        while rest:
            bit = rest & -rest
            rest ^= bit
            message = self._messages[bit.bit_length() - 1]
            key = (bit, clients[message.client], bookies[message.bookie])
            is_needed = self._needed.get(key)
            if is_needed is None:
                is_needed = self._needed[key] = self._is_needed(message, key[1], key[2])
            if not is_needed:
                in_flight ^= bit
        return in_flight

    def _is_needed(self, message: Message, client: int, bookie: int) -> bool:
        if message.kind not in _REQUESTS:
            number, sent = self.parts.step(client, message)
            return number != client or bool(sent)
        number, answers = self.parts.step(bookie, Deliver(message))
        return (
            number != bookie
            or self.parts.content(bookie).is_doomed
            or any(self._is_needed(answer, client, bookie) for answer in answers)
        )

    # Bookies

    def _crashes(self, state: State) -> Iterator[tuple[Step, State]]:
        for place, bookie in enumerate(state.bookies):
            content = self.parts.content(bookie)
            left, unlucky = state.left, state.unlucky
            if not content.is_doomed:
                if not left[0] or place > unlucky:
                    continue
                left = _put(left, 0, left[0] - 1)
                unlucky = self._unlucky(state, place)
            for kept in range(len(content.records) - content.durable + 1):
                number, _ = self.parts.step(bookie, Crash(kept))
                if number == bookie:
                    continue  # nothing was forgotten: for everybody else nothing happened
                bookies = _put(state.bookies, place, number)
                touched = self._to_bookie[place]
                in_flight = self._forget(state.in_flight, touched, state.clients, bookies)
                after = state._replace(
                    bookies=bookies, in_flight=in_flight, left=left, unlucky=unlucky
                )
                yield Step("crashes", place, kept), after

    def _unlucky(self, state: State, place: int) -> int:
        """Until something happens to them the bookies are alike: name them in that order."""
        return max(state.unlucky, min(place + 1, self.scope.ensemble_size))

    # Clients

    def _own_steps(self, state: State, client: int) -> Iterator[tuple[Step, State]]:
        content = self.parts.content(state.clients[client])
        budget = 1 if client == WRITER else 2
        for offer in content.offers():
            if offer.what not in ("time out", "give up read"):
                yield self._client_step(state, client, offer, kind="does")
                continue
            place = offer.bookie
            if not state.left[budget] or state.unlucky < place < self.scope.ensemble_size:
                continue
            yield self._client_step(
                state,
                client,
                offer,
                kind="does",
                left=_put(state.left, budget, state.left[budget] - 1),
                unlucky=self._unlucky(state, place),
            )
        if content.looks:
            size = self.scope.ensemble_size
            listed = Listed(tuple(range(size, size + self.scope.spares)))
            yield self._client_step(state, client, listed, kind="lists")

    def _metadata_steps(self, state: State, client: int) -> Iterator[tuple[Step, State]]:
        """A write of the writer and its reply are two steps: much may happen between them."""
        if client == WRITER and state.late is not None:
            register, _ = self.parts.step(state.register, state.late)
            yield Step("late", client, state.late), state._replace(register=register, late=None)
        content = self.parts.content(state.clients[client])
        ask = content.asks
        if ask is None or not self._may_begin(state, client):
            return
        may_lose = state.left[3] and not content.is_closing
        left = _put(state.left, 3, state.left[3] - 1)
        lost = Answer(0, error="lost")
        if client == WRITER and state.reply is not None:
            yield self._client_step(state, client, state.reply, kind="reply", reply=None)
            if may_lose:
                yield self._client_step(state, client, lost, kind="reply", reply=None, left=left)
            return
        register, (answer,) = self.parts.step(state.register, ask)
        if client != WRITER or ask.metadata is None:
            _, after = self._client_step(state, client, answer, register=register)
            yield Step("asks", client, (ask, answer)), after
            return
        yield (
            Step("asks", client, (ask, answer)),
            state._replace(register=register, reply=answer),
        )
        if may_lose and state.late is None:
            yield self._client_step(state, client, lost, kind="reply", late=ask, left=left)

    def _may_begin(self, state: State, client: int) -> bool:
        """Recoverers are alike, so they begin in order."""
        before = state.clients[client - 1]
        return client <= WRITER + 1 or before != self._unbegun[client - 1]

    # Promises

    def check(self, state: State) -> None:
        """Judge the state.

        Raises:
            InvariantBrokenError: a promise is broken.
        """
        key = (state.register, *state.clients, -1, *state.bookies, state.shown)
        if key in self._judged:
            return
        self._judged.add(key)
        metadata: LedgerMetadata = self.parts.content(state.register).metadata.value
        writer: Writer = self.parts.content(state.clients[WRITER])
        assert writer.appender is not None
        acked = writer.appender.window.last_add_confirmed
        bookies = [self.parts.content(each) for each in state.bookies]
        if metadata.state is LedgerState.CLOSED:
            _require(
                "NoDivergenceBetweenClientAndMetadata",
                acked <= metadata.last_entry_id,
                f"closed at {metadata.last_entry_id}, acknowledged up to {acked}",
            )
            _require(
                "WhatWasShownStays",
                state.shown <= metadata.last_entry_id,
                f"closed at {metadata.last_entry_id}, shown up to {state.shown}",
            )
        elif metadata.state is LedgerState.OPEN:
            end = self._read(state)
            _require("LinearizableReads", acked <= end, f"{acked} is acknowledged, {end} is read")
        for client in state.clients:
            reported = self.parts.content(client).reported_end
            stored = (metadata.last_entry_id, metadata.length_bytes)
            _require(
                "EveryoneGetsTheStoredEnd",
                reported is None or (metadata.state is LedgerState.CLOSED and reported == stored),
                f"{reported} was reported, stored is {metadata.state.name} at {stored}",
            )
        _check_holders(metadata, bookies, max(acked, state.shown))
        for place, bookie in enumerate(bookies):
            _require(
                "NoDirtyConfirm",
                bookie.state.last_add_confirmed <= acked,
                f"bookie-{place} says {bookie.state.last_add_confirmed} is confirmed, not {acked}",
            )
        self._check_healing(state, max(acked, state.shown))

    def _check_healing(self, state: State, kept: int) -> None:
        """With all bookies up and no one else at work a recoverer closes the ledger, well."""
        end = self._heal(state.register, state.bookies)
        _require(
            "AllAckedEntriesAreReadable",
            kept <= end,
            f"a recovery from here closes at {end}, acknowledged or shown up to {kept}",
        )

    def _heal(self, register: int, bookies: tuple[int, ...]) -> int:
        """Run one recovery alone and return the end; remember it by where it starts."""
        known = self._ends.get((register, bookies))
        if known is not None:
            return known
        start = (register, bookies)
        client = self.parts.number(self.recoverer_class(_HEALER))
        queue: list[Message] = []
        numbers = [
            self.parts.step(each, Crash(0))[0] if self.parts.content(each).is_doomed else each
            for each in bookies
        ]
        while True:
            if queue:
                message = queue.pop(0)
                bookie, answers = self.parts.step(numbers[message.bookie], Deliver(message))
                numbers[message.bookie] = bookie
                events: Sequence[Any] = answers
            else:
                ask = self.parts.content(client).asks
                if ask is None:
                    break
                register, events = self.parts.step(register, ask)
            for event in events:
                client, sent = self.parts.step(client, event)
                queue += sent
        metadata: LedgerMetadata = self.parts.content(register).metadata.value
        _require(
            "ALedgerCanBeClosed",
            metadata.state is LedgerState.CLOSED
            and self.parts.content(client).reported_end is not None,
            f"a recovery with all bookies up leaves it {metadata.state.name}",
        )
        contents = [self.parts.content(each) for each in numbers]
        _check_holders(metadata, contents, metadata.last_entry_id)
        self._ends[start] = metadata.last_entry_id
        return metadata.last_entry_id


def _read_end(metadata: LedgerMetadata, bookies: Sequence[Bookie], entry_count: int) -> int:
    """Return the end of an open ledger as the product's rule finds it; -1 of another."""
    if metadata.state is not LedgerState.OPEN:
        return -1
    answers: dict[int, HeldEntries] = {}
    for position, member in enumerate(metadata.last_ensemble.bookies):
        bookie = bookies[BOOKIES.index(member)]
        lac = bookie.state.last_add_confirmed
        held = [(each, each) for each in range(lac + 1, entry_count) if bookie.holds(each)]
        answers[position] = HeldEntries(lac, ENTRY_ID_MAX, held)
    end = judge_end(metadata.quorum, metadata.last_ensemble.first_entry_id, answers)
    assert end is not None
    assert end.is_decided
    return end.held


def _check_holders(metadata: LedgerMetadata, bookies: Sequence[Bookie], acked: int) -> None:
    for entry_id in range(acked + 1):
        ensemble = metadata.ensemble_of(entry_id).bookies
        holders = [
            place
            for place, bookie in enumerate(bookies)
            if BOOKIES[place] in ensemble and bookie.holds(entry_id)
        ]
        _require(
            "AllCommittedEntriesReachAckQuorum",
            len(holders) >= metadata.quorum.ack_quorum_size,
            f"entry {entry_id} is held by {holders} of {[each.name for each in ensemble]}",
        )


def _require(name: str, holds: bool, message: str) -> None:
    if not holds:
        raise InvariantBrokenError(f"{name}: {message}")


def _put(values: tuple[int, ...], place: int, value: int) -> Any:
    """Return `values` with one changed; equal ones are one object, which saves much memory."""
    changed = (*values[:place], value, *values[place + 1 :])
    return _KNOWN_TUPLES.setdefault(changed, changed)


def _name(client: int) -> str:
    return "the writer" if client == WRITER else f"recoverer-{client}"


def describe(step: Step) -> str:
    """Return a step as a sentence."""
    name = _name(step.client)
    what = step.what
    match step.kind:
        case "crashes":
            return f"bookie-{step.client} loses power, {what} un-synced records survive"
        case "asks":
            ask, answer = what
            return f"{name} {_describe_ask(ask)}{': refused' if answer.error else ''}"
        case "late":
            return f"a write that {name} gave up is applied: it {_describe_ask(what)}"
        case "reply":
            return f"{name} gets {'no' if what.error == 'lost' else 'its'} reply"
        case "lists":
            return f"{name} finds {len(what.bookies)} spare bookies"
        case "does":
            entry = f" entry {what.entry_id}" if what.entry_id >= 0 else ""
            place = f" at position {what.position}" if what.position >= 0 else ""
            return f"{name}: {what.what}{entry}{place}"
    entry = f" {what.entry_id}" if what.entry_id >= 0 else ""
    if what.kind in _REQUESTS:
        return f"bookie-{what.bookie} gets '{what.kind}{entry}' of {name}{step.kind[7:]}"
    lac = f", LAC {what.data}" if what.kind == "fenced" else ""
    return f"{name} gets '{what.kind}{entry}{lac}' of bookie-{what.bookie}"


def _describe_ask(ask: Ask) -> str:
    if ask.metadata is None:
        return "reads the metadata"
    metadata = ask.metadata.value
    ensembles = " ".join(
        f"{each.first_entry_id}:{','.join(bookie.name for bookie in each.bookies)}"
        for each in metadata.ensembles
    )
    end = f" at {metadata.last_entry_id}" if metadata.state is LedgerState.CLOSED else ""
    return f"stores {metadata.state.name}{end} {ensembles}"
