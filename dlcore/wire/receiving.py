"""The receiving half of both ends: memory for bytes, whole frames, and the limit of silence.

Small frames come through a scratch buffer that all connections of an event loop may share: between
`get_buffer` and `received` no other connection uses it.  A big payload gets memory of its exact
size, and the bytes are received straight into it.  Bytes that arrived together with the frame's
head pass through the scratch buffer first.  A payload gets its memory only after its header and
fields were checked.

Fresh pages, which the kernel has to zero, cost as much as the copy of the received bytes into them.
Pages that were used a moment ago are also in the cache.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from dlcore.base.errors import BookieUnavailableError
from dlcore.wire.messages import HEADER, Expected, Header, Ping, check_head, decode_header

if TYPE_CHECKING:
    from numpy.typing import NDArray


SCRATCH_BYTES = 64 * 1024
_KEPT_BYTES_MAX = 16 * 1024 * 1024
"""Bytes that a reader of a log has on the way and ahead of its caller."""
_SIZE_MIN = 256 * 1024
"""Smaller payloads get memory from the C library each time."""
_ROUND_BYTES = 64 * 1024
_WASTE_SHARE_MAX = 4
"""A payload leaves at most 1 / `_WASTE_SHARE_MAX` of its memory unused."""


class ReceiveMemory:
    """The memory that all connections of one event loop receive into.

    Memory is lent: each payload is received through a loan, an array object of its own that stands
    for the memory.  Each object that refers to the payload (a view, an Arrow or numpy array of it,
    a slice of these) holds the buffer of the loan, and with it the loan.  A weak reference shows
    when nothing holds the loan any more; then the memory can be lent again.  Holders may release it
    in any thread; only the event loop takes memory.

    Args:
        kept_bytes_max: most memory that is kept for reuse, whether it is lent or not.
    """

    def __init__(self, kept_bytes_max: int = _KEPT_BYTES_MAX) -> None:
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._kept_bytes_max = kept_bytes_max
        self._kept: list[_Kept] = []
        self.kept_bytes = 0

    def take(self, size: int) -> memoryview:
        """Return `size` bytes of memory with arbitrary contents."""
        # The C library reuses small blocks by itself; it returns large ones to the kernel.
        if size < _SIZE_MIN:
            return np.empty(size, np.uint8).data
        for kept in self._kept:
            spare = kept.size - size
            if 0 <= spare <= kept.size // _WASTE_SHARE_MAX and kept.is_free():
                return kept.lend(size)
        # Rounded up, so that the next payload of about this size fits too.
        kept = _Kept(-(-size // _ROUND_BYTES) * _ROUND_BYTES)
        self._make_room(kept.size)
        # Memory beyond the bound is lent once, and goes back to the C library with its last view.
        if self.kept_bytes + kept.size <= self._kept_bytes_max:
            self.kept_bytes += kept.size
            self._kept.append(kept)
        return kept.lend(size)

    def forget_free(self) -> None:
        """Release all memory that nothing refers to."""
        self._kept = [kept for kept in self._kept if not kept.is_free()]
        self.kept_bytes = sum(kept.size for kept in self._kept)

    def _make_room(self, size: int) -> None:
        """Release free memory of other sizes, the oldest first, if `size` bytes need it."""
        remaining: list[_Kept] = []
        for kept in self._kept:
            is_full = self.kept_bytes + size > self._kept_bytes_max
            if is_full and kept.is_free():
                self.kept_bytes -= kept.size
            else:
                remaining.append(kept)
        self._kept = remaining


class _Kept:
    """Memory that is lent to one payload at a time."""

    __slots__ = ("_array", "_loan", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._array = np.empty(size, np.uint8)
        self._loan: weakref.ref[NDArray[np.uint8]] | None = None

    def is_free(self) -> bool:
        """Return whether nothing refers to the last loan."""
        return self._loan is None or self._loan() is None

    def lend(self, size: int) -> memoryview:
        # Only the buffer of the loan is returned.  A slice of a numpy array refers to the base of
        # that array, so a slice of the loan would not hold the loan.
        loan = self._array[:size]
        self._loan = weakref.ref(loan)
        return loan.data


_BIG_BYTES = 32 * 1024
"""A payload of at least this size is received into a buffer of its own."""
_PEEK_BYTES = 16 * 1024
"""Bytes to read after a big frame: most likely another head, whose payload must not be copied."""

_KEPT_SHARE_MAX = 8
"""A payload keeps at most this many times its size of the memory that it was received with."""
_NO_PAYLOAD = memoryview(b"")


class Frame(NamedTuple):
    """One whole frame."""

    header: Header
    fields: bytes
    payload: memoryview


class Room(Protocol):
    """Bounds the memory of big payloads over many connections."""

    def take(self, size: int) -> bool:
        """Return whether the next payload may have its memory; if not, ask again later."""
        ...

    def give(self) -> None:
        """Note that the payload is whole."""
        ...


class _Partial:
    """A big frame whose payload has not arrived in full."""

    __slots__ = ("fields", "filled", "header", "payload")

    def __init__(self, header: Header, fields: bytes, head: memoryview, memory: memoryview) -> None:
        self.header = header
        self.fields = fields
        self.payload = memory
        self.filled = len(head)
        self.payload[: self.filled] = head


class Assembly:
    """The receiving half of a connection; it returns a frame only when all its bytes were received.

    Args:
        memory: the memory for received bytes.
        expected: the kinds of frames that may come; others are refused by their header.
        room: asked before a big payload gets memory; while it refuses, `next_frame` returns None,
            and the caller must not receive.
    """

    def __init__(self, memory: ReceiveMemory, expected: Expected, room: Room | None = None) -> None:
        self.expected = expected
        self._memory = memory
        self._room = room
        self._scratch = memory.scratch
        self._data = b""
        self._position = 0
        self._partial: _Partial | None = None
        self._was_big = False

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Return the buffer for the next bytes; never empty while `next_frame` returns None.

        A transport may call it as `asyncio.BufferedProtocol.get_buffer`.
        """
        partial = self._partial
        if partial is not None and partial.filled < len(partial.payload):
            return partial.payload[partial.filled :]
        # After a big payload most likely another one comes: read little more than its head here,
        # so that its bytes go straight into its own memory and need no copy.
        return self._scratch[:_PEEK_BYTES] if self._was_big else self._scratch

    def received(self, count: int) -> None:
        """Note that `count` bytes were written to the buffer that `get_buffer` returned last."""
        partial = self._partial
        if partial is not None and partial.filled < len(partial.payload):
            partial.filled += count
            return
        self._data = self._data[self._position :] + self._scratch[:count]
        self._position = 0

    def close(self) -> None:
        """Release the received bytes: no more will come."""
        self._partial = None
        self._data, self._position = b"", 0

    def next_frame(self) -> Frame | None:
        """Return the next frame if it is whole.

        Raises:
            WireError: the bytes are not a frame.
        """
        if self._partial is not None:
            return self._take_partial()
        data, start = self._data, self._position
        if len(data) - start < HEADER.size:
            return None
        header = decode_header(data, start, self.expected)
        body = start + HEADER.size + header.fields_bytes
        if len(data) < body:
            return None
        end = body + header.payload_bytes
        if len(data) < end and header.payload_bytes < _BIG_BYTES:
            return None
        # Checked before memory is taken: a damaged length must not reserve any.
        fields = check_head(data, start, header)
        payload = memoryview(data)[body:end] if header.payload_bytes else _NO_PAYLOAD
        if len(data) < end:
            if self._room is not None and not self._room.take(header.payload_bytes):
                return None
            memory = self._memory.take(header.payload_bytes)
            # All received bytes are in the partial frame now: the frame ends beyond them.
            self._partial = _Partial(header, fields, payload, memory)
            self._data, self._position = b"", 0
            return None
        # A small view would keep all received bytes in memory for as long as it lives.
        if 0 < len(payload) * _KEPT_SHARE_MAX < len(data):
            payload = memoryview(bytes(payload))
        self._position = end
        self._was_big = False
        return Frame(header, fields, payload)

    def _take_partial(self) -> Frame | None:
        partial = self._partial
        assert partial is not None
        if partial.filled < len(partial.payload):
            return None
        self._partial = None
        self._was_big = True
        if self._room is not None:
            self._room.give()
        return Frame(partial.header, partial.fields, partial.payload.toreadonly())


