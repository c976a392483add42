"""Followers get every confirmed entry that is held, once, in order, and soon."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bookie.serving.reads_in_progress import FollowStream
from dlcore.base.errors import BookieStorageError, BookieUnavailableError
from dlcore.wire.frames import FrameRun
from dlcore.wire.messages import Follow, Update
from tests.fixtures.aio import until
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import follow, make_frame, open_storage
from tests.simulation.loop import run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dlcore.wire.port import FollowUpdate

    Updates = AsyncGenerator[FollowUpdate, None]


async def take(updates: Updates) -> FollowUpdate:
    """Return the next update."""
    async with asyncio.timeout(20):
        return await anext(updates)


async def nothing_comes(updates: Updates) -> asyncio.Task[FollowUpdate]:
    """Check that no update is ready, and return the task that waits for the next."""
    task: asyncio.Task[FollowUpdate] = asyncio.ensure_future(anext(updates))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    return task


def test_updates_follow_the_lac() -> None:
    """Goal: the first update at once; then entries when they are confirmed, not when added."""

    async def main() -> None:
        async with open_storage(MemoryDisk()) as storage:
            updates = follow(storage, 1, first_entry_id=0)
            first = await take(updates)
            assert (list(first.frames), first.last_add_confirmed, first.fenced) == ([], -1, False)
            waiting = await nothing_comes(updates)
            await storage.writes.add_entry(make_frame(1, 0))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            storage.writes.write_lac(1, 0)
            second = await waiting
            assert ([*second.frames], second.last_add_confirmed) == ([make_frame(1, 0)], 0)
            for entry_id in (1, 2, 3):
                await storage.writes.add_entry(make_frame(1, entry_id))
            got: list[bytes] = []
            while len(got) < 2:
                update = await take(updates)
                got += map(bytes, update.frames)
            assert got == [make_frame(1, 1), make_frame(1, 2)]
            assert update.last_add_confirmed == 2
            await updates.aclose()

    run(main())


def test_followers_learn_of_a_fence_once_it_is_durable() -> None:
    """Goal: the follower learns that it must look at the metadata."""

    async def main() -> None:
        async with open_storage(MemoryDisk(latency_s=lambda: 0.001)) as storage:
            await storage.writes.add_entry(make_frame(1, 0))
            updates = follow(storage, 1, first_entry_id=0)
            assert not (await take(updates)).fenced
            assert await storage.reads.read_lac(1, fence=True) == -1
            assert (await take(updates)).fenced
            await updates.aclose()

    run(main())


def test_entries_that_are_not_held_are_left_out() -> None:
    """Goal: a striped replica: updates are complete up to their own LAC."""

    async def main() -> None:
        async with open_storage(MemoryDisk()) as storage:
            for entry_id in (0, 3, 6, 9):
                await storage.writes.add_entry(make_frame(1, entry_id))
            updates = follow(storage, 1, first_entry_id=2)
            update = await take(updates)
            assert [*update.frames] == [make_frame(1, 3), make_frame(1, 6)]
            assert update.last_add_confirmed == 8
            storage.writes.write_lac(1, 20)
            update = await take(updates)
            assert ([*update.frames], update.last_add_confirmed) == ([make_frame(1, 9)], 20)
            await updates.aclose()

    run(main())


def test_an_entry_that_is_not_durable_yet_holds_the_update_back() -> None:
    """Goal: this bookie is the slow one of the quorum; the entry must not be passed over."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk) as storage:
            await storage.writes.add_entry(make_frame(1, 0))
            updates = follow(storage, 1, first_entry_id=0)
            await take(updates)
            disk.device.latency_s = lambda: 0.005
            slow = storage.writes.add_entry(make_frame(1, 1))
            storage.writes.write_lac(1, 1)
            update = await take(updates)
            assert ([*update.frames], update.last_add_confirmed) == ([make_frame(1, 0)], 0)
            assert not slow.done()
            update = await take(updates)
            assert ([*update.frames], update.last_add_confirmed) == ([make_frame(1, 1)], 1)
            assert slow.done()
            await updates.aclose()

    run(main())


