"""Messages of the wire and their frames, in both directions.

Every message is one frame: a header of 24 bytes, the fields of its kind, and a payload of whole
entry frames.  The entry frames are not joined before they are sent, and not read when they are
received.  The header's checksum covers header and fields; each entry frame has its own.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, assert_never

import crc32c
import msgspec

from dlcore.base.access.capability import CAPABILITY_BYTES_MAX, CAPABILITY_BYTES_MIN
from dlcore.base.config import ENTRY_SIZE_BYTES_MAX, MIB
from dlcore.base.errors import BadRequestError
from dlcore.base.features import HANDSHAKE_BITS
from dlcore.wire.fields import TEXT_BYTES_MAX, Buffer as Buffer, blob, blobs, cut, text
from dlcore.wire.frames import (
    SIZE_BYTES,
    FrameParts,
    FrameRun,
    WireError as WireError,
    split,
    total_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Frame: TypeAlias = Buffer | FrameParts
"""An entry frame to send."""

PROTOCOL_VERSION = 1
FEATURE_HELD, FEATURE_AUTHORIZE = HANDSHAKE_BITS["read-held"], HANDSHAKE_BITS["authorize"]
"""The feature bits of READ_HELD and its answer, and of AUTHORIZE."""
FEATURES = sum(HANDSHAKE_BITS.values())
"""Bit set of the optional features of this side."""

HEADER = struct.Struct(">HBBIIQI")
_MAGIC = 0xD10B
_CHECKED = struct.Struct(">HBBIIQ")
_CRC_OFFSET = _CHECKED.size
_CRC = struct.Struct(">I")

ENTRY_BYTES_MIN = 48
"""Bytes of an entry frame without a body: no entry frame is shorter."""
ADD_FRAMES_MAX = 256
"""Entries in one ADD: refusing or storing this many does not delay other clients for long."""
ADD_BYTES_MAX = ENTRY_SIZE_BYTES_MAX + MIB
"""Payload of one ADD: one entry of any allowed size, or a batch of smaller ones."""
CHUNK_BYTES_MAX = 4 * MIB
"""Most bytes that a bookie puts into one CHUNK or UPDATE, unless a single entry is larger."""
CHUNK_FRAMES_MAX = CHUNK_BYTES_MAX // ENTRY_BYTES_MIN
DURABLE_IDS_MAX = 1024
HELD_RANGES_MAX = 64
"""Ranges in one HELD; it says nothing about entries after the last one."""
WINDOW_BYTES_MAX = 16 * MIB
"""Most bytes that a reader can let a bookie send ahead of it."""
MESSAGE_BYTES = 64
"""The size of a CHUNK or UPDATE in its reader's window, without its payload."""
REQUEST_ID_MAX = 2**63 - 1
_CONNECTION_ID = 0
"""The request id of messages about the connection itself."""


class Kind(IntEnum):
    """Kinds of messages: clients send those below WELCOME, bookies the others; both PING, PONG."""

    HELLO = 1
    ADD = 2
    WRITE_LAC = 3
    READ_LAC = 4
    READ_ENTRY = 5
    READ_ENTRIES = 6
    FOLLOW = 7
    CREDIT = 8
    CANCEL = 9
    READ_HELD = 10
    AUTHORIZE = 11
    PING = 16
    PONG = 17
    WELCOME = 32
    DURABLE = 33
    FAILED = 34
    LAC = 35
    CHUNK = 36
    UPDATE = 37
    HELD = 38


class Hello(NamedTuple):
    """The first message of a connection: the wanted bookie, and the client's features."""

    version: int
    features: int
    cluster_id: str
    bookie_name: str
    incarnation: str
    token: bytes = b""
    """For a proof of the client's identity."""


class Add(NamedTuple):
    """Store entries; each is a request of its own, numbered from `first_request_id`."""

    first_request_id: int
    is_recovery: bool
    frames: Sequence[Buffer]


class WriteLac(NamedTuple):
    """Remember a ledger's last add confirmed."""

    request_id: int
    ledger_id: int
    last_add_confirmed: int


class ReadLac(NamedTuple):
    """Return a ledger's last add confirmed."""

    request_id: int
    ledger_id: int
    fence: bool


class ReadHeld(NamedTuple):
    """Return the entries held of a ledger above its last add confirmed; needs `FEATURE_HELD`."""

    request_id: int
    ledger_id: int


class ReadEntry(NamedTuple):
    """Send one entry, as a CHUNK."""

    request_id: int
    ledger_id: int
    entry_id: int
    fence: bool


