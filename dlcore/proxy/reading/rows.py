"""A log's rows as a proxy sends them: the columns of the Spark source, or some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from dlcore.api.schemas import byte_row_schema
from dlcore.base.errors import SchemaMismatchError
from dlcore.flight.sending import Columns, batch_message, columns_message
from dlcore.log.reading.ranges import RangeView

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Sized

    from dlcore.base.ids import DLSN
    from dlcore.flight.sending import Ends, Integers
    from dlcore.log.reading.entry_rows import StoredRows
    from dlcore.wire.frames import BytesLike

PART_BYTES = 1792 * 1024
"""Size up to which entries are joined for one reader: a little more than three entries of a writer,
or half of a chunk.  Each message costs some tenth of a millisecond beside its bytes."""
_ROW_BYTES = 64
"""Bytes that a row takes in a message, beside its own columns and the log's name."""


class View(Protocol):
    """Makes the messages for a kind of reader."""

    @property
    def schema(self) -> pa.Schema:
        """The columns, and more if need be: views with the same schema make the same messages."""
        ...

    @property
    def part_bytes(self) -> int:
        """The size up to which entries are joined in a message for one reader."""
        ...

    @property
    def row_bytes(self) -> int:
        """The bytes that a row takes in a message, beside the columns of its entry."""
        ...

    def message(self, entries: Sequence[StoredRows], following: DLSN, /) -> Sized:
        """Return a message with the rows of entries; `following` is the position behind them.

        Its length is that of its bytes.
        """
        ...


def key_of(view: View) -> bytes:
    """Return what is the same for all views that make the same messages."""
    found: bytes = view.schema.serialize().to_pybytes()
    return found


class RowView:
    """The wanted columns of a log's rows.

    Args:
        log: the log's name.
        schema: columns of a typed log, None for a byte log.  Rows of a typed log have its columns,
            and `_log`, `_dlsn`, `_txid`, `_sequence_id` and `_timestamp` if they are named.
        columns: names of the columns; None: all columns of a byte log, or a typed log's own.

    Raises:
        SchemaMismatchError: the log does not have one of the columns.
    """

    def __init__(self, log: str, schema: pa.Schema | None, columns: Sequence[str] | None) -> None:
        self._log = log
        self.part_bytes, self.row_bytes = PART_BYTES, row_bytes_of(log)
        self._typed = None if schema is None else RangeView(log, schema, columns)
        self.schema = self._chosen(columns) if self._typed is None else self._typed.schema

    def _chosen(self, columns: Sequence[str] | None) -> pa.Schema:
        rows = byte_row_schema()
        names = rows.names if columns is None else list(columns)
        for name in names:
            if name not in rows.names or names.count(name) > 1:
                raise SchemaMismatchError(
                    f"log {self._log!r}: columns={names}: {name!r} is not one of its columns, or "
                    f"named twice; expected some of {', '.join(rows.names)}"
                )
        return pa.schema([rows.field(name) for name in names])

    def message(self, entries: Sequence[StoredRows], following: DLSN) -> bytes:
        """Return a message with the rows of entries; `following` is the position behind them."""
        if self._typed is None:
            return columns_message(self._columns_of(entries), following)
        parts = [self._typed.of(each.typed()) for each in entries]
        (joined,) = pa.Table.from_batches(parts).combine_chunks().to_batches()
        return batch_message(joined, following)

    def _columns_of(self, entries: Sequence[StoredRows]) -> Columns:
        counts = [each.batch.num_rows for each in entries]
        places = [each.place for each in entries]
        slots = [each.first_slot for each in entries]
        columns = Columns(sum(counts))
        for name in self.schema.names:
            match name:
                case "log":
                    text = self._log.encode()
                    ends = np.arange(columns.row_count + 1, dtype=np.int32) * np.int32(len(text))
                    columns.add_values(ends, [text * columns.row_count])
                case "dlsn":
                    columns.add_struct()
                    columns.add_numbers(_repeated((each.lssn for each in places), counts))
                    columns.add_numbers(_repeated((each.entry_id for each in places), counts))
                    columns.add_numbers(_counted(slots, counts))
                case "txid":
                    columns.add_numbers(np.concatenate([each.txids for each in entries]))
                case "sequence_id":
                    firsts = (
                        each.sequence_id + slot for each, slot in zip(places, slots, strict=True)
                    )
                    columns.add_numbers(_counted(firsts, counts))
                case "timestamp":
                    times = (each.timestamp_ms * 1000 for each in places)
                    columns.add_numbers(_repeated(times, counts))
                case _:
                    columns.add_values(*_values_of([each.batch.column(1) for each in entries]))
        return columns


def row_bytes_of(log: str) -> int:
    """Return the bytes that a row of a log takes in a message of Flight, beside its own columns."""
    return _ROW_BYTES + len(log.encode())


def _repeated(numbers: Iterable[int], counts: Sequence[int]) -> Integers:
    """Return the number of each entry, repeated for all its rows."""
    return np.repeat(np.fromiter(numbers, np.int64, len(counts)), counts)


def _counted(firsts: Iterable[int], counts: Sequence[int]) -> Integers:
    """Return numbers that count up by one in each entry, from the entry's first number."""
    return np.concatenate(
        [
            np.arange(first, first + count, dtype=np.int64)
            for first, count in zip(firsts, counts, strict=True)
        ]
    )


def _values_of(arrays: Sequence[pa.Array]) -> tuple[Ends, list[BytesLike]]:
    """Return the values of arrays as one column: the offsets of their ends, and the bytes in parts.

    The offsets begin with a zero.
    """
    parts: list[BytesLike] = []
    ends = [np.zeros(1, np.int32)]
    size_bytes = 0
    for array in arrays:
        _, offsets, values = array.buffers()
        first = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4)
        parts.append(memoryview(values)[first[0] : first[-1]])
        ends.append(first[1:] + np.int32(size_bytes - int(first[0])))
        size_bytes += len(parts[-1])
    return np.concatenate(ends), parts
