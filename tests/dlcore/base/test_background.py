"""Tasks that no caller awaits: none is lost, none fails in silence."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.background import (
    BackgroundTasks,
    all_of,
    forget_frames,
    fulfil,
    outcome_of,
    refuse,
    reported_to_callers,
    side_tasks,
    together,
)
from dlcore.log import tidying
from dlcore.log.tidying import Tidier
from tests.fixtures.aio import run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine


async def _fail() -> None:
    await asyncio.sleep(0)
    raise ZeroDivisionError("planted")


async def _forever(started: list[int], ended: list[int]) -> None:
    started.append(1)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)  # an end takes its time
        ended.append(1)


def test_a_failure_is_logged_or_reported_and_awaiters_learn_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By the task's name, with its trace."""

    async def scenario() -> None:
        logged = BackgroundTasks()
        task = logged.start(_fail(), name="counting sheep")
        with pytest.raises(ZeroDivisionError):
            await task
        assert "counting sheep failed" in caplog.text
        assert "ZeroDivisionError: planted" in caplog.text
        reported: list[BaseException] = []
        owner = BackgroundTasks(reported.append)
        owner.start(_fail())
        await owner.finish()
        assert [str(each) for each in reported] == ["planted"]
        caplog.clear()
        with caplog.at_level(logging.INFO), pytest.raises(ZeroDivisionError):
            await BackgroundTasks(reported_to_callers).start(_fail())
        assert not caplog.records

    run(scenario())


def test_closing_cancels_and_awaits_all_also_those_that_are_started_meanwhile() -> None:
    """Closing twice, or without a use, works too."""

    async def scenario() -> None:
        started: list[int] = []
        ended: list[int] = []
        owner = BackgroundTasks()

        async def starts_another(other: Coroutine[None, None, None]) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                owner.start(other)
                await asyncio.sleep(0)

        owner.start(_forever(started, ended))
        owner.start(starts_another(_forever(started, ended)))
        await asyncio.sleep(0)
        assert len(owner) == 2
        await owner.aclose()
        assert len(started) == len(ended) == 2
        assert not owner
        await owner.aclose()

    run(scenario())


def test_finishing_lets_all_end_by_themselves() -> None:
    """None is cancelled."""

    async def scenario() -> None:
        owner = BackgroundTasks()
        tasks = [owner.start(asyncio.sleep(0, each)) for each in (1, 2)]
        await owner.finish()
        assert [each.result() for each in tasks] == [1, 2]

    run(scenario())


def test_a_defect_of_one_job_keeps_no_other_from_being_tidied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged, and the next job is done."""

    async def scenario() -> None:
        tidier, done = Tidier(), []

        async def job() -> None:
            done.append(1)

        await tidier.submit("the first job", _fail)
        await tidier.submit("the second", job)
        await tidier.settled()
        await tidier.aclose()
        assert done == [1]
        assert "the first job failed" in caplog.text

    run(scenario())


def test_a_caller_that_waits_to_hand_a_job_over_is_released_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that never ends holds up others for a time, and not for ever."""
    monkeypatch.setattr(tidying, "_JOBS_MAX", 2)
    monkeypatch.setattr(tidying, "_PATIENCE_S", 0.01)

    async def scenario() -> None:
        tidier = Tidier()

        async def job() -> None:
            await asyncio.Event().wait()

        async with asyncio.TaskGroup() as submitting:
            for number in range(9):
                submitting.create_task(tidier.submit(f"job {number}", job))
            await asyncio.sleep(0)
            await tidier.aclose()
        await tidier.settled()

    run(scenario())


