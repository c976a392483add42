"""Structured Streaming: the adapters to Spark's stream reader and stream writer."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)

from dlcore.base.clock import SystemClock
from dlcore.base.errors import LedgerReadError
from dlcore.base.records import NotLessThan, RecordField
from dlspark.admission import (
    ADVICE_WITHOUT_ADMISSION,
    SupportsTriggerAvailableNow,
    default_read_limit,
    has_admission_control,
    is_unlimited,
)
from dlspark.batch import task_properties
from dlspark.commit import stream_identity
from dlspark.keeping import KeptPositions
from dlspark.lag import Lag, LagReport
from dlspark.limits import Backlog, share
from dlspark.offsets import DataLoss, LogPosition, LogRange, LogView, StreamOffset
from dlspark.planning import Stretch
from dlspark.reading import (
    LogSnapshots,
    find_log,
    list_selected,
    losses_of,
    plan_read,
    read_rows,
    report_losses,
    require_all,
    require_reached,
    resolve,
    warn_of_bounds,
)
from dlspark.sessions import close_shared_namespace
from dlspark.staging import abort_staged, commit_staged, stage_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit

    from dlcore.base.ids import DLSN
    from dlcore.sync import LogSnapshot
    from dlspark.options import ReadOptions, WriteOptions
    from dlspark.schema import WriteColumns

logger = logging.getLogger(__name__)
REGRESSED_END_DELAYS_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Pauses while waiting for records that were readable before and are not now: a bookie may be
restarting."""

_ID_LENGTH = 12
"""Length of a query's id: people read it, and few queries read one log."""
LOSSES_KEPT_MAX = 10_000
"""Most reported losses that are remembered, to report each only once.  Deleted logs are found at
each trigger, and truncated ranges when their batch is planned again."""


class _ReportedLosses:
    """The losses of a query, each counted and reported once however often it is found."""

    def __init__(self, *, fail: bool) -> None:
        self._fail = fail
        self.known: dict[tuple[str, ...], None] = {}
        """Those found last are at the end."""
        self.count = 0
        self.records = 0

    def report(self, losses: list[DataLoss]) -> None:
        """Raise for a loss if the query is to fail, or report those that are new."""
        new = [loss for loss in losses if self._fail or loss.key not in self.known]
        report_losses(new, fail=self._fail)
        for loss in losses:
            self.known.pop(loss.key, None)  # moves it to the end: the oldest ones are dropped
            self.known[loss.key] = None
        # Those that were found now stay in any case, or each trigger would report them again.
        while len(self.known) > max(LOSSES_KEPT_MAX, len(losses)):
            del self.known[next(iter(self.known))]
        self.count += len(new)
        self.records += sum(loss.records or 0 for loss in new)


class _Pace:
    """How long ago a query's last batch with records was planned.

    minRecordsPerTrigger may make the next batch wait for more records.
    A batch without records does not begin that wait anew.
    """

    def __init__(self, monotonic_ns: Callable[[], int]) -> None:
        self._monotonic_ns = monotonic_ns
        self._last_ns: int | None = None

    def planned(self) -> None:
        """Note that a batch with records is planned now."""
        self._last_ns = self._monotonic_ns()

    @property
    def waited_s(self) -> float | None:
        """Seconds since the last batch; None: there was none."""
        return None if self._last_ns is None else (self._monotonic_ns() - self._last_ns) / 1e9


class DlogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows logs; every offset contains all that is needed to read its batch again.

    One instance lives through a query's run in a process of its own and answers about offsets.
    Other instances are created for the tasks.  Therefore `read` must not depend on the state of
    this one.
    """

    def __init__(
        self,
        options: ReadOptions,
        source: LogSnapshots | None = None,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._options = options
        self._known: StreamOffset | None = None
        self._source = source
        self._snapshots: dict[str, LogSnapshot] = {}
        self._target: dict[str, LogPosition] | None = None
        """Position by log id where a run with Trigger.AvailableNow ends; None for a continuous run.
        """
        self._pace = _Pace(monotonic_ns)
        self._losses = _ReportedLosses(fail=options.fail_on_data_loss)
        self._is_warned = False
        # Spark gives a Python source no id of its query.
        self._new_query = SystemClock().new_token()[:_ID_LENGTH]
        """Id of the query, unless its offsets have one."""
        self._kept = KeptPositions(lambda: self._logs, options.subscription, monotonic_ns)

    def initialOffset(self) -> dict[str, Any]:
        """Resolve the start of a new query; only once, however often and late Spark asks."""
        return self._initial.to_json()

    @cached_property
    def _initial(self) -> StreamOffset:
        options, bounds = self._options, self._options.bounds
        # Cached, because Spark asks again, and a start such as "latest" would have moved on
        # meanwhile.
        logs = list_selected(options.address, options.logs)
        snapshots = require_all(self._logs.take(logs), options.address)
        if bounds.must_reach_start:
            for snapshot in snapshots.values():
                require_reached(snapshot, bounds.start)
        self._losses.report(losses_of(self._logs, snapshots.values(), bounds.start))
        positions = resolve(self._logs, snapshots, bounds.start)
        for log, position in positions.items():
            warn_of_bounds(snapshots[log], position.dlsn)
        return StreamOffset.initial(positions)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the read limit for Spark, which states whether batches are limited."""
        return default_read_limit(self._options.limits)

    def prepareForTriggerAvailableNow(self) -> None:
        """Note the current ends of the logs: this run does not go beyond them."""
        snapshots = self._logs.take(list_selected(self._options.address, self._options.logs))
        self._target = {
            # By id, because a log may be renamed during the run.
            snapshot.log_id: LogPosition(
                log_id=snapshot.log_id,
                dlsn=snapshot.end,
                sequence_id=LogView.of(snapshot).end_sequence_id,
            )
            for snapshot in snapshots.values()
            if snapshot is not None
        }

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: object = None
    ) -> dict[str, Any]:
        """Return the end of the next batch, within the currently readable records.

        Spark 4.1 passes no arguments; then the last offset that it mentioned is used.  For a
        new query Spark calls this before `initialOffset`.
        """
        if start is not None:
            # Spark asks for the next batch when the one before, which ends here, has ended.
            ended = since = StreamOffset.from_json(start)
        else:
            ended = None
            since = self._known or self._initial
            if self._options.limits.bounds_batches and not has_admission_control():
                self._warn_of_version()
        views = self._look(since)
        # Reported before the offset goes on: an offset without these logs cannot report them.
        left_out = self._left_out(since)
        self._losses.report(left_out)
        since = since.without(loss.log for loss in left_out)
        offset, losses = since.advanced(views, self._ends(views))
        self._losses.report(losses)
        if not is_unlimited(limit):
            offset = self._limited(since, offset, views)
        is_more = offset.logs != since.logs
        if is_more:
            self._pace.planned()
            # Only with a batch: Spark stores no offset of a trigger without one, and its id would
            # be lost.
            if offset.query is None:
                offset = replace(offset, query=self._new_query)
        if ended is not None:
            # No further batch would come to store the last position of a run with an end.
            self._kept.note(ended, is_last=self._target is not None and not is_more)
        # Spark 4.1 passes no start to the next call.
        self._known = offset
        return offset.to_json()

    def _limited(
        self, since: StreamOffset, offset: StreamOffset, views: Mapping[str, LogView | None]
    ) -> StreamOffset:
        """Return the end of a batch within the limits, at most `offset`."""
        limits = self._options.limits
        ranges = since.ranges_to(offset)
        if not ranges or (limits.min_records is None and not limits.bounds_batches):
            return offset
        starts = self._count([_readable_start(each, views[each.log]) for each in ranges], ranges)
        ends = self._count([offset.logs[each.log] for each in ranges], ranges)
        backlogs = {
            each.log: Backlog.of(self._snapshots[each.log], start, end)
            for each, start, end in zip(ranges, starts, ends, strict=True)
        }
        waiting = sum(backlog.records for backlog in backlogs.values())
        # A run with an end takes all records up to it, even if they are few.
        if self._target is None and not limits.is_enough(waiting, waited_s=self._pace.waited_s):
            return since
        cut = [
            (log, backlogs[log].start + records)
            for log, records in share(backlogs, limits).items()
            if records < backlogs[log].records
        ]
        found = self._logs.find(
            [
                (self._snapshots[log], NotLessThan(RecordField.SEQUENCE_ID, sequence_id))
                for log, sequence_id in cut
            ]
        )
        stops = {
            log: LogPosition(
                log_id=self._snapshots[log].log_id,
                dlsn=place.dlsn,
                sequence_id=place.sequence_id,
            )
            for (log, _), place in zip(cut, found, strict=True)
        }
        # Advanced from `since` again: `offset` has already passed the records that are left out.
        return since.advanced(views, {**self._ends(views), **stops})[0]

    def _ends(self, views: Mapping[str, LogView | None]) -> dict[str, LogPosition]:
        """Return where a run with Trigger.AvailableNow ends, by the current names of the logs."""
        target = self._target or {}
        return {
            log: target[view.log_id]
            for log, view in views.items()
            if view is not None and view.log_id in target
        }

    def _count(self, positions: list[LogPosition], ranges: list[LogRange]) -> list[int]:
        """Return how many records precede each position; the logs are those of `ranges`."""
        unknown = {
            index: (self._snapshots[each.log], position.dlsn)
            for index, (each, position) in enumerate(zip(ranges, positions, strict=True))
            if position.sequence_id is None
        }
        found = dict(zip(unknown, self._logs.find(list(unknown.values())), strict=True))
        return [
            found[index].sequence_id if position.sequence_id is None else position.sequence_id
            for index, position in enumerate(positions)
        ]

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the ends of the logs, and the lag of the offset that was returned last."""
        if self._known is None or not self._snapshots:
            return None
        positions = {each.log_id: each.dlsn for each in self._known.logs.values()}
        behind: list[tuple[LogSnapshot, DLSN | NotLessThan]] = [
            (snapshot, position)
            for snapshot in self._snapshots.values()
            if (position := positions.get(snapshot.log_id, snapshot.first)) < snapshot.end
        ]
        lags = {
            snapshot.log: Lag.of(snapshot, place)
            for (snapshot, _), place in zip(behind, self._logs.find(behind), strict=True)
        }
        return LagReport(
            logs={log: lag for log, lag in lags.items() if lag.records},
            ends={log: str(snapshot.end) for log, snapshot in self._snapshots.items()},
            skipped_records=self._losses.records,
            losses=self._losses.count,
        ).to_json()

    def _look(self, since: StreamOffset) -> dict[str, LogView | None]:
        """Return the current views of the logs; in a run with an end, without logs added later."""
        selection = self._options.logs
        known = {log for log in since.logs if selection.matches(log)}
        names = sorted(known.union(list_selected(self._options.address, selection)))
        snapshots = self._logs.take(names)
        # A log of the checkpoint that is gone is a loss; a name that is new in the options is a
        # mistake.
        added = {log: snapshots[log] for log in selection.names if log not in known}
        require_all(added, self._options.address)
        self._snapshots = {log: found for log, found in snapshots.items() if found is not None}
        views: dict[str, LogView | None] = {
            log: LogView.of(snapshot) for log, snapshot in self._snapshots.items()
        }
        if self._target is not None:
            # A log that did not exist when the run began is left to the next run.
            views = {
                log: view
                for log, view in views.items()
                if view is not None and view.log_id in self._target
            }
        # A log that a pattern found and that is gone now never existed for this query.
        views |= {log: None for log in known if log not in self._snapshots}
        return self._with_first_counts(since, views)

    def _left_out(self, since: StreamOffset) -> list[DataLoss]:
        """Return the logs of the checkpoint that the options do not select, under any name."""
        selection = self._options.logs
        followed = {snapshot.log_id for snapshot in self._snapshots.values()}
        names = [
            log
            for log, known in sorted(since.logs.items())
            if not (known.log_id in followed or log in since.gone or selection.matches(log))
        ]
        views = {
            log: None if snapshot is None else LogView.of(snapshot)
            for log, snapshot in (self._logs.take(names) if names else {}).items()
        }
        return [
            DataLoss.left_out(log, since.logs[log], views[log], chosen=str(selection), names=names)
            for log in names
        ]

    def _with_first_counts(
        self, since: StreamOffset, views: dict[str, LogView | None]
    ) -> dict[str, LogView | None]:
        """Count the records before the first one, if this tells how many were lost."""
        known = {each.log_id: each.dlsn for each in since.logs.values()}
        uncounted = [
            (log, view)
            for log, view in views.items()
            if view is not None and not view.is_empty and view.first_sequence_id is None
            if view.log_id not in known or known[view.log_id] < view.first
        ]
        places = self._logs.find([(self._snapshots[log], view.first) for log, view in uncounted])
        for (log, view), place in zip(uncounted, places, strict=True):
            views[log] = replace(view, first_sequence_id=place.sequence_id)
        return views

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Divide the records between two offsets, also of a batch of an earlier run."""
        # Without arguments, as in Spark 4.1, `latestOffset` goes on from this offset.
        until = StreamOffset.from_json(end)
        self._known = until
        # From the two offsets alone: after a restart this instance knows nothing of the batch.
        ranges = StreamOffset.from_json(start).ranges_to(until)
        stretches = [part for wanted in ranges for part in self._stretches(wanted)]
        return plan_read(self._logs, stretches, self._options)

    def _stretches(self, wanted: LogRange) -> list[Stretch]:
        snapshot = self._snapshot_of(wanted)
        if snapshot is None:
            # The batch was planned before the log went; its other logs are still read.
            self._losses.report([DataLoss.deleted(wanted.log, wanted.start)])
            return []
        view = LogView.of(snapshot)
        if view.log_id != wanted.start.log_id:
            # Positions of the old log mean nothing in the new one.  `latestOffset` starts the new
            # log from its beginning.
            self._losses.report([DataLoss.recreated(wanted.log, wanted.start, view)])
            return []
        if view.has_lost_after(wanted.start):
            self._losses.report([DataLoss.truncated(wanted.log, wanted.start, view)])
        return [Stretch(snapshot=snapshot, start=wanted.start.dlsn, end=wanted.end)]

    def _snapshot_of(self, wanted: LogRange) -> LogSnapshot | None:
        # A batch of an earlier run was planned with other snapshots: take a new one if need be.
        snapshot = self._snapshots.get(wanted.log)
        if (
            snapshot is not None
            and snapshot.log_id == wanted.start.log_id
            and snapshot.end >= wanted.end
        ):
            return snapshot
        for delay_s in (*REGRESSED_END_DELAYS_S, None):
            snapshot = find_log(self._logs, self._options, wanted.log, wanted.start.log_id)
            if (
                snapshot is None
                or snapshot.log_id != wanted.start.log_id
                or snapshot.end >= wanted.end
            ):
                return snapshot
            if delay_s is not None:
                time.sleep(delay_s)
        assert snapshot is not None
        raise LedgerReadError(
            f"log {wanted.log!r}: records up to {wanted.end} (exclusive) were readable when the "
            f"batch was planned, but now only up to {snapshot.end}: bookies of its last segment do "
            "not answer"
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition; runs in a task."""
        return read_rows(partition, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        """Let the logs keep the positions up to which all batches have ended, for others to see."""
        self._kept.note(StreamOffset.from_json(end))

    def stop(self) -> None:
        """Store the last positions, and close the connections of this process."""
        self._kept.flush()
        self._source = None
        close_shared_namespace(self._options.address)

    @property
    def _logs(self) -> LogSnapshots:
        if self._source is None:
            self._source = LogSnapshots(self._options.address)
        return self._source

    def _warn_of_version(self) -> None:
        if not self._is_warned:
            self._is_warned = True
            logger.warning(
                "%s; to do: follow this advice, or nothing if no such trigger is used",
                ADVICE_WITHOUT_ADMISSION,
            )


def _readable_start(wanted: LogRange, view: LogView | None) -> LogPosition:
    """Return where a range begins in the readable part of its log."""
    if view is None or wanted.start.dlsn >= view.first:
        return wanted.start
    return LogPosition(log_id=view.log_id, dlsn=view.first, sequence_id=view.first_sequence_id)


class DlogStreamWriter(DataSourceStreamArrowWriter):
    """Appends each micro-batch to one or more logs in one transaction, once.

    The instance that commits is not one of those that write, and has no task.  It gets the identity
    of the batch from the messages.
    """

    def __init__(
        self, options: WriteOptions, columns: WriteColumns | None, *, overwrite: bool = False
    ) -> None:
        """Create a writer; `columns` are None if it only commits."""
        self._options = options
        self._columns = columns
        self._overwrite = overwrite

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage the rows of a task."""
        context = TaskContext.get()
        assert context is not None, "Spark calls write in a task"
        # Spark pickles this object to the tasks from the process that plans, never from the one
        # that commits.
        assert self._columns is not None, "a writer without columns only commits"
        return stage_rows(
            iterator,
            options=self._options,
            columns=self._columns,
            append=stream_identity(self._options, task_properties(context)),
            partition_id=context.partitionId(),
        )

    def commit(  # Spark passes both by position or by name
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,
    ) -> None:
        """Append all staged rows; skip the batch if it was appended before."""
        commit_staged(messages, options=self._options, replaces=self._overwrite)

    def abort(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,
    ) -> None:
        """Drop the staged rows, unless the batch was appended after all."""
        abort_staged(messages, address=self._options.address)
