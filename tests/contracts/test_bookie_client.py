"""The contract of every `BookieClient`: a real one, with TLS and without, and that in memory."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pytest

from bookie.serving.control import LISTED_RANGES_MAX
from dlcore.base.access.tls_in_use import TlsInUse
from dlcore.base.config import ENTRY_SIZE_BYTES_MAX
from dlcore.base.errors import (
    BadRequestError,
    BookieUnavailableError,
    DigestMismatchError,
    DLError,
    EntryTooLargeError,
    LedgerFencedError,
    NoSuchEntryError,
    NoSuchLedgerError,
    WrongIncarnationError,
)
from dlcore.base.ids import BookieId
from dlcore.wire.client import WireBookieClient
from dlcore.wire.memory_bookies import MemoryBookie, MemoryBookieClient
from dlcore.wire.port import ENTRY_ID_MAX, BookieClient, EntryRange, FollowUpdate
from tests.fixtures.aio import until
from tests.fixtures.certificates import Tls, make_tls
from tests.fixtures.served_bookie import (
    BOOKIE,
    CLIENT,
    CLUSTER_ID,
    frame_of,
    run as run_alone,
    serve,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    Open = Callable[[], AbstractAsyncContextManager["Cluster"]]

LEDGER = 7
ABSENT = BookieId("bookie-absent", "a" * 32)


@dataclass(frozen=True, slots=True)
class Cluster:
    """One running bookie and a client; `ABSENT` is a bookie that no client can reach."""

    client: BookieClient
    bookie: BookieId


@asynccontextmanager
async def _open_wire(directory: Path, tls: Tls | None = None) -> AsyncIterator[Cluster]:
    async with serve(directory, tls=tls.bookie if tls else None) as served:

        async def resolve(bookie: BookieId) -> str:
            return "127.0.0.1:1" if bookie == ABSENT else served.address

        async def resolve_control(bookie: BookieId) -> str:
            return "127.0.0.1:1" if bookie == ABSENT else served.control_address

        client = WireBookieClient(
            resolve,
            cluster_id=CLUSTER_ID,
            config=CLIENT,
            resolve_control=resolve_control,
            tls=TlsInUse.of(tls.client if tls else None),
        )
        try:
            yield Cluster(client, BOOKIE)
        finally:
            await client.aclose()


@asynccontextmanager
async def _open_memory(_directory: Path) -> AsyncIterator[Cluster]:
    client = MemoryBookieClient([MemoryBookie(BOOKIE)])
    try:
        yield Cluster(client, BOOKIE)
    finally:
        await client.aclose()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Files of a bookie and a client that trust each other."""
    return make_tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=["wire", "tls", "memory"])
def open_cluster(request: pytest.FixtureRequest, tmp_path: Path, tls: Tls) -> Open:
    """Return what opens a cluster inside the test's event loop."""
    match request.param:
        case "wire":
            return lambda: _open_wire(tmp_path)
        case "tls":
            return lambda: _open_wire(tmp_path, tls)
        case _:
            return lambda: _open_memory(tmp_path)


def run(open_cluster: Open, scenario: Callable[[Cluster], Awaitable[None]]) -> None:
    """Run `scenario` on a fresh cluster."""

    async def main() -> None:
        async with open_cluster() as cluster:
            await scenario(cluster)

    run_alone(main)


async def read_all(
    cluster: Cluster,
    first: int,
    last: int,
    *,
    stride: int = 1,
    into: list[bytes] | None = None,
) -> list[bytes]:
    """Return the frames of a range read, also put `into` a list as they come."""
    got = [] if into is None else into
    stream = cluster.client.read_entries(
        cluster.bookie,
        ledger_id=LEDGER,
        first_entry_id=first,
        last_entry_id=last,
        stride=stride,
    )
    async for frames in stream:
        got += map(bytes, frames)
    return got


def follow(cluster: Cluster, first: int) -> AsyncGenerator[FollowUpdate, None]:
    """Follow the test's ledger."""
    return cluster.client.follow(cluster.bookie, ledger_id=LEDGER, first_entry_id=first)


