"""The reading half of both sources: what logs hold, where positions are, and the scan in a task."""

from __future__ import annotations

import logging
from itertools import groupby
from typing import TYPE_CHECKING

from dlcore.errors import AlreadyTruncatedError, ConfigurationError, LogNotFoundError
from dlcore.ids import DLSN
from dlspark.arrow import RowBuilder
from dlspark.planning import DlogPartition
from dlspark.positions import Bound, Edge, PositionsByLog, TimestampBound, TxidBound
from dlspark.sessions import describe_missing, open_shared_namespace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition

    from dlcore.sync import LogSnapshot, ScanBatch, ScanRange
    from dlspark.offsets import DataLoss
    from dlspark.options import Address, LogSelection

logger = logging.getLogger(__name__)
_ADVICE_ON_LOSS = (
    "The query stops because failOnDataLoss is true; set the option failOnDataLoss to false to go "
    "on with what is there"
)


def list_selected(address: Address, selection: LogSelection) -> list[str]:
    """Return the names of the selected logs; for a pattern, of those that exist."""
    if selection.pattern is None:
        return list(selection.names)
    return [log for log in open_shared_namespace(address).get_logs() if selection.matches(log)]


class LogSnapshots:
    """Takes snapshots of logs; of those that have not changed since the last nothing is asked."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def take(self, logs: Iterable[str]) -> dict[str, LogSnapshot | None]:
        """Return what each log holds now; None for those that do not exist."""
        return open_shared_namespace(self._address).get_snapshots(list(logs), fresh=True)


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


def resolve(address: Address, snapshot: LogSnapshot, bound: Bound) -> DLSN:
    """Return the position that `bound` means in a log; for what lies after its records, its end."""
    match bound:
        case PositionsByLog(positions):
            return resolve(address, snapshot, positions.get(snapshot.log, Edge.EARLIEST))
        case DLSN():
            return bound
        case Edge.EARLIEST:
            return snapshot.first
        case Edge.LATEST:
            return snapshot.end
        case TxidBound(txid):
            with open_shared_namespace(address).open_log(snapshot.log) as manager:
                return manager.get_dlsn_not_less_than_txid(txid)
        case TimestampBound(timestamp_ms):
            with open_shared_namespace(address).open_log(snapshot.log) as manager:
                return manager.get_dlsn_not_less_than_timestamp(timestamp_ms)


def require_reached(snapshot: LogSnapshot, bound: Bound) -> None:
    """Raise unless the first record that `bound` asks for is there already.

    A stream cannot wait for it: it would start at the log's end, and give the records that follow
    whether they are above the bound or below.

    Raises:
        ConfigurationError: no record of the log is at or above the bound.
    """
    extents = [extent for segment in snapshot.segments for extent in segment.extents]
    match bound:
        case TxidBound(wanted):
            option, what = "startingTxid", "transaction id"
            last = max((extent.last_txid for extent in extents), default=None)
        case TimestampBound(wanted):
            option, what = "startingTimestamp", "timestamp"
            last = max((extent.last_timestamp_ms for extent in extents), default=None)
        case _:
            return
    if wanted == 0 or (last is not None and last >= wanted):
        return
    found = "it holds no record" if last is None else f"its highest is {last}"
    raise ConfigurationError(
        f"option {option}={wanted}: log {snapshot.log!r} has not come to this {what} yet, {found}; "
        "a stream starts at a record that is there, or with startingOffsets at earliest, latest or "
        "a DLSN"
    )


def report_losses(losses: Iterable[DataLoss], *, fail: bool) -> None:
    """Raise for the first loss if `fail`, else log each of them as a warning."""
    for loss in losses:
        if fail:
            raise loss.error(f"{loss}. {_ADVICE_ON_LOSS}")
        logger.warning("data loss: %s; going on, because failOnDataLoss is false", loss)


def read_rows(
    partition: InputPartition | None, *, address: Address, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a partition as Arrow batches.

    Spark passes a partition of its own when there is nothing to read.

    Raises:
        AlreadyTruncatedError: records were truncated after the partition was planned.
        LogNotFoundError: the log was deleted meanwhile.
    """
    if not isinstance(partition, DlogPartition):
        return
    for log, parts in groupby(partition.scans, key=lambda part: part.log):
        yield from RowBuilder(log).build(_scan(parts, address=address, fail=fail_on_data_loss))


def _scan(parts: Iterable[ScanRange], *, address: Address, fail: bool) -> Iterator[ScanBatch]:
    """Scan ranges of one log; of those with a loss what was there, unless `fail`."""
    from dlcore.sync import scan

    for part in parts:
        try:
            yield from scan([part], uri=address.uri, tls=address.tls)
        except (AlreadyTruncatedError, LogNotFoundError) as error:
            if fail:
                raise type(error)(f"{error}. {_ADVICE_ON_LOSS}") from error
            logger.warning(
                "data loss: log %r: the rest of %s … %s is skipped, because failOnDataLoss is "
                "false: %s",
                part.log,
                part.start,
                part.end,
                error,
            )
