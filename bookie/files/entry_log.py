"""The writing half of the entry log: each record gets its position, and full files are rolled.

A record gets its position when it is accepted, so the order of acceptance is the order on disk.
`GroupCommit`, the driver of a `CommitQueue`, writes and syncs the batches of accepted records, and
answers the callers that wait.  `EntryLog.commits` knows which records are durable, and `unsealed`
knows which files are not sealed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar, assert_never

import crc32c
import numpy as np

from bookie.disks.port import DiskFullError, write_with_room
from bookie.files.commit_queue import (
    Call,
    CommitQueue,
    DiskFull,
    Durable,
    Effect,
    Event,
    Fail,
    Failed,
    FooterMade,
    HandOver,
    MakeFooter,
    Offer,
    RetryLater,
    Signal,
    Step,
    UnsealedFile,
    UnsealedFiles,
    Write,
)
from bookie.files.entry_runs import interleaved
from bookie.files.format import (
    NOTE_BYTES,
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
from bookie.files.replay import WritePosition, note_newest
from dlcore.base.background import BackgroundTasks, fulfil
from dlcore.base.clock import steady_s
from dlcore.base.errors import BookieStorageError, BookieUnavailableError, copied
from dlcore.base.metrics import Durations
from dlcore.wire.frames import frame_check

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bookie.config import StorageConfig
    from bookie.disks.port import Disk, DiskFile
    from bookie.files.index import Location
    from bookie.files.replay import OpenedLog
    from dlcore.base.errors import BookieError
    from dlcore.wire.frames import BytesLike, EntryFrame, FollowingFrames, FrameRun


T = TypeVar("T")


class DurabilityWaiters:
    """Callers that wait until what was accepted before their call is durable.

    There are no more of them than accepted records that are not durable, which the storage bounds.
    """

    def __init__(self) -> None:
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()  # by their `end`

    def add(self, end: int, future: asyncio.Future[None]) -> None:
        """Add one who waits for this end of accepted bytes, which never falls."""
        self._waiters.append((end, future))

    def durable(self, end: int) -> None:
        """Answer those who wait for this end, or an earlier one."""
        waiters = self._waiters
        while waiters and waiters[0][0] <= end:
            future = waiters.popleft()[1]
            fulfil(future, None)

    def fail(self, error: BookieError) -> None:
        """Answer all with the error."""
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(copied(error))
        self._waiters.clear()


class CommitTimes:
    """How long records wait until they are durable, and how long the device takes."""

    def __init__(self) -> None:
        self.adds = Durations()
        """From the first record after what is durable until it is durable as well."""
        self.syncs = Durations()
        """The times that the write of a batch with its sync took."""
        self._waits_since_s: float | None = None

    def accepted(self) -> None:
        """A record was accepted."""
        if self._waits_since_s is None:
            self._waits_since_s = steady_s()

    def durable(self, *, more_waits: bool) -> None:
        """Count how long the oldest record waited; what came meanwhile counts from now on."""
        now_s = steady_s()
        if self._waits_since_s is not None:
            self.adds.note(now_s - self._waits_since_s)
        self._waits_since_s = now_s if more_waits else None


class EntryLogEvents(NamedTuple):
    """Callbacks of the log, called on the event loop."""

    on_durable: Callable[[set[int]], None]
    """A batch with records of these ledgers became durable."""
    on_sealed: Callable[[FileIndex, DiskFile, WritePosition], Awaitable[None]]
    """A file got its footer at that position.  The file counts as sealed once the callback returns;
    the log continues meanwhile."""
    on_failed: Callable[[BookieError], None]
    """No further record will become durable."""
    on_stalled: Callable[[bool], None]
    """The disk has no space for the next write (True), or has it again (False)."""


class GroupCommit:
    """A queue and its driver, on one event loop; the owner runs `run` in a task."""

    def __init__(
        self, disk: Disk, config: StorageConfig, files: UnsealedFiles, events: EntryLogEvents
    ) -> None:
        self.queue = CommitQueue(
            files,
            batch_bytes_max=config.batch_bytes_max,
            retry_s=config.space.check_interval_s,
        )
        self._loop = asyncio.get_running_loop()
        self._disk = disk
        self._files = files
        self._events = events
        self._work: asyncio.Future[Write | MakeFooter] = self._loop.create_future()
        self._waiters = DurabilityWaiters()
        self._handovers = BackgroundTasks()
        self._retry: asyncio.TimerHandle | None = None
        self.times = CommitTimes()

    @property
    def has_failed(self) -> bool:
        """Whether a failure forbids all further writes."""
        return self.queue.error is not None

    def check(self) -> None:
        """Raise the error that forbids further writes, if there was one."""
        if self.queue.error is not None:
            raise copied(self.queue.error)

    def accept(self, size_bytes: int, *, is_urgent: bool = True) -> None:
        """Take the records that the caller added to the batch of `CommitQueue.batch_for`.

        Unless it `is_urgent`, they wait for others that are, or for `wake`.
        """
        self.times.accepted()
        effects = self.queue.accept(size_bytes, is_urgent=is_urgent)
        if effects:  # not for most records: a turn, or a write, is on its way
            self._perform(effects)

    def wake(self) -> None:
        """Write the batches that wait."""
        self._handle(Signal.WAKE)

    def end_waiting(self) -> None:
        """From now on fail, instead of waiting, when the disk has no space."""
        self._handle(Signal.END_WAITING)

    def watch(self) -> asyncio.Future[None]:
        """Return a future that is done when everything accepted so far is durable.

        Raises:
            BookieError: it will never become durable.
        """
        queue, future = self.queue, self._loop.create_future()
        if queue.error is not None:
            raise copied(queue.error)
        if queue.durable_end < queue.accepted_end:
            self._waiters.add(queue.accepted_end, future)
        else:
            future.set_result(None)
        return future

    async def flush(self) -> None:
        """Make everything accepted so far durable.

        Raises:
            BookieError: it will never become durable.
        """
        durable = self.watch()
        if not durable.done():
            self.wake()
            await durable

    async def make_durable(self, locations: Sequence[Location]) -> None:
        """Return once the records at these locations are durable, or raise as `flush` does."""
        if not all(self._files.is_durable(location) for location in locations):
            await self.flush()

    async def run(self) -> None:
        """Do the writes that take long, until cancelled; the owner's task."""
        try:
            while True:
                work = await self._work
                self._work = self._loop.create_future()
                self._handle(await self._answer_to(work))
                # The turn that may come now gives more work: no wait for another turn.
                await asyncio.sleep(0)
        finally:
            # Callers that still wait would wait for ever otherwise.
            self._handle(Fail(BookieUnavailableError("the bookie's storage was closed")))

    def _handle(self, event: Event) -> None:
        self._perform(self.queue.handle(event))

    def _perform(self, effects: list[Effect]) -> None:
        # The list grows while it is gone through: a chain of quick batches then needs no deep
        # stack.
        for effect in effects:
            match effect:
                case Offer():
                    effects += self.queue.handle(self._offered(effect))
                case Durable():
                    self.times.durable(more_waits=bool(self.queue.pending_bytes))
                    self._waiters.durable(effect.end)
                    # After the callbacks of their futures.
                    self._loop.call_soon(self._events.on_durable, effect.ledger_ids)
                case Call.TURN_SOON:
                    self._loop.call_soon(self._turn)
                case Write() | MakeFooter():
                    self._work.set_result(effect)
                case HandOver(file):
                    name = f"seal-{file.index.number}"
                    self._handovers.start(self._hand_over(file), name=name)
                case Call.NOTE_STALL | Call.NOTE_SPACE:
                    self._events.on_stalled(effect is Call.NOTE_STALL)
                case RetryLater(after_s):
                    self._retry = self._loop.call_later(after_s, self._handle, Signal.RETRY_DUE)
                case Failed(error):
                    self._fail(error)
                case _:
                    assert_never(effect)

    def _turn(self) -> None:
        try:
            self._handle(Signal.TURN)
        except BaseException:
            # The loop would only log the error of a callback, and waiting adds would get no answer.
            self._handle(Fail(BookieUnavailableError("a defect ended the bookie's storage")))
            raise

    def _fail(self, error: BookieError) -> None:
        self._waiters.fail(error)
        self._handovers.cancel()
        if self._retry is not None:
            self._retry.cancel()
        self._events.on_failed(error)

    def _offered(self, offer: Offer) -> Event:
        file = offer.file.file
        assert file is not None
        try:
            check_place(file, offer.batch.offset)
            begun_s = steady_s()
            is_taken = file.append_now(offer.batch.buffers)
        except DiskFullError as error:
            return DiskFull(error)
        except BookieStorageError as error:
            return Fail(error)
        if not is_taken:
            return Signal.NOT_TAKEN
        self.times.syncs.note(steady_s() - begun_s)
        return Signal.TAKEN

    async def _answer_to(self, work: Write | MakeFooter) -> Event:
        try:
            if isinstance(work, Write):
                await self._write(work)
                return Signal.WRITTEN
            index, position = work.file.index, work.file.position
            footer = await self._disk.compute(
                encode_footer_record,
                index,
                position.header,
                offset=position.offset,
                sequence=position.sequence,
            )
        except DiskFullError as error:
            return DiskFull(error)
        except BookieStorageError as error:
            return Fail(error)
        return FooterMade(footer)

    async def _write(self, write: Write) -> None:
        number, file, disk = write.file.index.number, write.file.file, self._disk
        if write.step is Step.CREATE:
            create = partial(disk.create, file_name(number), write.buffers)
            write.file.file = await self._with_room(write, create)
            return
        assert file is not None
        match write.step:
            case Step.FOOTER | Step.BATCH:
                check_place(file, write.offset)
                begun_s = steady_s()
                await self._with_room(write, partial(file.append, write.buffers))
                if write.step is Step.BATCH:
                    self.times.syncs.note(steady_s() - begun_s)
            case Step.CUT:
                await file.truncate(file.size)
            case Step.NOTE:
                await self._with_room(write, partial(note_newest, disk, number))
            case _:
                assert_never(write.step)

    async def _with_room(self, write: Write, work: Callable[[], Awaitable[T]]) -> T:
        return await write_with_room(self._disk, write.size_bytes, work)

    async def _hand_over(self, full: UnsealedFile) -> None:
        """Register the file as sealed, and close it."""
        assert full.file is not None
        await self._events.on_sealed(full.index, full.file, full.position)
        self._files.forget(full)
        full.file.close()