def test_an_entry_is_read_back_as_it_was_added(open_cluster: Open) -> None:
    """Add a frame twice and read it: the same bytes, and the second add succeeds."""

    async def scenario(cluster: Cluster) -> None:
        frame = frame_of(LEDGER, 0)
        await cluster.client.add_entry(cluster.bookie, frame)
        await cluster.client.add_entry(cluster.bookie, frame)  # again: it is held already
        read = await cluster.client.read_entry(
            cluster.bookie, ledger_id=LEDGER, entry_id=0, fence=False
        )
        assert bytes(read) == frame

    run(open_cluster, scenario)


def test_the_answer_to_an_add_that_is_sent_comes_later(open_cluster: Open) -> None:
    """Once each, success and error, and never within the call; the next ones may be sent then."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        frames = [frame_of(LEDGER, entry_id) for entry_id in range(5)]
        answers: list[DLError | None] = []
        calls = 0

        def send_next(error: DLError | None = None) -> None:
            nonlocal calls
            assert not calls, "the answer came within a call"
            answers.append(error)
            calls += 1
            if len(answers) <= len(frames):
                client.send_add(bookie, frames[len(answers) - 1], send_next)
            elif len(answers) == len(frames) + 1:
                client.send_add(bookie, b"damaged", send_next, is_recovery=True)
            calls -= 1

        send_next()
        await until(lambda: len(answers) == len(frames) + 2)
        assert answers[:-1] == [None] * (len(frames) + 1)
        assert isinstance(answers[-1], DigestMismatchError)
        assert await read_all(cluster, 0, len(frames) - 1) == frames

    run(open_cluster, scenario)


def test_pipelined_adds_of_any_size_all_arrive(open_cluster: Open) -> None:
    """Add frames of sizes around every length encoding at once; read all, and a stride."""

    async def scenario(cluster: Cluster) -> None:
        sizes = [0, 1, 79, 80, 127, 128, 16_383, 16_384, 700_000, 3_000_000] * 3
        frames = [frame_of(LEDGER, i, bytes([i]) * size) for i, size in enumerate(sizes)]
        await asyncio.gather(*(cluster.client.add_entry(cluster.bookie, f) for f in frames))
        assert await read_all(cluster, 0, len(frames) - 1) == frames
        assert await read_all(cluster, 1, len(frames) - 1, stride=4) == frames[1::4]
        assert list(await cluster.client.list_entries(cluster.bookie, ledger_id=LEDGER)) == [
            EntryRange(first_entry_id=0, last_entry_id=len(frames) - 1)
        ]

    run(open_cluster, scenario)


def test_the_largest_entry_travels_and_a_larger_one_is_refused(open_cluster: Open) -> None:
    """One byte decides; the refused entry leaves no trace."""

    async def scenario(cluster: Cluster) -> None:
        overhead = len(frame_of(LEDGER, 0, b""))
        largest = frame_of(LEDGER, 0, b"x" * (ENTRY_SIZE_BYTES_MAX - overhead))
        await cluster.client.add_entry(cluster.bookie, largest)
        too_large = frame_of(LEDGER, 1, b"x" * (ENTRY_SIZE_BYTES_MAX - overhead + 1))
        with pytest.raises(EntryTooLargeError):
            await cluster.client.add_entry(cluster.bookie, too_large)
        assert await read_all(cluster, 0, 0) == [largest]
        with pytest.raises(NoSuchEntryError):
            await cluster.client.read_entry(
                cluster.bookie, ledger_id=LEDGER, entry_id=1, fence=False
            )

    run(open_cluster, scenario)


def test_a_range_read_yields_what_is_there_before_it_says_no(open_cluster: Open) -> None:
    """Read over a hole: what precedes it comes, then the proven no."""

    async def scenario(cluster: Cluster) -> None:
        for entry_id in (0, 1, 3):
            await cluster.client.add_entry(cluster.bookie, frame_of(LEDGER, entry_id))
        got: list[bytes] = []
        with pytest.raises(NoSuchEntryError):
            await read_all(cluster, 0, 3, into=got)
        assert got == [frame_of(LEDGER, 0), frame_of(LEDGER, 1)]
        assert list(await cluster.client.list_entries(cluster.bookie, ledger_id=LEDGER)) == [
            EntryRange(first_entry_id=0, last_entry_id=1),
            EntryRange(first_entry_id=3, last_entry_id=3),
        ]

    run(open_cluster, scenario)


@pytest.mark.parametrize("count", [0, LISTED_RANGES_MAX, LISTED_RANGES_MAX + 1])
def test_a_list_of_ranges_may_be_longer_than_a_page(open_cluster: Open, count: int) -> None:
    """Hold every second entry: each is a range, and all come, in order."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        await client.read_lac(bookie, ledger_id=LEDGER, fence=True)  # known, though it is empty
        held = range(1, 2 * count, 2)
        await asyncio.gather(
            *(client.add_entry(bookie, frame_of(LEDGER, e), is_recovery=True) for e in held)
        )
        listed = await client.list_entries(bookie, ledger_id=LEDGER)
        assert list(listed) == [EntryRange(first_entry_id=e, last_entry_id=e) for e in held]

    run(open_cluster, scenario)


