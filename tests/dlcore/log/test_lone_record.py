"""The message of one record that is made without Arrow: the bytes that Arrow makes, or none."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from dlcore.ids import TXID_MAX
from dlcore.log.entries.batches import batch_of
from dlcore.log.entries.body import BYTE_LOG_SCHEMA
from dlcore.log.entries.lone_record import LONE_RECORD_FORMAT, LoneRecordFormat


def arrows(txid: int, payload: bytes) -> bytes:
    """Return what Arrow makes of a record."""
    message: bytes = batch_of([txid], [payload]).serialize().to_pybytes()
    return message


@given(st.integers(0, TXID_MAX), st.binary(max_size=300))
def test_the_message_is_the_one_that_arrow_makes(txid: int, payload: bytes) -> None:
    """Byte for byte, so readers cannot tell."""
    assert LONE_RECORD_FORMAT is not None
    assert b"".join(LONE_RECORD_FORMAT.message(txid, payload)) == arrows(txid, payload)


@pytest.mark.parametrize("size", [65_535, 65_536, 1_048_576, 4_000_001])
def test_a_large_payload_is_not_copied_and_is_read_back(size: int) -> None:
    """Sizes that take more bytes of their fields than those which the format was learned from."""
    assert LONE_RECORD_FORMAT is not None
    payload = b"\xfe" * size
    parts = LONE_RECORD_FORMAT.message(7, payload)
    assert parts[1] is payload
    batch = pa.ipc.read_record_batch(pa.py_buffer(b"".join(parts)), BYTE_LOG_SCHEMA)
    batch.validate(full=True)
    assert batch.to_pydict() == {"txid": [7], "payload": [payload]}


def test_a_message_of_another_layout_is_left_to_arrow() -> None:
    """Where sizes are not found, and where more depends on them than what is known of."""
    assert LoneRecordFormat.learn(arrows) is not None
    assert LoneRecordFormat.learn(lambda _, payload: payload) is None
    assert (
        LoneRecordFormat.learn(lambda txid, payload: arrows(txid + len(payload), payload)) is None
    )
