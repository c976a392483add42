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
from dlcore.errors import DigestMismatchError
from dlcore.wire.digest import EntryFrame, decode_frame, frame_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bookie.files.format import FileHeader
    from bookie.files.index import FileIndex


class IntactRecord(NamedTuple):
    """A record whose checksums match."""

    record: Record
    payload: memoryview
    entry: EntryFrame | None
    """What its payload is, of the type ENTRY."""

    def take_into(self, index: FileIndex) -> None:
        """Take what it says into the index of its file."""
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
            case _:  # entries have their place above; the others say nothing of ledgers
                pass


class IntactRecords:
    """Iterates over the whole and intact records of a view; says where they end, and why.

    Args:
        view: some of the file, from `offset` on, which is where a record begins; it may end in the
            middle of one.
        header: of the file.
        end: of all records.
    """

    def __init__(self, view: memoryview, offset: int, header: FileHeader, *, end: int) -> None:
        self._view = view
        self._offset = offset
        self._header = header
        self._end = end
        self.position = offset
        """Where the next record begins: those before it were taken."""
        self.cut_bytes = 0
        """So much of the next record, at least, has to be read to tell more; 0: it is damaged, or
        there is none."""

    def __iter__(self) -> Iterator[IntactRecord]:
        """Yield records; each counts as taken when the next is asked for.

        Raises:
            BookieStorageError: an intact record of a type that this version does not know.
        """
        view, offset = self._view, self._offset
        limit = offset + len(view)
        while self.position < self._end:
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
    if record.type is not RecordType.ENTRY:
        is_intact = crc32c.crc32c(payload) == record.payload_crc
        return IntactRecord(record, payload, None) if is_intact else None
    try:
        entry = decode_frame(payload)
    except DigestMismatchError:
        return None
    is_intact = frame_check(payload) == record.payload_crc
    return IntactRecord(record, payload, entry) if is_intact else None