def test_an_entry_that_is_written_and_not_synced_reaches_no_follower() -> None:
    """Goal: the newest entry, which is looked for first and in memory, waits for its sync too."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk) as storage:
            await storage.writes.add_entry(make_frame(1, 0))
            steps = disk.device.steps
            disk.device.latency_s = lambda: 0.02
            slow = storage.writes.add_entry(make_frame(1, 1))
            storage.writes.write_lac(1, 1)
            await until(lambda: disk.device.steps == steps + 2)
            early = await storage.reads.follow_chunk(
                1, first_entry_id=1, sent=None, bytes_max=1_000
            )
            assert not slow.done()
            assert early is not None
            assert ([*early.frames], early.last_add_confirmed) == ([], 0)
            await slow
            late = await storage.reads.follow_chunk(
                1, first_entry_id=1, sent=early, bytes_max=1_000
            )
            assert late is not None
            assert ([*late.frames], late.last_add_confirmed) == ([make_frame(1, 1)], 1)

    run(main())


def test_an_entry_that_is_not_durable_yet_holds_back_one_who_is_far_behind() -> None:
    """Goal: many entries at once end before the same entry as they would one by one."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk) as storage:
            frames = [make_frame(1, entry_id) for entry_id in range(50)]
            await asyncio.gather(*map(storage.writes.add_entry, frames[:30]))
            disk.device.latency_s = lambda: 0.005
            slow = [storage.writes.add_entry(frame) for frame in frames[30:]]
            storage.writes.write_lac(1, 49)
            updates = follow(storage, 1, first_entry_id=0)
            update = await take(updates)
            assert ([*update.frames], update.last_add_confirmed) == (frames[:30], 29)
            assert not any(each.done() for each in slow)
            got = [*update.frames]
            while len(got) < len(frames):
                update = await take(updates)
                got += update.frames
                assert update.last_add_confirmed == len(got) - 1
                assert all(each.done() for each in slow[: len(got) - 30])
            assert got == frames
            await updates.aclose()

    run(main())


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_late_follower_gets_bounded_updates(is_whole: bool) -> None:
    """Goal: memory per follower is one chunk at any distance; each is complete to its LAC.

    Where every entry is held many are read at once; where some are not, as with striping, one by
    one, and the updates are no smaller for it.
    """

    async def main() -> None:
        async with open_storage(MemoryDisk()) as storage:
            held = [each for each in range(700) if is_whole or each % 3 != 1]
            await asyncio.gather(*(storage.writes.add_entry(make_frame(1, each)) for each in held))
            storage.writes.write_lac(1, 698)
            updates = follow(storage, 1, first_entry_id=10, chunk_bytes=500)
            kinds: list[bool] = []
            got: list[bytes] = []
            confirmed = 9
            while confirmed < 698:
                update = await take(updates)
                kinds.append(isinstance(update.frames, FrameRun))
                assert len(update.frames) >= 4 or update.last_add_confirmed == 698
                assert sum(map(len, update.frames)) <= 500
                got += map(bytes, update.frames)
                assert update.last_add_confirmed > confirmed
                confirmed = update.last_add_confirmed
                last = max(each for each in held if each <= confirmed)
                assert got[-1] == make_frame(1, last)
            assert got == [make_frame(1, each) for each in held if 10 <= each <= 698]
            assert sum(kinds) > len(kinds) / 2 if is_whole else not any(kinds)
            await nothing_comes_and_close(updates)

    run(main())


async def nothing_comes_and_close(updates: Updates) -> None:
    """Check that no update is ready, and end the follower by cancelling it."""
    waiting = await nothing_comes(updates)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_news_that_an_add_brings_does_not_wait_for_its_write() -> None:
    """Goal: what an add confirms is on disk already, so followers get it before the add."""

    async def main() -> None:
        async with open_storage(MemoryDisk()) as storage:
            await storage.writes.add_entry(make_frame(1, 0))
            unwritten: list[int] = []  # when they get the update
            commits = storage.core.log.commits
            end = storage.followers.watch(1, lambda: unwritten.append(commits.queue.pending_bytes))
            adding = storage.writes.add_entry(make_frame(1, 1, last_add_confirmed=0))
            assert unwritten == [commits.queue.pending_bytes]
            assert unwritten[0] > 0
            await adding
            end()

    run(main())