def test_an_entry_that_was_never_held_is_a_proven_no(open_cluster: Open) -> None:
    """Ask for everything about a ledger that the bookie never saw."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        with pytest.raises(NoSuchLedgerError):
            await client.read_lac(bookie, ledger_id=LEDGER, fence=False)
        with pytest.raises(NoSuchLedgerError):
            await client.read_entry(bookie, ledger_id=LEDGER, entry_id=0, fence=False)
        with pytest.raises(NoSuchLedgerError):
            await client.list_entries(bookie, ledger_id=LEDGER)
        with pytest.raises((NoSuchLedgerError, NoSuchEntryError)):
            await read_all(cluster, 0, 1)
        with pytest.raises((NoSuchLedgerError, NoSuchEntryError)):
            await client.read_entry(bookie, ledger_id=LEDGER, entry_id=0, fence=True)

    run(open_cluster, scenario)


@pytest.mark.parametrize("by", ["read_lac", "read_entry"])
def test_a_fenced_ledger_takes_recovery_adds_only(open_cluster: Open, by: str) -> None:
    """Fence by either request; ordinary adds fail, recovery's do not."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        await client.add_entry(bookie, frame_of(LEDGER, 0))
        if by == "read_lac":
            assert await client.read_lac(bookie, ledger_id=LEDGER, fence=True) == -1
        else:
            await client.read_entry(bookie, ledger_id=LEDGER, entry_id=0, fence=True)
        with pytest.raises(LedgerFencedError):
            await client.add_entry(bookie, frame_of(LEDGER, 1))
        await client.add_entry(bookie, frame_of(LEDGER, 1), is_recovery=True)
        await client.add_entry(bookie, frame_of(LEDGER + 1, 0))  # other ledgers go on
        assert await read_all(cluster, 0, 1) == [frame_of(LEDGER, 0), frame_of(LEDGER, 1)]

    run(open_cluster, scenario)


def test_a_ledger_can_be_fenced_before_its_first_entry(open_cluster: Open) -> None:
    """Fence an unknown ledger: its writer comes too late."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        assert await client.read_lac(bookie, ledger_id=LEDGER, fence=True) == -1
        with pytest.raises(LedgerFencedError):
            await client.add_entry(bookie, frame_of(LEDGER, 0))

    run(open_cluster, scenario)


def test_the_lac_comes_with_entries_and_by_itself(open_cluster: Open) -> None:
    """The LAC read is the highest that came with an entry or alone."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        await client.add_entry(bookie, frame_of(LEDGER, 0))
        assert await client.read_lac(bookie, ledger_id=LEDGER, fence=False) == -1
        await client.add_entry(bookie, frame_of(LEDGER, 1, lac=0))
        assert await client.read_lac(bookie, ledger_id=LEDGER, fence=False) == 0
        await client.write_lac(bookie, ledger_id=LEDGER, last_add_confirmed=1)
        assert await client.read_lac(bookie, ledger_id=LEDGER, fence=False) == 1
        await client.write_lac(bookie, ledger_id=LEDGER, last_add_confirmed=0)  # late: no harm
        assert await client.read_lac(bookie, ledger_id=LEDGER, fence=False) == 1

    run(open_cluster, scenario)


