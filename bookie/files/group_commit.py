"""Group commit: records that were accepted become durable in batches, and full files are sealed.

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
from typing import TYPE_CHECKING, TypeVar

from bookie.disks.port import DiskFullError, write_with_room
from bookie.files.format import file_name
from bookie.files.index import encode_footer_record
from bookie.files.replay import NOTE_BYTES, note_newest
from bookie.files.unsealed import Batch, EntryLogEvents, UnsealedFile
from dlcore.background import BackgroundTasks
from dlcore.errors import BookieStorageError, BookieUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bookie.config import StorageConfig
    from bookie.disks.port import Disk, DiskFile
    from bookie.files.unsealed import Location, UnsealedFiles
    from dlcore.errors import BookieError

T = TypeVar("T")


class GroupCommit:
    """Batches in, durability out; one event loop, and one task that runs `run`."""

    def __init__(
        self, disk: Disk, config: StorageConfig, files: UnsealedFiles, events: EntryLogEvents
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._disk = disk
        self._config = config
        self._files = files
        self._events = events
        self._batches: deque[Batch] = deque()
        self._writing: Batch | None = None
        self._wakeup = asyncio.Event()
        self._is_due = False  # the short way is taken in the next turn of the loop
        self._is_waiting = False  # the task has something to do
        self._handovers = BackgroundTasks()
        self._failure: BookieError | None = None
        self._is_stalled = False
        self._ending = asyncio.Event()
        self.pending_bytes = 0
        """Accepted and not yet durable."""
        self.durable_bytes = 0
        """Made durable since the log was opened, files' ends and beginnings among them."""

    @property
    def has_failed(self) -> bool:
        """Whether nothing can be written any more."""
        return self._failure is not None

    def check(self) -> None:
        """Raise why nothing can be written any more, if that is so."""
        if self._failure is not None:
            raise _again(self._failure)

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
            return self.watch_last()
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
        if not all(self._files.is_durable(location) for location in locations):
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

    def batch_for(self, size: int, *, is_apart: bool) -> Batch:
        """Return the batch that takes the next record: the last one, unless it is full."""
        current = self._files.current
        number = current.index.number
        if self._batches and not is_apart:
            last = self._batches[-1]
            if last.file_number == number and last.size + size <= self._config.batch_bytes_max:
                return last
        batch = Batch(number, current.position.offset)
        self._batches.append(batch)
        return batch

    def watch_last(self) -> asyncio.Future[None]:
        """Return a future that is done when the record accepted last is durable."""
        future = self._loop.create_future()
        self._batches[-1].futures.append(future)
        return future

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

    def _target(self, batch: Batch) -> UnsealedFile:
        target = self._files.get(batch.file_number)
        assert target is not None  # it is sealed after its last batch
        return target

    def _write_now(self, batch: Batch) -> bool:
        """Write the first batch that waits, if the device takes it at once."""
        target = self._target(batch)
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
        target = self._target(batch)
        file = target.file
        if file is None or not target.is_noted:
            file = await self._prepare(target)
        batch.check_place(file)
        await self._persist(batch.size, partial(file.append, batch.buffers))
        self._writing = None
        self._note_durable(batch)

    def _note_durable(self, batch: Batch) -> None:
        self._files.durable = (batch.file_number, batch.offset + batch.size)
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
            before = self._files.get(number - 1)
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
        self._files.owed_footer_bytes -= full.index.footer_bytes
        self._handovers.start(self._hand_over(full, full.file), name=f"seal-{full.index.number}")

    async def _hand_over(self, full: UnsealedFile, file: DiskFile) -> None:
        """Let the file be known as a sealed one; with very many ledgers no add waits for that."""
        await self._events.on_sealed(full.index, file, full.position)
        self._files.forget(full)
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
