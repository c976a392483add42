"""Makes whole frames of received bytes, and chooses the memory that receives them.

Small frames come through a scratch buffer that all connections of an event loop may share: between
`get_buffer` and `received` no other connection uses it.  A big payload gets memory of its exact
size, and the bytes are received straight into it.  Bytes that arrived together with the frame's
head pass through the scratch buffer first.  A payload gets its memory only after its header and
fields were checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from dlcore.wire.messages import HEADER, Expected, Header, check_head, decode_header

if TYPE_CHECKING:
    from dlcore.wire.receive_memory import ReceiveMemory

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
