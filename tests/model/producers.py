"""Clients over two proxies that take a log from each other: every interleaving in a small scope.

The machines are the real ones (`producer_parts.py`); the log, its fencing and the wire are
modelled.  A step is: a client begins, or begins again at any proxy after its stream was lost; a
message arrives; a stream breaks, after which its messages may still arrive, at any later time; an
owner makes an entry of what it accepted; the oldest entry becomes durable; an owner gives the log
away in order; a proxy takes the log over, by which some first entries of those on their way are in
it and no later ones; a proxy crashes; so much time passes that a log forgets silent producers.  An
owner that was taken over from does not know it until it writes, or refuses.  Replies arrive at
once, or never.

Promises, looked at in every state:

* InOrderOnce: in the log, the sequences of a producer are 0, 1, 2, ... without gap or repetition,
  and so are the records of each client.
* AckedIsThere: records that were acknowledged to a client are in the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from dlcore.log.entries.stamp import decode_stamp
from dlcore.log.proxied.producers import GENERATED_FORGOTTEN_MS, Producers
from tests.model.parts import Parts
from tests.model.producer_parts import (
    Arrived,
    Begin,
    ClientEnd,
    Closes,
    Ends,
    Entry,
    Flush,
    Gone,
    Heard,
    Lost,
    LostLog,
    Opened,
    Opens,
    Over,
    OwnerEnd,
    PartingOver,
    Release,
    Replies,
    Stored,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROXIES = (0, 1)
BROKEN = "ProxyUnavailableError"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The extent of one search: the clients, and how much happens to them."""

    clients: int = 1
    records: int = 2
    """That each of them has to write."""
    is_named: bool = True
    """All clients are incarnations of one producer; else each has a name that was generated."""
    takeovers: int = 2
    crashes: int = 1
    breaks: int = 1
    releases: int = 0
    pauses: int = 0
    """How often so much time passes that a log forgets."""
    others: int = 0
    """How many entries have only records of others."""


SMALL = {
    "one client, two records": Scope(),
    "two incarnations": Scope(clients=2, records=1, breaks=0),
    "a log moves in order": Scope(crashes=0, releases=1),
    "a log forgets": Scope(records=1, is_named=False, crashes=0, pauses=1, others=1),
}
LARGE = {
    "two incarnations, and a stream breaks": Scope(clients=2, records=1),
    "one client, three records": Scope(records=3),
    "one client, three takeovers": Scope(takeovers=3, crashes=2, breaks=2),
    "a log moves, and crashes": Scope(releases=1),
    "a log forgets one of two records": Scope(is_named=False, pauses=1, others=1),
}


class Wire(NamedTuple):
    """A stream: whose it is, and the messages that have not arrived; None: its half ends."""

    number: int
    client: int
    proxy: int
    waiting: tuple[bytes | None, ...] = ()
    is_open: bool = True


class State(NamedTuple):
    """All of it; owners and clients are numbers of contents."""

    log: tuple[Entry, ...] = ()
    current: int | None = None
    lssn: int = 0
    owners: tuple[int | None, ...] = (None, None)
    limbo: tuple[Entry, ...] = ()
    """Entries of a current owner that crashed: the next one finds some first of them."""
    clients: tuple[int, ...] = ()
    wires: tuple[Wire, ...] = ()
    now: float = 0.0
    takeovers: int = 0
    crashes: int = 0
    breaks: int = 0
    releases: int = 0
    pauses: int = 0
    others: int = 0


