"""A log's rows as Kafka's record batches: what a proxy makes of entries once for all its readers.

A row of a log of bytes is its value.  A typed log with the column `value`, of bytes, and at most
the columns `key` and `headers` beside it, as producers write them, has rows with these parts.  A
row of any other typed log is a JSON object of its columns, or, on demand, a stream of Arrow's IPC
format with that row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from dlcore.base.config import MIB
from dlcore.log.reading.ranges import RangeView
from dlcore.log.typed.json_values import json_rows
from dlcore.proxy.kafka.batches import Batch, Batches, batch_of, headers_of, with_headers
from dlcore.proxy.kafka.records import HEADERS
from dlcore.proxy.reading.rows import row_bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.ids import DLSN
    from dlcore.log.reading.entry_rows import StoredRows

_HEADERS_BYTES = 40
"""About so much the headers `dlsn` and `txid` of a record take."""
_PARTS = {"key": pa.binary(), "value": pa.binary()}
BATCH_BYTES = MIB
"""Entries go together in a batch up to this size: so much of a topic a client asks for at once, if
it is not configured.  A message for one reader is one batch, and so one answer: while a client
takes it, the next message is made."""


class RecordView:
    """Makes record batches of a log's rows.

    Args:
        log: the log's name.
        own: columns of a typed log, None for a log of bytes.
        is_arrow: whether rows of a typed log are Arrow streams, and not JSON.
        has_headers: whether records have the headers `dlsn` and `txid`.
    """

    def __init__(
        self, log: str, own: pa.Schema | None, *, is_arrow: bool, has_headers: bool
    ) -> None:
        self._typed = None if own is None else RangeView(log, own, None)
        self._is_keyed = own is not None and is_keyed(own)
        self._is_arrow = is_arrow
        self._has_headers = has_headers
        self.part_bytes = BATCH_BYTES
        # Rows of bytes take as much beside their values in an entry as in a batch.
        own_bytes = 0 if own is None or self._is_keyed else row_bytes_of(log)
        self.row_bytes = own_bytes + _HEADERS_BYTES * has_headers
        # No view of Flight has this: readers of equal schemas share what was made.
        made = f"{'arrow' if is_arrow else 'json'} {has_headers}".encode()
        columns = pa.schema([]) if self._typed is None else self._typed.schema
        self.schema = columns.with_metadata({**(columns.metadata or {}), b"kafka": made})
        """The columns, and a mark: views with the same schema make the same messages."""

    def message(self, entries: Sequence[StoredRows], _: DLSN) -> Batches:
        """Return the batches with the rows of entries, one after the other."""
        found: list[Batch] = []
        together: list[StoredRows] = []
        size_bytes = 0
        for each in entries:
            added_bytes = each.batch.nbytes + each.batch.num_rows * self.row_bytes
            if together and size_bytes + added_bytes > BATCH_BYTES:
                found.append(self._batch(together))
                together, size_bytes = [], 0
            together.append(each)
            size_bytes += added_bytes
        if together:
            found.append(self._batch(together))
        return Batches(found)

    def _batch(self, entries: Sequence[StoredRows]) -> Batch:
        counts = [each.batch.num_rows for each in entries]
        times = np.fromiter((each.place.timestamp_ms for each in entries), np.int64, len(entries))
        headers = self._headers(entries, counts) if self._has_headers else None
        keys = None
        if self._is_keyed:
            rows = pa.Table.from_batches([self._rows(each) for each in entries])
            values, keys = rows["value"], rows["key"] if "key" in rows.column_names else None
            if "headers" in rows.column_names:
                headers = with_headers(rows["headers"], headers)
        else:
            values = pa.chunked_array([self._values(each) for each in entries])
        first = entries[0]
        return batch_of(
            values,
            np.repeat(times, counts),
            offset=first.place.sequence_id + first.first_slot,
            headers=headers,
            keys=keys,
        )

    def _values(self, rows: StoredRows) -> pa.BinaryArray:
        if self._typed is None:
            return rows.batch.column(1)
        batch = self._rows(rows)
        if not self._is_arrow:
            return pa.array(json_rows(batch), pa.string()).cast(pa.binary())
        return pa.array([_stream_of(batch.slice(row, 1)) for row in range(len(batch))], pa.binary())

    def _rows(self, rows: StoredRows) -> pa.RecordBatch:
        """Return the columns of a typed log."""
        assert self._typed is not None
        return self._typed.of(rows.typed())

    def _headers(self, entries: Sequence[StoredRows], counts: Sequence[int]) -> pa.BinaryArray:
        slots = [
            np.arange(count) + rows.first_slot for rows, count in zip(entries, counts, strict=True)
        ]
        lssns = np.repeat([rows.place.lssn for rows in entries], counts)
        entry_ids = np.repeat([rows.place.entry_id for rows in entries], counts)
        places = [pa.array(each) for each in (lssns, entry_ids, np.concatenate(slots))]
        return headers_of(places, pa.concat_arrays([rows.batch.column(0) for rows in entries]))


def is_keyed(schema: pa.Schema) -> bool:
    """Return whether the columns of a typed log are the parts of Kafka's records, and no others."""
    types = {each.name: each.type for each in schema}
    found = types.pop("headers", HEADERS)
    is_headers = pa.types.is_list(found) and found.value_type.equals(HEADERS.value_type)
    return "value" in types and is_headers and _PARTS.items() >= types.items()


def _stream_of(row: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as writer:
        writer.write_batch(row)
    found: bytes = sink.getvalue().to_pybytes()
    return found
