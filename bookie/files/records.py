"""The intact records of a file, one after the other: for replay, scrubbing and indexing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import crc32c

from bookie.files.format import (
    RECORD_HEADER_BYTES,
    Record,
    RecordType,
    decode_fence,
    decode_garbage,
    decode_lac,
    read_record_header,
)
from dlcore.base.errors import DigestMismatchError
from dlcore.wire.frames import EntryFrame, decode_frame, frame_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bookie.files.format import FileHeader
    from bookie.files.index import FileIndex


class IntactRecord(NamedTuple):
    """A record whose checksums match."""

    record: Record
    payload: memoryview
    entry: EntryFrame | None
    """The decoded payload, for the type ENTRY."""

    def take_into(self, index: FileIndex) -> None:
        """Add the record to the index of its file."""
        if self.entry is not None:
            index.add_entry(
                ledger_id=self.entry.ledger_id,
                entry_id=self.entry.entry_id,
                offset=self.record.payload_offset,
                size=self.record.payload_bytes,
                last_add_confirmed=self.entry.last_add_confirmed,
            )
        match self.record.type:
            case RecordType.FENCE:
                index.note_fence(decode_fence(self.payload))
            case RecordType.LAC:
                ledger_id, last_add_confirmed = decode_lac(self.payload)
                index.note_lac(ledger_id, last_add_confirmed)
            case RecordType.GARBAGE:
                index.deleted_files.extend(decode_garbage(self.payload))
            case _:  # entries are in the index already; the other types concern no ledger
                pass


class IntactRecords:
    """Iterates over the intact records of a view, and knows where and why they end.

    Args:
        view: bytes of the file from `offset` on, where a record begins; it may end within a record.
        header: header of the file.
        end: offset where all records end.
    """

    def __init__(self, view: memoryview, offset: int, header: FileHeader, *, end: int) -> None:
        self._view = view
        self._offset = offset
        self._header = header
        self._end = end
        self.position = offset
        """Offset of the next record; all records before it were yielded."""
        self.cut_bytes = 0
        """Bytes of the next record that are needed, at least, to decode it. 0: it is damaged, or
        there is none."""

    def __iter__(self) -> Iterator[IntactRecord]:
        """Yield records; a record counts as taken when the next is requested.

        Raises:
            BookieStorageError: an intact record of a type that this version does not know.
        """
        view, offset = self._view, self._offset
        limit = offset + len(view)
        while self.position < self._end:
            # Behind the end of all records there is nothing to read, so too few bytes are no
            # record.
            if self.position + RECORD_HEADER_BYTES > limit < self._end:
                self.cut_bytes = RECORD_HEADER_BYTES
                return
            record = read_record_header(view, self.position, self._header, view_offset=offset)
            if record is None or record.end > self._end:
                return
            if record.end > limit:
                self.cut_bytes = record.end - self.position
                return
            intact = _verified(record, view[record.payload_offset - offset : record.end - offset])
            if intact is None:
                return
            yield intact
            self.position = record.end


def _verified(record: Record, payload: memoryview) -> IntactRecord | None:
    # An entry's record repeats the frame's own checksum, so its bytes are summed only once.
    if record.type is not RecordType.ENTRY:
        is_intact = crc32c.crc32c(payload) == record.payload_crc
        return IntactRecord(record, payload, None) if is_intact else None
    try:
        entry = decode_frame(payload)
    except DigestMismatchError:
        return None
    is_intact = frame_check(payload) == record.payload_crc
    return IntactRecord(record, payload, entry) if is_intact else None