def test_entries_above_the_lac_are_reported_before_a_client_confirms_them(
    open_cluster: Open,
) -> None:
    """Gaps are reported, and confirmed entries are not reported again."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        with pytest.raises(NoSuchLedgerError):
            await client.read_held(bookie, ledger_id=LEDGER)
        for entry_id in (0, 1, 2, 4, 5):
            await client.add_entry(bookie, frame_of(LEDGER, entry_id))
        held = await client.read_held(bookie, ledger_id=LEDGER)
        assert held == (-1, ENTRY_ID_MAX, [(0, 2), (4, 5)])
        await client.write_lac(bookie, ledger_id=LEDGER, last_add_confirmed=1)
        held = await client.read_held(bookie, ledger_id=LEDGER)
        assert held == (1, ENTRY_ID_MAX, [(2, 2), (4, 5)])
        await client.write_lac(bookie, ledger_id=LEDGER, last_add_confirmed=9)
        assert await client.read_held(bookie, ledger_id=LEDGER) == (9, ENTRY_ID_MAX, [])

    run(open_cluster, scenario)


def test_a_follower_gets_entries_as_the_lac_moves(open_cluster: Open) -> None:
    """Follow from before the first entry to the fence; every update is complete."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        got: list[bytes] = []
        async with aclosing(follow(cluster, 0)) as updates:
            first = await anext(updates)
            assert (list(first.frames), first.last_add_confirmed) == ([], -1)
            adds = [client.add_entry(bookie, frame_of(LEDGER, i, lac=i - 1)) for i in range(5)]
            await asyncio.gather(*adds)
            await client.write_lac(bookie, ledger_id=LEDGER, last_add_confirmed=4)
            lac = -1
            while lac < 4:
                update = await anext(updates)
                assert update.last_add_confirmed >= lac
                lac = update.last_add_confirmed
                got += map(bytes, update.frames)
                assert len(got) == lac + 1  # complete up to its LAC
                assert not update.fenced
            await client.read_lac(bookie, ledger_id=LEDGER, fence=True)
            while not update.fenced:
                update = await anext(updates)
                assert not update.frames
        assert got == [frame_of(LEDGER, i, lac=i - 1) for i in range(5)]

    run(open_cluster, scenario)


def test_a_follower_may_start_anywhere(open_cluster: Open) -> None:
    """Follow from the middle: the first update holds that entry."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        for i in range(4):
            await client.add_entry(bookie, frame_of(LEDGER, i, lac=i - 1))
        async with aclosing(follow(cluster, 2)) as updates:
            update = await anext(updates)
            assert [bytes(frame) for frame in update.frames] == [frame_of(LEDGER, 2, lac=1)]
            assert update.last_add_confirmed == 2

    run(open_cluster, scenario)


def test_a_follower_that_is_far_behind_misses_nothing(open_cluster: Open) -> None:
    """More is confirmed than one update takes: each entry comes once, over the edges too."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        frames = [frame_of(LEDGER, i, bytes([i]) * 400_000, lac=i - 1) for i in range(20)]
        await asyncio.gather(*(client.add_entry(bookie, frame) for frame in frames))
        await client.write_lac(bookie, ledger_id=LEDGER, last_add_confirmed=19)
        got: list[bytes] = []
        async with aclosing(follow(cluster, 0)) as updates:
            async for update in updates:
                got += map(bytes, update.frames)
                assert len(got) == update.last_add_confirmed + 1
                if update.last_add_confirmed == 19:
                    break
        assert got == frames

    run(open_cluster, scenario)


