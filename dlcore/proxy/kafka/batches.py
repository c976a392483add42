"""Kafka's record batches, version 2, made of Arrow's arrays as a whole.

A batch has a header of 61 bytes, and its records one after the other:

    length, attributes (0), time - time of the batch, number in the batch, length of the key (-1:
    none), key, length of the value (-1: null), value, number of headers, headers

Lengths, the time and the number are zigzag varints of 1 to 10 bytes.  All that stands before the
values is made as one table of bytes by numpy; a mask takes out what shorter varints leave unused.
Arrow then joins what belongs to a record, and its value.  A batch without headers has only a
0 behind each value, which becomes the first byte of the next record, and saves a part of the join.
Records of one size and time, one after the other, differ in their numbers only: they are the rows
of a table, into which numpy copies their values at once.
Records with keys, and batches with a null among the values, are made one by one.
"""

from __future__ import annotations

import struct
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.int64]


class Batch(NamedTuple):
    """A batch in parts, which are sent one after the other and never joined."""

    parts: tuple[bytes | memoryview, ...]
    size_bytes: int
    end: int
    """The number of the record behind its last one."""


class Batches:
    """Batches one after the other; their length is that of their bytes."""

    def __init__(self, each: Sequence[Batch] = ()) -> None:
        self.each = each
        self._size_bytes = sum(batch.size_bytes for batch in each)

    def __len__(self) -> int:
        return self._size_bytes

    @property
    def parts(self) -> list[bytes | memoryview]:
        """The parts of all batches."""
        return [part for batch in self.each for part in batch.parts]


FEW_RECORDS = 120
"""Up to this many records, a loop over them is faster."""
HEADER_BYTES = 61
_HEADER = struct.Struct(">qiibIhiqqqhii")
_COUNTED_AFTER = 12
"""Bytes of the header that its own length does not count."""
# The checksum covers all that follows it.
_CRC_FROM = 21
_MAGIC = 2
_NONE = -1
_RUNS_MAX = 16
"""Up to so many runs of records of one size and time are tables; more cost more than a join."""
_NUMBERS_LONGER = (2**6, 2**13, 2**20, 2**27)
"""The first numbers of records whose zigzag varints take a byte more."""
_SMALL = 2**30
"""Numbers below this one, and their doubles, need no more than 32 bits."""
_NO_HEADER: dict[str, Any] = {"key": None, "value": None}


def batch_of(
    values: pa.ChunkedArray,
    times_ms: Numbers,
    *,
    offset: int,
    headers: pa.BinaryArray | None,
    keys: pa.ChunkedArray | None = None,
) -> Batch:
    """Return a batch.

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
        sizes = _sizes_of(values)
        even = None if headers is not None else _even_records(values, sizes, deltas_ms)
        records = _records(values, sizes, deltas_ms, headers) if even is None else [even]
    length = HEADER_BYTES - _COUNTED_AFTER + sum(map(len, records))
    rest = (0, count - 1, base_ms, int(times_ms.max()), _NONE, _NONE, _NONE, count)
    crc = crc32c.crc32c(_HEADER.pack(offset, length, _NONE, _MAGIC, 0, *rest)[_CRC_FROM:])
    for each in records:
        crc = crc32c.crc32c(each, crc)
    header = _HEADER.pack(offset, length, _NONE, _MAGIC, crc, *rest)
    return Batch((header, *records), _COUNTED_AFTER + length, offset + count)


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


def with_headers(own: pa.ChunkedArray, appended: pa.BinaryArray | None) -> pa.BinaryArray:
    """Return the encoded headers, with their number, of each record.

    Args:
        own: those of each record: structs of `key` and `value`; a key that is null becomes empty.
        appended: the headers that follow them, by `headers_of`; None: there are none.
    """
    tails = [b"\0"] * len(own) if appended is None else appended.to_pylist()
    found = list[bytes]()
    for headers, tail in zip(own.to_pylist(), tails, strict=True):
        named = [each or _NO_HEADER for each in headers or ()]
        parts = [varint(len(named) + tail[0] // 2)]  # the number of appended ones is one byte
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


class _Rows(NamedTuple):
    """Records of one size and time, whose numbers, from `start` on, take the same bytes."""

    start: int
    record_count: int
    record_bytes: int
    """The bytes of each record."""
    head: bytes
    """The bytes of each record before its value; those of its number are not set."""
    number_at: int
    number_bytes: int
    values: NDArray[np.void] | None
    """The values, unless they are empty."""


def _even_records(
    values: pa.ChunkedArray, sizes: NDArray[np.int32], deltas_ms: Numbers
) -> memoryview | None:
    """Return records without headers as runs of one size and time; None: there are too many."""
    is_new = sizes[1:] != sizes[:-1]
    is_new |= deltas_ms[1:] != deltas_ms[:-1]
    changes = np.flatnonzero(is_new)
    if len(changes) >= _RUNS_MAX:
        return None
    breaks = (*_NUMBERS_LONGER, *(changes + 1).tolist())
    runs, end = list[_Rows](), 0
    for array in values.chunks:
        first, end = end, end + len(array)
        ends, data = _ends_of(array), array.buffers()[2]
        within = [each for each in breaks if first < each < end]
        for start, stop in pairwise(sorted({first, *within, end})):
            size, count, found = int(sizes[start]), stop - start, None
            if size:
                found = np.frombuffer(data, f"V{size}", count, int(ends[start - first]))
            runs.append(_rows(start, count, size, int(deltas_ms[start]), found))
    return _joined_rows(runs)


def _rows(
    start: int, count: int, size: int, delta_ms: int, values: NDArray[np.void] | None
) -> _Rows:
    number_bytes = _width_max(2 * start)
    before, behind = b"\0" + varint(delta_ms), b"\1" + varint(size)
    rest_bytes = len(before) + number_bytes + len(behind) + size + 1
    length = varint(rest_bytes)
    head = b"".join((length, before, bytes(number_bytes), behind))
    number_at = len(length) + len(before)
    return _Rows(start, count, len(length) + rest_bytes, head, number_at, number_bytes, values)


def _joined_rows(runs: Sequence[_Rows]) -> memoryview:
    """Return the records of runs, one after the other."""
    data = np.empty(sum(each.record_count * each.record_bytes for each in runs), np.uint8)
    at = 0
    for start, count, step, head, number_at, number_bytes, values in runs:
        end = at + count * step
        # Bytes of one kind in all rows are an array with a stride; numpy copies each as a whole.
        np.ndarray(count, f"V{len(head)}", data, at, step)[:] = np.void(head)
        numbers = np.arange(2 * start, 2 * (start + count), 2)
        for index in range(number_bytes):
            bits = numbers >> 7 * index if index else numbers
            is_last = index == number_bytes - 1
            data[at + number_at + index : end : step] = bits if is_last else bits | 0x80
        if values is not None:
            np.ndarray(count, values.dtype, data, at + len(head), step)[:] = values
        data[at + step - 1 : end : step] = 0
        at = end
    return data.data


def _sizes_of(values: pa.ChunkedArray) -> NDArray[np.int32]:
    """Return the bytes of each value."""
    ends = [_ends_of(each) for each in values.chunks]
    return np.concatenate([each[1:] - each[:-1] for each in ends])


def _ends_of(array: pa.BinaryArray) -> NDArray[np.int32]:
    """Return where in its data an array's first value begins, and where each one ends."""
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)


