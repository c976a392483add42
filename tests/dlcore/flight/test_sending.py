"""The bytes of a DoGet, read back by the protobuf library and by Arrow."""

from __future__ import annotations

import json
import struct

import pyarrow as pa
from hypothesis import given, strategies as st

from dlcore.base.ids import DLSN
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.sending import batch_message, schema_message

SCHEMA = pa.schema([("value", pa.binary()), ("number", pa.int64())])


def arrow_message(data: pb.FlightData) -> pa.Buffer:
    """Return what Arrow itself would have written."""
    prefix = struct.pack("<iI", -1, len(data.data_header))
    return pa.py_buffer(prefix + data.data_header + data.data_body)


@given(st.lists(st.tuples(st.binary(max_size=300), st.integers(0, 2**40)), max_size=50))
def test_a_batch(rows: list[tuple[bytes, int]]) -> None:
    """Its rows, and beside them where a reader goes on."""
    values, numbers = [row[0] for row in rows], [row[1] for row in rows]
    batch = pa.record_batch([pa.array(values, pa.binary()), pa.array(numbers, pa.int64())], SCHEMA)
    data = pb.FlightData.FromString(batch_message(batch, DLSN(3, 17, 0)))
    assert json.loads(data.app_metadata) == {"next": "3:17:0"}
    assert pa.ipc.read_record_batch(arrow_message(data), SCHEMA).equals(batch)


def test_a_schema() -> None:
    """It has no body, and nothing beside it."""
    data = pb.FlightData.FromString(schema_message(SCHEMA))
    assert (data.app_metadata, data.data_body) == (b"", b"")
    assert pa.ipc.read_schema(arrow_message(data)).equals(SCHEMA)
