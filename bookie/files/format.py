"""Bytes of an entry log file: its header, its records, and how torn records differ from damage.

A file is a header, then records.  The header lists the sealed files that are alive when it is
written, each with the offset where its records end.  Therefore a missing file is noticed, and a
damaged footer can be made again from the records.  All numbers outside the footer are big-endian.

    header:  magic 8s | version u16 | reserved u16 | header bytes u32 | file number u64 | owner 16s
             | life 16s | live count u32 | per live file: number u64, records end u64 | crc32c u32
    record:  magic u16 | type u8 | reserved u8 | payload bytes u32 | sequence u64
             | file number u64 | offset u32 | batch offset u32 | payload crc32c u32
             | header crc32c u32, then the payload

The record header's checksum is seeded with the file header's, so a record of another file, of
another bookie, or of an earlier life of this file has a wrong checksum here.  A file may be
recycled from an older one.  Then the old records lie behind the new ones, intact and at the same
offsets.  To tell them apart, each file has a life, a random number in its header.

Behind the last record of a file that is being written come zeros, or bytes of an earlier life, or
both.  A sealed file ends with its footer.

An entry's frame carries its own checksum.  Its record uses this as the payload's CRC32C, so that
the body is summed only once.

The batch offset is where the group-committed batch of the record begins.  A batch is written only
when the one before it is durable.  Therefore a record whose batch begins behind an unreadable place
proves that the place was durable and acknowledged: the place is damaged.  Without such a proof it
is the torn tail of the last, unacknowledged batch.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import crc32c
import numpy as np

from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dlcore.wire.frames import BytesLike

FILE_SUFFIX = ".log"
NOTE_BYTES = 4096
"""Most bytes of the disk that the note of the newest file takes."""
# Ends as PNG's signature does: a copy that translates line ends is noticed.
_FILE_MAGIC = b"DLOGBK\r\n"
_FILE_VERSION = 1
_FILE_FIXED = struct.Struct(">8sHHIQ16s16sI")
_LIVE_FILE = struct.Struct(">QQ")
_CRC = struct.Struct(">I")

_RECORD = struct.Struct(">HBBIQQIII")
_RECORD_MAGIC = 0xB10C
_RECORD_MAGIC_BYTES = _RECORD_MAGIC.to_bytes(2, "big")
RECORD_HEADER_BYTES = _RECORD.size + _CRC.size
_RECORDS = np.dtype(
    [
        ("magic", ">u2"),
        ("kind", "u1"),
        ("reserved", "u1"),
        ("payload_bytes", ">u4"),
        ("sequence", ">u8"),
        ("number", ">u8"),
        ("offset", ">u4"),
        ("batch_offset", ">u4"),
        ("payload_crc", ">u4"),
        ("crc", ">u4"),
    ]
)
"""Record headers, to encode many of them at once."""

_FENCE = struct.Struct(">q")
_LAC = struct.Struct(">qq")


class RecordType(IntEnum):
    """Types of records; the numbers are stored on disk."""

    ENTRY = 1
    FENCE = 2
    LAC = 3
    GARBAGE = 4
    """These files are not needed any more; logged before they are deleted."""
    MARK = 5
    """Proves that everything before it was durable; its payload fills a sector."""
    FOOTER = 6
    """The sorted index of the file, its last record."""


_TYPES = {kind.value: kind for kind in RecordType}


class FileHeader(NamedTuple):
    """A verified file header."""

    number: int
    live_files: dict[int, int]
    """Number and records end of each sealed file that was alive at the time."""
    size: int
    seed: int
    """Seed of the checksums of the file's records."""


class Record(NamedTuple):
    """A record header with a valid checksum; the payload is not verified yet."""

    type: RecordType
    offset: int
    payload_bytes: int
    sequence: int
    batch_offset: int
    payload_crc: int

    @property
    def payload_offset(self) -> int:
        """Offset of the payload in the file."""
        return self.offset + RECORD_HEADER_BYTES

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self.offset + RECORD_HEADER_BYTES + self.payload_bytes


