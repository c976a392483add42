"""The reading half of both sources: snapshots of logs, searches, and the scan in a task."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from dlcore.base.errors import (
    AlreadyTruncatedError,
    ConfigurationError,
    LedgerReadError,
    LogNotFoundError,
    SchemaMismatchError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import NotLessThan, RecordField
from dlspark.arrow import RowBuilder, RowShape
from dlspark.keeping import NAME_PREFIX, QUERIES_MAX
from dlspark.offsets import DataLoss, LogPosition, LogView
from dlspark.planning import (
    CountedPartition,
    CountedRange,
    DlogPartition,
    Stretch,
    end_sequence_id,
    first_sequence_id,
    plan_counts,
    plan_partitions,
)
from dlspark.positions import Bound, Edge, PositionsByLog, TimestampBound, TxidBound
from dlspark.sessions import describe_missing, open_shared_namespace, scan_range
from dlspark.workers import freeze_imports

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition

    from dlcore.base.records import RecordPlace
    from dlcore.sync import LogSnapshot, ScanRange, ScanRun
    from dlspark.options import Address, LogSelection, ReadOptions
    from dlspark.pruning import Wanted

logger = logging.getLogger(__name__)
_ADVICE_ON_LOSS = (
    "The query stops because failOnDataLoss is true; set the option failOnDataLoss to false to go "
    "on with what is there"
)

LOGS_SEARCHED_MAX = 64
"""With more logs than this, the values of a filter `IN` are not searched separately, because each
search reads some headers from bookies."""


def list_selected(address: Address, selection: LogSelection) -> list[str]:
    """Return the names of the selected logs; for a pattern, of existing logs."""
    if selection.pattern is None:
        return list(selection.names)
    return [log for log in open_shared_namespace(address).get_logs() if selection.matches(log)]


def find_schema(options: ReadOptions) -> pa.Schema | None:
    """Return the current columns of the selected logs; None if they are byte logs.

    Raises:
        SchemaMismatchError: no common schema fits their columns.
    """
    from dlcore.api.schemas import merge_schemas

    names = list_selected(options.address, options.logs)
    return merge_schemas(open_shared_namespace(options.address).get_schemas(names))


class LogSnapshots:
    """Takes snapshots of logs; a log that has not changed since the last one is not read again."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def take(self, logs: Iterable[str]) -> dict[str, LogSnapshot | None]:
        """Return the current snapshot of each log; None for logs that do not exist."""
        return open_shared_namespace(self._address).get_snapshots(list(logs), fresh=True)

    def find(self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]) -> list[RecordPlace]:
        """Return the first record of each search; bookies are asked for entries."""
        return open_shared_namespace(self._address).find_places(wanted) if wanted else []

    def store_position(self, log: str, position: LogPosition, subscriber: str) -> bool:
        """Let a log keep a position, unless another log has its name now, or it keeps too many.

        Returns: False if it keeps those of `QUERIES_MAX` other queries.
        """
        with open_shared_namespace(self._address).open_log(log) as manager:
            if manager.log_id != position.log_id:
                return True
            if subscriber.startswith(NAME_PREFIX):
                kept = [n for n in manager.get_subscriptions() if n.startswith(NAME_PREFIX)]
                if subscriber not in kept and len(kept) >= QUERIES_MAX:
                    return False
            manager.move_subscription(subscriber, dlsn=position.dlsn)
            return True


def require_all(
    snapshots: Mapping[str, LogSnapshot | None], address: Address
) -> dict[str, LogSnapshot]:
    """Return `snapshots`, or raise `LogNotFoundError` for a log that does not exist."""
    existing = {}
    for log, snapshot in snapshots.items():
        if snapshot is None:
            raise LogNotFoundError(describe_missing(log, address))
        existing[log] = snapshot
    return existing


