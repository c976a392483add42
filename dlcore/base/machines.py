"""The base of the machines, and the table of transitions between states.

A machine that does one thing at a time for one caller is a `StepMachine`, which `run_to_end` runs.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dlcore.base.errors import DLError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")
OutcomeT = TypeVar("OutcomeT")
_OutcomeT = TypeVar("_OutcomeT", covariant=True)


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
    the diagram in docs/architecture/machines.md that `make pages` draws of it, cannot differ from
    the code.
    """

    start: StateT
    causes: Mapping[StateT, Mapping[StateT, str]]
    """The cause of each transition, by the state before and the state after it."""


class Machine(Generic[StateT]):
    """The base of the machines: a state that changes as the table allows."""

    transitions: Transitions[StateT]
    state: StateT

    def _become(self, state: StateT) -> None:
        assert state in self.transitions.causes[self.state], (self.state, state)
        self.state = state


@dataclass(frozen=True, slots=True)
class CallFailed:
    """Event: the last effect was refused, or its outcome is unknown."""

    error: DLError


@dataclass(frozen=True, slots=True)
class Pause:
    """Effect: go on after a random time of at most `s_max`; `error` is the reason.

    Clients whose changes collided are separated by it.
    """

    s_max: float
    error: DLError


@dataclass(frozen=True, slots=True)
class Ended(Generic[_OutcomeT]):
    """Effect: answer the caller with an outcome, or with an error."""

    outcome: _OutcomeT | DLError


class StepMachine(Machine[StateT], Generic[StateT, EventT, EffectT, OutcomeT]):
    """The base of machines whose events have one effect each, the last of them `Ended`."""

    @abstractmethod
    def handle(self, event: EventT | CallFailed) -> EffectT | Ended[OutcomeT]:
        """Take one event."""


async def run_to_end(
    machine: StepMachine[Any, EventT, EffectT, OutcomeT],
    event: EventT | CallFailed,
    answer_of: Callable[[EffectT], Awaitable[EventT]],
) -> OutcomeT:
    """Feed a machine its first event, perform all that follows, and return the outcome.

    An effect is performed only after the answer to the one before was handled.  If it fails with a
    `DLError`, the machine decides what follows.  Another error, or a cancellation, ends the loop at
    once.  The machine hears nothing of it, and the effect may have been performed or not.

    Args:
        machine: the machine.
        event: the first event.
        answer_of: performs an effect, and returns the event that answers it.

    Raises:
        DLError: the machine ended with it.
    """
    while not isinstance(effect := machine.handle(event), Ended):
        try:
            event = await answer_of(effect)
        except DLError as error:
            event = CallFailed(error)
    if isinstance(effect.outcome, DLError):
        raise effect.outcome
    return effect.outcome
