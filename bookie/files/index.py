"""The index of entries: of the file being written, the footer of a sealed one, and over all files.

`LedgerState` has the fence and the LAC of a ledger, and names the sealed files with its entries.

The index of a file, sealed or not, has the method `entries(ledger_id)`, which returns the same
three columns, ascending by entry id.  The footer is little-endian and 8-byte aligned in the file,
so that its columns are used directly in the mapped file:

    magic 4s | version u16 | reserved u16 | ledgers u32 | entries u32 | deleted files u32
    | reserved u32 | reserved u64
    | ledger ids i64[] | ledger rows[] | entry ids i64[] | deleted files u64[]
    | offsets u32[] | sizes u32[]
"""

from __future__ import annotations

import bisect
import struct
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import crc32c
import numpy as np

from bookie.files.format import (
    RECORD_HEADER_BYTES,
    FileHeader,
    RecordType,
    encode_record_header,
    read_record_header,
)
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

_FIXED = struct.Struct("<4sHHIIIIQ")
_MAGIC = b"FOOT"
_VERSION = 1
_LEDGER_ROW = np.dtype(
    [
        ("last_add_confirmed", "<i8"),
        ("start", "<u4"),
        ("count", "<u4"),
        ("fenced", "<u4"),
        ("reserved", "<u4"),
    ]
)
_ALIGNMENT_BYTES = 8
ENTRY_FOOTER_BYTES = 16
"""Bytes that an entry adds to its file's footer."""
LEDGER_FOOTER_BYTES = 8 + _LEDGER_ROW.itemsize
"""Bytes that a ledger adds to the footer of each file that has records of it."""
_FILE_FOOTER_BYTES = 8

_SPAN_FIELDS = 4
"""Values per file: its number, the ledger's first and last entry in it, and the bytes of its
entries."""

_HEAD = struct.Struct("=q?")
_ENTRY_BYTES = 16
_PACKED_ENTRIES_MAX = 8
"""Most entries of a ledger that are packed.  Columns of more entries are arrays, which grow without
a copy.  100,000 ledgers of few entries take 17 MB packed, and 59 MB as objects."""
_NOTHING = _HEAD.pack(-1, False)
"""The packed form of a ledger without any records."""


class LedgerSummary(NamedTuple):
    """Summary of one ledger in one file; first > last: the file holds no entry of it."""

    ledger_id: int
    first_entry_id: int
    last_entry_id: int
    last_add_confirmed: int
    fenced: bool
    entry_bytes: int
    """Bytes of its entry records."""


