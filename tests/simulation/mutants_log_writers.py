"""Bugs of a log's writer, staging, recovery, truncation and readers, put back on purpose."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace as with_fields
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec.structs import replace

from dlcore.base.ids import DLSN
from dlcore.log import recovery
from dlcore.log.metadata import changes
from dlcore.log.metadata.changes import _Draft
from dlcore.log.reading import snapshot
from dlcore.log.reading.cursor import FollowExtent, ReadCursor, ReadExtent
from dlcore.log.reading.reader import DirectReader
from dlcore.log.reading.tail import LogTail, ReadState, TailState
from dlcore.log.reading.tail_driver import Fetcher
from dlcore.log.staging.writer import DirectStagingWriter
from dlcore.log.writing import changing, open_segment
from dlcore.log.writing.append import Acknowledge, Report
from dlcore.log.writing.transmit import OwnExtent, Run, Transmitter
from dlcore.metadata.port import ANY_VERSION, Put

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.log.metadata.changes import Change


def _unguarded(change: Change) -> Change:
    """Return the change with a head that is written over whatever is there."""
    *others, put = change.ops
    assert isinstance(put, Put)
    return with_fields(change, ops=(*others, Put(put.path, put.value, ANY_VERSION)))


@contextlib.contextmanager
def extents_miss_the_last_entry() -> Iterator[None]:
    """The extent of a closed ledger ends before the entry that was acknowledged last."""
    close = OwnExtent.close

    def short(self: OwnExtent, *about: int) -> None:
        close(self, *about)
        closing = self.closing
        if closing is not None and closing.entry_count > 1:
            self.closing = replace(closing, last_entry_id=closing.entry_count - 2)

    with patch.object(OwnExtent, "close", short):
        yield


@contextlib.contextmanager
def positions_are_one_entry_late() -> Iterator[None]:
    """Callers get the position of the entry that follows theirs."""
    acknowledge = Report.acknowledge

    def late(self: Report[Any], segment: OwnExtent | None) -> Acknowledge[Any]:
        effect = acknowledge(self, segment)
        return with_fields(effect, entry_id=effect.entry_id + 1)

    with patch.object(Report, "acknowledge", late):
        yield


@contextlib.contextmanager
def batches_are_answered_with_their_first_position() -> Iterator[None]:
    """A reader that got the position of a batch goes on in the middle of it."""
    add_batch = Transmitter.add_batch

    def first(self: Transmitter[Any], batch: Any, ticket: Any = None, **more: Any) -> None:
        add_batch(self, batch, ticket, **more)
        row_count = getattr(batch, "num_rows", 1)
        if ticket is not None and row_count > 1 and self._open is not None:
            self._open.slots[-1] -= row_count - 1

    with patch.object(Transmitter, "add_batch", first):
        yield


@contextlib.contextmanager
def completed_segments_keep_an_open_extent() -> Iterator[None]:
    """The next segment is started while the last extent of the one before is open."""
    complete = _Draft.complete

    def half(self: _Draft, **more: Any) -> None:
        if self._tail:
            self._tail[-1] = replace(self._tail[-1], last_entry_id=None)
        complete(self, **more)

    with patch.object(_Draft, "complete", half):
        yield


@contextlib.contextmanager
def changes_before_an_extent_is_followed_are_forgotten() -> Iterator[None]:
    """A reader waits at the end of a ledger whose successor it could know."""
    plan = LogTail._plan

    def forgetful(self: LogTail) -> Any:
        segments, was_learning = self.segments, self.segments.is_learning
        effects = plan(self)
        if self.state is not TailState.FOLLOWING or was_learning == segments.is_learning:
            return effects
        segments.is_learning, segments.is_stale = False, True
        return [each for each in effects if not isinstance(each, ReadState)]

    with patch.object(LogTail, "_plan", forgetful):
        yield


@contextlib.contextmanager
def headers_do_not_count_records_before() -> Iterator[None]:
    """Every entry says that it is the first of its run: sequence ids begin again with it."""
    encode = Run.encode

    def forgetful(self: Run, group: Any, **more: Any) -> Any:
        before, self.record_count = self.record_count, 0
        body = encode(self, group, **more)
        self.record_count += before
        return body

    with patch.object(Run, "encode", forgetful):
        yield


@contextlib.contextmanager
def recovery_leaves_out_the_last_entry() -> Iterator[None]:
    """A dead writer's segment is completed one entry before its last acknowledged one."""
    bounded_extent = recovery.bounded_extent

    async def short(reader: Any, extent: Any, *, last_entry_id: int, **more: Any) -> Any:
        return await bounded_extent(reader, extent, last_entry_id=last_entry_id - 1, **more)

    with patch.object(recovery, "bounded_extent", short):
        yield


