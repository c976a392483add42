"""The event loop of tests whose time leaves out what the machine kept its process waiting for."""

from __future__ import annotations

import asyncio
import time

from tests.fixtures.lateness import run_in_own_time


def test_a_loop_that_stood_still_has_had_no_time() -> None:
    """An action ends before the callers that wait for it give up."""

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        began_s, really_s = clock(), time.monotonic()
        async with asyncio.timeout(0.05):
            for _ in range(5):
                time.sleep(0.05)  # noqa: ASYNC251  # stands for a machine that does other things
                await asyncio.sleep(0)
        assert clock() - began_s < 0.05 < time.monotonic() - really_s

    run_in_own_time(main())


def test_a_loop_that_has_its_turns_has_time() -> None:
    """Timers end, and not before."""

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        began_s, really_s = clock(), time.monotonic()
        await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=0.05)
        assert clock() - began_s >= 0.05
        assert time.monotonic() - really_s >= 0.04

    run_in_own_time(main())
