"""Kafka's record batches, version 2, taken apart as a whole: the other way of `batches`.

A record says its length in front, so where each one begins is found by a loop, which looks at the
lengths only.  All that is in the records is then read by numpy, a column after the other; Arrow
takes keys and values out of the bytes.  Only headers are read one by one.

Promises: whatever comes is a batch, or `RefusedBatchError` with the code that Kafka has for it.
Nothing is taken from a batch whose checksum is wrong.  A compressed batch takes no more memory than
a plain one may: what would become larger is refused before it is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import crc32c
import numpy as np
import pyarrow as pa
from kio.schema.errors import ErrorCode

from dlcore.proxy.kafka.batches import HEADER_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.int64]

HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
"""The type of the headers of records."""
NO_PRODUCER = -1
_HEADER = struct.Struct(">qiibIhiqqqhii")
_COUNTED_AFTER, _MAGIC_AT, _CRC_FROM, _MAGIC = 12, 16, 21, 2
_COMPRESSION, _TRANSACTIONAL, _CONTROL = 0x07, 0x10, 0x20
_STREAMED = {1: "gzip", 3: "lz4", 4: "zstd"}
_SNAPPY = 2
# Seven fields of one byte each: length, attributes, time, number, two lengths, count of headers.
_RECORD_BYTES_MIN = 7
_VARINT_BYTES, _VARLONG_BYTES = 5, 10
_XERIAL = b"\x82SNAPPY\0"
_XERIAL_BYTES = 16
_CORRUPT, _INVALID = ErrorCode.corrupt_message, ErrorCode.invalid_record


class RefusedBatchError(Exception):
    """A batch is refused with a code of Kafka's, for a reason."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class ProducedBatch:
    """The records of a producer, at least one."""

    producer: int
    """The producer's id; `NO_PRODUCER`: it does not number its records."""
    epoch: int
    sequence: int
    """The number of the first record."""
    values: pa.BinaryArray
    keys: pa.BinaryArray | None
    """None: no record has a key."""
    headers: pa.ListArray | None
    """Headers of each record, in the type `HEADERS`; None: no record has any."""

    def __len__(self) -> int:
        return len(self.values)


def produced_in(data: bytes | None, *, bytes_max: int) -> ProducedBatch:
    """Read the one batch in these bytes; its records have at most `bytes_max` bytes.

    Raises:
        RefusedBatchError: there is no batch, or none that is served.
    """
    if data is None or len(data) < HEADER_BYTES:
        raise RefusedBatchError(_CORRUPT, f"a batch of {len(data or b''):,} bytes: expected 61")
    found = _HEADER.unpack_from(data)
    _, length, _, magic, crc, attributes, last, _, _, producer, epoch, sequence, count = found
    if magic != _MAGIC:
        raise RefusedBatchError(_INVALID, f"records of version {magic}: expected 2")
    if length != len(data) - _COUNTED_AFTER:
        is_more = 0 < length < len(data) - _COUNTED_AFTER
        reason = f"a batch of {length:,} bytes in {len(data) - _COUNTED_AFTER:,}: expected all"
        raise RefusedBatchError(_INVALID if is_more else _CORRUPT, reason)
    if crc != crc32c.crc32c(memoryview(data)[_CRC_FROM:]):
        raise RefusedBatchError(_CORRUPT, "the checksum of a batch is wrong")
    if attributes & _CONTROL:
        raise RefusedBatchError(_INVALID, "a control batch, which only brokers write")
    if attributes & _TRANSACTIONAL:
        raise RefusedBatchError(ErrorCode.invalid_txn_state, "transactions are not served")
    if producer < NO_PRODUCER or (producer >= 0 and (epoch < 0 or sequence < 0)):
        reason = f"producer {producer}, epoch {epoch}, sequence {sequence}: expected none below 0"
        raise RefusedBatchError(_INVALID, reason)
    body, start = _plain(data, attributes & _COMPRESSION, bytes_max)
    size = len(body) - start
    if not 0 < count <= size // _RECORD_BYTES_MIN or last != count - 1:
        reason = f"{count:,} records, the last is number {last:,}, in {size:,} bytes"
        raise RefusedBatchError(_INVALID, reason)
    keys, values, headers = _fields(body, *_bounds(body, start, count))
    return ProducedBatch(producer, epoch, sequence, values, keys, headers)


# Compression