class Model:
    """The steps of one scope; subclasses break a rule."""

    zombies_acknowledge = False
    restores = True

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.parts = Parts()

    def initial(self) -> State:
        """Return where it begins: a log that no one owns."""
        scope = self.scope
        clients = [
            ClientEnd(number, scope.records, is_named=scope.is_named)
            for number in range(scope.clients)
        ]
        return State(clients=tuple(map(self.parts.number, clients)))

    def client(self, state: State, number: int) -> ClientEnd:
        """Return a client, not to be changed."""
        found: ClientEnd = self.parts.content(state.clients[number])
        return found

    def _owner(self, state: State, proxy: int) -> OwnerEnd | None:
        number = state.owners[proxy]
        return None if number is None else self.parts.content(number)

    def is_owned(self, state: State) -> bool:
        """Return whether a proxy owns the log, and does not give it away."""
        owner = None if state.current is None else self._owner(state, state.current)
        return owner is not None and owner.released is None

    def check(self, state: State) -> str:
        """Return which promise is broken, "" if none is."""
        rows = [row for entry in state.log for row in entry.rows]
        for name in {name for name, _, _ in rows}:
            sequences = [sequence for owner, sequence, _ in rows if owner == name]
            if sequences != list(range(len(sequences))):
                return f"InOrderOnce: {rows}"
        for number in range(len(state.clients)):
            client = self.client(state, number)
            there = [payload for _, _, payload in rows if payload in client.payloads]
            if there != client.payloads[: len(there)]:
                return f"InOrderOnce: client {number} has {there} in the log"
            if len(there) < len(client.acked):
                return f"AckedIsThere: client {number} has acks of {client.acked}, but {there}"
        return ""

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield every step, and the state after it."""
        if state.pauses < self.scope.pauses:
            now = state.now + GENERATED_FORGOTTEN_MS / 1000
            yield "time passes", state._replace(now=now, pauses=state.pauses + 1)
        for proxy in PROXIES:
            yield from self._takeover(state, proxy)
            owner = self._owner(state, proxy)
            if owner is not None:
                yield from self._owner_steps(state, proxy, owner)
                yield from self._begin(state, proxy)
        for wire in state.wires:
            yield from self._wire_steps(state, wire)

    # The log

    def _takeover(self, state: State, proxy: int) -> Iterator[tuple[str, State]]:
        if state.takeovers >= self.scope.takeovers or state.current == proxy:
            return
        flying = state.limbo
        if state.current is not None and (before := self._owner(state, state.current)) is not None:
            flying = tuple(each.entry for each in before.flying)
        for survivors in range(len(flying) + 1):
            log = state.log + flying[:survivors]
            producers: Producers[int] = Producers()
            if self.restores and log and log[-1].stamp:
                _restore(producers, log)
            owner = OwnerEnd(state.lssn + 1, producers)
            after = self._without(state, proxy)._replace(
                log=log,
                current=proxy,
                lssn=owner.lssn,
                limbo=(),
                takeovers=state.takeovers + 1,
            )
            after = _put(after, proxy, self.parts.number(owner))
            yield f"proxy {proxy} takes over, {survivors} entries survive", after

    def _without(self, state: State, proxy: int) -> State:
        """Return the state without the owner at a proxy, whose streams break."""
        after = _put(state, proxy, None)
        for wire in state.wires:
            if wire.proxy == proxy:
                after = _with_wire(after, wire.number, None)
                if wire.is_open:
                    after = self._tell(after, wire.client, Lost(BROKEN))
        return after

    def _owner_steps(
        self, state: State, proxy: int, owner: OwnerEnd
    ) -> Iterator[tuple[str, State]]:
        is_current = state.current == proxy
        if state.crashes < self.scope.crashes:
            flying = tuple(each.entry for each in owner.flying)
            yield (
                f"proxy {proxy} crashes",
                self._without(state, proxy)._replace(
                    current=None if is_current else state.current,
                    limbo=flying if is_current else state.limbo,
                    crashes=state.crashes + 1,
                ),
            )
        if state.releases < self.scope.releases and is_current and owner.released is None:
            after = state._replace(releases=state.releases + 1)
            yield f"proxy {proxy} gives the log away", self._own(after, proxy, Release())
        if owner.queue or state.others < self.scope.others:
            others = state.others + (not owner.queue)
            after = self._own(state._replace(others=others), proxy, Flush(state.now))
            yield f"proxy {proxy} makes an entry", after
        if owner.flying and (is_current or self.zombies_acknowledge):
            entry = owner.flying[0].entry
            log = (*state.log, entry) if is_current else state.log
            what = f"proxy {proxy} has an entry durable: {entry.rows}"
            yield what, self._own(state._replace(log=log), proxy, Stored())
        elif owner.flying:
            yield f"proxy {proxy} learns that it is fenced", self._own(state, proxy, LostLog())
        if owner.released is not None:
            for number in owner.streams:
                after = self._own(state, proxy, PartingOver(number))
                if after != state:
                    yield f"proxy {proxy} waits no more for stream {number}", after

    # Streams

    def _begin(self, state: State, proxy: int) -> Iterator[tuple[str, State]]:
        for number, _ in enumerate(state.clients):
            client = self.client(state, number)
            is_new = not client.has_written and not any(
                wire.client == number and wire.is_open for wire in state.wires
            )
            if client.failed_with is None and (client.is_paused or is_new):
                after = self._tell(state, number, Begin(state.now), proxy)
                yield f"client {number} opens a stream to proxy {proxy}", after

    def _wire_steps(self, state: State, wire: Wire) -> Iterator[tuple[str, State]]:
        if wire.waiting:
            data, *rest = wire.waiting
            after = _with_wire(state, wire.number, wire._replace(waiting=tuple(rest)))
            owns = state.current == wire.proxy
            after = self._own(after, wire.proxy, Arrived(wire.number, data, owns, state.now))
            what = "a message" if data is not None else "the end"
            yield f"{what} of stream {wire.number} arrives at proxy {wire.proxy}", after
        if wire.is_open and state.breaks < self.scope.breaks:
            for lost in range(max(1, len(wire.waiting))):
                after = state._replace(breaks=state.breaks + 1)
                after = self._close(after, wire._replace(waiting=wire.waiting[lost:]))
                after = self._tell(after, wire.client, Lost(BROKEN))
                yield f"stream {wire.number} breaks, {lost} messages are lost", after

    def _close(self, state: State, wire: Wire) -> State:
        """Return the state in which a client hears no more of a stream, whose messages may come."""
        if wire.waiting:
            return _with_wire(state, wire.number, wire._replace(is_open=False))
        return self._own(_with_wire(state, wire.number, None), wire.proxy, Gone(wire.number))

    def _own(self, state: State, proxy: int, event: Any) -> State:
        """Return the state after an input of an owner."""
        number = state.owners[proxy]
        if number is None:
            return state
        number, outputs = self.parts.step(number, event)
        after = _put(state, proxy, number)
        for output in outputs:
            wire = next((each for each in after.wires if each.number == output.stream), None)
            if isinstance(output, Over):
                after = _with_wire(after, output.stream, None)
            if wire is not None and wire.is_open:
                heard: Any = Lost(output.error) if isinstance(output, Over) else None
                if isinstance(output, Replies):
                    heard = Heard(output.reply, state.now)
                after = self._tell(after, wire.client, heard)
        for wire in after.wires:
            if not wire.waiting and not wire.is_open:
                after = self._close(after, wire)
        owner = self._owner(after, proxy)
        return self._without(after, proxy) if owner is not None and owner.is_lost else after

    def _tell(self, state: State, client: int, event: Any, proxy: int = 0) -> State:
        """Return the state after an input of a client; a stream that it opens goes to `proxy`."""
        number, outputs = self.parts.step(state.clients[client], event)
        clients = (*state.clients[:client], number, *state.clients[client + 1 :])
        after = state._replace(clients=clients)
        for output in outputs:
            wire = next((w for w in after.wires if w.client == client and w.is_open), None)
            match output:
                case Opens(target):
                    after = self._open(after, client, proxy, target)
                case Closes():
                    after = after if wire is None else self._close(after, wire)
                case _ if wire is not None:
                    data = None if isinstance(output, Ends) else output
                    sent = wire._replace(waiting=(*wire.waiting, data))
                    after = _with_wire(after, wire.number, sent)
        return after

    def _open(self, state: State, client: int, proxy: int, target: bytes) -> State:
        taken = {wire.number for wire in state.wires}
        number = next(each for each in count() if each not in taken)
        wire = Wire(number, client, proxy)
        after = state._replace(wires=(*state.wires, wire))
        owns = state.current == proxy
        return self._own(after, proxy, Opened(wire.number, target, owns, state.now))


def _restore(producers: Producers[int], log: Sequence[Entry]) -> None:
    last = log[-1]
    first = decode_stamp(memoryview(last.stamp)).snapshot
    for entry in log:
        if entry.lssn == last.lssn and entry.entry_id >= first:
            stamp = decode_stamp(memoryview(entry.stamp))
            producers.restore(
                stamp, lssn=entry.lssn, entry_id=entry.entry_id, written_ms=entry.written_ms
            )


def _put(state: State, proxy: int, owner: int | None) -> State:
    owners = tuple(owner if each == proxy else state.owners[each] for each in PROXIES)
    return state._replace(owners=owners)


def _with_wire(state: State, number: int, wire: Wire | None) -> State:
    changed = (wire if each.number == number else each for each in state.wires)
    return state._replace(wires=tuple(each for each in changed if each is not None))
