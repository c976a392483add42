"""The writers of a client that are open, and what those that ended have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.statistics import WriteStatistics

if TYPE_CHECKING:
    from dlcore.ledger.writing.writer import LedgerWriter


class OpenWriters:
    """Knows each writer from its ledger's creation to its end."""

    def __init__(self) -> None:
        self.open: set[LedgerWriter] = set()
        self._entries = self._bytes = 0  # of those that ended

    def add(self, writer: LedgerWriter) -> None:
        """Add a new one."""
        self.open.add(writer)

    def ended(self, writer: LedgerWriter) -> None:
        """Count what a writer has written, once."""
        if writer in self.open:
            self.open.discard(writer)
            self._entries += writer.last_add_confirmed + 1
            self._bytes += writer.confirmed_bytes

    def statistics(self) -> WriteStatistics:
        """Return counts of the entries and bytes that were written until now."""
        writers = list(self.open)  # a copy: a collector may ask in another thread
        return WriteStatistics(
            open_ledgers=len(writers),
            pending_bytes=sum(each.pending_bytes for each in writers),
            entries=self._entries + sum(each.last_add_confirmed + 1 for each in writers),
            size_bytes=self._bytes + sum(each.confirmed_bytes for each in writers),
        )

    async def aclose(self) -> None:
        """Abandon those that are open."""
        for writer in list(self.open):
            await writer.abandon()
