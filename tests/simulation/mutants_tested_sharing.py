"""Bugs of what many share, that named tests catch: memory, turns, and the locks of logs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from unittest.mock import patch

from bookie.serving.connection import Taker, Turns
from bookie.serving.reads_in_progress import ReadBudget
from dlcore.log.metadata.store import WriterLocks
from dlcore.log.metadata.values import LockHolder
from dlcore.metadata.port import ANY_VERSION
from dlcore.metadata.stored import decode
from dlcore.proxy.membership import Membership
from dlcore.proxy.writing.owner import WriterOpener
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Collection, Iterator

    from dlcore.backends.direct.log import DirectLog
    from dlcore.log.metadata.values import LogKey

_BUDGET = "bookie/test_read_budget.py::test_{}".format
_TURNS = "bookie/test_turns.py::test_a_stream_that_asks_for_little_comes_before_busy_ones"
_LOCKS = "dlcore/log/test_broken_locks.py::test_{}".format
_OWNERS = "dlcore/proxy/test_owners.py::test_{}".format

# The bytes of a bookie that are on their way to readers


@caught_by(_BUDGET("free_memory_is_never_negative"))
def reads_take_what_is_not_free() -> Iterator[None]:
    """No caller waits for memory."""

    async def take(self: ReadBudget, size: int) -> None:
        self.free -= size

    with patch.object(ReadBudget, "take", take):
        yield


@caught_by(_BUDGET("a_waiting_reader_gets_its_turn"))
def small_reads_overtake_large_ones() -> Iterator[None]:
    """An entry that fits is taken, whichever waits: a large entry may never be read."""
    wait = ReadBudget.take

    async def take(self: ReadBudget, size: int) -> None:
        if size <= self.free:
            self.free -= size
        else:
            await wait(self, size)

    with patch.object(ReadBudget, "take", take):
        yield


@caught_by(_BUDGET("a_reader_that_leaves_while_it_waits_takes_nothing_along"))
def who_goes_in_its_turn_takes_bytes_along() -> Iterator[None]:
    """A caller that is cancelled in the moment when it gets its bytes never gives them back."""

    async def take(self: ReadBudget, size: int) -> None:
        if not self._waiters and size <= self.free:
            self.free -= size
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((size, future))
        await future

    with patch.object(ReadBudget, "take", take):
        yield


@caught_by(_BUDGET("a_chunk_is_a_share_of_what_is_free"))
def a_chunk_is_as_large_as_it_is_wanted() -> Iterator[None]:
    """A few readers who do not read take all that there is."""
    with patch.object(ReadBudget, "chunk_bytes", lambda self, wanted: min(wanted, self.bytes_max)):
        yield


# Turns of connections


@caught_by(_TURNS)
def all_connections_wait_in_one_queue() -> Iterator[None]:
    """A client that asks for little waits for all those that always have more."""
    wait = Turns._wait

    def behind(self: Turns, _: deque[Taker], taker: Taker) -> None:
        wait(self, self._busy, taker)

    with patch.object(Turns, "_wait", behind):
        yield


@caught_by(_TURNS)
def modest_connections_come_first_as_long_as_there_are_any() -> Iterator[None]:
    """Those who have more starve while many ask for little."""

    def run(self: Turns) -> None:
        queue = self._modest or self._busy
        if queue:
            taker = queue.popleft()
            taker.waits_for_turn = False
            self._serve(taker)
        self._is_due = bool(self._modest or self._busy)
        if self._is_due:
            self._loop.call_soon(self._run)

    with patch.object(Turns, "_run", run):
        yield


# Locks of owners that are gone


@caught_by(_OWNERS("a_client_that_cannot_reach_the_right_owner_is_served_here"))
def a_client_that_does_not_reach_an_owner_is_proof_enough() -> Iterator[None]:
    """A lock is broken though this proxy would reach its owner."""

    async def is_gone(_: Membership, __: str) -> bool:
        return True

    with patch.object(Membership, "is_gone", is_gone):
        yield


@caught_by(_OWNERS("a_lock_is_broken_on_the_word_of_a_client_and_ones_own_look"))
def an_owner_that_refuses_this_proxy_is_proof_enough() -> Iterator[None]:
    """A lock is broken though no client said that it did not reach its owner."""
    makes_way = WriterOpener._makes_way

    async def eager(self: WriterOpener, log: DirectLog, owner: str, _: Collection[str]) -> bool:
        return await makes_way(self, log, owner, [owner])

    with patch.object(WriterOpener, "_makes_way", eager):
        yield


class _OtherClient:
    """A store that does not know its own session."""

    def __init__(self, store: object) -> None:
        self._store = store
        self.session_token = -1

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@caught_by(_OWNERS("a_lock_of_a_proxy_itself_is_never_taken_for_one_that_was_left"))
def a_lock_of_ones_own_session_is_broken() -> Iterator[None]:
    """It has the same owner as one that an earlier process at the same place left."""
    break_one = WriterLocks.break_one

    async def careless(self: WriterLocks, log: LogKey, owner: str) -> bool:
        store = self._store
        self._store = _OtherClient(store)  # type: ignore[assignment]
        try:
            return await break_one(self, log, owner)
        finally:
            self._store = store

    with patch.object(WriterLocks, "break_one", careless):
        yield


@caught_by(_LOCKS("the_lock_of_the_one_that_was_meant_is_deleted"))
def every_holder_of_a_lock_loses_it() -> Iterator[None]:
    """Between the look at the owner and its end another one may have taken the lock."""
    break_one = WriterLocks.break_one

    async def careless(self: WriterLocks, log: LogKey, _: str) -> bool:
        path = self._paths.log_of(log.log_id).lock
        node = await self._store.get(path, fresh=True)
        found = "" if node is None else decode(LockHolder, node.value, source=path).owner
        return await break_one(self, log, found)

    with patch.object(WriterLocks, "break_one", careless):
        yield


@caught_by(_LOCKS("a_lock_whose_owner_is_at_work_stays"))
def a_lock_is_broken_whatever_became_of_it() -> Iterator[None]:
    """The version that was looked at is not compared."""
    break_one = WriterLocks.break_one

    async def blind(self: WriterLocks, log: LogKey, owner: str) -> bool:
        delete = self._store.delete

        async def any_version(path: str, *, version: int) -> None:
            assert version != ANY_VERSION
            await delete(path, version=ANY_VERSION)

        with patch.object(self._store, "delete", any_version):
            return await break_one(self, log, owner)

    with patch.object(WriterLocks, "break_one", blind):
        yield
