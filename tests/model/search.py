"""Breadth-first search over global states: the first violation found is one of the shortest."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.model.system import describe

if TYPE_CHECKING:
    from tests.model.system import Protocol, State


@dataclass(slots=True)
class Result:
    """The result of a search."""

    states: int = 0
    steps: int = 0
    depth: int = 0
    seconds: float = 0.0
    is_complete: bool = False
    violation: str = ""
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rate = self.states / max(self.seconds, 1e-9)
        whole = "all" if self.is_complete else "not all"
        text = (
            f"{self.states} states ({whole}), {self.steps} steps, depth {self.depth}, "
            f"{self.seconds:.1f} s, {rate:.0f} states/s"
        )
        if self.violation:
            steps = "\n".join(f"  {number:2}. {each}" for number, each in enumerate(self.trace, 1))
            text += f"\n{self.violation}\n{steps}"
        return text


def search(protocol: Protocol, *, states_max: int) -> Result:
    """Visit every state, or `states_max` of them; stop at the first violation."""
    began = time.perf_counter()
    result = Result()
    first = protocol.initial()
    parents: dict[State, State | None] = {first: None}
    level = [first]
    try:
        while level and result.states < states_max:
            following: list[State] = []
            for state in level:
                result.states += 1
                last = state
                protocol.check(state)
                for _, after in protocol.steps(state):
                    result.steps += 1
                    if after not in parents:
                        parents[after] = state
                        following.append(after)
            level = following
            result.depth += bool(level)
        result.is_complete = not level
    except AssertionError as error:
        result.violation = f"{type(error).__name__}: {error}"
        result.trace = _trace(protocol, parents, last)
    result.seconds = time.perf_counter() - began
    return result


def _trace(protocol: Protocol, parents: dict[State, State | None], state: State) -> list[str]:
    steps: list[str] = []
    while (before := parents[state]) is not None:
        steps.append(describe(next(s for s, after in protocol.steps(before) if after == state)))
        state = before
    return steps[::-1]
