"""Following a node: over changes, failed looks, and the end of its store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import MetadataConnectionError
from dlcore.metadata.one_node import NodeFollower
from tests.fixtures.aio import run, until
from tests.fixtures.simulated_store import SimulatedTree

if TYPE_CHECKING:
    import pytest


def test_each_change_is_looked_at_also_after_a_look_that_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The failure is reported once, and the next change brings the knowledge."""

    async def scenario() -> None:
        store = SimulatedTree().connect()
        await store.create("/a", b"one")
        seen: list[bytes] = []
        fails = False

        async def look() -> None:
            if fails:
                raise MetadataConnectionError("no answer")
            node = await store.get("/a")
            assert node is not None
            seen.append(node.value)

        follower = NodeFollower(store, "/a", look, what="the test's node")
        await until(lambda: seen == [b"one"])
        fails = True
        await store.put("/a", b"two", version=0)
        reason = "the test's node: a change is not known yet: no answer"
        await until(lambda: reason in caplog.text)
        fails = False
        await store.put("/a", b"three", version=1)
        await until(lambda: seen[-1] == b"three")
        await follower.aclose()
        await store.put("/a", b"four", version=2)
        await asyncio.sleep(0)
        assert seen[-1] == b"three"

    run(scenario())


def test_a_follower_that_outlives_its_store_ends_quietly(caplog: pytest.LogCaptureFixture) -> None:
    """A store that was closed before is no defect: a process ends in any order."""

    async def scenario() -> None:
        defects: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: defects.append(about))
        store = SimulatedTree().connect()
        await store.create("/a")
        looks: list[int] = []

        async def look() -> None:
            looks.append(1)
            await store.get("/a")

        follower = NodeFollower(store, "/a", look, what="the test's node")
        await until(lambda: bool(looks))
        await store.aclose()
        follower._changed.set()
        (following,) = follower._tasks
        await until(following.done)
        await follower.aclose()
        assert not defects

    run(scenario())
    assert "not known" not in caplog.text