def check_place(file: DiskFile, offset: int) -> None:
    """Refuse to append to a file that does not end at `offset`."""
    if file.size != offset:
        raise BookieStorageError(f"{file.name} has {file.size} bytes, expected {offset}")


_SECTOR_BYTES = 4096
"""Most bytes that a device loses at once."""
_MARK_BYTES = 2 * RECORD_HEADER_BYTES + _SECTOR_BYTES


class EntryLog:
    """Accepts records, on one event loop."""

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
        self._config = config
        self._owner = owner
        self._new_life = new_life
        current = UnsealedFile(opened.index, opened.position, opened.content)
        current.file = opened.file
        current.is_noted = opened.is_noted
        self.unsealed = UnsealedFiles(current)
        self.commits = GroupCommit(disk, config, self.unsealed, events)
        self._records_ends = {each.number: each.records_end for each in opened.sealed}
        self.is_marked = opened.position.sequence == 0
        """Whether the last accepted record is a MARK, or there is no record."""
        # No file has the number 0.
        self._roll_number = 0
        """The file with this number accepts no more records."""

    @property
    def claimed_bytes(self) -> int:
        """Bytes that accepted records still cost: their own, footers, a new file, a mark."""
        return (
            self.commits.queue.pending_bytes
            + self.unsealed.owed_footer_bytes
            + self.unsealed.current.index.footer_bytes
            + file_header_bytes(len(self._records_ends) + len(self.unsealed))
            + NOTE_BYTES
            + _MARK_BYTES
        )

    def append_entry(self, frame: EntryFrame) -> asyncio.Future[None]:
        """Accept a verified frame; the future is done when it is durable."""
        self.copy_entry(frame)
        return self.commits.watch()

    def append_run(self, run: FrameRun, what: FollowingFrames) -> asyncio.Future[None] | None:
        """Accept verified frames of new entries; the future is done once all are durable.

        All of them belong to one ledger.

        Returns None, and accepts nothing, if they do not fit into the current file and one batch.
        """
        self.commits.check()
        current, config = self.unsealed.current, self._config
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
        # Nothing below awaits: the records get their bytes before the batch is written.
        batch = self.commits.queue.batch_for(size, is_apart=False)
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
        self.is_marked = False
        self.commits.accept(size)
        return self.commits.watch()

    def copy_entry(self, frame: EntryFrame) -> None:
        """Accept a verified frame without a future; a flush makes it durable."""
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

        The record is written together with the next other record, or at `GroupCommit.wake`.
        """
        self.copy_lac(ledger_id, last_add_confirmed)
        return self.commits.watch()

    def copy_lac(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Accept an explicit last add confirmed without a future."""
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
        """Accept a record that declares sealed files garbage, before they are deleted."""
        index = self._append_small(RecordType.GARBAGE, encode_garbage(numbers), None)
        index.deleted_files.extend(numbers)
        for number in numbers:
            del self._records_ends[number]

    def append_mark(self) -> None:
        """Accept records that prove, once written, that all records before them were durable.

        They get a batch of their own: in one batch with the records before them they would prove
        nothing.  The second one begins a sector, so that the loss of one sector does not lose the
        last entry together with its proof.
        """
        end = self.unsealed.current.position.offset
        padding = bytes(-(end + RECORD_HEADER_BYTES) % _SECTOR_BYTES)
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
        """Continue in a new file, if the current file is `number`.

        The newest file is read whole at a start, so one with a damaged record could not be opened
        again.  A sealed file is known by its footer.
        """
        is_current = number == self.unsealed.current.index.number != self._roll_number
        if is_current and not self.commits.has_failed:
            self._roll_number = number
            self.append_mark()

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
        self.commits.check()
        size = RECORD_HEADER_BYTES + len(payload)
        self._roll_if_full(size)
        current = self.unsealed.current
        position = current.position
        batch = self.commits.queue.batch_for(size, is_apart=is_apart)
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
        if ledger is not None:
            batch.ledger_ids.add(ledger)
        position.offset += size
        position.sequence += 1
        self.is_marked = False
        self.commits.accept(size, is_urgent=is_urgent)
        return current

    def _roll_if_full(self, size: int) -> None:
        """Direct the next records to a new file, which the writer task creates later."""
        current = self.unsealed.current
        position = current.position
        is_full = (
            position.offset + size > self._config.file_bytes_max
            or current.index.entry_count >= self._config.file_entries_max
            or position.sequence >= self._config.file_records_max
            or current.index.number == self._roll_number
        )
        # A file without records is never full: a record larger than a file gets one of its own.
        if not is_full or position.sequence == 0:
            return
        # The header of a file names all others with their ends, so that a start notices a loss.
        # Known now, although the footer is written later: it begins where the records end.
        self._records_ends[current.index.number] = position.offset
        number = current.index.number + 1
        content = encode_file_header(
            number, owner=self._owner, life=self._new_life(), live_files=self._records_ends
        )
        header = decode_file_header(memoryview(content), number=number, owner=self._owner)
        position = WritePosition(header=header, offset=header.size, sequence=0)
        self.unsealed.roll(UnsealedFile(FileIndex(number), position, content))
