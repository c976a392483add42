"""The sealed files of a bookie: open ones and their footers, sizes and ledgers, and their drop.

Sealed files are opened when needed.  The most recently used ones stay open with their footers.  The
number is limited because a big disk holds more files than a process may have descriptors, and more
footers than fit into memory.

A crash may interrupt a drop at any step: first the needed content is durable elsewhere, then the
file is logged as garbage, then it is deleted.  Replay finishes a deletion that was logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from bookie.files.compaction_choice import FileLoad
from bookie.files.format import file_name
from bookie.files.index import SealedIndex, note_sealed, read_footer
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from bookie.disks.port import Disk, DiskFile
    from bookie.files.damage import DamageLog
    from bookie.files.entry_log import EntryLog
    from bookie.files.index import FileIndex, LedgerState


class FooterPlace(NamedTuple):
    """Offset of a sealed file's footer, and the seed of its checksum."""

    offset: int
    seed: int


class _Footer(NamedTuple):
    """A footer in memory, and its size there."""

    entries: SealedIndex
    size: int


class SealedHandles:
    """Opens files, and reads footers of sealed files; a dropped file does not exist for it.

    Args:
        disk: holds the files.
        log: has the files open that are not sealed yet.
        damage: notes every footer that is found damaged.
        open_files_max: most sealed files that are kept open.
        footer_bytes_max: most bytes of footers in memory; the footer used last always stays.
    """

    def __init__(
        self,
        disk: Disk,
        log: EntryLog,
        damage: DamageLog,
        *,
        open_files_max: int,
        footer_bytes_max: int,
    ) -> None:
        self._disk = disk
        self._log = log
        self._damage = damage
        self._open_files_max = open_files_max
        self._footer_bytes_max = footer_bytes_max
        self._places: dict[int, FooterPlace] = {}
        self._open: OrderedDict[int, DiskFile] = OrderedDict()
        self._footers: OrderedDict[int, _Footer] = OrderedDict()
        self._footer_bytes = 0

    def add(self, number: int, *, footer_offset: int, seed: int) -> None:
        """Add a sealed file; `seed` is that of its header."""
        self._places[number] = FooterPlace(footer_offset, seed)

    def place(self, number: int) -> FooterPlace | None:
        """Return the place of a sealed file's footer; None if there is no such file any more."""
        return self._places.get(number)

    def forget(self, number: int) -> None:
        """Forget a file that is about to be deleted."""
        del self._places[number]
        self.let_go(number)

    def let_go(self, number: int) -> None:
        """Close a sealed file, and read its footer from the disk at the next use."""
        file = self._open.pop(number, None)
        if file is not None:
            file.close()
        footer = self._footers.pop(number, None)
        if footer is not None:
            self._footer_bytes -= footer.size

    def close(self) -> None:
        """Close every sealed file."""
        for number in list(self._open.keys() | self._footers.keys()):
            self.let_go(number)

    def file(self, number: int) -> DiskFile | None:
        """Return the open file; None if it was dropped."""
        file = self._log.unsealed.file_of(number)
        if file is not None:
            return file
        file = self._open.get(number)
        if file is not None:
            self._open.move_to_end(number)
            return file
        if number not in self._places:
            return None
        file = self._open[number] = self._disk.open(file_name(number))
        # Reads in progress keep a file open that leaves here.
        while len(self._open) > self._open_files_max:
            self._open.popitem(last=False)[1].close()
        return file

    def footer(self, number: int) -> SealedIndex:
        """Return the footer of a sealed file, from memory or from the disk.

        Raises:
            BookieStorageError: it is damaged or cannot be read.
        """
        cached = self._footers.get(number)
        if cached is not None:
            self._footers.move_to_end(number)
            return cached.entries
        place = self._places[number]
        file = self.file(number)
        assert file is not None  # the file is in _places
        size = max(0, file.size - place.offset)
        try:
            # Blocking, because a look-up is one step: between it and the decision on an add nothing
            # may happen.
            data = file.read_now(place.offset, size)
        except BookieStorageError as error:
            raise self._footer_is_damaged(number, f": {error}") from error
        index = read_footer(data, offset=place.offset, number=number, seed=place.seed)
        if index is None:
            raise self._footer_is_damaged(number, "")
        self._footers[number] = _Footer(index, size)
        self._footer_bytes += size
        while self._footer_bytes > self._footer_bytes_max and len(self._footers) > 1:
            self._footer_bytes -= self._footers.popitem(last=False)[1].size
        return index

    async def read_footer(self, number: int) -> SealedIndex | None:
        """Return the verified footer as it is on the disk now; None if the file was dropped.

        Raises:
            BookieStorageError: it is damaged or cannot be read.
        """
        place = self._places.get(number)
        if place is None:
            return None
        footer = None
        reason = ""
        # A handle of its own: during the read another call may push the kept one out.
        file = self._disk.open(file_name(number))
        try:
            data = await file.read(place.offset, max(0, file.size - place.offset))
            footer = await self._disk.compute(
                read_footer, data, offset=place.offset, number=number, seed=place.seed
            )
        except BookieStorageError as error:
            reason = f": {error}"
        finally:
            file.close()
        # If the file was dropped during the read, an unreadable footer is no damage.
        if footer is None and number in self._places:
            self.let_go(number)
            raise self._footer_is_damaged(number, reason)
        return footer

    def _footer_is_damaged(self, number: int, reason: str) -> BookieStorageError:
        self._damage.note_footer(number)
        return BookieStorageError(f"the footer of {file_name(number)} is damaged{reason}")