def _plain(data: bytes, codec: int, bytes_max: int) -> tuple[bytes, int]:
    """Return the records of a batch, not compressed, and where they begin: they are not copied."""
    if not codec:
        found, start = data, HEADER_BYTES
    elif codec == _SNAPPY:
        found, start = _unsnapped(data[HEADER_BYTES:], bytes_max), 0
    elif codec in _STREAMED:
        found, start = _streamed(data[HEADER_BYTES:], _STREAMED[codec], bytes_max), 0
    else:
        code = ErrorCode.unsupported_compression_type
        raise RefusedBatchError(code, f"compression {codec}: expected 0 to 4")
    _require_room(len(found) - start, bytes_max)
    return found, start


def _require_room(size_bytes: int, bytes_max: int) -> None:
    if size_bytes > bytes_max:
        reason = f"a batch of {size_bytes:,} bytes or more: expected {bytes_max:,} at most"
        raise RefusedBatchError(ErrorCode.message_too_large, reason)


def _streamed(data: bytes, codec: str, bytes_max: int) -> bytes:
    # One byte more than allowed shows that a batch is too large; the rest is not inflated.
    parts, left = list[bytes](), bytes_max + 1
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), codec) as stream:
            while left and (part := stream.read(left)):
                parts.append(part)
                left -= len(part)
    except (OSError, pa.ArrowException) as error:
        raise RefusedBatchError(_CORRUPT, f"what is no {codec}: {error}") from error
    return b"".join(parts)


def _unsnapped(data: bytes, bytes_max: int) -> bytes:
    """Return what snappy has compressed: one block, or those of the frame that Java's client makes.

    A frame has a mark and two versions, and before each block its size.
    """
    if not data.startswith(_XERIAL):
        return _block(data, bytes_max)
    parts, left, at = list[bytes](), bytes_max, _XERIAL_BYTES
    while at < len(data):
        size = int.from_bytes(data[at : at + 4])
        block = data[at + 4 : at + 4 + size]
        if len(block) != size or not size:
            raise RefusedBatchError(_CORRUPT, f"a block of snappy of {size:,} bytes is cut off")
        parts.append(_block(block, left))
        left -= len(parts[-1])
        at += 4 + size
    return b"".join(parts)


def _block(data: bytes, bytes_max: int) -> bytes:
    """Return a block of snappy, which begins with its size as a varint."""
    size = 0
    for index, byte in enumerate(data[:_VARINT_BYTES]):
        size |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            break
    _require_room(size, bytes_max)
    try:
        found: bytes = pa.Codec("snappy").decompress(data, size, asbytes=True)
    except (OSError, pa.ArrowException) as error:
        raise RefusedBatchError(_CORRUPT, f"what is no snappy: {error}") from error
    return found


# Records


def _bounds(body: bytes, start: int, count: int) -> tuple[Numbers, Numbers]:
    """Return where each record begins behind its length, and where it ends."""
    starts, ends, at = list[int](), list[int](), start
    try:
        for _ in range(count):
            length = body[at]
            at += 1
            if length >= 0x80:  # most records have one byte or two
                byte = body[at]
                at += 1
                length = length & 0x7F | (byte & 0x7F) << 7
                shift = 14
                while byte >= 0x80 and shift < 7 * _VARINT_BYTES:
                    byte = body[at]
                    at += 1
                    length |= (byte & 0x7F) << shift
                    shift += 7
            if length & 1:  # a zigzag number below 0
                break
            starts.append(at)
            at += length >> 1
            ends.append(at)
    except IndexError as error:
        reason = f"record {len(starts):,} of {count:,} ends behind its batch"
        raise RefusedBatchError(_INVALID, reason) from error
    if at != len(body) or len(ends) != count:
        have, size = at - start, len(body) - start
        reason = f"{len(ends):,} of {count:,} records have {have:,} bytes: expected {size:,}"
        raise RefusedBatchError(_INVALID, reason)
    return np.array(starts, np.int64), np.array(ends, np.int64)


