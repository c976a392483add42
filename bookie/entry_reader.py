"""The read half of the entry log: finding entries and reading them, verified.

Looking up does not wait; reading does.  Sealed files are opened when needed and the most recently
used ones stay open, because a big disk holds more files than a process may have descriptors.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bookie.entry_log import EntryLog, Location
from bookie.entry_log_format import file_name
from bookie.index import LedgerEntries, SealedIndex, read_footer
from dlcore.errors import BookieStorageError, DigestMismatchError
from dlcore.ids import INVALID_ENTRY_ID
from dlcore.ledger.digest import decode_frame

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bookie.disk_port import Disk, DiskFile
    from bookie.ledger_state import LedgerState

_GAP_BYTES_MAX = 16 * 1024
"""Frames this close in a file are read together: copying a gap is cheaper than another call."""
_RUN_BYTES_MAX = 4 * 1024 * 1024
_ENTRY_ID_MAX = 2**63 - 1
_LOOKUP_COUNT = 256
"""Entries looked up at a time while a chunk is filled."""


class _FooterPlace(NamedTuple):
    """Where a sealed file's footer is, and what its checksum starts from."""

    offset: int
    seed: int


class _OpenFile(NamedTuple):
    """A sealed file with its footer in place."""

    file: DiskFile
    footer: SealedIndex


