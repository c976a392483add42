"""Goal: every transition of the registration machine.

Method: exact effects for the rare ones; then seeded chance, with a store of two nodes of its own.
"""

from __future__ import annotations

import random

import pytest

from bookie.disks.port import DiskSpace
from bookie.membership.registration import (
    RETRY_S,
    TRANSITIONS,
    Applied,
    Apply,
    Call,
    CallFailed,
    Conflict,
    CookieLooked,
    Effect,
    Event,
    Looked,
    Register,
    RegisterEnded,
    Registration,
    RegistrationState,
    RemovalEnded,
    RetryLater,
    SetReadOnly,
    SetSpace,
    Signal,
)
from dlcore.base.errors import ConfigurationError, MetadataConnectionError, NoNodeError
from dlcore.base.ids import BookieId
from dlcore.ledger.metadata.values import BookieRegistration
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.port import Create, Delete, Put, Versioned
from dlcore.metadata.stored import decode, encode

BOOKIE = BookieId("bookie-1", f"{7:032x}")
PATHS = NamespacePaths("/dlog")
AVAILABLE = PATHS.bookie_available(BOOKIE.name)
READONLY = PATHS.bookie_readonly(BOOKIE.name)
AWAY = MetadataConnectionError("no answer")


def node_of(value: bytes, version: int = 1) -> Versioned:
    """Return a node as the store shows it."""
    return Versioned(value, version)


def strange_node(*, incarnation: str = "", address: str = "there:1") -> Versioned:
    """Return a node that another process made."""
    return node_of(
        encode(
            BookieRegistration(
                name=BOOKIE.name,
                incarnation=incarnation or BOOKIE.incarnation,
                address=address,
                session="another",
            )
        )
    )


class Bench:
    """A machine, validated after each event, and a store that holds its nodes."""

    def __init__(self) -> None:
        self.machine = Registration(
            PATHS, bookie=BOOKIE, address="here:1", control_address="here:2", rack="r"
        )
        self.nodes: dict[str, Versioned] = {}
        self.session = "one"

    def handle(self, event: Event) -> list[Effect]:
        """Feed an event."""
        effects = self.machine.handle(event)
        self.machine.validate()
        return effects

    def look(self, *, is_held: bool = False, now: float = 0.0) -> list[Effect]:
        """Answer a look."""
        return self.handle(Looked(self.session, is_held, dict(self.nodes), now))

    def apply(self, effect: Effect) -> list[Effect]:
        """Apply a transaction to the nodes."""
        assert isinstance(effect, Apply)
        for op in effect.ops:
            match op:
                case Delete(path):
                    self.nodes.pop(path, None)
                case Create(path, value) | Put(path, value):
                    self.nodes[path] = node_of(value)
        return self.handle(Applied())

    def registered(self) -> Bench:
        """Register, and return this."""
        assert self.handle(Register(False, 10.0)) == [Call.LOOK]
        (change,) = self.look()
        assert self.apply(change) == [RegisterEnded(None)]
        return self

    def space(self) -> int:
        """Return the registered free space in bytes."""
        node = self.nodes[AVAILABLE]
        return decode(BookieRegistration, node.value, source=AVAILABLE).free_bytes


def test_a_change_during_another_one_is_applied_afterwards() -> None:
    """Nothing that is wanted is forgotten, and nothing is done twice at a time."""
    bench = Bench()
    bench.handle(SetSpace(DiskSpace(free_bytes=1, total_bytes=9)))
    bench.registered()
    assert bench.space() == 1
    assert bench.handle(SetSpace(DiskSpace(free_bytes=2, total_bytes=9))) == [Call.LOOK]
    assert bench.handle(SetSpace(DiskSpace(free_bytes=3, total_bytes=9))) == []
    (change,) = bench.look()
    assert isinstance(change, Apply)
    assert isinstance(change.ops[0], Put)  # it stays registered
    assert bench.handle(SetReadOnly(True)) == []
    assert bench.apply(change) == [Call.LOOK]
    assert bench.space() == 3
    (change,) = bench.look()
    assert bench.apply(change) == []
    assert list(bench.nodes) == [READONLY]
    assert bench.handle(Signal.RETRY_DUE) == []


