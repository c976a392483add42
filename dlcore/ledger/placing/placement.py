"""Chooses bookies for ensembles: spread over racks, weighted by free space, suspect ones last.

Theory of operation.  The candidates are brought into a random order in which a bookie with more
free space tends to come earlier.  A depth-first search then fills the open positions of the
ensemble in turn, trying candidates in that order, and takes the first filling that keeps the rack
rule: any Qw consecutive positions (around the end too, for the write set of entry e begins at
position e mod E) lie in enough racks.  If no filling keeps it, the one with the fewest racks
missing is taken, unless the rule is enforced.

The rule does not promise this: an entry is acknowledged by Qa of its Qw bookies, and those may all
lie in one rack.  With 3/3/2 over two racks, the loss of a whole rack can take both bookies that
acknowledged an entry before the third one had it.  To survive the loss of any one rack, ask for
Qa = Qw, or for as many racks as Qw.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from dlcore.base.config import DEFAULT_RACK, PlacementConfig
from dlcore.base.errors import NotEnoughBookiesError

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dlcore.base.config import QuorumConfig
    from dlcore.base.ids import BookieId

WEIGHT_MEDIANS_MAX = 3
"""A bookie weighs at most this many medians, so that an empty new one is not flooded."""
_STEPS_MAX = 2_000
"""Positions tried for one choice.  After these the next candidates are taken, whatever racks are
missing.  Only large ensembles over unequal racks come near."""

_Kind: TypeAlias = tuple[str | None, bool]
"""A candidate's rack, and whether it is avoided."""


@dataclass(frozen=True, slots=True)
class BookieSite:
    """A bookie's rack and the space on its disk; a total of 0 bytes means unknown."""

    rack: str = DEFAULT_RACK
    free_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The sites and the health of bookies, as a choice takes them into account.

    A bookie without a site is in no known rack, and does not add a rack to a write set.
    """

    sites: Mapping[BookieId, BookieSite] = field(default_factory=lambda: MappingProxyType({}))
    avoided: Collection[BookieId] = ()
    """Bookies that are chosen only if the others do not suffice."""
    config: PlacementConfig = field(default_factory=PlacementConfig)

    def rack_of(self, bookie: BookieId) -> str | None:
        """Return the bookie's rack, None if it is not known."""
        site = self.sites.get(bookie)
        return None if site is None else site.rack


UNKNOWN_TOPOLOGY = Topology()
"""Nothing is known: all bookies are alike."""


def choose_quorum(wanted: QuorumConfig, writable: int, config: PlacementConfig) -> QuorumConfig:
    """Return the quorum of a new ledger if `writable` bookies are writable.

    With fewer than E bookies the ledger begins with as many as there are, at most Qw and at least
    Qa, unless the configuration refuses that.  Acknowledged entries still survive the loss of
    Qa - 1 bookies.  With even fewer, or fewer than an enforced rack rule needs, the result is the
    smallest quorum that would do.
    """
    if config.enforce_ensemble_size:
        return wanted
    needed = wanted.ack_quorum_size
    if config.enforce_racks:
        racks = min(config.racks_per_write_quorum_min, wanted.write_quorum_size)
        needed = max(needed, racks)
    return wanted.reduced_to(max(writable, needed))


def choose_ensemble(
    candidates: Iterable[BookieId],
    *,
    size: int,
    rng: random.Random,
    write_quorum_size: int | None = None,
    topology: Topology = UNKNOWN_TOPOLOGY,
) -> tuple[BookieId, ...]:
    """Return `size` different bookies; the write quorum is all of them unless given.

    The choice has as few avoided bookies as possible, then as few missing racks as possible.  An
    enforced rack rule comes before both.

    Raises:
        NotEnoughBookiesError: there are fewer candidates, or no choice keeps the enforced rule.
    """
    # Sorted, so that the choice depends on the seed only and not on the order of a set.
    known = sorted(set(candidates))
    if len(known) < size:
        names = ", ".join(map(str, known)) or "none"
        raise NotEnoughBookiesError(
            f"an ensemble needs {size} writable bookies, registered are {len(known)}: {names}"
        )
    filling = _Filling(
        members=[None] * size,
        positions=range(size),
        order=_draw_order(known, topology, rng),
        write_quorum_size=write_quorum_size or size,
        topology=topology,
    )
    chosen = filling.find(shortfall_max=0)
    if chosen is None:
        raise NotEnoughBookiesError(_racks_missing(known, size, filling.racks.needed, topology))
    return tuple(chosen)


