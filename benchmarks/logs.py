"""Figures of the log library: bulk writes, the time of one append, the time to a tailing reader."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np
import pyarrow as pa
import uvloop

from benchmarks.figures import Figure, Target, measure
from benchmarks.limits import (
    MIB,
    bare_read_rate,
    bare_server,
    bare_write_rate,
    disk_rate,
    round_trip_ms,
    summed_read_rate,
)
from dlcore.backends.direct.namespace import open_namespace as open_namespace_async
from dlcore.base.config import LogConfig, QuorumConfig
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Callable,
        Coroutine,
        Iterable,
        Iterator,
        Sequence,
    )
    from contextlib import AbstractContextManager

    from dlcore.backends.direct.log import DirectLog
    from dlcore.base.access.tls import TlsFiles
    from dlcore.log.reading.reader import DirectReader
    from dlcore.log.writing.writer import DirectWriter
    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import DistributedLogManager as BlockingLogManager

COPIES = 3
CONFIG = LogConfig(quorum=QuorumConfig.of_replication_factor(COPIES))
"""All three copies are acknowledged, so that all three are in the time measured."""

WRITE_BYTES = 256 * MIB
"""The length of one round: long enough that the disk's own caches are not what is measured."""
SHORT_ROUNDS = 11
"""Where a round takes a fraction of a second, and differs from the next by a third."""
RECORD_BYTES = 1024
_BATCH_RECORDS = 1024
_LATENCY_COUNT = 300
MEMORY_MB_MAX = 300
GRPC_WRITE_CPU_S = 13.5
"""The CPU of client and bookies per GB of user data, written three times, with entries on gRPC."""
GRPC_READ_CPU_S = 3.0
"""The CPU of client and bookies per GB of user data read, with entries on gRPC."""


