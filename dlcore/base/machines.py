"""The base of the machines, the table of transitions between states, and its diagram."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping


class State(Enum):
    """The base of the states of a machine."""

    # Each state is one object.  The hash of `Enum` is a function in Python, and machines on hot
    # paths look states up at each change.
    __hash__ = object.__hash__


StateT = TypeVar("StateT", bound=State)


@dataclass(frozen=True, slots=True)
class Transitions(Generic[StateT]):
    """Every transition that a machine may make, with its cause in words for the diagram.

    The machine asserts at each change of its state that the table has it.  Therefore the table, and
    the diagram in docs/architecture/machines.md that `make docs` draws of it, cannot differ from
    the code.
    """

    start: StateT
    causes: Mapping[StateT, Mapping[StateT, str]]
    """The cause of each transition, by the state before and the state after it."""

    def diagram(self) -> str:
        """Return the table as a Mermaid state diagram."""
        moves = [
            f"  {before.name} --> {after.name}: {cause}"
            for before, afters in self.causes.items()
            for after, cause in afters.items()
        ]
        return "\n".join(["stateDiagram-v2", f"  [*] --> {self.start.name}", *moves])


class Machine(Generic[StateT]):
    """The base of the machines: a state that changes as the table allows."""

    transitions: Transitions[StateT]
    state: StateT

    def _become(self, state: StateT) -> None:
        assert state in self.transitions.causes[self.state], (self.state, state)
        self.state = state