class EntryReader:
    """Finds and reads entries of sealed and unsealed files."""

    def __init__(
        self,
        disk: Disk,
        log: EntryLog,
        ledgers: Mapping[int, LedgerState],
        *,
        open_files_max: int,
    ) -> None:
        self._disk = disk
        self._log = log
        self._ledgers = ledgers
        self._open_files_max = open_files_max
        self._footers: dict[int, _FooterPlace] = {}
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()

    def add_sealed(self, number: int, *, footer_offset: int, seed: int) -> None:
        """Take note of a sealed file; `seed` is that of its header."""
        self._footers[number] = _FooterPlace(footer_offset, seed)

    def forget(self, number: int) -> None:
        """Let go of a file that is about to be deleted."""
        del self._footers[number]
        self._close(number)

    def close(self) -> None:
        """Close every sealed file."""
        while self._open:
            self._open.popitem()[1].file.close()

    def find(self, ledger_id: int, entry_id: int) -> Location | None:
        """Return where the entry is, durable or not."""
        found = self.between(ledger_id, entry_id, entry_id, count_max=1)
        return found[0] if found else None

    def between(
        self, ledger_id: int, first_entry_id: int, last_entry_id: int, *, count_max: int
    ) -> list[Location]:
        """Return the first `count_max` held entries of the range, ascending, durable or not."""
        found: list[Location] = []
        for lowest, number, entries in self._sources(ledger_id, first_entry_id, last_entry_id):
            if len(found) >= count_max and lowest > found[count_max - 1].entry_id:
                break  # sources come by their lowest entry: none of the rest can matter
            found += (
                Location(entry_id, number, offset, size)
                for entry_id, offset, size in entries.between(
                    first_entry_id, last_entry_id, count_max
                )
            )
            found.sort()
        return found[:count_max]

    def find_all(self, ledger_id: int, wanted: range, *, bytes_max: int) -> list[Location]:
        """Return where the first `wanted` entries are, up to the first that is not held.

        At most `bytes_max` bytes of frames, or one frame; durable or not.
        """
        chunk: list[Location] = []
        size = 0
        next_id, last_id = wanted.start, wanted.stop - 1  # a range of all ids has no len()
        while next_id <= last_id:
            found = self.between(ledger_id, next_id, last_id, count_max=_LOOKUP_COUNT)
            for location in found:
                if location.entry_id < next_id:
                    continue
                size += location.size
                if location.entry_id != next_id or (chunk and size > bytes_max):
                    return chunk
                chunk.append(location)
                next_id += wanted.step
            if not found:
                break
        return chunk

    def find_confirmed(
        self, ledger_id: int, first_entry_id: int, *, bytes_max: int
    ) -> tuple[list[Location], int]:
        """Return where durable entries from `first_entry_id` to the LAC are, and how far that is.

        It ends before the first entry that is not durable yet, and after `bytes_max` bytes or one
        frame.
        """
        state = self._ledgers.get(ledger_id)
        confirmed = INVALID_ENTRY_ID if state is None else state.last_add_confirmed
        chunk: list[Location] = []
        size = 0
        while first_entry_id <= confirmed:
            found = self.between(ledger_id, first_entry_id, confirmed, count_max=_LOOKUP_COUNT)
            for location in found:
                size += location.size
                is_full = bool(chunk) and size > bytes_max
                if is_full or not self._log.is_durable(location):
                    return chunk, location.entry_id - 1
                chunk.append(location)
            if len(found) < _LOOKUP_COUNT:
                break
            first_entry_id = found[-1].entry_id + 1
        return chunk, confirmed

    def durable_ranges(self, ledger_id: int) -> list[tuple[int, int]]:
        """Return (first, last) of the runs of durable entries of the ledger, ascending."""
        columns = [
            np.array(entries.entry_ids)[
                np.array(entries.offsets) < self._log.durable_offset(number)
            ]
            for _, number, entries in self._sources(ledger_id, 0, _ENTRY_ID_MAX)
        ]
        if not columns:
            return []
        ids = np.unique(np.concatenate(columns))
        breaks = np.flatnonzero(np.diff(ids) != 1)
        firsts = ids[np.concatenate(([0], breaks + 1))] if len(ids) else ids
        lasts = ids[np.concatenate((breaks, [len(ids) - 1]))] if len(ids) else ids
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

    async def prove_absent(self, ledger_id: int, entry_id: int) -> None:
        """Verify every footer that would name the entry, as it is on the disk now.

        A footer in use may have rotted since it was opened, and a rotted one hides entries.  An
        unsealed file's index is in memory and needs no proof.

        Raises:
            BookieStorageError: a footer is damaged, or does name the entry.
        """
        state = self._ledgers.get(ledger_id)
        files = [] if state is None else state.files_between(entry_id, entry_id)
        for _, number in files:
            file, _ = self._opened(number)
            place = self._footers[number]
            data = await file.read(place.offset, file.size - place.offset)
            footer = await self._disk.compute(
                read_footer, data, offset=place.offset, number=number, seed=place.seed
            )
            entries = None if footer is None else footer.entries(ledger_id)
            if entries is None or any(entries.between(entry_id, entry_id, 1)):
                self._close(number)
                raise BookieStorageError(
                    f"entry {ledger_id}:{entry_id} cannot be called absent: the footer of "
                    f"{file_name(number)} is damaged"
                )

    async def read(self, ledger_id: int, locations: Sequence[Location]) -> list[memoryview]:
        """Return the verified frames at `locations`.

        Raises:
            BookieStorageError: a frame is damaged or cannot be read.
        """
        frames: list[memoryview] = []
        for run in _runs(locations):
            start = run[0].offset
            file = self._file(run[0].file_number)
            data = await file.read(start, run[-1].offset + run[-1].size - start)
            for location in run:
                frame = data[location.offset - start :][: location.size]
                self._verify(frame, ledger_id, location)
                frames.append(frame)
        return frames

    def _verify(self, frame: memoryview, ledger_id: int, location: Location) -> None:
        try:
            decode_frame(frame, ledger_id=ledger_id, entry_id=location.entry_id)
        except DigestMismatchError as error:
            raise BookieStorageError(
                f"entry {ledger_id}:{location.entry_id} is damaged at offset {location.offset} of "
                f"{file_name(location.file_number)}: {error}"
            ) from error

    def _sources(
        self, ledger_id: int, first_entry_id: int, last_entry_id: int
    ) -> list[tuple[int, int, LedgerEntries]]:
        """Return (lowest entry id, file, entries) of every file that may hold some of the range."""
        sources: list[tuple[int, int, LedgerEntries]] = []
        for index in self._log.unsealed_indexes():
            entries = index.entries(ledger_id)
            if entries is not None and len(entries.entry_ids):
                sources.append((int(entries.entry_ids[0]), index.number, entries))
        state = self._ledgers.get(ledger_id)
        if state is not None:
            for lowest, number in state.files_between(first_entry_id, last_entry_id):
                entries = self._opened(number).footer.entries(ledger_id)
                if entries is None:
                    raise BookieStorageError(
                        f"{file_name(number)}: its footer lost ledger {ledger_id}"
                    )
                sources.append((lowest, number, entries))
        sources.sort(key=lambda source: source[:2])
        return sources

    def _file(self, number: int) -> DiskFile:
        file = self._log.file(number)
        return self._opened(number).file if file is None else file

    def _opened(self, number: int) -> _OpenFile:
        opened = self._open.get(number)
        if opened is not None:
            self._open.move_to_end(number)
            return opened
        place = self._footers.get(number)
        if place is None:
            raise BookieStorageError(f"{file_name(number)} was dropped as garbage meanwhile")
        file = self._disk.open(file_name(number))
        view = file.view(place.offset, file.size - place.offset)
        footer = read_footer(view, offset=place.offset, number=number, seed=place.seed)
        if footer is None:
            file.close()
            raise BookieStorageError(f"the footer of {file_name(number)} is damaged")
        opened = self._open[number] = _OpenFile(file, footer)
        while len(self._open) > self._open_files_max:
            self._open.popitem(last=False)[1].file.close()
        return opened

    def _close(self, number: int) -> None:
        opened = self._open.pop(number, None)
        if opened is not None:
            opened.file.close()


def _runs(locations: Sequence[Location]) -> Iterator[list[Location]]:
    """Group neighbours in one file that are read in one go."""
    run: list[Location] = []
    for location in locations:
        if run and not _belongs(location, run):
            yield run
            run = []
        run.append(location)
    if run:
        yield run


def _belongs(location: Location, run: list[Location]) -> bool:
    last_end = run[-1].offset + run[-1].size
    return (
        location.file_number == run[0].file_number
        and last_end <= location.offset <= last_end + _GAP_BYTES_MAX
        and location.offset + location.size - run[0].offset <= _RUN_BYTES_MAX
    )
