"""Reads of a storage: entries, last adds confirmed, and lists of held entries.

The answer to a read is an entry, a proof that the entry is absent, or an error: then it is unknown
whether the entry is held.  A read with fencing is answered only when the fence is durable, whatever
the answer is.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from bookie.files.entry_reader import check_room
from bookie.files.entry_runs import ListedRanges
from bookie.storage.writes import check_id
from dlcore.base.errors import BadRequestError, NoSuchLedgerError
from dlcore.wire.messages import HELD_RANGES_MAX
from dlcore.wire.port import ENTRY_ID_MAX, FollowUpdate, HeldEntries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie.files.entry_runs import RangePage
    from bookie.files.index import LedgerState
    from bookie.storage.status import StorageStatus
    from bookie.storage.storage_core import StorageCore
    from bookie.storage.writes import Writes


_FRAME_BYTES_MAX = 2**32 - 1
"""Largest frame: the protocol and the files state its size in 32 bits."""
_ABSENT_MAX = 64
"""Most entries whose absence is proven for one answer of `read_held`; the answer ends before the
next."""


class Reads:
    """Reads of ledgers; used on one event loop only.

    All methods raise `BookieUnavailableError` once the storage is closed.  After a failed write or
    sync, methods that have to write a fence or to prove absence raise `BookieStorageError`.
    """

    def __init__(self, core: StorageCore, *, status: StorageStatus, writes: Writes) -> None:
        self._core = core
        self._status = status
        self._writes = writes

    async def read_lac(self, ledger_id: int, *, fence: bool) -> int:
        """Return the highest known LAC, -1 for none; with `fence`, fence durably first.

        Raises:
            NoSuchLedgerError: the ledger is unknown here; not with `fence`.
            BadRequestError: the ledger was never created; BookieUnavailableError: this is not
                known.
            BookieReadOnlyError, BookieOverloadedError: there is no space for the fence now.
        """
        await self._prepare(ledger_id, fence=fence)
        return self._known_ledger(ledger_id).last_add_confirmed

    async def read_held(self, ledger_id: int) -> HeldEntries:
        """Return the highest known LAC, and the durable entries above it.

        Raises:
            NoSuchLedgerError: the ledger is unknown here.
            BookieStorageError: absence of entries cannot be proven.
        """
        check_id("ledger", ledger_id)
        self._status.check_open()
        while True:
            # Again from the beginning if an entry was added during the proof, which is then void.
            lac = self._known_ledger(ledger_id).last_add_confirmed
            firsts, lasts, next_entry_id = self._core.reader.durable_ranges(ledger_id, lac + 1)
            known_to = ENTRY_ID_MAX if next_entry_id is None else next_entry_id - 1
            ranges = list(zip(firsts, lasts, strict=True))
            # Cut to one message; the reader asks again from `known_to` on.
            if len(ranges) > HELD_RANGES_MAX:
                known_to = ranges[HELD_RANGES_MAX][0] - 1
                del ranges[HELD_RANGES_MAX:]
            proved_to = await self._prove_absent(ledger_id, lac, ranges)
            if proved_to is not None:
                return _held_entries(lac, min(known_to, proved_to), ranges)

    async def _prove_absent(
        self, ledger_id: int, lac: int, ranges: Sequence[tuple[int, int]]
    ) -> int | None:
        """Prove that no entry beside `ranges` is held; return how far, None if one was added.

        An entry that is accepted and not durable yet is not held, and needs no proof.
        """
        reader = self._core.reader
        self._core.log.commits.check()
        # Read before any wait: an entry above it that comes later was not durable at the call.
        end = max(self._known_ledger(ledger_id).last_entry_id, lac)
        starts = [lac + 1, *(last + 1 for _, last in ranges)]
        ends = [*(first for first, _ in ranges), max(end + 1, starts[-1] + 1)]
        absent = chain.from_iterable(map(range, starts, ends))
        for entry_id in islice(absent, _ABSENT_MAX):
            if reader.find(ledger_id, entry_id) is None:
                await reader.prove_absent(ledger_id, entry_id)
                if reader.find(ledger_id, entry_id) is not None:
                    return None
        unproved = next(absent, None)
        return ENTRY_ID_MAX if unproved is None else unproved - 1

    async def read_entry(
        self, ledger_id: int, entry_id: int, *, fence: bool, bytes_max: int = _FRAME_BYTES_MAX
    ) -> memoryview:
        """Return one verified frame; with `fence`, any answer comes after the fence is durable.

        Raises:
            LargerEntryError: it has more than `bytes_max` bytes.
            NoSuchLedgerError, NoSuchEntryError: the absence is proven.
            BookieStorageError: the entry cannot be read or is damaged.
            BookieReadOnlyError, BookieOverloadedError: there is no space for the fence now.
        """
        check_id("entry", entry_id)
        await self._prepare(ledger_id, fence=fence)
        reader = self._core.reader
        # A loop, because the entry may be added while its absence is being proven.
        while (location := reader.find(ledger_id, entry_id)) is None:
            await reader.refuse_absent(ledger_id, entry_id)
        check_room(location.size, bytes_max)
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

        The frames have at most `bytes_max` bytes, and end before the first entry that is not held.

        Raises:
            LargerEntryError: the first frame alone has more.
            NoSuchLedgerError, NoSuchEntryError: the first entry is not held.
        """
        check_id("ledger", ledger_id)
        wanted = check_range(first_entry_id, last_entry_id, stride=stride, bytes_max=bytes_max)
        self._status.check_open()
        reader = self._core.reader
        frames = await reader.read_next(ledger_id, wanted, bytes_max=bytes_max)
        if frames is not None:
            return frames
        # A loop, because the entry may be added while its absence is being proven.
        while not (chunk := reader.find_all(ledger_id, wanted, bytes_max=bytes_max)):
            await reader.refuse_absent(ledger_id, first_entry_id)
            self._status.check_open()
        await self._core.log.commits.make_durable(chunk)
        return await reader.read(chunk)

    async def follow_chunk(
        self, ledger_id: int, *, first_entry_id: int, sent: FollowUpdate | None, bytes_max: int
    ) -> FollowUpdate | None:
        """Return the news for a follower that has received `sent`, None if there are none.

        The update is complete up to its own `last_add_confirmed`: an entry at or below it, from
        `first_entry_id` on, that is not among its frames is not held here.  A follower that is far
        behind gets the LAC in steps of `bytes_max` bytes of frames.

        Raises:
            LargerEntryError: the first frame alone has more.
            BookieStorageError: the storage failed, and every readable entry was delivered.
        """
        check_id("ledger", ledger_id)
        check_id("entry", first_entry_id)
        self._status.check_open()
        reader = self._core.reader
        state = self._core.ledgers.get(ledger_id)
        fenced = state is not None and state.is_fence_durable
        # The two common cases first: a follower that is up to date, and one that is far behind.
        newest = reader.read_newest(ledger_id, first_entry_id, bytes_max=bytes_max)
        if newest is not None:
            return FollowUpdate([newest], first_entry_id, fenced)
        many = await reader.read_confirmed(ledger_id, first_entry_id, bytes_max=bytes_max)
        if many is not None:
            return FollowUpdate(many, first_entry_id + len(many) - 1, fenced)
        locations, confirmed = reader.find_confirmed(ledger_id, first_entry_id, bytes_max=bytes_max)
        known = sent and (sent.last_add_confirmed, sent.fenced)
        if not locations and known == (confirmed, fenced):
            # After a failure no news can come: the follower must go to another bookie.
            self._core.log.commits.check()
            return None
        frames = await reader.read(locations)
        return FollowUpdate(frames=frames, last_add_confirmed=confirmed, fenced=fenced)

    def may_have_news(self, ledger_id: int, sent: FollowUpdate) -> bool:
        """Return whether a follower that has received `sent` may find more, or an error."""
        state = self._core.ledgers.get(ledger_id)
        if state is None or self._status.is_over:
            return True
        return sent.last_add_confirmed < state.last_add_confirmed or state.is_fence_durable

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
        # Before the lookup: what is absent behind the fence can be added by a recovery only.
        if fence:
            await self._writes.fence(ledger_id)

    def _known_ledger(self, ledger_id: int) -> LedgerState:
        state = self._core.ledgers.get(ledger_id)
        if state is None or state.is_deleted:
            # After a failed write the bookie may know too little to say that it has no ledger.
            self._core.log.commits.check()
            raise NoSuchLedgerError(f"ledger {ledger_id} is unknown here")
        return state


def _held_entries(lac: int, known_to: int, ranges: Sequence[tuple[int, int]]) -> HeldEntries:
    """Return the answer about entries up to `known_to`."""
    sent = [(first, min(last, known_to)) for first, last in ranges if first <= known_to]
    return HeldEntries(lac, known_to, sent)


def check_range(first_entry_id: int, last_entry_id: int, *, stride: int, bytes_max: int) -> range:
    """Return the entries of a range to read, or raise `BadRequestError`."""
    check_id("entry", first_entry_id)
    check_id("entry", last_entry_id)
    if stride < 1 or bytes_max < 1 or last_entry_id < first_entry_id:
        raise BadRequestError(
            f"entries {first_entry_id} to {last_entry_id}, stride={stride} "
            f"bytes_max={bytes_max}: expected first <= last, stride >= 1, bytes_max >= 1"
        )
    return range(first_entry_id, last_entry_id + 1, stride)
