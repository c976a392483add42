"""Choosing bookies.

Goal: ensembles and replacements are different, allowed bookies, chosen by the seed alone; they span
racks wherever that is possible, and fill disks evenly.  Method: random topologies compared with all
ways there are; weights counted over many seeded draws, against bounds six deviations wide.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings, strategies as st

from dlcore.base.config import PlacementConfig
from dlcore.base.errors import ConfigurationError, NotEnoughBookiesError
from dlcore.ledger.placing.placement import (
    WEIGHT_MEDIANS_MAX,
    BookieSite,
    Topology,
    choose_ensemble,
    choose_replacements,
    weigh,
)
from tests.fixtures.ledgers import bookie, bookies
from tests.fixtures.lengths import amount

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = "ABCDEFGHIJKLMNOPQRST"
ENFORCED = PlacementConfig(enforce_racks=True)


def topology_of(
    racks: str, *, avoided: str = "", config: PlacementConfig | None = None
) -> Topology:
    """Return a topology in which bookie A stands in the rack of the first letter, and so on."""
    return Topology(
        sites={
            bookie(name): BookieSite(f"/{rack}") for name, rack in zip(NAMES, racks, strict=False)
        },
        avoided=bookies(avoided),
        config=config or PlacementConfig(),
    )


def racks_missing(racks: Sequence[str | None], write_quorum_size: int, needed: int) -> int:
    """Count what each write set lacks: a second, plain way to say the rule."""
    size = len(racks)
    missing = 0
    for first in range(size if write_quorum_size < size else 1):
        seen = {racks[(first + i) % size] for i in range(write_quorum_size)} - {None}
        missing += max(0, needed - len(seen))
    return missing


def test_the_order_of_candidates_does_not_matter() -> None:
    """The same seed chooses the same bookies."""
    one = choose_ensemble(bookies("ABCDE"), size=3, rng=random.Random(3))
    other = choose_ensemble(reversed(bookies("ABCDE")), size=3, rng=random.Random(3))
    assert one == other
    assert len(set(one)) == 3


def test_every_bookie_is_chosen_some_time() -> None:
    """Load spreads."""
    rng = random.Random(0)
    seen = {each for _ in range(200) for each in choose_ensemble(bookies("ABCDE"), size=2, rng=rng)}
    assert seen == set(bookies("ABCDE"))


def test_too_few_bookies_say_which_there_are() -> None:
    """A person can act on the message."""
    with pytest.raises(NotEnoughBookiesError, match=r"needs 3 .* registered are 2: A/.*, B/"):
        choose_ensemble(bookies("AB"), size=3, rng=random.Random(0))
    with pytest.raises(NotEnoughBookiesError, match="registered are 0: none"):
        choose_ensemble((), size=1, rng=random.Random(0))


@given(
    candidates=st.text("ABCDEFGH"),
    ensemble=st.lists(st.sampled_from("ABCDEFGH"), min_size=1, unique=True),
    data=st.data(),
    seed=st.integers(0, 100),
)
def test_replacements_are_as_many_as_there_are(
    candidates: str, ensemble: list[str], data: st.DataObject, seed: int
) -> None:
    """Never a member, never one twice, the first positions first."""
    positions = sorted(data.draw(st.sets(st.integers(0, len(ensemble) - 1))))
    chosen = choose_replacements(
        bookies(candidates),
        ensemble=bookies("".join(ensemble)),
        positions=positions,
        rng=random.Random(seed),
    )
    allowed = set(candidates) - set(ensemble)
    assert {each.name for each in chosen.values()} <= allowed
    assert len(set(chosen.values())) == len(chosen)
    assert list(chosen) == positions[: len(allowed)]


@st.composite
def rack_cases(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """Return racks of candidates, E, Qw and the racks needed; small enough to try all ways."""
    racks = draw(st.text("xyz", min_size=1, max_size=6))
    size = draw(st.integers(1, min(5, len(racks))))
    write_quorum_size = draw(st.integers(1, size))
    return racks, size, write_quorum_size, draw(st.integers(1, 3))


@given(case=rack_cases(), seed=st.integers(0, 5))
def test_an_ensemble_misses_no_rack_that_it_need_not(
    case: tuple[str, int, int, int], seed: int
) -> None:
    """As few racks missing as in the best of all ensembles; if enforced, none or an error."""
    racks, size, write_quorum_size, racks_min = case
    names = NAMES[: len(racks)]
    needed = min(racks_min, write_quorum_size)

    def missing_of(ensemble: Sequence[str], needed: int) -> int:
        members = [racks[NAMES.index(name)] for name in ensemble]
        return racks_missing(members, write_quorum_size, needed)

    ways = list(itertools.permutations(names, size))
    needed_softly = min(needed, len(set(racks)))
    chosen = choose_ensemble(
        bookies(names),
        size=size,
        write_quorum_size=write_quorum_size,
        topology=topology_of(racks, config=PlacementConfig(racks_per_write_quorum_min=racks_min)),
        rng=random.Random(seed),
    )
    assert len(set(chosen)) == size
    best = min(missing_of(way, needed_softly) for way in ways)
    assert missing_of([each.name for each in chosen], needed_softly) == best
    config = PlacementConfig(racks_per_write_quorum_min=racks_min, enforce_racks=True)
    is_possible = any(missing_of(way, needed) == 0 for way in ways)
    try:
        chosen = choose_ensemble(
            bookies(names),
            size=size,
            write_quorum_size=write_quorum_size,
            topology=topology_of(racks, config=config),
            rng=random.Random(seed),
        )
    except NotEnoughBookiesError:
        assert not is_possible
    else:
        assert missing_of([each.name for each in chosen], needed) == 0


@given(
    racks=st.text("xyz", min_size=2, max_size=6),
    data=st.data(),
    seed=st.integers(0, 5),
)
def test_a_replacement_keeps_the_rule_if_any_does(
    racks: str, data: st.DataObject, seed: int
) -> None:
    """Given the others, the write sets miss as few racks as with the best of all replacements."""
    size = data.draw(st.integers(1, len(racks)))
    write_quorum_size = data.draw(st.integers(1, size))
    positions = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
    ensemble, spare = NAMES[:size], NAMES[size : len(racks)]
    needed = min(2, write_quorum_size)
    filled = positions[: len(spare)]

    def missing_with(chosen: Sequence[str], needed: int) -> int:
        members = list(ensemble)
        for position, name in zip(filled, chosen, strict=True):
            members[position] = name
        in_racks = [racks[NAMES.index(name)] for name in members]
        return racks_missing(in_racks, write_quorum_size, needed)

    def choose(config: PlacementConfig) -> list[str]:
        found = choose_replacements(
            bookies(spare),
            ensemble=bookies(ensemble),
            positions=positions,
            write_quorum_size=write_quorum_size,
            topology=topology_of(racks, config=config),
            rng=random.Random(seed),
        )
        return [found[p].name for p in sorted(found)]

    staying = [racks[p] for p in range(size) if p not in filled]
    needed_softly = min(needed, len({*staying, *racks[size:]}) or 1)
    ways = list(itertools.permutations(spare, len(filled)))
    assert missing_with(choose(PlacementConfig()), needed_softly) == min(
        missing_with(way, needed_softly) for way in ways
    )
    strict = choose(ENFORCED)
    now = missing_with([ensemble[p] for p in filled], needed)
    if min(missing_with(way, needed) for way in ways) <= now:
        assert missing_with(strict, needed) <= now
    else:
        assert len(strict) < len(filled)


def test_a_rule_that_cannot_be_kept_names_racks_and_counts() -> None:
    """A person can act on the message."""
    with pytest.raises(NotEnoughBookiesError, match=r"needs 2 racks .* are /x: 3, unknown: 1"):
        choose_ensemble(
            bookies("ABCD"),
            size=3,
            topology=topology_of("xxx", config=ENFORCED),
            rng=random.Random(0),
        )
    with pytest.raises(ConfigurationError, match="racks_per_write_quorum_min=0: expected"):
        PlacementConfig(racks_per_write_quorum_min=0)


def test_a_bookie_in_no_known_rack_adds_none() -> None:
    """The member that is not registered any more cannot be counted on for its rack."""
    for seed in range(20):
        chosen = choose_replacements(
            bookies("BCD"),
            ensemble=bookies("ATS"),
            positions=[1],
            topology=topology_of("xxxy"),
            rng=random.Random(seed),
        )
        assert chosen == {1: bookie("D")}


@pytest.mark.parametrize("config", [PlacementConfig(), ENFORCED])
def test_avoided_bookies_come_last(config: PlacementConfig) -> None:
    """None while the others suffice, as few as possible otherwise; an enforced rule needs more."""
    for seed in range(20):
        rng = random.Random(seed)
        topology = topology_of("xxyyxy", avoided="BC", config=config)
        assert not {*choose_ensemble(bookies("ABCDEF"), size=3, topology=topology, rng=rng)} & {
            *bookies("BC")
        }
        chosen = choose_ensemble(bookies("ABCD"), size=3, topology=topology, rng=rng)
        assert len({*chosen} & {*bookies("BC")}) == 1
        only_rack = topology_of("xxxy", avoided="D", config=config)
        chosen = choose_ensemble(bookies("ABCD"), size=3, topology=only_rack, rng=rng)
        assert (bookie("D") in chosen) == config.enforce_racks


def test_weights_are_capped_and_sane() -> None:
    """Free bytes up to three medians; the silent ones weigh as the median; all full, all equal."""

    def weights(*free: int | None) -> list[float]:
        return weigh(
            [BookieSite() if each is None else BookieSite("/x", each, 1000) for each in free]
        )

    assert weights(100, 200, 300) == [100, 200, 300]
    assert weights(100, 100, 100, 10**18) == [100, 100, 100, 100 * WEIGHT_MEDIANS_MAX]
    assert weights(1, 10**18) == [1, WEIGHT_MEDIANS_MAX]
    assert weights(100, None, 0) == [100, 100, 0]
    assert weights(0, 0) == [1, 1]
    assert weights(None) == [1]
    assert weights() == []


def test_bookies_are_chosen_by_their_free_space() -> None:
    """Bookies with 1, 2, 3 and (capped) 6 parts of 12, 12 000 draws."""
    sites = {
        bookie(name): BookieSite("/x", free, 10**6)
        for name, free in zip("ABCD", (100, 200, 300, 10**6), strict=True)
    }
    rng = random.Random(7)
    count = 12_000
    drawn = Counter(
        choose_ensemble(bookies("ABCD"), size=1, topology=Topology(sites=sites), rng=rng)[0].name
        for _ in range(count)
    )
    for name, parts in zip("ABCD", (1, 2, 3, 6), strict=True):
        share = parts / 12
        deviation = (count * share * (1 - share)) ** 0.5
        assert abs(drawn[name] - count * share) < 6 * deviation


def test_full_bookies_are_chosen_when_no_other_is_there() -> None:
    """No weight at all is no reason to search for ever."""
    sites = {each: BookieSite("/x", 0, 1000) for each in bookies("ABC")}
    sites[bookie("D")] = BookieSite("/x", 500, 1000)
    for seed in range(20):
        chosen = choose_ensemble(
            bookies("ABCD"), size=4, topology=Topology(sites=sites), rng=random.Random(seed)
        )
        assert chosen[0] == bookie("D")
        assert set(chosen) == {*bookies("ABCD")}


@settings(max_examples=amount(20, sampled=5))
@given(racks=st.text("vwxyz", min_size=20, max_size=20), seed=st.integers(0, 3))
def test_large_ensembles_come_to_an_end(racks: str, seed: int) -> None:
    """Searching all ways would take for ever; what is found is an ensemble in any case."""
    config = PlacementConfig(racks_per_write_quorum_min=5)
    chosen = choose_ensemble(
        bookies(NAMES),
        size=18,
        write_quorum_size=6,
        topology=topology_of(racks, config=config),
        rng=random.Random(seed),
    )
    assert len(set(chosen)) == 18


def test_only_replacements_that_keep_an_enforced_rule_are_made() -> None:
    """The first ones: all at once would leave every write set in one rack."""
    topology = topology_of("xyxxx", config=ENFORCED)
    rng = random.Random(0)
    for positions, chosen_positions in (([0, 1], {0}), ([1], set()), ([0, 2], {0, 2})):
        chosen = choose_replacements(
            bookies("DE"), ensemble=bookies("ABC"), positions=positions, topology=topology, rng=rng
        )
        assert chosen.keys() == chosen_positions
