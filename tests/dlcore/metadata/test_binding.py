"""Namespaces: made whole or not at all, by one of many, and recognised for what they are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from dlcore.base.clock import SystemClock
from dlcore.base.errors import ConfigurationError, CorruptMetadataError, MetadataConnectionError
from dlcore.metadata.binding import ensure_namespace, read_binding
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.zookeeper import ZooKeeperStore
from tests.fixtures.aio import run
from tests.fixtures.simulated_store import SimulatedTree

if TYPE_CHECKING:
    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper

CLOCK = SystemClock()
CHILDREN = [
    "bookies",
    "commits",
    "deleted",
    "heads",
    "ledgers",
    "logs",
    "merged",
    "proxies",
    "retention",
    "staging",
    "staging-owners",
    "upkeep",
]


@pytest.mark.parametrize("root", ["/dlog", "/a/b/c"])
def test_the_first_makes_the_tree_and_the_next_finds_it(root: str) -> None:
    """With one identity for all time."""

    async def scenario() -> None:
        tree = SimulatedTree()
        store, paths = tree.connect(), NamespacePaths(root)
        made = await ensure_namespace(store, paths, CLOCK)
        assert len(made.cluster_id) == 32
        before = tree.dump()
        assert await ensure_namespace(tree.connect(), paths, CLOCK) == made
        assert await read_binding(store, paths) == made
        assert tree.dump() == before
        assert await store.get_children(root) == CHILDREN
        assert (await store.get_children(f"{root}/bookies")) == ["available", "cookies", "readonly"]
        assert before[paths.ledger_idgen].value == b"0"

    run(scenario())


def test_many_at_once_agree() -> None:
    """In any order, all have the same cluster."""

    async def scenario() -> None:
        tree, paths = SimulatedTree(latency=lambda: 0.001), NamespacePaths("/deep/dlog")
        bindings = await asyncio.gather(
            *(ensure_namespace(tree.connect(), paths, CLOCK) for _ in range(20))
        )
        assert len(set(bindings)) == 1

    run(scenario())


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_reply_is_looked_into(applied: bool, lost: int) -> None:
    """The answers to the parent's creation and to the transaction are lost."""

    async def scenario() -> None:
        tree, paths = SimulatedTree(), NamespacePaths("/deep/dlog")
        store = tree.connect()
        for _ in range(lost):
            store.lose_next_reply(applied=applied)
        made = await ensure_namespace(store, paths, CLOCK)
        assert await read_binding(tree.connect(), paths) == made
        assert await store.get_children(paths.root) == CHILDREN

    run(scenario())


def test_a_store_that_never_answers_ends_in_unknown() -> None:
    """The number of attempts is bounded."""

    async def scenario() -> None:
        store = SimulatedTree().connect()
        for _ in range(5):
            store.lose_next_reply(applied=False)
        with pytest.raises(MetadataConnectionError):
            await ensure_namespace(store, NamespacePaths("/dlog"), CLOCK)

    run(scenario())


def test_a_namespace_may_stand_above_another() -> None:
    """The empty node that was made for the lower one becomes the upper one."""

    async def scenario() -> None:
        store = SimulatedTree().connect()
        lower = await ensure_namespace(store, NamespacePaths("/a/b"), CLOCK)
        with pytest.raises(ConfigurationError, match="no dlog namespace at /a"):
            await read_binding(store, NamespacePaths("/a"))
        upper = await ensure_namespace(store, NamespacePaths("/a"), CLOCK)
        assert upper.cluster_id != lower.cluster_id
        assert await read_binding(store, NamespacePaths("/a/b")) == lower

    run(scenario())


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"\xff\xff", "at /dlog does not parse"),
        (b'{"layout":1}', "at /dlog has layout version 1, this release reads 2"),
        (b'{"layout":2,"cluster_id":"","created_ms":1}', "at /dlog .*cluster_id"),
    ],
)
def test_a_node_that_is_no_binding_is_refused_and_left_alone(value: bytes, problem: str) -> None:
    """A node of another program, or of a later release."""

    async def scenario() -> None:
        tree = SimulatedTree()
        store, paths = tree.connect(), NamespacePaths("/dlog")
        await store.create("/dlog", value)
        for call in (read_binding(store, paths), ensure_namespace(store, paths, CLOCK)):
            with pytest.raises(CorruptMetadataError, match=problem):
                await call
        assert [path for path in tree.dump() if path != "/"] == ["/dlog"]

    run(scenario())


def test_a_missing_namespace_is_named() -> None:
    """The path may be mistyped."""

    async def scenario() -> None:
        with pytest.raises(ConfigurationError, match="there is no dlog namespace at /dlgo"):
            await read_binding(SimulatedTree().connect(), NamespacePaths("/dlgo"))

    run(scenario())


@pytest.mark.integration
def test_many_at_once_agree_on_a_real_server(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str
) -> None:
    """As in memory."""

    async def scenario() -> None:
        paths = NamespacePaths(f"{zookeeper_root}/deep/dlog")
        stores = await asyncio.gather(
            *(ZooKeeperStore.connect(zookeeper.servers, connect_timeout_s=60) for _ in range(3))
        )
        try:
            bindings = await asyncio.gather(
                *(ensure_namespace(store, paths, CLOCK) for store in stores)
            )
            assert len(set(bindings)) == 1
            assert await read_binding(stores[0], paths) == bindings[0]
            assert await stores[0].get_children(paths.root) == CHILDREN
        finally:
            await asyncio.gather(*(store.aclose() for store in stores))

    run(scenario())