class ReadEntries(NamedTuple):
    """Send entries first, first + stride, … ≤ last, as CHUNKs within the window."""

    request_id: int
    ledger_id: int
    first_entry_id: int
    last_entry_id: int
    stride: int
    chunk_bytes: int
    window_bytes: int


class Follow(NamedTuple):
    """Send UPDATEs within the window, as the last add confirmed moves."""

    request_id: int
    ledger_id: int
    first_entry_id: int
    window_bytes: int


class Credit(NamedTuple):
    """Widen the window of a read by `size` bytes, which the reader took."""

    request_id: int
    size: int


class Cancel(NamedTuple):
    """Stop a request: no one waits for its answer any more."""

    request_id: int


class Authorize(NamedTuple):
    """Give the requests behind it the rights of a capability; needs `FEATURE_AUTHORIZE`."""

    token: bytes


class Ping(NamedTuple):
    """Ask the other side for a sign of life; `token` comes back in the PONG."""

    token: int


class Pong(NamedTuple):
    """The answer to a PING."""

    token: int


class Welcome(NamedTuple):
    """The answer to HELLO: the bookie, and the features that both sides have."""

    version: int
    features: int
    bookie_name: str
    incarnation: str


class Durable(NamedTuple):
    """Requests whose entries and LACs are on disk now."""

    request_ids: Sequence[int]


class Failed(NamedTuple):
    """The answer to a request that was not carried out; id 0: the connection ends."""

    request_id: int
    status: int
    detail: str


class Lac(NamedTuple):
    """The answer to READ_LAC."""

    request_id: int
    last_add_confirmed: int


class Held(NamedTuple):
    """The answer to READ_HELD: the LAC, and ranges of durable entries above it up to `known_to`."""

    request_id: int
    last_add_confirmed: int
    known_to: int
    ranges: Sequence[tuple[int, int]]


class Chunk(NamedTuple):
    """Entries of a read; `is_last`: there are no more."""

    request_id: int
    frames: Sequence[Buffer]
    is_last: bool


class Update(NamedTuple):
    """Entries up to `last_add_confirmed` that the follower did not have yet."""

    request_id: int
    frames: Sequence[Buffer]
    last_add_confirmed: int
    fenced: bool


_Read: TypeAlias = ReadLac | ReadHeld | ReadEntry | ReadEntries | Follow
_Small: TypeAlias = (
    Hello | _Read | Credit | Cancel | Authorize | Ping | Pong | Welcome | Failed | Lac
)
Request: TypeAlias = WriteLac | _Read
Message: TypeAlias = _Small | WriteLac | Held | Add | Durable | Chunk | Update


def cost_of(message: Chunk | Update) -> int:
    """Return the bytes that a message takes of its reader's window."""
    return MESSAGE_BYTES + total_bytes(message.frames)


class Header(msgspec.Struct, frozen=True, gc=False):
    """The contents of a frame's header, checked against the limits of its kind."""

    kind: Kind
    flags: int
    request_id: int
    fields_bytes: int
    payload_bytes: int
    crc: int


class _Shape(NamedTuple):
    """The limits of a kind's frames: bytes of fields and of payload, flags in use."""

    kind: Kind
    fields_min: int
    fields_max: int
    payload_max: int
    flags: int


_HELLO = struct.Struct(">HQ")
_TWO_IDS = struct.Struct(">qq")
_ONE_ID = struct.Struct(">q")
_RANGE = struct.Struct(">qqqqII")
_FOLLOW = struct.Struct(">qqI")
_SIZE = struct.Struct(">I")
_STATUS = struct.Struct(">B")
_NONE = struct.Struct("")
_ID_BYTES = 8
_FRAMES_BYTES_MAX = CHUNK_BYTES_MAX + ENTRY_SIZE_BYTES_MAX


def _fixed(kind: Kind, fields: struct.Struct, *, flags: int = 0) -> _Shape:
    return _Shape(kind, fields.size, fields.size, 0, flags)