def test_a_held_bookie_is_read_only() -> None:
    """An operator's wish counts as much as a full disk."""
    bench = Bench().registered()
    assert bench.handle(Signal.MAY_DIFFER) == [Call.LOOK]
    (change,) = bench.look(is_held=True)
    bench.apply(change)
    assert list(bench.nodes) == [READONLY]


def test_a_node_of_an_earlier_session_is_made_anew() -> None:
    """It would vanish with that session."""
    bench = Bench().registered()
    bench.session = "two"
    bench.handle(Signal.MAY_DIFFER)
    (change,) = bench.look()
    assert isinstance(change, Apply)
    assert [type(op).__name__ for op in change.ops] == ["Check", "Delete", "Create"]


def test_the_first_registration_waits_and_gives_up_in_time() -> None:
    """It may be asked for again."""
    bench = Bench()
    bench.nodes[AVAILABLE] = strange_node(incarnation=f"{8:032x}")
    bench.handle(Register(False, 1.0))
    (retry,) = bench.look(now=0.5)
    assert isinstance(retry, RetryLater)
    assert retry.after_s == RETRY_S
    assert bench.handle(Signal.MAY_DIFFER) == []  # the pause is not over
    assert bench.handle(Signal.RETRY_DUE) == [Call.LOOK]
    (ended,) = bench.look(now=1.0)
    assert isinstance(ended, RegisterEnded)
    assert isinstance(ended.error, ConfigurationError)
    bench.nodes.clear()
    bench.registered()


def test_a_store_that_stays_away_is_asked_without_end_once_it_is_registered() -> None:
    """The registration serves discovery only: the bookie goes on meanwhile."""
    bench = Bench().registered()
    bench.handle(Signal.MAY_DIFFER)
    for now in (0.0, 1e6):
        assert bench.handle(CallFailed(AWAY, now)) == [RetryLater(RETRY_S, AWAY)]
        assert bench.handle(Signal.MAY_DIFFER) == [Call.LOOK]


@pytest.mark.parametrize("address", ["there:1", "here:1"])
def test_another_process_of_this_bookie_ends_it(address: str) -> None:
    """Unless the node is its own of an earlier session."""
    bench = Bench().registered()
    bench.nodes[AVAILABLE] = strange_node(address=address)
    bench.handle(Signal.MAY_DIFFER)
    (effect,) = bench.look()
    assert isinstance(effect, Conflict if address == "there:1" else Apply)


def test_a_bookie_without_a_cookie_is_refused() -> None:
    """A store without any cookie is waited for."""
    bench = Bench()
    gone = NoNodeError("no cookie")
    bench.handle(Register(False, 1.0))
    bench.look()
    assert bench.handle(CallFailed(gone, 0.0)) == [Call.LOOK_FOR_COOKIE]
    assert bench.handle(CookieLooked(False, 0.0)) == [RetryLater(RETRY_S, gone)]
    bench.handle(Signal.RETRY_DUE)
    (change,) = bench.look()
    bench.apply(change)
    bench.handle(SetReadOnly(True))
    bench.look()
    bench.handle(CallFailed(gone, 0.0))
    assert bench.handle(CallFailed(AWAY, 0.0)) == [RetryLater(RETRY_S, AWAY)]
    bench.handle(Signal.RETRY_DUE)
    bench.look()
    bench.handle(CallFailed(gone, 0.0))
    (conflict,) = bench.handle(CookieLooked(True, 0.0))
    assert isinstance(conflict, Conflict)
    assert "decommissioned" in str(conflict.error)


def test_a_damaged_node_ends_the_bookie() -> None:
    """To ask again would change nothing."""
    bench = Bench().registered()
    bench.handle(Signal.MAY_DIFFER)
    error = ConfigurationError("damaged")
    assert bench.handle(CallFailed(error, 0.0)) == [Conflict(error)]


