"""Goal: readers and followers get every confirmed entry.  Method: memory bookies, virtual time."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import (
    BookieStorageError,
    ConfigurationError,
    LedgerNotFoundError,
    LedgerReadError,
)
from dlcore.ledger.client import LedgerClient
from dlcore.ledger.metadata.values import first_followed
from dlcore.wire.memory_bookies import MemoryBookieClient
from tests.fixtures.ledgers import quorum_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ledger.reading.reader import LedgerReader
    from dlcore.metadata.port import Versioned
    from dlcore.wire.frames import EntryFrame
    from dlcore.wire.port import FollowUpdate

from tests.fixtures.ledger_cluster import (
    CONFIG,
    PATHS,
    Cluster,
    TokenClock,
    bodies,
    read_all,
    read_into,
    run,
    write,
)


def test_damage_silence_and_death_are_read_around() -> None:
    """One good copy anywhere is enough for each entry."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 3, 3))
        await write(writer, 30)
        await writer.close()
        for position in range(3):
            held = cluster.member(writer, position).entries(writer.ledger_id)
            for entry_id in range(30):
                if entry_id % 3 != position:
                    held[entry_id] = held[entry_id][:-1] + b"?"
        reader = await cluster.client.open_ledger(writer.ledger_id)
        assert await read_all(reader, 0, 29) == bodies(0, 29)

    run(scenario)


@pytest.mark.parametrize("quorum", [(3, 3, 3), (4, 2, 2)])
def test_a_silent_replica_costs_the_speculative_delay(quorum: tuple[int, int, int]) -> None:
    """Not the read time-out."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(*quorum))
        await write(writer, 12)
        await writer.close()
        reader = await cluster.client.open_ledger(writer.ledger_id)
        for position in range(quorum[0]):
            silent = cluster.member(writer, position)
            silent.is_silent = True
            began = asyncio.get_running_loop().time()
            assert await read_all(reader, 0, 11) == bodies(0, 11)
            assert asyncio.get_running_loop().time() - began < 1.2
            silent.is_silent = False
            silent.wake()

    run(scenario)


def test_an_entry_that_no_bookie_gives_is_an_error_that_names_all_answers() -> None:
    """Everything before it is delivered."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 5)
        await writer.close()
        members = [cluster.member(writer, position) for position in range(3)]
        del members[0].entries(writer.ledger_id)[3]
        members[1].entries(writer.ledger_id)[3] = b"damaged"
        members[2].stop()
        reader = await cluster.client.open_ledger(writer.ledger_id)
        got: list[bytes] = []
        with pytest.raises(LedgerReadError) as caught:
            await read_into(got, reader, 0, 4)
        assert got == bodies(0, 2)
        for each, answer in zip(
            members,
            ("NoSuchEntryError", "DigestMismatchError", "BookieUnavailableError"),
            strict=True,
        ):
            assert f"{each.bookie}: {answer}" in str(caught.value)

    run(scenario)


def test_all_silent_is_an_error_after_the_time_out() -> None:
    """A read never hangs."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 1)
        await writer.close()
        for each in cluster.bookies.values():
            each.is_silent = True
        reader = await cluster.client.open_ledger(writer.ledger_id)
        with pytest.raises(LedgerReadError, match=r"no answer within 2\.0 s"):
            await read_all(reader, 0, 0)

    run(scenario)


def test_ranges_outside_the_ledger_are_refused() -> None:
    """With the ledger's end in the message."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 2)
        await writer.close()
        reader = await cluster.client.open_ledger(writer.ledger_id)
        with pytest.raises(ConfigurationError, match=r"last=2: ledger \d+ ends with entry 1"):
            await read_all(reader, 0, 2)
        with pytest.raises(ConfigurationError, match="first=-1"):
            await read_all(reader, -1, 0)
        with pytest.raises(ConfigurationError, match="first=-5"):
            await anext(aiter(reader.follow(-5)))

    run(scenario)


