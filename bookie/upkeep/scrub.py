"""Scrubbing: all stored data is read, to find damage while other copies are still intact.

A pass reads each sealed file (header, every record, footer) and the durable part of the files being
written, and verifies every checksum, slowly.  Damage to the valid copy of an entry is remembered
for repair.  A damaged footer is made again from the records, if these are intact.  It then has
exactly the original bytes, and a crash during the write leaves it as damaged as before.  A damaged
header is remembered.  Only the next start reads it, and would fail.  Therefore compaction moves the
content of the file.  A damaged file does not end the pass.

Files are read through the page cache.  The kernel does not read a cached page from the device
again, so damage below it is found only after the page was dropped.  Scrubbing cannot find entries
that should be stored and are not; the replica check does this.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from bookie.disks.port import write_with_room
from bookie.files.entry_reader import read_run
from bookie.files.format import (
    RECORD_HEADER_BYTES,
    FileHeader,
    decode_file_header,
    file_name,
)
from bookie.files.index import FileIndex, Location, encode_footer_record
from bookie.files.records import IntactRecords
from bookie.files.replay import read_header
from dlcore.base.errors import BookieStorageError
from dlcore.wire.frames import EntryFrame

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie.config import ScrubConfig
    from bookie.disks.port import DiskFile
    from bookie.files.index import EntryColumns
    from bookie.storage.storage_core import StorageCore
    from dlcore.base.clock import Clock

logger = logging.getLogger(__name__)
_CHUNK_BYTES = 256 * 1024


@dataclass(slots=True, kw_only=True)
class ScrubReport:
    """The result of one pass."""

    files_scrubbed: int = 0
    bytes_read: int = 0
    damaged_records: int = 0
    """Damaged entries and other records, needed or not."""
    damaged_files: list[int] = field(default_factory=list)
    """Files with any damage, repaired or not, as far as they could be read."""
    footers_made_again: int = 0


@dataclass(slots=True, kw_only=True)
class _Part:
    """The part of a file whose records are read."""

    header: FileHeader
    """Header with the fields that reading records needs."""
    start: int
    end: int
    columns: Callable[[], EntryColumns | None]
    """The expected entries; called only after a record was found damaged."""
    index: FileIndex | None = None
    """Index of the records found, if the footer has to be made again."""
    record_count: int = 0


class Scrubber:
    """Reads one storage's files, one pass at a time.

    Args:
        owner: what every file header must say.
    """

    def __init__(
        self,
        core: StorageCore,
        config: ScrubConfig,
        *,
        owner: bytes,
        clock: Clock,
    ) -> None:
        self._core = core
        self.config = config
        self._owner = owner
        self._clock = clock
        self._lock = asyncio.Lock()
        self._ended_ms = clock.now_ms()
        self._footer_lock = asyncio.Lock()
        """Held by the pass that makes a footer again, so that no other pass does so at the same
        time."""

    async def mend_footers(self) -> None:
        """Make damaged footers again, as far as the records of their files are intact."""
        for number in sorted(self._core.damage.footers):
            await self._scrub_file(number, ScrubReport(), self._scrub_sealed)

    async def run(self) -> ScrubReport:
        """Read every existing file once, behind a pass that is under way."""
        report = ScrubReport()
        async with self._lock:
            for number in self._core.files.numbers():
                await self._scrub_file(number, report, self._scrub_sealed)
            for index in self._core.log.unsealed.indexes():
                await self._scrub_file(index.number, report, self._scrub_unsealed)
            self._ended_ms = self._clock.now_ms()
        return report

    def age_s(self) -> float:
        """Return the seconds since the last pass ended; without one, since the start."""
        return max(0, self._clock.now_ms() - self._ended_ms) / 1000

    async def _scrub_file(
        self,
        number: int,
        report: ScrubReport,
        scrub: Callable[[int, DiskFile, ScrubReport], Awaitable[bool]],
    ) -> None:
        try:
            file = self._core.disk.open(file_name(number))
        except BookieStorageError as error:
            if number in self._core.files:
                logger.error(  # noqa: TRY400  not ours
                    "cannot scrub file=%s: %s; to do: see to the disk and its mount; the entries "
                    "of the file cannot be read",
                    file_name(number),
                    error,
                )
                report.damaged_files.append(number)
            return
        damaged = report.damaged_records
        is_whole = False
        try:
            is_whole = await scrub(number, file, report)
        except BookieStorageError as error:
            logger.warning(
                "scrubbing file=%s: %s; to do: see to the disk; the next pass tries the file again",
                file_name(number),
                error,
            )
        finally:
            file.close()
        report.files_scrubbed += 1
        if not is_whole or report.damaged_records > damaged:
            report.damaged_files.append(number)

    async def _scrub_sealed(self, number: int, file: DiskFile, report: ScrubReport) -> bool:
        """Return whether header and footer are intact, or the file is gone."""
        place = self._core.handles.place(number)
        if place is None:
            return True
        header = await self._header(number, file)
        footer = None
        try:
            footer = await self._core.handles.read_footer(number)
        except BookieStorageError as error:
            logger.warning(
                "scrubbing: %s; to do: nothing, damage is logged and repaired; see to the "
                "disk if this comes again",
                error,
            )
        if number not in self._core.files:
            return True
        if footer is not None:
            self._core.damage.footer_is_whole(number)
        columns = None if footer is None else footer.columns()
        start = header.size if header is not None else _first_record(columns, place.offset)
        part = _Part(
            header=FileHeader(number, {}, 0, place.seed),
            start=start,
            end=place.offset,
            columns=lambda: columns,
            index=FileIndex(number) if footer is None and header is not None else None,
        )
        damaged = report.damaged_records
        await self._scrub_records(file, part, report)
        if part.index is not None and report.damaged_records == damaged:
            async with self._footer_lock:
                if number in self._core.damage.footers:
                    await self._make_footer_again(file, part, part.index, report)
        return footer is not None and header is not None

    async def _header(self, number: int, file: DiskFile) -> FileHeader | None:
        try:
            view = await read_header(file)
            return decode_file_header(view, number=number, owner=self._owner)
        except BookieStorageError as error:
            if number in self._core.files:
                logger.warning(
                    "scrubbing: %s; to do: nothing, damage is logged and repaired; see to "
                    "the disk if this comes again",
                    error,
                )
                self._core.damage.note_header(number)
            return None

    async def _scrub_unsealed(self, number: int, file: DiskFile, report: ScrubReport) -> bool:
        part = self._core.log.unsealed.durable_part(number)
        if part is None:
            return True
        header, end, index = part
        await self._scrub_records(
            file,
            _Part(header=header, start=header.size, end=end, columns=index.columns),
            report,
        )
        return True

    # Records

    async def _scrub_records(self, file: DiskFile, part: _Part, report: ScrubReport) -> None:
        """Verify every record; after a damaged one continue at the next known entry."""
        position = part.start
        chunk_bytes = _CHUNK_BYTES
        while position < part.end:
            size = min(chunk_bytes, part.end - position)
            try:
                data = await file.read(position, size)
            except BookieStorageError as error:
                logger.warning(
                    "scrubbing: %s; to do: nothing, damage is logged and repaired; see to "
                    "the disk if this comes again",
                    error,
                )
                position = await self._scrub_unreadable(file, part, position, size, report)
                continue
            stop, cut_bytes = await self._core.disk.compute(_walk, part, data, position)
            report.bytes_read += stop - position
            if not cut_bytes and stop < part.end:
                report.damaged_records += 1
                stop = self._note_damaged_record(part, stop)
            chunk_bytes = max(_CHUNK_BYTES, cut_bytes)  # for a large record
            position = stop
            await asyncio.sleep(size / self.config.bytes_per_second)

    async def _scrub_unreadable(
        self, file: DiskFile, part: _Part, position: int, size: int, report: ScrubReport
    ) -> int:
        """Read the entries of an unreadable part singly; return the offset to continue at."""
        report.damaged_records += 1
        columns = part.columns()
        if columns is None:
            return part.end
        starts = columns.offsets.astype(np.int64) - RECORD_HEADER_BYTES
        for row in np.flatnonzero((starts >= position) & (starts < position + size)).tolist():
            location = _location(part.header.number, columns, row)
            (found,) = await read_run(file, [location])
            if not isinstance(found, EntryFrame):
                self._note_damaged(location)
            await asyncio.sleep(0)
        return int(min(starts[starts >= position + size], default=part.end))

    def _note_damaged_record(self, part: _Part, position: int) -> int:
        """Note the damaged record at `position`; return the offset of the next known one."""
        number = part.header.number
        logger.error(
            "the record at offset %d of %s is damaged; to do: nothing, a copy of another bookie "
            "replaces its entry; replace the disk if this comes again",
            position,
            file_name(number),
        )
        # The next start reads the newest file whole, and would refuse the damage.
        self._core.log.roll_from(number)
        columns = part.columns()
        if columns is None:
            return part.end
        starts = columns.offsets.astype(np.int64) - RECORD_HEADER_BYTES
        for row in np.flatnonzero(starts == position).tolist():
            self._note_damaged(_location(number, columns, row))
        return int(min(starts[starts > position], default=part.end))

    def _note_damaged(self, location: Location) -> None:
        if self._core.is_live(location.ledger_id):
            self._core.reader.note_damaged(location)

    # Footers

    async def _make_footer_again(
        self, file: DiskFile, part: _Part, index: FileIndex, report: ScrubReport
    ) -> None:
        """Write the footer that the records give; all of them are intact."""
        number = part.header.number
        try:
            buffers = await self._core.disk.compute(
                encode_footer_record,
                index,
                part.header,
                offset=part.end,
                sequence=part.record_count,
            )
            if number not in self._core.files:
                return
            footer = b"".join(buffers)
            # Otherwise it is written over in place, so that a crash leaves no less of it than there
            # was.
            if file.size != part.end + len(footer):
                await file.truncate(part.end)
            rewrite = partial(file.rewrite, part.end, footer)
            await write_with_room(self._core.disk, len(footer), rewrite)
            # The handle and the footer in memory are of the file as it was.
            self._core.handles.let_go(number)
            await self._core.handles.read_footer(number)
        except BookieStorageError as error:
            logger.warning(
                "cannot make the footer of %s again: %s; to do: free space, or see to the disk; "
                "the next pass tries again",
                file_name(number),
                error,
            )
            return
        logger.warning(
            "made the footer of %s again; to do: nothing, but replace the disk if this comes often",
            file_name(number),
        )
        self._core.damage.footer_is_whole(number)
        report.footers_made_again += 1


def _walk(part: _Part, view: memoryview, offset: int) -> tuple[int, int]:
    """Verify the intact records in `view`, which begins at `offset`.

    Returns the offset where they end, and how many bytes of the next record are needed to decode
    it; 0 if it is damaged, or if there is none.
    """
    records = IntactRecords(view, offset, part.header, end=part.end)
    try:
        for each in records:
            part.record_count += 1
            if part.index is not None:
                each.take_into(part.index)
    except BookieStorageError as error:
        logger.warning(
            "scrubbing: %s; to do: nothing, damage is logged and repaired; see to the "
            "disk if this comes again",
            error,
        )  # a record of a type that this version never writes
    return records.position, records.cut_bytes


def _location(number: int, columns: EntryColumns, row: int) -> Location:
    ledger_id, entry_id, offset, size = (int(column[row]) for column in columns)
    return Location(entry_id, number, offset, size, ledger_id)


def _first_record(columns: EntryColumns | None, end: int) -> int:
    """Return the offset of the first entry's record; records before it are unknown."""
    if columns is None or not len(columns.offsets):
        return end
    return int(columns.offsets.min()) - RECORD_HEADER_BYTES
