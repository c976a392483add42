"""Byte streams: what is written is read, byte for byte, by position, whatever failed meanwhile.

Goal: a stream is what a `bytes` object is.  Method: pure parts beside slices of one; a cluster in
memory for writers that fail, truncation, the seal and positions.
"""

from __future__ import annotations

import io
import random
from typing import TYPE_CHECKING

import pytest

from dlcore.base.config import RECORD_SIZE_BYTES_MAX
from dlcore.base.errors import (
    AlreadyTruncatedError,
    ConfigurationError,
    DLError,
    UnexpectedError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.log.entries.batches import read_schema
from dlcore.log.entries.stream import bytes_of, cut
from tests.fixtures.lengths import sample
from tests.fixtures.memory_namespace import MemoryCluster, on_log

if TYPE_CHECKING:
    import pyarrow as pa

    from dlcore.backends.direct.log import DirectLog


def batch_of(records: list[tuple[int, bytes]]) -> pa.RecordBatch:
    """Return records as they are read."""
    import pyarrow as pa

    rows = [
        {
            "dlsn": {"lssn": 1, "entry": 7, "slot": slot},
            "txid": txid,
            "sequence_id": slot,
            "timestamp": 0,
            "value": payload,
        }
        for slot, (txid, payload) in enumerate(records)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=read_schema())


@pytest.mark.parametrize(
    ("size", "ends"),
    [
        (0, []),
        (1, [101]),
        (RECORD_SIZE_BYTES_MAX, [100 + RECORD_SIZE_BYTES_MAX]),
        (
            2 * RECORD_SIZE_BYTES_MAX + 1,
            [100 + n for n in (RECORD_SIZE_BYTES_MAX, 2 * RECORD_SIZE_BYTES_MAX)]
            + [101 + 2 * RECORD_SIZE_BYTES_MAX],
        ),
    ],
)
def test_bytes_are_cut_to_records(size: int, ends: list[int]) -> None:
    """Each of which says where it ends."""
    data = random.Random(size).randbytes(size)
    records = list(cut(memoryview(data), 100))
    assert [end for end, _ in records] == ends
    assert b"".join(chunk for _, chunk in records) == data


def test_bytes_of_records() -> None:
    """They lie together already, also of rows that are a part of an entry."""
    batch = batch_of([(3, b"abc"), (3, b""), (7, b"defg"), (8, b"h")])
    for rows, begin, wanted in (
        (batch, 0, b"abcdefgh"),
        (batch.slice(2), 3, b"defgh"),
        (batch.slice(1, 1), 3, b""),
        (batch_of([(5, b"")]), 5, b""),
    ):
        start, data = bytes_of(rows, "clicks")
        assert (start, bytes(data)) == (begin, wanted)


@pytest.mark.parametrize(
    ("records", "place"),
    [
        ([(2, b"abc")], "1:7:0"),
        ([(3, b"abc"), (5, b"d")], "1:7:1"),
        ([(3, b"abc"), (4, b"d"), (4, b"e")], "1:7:2"),
    ],
)
def test_records_that_are_no_bytes_of_a_stream(
    records: list[tuple[int, bytes]], place: str
) -> None:
    """The error names the record."""
    with pytest.raises(UnexpectedError, match=f"'clicks' is no byte stream: its record at {place}"):
        bytes_of(batch_of(records), "clicks")


def test_position_only_after_ack() -> None:
    """A stream starts at 0; where bytes go next is known at once."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_stream_writer() as writer:
            assert (writer.position, writer.tell()) == (0, 0)
            assert await writer.write(b"") == 0
            written = [writer.write(b"abc"), writer.write(bytearray(b"de"))]
            assert (writer.position, writer.tell()) == (0, 5)
            assert [await each for each in written] == [3, 5]
            assert writer.position == 5
            writer.write(memoryview(b"fg"))
            assert await writer.flush() == 7
            assert writer.position == 7
        assert [r.txid for r in await (await log.open_reader()).read_bulk(9)] == [3, 5, 7]

    on_log(body)


def test_a_large_write_is_many_records_and_one_answer() -> None:
    """Read back whole, in one piece or many."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        data = random.Random(1).randbytes(3 * RECORD_SIZE_BYTES_MAX + 77)
        async with await log.open_stream_writer() as writer:
            assert await writer.write(data) == len(data)
            async with await log.open_stream_reader() as reader:
                assert await reader.read() == data
                assert await reader.seek(-10, io.SEEK_END) == len(data) - 10
                assert await reader.read(4) == data[-10:-6]
                assert await reader.seek(2, io.SEEK_CUR) == len(data) - 4
                assert await reader.read(100) == data[-4:]
                assert await reader.read(0) == b""
                assert f"'clicks' at {len(data)}" in repr(reader)

    on_log(body)


def test_no_offset_gap_after_a_writer_failed() -> None:
    """The next one begins where the durable bytes end, whatever is known of the last of them."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await log.open_stream_writer()
        await writer.write(b"durable")
        for bookie in cluster.bookies:
            bookie.stop()
        lost, unwanted = writer.write(b"lo"), writer.write(b"st")
        unwanted.cancel()
        assert "'clicks' at 7" in repr(writer)
        await writer.abort()
        with pytest.raises(DLError):
            await lost
        assert (writer.position, writer.tell()) == (7, 11)
        for bookie in cluster.bookies:
            bookie.start()
        async with await log.open_stream_writer() as writer:
            start = writer.tell()
            assert start in (7, 11)
            await writer.write(b"more")
        async with await log.open_stream_reader() as reader:
            assert await reader.read() == b"durablelost"[:start] + b"more"

    on_log(body)


def test_bytes_that_were_truncated() -> None:
    """The others keep their positions; a reader starts at the first of them."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_stream_writer() as writer:
            for data in (b"0123", b"456", b"789"):
                await writer.write(data)
                await writer.flush()
        dlsn = await log.get_dlsn_not_less_than_txid(5)
        await log.truncate(dlsn)
        async with await log.open_stream_reader() as reader:
            assert reader.tell() == 4
            assert await reader.read() == b"456789"
        for position in (0, 3):
            async with await log.open_stream_reader(position) as reader:
                with pytest.raises(AlreadyTruncatedError, match=rf"bytes {position} … 3"):
                    await reader.read()
                assert await reader.seek(6) == 6
                assert await reader.read() == b"6789"
        await log.truncate((await log.get_last_dlsn()).next_slot())
        async with await log.open_stream_reader() as reader:
            assert (reader.tell(), await reader.read()) == (10, b"")

    on_log(body)


def test_a_log_that_is_no_stream() -> None:
    """Within an entry and from one to the next."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write(LogRecord(3, b"abc"))
            await writer.write(LogRecord(4, b"abc"))
        async with await log.open_stream_reader() as reader:
            assert await reader.read(3) == b"abc"
            with pytest.raises(UnexpectedError, match="byte 1 follows byte 2"):
                await reader.read()
        async with await log.open_writer() as writer:
            await writer.write(LogRecord(5, b"longer than 5"))
        await log.truncate(DLSN(2, 0, 0))
        with pytest.raises(UnexpectedError, match="is no byte stream: its record at 2:0:0"):
            await log.open_stream_reader()

    on_log(body)


def test_empty_records_are_passed_over() -> None:
    """A stream's writer makes none, but they do no harm."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            for record in (LogRecord(0, b""), LogRecord(2, b"ab"), LogRecord(2, b"")):
                await writer.write(record)
        async with await log.open_stream_reader() as reader:
            assert (await reader.read(), reader.tell()) == (b"ab", 2)

    on_log(body)


@pytest.mark.parametrize("position", [-1, 2**63 - 2])
def test_positions_that_no_byte_has(position: int) -> None:
    """The rule is named."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        with pytest.raises(ConfigurationError, match=f"position={position}"):
            await log.open_stream_reader(position)

    on_log(body)


@pytest.mark.parametrize("seed", sample(range(50), 6))
def test_random_writes_reads_and_seeks(seed: int) -> None:
    """Over writers that come and go, the stream is the bytes that were written."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        rng, model = random.Random(seed), b""
        reader = await log.open_stream_reader()
        position = 0
        for _ in range(6):
            async with await log.open_stream_writer() as writer:
                for _ in range(rng.randrange(6)):
                    data = rng.randbytes(rng.choice([0, 1, 10, 200_000]))
                    writer.write(data)
                    model += data
                await writer.flush()
            for _ in range(5):
                if rng.random() < 0.5:
                    position = await reader.seek(rng.randint(0, len(model) + 5))
                size = rng.choice([-1, 1, 17, 100_000])
                found = await reader.read(size)
                wanted = model[position:] if size < 0 else model[position : position + size]
                assert found == wanted
                position += len(found)
                assert reader.tell() == position

    on_log(body)
