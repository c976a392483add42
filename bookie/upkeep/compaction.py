"""Compaction: live records of a mostly dead file are copied, so that the file can be dropped.

Needed are the newest copies of the entries of ledgers that are not proven deleted, and the fences
and LACs of these ledgers.  One file goes through these steps:

1. Its footer is read from the disk and verified; it says what the file holds.
2. Every needed entry is read, verified and added to the log as any new record is.  From when it is
   durable, the copy is the newest one, and is the one that is found.  An entry that has a newer
   copy already (a crash came between, or it was repaired) is not copied, if that copy is intact.
3. Fences and LACs are logged again, unless the files being written say the same.
4. Once all of that is durable, and if no ledger left out is in use again, the file is logged as
   garbage, forgotten, and, once that record is durable, deleted.

The log keeps the order: the garbage record is never durable before the copies.  There are two cases
after a crash at any step.  Either both copies exist, and the pass is repeated without copying
anything twice, or the file is garbage, and replay deletes it.  Adds, fences and a pass do not wait
for each other: the records of adds and fences come later in the log, and adds are compared with the
newest copy.  A read whose location is in a dropped file looks the entry up again.

A damaged file does not end the pass.  If an entry or the footer is damaged, the damage is
remembered, and nothing more is copied out of the file.  The rest is still read, to find all damage.
The file stays, and the pass continues with the next one.  After a repair of the entries the newest
copies are in other files, and the next pass compacts the file.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bookie.files.compaction_choice import LEDGER_BYTES_MAX, FileLoad, choose_next
from bookie.files.entry_reader import read_run, runs_of
from bookie.files.format import RECORD_HEADER_BYTES, file_name
from bookie.files.index import Location
from dlcore.base.errors import BookieStorageError
from dlcore.wire.frames import EntryFrame

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from numpy.typing import NDArray

    from bookie.config import CompactionConfig
    from bookie.disks.port import DiskFile
    from bookie.files.index import EntryColumns, LedgerEntries, SealedIndex
    from bookie.storage.storage_core import StorageCore

logger = logging.getLogger(__name__)
_CHUNK_BYTES = 256 * 1024
_CHUNK_ENTRIES = 500
"""Entries that are copied before the event loop gets a turn."""
_LEDGERS_AT_A_TIME = 500
_ANY_SHARE = 2.0
"""Above every live share, so that all files are worth compacting."""


@dataclass(slots=True, kw_only=True)
class CompactionReport:
    """The result of one pass."""

    files_compacted: int = 0
    bytes_copied: int = 0
    """Bytes of records that were written again."""
    bytes_freed: int = 0
    """Bytes of the deleted files; the copies are not subtracted."""
    files_left_alone: list[int] = field(default_factory=list)
    """Files that are worth compacting, but damaged."""
    files_without_room: int = 0
    """Files that are worth compacting, but whose copies would not fit on the disk."""


class _Abandoned(Exception):
    """The file cannot be dropped in this pass, perhaps in a later one; the message says why."""


class _Needed(NamedTuple):
    """The needed records of a file; row numbers refer to its columns."""

    columns: EntryColumns
    rows: NDArray[np.int64]
    """Rows of entries without a newer copy, in the order of the file."""
    superseded_rows: NDArray[np.int64]
    """Rows of entries with a newer copy."""
    left_out: set[int]
    """Ledgers whose records are not all copied, because they are proven deleted; the pass may add
    more."""


class Compactor:
    """Compacts one storage's sealed files, one pass at a time.

    Args:
        room_bytes: returns how many bytes may be written now.
        is_full: returns whether the disk is so full that the bookie is read-only.
    """

    def __init__(
        self,
        core: StorageCore,
        config: CompactionConfig,
        *,
        room_bytes: Callable[[], int],
        is_full: Callable[[], bool],
    ) -> None:
        self._core = core
        self.config = config
        self._room_bytes = room_bytes
        self._is_full = is_full

    async def run(self, *, only: Collection[int] | None = None) -> CompactionReport:
        """Compact every file that is worth it and fits, each at most once.

        With `only` these are the files, however little of them is garbage.

        Raises:
            BookieError: the log failed.
        """
        report = CompactionReport()
        # Files that are sealed during the pass hold its copies; to compact them would have no end.
        newest = max(self._core.files.numbers(), default=0)
        tried: set[int] = set()
        while (load := await self._choose(newest, tried, report, only)) is not None:
            tried.add(load.number)
            try:
                await self._compact(load, report)
            except _Abandoned as reason:
                logger.info("not compacted file=%s: %s", file_name(load.number), reason)
            except BookieStorageError as error:
                self._core.log.commits.check()
                # If the log failed, the pass ends; if only this file is damaged, it goes on.
                logger.warning(
                    "left alone file=%s: %s; to do: nothing, scrubbing finds damage; its space is "
                    "not regained until it can be read",
                    file_name(load.number),
                    error,
                )
                report.files_left_alone.append(load.number)
        return report

    async def _choose(
        self, newest: int, tried: set[int], report: CompactionReport, only: Collection[int] | None
    ) -> FileLoad | None:
        """Return the next file to compact, and note why others are not compacted."""
        share = self.config.below_live_share
        # A bookie that accepts nothing can spend its disk's time on smaller savings.
        if self._is_full():
            share = max(share, self.config.full_below_live_share)
        if only is not None:
            share = _ANY_SHARE
        damaged = self._core.damage.files_of_entries() | self._core.damage.footers
        loads = [
            load
            for load in await self._core.files.loads()
            if load.number <= newest
            and load.number not in tried
            and (only is None or load.number in only)
        ]
        intact = [load for load in loads if load.number not in damaged]
        room_bytes = self._room_bytes()
        chosen = choose_next(intact, below_live_share=share, room_bytes=room_bytes)
        if chosen is None:
            report.files_left_alone += [
                load.number
                for load in loads
                if load.number in damaged and (load.is_unfit or load.live_share < share)
            ]
            report.files_without_room = sum(
                load.is_unfit or load.live_share < share for load in intact
            )
        return chosen

    async def _compact(self, load: FileLoad, report: CompactionReport) -> None:
        number = load.number
        footer = await self._core.handles.read_footer(number)
        if footer is None:
            raise _Abandoned("it was dropped meanwhile")
        await self._core.log.commits.flush()  # newer copies must be durable to be the valid ones
        needed = await self._needed(number, footer)
        await self._copy_entries(load, needed, report)
        await self._copy_states(footer, needed)
        await self._core.log.commits.flush()
        if number not in self._core.files:
            raise _Abandoned("it was dropped meanwhile")
        # Its records are only in this file, which therefore must stay.
        if any(self._core.is_live(ledger_id) for ledger_id in needed.left_out):
            raise _Abandoned("a ledger that had been deleted is in use again")
        dropped = await self._core.files.drop([number], footer.ledger_ids())
        report.files_compacted += 1
        report.bytes_freed += sum(dropped.values())

    # Needed records

    async def _needed(self, number: int, footer: SealedIndex) -> _Needed:
        columns = footer.columns()
        is_needed = np.zeros(len(columns.entry_ids), bool)
        is_superseded = np.zeros(len(columns.entry_ids), bool)
        left_out = set()
        ledgers = list(footer.ledger_rows())
        newer_files: dict[int, array[int]] = {}
        for position, (ledger_id, rows) in enumerate(ledgers):
            if position % _LEDGERS_AT_A_TIME == 0:
                await asyncio.sleep(0)
            if not self._core.is_live(ledger_id):
                left_out.add(ledger_id)
                continue
            entry_ids = columns.entry_ids[rows]
            if not len(entry_ids):
                continue
            is_needed[rows] = True
            is_needed[rows][:-1] = entry_ids[:-1] != entry_ids[1:]  # the last copy is the valid one
            for entries in self._unsealed_copies(ledger_id, entry_ids):
                is_superseded[rows] |= np.isin(entry_ids, np.array(entries.entry_ids))
            state = self._core.ledgers[ledger_id]
            for _, newer in state.files_between(int(entry_ids[0]), int(entry_ids[-1])):
                if newer > number:
                    newer_files.setdefault(newer, array("I")).append(position)
        for newer, positions in sorted(newer_files.items()):
            parts = (ledgers[position] for position in positions)
            await self._note_superseded(newer, parts, columns, is_superseded)
        kept = np.flatnonzero(is_needed & ~is_superseded)
        return _Needed(
            columns,
            kept[np.argsort(columns.offsets[kept])],
            np.flatnonzero(is_needed & is_superseded),
            left_out,
        )

    def _unsealed_copies(
        self, ledger_id: int, entry_ids: NDArray[np.int64]
    ) -> Iterator[LedgerEntries]:
        """Return the ledger's entries in files being written, if the ids overlap `entry_ids`."""
        for index in self._core.log.unsealed.indexes():
            entries = index.entries(ledger_id)
            if entries is None or not len(entries.entry_ids):
                continue
            if entries.entry_ids[0] <= entry_ids[-1] and entries.entry_ids[-1] >= entry_ids[0]:
                yield entries

    async def _note_superseded(
        self,
        newer: int,
        ledgers: Iterable[tuple[int, slice]],
        columns: EntryColumns,
        is_superseded: NDArray[np.bool_],
    ) -> None:
        """Mark the entries of `ledgers`, each with its rows, that a newer file holds as well."""
        try:
            footer = await self._core.handles.read_footer(newer)
        except BookieStorageError:
            return  # copies that cannot be found are ignored
        if footer is None:
            return
        for position, (ledger_id, rows) in enumerate(ledgers, 1):
            entries = footer.entries(ledger_id)
            if entries is not None:
                is_superseded[rows] |= np.isin(columns.entry_ids[rows], entries.entry_ids)
            if position % _LEDGERS_AT_A_TIME == 0:
                await asyncio.sleep(0)

    # Copying

    async def _copy_entries(
        self, load: FileLoad, needed: _Needed, report: CompactionReport
    ) -> None:
        """Copy the needed entries.

        Raises:
            BookieStorageError: some of them are damaged.
            _Abandoned: the disk is full, or the file was dropped meanwhile.
        """
        file = self._core.disk.open(file_name(load.number))
        try:
            damaged = 0
            lost = await self._lost_copies(load.number, needed)
            for chunk in _chunks(load.number, needed.columns, np.concatenate((lost, needed.rows))):
                size = sum(RECORD_HEADER_BYTES + location.size for location in chunk)
                if load.number not in self._core.files:
                    raise _Abandoned("it was dropped meanwhile")
                # Checked before each chunk, because adds and other programs take space meanwhile.
                if self._room_bytes() < size + load.footer_bytes:
                    raise _Abandoned("the disk filled up meanwhile")
                good, damaged_here = await self._read_chunk(file, chunk)
                damaged += damaged_here
                if not damaged:
                    # The file stays anyway, so copies would only take space.
                    await self._write_chunk(good, needed, report)
                await asyncio.sleep(size / self.config.bytes_per_second)
        finally:
            file.close()
        if damaged:
            raise BookieStorageError(f"{damaged} entries are damaged")

    async def _read_chunk(
        self, file: DiskFile, chunk: list[Location]
    ) -> tuple[list[EntryFrame], int]:
        """Return the intact entries of a chunk, and the number of damaged ones."""
        damaged = 0
        good: list[EntryFrame] = []
        for run in runs_of(chunk):
            for location, found in zip(run, await read_run(file, run), strict=True):
                if isinstance(found, EntryFrame):
                    good.append(found)
                elif self._core.reader.note_damaged(location):
                    damaged += 1
        return good, damaged

    async def _write_chunk(
        self, frames: list[EntryFrame], needed: _Needed, report: CompactionReport
    ) -> None:
        """Write copies, durably."""
        for frame in frames:
            if self._core.is_live(frame.ledger_id):
                self._core.log.copy_entry(frame)
                report.bytes_copied += RECORD_HEADER_BYTES + len(frame.data)
            else:
                needed.left_out.add(frame.ledger_id)
        await self._core.log.commits.flush()
        self._core.damage.forget_copied((frame.ledger_id, frame.entry_id) for frame in frames)

    async def _lost_copies(self, number: int, needed: _Needed) -> NDArray[np.int64]:
        """Return the rows whose newer copies cannot be read: these rows are needed after all."""
        lost = []
        rows = needed.superseded_rows
        for start in range(0, len(rows), _CHUNK_ENTRIES):
            part = rows[start : start + _CHUNK_ENTRIES]
            for row, location in zip(
                part.tolist(), _locations(number, needed.columns, part), strict=True
            ):
                newer = self._core.reader.find(location.ledger_id, location.entry_id)
                try:
                    if newer is not None:
                        await self._core.reader.read([newer])
                except BookieStorageError:
                    lost.append(row)
            size = int(needed.columns.sizes[part].sum(dtype=np.int64))
            await asyncio.sleep(size / self.config.bytes_per_second)
        return np.array(lost, np.int64)

    async def _copy_states(self, footer: SealedIndex, needed: _Needed) -> None:
        """Log again the fences and LACs that are missing in the files being written."""
        count = len(footer.ledger_ids())
        for position, summary in enumerate(footer.summaries()):
            if position % _LEDGERS_AT_A_TIME == 0:
                await self._core.log.commits.flush()
                await asyncio.sleep(0)
                next_count = min(_LEDGERS_AT_A_TIME, count - position)
                if self._room_bytes() < next_count * LEDGER_BYTES_MAX:
                    raise _Abandoned("the disk filled up meanwhile")
            ledger_id = summary.ledger_id
            if not self._core.is_live(ledger_id):
                needed.left_out.add(ledger_id)
                continue
            unsealed = self._core.log.unsealed.indexes()
            if summary.fenced and not any(each.is_fenced(ledger_id) for each in unsealed):
                self._core.log.append_fence(ledger_id)
            if summary.last_add_confirmed > max(
                each.last_add_confirmed(ledger_id) for each in unsealed
            ):
                self._core.log.copy_lac(ledger_id, summary.last_add_confirmed)


def _locations(number: int, columns: EntryColumns, rows: NDArray[np.int64]) -> Iterator[Location]:
    return (
        Location(entry_id, number, offset, size, ledger_id)
        for ledger_id, entry_id, offset, size in zip(
            *(column[rows].tolist() for column in columns), strict=True
        )
    )


def _chunks(
    number: int, columns: EntryColumns, rows: NDArray[np.int64]
) -> Iterator[list[Location]]:
    """Return the locations of `rows` in chunks that are copied at once."""
    for start in range(0, len(rows), _CHUNK_ENTRIES):
        chunk: list[Location] = []
        size = 0
        for location in _locations(number, columns, rows[start : start + _CHUNK_ENTRIES]):
            if chunk and size + location.size > _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(location)
            size += location.size
        yield chunk
