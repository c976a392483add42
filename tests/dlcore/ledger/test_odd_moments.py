"""Ledger clients when a bookie breaks every rule, and metadata changes at each look.

Goal: an error that says what is unknown, soon; nothing waits for ever.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import (
    BookieReadOnlyError,
    EntryTooLargeError,
    LedgerFencedError,
    LedgerRecoveryError,
    MetadataVersionError,
    NotEnoughBookiesError,
)
from dlcore.ledger.metadata import store as store_module
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ledger.writing.appender import LacPublication
from tests.fixtures.ledger_cluster import PATHS, Cluster, bodies, read_all, run, write
from tests.fixtures.ledgers import quorum_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.errors import BookieError
    from dlcore.metadata.port import Versioned


def test_a_defect_ends_a_recovery_and_the_next_one_goes_through() -> None:
    """The recovering client must not wait for an answer that never comes."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 5)
        await asyncio.sleep(5)  # its last LAC is sent
        planted: BookieError = KeyError("planted")  # type: ignore[assignment]  # none of its kind
        for each in cluster.bookies.values():
            each.fail_next(planted)
        other = cluster.new_client()
        with pytest.raises(KeyError, match="planted"):
            await other.recover_ledger(writer.ledger_id)
        for each in cluster.bookies.values():
            each._faults.clear()
            each.is_silent = True
        with pytest.raises(LedgerRecoveryError, match="did not answer within 2"):
            await other.recover_ledger(writer.ledger_id)
        for each in cluster.bookies.values():
            each.is_silent = False
            each.wake()
        metadata = await other.recover_ledger(writer.ledger_id)
        assert metadata.last_entry_id == 4
        assert await read_all(await other.open_ledger(writer.ledger_id), 0, 4) == bodies(0, 4)
        await other.aclose()

    run(scenario)


def test_a_recovery_that_cannot_write_back_closes_nothing() -> None:
    """Bookies that read and do not store: what was found may be lost before the next recovery."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        with patch.object(LacPublication, "publish", lambda *_: []):
            await write(writer, 5)  # no bookie learns that the last one is confirmed
        await writer.abandon()
        stores = {each: each.add_entry for each in cluster.bookies.values()}

        def refuse(frame: bytes, *, is_recovery: bool) -> None:
            raise BookieReadOnlyError("full")

        for each in stores:
            each.add_entry = refuse  # type: ignore[method-assign]
        with pytest.raises(LedgerRecoveryError, match="not written back"):
            await cluster.client.recover_ledger(writer.ledger_id)
        store = cluster.client._context().ledger_store
        stored = await store.read(writer.ledger_id)
        assert stored.metadata.state is LedgerState.IN_RECOVERY
        for each, add_entry in stores.items():
            each.add_entry = add_entry  # type: ignore[method-assign]
        metadata = await cluster.client.recover_ledger(writer.ledger_id)
        assert metadata.last_entry_id == 4

    run(scenario)


def test_a_replacement_that_refuses_an_entry_as_too_large_is_left_out() -> None:
    """Its limit is lower than that of the members: an entry that waits for it fails in time."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        members = [cluster.member(writer, position) for position in range(3)]
        (spare,) = (each for each in cluster.bookies.values() if each not in members)
        asked: list[bytes] = []

        def refuse(frame: bytes, *, is_recovery: bool) -> None:
            asked.append(frame)
            raise EntryTooLargeError("the limit is 5 bytes")

        spare.add_entry = refuse  # type: ignore[method-assign]
        members[0].stop()
        left_out = re.escape(f"for new ones refused entries: {spare.bookie} (the limit is 5 ")
        with pytest.raises(NotEnoughBookiesError, match=left_out):
            await writer.append([b"x"])
        assert len(asked) == 1

    run(scenario, "ABCD")


def test_a_writer_whose_lac_is_fenced_writes_no_more() -> None:
    """The explicit LAC of an idle writer is what meets the fence first."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 1)
        for each in cluster.bookies.values():
            each.fail_next(LedgerFencedError("by another"))
        await asyncio.sleep(5)
        for each in cluster.bookies.values():
            each._faults.clear()
        with pytest.raises(LedgerFencedError):
            await writer.append([b"late"])

    run(scenario)


def test_ids_that_others_always_take_first_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a number of attempts; no id was given."""
    monkeypatch.setattr(store_module, "_ID_CONFLICTS_MAX", 3)

    async def scenario(cluster: Cluster) -> None:
        store = cluster.tree.connect()
        ledgers = LedgerStore(store, PATHS)
        put = store.put

        async def overtaken(path: str, value: bytes, *, version: int) -> int:
            await put(path, value, version=version)
            return await put(path, value, version=version)

        with monkeypatch.context() as patch:
            patch.setattr(store, "put", overtaken)
            with pytest.raises(MetadataVersionError, match="changed 3 times in a row"):
                await ledgers.new_ledger_id()
        assert await ledgers.new_ledger_id() > 0
        await store.aclose()

    run(scenario)


def test_a_list_of_bookies_that_changes_while_it_is_read_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that goes between the list and its node is left out, and none is kept for gone."""

    async def scenario(cluster: Cluster) -> None:
        store = cluster.tree.connect()
        registry = BookieRegistry(store, PATHS)
        get_many = store.get_many

        async def lose_one(paths: Sequence[str]) -> list[Versioned | None]:
            if any(path == PATHS.bookie_available("A") for path in paths):
                await cluster.store.delete(PATHS.bookie_available("A"))
            found = await get_many(paths)
            await asyncio.sleep(1)  # the watch has reported it by then
            return found

        with monkeypatch.context() as patch:
            patch.setattr(store, "get_many", lose_one)
            found = await registry.get_addresses()
            assert {each.name for each in found} == {"B", "C", "D"}
        assert not registry._all
        assert {each.name for each in await registry.get_addresses()} == {"B", "C", "D"}
        assert registry._all
        await registry.aclose()
        await store.aclose()

    run(scenario)
