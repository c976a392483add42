"""Goal: work ends with its session or a pause, at once, and begins again when it may."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dlcore.base.errors import MetadataConnectionError
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.autorecovery.runner import PausableRunner, run_together
from tests.fixtures.ledger_cluster import PATHS, Cluster, TokenClock, run


class Work:
    """Counts its beginnings and its ends."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.error: Exception | None = None

    async def run(self) -> None:
        """Work until cancelled, or fail once with `error`."""
        self.begun += 1
        try:
            error, self.error = self.error, None
            if error is not None:
                raise error
            await asyncio.get_running_loop().create_future()
        finally:
            self.ended += 1


def test_work_ends_with_its_session_and_with_a_pause() -> None:
    """Before anything else can happen in the session, and without asking the store."""

    async def scenario(cluster: Cluster) -> None:
        store = cluster.tree.connect()
        repairs = RepairList(store, PATHS, TokenClock())
        work = Work()
        task = asyncio.create_task(PausableRunner(store, PATHS, repairs).run([work.run]))
        await asyncio.sleep(1)
        assert (work.begun, work.ended) == (1, 0)
        store.expire()
        for _ in range(10):
            await asyncio.sleep(0)
        assert work.ended == 1
        await asyncio.sleep(30)
        assert (work.begun, work.ended) == (2, 1)
        other = RepairList(cluster.store, PATHS, TokenClock())
        await other.set_paused(is_paused=True)
        await asyncio.sleep(30)
        assert (work.begun, work.ended) == (2, 2)
        await other.set_paused(is_paused=False)
        await asyncio.sleep(5)
        assert (work.begun, work.ended) == (3, 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (work.begun, work.ended) == (3, 3)
        await store.aclose()

    run(scenario)


@pytest.mark.parametrize("error", [MetadataConnectionError("no answer"), OverflowError("a defect")])
def test_work_that_failed_begins_again_and_ends_no_other(error: Exception) -> None:
    """An error of the cluster passes; one of the program is reported, and the others go on."""

    async def scenario(cluster: Cluster) -> None:
        store = cluster.tree.connect()
        repairs = RepairList(store, PATHS, TokenClock())
        work, other = Work(), Work()
        work.error = error
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context)
        )
        task = asyncio.create_task(PausableRunner(store, PATHS, repairs).run([work.run, other.run]))
        await asyncio.sleep(10)
        assert (work.begun, work.ended, other.begun) == (2, 1, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [each["exception"] for each in reported] == [error] * isinstance(
            error, OverflowError
        )
        await store.aclose()

    run(scenario)


def test_works_that_run_together_end_together() -> None:
    """The first that ends or fails ends the others."""

    async def scenario(_: Cluster) -> None:
        one, two = Work(), Work()
        two.error = ZeroDivisionError("a defect")
        with pytest.raises(ZeroDivisionError):
            await run_together(one.run(), two.run())
        assert one.ended == two.ended == 1

    run(scenario)
