"""Encodes and decodes parts of a message's fields and payload, and reports wrong ones."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dlcore.base.errors import BadRequestError
from dlcore.wire.frames import FrameRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Buffer: TypeAlias = bytes | memoryview
SIZE_BYTES = 4
TEXT_BYTES_MAX = 1024
_SIZE = struct.Struct(">I")
_TEXT = struct.Struct(">H")
RUN_FRAMES_MIN = 16
"""This many frames or more are split without a step for each."""


class WireError(BadRequestError):
    """The other side broke the protocol; the connection ends."""


def cut(detail: str) -> bytes:
    """Return text that fits a frame, cut between two characters."""
    text = detail.encode(errors="replace")
    return text[:TEXT_BYTES_MAX].decode(errors="ignore").encode()


def text(text: str) -> bytes:
    """Return the length of the text, then the text."""
    return blob(text.encode())


def blob(data: bytes) -> bytes:
    """Return the length of the bytes, then the bytes."""
    if len(data) > TEXT_BYTES_MAX:
        raise BadRequestError(f"{data[:40]!r}… has {len(data)} bytes, at most {TEXT_BYTES_MAX}")
    return _TEXT.pack(len(data)) + data


def split(sizes: Buffer, payload: memoryview, *, bytes_min: int) -> Sequence[memoryview]:
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


def blobs(data: Buffer, *, count: int) -> list[bytes]:
    """Return the `count` blobs that `data` consists of."""
    found: list[bytes] = []
    for _ in range(count):
        (size,) = _TEXT.unpack_from(data)
        data = data[_TEXT.size :]
        if size > len(data):
            raise WireError(f"a text of {size} bytes where {len(data)} are left")
        found.append(bytes(data[:size]))
        data = data[size:]
    if data:
        raise WireError(f"{len(data)} bytes too many")
    return found
