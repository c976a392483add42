"""Kernels over record batches, compared with plain loops."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore.base.config import MIB, RECORD_SIZE_BYTES_MAX
from dlcore.base.errors import (
    ConfigurationError,
    LogRecordTooLongError,
    TransactionIdOutOfOrderError,
)
from dlcore.base.ids import DLSN, TXID_MAX
from dlcore.base.records import EntryPlace, LogRecord
from dlcore.log.entries.batcher import RECORD_OVERHEAD_BYTES
from dlcore.log.entries.batches import (
    byte_log_batch,
    check_txids,
    cut,
    first_row_not_less,
    payload_offsets,
    read_batch,
    read_schema,
    records_of,
)
from dlcore.log.entries.body import (
    Compressor,
    batch_of,
    byte_log_schema,
    decode_entry_batch,
    decode_entry_header,
    encode_entry,
)
from dlcore.log.reading.entry_rows import EntryRows
from dlcore.log.reading.rows import take_records
from tests.fixtures.lengths import for_each
from tests.fixtures.memory_namespace import MemoryCluster, on_log, read_all

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog


@pytest.mark.parametrize("count", [1, 2, 100, 101, 5000])
def test_batch_of_equals_what_arrow_makes_of_lists(count: int) -> None:
    """Few and many records, empty payloads among them."""
    txids = [7 * number for number in range(count)]
    payloads = [b"x" * (number % 5) for number in range(count)]
    expected = pa.RecordBatch.from_arrays(
        [pa.array(txids, pa.int64()), pa.array(payloads, pa.binary())], schema=byte_log_schema()
    )
    batch = batch_of(txids, payloads)
    batch.validate(full=True)
    assert batch.equals(expected)


def test_a_byte_log_loads_no_pandas() -> None:
    """It takes up to half a second, in which nothing else on the event loop goes on."""
    script = """
import sys
from dlcore.log.entries.batches import check_txids, cut, read_batch, records_of
from dlcore.log.entries.body import batch_of
from dlcore.log.entries.body import decode_entry_batch, decode_entry_header, encode_entry
from dlcore.log.entries.body import Compressor
from dlcore.log.entries.stream import bytes_of
from dlcore.base.records import EntryPlace, LogRecord
for count in (1, 2, 1000):
    rows = batch_of(range(1, count + 1), [b"x"] * count)
    check_txids(rows, last_txid=-1)
    (part, _), *_ = cut(rows, entry_bytes=1000)
    for compression in ("none", "lz4", "zstd"):
        body = b"".join(
            encode_entry(
                part,
                first_txid=1,
                last_txid=part.num_rows,
                records_before=0,
                write_time_ms=0,
                compressor=Compressor(compression),
            )
        )
        decoded = decode_entry_batch(body, decode_entry_header(body))
        records_of(decoded, EntryPlace(1, 0, 0, 0, 0), first_slot=0)
        bytes_of(read_batch(decoded, EntryPlace(1, 0, 0, 0, 0), first_slot=0, log="log"), "log")
