"""Bugs of a bookie's rules, put back on purpose: fences, answers, listings, what followers see."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING
from unittest.mock import patch

from bookie.files.entry_reader import EntryReader
from bookie.files.index import LedgerState, SealedIndex
from bookie.files.sealed_files import SealedHandles
from bookie.storage.reads import Reads
from bookie.storage.writes import Followers, Writes, ledger_for_change
from dlcore.base.config import MIB
from dlcore.base.errors import BookieStorageError, NoSuchEntryError
from dlcore.base.ids import INVALID_ENTRY_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bookie.disks.port import DiskFile
    from bookie.files.index import LedgerSummary, Location
    from bookie.storage.storage_core import StorageCore
    from dlcore.wire.frames import BytesLike


@contextlib.contextmanager
def negative_answers_before_the_fence_is_durable() -> Iterator[None]:
    """Still in BookKeeper: "no such entry" is answered while the fence is on its way to disk."""

    async def early_lac(self: Reads, ledger_id: int, *, fence: bool) -> int:
        core = self._core
        if fence and core.reader.find_all(ledger_id, range(1000), bytes_max=MIB) == []:
            return _fence_soon(core, ledger_id).last_add_confirmed
        return await read_lac(self, ledger_id, fence=fence)

    async def early_entry(
        self: Reads, ledger_id: int, entry_id: int, *, fence: bool, **more: int
    ) -> memoryview:
        if fence and self._core.reader.find(ledger_id, entry_id) is None:
            _fence_soon(self._core, ledger_id)
            raise NoSuchEntryError("not held, and the fence is not durable yet")
        return await read_entry(self, ledger_id, entry_id, fence=fence, **more)

    read_lac, read_entry = Reads.read_lac, Reads.read_entry
    with (
        patch.object(Reads, "read_lac", early_lac),
        patch.object(Reads, "read_entry", early_entry),
    ):
        yield


def _fence_soon(core: StorageCore, ledger_id: int) -> LedgerState:
    state = ledger_for_change(core, ledger_id)
    if not state.fenced:
        core.log.append_fence(ledger_id)
        state.fenced = True
    return state


@contextlib.contextmanager
def adds_are_answered_before_they_are_durable() -> Iterator[None]:
    """Section 4.2, `journalSyncData=false`: an add is answered when it is in the page cache."""
    add_entry = Writes.add_entry

    def early(self: Writes, frame: BytesLike, *, is_recovery: bool = False) -> asyncio.Future[None]:
        return _answered_at_once(add_entry(self, frame, is_recovery=is_recovery))

    with patch.object(Writes, "add_entry", early):
        yield


@contextlib.contextmanager
def explicit_lacs_are_answered_before_they_are_durable() -> Iterator[None]:
    """Section 4.2: a LAC that a crash forgets was called known."""
    write_lac = Writes.write_lac

    def early(self: Writes, ledger_id: int, last_add_confirmed: int) -> asyncio.Future[None]:
        return _answered_at_once(write_lac(self, ledger_id, last_add_confirmed))

    with patch.object(Writes, "write_lac", early):
        yield


def _answered_at_once(durable: asyncio.Future[None]) -> asyncio.Future[None]:
    if durable.done():
        return durable
    durable.add_done_callback(lambda done: done.cancelled() or done.exception())
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    answer.set_result(None)
    return answer


@contextlib.contextmanager
def fences_are_not_logged() -> Iterator[None]:
    """BOOKKEEPER-815: the fence is kept in memory only."""

    fence = Writes.fence

    async def forgetful(self: Writes, ledger_id: int) -> None:
        ledger_for_change(self._core, ledger_id).fenced = True
        await fence(self, ledger_id)

    with patch.object(Writes, "fence", forgetful):
        yield


@contextlib.contextmanager
def fences_of_unknown_ledgers_do_not_stick() -> Iterator[None]:
    """#4462: fence and add make a ledger's state each for itself, and one of them is lost."""
    fence = Writes.fence

    async def racing(self: Writes, ledger_id: int) -> None:
        ledgers = self._core.ledgers
        is_known = ledger_id in ledgers
        await fence(self, ledger_id)
        if not is_known:
            state = LedgerState()
            state.last_entry_id = ledgers[ledger_id].last_entry_id
            ledgers[ledger_id] = state

    with patch.object(Writes, "fence", racing):
        yield


