"""Group commit: accepted records become durable in batches, and full files are sealed.

While one batch is written and synced, new records collect for the next; there is no timer.  A batch
that the device takes at once is written in the next turn of the event loop, with everything that
the connections received in this turn.  A task writes the batches that have to wait for the device.
A full file is sealed with its footer before the next file is made and written.  Therefore a batch
is durable only when everything accepted before it is durable.

After any failed write or sync nothing is written any more, because the state of the device is
unknown.  A full disk is no such failure: neither this batch nor a later one is written, and no
result is reported, until the same bytes fit.
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
from dlcore.base.background import BackgroundTasks
from dlcore.base.errors import BookieStorageError, BookieUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bookie.config import StorageConfig
    from bookie.disks.port import Disk, DiskFile
    from bookie.files.unsealed import Location, UnsealedFiles
    from dlcore.base.errors import BookieError

T = TypeVar("T")


class GroupCommit:
    """Takes batches and makes them durable; one event loop, and one task that runs `run`."""

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
        self._is_due = False  # a batch is written in the next turn of the loop, without the task
        self._is_waiting = False  # the task has work
        self._handovers = BackgroundTasks()
        self._failure: BookieError | None = None
        self._is_stalled = False
        self._ending = asyncio.Event()
        self.pending_bytes = 0
        """Bytes that are accepted and not yet durable."""
        self.durable_bytes = 0
        """Bytes made durable since the log was opened, with headers and footers of files."""

    @property
    def has_failed(self) -> bool:
        """Whether a failure forbids all further writes."""
        return self._failure is not None

    def check(self) -> None:
        """Raise the error that forbids further writes, if there was one."""
        if self._failure is not None:
            raise _again(self._failure)

    def wake(self) -> None:
        """Write the batches that wait."""
        if self._is_waiting:
            self._wakeup.set()
        elif not self._is_due:
            # Not at once: records accepted in this iteration of the loop share the batch.
            self._is_due = True
            self._loop.call_soon(self._write_due)

    def watch(self) -> asyncio.Future[None]:
        """Return a future that is done when everything accepted so far is durable.

        Raises:
            BookieError: it will never become durable.
        """
        self.check()
        # Batches are written in order, so the last one waits for all others.
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
        """Write the batches that take long, until cancelled or failed; the owner's task."""
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                # Only those that wait now: a new batch sets the event again, unless it can wait.
                for _ in range(len(self._batches)):
                    if not self._write_now(self._batches[0]):
                        await self._write_batch(self._batches.popleft())
                    await asyncio.sleep(0)  # waiting requests are answered before the next batch
                self._is_waiting = self._wakeup.is_set()
        except BookieStorageError as error:
            self._fail(error)
        finally:
            self._fail(BookieUnavailableError("the bookie's storage was closed"))
            self._handovers.cancel()

    def end_waiting(self) -> None:
        """From now on fail, instead of waiting, when the disk has no space."""
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
        """Write the batches that need no waiting; leave the rest to the task."""
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
        """Write the first batch in the queue, if the device takes it at once."""
        target = self._target(batch)
        # Only the task may wait: for a new file, or for space on the disk.
        if target.file is None or not target.is_noted or self._is_stalled:
            return False
        batch.check_place(target.file)
        try:
            if not target.file.append_now(batch.buffers):
                return False
        except DiskFullError:
            return False  # the task can free space
        self._batches.popleft()
        self.durable_bytes += batch.size
        self._note_durable(batch)
        return True

    async def _write_batch(self, batch: Batch) -> None:
        self._writing = batch  # it left the queue, but `_fail` must still reach its futures
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
        # After the callbacks of the futures above.
        self._loop.call_soon(self._events.on_durable, batch.ledger_ids)

    async def _prepare(self, target: UnsealedFile) -> DiskFile:
        """Return the file after it is created and noted as the newest; seal the one before it."""
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
        """Do a write of `size` bytes, as soon as the disk has space for it.

        Raises:
            BookieStorageError: it failed, or there is no space and `end_waiting` was called.
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
            # A full disk is no failure: nothing was written, and the batch stays first in order.
            if not self._is_stalled:
                self._is_stalled = True
                self._events.on_stalled(True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.space.check_interval_s):
                    await self._ending.wait()

    async def _seal(self, full: UnsealedFile) -> None:
        assert full.file is not None  # files are created in order
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
        await full.file.truncate(full.file.size)  # gives preallocated space back
        self._files.owed_footer_bytes -= full.index.footer_bytes
        self._handovers.start(self._hand_over(full, full.file), name=f"seal-{full.index.number}")

    async def _hand_over(self, full: UnsealedFile, file: DiskFile) -> None:
        """Register the file as sealed; no add waits for this, even with very many ledgers."""
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
    """Return a copy to raise: an exception that is raised repeatedly collects every traceback."""
    copy = type(error)(*error.args)
    copy.__cause__ = error
    return copy
