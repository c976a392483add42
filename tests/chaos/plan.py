"""The plan of the nemesis, drawn from the seed alone: the same seed, the same plan.

Only the plan is reproducible.  All else is real: processes, disks and their timing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ADD_TIMEOUT_S = 3.0
"""The time-out of the clients, for adds and reads alike."""
BOOKIE_SESSION_S = 4.0
CLIENT_SESSION_S = 10.0
"""The settings for `open_namespace`."""

PROXY_SESSION_S = 4.0
"""The further settings of a proxy."""
OWNER_DIES_EVERY_S = 10.0

KINDS = (
    "kill bookie",
    "lose power",
    "pause bookie",
    "kill client",
    "pause client",
    "cut links",
    "half-open links",
    "one-way links",
    "slow links",
    "reset links",
    "fill disk",
    "fail syncs",
    "slow disk",
    "restart ZooKeeper",
    "pause ZooKeeper",
    "wipe bookie",
    "stale folder",
    "forge frames",
    "kill owner",
    "pause owner",
    "drain proxies",
    "restart proxies",
    "restart bookies",
)
CHANGE_RELEASE, FINALIZE = "change release", "finalize features"
MIXED_KINDS = (*KINDS, CHANGE_RELEASE, FINALIZE)
"""Those of a run of two releases, which both are in its plan or neither."""
LINK_KINDS = frozenset(kind for kind in KINDS if kind.endswith(" links"))
FORGERY = "forge frames"
ZOOKEEPER = "zookeeper"
_GAP_S_MIN, _GAP_S_MAX = 1.0, 4.0
_EARLY_SHARE = 0.6
"""The first round of all kinds takes this share of the time."""
_MIXED_SHARE = 0.75
"""The share of the time after which the features are finalized."""
_CHANGE_S_MIN, _CHANGE_S_MAX = 1.0, 5.0
"""Between two changes of a release."""
_CHANGE_ROUNDS = 2
"""How often each process changes its release, if there is time: forwards, and back."""
ABRUPT = 0.7
"""From this strength on a process is killed to change its release, else stopped in order."""
ALL_LOSE_POWER = 0.5
"""From this strength on a loss of power is that of all bookies at once."""

# Seconds that a fault lasts: long enough for the time-outs that it is to outlast.
_LASTS_S = {
    "kill bookie": (0.2, 8.0),
    "lose power": (0.2, 4.0),
    "pause bookie": (BOOKIE_SESSION_S + ADD_TIMEOUT_S, BOOKIE_SESSION_S + ADD_TIMEOUT_S + 4),
    "kill client": (0.2, 4.0),
    "pause client": (CLIENT_SESSION_S + 1.5, CLIENT_SESSION_S + 4),
    "cut links": (1.0, 12.0),
    "half-open links": (2.0, 12.0),
    "one-way links": (2.0, 12.0),
    "slow links": (3.0, 10.0),
    "reset links": (0.0, 0.0),
    "fill disk": (4.0, 9.0),
    "fail syncs": (2.0, 5.0),
    "slow disk": (3.0, 9.0),
    "restart ZooKeeper": (0.0, 6.0),
    "pause ZooKeeper": (2.0, 9.0),
    "wipe bookie": (0.2, 2.0),
    "stale folder": (1.0, 4.0),
    "forge frames": (3.0, 8.0),
    "kill owner": (0.2, 4.0),
    "pause owner": (PROXY_SESSION_S + 1.5, PROXY_SESSION_S + 4),
    "drain proxies": (0.5, 4.0),
    "restart proxies": (0.2, 1.0),
    "restart bookies": (0.2, 1.0),
    CHANGE_RELEASE: (0.0, 2.0),
    FINALIZE: (0.0, 0.0),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: what, when after the start, for how long, and to whom.

    `sources` and `endpoints` are the two ends of links.  `strength` is in 0 … 1 and means what the
    kind makes of it: a delay, how full the disk gets, whether a kill comes again during replay,
    whether one bookie loses power or all of them at once, whether a process is stopped or killed.
    """

    kind: str
    at_s: float
    lasts_s: float
    target: str = ""
    sources: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    strength: float = 0.0

    def __str__(self) -> str:
        whom = self.target or f"{','.join(self.sources)} → {','.join(self.endpoints)}"
        text = f"{self.at_s:7.2f} s  {self.kind:<17} {whom}"
        return f"{text}, {self.lasts_s:.1f} s, strength {self.strength:.2f}"


