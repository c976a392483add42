"""The write half of the entry log: group commit, rolling, sealing, and stopping for good.

Every record gets its place when it is accepted, so the order of acceptance is the order on disk.
While one batch is written and synced, newcomers collect for the next; there is no timer.  A batch
that the device takes at once is written in the next turn of the event loop, with all that the
connections brought in this one; a task writes what has to wait for the device.  A file that is
full is sealed with its footer, and only then is the next one made and written to; so a batch is
durable only when everything accepted before it is.

After any failed write or sync nothing is written any more: what the device holds is unknown.  A
disk without room is no such failure: nothing was written, nothing after it is, and nobody is told
anything, until the same bytes fit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import crc32c
import numpy as np

from bookie.disks.port import DiskFullError, write_with_room
from bookie.files.entry_runs import interleaved
from bookie.files.format import (
    RECORD_HEADER_BYTES,
    RecordType,
    decode_file_header,
    encode_entry_headers,
    encode_fence,
    encode_file_header,
    encode_garbage,
    encode_lac,
    encode_record_header,
    file_header_bytes,
    file_name,
)
from bookie.files.index import FileIndex, encode_footer_record
from bookie.files.replay import NOTE_BYTES, WritePosition, note_newest
from bookie.files.unsealed import Batch, EntryLogEvents, UnsealedFile
from dlcore.background import BackgroundTasks
from dlcore.errors import BookieStorageError, BookieUnavailableError
from dlcore.wire.digest import frame_check

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bookie.config import StorageConfig
    from bookie.disks.port import Disk, DiskFile
    from bookie.files.format import FileHeader
    from bookie.files.replay import OpenedLog
    from dlcore.errors import BookieError
    from dlcore.wire.digest import BytesLike, EntryFrame, FollowingFrames
    from dlcore.wire.frames import FrameRun


T = TypeVar("T")

_OFFSET_MAX = 2**32
_SECTOR_BYTES = 4096
"""The most that a device loses at once."""
_MARK_BYTES = 2 * RECORD_HEADER_BYTES + _SECTOR_BYTES


class Location(NamedTuple):
    """Where an entry's frame is."""

    entry_id: int
    file_number: int
    offset: int
    size: int
    ledger_id: int


