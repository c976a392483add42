"""The list of live proxies, as one of them sees it."""

from __future__ import annotations

import asyncio
from typing import Any

from dlcore.proxy.membership import Membership
from tests.fixtures.aio import run, until
from tests.fixtures.memory_namespace import memory_cluster


def test_who_outlives_its_namespace_follows_nobody() -> None:
    """A namespace that was closed before is no defect: a process ends in any order."""

    async def body() -> None:
        defects: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: defects.append(about))
        async with memory_cluster() as cluster:
            await cluster.open("a")
            store = cluster.stores["a"]
            membership = Membership(store, cluster.paths, "grpc://here:1")
            await membership.join()
            assert membership.live == {"grpc://here:1"}
            (following,) = membership._tasks._tasks
            await store.aclose()
            membership._changed.set()
            await until(following.done)
            await membership.aclose()
        assert not defects

    run(body())