def test_a_follower_may_take_updates_as_they_arrive(open_cluster: Open) -> None:
    """More than a window is taken at once, other updates are yielded: none is missed or doubled."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        frames = [frame_of(LEDGER, i, bytes([i]) * 400_000, lac=i - 1) for i in range(20)]
        got: list[bytes] = []
        taken: list[bool] = []

        def keep(update: FollowUpdate) -> None:
            got.extend(map(bytes, update.frames))

        def holds(count: int) -> bool:
            return len(got) == count

        def take(update: FollowUpdate) -> bool:
            taken.append(len(taken) % 4 < 3)
            if taken[-1]:
                keep(update)
            return taken[-1]

        async def iterate() -> None:
            updates = client.follow(bookie, ledger_id=LEDGER, first_entry_id=0, take=take)
            async with aclosing(updates):
                async for update in updates:
                    keep(update)

        task = asyncio.create_task(iterate())
        for entry_id, frame in enumerate(frames):
            await client.add_entry(bookie, frame)
            await client.write_lac(bookie, ledger_id=LEDGER, last_add_confirmed=entry_id)
            await until(partial(holds, entry_id + 1))
        task.cancel()
        await asyncio.wait([task])
        assert got == frames
        assert any(taken)

    run(open_cluster, scenario)


def test_damaged_frames_are_refused_and_not_stored(open_cluster: Open) -> None:
    """Add damaged bytes of several kinds; nothing is held afterwards."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        good = frame_of(LEDGER, 0)
        flipped = bytearray(good)
        flipped[-1] ^= 1
        for bad in (bytes(flipped), good[:-1], good[:20], b"", b"nonsense" * 10):
            with pytest.raises((DigestMismatchError, BadRequestError)):
                await client.add_entry(bookie, bad)
        with pytest.raises(NoSuchLedgerError):
            await client.list_entries(bookie, ledger_id=LEDGER)
        await client.add_entry(bookie, good)  # the connection is as good as before

    run(open_cluster, scenario)


def test_ids_out_of_range_are_bad_requests(open_cluster: Open) -> None:
    """Negative ids, empty ranges and stride 0 are refused as such everywhere."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        await client.add_entry(bookie, frame_of(LEDGER, 0))
        for frame in (frame_of(-1, 0), frame_of(LEDGER, -1)):
            with pytest.raises(BadRequestError):
                await client.add_entry(bookie, frame)
        with pytest.raises(BadRequestError):
            await client.write_lac(bookie, ledger_id=-1, last_add_confirmed=0)
        with pytest.raises(BadRequestError):
            await client.write_lac(bookie, ledger_id=LEDGER, last_add_confirmed=-2)
        with pytest.raises(BadRequestError):
            await client.read_lac(bookie, ledger_id=-1, fence=True)
        with pytest.raises(BadRequestError):
            await client.read_entry(bookie, ledger_id=LEDGER, entry_id=-1, fence=False)
        with pytest.raises(BadRequestError):
            await read_all(cluster, 1, 0)
        with pytest.raises(BadRequestError):
            await read_all(cluster, 0, 1, stride=0)
        with pytest.raises(BadRequestError):
            await client.list_entries(bookie, ledger_id=-1)
        async with aclosing(follow(cluster, -1)) as updates:
            with pytest.raises(BadRequestError):
                await anext(updates)

    run(open_cluster, scenario)


def test_an_entry_cannot_be_replaced_by_another(open_cluster: Open) -> None:
    """Add other bytes under a held id: refused, the first stay."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        await client.add_entry(bookie, frame_of(LEDGER, 0, b"one"))
        with pytest.raises(BadRequestError):
            await client.add_entry(bookie, frame_of(LEDGER, 0, b"two"))
        assert await read_all(cluster, 0, 0) == [frame_of(LEDGER, 0, b"one")]

    run(open_cluster, scenario)


