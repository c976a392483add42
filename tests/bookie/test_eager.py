"""A coroutine that waits for nothing is over when it was started; another one goes on as a task."""

from __future__ import annotations

import asyncio

import pytest

from bookie.serving.reads_in_progress import start_eagerly


def test_a_step_that_waits_for_nothing_needs_no_task() -> None:
    """It is done at once, and its error is raised at once."""

    async def scenario() -> None:
        done: list[int] = []
        ended: list[asyncio.Task[None]] = []

        async def work(*, fails: bool) -> None:
            done.append(1)
            if fails:
                raise ValueError("it fails")

        assert start_eagerly(work(fails=False), ended.append) is None
        with pytest.raises(ValueError, match="it fails"):
            start_eagerly(work(fails=True), ended.append)
        assert done == [1, 1]
        assert not ended

    asyncio.run(scenario())


def test_a_step_that_waits_goes_on_as_a_task() -> None:
    """With what it waited for: results, errors, and its cancellation."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        good, bad, never = (loop.create_future() for _ in range(3))
        seen: list[object] = []
        ended: list[asyncio.Task[None]] = []

        async def work() -> None:
            seen.append(await good)
            await asyncio.sleep(0)
            try:
                await bad
            except ValueError as error:
                seen.append(str(error))
            try:
                await never
            finally:
                seen.append("cancelled")

        task = start_eagerly(work(), ended.append)
        assert task is not None
        good.set_result("good")
        bad.set_exception(ValueError("bad"))
        for _ in range(6):
            await asyncio.sleep(0)
        assert seen == ["good", "bad"]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["good", "bad", "cancelled"]
        assert never.cancelled()
        assert ended == [task]

    asyncio.run(scenario())


def test_the_error_of_a_task_is_its_own() -> None:
    """No other caller gets it."""

    async def scenario() -> None:
        async def work() -> None:
            await asyncio.sleep(0)
            raise ValueError("late")

        task = start_eagerly(work(), lambda _: None)
        assert task is not None
        with pytest.raises(ValueError, match="late"):
            await task

    asyncio.run(scenario())
