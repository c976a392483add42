"""The Flight protocol twice: pyarrow's own server, and grpc.aio that frames its messages by hand.

DoPut acknowledges how many records were taken, at once or when a log has them durably, in the words
of a proxy; DoGet gives each follower what a clock makes, and that of grpc.aio, by a ticket
``{"batches", "rows"}``, one batch so many times, or, with a ``source``, the chunks of a bare server
as values of batches.  None does more: what is compared are the roads.

`python -m benchmarks.flight_servers pyarrow|aio [URI]` prints its port, serves until its standard
input ends, and answers the action `usage` with its CPU seconds, memory, threads and followers.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import resource
import struct
import sys
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import crc32c
import grpc
import pyarrow as pa
import pyarrow.flight as fl
import uvloop

from benchmarks.bare_server import CHUNK_BYTES, Ask, BareClient
from dlcore.backends.direct.namespace import open_namespace
from dlcore.base import server_process
from dlcore.base.config import LogConfig, QuorumConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

SCHEMA = pa.schema([("value", pa.binary())])
_METHOD = "/arrow.flight.protocol.FlightService/"
_ROW_BYTES = 1024
_READY = b'{"ready": {}}'
_CHUNKS_AHEAD = 2


def _acked(count: int) -> bytes:
    return b'{"acked": %d}' % count


class Log:
    """Where batches go: nowhere, or to one log; call it on the loop."""

    def __init__(self) -> None:
        self.writer: Any = None
        self.started = time.time_ns()

    async def open(self, uri: str, name: str) -> None:
        """Take a log."""
        quorum = QuorumConfig.of_replication_factor(3)
        namespace = await open_namespace(uri, config=LogConfig(quorum=quorum))
        log = await namespace.open_log(name, create_if_missing=True)
        self.writer = await log.open_writer()

    def append(self, batch: pa.RecordBatch, acknowledge: Callable[[], None]) -> None:
        """Store a batch, or say that it is."""
        if self.writer is None:
            acknowledge()
            return
        now = pa.array([time.time_ns() // 1000] * batch.num_rows, pa.int64())
        stored = self.writer.write_batch(
            pa.RecordBatch.from_arrays([now, batch.column("value")], names=["txid", "value"])
        )
        stored.add_done_callback(lambda done: acknowledge() if done.result() else None)


class Feed:
    """Entries made by a clock for all followers, kept and framed once."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.frames: list[bytes] = []
        self.followers = 0
        self.changed = threading.Condition()
        self.news = asyncio.Event()

    async def run(self, per_second: int, seconds: int) -> None:
        """Make so many batches, of one row that begins with the time."""
        await asyncio.sleep(1)
        for _ in range(per_second * seconds):
            row = struct.pack(">q", time.time_ns()) + bytes(_ROW_BYTES - 8)
            batch = pa.record_batch([pa.array([row], pa.binary())], schema=SCHEMA)
            with self.changed:
                self.batches.append(batch)
                self.frames.append(framed(batch.serialize()))
                self.changed.notify_all()
            self.news.set()
            self.news = asyncio.Event()
            await asyncio.sleep(1 / per_second)