@contextlib.contextmanager
def a_takeover_does_not_fence() -> Iterator[None]:
    """A segment is completed at its LAC while its writer goes on to acknowledge."""

    async def peek(context: Any, extent: Any) -> Any:
        reader = await context.ledgers.open_ledger(extent.ledger_id)
        last = await reader.read_last_add_confirmed()
        return await recovery.bounded_extent(reader, extent, last_entry_id=last)

    with patch.object(recovery, "_recover_extent", peek):
        yield


@contextlib.contextmanager
def starts_are_not_guarded() -> Iterator[None]:
    """A segment is started over whatever has become of the log."""
    plan_start = changes.plan_start

    def blind(*about: Any, **more: Any) -> Change:
        return _unguarded(plan_start(*about, **more))

    with patch.object(open_segment, "plan_start", blind):
        yield


@contextlib.contextmanager
def heads_forget_transaction_ids() -> Iterator[None]:
    """The next writer may begin below what the log holds."""
    begin = _Draft.append

    def forgetful(self: _Draft, extent: Any) -> None:
        before = self.head.max_txid
        begin(self, extent)
        self.head = replace(self.head, max_txid=before)

    with patch.object(_Draft, "append", forgetful):
        yield


@contextlib.contextmanager
def heads_forget_sequence_ids() -> Iterator[None]:
    """The next segment counts its records from where the last one began."""
    begin = _Draft.append

    def forgetful(self: _Draft, extent: Any) -> None:
        before = self.head.next_sequence_id
        begin(self, extent)
        self.head = replace(self.head, next_sequence_id=before)

    with patch.object(_Draft, "append", forgetful):
        yield


@contextlib.contextmanager
def numbers_of_segments_are_used_again() -> Iterator[None]:
    """The segment after a completed one gets its number: positions mean two records."""
    open_segment = _Draft.open_segment

    def again(self: _Draft, **more: Any) -> None:
        open_segment(self, **more)
        if self.head.max_lssn > 2:
            self.head = replace(self.head, max_lssn=self.head.max_lssn - 1)

    with patch.object(_Draft, "open_segment", again):
        yield


@contextlib.contextmanager
def truncation_takes_one_record_more() -> Iterator[None]:
    """The first record that was to be kept goes, too."""
    plan_truncate = changes.plan_truncate

    def more(paths: Any, at: Any, dlsn: DLSN) -> Change | None:
        return plan_truncate(paths, at, DLSN(dlsn.lssn, dlsn.entry_id + 1, 0))

    with patch.object(changing, "plan_truncate", more):
        yield


@contextlib.contextmanager
def runs_of_several_logs_are_one() -> Iterator[None]:
    """A staged run does not end where entries of another log begin: no commit takes both."""

    def go_on(self: DirectStagingWriter, lane: Any, part: Any) -> None:
        if part is None:
            for each in self._parts.values():
                self._end_run(each)
        lane.part = part

    with patch.object(DirectStagingWriter, "_take_turn", go_on):
        yield


@contextlib.contextmanager
def staged_extents_leave_out_their_first_entry() -> Iterator[None]:
    """An extent begins with the entry that follows the first of its run."""
    end_run = DirectStagingWriter._end_run

    def late(self: DirectStagingWriter, part: Any) -> None:
        run = part.run
        if run is not None and run.entry_count > 1:
            run.first_entry_id += 1
            run.entry_count -= 1
        end_run(self, part)

    with patch.object(DirectStagingWriter, "_end_run", late):
        yield


