"""A bare tail: records go to bare servers at a rate, and from one of them to its follower.

`python -m benchmarks.bare_tail FOLDER` prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import uvloop

from benchmarks.bare_server import Ask, BareClient, BareServer, serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.bare_server import Files
    from dlcore.base.records import LogRecord


class TailServer(BareServer):
    """Keeps what it is given, and passes it on to its followers on demand."""

    _followers: ClassVar[list[TailServer]] = []

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        self._kept: deque[memoryview] = deque()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the follower."""
        super().connection_lost(error)
        self._followers.clear()

    def take(self, kind: int, payload: memoryview) -> None:
        """Answer."""
        match kind:
            case Ask.FOLLOW:
                self._followers.append(self)
                self.send(0, b"")
            case Ask.PASS:
                passed = self._kept.popleft()
                for follower in self._followers:
                    follower.send(0, passed)
            case _:
                if self._followers:
                    self._kept.append(payload)
                super().take(kind, payload)


class TailFollower(BareClient):
    """Notes when it has which record; they begin at 1, and are of one size."""

    def __init__(self, record_bytes: int, count: int) -> None:
        super().__init__()
        self._record_bytes = record_bytes
        self._count = count
        self.delivered: dict[int, float] = {}
        self.is_heard = asyncio.Event()
        self.has_all = asyncio.Event()

    def take(self, kind: int, payload: memoryview) -> None:
        """Note the records of a message."""
        now = time.perf_counter()
        self.is_heard.set()
        for _ in range(len(payload) // self._record_bytes):
            self.delivered[len(self.delivered) + 1] = now
        if len(self.delivered) == self._count:
            self.has_all.set()


async def follow(address: str, *, record_bytes: int, count: int) -> TailFollower:
    """Connect to host:port, and ask for so many records as they are passed on."""
    host, port = address.split(":")
    _, follower = await asyncio.get_running_loop().create_connection(
        lambda: TailFollower(record_bytes, count), host, int(port)
    )
    follower.send(Ask.FOLLOW, b"")
    await follower.is_heard.wait()
    return follower


class TailWriter:
    """Sends what waits to each server, one message at a time.

    It is durable when so many have answered; the first server then gets the order to pass it on.
    """

    def __init__(self, servers: Sequence[BareClient], *, answers: int) -> None:
        self._servers = servers
        self._answers = answers
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._missing = 0
        self.durable: dict[int, float] = {}
        """When which record was; they begin at 1."""

    def write(self, record: LogRecord) -> asyncio.Future[None]:
        """Return what is done when the record is durable."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((record.payload, done))
        if not self._missing:
            self._send()
        return done

    def _send(self) -> None:
        sent, self._waiting = self._waiting, []
        self._missing = self._answers
        payload = b"".join(body for body, _ in sent)
        waiting = [done for _, done in sent]
        for server in self._servers:
            server.ask(Ask.KEEP, payload).add_done_callback(partial(self._answered, waiting))

    def _answered(
        self, waiting: Sequence[asyncio.Future[None]], _: asyncio.Future[memoryview]
    ) -> None:
        if waiting[0].done():
            return  # the others were quicker
        self._missing -= 1
        if not self._missing:
            now = time.perf_counter()
            self._servers[0].send(Ask.PASS, b"")
            for done in waiting:
                self.durable[len(self.durable) + 1] = now
                done.set_result(None)
            if self._waiting:
                self._send()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), TailServer))
