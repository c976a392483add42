"""The read half of the entry log: finding entries and reading them, verified.

Looking up does not wait, but for the footer of a sealed file that is not in memory; reading does.

An entry may be held twice: once compaction has copied it, or once its first copy was found damaged.
The newest durable copy is the one that counts.  The file of an older one may be dropped at any
time, so whoever finds its file gone looks again.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from bookie.files.entry_runs import COUNT_MAX, EntryRun, first_run, joined, scattered
from bookie.files.format import (
    RECORD_HEADER_BYTES,
    FileHeader,
    file_name,
    read_record_header,
)
from bookie.files.listed_ranges import RangePage, joined_ranges
from bookie.files.read_runs import decode_at, read_run, runs_of
from bookie.files.unsealed import Location
from dlcore.errors import (
    BookieStorageError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from dlcore.ids import INVALID_ENTRY_ID
from dlcore.wire.digest import EntryFrame, is_sound

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bookie.files.damage import DamageLog
    from bookie.files.entry_log import EntryLog
    from bookie.files.index import LedgerEntries
    from bookie.files.sealed_handles import SealedHandles
    from bookie.ledger_state import LedgerState
    from dlcore.wire.frames import FrameRun

_ENTRY_ID_MAX = 2**63 - 1
_NO_IDS = np.array([], np.int64)
_LISTED_COUNT = 16_384
"""Entries of one file that one step of a list looks at, so that it delays nobody."""
_LOOKUP_COUNT = 256
"""Entries looked up at a time while a chunk is filled, at most."""
_LOOKUP_COUNT_FIRST = 4
_LOOKUP_GROWTH = 4
_FAR_BEHIND = 16
"""Confirmed entries that a follower lacks, from which on it gets them as a reader of a range does:
for few of them looking each up is quicker."""
_FOUND_MAX = 64
"""Places looked up and not yet read from, of readers who are expected to go on; 100 KB each."""


class LargerEntryError(Exception):
    """The next entry alone is larger than what may be read; nothing was read.

    It never leaves the bookie: who has the room of `size_bytes` asks again.
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
        ledgers: which sealed files may hold what.
        damage: told of every entry found damaged.
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
                Location(entry_id, number, offset, size, ledger_id)
                for entry_id, offset, size in entries.between(
                    first_entry_id, last_entry_id, count_max
                )
            )
            found = self._newest_copies(found)
        return found[:count_max]

    def find_all(self, ledger_id: int, wanted: range, *, bytes_max: int) -> list[Location]:
        """Return where the first `wanted` entries are, up to the first that is not held.

        At most `bytes_max` bytes of frames; durable or not.  Raises: LargerEntryError.
        """
        chunk: list[Location] = []
        size = 0
        next_id, last_id = wanted.start, wanted.stop - 1  # a range of all ids has no len()
        count_max = _LOOKUP_COUNT_FIRST
        while next_id <= last_id:
            found = self.between(ledger_id, next_id, last_id, count_max=count_max)
            count_max = min(_LOOKUP_COUNT, count_max * _LOOKUP_GROWTH)
            for location in found:
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
        """Return where the first `wanted` entries are, as far as they follow each other in a file.

        At most `bytes_max` bytes of frames; durable or not.  None: one by one they may be found
        (`find_all`).  What else was found is kept for whoever goes on there; should a better copy
        come, the one that is kept is the same or shows its damage.  Raises: LargerEntryError.
        """
        run = self._found.pop((ledger_id, wanted.start, wanted.step), None)
        if run is None:
            run = self._look_up_run(ledger_id, wanted)
        if run is None:
            return None
        check_room(int(run.sizes[0]), bytes_max)
        run, rest = run.split(bytes_max, wanted.stop - 1)
        if rest is not None:
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
        newer = next(sources, None)
        return run if run is None or newer is None else run.before(newer[0])

    async def read_next(self, ledger_id: int, wanted: range, *, bytes_max: int) -> FrameRun | None:
        """Return the verified frames of the first `wanted` entries, as `find_run` finds them.

        None: one by one they may be had.  Raises: LargerEntryError.
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
        """Return many verified frames from an entry on that are durable and confirmed.

        None: they are few, or some are not held here; `find_confirmed` finds the others.
        Raises: LargerEntryError.
        """
        state = self._ledgers.get(ledger_id)
        if state is None or state.last_add_confirmed - first_entry_id < _FAR_BEHIND:
            return None
        wanted = range(first_entry_id, state.last_add_confirmed + 1)
        run = self.find_run(ledger_id, wanted, bytes_max=bytes_max)
        if run is None or not self._log.unsealed.is_durable_at(run.file_number, run.last_offset):
            return None
        is_whole = run.frames_bytes > bytes_max // 2 or run.entry_ids[-1] == wanted[-1]
        return await self._read_all(ledger_id, run) if is_whole else None

    def read_newest(self, ledger_id: int, entry_id: int, *, bytes_max: int) -> memoryview | None:
        """Return the verified frame of an entry if it is the last confirmed one, and in memory.

        None: it is not durable, or was stored long ago.  Mostly the ledger's next entry, which told
        that this one is confirmed, is here too.  Raises: LargerEntryError.
        """
        state = self._ledgers.get(ledger_id)
        if state is None or state.last_add_confirmed != entry_id:
            return None
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
        if file is None or not self._log.unsealed.is_durable_at(index.number, offset):
            return None
        check_room(size, bytes_max)
        data = file.read_recent(offset, size)
        location = Location(entry_id, index.number, offset, size, ledger_id)
        is_intact = data is not None and isinstance(decode_at(data, location), EntryFrame)
        return data if is_intact else None

    async def _read_all(self, ledger_id: int, run: EntryRun) -> FrameRun | None:
        """Return the verified frames of a run that is durable; None if not all can be had."""
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
        return frames if is_sound(frames, ledger_id=ledger_id, entry_ids=run.entry_ids) else None

    def find_confirmed(
        self, ledger_id: int, first_entry_id: int, *, bytes_max: int
    ) -> tuple[list[Location], int]:
        """Return where durable entries from `first_entry_id` to the LAC are, and how far that is.

        It ends before the first entry that is not durable yet, and after `bytes_max` bytes.
        Raises: LargerEntryError.
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
                    return chunk, location.entry_id - 1
                check_room(size, bytes_max)
                chunk.append(location)
            if len(found) < _LOOKUP_COUNT:
                break
            first_entry_id = found[-1].entry_id + 1
        return chunk, confirmed

    def durable_ranges(self, ledger_id: int, first_entry_id: int) -> RangePage:
        """Return runs of durable entries from an entry on, as far as one step looks."""
        end: int | None = None  # so far all that is held is known
        found = [_NO_IDS]
        for lowest, number, entries in self._sources(ledger_id, first_entry_id, _ENTRY_ID_MAX):
            last = _ENTRY_ID_MAX if end is None else end
            if lowest > last:
                break
            ids, offsets, _ = entries.columns_between(first_entry_id, last, _LISTED_COUNT)
            if len(ids) == _LISTED_COUNT:
                end = int(ids[-1])
            found.append(ids[offsets < self._log.unsealed.durable_offset(number)])
        ids = np.concatenate(found)
        if end is not None:
            ids = ids[ids <= end]
        ids.sort()
        firsts, lasts = joined_ranges(ids, ids)
        return RangePage(firsts.tolist(), lasts.tolist(), None if end is None else end + 1)

    async def refuse_absent(self, ledger_id: int, entry_id: int) -> None:
        """Raise the proven no; return if the entry can be found after all.

        Raises:
            NoSuchLedgerError, NoSuchEntryError: proven no.
            BookieStorageError: the log failed, or where the entry would be found is damaged: then
                nothing absent is proven.
        """
        self._log.commits.check()
        await self.prove_absent(ledger_id, entry_id)
        if self.find(ledger_id, entry_id) is not None:
            return
        if ledger_id not in self._ledgers:
            raise NoSuchLedgerError(f"ledger {ledger_id} is unknown here")
        raise NoSuchEntryError(f"entry {ledger_id}:{entry_id} is not held here")

    async def prove_absent(self, ledger_id: int, entry_id: int) -> None:
        """Verify every footer that would name the entry, as it is on the disk now.

        A footer in use may have rotted since it was read, and a rotted one hides entries.  An
        unsealed file's index is in memory and needs no proof.  Files may be dropped meanwhile: if
        the entry can be found afterwards, nothing was proven.

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
                self._handles.let_go(number)
                raise BookieStorageError(
                    f"entry {ledger_id}:{entry_id} cannot be called absent: the footer of "
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

        It has a checksum of its own, so it tells what was stored even if that cannot be read.
        """
        number = location.file_number
        file = self._handles.file(number)
        if file is None:
            return None
        unsealed = self._log.unsealed.durable_part(number)
        if unsealed is None:
            place = self._handles.place(number)
            assert place is not None  # else it was dropped, and not open
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
            elif self._handles.file(number) is not file:  # it was closed in the middle
                return await self._read_run(run)
            else:
                self.note_damaged(location)
                raise found
        return frames

    async def _read_again(self, location: Location) -> memoryview:
        """Read an entry whose file is gone from where it is now."""
        found = self.find(location.ledger_id, location.entry_id)
        if found is None or not self._log.unsealed.is_durable(found):
            raise BookieStorageError(
                f"entry {location.ledger_id}:{location.entry_id}: "
                f"{file_name(location.file_number)} was dropped as garbage meanwhile"
            )
        (frame,) = await self.read([found])
        return frame

    def note_damaged(self, location: Location) -> bool:
        """Remember damage to the copy that counts, and return True; an older one matters not."""
        try:
            counts = self.find(location.ledger_id, location.entry_id) == location
        except BookieStorageError:
            counts = True  # a newer copy cannot be found, if there is one
        if counts:
            self._log.roll_from(location.file_number)
            self._damage.note_entry(location.ledger_id, location.entry_id, location.file_number)
        return counts

    def _newest_copies(self, found: list[Location]) -> list[Location]:
        """Return the copies that count, sorted by entry."""
        found.sort()
        if len({location.entry_id for location in found}) == len(found):
            return found
        unsealed = self._log.unsealed
        kept: list[Location] = []
        for location in found:
            if not kept or kept[-1].entry_id != location.entry_id:
                kept.append(location)
            elif unsealed.is_durable(location) or not unsealed.is_durable(kept[-1]):
                kept[-1] = location
        return kept

    def _unproven(self, ledger_id: int, entry_id: int, proven: set[int]) -> int | None:
        """Return a file that may hold the entry, and is none of the proven ones."""
        state = self._ledgers.get(ledger_id)
        files = [] if state is None else state.files_between(entry_id, entry_id)
        return next((number for _, number in files if number not in proven), None)

    def _sources(
        self, ledger_id: int, first_entry_id: int, last_entry_id: int
    ) -> Iterator[tuple[int, int, LedgerEntries]]:
        """Yield (lowest entry id, file, entries) of every file that may hold some of the range.

        They come by their lowest entry.  A footer is looked at when its turn comes, so that a
        ledger in many files does not hold the footers of all of them in memory.
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