@contextlib.contextmanager
def fences_refuse_recovery_adds() -> Iterator[None]:
    """Section 4.1: a fenced bookie takes nothing, not even what recovery writes back."""
    with patch.object(LedgerState, "accepts", lambda self, *, is_recovery: not self.fenced):
        yield


@contextlib.contextmanager
def footers_forget_fences() -> Iterator[None]:
    """BOOKKEEPER-815: once a file is sealed and the bookie restarted, its fences are gone."""
    summaries = SealedIndex.summaries

    def forgetful(self: SealedIndex) -> Iterator[LedgerSummary]:
        for each in summaries(self):
            yield each._replace(fenced=False)

    with patch.object(SealedIndex, "summaries", forgetful):
        yield


@contextlib.contextmanager
def damage_is_called_absence() -> Iterator[None]:
    """#2908: an entry that is damaged is answered with "no such entry"."""

    read_entry = Reads.read_entry

    async def careless(
        self: Reads, ledger_id: int, entry_id: int, *, fence: bool, **more: int
    ) -> memoryview:
        try:
            return await read_entry(self, ledger_id, entry_id, fence=fence, **more)
        except BookieStorageError as error:
            raise NoSuchEntryError(str(error)) from error

    with patch.object(Reads, "read_entry", careless):
        yield


@contextlib.contextmanager
def followers_get_what_is_not_confirmed() -> Iterator[None]:
    """Section 1.4: a follower is sent every entry that the bookie holds."""
    find = EntryReader.find_confirmed

    def eager(
        self: EntryReader, ledger_id: int, first_entry_id: int, *, bytes_max: int
    ) -> tuple[list[Location], int]:
        state = self._ledgers.get(ledger_id)
        if state is None:
            return [], INVALID_ENTRY_ID
        confirmed, state.last_add_confirmed = state.last_add_confirmed, state.last_entry_id
        try:
            return find(self, ledger_id, first_entry_id, bytes_max=bytes_max)
        finally:
            state.last_add_confirmed = confirmed

    with patch.object(EntryReader, "find_confirmed", eager):
        yield


@contextlib.contextmanager
def followers_are_never_forgotten() -> Iterator[None]:
    """#1108: who follows a ledger is remembered for ever, also when it is long gone."""

    def watch(self: Followers, ledger_id: int, callback: Callable[[], None]) -> Callable[[], None]:
        self._callbacks.setdefault(ledger_id, {})[callback] = None
        return lambda: None

    with patch.object(Followers, "watch", watch):
        yield


@contextlib.contextmanager
def open_files_are_not_counted() -> Iterator[None]:
    """#1757: sealed files that were read stay open, however many they are."""

    def keep(self: SealedHandles, number: int) -> DiskFile | None:
        with patch.object(self, "_open_files_max", 1 << 30):
            return file(self, number)

    file = SealedHandles.file
    with patch.object(SealedHandles, "file", keep):
        yield


MUTANTS = (
    adds_are_answered_before_they_are_durable,
    damage_is_called_absence,
    explicit_lacs_are_answered_before_they_are_durable,
    fences_are_not_logged,
    fences_of_unknown_ledgers_do_not_stick,
    fences_refuse_recovery_adds,
    followers_are_never_forgotten,
    followers_get_what_is_not_confirmed,
    footers_forget_fences,
    negative_answers_before_the_fence_is_durable,
    open_files_are_not_counted,
)