Expected: TypeAlias = dict[int, _Shape]
"""The kinds that may come next."""
ANYTHING: Expected = {
    shape.kind: shape
    for shape in (
        _Shape(Kind.HELLO, _HELLO.size + 8, _HELLO.size + 4 * (TEXT_BYTES_MAX + 2), 0, 0),
        _Shape(Kind.ADD, SIZE_BYTES, SIZE_BYTES * ADD_FRAMES_MAX, ADD_BYTES_MAX, 1),
        _fixed(Kind.WRITE_LAC, _TWO_IDS),
        _fixed(Kind.READ_LAC, _ONE_ID, flags=1),
        _fixed(Kind.READ_HELD, _ONE_ID),
        _fixed(Kind.READ_ENTRY, _TWO_IDS, flags=1),
        _fixed(Kind.READ_ENTRIES, _RANGE),
        _fixed(Kind.FOLLOW, _FOLLOW),
        _fixed(Kind.CREDIT, _SIZE),
        _fixed(Kind.CANCEL, _NONE),
        _Shape(Kind.AUTHORIZE, CAPABILITY_BYTES_MIN, CAPABILITY_BYTES_MAX, 0, 0),
        _fixed(Kind.PING, _NONE),
        _fixed(Kind.PONG, _NONE),
        _Shape(Kind.WELCOME, _HELLO.size + 4, _HELLO.size + 2 * (TEXT_BYTES_MAX + 2), 0, 0),
        _Shape(Kind.DURABLE, _ID_BYTES, _ID_BYTES * DURABLE_IDS_MAX, 0, 0),
        _Shape(Kind.FAILED, _STATUS.size, _STATUS.size + TEXT_BYTES_MAX, 0, 0),
        _fixed(Kind.LAC, _ONE_ID),
        _Shape(Kind.HELD, _TWO_IDS.size, _TWO_IDS.size * (1 + HELD_RANGES_MAX), 0, 0),
        _Shape(Kind.CHUNK, 0, SIZE_BYTES * CHUNK_FRAMES_MAX, _FRAMES_BYTES_MAX, 1),
        _Shape(Kind.UPDATE, 8, 8 + SIZE_BYTES * CHUNK_FRAMES_MAX, _FRAMES_BYTES_MAX, 1),
    )
}


def kinds(*kinds: Kind) -> Expected:
    """Return the shapes of `kinds`: only these may come."""
    return {kind: ANYTHING[kind] for kind in kinds}


def encode(message: Message) -> list[Buffer]:
    """Return the frame of a message: header and fields in one buffer, then its entry frames.

    Raises:
        BadRequestError: a value does not fit its field.
    """
    try:
        return _encode(message)
    except struct.error as error:
        raise BadRequestError(f"{message!r:.200} cannot be sent: {error}") from error


def encode_add(
    first_request_id: int, frames: Sequence[Frame], *, is_recovery: bool
) -> list[Buffer]:
    """Return the frame of an ADD, whose entries may be in parts."""
    return _with_frames(Kind.ADD, is_recovery, first_request_id, b"", frames)


def encode_durable(request_ids: Sequence[int]) -> bytes:
    """Return the frame of a DURABLE."""
    fields = struct.pack(f">{len(request_ids)}Q", *request_ids)
    return _head(Kind.DURABLE, 0, _CONNECTION_ID, fields)


def _encode(message: Message) -> list[Buffer]:
    match message:
        case Add():
            return encode_add(
                message.first_request_id, message.frames, is_recovery=message.is_recovery
            )
        case WriteLac():
            fields = _TWO_IDS.pack(message.ledger_id, message.last_add_confirmed)
            return [_head(Kind.WRITE_LAC, 0, message.request_id, fields)]
        case Chunk():
            return _with_frames(
                Kind.CHUNK, message.is_last, message.request_id, b"", message.frames
            )
        case Update():
            fields = _ONE_ID.pack(message.last_add_confirmed)
            return _with_frames(
                Kind.UPDATE, message.fenced, message.request_id, fields, message.frames
            )
        case Durable():
            return [encode_durable(message.request_ids)]
        case Held(id_, lac, known_to, ranges):
            fields = _TWO_IDS.pack(lac, known_to)
            fields += b"".join(_TWO_IDS.pack(first, last) for first, last in ranges)
            return [_head(Kind.HELD, 0, id_, fields)]
        case _:
            return [_encode_small(message)]


