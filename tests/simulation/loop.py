"""An event loop whose time jumps: nothing is waited for, and one seed gives one order of events."""

from __future__ import annotations

import asyncio
import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import selectors
    from collections.abc import Callable, Coroutine, Iterator

T = TypeVar("T")
_COLLECTED_EVERY_STEPS = 2_000


class LivenessLostError(AssertionError):
    """The run needs more steps or virtual time than it may have, or nothing can happen any more."""


class _NoSelector:
    """Waits for no file; asks the loop to jump instead."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        self._jump = jump

    def select(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Jump over `timeout`; None means that no timer is set."""
        self._jump(timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """asyncio's own scheduling (FIFO among what is ready) on a clock that jumps to the next timer.

    A run that takes more than `steps_max` turns or `seconds_max` of virtual time fails.
    """

    def __init__(self, *, steps_max: int, seconds_max: float) -> None:
        super().__init__()
        self.steps = 0
        self.errors: list[dict[str, Any]] = []
        self._steps_max = steps_max
        self._seconds_max = seconds_max
        self._now = 0.0
        self._clock_resolution = 1e-6
        self._selector = _NoSelector(self._jump)
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        """Return virtual seconds since the start."""
        return self._now

    def _jump(self, timeout: float | None) -> None:
        self.steps += 1
        if timeout is None:
            raise LivenessLostError(f"nothing can happen any more at {self._now:.3f} s")
        self._now += timeout
        if self.steps % _COLLECTED_EVERY_STEPS == 0:
            gc.collect()
        if self.steps > self._steps_max or self._now > self._seconds_max:
            raise LivenessLostError(f"still at work after {self.steps} steps, {self._now:.3f} s")

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """One thread: no one has to be woken."""


def run(
    main: Coroutine[Any, Any, T], *, steps_max: int = 300_000, seconds_max: float = 600.0
) -> tuple[T, VirtualLoop]:
    """Run `main` to its end on a fresh loop; return its result and the loop.

    Tasks it leaves behind are cancelled; an error that no one saw fails the run.
    """
    loop = VirtualLoop(steps_max=steps_max, seconds_max=seconds_max)
    with _collecting_by_steps():
        try:
            result = loop.run_until_complete(main)
        finally:
            _clean_up(loop)
    if loop.errors:
        raise AssertionError(f"unhandled in the loop: {loop.errors[0]}")
    return result, loop


@contextmanager
def _collecting_by_steps() -> Iterator[None]:
    """Let Python collect garbage by the steps of a loop, and not by what was allocated before.

    Weakly held objects, as the logs that a proxy reads, go with it, and it ends generators that no
    one ended: a seed would not give one order of events.
    """
    gc.disable()
    gc.collect()  # the world of an earlier run, which would stay with all that is frozen
    # Older objects are not looked at with each step, nor later: where all tests are known
    # it takes a third of a second each time.
    gc.freeze()
    try:
        yield
    finally:
        gc.enable()


def _clean_up(loop: VirtualLoop) -> None:
    loop._steps_max = loop.steps + 100_000
    loop._seconds_max = loop.time() + 1000.0
    while left := asyncio.all_tasks(loop):  # those that end may start others
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
