"""A process that stands before a server and lets everything arrive later, each way.

`python -m benchmarks.delay_proxy PORT DELAY_S` prints the port it listens on, and ends when its
standard input does.  Bytes sent together arrive together: the delay costs a round trip, and no
throughput.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"


class _Side(asyncio.Protocol):
    """One end of a connection: passes on to the other end what comes, a while later."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None
        self._early: list[bytes] = []  # what came before the other end was there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        # Timers of one delay run in the order in which they were set.
        self._loop.call_later(self._delay_s, self._pass, data)

    def _pass(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early.append(data)
            return
        self.other.transport.write(data)

    def join(self, other: _Side) -> None:
        """Take `other` for the other end."""
        self.other = other
        early, self._early = self._early, []
        for data in early:
            self._pass(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


async def serve(port: int, delay_s: float) -> None:
    """Serve until the standard input ends."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def connect(client: _Side) -> None:
        try:
            _, server = await loop.create_connection(lambda: _Side(delay_s), HOST, port)
        except OSError:
            assert client.transport is not None
            client.transport.abort()
            return
        server.join(client)
        client.join(server)

    def accept() -> _Side:
        client = _Side(delay_s)
        task = loop.create_task(connect(client))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return client

    listener = await loop.create_server(accept, HOST, 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    with suppress(asyncio.CancelledError):
        await asyncio.to_thread(sys.stdin.read)
    listener.close()


@contextmanager
def delay_proxy(server: str, *, delay_s: float) -> Iterator[str]:
    """Run the proxy before `server` (host:port); yield its own address."""
    port = server.rpartition(":")[2]
    command = [sys.executable, "-m", "benchmarks.delay_proxy", port, str(delay_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield f"{HOST}:{int(process.stdout.readline())}"
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=30)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
