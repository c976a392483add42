"""The balance of logs over proxies: each rule, and several owners that know of each other late."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from dlcore.proxy.load import ProxyLoad
from dlcore.proxy.rendezvous import preferred_owner
from dlcore.proxy.writing.balance import (
    LOOK_PAUSES,
    RATE_FLOOR,
    TRANSITIONS,
    AskLoads,
    Balancer,
    BalanceState,
    Effect,
    Event,
    HandOver,
    LoadsRead,
    Looked,
    OwnedState,
    PublishLoad,
)
from tests.fixtures.lengths import sample

ME, OTHER, THIRD = "grpc://me:1", "grpc://other:1", "grpc://third:1"
AFTER_S, PAUSE_S = 60.0, 5.0
MIB = 1024 * 1024
LATE_S = 20.0
EMPTY = ProxyLoad(logs=0, room=100, bytes_per_s=0)


class Checked(Balancer):
    """A machine that is validated after each event."""

    def handle(self, event: Event) -> list[Effect]:
        """Take an event."""
        effects = super().handle(event)
        self.validate()
        return effects


@pytest.fixture
def balancer() -> Balancer:
    """That of this proxy."""
    return Checked(ME, after_s=AFTER_S, pause_s=PAUSE_S, tolerance=0.2)


def owned(*homes: str, **fields: object) -> list[OwnedState]:
    """Return logs with these homes, called after their place."""
    return [
        OwnedState(name=str(number), home=home, accepted_bytes=0, **fields)  # type: ignore[arg-type]
        for number, home in enumerate(homes)
    ]


def look(
    balancer: Balancer,
    now_s: float,
    logs: list[OwnedState],
    live: frozenset[str] = frozenset({ME, OTHER}),
) -> list[Effect]:
    """Let it look; return what it wants done."""
    return balancer.handle(Looked(now_s=now_s, live=live, logs=logs, room=100 - len(logs)))


def step(
    balancer: Balancer, logs: list[OwnedState], loads: dict[str, ProxyLoad | None], now_s: float
) -> list[str]:
    """Let it look and learn the loads; return which logs it hands over."""
    live = frozenset({ME, *loads})
    if AskLoads(tuple(sorted(loads))) not in look(balancer, now_s, logs, live):
        return []
    effects = balancer.handle(LoadsRead(now_s=now_s, loads=loads))
    assert all(isinstance(each, HandOver) for each in effects)
    return [each.name for each in effects if isinstance(each, HandOver)]


def settled(
    balancer: Balancer, logs: list[OwnedState], loads: dict[str, ProxyLoad | None]
) -> list[str]:
    """Let the live proxies be the same for long; return which logs it then hands over."""
    assert step(balancer, logs, loads, 0.0) == []
    return step(balancer, logs, loads, AFTER_S)


def test_nothing_moves_before_the_live_proxies_have_been_the_same_for_long(
    balancer: Balancer,
) -> None:
    """A change begins the time anew."""
    logs, both = owned(*[OTHER] * 4), frozenset({ME, OTHER})
    for now_s, live, state in (
        (0.0, both, BalanceState.SETTLING),
        (AFTER_S - 1, both, BalanceState.SETTLING),
        (AFTER_S, both | {THIRD}, BalanceState.SETTLING),
        (2 * AFTER_S - 1, both | {THIRD}, BalanceState.SETTLING),
        (2 * AFTER_S, frozenset({ME}), BalanceState.ALONE),
        (4 * AFTER_S, both - {ME}, BalanceState.ALONE),
        (4 * AFTER_S + 1, both, BalanceState.SETTLING),
    ):
        effects = look(balancer, now_s, logs, live)
        assert not [each for each in effects if isinstance(each, AskLoads)]
        assert balancer.state is state
    assert balancer.wait_s == LOOK_PAUSES * PAUSE_S
    assert AskLoads((OTHER,)) in look(balancer, 5 * AFTER_S + 1, logs, both)


def test_a_proxy_that_restarts_between_two_looks_begins_the_time_anew(balancer: Balancer) -> None:
    """The live proxies are the same at both looks, and have changed twice."""
    logs, live = owned(*[OTHER] * 4), frozenset({ME, OTHER})
    looked = Looked(now_s=0.0, live=live, logs=logs, room=90)
    for _ in range(2):  # the second look is at the same time
        balancer.handle(looked)
    assert AskLoads((OTHER,)) in balancer.handle(replace(looked, now_s=AFTER_S))
    balancer.handle(replace(looked, now_s=AFTER_S + 1, changes=2))
    assert balancer.state is BalanceState.SETTLING


def test_the_excess_goes_and_no_more(balancer: Balancer) -> None:
    """One at a time, up to the mean and its tolerance."""
    logs = owned(*[OTHER] * 10)
    moved = settled(balancer, logs, {OTHER: EMPTY})
    assert balancer.state is BalanceState.MOVING
    assert balancer.wait_s == PAUSE_S
    for number in range(20):
        logs = [each for each in logs if each.name not in moved]
        published = changed_by(EMPTY, logs=10 - len(logs))
        moved = step(balancer, logs, {OTHER: published}, AFTER_S + (number + 1) * PAUSE_S)
    assert len(logs) == 6
    assert balancer.handed_over == 4
    assert (balancer.state, balancer.misplaced) == (BalanceState.EVEN, 6)


def changed_by(load: ProxyLoad, **fields: int) -> ProxyLoad:
    """Return a load with other values."""
    known = {"logs": load.logs, "room": load.room, "bytes_per_s": load.bytes_per_s}
    return ProxyLoad(**(known | fields))


def test_a_handed_over_log_counts_before_its_new_owner_publishes_it(
    balancer: Balancer,
) -> None:
    """No client may write it for long: then no proxy acquires it."""
    logs = owned(*[OTHER] * 10)
    moved = settled(balancer, logs, {OTHER: EMPTY})
    for number in range(20):
        logs = [each for each in logs if each.name not in moved]
        moved = step(balancer, logs, {OTHER: EMPTY}, AFTER_S + (number + 1) * PAUSE_S)
    assert len(logs) == 6
    # After ten minutes they have no owner, and the others are too many again.
    assert step(balancer, logs, {OTHER: EMPTY}, AFTER_S + 1000)


def test_a_new_owner_that_hands_over_others_meanwhile_gets_more(balancer: Balancer) -> None:
    """It owns no more than before, so that it seems not to have published what it got."""
    logs = owned(*[OTHER] * 12, is_open=True)
    published = changed_by(EMPTY, logs=8)
    moved = settled(balancer, logs, {OTHER: published, THIRD: EMPTY})
    now_s = AFTER_S
    while now_s < 4 * AFTER_S:
        logs = [each for each in logs if each.name not in moved]
        now_s += PAUSE_S
        moved = step(balancer, logs, {OTHER: published, THIRD: EMPTY}, now_s)
    assert len(logs) == 8  # the mean and its tolerance


@pytest.mark.parametrize(
    ("loads", "why"),
    [
        ({OTHER: None}, "it tells none, as an older release"),
        ({OTHER: ProxyLoad(logs=0, room=0, bytes_per_s=0)}, "it is full"),
        ({OTHER: ProxyLoad(logs=9, room=9, bytes_per_s=0)}, "the difference is small"),
        ({OTHER: EMPTY, THIRD: EMPTY}, "it is the third that has few, and not their home"),
    ],
)
def test_some_proxies_get_nothing(
    balancer: Balancer, loads: dict[str, ProxyLoad | None], why: str
) -> None:
    """Whatever hashing says."""
    if "home" in why:
        loads = {OTHER: changed_by(EMPTY, logs=12), THIRD: EMPTY}
    assert settled(balancer, owned(*[OTHER] * 10), loads) == [], why
    assert balancer.state is BalanceState.EVEN


def test_a_log_whose_home_is_not_reached_stays_and_so_does_one_at_home(balancer: Balancer) -> None:
    """They are no candidates at all."""
    logs = owned(*[OTHER] * 10, stays=True)
    assert settled(balancer, logs, {OTHER: EMPTY}) == []
    assert step(balancer, owned(*[ME] * 10), {OTHER: EMPTY}, 2 * AFTER_S) == []
    assert balancer.misplaced == 0


def test_one_log_alone_does_not_move(balancer: Balancer) -> None:
    """Where it is, it is as much as it would be elsewhere."""
    assert settled(balancer, owned(OTHER), {OTHER: EMPTY}) == []


def written(rates: dict[str, float], now_s: float, *, home: str = OTHER) -> list[OwnedState]:
    """Return logs with these rates, in MiB a second, as they are at a time."""
    return [
        OwnedState(name=name, home=home, accepted_bytes=round(rate * MIB * now_s), is_open=True)
        for name, rate in rates.items()
    ]


def warm(balancer: Balancer, rates: dict[str, float], *, home: str = OTHER) -> None:
    """Let it look until it knows the rates."""
    for number in range(int(AFTER_S / PAUSE_S)):
        now_s = number * PAUSE_S
        look(balancer, now_s, written(rates, now_s, home=home))


def test_unwritten_logs_go_first_and_a_written_one_goes_alone(
    balancer: Balancer,
) -> None:
    """Those without a stream before those with a silent one; a step takes one of a hundred."""
    rates = {"busy": 0.5, "quick": 0.9, "silent": 0.0} | {f"written-{n}": 0.1 for n in range(250)}
    warm(balancer, rates)
    logs = [*written(rates, AFTER_S), *owned(OTHER)]
    assert step(balancer, logs, {OTHER: changed_by(EMPTY, room=1000)}, AFTER_S) == ["0", "silent"]
    logs = written({name: rate for name, rate in rates.items() if rate}, AFTER_S + PAUSE_S)
    published = changed_by(EMPTY, room=1000, logs=2)
    moved = step(balancer, logs, {OTHER: published}, AFTER_S + PAUSE_S)
    assert len(moved) == 1
    assert moved[0].startswith("written-")


def test_for_the_bytes_the_largest_goes_that_fits(balancer: Balancer) -> None:
    """Though the count is even; then nothing more."""
    rates = {"a": 70.0, "b": 25.0, "c": 20.0, "d": 1.0}
    at_home = owned(*[ME] * 4)
    warm(balancer, rates)
    now_s = AFTER_S
    for goes, logs, there in (("b", 7, 20), ("c", 8, 45), (None, 9, 65)):
        published = changed_by(EMPTY, logs=logs, bytes_per_s=there * MIB)
        found = step(balancer, [*written(rates, now_s), *at_home], {OTHER: published}, now_s)
        assert found == ([] if goes is None else [goes])
        rates.pop(goes or "a")
        now_s += PAUSE_S


def test_one_that_is_larger_than_what_is_too_much_goes_only_where_that_helps(
    balancer: Balancer,
) -> None:
    """A log that is most of all that is written stays, wherever it is."""
    rates = {"most": 90.0, "rest": 1.0}
    warm(balancer, rates)
    published = changed_by(EMPTY, logs=2, bytes_per_s=10 * MIB)
    assert step(balancer, written(rates, AFTER_S), {OTHER: published}, AFTER_S) == ["rest"]
    published = changed_by(EMPTY, logs=3, bytes_per_s=11 * MIB)
    now_s = AFTER_S + PAUSE_S
    assert step(balancer, written({"most": 90.0}, now_s), {OTHER: published}, now_s) == []


def test_little_that_is_written_is_no_reason(balancer: Balancer) -> None:
    """Below a MiB a second above the mean nothing moves, whatever share that is."""
    rates = {"a": 0.5, "b": 0.4, "c": 0.3}
    warm(balancer, rates)
    published = changed_by(EMPTY, logs=3)
    assert step(balancer, written(rates, AFTER_S), {OTHER: published}, AFTER_S) == []


def test_the_count_is_not_made_even_by_making_the_bytes_uneven(balancer: Balancer) -> None:
    """A log that is written much does not go where much is written."""
    rates = {str(n): 10.0 for n in range(10)}
    warm(balancer, rates)
    published = changed_by(EMPTY, logs=1, bytes_per_s=150 * MIB)
    assert step(balancer, written(rates, AFTER_S), {OTHER: published}, AFTER_S) == []


def test_a_log_that_came_back_is_measured_from_there(balancer: Balancer) -> None:
    """Its accepted bytes count from its acquisition."""
    look(balancer, 0.0, written({"a": 10.0}, 0.0))
    look(balancer, 10.0, written({"a": 10.0}, 10.0))
    (published,) = look(balancer, 20.0, written({"a": 1.0}, 2.0))
    assert isinstance(published, PublishLoad)
    assert published.load.bytes_per_s < 5 * MIB


def test_the_load_is_published_when_it_has_changed_and_seldom(balancer: Balancer) -> None:
    """Four times a minute at most; a rate that hardly differs is not published."""
    assert look(balancer, 0.0, []) == [PublishLoad(ProxyLoad(logs=0, room=100, bytes_per_s=0))]
    assert look(balancer, 5.0, owned(ME)) == []
    assert look(balancer, 15.0, owned(ME)) == [
        PublishLoad(ProxyLoad(logs=1, room=99, bytes_per_s=0))
    ]
    assert look(balancer, 60.0, written({"0": RATE_FLOOR / MIB / 20}, 60.0, home=ME)) == []
    balancer.forget_published_load()
    assert len(look(balancer, 61.0, owned(ME))) == 1
    written_much = look(balancer, 90.0, written({"0": 10.0}, 90.0, home=ME))
    assert isinstance(written_much[0], PublishLoad)
    assert written_much[0].load.bytes_per_s > MIB


@dataclass
class Cluster:
    """Proxies that look in any order, know old loads, and acquire what they were given later."""

    rng: random.Random
    homes: dict[str, str]  # of logs
    rates: dict[str, float]
    owners: dict[str, str | None]
    machines: dict[str, Balancer]
    published: dict[str, list[tuple[float, ProxyLoad]]] = field(default_factory=dict)
    moves: Counter[str] = field(default_factory=Counter)
    now_s: float = 0.0
    last_move_s: float = 0.0

    def load(self, location: str) -> tuple[int, float]:
        """Return the true load of a proxy."""
        mine = [name for name, owner in self.owners.items() if owner == location]
        return len(mine), sum(self.rates[name] for name in mine)

    def turn(self, location: str) -> None:
        """Let a proxy look."""
        machine = self.machines[location]
        logs = [
            OwnedState(
                name=name,
                home=self.homes[name],
                accepted_bytes=round(self.rates[name] * self.now_s),
                is_open=bool(self.rates[name]),
            )
            for name, owner in self.owners.items()
            if owner == location
        ]
        live = frozenset(self.machines)
        effects = machine.handle(Looked(now_s=self.now_s, live=live, logs=logs, room=1000))
        while effects:
            effect = effects.pop(0)
            match effect:
                case PublishLoad():
                    self.published.setdefault(location, []).append((self.now_s, effect.load))
                case AskLoads():
                    loads = {each: self.known(each) for each in effect.locations}
                    effects += machine.handle(LoadsRead(now_s=self.now_s, loads=loads))
                case HandOver():
                    self.move(location, effect)

    def known(self, location: str) -> ProxyLoad | None:
        """Return what another proxy knows of a proxy; it may not know yet what that one published
        now."""
        published = self.published.get(location)
        if published is None:
            return None
        is_late = (
            len(published) > 1
            and self.now_s - published[-1][0] < LATE_S
            and self.rng.random() < 0.5
        )
        return published[-2 if is_late else -1][1]

    def move(self, location: str, effect: HandOver) -> None:
        """Let a log go to its home, where it is acquired now, or later, when a client writes it."""
        assert effect.home == self.homes[effect.name] != location
        assert self.owners[effect.name] == location
        self.moves[effect.name] += 1
        self.last_move_s = self.now_s
        self.owners[effect.name] = effect.home if self.rng.random() < 0.5 else None

    def acquire_some(self) -> None:
        """Let clients come to logs without an owner."""
        for name, owner in self.owners.items():
            if owner is None and self.rng.random() < 0.3:
                self.owners[name] = self.homes[name]


@pytest.mark.parametrize("seed", sample(range(300), 12))
def test_several_owners_that_know_little_come_to_a_balance(seed: int) -> None:
    """Each log moves once at most; in the end no proxy has too much that it could hand over.

    One seed is one order of looks, one distribution and one set of loads that come late.
    """
    rng = random.Random(seed)
    locations = [f"grpc://proxy-{n}:1" for n in range(rng.choice((2, 3, 5)))]
    names = [f"log-{n}" for n in range(rng.choice((1, 7, 40)))]
    homes = {name: str(preferred_owner(f"{seed}{name}", locations)) for name in names}
    some = locations[: rng.randrange(1, len(locations) + 1)]
    is_written = rng.random() < 0.5
    cluster = Cluster(
        rng,
        homes,
        {name: rng.choice((0.0, 1.0, 4.0, 30.0)) * MIB * is_written for name in names},
        {name: rng.choice(some) for name in names},
        {
            each: Checked(each, after_s=AFTER_S, pause_s=PAUSE_S, tolerance=0.2)
            for each in locations
        },
    )
    before = {each: cluster.load(each)[0] for each in locations}
    while cluster.now_s < 3000:
        cluster.now_s += 2 * rng.random() * PAUSE_S
        cluster.acquire_some()
        cluster.turn(rng.choice(locations))
    assert set(cluster.moves.values()) <= {1}
    assert cluster.last_move_s < 2500
    count, rate = len(names), sum(cluster.rates.values())
    for location in locations:
        logs, written_here = cluster.load(location)
        if not is_written:  # no proxy gave more than what was too much, but for what it knew late
            assert logs >= min(before[location], count // len(locations) - 2)
        misplaced = [
            name
            for name, owner in cluster.owners.items()
            if owner == location and homes[name] != location
        ]
        has_too_much = logs > count / len(locations) * 1.2
        for name in misplaced:
            there = cluster.load(homes[name])
            helps = there[0] + 1 < logs and there[1] + cluster.rates[name] <= max(
                rate / len(locations) * 1.2 - MIB, written_here - cluster.rates[name] - MIB
            )
            assert not (has_too_much and helps), (location, name)


def test_the_table_has_every_transition_that_there_is() -> None:
    """Proxies come and go, logs too, and what the others publish is little or much."""
    made = set[tuple[BalanceState, BalanceState]]()
    for seed in range(50):
        rng = random.Random(seed)
        live = frozenset({ME, OTHER})
        machine = Checked(ME, after_s=rng.choice([0.0, 10.0]), pause_s=PAUSE_S, tolerance=0.2)
        for turn in range(60):
            before = machine.state
            if rng.random() < 0.2:
                live = frozenset(rng.choice([{ME}, {OTHER}, {ME, OTHER}, {ME, OTHER, THIRD}]))
            logs = owned(*rng.choices([ME, OTHER], k=rng.randrange(4)))
            effects = look(machine, turn * 5.0, logs, live)
            if any(isinstance(each, AskLoads) for each in effects):
                load = rng.choice([EMPTY, ProxyLoad(logs=100, room=0, bytes_per_s=0)])
                machine.handle(LoadsRead(now_s=turn * 5.0, loads={OTHER: load}))
            made.add((before, machine.state))
    assert {(one, other) for one, other in made if one is not other} == {
        (before, after) for before, afters in TRANSITIONS.causes.items() for after in afters
    }
