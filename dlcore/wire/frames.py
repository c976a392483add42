"""Frames of entries: ids, LAC and a CRC32C of all; many in one buffer, how they are sent and split.

The client builds a frame once.  It is sent, stored and read back unchanged, and every component
that it passes verifies it.  Layout, big-endian: a header of 40 bytes, the body, 8 bytes at the end:

    magic u16 | version u8 | reserved u8 | body size u32 | ledger id i64 | entry id i64
    | last add confirmed i64 | ledger bytes up to and with this body i64
    body
    reserved u32 | check 4 bytes

The check makes the CRC32C of the whole frame 0.  The same holds for any frames one after the other,
so one pass verifies all frames in a buffer.  As a number of little-endian bytes, the check is the
CRC32C of all bytes before it, xor 0x9be09bab.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import crc32c
import numpy as np

from dlcore.base.errors import BadRequestError, DigestMismatchError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator, Sized

    from numpy.typing import NDArray


_JOIN_BYTES = 8192
"""Buffers below this size are joined by a copy, which costs less than a vector for each."""
_PAUSES = not ((3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2))
"""Whether asyncio's `writelines` pauses the protocol when its buffer is full (CVE-2024-12254)."""


class FrameParts:
    """A frame in several parts, which are sent one after the other and never joined.

    Args:
        parts: buffers of single bytes; they must not change while the frame is in use.
    """

    __slots__ = ("_size", "parts")

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self.parts = parts
        self._size = sum(map(len, parts))

    def __repr__(self) -> str:
        return f"<FrameParts parts={len(self.parts)} bytes={self._size}>"

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


class FrameRun(Sequence[memoryview]):
    """Frames in one buffer; each becomes a view on access.

    Args:
        payload: the frames, without gaps.
        bounds: the start of each frame and the end of the last: 0 … len(payload), ascending.
    """

    __slots__ = ("bounds", "payload")

    def __init__(self, payload: memoryview, bounds: NDArray[np.int64]) -> None:
        self.payload = payload
        self.bounds = bounds

    @classmethod
    def of_sizes(cls, payload: memoryview, sizes: NDArray[np.integer]) -> FrameRun:
        """Return the frames of these sizes, which make up the payload."""
        bounds = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=bounds[1:])
        assert bounds[-1] == len(payload)
        return cls(payload, bounds)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each frame."""
        return self.bounds[1:] - self.bounds[:-1]

    def __repr__(self) -> str:
        return f"<FrameRun frames={len(self)} bytes={len(self.payload)}>"

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        return self.payload[int(self.bounds[position]) : int(self.bounds[position + 1])]

    def __iter__(self) -> Iterator[memoryview]:
        payload = self.payload
        return (payload[start:end] for start, end in pairwise(self.bounds.tolist()))


class WireError(BadRequestError):
    """The other side broke the protocol; the connection ends."""


SIZE_BYTES = 4
"""Bytes of the size of a frame, which a message has for each of its frames."""
_SIZE = struct.Struct(">I")
RUN_FRAMES_MIN = 16
"""This many frames or more are split without a step for each."""


def split(
    sizes: bytes | memoryview, payload: memoryview, *, bytes_min: int
) -> Sequence[memoryview]:
    """Return the entry frames in a payload, by the sizes in the fields."""
    if len(sizes) % SIZE_BYTES:
        raise WireError(f"{len(sizes)} bytes of entry sizes: expected a multiple of {SIZE_BYTES}")
    if len(sizes) >= SIZE_BYTES * RUN_FRAMES_MIN:
        return _split_run(np.frombuffer(sizes, ">u4"), payload, bytes_min=bytes_min)
    if len(sizes) == SIZE_BYTES and bytes_min <= len(payload) == _SIZE.unpack(sizes)[0]:
        return [payload]  # most messages have one entry
    frames: list[memoryview] = []
    start = 0
    for size in struct.unpack(f">{len(sizes) // SIZE_BYTES}I", sizes):
        if size < bytes_min:
            raise WireError(f"an entry of {size} bytes: expected at least {bytes_min}")
        end = start + size
        frames.append(payload[start:end])
        start = end
    if start != len(payload):
        raise WireError(f"entries of {start} bytes in a payload of {len(payload)} bytes")
    return frames


def _split_run(
    sizes: NDArray[np.uint32], payload: memoryview, *, bytes_min: int
) -> Sequence[memoryview]:
    smallest, total = int(sizes.min()), int(sizes.sum(dtype=np.int64))
    if smallest < bytes_min:
        raise WireError(f"an entry of {smallest} bytes: expected at least {bytes_min}")
    if total != len(payload):
        raise WireError(f"entries of {total} bytes in a payload of {len(payload)} bytes")
    return FrameRun.of_sizes(payload, sizes)


def total_bytes(frames: Sequence[Sized]) -> int:
    """Return the bytes of all frames."""
    return len(frames.payload) if type(frames) is FrameRun else sum(map(len, frames))


def gather(buffers: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the same bytes in fewer buffers: small ones are joined, large ones are kept."""
    gathered: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = []
    for buffer in buffers:
        if len(buffer) < _JOIN_BYTES:
            small.append(buffer)
            continue
        if small:
            gathered.append(b"".join(small))
            small = []
        gathered.append(buffer)
    if small:
        gathered.append(b"".join(small))
    return gathered