def resolve(
    source: LogSnapshots, snapshots: Mapping[str, LogSnapshot], bound: Bound
) -> dict[str, LogPosition]:
    """Return the position of `bound` in each log, or the end of a log that does not reach it.

    The number of records before the position is included if it is known without reading.
    """
    positions: dict[str, LogPosition] = {}
    searched: list[tuple[LogSnapshot, NotLessThan]] = []
    for log, snapshot in snapshots.items():
        match bound_of(log, bound):
            case TxidBound(txid):
                searched.append((snapshot, NotLessThan(RecordField.TXID, txid)))
                continue
            case TimestampBound(timestamp_ms):
                searched.append((snapshot, NotLessThan(RecordField.TIMESTAMP_MS, timestamp_ms)))
                continue
            case Edge.EARLIEST:
                dlsn = snapshot.first
            case Edge.LATEST:
                dlsn = snapshot.end
            case DLSN() as dlsn:
                if dlsn == DLSN.INITIAL:  # INITIAL means the beginning, as elsewhere
                    dlsn = snapshot.first
        view = LogView.of(snapshot)
        counts = {view.first: view.first_sequence_id, view.end: view.end_sequence_id}
        positions[log] = LogPosition(
            log_id=snapshot.log_id, dlsn=dlsn, sequence_id=counts.get(dlsn)
        )
    for (snapshot, _), place in zip(searched, source.find(searched), strict=True):
        positions[snapshot.log] = LogPosition(
            log_id=snapshot.log_id, dlsn=place.dlsn, sequence_id=place.sequence_id
        )
    return positions


def bound_of(log: str, bound: Bound) -> Edge | DLSN | TxidBound | TimestampBound:
    """Return the bound of one log; a log that `bound` does not name is read from its start."""
    if isinstance(bound, PositionsByLog):
        return bound.positions.get(log, Edge.EARLIEST)
    return bound


def losses_of(
    source: LogSnapshots, snapshots: Iterable[LogSnapshot], bound: Bound
) -> list[DataLoss]:
    """Return the losses of a read from a transaction id on: such records were truncated.

    The id 0 means the beginning, as elsewhere.
    """
    found, searched = [], []
    for snapshot in snapshots:
        start = bound_of(snapshot.log, bound)
        if not isinstance(start, TxidBound) or start.txid == 0:
            continue
        # Truncated extents are known by their ids.  If an extent is truncated in part, its entries
        # still exist, and are searched below.
        if start.txid <= snapshot.truncated_txid:
            found.append(DataLoss.of_txids(snapshot, start.txid))
        elif snapshot.first > DLSN(snapshot.first.lssn, 0, 0):
            searched.append((snapshot, start.txid))
    places = source.find(
        [
            (each.starting_at(DLSN(each.first.lssn, 0, 0)), NotLessThan(RecordField.TXID, txid))
            for each, txid in searched
        ]
    )
    for (snapshot, txid), place in zip(searched, places, strict=True):
        if place.dlsn < snapshot.first:
            found.append(DataLoss.of_txids(snapshot, txid))
    return found


def require_reached(snapshot: LogSnapshot, bound: Bound) -> None:
    """Raise unless the log has the first record that `bound` asks for.

    A stream that waited for this record would start at the log's end.  It would then return the
    following records, whether they are above the bound or below it.

    Raises:
        ConfigurationError: no record of the log is at or above the bound.
    """
    extents = [extent for segment in snapshot.segments for extent in segment.extents]
    match bound_of(snapshot.log, bound):
        case TxidBound(wanted):
            option, what = "startingTxid", "transaction id"
            last = max((extent.last_txid for extent in extents), default=None)
        case TimestampBound(wanted):
            by_log = isinstance(bound, PositionsByLog)
            option = "startingOffsetsByTimestamp" if by_log else "startingTimestamp"
            what = "timestamp"
            last = max((extent.last_timestamp_ms for extent in extents), default=None)
        case _:
            return
    if wanted == 0 or (last is not None and last >= wanted):
        return
    found = "it holds no record" if last is None else f"its highest is {last}"
    raise ConfigurationError(
        f"option {option}={wanted}: log {snapshot.log!r} has not reached this {what} yet, {found}; "
        "to start at its end, set startingOffsetsByTimestampStrategy to latest"
    )


def warn_of_bounds(snapshot: LogSnapshot, start: DLSN, end: DLSN | None = None) -> None:
    """Warn of bounds that select no records and look like a mistake.

    A start at the log's end is no mistake: the wanted records may follow.
    """
    if start > snapshot.end:
        logger.warning(
            "log %r: the start %s lies beyond its end, %s: no record is read before it gets "
            "there; to do: correct the option if a later start was not meant",
            snapshot.log,
            start,
            snapshot.end,
        )
    elif end is not None and end < start < snapshot.end:
        logger.warning(
            "log %r: no record is read, because the end %s in the options lies before the start "
            "%s in the options; to do: correct the two options",
            snapshot.log,
            end,
            start,
        )


def report_losses(losses: Iterable[DataLoss], *, fail: bool) -> None:
    """Raise for the first loss if `fail`, else log each of them as a warning."""
    for loss in losses:
        if fail:
            raise loss.error(f"{loss}. {_ADVICE_ON_LOSS}")
        logger.warning(
            "data loss: %s; going on, because failOnDataLoss is false; to do: find out why "
            "records are gone (dlog log inspect), and set failOnDataLoss where none may be missed",
            loss,
        )


