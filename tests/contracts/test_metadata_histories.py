"""Random histories of transactions, to which all metadata stores give the same answers."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    MetadataError,
)
from dlcore.metadata.port import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    MetadataStore,
    Op,
    Put,
)
from dlcore.metadata.zookeeper import ZooKeeperStore
from tests.fixtures.aio import run
from tests.fixtures.lengths import sample
from tests.fixtures.metadata_backend import lagging_tree
from tests.fixtures.simulated_store import SimulatedTree

if TYPE_CHECKING:
    from dlcore.ops.sandbox.metadata_server import EmbeddedMetadataServer
    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper


def random_op(rng: random.Random, root: str) -> Op:
    """Return an operation on one of a few paths, right about as often as wrong."""
    path = root + rng.choice(["/a", "/b", "/a/a", "/a/b", "/a/a/a", "/b/a"])
    version = rng.choice([ANY_VERSION, ANY_VERSION, 0, 0, 1, 2])
    value = b"%d" % rng.randrange(100)
    kind = rng.choice(["create", "create", "put", "delete", "check"])
    if kind == "create":
        return Create(path, value, ephemeral=rng.random() < 0.1)
    if kind == "put":
        return Put(path, value, version)
    return Delete(path, version) if kind == "delete" else Check(path, version)


async def history(store: MetadataStore, root: str, seed: int) -> list[str]:
    """Apply random transactions; return every answer and the tree after each."""
    rng = random.Random(seed)
    answers: list[str] = []
    await store.create(root)
    for _ in range(300):
        ops = [random_op(rng, root) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        try:
            await store.multi(ops)
            answers.append("done")
        except MetadataError as error:
            answers.append(type(error).__name__)
        for path in ("", "/a", "/b", "/a/a", "/a/b", "/a/a/a", "/b/a"):
            node, children = await asyncio.gather(
                store.get(root + path), store.get_children(root + path)
            )
            answers.append(f"{path} {node} {children}".replace(store.session_token, "this one"))
    return answers


@pytest.mark.integration
@pytest.mark.parametrize("seed", sample(range(3), 1))
def test_all_stores_answer_a_random_history_alike(
    seed: int,
    zookeeper: EmbeddedZooKeeper,
    metadata_server: EmbeddedMetadataServer,
    zookeeper_root: str,
) -> None:
    """ZooKeeper is the specification of the others."""

    async def main() -> None:
        real = await ZooKeeperStore.connect(zookeeper.servers, connect_timeout_s=60)
        ours = await ZooKeeperStore.connect(metadata_server.servers, connect_timeout_s=60)
        memory, lagging = SimulatedTree().connect(), lagging_tree(seed).connect()
        try:
            expected = await history(real, zookeeper_root, seed)
            assert await history(ours, zookeeper_root, seed) == expected
            assert await history(memory, zookeeper_root, seed) == expected
            assert await history(lagging, zookeeper_root, seed) == expected
            assert {"done", "NoNodeError", "NodeExistsError", "MetadataVersionError"} <= set(
                expected
            )
            assert "NodeNotEmptyError" in expected
        finally:
            for store in (real, ours, memory, lagging):
                await store.aclose()

    run(main())
