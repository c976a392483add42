"""Entries of a typed log in which all columns of some rows become null; nothing else changes.

Number, order, transaction ids, times and stamps of producers stay, so that positions hold.  A row
that has only nulls already is not counted: there is nothing left of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlcore.base.errors import UnsupportedError
from dlcore.log.entries.body import (
    Compressor,
    decode_entry_batch,
    decode_entry_header,
    encode_entry,
    stamp_of,
)
from dlcore.log.typed.arrow import conform, entry_schemas
from dlcore.log.typed.conditions import Matcher

if TYPE_CHECKING:
    from dlcore.log.entries.body import EntryHeader
    from dlcore.log.typed.conditions import Condition
    from dlcore.log.typed.schema import LogSchema
    from dlcore.wire.frames import BytesLike

_CODEC = "zstd"


class Redacted(NamedTuple):
    """An entry's body after redaction, and how many rows lost their columns."""

    body: BytesLike
    rows: int


class RowRedactor:
    """Redacts the entries of one log.

    Args:
        log: the name of the log.
        schema: its schema.
        conditions: a row that fulfils all of them is redacted.

    Raises:
        ConfigurationError: the conditions do not fit the columns.
        UnsupportedError: a column cannot be null.
    """

    def __init__(self, log: str, schema: LogSchema, conditions: tuple[Condition, ...]) -> None:
        self._log = log
        self._schemas = entry_schemas(schema)
        self._matcher = Matcher(log, conditions, self._schemas.columns)
        required = [each.name for each in schema.latest if not each.nullable]
        if required:
            raise UnsupportedError(
                f"log {log!r}: its columns {', '.join(required)} cannot be null, and a row is "
                "redacted by nulls: change the schema so that they can, then try again"
            )
        # An entry of an earlier version, in which a column cannot be null, becomes a later one.
        self._written_as = {
            number: number if all(each.nullable for each in columns) else schema.latest_id
            for number, columns in enumerate(schema.versions, 1)
        }

    def count(self, body: BytesLike) -> int:
        """Return how many rows of an entry are to be redacted.

        Raises:
            UnsupportedError: the entry is encrypted.
            InvalidEntryError: it cannot be decoded.
        """
        header = self._header_of(body)
        return int(pc.sum(self._mask(header, self._batch_of(body, header))).as_py() or 0)

    def redact(self, body: BytesLike) -> Redacted:
        """Return an entry without these rows' values; the same body, if there are none.

        Raises: the same errors as `count`.
        """
        header = self._header_of(body)
        batch = self._batch_of(body, header)
        mask = self._mask(header, batch)
        rows = int(pc.sum(mask).as_py() or 0)
        if not rows:
            return Redacted(body, 0)
        schema_id = self._written_as[header.schema_id]
        if schema_id != header.schema_id:
            batch = conform(batch, self._schemas.of(schema_id))
        parts = encode_entry(
            without_values(batch, mask),
            first_txid=header.first_txid,
            last_txid=header.last_txid,
            records_before=header.records_before,
            write_time_ms=header.write_time_ms,
            compressor=Compressor(_CODEC if header.compressed else "none"),
            schema_id=schema_id,
            stamp=bytes(stamp_of(body, header)),
        )
        return Redacted(memoryview(b"".join(parts)), rows)

    def _header_of(self, body: BytesLike) -> EntryHeader:
        header = decode_entry_header(body)
        if header.encrypted:
            raise UnsupportedError(
                f"log {self._log!r} has encrypted entries, which cannot be redacted: without its "
                "key they cannot be read"
            )
        return header

    def _batch_of(self, body: BytesLike, header: EntryHeader) -> pa.RecordBatch:
        return decode_entry_batch(body, header, self._schemas)

    def _mask(self, header: EntryHeader, batch: pa.RecordBatch) -> Any:
        """Return which rows fulfil the conditions, as readers see them, and are not null."""
        shown = self._schemas.promote(batch, header.schema_id)
        values = [pc.is_valid(each) for each in batch.columns[1:]]
        has_some = values[0]
        for each in values[1:]:
            has_some = pc.or_(has_some, each)
        return pc.and_(self._matcher.mask(shown), has_some)


def without_values(batch: pa.RecordBatch, mask: Any) -> pa.RecordBatch:
    """Return a batch in which all columns but the first are null where `mask` is true.

    The arrays are new: no memory of theirs has what was there before.
    """
    rows = pa.array(np.arange(batch.num_rows), mask=np.asarray(mask))
    columns = [batch.column(0), *(each.take(rows) for each in batch.columns[1:])]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
