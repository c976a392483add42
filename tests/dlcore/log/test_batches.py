"""Kernels over record batches, compared with plain loops."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from dlcore.config import RECORD_SIZE_BYTES_MAX
from dlcore.errors import (
    ConfigurationError,
    LogRecordTooLongError,
    TransactionIdOutOfOrderError,
)
from dlcore.ids import DLSN, TXID_MAX
from dlcore.log.entries.batches import (
    READ_SCHEMA,
    RECORD_OVERHEAD_BYTES,
    RowsPlace,
    batch_of,
    byte_log_batch,
    check_txids,
    cut,
    first_row_not_less,
    payload_offsets,
    read_batch,
    read_batch_of,
    records_of_read,
)
from dlcore.log.entries.body import (
    BYTE_LOG_SCHEMA,
    decode_entry_batch,
    decode_entry_header,
    encode_entry,
    ipc_options,
)
from dlcore.records import LogRecordWithDLSN


@pytest.mark.parametrize("seed", range(50))
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
            options=ipc_options(compression),
        )
    )
    assert len(body) < 10_000
    header = decode_entry_header(body)
    assert (header.record_count, header.records_before) == (100, 7)
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
        {"other": [1.5], "payload": pa.array(["é"]), "txid": pa.array([7], pa.int32())}
    )
    assert byte_log_batch(batch).schema == BYTE_LOG_SCHEMA
    assert byte_log_batch(batch).to_pydict() == {"txid": [7], "payload": ["é".encode()]}
    without = pa.record_batch({"payload": [b"a", b"b"]})
    assert byte_log_batch(without, txid_required=False).to_pydict()["txid"] == [0, 0]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"payload": [b"a"]}, "needs a column txid"),
        ({"txid": [1]}, "needs a column payload"),
        ({"txid": [1.5], "payload": [b"a"]}, "column txid has type double"),
        ({"txid": [1], "payload": [7]}, "column payload has type int64"),
        ({"txid": [None, 1], "payload": [b"a", b"b"]}, "column txid holds 1 nulls"),
        ({"txid": [1, 2], "payload": [b"a", None]}, "column payload holds 1 nulls"),
        ({"txid": pa.array([2**63], pa.uint64()), "payload": [b"a"]}, "does not fit int64"),
    ],
)
def test_wrong_columns_are_named(columns: dict[str, object], problem: str) -> None:
    """Bad input is refused with what is wrong, before anything is written."""
    with pytest.raises(ConfigurationError, match=problem):
        byte_log_batch(pa.record_batch(columns))


def test_searching_a_transaction_id() -> None:
    """The first of equal ones is found."""
    batch = batch_of([1, 3, 3, 5], [b""] * 4)
    assert [first_row_not_less(batch, txid) for txid in (0, 1, 2, 3, 4, 5, 6)] == [
        0, 0, 1, 1, 3, 3, 4,
    ]  # fmt: skip


def test_rows_are_read_with_their_positions() -> None:
    """As a batch of one entry, and as records that were taken one by one: the same rows."""
    batch = batch_of([5, 5, 7], [b"a", b"", b"c"])
    rows = read_batch(
        batch,
        RowsPlace(lssn=3, entry_id=8, first_slot=1, sequence_id=40, timestamp_ms=1_700_000_000_123),
    )
    records = [
        LogRecordWithDLSN(
            txid=txid,
            payload=payload,
            dlsn=DLSN(3, 8, 1 + row),
            sequence_id=40 + row,
            timestamp_ms=1_700_000_000_123,
        )
        for row, (txid, payload) in enumerate([(5, b"a"), (5, b""), (7, b"c")])
    ]
    assert rows.schema == READ_SCHEMA
    assert read_batch_of(records).equals(rows)
    assert records_of_read(rows) == records
    assert rows.column(0).to_pylist() == [3, 3, 3]
    assert rows.column(2).to_pylist() == [1, 2, 3]
    assert rows.column(4).to_pylist() == [40, 41, 42]
    assert read_batch_of([]).schema == READ_SCHEMA


def test_nothing_is_cut_to_nothing() -> None:
    """Arrow gives an empty column no buffer of offsets, or any."""
    for empty in (batch_of([], []), batch_of([1, 2], [b"a", b"b"]).slice(2)):
        assert payload_offsets(empty).tolist() == [0]
        assert cut(empty, entry_bytes=100) == []