def file_name(number: int) -> str:
    """Return the name of the file with that number."""
    return f"{number:010d}{FILE_SUFFIX}"


def file_number(name: str) -> int | None:
    """Return the number of an entry log file, None for any other name."""
    stem = name.removesuffix(FILE_SUFFIX)
    if stem == name or not stem.isdecimal() or file_name(int(stem)) != name:
        return None
    return int(stem)


def owner_digest(owner: str) -> bytes:
    """Return the digest of its owner that a file header holds."""
    return hashlib.blake2b(owner.encode(), digest_size=16).digest()


def file_header_bytes(live_count: int) -> int:
    """Return the size of a file header that lists `live_count` live files."""
    return _FILE_FIXED.size + _LIVE_FILE.size * live_count + _CRC.size


def encode_file_header(
    number: int, *, owner: bytes, life: str, live_files: dict[int, int]
) -> bytes:
    """Return the header of file `number` while `live_files` (number: records end) are alive.

    `life` is 32 random hex digits that no file had before.
    """
    size = file_header_bytes(len(live_files))
    header = b"".join(
        (
            _FILE_FIXED.pack(
                _FILE_MAGIC,
                _FILE_VERSION,
                0,
                size,
                number,
                owner,
                bytes.fromhex(life),
                len(live_files),
            ),
            *(_LIVE_FILE.pack(*item) for item in live_files.items()),
        )
    )
    return header + _CRC.pack(crc32c.crc32c(header))


def stated_header_size(view: memoryview) -> int:
    """Return the length that the header states, without verification."""
    if len(view) < _FILE_FIXED.size:
        return 0
    return int(_FILE_FIXED.unpack_from(view)[3])


def decode_file_header(view: memoryview, *, number: int, owner: bytes) -> FileHeader:
    """Verify the header of file `number`.

    Raises:
        BookieStorageError: damaged, or a file of another number or owner.
    """
    name = file_name(number)
    if len(view) < _FILE_FIXED.size + _CRC.size:
        raise BookieStorageError(f"{name}: {len(view)} bytes are too few for a file header")
    magic, version, _, size, found, found_owner, _, count = _FILE_FIXED.unpack_from(view)
    if magic != _FILE_MAGIC:
        raise BookieStorageError(f"{name}: not an entry log file, it begins with {magic!r}")
    expected_size = file_header_bytes(count)
    if size != expected_size or size > len(view):
        raise BookieStorageError(f"{name}: damaged file header: it says it has {size} bytes")
    (checksum,) = _CRC.unpack_from(view, size - _CRC.size)
    if crc32c.crc32c(view[: size - _CRC.size]) != checksum:
        raise BookieStorageError(f"{name}: damaged file header: its checksum does not match")
    # After the checksum, so that damage is not reported as another version.
    if version != _FILE_VERSION:
        raise BookieStorageError(f"{name}: format version {version}, expected {_FILE_VERSION}")
    if found != number:
        raise BookieStorageError(f"{name}: its header says it is file {found}")
    if found_owner != owner:
        raise BookieStorageError(f"{name}: written by another bookie or in another cluster")
    live = view[_FILE_FIXED.size : size - _CRC.size]
    return FileHeader(number, dict(_LIVE_FILE.iter_unpack(live)), size, checksum)


def encode_record_header(
    kind: RecordType,
    *,
    payload_bytes: int,
    payload_crc: int,
    sequence: int,
    number: int,
    offset: int,
    batch_offset: int,
    seed: int,
) -> bytes:
    """Return the header of a record at `offset` of file `number`."""
    header = _RECORD.pack(
        _RECORD_MAGIC,
        kind,
        0,
        payload_bytes,
        sequence,
        number,
        offset,
        batch_offset,
        payload_crc,
    )
    return header + _CRC.pack(crc32c.crc32c(header, seed))


