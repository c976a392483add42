"""The ports to entries that are no longer on bookies, and to a ledger that is followed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from contextlib import AbstractContextManager

    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata
    from dlcore.wire.frames import EntryFrame
    from dlcore.wire.port import FollowUpdate, HeldEntries


class ColdEntries(Protocol):
    """Reads the entries of cold ledgers, which are in objects."""

    def read(
        self, ledger: LedgerMetadata, first_entry_id: int, last_entry_id: int
    ) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield the entries from the first to the last in order, many at a time.

        Raises:
            LedgerReadError: an object is missing, damaged, or cannot be read now.
        """
        ...


class Follower(Protocol):
    """Learns news of a ledger from `FollowedLedger.informing`."""

    def note_end(self, last_entry_id: int) -> None:
        """Deliver up to this entry, which may be read, without waiting for a bookie's message."""

    def metadata_changed(self) -> None:
        """Read the metadata again."""


class FollowedLedger(Protocol):
    """The part of `LedgerReader` that a follower uses."""

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as last read."""

    def informing(self, follower: Follower) -> AbstractContextManager[None]:
        """Tell a follower of changes of the metadata, and of entries that may be read."""

    async def refresh(self, *, fresh: bool = False) -> LedgerMetadata:
        """Read the metadata again."""

    async def read_last_add_confirmed(self) -> int:
        """Return the last entry that may be read now."""

    def updates(
        self, bookie: BookieId, first: int, take: Callable[[FollowUpdate], bool]
    ) -> AsyncGenerator[FollowUpdate, None]:
        """Yield what a bookie pushes from an entry on; see `BookieClient.follow`."""

    async def ask_all(
        self, bookies: Sequence[BookieId], on_answer: Callable[[], None]
    ) -> Sequence[tuple[BookieId, HeldEntries]]:
        """Return what the bookies know that answer; `on_answer` is called at each answer."""

    async def disprove(self, ensemble: Ensemble, *, vouched: int, claimed: int) -> int:
        """Return up to where a claimed LAC holds."""

    def read(self, first: int, last: int) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield verified entries in order."""
