"""The list of damage that was found on the disk and is not repaired yet.

Damage is found by reads: of a client's request, of scrubbing, of compaction, or of an add that is
compared with the held entry.  The list is in memory only: after a restart the damage is found
again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from bookie.files.format import file_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

logger = logging.getLogger(__name__)


class DamageLog:
    """Damaged entries, each with its file, and damaged files; at most `entries_max` entries.

    Further damage is not remembered; it is found again once the list has space.
    """

    def __init__(self, *, entries_max: int) -> None:
        self._entries_max = entries_max
        self._entries: dict[tuple[int, int], int] = {}
        self._footers: set[int] = set()
        self._headers: set[int] = set()
        self._listeners: list[Callable[[], None]] = []
        self.repaired_count = 0
        """Entries repaired since the start."""

    def on_entry(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever an entry is newly found damaged."""
        self._listeners.append(listener)

    def note_entry(self, ledger_id: int, entry_id: int, number: int) -> None:
        """Remember that the entry's copy in file `number` is damaged."""
        key = ledger_id, entry_id
        if self._entries.get(key) == number:
            return
        # A broken disk may have millions of damaged entries, and a list without a bound would end
        # the bookie.
        if key not in self._entries and len(self._entries) >= self._entries_max:
            return
        self._entries[key] = number
        logger.error(
            "entry %d:%d is damaged in %s; to do: nothing, a copy of another bookie replaces it; "
            "replace the disk if this comes again",
            ledger_id,
            entry_id,
            file_name(number),
        )
        for listener in self._listeners:
            listener()

    def forget_entry(self, ledger_id: int, entry_id: int, *, is_repaired: bool) -> None:
        """Forget an entry that is intact again, or that is not needed."""
        known = self._entries.pop((ledger_id, entry_id), None)
        if is_repaired:
            # Also for an entry that is not listed, because the list was full.
            self.repaired_count += 1
            logger.warning(
                "repaired entry %d:%d; to do: nothing, but replace the disk if this comes often",
                ledger_id,
                entry_id,
            )
        elif known is not None:
            logger.info("entry %d:%d is damaged no longer", ledger_id, entry_id)

    def forget_copied(self, keys: Iterable[tuple[int, int]]) -> None:
        """Note that good copies of entries were written; most of them were not damaged before."""
        for ledger_id, entry_id in keys if self._entries else ():
            if (ledger_id, entry_id) in self._entries:
                self.forget_entry(ledger_id, entry_id, is_repaired=True)

    def forget_ledgers(self, ledger_ids: Collection[int]) -> None:
        """Forget the entries of deleted ledgers."""
        for key in [key for key in self._entries if key[0] in ledger_ids]:
            del self._entries[key]

    def note_footer(self, number: int) -> None:
        """Remember that the footer of a sealed file is damaged."""
        if number not in self._footers:
            logger.error(
                "the footer of %s is damaged; to do: nothing, it is made again of the records; "
                "replace the disk if this comes again",
                file_name(number),
            )
            self._footers.add(number)

    def note_header(self, number: int) -> None:
        """Remember that a sealed file has a damaged header: it could not be opened again."""
        if number not in self._headers:
            logger.error(
                "the header of %s is damaged; to do: copy the data away while the bookie runs "
                "(dlog bookie decommission after its stop), and replace the disk",
                file_name(number),
            )
            self._headers.add(number)

    def footer_is_whole(self, number: int) -> None:
        """Forget that a footer was damaged."""
        self._footers.discard(number)

    def forget_files(self, numbers: Collection[int]) -> None:
        """Forget files that were dropped."""
        self._footers.difference_update(numbers)
        self._headers.difference_update(numbers)
        for key in [key for key, number in self._entries.items() if number in numbers]:
            del self._entries[key]

    @property
    def entry_count(self) -> int:
        """Number of damaged entries."""
        return len(self._entries)

    def entries(self) -> list[tuple[int, int]]:
        """Return (ledger id, entry id) of the damaged entries, ascending."""
        return sorted(self._entries)

    def files_of_entries(self) -> set[int]:
        """Return the files that hold damaged entries."""
        return set(self._entries.values())

    @property
    def footers(self) -> frozenset[int]:
        """The files whose footers are damaged."""
        return frozenset(self._footers)

    @property
    def headers(self) -> frozenset[int]:
        """The files whose headers are damaged."""
        return frozenset(self._headers)
