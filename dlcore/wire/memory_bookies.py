"""Bookies in memory behind the `BookieClient` port: for tests of code that uses ledgers.

They follow the protocol exactly (durable at once, fenced for good, never a wrong "no").  Therefore
code that works here and fails over the wire has a problem of transport.  `stop`, `start` and
`fail_next` make faults.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from dlcore.base.config import ENTRY_SIZE_BYTES_MAX
from dlcore.base.errors import (
    BadRequestError,
    BookieError,
    BookieReadOnlyError,
    BookieUnavailableError,
    DigestMismatchError,
    EntryTooLargeError,
    LedgerFencedError,
    NoSuchEntryError,
    NoSuchLedgerError,
    WrongIncarnationError,
)
from dlcore.wire.frames import decode_frame
from dlcore.wire.port import (
    ENTRY_ID_MAX,
    BookieClient,
    EntryRange,
    FollowUpdate,
    HeldEntries,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from dlcore.base.ids import BookieId
    from dlcore.wire.frames import FrameParts

_CHUNK_BYTES = 1024 * 1024


class _Ledger:
    def __init__(self) -> None:
        self.entries: dict[int, bytes] = {}
        self.last_add_confirmed = -1
        self.is_fenced = False


class MemoryBookie:
    """One bookie; tests may read and change its public attributes."""

    def __init__(self, bookie: BookieId) -> None:
        self.bookie = bookie
        self.is_read_only = False
        self.is_running = True
        self.is_silent = False
        """Requests get no answer at all, as from a frozen process; adds and LACs are lost."""
        self.requests = 0
        self._ledgers: dict[int, _Ledger] = {}
        self._faults: deque[BookieError] = deque()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Answer every request with `BookieUnavailableError` until `start`."""
        self.is_running = False
        self.wake()

    def start(self) -> None:
        """Answer again; the stored entries are still there."""
        self.is_running = True

    def fail_next(self, *errors: BookieError) -> None:
        """Answer the next requests with these errors, one each, and do not carry them out."""
        self._faults.extend(errors)

    def entries(self, ledger_id: int) -> dict[int, bytes]:
        """Return the frames of a ledger by entry id; a test may damage them in place."""
        return self._ledger(ledger_id).entries

    def is_fenced(self, ledger_id: int) -> bool:
        """Return whether the ledger takes no more ordinary adds here."""
        return self._ledger(ledger_id).is_fenced

    def check_in(self) -> None:
        """Raise an error if the bookie is stopped or `fail_next` asks for one."""
        self.requests += 1
        if not self.is_running:
            raise BookieUnavailableError(f"{self.bookie} is stopped")
        if self._faults:
            raise self._faults.popleft()

    def add_entry(self, frame: bytes, *, is_recovery: bool) -> None:
        """Store a frame."""
        if len(frame) > ENTRY_SIZE_BYTES_MAX:
            raise EntryTooLargeError(f"{self.bookie}: an entry of {len(frame)} bytes")
        entry = decode_frame(frame)
        _check_at_least(0, ledger_id=entry.ledger_id, entry_id=entry.entry_id)
        ledger = self._ledger(entry.ledger_id)
        # A recovery writes entries back after it has fenced the ledger.
        if not is_recovery:
            if ledger.is_fenced:
                raise LedgerFencedError(f"ledger {entry.ledger_id} is fenced on {self.bookie}")
            if self.is_read_only:
                raise BookieReadOnlyError(f"{self.bookie} is read-only")
        if ledger.entries.setdefault(entry.entry_id, frame) != frame:
            raise BadRequestError(
                f"{self.bookie} holds other bytes for {entry.ledger_id}:{entry.entry_id}"
            )
        ledger.last_add_confirmed = max(ledger.last_add_confirmed, entry.last_add_confirmed)
        self.wake()

    def write_lac(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Remember the LAC."""
        _check_at_least(0, ledger_id=ledger_id)
        _check_at_least(-1, last_add_confirmed=last_add_confirmed)
        ledger = self._ledger(ledger_id)
        ledger.last_add_confirmed = max(ledger.last_add_confirmed, last_add_confirmed)
        self.wake()

    def read_lac(self, ledger_id: int, *, fence: bool) -> int:
        """Return the LAC."""
        _check_at_least(0, ledger_id=ledger_id)
        if fence:
            self._fence(ledger_id)
        return self._require(ledger_id).last_add_confirmed

    def read_held(self, ledger_id: int) -> HeldEntries:
        """Return the LAC, and the ranges of entries held above it."""
        lac = self.read_lac(ledger_id, fence=False)
        ranges = [
            (max(each.first_entry_id, lac + 1), each.last_entry_id)
            for each in self.list_entries(ledger_id)
            if each.last_entry_id > lac
        ]
        return HeldEntries(lac, ENTRY_ID_MAX, ranges)

    def read_entry(self, ledger_id: int, entry_id: int, *, fence: bool) -> bytes:
        """Return a frame."""
        _check_at_least(0, ledger_id=ledger_id, entry_id=entry_id)
        if fence:
            self._fence(ledger_id)
        frame = self._require(ledger_id).entries.get(entry_id)
        if frame is None:
            raise NoSuchEntryError(f"{self.bookie} does not hold {ledger_id}:{entry_id}")
        return frame

    def list_entries(self, ledger_id: int) -> list[EntryRange]:
        """Return the ranges of entries held."""
        _check_at_least(0, ledger_id=ledger_id)
        ranges: list[EntryRange] = []
        for entry_id in sorted(self._require(ledger_id).entries):
            first = entry_id
            if ranges and ranges[-1].last_entry_id == entry_id - 1:
                first = ranges.pop().first_entry_id
            ranges.append(EntryRange(first_entry_id=first, last_entry_id=entry_id))
        return ranges

    def follow_update(self, ledger_id: int, next_entry_id: int) -> FollowUpdate:
        """Return the entries held from `next_entry_id` up to the LAC."""
        ledger = self._ledgers.get(ledger_id) or _Ledger()
        lac = ledger.last_add_confirmed
        held = sorted(e for e in ledger.entries if next_entry_id <= e <= lac)
        return FollowUpdate(
            frames=[ledger.entries[entry_id] for entry_id in held],
            last_add_confirmed=lac,
            fenced=ledger.is_fenced,
        )

    @property
    def next_change(self) -> asyncio.Event:
        """Set at the next change of anything stored, or when the bookie stops."""
        return self._changed

    def _fence(self, ledger_id: int) -> None:
        self._ledger(ledger_id).is_fenced = True
        self.wake()

    def _ledger(self, ledger_id: int) -> _Ledger:
        return self._ledgers.setdefault(ledger_id, _Ledger())

    def _require(self, ledger_id: int) -> _Ledger:
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            raise NoSuchLedgerError(f"{self.bookie} holds nothing of ledger {ledger_id}")
        return ledger

    def wake(self) -> None:
        """Make followers check the connection and the stored entries."""
        # The old one stays set, so that a follower which took it before its look misses nothing.
        self._changed.set()
        self._changed = asyncio.Event()


def _check_at_least(lowest: int, **values: int) -> None:
    for name, value in values.items():
        if value < lowest:
            raise BadRequestError(f"{name}={value}: expected at least {lowest}")


class MemoryBookieClient(BookieClient):
    """A `BookieClient` of the given bookies; every answer takes one turn of the loop."""

    def __init__(
        self,
        bookies: Iterable[MemoryBookie],
        *,
        add_timeout_s: float = 5.0,
        read_timeout_s: float = 5.0,
    ) -> None:
        self._add_timeout_s = add_timeout_s
        self._read_timeout_s = read_timeout_s
        self._bookies = {each.bookie: each for each in bookies}
        self._is_closed = False

    def add_entry(
        self, bookie: BookieId, frame: bytes | FrameParts, *, is_recovery: bool = False
    ) -> asyncio.Future[None]:
        """Store `frame`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_silent(bookie):
            self._expire_later(bookie, future)
            return future
        try:
            self._reach(bookie).add_entry(bytes(frame), is_recovery=is_recovery)
        except (BookieError, DigestMismatchError) as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        return future

    def write_lac(
        self, bookie: BookieId, *, ledger_id: int, last_add_confirmed: int
    ) -> asyncio.Future[None]:
        """Tell the bookie the LAC."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_silent(bookie):
            self._expire_later(bookie, future)
            return future
        try:
            self._reach(bookie).write_lac(ledger_id, last_add_confirmed)
        except BookieError as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        return future

    async def read_lac(self, bookie: BookieId, *, ledger_id: int, fence: bool) -> int:
        """Return the bookie's LAC."""
        return (await self._ask(bookie)).read_lac(ledger_id, fence=fence)

    def forget_free_memory(self) -> None:
        """Do nothing: no memory is kept here."""

    async def read_held(self, bookie: BookieId, *, ledger_id: int) -> HeldEntries:
        """Return the bookie's LAC, and the ranges of entries that it holds above it."""
        return (await self._ask(bookie)).read_held(ledger_id)

    async def read_entry(
        self, bookie: BookieId, *, ledger_id: int, entry_id: int, fence: bool
    ) -> bytes | memoryview:
        """Return one frame."""
        return (await self._ask(bookie)).read_entry(ledger_id, entry_id, fence=fence)

    async def read_entries(
        self,
        bookie: BookieId,
        *,
        ledger_id: int,
        first_entry_id: int,
        last_entry_id: int,
        stride: int = 1,
    ) -> AsyncGenerator[Sequence[bytes | memoryview], None]:
        """Stream frames in chunks."""
        chunk: list[bytes | memoryview] = []
        size = 0
        here = await self._contact(bookie)
        _check_at_least(first_entry_id, last_entry_id=last_entry_id)
        _check_at_least(1, stride=stride)
        for entry_id in range(first_entry_id, last_entry_id + 1, stride):
            try:
                frame = here.read_entry(ledger_id, entry_id, fence=False)
            except BookieError:
                if chunk:
                    yield chunk
                raise
            chunk.append(frame)
            size += len(frame)
            if size >= _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
                here = await self._contact(bookie)
        if chunk:
            yield chunk

    async def follow(
        self,
        bookie: BookieId,
        *,
        ledger_id: int,
        first_entry_id: int,
        take: Callable[[FollowUpdate], bool] | None = None,
    ) -> AsyncGenerator[FollowUpdate, None]:
        """Push updates as the LAC moves."""
        here = await self._contact(bookie)
        _check_at_least(0, ledger_id=ledger_id, first_entry_id=first_entry_id)
        next_entry_id = first_entry_id
        last: tuple[int, bool] | None = None
        while True:
            # Before the look, so that a change behind it is not missed.
            change = here.next_change
            update = here.follow_update(ledger_id, next_entry_id)
            known = (update.last_add_confirmed, update.fenced)
            if known != last:
                is_first, last = last is None, known
                next_entry_id = max(next_entry_id, update.last_add_confirmed + 1)
                if is_first or take is None or not take(update):
                    yield update
            await change.wait()
            if self._is_closed or not here.is_running:
                raise BookieUnavailableError(f"the connection to {bookie} broke")

    async def list_entries(self, bookie: BookieId, *, ledger_id: int) -> Sequence[EntryRange]:
        """Return the ranges of entries held."""
        return (await self._ask(bookie)).list_entries(ledger_id)

    async def aclose(self) -> None:
        """Break every connection; the bookies themselves stay."""
        self._is_closed = True
        for bookie in self._bookies.values():
            bookie.wake()

    def _is_silent(self, bookie: BookieId) -> bool:
        return bookie in self._bookies and self._bookies[bookie].is_silent

    def _expire_later(self, bookie: BookieId, future: asyncio.Future[None]) -> None:
        error = BookieUnavailableError(f"{bookie} did not answer within {self._add_timeout_s} s")

        def expire() -> None:
            if not future.done():
                future.set_exception(error)

        timer = asyncio.get_running_loop().call_later(self._add_timeout_s, expire)
        future.add_done_callback(lambda _: timer.cancel())

    async def _ask(self, bookie: BookieId) -> MemoryBookie:
        """Contact a bookie for one answer; fail if it does not come within the time-out."""
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await self._contact(bookie)
        except TimeoutError:
            raise BookieUnavailableError(
                f"{bookie} did not answer within {self._read_timeout_s} s"
            ) from None

    async def _contact(self, bookie: BookieId) -> MemoryBookie:
        await asyncio.sleep(0)
        while self._is_silent(bookie):
            await self._bookies[bookie].next_change.wait()
        return self._reach(bookie)

    def _reach(self, bookie: BookieId) -> MemoryBookie:
        if self._is_closed:
            raise BookieUnavailableError("the bookie client is closed")
        here = self._bookies.get(bookie)
        if here is None:
            if any(known.name == bookie.name for known in self._bookies):
                raise WrongIncarnationError(f"another incarnation answers for {bookie}")
            raise BookieUnavailableError(f"{bookie} is not known here")
        here.check_in()
        return here
