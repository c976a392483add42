"""Batches of producers: all that is in them is read; what is wrong is refused by its code."""

from __future__ import annotations

import random
import re
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from kio.schema.errors import ErrorCode

from dlcore.proxy.kafka.batches import batch_of
from dlcore.proxy.kafka.records import NO_PRODUCER, RefusedBatchError, produced_in
from tests.fixtures.kafka_batches import Record, batch, body_of, varint

BYTES_MAX = 2**20
CORRUPT, INVALID, TOO_LARGE = (
    ErrorCode.corrupt_message,
    ErrorCode.invalid_record,
    ErrorCode.message_too_large,
)
SIZES = st.one_of(st.integers(0, 130), st.sampled_from([63, 64, 8191, 8192, 70_000]))


def refused(data: bytes | None, *, bytes_max: int = BYTES_MAX) -> tuple[ErrorCode, str]:
    """Return the code and the reason of a refusal."""
    with pytest.raises(RefusedBatchError) as caught:
        produced_in(data, bytes_max=bytes_max)
    return caught.value.code, str(caught.value)


def one(inner: bytes) -> bytes:
    """Return a batch of one record, whatever that is."""
    return batch(varint(len(inner)) + inner, 1)


PLAIN = body_of([(None, b"one", []), (None, b"two", [])])


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.none() | SIZES, st.none() | SIZES, st.integers(0, 2)), min_size=1,
                   max_size=30),
    repeats=st.integers(1, 20),
    time_ms=st.sampled_from([0, -1, 5, -(2**40), 2**62]),
)  # fmt: skip
def test_all_of_a_batch_is_read(
    sizes: list[tuple[int | None, int | None, int]], repeats: int, time_ms: int
) -> None:
    """Keys, values and headers, also across the lengths of varints."""
    part = [(b"name", b"value"), ("größe".encode(), None)]
    records: list[Record] = [
        (None if key is None else b"k" * key, None if size is None else bytes([size % 251]) * size,
         part[:count])
        for key, size, count in sizes * repeats
    ]  # fmt: skip
    data = batch(body_of(records, time_ms=time_ms), len(records), epoch=3, sequence=77)
    found = produced_in(data, bytes_max=2**30)
    assert (found.producer, found.epoch, found.sequence) == (5, 3, 77)
    assert len(found) == len(records)
    assert found.values.to_pylist() == [value for _, value, _ in records]
    keys = None if found.keys is None else found.keys.to_pylist()
    assert (keys or [None] * len(records)) == [key for key, _, _ in records]
    assert (keys is None) == all(key is None for key, _, _ in records)
    headers = [[] for _ in records] if found.headers is None else found.headers.to_pylist()
    assert [[(each["key"].encode(), each["value"]) for each in row] for row in headers] == [
        each for _, _, each in records
    ]


@pytest.mark.parametrize("count", [1, 9000])
def test_the_proxy_reads_what_it_writes(count: int) -> None:
    """Batches for readers are batches of no producer."""
    values = pa.array([f"value {number}".encode() for number in range(count)], pa.binary())
    times = np.arange(count, dtype=np.int64)
    made = batch_of(pa.chunked_array([values]), times, offset=9, headers=None)
    found = produced_in(b"".join(made.parts), bytes_max=BYTES_MAX)
    assert found.values == values
    assert (found.producer, found.keys, found.headers) == (NO_PRODUCER, None, None)


def xerial(body: bytes, *, block: int = 1000) -> bytes:
    """Return the frame of Java's snappy."""
    codec = pa.Codec("snappy")
    parts = [codec.compress(body[at : at + block], True) for at in range(0, len(body), block)]
    return (
        b"\x82SNAPPY\0"
        + struct.pack(">ii", 1, 1)
        + b"".join(len(each).to_bytes(4) + each for each in parts)
    )


