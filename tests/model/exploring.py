"""The search of models that stand by themselves, and the proof of their scopes in tests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from dlcore.base.errors import InvalidEntryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

STATES_MAX = 400_000
"""A known bug shows in fewer; whole scopes have at most ten times as many."""


@dataclass(slots=True)
class Result:
    """The result of a search."""

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


def scopes(small: Mapping[str, Any], large: Mapping[str, Any]) -> list[Any]:
    """Return the scopes as parameters of a test, the large ones for `make prove`."""
    marked = [(small, ()), (large, (pytest.mark.prove,))]
    return [
        pytest.param(scope, id=name, marks=marks)
        for found, marks in marked
        for name, scope in found.items()
    ]


def prove(model: Searched) -> None:
    """Visit every state of a model, and fail if one breaks a promise."""
    result = search(model, states_max=10 * STATES_MAX)
    assert not result.violation, str(result)
    assert result.is_complete, str(result)
