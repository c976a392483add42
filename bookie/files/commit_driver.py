"""Runs a `CommitQueue`: writes and syncs its batches, and answers the callers that wait."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, TypeVar, assert_never

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
    Write,
)
from bookie.files.format import file_name
from bookie.files.index import encode_footer_record
from bookie.files.log_state import check_place
from bookie.files.replay import note_newest
from dlcore.base.background import BackgroundTasks
from dlcore.base.clock import steady_s
from dlcore.base.errors import BookieStorageError, BookieUnavailableError
from dlcore.base.metrics import Durations

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bookie.config import StorageConfig
    from bookie.disks.port import Disk
    from bookie.files.log_state import EntryLogEvents, Location, UnsealedFile, UnsealedFiles
    from dlcore.base.errors import BookieError

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
            if not future.done():
                future.set_result(None)

    def fail(self, error: BookieError) -> None:
        """Answer all with the error."""
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(_again(error))
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
            raise _again(self.queue.error)

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
            raise _again(queue.error)
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
            self._handle(Fail(BookieUnavailableError("the bookie's storage was closed")))

    def _handle(self, event: Event) -> None:
        self._perform(self.queue.handle(event))

    def _perform(self, effects: list[Effect]) -> None:
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


def _again(error: BookieError) -> BookieError:
    """Return a copy to raise: an exception that is raised repeatedly collects every traceback."""
    copy = type(error)(*error.args)
    copy.__cause__ = error
    return copy
