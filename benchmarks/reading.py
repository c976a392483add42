"""Figures of readers: record by record, over many segments, along a busy tail, of an old log."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import uvloop

from benchmarks.bare_server import BareClient
from benchmarks.bare_tail import TailWriter, follow
from benchmarks.counted_client import counted_client
from benchmarks.figures import Figure, Target, measure
from benchmarks.limits import MIB, bare_server, file_read_rate, served, summed_read_rate
from benchmarks.logs import (
    CONFIG,
    COPIES,
    SHORT_ROUNDS,
    WRITE_BYTES,
    append_and_tail,
    drop_log,
    fresh_log,
    read_to_its_end,
    record_batches,
    run,
    write_log,
)
from benchmarks.written_history import write_history
from dlcore.backends.direct.namespace import open_namespace as open_namespace_async
from dlcore.base.records import LogRecord
from dlcore.metadata.paths import parse_uri
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from pathlib import Path

    from dlcore.log.reading.reader import DirectReader
    from dlcore.log.writing.writer import DirectWriter
    from dlcore.ops.sandbox.cluster import Sandbox

_SMALL_RECORD_BYTES = 100
_SMALL_RECORDS = 1_000_000
_SEGMENT_BYTES = 16 * MIB
_TAIL_RATES = (1_000, 10_000)
_TAIL_S = 4.0
_TAIL_BYTES = 1024
_TICKS_PER_S = 1_000
_LATE_S = 1.0
_OLD_SEGMENTS = 10_000


def record_read(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """Iterate over 100-byte records one by one, blocking and async, beside `read_batch`."""
    batches = record_batches(
        total_bytes=_SMALL_RECORDS * _SMALL_RECORD_BYTES, record_bytes=_SMALL_RECORD_BYTES
    )
    count = sum(batch.num_rows for batch in batches)
    log, _ = write_log(sandbox.uri, batches)
    del batches

    def by_batches() -> float:
        with open_namespace(sandbox.uri) as namespace, namespace.open_log(log) as manager:
            started = time.perf_counter()
            with manager.open_reader() as reader:
                found = sum(batch.num_rows for batch in reader.batches())
            return _rate(found, count, started)

    def by_records() -> float:
        with open_namespace(sandbox.uri) as namespace, namespace.open_log(log) as manager:
            started = time.perf_counter()
            found = 0
            with manager.open_reader() as reader:
                for _ in reader:
                    found += 1
            return _rate(found, count, started)

    async def by_records_async() -> float:
        async with (
            await open_namespace_async(sandbox.uri) as namespace,
            await namespace.open_log(log) as manager,
        ):
            started = time.perf_counter()
            found = 0
            async with await manager.open_reader() as reader:
                async for _ in reader:
                    found += 1
            return _rate(found, count, started)

    ways = {"record_read": by_records, "record_read_async": lambda: run(by_records_async())}
    return [
        measure(
            name=name,
            unit="records/s",
            target=Target(ratio=0.15, is_rate=True),
            value=value,
            limit=by_batches,
        )
        for name, value in ways.items()
    ]


def _rate(found: int, count: int, started: float) -> float:
    seconds = time.perf_counter() - started
    assert found == count
    return count / seconds


def read_ahead(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """One reader, Arrow batches of 1 KB records, over a segment boundary every 16 MB.

    Beside bare framed reads of as many bytes of a file, also from the page cache, and beside such
    reads that sum each chunk at both ends, as is promised.  Each round opens a reader in a
    namespace that stays open, as a program's does, which so knows the segments' ledgers; reading
    those each time makes no difference here.
    """
    config = replace(CONFIG, segment_bytes_max=_SEGMENT_BYTES)
    batches = record_batches(total_bytes=WRITE_BYTES, record_bytes=1024)
    log, _ = write_log(sandbox.uri, batches, config=config)
    del batches

    with (
        bare_server(folder) as server,
        open_namespace(sandbox.uri) as namespace,
        namespace.open_log(log) as manager,
    ):

        def value() -> float:
            started = time.perf_counter()
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
                ("read_ahead", lambda: run(file_read_rate(server.address))),
                (
                    "read_ahead_summed",
                    lambda: run(summed_read_rate(server.address, is_summed=True)),
                ),
            )
        ]
    drop_log(sandbox.uri, log)
    return figures


def tail_rate(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """From durable to delivered at 1,000 and at 10,000 single records a second.

    The median and the 99th percentile, beside those of one record at a time; none comes more than a
    second late.  The median also beside that of bare servers, which keep as many copies and pass
    the records on at the same rate: what the machine's cores have to do for any tail.
    """
    with ExitStack() as stack:
        servers = [
            stack.enter_context(served("benchmarks.bare_tail", folder / f"tail-{i}"))
            for i in range(COPIES)
        ]
        return _tail_rates(sandbox, [server.address for server in servers])


def _tail_rates(sandbox: Sandbox, bare: Sequence[str]) -> list[Figure]:
    figures = []
    for rate in _TAIL_RATES:
        medians: list[float] = []
        alone: list[float] = []
        along: list[float] = []

        def limit(
            rate: int = rate, alone: list[float] = alone, medians: list[float] = medians
        ) -> float:
            medians.append(statistics.median(_times(_bare_tail_at(bare, rate))) * 1000)
            alone[:] = _times(append_and_tail(sandbox.uri))
            return statistics.median(alone) * 1000

        def value(rate: int = rate, along: list[float] = along) -> float:
            along[:] = _times(_tail_at(sandbox.uri, rate))
            assert along[-1] < _LATE_S, f"a record came {along[-1]:.3f} s late"
            return statistics.median(along) * 1000

        figures.append(
            measure(
                name=f"tail_rate_{rate}_p50",
                unit="ms",
                target=Target(ratio=1.5, is_rate=False),
                value=value,
                limit=limit,
                rounds=3,
            )
        )
        figures.append(
            Figure(
                name=f"tail_rate_{rate}_p99",
                unit="ms",
                value=along[len(along) * 99 // 100] * 1000,
                limit=alone[len(alone) * 99 // 100] * 1000,
                target=Target(ratio=1.5, is_rate=False),
            )
        )
        figures.append(
            Figure(
                name=f"tail_rate_{rate}_p50_bare",
                unit="ms",
                value=figures[-2].value,
                limit=statistics.median(medians[1:]),  # the first round warms up
                target=None,
            )
        )
    return figures


def _times(work: Coroutine[None, None, list[float]]) -> list[float]:
    """Run a client on the event loop that the blocking face has; return its times, sorted."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return sorted(runner.run(work))