def test_followers_end_with_the_storage() -> None:
    """Goal: no follower waits for a storage that is closed or failed."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk) as storage:
            await storage.writes.add_entry(make_frame(1, 0))
            updates = follow(storage, 1, first_entry_id=0)
            await take(updates)
            waiting = await nothing_comes(updates)
            await storage.aclose()
            with pytest.raises(BookieUnavailableError):
                await waiting
        async with open_storage(disk) as storage:
            lac = storage.writes.write_lac(1, 0)
            updates = follow(storage, 1, first_entry_id=0)
            assert [*(await take(updates)).frames] == [make_frame(1, 0)]
            waiting = await nothing_comes(updates)
            disk.device.sync_error = "Input/output error"
            with pytest.raises(BookieStorageError):
                await storage.writes.add_entry(make_frame(1, 1))
            with pytest.raises(BookieStorageError):
                await lac
            with pytest.raises(BookieStorageError, match="Input/output error"):
                await waiting

    run(main())


def may_come(stream: FollowStream) -> bool:
    """Return whether the stream would be asked for another update."""
    return stream.has_news


def test_a_stream_looks_again_only_where_there_may_be_more() -> None:
    """Goal: one look per update; but an end that came before the last update is sent after it."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk) as storage:
            await storage.writes.add_entry(make_frame(1, 0))
            stream = FollowStream(
                storage.reads,
                storage.followers,
                Follow(7, 1, 0, 1000),
                chunk_bytes=1000,
                on_news=lambda _: None,
            )
            assert await stream.advance(1000) == Update(7, [], -1, fenced=False)
            assert not may_come(stream)
            storage.writes.write_lac(1, 0)
            assert may_come(stream)
            assert await stream.advance(1000) == Update(7, [make_frame(1, 0)], 0, fenced=False)
            assert not may_come(stream)
            await storage.writes.add_entry(make_frame(1, 1))
            await storage.writes.add_entry(make_frame(1, 2))
            lac = storage.writes.write_lac(1, 2)
            assert await stream.advance(100) == Update(7, [make_frame(1, 1)], 1, fenced=False)
            assert may_come(stream)
            disk.device.sync_error = "Input/output error"
            with pytest.raises(BookieStorageError):
                await storage.writes.add_entry(make_frame(1, 3))
            with pytest.raises(BookieStorageError):
                await lac
            assert await stream.advance(100) == Update(7, [make_frame(1, 2)], 2, fenced=False)
            assert may_come(stream)
            with pytest.raises(BookieStorageError, match="Input/output error"):
                await stream.advance(100)
            stream.close()

    run(main())


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_stream_that_sent_all_entries_learns_that_the_storage_ended(is_closed: bool) -> None:
    """Goal: a follower does not wait for a new entry that cannot come any more."""

    async def main() -> None:
        disk = MemoryDisk()
        async with open_storage(disk) as storage:
            storage.writes.write_lac(1, -1)
            reported: list[FollowStream] = []
            stream = FollowStream(
                storage.reads,
                storage.followers,
                Follow(7, 1, 0, 1000),
                chunk_bytes=1000,
                on_news=reported.append,
            )
            assert await stream.advance(1000) == Update(7, [], -1, fenced=False)
            assert not may_come(stream)
            if is_closed:
                await storage.aclose()
            else:
                disk.device.sync_error = "Input/output error"
                with pytest.raises(BookieStorageError):
                    await storage.writes.add_entry(make_frame(1, 0))
            assert stream in reported
            assert may_come(stream)
            with pytest.raises(BookieUnavailableError if is_closed else BookieStorageError):
                await stream.advance(1000)
            stream.close()

    run(main())


def test_many_followers_all_get_everything() -> None:
    """Goal: followers share nothing; one that stops does not hold the others."""

    async def main() -> None:
        async with open_storage(MemoryDisk(latency_s=lambda: 0.0001)) as storage:

            async def take_all(count: int) -> list[bytes]:
                got: list[bytes] = []
                updates = follow(storage, 1, first_entry_id=0)
                while len(got) < count:
                    got += map(bytes, (await take(updates)).frames)
                await updates.aclose()
                return got

            followers = [asyncio.ensure_future(take_all(count)) for count in (3, 50, 50, 20)]
            for entry_id in range(51):
                await storage.writes.add_entry(make_frame(1, entry_id))
            results = await asyncio.gather(*followers)
            expected = [make_frame(1, entry_id) for entry_id in range(50)]
            assert [each == expected[: len(each)] for each in results] == [True] * 4

    run(main())
