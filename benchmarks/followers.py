"""Many followers of one log in one process that computes little: what a proxy can carry is asked.

Each has a connection of its own and speaks just enough HTTP/2 to follow, with windows of gRPC's
usual size, of which it gives back what it has taken; a message that all get is decoded once.
Arrow's own clients would take more of the machine than the proxy.

``python -m benchmarks.followers ADDRESS LOG COUNT RECORDS`` prints ``ready`` once all have the
record 0, and when each has the last one, JSON: how late records came, in ms, and how many missed.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import time
from typing import Any, NoReturn, cast

import pyarrow as pa
import uvloop

from dlcore.base.proto import flight_pb2 as pb

STAMP = struct.Struct(">qq")
"""The beginning of a record: the time of its writing in ns since the epoch, and its number."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME = struct.Struct(">IBI")  # length and type, which share four bytes, flags, stream
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_HEADERS, _END_STREAM, _PADDED = 1, 4, 1, 8
_WINDOW_BYTES = 65_535
"""HTTP/2's first window, of a connection and of a stream."""
_GRPC = struct.Struct(">BI")
_CONNECTING_MAX = 50


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return _FRAME.pack(len(body) << 8 | kind, flags, stream) + body


def _header(name: bytes, value: bytes) -> bytes:
    """Return a header field, neither compressed nor kept (RFC 7541, 6.2.2)."""
    assert len(name) < 127
    assert len(value) < 127
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def _request(address: str, ticket: bytes) -> bytes:
    """Return what a follower sends first: its settings, and the call."""
    headers = b"".join(
        _header(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/arrow.flight.protocol.FlightService/DoGet"),
            (b":authority", address.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    )
    message = pb.Ticket(ticket=ticket).SerializeToString()
    return b"".join(
        (
            _PREFACE,
            _frame(_SETTINGS, 0, 0, b""),
            _frame(_HEADERS, _END_HEADERS, 1, headers),
            _frame(_DATA, _END_STREAM, 1, _GRPC.pack(0, len(message)) + message),
        )
    )


class Crowd:
    """The records that all followers have seen."""

    def __init__(self, count: int, records: int) -> None:
        self.records = records
        self._count = count
        self._notified = self._ended = 0
        self.late_ms: list[float] = []
        self.ready = asyncio.Event()
        self.done = asyncio.Event()
        self._schema: pa.Schema | None = None
        self._known: dict[bytes, list[tuple[int, int]]] = {}

    def stamps_of(self, message: bytes) -> list[tuple[int, int]]:
        """Return the stamps of the records in a message."""
        known = self._known.get(message)
        if known is None:
            known = self._known[message] = self._decoded(pb.FlightData.FromString(message))
        return known

    def _decoded(self, data: pb.FlightData) -> list[tuple[int, int]]:
        header = data.data_header
        prefix = struct.pack("<Ii", 0xFFFFFFFF, len(header))
        message = pa.ipc.read_message(prefix + header + data.data_body)
        if message.type == "schema":
            self._schema = pa.ipc.read_schema(message)
            return []
        batch = pa.ipc.read_record_batch(message, self._schema)
        return [STAMP.unpack_from(value) for value in batch.column("value").to_pylist()]

    def notify(self) -> None:
        """Note that a follower has the record 0."""
        self._notified += 1
        if self._notified == self._count:
            self.ready.set()

    def ended(self) -> None:
        """Note that a follower has the last record."""
        self._ended += 1
        if self._ended == self._count:
            self.done.set()


class Follower(asyncio.Protocol):
    """One connection."""

    def __init__(self, crowd: Crowd, request: bytes) -> None:
        self._crowd = crowd
        self._request = request
        self._frames = bytearray()
        self._messages = bytearray()
        self._next = 0
        self._taken_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail if it ends early: only this process may end it."""
        assert self._next == self._crowd.records, f"a follower lost its connection: {exc}"

    def data_received(self, data: bytes) -> None:
        """Take frames."""
        frames = self._frames
        frames += data
        at = 0
        while len(frames) - at >= _FRAME.size:
            length_kind, flags, _ = _FRAME.unpack_from(frames, at)
            end = at + _FRAME.size + (length_kind >> 8)
            if len(frames) < end:
                break
            self._take(length_kind & 255, flags, bytes(frames[at + _FRAME.size : end]))
            at = end
        del frames[:at]

    def _take(self, kind: int, flags: int, body: bytes) -> None:
        if kind == _DATA:
            assert not flags & _PADDED
            self._give_back(len(body))
            self._take_data(body)
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._transport.write(_frame(kind, _ACK, 0, body if kind == _PING else b""))
        elif kind in (_RST, _GOAWAY):
            raise AssertionError(f"the proxy ended a follower: frame {kind}, {body!r}")

    def _give_back(self, size_bytes: int) -> None:
        """Widen both windows again once half of them was used."""
        self._taken_bytes += size_bytes
        if self._taken_bytes > _WINDOW_BYTES // 2:
            more = struct.pack(">I", self._taken_bytes)
            self._transport.write(_frame(_WINDOW, 0, 0, more) + _frame(_WINDOW, 0, 1, more))
            self._taken_bytes = 0

    def _take_data(self, body: bytes) -> None:
        messages, crowd = self._messages, self._crowd
        messages += body
        while len(messages) >= _GRPC.size:
            end = _GRPC.size + _GRPC.unpack_from(messages)[1]
            if len(messages) < end:
                return
            now_ns = time.time_ns()
            for written_ns, number in crowd.stamps_of(bytes(messages[_GRPC.size : end])):
                assert number == self._next, f"a follower has {number} after {self._next - 1}"
                self._next += 1
                if number:
                    crowd.late_ms.append((now_ns - written_ns) / 1e6)
                else:
                    crowd.notify()
                if self._next == crowd.records:
                    crowd.ended()
            del messages[:end]


def _give_up(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> NoReturn:
    """End the process: what one follower misses counts."""
    print(context, file=sys.stderr)
    os._exit(1)


async def follow(address: str, log: str, count: int, records: int) -> None:
    """Follow, until all have all records."""
    crowd = Crowd(count, records)
    ticket = {"log": log, "start": {"dlsn": "1:0:0"}, "follow": True}
    request = _request(address, json.dumps(ticket).encode())
    host, port = address.split(":")
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_give_up)
    turns = asyncio.Semaphore(_CONNECTING_MAX)

    async def connect() -> None:
        async with turns:
            await loop.create_connection(lambda: Follower(crowd, request), host, int(port))

    await asyncio.gather(*(connect() for _ in range(count)))
    await crowd.ready.wait()
    print("ready", flush=True)
    await crowd.done.wait()
    late_ms = sorted(crowd.late_ms)
    print(
        json.dumps(
            {
                "p50_ms": late_ms[len(late_ms) // 2],
                "p99_ms": late_ms[len(late_ms) * 99 // 100],
                "deliveries": len(late_ms),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    uvloop.run(follow(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