async def _bare_tail_at(addresses: Sequence[str], rate: int) -> list[float]:
    """Return the time from durable to delivered of each record at bare servers, in s."""
    count = int(rate * _TAIL_S)
    follower = await follow(addresses[0], record_bytes=_TAIL_BYTES, count=count)
    servers = [await BareClient.connect(address) for address in addresses]
    writer = TailWriter(servers, answers=CONFIG.quorum.ack_quorum_size)
    await _write_at(writer, rate, count, {})
    await follower.has_all.wait()
    for client in (*servers, follower):
        client.close()
    return [follower.delivered[txid] - writer.durable[txid] for txid in range(1, count + 1)]


async def _tail_at(uri: str, rate: int) -> list[float]:
    """Return the time from durable to delivered of each record, in s."""
    count = int(rate * _TAIL_S)
    durable: dict[int, float] = {}
    delivered: dict[int, float] = {}
    async with fresh_log(uri) as (log, writer), await log.open_reader() as reader:
        await writer.write(LogRecord(0, b"first"))
        assert await reader.read_next() is not None  # its streams are open
        reading = asyncio.create_task(_read_tail(reader, count, delivered))
        await _write_at(writer, rate, count, durable)
        await writer.flush()
        await reading
    # Where both happen in one turn of the loop, delivery may be noted first.
    return [max(0.0, delivered[txid] - durable[txid]) for txid in range(1, count + 1)]


async def _read_tail(reader: DirectReader, count: int, delivered: dict[int, float]) -> None:
    async for record in reader.records(follow=True):
        delivered[record.txid] = time.perf_counter()
        if len(delivered) == count:
            return


async def _write_at(
    writer: DirectWriter | TailWriter, rate: int, count: int, durable: dict[int, float]
) -> None:
    """Write single records at an even rate, each when it is due."""

    def note(txid: int, _: asyncio.Future[Any]) -> None:
        durable[txid] = time.perf_counter()

    payload = os.urandom(_TAIL_BYTES)
    started = time.perf_counter()
    txid = 0
    while txid < count:
        due = min(count, int((time.perf_counter() - started) * rate) + 1)
        while txid < due:
            txid += 1
            # None is kept: to gather them all would stop the loop for a tenth of a second.
            writer.write(LogRecord(txid, payload)).add_done_callback(partial(note, txid))
        await asyncio.sleep(1 / _TICKS_PER_S)


def open_log(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """Open a log of 10,000 segments and a reader at its start, beside listing their names."""
    return asyncio.run(_open_old(sandbox))


async def _open_old(sandbox: Sandbox) -> list[Figure]:
    uri = parse_uri(sandbox.uri)
    name = f"bench/{uuid4().hex}"
    listed: list[float] = []
    opened: list[float] = []
    async with counted_client(uri.servers, uri.root) as client:
        namespace = client.namespace
        await namespace.create_log(name, config=CONFIG)
        await write_history(client.context, name, _OLD_SEGMENTS, segment_extents=1)
        metadata = await client.context.logs.find(name)
        head = client.context.logs.paths_of(metadata).head
        for _ in range(6):
            started = time.perf_counter()
            names = await client.context.store.get_children(head)
            listed.append(time.perf_counter() - started)
            assert names is not None
            assert len(names) >= _OLD_SEGMENTS - 1  # the last one is in the head
            started = time.perf_counter()
            async with await namespace.open_log(name) as log, await log.open_reader():
                opened.append(time.perf_counter() - started)
    return [
        Figure(
            name="open_log",
            unit="ms",
            value=statistics.median(opened[1:]) * 1000,
            limit=statistics.median(listed[1:]) * 1000,
            target=Target(ratio=2.0, is_rate=False),
        )
    ]
