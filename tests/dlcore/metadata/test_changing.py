"""The compare-and-set of one node, against others that are first and answers that are lost."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    ConfigurationError,
    MetadataConnectionError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.metadata.one_node import ATTEMPTS_MAX, change_node
from tests.fixtures.aio import run
from tests.fixtures.interrupted_store import InterruptedStore
from tests.fixtures.simulated_store import SimulatedTree

if TYPE_CHECKING:
    from dlcore.metadata.port import Versioned

PATH = "/letters"


def added(letter: bytes, node: Versioned | None) -> tuple[bytes, bytes | None]:
    """Return the letters with one more, and None if it is there."""
    before = b"" if node is None else node.value
    return (before, None) if letter in before else (before + letter, before + letter)


def test_existing_settings_are_changed_or_left() -> None:
    """A missing node is made; one that needs no change is not written."""

    async def scenario() -> None:
        store = SimulatedTree().connect()
        for letter, version in ((b"a", 0), (b"b", 1), (b"b", 1)):
            result = await change_node(store, PATH, partial(added, letter))
            node = await store.get(PATH)
            assert node is not None
            assert (node.value, node.version) == (result, version)
        assert result == b"ab"
        with pytest.raises(NoNodeError):
            await change_node(store, "/not/there", partial(added, b"a"))
        await change_node(store, "/not/there", partial(added, b"a"), make_parents=True)
        assert await store.get("/not/there") is not None

    run(scenario())


def test_an_error_of_the_change_stores_nothing() -> None:
    """It goes to the caller."""

    async def scenario() -> None:
        store = SimulatedTree().connect()

        def refuse(node: Versioned | None) -> tuple[None, bytes | None]:
            raise ConfigurationError(f"not this: {node}")

        with pytest.raises(ConfigurationError, match="not this: None"):
            await change_node(store, PATH, refuse)
        assert await store.get(PATH) is None

    run(scenario())


@pytest.mark.parametrize("times", [1, ATTEMPTS_MAX - 1, ATTEMPTS_MAX])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_lost_race_is_run_again(times: int, *, is_new: bool) -> None:
    """Neither change is lost; a caller that loses each race gets the error."""

    async def scenario() -> None:
        tree = SimulatedTree()
        other, store = tree.connect(), InterruptedStore(tree.connect())
        if not is_new:
            await other.create(PATH, b"z")
        letters = [bytes([ord("a") + number]) for number in range(times)]

        async def be_first() -> None:
            if letters:
                letter = letters.pop()
                await change_node(other, PATH, partial(added, letter))

        store.before_each("create", be_first)
        store.before_each("put", be_first)

        add = partial(added, b"!")
        if times == ATTEMPTS_MAX:
            with pytest.raises((MetadataVersionError, NodeExistsError)):
                await change_node(store, PATH, add)
        else:
            result = await change_node(store, PATH, add)
            assert len(result) == times + 1 + (not is_new)
            assert b"!" in result

    run(scenario())


@pytest.mark.parametrize("applied", [True, False])
def test_a_lost_answer_is_decided_again(*, applied: bool) -> None:
    """The change is there once, whether the first attempt was applied or not."""

    async def scenario() -> None:
        store = SimulatedTree().connect()
        await store.create(PATH, b"z")
        store.lose_next_reply(applied=applied)
        assert await change_node(store, PATH, partial(added, b"a")) == b"za"
        node = await store.get(PATH)
        assert node is not None
        assert (node.value, node.version) == (b"za", 1)

    run(scenario())


def test_a_store_that_never_answers() -> None:
    """The caller hears that the outcome is unknown."""

    async def scenario() -> None:
        store = InterruptedStore(SimulatedTree().connect())

        async def lose() -> None:
            raise MetadataConnectionError("no answer")

        store.before_each("create", lose)
        with pytest.raises(MetadataConnectionError):
            await change_node(store, PATH, partial(added, b"a"))

    run(scenario())