class EntryLog:
    """Records in, durability out; one event loop, and one task that runs `run`."""

    def __init__(
        self,
        disk: Disk,
        config: StorageConfig,
        opened: OpenedLog,
        *,
        owner: bytes,
        new_life: Callable[[], str],
        events: EntryLogEvents,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._disk = disk
        self._config = config
        self._owner = owner
        self._new_life = new_life
        self._events = events
        self._current = UnsealedFile(opened.index, opened.position, opened.content)
        self._current.file = opened.file
        self._current.is_noted = opened.is_noted
        self._unsealed = {opened.index.number: self._current}
        self._records_ends = {each.number: each.records_end for each in opened.sealed}
        self._batches: deque[Batch] = deque()
        self._writing: Batch | None = None
        self._wakeup = asyncio.Event()
        self._is_due = False  # the short way is taken in the next turn of the loop
        self._is_waiting = False  # the task has something to do
        self._handovers = BackgroundTasks()
        self._failure: BookieError | None = None
        self._owed_footer_bytes = 0
        """Of the files that are full and not sealed yet."""
        self._is_stalled = False
        self._ending = asyncio.Event()
        self._durable = (opened.index.number, opened.position.offset)
        self.pending_bytes = 0
        """Accepted and not yet durable."""
        self.durable_bytes = 0
        """Made durable since the log was opened, files' ends and beginnings among them."""
        self.is_marked = opened.position.sequence == 0
        """The last record accepted is a MARK, or there is none."""
        self._roll_number = 0
        """The file of this number takes no more records."""

    def check(self) -> None:
        """Raise why nothing can be written any more, if that is so."""
        if self._failure is not None:
            raise _again(self._failure)

    @property
    def written_bytes(self) -> int:
        """Bytes accepted for files that are not sealed."""
        return sum(each.position.offset for each in self._unsealed.values())

    @property
    def claimed_bytes(self) -> int:
        """Bytes that will be written for what was accepted: it, footers, a new file, a mark."""
        return (
            self.pending_bytes
            + self._owed_footer_bytes
            + self._current.index.footer_bytes
            + file_header_bytes(len(self._records_ends) + len(self._unsealed))
            + NOTE_BYTES
            + _MARK_BYTES
        )

    def is_durable(self, location: Location) -> bool:
        """Return whether the record at `location` survives a crash."""
        return self.is_durable_at(location.file_number, location.offset)

    def is_durable_at(self, number: int, offset: int) -> bool:
        """Return whether the record around `offset` of file `number` survives a crash."""
        return (number, offset) < self._durable

    def durable_offset(self, number: int) -> int:
        """Return the offset in file `number` below which everything is durable."""
        durable_number, offset = self._durable
        if number == durable_number:
            return offset
        return 0 if number > durable_number else _OFFSET_MAX

    def unsealed_indexes(self) -> list[FileIndex]:
        """Return the indexes of the files not yet sealed, oldest first."""
        return [each.index for each in self._unsealed.values()]

    def file(self, number: int) -> DiskFile | None:
        """Return the handle of a file not yet sealed."""
        unsealed = self._unsealed.get(number)
        return None if unsealed is None else unsealed.file

    def append_entry(self, frame: EntryFrame) -> asyncio.Future[None]:
        """Accept a verified frame; the future is done when it is durable."""
        self.copy_entry(frame)
        return self._watch_last_batch()

    def append_run(self, run: FrameRun, what: FollowingFrames) -> asyncio.Future[None] | None:
        """Accept verified frames of new entries of a ledger; the future is done once all are.

        None: they do not fit into the current file and one batch; nothing was accepted.
        """
        self.check()
        current, config = self._current, self._config
        position, index = current.position, current.index
        count = len(run)
        size = len(run.payload) + count * RECORD_HEADER_BYTES
        if (
            size > config.batch_bytes_max
            or position.offset + size > config.file_bytes_max
            or index.entry_count + count > config.file_entries_max
            or position.sequence + count > config.file_records_max
            or index.number == self._roll_number
        ):
            return None
        batch = self._batch_for(size, is_apart=False)
        self.wake()
        sizes = run.sizes
        headers = encode_entry_headers(
            sizes,
            what.checks,
            sequence=position.sequence,
            number=index.number,
            offset=position.offset,
            batch_offset=batch.offset,
            seed=position.header.seed,
        )
        batch.buffers.append(interleaved(headers, run))
        batch.size += size
        batch.ledger_ids.add(what.ledger_id)
        index.add_entries(
            ledger_id=what.ledger_id,
            first_entry_id=what.first_entry_id,
            offsets=headers["offset"].astype(np.int64) + RECORD_HEADER_BYTES,
            sizes=sizes,
            last_add_confirmed=int(what.last_add_confirmed.max()),
        )
        position.offset += size
        position.sequence += count
        self.pending_bytes += size
        self.is_marked = False
        return self._watch_last_batch()

    def copy_entry(self, frame: EntryFrame) -> None:
        """Accept a verified frame of which nobody waits to hear; `flush` makes it durable."""
        current = self._append(
            RecordType.ENTRY,
            frame.data,
            payload_crc=frame_check(frame.data),
            ledger=frame.ledger_id,
        )
        current.index.add_entry(
            ledger_id=frame.ledger_id,
            entry_id=frame.entry_id,
            offset=current.position.offset - len(frame.data),
            size=len(frame.data),
            last_add_confirmed=frame.last_add_confirmed,
        )

    def append_fence(self, ledger_id: int) -> None:
        """Accept a fence."""
        self._append_small(RecordType.FENCE, encode_fence(ledger_id), ledger_id).note_fence(
            ledger_id
        )

    def append_lac(self, ledger_id: int, last_add_confirmed: int) -> asyncio.Future[None]:
        """Accept an explicit last add confirmed; the future is done when it is durable.

        It waits for any other record, or for `wake`, and is written with that.
        """
        self.copy_lac(ledger_id, last_add_confirmed)
        return self._watch_last_batch()

    def copy_lac(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Accept an explicit last add confirmed of which nobody waits to hear."""
        payload = encode_lac(ledger_id, last_add_confirmed)
        current = self._append(
            RecordType.LAC,
            payload,
            payload_crc=crc32c.crc32c(payload),
            ledger=ledger_id,
            is_urgent=False,
        )
        current.index.note_lac(ledger_id, last_add_confirmed)

    def append_garbage(self, numbers: Sequence[int]) -> None:
        """Accept that sealed files are garbage, before they are deleted."""
        index = self._append_small(RecordType.GARBAGE, encode_garbage(numbers), None)
        index.deleted_files.extend(numbers)
        for number in numbers:
            del self._records_ends[number]

    def append_mark(self) -> None:
        """Accept records that prove, once written, that all before them was durable.

        They get a batch of their own: with the records before them in one batch they would prove
        nothing.  The second one begins a sector: to lose one sector is not to lose the last entry
        together with its proof.
        """
        padding = bytes(-(self._current.position.offset + RECORD_HEADER_BYTES) % _SECTOR_BYTES)
        for payload, is_apart in ((padding, True), (b"", False)):
            self._append(
                RecordType.MARK,
                payload,
                payload_crc=crc32c.crc32c(payload),
                ledger=None,
                is_apart=is_apart,
            )
        self.is_marked = True

    def roll_from(self, number: int) -> None:
        """Go on in a new file, if the current one is `number`.

        A file with a damaged record would not be opened again as the newest one, because that is
        read whole; once it is sealed it is known by its footer.
        """
        if number == self._current.index.number != self._roll_number and self._failure is None:
            self._roll_number = number
            self.append_mark()

    def durable_part(self, number: int) -> tuple[FileHeader, int, FileIndex] | None:
        """Return header, durable end and index of a file not yet sealed; None for any other."""
        unsealed = self._unsealed.get(number)
        if unsealed is None:
            return None
        position = unsealed.position
        end = min(position.offset, self.durable_offset(number))
        return position.header, end, unsealed.index

    def wake(self) -> None:
        """Write what waits now."""
        if self._is_waiting:
            self._wakeup.set()
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._write_due)

    def watch(self) -> asyncio.Future[None]:
        """Return a future that is done when everything accepted so far is durable.

        Raises:
            BookieError: it will not be.
        """
        self.check()
        if self._batches:
            return self._watch_last_batch()
        future = self._loop.create_future()
        if self._writing is not None:
            self._writing.futures.append(future)
        else:
            future.set_result(None)
        return future

    async def flush(self) -> None:
        """Make everything accepted so far durable.

        Raises:
            BookieError: it will not be.
        """
        durable = self.watch()
        if not durable.done():
            self.wake()
            await durable

    async def make_durable(self, locations: Sequence[Location]) -> None:
        """Return once the records at these places are durable, or raise as `flush` does."""
        if not all(self.is_durable(location) for location in locations):
            await self.flush()

    async def run(self) -> None:
        """Write batches that take long, until cancelled or failed; the owner's task."""
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                for _ in range(len(self._batches)):  # a newcomer wakes again, unless it can wait
                    if not self._write_now(self._batches[0]):
                        await self._write_batch(self._batches.popleft())
                    await asyncio.sleep(0)  # what waited is answered before anything else is done
                self._is_waiting = self._wakeup.is_set()
        except BookieStorageError as error:
            self._fail(error)
        finally:
            self._fail(BookieUnavailableError("the bookie's storage was closed"))
            self._handovers.cancel()

    def end_waiting(self) -> None:
        """Fail, rather than wait, when the disk has no room from now on."""
        self._ending.set()

    def close_files(self) -> None:
        """Close the handles of files not yet sealed."""
        for each in self._unsealed.values():
            if each.file is not None:
                each.file.close()

    def _append_small(self, kind: RecordType, payload: bytes, ledger: int | None) -> FileIndex:
        crc = crc32c.crc32c(payload)
        return self._append(kind, payload, payload_crc=crc, ledger=ledger).index

    def _append(
        self,
        kind: RecordType,
        payload: BytesLike,
        *,
        payload_crc: int,
        ledger: int | None,
        is_apart: bool = False,
        is_urgent: bool = True,
    ) -> UnsealedFile:
        self.check()
        size = RECORD_HEADER_BYTES + len(payload)
        self._roll_if_full(size)
        current = self._current
        position = current.position
        batch = self._batch_for(size, is_apart=is_apart)
        if is_urgent:
            self.wake()
        header = encode_record_header(
            kind,
            payload_bytes=len(payload),
            payload_crc=payload_crc,
            sequence=position.sequence,
            number=current.index.number,
            offset=position.offset,
            batch_offset=batch.offset,
            seed=position.header.seed,
        )
        batch.buffers += (header, payload)
        batch.size += size
        if ledger is not None:
            batch.ledger_ids.add(ledger)
        position.offset += size
        position.sequence += 1
        self.pending_bytes += size
        self.is_marked = False
        return current

    def _batch_for(self, size: int, *, is_apart: bool) -> Batch:
        """Return the batch that takes the next record: the last one, unless it is full."""
        number = self._current.index.number
        if self._batches and not is_apart:
            last = self._batches[-1]
            if last.file_number == number and last.size + size <= self._config.batch_bytes_max:
                return last
        batch = Batch(number, self._current.position.offset)
        self._batches.append(batch)
        return batch

    def _watch_last_batch(self) -> asyncio.Future[None]:
        future = self._loop.create_future()
        self._batches[-1].futures.append(future)
        return future

    def _roll_if_full(self, size: int) -> None:
        """Direct the next records to a new file; the writer makes it when it gets there."""
        current = self._current
        position = current.position
        is_full = (
            position.offset + size > self._config.file_bytes_max
            or current.index.entry_count >= self._config.file_entries_max
            or position.sequence >= self._config.file_records_max
            or current.index.number == self._roll_number
        )
        if not is_full or position.sequence == 0:
            return
        self._records_ends[current.index.number] = position.offset
        self._owed_footer_bytes += current.index.footer_bytes
        number = current.index.number + 1
        content = encode_file_header(
            number, owner=self._owner, life=self._new_life(), live_files=self._records_ends
        )
        header = decode_file_header(memoryview(content), number=number, owner=self._owner)
        self._current = UnsealedFile(
            FileIndex(number),
            WritePosition(header=header, offset=header.size, sequence=0),
            content,
        )
        self._unsealed[number] = self._current

    def _write_due(self) -> None:
        """Write what waits as long as that needs no waiting; the rest is for the task."""
        self._is_due = False
        try:
            for _ in range(len(self._batches)):
                if not self._write_now(self._batches[0]):
                    self._is_waiting = True
                    self._wakeup.set()
                    return
        except BookieStorageError as error:
            self._fail(error)
        except BaseException:
            self._fail(BookieUnavailableError("a defect ended the bookie's storage"))
            raise

    def _write_now(self, batch: Batch) -> bool:
        """Write the first batch that waits, if the device takes it at once."""
        target = self._unsealed[batch.file_number]
        if target.file is None or not target.is_noted or self._is_stalled:
            return False
        batch.check_place(target.file)
        try:
            if not target.file.append_now(batch.buffers):
                return False
        except DiskFullError:
            return False  # there are ways to make room
        self._batches.popleft()
        self.durable_bytes += batch.size
        self._note_durable(batch)
        return True

    async def _write_batch(self, batch: Batch) -> None:
        self._writing = batch
        target = self._unsealed[batch.file_number]
        file = target.file
        if file is None or not target.is_noted:
            file = await self._prepare(target)
        batch.check_place(file)
        await self._persist(batch.size, partial(file.append, batch.buffers))
        self._writing = None
        self._note_durable(batch)

    def _note_durable(self, batch: Batch) -> None:
        self._durable = (batch.file_number, batch.offset + batch.size)
        self.pending_bytes -= batch.size
        for future in batch.futures:
            if not future.done():
                future.set_result(None)
        # Behind the answers of those who waited.
        self._loop.call_soon(self._events.on_durable, batch.ledger_ids)

    async def _prepare(self, target: UnsealedFile) -> DiskFile:
        """Return the file, which exists and is known to exist; the one before it is sealed."""
        number = target.index.number
        if target.file is None:
            before = self._unsealed.get(number - 1)
            if before is not None:
                await self._seal(before)
            content = target.content
            target.file = await self._persist(
                len(content), partial(self._disk.create, file_name(number), [content])
            )
        if not target.is_noted:
            await self._persist(NOTE_BYTES, partial(note_newest, self._disk, number))
            target.is_noted = True
        return target.file

    async def _persist(self, size: int, write: Callable[[], Awaitable[T]]) -> T:
        """Do a write of `size` bytes, as soon as the disk has room for it.

        Raises:
            BookieStorageError: it failed, or there is no room and `end_waiting` was called.
        """
        while True:
            try:
                done = await write_with_room(self._disk, size, write)
            except DiskFullError:
                if self._ending.is_set():
                    raise
            else:
                self.durable_bytes += size
                if self._is_stalled:
                    self._is_stalled = False
                    self._events.on_stalled(False)
                return done
            if not self._is_stalled:
                self._is_stalled = True
                self._events.on_stalled(True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.space.check_interval_s):
                    await self._ending.wait()

    async def _seal(self, full: UnsealedFile) -> None:
        assert full.file is not None  # files are made in order
        position = full.position
        footer = await self._disk.compute(
            encode_footer_record,
            full.index,
            position.header,
            offset=position.offset,
            sequence=position.sequence,
        )
        size = sum(len(part) for part in footer)
        await self._persist(size, partial(full.file.append, footer))
        await full.file.truncate(full.file.size)
        self._owed_footer_bytes -= full.index.footer_bytes
        self._handovers.start(self._hand_over(full, full.file), name=f"seal-{full.index.number}")

    async def _hand_over(self, full: UnsealedFile, file: DiskFile) -> None:
        """Let the file be known as a sealed one; with very many ledgers no add waits for that."""
        await self._events.on_sealed(full.index, file, full.position)
        del self._unsealed[full.index.number]
        file.close()

    def _fail(self, error: BookieError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        pending = [self._writing] if self._writing is not None else []
        pending += self._batches
        self._batches.clear()
        self._writing = None
        for batch in pending:
            for future in batch.futures:
                if not future.done():
                    future.set_exception(_again(error))
        self._events.on_failed(error)


def _again(error: BookieError) -> BookieError:
    """Return a copy to raise: an exception raised over and over collects every traceback."""
    copy = type(error)(*error.args)
    copy.__cause__ = error
    return copy
