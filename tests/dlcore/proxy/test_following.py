"""Messages to many readers go together where they are slower than the records come."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import pytest

from dlcore.base.errors import LedgerReadError
from dlcore.base.ids import DLSN
from dlcore.proxy.reading.delivery import Deliveries, Reading
from dlcore.proxy.reading.following import FollowedLogs
from dlcore.proxy.reading.kept import KeptMessages
from dlcore.proxy.reading.outgoing import Outgoing
from dlcore.proxy.reading.ring import RUN_BYTES, RingBudget
from dlcore.proxy.reading.rows import RowView
from tests.dlcore.proxy.test_runs import entry, values
from tests.fixtures.lateness import run_in_own_time

if TYPE_CHECKING:
    from dlcore.base.errors import DLError
    from dlcore.log.reading.entry_rows import EntryRows

VIEW = RowView("a", None, ["dlsn", "value"])
BEGIN = DLSN(1, 0, 0)
WAIT_S = 30


class GrowingLog:
    """A log whose reader takes all entries that have come."""

    name = log_id = "a"

    def __init__(self) -> None:
        self.entries: list[EntryRows] = []
        self.error: DLError | None = None
        self.more = asyncio.Event()

    def grow(self, number: int, *, size: int = 100) -> None:
        """Let an entry with one record come."""
        self.entries.append(entry(number, 1, size=size))
        self.more.set()

    async def open_reader(self, *, dlsn: DLSN) -> GrowingLog:
        """Read from the beginning."""
        assert dlsn == BEGIN
        return self

    async def take_entries(self) -> list[EntryRows]:
        """Wait for entries."""
        await self.more.wait()
        self.more.clear()
        if self.error is not None:
            raise self.error
        taken, self.entries = self.entries, []
        return taken

    async def __aenter__(self) -> GrowingLog:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class Client:
    """The messages of one follower; it takes a message when it is let."""

    def __init__(self) -> None:
        self.got: list[list[bytes]] = []
        self.came = asyncio.Event()
        self.may_take = asyncio.Event()

    async def send(self, message: bytes) -> None:
        """Take it."""
        self.got.append(values(message))
        self.came.set()
        await self.may_take.wait()

    async def wait_for(self, count: int) -> list[list[bytes]]:
        """Wait for so many messages."""
        async with asyncio.timeout(WAIT_S):
            while len(self.got) < count:
                self.came.clear()
                await self.came.wait()
        return self.got


def _readers_of(followed: FollowedLogs) -> int:
    return sum(
        sum(known.ring._waiting.values())
        for log in followed
        for known in log._rings._rings.values()
    )


async def _followed(
    clients: int, end: int, start: DLSN = BEGIN
) -> tuple[GrowingLog, list[Client], asyncio.Future[Any]]:
    """Let clients follow a log until they have the entries before `end`."""
    log = GrowingLog()
    followed = FollowedLogs(RingBudget(1 << 20))
    deliveries = Deliveries(followed, Outgoing(1 << 20), KeptMessages(0), catching_up_max=1)
    reading = Reading(
        log=cast("Any", log),
        view=VIEW,
        start=start,
        end=DLSN(1, end, 0),
        known_end=BEGIN,
        follow=True,
    )
    followers = [Client() for _ in range(clients)]
    all_done = asyncio.gather(*(deliveries.deliver(reading, each.send) for each in followers))
    async with asyncio.timeout(WAIT_S):
        while _readers_of(followed) < clients:  # noqa: ASYNC110  # nothing tells it
            await asyncio.sleep(0)
    return log, followers, all_done


def test_entries_that_come_during_a_send_go_together() -> None:
    """One message with all of it follows, instead of one each, up to what one may have."""

    async def follow() -> None:
        log, (first, second), all_done = await _followed(2, end=6)
        log.grow(0)
        for each in (first, second):
            await each.wait_for(1)
        for number, size in ((1, 100), (2, 100), (3, 100), (4, RUN_BYTES), (5, 100)):
            log.grow(number, size=size)
            while log.entries:  # noqa: ASYNC110  # nothing tells it
                await asyncio.sleep(0)
        for each in (first, second):
            each.may_take.set()
        await asyncio.wait_for(all_done, WAIT_S)
        for each in (first, second):
            assert each.got == [[b"0:0"], [b"1:0", b"2:0", b"3:0"], [b"4:0"], [b"5:0"]]

    run_in_own_time(follow())


def test_a_reader_that_begins_behind_the_last_record_of_an_entry_does_not_get_it() -> None:
    """Its records come with the next one."""

    async def follow() -> None:
        log, (client,), all_done = await _followed(1, end=2, start=DLSN(1, 0, 5))
        client.may_take.set()
        for number in range(2):
            log.grow(number)
            while log.entries:  # noqa: ASYNC110  # nothing tells it
                await asyncio.sleep(0)
        await asyncio.wait_for(all_done, WAIT_S)
        assert client.got == [[b"1:0"]]

    run_in_own_time(follow())


def test_a_reader_that_leaves_a_broken_log_takes_nothing_from_later_ones() -> None:
    """They share one that follows it anew, until the last of them leaves."""

    async def follow() -> None:
        log: Any = GrowingLog()
        followed = FollowedLogs(RingBudget(1 << 20))
        with ExitStack() as early:
            broken = early.enter_context(followed.follow(log, BEGIN))
            log.error = LedgerReadError("an entry is lost")
            log.more.set()
            await asyncio.wait_for(broken.task, WAIT_S)
            with pytest.raises(LedgerReadError, match="lost"):
                broken.require_unbroken()
            log.error = None
            with followed.follow(log, BEGIN) as sound:
                assert sound is not broken
                early.close()
                with followed.follow(log, BEGIN) as shared:
                    assert shared is sound
                    assert repr(shared).endswith("2 readers>")
        assert not len(followed)
        await followed.aclose()

    run_in_own_time(follow())