class LedgerEntries(NamedTuple):
    """Entries of one ledger in one file: ascending ids, and offset and size of each frame.

    An entry may occur twice, if its first copy was found damaged; the newer copy follows.
    """

    entry_ids: array[int] | NDArray[np.int64]
    offsets: array[int] | NDArray[np.uint32]
    sizes: array[int] | NDArray[np.uint32]

    def between(
        self, first_entry_id: int, last_entry_id: int, count_max: int
    ) -> Iterator[tuple[int, int, int]]:
        """Return (entry id, offset, size) of the first `count_max` entries of the range.

        All copies of the last one are included.
        """
        start = bisect.bisect_left(self.entry_ids, first_entry_id)
        end = bisect.bisect_right(self.entry_ids, last_entry_id, start)
        stop = min(end, start + count_max)
        while start < stop < end and self.entry_ids[stop] == self.entry_ids[stop - 1]:
            stop += 1
        return zip(
            self.entry_ids[start:stop].tolist(),
            self.offsets[start:stop].tolist(),
            self.sizes[start:stop].tolist(),
            strict=True,
        )

    def columns_between(
        self, first_entry_id: int, last_entry_id: int, count_max: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return ids, offsets and sizes of the first `count_max` entries of the range.

        The columns are copied, because an array cannot grow while a view of it exists.
        """
        start = bisect.bisect_left(self.entry_ids, first_entry_id)
        end = bisect.bisect_right(self.entry_ids, last_entry_id, start)
        part = slice(start, min(end, start + count_max))
        return (
            np.array(self.entry_ids[part], np.int64),
            np.array(self.offsets[part], np.int64),
            np.array(self.sizes[part], np.int64),
        )


class Location(NamedTuple):
    """Position of an entry's frame."""

    entry_id: int
    file_number: int
    offset: int
    size: int
    ledger_id: int


class EntryColumns(NamedTuple):
    """All entries of one sealed file, in columns of equal length, by ledger and entry."""

    ledger_ids: NDArray[np.int64]
    entry_ids: NDArray[np.int64]
    offsets: NDArray[np.uint32]
    sizes: NDArray[np.uint32]


class _Ledger:
    """The part of one ledger with many entries in the file that is being written."""

    __slots__ = ("entries", "fenced", "last_add_confirmed")

    def __init__(self, entries: LedgerEntries, last_add_confirmed: int, *, fenced: bool) -> None:
        self.entries = entries
        self.last_add_confirmed = last_add_confirmed
        self.fenced = fenced


class FileIndex:
    """The index of one file while it is written: append-only, 16 bytes per entry.

    There may be very many ledgers, and most of them have few entries in one file.  Such a ledger is
    packed into one bytes object: last add confirmed and fence, then the three columns.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.entry_count = 0
        self.deleted_files: list[int] = []
        self._ledgers: dict[int, bytes | _Ledger] = {}

    def add_entry(
        self,
        *,
        ledger_id: int,
        entry_id: int,
        offset: int,
        size: int,
        last_add_confirmed: int,
    ) -> None:
        """Add an entry; `offset` and `size` are those of its frame."""
        stored = self._ledgers.get(ledger_id, _NOTHING)
        ledger = _unpacked(stored) if isinstance(stored, bytes) else stored
        entry_ids, offsets, sizes = ledger.entries
        if not entry_ids or entry_id > entry_ids[-1]:
            position = len(entry_ids)
        else:
            position = bisect.bisect_right(entry_ids, entry_id)
        # Behind its equals: a repaired copy follows the damaged one.
        for column, value in ((entry_ids, entry_id), (offsets, offset), (sizes, size)):
            column.insert(position, value)  # type: ignore[union-attr]  # ours are arrays
        if last_add_confirmed > ledger.last_add_confirmed:
            ledger.last_add_confirmed = last_add_confirmed
        self.entry_count += 1
        if isinstance(stored, bytes):
            is_small = len(entry_ids) <= _PACKED_ENTRIES_MAX
            self._ledgers[ledger_id] = _packed(ledger) if is_small else ledger

    def add_entries(
        self,
        *,
        ledger_id: int,
        first_entry_id: int,
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        last_add_confirmed: int,
    ) -> None:
        """Add consecutive entries, higher than all entries of the ledger in this file."""
        stored = self._ledgers.get(ledger_id, _NOTHING)
        ledger = _unpacked(stored) if isinstance(stored, bytes) else stored
        count = len(offsets)
        columns = (np.arange(first_entry_id, first_entry_id + count), offsets, sizes)
        for column, values in zip(ledger.entries, columns, strict=True):
            assert isinstance(column, array)
            column.frombytes(values.astype(column.typecode).tobytes())
        ledger.last_add_confirmed = max(ledger.last_add_confirmed, last_add_confirmed)
        self.entry_count += count
        self._ledgers[ledger_id] = ledger

    @property
    def footer_bytes(self) -> int:
        """Most bytes that the file's FOOTER record would have now."""
        return (
            RECORD_HEADER_BYTES
            + _ALIGNMENT_BYTES
            + _FIXED.size
            + len(self._ledgers) * LEDGER_FOOTER_BYTES
            + self.entry_count * ENTRY_FOOTER_BYTES
            + len(self.deleted_files) * _FILE_FOOTER_BYTES
        )

    def note_fence(self, ledger_id: int) -> None:
        """Note that the ledger is fenced."""
        stored = self._ledgers.get(ledger_id, _NOTHING)
        if isinstance(stored, bytes):
            self._ledgers[ledger_id] = _HEAD.pack(_head(stored)[0], True) + stored[_HEAD.size :]
        else:
            stored.fenced = True

    def note_lac(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Note a last add confirmed; one that is not higher than the known one changes nothing."""
        stored = self._ledgers.setdefault(ledger_id, _NOTHING)
        known, fenced = _head(stored)
        if last_add_confirmed <= known:
            return
        if isinstance(stored, bytes):
            self._ledgers[ledger_id] = _HEAD.pack(last_add_confirmed, fenced) + stored[_HEAD.size :]
        else:
            stored.last_add_confirmed = last_add_confirmed

    def entries(self, ledger_id: int) -> LedgerEntries | None:
        """Return the ledger's current entries in this file; None if it is not there."""
        stored = self._ledgers.get(ledger_id)
        if isinstance(stored, bytes):
            return _unpacked(stored).entries
        return None if stored is None else stored.entries

    def summaries(self) -> Iterator[LedgerSummary]:
        """Return the summary of each ledger in the file."""
        for ledger_id, stored in self._ledgers.items():
            ledger = _unpacked(stored) if isinstance(stored, bytes) else stored
            ids, _, sizes = ledger.entries
            # A file may have only the fence or the LAC of a ledger; its range of entries is then
            # empty.
            first, last = (int(ids[0]), int(ids[-1])) if len(ids) else (0, -1)
            entry_bytes = sum(sizes) + len(ids) * RECORD_HEADER_BYTES
            yield LedgerSummary(
                ledger_id, first, last, ledger.last_add_confirmed, ledger.fenced, entry_bytes
            )

    def columns(self) -> EntryColumns:
        """Return a copy of all entries, ledger by ledger."""
        ledgers = list(self._ledgers.values())
        counts = [_count(stored) for stored in ledgers]
        return EntryColumns(
            np.repeat(np.array(list(self._ledgers), np.int64), counts),
            np.frombuffer(_column(ledgers, 0), "<i8"),
            np.frombuffer(_column(ledgers, 1), "<u4"),
            np.frombuffer(_column(ledgers, 2), "<u4"),
        )

    def last_add_confirmed(self, ledger_id: int) -> int:
        """Return the LAC of the ledger in this file, -1 for none."""
        return _head(self._ledgers.get(ledger_id, _NOTHING))[0]

    def is_fenced(self, ledger_id: int) -> bool:
        """Return whether the file holds a fence of the ledger."""
        return _head(self._ledgers.get(ledger_id, _NOTHING))[1]

    def encode_footer(self) -> bytes:
        """Return the footer, whose first byte belongs at an aligned offset."""
        ledger_ids = sorted(self._ledgers)
        ledgers = [self._ledgers[ledger_id] for ledger_id in ledger_ids]
        # Columns of eight bytes come before those of four, so that each of them is aligned.
        rows = np.zeros(len(ledgers), _LEDGER_ROW)
        counts = np.fromiter((_count(each) for each in ledgers), np.int64)
        rows["count"] = counts
        rows["start"] = np.cumsum(counts) - counts
        rows["last_add_confirmed"] = [_head(each)[0] for each in ledgers]
        rows["fenced"] = [_head(each)[1] for each in ledgers]
        return b"".join(
            (
                _FIXED.pack(
                    _MAGIC,
                    _VERSION,
                    0,
                    len(ledgers),
                    self.entry_count,
                    len(self.deleted_files),
                    0,
                    0,
                ),
                np.array(ledger_ids, "<i8").tobytes(),
                rows.tobytes(),
                _column(ledgers, 0),
                np.array(self.deleted_files, "<u8").tobytes(),
                _column(ledgers, 1),
                _column(ledgers, 2),
            )
        )


def _head(stored: bytes | _Ledger) -> tuple[int, bool]:
    """Return the last add confirmed, and whether the ledger is fenced."""
    if isinstance(stored, bytes):
        last_add_confirmed, fenced = _HEAD.unpack_from(stored)
        return last_add_confirmed, fenced
    return stored.last_add_confirmed, stored.fenced


def _count(stored: bytes | _Ledger) -> int:
    if isinstance(stored, bytes):
        return (len(stored) - _HEAD.size) // _ENTRY_BYTES
    return len(stored.entries.entry_ids)


def _packed(ledger: _Ledger) -> bytes:
    entry_ids, offsets, sizes = ledger.entries
    head = _HEAD.pack(ledger.last_add_confirmed, ledger.fenced)
    return head + entry_ids.tobytes() + offsets.tobytes() + sizes.tobytes()


def _unpacked(packed: bytes) -> _Ledger:
    last_add_confirmed, fenced = _HEAD.unpack_from(packed)
    # An entry has 8 bytes of id, 4 of offset and 4 of size: the ids take half, offsets a quarter.
    sizes = _HEAD.size + (len(packed) - _HEAD.size) // 4 * 3
    offsets = _HEAD.size + (len(packed) - _HEAD.size) // 2
    entries = LedgerEntries(
        array("q", packed[_HEAD.size : offsets]),
        array("I", packed[offsets:sizes]),
        array("I", packed[sizes:]),
    )
    return _Ledger(entries, last_add_confirmed, fenced=fenced)


def _column(ledgers: Sequence[bytes | _Ledger], number: int) -> bytes:
    """Return a column of all `ledgers`, as it is stored: 0 the entry ids, 1 offsets, 2 sizes."""
    joined = b"".join(_column_of(each, number) for each in ledgers)
    typecode, stored = (("q", "<i8"), ("I", "<u4"), ("I", "<u4"))[number]
    return np.frombuffer(joined, typecode).astype(stored, copy=False).tobytes()


def _column_of(stored: bytes | _Ledger, number: int) -> bytes | memoryview:
    if not isinstance(stored, bytes):
        return memoryview(stored.entries[number])  # type: ignore[arg-type]  # ours are arrays
    count = _count(stored)
    # Packed columns follow each other, so one starts after those before it: 0, 8 or 12 bytes each.
    start = _HEAD.size + (0, 8, 12)[number] * count
    return stored[start : start + (8, 4, 4)[number] * count]


class SealedIndex:
    """The footer of a sealed file, used in place; its checksum is verified before."""

    def __init__(self, payload: memoryview) -> None:
        if len(payload) < _FIXED.size:
            raise BookieStorageError(f"a footer of {len(payload)} bytes is too short")
        magic, version, _, ledgers, entries, deleted, _, _ = _FIXED.unpack_from(payload)
        if magic != _MAGIC or version != _VERSION:
            raise BookieStorageError(
                f"footer of magic {magic!r} version {version}, expected {_MAGIC!r} {_VERSION}"
            )
        self._payload = payload
        self._asked_id = -1
        self._asked: LedgerEntries | None = None
        self._offset = _FIXED.size
        self._ledger_ids = self._take("<i8", ledgers)
        self._rows = self._take(_LEDGER_ROW, ledgers)
        self._entry_ids = self._take("<i8", entries)
        self.deleted_files: list[int] = self._take("<u8", deleted).tolist()
        self._offsets = self._take("<u4", entries)
        self._sizes = self._take("<u4", entries)

    def entries(self, ledger_id: int) -> LedgerEntries | None:
        """Return the ledger's entries in this file; None if it is not in the file."""
        if ledger_id == self._asked_id:  # A reader of a ledger asks for it at each chunk.
            return self._asked
        self._asked_id, self._asked = ledger_id, self._find_entries(ledger_id)
        return self._asked

    def _find_entries(self, ledger_id: int) -> LedgerEntries | None:
        position = int(np.searchsorted(self._ledger_ids, ledger_id))
        if position == len(self._ledger_ids) or self._ledger_ids[position] != ledger_id:
            return None
        row = self._rows[position]
        start = int(row["start"])
        part = slice(start, start + int(row["count"]))
        return LedgerEntries(self._entry_ids[part], self._offsets[part], self._sizes[part])

    def summaries(self) -> Iterator[LedgerSummary]:
        """Return the summary of each ledger in the file."""
        ends = np.concatenate(([0], np.cumsum(self._sizes, dtype=np.int64)))
        for ledger_id, (lac, start, count, fenced, _) in zip(
            self._ledger_ids.tolist(), self._rows.tolist(), strict=True
        ):
            first, last = 0, -1
            if count:
                first = int(self._entry_ids[start])
                last = int(self._entry_ids[start + count - 1])
            size = int(ends[start + count] - ends[start]) + count * RECORD_HEADER_BYTES
            yield LedgerSummary(ledger_id, first, last, lac, bool(fenced), size)

    def ledger_ids(self) -> list[int]:
        """Return the ledgers that have records in the file."""
        ids: list[int] = self._ledger_ids.tolist()
        return ids

    def ledger_rows(self) -> Iterator[tuple[int, slice]]:
        """Return each ledger with its slice of `columns`."""
        for ledger_id, (_, start, count, _, _) in zip(
            self._ledger_ids.tolist(), self._rows.tolist(), strict=True
        ):
            yield ledger_id, slice(start, start + count)

    def columns(self) -> EntryColumns:
        """Return all entries of the file, by ledger and entry."""
        counts = self._rows["count"].astype(np.int64)
        return EntryColumns(
            np.repeat(self._ledger_ids, counts), self._entry_ids, self._offsets, self._sizes
        )

    def _take(self, dtype: str | np.dtype[np.void], count: int) -> NDArray[Any]:
        column = np.dtype(dtype)
        if self._offset + column.itemsize * count > len(self._payload):
            raise BookieStorageError("a footer is shorter than its own counts say")
        values = np.frombuffer(self._payload, column, count, self._offset)
        self._offset += column.itemsize * count
        return values


def encode_footer_record(
    index: FileIndex, header: FileHeader, *, offset: int, sequence: int
) -> list[bytes]:
    """Return the FOOTER record that seals the file at `offset`."""
    payload = bytes(_padding(offset)) + index.encode_footer()
    record = encode_record_header(
        RecordType.FOOTER,
        payload_bytes=len(payload),
        payload_crc=crc32c.crc32c(payload),
        sequence=sequence,
        number=index.number,
        offset=offset,
        batch_offset=offset,
        seed=header.seed,
    )
    return [record, payload]


def read_footer(view: memoryview, *, offset: int, number: int, seed: int) -> SealedIndex | None:
    """Return the footer in `view`, file `number` from `offset` to its end; None if it is damaged.

    `seed` is that of the file's header.
    """
    header = FileHeader(number, {}, 0, seed)
    record = read_record_header(view, offset, header, view_offset=offset)
    if record is None or record.type is not RecordType.FOOTER or record.end != offset + len(view):
        return None
    payload = view[RECORD_HEADER_BYTES:]
    if crc32c.crc32c(payload) != record.payload_crc:
        return None
    return SealedIndex(payload[_padding(offset) :])


def _padding(offset: int) -> int:
    return -(offset + RECORD_HEADER_BYTES) % _ALIGNMENT_BYTES


class LedgerState:
    """Fence, last add confirmed and files of one ledger.

    `fenced` is set when the fence is accepted, so that no later add is accepted.
    `is_fence_durable` is set once the fence's record is on disk; only then may the fence be
    reported to a client.
    """

    __slots__ = (
        "_spans",
        "fenced",
        "is_deleted",
        "is_fence_durable",
        "last_add_confirmed",
        "last_entry_id",
    )

    def __init__(self) -> None:
        self.fenced = False
        self.is_fence_durable = False
        self.is_deleted = False
        """The ledger's metadata is proven to be gone.  Its files are dropped when no other ledger
        needs them."""
        self.last_add_confirmed = -1
        self.last_entry_id = -1
        """Highest entry accepted; an add of a higher entry cannot be a repetition."""
        self._spans: array[int] = array("q")

    def note_sealed(self, number: int, summary: LedgerSummary) -> None:
        """Add the summary of the ledger in sealed file `number`."""
        self._spans.extend(
            (number, summary.first_entry_id, summary.last_entry_id, summary.entry_bytes)
        )
        self.note_summary(summary)

    def note_summary(self, summary: LedgerSummary) -> None:
        """Add the summary of the ledger in a replayed file."""
        self.note_entry(summary.last_entry_id, summary.last_add_confirmed)
        if summary.fenced:
            self.fenced = True
            self.is_fence_durable = True

    def note_entry(self, entry_id: int, last_add_confirmed: int) -> bool:
        """Note an accepted entry and the LAC it carries; return whether the LAC moved."""
        self.last_entry_id = max(self.last_entry_id, entry_id)
        return self.note_lac(last_add_confirmed)

    def note_lac(self, last_add_confirmed: int) -> bool:
        """Raise the last add confirmed; return whether it moved."""
        if last_add_confirmed <= self.last_add_confirmed:
            return False
        self.last_add_confirmed = last_add_confirmed
        return True

    def accepts(self, *, is_recovery: bool) -> bool:
        """Return whether an add is still allowed."""
        return is_recovery or not self.fenced

    def forget_files(self, numbers: Container[int]) -> None:
        """Forget deleted files."""
        kept: array[int] = array("q")
        for span in self._iterate():
            if span[0] not in numbers:
                kept.extend(span)
        self._spans = kept

    @property
    def has_files(self) -> bool:
        """Whether any sealed file has records of the ledger."""
        return len(self._spans) > 0

    def files(self) -> Iterator[int]:
        """Return the sealed files that have records of the ledger."""
        return iter(self._spans[::_SPAN_FIELDS])

    def file_bytes(self) -> Iterator[tuple[int, int]]:
        """Return (file, bytes of the ledger's entry records in it) of its sealed files."""
        return zip(self._spans[::_SPAN_FIELDS], self._spans[3::_SPAN_FIELDS], strict=True)

    def files_between(self, first_entry_id: int, last_entry_id: int) -> list[tuple[int, int]]:
        """Return (lowest entry id, file) of sealed files that may hold entries of the range."""
        return [
            (first, number)
            for number, first, last, _ in self._iterate()
            if first <= last_entry_id and last >= first_entry_id
        ]

    def _iterate(self) -> Iterator[tuple[int, int, int, int]]:
        spans = self._spans
        return zip(
            spans[::_SPAN_FIELDS],
            spans[1::_SPAN_FIELDS],
            spans[2::_SPAN_FIELDS],
            spans[3::_SPAN_FIELDS],
            strict=True,
        )


def note_sealed(
    ledgers: dict[int, LedgerState], number: int, summaries: Iterable[LedgerSummary]
) -> None:
    """Add the summaries of the ledgers in sealed file `number`."""
    for summary in summaries:
        state = ledgers.get(summary.ledger_id)
        if state is None:
            state = ledgers[summary.ledger_id] = LedgerState()
        state.note_sealed(number, summary)
