"""The segment a writer is appending to: its ledger, and the counts its extent will have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlcore.ids import DLSN
from dlcore.log.entries.body import encode_entry, encode_entry_header
from dlcore.log.entries.lone_record import LONE_RECORD_FORMAT
from dlcore.log.metadata.segment import Extent

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    import pyarrow as pa

    from dlcore.ledger.digest import BytesLike
    from dlcore.ledger.writer import LedgerWriter
    from dlcore.log.writing.transmit import Group


def encode_group(
    group: Group[Any],
    *,
    records_before: int,
    write_time_ms: int,
    options: pa.ipc.IpcWriteOptions,
) -> tuple[list[BytesLike], int]:
    """Return the parts of an entry's body, and their size in bytes."""
    lone = group.lone_record()
    if lone is not None and LONE_RECORD_FORMAT is not None and options.compression is None:
        txid, payload = lone
        header = encode_entry_header(
            record_count=1,
            first_txid=txid,
            last_txid=txid,
            records_before=records_before,
            write_time_ms=write_time_ms,
        )
        parts = [header, *LONE_RECORD_FORMAT.message(txid, payload)]
        return parts, sum(map(len, parts))
    body = encode_entry(
        group.batch(),
        first_txid=group.first_txid,
        last_txid=group.last_txid,
        records_before=records_before,
        write_time_ms=write_time_ms,
        options=options,
    )
    return body, sum(memoryview(part).nbytes for part in body)


class ActiveSegment:
    """One open extent over one ledger, filled by its only writer.

    What was pushed counts for the next entry's header and for rolling; what was acknowledged is
    what the extent will say.
    """

    def __init__(
        self, lssn: int, ledger: LedgerWriter, *, started_ms: int, timestamp_ms: int
    ) -> None:
        self.lssn = lssn
        self.ledger = ledger
        self.started_ms = started_ms
        self._timestamp_ms = timestamp_ms
        self._records_pushed = 0
        self.entries_pushed = 0
        self.bytes_pushed = 0
        self._acked: _Acknowledged | None = None

    @property
    def entries_acknowledged(self) -> int:
        """Entries known to be durable."""
        return 0 if self._acked is None else self._acked.entry_count

    def push(
        self,
        group: Group[Any],
        *,
        now_ms: int,
        options: pa.ipc.IpcWriteOptions,
        on_answer: Callable[[asyncio.Future[int], int], None],
    ) -> None:
        """Append a group as the next entry; `on_answer` gets its future and its write time."""
        self._timestamp_ms = timestamp_ms = max(self._timestamp_ms, now_ms)
        body, size = encode_group(
            group,
            records_before=self._records_pushed,
            write_time_ms=timestamp_ms,
            options=options,
        )
        future = self.ledger.append(body)
        self._records_pushed += group.record_count
        self.entries_pushed += 1
        self.bytes_pushed += size
        future.add_done_callback(lambda done: on_answer(done, timestamp_ms))

    def acknowledged(self, group: Group[Any], *, timestamp_ms: int) -> DLSN:
        """Count the next entry as durable; return the position of its first record."""
        if self._acked is None:
            self._acked = _Acknowledged(group.first_txid)
        acked = self._acked
        position = DLSN(self.lssn, acked.entry_count, 0)
        acked.entry_count += 1
        acked.record_count += group.record_count
        acked.last_txid = group.last_txid
        acked.timestamp_ms = timestamp_ms
        return position

    def extent(self, *, last_entry_id: int, size_bytes: int) -> Extent | None:
        """Return the final extent of the closed ledger; None if it is empty."""
        acked = self._acked
        if acked is None:
            assert last_entry_id < 0
            return None
        assert last_entry_id == acked.entry_count - 1
        return Extent(
            ledger_id=self.ledger.ledger_id,
            first_entry_id=0,
            last_entry_id=last_entry_id,
            record_count=acked.record_count,
            size_bytes=size_bytes,
            first_txid=acked.first_txid,
            last_txid=acked.last_txid,
            last_timestamp_ms=acked.timestamp_ms,
        )


class _Acknowledged:
    __slots__ = ("entry_count", "first_txid", "last_txid", "record_count", "timestamp_ms")

    def __init__(self, first_txid: int) -> None:
        self.entry_count = 0
        self.record_count = 0
        self.first_txid = first_txid
        self.last_txid = first_txid
        self.timestamp_ms = 0