def encode_entry_headers(
    sizes: NDArray[np.int64],
    checks: NDArray[np.uint32],
    *,
    sequence: int,
    number: int,
    offset: int,
    batch_offset: int,
    seed: int,
) -> NDArray[np.void]:
    """Return the headers of the records of entries one after the other, from `offset` on.

    Args:
        sizes: sizes of their frames.
        checks: checksums that the frames carry.
        sequence: sequence number of the first record.
    """
    ends = offset + np.cumsum(sizes + RECORD_HEADER_BYTES)
    headers = np.empty(len(sizes), _RECORDS)
    headers["magic"] = _RECORD_MAGIC
    headers["kind"] = RecordType.ENTRY
    headers["reserved"] = 0
    headers["payload_bytes"] = sizes
    headers["sequence"] = np.arange(sequence, sequence + len(sizes))
    headers["number"] = number
    headers["offset"] = ends - sizes - RECORD_HEADER_BYTES
    headers["batch_offset"] = batch_offset
    headers["payload_crc"] = checks
    data = headers.view(np.uint8).data
    headers["crc"] = [
        crc32c.crc32c(data[start : start + _RECORD.size], seed)
        for start in range(0, len(data), RECORD_HEADER_BYTES)
    ]
    return headers


def read_record_header(
    view: memoryview, offset: int, header: FileHeader, *, view_offset: int = 0
) -> Record | None:
    """Return the record that begins at `offset` of the file, None if there is none.

    `view` is the file from `view_offset` on.

    Raises:
        BookieStorageError: an intact record of a type that this version does not know.
    """
    start = offset - view_offset
    if start + RECORD_HEADER_BYTES > len(view):
        return None
    magic, kind, _, payload_bytes, sequence, number, found, batch_offset, payload_crc = (
        _RECORD.unpack_from(view, start)
    )
    # Before the checksum: a search for a record asks at each place that looks like the magic.
    if magic != _RECORD_MAGIC or found != offset or number != header.number:
        return None
    (checksum,) = _CRC.unpack_from(view, start + _RECORD.size)
    if crc32c.crc32c(view[start : start + _RECORD.size], header.seed) != checksum:
        return None
    known = _TYPES.get(kind)
    if known is None:
        raise BookieStorageError(
            f"{file_name(number)}: record at offset {offset} has the unknown type {kind}: "
            "a newer version wrote this file"
        )
    return Record(known, offset, payload_bytes, sequence, batch_offset, payload_crc)


def find_record_after(
    view: memoryview, view_offset: int, offset: int, header: FileHeader
) -> Record | None:
    """Return the first record that proves the unreadable place `offset` was durable.

    `view` is some of the file behind that place, from `view_offset` on.
    """
    # A memoryview has no `find`.
    data = bytes(view)
    position = data.find(_RECORD_MAGIC_BYTES)
    while position >= 0:
        record = read_record_header(view, view_offset + position, header, view_offset=view_offset)
        if record is not None and record.batch_offset > offset:
            return record
        position = data.find(_RECORD_MAGIC_BYTES, position + 1)
    return None


def encode_fence(ledger_id: int) -> bytes:
    """Return the payload of a FENCE record."""
    return _FENCE.pack(ledger_id)


def decode_fence(payload: BytesLike) -> int:
    """Return the ledger id of a FENCE record."""
    (ledger_id,) = _FENCE.unpack(payload)
    return int(ledger_id)


def encode_lac(ledger_id: int, last_add_confirmed: int) -> bytes:
    """Return the payload of a LAC record."""
    return _LAC.pack(ledger_id, last_add_confirmed)


def decode_lac(payload: BytesLike) -> tuple[int, int]:
    """Return ledger id and last add confirmed of a LAC record."""
    ledger_id, last_add_confirmed = _LAC.unpack(payload)
    return ledger_id, last_add_confirmed


def encode_garbage(numbers: Sequence[int]) -> bytes:
    """Return the payload of a GARBAGE record."""
    return struct.pack(f">{len(numbers)}Q", *numbers)


def decode_garbage(payload: BytesLike) -> tuple[int, ...]:
    """Return the file numbers of a GARBAGE record."""
    return struct.unpack(f">{len(payload) // 8}Q", payload)
