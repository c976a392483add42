"""The reading half of the entry log: finding entries and reading them, verified.

A lookup waits only for the footer of a sealed file that is not in memory.  Reading waits for the
disk.

An entry may be held twice: after compaction has copied it, or after its first copy was found
damaged.  The newest durable copy is the valid one.  The file of an older copy may be dropped at any
time; a reader that finds its file gone looks the entry up again.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from bookie.files.entry_runs import (
    COUNT_MAX,
    EntryRun,
    RangePage,
    first_run,
    joined,
    joined_ranges,
    scattered,
)
from bookie.files.format import RECORD_HEADER_BYTES, FileHeader, file_name, read_record_header
from bookie.files.index import Location
from dlcore.base.errors import (
    BookieStorageError,
    DigestMismatchError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from dlcore.base.ids import INVALID_ENTRY_ID
from dlcore.wire.frames import EntryFrame, decode_frame, is_sound

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bookie.disks.port import DiskFile
    from bookie.files.damage import DamageLog
    from bookie.files.entry_log import EntryLog
    from bookie.files.index import LedgerEntries, LedgerState
    from bookie.files.sealed_files import SealedHandles
    from dlcore.wire.frames import FrameRun


_GAP_BYTES_MAX = 16 * 1024
"""Largest gap between frames that are read together: to copy the gap is cheaper than another call.
"""
_RUN_BYTES_MAX = 4 * 1024 * 1024
"""Bounds the memory of one read: the budget of readers counts frames, and no gaps between them."""


async def read_run(
    file: DiskFile, run: Sequence[Location]
) -> list[EntryFrame | BookieStorageError]:
    """Return the verified frame at each location of a run, or the error of that frame.

    If the whole run cannot be read at once, the frames are read singly, to separate the damaged
    ones from the intact ones.
    """
    start = run[0].offset
    try:
        data = await file.read(start, run[-1].offset + run[-1].size - start)
    except BookieStorageError as error:
        if len(run) == 1:
            return [error]
        # One bad sector fails the call for all of its bytes.
        return [each for location in run for each in await read_run(file, [location])]
    return [
        decode_at(data[location.offset - start :][: location.size], location) for location in run
    ]


def decode_at(frame: memoryview, location: Location) -> EntryFrame | BookieStorageError:
    """Return the frame verified as the entry at `location`, or its error."""
    try:
        return decode_frame(frame, ledger_id=location.ledger_id, entry_id=location.entry_id)
    except DigestMismatchError as error:
        return BookieStorageError(
            f"entry {location.ledger_id}:{location.entry_id} is damaged at offset "
            f"{location.offset} of {file_name(location.file_number)}: {error}"
        )


def runs_of(locations: Sequence[Location]) -> Iterator[list[Location]]:
    """Group neighbours in one file into runs that are read together."""
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


_ENTRY_ID_MAX = 2**63 - 1
_NO_IDS = np.array([], np.int64)
_LISTED_COUNT = 16_384
"""Entries of one file that one step of a listing examines, so that the step stays short."""
_LOOKUP_COUNT = 256
"""Most entries that are looked up at a time while a chunk is filled."""
_LOOKUP_COUNT_FIRST = 4
"""Few at first: a chunk may be one large entry, and the others would be looked up in vain."""
_LOOKUP_GROWTH = 4
_FAR_BEHIND = 16
"""A follower that lacks at least this many confirmed entries gets them as a reader of a range does.
For fewer entries single lookups are faster."""
_FOUND_MAX = 64
"""Most runs that are looked up and not yet read, for readers that are expected to continue; up to
100 KB each."""


class LargerEntryError(Exception):
    """The next entry alone is larger than what may be read; nothing was read.

    It never leaves the bookie: the caller asks again once it may read `size_bytes`.
    """

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"the next frame has {size_bytes} bytes")
        self.size_bytes = size_bytes


def check_room(size_bytes: int, bytes_max: int) -> None:
    """Raise `LargerEntryError` for a frame that is larger than `bytes_max`."""
    if size_bytes > bytes_max:
        raise LargerEntryError(size_bytes)


class EntryReader:
    """Finds and reads entries of sealed and unsealed files.

    Args:
        log: the files not yet sealed.
        handles: all files, and the footers of sealed ones.
        ledgers: the states that name the sealed files of each ledger.
        damage: notes every entry that is found damaged.
    """

    def __init__(
        self,
        log: EntryLog,
        handles: SealedHandles,
        ledgers: Mapping[int, LedgerState],
        damage: DamageLog,
    ) -> None:
        self._log = log
        self._handles = handles
        self._ledgers = ledgers
        self._damage = damage
        self._found: OrderedDict[tuple[int, int, int], EntryRun] = OrderedDict()

    def find(self, ledger_id: int, entry_id: int) -> Location | None:
        """Return the location of the entry, durable or not."""
        found = self.between(ledger_id, entry_id, entry_id, count_max=1)
        return found[0] if found else None

    def between(
        self, ledger_id: int, first_entry_id: int, last_entry_id: int, *, count_max: int
    ) -> list[Location]:
        """Return the first `count_max` held entries of the range, ascending, durable or not."""
        found: list[Location] = []
        for lowest, number, entries in self._sources(ledger_id, first_entry_id, last_entry_id):
            if len(found) >= count_max and lowest > found[count_max - 1].entry_id:
                # Sources are sorted by their lowest entry, so no later one has an entry of the
                # result.
                break
            found += (
                Location(entry_id, number, offset, size, ledger_id)
                for entry_id, offset, size in entries.between(
                    first_entry_id, last_entry_id, count_max
                )
            )
            found = self._newest_copies(found)
        return found[:count_max]

    def find_all(self, ledger_id: int, wanted: range, *, bytes_max: int) -> list[Location]:
        """Return the locations of the first `wanted` entries, up to the first that is not held.

        They have at most `bytes_max` bytes of frames, and may be not durable.  Raises:
        LargerEntryError.
        """
        chunk: list[Location] = []
        size = 0
        next_id, last_id = wanted.start, wanted.stop - 1  # a range of all ids has no len()
        count_max = _LOOKUP_COUNT_FIRST
        while next_id <= last_id:
            found = self.between(ledger_id, next_id, last_id, count_max=count_max)
            count_max = min(_LOOKUP_COUNT, count_max * _LOOKUP_GROWTH)
            for location in found:
                # With a stride, the entries between the wanted ones are found as well.
                if location.entry_id < next_id:
                    continue
                size += location.size
                if location.entry_id != next_id or (chunk and size > bytes_max):
                    return chunk
                check_room(size, bytes_max)
                chunk.append(location)
                next_id += wanted.step
            if not found:
                break
        return chunk

    def find_run(self, ledger_id: int, wanted: range, *, bytes_max: int) -> EntryRun | None:
        """Return the first `wanted` entries as one run, if they follow each other in a file.

        The run has at most `bytes_max` bytes of frames, and may be not durable.  None: `find_all`
        may find the entries singly.  The rest of the lookup is kept for a reader that continues
        there.  If a newer copy of an entry is written meanwhile, the kept one has the same bytes,
        or its checksum shows the damage.  Raises: LargerEntryError.
        """
        run = self._found.pop((ledger_id, wanted.start, wanted.step), None)
        if run is None:
            run = self._look_up_run(ledger_id, wanted)
        if run is None:
            return None
        check_room(int(run.sizes[0]), bytes_max)
        run, rest = run.split(bytes_max, wanted.stop - 1)
        if rest is not None:
            # Readers ask chunk by chunk, and one look-up serves several chunks.
            self._found[ledger_id, int(rest.entry_ids[0]), wanted.step] = rest
            if len(self._found) > _FOUND_MAX:
                self._found.popitem(last=False)
        return run

    def _look_up_run(self, ledger_id: int, wanted: range) -> EntryRun | None:
        first, last = wanted.start, wanted.stop - 1
        sources = self._sources(ledger_id, first, last)
        source = next(sources, None)
        if source is None:
            return None
        _, number, entries = source
        columns = entries.columns_between(first, last, COUNT_MAX * wanted.step)
        run = first_run(*columns, wanted=wanted, file_number=number)
        # From the next file's lowest entry on, that file may have newer copies.
        newer = next(sources, None)
        return run if run is None or newer is None else run.before(newer[0])

    async def read_next(self, ledger_id: int, wanted: range, *, bytes_max: int) -> FrameRun | None:
        """Return the verified frames of the first `wanted` entries, as `find_run` finds them.

        None: they may be readable singly.  Raises: LargerEntryError.
        """
        run = self.find_run(ledger_id, wanted, bytes_max=bytes_max)
        if run is None:
            return None
        if not self._log.unsealed.is_durable_at(run.file_number, run.last_offset):
            await self._log.commits.flush()
        return await self._read_all(ledger_id, run)

    async def read_confirmed(
        self, ledger_id: int, first_entry_id: int, *, bytes_max: int
    ) -> FrameRun | None:
        """Return many verified frames of durable and confirmed entries, from an entry on.

        None: they are few, or some are not held here; `find_confirmed` finds them singly.  Raises:
        LargerEntryError.
        """
        state = self._ledgers.get(ledger_id)
        if state is None or state.last_add_confirmed - first_entry_id < _FAR_BEHIND:
            return None
        wanted = range(first_entry_id, state.last_add_confirmed + 1)
        run = self.find_run(ledger_id, wanted, bytes_max=bytes_max)
        if run is None or not self._log.unsealed.is_durable_at(run.file_number, run.last_offset):
            return None
        # A short run is not worth its message, unless it reaches the LAC.
        is_whole = run.frames_bytes > bytes_max // 2 or run.entry_ids[-1] == wanted[-1]
        return await self._read_all(ledger_id, run) if is_whole else None

    def read_newest(self, ledger_id: int, entry_id: int, *, bytes_max: int) -> memoryview | None:
        """Return the verified frame of an entry if it is the last confirmed one, and in memory.

        None: it is not durable, or was stored long ago.  Mostly the ledger's next entry is held
        too, because that one carried the LAC that confirms this one.  Raises: LargerEntryError.
        """
        state = self._ledgers.get(ledger_id)
        if state is None or state.last_add_confirmed != entry_id:
            return None
        # Only the newest file: the entry that followers wait for was added a moment ago.
        current = self._log.unsealed.current
        index = current.index
        entries = index.entries(ledger_id)
        if entries is None:
            return None
        position = bisect.bisect_right(entries.entry_ids, entry_id) - 1
        if position < 0 or entries.entry_ids[position] != entry_id:
            return None
        offset, size = int(entries.offsets[position]), int(entries.sizes[position])
        file = current.file
        # A crash could lose what a follower has seen, so nothing is shown that is not durable.
        if file is None or not self._log.unsealed.is_durable_at(index.number, offset):
            return None
        check_room(size, bytes_max)
        data = file.read_recent(offset, size)
        location = Location(entry_id, index.number, offset, size, ledger_id)
        is_intact = data is not None and isinstance(decode_at(data, location), EntryFrame)
        return data if is_intact else None

    async def _read_all(self, ledger_id: int, run: EntryRun) -> FrameRun | None:
        """Return the verified frames of a durable run; None if any of them cannot be read."""
        file = self._handles.file(run.file_number)
        if file is None:
            return None
        start = int(run.offsets[0])
        try:
            if run.is_copied:
                frames = joined(await file.read(start, run.span_bytes), run)
            else:
                frames, buffers = scattered(run)
                await file.read_into(start, buffers)
        except BookieStorageError:
            return None
        # The caller reads the entries singly then, which finds out the damaged ones.
        return frames if is_sound(frames, ledger_id=ledger_id, entry_ids=run.entry_ids) else None

    def find_confirmed(
        self, ledger_id: int, first_entry_id: int, *, bytes_max: int
    ) -> tuple[list[Location], int]:
        """Return locations of durable entries up to the LAC, and the last entry id covered.

        They begin at `first_entry_id`.  They end before the first entry that is not durable yet,
        and after `bytes_max` bytes.  Raises: LargerEntryError.
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
                if is_full or not self._log.unsealed.is_durable(location):
                    # The entries between are not held here, so they are covered as well.
                    return chunk, location.entry_id - 1
                check_room(size, bytes_max)
                chunk.append(location)
            # Fewer than asked for: no further entry up to the LAC is held here.
            if len(found) < _LOOKUP_COUNT:
                break
            first_entry_id = found[-1].entry_id + 1
        return chunk, confirmed

    def durable_ranges(self, ledger_id: int, first_entry_id: int) -> RangePage:
        """Return ranges of durable entries from an entry on, as far as one step examines."""
        # The last entry id of this step; None: the step sees all held entries.
        end: int | None = None
        found = [_NO_IDS]
        for lowest, number, entries in self._sources(ledger_id, first_entry_id, _ENTRY_ID_MAX):
            last = _ENTRY_ID_MAX if end is None else end
            if lowest > last:
                break
            ids, offsets, _ = entries.columns_between(first_entry_id, last, _LISTED_COUNT)
            # The file may hold more entries behind these, so nothing is known about higher ids.
            if len(ids) == _LISTED_COUNT:
                end = int(ids[-1])
            found.append(ids[offsets < self._log.unsealed.durable_offset(number)])
        ids = np.concatenate(found)
        # An earlier file may have listed ids beyond the end that a later file set.
        if end is not None:
            ids = ids[ids <= end]
        ids.sort()
        firsts, lasts = joined_ranges(ids, ids)
        return RangePage(firsts.tolist(), lasts.tolist(), None if end is None else end + 1)

    async def refuse_absent(self, ledger_id: int, entry_id: int) -> None:
        """Raise the error that proves absence; return if the entry is found after all.

        Raises:
            NoSuchLedgerError, NoSuchEntryError: the absence is proven.
            BookieStorageError: the log failed, or the place where the entry would be is damaged, so
                that absence is not proven.
        """
        # After a failed write the log may lack entries that it has accepted, so it proves nothing.
        self._log.commits.check()
        await self.prove_absent(ledger_id, entry_id)
        # Files may have been sealed or dropped during the proof, and the entry added.
        if self.find(ledger_id, entry_id) is not None:
            return
        if ledger_id not in self._ledgers:
            raise NoSuchLedgerError(f"ledger {ledger_id} is unknown here")
        raise NoSuchEntryError(f"entry {ledger_id}:{entry_id} is not held here")

    async def prove_absent(self, ledger_id: int, entry_id: int) -> None:
        """Verify every footer that would name the entry, as it is on the disk now.

        A footer on the disk may have become damaged since it was read, and a damaged footer hides
        entries.  The index of an unsealed file is in memory and needs no proof.  Files may be
        dropped meanwhile: if the entry is found afterwards, its absence is not proven.

        Raises:
            BookieStorageError: a footer is damaged, or does name the entry.
        """
        proven: set[int] = set()
        while (number := self._unproven(ledger_id, entry_id, proven)) is not None:
            footer = await self._handles.read_footer(number)
            proven.add(number)
            if footer is None:
                continue
            entries = footer.entries(ledger_id)
            if entries is None or any(entries.between(entry_id, entry_id, 1)):
                # The footer in memory contradicts the disk, so the next use reads it again.
                self._handles.let_go(number)
                raise BookieStorageError(
                    f"entry {ledger_id}:{entry_id} may be stored here or not: the footer of "
                    f"{file_name(number)} is damaged"
                )

    async def read(self, locations: Sequence[Location]) -> list[memoryview]:
        """Return the verified frames at `locations`, which are durable.

        Raises:
            BookieStorageError: a frame is damaged or cannot be read.
        """
        frames: list[memoryview] = []
        for run in runs_of(locations):
            frames += await self._read_run(run)
        return frames

    async def stated_checksum(self, location: Location) -> int | None:
        """Return the checksum that the record of a damaged entry states, None if that is damaged.

        The record's header has its own checksum, so it proves which bytes were stored even if these
        cannot be read.
        """
        number = location.file_number
        file = self._handles.file(number)
        if file is None:
            return None
        unsealed = self._log.unsealed.durable_part(number)
        if unsealed is None:
            place = self._handles.place(number)
            assert place is not None  # else the file was dropped, and is not open
            header = FileHeader(number, {}, 0, place.seed)
        else:
            header = unsealed[0]
        start = location.offset - RECORD_HEADER_BYTES
        try:
            data = await file.read(start, RECORD_HEADER_BYTES)
            record = read_record_header(data, start, header, view_offset=start)
        except BookieStorageError:
            return None
        if record is None or record.payload_bytes != location.size:
            return None
        return record.payload_crc

    async def _read_run(self, run: list[Location]) -> list[memoryview]:
        number = run[0].file_number
        file = self._handles.file(number)
        if file is None:
            return [await self._read_again(location) for location in run]
        frames: list[memoryview] = []
        for location, found in zip(run, await read_run(file, run), strict=True):
            if isinstance(found, EntryFrame):
                frames.append(memoryview(found.data))
            elif self._handles.file(number) is not file:  # the file was closed during the read
                # A closed handle fails a read without any damage; the file may be open anew, or
                # dropped.
                return await self._read_run(run)
            else:
                self.note_damaged(location)
                raise found
        return frames

    async def _read_again(self, location: Location) -> memoryview:
        """Look up an entry whose file was dropped, and read it from its new location."""
        found = self.find(location.ledger_id, location.entry_id)
        if found is None or not self._log.unsealed.is_durable(found):
            raise BookieStorageError(
                f"entry {location.ledger_id}:{location.entry_id}: "
                f"{file_name(location.file_number)} was dropped as garbage meanwhile"
            )
        (frame,) = await self.read([found])
        return frame

    def note_damaged(self, location: Location) -> bool:
        """Remember damage to the valid copy, and return True; ignore damage to an older copy."""
        try:
            counts = self.find(location.ledger_id, location.entry_id) == location
        except BookieStorageError:
            counts = True  # if there is a newer copy, it cannot be found
        if counts:
            self._log.roll_from(location.file_number)
            self._damage.note_entry(location.ledger_id, location.entry_id, location.file_number)
        return counts

    def _newest_copies(self, found: list[Location]) -> list[Location]:
        """Return the valid copy of each entry, sorted by entry."""
        # By entry, then by file and offset: of two copies the later one is newer.
        found.sort()
        if len({location.entry_id for location in found}) == len(found):
            return found
        unsealed = self._log.unsealed
        kept: list[Location] = []
        for location in found:
            if not kept or kept[-1].entry_id != location.entry_id:
                kept.append(location)
            # A newer copy that a crash could still lose does not replace a durable one.
            elif unsealed.is_durable(location) or not unsealed.is_durable(kept[-1]):
                kept[-1] = location
        return kept

    def _unproven(self, ledger_id: int, entry_id: int, proven: set[int]) -> int | None:
        """Return a file that may hold the entry and is not in `proven`."""
        state = self._ledgers.get(ledger_id)
        files = [] if state is None else state.files_between(entry_id, entry_id)
        return next((number for _, number in files if number not in proven), None)

    def _sources(
        self, ledger_id: int, first_entry_id: int, last_entry_id: int
    ) -> Iterator[tuple[int, int, LedgerEntries]]:
        """Yield (lowest entry id, file, entries) of every file that may hold some of the range.

        The files come in the order of their lowest entries.  Each footer is read only when its file
        is reached, so that a ledger in many files does not need all footers in memory.
        """
        sources: list[tuple[int, int, LedgerEntries | None]] = []
        for index in self._log.unsealed.indexes():
            entries = index.entries(ledger_id)
            if entries is not None and len(entries.entry_ids):
                sources.append((int(entries.entry_ids[0]), index.number, entries))
        state = self._ledgers.get(ledger_id)
        if state is not None:
            for lowest, number in state.files_between(first_entry_id, last_entry_id):
                sources.append((lowest, number, None))
        # By lowest entry, so that `between` can stop early; then by file.
        sources.sort(key=lambda source: source[:2])
        for lowest, number, entries in sources:
            if entries is not None:
                yield lowest, number, entries
            elif self._handles.place(number) is not None:  # else it was dropped just now
                yield lowest, number, self._sealed_entries(number, ledger_id)

    def _sealed_entries(self, number: int, ledger_id: int) -> LedgerEntries:
        entries = self._handles.footer(number).entries(ledger_id)
        if entries is None:
            raise BookieStorageError(f"{file_name(number)}: its footer lost ledger {ledger_id}")
        return entries