def send(transport: asyncio.WriteTransport, buffers: Sequence[bytes | memoryview]) -> None:
    """Send buffers in order; if the peer does not read, the transport pauses its protocol.

    If `writelines` of this Python does not pause, the buffers are copied once more instead.
    """
    if _PAUSES:
        transport.writelines(gather(buffers) if len(buffers) > 1 else buffers)
    else:
        transport.write(b"".join(buffers))


_HEADER = struct.Struct(">HBBIqqqq")
_RESERVED = bytes(4)
_CHECK = struct.Struct("<I")
_CHECK_XOR = 0x9BE09BAB
_TAIL_BYTES = len(_RESERVED) + _CHECK.size
FRAME_BYTES = _HEADER.size + _TAIL_BYTES
"""Bytes of a frame beside its body."""
_MAGIC = 0xD106
_VERSION = 1
_ID_MAX = 2**63 - 1
_FEW_FRAMES = 4
"""Up to this many frames are checked one by one: few frames are large, and their bytes have pushed
numpy's code out of the CPU's cache."""


@cache
def _header_dtype() -> np.dtype[np.void]:
    return np.dtype(f"V{_HEADER.size}")


@cache
def _check_dtype() -> np.dtype[np.void]:
    return np.dtype(f"V{_CHECK.size}")


@cache
def _headers_dtype() -> np.dtype[np.void]:
    return np.dtype(
        [
            ("magic", ">u2"),
            ("version", "u1"),
            ("reserved", "u1"),
            ("body_bytes", ">u4"),
            ("ledger_id", ">i8"),
            ("entry_id", ">i8"),
            ("last_add_confirmed", ">i8"),
            ("ledger_bytes", ">i8"),
        ]
    )


BytesLike: TypeAlias = bytes | bytearray | memoryview
"""Read-only use of a contiguous buffer of single bytes; Arrow's are passed as memoryviews."""


class EntryFrame(NamedTuple):
    """A verified frame; `body` is a view into `data`, which is the whole frame as stored."""

    ledger_id: int
    entry_id: int
    last_add_confirmed: int
    ledger_bytes: int
    body: memoryview
    data: BytesLike


def encode_frame(
    *,
    ledger_id: int,
    entry_id: int,
    last_add_confirmed: int,
    ledger_bytes: int,
    body: Sequence[BytesLike],
) -> bytes:
    """Return the frame of the concatenated `body` parts.

    `ledger_bytes` counts the body bytes of the ledger up to and including this entry.
    """
    size = sum(map(len, body))
    header = _HEADER.pack(
        _MAGIC, _VERSION, 0, size, ledger_id, entry_id, last_add_confirmed, ledger_bytes
    )
    data = b"".join((header, *body, _RESERVED))
    return data + _CHECK.pack(crc32c.crc32c(data) ^ _CHECK_XOR)