print("pandas" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"


@for_each(range(50))
def test_cut_makes_full_slices_of_a_slice(seed: int) -> None:
    """Slices join to the batch, none is too large, and none could have taken the next record."""
    rng = random.Random(seed)
    payloads = [b"x" * rng.randrange(200) for _ in range(rng.randrange(1, 100))]
    whole = batch_of(list(range(len(payloads))), payloads)
    first = rng.randrange(len(payloads))
    batch = whole.slice(first)
    entry_bytes = rng.randrange(1, 600)
    slices = cut(batch, entry_bytes=entry_bytes)
    assert pa.Table.from_batches([part for part, _ in slices]).equals(
        pa.Table.from_batches([batch])
    )
    costs = [len(payload) + RECORD_OVERHEAD_BYTES for payload in payloads[first:]]
    position = 0
    for part, size_bytes in slices:
        taken = costs[position : position + part.num_rows]
        position += part.num_rows
        assert size_bytes == sum(taken)
        assert size_bytes <= entry_bytes or part.num_rows == 1
        if position < len(costs):
            assert size_bytes + costs[position] > entry_bytes


@pytest.mark.parametrize(
    ("entry_bytes", "rows"),
    [
        (512 * 1024, [506, 518]),  # within a 32nd of a full one
        (500 * 1024, [494, 494, 36]),
        (MIB, [1012, 12]),  # nothing is more than a MiB
        (MIB - 1, [1012, 12]),
    ],
)
def test_a_mebibyte_of_rows_is_two_entries(entry_bytes: int, rows: list[int]) -> None:
    """Though it is more, with what rows take beside their payloads."""
    batch = batch_of(range(1024), [bytes(1024)] * 1024)
    assert [part.num_rows for part, _ in cut(batch, entry_bytes=entry_bytes)] == rows


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_a_slice_survives_an_entry(compression: str) -> None:
    """A slice with an offset is written without the rest of its batch, and read back equal."""
    whole = batch_of(list(range(1000)), [b"%d" % i * 10 for i in range(1000)])
    part = whole.slice(400, 100)
    body = b"".join(
        encode_entry(
            part,
            first_txid=400,
            last_txid=499,
            records_before=7,
            write_time_ms=5,
            compressor=Compressor(compression),
        )
    )
    assert len(body) < 10_000
    header = decode_entry_header(body)
    assert (header.record_count, header.records_before) == (100, 7)
    assert header.compressed is (compression != "none")
    assert decode_entry_batch(body, header).equals(part)


def test_a_record_that_is_too_long_refuses_the_batch() -> None:
    """The message says how long it is."""
    with pytest.raises(LogRecordTooLongError, match=str(RECORD_SIZE_BYTES_MAX + 1)):
        cut(batch_of([1, 2], [b"a", b"x" * (RECORD_SIZE_BYTES_MAX + 1)]), entry_bytes=1000)
    assert len(cut(batch_of([1], [b"x" * RECORD_SIZE_BYTES_MAX]), entry_bytes=1000)) == 1


@pytest.mark.parametrize(
    ("txids", "last_txid", "problem"),
    [
        ([3, 4, 4, 9], 3, None),
        ([0], -1, None),
        ([TXID_MAX], 5, None),
        ([3, 4], 5, "3 is lower than 5"),
        ([3, 2, 7], 1, "2 is lower than 3"),
    ],
)
def test_transaction_ids_never_decrease(
    txids: list[int], last_txid: int, problem: str | None
) -> None:
    """Checked within a batch, and against what came before it."""
    batch = batch_of(txids, [b""] * len(txids))
    if problem is None:
        assert check_txids(batch, last_txid=last_txid) == (txids[0], txids[-1])
        return
    with pytest.raises(TransactionIdOutOfOrderError, match=problem):
        check_txids(batch, last_txid=last_txid)


@pytest.mark.parametrize("txids", [[-7, 2], [5, -7], [1, TXID_MAX + 1], [TXID_MAX + 1, 1]])
def test_transaction_ids_out_of_range_are_no_question_of_order(txids: list[int]) -> None:
    """Sorting would not help, so the error is another one."""
    with pytest.raises(ConfigurationError, match=r"-7 is out of range|807 is out of range"):
        check_txids(batch_of(txids, [b""] * 2), last_txid=0)


def test_columns_are_found_by_name_and_cast() -> None:
    """Other integers and text are taken; other columns are left out."""
    batch = pa.record_batch(
        {"other": [1.5], "value": pa.array(["é"]), "txid": pa.array([7], pa.int32())}
    )
    found = byte_log_batch(batch, assigned_txid=9)
    assert found.schema == byte_log_schema()
    assert found.to_pydict() == {"txid": [7], "value": ["é".encode()]}
    without = pa.record_batch({"value": [b"a", b"b"]})
    assert byte_log_batch(without, assigned_txid=7).to_pydict()["txid"] == [7, 7]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"txid": [1]}, "needs a column value"),
        ({"txid": [1.5], "value": [b"a"]}, "column txid has type double"),
        ({"txid": [1], "value": [7]}, "column value has type int64"),
        ({"txid": [None, 1], "value": [b"a", b"b"]}, "column txid holds 1 nulls"),
        ({"txid": [1, 2], "value": [b"a", None]}, "column value holds 1 nulls"),
        ({"txid": pa.array([2**63], pa.uint64()), "value": [b"a"]}, "does not fit int64"),
    ],
)
def test_wrong_columns_are_named(columns: dict[str, object], problem: str) -> None:
    """Bad input is refused with what is wrong, before anything is written."""
    with pytest.raises(ConfigurationError, match=problem):
        byte_log_batch(pa.record_batch(columns), assigned_txid=9)


def test_searching_a_transaction_id() -> None:
    """The first of equal ones is found."""
    batch = batch_of([1, 3, 3, 5], [b""] * 4)
    assert [first_row_not_less(batch, txid) for txid in (0, 1, 2, 3, 4, 5, 6)] == [
        0, 0, 1, 1, 3, 3, 4,
    ]  # fmt: skip
    assert [first_row_not_less(batch.slice(1), txid) for txid in (1, 3, 4)] == [0, 0, 2]
    assert first_row_not_less(batch.slice(4), 7) == 0


