"""The message of one record that is made without Arrow: the bytes that Arrow makes, or none."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from dlcore.ids import TXID_MAX
from dlcore.log.entries.batches import batch_of
from dlcore.log.entries.body import byte_log_schema
from dlcore.log.entries.lone_record import LoneRecordFormat, lone_record_format


def arrows(txid: int, payload: bytes) -> bytes:
    """Return what Arrow makes of a record."""
    message: bytes = batch_of([txid], [payload]).serialize().to_pybytes()
    return message


@given(st.integers(0, TXID_MAX), st.binary(max_size=300))
def test_the_message_is_the_one_that_arrow_makes(txid: int, payload: bytes) -> None:
    """Byte for byte, so readers cannot tell."""
    form = lone_record_format()
    assert form is not None
    assert b"".join(form.message(txid, payload)) == arrows(txid, payload)


@pytest.mark.parametrize("size", [65_535, 65_536, 1_048_576, 4_000_001])
def test_a_large_payload_is_not_copied_and_is_read_back(size: int) -> None:
    """Sizes that take more bytes of their fields than those which the format was learned from."""
    form = lone_record_format()
    assert form is not None
    payload = b"\xfe" * size
    parts = form.message(7, payload)
    assert parts[1] is payload
    batch = pa.ipc.read_record_batch(pa.py_buffer(b"".join(parts)), byte_log_schema())
    batch.validate(full=True)
    assert batch.to_pydict() == {"txid": [7], "payload": [payload]}


@given(st.integers(0, TXID_MAX), st.binary(max_size=300))
def test_a_message_is_taken_apart_without_arrow(txid: int, payload: bytes) -> None:
    """What Arrow made as well as what was made in its place."""
    form = lone_record_format()
    assert form is not None
    assert form.parse(memoryview(arrows(txid, payload))) == (txid, payload)


@given(st.binary(max_size=40), st.data())
def test_only_a_message_of_one_record_is_taken_apart(payload: bytes, data: st.DataObject) -> None:
    """Cut, longer, with any byte changed that is not the record's, or of more records: Arrow's."""
    form = lone_record_format()
    assert form is not None
    parse = form.parse
    message = arrows(5, payload)
    assert parse(memoryview(message)[: data.draw(st.integers(0, len(message) - 1))]) is None
    assert parse(memoryview(message + bytes(8))) is None
    several: bytes = batch_of([5, 6], [payload, payload]).serialize().to_pybytes()
    assert parse(memoryview(several)) is None
    changed = bytearray(message)
    head_bytes = len(message) - len(payload) - -len(payload) % 8
    at = data.draw(st.integers(0, head_bytes - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    found = parse(memoryview(changed))
    is_txid = head_bytes - 16 <= at < head_bytes - 8
    assert found is None if not is_txid else found is not None and found[1] == payload


def test_a_message_of_another_layout_is_left_to_arrow() -> None:
    """Where sizes are not found, and where more depends on them than what is known of."""
    assert LoneRecordFormat.learn(arrows) is not None
    assert LoneRecordFormat.learn(lambda _, payload: payload) is None
    assert (
        LoneRecordFormat.learn(lambda txid, payload: arrows(txid + len(payload), payload)) is None
    )
