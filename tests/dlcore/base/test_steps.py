"""The loop of machines that do one thing at a time."""

from __future__ import annotations

import asyncio
import enum
from typing import TypeAlias

import pytest

from dlcore.base.errors import AlreadyClosedError, DLError
from dlcore.base.machines import CallFailed, Ended, State, StepMachine, Transitions, run_to_end


class _Step(State):
    READY = "nothing has begun"


class _Signal(enum.Enum):
    BEGIN = "begin"
    DONE = "done"


_Event: TypeAlias = _Signal | CallFailed


class _Counter(StepMachine[_Step, _Event, int, int]):
    """Has the effects 1 to `last`, and ends with an outcome; a failed effect is tried again."""

    transitions = Transitions(_Step.READY, {_Step.READY: {}})

    def __init__(self, last: int, outcome: int | DLError) -> None:
        self.state = _Step.READY
        self.events: list[_Event] = []
        self._last = last
        self._outcome = outcome
        self._number = 0

    def handle(self, event: _Event) -> int | Ended[int]:
        self.events.append(event)
        self._number += not isinstance(event, CallFailed)
        return Ended(self._outcome) if self._number > self._last else self._number


def test_each_effect_is_performed_once_the_one_before_is_answered() -> None:
    """In the order in which the machine has them; the last one is the outcome."""
    machine, log = _Counter(3, 7), list[str]()

    async def answer_of(effect: int) -> _Event:
        log.append(f"begin {effect}")
        await asyncio.sleep(0)
        log.append(f"end {effect}")
        return _Signal.DONE

    assert asyncio.run(run_to_end(machine, _Signal.BEGIN, answer_of)) == 7
    assert log == [f"{what} {number}" for number in (1, 2, 3) for what in ("begin", "end")]
    assert machine.events == [_Signal.BEGIN, *[_Signal.DONE] * 3]


def test_a_machine_that_ends_at_once() -> None:
    """Nothing is performed."""

    async def answer_of(effect: int) -> _Event:
        raise AssertionError(effect)

    assert asyncio.run(run_to_end(_Counter(0, 0), _Signal.BEGIN, answer_of)) == 0


def test_an_error_of_the_project_is_an_event() -> None:
    """The machine decides; the error with which it ends is raised."""
    failed, last = AlreadyClosedError("closed"), DLError("given up")
    machine, errors = _Counter(2, last), [failed]

    async def answer_of(_: int) -> _Event:
        if errors:
            raise errors.pop()
        return _Signal.DONE

    with pytest.raises(DLError, match="given up") as caught:
        asyncio.run(run_to_end(machine, _Signal.BEGIN, answer_of))
    assert caught.value is last
    assert machine.events == [_Signal.BEGIN, CallFailed(failed), _Signal.DONE, _Signal.DONE]


@pytest.mark.parametrize("error", [ValueError("a bug"), asyncio.CancelledError()])
def test_another_error_ends_the_loop(error: BaseException) -> None:
    """The machine hears nothing of it."""
    machine, errors = _Counter(2, 0), [error]

    async def answer_of(_: int) -> _Event:
        if errors:
            raise errors.pop()
        return _Signal.DONE

    with pytest.raises(type(error)):
        asyncio.run(run_to_end(machine, _Signal.BEGIN, answer_of))
    assert machine.events == [_Signal.BEGIN]
