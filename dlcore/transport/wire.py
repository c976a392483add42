"""Wire forms of the bookie protocol: messages to values and back, statuses to errors and back.

Messages are those of dlcore/proto/bookie.proto.  Protobuf's Python runtime copies every bytes field
twice on each side, which more than halves the rate of bulk transfers; so `repeated bytes frames`,
field 5 of every message that moves many entries, is written and read here by hand, in the same wire
form.  Encoding joins the frames behind the rest of the message once; decoding yields views into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError, Message

from dlcore.config import ENTRY_SIZE_BYTES_MAX, MIB
from dlcore.errors import (
    AlreadyClosedError,
    BadRequestError,
    BookieError,
    BookieOverloadedError,
    BookieReadOnlyError,
    BookieStorageError,
    BookieUnavailableError,
    DigestMismatchError,
    DLError,
    EntryTooLargeError,
    LedgerFencedError,
    NoSuchEntryError,
    NoSuchLedgerError,
    WrongIncarnationError,
)
from dlcore.ledger.port import EntryRange, FollowUpdate
from dlcore.proto import bookie_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PROTOCOL_VERSION = 1
SERVICE = "dlog.bookie.v1.Bookie"

CHUNK_BYTES_MAX = 2 * MIB
"""Most a bookie puts into one message of a stream, unless a single entry is larger."""
REQUEST_BYTES_MAX = ENTRY_SIZE_BYTES_MAX + MIB
"""Largest message a bookie takes: one entry of any allowed size, or a batch of smaller ones."""
RESPONSE_BYTES_MAX = CHUNK_BYTES_MAX + ENTRY_SIZE_BYTES_MAX + MIB
"""Largest message a client takes."""

_FRAMES_TAG = 5 << 3 | 2
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_VARINT_BITS_MAX = 63

_ERRORS: dict[pb.Status.ValueType, type[BookieError]] = {
    pb.NO_SUCH_LEDGER: NoSuchLedgerError,
    pb.NO_SUCH_ENTRY: NoSuchEntryError,
    pb.FENCED: LedgerFencedError,
    pb.READ_ONLY: BookieReadOnlyError,
    pb.OVERLOADED: BookieOverloadedError,
    pb.DIGEST_MISMATCH: DigestMismatchError,
    pb.WRONG_INCARNATION: WrongIncarnationError,
    pb.BAD_REQUEST: BadRequestError,
    pb.ENTRY_TOO_LARGE: EntryTooLargeError,
    pb.STORAGE_ERROR: BookieStorageError,
    pb.SHUTTING_DOWN: BookieUnavailableError,
}
_STATUSES: dict[type, pb.Status.ValueType] = {
    **{error: status for status, error in _ERRORS.items()},
    AlreadyClosedError: pb.SHUTTING_DOWN,
}

_M = TypeVar("_M", bound=Message)


def error_of(status: pb.Status.ValueType, detail: str) -> BookieError:
    """Return the error that `status` stands for.

    A status that this version does not know counts as "unknown", never as a proven "no".
    """
    assert status != pb.OK
    error = _ERRORS.get(status)
    if error is None:
        return BookieStorageError(f"unknown status {status}: {detail}")
    return error(detail)


def status_of(error: BaseException) -> tuple[pb.Status.ValueType, str]:
    """Return the status and detail that tell a client about `error`; by default STORAGE_ERROR."""
    for kind in type(error).__mro__:
        status = _STATUSES.get(kind)
        if status is not None:
            return status, str(error)
    return pb.STORAGE_ERROR, f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """Whom a client means to talk to."""

    protocol_version: int
    cluster_id: str
    bookie_name: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBatch:
    """One message of a write stream: `frames`, then `lacs`, numbered from `first_request_id`.

    `lacs` are (ledger id, last add confirmed).
    """

    handshake: Handshake | None
    first_request_id: int
    is_recovery: bool
    frames: Sequence[memoryview]
    lacs: Sequence[tuple[int, int]]


def encode_handshake(handshake: Handshake) -> bytes:
    """Return the first message of a write stream."""
    return pb.WriteRequest(
        handshake=pb.Handshake(
            protocol_version=handshake.protocol_version,
            cluster_id=handshake.cluster_id,
            bookie_name=handshake.bookie_name,
            incarnation=handshake.incarnation,
        )
    ).SerializeToString()


def encode_write_batch(
    *,
    first_request_id: int,
    is_recovery: bool,
    frames: Sequence[bytes | memoryview],
    lacs: Sequence[tuple[int, int]],
) -> bytes:
    """Return a message of a write stream."""
    rest = pb.WriteRequest(
        first_request_id=first_request_id,
        is_recovery=is_recovery,
        lacs=[pb.WriteLac(ledger_id=ledger, last_add_confirmed=lac) for ledger, lac in lacs],
    )
    return _join_frames(rest, frames)


def decode_write_request(data: bytes) -> WriteBatch:
    """Invert `encode_handshake` and `encode_write_batch`.

    Raises:
        BadRequestError: the bytes are not a `WriteRequest`.
    """
    rest, frames = _split_frames(data, BadRequestError)
    message = _parse(pb.WriteRequest, rest, BadRequestError)
    handshake = None
    if message.HasField("handshake"):
        handshake = Handshake(
            protocol_version=message.handshake.protocol_version,
            cluster_id=message.handshake.cluster_id,
            bookie_name=message.handshake.bookie_name,
            incarnation=message.handshake.incarnation,
        )
    return WriteBatch(
        handshake=handshake,
        first_request_id=message.first_request_id,
        is_recovery=message.is_recovery,
        frames=frames,
        lacs=[(lac.ledger_id, lac.last_add_confirmed) for lac in message.lacs],
    )


def encode_write_response(
    ok_request_ids: Iterable[int], failures: Iterable[tuple[int, BaseException]]
) -> bytes:
    """Return the results of some requests of a write stream."""
    message = pb.WriteResponse(ok_request_ids=ok_request_ids)
    for request_id, error in failures:
        status, detail = status_of(error)
        message.failures.add(request_id=request_id, status=status, detail=detail)
    return message.SerializeToString()


def decode_write_response(data: bytes) -> tuple[list[int], list[tuple[int, BookieError]]]:
    """Return the request ids that succeeded, and those that failed with their errors."""
    message = _parse(pb.WriteResponse, data, BookieUnavailableError)
    failures = [(f.request_id, error_of(f.status, f.detail)) for f in message.failures]
    return list(message.ok_request_ids), failures


def encode_read_lac(*, incarnation: str, ledger_id: int, fence: bool) -> bytes:
    """Return a `ReadLacRequest`."""
    request = pb.ReadLacRequest(incarnation=incarnation, ledger_id=ledger_id, fence=fence)
    return request.SerializeToString()


def decode_read_lac_response(data: bytes) -> int:
    """Return the LAC, or raise the error that the bookie answered with."""
    message = _parse(pb.ReadLacResponse, data, BookieUnavailableError)
    _raise_for(message.status, message.detail)
    return message.last_add_confirmed


def encode_read_entry(*, incarnation: str, ledger_id: int, entry_id: int, fence: bool) -> bytes:
    """Return a `ReadEntryRequest`."""
    return pb.ReadEntryRequest(
        incarnation=incarnation, ledger_id=ledger_id, entry_id=entry_id, fence=fence
    ).SerializeToString()


def decode_read_entry_response(data: bytes) -> bytes:
    """Return the frame, or raise the error that the bookie answered with."""
    message = _parse(pb.ReadEntryResponse, data, BookieUnavailableError)
    _raise_for(message.status, message.detail)
    return message.frame


def encode_read_entries(
    *,
    incarnation: str,
    ledger_id: int,
    first_entry_id: int,
    last_entry_id: int,
    stride: int,
    chunk_bytes: int,
) -> bytes:
    """Return a `ReadEntriesRequest`."""
    return pb.ReadEntriesRequest(
        incarnation=incarnation,
        ledger_id=ledger_id,
        first_entry_id=first_entry_id,
        last_entry_id=last_entry_id,
        stride=stride,
        chunk_bytes=chunk_bytes,
    ).SerializeToString()


def encode_read_entries_response(frames: Sequence[bytes | memoryview]) -> bytes:
    """Return one chunk of a range read."""
    return _join_frames(pb.ReadEntriesResponse(status=pb.OK), frames)


def decode_read_entries_response(data: bytes) -> list[memoryview]:
    """Return the frames of a chunk, or raise the error that the stream ended with."""
    rest, frames = _split_frames(data, BookieUnavailableError)
    message = _parse(pb.ReadEntriesResponse, rest, BookieUnavailableError)
    _raise_for(message.status, message.detail)
    return frames


def encode_follow(*, incarnation: str, ledger_id: int, first_entry_id: int) -> bytes:
    """Return a `FollowRequest`."""
    return pb.FollowRequest(
        incarnation=incarnation, ledger_id=ledger_id, first_entry_id=first_entry_id
    ).SerializeToString()


def encode_follow_response(update: FollowUpdate) -> bytes:
    """Return one push to a follower."""
    rest = pb.FollowResponse(
        status=pb.OK, last_add_confirmed=update.last_add_confirmed, fenced=update.fenced
    )
    return _join_frames(rest, update.frames)


def decode_follow_response(data: bytes) -> FollowUpdate:
    """Return one push, or raise the error that the stream ended with."""
    rest, frames = _split_frames(data, BookieUnavailableError)
    message = _parse(pb.FollowResponse, rest, BookieUnavailableError)
    _raise_for(message.status, message.detail)
    return FollowUpdate(
        frames=frames, last_add_confirmed=message.last_add_confirmed, fenced=message.fenced
    )


def encode_list_entries(*, incarnation: str, ledger_id: int) -> bytes:
    """Return a `ListEntriesRequest`."""
    request = pb.ListEntriesRequest(incarnation=incarnation, ledger_id=ledger_id)
    return request.SerializeToString()


def encode_list_entries_response(ranges: Iterable[EntryRange]) -> bytes:
    """Return one page of ranges."""
    response = pb.ListEntriesResponse(status=pb.OK)
    for each in ranges:
        response.ranges.add(first_entry_id=each.first_entry_id, last_entry_id=each.last_entry_id)
    return response.SerializeToString()


def decode_list_entries_response(data: bytes) -> list[EntryRange]:
    """Return one page of ranges, or raise the error that the bookie answered with."""
    message = _parse(pb.ListEntriesResponse, data, BookieUnavailableError)
    _raise_for(message.status, message.detail)
    return [
        EntryRange(first_entry_id=r.first_entry_id, last_entry_id=r.last_entry_id)
        for r in message.ranges
    ]


def decode_request(kind: type[_M], data: bytes) -> _M:
    """Parse a request of a bookie.

    Raises:
        BadRequestError: the bytes are not a message of this kind.
    """
    return _parse(kind, data, BadRequestError)


def _raise_for(status: pb.Status.ValueType, detail: str) -> None:
    if status != pb.OK:
        raise error_of(status, detail)


def _parse(kind: type[_M], data: bytes, malformed: type[DLError]) -> _M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise malformed(f"not a {kind.DESCRIPTOR.name} message: {error}") from error


def _join_frames(rest: Message, frames: Sequence[bytes | memoryview]) -> bytes:
    parts: list[bytes | memoryview] = [rest.SerializeToString()]
    for frame in frames:
        parts.append(_frame_prefix(len(frame)))
        parts.append(frame)
    return b"".join(parts)


def _frame_prefix(size: int) -> bytes:
    prefix = bytearray((_FRAMES_TAG,))
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix)


def _split_frames(data: bytes, malformed: type[DLError]) -> tuple[bytes, list[memoryview]]:
    """Return the message without its frames, and the frames as views into `data`."""
    view = memoryview(data)
    frames: list[memoryview] = []
    rest: list[memoryview] = []
    position = 0
    try:
        while position < len(data):
            start = position
            tag, position = _read_varint(data, position)
            body, position = _skip_field(data, position, tag & 7)
            if tag == _FRAMES_TAG:
                frames.append(view[body:position])
            else:
                rest.append(view[start:position])
    except (IndexError, ValueError) as error:
        raise malformed(f"a message of {len(data)} bytes ends inside a field") from error
    return b"".join(rest), frames


def _skip_field(data: bytes, position: int, wire_type: int) -> tuple[int, int]:
    """Return where the field's content starts, and where the field ends."""
    if wire_type == _LENGTH_DELIMITED:
        size, position = _read_varint(data, position)
        end = position + size
    elif wire_type == _VARINT:
        _, end = _read_varint(data, position)
    elif wire_type == _FIXED64:
        end = position + 8
    elif wire_type == _FIXED32:
        end = position + 4
    else:
        raise ValueError(f"wire type {wire_type}")
    if end > len(data):
        raise IndexError(end)
    return position, end


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    byte = data[position]
    value = byte & 0x7F
    shift = 7
    position += 1
    while byte > 0x7F:
        if shift > _VARINT_BITS_MAX:
            raise ValueError("a varint of more than ten bytes")
        byte = data[position]
        value |= (byte & 0x7F) << shift
        shift += 7
        position += 1
    return value, position
