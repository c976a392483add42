"""The port to entries that are no longer on bookies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.wire.frames import EntryFrame


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
