"""Finding bookies: fresh lists, cached addresses that follow restarts, and honest errors."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    BookieUnavailableError,
    CorruptMetadataError,
    MetadataConnectionError,
    WrongIncarnationError,
)
from dlcore.base.ids import BookieId
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.ledger.metadata.values import BookieRegistration
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.stored import encode
from tests.fixtures.aio import run, until_async
from tests.fixtures.simulated_store import SimulatedStore, SimulatedTree

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PATHS = NamespacePaths("/dlog")
B1, B2 = BookieId("b1", "1" * 32), BookieId("b2", "2" * 32)


async def register(
    store: SimulatedStore, bookie: BookieId, address: str, *, read_only: bool = False
) -> None:
    """Register as a bookie does."""
    path = PATHS.bookie_readonly if read_only else PATHS.bookie_available
    value = encode(
        BookieRegistration(
            name=bookie.name, incarnation=bookie.incarnation, address=address, read_only=read_only
        )
    )
    await store.create(path(bookie.name), value, ephemeral=True)


def play(
    scenario: Callable[[SimulatedTree, SimulatedStore, BookieRegistry], Awaitable[None]],
) -> None:
    """Run `scenario` with an empty registry; the store is the client's own session."""

    async def main() -> None:
        tree = SimulatedTree()
        store = tree.connect()
        await store.create(PATHS.bookies_available, make_parents=True)
        await store.create(PATHS.bookies_readonly)
        registry = BookieRegistry(store, PATHS)
        await scenario(tree, store, registry)
        await registry.aclose()

    run(main())


def test_the_list_is_fresh_and_ordered() -> None:
    """Writable and read-only, by name; one on its way between the two counts as read-only."""

    async def scenario(
        tree: SimulatedTree, store: SimulatedStore, registry: BookieRegistry
    ) -> None:
        assert await registry.get_bookies() == []
        bookies = tree.connect()
        await register(bookies, B2, "h:2", read_only=True)
        await register(bookies, B1, "h:1")
        assert await registry.get_bookies() == [
            BookieRegistration(
                name=B1.name, incarnation=B1.incarnation, address="h:1", read_only=False
            ),
            BookieRegistration(
                name=B2.name, incarnation=B2.incarnation, address="h:2", read_only=True
            ),
        ]
        await register(bookies, B1, "h:1", read_only=True)
        assert [info.read_only for info in await registry.get_bookies()] == [True, True]
        await bookies.aclose()
        assert await registry.get_bookies() == []

    play(scenario)


def test_an_address_follows_the_bookie_to_another_port() -> None:
    """The list of bookies changes when one restarts, and what was cached is read again."""

    async def scenario(
        tree: SimulatedTree, store: SimulatedStore, registry: BookieRegistry
    ) -> None:
        first = tree.connect()
        await register(first, B1, "h:1")
        assert await registry.resolve(B1) == "h:1"
        await first.aclose()
        second = tree.connect()
        await register(second, B1, "h:11", read_only=True)

        async def is_followed() -> bool:
            return await registry.resolve(B1) == "h:11"

        await until_async(is_followed)

    play(scenario)


def test_a_cached_address_needs_no_answer_from_the_store() -> None:
    """ZooKeeper is off the data path, and an old address is better than none."""

    async def scenario(
        tree: SimulatedTree, store: SimulatedStore, registry: BookieRegistry
    ) -> None:
        bookies = tree.connect()
        await register(bookies, B1, "h:1")
        await registry.resolve(B1)
        await asyncio.sleep(0.01)
        assert await registry.resolve(B1) == "h:1"
        store.disconnect()
        assert await registry.resolve(B1) == "h:1"
        with pytest.raises(BookieUnavailableError, match="b2/22222222 is unknown"):
            await registry.resolve(B2)
        store.expire()
        store.reconnect()
        assert await registry.resolve(B1) == "h:1"
        await asyncio.sleep(0.01)
        store.disconnect()
        assert await registry.resolve(B1) == "h:1"
        with pytest.raises(MetadataConnectionError):
            await registry.get_bookies()

    play(scenario)


def test_a_change_while_an_address_is_read_is_not_missed() -> None:
    """A list read before the change is not kept as fresh."""

    async def scenario(
        tree: SimulatedTree, store: SimulatedStore, registry: BookieRegistry
    ) -> None:
        bookies = tree.connect()
        await register(bookies, B1, "h:1")
        await registry.resolve(B1)
        await asyncio.sleep(0.01)
        registry._on_change()
        resolving = asyncio.create_task(registry.resolve(B1))
        await asyncio.sleep(0)
        registry._on_change()  # the watch speaks between the question and the answer
        assert await resolving == "h:1"
        assert B1 not in registry._fresh
        assert await registry.resolve(B1) == "h:1"
        assert B1 in registry._fresh

    play(scenario)


def test_an_absent_bookie_and_a_replaced_one_are_different_errors() -> None:
    """An empty disk at the same name is another bookie."""

    async def scenario(
        tree: SimulatedTree, store: SimulatedStore, registry: BookieRegistry
    ) -> None:
        with pytest.raises(BookieUnavailableError, match="b1/11111111 is not registered"):
            await registry.resolve(B1)
        await register(tree.connect(), BookieId("b1", "f" * 32), "h:1")
        with pytest.raises(WrongIncarnationError, match="b1/ffffffff is registered"):
            await registry.resolve(B1)
        await register(tree.connect(), B1, "h:9", read_only=True)
        assert await registry.resolve(B1) == "h:9"

    play(scenario)


def test_a_registration_that_does_not_parse_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """The namespace stays writable with the other bookies; the bad one is named."""

    async def scenario(
        tree: SimulatedTree, store: SimulatedStore, registry: BookieRegistry
    ) -> None:
        await store.create(PATHS.bookie_available("b1"), b"\xff")
        await store.create(PATHS.bookie_readonly("b3"), b"\xff")
        await register(store, B2, "h:2")
        with caplog.at_level(logging.WARNING):
            assert await registry.get_bookies() == [
                BookieRegistration(
                    name=B2.name, incarnation=B2.incarnation, address="h:2", read_only=False
                )
            ]
        assert len(caplog.records) == 2
        assert PATHS.bookie_available("b1") in caplog.text
        assert PATHS.bookie_readonly("b3") in caplog.text
        assert await registry.resolve(B2) == "h:2"
        with pytest.raises(CorruptMetadataError, match=PATHS.bookie_available("b1")):
            await registry.resolve(B1)

    play(scenario)