def choose_replacements(
    candidates: Iterable[BookieId],
    *,
    ensemble: Sequence[BookieId | None],
    positions: Sequence[int],
    rng: random.Random,
    write_quorum_size: int | None = None,
    topology: Topology = UNKNOWN_TOPOLOGY,
) -> dict[int, BookieId]:
    """Return new bookies for some of the `positions` of an ensemble, none of them a member already.

    None in `ensemble` is a position that no bookie has had yet.

    All positions get a bookie if there are enough, else the first ones.  With an enforced rack rule
    a position stays unfilled if filling it would make the ensemble miss more racks than now.
    """
    known = sorted(set(candidates).difference(each for each in ensemble if each is not None))
    order = _draw_order(known, topology, rng)
    for count in range(min(len(positions), len(known)), 0, -1):
        open_positions = sorted(positions)[:count]
        filling = _Filling(
            members=[None if p in open_positions else each for p, each in enumerate(ensemble)],
            positions=open_positions,
            order=order,
            write_quorum_size=write_quorum_size or len(ensemble),
            topology=topology,
        )
        racks_now = [None if each is None else topology.rack_of(each) for each in ensemble]
        chosen = filling.find(shortfall_max=filling.racks.shortfall_of(racks_now))
        if chosen is not None:
            return dict(zip(open_positions, chosen, strict=True))
    return {}


def _racks_missing(
    known: Sequence[BookieId], size: int, racks_needed: int, topology: Topology
) -> str:
    counts = Counter(topology.rack_of(each) or "unknown" for each in known)
    racks = ", ".join(f"{rack}: {counts[rack]}" for rack in sorted(counts))
    return (
        f"an ensemble of {size} needs {racks_needed} racks in each write set "
        f"(enforce_racks is set), writable bookies by rack are {racks}"
    )


def _draw_order(
    known: Sequence[BookieId], topology: Topology, rng: random.Random
) -> list[BookieId]:
    """Return the candidates as drawn one after the other, each time in proportion to weight.

    Each of several independent exponential variables is the smallest with a probability in
    proportion to its rate, and the same holds for the rest.  Therefore one sort does the drawing.
    """
    weights = weigh([topology.sites.get(each, BookieSite()) for each in known])
    keys = {}
    for bookie, weight in zip(known, weights, strict=True):
        wait = rng.expovariate(1.0)
        keys[bookie] = (weight <= 0, wait / weight if weight > 0 else wait)
    return sorted(known, key=keys.__getitem__)


