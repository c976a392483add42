"""The frame around every entry: ids, LAC and a CRC32C over header and body.

The client builds a frame once; it travels, is stored and is read back verbatim, and every hand it
passes through verifies it.  Layout, big-endian, 48 bytes, then the body:

    magic u16 | version u8 | reserved u8 | body size u32 | ledger id i64 | entry id i64
    | last add confirmed i64 | ledger bytes up to and with this body i64 | reserved u32 | crc32c u32

The checksum covers the 44 bytes before it and the body.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import crc32c

from dlcore.errors import DigestMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

FRAME_HEADER_BYTES = 48
_HEADER = struct.Struct(">HBBIqqqqI")
_CRC = struct.Struct(">I")
_MAGIC = 0xD106
_VERSION = 1

BytesLike: TypeAlias = bytes | bytearray | memoryview
"""Read-only use of a contiguous buffer; Arrow buffers are passed as memoryviews."""


@dataclass(frozen=True, slots=True)
class EntryFrame:
    """A verified frame; `body` is a view into `data`, which is header and body as stored."""

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
    size = sum(memoryview(part).nbytes for part in body)
    header = _HEADER.pack(
        _MAGIC, _VERSION, 0, size, ledger_id, entry_id, last_add_confirmed, ledger_bytes, 0
    )
    checksum = crc32c.crc32c(header)
    for part in body:
        checksum = crc32c.crc32c(part, checksum)
    return b"".join((header, _CRC.pack(checksum), *body))


def decode_frame(
    data: BytesLike, *, ledger_id: int | None = None, entry_id: int | None = None
) -> EntryFrame:
    """Verify `data` as one whole frame, of `ledger_id` and `entry_id` where given.

    Raises:
        DigestMismatchError: damaged bytes, or a frame of another entry.
    """
    view = memoryview(data)
    if view.nbytes < FRAME_HEADER_BYTES:
        raise DigestMismatchError(
            f"entry frame of {view.nbytes} bytes is shorter than its header of {FRAME_HEADER_BYTES}"
        )
    magic, version, _, size, ledger, entry, lac, ledger_bytes, _ = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != _VERSION:
        raise DigestMismatchError(
            f"not an entry frame: magic {magic:#06x} version {version}, "
            f"expected {_MAGIC:#06x} version {_VERSION}"
        )
    body = view[FRAME_HEADER_BYTES:]
    if body.nbytes != size:
        raise DigestMismatchError(
            f"entry {ledger}:{entry} says it has {size} body bytes but {body.nbytes} are there"
        )
    checksum = crc32c.crc32c(body, crc32c.crc32c(view[: _HEADER.size]))
    (expected,) = _CRC.unpack_from(view, _HEADER.size)
    if checksum != expected:
        raise DigestMismatchError(
            f"entry {ledger}:{entry} has CRC32C {checksum:#010x}, its header says {expected:#010x}"
        )
    _check_identity("ledger", ledger, ledger_id)
    _check_identity("entry", entry, entry_id)
    return EntryFrame(ledger, entry, lac, ledger_bytes, body, data)


def _check_identity(kind: str, found: int, wanted: int | None) -> None:
    if wanted is not None and found != wanted:
        raise DigestMismatchError(f"the frame is of {kind} {found}, expected {kind} {wanted}")
