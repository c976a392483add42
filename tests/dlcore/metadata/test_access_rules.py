"""The stored rules of a namespace: changed by many at once, and found damaged."""

from __future__ import annotations

import asyncio

import pytest

from dlcore.base.access.rights import RULES_MAX, Right, Rule, Scope
from dlcore.base.errors import ConfigurationError, CorruptMetadataError
from dlcore.metadata.access_rules import RuleStore
from dlcore.metadata.paths import NamespacePaths
from tests.fixtures.aio import run, until
from tests.fixtures.simulated_store import SimulatedStore, SimulatedTree

PATHS = NamespacePaths("/dlog")


def rule(number: int, *, deny: bool = False) -> Rule:
    """Return one of many rules."""
    return Rule(principal=f"user:{number}", rights=(Right.READ,), scope=Scope.NAMESPACE, deny=deny)


def opened() -> tuple[SimulatedStore, RuleStore]:
    """Return a store, and the rules in it."""
    store = SimulatedTree().connect()
    return store, RuleStore(store, PATHS)


def test_rules_are_read_as_they_were_changed() -> None:
    """In their order, and an unchanged value is not written."""

    async def scenario() -> None:
        store, rules = opened()
        await store.create(PATHS.root)
        assert await rules.read() == ()
        await rules.clear()
        assert await store.get(PATHS.access_rules) is None
        assert await rules.change(add=[rule(2), rule(1)]) == (rule(2), rule(1))
        assert await rules.change(add=[rule(1)], remove=[]) == (rule(2), rule(1))
        assert (await store.get(PATHS.access_rules)).version == 0  # type: ignore[union-attr]
        assert await rules.change(add=[rule(3)], remove=[rule(2)]) == (rule(1), rule(3))
        assert await rules.read() == (rule(1), rule(3))
        assert await rules.change(remove=[rule(2)]) == (rule(1), rule(3))
        with pytest.raises(ConfigurationError, match="at most 1000"):
            await rules.change(add=map(rule, range(RULES_MAX + 1)))
        assert await rules.read() == (rule(1), rule(3))
        await rules.clear()
        assert await rules.read() == ()

    run(scenario())


def test_no_change_of_several_clients_is_lost() -> None:
    """Each of them reads again after another was first."""

    async def scenario() -> None:
        store, rules = opened()
        await store.create(PATHS.root)
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(rules.change(add=[rule(number)]))
        assert {each.principal for each in await rules.read()} == {f"user:{n}" for n in range(5)}

    run(scenario())


@pytest.mark.parametrize("applied", [True, False])
def test_a_lost_answer_is_looked_up(applied: bool) -> None:
    """The rules are changed once, whether the first attempt was applied or not."""

    async def scenario() -> None:
        store, rules = opened()
        await store.create(PATHS.root)
        await rules.change(add=[rule(1)])
        store.lose_next_reply(applied=applied)
        assert await rules.change(add=[rule(2)], remove=[rule(1)]) == (rule(2),)
        assert (await store.get(PATHS.access_rules)).version == 1  # type: ignore[union-attr]

    run(scenario())


def test_damaged_rules_are_named_and_can_be_cleared() -> None:
    """They are never read as if there were none."""

    async def scenario() -> None:
        store, rules = opened()
        await store.create(PATHS.root)
        await store.create(
            PATHS.access_rules, b'{"layout":2,"rules":["allow alice read namespace"]}'
        )
        for call in (rules.read(), rules.change(add=[rule(1)])):
            with pytest.raises(CorruptMetadataError):
                await call
        await rules.clear()
        assert await rules.change(add=[rule(1)]) == (rule(1),)

    run(scenario())


def test_a_watch_tells_of_the_first_rule_too() -> None:
    """The node is made with the first rule."""

    async def scenario() -> None:
        store, rules = opened()
        await store.create(PATHS.root)
        calls: list[tuple[Rule, ...]] = []

        async def look() -> None:
            calls.append(await rules.read())

        follower = rules.follow(look)
        await until(lambda: calls == [()])
        await rules.change(add=[rule(1)])
        await until(lambda: calls[-1] == (rule(1),))
        await follower.aclose()

    run(scenario())
