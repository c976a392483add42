"""Reads of a storage: entries, last adds confirmed, and lists of what it holds.

An answer is yes, a proven no, or an error that means unknown.  Reading that fences is answered when
the fence is durable, whatever the answer is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie.files.listed_ranges import ListedRanges
from bookie.ledger_state import check_id
from dlcore.errors import BadRequestError, NoSuchLedgerError
from dlcore.ledger.port import FollowUpdate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie.files.listed_ranges import RangePage
    from bookie.ledger_state import LedgerState
    from bookie.storage.status import StorageStatus
    from bookie.storage.storage_core import StorageCore
    from bookie.storage.writes import Writes


class Reads:
    """Answers what is asked of ledgers; used on one event loop only.

    All requests raise `BookieUnavailableError` once the storage is closed.  What needs the disk's
    writing half, a fence or a proven no, raises `BookieStorageError` once a write or sync failed.
    """

    def __init__(self, core: StorageCore, *, status: StorageStatus, writes: Writes) -> None:
        self._core = core
        self._status = status
        self._writes = writes

    async def read_lac(self, ledger_id: int, *, fence: bool) -> int:
        """Return the highest LAC known, -1 for none; with `fence`, fence first and durably.

        Raises:
            NoSuchLedgerError: without `fence`, for a ledger it knows nothing of.
            BadRequestError: the ledger was never made; BookieUnavailableError: that is not known.
            BookieReadOnlyError, BookieOverloadedError: no room for the fence now.
        """
        await self._prepare(ledger_id, fence=fence)
        return self._known_ledger(ledger_id).last_add_confirmed

    async def read_entry(self, ledger_id: int, entry_id: int, *, fence: bool) -> memoryview:
        """Return one verified frame; with `fence`, any answer comes after the fence is durable.

        Raises:
            NoSuchLedgerError, NoSuchEntryError: proven no.
            BookieStorageError: the entry cannot be read or is damaged.
            BookieReadOnlyError, BookieOverloadedError: no room for the fence now.
        """
        check_id("entry", entry_id)
        await self._prepare(ledger_id, fence=fence)
        reader = self._core.reader
        while (location := reader.find(ledger_id, entry_id)) is None:
            await reader.refuse_absent(ledger_id, entry_id)
        await self._core.log.commits.make_durable([location])
        return (await reader.read([location]))[0]

    async def read_chunk(
        self,
        ledger_id: int,
        *,
        first_entry_id: int,
        last_entry_id: int,
        stride: int = 1,
        bytes_max: int,
    ) -> Sequence[memoryview]:
        """Return the verified frames of entries first, first + stride, … ≤ last, as many as fit.

        They have at most `bytes_max` bytes, or are one frame; they end before the first entry that
        is not held.

        Raises:
            NoSuchLedgerError, NoSuchEntryError: the first entry is not held.
        """
        check_id("ledger", ledger_id)
        wanted = check_range(first_entry_id, last_entry_id, stride=stride, bytes_max=bytes_max)
        self._status.check_open()
        reader = self._core.reader
        frames = await reader.read_next(ledger_id, wanted, bytes_max=bytes_max)
        if frames is not None:
            return frames
        while not (chunk := reader.find_all(ledger_id, wanted, bytes_max=bytes_max)):
            await reader.refuse_absent(ledger_id, first_entry_id)
            self._status.check_open()
        await self._core.log.commits.make_durable(chunk)
        return await reader.read(chunk)

    async def follow_chunk(
        self, ledger_id: int, *, first_entry_id: int, told: FollowUpdate | None, bytes_max: int
    ) -> FollowUpdate | None:
        """Return what is new for a follower that was told `told`, or None.

        It is complete up to its own `last_add_confirmed`: an entry at or below it, from
        `first_entry_id` on, that is not among its frames is not held here.  A follower that is far
        behind gets the LAC in steps of `bytes_max` bytes of frames, or one frame.

        Raises:
            BookieStorageError: the storage failed, and all that could be read was delivered.
        """
        check_id("ledger", ledger_id)
        check_id("entry", first_entry_id)
        self._status.check_open()
        reader = self._core.reader
        state = self._core.ledgers.get(ledger_id)
        fenced = state is not None and state.is_fence_durable
        if (newest := reader.read_newest(ledger_id, first_entry_id)) is not None:
            return FollowUpdate([newest], first_entry_id, fenced)
        many = await reader.read_confirmed(ledger_id, first_entry_id, bytes_max=bytes_max)
        if many is not None:
            return FollowUpdate(many, first_entry_id + len(many) - 1, fenced)
        locations, confirmed = reader.find_confirmed(ledger_id, first_entry_id, bytes_max=bytes_max)
        known = told and (told.last_add_confirmed, told.fenced)
        if not locations and known == (confirmed, fenced):
            self._core.log.commits.check()
            return None
        frames = await reader.read(locations)
        return FollowUpdate(frames=frames, last_add_confirmed=confirmed, fenced=fenced)

    def may_tell_more(self, ledger_id: int, told: FollowUpdate) -> bool:
        """Return whether a follower who was told `told` just now may find more, or an error."""
        state = self._core.ledgers.get(ledger_id)
        if state is None or self._status.is_over:
            return True
        return told.last_add_confirmed < state.last_add_confirmed or state.is_fence_durable

    def list_entries(self, ledger_id: int) -> ListedRanges:
        """Return the ranges of durable entries, looked up step by step as they are read.

        Each step may raise NoSuchLedgerError, and BookieStorageError.
        """
        check_id("ledger", ledger_id)

        def look(first_entry_id: int) -> RangePage:
            self._status.check_open()
            self._known_ledger(ledger_id)
            return self._core.reader.durable_ranges(ledger_id, first_entry_id)

        return ListedRanges(look)

    async def _prepare(self, ledger_id: int, *, fence: bool) -> None:
        check_id("ledger", ledger_id)
        self._status.check_open()
        if fence:
            await self._writes.fence(ledger_id)

    def _known_ledger(self, ledger_id: int) -> LedgerState:
        state = self._core.ledgers.get(ledger_id)
        if state is None or state.is_deleted:
            self._core.log.commits.check()
            raise NoSuchLedgerError(f"ledger {ledger_id} is unknown here")
        return state


def check_range(first_entry_id: int, last_entry_id: int, *, stride: int, bytes_max: int) -> range:
    """Return the entries that a read of a range asks for, or raise `BadRequestError`."""
    check_id("entry", first_entry_id)
    check_id("entry", last_entry_id)
    if stride < 1 or bytes_max < 1 or last_entry_id < first_entry_id:
        raise BadRequestError(
            f"entries {first_entry_id} to {last_entry_id}, stride={stride} "
            f"bytes_max={bytes_max}: expected first <= last, and both >= 1"
        )
    return range(first_entry_id, last_entry_id + 1, stride)
