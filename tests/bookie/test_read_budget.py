"""Bytes on their way to readers: in turn, and none is lost when a reader goes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, strategies as st

from bookie.files.entry_reader import LargerEntryError
from bookie.serving.reads_in_progress import ReadBudget
from dlcore.base.errors import BookieOverloadedError
from tests.fixtures.aio import run

MAX = 1_000
READS = st.lists(
    st.tuples(
        st.integers(1, MAX),  # wanted
        st.integers(1, MAX),  # what the next entry needs
        st.integers(0, 3),  # turns of the loop that reading takes
        st.integers(0, 3),  # turns until the network has taken it
        st.integers(0, 12),  # the turn in which the reader goes
    ),
    max_size=30,
)


def test_a_waiting_reader_gets_its_turn() -> None:
    """No reader overtakes, also if it wants less."""

    async def main() -> None:
        waits: list[int] = []
        budget = ReadBudget(MAX, on_wait=lambda: waits.append(1))
        await budget.take(700)
        taken: list[str] = []

        async def take(name: str, size: int) -> None:
            await budget.take(size)
            taken.append(name)

        async with asyncio.TaskGroup() as group:
            for name, size in (("large", 600), ("small", 100), ("other", 300)):
                group.create_task(take(name, size))
            await asyncio.sleep(0)
            assert (taken, len(waits), budget.is_exhausted) == ([], 3, True)
            budget.give(300)
            await asyncio.sleep(0)
            assert taken == ["large"]
            budget.give(400)
        assert taken == ["large", "small", "other"]
        assert (budget.free, budget.is_exhausted) == (0, False)

    run(main())


def test_a_chunk_is_a_share_of_what_is_free() -> None:
    """Many readers of large ranges leave room for one more; none gets less than a small chunk."""
    mib = 1 << 20
    budget = ReadBudget(64 * mib, on_wait=lambda: None)

    async def main() -> None:
        sizes: list[int] = []
        while not sizes or sizes[-1] > 64 * 1024:
            sizes.append(budget.chunk_bytes(8 * mib))
            assert sizes[-1] <= budget.free  # or its reader waits
            await budget.take(sizes[-1])
        assert (sizes[0], sizes[1]) == (8 * mib, 7 * mib)
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) > 30
        assert budget.chunk_bytes(100) == 100

    run(main())
    assert ReadBudget(100, on_wait=lambda: None).chunk_bytes(mib) == 100


def test_a_reader_that_leaves_while_it_waits_takes_nothing_along() -> None:
    """Before its turn, and in the very moment of it; those behind it go on."""

    async def main() -> None:
        budget = ReadBudget(MAX, on_wait=lambda: None)
        await budget.take(MAX)
        first, second, third = (asyncio.create_task(budget.take(400)) for _ in range(3))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        budget.give(400)  # the second has its turn, and does not know it yet
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await asyncio.wait_for(third, 60)
        assert (first.cancelled(), second.cancelled()) == (True, True)
        assert (budget.free, budget.is_exhausted) == (0, False)

    run(main())


@given(reads=READS)
def test_free_memory_is_never_negative(
    reads: list[tuple[int, int, int, int, int]],
) -> None:
    """For all sizes of requests and entries, and for readers that leave at any time.

    Each reader gets its entry unless it goes; in the end all is free again.
    """

    async def main() -> None:
        budget = ReadBudget(MAX, on_wait=lambda: None)
        in_memory = 0

        async def one(wanted: int, entry: int, reading: int, sending: int) -> str:
            nonlocal in_memory

            async def read(bytes_max: int) -> int:
                nonlocal in_memory
                if entry > bytes_max:
                    raise LargerEntryError(entry)
                in_memory += bytes_max
                try:
                    for _ in range(reading):
                        await asyncio.sleep(0)
                finally:
                    in_memory -= bytes_max
                return entry

            size, held = await budget.within(wanted, read)
            assert size <= held
            in_memory += size
            budget.give(held - size)
            try:
                for _ in range(sending):
                    await asyncio.sleep(0)
            finally:
                in_memory -= size
                budget.give(size)
            return "sent"

        tasks = [asyncio.create_task(one(*each[:4])) for each in reads]
        for turn in range(13):
            for task, each in zip(tasks, reads, strict=True):
                if each[4] == turn:
                    task.cancel()
            await asyncio.sleep(0)
            assert 0 <= budget.free <= MAX - in_memory
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert {str(end) for end in ends} <= {"sent", ""}  # of those that went
        assert (budget.free, budget.is_exhausted, in_memory) == (MAX, False, 0)

    run(main())


def test_an_entry_that_no_room_suffices_for_is_refused() -> None:
    """Neither it nor a read that fails keeps bytes of the budget."""

    async def main() -> None:
        budget = ReadBudget(MAX, on_wait=lambda: None)

        async def read(_: int) -> None:
            raise LargerEntryError(MAX + 1)

        with pytest.raises(BookieOverloadedError, match=r"1001 bytes, .* read_bytes_max=1000"):
            await budget.within(10, read)

        async def fail(_: int) -> None:
            raise OSError("the disk")

        with pytest.raises(OSError, match="the disk"):
            await budget.within(10, fail)
        assert budget.free == MAX

    run(main())


def test_bytes_that_were_not_taken_cannot_be_given_back() -> None:
    """Otherwise reads could hold more bytes than the limit."""
    budget = ReadBudget(MAX, on_wait=lambda: None)
    for size in (-1, 1):
        with pytest.raises(ValueError, match="bytes given back of 0 taken"):
            budget.give(size)
