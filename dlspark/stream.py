"""Structured Streaming: the adapters to Spark's stream reader and stream writer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)

from dlcore.errors import LedgerReadError
from dlspark.batch import task_properties
from dlspark.commit import stream_identity
from dlspark.offsets import DataLoss, LogPosition, LogRange, LogView, StreamOffset
from dlspark.planning import plan_partitions
from dlspark.reading import (
    LogSnapshots,
    list_selected,
    read_rows,
    report_losses,
    require_all,
    require_reached,
    resolve,
)
from dlspark.sessions import close_shared_namespace
from dlspark.staging import abort_staged, commit_staged, stage_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from dlcore.sync import LogSnapshot, ScanRange
    from dlspark.options import ReadOptions, WriteOptions
    from dlspark.schema import WriteColumns

REGRESSED_END_DELAYS_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Waits for records that were readable before and are not now: a bookie may be restarting."""


class DlogStreamReader(DataSourceStreamReader):
    """Follows logs; every offset says all that its batch needs to be read again.

    One instance lives through a query's run in a process of its own and answers about offsets;
    others are made for the tasks, so nothing that this one learns may matter in `read`.
    """

    def __init__(self, options: ReadOptions, source: LogSnapshots | None = None) -> None:
        self._options = options
        self._initial: StreamOffset | None = None
        self._known: StreamOffset | None = None
        self._source = source
        self._snapshots: dict[str, LogSnapshot] = {}
        self._reported: set[DataLoss] = set()

    def initialOffset(self) -> dict[str, Any]:
        """Resolve where a new query starts; once, however often and late Spark asks."""
        return self._initial_offset().to_json()

    def _initial_offset(self) -> StreamOffset:
        if self._initial is None:
            logs = list_selected(self._options.address, self._options.logs)
            snapshots = require_all(self._take(logs), self._options.address)
            self._initial = StreamOffset.initial(
                {log: self._start_of(snapshot) for log, snapshot in snapshots.items()}
            )
        return self._initial

    def _start_of(self, snapshot: LogSnapshot) -> LogPosition:
        require_reached(snapshot, self._options.start)
        start = resolve(self._options.address, snapshot, self._options.start)
        view = LogView.of(snapshot)
        counts = {view.first: view.first_sequence_id, view.end: view.end_sequence_id}
        return LogPosition(log_id=snapshot.log_id, dlsn=start, sequence_id=counts.get(start))

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: object = None
    ) -> dict[str, Any]:
        """Return the offset after all that is readable now.

        Spark 4.1 passes no arguments; there the last offset it mentioned stands in.  It asks a new
        query for this before it asks for the initial offset.
        """
        if start is not None:
            since = StreamOffset.from_json(start)
        else:
            since = self._known or self._initial_offset()
        views = self._look(since)
        offset, losses = since.advanced(views)
        self._report(losses)
        self._known = offset
        return offset.to_json()

    def _look(self, since: StreamOffset) -> dict[str, LogView | None]:
        known = {log for log in since.logs if self._options.logs.matches(log)}
        names = sorted(known.union(list_selected(self._options.address, self._options.logs)))
        snapshots = self._take(names)
        added = {log: snapshots[log] for log in self._options.logs.names if log not in known}
        require_all(added, self._options.address)
        self._snapshots = {log: found for log, found in snapshots.items() if found is not None}
        # A log that a pattern listed and that is gone already was never there for this query.
        return {
            log: None if found is None else LogView.of(found)
            for log, found in snapshots.items()
            if found is not None or log in known
        }

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Divide what lies between two offsets; also for a batch of an earlier run of the query."""
        until = StreamOffset.from_json(end)
        self._known = until
        ranges = StreamOffset.from_json(start).ranges_to(until)
        scans = [part for wanted in ranges for part in self._scans(wanted)]
        return list(
            plan_partitions(
                scans,
                min_partitions=self._options.min_partitions,
                max_records_per_partition=self._options.max_records_per_partition,
            )
        )

    def _scans(self, wanted: LogRange) -> list[ScanRange]:
        snapshot = self._snapshot_of(wanted)
        if snapshot is None:
            self._report([DataLoss.deleted(wanted.log, wanted.start)])
            return []
        view = LogView.of(snapshot)
        if view.log_id != wanted.start.log_id:
            # Positions of the old log mean nothing in the new one, which is read from its beginning
            # once `latestOffset` meets it.
            self._report([DataLoss.recreated(wanted.log, wanted.start, view)])
            return []
        if view.has_lost_after(wanted.start):
            self._report([DataLoss.truncated(wanted.log, wanted.start.dlsn, view)])
        return snapshot.scans(wanted.start.dlsn, wanted.end)

    def _snapshot_of(self, wanted: LogRange) -> LogSnapshot | None:
        snapshot = self._snapshots.get(wanted.log)
        if (
            snapshot is not None
            and snapshot.log_id == wanted.start.log_id
            and snapshot.end >= wanted.end
        ):
            return snapshot
        for delay_s in (*REGRESSED_END_DELAYS_S, None):
            snapshot = self._take([wanted.log])[wanted.log]
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
            f"batch was planned, now only up to {snapshot.end}: bookies of its last segment do not "
            "answer"
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition; runs in a task."""
        return read_rows(
            partition,
            address=self._options.address,
            fail_on_data_loss=self._options.fail_on_data_loss,
        )

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: logs are kept as long as their owners say, not as long as readers need."""

    def stop(self) -> None:
        """Close the connections of this process."""
        self._source = None
        close_shared_namespace(self._options.address)

    def _take(self, logs: list[str]) -> dict[str, LogSnapshot | None]:
        if self._source is None:
            self._source = LogSnapshots(self._options.address)
        return self._source.take(logs)

    def _report(self, losses: list[DataLoss]) -> None:
        fail = self._options.fail_on_data_loss
        report_losses([loss for loss in losses if fail or loss not in self._reported], fail=fail)
        self._reported.update(losses)


class DlogStreamWriter(DataSourceStreamArrowWriter):
    """Appends each micro-batch to one or more logs in one transaction, once.

    The instance that commits is another one than those that write, and has no task of its own: what
    identifies the batch comes with the messages.
    """

    def __init__(self, options: WriteOptions, columns: WriteColumns) -> None:
        self._options = options
        self._columns = columns

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage the rows of a task."""
        context = TaskContext.get()
        assert context is not None, "Spark calls write in a task"
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
        """Append what all tasks staged; skip it if the batch was appended before."""
        commit_staged(messages, options=self._options)

    def abort(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,
    ) -> None:
        """Drop what the tasks staged, unless the batch was appended after all."""
        abort_staged(messages, address=self._options.address)