def test_a_reader_without_metadata_store_reads_by_what_it_was_handed() -> None:
    """As Spark's executors do; everything else says what is missing."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 9)
        metadata = await writer.close()
        client = LedgerClient(
            ledger_store=None,
            registry=None,
            bookies=MemoryBookieClient(cluster.bookies.values()),
            config=CONFIG,
            clock=TokenClock(),
            rng=random.Random(0),
        )
        assert await read_all(client.open_ledger_of(metadata), 0, 8) == bodies(0, 8)
        with pytest.raises(ConfigurationError, match="it can only read"):
            await client.open_ledger(metadata.ledger_id)
        for each in cluster.bookies.values():
            each.stop()
        with pytest.raises(LedgerReadError):
            await read_all(client.open_ledger_of(metadata), 0, 8)

    run(scenario)


def test_a_stale_reader_looks_at_the_metadata_after_a_failure() -> None:
    """Entries may have moved to other bookies since it was handed the metadata."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(2, 2, 2))
        stale = cluster.client.open_ledger_of(writer.metadata)
        for position in (0, 1):
            cluster.member(writer, position).stop()
        await write(writer, 4)
        await writer.close()
        assert await read_all(stale, 0, 3) == bodies(0, 3)

    run(scenario)


def test_a_stale_reader_asks_no_server_that_is_behind() -> None:
    """A server of the metadata store may know as little of the move as the reader."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(2, 2, 2))
        stale = cluster.client.open_ledger_of(writer.metadata)
        ledger = PATHS.ledger(writer.ledger_id)
        behind = await cluster.store.get(ledger)
        assert behind is not None
        for position in (0, 1):
            cluster.member(writer, position).stop()
        await write(writer, 4)
        await writer.close()
        get = cluster.store.get

        async def get_behind(path: str, *, fresh: bool = False) -> Versioned | None:
            return await get(path) if fresh or path != ledger else behind

        cluster.store.get = get_behind  # type: ignore[method-assign]  # a server that is behind
        assert await read_all(stale, 0, 3) == bodies(0, 3)

    run(scenario)


def test_a_lac_read_without_coverage_says_who_did_not_answer() -> None:
    """It does not guess."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 1)
        reader = await cluster.client.open_ledger(writer.ledger_id)
        cluster.member(writer, 0).stop()
        cluster.member(writer, 1).is_silent = True
        with pytest.raises(LedgerReadError, match=r"is stopped; .* did not answer within 2\.0 s"):
            await reader.read_last_add_confirmed()
        cluster.member(writer, 1).is_silent = False

    run(scenario)


def test_bookies_tell_the_lac_while_the_metadata_is_read() -> None:
    """Neither waits for the other; of an ensemble that was replaced meanwhile nothing counts."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 1)
        await writer.publish_lac()
        reader = await cluster.client.open_ledger(writer.ledger_id)
        members = [cluster.member(writer, position) for position in range(3)]
        refresh, arrived = reader.refresh, asyncio.Event()

        async def late(*, fresh: bool = False) -> LedgerMetadata:
            await arrived.wait()
            return await refresh(fresh=fresh)

        reader.refresh = late  # type: ignore[method-assign]
        asked = sum(member.requests for member in members)
        reading = asyncio.create_task(reader.read_last_add_confirmed())
        await asyncio.sleep(0.1)
        assert sum(member.requests for member in members) == asked + 3
        members[0].stop()
        await write(writer, 1)
        await asyncio.sleep(1)
        assert cluster.member(writer, 0) is not members[0]
        await writer.publish_lac()
        arrived.set()
        assert await reading == 1
        await writer.abandon()

    run(scenario)


async def follow_all(
    reader: LedgerReader,
    first: int,
    got: list[bytes],
    *,
    takes: Callable[[int], bool] = lambda _: False,
) -> bool:
    """Collect bodies until the end; return what the last step said.

    Entries for which `takes` holds are taken as they come.
    """
    closed = False

    def take(entry: EntryFrame) -> bool:
        if takes(entry.entry_id):
            got.append(bytes(entry.body))
            return True
        return False

    async for step in reader.follow(first, on_entry=take):
        assert not closed
        assert all(each.entry_id <= step.last_add_confirmed for each in step.frames)
        got += [bytes(each.body) for each in step.frames]
        closed = step.closed
    return closed


TAKES = {
    "none": lambda _: False,
    "all": lambda _: True,
    "some": lambda entry_id: entry_id % 3 > 0,
}
"""Which entries are taken as they come."""


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something holds."""
    while not condition():  # noqa: ASYNC110  # virtual time: polling costs nothing
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("takes", TAKES.values(), ids=TAKES)
@pytest.mark.parametrize("quorum", [(3, 3, 2), (4, 2, 2)])
def test_a_follower_gets_entries_as_they_are_confirmed(
    quorum: tuple[int, int, int], takes: Callable[[int], bool]
) -> None:
    """Through ensemble changes and the death of the bookie it follows, to the end."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(*quorum))
        reader = await cluster.client.open_ledger(writer.ledger_id)
        got: list[bytes] = []
        follower = asyncio.create_task(follow_all(reader, 0, got, takes=takes))
        for position in (0, 1, 2):
            await write(writer, 7)
            await until(lambda: len(got) == writer.last_add_confirmed + 1)
            victim = cluster.member(writer, position)
            victim.stop()
            await write(writer, 7)
            await until(lambda: len(got) == writer.last_add_confirmed + 1)
            victim.start()
        await writer.close()
        assert await follower is True
        assert got == bodies(0, 41)

    run(scenario, "ABCDE")


def test_an_entry_taken_as_it_comes_is_confirmed_and_no_step_brings_it() -> None:
    """Nor does the caller get entries while it works at a step: they wait for the next one."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        reader = await cluster.client.open_ledger(writer.ledger_id)
        taken: list[int] = []

        def take(entry: EntryFrame) -> bool:
            assert entry.entry_id <= writer.last_add_confirmed
            taken.append(entry.entry_id)
            return True

        steps = reader.follow(0, on_entry=take)
        async with aclosing(steps):
            assert not (await anext(steps)).frames
            await write(writer, 3)
            await asyncio.sleep(1.0)
            assert taken == [], "the caller is busy with the step"
            second = asyncio.ensure_future(anext(steps))
            await until(lambda: len(taken) == 3)
            await write(writer, 3)
            await until(lambda: len(taken) == 6)
            assert not second.done()
            await writer.close()
            last = await second
            assert (last.closed, last.frames) == (True, ())
            assert taken == [0, 1, 2, 3, 4, 5]

    run(scenario)