def _encode_small(message: _Small) -> bytes:  # noqa: C901 - one case for each kind
    match message:
        case Lac(id_, lac):
            return _head(Kind.LAC, 0, id_, _ONE_ID.pack(lac))
        case Credit(id_, size):
            return _head(Kind.CREDIT, 0, id_, _SIZE.pack(size))
        case ReadLac(id_, ledger_id, fence):
            return _head(Kind.READ_LAC, fence, id_, _ONE_ID.pack(ledger_id))
        case ReadHeld(id_, ledger_id):
            return _head(Kind.READ_HELD, 0, id_, _ONE_ID.pack(ledger_id))
        case ReadEntry(id_, ledger_id, entry_id, fence):
            return _head(Kind.READ_ENTRY, fence, id_, _TWO_IDS.pack(ledger_id, entry_id))
        case ReadEntries():
            return _head(Kind.READ_ENTRIES, 0, message.request_id, _RANGE.pack(*message[1:]))
        case Follow():
            return _head(Kind.FOLLOW, 0, message.request_id, _FOLLOW.pack(*message[1:]))
        case Cancel(id_):
            return _head(Kind.CANCEL, 0, id_, b"")
        case Authorize(token):
            return _head(Kind.AUTHORIZE, 0, _CONNECTION_ID, token)
        # These two belong to no request, and carry their token in the field of the id.
        case Ping(token):
            return _head(Kind.PING, 0, token, b"")
        case Pong(token):
            return _head(Kind.PONG, 0, token, b"")
        case Failed(id_, status, detail):
            return _head(Kind.FAILED, 0, id_, _STATUS.pack(status) + cut(detail))
        case Hello():
            fields = _HELLO.pack(message.version, message.features)
            texts = [message.cluster_id, message.bookie_name, message.incarnation]
            fields += b"".join(map(text, texts)) + blob(message.token)
            return _head(Kind.HELLO, 0, _CONNECTION_ID, fields)
        case Welcome():
            fields = _HELLO.pack(message.version, message.features)
            fields += text(message.bookie_name) + text(message.incarnation)
            return _head(Kind.WELCOME, 0, _CONNECTION_ID, fields)
        case _:
            assert_never(message)


def _head(
    kind: Kind, flags: int, request_id: int, fields: bytes, *, payload_bytes: int = 0
) -> bytes:
    header = _CHECKED.pack(_MAGIC, kind, flags, len(fields), payload_bytes, request_id)
    return header + _CRC.pack(crc32c.crc32c(header + fields)) + fields


def _with_frames(
    kind: Kind, flag: bool, request_id: int, fields: bytes, frames: Sequence[Frame]
) -> list[Buffer]:
    if type(frames) is FrameRun:
        fields += frames.sizes.astype(">u4").tobytes()
        payload = frames.payload
        return [_head(kind, flag, request_id, fields, payload_bytes=len(payload)), payload]
    sizes = [len(frame) for frame in frames]
    fields += _SIZE.pack(*sizes) if len(sizes) == 1 else struct.pack(f">{len(sizes)}I", *sizes)
    buffers: list[Buffer] = [_head(kind, flag, request_id, fields, payload_bytes=sum(sizes))]
    for frame in frames:
        if isinstance(frame, FrameParts):
            buffers += frame.parts
        else:
            buffers.append(frame)
    return buffers


def decode_header(data: bytes, offset: int, expected: Expected) -> Header:
    """Read the header at `offset`, and refuse one that its kind cannot have.

    Raises:
        WireError: a kind that is not expected, wrong flags or sizes.
    """
    header = HEADER.unpack_from(data, offset)
    magic, number, flags, fields_bytes, payload_bytes, request_id, crc = header
    shape = expected.get(number)
    if (
        magic != _MAGIC
        or shape is None
        or not shape.fields_min <= fields_bytes <= shape.fields_max
        or payload_bytes > shape.payload_max
        or flags & ~shape.flags
    ):
        # One condition on the way of every frame; the reason is worked out only for a wrong one.
        raise _header_error(expected, magic, number, flags, fields_bytes, payload_bytes)
    return Header(shape.kind, flags, request_id, fields_bytes, payload_bytes, crc)


def _header_error(
    expected: Expected, magic: int, number: int, flags: int, fields_bytes: int, payload_bytes: int
) -> WireError:
    """Return the error of a header."""
    if magic != _MAGIC:
        return WireError(f"not a frame: it begins with {magic:#06x}, expected {_MAGIC:#06x}")
    if number not in expected:
        found = ANYTHING[number].kind.name if number in ANYTHING else f"kind {number}"
        names = " or ".join(shape.kind.name for shape in expected.values())
        return WireError(f"{found}: expected {names}")
    kind, fields_min, fields_max, payload_max, known = expected[number]
    if not fields_min <= fields_bytes <= fields_max:
        problem = f"{fields_bytes} bytes of fields: expected {fields_min} … {fields_max}"
    elif payload_bytes > payload_max:
        problem = f"{payload_bytes} bytes of payload: expected at most {payload_max}"
    else:
        problem = f"flags {flags:#x}: expected none beside {known:#x}"
    return WireError(f"{kind.name} with {problem}")


def check_head(data: bytes, offset: int, header: Header) -> bytes:
    """Return the fields of the frame at `offset`.

    Raises:
        WireError: header or fields are damaged.
    """
    start = offset + HEADER.size
    fields = data[start : start + header.fields_bytes]
    crc = crc32c.crc32c(data[offset : offset + _CRC_OFFSET] + fields)
    if crc != header.crc:
        raise WireError(
            f"{header.kind.name} frame with CRC32C {crc:#010x}, its header says {header.crc:#010x}"
        )
    return fields