logger = logging.getLogger(__name__)
_LEDGERS_AT_A_TIME = 1000
"""Ledgers that are examined before the event loop gets a turn."""


class _SealedFile(NamedTuple):
    """Sizes of a sealed file, known without reading it."""

    size: int
    footer_bytes: int


class SealedFiles:
    """All sealed files; they and the states of ledgers change together.

    Args:
        on_forgotten: called with each deleted ledger whose state is forgotten.
    """

    def __init__(
        self,
        disk: Disk,
        log: EntryLog,
        handles: SealedHandles,
        ledgers: dict[int, LedgerState],
        damage: DamageLog,
        *,
        on_forgotten: Callable[[int], None],
    ) -> None:
        self._disk = disk
        self._log = log
        self._handles = handles
        self._ledgers = ledgers
        self._damage = damage
        self._on_forgotten = on_forgotten
        self._files: dict[int, _SealedFile] = {}
        self.stored_bytes = 0
        """Bytes of all sealed files."""
        self._undeleted: set[int] = set()
        """Files that were dropped and may still be on the disk."""

    def __contains__(self, number: int) -> bool:
        return number in self._files

    def numbers(self) -> list[int]:
        """Return the numbers of all sealed files, oldest first."""
        return sorted(self._files)

    def take(self, number: int, *, size: int, records_end: int, seed: int) -> None:
        """Add a file that was sealed now or before; `seed` is that of its header.

        The states of its ledgers include it already: see `note_sealed`.
        """
        self._handles.add(number, footer_offset=records_end, seed=seed)
        self._files[number] = _SealedFile(size, size - records_end)
        self.stored_bytes += size

    async def take_over(self, index: FileIndex, *, size: int, records_end: int, seed: int) -> None:
        """Add a file that was sealed now, once the states of its ledgers include it.

        Its index must stay in use until this returns.  Other requests may run meanwhile.
        """
        number = index.number
        # Before the states: a look-up skips a file that a state names and that has no place.
        self._handles.add(number, footer_offset=records_end, seed=seed)
        for position, summary in enumerate(index.summaries(), 1):
            note_sealed(self._ledgers, number, [summary])
            if position % _LEDGERS_AT_A_TIME == 0:
                await asyncio.sleep(0)
        self.take(number, size=size, records_end=records_end, seed=seed)

    async def loads(self) -> list[FileLoad]:
        """Return the load of each file: its records of ledgers that are not proven deleted.

        An entry that is held twice counts in both files, so a load is never too small.
        """
        live_bytes = dict.fromkeys(self._files, 0)
        ledgers = dict.fromkeys(self._files, 0)
        for position, state in enumerate(list(self._ledgers.values())):
            if position % _LEDGERS_AT_A_TIME == 0:
                await asyncio.sleep(0)
            if state.is_deleted:
                continue
            for number, size in state.file_bytes():
                if number in live_bytes:  # the file was sealed before this began
                    live_bytes[number] += size
                    ledgers[number] += 1
        return [
            FileLoad(
                number=number,
                size_bytes=file.size,
                footer_bytes=file.footer_bytes,
                live_bytes=live_bytes[number],
                live_ledgers=ledgers[number],
                is_unfit=number in self._damage.headers,
            )
            for number, file in sorted(self._files.items())
            if number in live_bytes
        ]

    async def drop_dead(self) -> dict[int, int]:
        """Drop the files that hold only deleted ledgers; return their sizes."""
        dead = set(self._files)
        deleted: list[int] = []
        for position, (ledger_id, state) in enumerate(list(self._ledgers.items()), 1):
            if state.is_deleted:
                deleted.append(ledger_id)
            else:
                dead.difference_update(state.files())
            if position % _LEDGERS_AT_A_TIME == 0:
                await asyncio.sleep(0)
        for ledger_id in deleted:
            again = self._ledgers.get(ledger_id)
            # The loop above gave other tasks turns.
            if again is not None and not again.is_deleted:  # in use again meanwhile
                dead.difference_update(again.files())
        return await self.drop(dead & self._files.keys(), deleted)

    async def drop(self, numbers: Collection[int], ledger_ids: Iterable[int]) -> dict[int, int]:
        """Drop files that hold nothing needed; return their sizes.

        `ledger_ids` are all ledgers with records in the files.  The files are forgotten before the
        first wait, so that the caller's reasons still hold.  The states of the ledgers forget the
        files step by step.

        Files that were dropped before and not deleted, because the caller was cancelled or the disk
        refused, are deleted as well.

        Raises:
            BookieError: the log failed; after a restart the files may be there again.
        """
        dropped = self._forget(numbers) if numbers else {}
        await self._forget_spans(ledger_ids)
        doomed = sorted(self._undeleted)
        if doomed:
            await self._log.commits.flush()
            # A start refuses to go on without a file that no durable record calls garbage.
            await self._disk.recycle([file_name(number) for number in doomed])
            self._undeleted.difference_update(doomed)
            logger.info("dropped files=%s", doomed)
        return dropped

    def _forget(self, numbers: Collection[int]) -> dict[int, int]:
        """Log files as garbage, and forget them; return their sizes."""
        dropped = {number: self._files.pop(number).size for number in sorted(numbers)}
        self.stored_bytes -= sum(dropped.values())
        self._log.append_garbage(list(dropped))
        self._undeleted.update(dropped)
        for number in dropped:
            self._handles.forget(number)
        self._damage.forget_files(dropped)
        return dropped

    async def _forget_spans(self, ledger_ids: Iterable[int]) -> None:
        """Remove dropped files from the states of ledgers, and the states of deleted ledgers."""
        for position, ledger_id in enumerate(ledger_ids, 1):
            self._forget_spans_of(ledger_id)
            if position % _LEDGERS_AT_A_TIME == 0:
                await asyncio.sleep(0)

    def _forget_spans_of(self, ledger_id: int) -> None:
        state = self._ledgers.get(ledger_id)
        if state is None:
            return
        gone = {number for number in state.files() if self._handles.place(number) is None}
        if gone:
            state.forget_files(gone)
        if (
            state.is_deleted
            and not state.has_files
            # Else the sealing of that file would bring the ledger back, as one that is not deleted.
            and all(each.entries(ledger_id) is None for each in self._log.unsealed.indexes())
        ):
            del self._ledgers[ledger_id]
            self._on_forgotten(ledger_id)
