"""The most that the machine can do: its disk, and a bare framed round trip."""

from __future__ import annotations

import asyncio
import os
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from uuid import uuid4

import crc32c

from benchmarks.bare_server import CACHED_BYTES, Ask, BareClient
from bookie.disks.real import RealDisk
from bookie.files.format import RECORD_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from bookie.disks.real_file import RealFile

T = TypeVar("T")

MIB = 1024 * 1024
_BLOCK = os.urandom(MIB)
_BLOCKS_IN_FLIGHT = 8
_BLOCKS_PER_APPEND = 4
_CHUNKS_AHEAD = 2
_CHUNKS_KEPT = 8
_FILE_CHUNKS = [b"%d" % number for number in range(CACHED_BYTES // MIB)]
_FILE_HEADER_BYTES = struct.Struct(">12xI")
_RECORD_MAGIC = b"\xb1\x0c"
_PAYLOAD_BYTES = struct.Struct(">4xI")


async def disk_rate(folder: Path, *, total_bytes: int, files: int) -> float:
    """Return MB/s of writing so much to each of several files at once, as bookies do it.

    Each on a `RealDisk` of its own, each append durable before the next one.  The files stay until
    `folder` goes, as a log's files do.  Space that was just freed is another matter: virtual disks
    and their caches take it several times faster.
    """
    folders = [folder / f"raw-{uuid4().hex}" for _ in range(files)]
    for each in folders:
        each.mkdir()
    disks = [RealDisk(each) for each in folders]
    opened = [await disk.create("raw", []) for disk in disks]

    async def append_all(file: RealFile) -> None:
        for _ in range(total_bytes // (_BLOCKS_PER_APPEND * MIB)):
            await file.append([_BLOCK] * _BLOCKS_PER_APPEND)

    started = time.perf_counter()
    await asyncio.gather(*map(append_all, opened))
    seconds = time.perf_counter() - started
    for file, disk in zip(opened, disks, strict=True):
        file.close()
        await disk.aclose()
    return total_bytes / 1e6 / seconds


def disk_read_s(path: Path) -> float:
    """Return the time to read a file in order."""
    buffer = bytearray(MIB)
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - started


def bare_replay_s(path: Path) -> float:
    """Return the time to read an entry log file and to sum each of its payloads, no more."""
    started = time.perf_counter()
    view = memoryview(path.read_bytes())
    (offset,) = _FILE_HEADER_BYTES.unpack_from(view)
    while view[offset : offset + 2] == _RECORD_MAGIC:  # behind the last one is space ahead
        (payload_bytes,) = _PAYLOAD_BYTES.unpack_from(view, offset)
        offset += RECORD_HEADER_BYTES
        crc32c.crc32c(view[offset : offset + payload_bytes])
        offset += payload_bytes
    return time.perf_counter() - started


class Server(NamedTuple):
    """A server process: where it listens, ``host:port``, and its id."""

    address: str
    pid: int


@contextmanager
def served(module: str, folder: Path) -> Iterator[Server]:
    """Run a server, a process of its own."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", module, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield Server(f"127.0.0.1:{int(process.stdout.readline())}", process.pid)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def bare_server(folder: Path) -> AbstractContextManager[Server]:
    """Run the bare server."""
    return served("benchmarks.bare_server", folder)


async def windowed_s(
    sent: Iterable[asyncio.Future[T]],
    *,
    in_flight: int,
    take: Callable[[T], object] = lambda _: None,
) -> float:
    """Return the time to send requests, so many not yet answered, and to `take` the answers.

    They are sent as they are taken out of `sent`, and their answers taken in that order.
    """
    waiting: deque[asyncio.Future[T]] = deque()
    started = time.perf_counter()
    requests = iter(sent)
    while True:
        if len(waiting) == in_flight:
            take(await waiting.popleft())
        request = next(requests, None)
        if request is None:
            break
        waiting.append(request)
    for each in waiting:
        take(await each)
    return time.perf_counter() - started


async def bare_write_rate(servers: Sequence[Server], *, total_bytes: int) -> float:
    """Return MB/s of sending the same bytes to each of the servers, which sum and write them."""
    clients = [await BareClient.connect(server.address) for server in servers]
    stores = (
        asyncio.gather(*(client.ask(Ask.STORE, _BLOCK) for client in clients))
        for _ in range(total_bytes // MIB)
    )
    seconds = await windowed_s(stores, in_flight=_BLOCKS_IN_FLIGHT)
    for client in clients:
        client.close()
    return total_bytes / 1e6 / seconds


async def bare_add_rate(
    address: str, kind: Ask, *, bodies: Sequence[bytes], in_flight: int
) -> float:
    """Return MB/s of sending `bodies` one after the other, so many not yet answered."""
    client = await BareClient.connect(address)
    adds = (client.ask(kind, body) for body in bodies)
    seconds = await windowed_s(adds, in_flight=in_flight)
    client.close()
    return sum(map(len, bodies)) / 1e6 / seconds


async def bare_read_rate(address: str, *, total_bytes: int) -> float:
    """Return MB/s of reading chunks from a server's memory, two on their way at a time."""
    return await _read_rate(address, Ask.GIVE, [b"%d" % MIB] * (total_bytes // MIB))


async def file_read_rate(address: str) -> float:
    """Return MB/s of reading a file of the page cache, two chunks on their way at a time.

    Unlike `bare_read_rate` it moves `CACHED_BYTES` that differ, instead of a few that stay in the
    processor's caches.
    """
    return await _read_rate(address, Ask.READ, _FILE_CHUNKS)


async def summed_read_rate(address: str, *, is_summed: bool) -> float:
    """Return MB/s of reads as `file_read_rate` does them, of which the server sums each chunk.

    `is_summed` says whether the client does as well, and the last chunks stay in the client's
    memory, as they do with a reader that is ahead of its caller.
    """
    kept: deque[memoryview] = deque(maxlen=_CHUNKS_KEPT)

    def take(chunk: memoryview) -> None:
        if is_summed:
            crc32c.crc32c(chunk)
        kept.append(chunk)

    return await _read_rate(address, Ask.FETCH, _FILE_CHUNKS, take)


async def _read_rate(
    address: str,
    kind: Ask,
    asks: Sequence[bytes],
    take: Callable[[memoryview], None] = lambda _: None,
) -> float:
    def check_and_take(chunk: memoryview) -> None:
        assert len(chunk) == MIB
        take(chunk)

    client = await BareClient.connect(address)
    chunks = (client.ask(kind, ask) for ask in asks)
    seconds = await windowed_s(chunks, in_flight=_CHUNKS_AHEAD, take=check_and_take)
    client.close()
    return len(asks) * MIB / 1e6 / seconds


async def round_trip_ms(
    addresses: Sequence[str], *, durable: bool, size_bytes: int, count: int
) -> float:
    """Return the median time of `count` calls, one after the other, that carry `size_bytes`.

    Each goes to all servers at once, and is over when all have answered.
    """
    payload = os.urandom(size_bytes)
    times = []
    clients = [await BareClient.connect(address) for address in addresses]
    kind = Ask.WRITE if durable else Ask.ECHO
    for _ in range(count + 1):
        started = time.perf_counter()
        for answer in [client.ask(kind, payload) for client in clients]:
            await answer
        times.append(time.perf_counter() - started)
    for client in clients:
        client.close()
    return statistics.median(times[1:]) * 1000
