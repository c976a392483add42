"""Batch reads and writes: the adapters to Spark's reader and writer."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    Not,
    WriterCommitMessage,
)

from dlcore.base.clock import SystemClock
from dlcore.base.errors import LogNotFoundError
from dlspark.commit import TASK_PROPERTIES, batch_identity
from dlspark.offsets import DataLoss, LogPosition, LogView
from dlspark.planning import Stretch
from dlspark.positions import Edge
from dlspark.pruning import Comparison, Wanted
from dlspark.reading import (
    LogSnapshots,
    list_selected,
    losses_of,
    narrow,
    plan_read,
    read_rows,
    report_losses,
    require_all,
    require_reached,
    resolve,
    warn_of_bounds,
)
from dlspark.sessions import log_id_of
from dlspark.staging import abort_staged, commit_staged, stage_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql.datasource import Filter

    from dlspark.commit import AppendIdentity
    from dlspark.options import ReadOptions, WriteOptions
    from dlspark.schema import WriteColumns


def task_properties(context: TaskContext) -> dict[str, str | None]:
    """Return the local properties of a task that identify its query, batch and execution."""
    return {name: context.getLocalProperty(name) for name in TASK_PROPERTIES}


class DlogReader(DataSourceReader):
    """Reads logs from one position to another."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._wanted = Wanted()

    def partitions(self) -> list[InputPartition]:
        """Take a snapshot of the logs, and divide the records that can be wanted.

        Raises:
            LogNotFoundError: one of the logs does not exist.
        """
        address, options = self._options.address, self._options
        logs = list_selected(address, options.logs)
        if not logs:
            raise LogNotFoundError(f"no log in {address} matches {options.logs}")
        # After the check above: a filter may exclude every log, which is no error.
        logs = [log for log in logs if self._wanted.takes_log(log)]
        source = LogSnapshots(address)
        snapshots = require_all(source.take(logs), address)
        if options.bounds.must_reach_start:
            for snapshot in snapshots.values():
                require_reached(snapshot, options.bounds.start)
        losses = losses_of(source, snapshots.values(), options.bounds.start)
        report_losses(losses, fail=options.fail_on_data_loss)
        starts = resolve(source, snapshots, options.bounds.start)
        ends = resolve(source, snapshots, options.bounds.end or Edge.LATEST)
        stretches = [
            Stretch(snapshot=snapshots[log], start=starts[log].dlsn, end=ends[log].dlsn)
            for log in logs
        ]
        for log, stretch in zip(logs, stretches, strict=True):
            warn_of_bounds(stretch.snapshot, stretch.start, stretch.end)
            self._check_loss(starts[log], stretch)
        return plan_read(source, narrow(source, stretches, self._wanted), options)

    def _check_loss(self, start: LogPosition, stretch: Stretch) -> None:
        view = LogView.of(stretch.snapshot)
        if stretch.start < stretch.end and not view.is_empty and view.has_lost_after(start):
            loss = DataLoss.truncated(stretch.snapshot.log, start, view)
            report_losses([loss], fail=self._options.fail_on_data_loss)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition; runs in a task."""
        return read_rows(partition, self._options)


class FilteringDlogReader(DlogReader):
    """Reads the records that pass pushed filters, if Spark pushes filters down.

    Otherwise Spark refuses to read with a class that has `pushFilters`.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Note which records can be wanted; return all filters, for Spark to evaluate again."""
        comparisons = map(comparison_of, filters)
        if self._options.shape is not None:
            comparisons = map(Comparison.of_typed, comparisons)
        self._wanted = Wanted.of(comparisons)
        return filters


def comparison_of(each: Filter) -> Comparison:
    """Convert one of Spark's filters to a value."""
    child = each.child if isinstance(each, Not) else each
    return Comparison(
        kind=type(child).__name__,
        column=tuple(getattr(child, "attribute", ())),
        value=getattr(child, "value", None),
        is_negated=isinstance(each, Not),
    )


def batch_reader(options: ReadOptions) -> DlogReader:
    """Return a reader that accepts filters if Spark offers them, as its settings say.

    Only the worker that offers filters imports Spark's module for them.
    """
    if "pyspark.sql.worker.data_source_pushdown_filters" in sys.modules:
        return FilteringDlogReader(options)
    return DlogReader(options)


class DlogWriter(DataSourceArrowWriter):
    """Appends a DataFrame to one or more logs in one transaction.

    Spark pickles this object to the tasks and back to the driver's commit.  Therefore `token` is
    the same in all of them, and no two writes share one.  The object is created when the write
    begins, on the driver's machine, and commits there.  The log of a transaction is looked up then,
    so that it is the same in all tasks and their attempts.
    """

    def __init__(
        self, options: WriteOptions, columns: WriteColumns, *, overwrite: bool = False
    ) -> None:
        self._options = options
        self._columns = columns
        self._overwrite = overwrite
        self._token = SystemClock().new_token()
        self._begun_ns = time.monotonic_ns()
        self._log_id: str | None = None
        if options.transaction is not None and options.log is not None:
            self._log_id = log_id_of(options.address, options.log)

    def _identity(self, properties: Mapping[str, str | None]) -> AppendIdentity:
        return batch_identity(self._options, properties, token=self._token, log_id=self._log_id)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage the rows of a task."""
        context = TaskContext.get()
        assert context is not None, "Spark calls write in a task"
        append = self._identity(task_properties(context))
        return stage_rows(
            iterator,
            options=self._options,
            columns=self._columns,
            append=append,
            partition_id=context.partitionId(),
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Append all staged rows; with overwrite, they replace the earlier content."""
        commit_staged(
            messages,
            options=self._options,
            begun_ns=self._begun_ns,
            replaces=self._overwrite,
        )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the staged rows."""
        # The driver is in no task: without messages only the token or the transaction names the
        # write.
        append = self._identity({})
        abort_staged(messages, address=self._options.address, append=append)
