"""Figures of records written one by one, beside the same records as Arrow batches."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING
from uuid import uuid4

import uvloop

from benchmarks.figures import Figure, Target, measure
from benchmarks.logs import CONFIG, drop_log, record_batches, write_log
from dlcore.backends.direct.namespace import open_namespace as open_namespace_async
from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox

_RECORDS = 1_000_000
_RECORD_BYTES = 100
_FUTURES_AT_ONCE = 50_000


def record_write(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """100-byte records through `write`, blocking, and async with a future each, beside batches."""
    payloads = [os.urandom(_RECORD_BYTES) for _ in range(1000)]
    batches = record_batches(total_bytes=_RECORDS * _RECORD_BYTES, record_bytes=_RECORD_BYTES)

    def beside_batches(
        name: str, ratio: float, write: Callable[[str, str, list[bytes]], float]
    ) -> Figure:
        def value() -> float:
            log = f"bench/{uuid4().hex}"
            seconds = write(sandbox.uri, log, payloads)
            drop_log(sandbox.uri, log)
            return float(_RECORDS / seconds)

        def limit() -> float:
            log, seconds = write_log(sandbox.uri, batches)
            drop_log(sandbox.uri, log)
            return float(sum(batch.num_rows for batch in batches) / seconds)

        return measure(
            name=name,
            unit="records/s",
            target=Target(ratio=ratio, is_rate=True),
            value=value,
            limit=limit,
        )

    return [
        beside_batches("record_write", 0.35, _write_blocking),
        beside_batches("record_write_async", 0.2, _write_async),
    ]


def _write_blocking(uri: str, name: str, payloads: list[bytes]) -> float:
    with open_namespace(uri) as namespace:
        namespace.create_log(name, config=CONFIG)
        with namespace.open_log(name, config=CONFIG) as log, log.open_writer() as writer:
            started = time.perf_counter()
            txid = 0
            while txid < _RECORDS:
                for payload in payloads:
                    writer.write(LogRecord(txid, payload))
                    txid += 1
            writer.flush()
            return time.perf_counter() - started


def _write_async(uri: str, name: str, payloads: list[bytes]) -> float:
    return float(uvloop.run(_write_with_futures(uri, name, payloads)))


async def _write_with_futures(uri: str, name: str, payloads: list[bytes]) -> float:
    async with await open_namespace_async(uri) as namespace:
        await namespace.create_log(name, config=CONFIG)
        log = await namespace.open_log(name, config=CONFIG)
        async with log, await log.open_writer() as writer:
            started = time.perf_counter()
            txid = 0
            before: list[asyncio.Future[object]] = []
            while txid < _RECORDS:
                futures: list[asyncio.Future[object]] = []
                while len(futures) < _FUTURES_AT_ONCE:
                    for payload in payloads:
                        futures.append(writer.write(LogRecord(txid, payload)))  # type: ignore[arg-type]
                        txid += 1
                    await asyncio.sleep(0)  # as a program that waits for what it writes
                if before:
                    await before[-1]  # they complete in order
                before = futures
            await before[-1]
            assert all(future.done() for future in before)
            return time.perf_counter() - started