def record_batches(*, total_bytes: int, record_bytes: int) -> list[pa.RecordBatch]:
    """Return records of `record_bytes` random bytes each, in batches, txids from 0."""
    batches = []
    offsets = pa.array(np.arange(_BATCH_RECORDS + 1, dtype=np.int32) * record_bytes)
    for first in range(0, total_bytes // record_bytes, _BATCH_RECORDS):
        payload = pa.BinaryArray.from_buffers(
            pa.binary(),
            _BATCH_RECORDS,
            [None, offsets.buffers()[1], pa.py_buffer(os.urandom(_BATCH_RECORDS * record_bytes))],
        )
        txid = pa.array(np.arange(first, first + _BATCH_RECORDS, dtype=np.int64))
        batches.append(pa.RecordBatch.from_arrays([txid, payload], names=["txid", "value"]))
    return batches


def write_log(
    uri: str,
    batches: list[pa.RecordBatch],
    *,
    config: LogConfig = CONFIG,
    encryption_keys: str | None = None,
    counted: Callable[[], AbstractContextManager[None]] = nullcontext,
    tls: TlsFiles | None = None,
) -> tuple[str, float]:
    """Write `batches` into a new log; return its name, and the seconds until all was durable.

    `counted` is open for just these seconds.  With `tls` bookies are reached by it, and by
    capabilities.
    """
    name = f"bench/{uuid4().hex}"
    with open_namespace(
        uri, encryption_keys=encryption_keys, tls=tls, capabilities=tls is not None
    ) as namespace:
        namespace.create_log(name, config=config)
        with namespace.open_log(name, config=config) as log, log.open_writer() as writer:
            started = time.perf_counter()
            with counted():
                for batch in batches:
                    writer.write_batch(batch)
                writer.flush()
            seconds = time.perf_counter() - started
    return name, seconds


KEEPS_NOTHING = {"ring_bytes_max": 1}
"""Settings of a proxy that reads from bookies what another reader was just sent."""


@contextmanager
def restarted(sandbox: Sandbox, **settings: object) -> Iterator[None]:
    """Let the first proxy have these settings meanwhile."""
    names = {f"DLOG_PROXY_{each.upper()}": str(value) for each, value in settings.items()}
    os.environ.update(names)
    try:
        sandbox.proxies[0].restart()
        yield
    finally:
        for each in names:
            del os.environ[each]
        sandbox.proxies[0].restart()


def drop_log(uri: str, name: str, *, tls: TlsFiles | None = None) -> None:
    """Delete a log, so that rounds do not fill the disk."""
    with open_namespace(uri, tls=tls) as namespace:
        namespace.delete_log(name)


class CpuCost:
    """The CPU of this process, and of servers beside it, during a measurement."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._rounds: list[tuple[float, float]] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is computed meanwhile, as one round."""
        client_s, servers_s = time.process_time(), cpu_of(self._pids)
        yield
        self._rounds.append((time.process_time() - client_s, cpu_of(self._pids) - servers_s))

    def per_gb(self, round_bytes: int = WRITE_BYTES) -> tuple[float, float]:
        """Return seconds per GB, of so many bytes a round: here, and in the servers."""
        counted = self._rounds[1:]  # the first one was the warming up
        client_s, servers_s = (statistics.median(side) for side in zip(*counted, strict=True))
        return client_s / (round_bytes / 1e9), servers_s / (round_bytes / 1e9)


@contextmanager
def write_limits(folder: Path) -> Iterator[tuple[dict[str, Callable[[], float]], CpuCost]]:
    """Run what writes of `WRITE_BYTES` are measured beside; yield limits, and what they compute.

    The disk's, written as bookies do; and that of bare servers, one per copy, which sum the same
    bytes and write them.
    """
    with ExitStack() as stack:
        servers = [stack.enter_context(bare_server(folder / f"bare-{i}")) for i in range(COPIES)]
        cost = CpuCost([server.pid for server in servers])

        def by_servers() -> float:
            with cost.counted():
                return run(bare_write_rate(servers, total_bytes=WRITE_BYTES))

        def by_disk() -> float:
            return run(disk_rate(folder, total_bytes=WRITE_BYTES, files=COPIES))

        yield {"disk": by_disk, "bare servers": by_servers}, cost


def core_write(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """1 KB records through one writer, beside what the disk takes of three bookies, or, where that
    is lower, bare servers, one per copy, which sum and write the same bytes.
    """
    batches = record_batches(total_bytes=WRITE_BYTES, record_bytes=RECORD_BYTES)
    cost = CpuCost([bookie.pid for bookie in sandbox.bookies])

    def value() -> float:
        name, seconds = write_log(sandbox.uri, batches, counted=cost.counted)
        drop_log(sandbox.uri, name)
        return WRITE_BYTES / 1e6 / seconds

    with write_limits(folder) as (limits, bare_cost):
        figure = measure(
            name="core_write",
            unit="MB/s",
            target=Target(ratio=0.75, is_rate=True),
            value=value,
            limit=limits,
        )
    (client, bookies), (bare_client, servers) = cost.per_gb(), bare_cost.per_gb()
    memory = Figure(
        name="bookie_peak_memory",
        unit="MB",
        value=max(peak_memory_mb(bookie.pid) for bookie in sandbox.bookies),
        limit=float(MEMORY_MB_MAX),
        target=Target(ratio=1.0, is_rate=False),
    )
    computed = replace(
        _cpu_figure("core_write_cpu", client + bookies, limit=GRPC_WRITE_CPU_S),
        cpu_s_per_gb={
            "client": client,
            "bookies": bookies,
            "client of bare servers": bare_client,
            "bare servers": servers,
        },
    )
    return [figure, computed, memory]


def core_read(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """1 KB records as Arrow batches, from one log's end to the other, beside bare framed reads.

    And beside such reads of a file that sum each chunk at both ends.  Each round opens a reader in
    a namespace that stays open, as a program's does.
    """
    batches = record_batches(total_bytes=WRITE_BYTES, record_bytes=RECORD_BYTES)
    log, _ = write_log(sandbox.uri, batches)
    del batches
    cost = CpuCost([bookie.pid for bookie in sandbox.bookies])

    with (
        bare_server(folder) as server,
        open_namespace(sandbox.uri) as namespace,
        namespace.open_log(log) as manager,
    ):

        def value() -> float:
            started = time.perf_counter()
            with cost.counted():
                read_to_its_end(manager)
            return WRITE_BYTES / 1e6 / (time.perf_counter() - started)

        figures = [
            measure(
                name=name,
                unit="MB/s",
                target=Target(ratio=0.6, is_rate=True),
                value=value,
                limit=limit,
                rounds=SHORT_ROUNDS,
            )
            for name, limit in (
                ("core_read", lambda: run(bare_read_rate(server.address, total_bytes=WRITE_BYTES))),
                ("core_read_summed", lambda: run(summed_read_rate(server.address, is_summed=True))),
            )
        ]
    drop_log(sandbox.uri, log)
    client, bookies = cost.per_gb()
    computed = _cpu_figure("core_read_cpu", client + bookies, limit=GRPC_READ_CPU_S)
    return [*figures, replace(computed, cpu_s_per_gb={"client": client, "bookies": bookies})]


def read_to_its_end(log: BlockingLogManager) -> None:
    """Read all that `WRITE_BYTES` are, as batches."""
    count = WRITE_BYTES // RECORD_BYTES
    with log.open_reader(dlsn=DLSN.INITIAL) as reader:
        while count > 0:
            batch = reader.read_batch()
            assert batch is not None
            count -= batch.num_rows


def _cpu_figure(name: str, value: float, *, limit: float) -> Figure:
    return Figure(
        name=name,
        unit="s/GB",
        value=value,
        limit=limit,
        target=Target(ratio=0.5, is_rate=False),
    )


def cpu_of(pids: Iterable[int]) -> float:
    """Return the CPU seconds that processes have used, in user and kernel."""
    ticks = 0
    for pid in pids:
        # Behind the name, which is in brackets, field 14 is the user's time and 15 the kernel's.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_memory_mb(pid: int) -> float:
    """Return the largest resident size that a process ever had."""
    return _status_mb(pid, "VmHWM")


def memory_mb(pid: int) -> float:
    """Return the resident size of a process."""
    return _status_mb(pid, "VmRSS")


def _status_mb(pid: int, key: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError(f"the kernel tells no {key} of process {pid}")


def append_latency(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """One record at a time, durable on three bookies, beside a bare framed round trip with one.

    And beside such a round trip with three at once, which is what the machine's cores and disk have
    to do for any client that waits for three copies.
    """
    return [
        figure
        for name, servers in (("append_latency", 1), ("append_latency_copies", COPIES))
        for figure in _beside_bare_call(
            name,
            lambda: _append_ms(sandbox.uri),
            folder,
            servers=servers,
            durable=True,
            ratio_max=1.8,
        )
    ]


async def _append_ms(uri: str) -> float:
    return statistics.median(await append_times(uri, _LATENCY_COUNT)) * 1000


async def append_times(
    uri: str, count: int, *, tls: TlsFiles | None = None, capabilities: bool = False
) -> list[float]:
    """Return how long each of `count` appends to a new log took, one after the other, in s."""
    times = []
    async with fresh_log(uri, tls=tls, capabilities=capabilities) as (_, writer):
        payload = os.urandom(RECORD_BYTES)
        await writer.write(LogRecord(0, payload))
        for txid in range(count):
            started = time.perf_counter()
            await writer.write(LogRecord(txid, payload))
            times.append(time.perf_counter() - started)
    return times


def tail_latency(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """From a record being durable to a tailing reader having it, beside a bare round trip."""
    return _beside_bare_call(
        "tail_latency",
        lambda: _tail_ms(sandbox.uri),
        folder,
        servers=1,
        durable=False,
        ratio_max=3.0,
    )


async def _tail_ms(uri: str) -> float:
    return statistics.median(await append_and_tail(uri)) * 1000


async def append_and_tail(uri: str) -> list[float]:
    """Return the time from durable to delivered of one record at a time, in s."""
    times = []
    async with (
        fresh_log(uri) as (log, writer),
        await log.open_reader(dlsn=DLSN.INITIAL) as reader,
    ):
        payload = os.urandom(RECORD_BYTES)
        for txid in range(_LATENCY_COUNT):
            waiting = asyncio.create_task(_delivered(reader))
            position = await writer.write(LogRecord(txid, payload))
            durable = time.perf_counter()
            delivered, record_position = await waiting
            times.append(delivered - durable)
            assert record_position == position
    return times[1:]  # the first one opens the reader's streams


async def _delivered(reader: DirectReader) -> tuple[float, DLSN]:
    """Return when the reader had the next record, and where that is."""
    record = await reader.read_next()
    assert record is not None
    return time.perf_counter(), record.dlsn


def run(work: Coroutine[None, None, float]) -> float:
    """Run a client on the event loop that the blocking face has."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _beside_bare_call(
    name: str,
    latency_ms: Callable[[], Coroutine[None, None, float]],
    folder: Path,
    *,
    servers: int,
    durable: bool,
    ratio_max: float,
) -> list[Figure]:
    """Measure a latency beside a bare framed round trip that carries as much, to each server."""
    with ExitStack() as stack:
        bare = [stack.enter_context(bare_server(folder / f"bare-{i}")) for i in range(servers)]
        figure = measure(
            name=name,
            unit="ms",
            target=Target(ratio=ratio_max, is_rate=False),
            value=lambda: run(latency_ms()),
            limit=lambda: run(
                round_trip_ms(
                    [server.address for server in bare],
                    durable=durable,
                    size_bytes=RECORD_BYTES,
                    count=_LATENCY_COUNT,
                )
            ),
        )
    return [figure]


@asynccontextmanager
async def fresh_log(
    uri: str, *, tls: TlsFiles | None = None, capabilities: bool = False
) -> AsyncIterator[tuple[DirectLog, DirectWriter]]:
    """Make a log and open it for writing."""
    name = f"bench/{uuid4().hex}"
    async with await open_namespace_async(uri, tls=tls, capabilities=capabilities) as namespace:
        await namespace.create_log(name, config=CONFIG)
        async with (
            await namespace.open_log(name, config=CONFIG) as log,
            await log.open_writer() as writer,
        ):
            yield log, writer
