"""A node that lasts as long as its process: it comes back after a lost session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlcore.base.errors import MetadataError
from dlcore.metadata.session_node import SessionNode
from tests.fixtures.aio import until
from tests.fixtures.simulated_store import SimulatedTree
from tests.simulation.loop import run

if TYPE_CHECKING:
    import pytest


def test_a_node_that_is_refused_after_a_lost_session_is_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log says the loss until then; no other lost session is needed."""

    async def scenario() -> None:
        tree = SimulatedTree()
        store = tree.connect()
        node = SessionNode(store, "/live/one", until_then="the test is alone")
        await node.ensure()
        create, refused = store.create, 3

        async def refuse(*args: Any, **options: Any) -> None:
            nonlocal refused
            if refused:
                refused -= 1
                raise MetadataError("access denied")
            await create(*args, **options)

        monkeypatch.setattr(store, "create", refuse)
        store.expire()
        assert "/live/one" not in tree.dump()
        await until(lambda: "/live/one" in tree.dump())
        assert [each.rpartition("dlog ")[2] for each in caplog.messages] == [
            f"tries again in {s} s, and until then the test is alone; to do: see to ZooKeeper"
            for s in (1, 2, 4)
        ]
        await node.aclose()
        await store.aclose()

    run(scenario())
