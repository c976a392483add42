"""Kafka's record batches, version 2, made of Arrow's arrays as a whole.

A batch has a header of 61 bytes, and its records one after the other:

    length, attributes (0), time - time of the batch, number in the batch, length of the key (-1:
    none), key, length of the value (-1: null), value, number of headers, headers

Lengths, the time and the number are zigzag varints of 1 to 10 bytes.  All that stands before the
values is made as one table of bytes by numpy, a row for each record; a mask takes out what shorter
varints leave unused.  Arrow then joins each row and its value.  A batch without headers has only a
0 behind each value, which becomes the first byte of the next row, and saves a part of the join.
Records with keys, and batches with a null among the values, are made one by one.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeAlias

import crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.int64]

FEW_RECORDS = 120
"""Up to this many records, a loop over them is faster."""
HEADER_BYTES = 61
_HEADER = struct.Struct(">qiibIhiqqqhii")
_COUNTED_AFTER = 12
"""Bytes of the header that its own length does not count."""
_CRC_FROM = 21
_MAGIC = 2
_NONE = -1
_NO_HEADER: dict[str, Any] = {"key": None, "value": None}


def batch_of(
    values: pa.BinaryArray,
    times_ms: Numbers,
    *,
    offset: int,
    headers: pa.BinaryArray | None,
    keys: pa.BinaryArray | None = None,
) -> list[bytes | memoryview]:
    """Return a batch in parts.

    Args:
        values: the records' values; there is at least one.
        times_ms: the time of each record.
        offset: the number of the first record in its log.
        headers: for each record the encoded headers with their number, by `headers_of`; None: no
            record has any.
        keys: the key of each record, or null; None: no record has one.
    """
    base_ms, count = int(times_ms.min()), len(values)
    deltas_ms = times_ms - base_ms
    if count <= FEW_RECORDS or keys is not None or values.null_count:
        records = _plain_records(values, deltas_ms, headers, keys)
    else:
        records = _records(values, deltas_ms, headers)
    length = HEADER_BYTES - _COUNTED_AFTER + sum(map(len, records))
    rest = (0, count - 1, base_ms, int(times_ms.max()), _NONE, _NONE, _NONE, count)
    crc = crc32c.crc32c(_HEADER.pack(offset, length, _NONE, _MAGIC, 0, *rest)[_CRC_FROM:])
    for each in records:
        crc = crc32c.crc32c(each, crc)
    return [_HEADER.pack(offset, length, _NONE, _MAGIC, crc, *rest), *records]


def ends_of(batches: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yield for each of these batches where it ends, and the number of the record behind it."""
    at = 0
    while at < len(batches):
        offset, length = struct.unpack_from(">qi", batches, at)
        (last,) = struct.unpack_from(">i", batches, at + _CRC_FROM + 2)
        at += _COUNTED_AFTER + length
        yield at, offset + last + 1


def headers_of(dlsns: Sequence[pa.Array], txids: pa.Array) -> pa.BinaryArray:
    """Return the headers `dlsn` and `txid`, as text, of each record.

    Args:
        dlsns: the numbers of segments, entries and slots, of all records.
        txids: the transaction ids.
    """
    lssn, entry, slot = (each.cast(pa.string()) for each in dlsns)
    dlsn = pc.binary_join_element_wise(lssn, entry, slot, ":").cast(pa.binary())
    txid = txids.cast(pa.string()).cast(pa.binary())
    return pc.binary_join_element_wise(
        pa.scalar(b"\x04\x08dlsn"), _short_lengths(dlsn), dlsn,
        pa.scalar(b"\x08txid"), _short_lengths(txid), txid, b"",
    )  # fmt: skip


