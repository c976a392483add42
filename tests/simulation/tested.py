"""Known bugs that a named test catches, where the simulation leaves that part out on purpose.

A mutant is a generator function that puts one bug back until it is resumed; `caught_by` names the
pytest node that must fail with it, and pass without.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Tested(NamedTuple):
    """A mutant and the test that must catch it."""

    apply: Callable[[], contextlib.AbstractContextManager[None]]
    test: str


TESTED: dict[str, Tested] = {}
"""By name; filled by the modules that `mutants_tested` imports."""


def caught_by(
    test: str,
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    """Note which test, a file and a function, must catch the mutant that follows."""

    def note(mutant: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        name = mutant.__name__
        assert name not in TESTED, f"two mutants are called {name}"
        TESTED[name] = Tested(contextlib.contextmanager(mutant), f"tests/{test}")
        return mutant

    return note