def frame_parts(
    *,
    ledger_id: int,
    entry_id: int,
    last_add_confirmed: int,
    ledger_bytes: int,
    body: Sequence[BytesLike],
) -> FrameParts:
    """Return the frame of `body` like `encode_frame`, without a copy of the body."""
    size = sum(map(len, body))
    header = _HEADER.pack(
        _MAGIC, _VERSION, 0, size, ledger_id, entry_id, last_add_confirmed, ledger_bytes
    )
    checksum = crc32c.crc32c(header)
    for part in body:
        checksum = crc32c.crc32c(part, checksum)
    checksum = crc32c.crc32c(_RESERVED, checksum)
    views = [memoryview(part) if isinstance(part, bytearray) else part for part in body]
    return FrameParts([header, *views, _RESERVED + _CHECK.pack(checksum ^ _CHECK_XOR)])


def frame_check(frame: BytesLike) -> int:
    """Return the check of a frame, a number that depends on each of its bytes."""
    (check,) = _CHECK.unpack_from(frame, len(frame) - _CHECK.size)
    return int(check)


def decode_frame(
    data: BytesLike, *, ledger_id: int | None = None, entry_id: int | None = None
) -> EntryFrame:
    """Verify `data` as one whole frame, of `ledger_id` and `entry_id` if they are given.

    Raises:
        DigestMismatchError: damaged bytes, or a frame of another entry.
    """
    view = memoryview(data)
    if view.nbytes < FRAME_BYTES:
        raise DigestMismatchError(
            f"entry frame of {view.nbytes} bytes, without a body it has {FRAME_BYTES}"
        )
    magic, version, _, size, ledger, entry, lac, ledger_bytes = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != _VERSION:
        raise DigestMismatchError(
            f"not an entry frame: magic {magic:#06x} version {version}, "
            f"expected {_MAGIC:#06x} version {_VERSION}"
        )
    body = view[_HEADER.size : -_TAIL_BYTES]
    if body.nbytes != size:
        raise DigestMismatchError(
            f"entry {ledger}:{entry} says it has {size} body bytes but {body.nbytes} are there"
        )
    # The frame ends in its own check, chosen so that the CRC of the whole frame is 0.
    if crc32c.crc32c(view):
        stated = frame_check(view)
        found = crc32c.crc32c(view[: -_CHECK.size]) ^ _CHECK_XOR
        raise DigestMismatchError(
            f"entry {ledger}:{entry} has the check {found:#010x}, it says {stated:#010x}"
        )
    if ledger_id is not None and ledger != ledger_id:
        raise DigestMismatchError(f"the frame is of ledger {ledger}, expected ledger {ledger_id}")
    if entry_id is not None and entry != entry_id:
        raise DigestMismatchError(f"the frame is of entry {entry}, expected entry {entry_id}")
    return EntryFrame(ledger, entry, lac, ledger_bytes, body, data)


def is_sound(run: FrameRun, *, ledger_id: int, entry_ids: NDArray[np.int64]) -> bool:
    """Return whether the frames of `run` are those of `entry_ids` of the ledger, each intact.

    It takes no step per frame.  To find the damaged one, use `decode_frame`.
    """
    if len(run) > _FEW_FRAMES:
        return _sound_headers(run, ledger_id, entry_ids) is not None
    # The checks make the CRC of any number of intact frames 0, so one call covers them all.
    if crc32c.crc32c(run.payload):
        return False
    for frame, entry_id in zip(run, entry_ids.tolist(), strict=True):
        if len(frame) < FRAME_BYTES:
            return False
        magic, version, _, body_bytes, *ids = _HEADER.unpack_from(frame)
        says = (magic, version, body_bytes + FRAME_BYTES, *ids[:2])
        if says != (_MAGIC, _VERSION, len(frame), ledger_id, entry_id):
            return False
    return True


