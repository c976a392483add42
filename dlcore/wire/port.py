"""The port to bookies: the requests of the ledger client; over sockets or in memory behind it.

An answer about an entry has three values.  *Yes* is a returned frame; *proven no* is
`NoSuchEntryError` or `NoSuchLedgerError`; every other error is *unknown* and must never be read as
"no".
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, cast, overload

import numpy as np

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Callable, Iterable

    from numpy.typing import NDArray

    from dlcore.base.errors import DLError
    from dlcore.base.ids import BookieId
    from dlcore.wire.frames import FrameParts


OnAnswer: TypeAlias = "Callable[[DLError | None], None]"
"""Gets the answer to a write: its error, None for success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRange:
    """Entries `first_entry_id` to `last_entry_id`, both included."""

    first_entry_id: int
    last_entry_id: int


ENTRY_ID_MAX = 2**63 - 1


class HeldEntries(NamedTuple):
    """The entries of a ledger that a bookie holds above the LAC that it knows.

    From its LAC up to `known_to`, exactly the entries in `ranges` are durable there: pairs of first
    and last entry, ascending and apart.  Entries above `known_to` are unknown.
    """

    last_add_confirmed: int
    known_to: int
    ranges: Sequence[tuple[int, int]]


class FollowUpdate(NamedTuple):
    """A message of a followed bookie: entries it holds up to its known LAC, in entry order.

    Entries that the bookie does not hold (striping, replicas that missed an add) are left out;
    `last_add_confirmed` tells the follower how far the ledger goes.
    """

    frames: Sequence[bytes | memoryview]
    last_add_confirmed: int
    fenced: bool


class BookieClient(Protocol):
    """Requests to any bookie; connections are opened at first use and shared.

    Every method may raise `BookieUnavailableError`, `WrongIncarnationError` (another bookie answers
    there), `BookieAccessDeniedError` and `BookieStorageError`.  A request with one answer (to add
    or read an entry or a LAC) fails with `BookieUnavailableError` if the answer does not come
    within its time-out, because the callers have no timer for it.  Frames come back as the bookie
    sent them: the caller verifies.
    """

    def send_add(
        self,
        bookie: BookieId,
        frame: bytes | FrameParts,
        on_answer: OnAnswer,
        *,
        is_recovery: bool = False,
    ) -> None:
        """Store `frame` as `add_entry` does; `on_answer` is called once, and not within this call.

        Where an answer comes over a wire, the call can come without another turn of the event loop.
        """
        added = self.add_entry(bookie, frame, is_recovery=is_recovery)
        # No other code has the future, so it is not cancelled, and its errors are those of bookies.
        added.add_done_callback(lambda done: on_answer(cast("DLError | None", done.exception())))

    def add_entry(
        self, bookie: BookieId, frame: bytes | FrameParts, *, is_recovery: bool = False
    ) -> asyncio.Future[None]:
        """Store `frame`; the future is done when it is durable there, and holds any error.

        The request is queued before this returns, so calls reach one bookie in call order.  Adding
        an entry that the bookie already holds succeeds.  A recovery add is accepted on a fenced
        ledger and on a read-only bookie.

        Raises:
            LedgerFencedError, BookieReadOnlyError, BookieOverloadedError, EntryTooLargeError,
            DigestMismatchError, BadRequestError.
        """
        ...

    def write_lac(
        self, bookie: BookieId, *, ledger_id: int, last_add_confirmed: int
    ) -> asyncio.Future[None]:
        """Tell the bookie the ledger's LAC, so that it can serve readers; queued like an add."""
        ...

    async def read_lac(self, bookie: BookieId, *, ledger_id: int, fence: bool) -> int:
        """Return the highest LAC the bookie knows (-1: none), fencing the ledger first if `fence`.

        A fencing request is answered only after the fence is durable, and succeeds (with -1) on a
        bookie that never saw the ledger.

        Raises:
            NoSuchLedgerError: without `fence`, the bookie holds nothing of the ledger.
        """
        ...

    async def read_held(self, bookie: BookieId, *, ledger_id: int) -> HeldEntries:
        """Return the LAC that the bookie knows, and which entries above it are durable there.

        Raises:
            NoSuchLedgerError: the bookie holds nothing of the ledger.
        """
        ...

    async def read_entry(
        self, bookie: BookieId, *, ledger_id: int, entry_id: int, fence: bool
    ) -> bytes | memoryview:
        """Return one frame; with `fence`, fence first, and answer ("no" too) only once durable.

        Raises:
            NoSuchLedgerError, NoSuchEntryError: proven no.
        """
        ...

    def read_entries(
        self,
        bookie: BookieId,
        *,
        ledger_id: int,
        first_entry_id: int,
        last_entry_id: int,
        stride: int = 1,
    ) -> AsyncGenerator[Sequence[bytes | memoryview], None]:
        """Stream the frames of entries first, first + stride, … ≤ last, in order, many per item.

        Raises:
            NoSuchLedgerError, NoSuchEntryError: at the first entry it does not hold, after yielding
                all before it.
        """
        ...

    def follow(
        self,
        bookie: BookieId,
        *,
        ledger_id: int,
        first_entry_id: int,
        take: Callable[[FollowUpdate], bool] | None = None,
    ) -> AsyncGenerator[FollowUpdate, None]:
        """Yield updates as the bookie's LAC moves, the first one at once; it ends when cancelled.

        `take` may be asked for an update as soon as it arrives, if the caller waits for it: this
        saves a turn of the event loop.  An update for which it returns True is not yielded.  It
        must not raise.

        A bookie that holds nothing of the ledger yet answers with a LAC of -1 and pushes once it
        does.  After an update with `fenced` the old writer confirms no further entries, and the
        reader should look at the ledger's metadata.
        """
        ...

    async def list_entries(self, bookie: BookieId, *, ledger_id: int) -> Sequence[EntryRange]:
        """Return the ranges of entries the bookie holds, ascending and apart from each other.

        It comes in as many parts as needed.  If a part does not come in time, the error says
        that the answer is unknown.

        Raises:
            NoSuchLedgerError: it holds nothing of the ledger.
        """
        ...

    def forget_free_memory(self) -> None:
        """Release memory that is kept for receiving from bookies and that nothing uses."""
        ...

    async def aclose(self) -> None:
        """Close every connection; pending requests fail with `BookieUnavailableError`."""
        ...


class EntryRanges(Sequence[EntryRange]):
    """Ascending ranges, which become values when they are accessed."""

    def __init__(self, ranges: Iterable[EntryRange] = ()) -> None:
        self._bounds = array("q")
        for each in ranges:
            self.add(each.first_entry_id, each.last_entry_id)

    def add(self, first_entry_id: int, last_entry_id: int) -> None:
        """Append a range."""
        self._bounds.append(first_entry_id)
        self._bounds.append(last_entry_id)

    def extend(self, firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> None:
        """Append ranges."""
        self._bounds.frombytes(np.column_stack((firsts, lasts)).tobytes())

    def __len__(self) -> int:
        return len(self._bounds) // 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # like a list

    @overload
    def __getitem__(self, index: int) -> EntryRange: ...

    @overload
    def __getitem__(self, index: slice) -> list[EntryRange]: ...

    def __getitem__(self, index: int | slice) -> EntryRange | list[EntryRange]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index] * 2
        return EntryRange(first_entry_id=self._bounds[place], last_entry_id=self._bounds[place + 1])

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first and the last entries."""
        bounds = np.frombuffer(self._bounds, np.int64).reshape(-1, 2)
        return bounds[:, 0], bounds[:, 1]
