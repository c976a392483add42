"""Producers over two proxies that take a log from each other: every interleaving in a small scope.

The machine is the real one (`dlcore.log.writing.producers`); the log, its fencing and what is on
its way are modelled.  A step is: a client begins, or sends one of its records to a proxy; an owner
makes an entry of what it accepted; the oldest entry becomes durable, and is acknowledged, or the
answer is lost; a proxy takes the log over, by which some first entries of those on their way are in
it and no later ones; a proxy crashes.  An owner that was taken over from does not know it until it
writes.

Promises, looked at in every state:

* InOrderOnce: in the log, the records of a producer are 0, 1, 2, ... without gap or repetition.
* AckedIsThere: what a client was told to be durable is in the log, as that client sent it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dlcore.base.errors import InvalidEntryError, ProducerFencedError, SequenceGapError
from dlcore.base.ids import DLSN
from dlcore.log.entries.stamp import Claim, decode_stamp
from dlcore.log.writing.producers import (
    Durable,
    Fresh,
    InFlight,
    Mark,
    MarkedRows,
    Producers,
    _Producer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "p"
PROXIES = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What one search covers."""

    clients: int = 1
    """Incarnations of the producer."""
    records: int = 2
    """That each of them has to write."""
    takeovers: int = 2
    crashes: int = 1


SMALL = {
    "one client, two records": Scope(),
    "two incarnations": Scope(clients=2, records=1),
}
LARGE = {
    "two incarnations, two crashes": Scope(clients=2, records=1, takeovers=3, crashes=2),
    "one client, three records": Scope(records=3),
    "one client, three takeovers": Scope(takeovers=3),
}


class Entry(NamedTuple):
    """An entry of the log: where it is, its stamp, and of each record its sequence and client."""

    lssn: int
    entry_id: int
    stamp: bytes
    rows: tuple[tuple[int, int], ...]


class Sent(NamedTuple):
    """A record that an owner accepted."""

    mark: Mark
    client: int


class Flying(NamedTuple):
    """An entry on its way, and what it is of."""

    entry: Entry
    parts: tuple[Sent, ...]


class Row(NamedTuple):
    """What an owner knows of the producer."""

    number: int
    claim: Claim
    accepted: int
    logged: int
    durable: int
    logged_claim: Claim | None


class Owner(NamedTuple):
    """A proxy that owns the log, or believes so."""

    lssn: int
    row: Row | None
    has_stamped: bool
    snapshot: int
    entries: int = 0
    queue: tuple[Sent, ...] = ()
    flying: tuple[Flying, ...] = ()
    waits: tuple[tuple[int, int], ...] = ()
    """Who waits for the durability of which sequence, having sent it again."""


class Client(NamedTuple):
    """An incarnation: what it was granted, perhaps not told yet, and what was acknowledged."""

    claim: Claim | None = None
    asked: tuple[int, int, Claim] | None = None
    """The proxy, its segment, and the claim that is told once what came before is durable."""
    acked: int = -1
    is_fenced: bool = False


class State(NamedTuple):
    """All of it."""

    log: tuple[Entry, ...] = ()
    current: int | None = None
    lssn: int = 0
    owners: tuple[Owner | None, ...] = (None, None)
    limbo: tuple[Flying, ...] = ()
    """Entries of a current owner that crashed: the next one finds some first of them."""
    clients: tuple[Client, ...] = ()
    takeovers: int = 0
    crashes: int = 0
    tokens: int = 0


def _machine(owner: Owner) -> Producers[str]:
    """Return the machine as it is in an owner."""
    machine: Producers[str] = Producers()
    machine._segment, machine._snapshot = owner.lssn, owner.snapshot
    machine.has_stamped = owner.has_stamped
    if owner.row is not None:
        row = owner.row
        machine._put(_known(row))
    return machine


def _known(row: Row) -> _Producer[str]:
    dlsn = DLSN(1, 0, 0) if row.logged >= 0 else None
    return _Producer(
        row.number,
        row.claim,
        0,
        row.accepted,
        row.logged,
        row.durable,
        row.logged_claim,
        dlsn,
        dlsn,
        deque((each, str(each)) for each in range(row.durable + 1, row.accepted + 1)) or None,
    )


def _row(machine: Producers[str]) -> Row | None:
    known = machine._known.get(NAME)
    if known is None:
        return None
    return Row(
        known.number,
        known.claim,
        known.accepted,
        known.logged,
        known.durable,
        known.logged_claim,
    )


def _after(owner: Owner, machine: Producers[str]) -> Owner:
    return owner._replace(
        row=_row(machine), has_stamped=machine.has_stamped, snapshot=machine._snapshot
    )