def test_a_cancelled_caller_leaves_the_outcome_to_the_others() -> None:
    """The future goes on; callers that still wait get its error, and no others."""

    async def scenario() -> list[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        unheard: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: unheard.append(context))
        shared: asyncio.Future[int] = loop.create_future()
        first, second = (asyncio.create_task(outcome_of(shared)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not shared.done()
        shared.set_exception(ValueError("it fails"))
        with pytest.raises(ValueError, match="it fails"):
            await second
        with pytest.raises(ValueError, match="it fails"):
            await outcome_of(shared)
        alone: asyncio.Future[int] = loop.create_future()
        waiting = asyncio.create_task(outcome_of(alone))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        alone.set_exception(ValueError("no caller waits"))
        await asyncio.sleep(0)
        del alone, shared, first, second, waiting
        gc.collect()
        return unheard

    assert asyncio.run(scenario()) == []


def test_a_future_ends_once() -> None:
    """A caller that has cancelled it, or has its result, is no error for the one that answers."""

    async def scenario() -> None:
        waits, has_left = (asyncio.get_running_loop().create_future() for _ in range(2))
        has_left.cancel()
        for future in (waits, has_left):
            fulfil(future, 1)
            fulfil(future, 2)
            refuse(future, OSError())
        assert waits.result() == 1
        assert has_left.cancelled()

    run(scenario())


async def uncollected(ended: Callable[[], Awaitable[weakref.ref[Any]]]) -> None:
    """See that what `ended` refers to is freed without the collector."""
    gc.disable()
    try:
        assert (await ended())() is None
    finally:
        gc.enable()


def test_a_cancelled_task_lets_go_of_the_frames_that_it_was_cancelled_in() -> None:
    """An object that holds the task, and is held by its frame, is freed by its reference count."""

    class Holder:
        def __init__(self) -> None:
            self.task = asyncio.create_task(self.wait())

        async def wait(self) -> None:
            await asyncio.Event().wait()

    async def ended() -> weakref.ref[Holder]:
        holder = Holder()
        await asyncio.sleep(0)
        holder.task.cancel()
        await asyncio.gather(holder.task, return_exceptions=True)
        forget_frames(holder.task)
        return weakref.ref(holder)

    run(uncollected(ended))


def test_closed_tasks_let_go_of_the_frames_that_they_were_cancelled_in() -> None:
    """An owner that keeps one of its tasks is freed by its count of references, too."""

    class Owner:
        def __init__(self) -> None:
            self.tasks = BackgroundTasks()
            self.task = self.tasks.start(self.wait())

        async def wait(self) -> None:
            await asyncio.Event().wait()

    async def ended() -> weakref.ref[Owner]:
        owner = Owner()
        await asyncio.sleep(0)
        await owner.tasks.aclose()
        return weakref.ref(owner)

    run(uncollected(ended))


def test_a_caller_that_waits_for_a_failure_is_in_no_cycle_with_it() -> None:
    """The error refers to the frame that waited, so that this may not hold the future."""

    class Planted(Exception):
        pass

    async def ended() -> weakref.ref[Planted]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        error = Planted()
        future.set_exception(error)
        reference, waiting = weakref.ref(error), outcome_of(future)
        del error, future
        with suppress(Planted):
            await waiting
        return reference

    run(uncollected(ended))


def test_side_tasks_end_with_their_block() -> None:
    """None is left, also if the block fails, or is cancelled while it waits for their ends."""

    async def scenario() -> None:
        started: list[int] = []
        ended: list[int] = []

        async def block(error: Exception | None = None) -> None:
            async with side_tasks() as tasks:
                tasks.start(_forever(started, ended))
                await asyncio.sleep(0)
                if error is not None:
                    raise error

        await block()
        with pytest.raises(ValueError, match="planted"):
            await block(ValueError("planted"))
        assert len(started) == len(ended) == 2
        stubborn: list[int] = []

        async def takes_long() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                stubborn.append(1)
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0)
                    stubborn.append(2)

        async def waits() -> None:
            async with side_tasks() as tasks:
                tasks.start(takes_long())
                await asyncio.sleep(0)

        waiting = asyncio.create_task(waits())
        while not stubborn:  # noqa: ASYNC110  # the block is over, and its task is not
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert stubborn == [1, 2]

    run(scenario())


def test_an_error_beside_a_block_is_raised_unchanged_where_it_is_awaited() -> None:
    """It ends neither the block nor the other tasks."""

    async def scenario() -> None:
        async with side_tasks() as tasks:
            failing, other = tasks.start(_fail()), tasks.start(asyncio.sleep(0.001, 1))
            assert await other == 1
            with pytest.raises(ZeroDivisionError, match="planted"):
                await failing

    run(scenario())


def test_all_end_before_the_first_error_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    """The first of those that were passed, not of those that failed; the others are logged."""

    async def scenario() -> None:
        done: list[int] = []

        async def work(number: int, error: Exception | None = None) -> int:
            for _ in range(9 - number):
                await asyncio.sleep(0)
            done.append(number)
            if error is not None:
                raise error
            return number

        assert await all_of(work(1), work(2), work(3)) == (1, 2, 3)
        assert await all_of() == ()
        assert not caplog.records
        with pytest.raises(ValueError, match="the first"):
            await all_of(work(4), work(5, ValueError("the first")), work(6, KeyError("late")))
        assert done == [3, 2, 1, 6, 5, 4]
        (logged,) = caplog.messages
        assert logged.startswith("beside the error that is raised: KeyError: 'late'; ")

    run(scenario())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_together_leaves_nothing_running(is_cancelled: bool) -> None:
    """If one fails, or the caller is cancelled, the others have ended when this is raised."""

    async def scenario() -> None:
        started: list[int] = []
        ended: list[int] = []
        last = [] if is_cancelled else [_fail()]
        others = [_forever(started, ended) for _ in range(2)]
        caller = asyncio.create_task(together(*others, *last))
        if is_cancelled:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            caller.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else ZeroDivisionError):
            await caller
        assert (len(started), len(ended)) == (2, 2)

    run(scenario())


def test_together_returns_all_results() -> None:
    """In the order of the works."""

    async def work(number: int) -> int:
        for _ in range(3 - number):
            await asyncio.sleep(0)
        return number

    async def scenario() -> None:
        assert await together(work(1), work(2), work(3)) == (1, 2, 3)
        assert await together() == ()

    run(scenario())