def with_headers(own: pa.ListArray, told: pa.BinaryArray | None) -> pa.BinaryArray:
    """Return the encoded headers, with their number, of each record.

    Args:
        own: those of each record: structs of `key` and `value`; a key that is null becomes empty.
        told: what comes behind them, by `headers_of`, if anything.
    """
    tails = [b"\0"] * len(own) if told is None else told.to_pylist()
    found = list[bytes]()
    for headers, tail in zip(own.to_pylist(), tails, strict=True):
        named = [each or _NO_HEADER for each in headers or ()]
        parts = [varint(len(named) + tail[0] // 2)]  # the number of those told is one byte
        for each in named:
            parts += (_sized((each["key"] or "").encode()), _sized(each["value"]))
        found.append(b"".join((*parts, tail[1:])))
    return pa.array(found, pa.binary())


def _short_lengths(texts: pa.BinaryArray) -> pa.BinaryArray:
    """Return the length of each text, which has less than 64 bytes, as a varint."""
    lengths = (np.asarray(pc.binary_length(texts)) << 1).astype(np.uint8)
    ends = np.arange(len(texts) + 1, dtype=np.int32)
    return _binary(ends, lengths)


def _binary(ends: Any, data: Any) -> pa.BinaryArray:
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, buffers)


class _Column:
    """A varint of each record, of a number that is not negative."""

    def __init__(self, numbers: Numbers) -> None:
        first = int(numbers[0])
        self.is_constant = bool((numbers == first).all())
        # A zigzag number that is not negative is its double.
        self.numbers = (numbers[:1] if self.is_constant else numbers) << 1
        self.width = max(1, -(-int(self.numbers.max()).bit_length() // 7))
        self.lengths: Any = np.ones(len(self.numbers), np.int64)
        for index in range(1, self.width):
            self.lengths += self.numbers >= 1 << (7 * index)

    def write(self, table: NDArray[np.uint8], mask: NDArray[np.bool_], at: int) -> None:
        """Write the bytes from the column `at` on, and clear the mask of those not used."""
        is_fixed = self.is_constant or int(self.lengths.min()) == self.width
        for index in range(self.width):
            byte = (self.numbers >> (7 * index)) & 0x7F
            if index < self.width - 1:
                byte |= (self.lengths > index + 1) << 7
            table[:, at + index] = byte
            if not is_fixed:
                mask[:, at + index] = self.lengths > index


def _records(
    values: pa.BinaryArray, deltas_ms: Numbers, headers: pa.BinaryArray | None
) -> list[bytes | memoryview]:
    count = len(values)
    sizes = np.asarray(pc.binary_length(values)).astype(np.int64)
    fields = time, number, size = _Column(deltas_ms), _Column(np.arange(count)), _Column(sizes)
    before = 2 + sum(each.lengths for each in fields)  # with the attributes and the key
    tails: Any = 1 if headers is None else np.asarray(pc.binary_length(headers))
    length = _Column(np.broadcast_to(before + sizes + tails, (count,)).astype(np.int64))
    at = int(headers is None)
    width = at + length.width + 2 + sum(each.width for each in fields)
    table, mask = np.zeros((count, width), np.uint8), np.ones((count, width), np.bool_)
    row_bytes = at + before + length.lengths
    for column, fixed in ((length, b"\0"), (time, b""), (number, b"\1"), (size, b"")):
        column.write(table, mask, at)
        at += column.width
        for byte in fixed:
            table[:, at] = byte
            at += 1
    ends = np.zeros(count + 1, np.int32)
    np.broadcast_to(row_bytes, (count,)).cumsum(out=ends[1:])
    prefixes = _binary(ends, table[mask])
    if headers is not None:
        return [_joined(pc.binary_join_element_wise(prefixes, values, headers, b""))]
    return [_joined(pc.binary_join_element_wise(prefixes, values, b""))[1:], b"\0"]


def _joined(array: pa.BinaryArray) -> memoryview:
    _, ends, data = array.buffers()
    bounds = np.frombuffer(ends, np.int32, len(array) + 1, array.offset * 4)
    return memoryview(data)[bounds[0] : bounds[-1]]


def _plain_records(
    values: pa.BinaryArray,
    deltas_ms: Numbers,
    headers: pa.BinaryArray | None,
    keys: pa.BinaryArray | None = None,
) -> list[bytes | memoryview]:
    found: list[bytes] = []
    tails = [b"\0"] * len(values) if headers is None else headers.to_pylist()
    names = [None] * len(values) if keys is None else keys.to_pylist()
    for number, (key, value, delta_ms, tail) in enumerate(
        zip(names, values.to_pylist(), deltas_ms.tolist(), tails, strict=True)
    ):
        head = b"\0" + varint(delta_ms) + varint(number) + _sized(key)
        body = _sized(value)
        found += (varint(len(head) + len(body) + len(tail)), head, body, tail)
    return [b"".join(found)]


def _sized(data: bytes | None) -> bytes:
    """Return bytes behind their length, which for null is -1."""
    return b"\1" if data is None else varint(len(data)) + data


def varint(number: int) -> bytes:
    """Return a number that is not negative as a zigzag varint."""
    rest, found = number << 1, bytearray()
    while rest > 0x7F:
        found.append(rest & 0x7F | 0x80)
        rest >>= 7
    found.append(rest)
    return bytes(found)
