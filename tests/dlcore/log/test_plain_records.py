"""The message of records that is made without Arrow: the bytes that Arrow makes, or none."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from dlcore.base.ids import TXID_MAX
from dlcore.base.records import EntryPlace, LogRecordWithDLSN
from dlcore.log.entries.body import (
    PARSED_RECORDS_MAX,
    PlainFormat,
    batch_of,
    byte_log_schema,
    plain_format,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PLACE = EntryPlace(lssn=1, entry_id=2, sequence_id=3, segment_sequence_id=0, timestamp_ms=4)
RECORDS = st.lists(
    st.tuples(st.integers(0, TXID_MAX), st.binary(max_size=300)), min_size=1, max_size=12
)
Records = list[tuple[int, bytes]]


def arrows(txids: Sequence[int], payloads: Sequence[bytes]) -> bytes:
    """Return what Arrow makes of records."""
    message: bytes = batch_of(txids, payloads).serialize().to_pybytes()
    return message


def columns_of(records: Records) -> tuple[list[int], list[bytes]]:
    """Return the transaction ids and the payloads."""
    return [txid for txid, _ in records], [payload for _, payload in records]


def known_format() -> PlainFormat:
    """Return the format of the Arrow that is installed."""
    form = plain_format()
    assert form is not None
    return form


@given(RECORDS)
def test_the_message_is_the_one_that_arrow_makes(records: Records) -> None:
    """Byte for byte, so readers cannot tell."""
    columns = columns_of(records)
    assert b"".join(known_format().message(*columns)) == arrows(*columns)


@pytest.mark.parametrize("count", [PARSED_RECORDS_MAX, PARSED_RECORDS_MAX + 1, 5_000])
def test_the_message_of_many_records_is_arrows_too(count: int) -> None:
    """Also beyond what is taken apart without Arrow."""
    payloads = [b"%d" % number for number in range(count)]
    assert b"".join(known_format().message(range(count), payloads)) == arrows(
        range(count), payloads
    )


@pytest.mark.parametrize("size", [65_535, 65_536, 1_048_576, 4_000_001])
def test_a_large_payload_is_not_copied_and_is_read_back(size: int) -> None:
    """Sizes that take more bytes of their fields than those which the format was learned from."""
    payload = b"\xfe" * size
    parts = known_format().message([7], [payload])
    assert parts[1] is payload
    batch = pa.ipc.read_record_batch(pa.py_buffer(b"".join(parts)), byte_log_schema())
    batch.validate(full=True)
    assert batch.to_pydict() == {"txid": [7], "value": [payload]}


@given(RECORDS, st.integers(0, 11))
def test_a_message_is_taken_apart_without_arrow(records: Records, first_slot: int) -> None:
    """Entries of Arrow, and entries of its replacement."""
    first_slot = min(first_slot, len(records) - 1)
    found = known_format().parse(memoryview(arrows(*columns_of(records))), len(records))
    assert found is not None
    assert found.records(PLACE, first_slot) == [
        LogRecordWithDLSN(txid, payload, slot, PLACE)
        for slot, (txid, payload) in enumerate(records)
        if slot >= first_slot
    ]


@given(RECORDS, st.data())
def test_only_a_message_of_these_records_is_taken_apart(
    records: Records, data: st.DataObject
) -> None:
    """Cut, longer, of more or fewer records, or with metadata that differs: it is Arrow's."""
    parse, count = known_format().parse, len(records)
    message = arrows(*columns_of(records))
    assert parse(memoryview(message)[: data.draw(st.integers(0, len(message) - 1))], count) is None
    assert parse(memoryview(message + bytes(8)), count) is None
    assert parse(memoryview(message), count + 1) is None
    assert parse(memoryview(message), count + 2) is None
    payload_bytes = sum(len(payload) for _, payload in records)
    ends_bytes = 4 * (count + 1)
    body_bytes = 8 * count + ends_bytes + -ends_bytes % 8 + payload_bytes + -payload_bytes % 8
    changed = bytearray(message)
    changed[data.draw(st.integers(0, len(message) - body_bytes - 1))] ^= data.draw(
        st.integers(1, 255)
    )
    assert parse(memoryview(changed), count) is None


@pytest.mark.parametrize("ends", [(1, 2, 4), (0, 2, 3), (0, 5, 4), (0, -1, 4)])
def test_payloads_that_do_not_follow_each_other_are_left_to_arrow(
    ends: tuple[int, int, int],
) -> None:
    """Not from the first byte, not to the last one, or one that ends before it begins."""
    message = bytearray(arrows([5, 6], [b"ab", b"cd"]))
    at = message.index(struct.pack("<iii", 0, 2, 4))
    message[at : at + 12] = struct.pack("<iii", *ends)
    assert known_format().parse(memoryview(message), 2) is None


def test_a_message_of_another_layout_is_left_to_arrow() -> None:
    """Where numbers are not found, and where more depends on them than what is known of."""
    assert PlainFormat.learn(arrows) is not None
    assert PlainFormat.learn(lambda _, payloads: b"".join(payloads)) is None
    assert (
        PlainFormat.learn(
            lambda txids, payloads: arrows([len(payloads[0]) for _ in txids], payloads)
        )
        is None
    )
    assert (
        PlainFormat.learn(lambda txids, payloads: bytes(len(txids)) + arrows(txids, payloads))
        is None
    )
    assert (
        PlainFormat.learn(
            lambda txids, payloads: bytes(8 * (2000 - len(txids))) + arrows(txids, payloads)
        )
        is None
    )
