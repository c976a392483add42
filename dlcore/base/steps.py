"""Machines that do one thing at a time for one caller, and the loop that runs one to its end.

Such a machine answers each event with one effect, and has a last one, `Ended`.  Its driver performs
an effect, and feeds back what came of it.

Promises of `run_to_end`:

* An effect is performed only after the answer to the one before was handled.
* A `DLError` of an effect is an event, `CallFailed`: the machine decides what follows.
* Another error, or a cancellation, ends the loop at once.  The machine hears nothing of it, and the
  effect that was being performed may have been or not.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dlcore.base.errors import DLError
from dlcore.base.machines import Machine, StateT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")
OutcomeT = TypeVar("OutcomeT")
_OutcomeT = TypeVar("_OutcomeT", covariant=True)


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
    """The base of machines whose events have one effect each."""

    @abstractmethod
    def handle(self, event: EventT | CallFailed) -> EffectT | Ended[OutcomeT]:
        """Take one event."""


async def run_to_end(
    machine: StepMachine[Any, EventT, EffectT, OutcomeT],
    event: EventT | CallFailed,
    answer_of: Callable[[EffectT], Awaitable[EventT]],
) -> OutcomeT:
    """Feed a machine its first event, perform all that follows, and return the outcome.

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