def test_the_removal_takes_only_its_own_nodes() -> None:
    """A failed removal is left to the end of the session."""
    bench = Bench()
    assert bench.handle(Signal.CLOSE) == [RemovalEnded(None)]
    assert bench.handle(Signal.CLOSE) == []
    bench = Bench().registered()
    assert bench.handle(Signal.CLOSE) == [Call.LOOK]
    (change,) = bench.look()
    assert bench.apply(change) == [RemovalEnded(None)]
    assert bench.nodes == {}
    bench = Bench().registered()
    bench.nodes[AVAILABLE] = strange_node()
    bench.handle(Signal.CLOSE)
    (ended,) = bench.look()
    assert isinstance(ended, RemovalEnded)
    assert isinstance(ended.error, ConfigurationError)
    bench = Bench().registered()
    bench.nodes.clear()
    bench.handle(Signal.CLOSE)
    assert bench.look() == [RemovalEnded(None)]
    bench = Bench().registered()
    bench.handle(Signal.CLOSE)
    assert bench.handle(CallFailed(AWAY, 0.0)) == [RemovalEnded(AWAY)]


class ByChance:
    """A machine to which things happen; what it asks for is answered, or fails."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench()
        self.todo: list[Effect] = []
        self.now = 0.0

    def run(self, steps: int) -> set[tuple[RegistrationState, RegistrationState]]:
        """Return the transitions."""
        seen = set()
        machine = self.bench.machine
        become = machine._become

        def note(state: RegistrationState) -> None:
            seen.add((machine.state, state))
            become(state)

        machine._become = note  # type: ignore[method-assign]
        for _ in range(steps):
            self.now += self.rng.random()
            effects = self.happen(self.rng.random())
            if self.bench.machine.state is RegistrationState.REMOVING and Call.LOOK in effects:
                self.todo.clear()  # the driver has stopped what was under way
            self.todo += (each for each in effects if isinstance(each, Call | Apply | RetryLater))
        return seen

    def happen(self, luck: float) -> list[Effect]:
        """Let one thing happen; return what follows."""
        bench, rng = self.bench, self.rng
        if bench.machine.state is RegistrationState.ABSENT and luck < 0.9:
            return bench.handle(Register(rng.random() < 0.5, self.now + rng.choice((0.0, 3.0))))
        if luck < 0.02 or bench.machine.state is RegistrationState.ABSENT:
            return bench.handle(Signal.CLOSE)
        if luck < 0.2:
            wish: Event = SetReadOnly(rng.random() < 0.5)
            return bench.handle(Signal.MAY_DIFFER if rng.random() < 0.5 else wish)
        if luck < 0.26:
            bench.nodes.clear()
            bench.session += "+"
            if luck < 0.23:
                bench.nodes[AVAILABLE] = strange_node(incarnation=rng.choice(["", f"{8:032x}"]))
            return []
        return self.answer(self.todo.pop()) if self.todo else []

    def answer(self, due: Effect) -> list[Effect]:
        """Answer what the machine asked for."""
        bench, rng = self.bench, self.rng
        if bench.machine.state is RegistrationState.REMOVED:
            return []
        if isinstance(due, RetryLater):
            return bench.handle(Signal.RETRY_DUE)
        if rng.random() < 0.2:
            return bench.handle(CallFailed(rng.choice([AWAY, NoNodeError("gone")]), self.now))
        if isinstance(due, Apply):
            return bench.apply(due)
        if due is Call.LOOK:
            return bench.look(now=self.now)
        return bench.handle(CookieLooked(rng.random() < 0.3, self.now))


def test_every_transition_of_the_table_happens() -> None:
    """One that never does would be a line of the diagram that means nothing."""
    seen = {each for seed in range(1500) for each in ByChance(seed).run(60)}
    table = TRANSITIONS.causes.items()
    assert seen == {(before, after) for before, afters in table for after in afters}
