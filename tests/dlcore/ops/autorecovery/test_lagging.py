"""The auditor's look at how far subscribers are behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dlcore.base.errors import LogNotFoundError, MetadataConnectionError
from dlcore.base.ids import DLSN
from dlcore.ops.autorecovery import lagging
from dlcore.ops.autorecovery.lagging import SubscriberLags
from dlcore.ops.autorecovery.metrics import BEHIND, AuditFigures
from tests.fixtures.aio import until
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.memory_namespace import memory_cluster, record

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest

    from dlcore.backends.direct.namespace import DirectNamespace

HOUR_MS = 3_600_000


class Scene:
    """A namespace whose clock the test moves, and what the look at it found."""

    def __init__(self, namespace: DirectNamespace) -> None:
        self.namespace = namespace
        self.figures = AuditFigures(is_auditor=True)
        self.lags = SubscriberLags(namespace, self.figures, interval_s=1)

    async def fill(self, name: str, *subscribers: str) -> None:
        """Write a record to a log, which its subscribers have not read."""
        await self.namespace.create_log(name)
        async with await self.namespace.open_log(name) as manager:
            async with await manager.open_writer() as writer:
                await writer.write(record(1))
                await writer.commit()
            for subscriber in subscribers:
                await manager.move_subscription(subscriber, dlsn=DLSN.INITIAL)


def on_scene(body: Callable[[Scene], Awaitable[None]]) -> None:
    """Run `body` with a namespace, an hour after the records of `fill` are written."""

    async def run() -> None:
        async with memory_cluster() as cluster:
            scene = Scene(await cluster.open("a"))
            for name in ("clicks", "views"):
                await scene.fill(name, "report")
            await scene.fill("unread")
            cluster.clocks["a"].current_ms += HOUR_MS
            await body(scene)

    run_in_own_time(asyncio.wait_for(run(), 60))


def test_a_subscriber_that_has_not_read_is_behind_and_one_that_has_is_not() -> None:
    """A log without subscribers is not reported; one that was deleted is forgotten."""

    async def body(scene: Scene) -> None:
        await scene.lags.look()
        assert scene.figures.lags == {"clicks": {"report": 3600}, "views": {"report": 3600}}
        async with await scene.namespace.open_log("clicks") as manager:
            await manager.move_subscription("report", dlsn=(await manager.get_snapshot()).end)
        await scene.namespace.delete_log("views")
        await scene.lags.look()
        assert scene.figures.lags == {"clicks": {"report": 0}}

    on_scene(body)


def test_logs_are_visited_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks find what one does; what an earlier round found stays meanwhile."""
    monkeypatch.setattr(lagging, "LOGS_AT_ONCE", 2)

    async def body(scene: Scene) -> None:
        await scene.lags.look()
        assert len(scene.figures.lags) < 3
        await scene.lags.look()
        assert set(scene.figures.lags) == {"clicks", "views"}
        for name in ("clicks", "views"):
            await scene.namespace.delete_log(name)
        await scene.lags.look()
        await scene.lags.look()
        assert scene.figures.lags == {}

    on_scene(body)


def test_a_log_that_cannot_be_asked_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are not held up by it; one that is gone has no lag."""

    async def body(scene: Scene) -> None:
        await scene.lags.look()
        errors = {"clicks": MetadataConnectionError("away"), "views": LogNotFoundError("gone")}

        async def fail(name: str) -> None:
            raise errors.get(name, LogNotFoundError(name))

        monkeypatch.setattr(scene.namespace, "open_log", fail)
        await scene.lags.look()
        assert scene.figures.lags == {"clicks": {"report": 3600}}

    on_scene(body)


def test_only_the_auditor_looks() -> None:
    """Another process would show an old state; a process that ends forgets it."""

    async def body(scene: Scene) -> None:
        running = asyncio.create_task(scene.lags.run())
        await until(lambda: bool(scene.figures.lags))
        scene.figures.is_auditor = False
        await until(lambda: not scene.figures.lags)
        scene.figures.is_auditor = True
        await until(lambda: bool(scene.figures.lags))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not scene.figures.lags

    on_scene(body)


def test_a_scrape_names_the_furthest_behind_alone() -> None:
    """Ten of them, whatever number there is."""
    lags = {f"log-{number}": {"report": float(number)} for number in range(99)}
    samples = [each for each in AuditFigures(lags=lags).samples() if each.metric is BEHIND]
    assert [each.value for each in samples] == [float(number) for number in range(98, 88, -1)]
