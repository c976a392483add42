"""Batch reads and writes: the adapters to Spark's reader and writer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

from dlcore.clock import SystemClock
from dlcore.errors import LogNotFoundError
from dlspark.commit import TASK_PROPERTIES, batch_identity
from dlspark.offsets import DataLoss, LogPosition, LogView
from dlspark.planning import plan_partitions
from dlspark.positions import Edge
from dlspark.reading import (
    LogSnapshots,
    list_selected,
    read_rows,
    report_losses,
    require_all,
    resolve,
)
from dlspark.staging import abort_staged, commit_staged, stage_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from dlcore.sync import LogSnapshot, ScanRange
    from dlspark.options import ReadOptions, WriteOptions
    from dlspark.schema import WriteColumns


def task_properties(context: TaskContext) -> dict[str, str | None]:
    """Return the local properties of a task that identify its query, batch and execution."""
    return {name: context.getLocalProperty(name) for name in TASK_PROPERTIES}


class DlogReader(DataSourceReader):
    """Reads logs from one position to another."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """Take what the logs hold now, and divide it."""
        address = self._options.address
        logs = list_selected(address, self._options.logs)
        if not logs:
            raise LogNotFoundError(
                f"no log in {address} matches logsPattern={self._options.logs.pattern!r}"
            )
        snapshots = require_all(LogSnapshots(address).take(logs), address)
        scans = [part for log in logs for part in self._scans(snapshots[log])]
        return list(
            plan_partitions(
                scans,
                min_partitions=self._options.min_partitions,
                max_records_per_partition=self._options.max_records_per_partition,
            )
        )

    def _scans(self, snapshot: LogSnapshot) -> list[ScanRange]:
        view = LogView.of(snapshot)
        start = resolve(self._options.address, snapshot, self._options.start)
        end = resolve(self._options.address, snapshot, self._options.end or Edge.LATEST)
        if start < end and not view.is_empty:
            position = LogPosition(log_id=snapshot.log_id, dlsn=start)
            if view.has_lost_after(position):
                loss = DataLoss.truncated(snapshot.log, start, view)
                report_losses([loss], fail=self._options.fail_on_data_loss)
        return snapshot.scans(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition; runs in a task."""
        return read_rows(
            partition,
            address=self._options.address,
            fail_on_data_loss=self._options.fail_on_data_loss,
        )


class DlogWriter(DataSourceArrowWriter):
    """Appends a DataFrame to one or more logs in one transaction.

    Spark pickles this very object to the tasks and back to the driver's commit, so `token` is the
    same in all of them, and no two writes share one.  It is made, and commits, on the driver's
    machine, as soon as the write begins.
    """

    def __init__(self, options: WriteOptions, columns: WriteColumns) -> None:
        self._options = options
        self._columns = columns
        self._token = SystemClock().new_token()
        self._begun_ns = time.monotonic_ns()

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage the rows of a task."""
        context = TaskContext.get()
        assert context is not None, "Spark calls write in a task"
        append = batch_identity(self._options, task_properties(context), token=self._token)
        return stage_rows(
            iterator,
            options=self._options,
            columns=self._columns,
            append=append,
            partition_id=context.partitionId(),
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Append what all tasks staged."""
        commit_staged(messages, options=self._options, begun_ns=self._begun_ns)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop what the tasks staged."""
        append = batch_identity(self._options, {}, token=self._token)
        abort_staged(messages, address=self._options.address, append=append)