LEAST_S = 0.001
"""The shortest delay: times are rounded, and without it a check could stay due for ever."""


class Keepalive:
    """How long one end hears nothing of the other: after `silence_s` it gives the other up.

    An end that receives nothing for half of that time sends a PING, and waits as long again.  The
    other side answers at once, whatever else it does.  Silence therefore means that it is frozen,
    gone, or out of reach.  If this end asks late, because its own process stood still, the other
    side gets the same time for its answer.
    """

    def __init__(self, silence_s: float, *, now_s: float) -> None:
        self._half_s = silence_s / 2
        self._heard_s = now_s
        self._asked_s: float | None = None  # time of a PING after which nothing came
        self._pings = 0

    def heard(self, now_s: float) -> None:
        """Note that bytes were received."""
        self._heard_s = now_s
        self._asked_s = None

    def quiet_s(self, now_s: float) -> float:
        """Return for how long nothing was received."""
        return now_s - self._heard_s

    def check(self, now_s: float) -> Ping | None:
        """Return the PING to send now, if any; call this when it is due.

        Raises:
            BookieUnavailableError: the other side is silent.
        """
        if now_s < self._patient_until_s:
            return None
        if self._asked_s is not None:
            quiet_s = self.quiet_s(now_s)
            raise BookieUnavailableError(
                f"not a byte for {quiet_s:.1f} s: the other side is silent"
            )
        self._asked_s = now_s
        self._pings += 1
        return Ping(self._pings)

    def due_s(self, now_s: float) -> float:
        """Return when to call `check` next, after `now_s`."""
        return max(self._patient_until_s, now_s + LEAST_S)

    @property
    def _patient_until_s(self) -> float:
        return (self._heard_s if self._asked_s is None else self._asked_s) + self._half_s