class FollowingFrames(NamedTuple):
    """The contents of intact frames of consecutive entries of one ledger."""

    ledger_id: int
    first_entry_id: int
    last_add_confirmed: NDArray[np.int64]
    checks: NDArray[np.uint32]


def following_frames(run: FrameRun) -> FollowingFrames | None:
    """Return the frames' contents; None unless they are intact and consecutive in one ledger."""
    if not len(run) or len(run[0]) < FRAME_BYTES:
        return None
    _, _, _, _, ledger_id, first, *_ = _HEADER.unpack_from(run[0])
    # Ids beyond int64 cannot follow: only a damaged header has such a first id.
    if first > _ID_MAX - len(run):
        return None
    headers = _sound_headers(run, ledger_id, np.arange(first, first + len(run)))
    if headers is None:
        return None
    checks = _pieces(run.payload, run.bounds[1:] - _CHECK.size, _check_dtype()).view("<u4")
    return FollowingFrames(ledger_id, first, headers["last_add_confirmed"].astype(np.int64), checks)


def ids_of_run(run: FrameRun) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ids of ledgers and entries that the frames have, intact or not, without a check.

    No frame is shorter than one without a body.
    """
    headers = _pieces(run.payload, run.bounds[:-1], _header_dtype()).view(_headers_dtype())
    return headers["ledger_id"], headers["entry_id"]


def decode_run(
    run: FrameRun, *, ledger_id: int, first_entry_id: int, stride: int
) -> list[EntryFrame] | None:
    """Return the frames of entries first, first + stride, … if each is intact, else None."""
    last = first_entry_id + stride * (len(run) - 1)
    if last > _ID_MAX:
        return None
    entry_ids = np.arange(first_entry_id, last + 1, stride)
    headers = _sound_headers(run, ledger_id, entry_ids)
    if headers is None:
        return None
    payload, bounds = run.payload, run.bounds.tolist()
    return [
        EntryFrame(
            ledger_id,
            entry_id,
            last_add_confirmed,
            ledger_bytes,
            payload[start + _HEADER.size : end - _TAIL_BYTES],
            payload[start:end],
        )
        for entry_id, last_add_confirmed, ledger_bytes, start, end in zip(
            entry_ids.tolist(),
            headers["last_add_confirmed"].tolist(),
            headers["ledger_bytes"].tolist(),
            bounds[:-1],
            bounds[1:],
            strict=True,
        )
    ]


def _sound_headers(
    run: FrameRun, ledger_id: int, entry_ids: NDArray[np.int64]
) -> NDArray[Any] | None:
    """Return the headers of the frames if all are valid, else None."""
    body_bytes = run.sizes - FRAME_BYTES
    if not len(run) or body_bytes.min() < 0 or crc32c.crc32c(run.payload):
        return None
    headers = _pieces(run.payload, run.bounds[:-1], _header_dtype()).view(_headers_dtype())
    is_sound = (
        (headers["magic"] == _MAGIC)
        & (headers["version"] == _VERSION)
        & (headers["body_bytes"] == body_bytes)
        & (headers["ledger_id"] == ledger_id)
        & (headers["entry_id"] == entry_ids)
    )
    return headers if is_sound.all() else None


def _pieces(
    payload: memoryview, starts: NDArray[np.int64], piece: np.dtype[np.void]
) -> NDArray[np.void]:
    """Return copies of the pieces of `payload` that begin at `starts`; all lie within it."""
    # An array with a stride of 1 byte has an element at every position, so that one fancy index
    # copies all pieces; `piece` is a void type, which needs no alignment.
    anywhere = (len(payload) - piece.itemsize + 1,)
    pieces: NDArray[np.void] = np.ndarray(anywhere, piece, payload, strides=(1,))[starts]
    return pieces