class _Unread:
    """The rest of each record that is not read yet; nothing behind a record's end is read."""

    def __init__(self, body: bytes, starts: Numbers, ends: Numbers) -> None:
        self._raw = np.frombuffer(body, np.uint8)
        self.at = starts
        self.ends = ends

    def _byte(self, at: Numbers) -> NDArray[np.uint8]:
        """Return a byte of each; what is read behind the last record is refused by `skip`."""
        found: NDArray[np.uint8] = self._raw[np.minimum(at, len(self._raw) - 1)]
        return found

    def skip(self, lengths: Any) -> None:
        """Pass over so many bytes of each."""
        self.at = self.at + lengths
        beyond = self.at > self.ends
        if beyond.any():
            raise RefusedBatchError(_INVALID, f"record {int(beyond.argmax()):,} is cut off")

    def varint(self, bytes_max: int = _VARINT_BYTES) -> Numbers:
        """Take a zigzag varint of each."""
        byte = self._byte(self.at)
        found = (byte & 0x7F).astype(np.uint64)
        goes_on, lengths = byte >= 0x80, np.ones(len(byte), np.int64)
        for index in range(1, bytes_max):
            if not goes_on.any():
                break
            byte = np.where(goes_on, self._byte(self.at + lengths), 0)
            found |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * index)
            lengths += goes_on
            goes_on = byte >= 0x80
        if goes_on.any():
            raise RefusedBatchError(_INVALID, f"record {int(goes_on.argmax()):,} has no varint")
        self.skip(lengths)
        half: Numbers = (found >> np.uint64(1)).astype(np.int64)
        return half ^ -(found & np.uint64(1)).astype(np.int64)

    def texts(self) -> tuple[Numbers, Numbers]:
        """Take bytes with their length of each; return where they begin, and the lengths."""
        lengths = self.varint()
        if (lengths < -1).any():
            number = int((lengths < -1).argmax())
            raise RefusedBatchError(_INVALID, f"record {number:,}: a length of {lengths[number]}")
        starts = self.at
        self.skip(np.maximum(lengths, 0))
        return starts, lengths


def _fields(
    body: bytes, starts: Numbers, ends: Numbers
) -> tuple[pa.BinaryArray | None, pa.BinaryArray, pa.ListArray | None]:
    """Return keys, values and headers."""
    unread = _Unread(body, starts, ends)
    unread.skip(1)  # attributes, of which there are none
    unread.varint(_VARLONG_BYTES)  # the time at the client: records have that of the write
    numbers = unread.varint()
    if (numbers != np.arange(len(numbers))).any():
        raise RefusedBatchError(_INVALID, "the records of a batch are not numbered 0, 1, 2, ...")
    keys, values, counts = unread.texts(), unread.texts(), unread.varint()
    if (counts < 0).any() or ((unread.at != ends) & (counts == 0)).any():
        raise RefusedBatchError(_INVALID, "a record is longer than what it holds")
    headers = _headers(body, unread.at, ends, counts) if counts.any() else None
    has_keys = bool((keys[1] >= 0).any())
    return _taken(body, *keys) if has_keys else None, _taken(body, *values), headers


def _taken(body: bytes, starts: Numbers, lengths: Numbers) -> pa.BinaryArray:
    """Return parts of the bytes; of a length below 0: null."""
    # Arrow has no gaps between values: each gap is a value of its own, which is not taken.
    ends = np.empty(2 * len(starts) + 1, np.int32)
    ends[:-1:2] = starts
    ends[1::2] = starts + np.maximum(lengths, 0)
    ends[-1] = ends[-2]
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(body)]
    whole = pa.Array.from_buffers(pa.binary(), 2 * len(starts), buffers)
    indices = pa.array(np.arange(0, 2 * len(starts), 2), mask=lengths < 0)
    found: pa.BinaryArray = whole.take(indices)
    return found


def _headers(body: bytes, starts: Numbers, ends: Numbers, counts: Numbers) -> pa.ListArray:
    """Return the headers of each record, one by one: few producers have any."""
    rows = list[list[dict[str, Any]]]()
    for number, (at, end, count) in enumerate(
        zip(starts.tolist(), ends.tolist(), counts.tolist(), strict=True)
    ):
        found = list[dict[str, Any]]()
        try:
            for _ in range(count):
                header, at = _header(body, at, end)
                found.append(header)
        except ValueError as error:
            raise RefusedBatchError(_INVALID, f"the headers of record {number:,}") from error
        if at != end:
            raise RefusedBatchError(_INVALID, f"the headers of record {number:,} end before it")
        rows.append(found)
    return pa.array(rows, HEADERS)


def _header(body: bytes, at: int, end: int) -> tuple[dict[str, Any], int]:
    """Return a header, and where it ends.  Raises: ValueError."""
    key, at = _text(body, at, end)
    value, at = _text(body, at, end)
    if key is None:
        raise ValueError
    return {"key": key.decode(), "value": value}, at


def _text(body: bytes, at: int, end: int) -> tuple[bytes | None, int]:
    """Return bytes with their length, and where they end.  Raises: ValueError."""
    number = 0
    for index in range(_VARINT_BYTES):
        if at >= end:
            raise ValueError
        byte = body[at]
        at += 1
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            break
    length = number >> 1 ^ -(number & 1)
    if length == -1:
        return None, at
    if not 0 <= length <= end - at:
        raise ValueError
    return body[at : at + length], at + length