def narrow(source: LogSnapshots, stretches: Sequence[Stretch], wanted: Wanted) -> list[Stretch]:
    """Return the parts of `stretches` that can hold wanted records."""
    searches = wanted.searches()
    # With many logs, one search for each end of the filter instead of one for each interval.
    if len(stretches) > LOGS_SEARCHED_MAX:
        searches = [[(runs[0][0], runs[-1][1])] for runs in searches]
    keys = list({key for runs in searches for run in runs for key in run if key is not None})
    places = iter(source.find([(each.snapshot, key) for each in stretches for key in keys]))
    narrowed = []
    for each in stretches:
        # The places come in the order in which they were asked for: log by log, and by key.
        at: dict[NotLessThan | None, DLSN] = {key: next(places).dlsn for key in keys}
        parts = [(each.start, each.end)]
        for runs in searches:
            # Each column bounds the parts that the columns before it left.
            met = (
                (max(low, at.get(first, low)), min(high, at.get(end, high)))
                for low, high in parts
                for first, end in runs
            )
            parts = _joined((low, high) for low, high in met if low < high)
        narrowed += [
            Stretch(snapshot=each.snapshot, start=low, end=high)
            for start, end in parts
            for low, high in wanted.cut(each.snapshot, start, end)
        ]
    return narrowed


def _joined(parts: Iterable[tuple[DLSN, DLSN]]) -> list[tuple[DLSN, DLSN]]:
    """Join ascending parts of a log that share an entry, because entries are read whole."""
    joined: list[tuple[DLSN, DLSN]] = []
    for low, high in parts:
        if joined and joined[-1][1] >= DLSN(low.lssn, low.entry_id, 0):
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return joined


def shape_of_rows(options: ReadOptions) -> RowShape:
    """Return the shape of the rows to read."""
    return options.shape or RowShape.of_bytes(options.byte_columns)


def require_kind(snapshots: Iterable[LogSnapshot], options: ReadOptions) -> None:
    """Raise unless the logs are of the kind that the rows are made for, typed or bytes.

    Raises:
        SchemaMismatchError: a log is of the other kind.
    """
    typed = options.shape is not None
    for snapshot in snapshots:
        # The DataFrame's schema was fixed before, and fits logs of one kind only.
        if (snapshot.schema is not None) is not typed:
            raise SchemaMismatchError(
                f"log {snapshot.log!r} is {'one of bytes' if typed else 'typed'}, and rows of "
                f"{'typed columns' if typed else 'bytes'} are expected: the log was created after "
                "the DataFrame; create the DataFrame again, and read logs of the two kinds apart"
            )


def plan_read(
    source: LogSnapshots, stretches: Sequence[Stretch], options: ReadOptions
) -> list[InputPartition]:
    """Divide the records to read; if only numbers are wanted, without reading records."""
    require_kind((each.snapshot for each in stretches), options)
    if not shape_of_rows(options).is_counted:
        scans = [part for stretch in stretches for part in stretch.scans()]
        return list(_granted(plan_partitions(scans, options.division), options.address))
    readable = [
        (each.snapshot, max(each.start, each.snapshot.first), min(each.end, each.snapshot.end))
        for each in stretches
    ]
    readable = [(snapshot, start, end) for snapshot, start, end in readable if start < end]
    starts = source.find([(snapshot, start) for snapshot, start, _ in readable])
    ends = source.find([(snapshot, end) for snapshot, _, end in readable])
    ranges = [
        CountedRange(snapshot.log, start.sequence_id, end.sequence_id - start.sequence_id)
        for (snapshot, _, _), start, end in zip(readable, starts, ends, strict=True)
    ]
    return list(plan_counts(ranges, options.division))


def _granted(partitions: list[DlogPartition], address: Address) -> list[DlogPartition]:
    """Return the partitions with capabilities to read each of them, if they are used."""
    if address.capabilities_s is None:
        return partitions
    found = open_shared_namespace(address).grant(
        [each.scans for each in partitions], lifetime_s=address.capabilities_s
    )
    return [
        DlogPartition(each.scans, capabilities)
        for each, capabilities in zip(partitions, found, strict=True)
    ]