def make_plan(
    seed: int,
    *,
    seconds: float,
    bookies: Sequence[str],
    clients: Sequence[str],
    small_disks: Sequence[str],
    kinds: Sequence[str] = KINDS,
) -> list[Fault]:
    """Return faults over `seconds`, in order of time: each of `kinds` once, and then at random.

    The owner of the producers' log is killed every ten seconds beside.  With `CHANGE_RELEASE` among
    the kinds the releases change beside, which leaves the other faults of a seed as they are.

    `small_disks` are the bookies whose disk can be filled.
    """
    rng = random.Random(f"chaos {seed}")
    if not kinds:
        return []
    faults: list[Fault] = []
    if CHANGE_RELEASE in kinds:
        faults += _make_changes(random.Random(f"releases {seed}"), seconds, [*bookies, *clients])
    kinds = [kind for kind in kinds if kind not in (CHANGE_RELEASE, FINALIZE)]
    first_round = list(kinds)
    rng.shuffle(first_round)
    gap_s = min(_GAP_S_MAX, max(_GAP_S_MIN, _EARLY_SHARE * seconds / max(1, len(kinds))))
    at_s = gap_s / 2
    while kinds and (at_s < seconds or first_round):
        kind = first_round.pop() if first_round else rng.choice(kinds)
        faults.append(_make_fault(rng, kind, at_s, bookies, clients, small_disks))
        at_s += gap_s if first_round else rng.uniform(0.3, 1.7) * gap_s
    if "kill owner" in kinds:
        for number in range(1, int(seconds / OWNER_DIES_EVERY_S)):
            at_s = number * OWNER_DIES_EVERY_S
            faults.append(_make_fault(rng, "kill owner", at_s, bookies, clients, small_disks))
    liar = random.Random(f"liar {seed}").choice(list(bookies))  # one bookie alone may lie
    faults = [replace(each, target=liar) if each.kind == FORGERY else each for each in faults]
    return sorted(faults, key=lambda fault: fault.at_s)


def _make_changes(rng: random.Random, seconds: float, processes: Sequence[str]) -> list[Fault]:
    """Return changes of the releases of all processes, one after the other, round by round.

    Each begins as the last release, so that rounds go forwards and back in turn.  At the end the
    features are finalized, after which there is no way back.
    """
    end_s = _MIXED_SHARE * seconds
    gap_s = end_s / (_CHANGE_ROUNDS * len(processes))
    gap_s = min(_CHANGE_S_MAX, max(_CHANGE_S_MIN, gap_s))
    faults: list[Fault] = []
    turns: list[str] = []
    at_s = gap_s / 2
    while at_s < end_s:
        turns = turns or rng.sample(list(processes), len(processes))
        lasts_s = rng.uniform(*_LASTS_S[CHANGE_RELEASE])
        faults.append(Fault(CHANGE_RELEASE, at_s, lasts_s, turns.pop(), strength=rng.random()))
        at_s += gap_s
    return [*faults, Fault(FINALIZE, end_s, 0.0, "cluster")]


def _make_fault(
    rng: random.Random,
    kind: str,
    at_s: float,
    bookies: Sequence[str],
    clients: Sequence[str],
    small_disks: Sequence[str],
) -> Fault:
    lasts_s = rng.uniform(*_LASTS_S[kind])
    strength = rng.random()
    if kind in LINK_KINDS:
        sources, endpoints = _choose_links(rng, bookies, clients)
        return Fault(kind, at_s, lasts_s, sources=sources, endpoints=endpoints, strength=strength)
    if kind.endswith("ZooKeeper"):
        target = ZOOKEEPER
    elif kind.endswith(("owner", "proxies")):
        target = "proxies"
    elif kind == "restart bookies":
        target = "bookies"
    elif kind == "stale folder":  # a mount cannot be put aside
        target = rng.choice([each for each in bookies if each not in small_disks])
    elif kind == "fill disk":
        target = rng.choice(list(small_disks))
    else:
        target = rng.choice(list(clients if kind.endswith("client") else bookies))
    return Fault(kind, at_s, lasts_s, target, strength=strength)


def _choose_links(
    rng: random.Random, bookies: Sequence[str], clients: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return sources and endpoints of one of the shapes that partitions have."""

    def some(names: Sequence[str], low: int, high: int) -> tuple[str, ...]:
        return tuple(sorted(rng.sample(list(names), rng.randint(low, min(high, len(names))))))

    shape = rng.randrange(5)
    if shape == 0:  # one bookie and everybody
        return tuple(clients), some(bookies, 1, 1)
    if shape == 1:  # one client and some bookies
        return some(clients, 1, 1), some(bookies, 1, len(bookies))
    if shape == 2:  # some clients and some bookies
        return some(clients, 1, 2), some(bookies, 1, 2)
    if shape == 3:  # clients and the metadata store
        return some(clients, 1, 2), (ZOOKEEPER,)
    return some(bookies, 1, 2), (ZOOKEEPER,)
