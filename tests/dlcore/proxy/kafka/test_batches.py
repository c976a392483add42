"""Record batches made as a whole are byte for byte those of a loop over their records."""

from __future__ import annotations

import struct
from typing import Any

import crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from kio.records.readers import read_batch

from dlcore.proxy.kafka import batches
from dlcore.proxy.kafka.batches import (
    FEW_RECORDS,
    HEADER_BYTES,
    Batch,
    batch_of,
    headers_of,
    varint,
    with_headers,
)
from dlcore.proxy.kafka.records import HEADERS

SIZES = st.one_of(st.integers(0, 130), st.sampled_from([63, 64, 8191, 8192, 70_000]))


def array(values: list[bytes]) -> pa.ChunkedArray:
    """Return values in two arrays, slices of longer ones as readers have them."""
    whole = pa.array([b"before", *values, b"after"], pa.binary())
    half = len(values) // 2
    return pa.chunked_array([whole.slice(1, half), whole.slice(1 + half, len(values) - half)])


def bytes_of(batch: Batch) -> bytes:
    """Return the bytes of a batch, which has as many as it says."""
    found = b"".join(batch.parts)
    assert len(found) == batch.size_bytes
    return found


def headers(count: int, base: int) -> pa.BinaryArray:
    """Return headers of records."""
    numbers = pa.array(np.arange(count) + base)
    return headers_of([numbers, numbers, numbers], numbers)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=40),
    times=st.lists(st.integers(0, 2**41), min_size=40, max_size=40),
    repeats=st.integers(1, 30),
    base=st.none() | st.integers(0, 2**62),
)
def test_the_whole_is_what_a_loop_makes(
    sizes: list[int], times: list[int], repeats: int, base: int | None
) -> None:
    """Also across the lengths of varints, for few records as for many."""
    values = array([bytes([each % 251]) * each for each in sizes] * repeats)
    count = len(values)
    deltas = np.resize(np.array(times, np.int64), count)
    found = headers(count, base) if base is not None else None
    expected = b"".join(batches._plain_records(values, deltas, found))
    made = batches._records(values, batches._sizes_of(values), deltas, found)
    assert b"".join(made) == expected


@settings(max_examples=60, deadline=None)
@given(
    entries=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 63, 64, 100, 130]),
            st.sampled_from([0, 63, 64, 2**41]),
            st.sampled_from([1, 64, 65, 3000, 9000]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_records_of_one_size_are_what_a_loop_makes(entries: list[tuple[int, int, int]]) -> None:
    """Also where sizes and times change from one to the next, and numbers get longer."""
    arrays = [array([bytes([size % 251]) * size] * count) for size, _, count in entries]
    values = pa.chunked_array([each for one in arrays for each in one.chunks])
    deltas = np.repeat([time for _, time, _ in entries], [count for *_, count in entries])
    made = batches._even_records(values, batches._sizes_of(values), deltas)
    assert made is not None
    assert bytes(made) == b"".join(batches._plain_records(values, deltas, None))


def test_records_of_many_sizes_are_no_runs() -> None:
    """Runs of few records cost more than a join; both ways make the same batch."""
    sizes = [1, 2, 3, 4, 5, 6, 7] * 30
    ragged = array([bytes(each) for each in sizes])
    deltas = np.zeros(len(sizes), np.int64)
    assert batches._even_records(ragged, batches._sizes_of(ragged), deltas) is None
    for values in (ragged, array([b"1234"] * 210)):
        made = batch_of(values, deltas + 5, offset=3, headers=None)
        expected = b"".join(batches._plain_records(values, deltas, None))
        assert bytes_of(made)[HEADER_BYTES:] == expected


@pytest.mark.parametrize("count", [1, FEW_RECORDS, FEW_RECORDS + 1, 9000])
def test_the_header_says_what_is_in_the_batch(count: int) -> None:
    """Offsets, times and the checksum; another implementation reads the records."""
    values = [f"value {number}".encode() for number in range(count)]
    times = np.arange(count, dtype=np.int64) + 1_700_000_000_000
    made = batch_of(array(values), times, offset=77, headers=headers(count, 5))
    data = bytes_of(made)
    offset, length, epoch, magic, crc = struct.unpack_from(">qiibI", data)
    assert (offset, length, epoch, magic) == (77, len(data) - 12, -1, 2)
    assert crc == crc32c.crc32c(data[21:])
    assert made.end == 77 + count
    batch: Any = read_batch(data, 0)[0]
    assert [each.value for each in batch.records] == values
    added = batch.records[-1]
    assert {each.key: each.value for each in added.headers} == {
        b"dlsn": f"{count + 4}:{count + 4}:{count + 4}".encode(),
        b"txid": f"{count + 4}".encode(),
    }


@pytest.mark.parametrize("has_more", [False, True])
def test_keys_nulls_and_headers(has_more: bool) -> None:
    """Another implementation reads what a record has of them, for few records as for many."""
    count = FEW_RECORDS + 1
    some = {"key": "h", "value": b"1"}
    own = [[some, {"key": "n", "value": None}], None, [], [None, {"key": None, "value": b""}]]
    found = with_headers(
        pa.chunked_array([(own * count)[:count]], HEADERS),
        headers(count, 0) if has_more else None,
    )
    keys = pa.chunked_array([([b"k" * 70, None, b""] * count)[:count]], pa.binary())
    values = pa.chunked_array([([b"v", None] * count)[:count]], pa.binary())
    times = np.zeros(count, np.int64)
    data = bytes_of(batch_of(values, times, offset=0, headers=found, keys=keys))
    records: Any = read_batch(data, 0)[0].records
    assert [each.key for each in records] == keys.to_pylist()
    assert [each.value for each in records] == values.to_pylist()
    added = [b"dlsn", b"txid"] if has_more else []
    expected = [[b"h", b"n"], [], [], [b"", b""]]
    for number, each in enumerate(records):
        assert [one.key for one in each.headers] == expected[number % 4] + added
    assert [one.value for one in records[0].headers][:2] == [b"1", None]
    plain = bytes_of(batch_of(values, times, offset=0, headers=None))
    assert [each.value for each in read_batch(plain, 0)[0].records] == values.to_pylist()


def test_varints_have_as_many_bytes_as_they_need() -> None:
    """For the lowest and the highest numbers of a length."""
    assert [len(varint(each)) for each in (0, 63, 64, 8191, 8192, 2**63 - 1)] == [1, 1, 2, 2, 3, 10]
