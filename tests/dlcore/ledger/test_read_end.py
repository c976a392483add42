"""Goal: a read that begins after an acknowledgement sees it, whatever bookies know by then.

Method: the writer tells no LAC by itself, as if it died, or were slow, right after each answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import LedgerReadError
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ledger.writing.appender import LacPublication
from dlcore.wire.memory_bookies import MemoryBookieClient
from tests.fixtures.ledger_cluster import CONFIG, Cluster, bodies, read_all, run, write
from tests.fixtures.ledgers import quorum_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ledger.writing.writer import LedgerWriter


@pytest.fixture(autouse=True)
def _unreported() -> Iterator[None]:
    with patch.object(LacPublication, "publish", lambda *_: []):
        yield


async def end_of(cluster: Cluster, writer: LedgerWriter) -> int:
    """Return what a new client finds."""
    client = cluster.new_client()
    try:
        reader = await client.open_ledger(writer.ledger_id)
        end = await reader.read_last_add_confirmed()
        assert await read_all(reader, 0, end) == bodies(0, end)
        return end
    finally:
        await client.aclose()


@pytest.mark.parametrize("quorum", [(3, 3, 2), (3, 3, 3), (4, 3, 2), (4, 2, 1), (1, 1, 1)])
def test_each_acknowledged_entry_is_seen_at_once(quorum: tuple[int, int, int]) -> None:
    """One at a time, many at once, and of a writer that died."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(*quorum))
        assert await end_of(cluster, writer) == -1
        for count in (1, 1, 5, 1, 40):
            await write(writer, count)
            assert await end_of(cluster, writer) == writer.last_add_confirmed
        await writer.abandon()
        assert await end_of(cluster, writer) == 47

    run(scenario)


def test_one_dead_bookie_hides_nothing() -> None:
    """The two others decide: what both hold is shown, what neither holds is not."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        cluster.member(writer, 1).is_silent = True
        assert await end_of(cluster, writer) == 2
        cluster.member(writer, 1).is_silent = False
        await writer.abandon()

    run(scenario)


def test_an_entry_of_which_too_few_tell_is_waited_for() -> None:
    """One holds it, one does not, the third is silent: until the writer goes on, or for so long."""

    async def scenario(cluster: Cluster) -> None:
        loop = asyncio.get_running_loop()
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        first, second, third = (cluster.member(writer, position) for position in range(3))
        frame = first.entries(writer.ledger_id)[2]
        for member in (second, third):
            del member.entries(writer.ledger_id)[2]
        third.is_silent = True
        began = loop.time()
        with pytest.raises(
            LedgerReadError, match=r"\(OPEN\): its last acknowledged entry is unknown .*entry -1"
        ):
            await end_of(cluster, writer)
        assert CONFIG.read_timeout_s <= loop.time() - began <= CONFIG.read_timeout_s + 2
        reading = asyncio.create_task(end_of(cluster, writer))
        await asyncio.sleep(1)
        assert not reading.done()
        second.entries(writer.ledger_id)[2] = frame
        assert await reading == 2
        third.is_silent = False
        await writer.abandon()

    run(scenario)


def test_a_claim_is_checked_only_if_the_others_do_not_catch_up() -> None:
    """To list all entries of a ledger is dear: it takes another service, and another library."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        first, second, third = (cluster.member(writer, position) for position in range(3))
        first.write_lac(writer.ledger_id, 2)
        frame = first.entries(writer.ledger_id)[2]
        for member in (second, third):
            del member.entries(writer.ledger_id)[2]
        with patch.object(MemoryBookieClient, "list_entries", autospec=True) as listed:
            reading = asyncio.create_task(end_of(cluster, writer))
            await asyncio.sleep(0.03)
            assert not reading.done()
            second.entries(writer.ledger_id)[2] = frame
            assert await reading == 2
            listed.assert_not_called()
        del second.entries(writer.ledger_id)[2]
        assert await end_of(cluster, writer) == 1
        await writer.abandon()

    run(scenario)


def test_write_backs_of_recoveries_are_shown_once_one_ends() -> None:
    """Another may have found that too few held it, and may close the ledger without it."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        await writer.abandon()
        ledger_id = writer.ledger_id
        members = [cluster.member(writer, position) for position in range(3)]
        store = cluster.client._context().ledger_store
        stored = await store.read(ledger_id)
        recovering = _in_state(stored.metadata, LedgerState.IN_RECOVERY)
        await store.write(recovering, version=stored.version)
        with pytest.raises(LedgerReadError, match=r"\(IN_RECOVERY\)"):
            await end_of(cluster, writer)
        reading = asyncio.create_task(end_of(cluster, writer))
        await asyncio.sleep(0.1)
        for member in members[1:]:
            del member.entries(ledger_id)[2]
        members[0].stop()
        assert (await cluster.client.recover_ledger(ledger_id)).last_entry_id == 1
        assert await reading == 1

    run(scenario)


def _in_state(metadata: LedgerMetadata, state: LedgerState) -> LedgerMetadata:
    from msgspec.structs import replace

    return replace(metadata, state=state)


def test_a_follower_gets_what_was_acknowledged_by_a_writer_that_died() -> None:
    """No writer will ever send it to its bookies."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        await writer.abandon()
        reader = await cluster.client.open_ledger(writer.ledger_id)
        steps = reader.follow(0)
        got: list[bytes] = []
        async with asyncio.timeout(5):
            while len(got) < 3:
                got += [bytes(frame.body) for frame in (await anext(steps)).frames]
        assert got == bodies(0, 2)
        await steps.aclose()

    run(scenario)


def test_a_follower_learns_where_a_read_found_the_end() -> None:
    """It need not wait until it grows suspicious of the silence."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        reader = await cluster.client.open_ledger(writer.ledger_id)
        steps = reader.follow(0)
        assert not (await anext(steps)).frames
        reading = asyncio.ensure_future(anext(steps))
        await asyncio.sleep(0.01)
        reader.note_end(await reader.read_last_add_confirmed())
        async with asyncio.timeout(0.1):
            step = await reading
        assert bytes(step.frames[-1].body) == bodies(2, 2)[0]
        reader.note_end(1)  # it knows
        await steps.aclose()
        reader.note_end(9)  # there is no follower
        await writer.abandon()

    run(scenario)


def test_shown_entries_outlive_a_change_of_bookies() -> None:
    """B holds the entry and its answer is lost: it is replaced by D, which has it by then."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        members = [cluster.member(writer, position) for position in range(3)]
        spare = next(each for name, each in cluster.bookies.items() if each not in members)
        for member in members[1:]:
            member.is_silent = True
        appended = writer.append([b"entry-0"])
        frame = members[0].entries(writer.ledger_id)[0]
        members[1].add_entry(frame, is_recovery=False)
        members[1].is_silent = False
        assert await end_of(cluster, writer) == 0
        assert not appended.done()
        store = cluster.client._context().ledger_store
        while len(spare.entries(writer.ledger_id)) == 0:
            assert (await store.read(writer.ledger_id)).metadata == writer.metadata
            await asyncio.sleep(0.01)
        await writer.abandon()
        members[2].is_silent = False
        assert (await cluster.client.recover_ledger(writer.ledger_id)).last_entry_id == 0

    run(scenario)


def test_a_client_without_metadata_relies_on_the_lac() -> None:
    """Whether what bookies hold will stay, the metadata of the moment says."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 2)
        await write(writer, 1)
        reader = await cluster.client.open_ledger(writer.ledger_id)
        reader._ledger_store = None
        assert await reader.read_last_add_confirmed() == 1  # as the last entry says
        await writer.abandon()

    run(scenario)