@pytest.mark.parametrize("count", [0, 1, 2, 99, 100, 101, 1000])
def test_batches_of_few_and_of_many_records(count: int) -> None:
    """They are made in two ways, of the same bytes."""
    txids = [n * 2**40 for n in range(count)]
    payloads = [b"x" * (n % 7) for n in range(count)]
    made = batch_of(txids, payloads)
    made.validate(full=True)
    columns = [pa.array(txids, pa.int64()), pa.array(payloads, pa.binary())]
    expected = pa.RecordBatch.from_arrays(columns, schema=byte_log_schema())
    assert made.serialize().equals(expected.serialize())


def test_rows_are_read_with_their_positions() -> None:
    """As an Arrow batch, and as records: the same rows."""
    batch = batch_of([5, 5, 7], [b"a", b"", b"c" * 65])
    place = EntryPlace(3, 8, 39, 30, 1_700_000_000_123)
    rows = read_batch(batch, place, first_slot=1, log="clicks")
    records = records_of(batch, place, first_slot=1)
    assert rows.schema == read_schema()
    assert rows.column("log").to_pylist() == ["clicks"] * 3
    positions = rows.column("dlsn").to_pylist()
    assert [DLSN(*at.values()) for at in positions] == [r.dlsn for r in records]
    assert [r.dlsn for r in records] == [DLSN(3, 8, 1), DLSN(3, 8, 2), DLSN(3, 8, 3)]
    assert rows.column("txid").to_pylist() == [r.txid for r in records] == [5, 5, 7]
    assert rows.column("sequence_id").to_pylist() == [r.sequence_id for r in records]
    assert [r.sequence_id for r in records] == [40, 41, 42]
    assert [r.position_in_segment for r in records] == [11, 12, 13]
    assert rows.column("value").to_pylist() == [r.payload for r in records]
    times = [value.value / 1000 for value in rows.column("timestamp")]
    assert times == [r.timestamp_ms for r in records] == [1_700_000_000_123] * 3
    assert records[0] == records_of(batch.slice(0, 1), place, first_slot=1)[0]
    assert "dlsn=3:8:1, txid=5, sequence_id=40," in repr(records[0])
    assert repr(records[2]).endswith("ccc'… (65 bytes))")
    assert read_batch(batch.slice(3), place, first_slot=4, log="").schema == read_schema()


def test_rows_are_taken_once() -> None:
    """As records, one after the other or in bulk, and the rest as a batch; or dropped."""
    batch = batch_of(list(range(10)), [b"x"] * 10)
    place = EntryPlace(3, 8, 100, 30, 0)
    rows = EntryRows(batch, place, 2, size_bytes=1)
    assert (rows.rows_left, rows.position) == (8, DLSN(3, 8, 2))
    assert next(rows.records()).txid == 2
    assert [record.txid for record in take_records(deque([rows]), 2)] == [3, 4]
    assert (rows.rows_left, rows.position) == (5, DLSN(3, 8, 5))
    for record in rows.records():
        if record.txid == 6:
            break
    rest = rows.take_batch("clicks")
    assert rest.column("txid").to_pylist() == [7, 8, 9]
    assert [at["slot"] for at in rest.column("dlsn").to_pylist()] == [7, 8, 9]
    assert rest.column("sequence_id").to_pylist() == [107, 108, 109]
    assert (rows.rows_left, rows.position) == (0, DLSN(3, 9, 0))
    assert rows.peek_records(1) == []
    dropped = EntryRows(batch, place, 0, size_bytes=1)
    left = dropped.records()
    dropped.drop()
    assert list(left) == []
    assert EntryRows(batch, place, 0, size_bytes=1).take_batch("").num_rows == 10
    assert EntryRows(batch, place, 11, size_bytes=1).rows_left == 0


def test_nothing_is_cut_to_nothing() -> None:
    """Arrow gives an empty column no buffer of offsets, or any."""
    for empty in (batch_of([], []), batch_of([1, 2], [b"a", b"b"]).slice(2)):
        assert payload_offsets(empty).tolist() == [0]
        assert cut(empty, entry_bytes=100) == []


def test_rows_of_bytes_without_transaction_ids_get_the_time() -> None:
    """As of a typed log, and as proxies do; and never one below the last."""

    async def body(_: MemoryCluster, log: DirectLog) -> None:
        rows = pa.record_batch({"value": [b"a", b"b"]})
        async with await log.open_writer() as writer:
            await writer.write_batch(rows)
            first = writer.last_txid
            await writer.write(LogRecord(first + 10**9, b"c"))
            await writer.write_batch(rows)
        found = [each.txid for each in await read_all(log)]
        assert first > 0
        assert found == [first] * 2 + [first + 10**9] * 3

    on_log(body)
