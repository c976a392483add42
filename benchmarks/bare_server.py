"""A bare framed server, and its client: as little as asyncio needs to move messages.

A message is its size, what is asked, and a payload; an answer is its size and a payload, in order.
`python -m benchmarks.bare_server FOLDER` prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections import deque
from enum import IntEnum
from pathlib import Path
from typing import cast

import crc32c
import numpy as np
import uvloop

_HEADER = struct.Struct(">II")
_SMALL_BYTES = 64 * 1024


class Ask(IntEnum):
    """What is asked of the server."""

    ECHO = 1
    WRITE = 2
    """Write the payload and sync it; the answer is empty."""
    TAKE = 3
    """Take the payload and do nothing with it; the answer is empty."""
    GIVE = 4
    """Answer with as many bytes from memory as the payload says."""
    STORE = 5
    """Sum the payload and write it, without a sync; the answer is empty."""


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


class BareServer(Framed):
    """Answers each message at once."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
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
            case Ask.GIVE:
                self.send(0, memoryview(self._memory)[: int(bytes(payload))])


class BareClient(Framed):
    """Asks, any number of times at once."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[asyncio.Future[int]] = deque()

    @classmethod
    async def connect(cls, address: str) -> BareClient:
        """Connect to host:port."""
        host, port = address.split(":")
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(cls, host, int(port))
        return client

    def ask(self, kind: Ask, payload: bytes) -> asyncio.Future[int]:
        """Return how many bytes come back, once they have."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self.send(kind, payload)
        return future

    def take(self, kind: int, payload: memoryview) -> None:
        """Complete what was asked first."""
        self._waiting.popleft().set_result(len(payload))

    def close(self) -> None:
        """Hang up."""
        assert self.transport is not None
        self.transport.abort()


async def serve(folder: Path) -> None:
    """Serve on a free port until standard input ends."""
    descriptor = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BareServer(descriptor), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()
    os.close(descriptor)


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
