"""Ledger metadata in the store: ids, compare-and-set, and whose write it was when no answer came.

Method: the store in memory with replies lost on demand, each write both applied and not.
"""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import (
    CorruptMetadataError,
    LedgerExistsError,
    LedgerNotFoundError,
    MetadataConnectionError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.base.ids import BookieId
from dlcore.ledger.metadata.store import LedgerStore, VersionedLedger
from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata, LedgerState
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.port import ANY_VERSION, Create, Put
from tests.fixtures.aio import run, until
from tests.fixtures.simulated_store import SimulatedStore, SimulatedTree

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PATHS = NamespacePaths("/dlog")


def ledger(ledger_id: int, *, token: str = "mine") -> LedgerMetadata:
    """Return an open ledger on one bookie."""
    return LedgerMetadata(
        ledger_id=ledger_id,
        quorum=QuorumConfig.of_replication_factor(1),
        state=LedgerState.OPEN,
        ensembles=(Ensemble(0, (BookieId("b1", "1" * 32),)),),
        token=token,
        created_ms=1,
    )


class World(SimpleNamespace):
    """A tree, two sessions and their ledger stores."""

    tree: SimulatedTree
    store: SimulatedStore
    ledgers: LedgerStore
    other_store: SimulatedStore
    others: LedgerStore


def play(scenario: Callable[[World], Awaitable[None]], tree: SimulatedTree | None = None) -> None:
    """Run `scenario` in a world with an id generator, on `tree` if it is given."""

    async def main(tree: SimulatedTree) -> None:
        store, other = tree.connect(), tree.connect()
        await store.create(PATHS.ledger_idgen, b"0", make_parents=True)
        await scenario(
            World(
                tree=tree,
                store=store,
                ledgers=LedgerStore(store, PATHS),
                other_store=other,
                others=LedgerStore(other, PATHS),
            )
        )

    run(main(tree or SimulatedTree()))


def test_ids_are_never_given_twice() -> None:
    """Many at once, in two processes, with replies lost."""

    async def scenario(world: World) -> None:
        rng = random.Random(1)
        ids: list[int] = []

        async def take(ledgers: LedgerStore, store: SimulatedStore) -> None:
            for _ in range(20):
                if not ledgers._ids and rng.random() < 0.2:
                    store.lose_next_reply(applied=rng.random() < 0.5)
                ids.append(await ledgers.new_ledger_id())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(take(world.ledgers, world.store))
                tasks.create_task(take(world.others, world.other_store))
        assert len(ids) == len(set(ids)) == 200

    play(scenario)


def test_ids_need_a_namespace_and_a_number() -> None:
    """A lost counter must not start again from zero."""

    async def scenario(world: World) -> None:
        await world.store.put(PATHS.ledger_idgen, b"7x", version=-1)
        with pytest.raises(CorruptMetadataError, match=r"idgen: expected a decimal number"):
            await world.ledgers.new_ledger_id()
        await world.store.delete(PATHS.ledger_idgen)
        with pytest.raises(NoNodeError, match="/dlog is no namespace"):
            await world.ledgers.new_ledger_id()

    play(scenario)


def test_a_ledger_is_created_read_written_and_deleted() -> None:
    """Versions count the writes."""

    async def scenario(world: World) -> None:
        metadata = ledger(3)
        assert await world.ledgers.create(metadata) == VersionedLedger(metadata, 0)
        assert await world.others.read(3) == VersionedLedger(metadata, 0)
        closed = metadata.closed(last_entry_id=9, length_bytes=100)
        assert await world.others.write(closed, version=0) == 1
        with pytest.raises(MetadataVersionError):
            await world.ledgers.write(metadata, version=0)
        assert await world.ledgers.read(3) == VersionedLedger(closed, 1)
        with pytest.raises(MetadataVersionError):
            await world.ledgers.delete(3, version=0)
        await world.ledgers.delete(3, version=1)
        with pytest.raises(LedgerNotFoundError, match="ledger 3 does not exist"):
            await world.ledgers.read(3)
        with pytest.raises(LedgerNotFoundError):
            await world.ledgers.write(closed, version=1)
        with pytest.raises(LedgerNotFoundError):
            await world.ledgers.delete(3)

    play(scenario)


def test_extra_operations_join_the_creation() -> None:
    """All or nothing, and an error of theirs is not taken for the ledger's."""

    async def scenario(world: World) -> None:
        await world.ledgers.create(ledger(1), extra_ops=[Create("/extra")])
        with pytest.raises(NodeExistsError, match="/extra"):
            await world.ledgers.create(ledger(2), extra_ops=[Create("/extra")])
        with pytest.raises(MetadataVersionError):
            await world.ledgers.create(ledger(2), extra_ops=[Put("/extra", b"", 5)])
        with pytest.raises(NoNodeError):
            await world.ledgers.create(ledger(2), extra_ops=[Create("/none/below")])
        with pytest.raises(LedgerNotFoundError):
            await world.ledgers.read(2)
        with pytest.raises(LedgerExistsError, match="ledger 1 exists"):
            await world.ledgers.create(ledger(1, token="other"), extra_ops=[Create("/other")])
        assert "/other" not in world.tree.dump()

    play(scenario)


def test_a_ledger_that_exists_may_be_the_creators_own() -> None:
    """Goal: a session may send again what it has no reply to: the token tells whose it is."""

    async def scenario(world: World) -> None:
        created = await world.ledgers.create(ledger(1))
        assert await world.ledgers.create(ledger(1)) == created
        with pytest.raises(LedgerExistsError):
            await world.ledgers.create(ledger(1, token="another's"))

    play(scenario)


@pytest.mark.parametrize("applied", [True, False])
def test_a_creation_without_an_answer_is_classified_by_its_token(applied: bool) -> None:
    """Ours: done, whatever happened to it since.  Not done: done again."""

    async def scenario(world: World) -> None:
        await world.ledgers.create(ledger(0))  # makes the parents, whose replies are not lost
        world.store.lose_next_reply(applied=applied)
        created = await world.ledgers.create(ledger(1), extra_ops=[Create("/extra")])
        assert created == VersionedLedger(ledger(1), 0)
        assert world.tree.dump()["/extra"].version == 0
        world.store.lose_next_reply(applied=applied)
        with pytest.raises(LedgerExistsError):
            await world.ledgers.create(ledger(1, token="another's"))
        assert (await world.ledgers.read(1)).metadata.token == "mine"

    play(scenario)


def test_a_lost_reply_is_read_back_as_it_is_now() -> None:
    """The servers of the metadata store that are asked have not heard of anything lately."""

    async def scenario(world: World) -> None:
        store = world.store
        store.lose_next_reply(applied=True)  # of its parents
        store.lose_next_reply(applied=True)
        created = await world.ledgers.create(ledger(1))
        assert created == VersionedLedger(ledger(1), 0)
        store.lose_next_reply(applied=True)
        recovering = replace(ledger(1), state=LedgerState.IN_RECOVERY)
        assert await world.ledgers.write(recovering, version=0) == 1
        assert (await world.others.read(1, fresh=True)).metadata == recovering
        store.lose_next_reply(applied=True)
        await world.ledgers.delete(1)
        with pytest.raises(LedgerNotFoundError):
            await world.others.read(1, fresh=True)

    play(scenario, SimulatedTree(lag=lambda: 1000.0))


def test_a_creation_that_was_changed_meanwhile_is_still_ours() -> None:
    """A recoverer may be quick: the version to go on with is the one that is there."""

    async def scenario(world: World) -> None:
        await world.ledgers.create(ledger(0))
        multi = world.store.multi
        recovering = replace(ledger(1), state=LedgerState.IN_RECOVERY)

        async def multi_and_a_quick_recoverer(ops: list[Create]) -> None:
            await multi(ops)
            await world.others.write(recovering, version=0)
            raise MetadataConnectionError("planted")

        world.store.multi = multi_and_a_quick_recoverer  # type: ignore[method-assign, assignment]  # between two awaits
        assert await world.ledgers.create(ledger(1)) == VersionedLedger(recovering, 1)

    play(scenario)


@pytest.mark.parametrize("applied", [True, False])
def test_a_write_without_an_answer_is_classified_by_value_and_version(applied: bool) -> None:
    """The new version is returned, and the value was written once."""

    async def scenario(world: World) -> None:
        await world.ledgers.create(ledger(1))
        closed = ledger(1).closed(last_entry_id=3, length_bytes=4)
        world.store.lose_next_reply(applied=applied)
        assert await world.ledgers.write(closed, version=0) == 1
        assert await world.ledgers.read(1) == VersionedLedger(closed, 1)

    play(scenario)


@pytest.mark.parametrize("applied", [True, False])
def test_a_write_that_lost_the_race_is_a_conflict_even_without_an_answer(applied: bool) -> None:
    """Another value at the next version is another's."""

    async def scenario(world: World) -> None:
        await world.ledgers.create(ledger(1))
        theirs = ledger(1).closed(last_entry_id=3, length_bytes=4)
        await world.others.write(theirs, version=0)
        world.store.lose_next_reply(applied=applied)
        with pytest.raises(MetadataVersionError):
            await world.ledgers.write(ledger(1).closed(last_entry_id=2, length_bytes=3), version=0)
        assert await world.ledgers.read(1) == VersionedLedger(theirs, 1)

    play(scenario)


def test_a_write_to_a_ledger_deleted_meanwhile_finds_nothing() -> None:
    """Neither a success nor a conflict."""

    async def scenario(world: World) -> None:
        await world.ledgers.create(ledger(1))
        put = world.store.put

        async def put_and_deletion(path: str, value: bytes, *, version: int) -> int:
            await put(path, value, version=version)
            await world.others.delete(1)
            raise MetadataConnectionError("planted")

        world.store.put = put_and_deletion  # type: ignore[method-assign]  # between two awaits
        with pytest.raises(LedgerNotFoundError):
            await world.ledgers.write(ledger(1), version=0)

    play(scenario)


@pytest.mark.parametrize("applied", [True, False])
def test_a_deletion_without_an_answer_is_done_once(applied: bool) -> None:
    """It is gone, and the caller hears of success."""

    async def scenario(world: World) -> None:
        await world.ledgers.create(ledger(1))
        world.store.lose_next_reply(applied=applied)
        await world.ledgers.delete(1)
        with pytest.raises(LedgerNotFoundError):
            await world.others.read(1)

    play(scenario)


def test_a_store_that_never_answers_ends_in_unknown() -> None:
    """The number of attempts is bounded."""

    async def scenario(world: World) -> None:
        await world.ledgers.create(ledger(1))
        for call in (
            lambda: world.ledgers.write(ledger(1), version=0),
            lambda: world.ledgers.delete(1),
            lambda: world.ledgers.create(ledger(2)),
            lambda: world.ledgers.create(ledger(10**8)),  # its parents do not exist
            lambda: world.ledgers.new_ledger_id(),
        ):
            for _ in range(5):
                world.store.lose_next_reply(applied=False)
            with pytest.raises(MetadataConnectionError):
                await call()
        assert world.store._connection.lost_replies == []
        assert await world.ledgers.new_ledger_id() == 0

    play(scenario)


def test_all_ledgers_are_listed_in_order() -> None:
    """Across the tree's levels, without the counter."""

    async def scenario(world: World) -> None:
        ids = [0, 1, 9_999, 10_000, 10_001, 10**8 - 1, 10**8, 2 * 10**8, 10**9 + 5, 2**63 - 1]
        for ledger_id in reversed(ids):
            await world.ledgers.create(ledger(ledger_id))
        assert [ledger_id async for ledger_id in world.others.list_ledgers()] == ids
        for ledger_id in ids:
            await world.ledgers.delete(ledger_id)
        assert [ledger_id async for ledger_id in world.others.list_ledgers()] == []
        await world.store.create(f"{PATHS.ledgers}/stranger")
        await world.ledgers.create(ledger(7))  # a node that is no ledger's hides none
        assert [ledger_id async for ledger_id in world.others.list_ledgers()] == [7]

    play(scenario)


def test_one_damaged_ledger_hides_no_other() -> None:
    """It has its place among them, with what is wrong; deleted ones have none."""

    async def scenario(world: World) -> None:
        for ledger_id in range(6):
            await world.ledgers.create(ledger(ledger_id))
        await world.store.put(PATHS.ledger(2), b"no ledger", version=ANY_VERSION)
        await world.ledgers.delete(3)
        found = await world.others.read_from(1, 3)
        assert list(found) == [1, 2, 4]
        assert found[1] == ledger(1)
        assert isinstance(found[2], CorruptMetadataError)
        assert PATHS.ledger(2) in str(found[2])
        assert list(await world.others.read_from(2, 1)) == [2]
        assert await world.others.read_from(6, 3) == {}

    play(scenario)


def test_metadata_of_another_ledger_is_refused() -> None:
    """A value copied to a wrong place would lead to a wrong ledger's entries."""

    async def scenario(world: World) -> None:
        await world.ledgers.create(ledger(1))
        node = await world.store.get(PATHS.ledger(1))
        assert node is not None
        await world.store.create(PATHS.ledger(2), node.value)
        with pytest.raises(CorruptMetadataError, match=f"{PATHS.ledger(2)} holds .* of 1"):
            await world.ledgers.read(2)
        await world.store.put(PATHS.ledger(1), b"\xff", version=0)
        with pytest.raises(CorruptMetadataError, match=PATHS.ledger(1)):
            await world.ledgers.read(1)

    play(scenario)


def test_a_watch_tells_of_changes() -> None:
    """Until it is ended."""

    async def scenario(world: World) -> None:
        await world.ledgers.create(ledger(1))
        calls: list[int] = []
        stop = world.others.watch(1, lambda: calls.append(1))
        await until(lambda: len(calls) == 1)
        await world.ledgers.write(ledger(1), version=0)
        await until(lambda: len(calls) == 2)
        stop()
        await world.ledgers.delete(1)
        await asyncio.sleep(0.01)
        assert len(calls) == 2

    play(scenario)