def decode(header: Header, fields: Buffer, payload: memoryview) -> Message:
    """Return the message of a frame.

    Raises:
        WireError: its parts contradict each other.
    """
    try:
        return _DECODERS[header.kind](header, fields, payload)
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(f"{header.kind.name} with wrong fields: {error}") from error


def _decode_add(header: Header, fields: Buffer, payload: memoryview) -> Message:
    frames = split(fields, payload, bytes_min=ENTRY_BYTES_MIN)
    return Add(header.request_id, bool(header.flags), frames)


def _decode_chunk(header: Header, fields: Buffer, payload: memoryview) -> Message:
    # A frame that is too short is damage of one entry, which the caller finds; the connection is
    # sound.  An ADD with such a frame is refused instead.
    return Chunk(header.request_id, split(fields, payload, bytes_min=0), bool(header.flags))


def _decode_update(header: Header, fields: Buffer, payload: memoryview) -> Message:
    (lac,) = _ONE_ID.unpack_from(fields)
    frames = split(fields[_ONE_ID.size :], payload, bytes_min=0)
    return Update(header.request_id, frames, lac, bool(header.flags))


def _decode_held(header: Header, fields: Buffer, _payload: memoryview) -> Message:
    (lac, known_to), *ranges = _TWO_IDS.iter_unpack(fields)
    end = lac
    for first, last in ranges:
        # `HeldEntries` promises ranges that ascend, all above the LAC.
        if not end < first <= last <= known_to:
            raise WireError(
                f"entries {first} to {last} behind {end}: expected them up to {known_to}"
            )
        end = last
    return Held(header.request_id, lac, known_to, ranges)


def _decode_durable(_header: Header, fields: Buffer, _payload: memoryview) -> Message:
    return Durable(struct.unpack(f">{len(fields) // _ID_BYTES}Q", fields))


def _decode_failed(header: Header, fields: Buffer, _payload: memoryview) -> Message:
    return Failed(header.request_id, fields[0], bytes(fields[1:]).decode())


def _decode_hello(_header: Header, fields: Buffer, _payload: memoryview) -> Message:
    version, features = _HELLO.unpack_from(fields)
    cluster, name, incarnation, token = blobs(fields[_HELLO.size :], count=4)
    return Hello(version, features, cluster.decode(), name.decode(), incarnation.decode(), token)


def _decode_welcome(_header: Header, fields: Buffer, _payload: memoryview) -> Message:
    version, features = _HELLO.unpack_from(fields)
    name, incarnation = blobs(fields[_HELLO.size :], count=2)
    return Welcome(version, features, name.decode(), incarnation.decode())


_DECODERS: dict[Kind, Callable[[Header, Buffer, memoryview], Message]] = {
    Kind.HELLO: _decode_hello,
    Kind.ADD: _decode_add,
    Kind.WRITE_LAC: lambda h, f, _: WriteLac(h.request_id, *_TWO_IDS.unpack(f)),
    Kind.READ_LAC: lambda h, f, _: ReadLac(h.request_id, _ONE_ID.unpack(f)[0], bool(h.flags)),
    Kind.READ_HELD: lambda h, f, _: ReadHeld(h.request_id, *_ONE_ID.unpack(f)),
    Kind.READ_ENTRY: lambda h, f, _: ReadEntry._make(
        (h.request_id, *_TWO_IDS.unpack(f), bool(h.flags))
    ),
    Kind.READ_ENTRIES: lambda h, f, _: ReadEntries(h.request_id, *_RANGE.unpack(f)),
    Kind.FOLLOW: lambda h, f, _: Follow(h.request_id, *_FOLLOW.unpack(f)),
    Kind.CREDIT: lambda h, f, _: Credit(h.request_id, *_SIZE.unpack(f)),
    Kind.CANCEL: lambda h, _, __: Cancel(h.request_id),
    Kind.AUTHORIZE: lambda _, f, __: Authorize(bytes(f)),
    Kind.PING: lambda h, _, __: Ping(h.request_id),
    Kind.PONG: lambda h, _, __: Pong(h.request_id),
    Kind.WELCOME: _decode_welcome,
    Kind.DURABLE: _decode_durable,
    Kind.FAILED: _decode_failed,
    Kind.LAC: lambda h, f, _: Lac(h.request_id, *_ONE_ID.unpack(f)),
    Kind.HELD: _decode_held,
    Kind.CHUNK: _decode_chunk,
    Kind.UPDATE: _decode_update,
}