def _records(
    values: pa.ChunkedArray,
    sizes: NDArray[np.int32],
    deltas_ms: Numbers,
    headers: pa.BinaryArray | None,
) -> list[bytes | memoryview]:
    count = len(values)
    # A row for each field, and then for each byte: numpy takes long rows at once.
    is_small = int(deltas_ms.max()) < _SMALL
    fields: Any = np.zeros((6 + (headers is None), count), np.int32 if is_small else np.int64)
    *_, length, _attributes, time, number, key, size = fields
    # A zigzag number that is not negative is its double, and -1 is 1.
    time[:] = deltas_ms << 1
    number[:] = np.arange(0, 2 * count, 2)
    key[:] = 1
    size[:] = sizes << 1
    length += sizes
    length += 1 if headers is None else np.asarray(pc.binary_length(headers))
    length += 2
    for each in (time, number, size):
        length += _width_of(each)
    length <<= 1
    widths = tuple(_width_max(each) for each in fields.max(axis=1).tolist())
    source, shifts, unused = _layout(widths)
    table = fields[source]
    table >>= shifts
    is_used = table > unused
    data = table.astype(np.uint8)
    data |= (table > 0x7F).view(np.uint8) << 7
    ends = np.zeros(count + 1, np.int32)
    np.cumsum(is_used.sum(axis=0, dtype=np.int32), out=ends[1:])
    prefixes = _binary(ends, data.T[is_used.T])
    if headers is not None:
        return [*_joined(pc.binary_join_element_wise(prefixes, values, headers, b""))]
    first, *others = _joined(pc.binary_join_element_wise(prefixes, values, b""))
    return [first[1:], *others, b"\0"]


@cache
def _layout(widths: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Return for each byte its field, its shift there, and what is left if it is not used."""
    fields = [field for field, width in enumerate(widths) for _ in range(width)]
    indexes = [[index] for width in widths for index in range(width)]
    shifts = np.array(indexes, np.int32) * 7
    # The first byte of a field is always used.
    return np.array(fields), shifts, np.minimum(shifts, 1) - 1


def _width_max(number: int) -> int:
    """Return the bytes that the varint of a number without a sign takes."""
    return max(1, -(-number.bit_length() // 7))


def _width_of(numbers: Numbers) -> Any:
    """Return the bytes that the varint of each number without a sign takes."""
    found: Any = 1
    for index in range(1, _width_max(int(numbers.max()))):
        found = found + (numbers >= 1 << (7 * index))
    return found


def _joined(array: pa.ChunkedArray) -> list[memoryview]:
    """Return the bytes of all values, one after the other."""
    found = []
    for each in array.chunks:
        ends = _ends_of(each)
        found.append(memoryview(each.buffers()[2])[ends[0] : ends[-1]])
    return found


def _plain_records(
    values: pa.ChunkedArray,
    deltas_ms: Numbers,
    headers: pa.BinaryArray | None,
    keys: pa.ChunkedArray | None = None,
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
    return unsigned_varint(number << 1)


def unsigned_varint(number: int) -> bytes:
    """Return a number that is not negative as a varint."""
    if number <= 0x7F:
        return bytes((number,))
    rest, found = number, bytearray()
    while rest > 0x7F:
        found.append(rest & 0x7F | 0x80)
        rest >>= 7
    found.append(rest)
    return bytes(found)
