"""Goal: blocking code runs on the virtual clock as it does elsewhere.  Method: small functions."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.simulation.loop import run
from tests.simulation.sink_threads import BlockingCall, HandingPortal, KilledError

PORTAL = HandingPortal()


async def _after(delay_s: float, what: str) -> str:
    await asyncio.sleep(delay_s)
    return what


def test_calls_of_a_thread_take_virtual_time() -> None:
    """Others go on meanwhile, and the function's result comes back."""

    async def scenario() -> None:
        loop, seen = asyncio.get_running_loop(), []

        def blocking(name: str, delay_s: float) -> str:
            seen.append(PORTAL.call(_after(delay_s, f"{name} 1")))
            seen.append(PORTAL.call(_after(delay_s, f"{name} 2")))
            return name

        calls = [BlockingCall(lambda: blocking("a", 3.0)), BlockingCall(lambda: blocking("b", 2.0))]
        assert await asyncio.gather(*(each.run() for each in calls)) == ["a", "b"]
        assert seen == ["b 1", "a 1", "b 2", "a 2"]
        assert loop.time() == pytest.approx(6.0)

    run(scenario())


def test_errors_pass_both_ways() -> None:
    """A coroutine's is raised in the thread, and the thread's by the call."""

    async def fail() -> None:
        raise ValueError("in the loop")

    def blocking() -> None:
        with pytest.raises(ValueError, match="in the loop"):
            PORTAL.call(fail())
        raise RuntimeError("in the thread")

    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="in the thread"):
            await BlockingCall(blocking).run()

    run(scenario())


def test_a_cancelled_call_kills_its_thread() -> None:
    """Its calls on the way out are not performed, and no thread is left."""
    carried_out = []

    async def carry_out() -> None:
        carried_out.append("something")

    def blocking() -> None:
        try:
            PORTAL.call(asyncio.sleep(100.0))
        finally:
            with pytest.raises(KilledError):
                PORTAL.call(carry_out())

    async def scenario() -> None:
        before = threading.active_count()
        task = asyncio.ensure_future(BlockingCall(blocking).run())
        await asyncio.sleep(1.0)
        assert threading.active_count() == before + 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert threading.active_count() == before

    run(scenario())
    assert not carried_out