@contextlib.contextmanager
def readers_skip_the_first_entry_of_a_segment() -> Iterator[None]:
    """A reader that goes on to the next segment begins with its second entry."""
    plan = ReadCursor.plan

    def skipping(self: ReadCursor, state: Any) -> Any:
        before = self.position
        step = plan(self, state)
        has_moved = self.position.lssn > before.lssn and self._next_sequence_id is not None
        if has_moved and isinstance(step, ReadExtent) and step.extent.entry_count > 1:
            self.position = DLSN(self.position.lssn, self.position.entry_id + 1, 0)
            self._next_sequence_id = None
            return plan(self, state)
        return step

    with patch.object(ReadCursor, "plan", skipping):
        yield


@contextlib.contextmanager
def readers_read_an_entry_twice_after_a_takeover() -> Iterator[None]:
    """When an extent that was followed becomes final the reader goes one entry back."""
    plan = ReadCursor.plan
    followed: dict[int, int] = {}

    def repeating(self: ReadCursor, state: Any) -> Any:
        step = plan(self, state)
        if isinstance(step, FollowExtent):
            followed[id(self)] = step.extent.ledger_id
            return step
        if followed.pop(id(self), None) is not None and self.position.entry_id > 0:
            self.position = DLSN(self.position.lssn, self.position.entry_id - 1, 0)
            self._next_sequence_id = None
            return plan(self, state)
        return step

    with patch.object(ReadCursor, "plan", repeating):
        yield


@contextlib.contextmanager
def readers_are_caught_up_too_early() -> Iterator[None]:
    """A reader gets the answer that there is no more when nothing has arrived yet."""

    async def nothing(_: Fetcher) -> bool:
        return False

    with patch.object(Fetcher, "has_more", nothing):
        yield


@contextlib.contextmanager
def cancelled_reads_lose_what_they_took() -> Iterator[None]:
    """A bulk that is cancelled forgets the records that it had when it waited for more."""
    gather = DirectReader._gather

    async def forgetful(self: DirectReader, **wanted: Any) -> None:
        try:
            await gather(self, **wanted)
        except asyncio.CancelledError:
            self._rows.clear()
            raise

    with patch.object(DirectReader, "_gather", forgetful):
        yield


@contextlib.contextmanager
def snapshots_end_before_the_last_entry() -> Iterator[None]:
    """An open segment is read up to the entry before its LAC."""
    bounded_extent = recovery.bounded_extent

    async def short(reader: Any, extent: Any, *, last_entry_id: int, **more: Any) -> Any:
        return await bounded_extent(reader, extent, last_entry_id=last_entry_id - 1, **more)

    with patch.object(snapshot, "bounded_extent", short):
        yield


@contextlib.contextmanager
def what_failed_is_called_never_sent() -> Iterator[None]:
    """Entries in flight are called cancelled, and are in the log: written again, they are twice."""
    drain = Transmitter.drain

    def swapped(self: Transmitter[Any]) -> Any:
        in_flight, queued = drain(self)
        return in_flight[:1], in_flight[1:] + queued

    with patch.object(Transmitter, "drain", swapped):
        yield


MUTANTS = (
    a_takeover_does_not_fence,
    batches_are_answered_with_their_first_position,
    cancelled_reads_lose_what_they_took,
    changes_before_an_extent_is_followed_are_forgotten,
    completed_segments_keep_an_open_extent,
    extents_miss_the_last_entry,
    headers_do_not_count_records_before,
    heads_forget_sequence_ids,
    heads_forget_transaction_ids,
    numbers_of_segments_are_used_again,
    positions_are_one_entry_late,
    readers_are_caught_up_too_early,
    readers_read_an_entry_twice_after_a_takeover,
    readers_skip_the_first_entry_of_a_segment,
    recovery_leaves_out_the_last_entry,
    runs_of_several_logs_are_one,
    snapshots_end_before_the_last_entry,
    staged_extents_leave_out_their_first_entry,
    starts_are_not_guarded,
    truncation_takes_one_record_more,
    what_failed_is_called_never_sent,
)
