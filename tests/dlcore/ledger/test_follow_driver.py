"""Goal: the driver of a follower keeps streams open no longer than needed, and hides no defect.

Method: a ledger that only pushes what a test says.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import LedgerReadError
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ledger.reading.follow_driver import LedgerFollower
from dlcore.wire.port import FollowUpdate
from tests.fixtures.ledgers import entry_of, frame_of, metadata_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata
    from dlcore.ledger.port import Follower
    from dlcore.ledger.reading.follow import FollowStep
    from dlcore.wire.frames import EntryFrame
    from dlcore.wire.port import HeldEntries

OPEN = metadata_of((0, "ABC"))


class Ledger:
    """A `FollowedLedger` of a bookie that pushes, and of ranges that are read entry by entry."""

    def __init__(self, metadata: LedgerMetadata = OPEN) -> None:
        self.metadata = metadata
        self.pushes: asyncio.Queue[FollowUpdate] = asyncio.Queue()
        self.take: Callable[[FollowUpdate], bool] | None = None
        self.ranges: list[tuple[int, int]] = []
        self.open_ranges = 0

    @contextmanager
    def informing(self, _: Follower) -> Iterator[None]:
        """Have no news."""
        yield

    async def refresh(self, *, fresh: bool = False) -> LedgerMetadata:
        """Return the same metadata."""
        del fresh
        return self.metadata

    async def read_last_add_confirmed(self) -> int:
        """Know nothing."""
        return -1

    async def updates(
        self, _: BookieId, __: int, take: Callable[[FollowUpdate], bool]
    ) -> AsyncGenerator[FollowUpdate, None]:
        """Yield what the test pushes; `take` is for its use, too."""
        self.take = take
        while True:
            yield await self.pushes.get()

    async def ask_all(
        self, _: Sequence[BookieId], __: Callable[[], None]
    ) -> Sequence[tuple[BookieId, HeldEntries]]:
        """Answer nothing."""
        return ()

    async def disprove(self, _: Ensemble, *, vouched: int, claimed: int) -> int:
        """Believe each LAC."""
        del vouched
        return claimed

    async def read(self, first: int, last: int) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield them one by one."""
        self.ranges.append((first, last))
        self.open_ranges += 1
        try:
            for entry_id in range(first, last + 1):
                yield [entry_of(entry_id)]
        finally:
            self.open_ranges -= 1


def follow(
    ledger: Ledger, on_entry: Callable[[EntryFrame], bool] = lambda _: False
) -> AsyncGenerator[FollowStep, None]:
    """Follow it from its first entry on."""
    return LedgerFollower(ledger, first=0, on_answer=lambda: None, on_entry=on_entry).steps()


def pushed(*ids: int, lac: int) -> FollowUpdate:
    """Return an update."""
    return FollowUpdate([frame_of(each) for each in ids], lac, fenced=False)


def test_a_range_is_left_behind_its_last_entry() -> None:
    """Its bookies' streams end while the caller works at that entry, not when it goes on."""

    async def scenario() -> None:
        ledger = Ledger(metadata_of((0, "ABC"), state=LedgerState.CLOSED, last_entry_id=2))
        async with aclosing(follow(ledger)) as steps:
            for is_open in (1, 1, 0):
                await anext(steps)
                await asyncio.sleep(0.01)
                assert ledger.open_ranges == is_open

    asyncio.run(scenario())


def test_a_slow_caller_gets_updates_in_order_and_none_is_taken_at_once() -> None:
    """The next one waits until the caller is done with the one before."""

    async def scenario() -> None:
        ledger = Ledger()
        async with aclosing(follow(ledger)) as steps:
            ledger.pushes.put_nowait(pushed(lac=-1))
            assert not (await anext(steps)).frames
            first = asyncio.ensure_future(anext(steps))
            await asyncio.sleep(0.01)
            assert ledger.take is not None
            assert ledger.take(pushed(0, 2, lac=2))  # the caller works at them, step by step
            assert not ledger.take(pushed(3, lac=3))
            for entry_id in (3, 4, 5):
                ledger.pushes.put_nowait(pushed(entry_id, lac=entry_id))
            await asyncio.sleep(0.01)
            got = await first
            for entry_id, not_fetched in enumerate((2, 2, 2, 2, 1)):
                assert [each.entry_id for each in got.frames] == [entry_id]
                await asyncio.sleep(0.01)
                assert not ledger.take(pushed(9, lac=9))
                assert ledger.pushes.qsize() == not_fetched
                got = await anext(steps)
            assert ledger.ranges == [(1, 1)]  # no update took the place of one in work

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [ZeroDivisionError("defect"), LedgerReadError("a defect, too")])
@pytest.mark.parametrize("is_at_once", [True, False])
def test_a_defect_in_the_middle_of_an_update_ends_the_follower(
    error: Exception, *, is_at_once: bool
) -> None:
    """The caller gets it; it is not taken for a failure of the bookie, which loses the entry."""

    async def scenario() -> None:
        ledger = Ledger()

        def refuse(_: EntryFrame) -> bool:
            raise error

        async with aclosing(follow(ledger, refuse)) as steps:
            ledger.pushes.put_nowait(pushed(lac=-1))
            await anext(steps)
            step = asyncio.ensure_future(anext(steps))
            await asyncio.sleep(0.01)
            assert ledger.take is not None
            if is_at_once:
                assert ledger.take(pushed(0, lac=0))
            else:
                ledger.pushes.put_nowait(pushed(0, lac=0))
            with pytest.raises(type(error), match="defect"):
                await asyncio.wait_for(step, 10)

    asyncio.run(scenario())