def usage(feed: Feed) -> bytes:
    """Return what this process used until now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return json.dumps(
        {
            "cpu_s": used.ru_utime + used.ru_stime,
            "memory_mb": _peak_kb() / 1024,
            "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
            "followers": feed.followers,
        }
    ).encode()


def _peak_kb() -> int:
    # The other count, of `getrusage`, begins with what the parent had.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


# pyarrow


class PyarrowServer(fl.FlightServerBase):  # type: ignore[misc]
    """A thread of C++ per call; the log is on another, where the loop runs."""

    def __init__(self, log: Log, feed: Feed, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._log, self._feed, self._loop = log, feed, loop

    def do_put(self, _context: Any, _descriptor: Any, reader: Any, writer: Any) -> None:
        """Take batches; a second thread acknowledges where it is not done at once."""
        writer.write(_READY)
        if self._log.writer is None:
            count = 0
            for chunk in reader:
                count += chunk.data.num_rows
                writer.write(_acked(count))
            return
        acks: queue.SimpleQueue[int] = queue.SimpleQueue()
        answering = threading.Thread(target=_answer, args=(acks, writer))
        answering.start()
        taken = 0
        stored = threading.Semaphore(0)

        def acknowledge(row_count: int) -> None:
            acks.put(row_count)
            stored.release()

        for chunk in reader:
            stored_rows = partial(acknowledge, chunk.data.num_rows)
            self._loop.call_soon_threadsafe(self._log.append, chunk.data, stored_rows)
            taken += 1
        for _ in range(taken):
            stored.acquire()
        acks.put(0)
        answering.join()

    def do_get(self, _context: Any, _ticket: Any) -> Any:
        """Follow."""
        return fl.GeneratorStream(SCHEMA, self._follow())

    def _follow(self) -> Iterator[pa.RecordBatch]:
        feed, index = self._feed, 0
        feed.followers += 1
        try:
            while True:
                with feed.changed:
                    while index >= len(feed.batches):
                        feed.changed.wait()
                yield feed.batches[index]
                index += 1
        finally:
            feed.followers -= 1

    def do_action(self, _context: Any, action: Any) -> list[bytes]:
        """Tell the usage, or start the clock."""
        if action.type == "feed":
            per_second, seconds = json.loads(action.body.to_pybytes())
            asyncio.run_coroutine_threadsafe(self._feed.run(per_second, seconds), self._loop)
        return [usage(self._feed)]


def _answer(acks: queue.SimpleQueue[int], writer: Any) -> None:
    count = 0
    while row_count := acks.get():
        count += row_count
        writer.write(_acked(count))


# grpc.aio


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, data: Any) -> list[Any]:
    """Return a field of bytes of a protobuf message, in parts."""
    return [_varint(number << 3 | 2), _varint(len(data)), data]


def framed(message: pa.Buffer) -> bytes:
    """Return an Arrow message as FlightData."""
    view = memoryview(message)
    header_bytes = 8 + int.from_bytes(view[4:8], "little")
    return b"".join([*field(2, view[8:header_bytes]), *field(1000, view[header_bytes:])])


def fields(message: bytes) -> dict[int, memoryview]:
    """Return the fields of bytes of a protobuf message."""
    view, at, found = memoryview(message), 0, {}

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = view[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(view):
        number, size = varint() >> 3, varint()
        found[number] = view[at : at + size]
        at += size
    return found


class AioServer(grpc.GenericRpcHandler):
    """Coroutines on the loop on which the log is."""

    def __init__(self, log: Log, feed: Feed) -> None:
        self._log, self._feed = log, feed

    def service(self, details: Any) -> Any:
        """Return the handler of a method."""
        return {
            f"{_METHOD}DoPut": grpc.stream_stream_rpc_method_handler(self._do_put),
            f"{_METHOD}DoGet": grpc.unary_stream_rpc_method_handler(self._do_get),
            f"{_METHOD}DoAction": grpc.unary_stream_rpc_method_handler(self._do_action),
        }.get(details.method)

    async def _do_put(self, requests: AsyncIterator[bytes], context: Any) -> None:
        taken = stored = 0
        news, done = asyncio.Event(), False

        def acknowledge(row_count: int) -> None:
            nonlocal stored
            stored += row_count
            news.set()

        async def answer() -> None:
            reported = 0
            while not done or reported < taken:
                await news.wait()
                news.clear()
                if reported < stored:
                    reported = stored
                    await context.write(b"".join(field(1, _acked(reported))))

        await context.write(b"".join(field(1, _READY)))
        schema = SCHEMA
        answering = asyncio.create_task(answer())
        async for message in requests:
            parts = fields(message)
            header = parts[2]
            message = struct.pack("<iI", -1, len(header)) + bytes(header)
            if 1000 not in parts:
                schema = pa.ipc.read_schema(pa.py_buffer(message))
                continue
            message += parts[1000]
            batch = pa.ipc.read_record_batch(pa.py_buffer(message), schema)
            taken += batch.num_rows
            self._log.append(batch, partial(acknowledge, batch.num_rows))
        done = True
        news.set()
        await answering

    async def _do_get(self, message: bytes, context: Any) -> None:
        ticket = fields(message).get(1)
        if ticket:
            await self._send(context, **json.loads(bytes(ticket)))
            return
        feed, index = self._feed, 0
        feed.followers += 1
        try:
            await context.write(framed(SCHEMA.serialize()))
            while True:
                news = feed.news
                while index < len(feed.frames):
                    await context.write(feed.frames[index])
                    index += 1
                await news.wait()
        finally:
            feed.followers -= 1

    async def _send(self, context: Any, batches: int, rows: int, source: str | None = None) -> None:
        """Send a batch again and again: nothing is read or made for it, or its values alone."""
        txids = pa.array(range(rows), pa.int64())
        values = pa.array([os.urandom(_ROW_BYTES)] * rows, pa.binary())
        batch = pa.record_batch({"txid": txids, "value": values})
        await context.write(framed(batch.schema.serialize()))
        message = framed(batch.serialize())
        if source is not None:
            await _relay(context, message[:-CHUNK_BYTES], source, batches)
            return
        for _ in range(batches):
            await context.write(message)

    async def _do_action(self, message: bytes, context: Any) -> None:
        parts = fields(message)
        if bytes(parts[1]) == b"feed":
            self._feeding = asyncio.create_task(self._feed.run(*json.loads(bytes(parts[2]))))
        await context.write(b"".join(field(1, usage(self._feed))))


async def _relay(context: Any, head: bytes, source: str, count: int) -> None:
    """Send chunks of a bare server, summed at both ends, each behind the same head."""
    client = await BareClient.connect(source)
    chunks = deque(client.ask(Ask.FETCH, b"%d" % number) for number in range(_CHUNKS_AHEAD))
    for number in range(_CHUNKS_AHEAD, count + _CHUNKS_AHEAD):
        chunk = await chunks.popleft()
        if number < count:
            chunks.append(client.ask(Ask.FETCH, b"%d" % number))
        crc32c.crc32c(chunk)
        await context.write(b"".join([head, chunk]))
    client.close()


async def serve(kind: str, uri: str | None) -> None:
    """Serve on a free port until standard input ends."""
    log, feed = Log(), Feed()
    if uri is not None:
        await log.open(uri, kind)
    if kind == "pyarrow":
        server = PyarrowServer(log, feed, asyncio.get_running_loop())
        port = server.port
    else:
        aio = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        aio.add_generic_rpc_handlers([AioServer(log, feed)])
        port = aio.add_insecure_port("127.0.0.1:0")
        await aio.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # pyarrow's server waits for handlers, which cannot be cancelled


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    server_process.keep_what_is_freed()
    uvloop.run(serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