class Model:
    """The steps of one scope; subclasses break a rule."""

    acks_when_accepted = False
    zombies_acknowledge = False
    restores = True

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def initial(self) -> State:
        """Return where it begins: a log that nobody owns."""
        return State(clients=(Client(),) * self.scope.clients)

    def check(self, state: State) -> str:
        """Return which promise is broken, "" if none is."""
        rows = [row for entry in state.log for row in entry.rows]
        if [sequence for sequence, _ in rows] != list(range(len(rows))):
            return f"InOrderOnce: {rows}"
        for number, client in enumerate(state.clients):
            first = 0 if client.claim is None else client.claim.base
            for sequence in range(first, client.acked + 1):
                if (sequence, number) not in rows:
                    return f"AckedIsThere: {sequence} of client {number} is not in {rows}"
        return ""

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield every step, and the state after it."""
        for proxy in PROXIES:
            yield from self._takeover(state, proxy)
            owner = state.owners[proxy]
            if owner is None:
                continue
            yield from self._crash(state, proxy, owner)
            yield from self._flush(state, proxy, owner)
            yield from self._durable(state, proxy, owner)
            for number, client in enumerate(state.clients):
                yield from self._begin(state, proxy, owner, number, client)
                yield from self._send(state, proxy, owner, number, client)

    # The log

    def _takeover(self, state: State, proxy: int) -> Iterator[tuple[str, State]]:
        if state.takeovers == self.scope.takeovers or state.current == proxy:
            return
        flying = state.limbo
        if state.current is not None and (before := state.owners[state.current]) is not None:
            flying = before.flying
        for survivors in range(len(flying) + 1):
            log = (*state.log, *(each.entry for each in flying[:survivors]))
            machine: Producers[str] = Producers()
            if self.restores and log and log[-1].stamp:
                self._restore(machine, log)
            lssn = state.lssn + 1
            owner = Owner(lssn, _row(machine), has_stamped=False, snapshot=0)
            after = state._replace(
                log=log,
                current=proxy,
                lssn=lssn,
                owners=_with(state.owners, proxy, owner),
                limbo=(),
                takeovers=state.takeovers + 1,
            )
            yield f"proxy {proxy} takes over, {survivors} entries survive", after

    def _restore(self, machine: Producers[str], log: tuple[Entry, ...]) -> None:
        last = log[-1]
        first = decode_stamp(memoryview(last.stamp)).snapshot
        for entry in log:
            if entry.lssn == last.lssn and entry.entry_id >= first:
                stamp = decode_stamp(memoryview(entry.stamp))
                machine.restore(stamp, lssn=entry.lssn, entry_id=entry.entry_id, written_ms=0)

    def _crash(self, state: State, proxy: int, owner: Owner) -> Iterator[tuple[str, State]]:
        if state.crashes == self.scope.crashes:
            return
        is_current = state.current == proxy
        yield (
            f"proxy {proxy} crashes",
            state._replace(
                owners=_with(state.owners, proxy, None),
                current=None if is_current else state.current,
                limbo=owner.flying if is_current else state.limbo,
                crashes=state.crashes + 1,
            ),
        )

    def _flush(self, state: State, proxy: int, owner: Owner) -> Iterator[tuple[str, State]]:
        if not owner.queue:
            return
        machine = _machine(owner)
        rows = [MarkedRows(each.mark, 1, slot) for slot, each in enumerate(owner.queue)]
        stamp = machine.stamp(rows, lssn=owner.lssn, entry_id=owner.entries, size_bytes=0, now_ms=0)
        records = tuple((each.mark.first, each.client) for each in owner.queue)
        entry = Entry(owner.lssn, owner.entries, stamp, records)
        after = _after(owner, machine)._replace(
            entries=owner.entries + 1,
            queue=(),
            flying=(*owner.flying, Flying(entry, owner.queue)),
        )
        yield f"proxy {proxy} makes an entry of {records}", _put(state, proxy, after)

    def _durable(self, state: State, proxy: int, owner: Owner) -> Iterator[tuple[str, State]]:
        if not owner.flying:
            return
        is_current = state.current == proxy
        if not is_current and not self.zombies_acknowledge:
            gone = state._replace(owners=_with(state.owners, proxy, None))
            yield f"proxy {proxy} is told that it is fenced", gone
            return
        oldest, *rest = owner.flying
        machine = _machine(owner)
        for part in oldest.parts:
            machine.durable(part.mark, 1, DLSN(1, 0, 0))
        log = (*state.log, oldest.entry) if is_current else state.log
        told = [(part.client, part.mark.first) for part in oldest.parts]
        last = max(sequence for _, sequence in told)
        told += [each for each in owner.waits if each[1] <= last]
        waits = tuple(each for each in owner.waits if each[1] > last)
        after = _after(owner, machine)._replace(flying=tuple(rest), waits=waits)
        stored = _put(state, proxy, after)._replace(log=log)
        yield f"proxy {proxy} has an entry durable, answers are lost", stored
        clients = list(stored.clients)
        for number, sequence in told:
            clients[number] = _acked(clients[number], sequence)
        heard = stored._replace(clients=tuple(clients))
        yield f"proxy {proxy} has an entry durable and acknowledges {told}", heard

    # Clients

    def _begin(
        self, state: State, proxy: int, owner: Owner, number: int, client: Client
    ) -> Iterator[tuple[str, State]]:
        if client.claim is not None or client.is_fenced:
            return
        if client.asked is None or client.asked[:2] != (proxy, owner.lssn):
            if state.tokens > self.scope.clients:
                return
            machine = _machine(owner)
            claim = machine.grant(NAME, state.tokens.to_bytes(8, "big"), now_ms=0)
            asks = client._replace(asked=(proxy, owner.lssn, claim))
            after = _put(state, proxy, _after(owner, machine))._replace(
                clients=_with_client(state.clients, number, asks), tokens=state.tokens + 1
            )
            yield f"client {number} begins at proxy {proxy}", after
        elif owner.row is not None and owner.row.durable >= client.asked[2].base - 1:
            claim = client.asked[2]
            told = client._replace(claim=claim, asked=None, acked=claim.base - 1)
            yield (
                f"client {number} is told its claim from {claim.base} on",
                state._replace(clients=_with_client(state.clients, number, told)),
            )

    def _send(
        self, state: State, proxy: int, owner: Owner, number: int, client: Client
    ) -> Iterator[tuple[str, State]]:
        claim = client.claim
        if claim is None or client.is_fenced:
            return
        for sequence in range(client.acked + 1, claim.base + self.scope.records):
            what = f"client {number} sends {sequence} to proxy {proxy}"
            machine = _machine(owner)
            try:
                machine.continue_with(claim, now_ms=0)
                found = machine.look_at(claim, sequence, 1)
            except ProducerFencedError:
                fenced = client._replace(is_fenced=True)
                clients = _with_client(state.clients, number, fenced)
                yield f"{what}, and is fenced", state._replace(clients=clients)
                continue
            except SequenceGapError:
                continue
            after = owner
            acked = client
            if isinstance(found, Fresh):
                mark = Mark(claim, sequence)
                machine.accepted(mark, 1, str(sequence), now_ms=0)
                after = owner._replace(queue=(*owner.queue, Sent(mark, number)))
                acked = _acked(client, sequence) if self.acks_when_accepted else client
            elif isinstance(found, Durable):
                acked = _acked(client, sequence)
            elif found != InFlight(str(sequence), is_last=True):
                raise AssertionError(f"sequence {sequence} waits for {found}")
            elif (number, sequence) not in owner.waits:
                after = owner._replace(waits=tuple(sorted((*owner.waits, (number, sequence)))))
            sent = _put(state, proxy, _after(after, machine))
            clients = _with_client(sent.clients, number, acked)
            yield f"{what}: {type(found).__name__}", sent._replace(clients=clients)


def _acked(client: Client, sequence: int) -> Client:
    return client._replace(acked=max(client.acked, sequence))


def _with(
    owners: tuple[Owner | None, ...], proxy: int, owner: Owner | None
) -> tuple[Owner | None, ...]:
    return tuple(owner if each == proxy else owners[each] for each in PROXIES)


def _put(state: State, proxy: int, owner: Owner) -> State:
    return state._replace(owners=_with(state.owners, proxy, owner))


def _with_client(clients: tuple[Client, ...], number: int, client: Client) -> tuple[Client, ...]:
    return (*clients[:number], client, *clients[number + 1 :])


@dataclass(slots=True)
class Result:
    """What a search found."""

    states: int = 0
    is_complete: bool = False
    violation: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = "\n".join(f"  {number:2}. {each}" for number, each in enumerate(self.trace, 1))
        return f"{self.states} states, all: {self.is_complete}\n{self.violation}\n{steps}"


class Searched(Protocol):
    """A model whose states are searched."""

    def initial(self) -> Any:
        """Return the first state."""
        ...

    def check(self, state: Any) -> str:
        """Return which promise a state breaks, "" if none."""
        ...

    def steps(self, state: Any) -> Iterator[tuple[str, Any]]:
        """Yield every step, and the state after it."""
        ...


def search(model: Searched, *, states_max: int) -> Result:
    """Visit every state, or so many of them, the nearest first; stop at the first violation."""
    result = Result()
    first = model.initial()
    parents: dict[Any, tuple[Any, str] | None] = {first: None}
    waiting = deque([first])
    while waiting and result.states < states_max:
        state = waiting.popleft()
        result.states += 1
        result.violation = model.check(state)
        if result.violation:
            break
        try:
            for what, after in model.steps(state):
                if after not in parents:
                    parents[after] = (state, what)
                    waiting.append(after)
        except (AssertionError, InvalidEntryError) as error:
            result.violation = f"the machine says {error!r}"
            break
    else:
        result.is_complete = not waiting
    if result.violation:
        steps = []
        parent = parents[state]
        while parent is not None:
            steps.append(parent[1])
            parent = parents[parent[0]]
        result.trace = tuple(reversed(steps))
    return result