def test_entries_that_the_followed_bookie_lacks_are_read_from_others() -> None:
    """As soon as it tells that it is confirmed."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(quorum_of(3, 1, 1))
        reader = await cluster.client.open_ledger(writer.ledger_id)
        got: list[bytes] = []
        follower = asyncio.create_task(follow_all(reader, 0, got, takes=TAKES["all"]))
        for _ in range(6):
            await write(writer, 1)
            async with asyncio.timeout(10):
                await until(lambda: len(got) > writer.last_add_confirmed)
        await writer.close()
        assert await follower is True
        assert got == bodies(0, 5)

    run(scenario)


def test_an_entry_beyond_the_lac_that_comes_with_it_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is read once it is confirmed, though it was pushed before."""
    follow, arrived = MemoryBookieClient.follow, [-1]

    async def follow_early(
        self: MemoryBookieClient,
        bookie: BookieId,
        *,
        ledger_id: int,
        first_entry_id: int,
        **_: object,
    ) -> AsyncIterator[FollowUpdate]:
        async for update in follow(
            self, bookie, ledger_id=ledger_id, first_entry_id=first_entry_id
        ):
            arrived.append(max(update.last_add_confirmed - 1, -1))
            yield update._replace(last_add_confirmed=arrived[-1])

    monkeypatch.setattr(MemoryBookieClient, "follow", follow_early)

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        reader = await cluster.client.open_ledger(writer.ledger_id)
        got: list[bytes] = []

        def takes(entry_id: int) -> bool:
            assert entry_id <= arrived[-1]
            return True

        follower = asyncio.create_task(follow_all(reader, 0, got, takes=takes))
        await until(lambda: len(arrived) > 1)
        for _ in range(5):
            await write(writer, 1)
            await until(lambda: len(got) >= writer.last_add_confirmed)
        await writer.close()
        assert await follower is True
        assert got == bodies(0, 4)

    run(scenario)


