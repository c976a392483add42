"""A bare framed server, and its client: as little as asyncio needs to move messages.

A message is its size, what is asked, and a payload; an answer is its size and a payload, in order.
`python -m benchmarks.bare_server FOLDER` prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import crc32c
import numpy as np
import uvloop

from dlcore.base import server_process

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_BYTES = 1024 * 1024
CACHED_BYTES = 256 * CHUNK_BYTES
_BLOCK_BYTES = 4096
_DIRECT_FILE_BYTES = 1024 * CHUNK_BYTES
_DIRECT_WRITE_BYTES_MAX = 8 * CHUNK_BYTES
_HEADER = struct.Struct(">II")
_SMALL_BYTES = 64 * 1024


class Ask(IntEnum):
    """The requests to the server."""

    ECHO = 1
    WRITE = 2
    """Write the payload and sync it; the answer is empty."""
    TAKE = 3
    """Take the payload and do nothing with it; the answer is empty."""
    GIVE = 4
    """Answer with as many bytes from memory as the payload says."""
    STORE = 5
    """Sum the payload and write it, without a sync; the answer is empty."""
    KEEP = 6
    """Sum the payload and write it past the page cache, together with what came while the last
    write was under way; the answer is empty."""
    READ = 7
    """Answer with 1 MiB of a file in the page cache, the payload says which."""
    FETCH = 8
    """The same, and sum it."""
    FOLLOW = 9
    """Answer at once, and with each payload that is passed on from now on; of a bare tail."""
    PASS = 10
    """Pass on the first payload kept that was not passed on yet; no answer."""


class Framed(asyncio.BufferedProtocol):
    """Receives messages: small ones through one buffer, a large one into its own."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._small = memoryview(bytearray(_SMALL_BYTES))
        self._rest = b""
        self._large: memoryview | None = None
        self._filled = 0
        self._kind = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=8 * 1024 * 1024)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self._small if self._large is None else self._large[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes."""
        if self._large is not None:
            self._filled += nbytes
            if self._filled == len(self._large):
                large, self._large = self._large, None
                self.take(self._kind, large)
            return
        data = self._rest + bytes(self._small[:nbytes])
        position = 0
        while len(data) - position >= _HEADER.size:
            size, kind = _HEADER.unpack_from(data, position)
            start = position + _HEADER.size
            if len(data) < start + size:
                if size > _SMALL_BYTES // 2:
                    self._large = np.empty(size, np.uint8).data
                    self._filled = len(data) - start
                    self._large[: self._filled] = data[start:]
                    self._kind = kind
                    position = len(data)
                break
            position = start + size
            self.take(kind, memoryview(data)[start:position])
        self._rest = data[position:]

    def send(self, kind: int, payload: bytes | memoryview) -> None:
        """Send a message."""
        assert self.transport is not None
        self.transport.writelines([_HEADER.pack(len(payload), kind), payload])

    def take(self, kind: int, payload: memoryview) -> None:
        """Take a message."""
        raise NotImplementedError


class DirectFile:
    """A file written in whole blocks past the page cache, by one thread."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(self._descriptor, 0, _DIRECT_FILE_BYTES)
        self._memory = mmap.mmap(-1, _DIRECT_WRITE_BYTES_MAX)
        self._offset = 0
        self._waiting: deque[tuple[memoryview, Callable[[], None]]] = deque()
        self._writer = ThreadPoolExecutor(1)
        self._is_writing = False

    def append(self, data: memoryview, done: Callable[[], None]) -> None:
        """Write `data` soon, and call `done` then."""
        self._waiting.append((data, done))
        if not self._is_writing:
            self._write_on()

    def _write_on(self) -> None:
        self._is_writing = bool(self._waiting)
        if not self._is_writing:
            return
        batch: list[tuple[memoryview, Callable[[], None]]] = []
        size = 0
        while self._waiting and size + len(self._waiting[0][0]) <= _DIRECT_WRITE_BYTES_MAX:
            batch.append(self._waiting.popleft())
            size += len(batch[-1][0])

        def written(_future: asyncio.Future[None]) -> None:
            for _, done in batch:
                done()
            self._write_on()

        loop = asyncio.get_running_loop()
        buffers = [data for data, _ in batch]
        loop.run_in_executor(self._writer, self._write, buffers).add_done_callback(written)

    def _write(self, buffers: list[memoryview]) -> None:
        filled = 0
        for buffer in buffers:
            self._memory[filled : filled + len(buffer)] = buffer
            filled += len(buffer)
        size = -(-filled // _BLOCK_BYTES) * _BLOCK_BYTES
        self._offset = self._offset if self._offset + size <= _DIRECT_FILE_BYTES else 0
        with memoryview(self._memory) as view:
            os.pwrite(self._descriptor, view[:size], self._offset)
        self._offset += size


class Files:
    """The buffers of a bare server's connections, each made when it is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.appended = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @cached_property
    def direct(self) -> DirectFile:
        """A file past the page cache."""
        return DirectFile(self._folder / "direct")

    @cached_property
    def cached(self) -> int:
        """A file in the page cache."""
        descriptor = os.open(self._folder / "cached", os.O_RDWR | os.O_CREAT)
        for chunk in range(CACHED_BYTES // CHUNK_BYTES):
            os.pwrite(descriptor, os.urandom(CHUNK_BYTES), chunk * CHUNK_BYTES)
        return descriptor


class BareServer(Framed):
    """Answers each message at once."""

    def __init__(self, files: Files) -> None:
        super().__init__()
        self._files = files
        self._descriptor = files.appended
        self._memory = os.urandom(4 * 1024 * 1024)

    def connection_lost(self, error: Exception | None) -> None:
        """Give the space back that a round took."""
        os.ftruncate(self._descriptor, 0)

    def take(self, kind: int, payload: memoryview) -> None:
        """Answer."""
        match kind:
            case Ask.ECHO:
                self.send(0, payload)
            case Ask.WRITE:
                os.write(self._descriptor, payload)
                os.fdatasync(self._descriptor)
                self.send(0, b"")
            case Ask.STORE:
                crc32c.crc32c(payload)
                os.write(self._descriptor, payload)
                self.send(0, b"")
            case Ask.TAKE:
                self.send(0, b"")
            case Ask.KEEP:
                crc32c.crc32c(payload)
                self._files.direct.append(payload, partial(self.send, 0, b""))
            case Ask.READ | Ask.FETCH:
                chunk = np.empty(CHUNK_BYTES, np.uint8).data
                os.preadv(self._files.cached, [chunk], int(bytes(payload)) * CHUNK_BYTES)
                if kind == Ask.FETCH:
                    crc32c.crc32c(chunk)
                self.send(0, chunk)
            case Ask.GIVE:
                self.send(0, memoryview(self._memory)[: int(bytes(payload))])


class BareClient(Framed):
    """Asks, any number of times at once."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[asyncio.Future[memoryview]] = deque()

    @classmethod
    async def connect(cls, address: str) -> BareClient:
        """Connect to host:port."""
        host, port = address.split(":")
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(cls, host, int(port))
        return client

    def ask(self, kind: Ask, payload: bytes) -> asyncio.Future[memoryview]:
        """Return what comes back, once it has."""
        future: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self.send(kind, payload)
        return future

    def take(self, kind: int, payload: memoryview) -> None:
        """Complete what was asked first."""
        self._waiting.popleft().set_result(payload)

    def close(self) -> None:
        """Hang up."""
        assert self.transport is not None
        self.transport.abort()


async def serve(folder: Path, server_class: type[BareServer] = BareServer) -> None:
    """Serve on a free port until standard input ends."""
    files = Files(folder)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: server_class(files), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    server_process.keep_what_is_freed()
    uvloop.run(serve(Path(sys.argv[1])))