def read_rows(partition: InputPartition | None, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a partition as Arrow batches.

    Spark passes its own partition if there is nothing to read.

    Raises:
        AlreadyTruncatedError: records were truncated after the partition was planned.
        LogNotFoundError: the log was deleted meanwhile.
    """
    freeze_imports()  # garbage collections then skip the imported modules
    shape = shape_of_rows(options)
    if isinstance(partition, CountedPartition):
        for log, first_sequence_id, records in partition.ranges:
            yield from RowBuilder(log, shape).count(first_sequence_id, records)
    elif isinstance(partition, DlogPartition):
        for log, parts in groupby(partition.scans, key=lambda part: part.log):
            wanted = (
                replace(part, columns=shape.log_columns, capabilities=partition.capabilities)
                for part in parts
            )
            # One builder for all ranges of a log, so that small ranges share batches.
            yield from RowBuilder(log, shape).build(_scan(wanted, options))


def find_log(
    source: LogSnapshots, options: ReadOptions, log: str, log_id: str
) -> LogSnapshot | None:
    """Return the snapshot of the log with this id, which may have any of the selected names.

    If the log is gone, return the snapshot of the log that has the name `log`, or None.
    """
    here = source.take([log])[log]
    if here is not None and here.log_id == log_id:
        return here
    names = [name for name in list_selected(options.address, options.logs) if name != log]
    others = source.take(names).values() if names else ()
    return next((each for each in others if each is not None and each.log_id == log_id), here)


def _scan(parts: Iterable[ScanRange], options: ReadOptions) -> Iterator[ScanRun]:
    """Scan ranges of one log; at lost records fail or continue, as failOnDataLoss says."""
    for part in parts:
        left: ScanRange | None = part
        while left is not None:
            left = yield from _scan_until_lost(left, options)


def _scan_until_lost(
    part: ScanRange, options: ReadOptions
) -> Generator[ScanRun, None, ScanRange | None]:
    """Scan a range up to lost records; return the rest behind them, None at the range's end."""
    # Counted along, so that a loss is reported with the exact number of records.
    start, sequence_id = part.start, first_sequence_id(part)
    try:
        for run in scan_range(options.address, part):
            yield run
            start, sequence_id = run.end, run.end_sequence_id
    except (AlreadyTruncatedError, LogNotFoundError) as error:
        return _left_after(part, start, sequence_id, options, error)
    return None


def _left_after(
    part: ScanRange,
    start: DLSN,
    sequence_id: int | None,
    options: ReadOptions,
    error: AlreadyTruncatedError | LogNotFoundError,
) -> ScanRange | None:
    """Return the rest of a range that was read up to `start`; fail for lost records, or warn."""
    source = LogSnapshots(options.address)
    snapshot = find_log(source, options, part.log, part.log_id)
    # Another log has the name now; none of its records belongs to this range.
    if snapshot is not None and snapshot.log_id != part.log_id:
        snapshot = None
    if snapshot is not None and snapshot.segments and snapshot.end < part.end:
        # A proxy may know fewer records than the process that planned: these are not lost.
        raise LedgerReadError(
            f"log {part.log!r}: records up to {part.end} were readable when the read was planned, "
            f"but now only those up to {snapshot.end}: read again"
        ) from error
    scans = [] if snapshot is None else snapshot.scans(start, part.end)
    left, end, number_at_end = None, part.end, end_sequence_id(part)
    if snapshot is not None and scans:
        left = replace(scans[0], columns=part.columns, capabilities=part.capabilities)
        end, number_at_end = left.start, source.find([(snapshot, left.start)])[0].sequence_id
        if (left.log, end) == (part.log, part.start):
            raise error  # the whole range exists, but could not be read
    if end == start or (sequence_id is not None and sequence_id == number_at_end):
        return left  # a renamed log, or the end of an entry that was read completely
    lost = part.between(start, end).record_count_estimate
    count = f"about {lost}"
    if sequence_id is not None and number_at_end is not None:
        count = str(number_at_end - sequence_id)
    held = (
        "the log was deleted, or renamed to a name that is not read"
        if snapshot is None
        else f"it holds {snapshot.first} … {snapshot.end} (exclusive)"
    )
    loss = f"records from {start} up to {end} (exclusive), {count} of them, are gone; {held}"
    if options.fail_on_data_loss:
        raise type(error)(f"log {part.log!r}: {loss}. {_ADVICE_ON_LOSS}") from error
    logger.warning(
        "data loss: log %r: %s; going on, because failOnDataLoss is false: %s; to do: find "
        "out why records are gone (dlog log inspect), and set failOnDataLoss where none may "
        "be missed",
        part.log,
        loss,
        error,
    )
    return left
