"""The hand-written wire forms are protobuf's own, and bad bytes are named as such."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings, strategies as st

from dlcore.errors import (
    AlreadyClosedError,
    BadRequestError,
    BookieError,
    BookieStorageError,
    BookieUnavailableError,
    LedgerError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from dlcore.ledger.port import FollowUpdate
from dlcore.proto import bookie_pb2 as pb
from dlcore.transport import wire

INT64 = st.integers(-(2**63), 2**63 - 1)
FRAMES = st.lists(st.binary(max_size=300), max_size=8)


@given(
    first_request_id=st.integers(1, 2**64 - 1),
    is_recovery=st.booleans(),
    frames=FRAMES,
    lacs=st.lists(st.tuples(INT64, INT64), max_size=3),
)
def test_a_write_batch_is_what_protobuf_reads_and_writes(
    first_request_id: int, is_recovery: bool, frames: list[bytes], lacs: list[tuple[int, int]]
) -> None:
    """Encode by hand and parse with protobuf; encode with protobuf and decode by hand."""
    data = wire.encode_write_batch(
        first_request_id=first_request_id, is_recovery=is_recovery, frames=frames, lacs=lacs
    )
    message = pb.WriteRequest(
        first_request_id=first_request_id,
        is_recovery=is_recovery,
        frames=frames,
        lacs=[pb.WriteLac(ledger_id=a, last_add_confirmed=b) for a, b in lacs],
    )
    assert pb.WriteRequest.FromString(data) == message
    for encoded in (data, message.SerializeToString()):
        batch = wire.decode_write_request(encoded)
        assert [bytes(frame) for frame in batch.frames] == frames
        assert (batch.first_request_id, batch.is_recovery) == (first_request_id, is_recovery)
        assert (batch.lacs, batch.handshake) == (lacs, None)


@given(frames=FRAMES, last_add_confirmed=INT64, fenced=st.booleans())
def test_streams_of_frames_are_what_protobuf_writes(
    frames: list[bytes], last_add_confirmed: int, fenced: bool
) -> None:
    """Compare both stream messages with protobuf's."""
    chunk = wire.encode_read_entries_response(frames)
    assert pb.ReadEntriesResponse.FromString(chunk).frames == frames
    assert wire.decode_read_entries_response(chunk) == frames
    update = FollowUpdate(frames=frames, last_add_confirmed=last_add_confirmed, fenced=fenced)
    message = pb.FollowResponse(
        status=pb.OK, last_add_confirmed=last_add_confirmed, fenced=fenced, frames=frames
    )
    assert pb.FollowResponse.FromString(wire.encode_follow_response(update)) == message
    assert wire.decode_follow_response(message.SerializeToString()) == update


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2**21 - 1, 2**21, 4 * 2**20])
def test_frames_of_every_length_form(size: int) -> None:
    """Sizes on both sides of each step of the length's encoding."""
    frame = b"f" * size
    data = wire.encode_read_entries_response([frame, b"next"])
    assert data == pb.ReadEntriesResponse(status=pb.OK, frames=[frame, b"next"]).SerializeToString()
    assert wire.decode_read_entries_response(data) == [frame, b"next"]


def test_fields_of_a_later_version_are_passed_over() -> None:
    """Append fields of every wire type with unknown numbers."""
    unknown = bytes((0x78, 5, 0x79, *range(8), 0x7D, *range(4), 0x7A, 2, 1, 2))
    known = wire.encode_read_entries_response([b"a"])
    assert wire.decode_read_entries_response(known + unknown + b"\x2a\x01b") == [b"a", b"b"]


@settings(max_examples=500)
@given(data=st.binary(max_size=60))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    """Random bytes never raise anything but the error of the side that reads them."""
    with suppress(BadRequestError):
        batch = wire.decode_write_request(data)
        assert sum(map(len, batch.frames)) <= len(data)
    for decode in (
        wire.decode_read_entries_response,
        wire.decode_follow_response,
        wire.decode_write_response,
        wire.decode_read_lac_response,
        wire.decode_read_entry_response,
        wire.decode_list_entries_response,
    ):
        with suppress(BookieError):
            decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x2a",  # a frame without its length
        b"\x2a\x05abc",  # a frame cut short
        b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length of twelve bytes
        b"\x11\x00\x00",  # a fixed64 cut short
        b"\x2b",  # a group
        b"\x0a\x02\x08\x80",  # a handshake that does not parse
    ],
)
def test_truncated_and_odd_messages_are_bad_requests(data: bytes) -> None:
    """Each way in which a message can be broken."""
    with pytest.raises(BadRequestError):
        wire.decode_write_request(data)


def test_an_answer_that_does_not_parse_is_unknown() -> None:
    """A client must not take garbage for an answer."""
    with pytest.raises(BookieUnavailableError):
        wire.decode_read_lac_response(b"\xff\xff\xff")


def test_a_handshake_round_trips() -> None:
    """Encode and decode."""
    handshake = wire.Handshake(protocol_version=3, cluster_id="c", bookie_name="b", incarnation="i")
    batch = wire.decode_write_request(wire.encode_handshake(handshake))
    assert (batch.handshake, batch.frames, batch.lacs) == (handshake, [], [])


def test_every_status_has_an_error_that_maps_back() -> None:
    """Walk the enum: no status may be forgotten, and only two of them are a "no"."""
    proven_no = set()
    for name, status in pb.Status.items():
        if name in ("STATUS_UNSPECIFIED", "OK"):
            continue
        error = wire.error_of(status, "why")
        assert str(error) == "why"
        assert wire.status_of(error) == (status, "why")
        if isinstance(error, NoSuchLedgerError | NoSuchEntryError):
            proven_no.add(name)
    assert proven_no == {"NO_SUCH_LEDGER", "NO_SUCH_ENTRY"}


def test_what_has_no_status_is_unknown() -> None:
    """Errors and statuses that the other side does not know never become a "no"."""
    assert wire.status_of(LedgerError("x"))[0] == pb.STORAGE_ERROR
    assert wire.status_of(ZeroDivisionError("x")) == (pb.STORAGE_ERROR, "ZeroDivisionError: x")
    assert wire.status_of(AlreadyClosedError("x"))[0] == pb.SHUTTING_DOWN
    assert isinstance(wire.error_of(pb.Status.ValueType(99), "x"), BookieStorageError)
    assert isinstance(wire.error_of(pb.STATUS_UNSPECIFIED, "x"), BookieStorageError)


def test_results_round_trip() -> None:
    """Successes and failures of one flush."""
    data = wire.encode_write_response([1, 2**40], [(3, NoSuchEntryError("gone"))])
    ok_request_ids, failures = wire.decode_write_response(data)
    assert ok_request_ids == [1, 2**40]
    assert [(id_, type(error), str(error)) for id_, error in failures] == [
        (3, NoSuchEntryError, "gone")
    ]