def test_a_follower_joins_anywhere_and_ends_with_recovery() -> None:
    """A fence makes it look at the metadata."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 20)
        reader = await cluster.client.open_ledger(writer.ledger_id)
        got: list[bytes] = []
        follower = asyncio.create_task(follow_all(reader, 12, got))
        await until(lambda: len(got) == 8)
        other = cluster.new_client()
        await other.recover_ledger(writer.ledger_id)
        assert await follower is True
        assert got == bodies(12, 19)
        await other.aclose()

    run(scenario)


def test_a_follower_of_a_bookie_that_hears_nothing_asks_the_others() -> None:
    """The followed bookie is cut off from the writer, and says nothing wrong."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        reader = await cluster.client.open_ledger(writer.ledger_id)
        got: list[bytes] = []
        follower = asyncio.create_task(follow_all(reader, 0, got))
        await asyncio.sleep(0.1)
        # The reader follows the bookie at the position of the ledger's id.
        cut_off = cluster.member(writer, writer.ledger_id % 3)
        cut_off.fail_next(*[BookieStorageError("disk")] * 10_000)  # its add, its LACs
        await write(writer, 1)
        since = asyncio.get_running_loop().time()
        await until(lambda: len(got) == 1)
        assert asyncio.get_running_loop().time() - since < 20.0
        await writer.close()
        assert await follower is True

    run(scenario, "ABC")


def test_a_follower_asks_the_bookie_whose_push_never_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No other bookie knows the LAC, and no writer is left."""
    follow, streams = MemoryBookieClient.follow, 0

    async def lossy(
        self: MemoryBookieClient,
        bookie: BookieId,
        *,
        ledger_id: int,
        first_entry_id: int,
        **_: object,
    ) -> AsyncIterator[FollowUpdate]:
        nonlocal streams
        streams += 1
        if streams == 1:
            await asyncio.Event().wait()
        async for update in follow(
            self, bookie, ledger_id=ledger_id, first_entry_id=first_entry_id
        ):
            yield update

    monkeypatch.setattr(MemoryBookieClient, "follow", lossy)

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 1)
        await writer.abandon()
        followed = first_followed(writer.ledger_id, 3)
        for position in range(3):
            member = cluster.member(writer, position)
            knows = member.read_lac(writer.ledger_id, fence=False)
            assert knows == (0 if position == followed else -1)
        reader = await cluster.client.open_ledger(writer.ledger_id)
        got: list[bytes] = []
        follower = asyncio.create_task(follow_all(reader, 0, got))
        async with asyncio.timeout(20):
            await until(lambda: len(got) == 1)
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)

    run(scenario)


@pytest.mark.parametrize("takes", TAKES.values(), ids=TAKES)
def test_a_follower_reads_damaged_pushes_from_others(takes: Callable[[int], bool]) -> None:
    """Every frame is verified, whichever bookie pushes it."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 10)
        await writer.publish_lac()
        held = cluster.member(writer, writer.ledger_id % 3).entries(writer.ledger_id)
        for entry_id in (0, 4, 5, 9):
            held[entry_id] = held[entry_id][:-1] + b"?"
        reader = await cluster.client.open_ledger(writer.ledger_id)
        got: list[bytes] = []
        follower = asyncio.create_task(follow_all(reader, 0, got, takes=takes))
        await until(lambda: len(got) == 10)
        assert got == bodies(0, 9)
        await writer.close()
        assert await follower is True

    run(scenario)


def test_a_follower_waits_for_bookies_that_are_all_away() -> None:
    """With pauses that grow; it goes on when they are back."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        await writer.publish_lac()
        for each in cluster.bookies.values():
            each.stop()
        reader = await cluster.client.open_ledger(writer.ledger_id)
        got: list[bytes] = []
        follower = asyncio.create_task(follow_all(reader, 0, got))
        await asyncio.sleep(30.0)
        assert sum(each.requests for each in cluster.bookies.values()) < 200
        for each in cluster.bookies.values():
            each.start()
        await until(lambda: len(got) == 3)
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        await writer.abandon()

    run(scenario)


def test_a_follower_of_a_deleted_ledger_gets_an_error() -> None:
    """It waits for nothing then, although the bookies go on."""

    async def scenario(cluster: Cluster) -> None:
        writer = await cluster.client.create_ledger(QuorumConfig())
        await write(writer, 3)
        reader = await cluster.client.open_ledger(writer.ledger_id)
        got: list[bytes] = []
        follower = asyncio.create_task(follow_all(reader, 0, got))
        await until(lambda: bool(got))
        await cluster.client._context().ledger_store.delete(writer.ledger_id)
        with pytest.raises(LedgerNotFoundError):
            await asyncio.wait_for(follower, 60.0)
        await writer.abandon()

    run(scenario)