def weigh(sites: Sequence[BookieSite]) -> list[float]:
    """Return each site's weight: its free bytes, at most `WEIGHT_MEDIANS_MAX` medians.

    Sites without known space weigh as much as the median; if none is known, all weigh the same.
    """
    known = sorted(
        each.free_bytes for each in sites if each.free_bytes > 0 and each.total_bytes > 0
    )
    if not known:
        return [1.0] * len(sites)
    median = known[(len(known) - 1) // 2]  # the lower one of two, or the huge one could be it
    return [
        float(min(each.free_bytes, WEIGHT_MEDIANS_MAX * median) if each.total_bytes else median)
        for each in sites
    ]


class _Candidates:
    """The bookies that may be taken, each once; those of one kind differ in their order only."""

    def __init__(self, order: Sequence[BookieId], topology: Topology) -> None:
        self._rank = {bookie: rank for rank, bookie in enumerate(order)}
        # Candidates of one rack that are equally avoided differ in their rank only.
        self._queues: dict[_Kind, list[BookieId]] = {}
        for bookie in order:
            kind = (topology.rack_of(bookie), bookie in topology.avoided)
            self._queues.setdefault(kind, []).append(bookie)
        self._taken = dict.fromkeys(self._queues, 0)
        self.avoided_left = 0
        """How many avoided ones may still be taken."""

    @property
    def racks(self) -> set[str]:
        """The racks that they are in, as far as they are known."""
        return {rack for rack, _ in self._queues if rack is not None}

    @property
    def avoided_count(self) -> int:
        """How many of them are avoided."""
        return sum(len(queue) for (_, avoided), queue in self._queues.items() if avoided)

    def __len__(self) -> int:
        return len(self._rank)

    def next_ones(self) -> list[tuple[BookieId, _Kind]]:
        """Return the next candidate of each kind, in the order in which they were drawn."""
        heads = [
            (queue[self._taken[kind]], kind)
            for kind, queue in self._queues.items()
            if self._taken[kind] < len(queue) and (self.avoided_left > 0 or not kind[1])
        ]
        return sorted(heads, key=lambda head: self._rank[head[0]])

    def take(self, kind: _Kind) -> None:
        """Take the next one of this kind."""
        self._taken[kind] += 1
        self.avoided_left -= kind[1]

    def give_back(self, kind: _Kind) -> None:
        """Undo the last `take` of this kind."""
        self._taken[kind] -= 1
        self.avoided_left += kind[1]

    def state(self) -> tuple[int, ...]:
        """Return how many of each kind are taken."""
        return tuple(self._taken.values())


class _Racks:
    """The racks of an ensemble's positions, and how many racks its write sets miss.

    Args:
        racks: of the positions; None where it is unknown, or no bookie is chosen yet.
        is_open: whether a position has no bookie yet.
        write_quorum_size: how many consecutive positions a write set has.
        needed: how many racks each should have.
    """

    def __init__(
        self,
        racks: list[str | None],
        is_open: list[bool],
        write_quorum_size: int,
        needed: int,
    ) -> None:
        size = len(racks)
        # If a write set is the whole ensemble, all of them are the same set: it counts once.
        starts = range(size) if write_quorum_size < size else range(1)
        self.needed = needed
        self._racks = racks
        self._is_open = is_open
        self._windows = [[(s + i) % size for i in range(write_quorum_size)] for s in starts]

    @property
    def worst(self) -> int:
        """The most racks that can be missing."""
        return len(self._windows) * self.needed

    def fill(self, position: int, rack: str | None) -> None:
        """Put a bookie of this rack at an open position."""
        self._racks[position], self._is_open[position] = rack, False

    def clear(self, position: int) -> None:
        """Open the position again."""
        self._racks[position], self._is_open[position] = None, True

    def shortfall(self) -> int:
        """Return how many racks the write sets miss at least, whatever fills the open positions."""
        return sum(
            max(0, self.needed - len(racks) - open_count)
            for racks, open_count in map(self._look_into, self._windows)
        )

    def shortfall_of(self, racks: Sequence[str | None]) -> int:
        """Return how many racks the write sets of an ensemble in these racks miss."""
        return sum(
            max(0, self.needed - len({racks[p] for p in window} - {None}))
            for window in self._windows
        )

    def state(self) -> tuple[tuple[frozenset[str | None], ...], int]:
        """Return everything that decides which racks may fill the open positions."""
        windows = map(self._look_into, self._windows)
        return tuple(racks for racks, open_count in windows if open_count), self.shortfall()

    def _look_into(self, window: Sequence[int]) -> tuple[frozenset[str | None], int]:
        racks = frozenset(self._racks[p] for p in window) - {None}
        return racks, sum(self._is_open[p] for p in window)


class _Filling:
    """The search for bookies for the open positions (None) of an ensemble."""

    def __init__(
        self,
        *,
        members: Sequence[BookieId | None],
        positions: Sequence[int],
        order: Sequence[BookieId],
        write_quorum_size: int,
        topology: Topology,
    ) -> None:
        self._positions = positions
        self._is_enforced = topology.config.enforce_racks
        self._candidates = _Candidates(order, topology)
        racks = [None if each is None else topology.rack_of(each) for each in members]
        needed = min(topology.config.racks_per_write_quorum_min, write_quorum_size)
        if not self._is_enforced:
            known = self._candidates.racks.union(each for each in racks if each is not None)
            needed = min(needed, max(1, len(known)))
        is_open = [each is None for each in members]
        self.racks = _Racks(racks, is_open, write_quorum_size, needed)
        self._shortfall_max = 0
        self._steps_left = _STEPS_MAX
        self._dead: set[object] = set()  # states from which no filling was found

    def find(self, *, shortfall_max: int) -> list[BookieId] | None:
        """Return a bookie for each open position, None if an enforced rule leaves no choice.

        `shortfall_max` is how many racks may be missing if the rule is enforced.
        """
        count, avoided_count = len(self._positions), self._candidates.avoided_count
        avoided_min = max(0, count - (len(self._candidates) - avoided_count))
        if self._is_enforced:
            for avoided_max in range(avoided_min, min(count, avoided_count) + 1):
                chosen = self._search(shortfall_max, avoided_max)
                if chosen is not None:
                    return chosen
            return None
        worst = self.racks.worst
        for shortfall in range(worst):
            chosen = self._search(shortfall, avoided_min)
            if chosen is not None:
                return chosen
        self._steps_left = count  # each step succeeds
        return self._search(worst, avoided_min)

    def _search(self, shortfall_max: int, avoided_max: int) -> list[BookieId] | None:
        self._shortfall_max = shortfall_max
        self._candidates.avoided_left = avoided_max
        self._dead.clear()
        chosen: list[BookieId] = []
        return chosen if self._fill(chosen) else None

    def _fill(self, chosen: list[BookieId]) -> bool:
        """Fill the positions after those of `chosen`; on failure leave everything as it was."""
        if len(chosen) == len(self._positions):
            return True
        candidates, racks = self._candidates, self.racks
        # Everything that decides whether the open positions can be filled.
        state = candidates.state(), racks.state()
        if state in self._dead:
            return False
        position = self._positions[len(chosen)]
        for bookie, kind in candidates.next_ones():
            if self._steps_left == 0:
                return False
            self._steps_left -= 1
            candidates.take(kind)
            racks.fill(position, kind[0])
            chosen.append(bookie)
            if racks.shortfall() <= self._shortfall_max and self._fill(chosen):
                return True
            chosen.pop()
            racks.clear(position)
            candidates.give_back(kind)
        self._dead.add(state)
        return False
