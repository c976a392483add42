"""Compression of what gains by it; what does not is not tried again and again.

Goal: data that compresses takes less room and time, other data costs no more than without.  Method:
one compressor, and batches that do and do not become smaller; then logs in memory, with what a
writer and a task store by default.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore.log.entries.body import (
    COMPRESSED_BYTES_MIN,
    Compressor,
    decode_entry_header,
    encode_entry,
)
from tests.fixtures.memory_namespace import MemoryCluster, on_log

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog

ROW_BYTES = 8


def rows(size_bytes: int, *, seed: int | None = None) -> pa.RecordBatch:
    """Return a column of so many bytes: noughts, or what cannot be compressed."""
    chance = random.Random(seed)
    data = bytes(size_bytes) if seed is None else chance.randbytes(size_bytes)
    numbers = pa.Array.from_buffers(pa.int64(), size_bytes // ROW_BYTES, [None, pa.py_buffer(data)])
    return pa.record_batch({"n": numbers})


@pytest.mark.parametrize(
    ("compression", "typed", "size_bytes", "expected"),
    [
        ("auto", True, COMPRESSED_BYTES_MIN, True),
        ("auto", True, COMPRESSED_BYTES_MIN - ROW_BYTES, False),
        ("auto", False, COMPRESSED_BYTES_MIN, False),
        ("none", True, COMPRESSED_BYTES_MIN, False),
        ("lz4", True, 4096, True),
        ("lz4", False, 4096, True),
        ("zstd", False, 4096, True),
        ("zstd", False, 8, False),
    ],
)
def test_entries_that_are_compressed(
    compression: str, typed: bool, size_bytes: int, expected: bool
) -> None:
    """By default large entries of typed logs; where it is asked for, all that become smaller."""
    batch = rows(size_bytes)
    message, is_compressed = Compressor(compression).message(batch, typed=typed)
    assert is_compressed is expected
    assert (message.size < size_bytes) is expected
    if not expected:
        assert message.equals(batch.serialize())


def test_whether_records_need_arrow_to_be_encoded() -> None:
    """Those that are written one by one do not, where they are not compressed."""
    left = {each: Compressor(each).leaves_bytes for each in ("auto", "none", "lz4", "zstd")}
    assert left == {"auto": True, "none": True, "lz4": False, "zstd": False}


def test_entries_that_do_not_shrink_are_not_compressed_again_at_once() -> None:
    """Entries of 15 times its size pass untried; a larger one than those is tried."""
    compressor = Compressor("auto")
    poor, good = rows(COMPRESSED_BYTES_MIN, seed=1), rows(COMPRESSED_BYTES_MIN)
    tried = [compressor.message(each, typed=True)[1] for each in [poor, *[good] * 16]]
    assert tried == [False] * 16 + [True]
    assert not compressor.message(poor, typed=True)[1]
    assert compressor.message(rows(16 * COMPRESSED_BYTES_MIN), typed=True)[1]


def test_a_batch_with_some_columns_that_compress() -> None:
    """It counts what all become; buffers that would grow are in it as they are."""
    names = ["n", "random"]
    half = [rows(COMPRESSED_BYTES_MIN).column(0), rows(COMPRESSED_BYTES_MIN, seed=1).column(0)]
    batch = pa.record_batch(half, names)
    parts = encode_entry(
        batch,
        first_txid=0,
        last_txid=0,
        records_before=0,
        write_time_ms=0,
        compressor=Compressor("zstd"),
    )
    body = b"".join(parts)
    assert COMPRESSED_BYTES_MIN < len(body) < COMPRESSED_BYTES_MIN * 9 // 8
    assert decode_entry_header(body).compressed


def test_typed_logs_are_compressed_unless_they_say_otherwise() -> None:
    """A writer's entries and those that a task stages; what is read is the same."""
    batch = rows(4 * COMPRESSED_BYTES_MIN)

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        for number, compression in enumerate((None, "none", "auto")):
            await namespace.create_log(f"typed-{number}", schema=batch.schema)
            async with await namespace.open_log(f"typed-{number}") as log:
                await log.update_settings(compression=compression)
                async with await log.open_writer() as writer:
                    await writer.write_batch(batch)
                async with await namespace.begin_append("me", number) as append:
                    await append.write_batch(log.name, batch)
                    await append.commit()
                sizes = [e.size_bytes for s in await log.get_log_segments() for e in s.extents]
                assert len(sizes) == 2
                for size in sizes:
                    assert (size > batch.nbytes) is (compression == "none")
                assert (await (await log.read()).to_arrow()).num_rows == 2 * batch.num_rows

    on_log(body)