def snappy(body: bytes) -> bytes:
    """Return one block, as librdkafka makes it."""
    return bytes(pa.Codec("snappy").compress(body, True))


def streamed(codec: str, body: bytes) -> bytes:
    """Return a stream of a codec."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(body)
    return bytes(sink.getvalue())


def compressed(codec: str, body: bytes) -> tuple[int, bytes]:
    """Return the number of a codec, and what it makes."""
    match codec:
        case "snappy":
            return 2, snappy(body)
        case "xerial":
            return 2, xerial(body)
    return {"gzip": 1, "lz4": 3, "zstd": 4}[codec], streamed(codec, body)


CODECS = ["gzip", "snappy", "xerial", "lz4", "zstd"]


@pytest.mark.parametrize("codec", CODECS)
def test_compressed_batches(codec: str) -> None:
    """They are read as plain ones, refused when they become too large, or are damaged or cut."""
    records: list[Record] = [(None, bytes([number]) * 90, []) for number in range(100)]
    body = body_of(records)
    attributes, packed = compressed(codec, body)
    found = produced_in(batch(packed, 100, attributes=attributes), bytes_max=len(body))
    assert found.values.to_pylist() == [value for _, value, _ in records]
    data = batch(packed, 100, attributes=attributes)
    code, reason = refused(data, bytes_max=len(body) - 1)
    assert code is TOO_LARGE
    assert "expected" in reason
    for cut in (0, 1, 5, 12, 18, len(packed) // 2, len(packed) - 1):
        code, _ = refused(batch(packed[:cut], 100, attributes=attributes))
        assert code in (CORRUPT, INVALID, TOO_LARGE), cut
    code, _ = refused(batch(b"\xff" * 40, 100, attributes=attributes))
    assert code in (CORRUPT, TOO_LARGE)


def test_a_bomb_takes_no_memory() -> None:
    """A GiB of zeros, in a few bytes."""
    packed = streamed("zstd", bytes(2**26)) * 16
    before = pa.total_allocated_bytes()
    code, _ = refused(batch(packed, 1, attributes=4))
    assert code is TOO_LARGE
    assert pa.total_allocated_bytes() - before < 2**22
    code, _ = refused(batch(b"\xff\xff\xff\xff\x0f" + bytes(9), 1, attributes=2))
    assert code is TOO_LARGE


@pytest.mark.parametrize(
    ("data", "code", "reason"),
    [
        (None, CORRUPT, "a batch of 0 bytes"),
        (bytes(60), CORRUPT, "a batch of 60 bytes"),
        (batch(PLAIN, 2, magic=1), INVALID, "records of version 1: expected 2"),
        (batch(PLAIN, 2) * 2, INVALID, "expected all"),
        (batch(PLAIN, 2)[:-1], CORRUPT, "expected all"),
        (batch(PLAIN, 2, length=-5), CORRUPT, "expected all"),
        (batch(PLAIN, 2, crc=7), CORRUPT, "the checksum of a batch is wrong"),
        (batch(PLAIN, 2, attributes=0x20), INVALID, "a control batch"),
        (batch(PLAIN, 2, attributes=0x10), ErrorCode.invalid_txn_state, "transactions are not"),
        (batch(PLAIN, 2, attributes=7), ErrorCode.unsupported_compression_type, "compression 7"),
        (batch(PLAIN, 2, producer=-2), INVALID, "producer -2"),
        (batch(PLAIN, 2, epoch=-1), INVALID, "epoch -1"),
        (batch(PLAIN, 2, sequence=-1), INVALID, "sequence -1"),
        (batch(PLAIN, 2, last=2), INVALID, "2 records, the last is number 2"),
        (batch(PLAIN, 2, count=0), INVALID, "0 records"),
        (batch(PLAIN, 2, count=2**31 - 1, last=2**31 - 2), INVALID, "2,147,483,647 records"),
        (batch(b"", 1), INVALID, "1 records"),
        (batch(PLAIN, 1), INVALID, "1 of 1 records have 10 bytes: expected 20"),
        (batch(PLAIN + bytes(9), 3), INVALID, "3 of 3 records have 21 bytes: expected 29"),
        (batch(PLAIN + b"\0", 2), INVALID, "2 of 2 records have 20 bytes: expected 21"),
        (batch(b"\x03" + PLAIN, 2), INVALID, "0 of 2 records have 1 bytes"),
        (batch(b"\xfe" * 30, 2), INVALID, "record 1 of 2 ends behind its batch"),
        (batch(PLAIN + b"\x80", 3), INVALID, "record 2 of 3 ends behind its batch"),
        (batch(PLAIN + b"\x80\x80\x80", 3), INVALID, "record 2 of 3 ends behind its batch"),
        (one(b"\0\0\0\1\2\0"), INVALID, "record 0 is cut off"),
        (one(b"\0\0\2\1\2x\0"), INVALID, "not numbered"),
        (one(b"\0\0\0\3\2x\0"), INVALID, "record 0: a length of -2"),
        (one(b"\0\0\0\1\3x\0"), INVALID, "record 0: a length of -2"),
        (one(b"\0\0\0\1\2x\1"), INVALID, "longer than what it holds"),
        (one(b"\0\0\0\1\2x\0y"), INVALID, "longer than what it holds"),
        (one(b"\xff" * 14), INVALID, "record 0 has no varint"),
        (one(b"\0\0\0\1\2x\2"), INVALID, "the headers of record 0"),
        (one(b"\0\0\0\1\0\2\1\0"), INVALID, "the headers of record 0"),
        (one(b"\0\0\0\1\0\2\2\xff\0"), INVALID, "the headers of record 0"),
        (one(b"\0\0\0\1\0\2\2a\6"), INVALID, "the headers of record 0"),
        (one(b"\0\0\0\1\0\2\2a\1x"), INVALID, "headers of record 0 end before it"),
        (one(b"\0\0\0\1\0\2" + b"\xff" * 7), INVALID, "the headers of record 0"),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused(data: bytes | None, code: ErrorCode, reason: str) -> None:
    """By the code that Kafka has for it, and a reason that says what."""
    found, text = refused(data)
    assert found is code, text
    assert re.search(reason, text), text


def test_a_batch_is_no_larger_than_it_may_be() -> None:
    """One that is not compressed as well."""
    assert refused(batch(PLAIN, 2), bytes_max=len(PLAIN) - 1)[0] is TOO_LARGE


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["plain", *CODECS]), st.booleans())
def test_whatever_comes_is_a_batch_or_refused(seed: int, codec: str, checked: bool) -> None:
    """Nothing else is raised, though the checksum fits what is damaged."""
    luck = random.Random(seed)
    records: list[Record] = [
        (luck.choice([None, b"key"]), b"v" * luck.randrange(40), [(b"h", b"x")] * luck.randrange(2))
        for _ in range(luck.randrange(1, 6))
    ]
    body = bytearray(body_of(records))
    if luck.random() < 0.7:
        for _ in range(luck.randrange(1, 4)):
            body[luck.randrange(len(body))] = luck.choice([0, 1, 2, 127, 128, 255])
    attributes, packed = (0, bytes(body)) if codec == "plain" else compressed(codec, bytes(body))
    damaged = bytearray(packed)
    if luck.random() < 0.5:
        damaged[luck.randrange(len(damaged))] = luck.randrange(256)
    data = bytearray(batch(bytes(damaged), len(records), attributes=attributes))
    if not checked:
        data[luck.randrange(len(data))] = luck.randrange(256)
    try:
        found = produced_in(bytes(data), bytes_max=10_000)
    except RefusedBatchError:
        return
    found.values.validate(full=True)
    for each in (found.keys, found.headers):
        if each is not None:
            each.validate(full=True)
            assert len(each) == len(found)
