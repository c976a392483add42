"""A bookie's storage: what it holds, what it refuses, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from bookie.config import StorageConfig
from bookie.disk_port import Disk
from dlcore.clock import Clock
from dlcore.ledger.port import EntryRange, FollowUpdate


class StorageState(Enum):
    """What the storage accepts."""

    WRITABLE = "writable"
    READ_ONLY = "read-only"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStats:
    """A snapshot of the storage, for people and for the service's info request."""

    ledger_count: int
    stored_bytes: int
    disk_free_bytes: int
    disk_total_bytes: int
    is_read_only: bool
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageReport:
    """What one garbage collection did."""

    ledgers_seen: int
    ledgers_deleted: int
    files_deleted: int
    bytes_freed: int
    refused: str
    """Why the pass was refused as a whole; empty if it was not."""


class LedgerStorage:
    """Every entry this bookie holds; used on one event loop only.

    Requests raise `BookieUnavailableError` after `aclose` and, as far as they need the disk's writing
    half, `BookieStorageError` once a write or sync has failed.
    """

    @classmethod
    async def open(
        cls, disk: Disk, config: StorageConfig, *, clock: Clock, owner: str = ""
    ) -> LedgerStorage:
        """Replay `disk` and start the writer task.

        `owner` (cluster and incarnation) is bound into every file; files of another are refused.

        Raises:
            BookieStorageError: data that was acknowledged may be damaged or missing.
        """
        raise NotImplementedError

    def add_entry(self, frame: bytes, *, is_recovery: bool = False) -> asyncio.Future[None]:
        """Accept or refuse `frame` now; the future is done when it is durable, or holds the refusal.

        Adding identical bytes again succeeds.

        Raises:
            Nothing: the future holds LedgerFencedError, BookieReadOnlyError, BookieOverloadedError,
            EntryTooLargeError, DigestMismatchError, BadRequestError (other bytes for a held entry),
            BookieStorageError or BookieUnavailableError.
        """
        raise NotImplementedError

    def write_lac(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Remember the LAC, wake followers, and log it lazily."""
        raise NotImplementedError

    async def read_lac(self, ledger_id: int, *, fence: bool) -> int:
        """Return the highest LAC known, -1 for none; with `fence`, fence first and durably.

        Raises:
            NoSuchLedgerError: without `fence`, for a ledger it knows nothing of.
        """
        raise NotImplementedError

    async def read_entry(self, ledger_id: int, entry_id: int, *, fence: bool) -> memoryview:
        """Return one verified frame; with `fence`, any answer comes after the fence is durable.

        Raises:
            NoSuchLedgerError, NoSuchEntryError: proven no.
            BookieStorageError: the entry cannot be read or is damaged.
        """
        raise NotImplementedError

    def read_entries(
        self,
        ledger_id: int,
        *,
        first_entry_id: int,
        last_entry_id: int,
        stride: int = 1,
        chunk_bytes: int,
    ) -> AsyncIterator[list[memoryview]]:
        """Stream verified frames of entries first, first + stride, … ≤ last, in chunks.

        Raises:
            NoSuchLedgerError, NoSuchEntryError: at the first entry it does not hold, after yielding
                all before it.
        """
        raise NotImplementedError

    def follow(self, ledger_id: int, *, first_entry_id: int) -> AsyncIterator[FollowUpdate]:
        """Push updates as the LAC moves; the first one comes at once.

        Each update is complete up to its own `last_add_confirmed`: an entry at or below it that came in
        no update is not held here.  A follower that is far behind gets the LAC in steps.

        Raises:
            BookieStorageError: the storage failed; everything readable was delivered before.
        """
        raise NotImplementedError

    def list_entries(self, ledger_id: int) -> list[EntryRange]:
        """Return the ranges of durable entries, ascending.

        Raises:
            NoSuchLedgerError: it knows nothing of the ledger.
        """
        raise NotImplementedError

    def ledgers(self) -> list[int]:
        """Return the ledgers it knows, ascending."""
        raise NotImplementedError

    def stats(self) -> StorageStats:
        """Return counts and space."""
        raise NotImplementedError

    @property
    def state(self) -> StorageState:
        """What the storage accepts now."""
        raise NotImplementedError

    def on_state(self, callback: Callable[[StorageState], None]) -> None:
        """Call `callback` at every change of `state`, from the event loop."""
        raise NotImplementedError

    async def collect_garbage(
        self, is_ledger_deleted: Callable[[int], Awaitable[bool]]
    ) -> GarbageReport:
        """Ask about every ledger, and drop files whose ledgers are all proven deleted."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Take no more, make everything accepted durable, stop; the disk stays open (its opener's)."""
        raise NotImplementedError
