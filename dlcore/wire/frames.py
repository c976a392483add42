"""Entry frames without copies: many in one buffer, one in several buffers, and their sending."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, overload

import numpy as np

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