def test_another_incarnation_gets_nothing(open_cluster: Open) -> None:
    """Address another incarnation in every request; nothing happens to this one."""

    async def scenario(cluster: Cluster) -> None:
        client = cluster.client
        other = BookieId(cluster.bookie.name, "f" * 32)
        await client.add_entry(cluster.bookie, frame_of(LEDGER, 0))
        with pytest.raises(WrongIncarnationError):
            await client.add_entry(other, frame_of(LEDGER, 1))
        with pytest.raises(WrongIncarnationError):
            await client.write_lac(other, ledger_id=LEDGER, last_add_confirmed=0)
        with pytest.raises(WrongIncarnationError):
            await client.read_lac(other, ledger_id=LEDGER, fence=True)
        with pytest.raises(WrongIncarnationError):
            await client.read_entry(other, ledger_id=LEDGER, entry_id=0, fence=True)
        with pytest.raises(WrongIncarnationError):
            await client.list_entries(other, ledger_id=LEDGER)
        with pytest.raises(WrongIncarnationError):
            await read_all(Cluster(client, other), 0, 0)
        async with aclosing(follow(Cluster(client, other), 0)) as updates:
            with pytest.raises(WrongIncarnationError):
                await anext(updates)
        await client.add_entry(cluster.bookie, frame_of(LEDGER, 1))  # it was not fenced
        assert await read_all(cluster, 0, 1) == [frame_of(LEDGER, 0), frame_of(LEDGER, 1)]

    run(open_cluster, scenario)


def test_a_bookie_out_of_reach_is_unknown_never_no(open_cluster: Open) -> None:
    """Ask an unreachable bookie: every answer is unknown."""

    async def scenario(cluster: Cluster) -> None:
        client = cluster.client
        with pytest.raises(BookieUnavailableError):
            await client.add_entry(ABSENT, frame_of(LEDGER, 0))
        with pytest.raises(BookieUnavailableError):
            await client.write_lac(ABSENT, ledger_id=LEDGER, last_add_confirmed=0)
        with pytest.raises(BookieUnavailableError):
            await client.read_lac(ABSENT, ledger_id=LEDGER, fence=False)
        with pytest.raises(BookieUnavailableError):
            await client.read_entry(ABSENT, ledger_id=LEDGER, entry_id=0, fence=False)
        with pytest.raises(BookieUnavailableError):
            await client.list_entries(ABSENT, ledger_id=LEDGER)
        with pytest.raises(BookieUnavailableError):
            await read_all(Cluster(client, ABSENT), 0, 0)
        async with aclosing(follow(Cluster(client, ABSENT), 0)) as updates:
            with pytest.raises(BookieUnavailableError):
                await anext(updates)

    run(open_cluster, scenario)


def test_closing_fails_what_is_pending_and_refuses_what_comes_later(open_cluster: Open) -> None:
    """Close with a follower and adds under way; closing again is harmless."""

    async def scenario(cluster: Cluster) -> None:
        client, bookie = cluster.client, cluster.bookie
        await client.add_entry(bookie, frame_of(LEDGER, 0))
        updates = follow(cluster, 0)
        await anext(updates)
        waiting = asyncio.ensure_future(anext(updates))
        adds = [
            asyncio.ensure_future(client.add_entry(bookie, frame_of(LEDGER, i))) for i in (1, 2)
        ]
        await client.aclose()
        await client.aclose()
        with pytest.raises(BookieUnavailableError):
            await waiting
        for outcome in await asyncio.gather(*adds, return_exceptions=True):
            assert outcome is None or isinstance(outcome, BookieUnavailableError)
        with pytest.raises(BookieUnavailableError):
            await client.add_entry(bookie, frame_of(LEDGER, 3))
        with pytest.raises(BookieUnavailableError):
            await client.read_lac(bookie, ledger_id=LEDGER, fence=False)

    run(open_cluster, scenario)
