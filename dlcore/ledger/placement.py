"""Choosing bookies for ensembles: a random choice among those that are registered and writable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.errors import NotEnoughBookiesError

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable

    from dlcore.ids import BookieId


def choose_ensemble(
    candidates: Iterable[BookieId], *, size: int, rng: random.Random
) -> tuple[BookieId, ...]:
    """Return `size` different bookies in random order.

    Raises:
        NotEnoughBookiesError: there are fewer candidates.
    """
    # Sorted, so that the choice depends on the seed only and not on the order of a set.
    known = sorted(set(candidates))
    if len(known) < size:
        names = ", ".join(map(str, known)) or "none"
        raise NotEnoughBookiesError(
            f"an ensemble needs {size} writable bookies, registered are {len(known)}: {names}"
        )
    return tuple(rng.sample(known, size))


def choose_replacements(
    candidates: Iterable[BookieId],
    *,
    exclude: Collection[BookieId],
    count_max: int,
    rng: random.Random,
) -> tuple[BookieId, ...]:
    """Return up to `count_max` different bookies, none of `exclude`; fewer if there are fewer."""
    assert count_max >= 0
    known = sorted(set(candidates).difference(exclude))
    return tuple(rng.sample(known, min(count_max, len(known))))
