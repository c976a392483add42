"""The time that a fork takes, by the number of segments: their bytes do not matter.

The cold segments are written to the metadata as tiering leaves them; there are no objects.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING
from uuid import uuid4

from benchmarks.counted_client import counted_client
from benchmarks.figures import Figure, Target
from dlcore.ledger.metadata.values import COLD_LAYOUT, LedgerMetadata, LedgerState, StoredObject
from dlcore.log.metadata.segment import ColdExtent
from dlcore.log.metadata.values import LogHead, SegmentEnd, StagedLedger, Totals, pack
from dlcore.metadata.paths import parse_uri
from dlcore.metadata.port import Create, Op, Put
from dlcore.metadata.stored import encode

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.log.context import LogContext
    from dlcore.ops.sandbox.cluster import Sandbox

SEGMENTS = (10, 1_000, 10_000)
LIMIT_S = 1.0
_SEGMENT_BYTES = 512 * 1024 * 1024
_ROWS = 1_000_000
_ENTRIES = 1_000
_AT_ONCE = 200


def fork_log(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """Forks of logs of 10 to 10,000 cold segments, which is 5 GB to 5 TB."""
    target = Target(ratio=1.0, is_rate=False)
    took = asyncio.run(_measure(sandbox))
    return [
        Figure(name=f"fork_log_{count}", unit="s", value=s, limit=LIMIT_S, target=target)
        for count, s in took.items()
    ]


async def _measure(sandbox: Sandbox) -> dict[int, float]:
    uri = parse_uri(sandbox.uri)
    took = {}
    async with counted_client(uri.servers, uri.root) as client:
        for count in SEGMENTS:
            name = f"bench/{uuid4().hex}"
            await client.namespace.create_log(name)
            await _write(client.context, name, count)
            started_s = time.perf_counter()
            await client.namespace.fork_log(name, f"{name}-fork")
            took[count] = time.perf_counter() - started_s
    return took


async def _write(context: LogContext, name: str, count: int) -> None:
    """Give a log so many cold segments, of 512 MiB each."""
    log = await context.logs.find(name)
    own = context.logs.paths_of(log)
    now_ms = context.clock.now_ms()
    ops: list[Op] = []
    for lssn in range(1, count + 1):
        ledger_id = await context.ledger_store.new_ledger_id()
        extent = ColdExtent(
            ledger_id=ledger_id,
            first_entry_id=0,
            last_entry_id=_ENTRIES - 1,
            record_count=_ROWS,
            size_bytes=_SEGMENT_BYTES,
            first_txid=now_ms,
            last_txid=now_ms,
            last_timestamp_ms=now_ms,
        )
        ledger = LedgerMetadata(
            layout=COLD_LAYOUT,
            ledger_id=ledger_id,
            quorum=log.quorum,
            state=LedgerState.CLOSED,
            ensembles=(),
            token=context.clock.new_token(),
            created_ms=now_ms,
            last_entry_id=_ENTRIES - 1,
            length_bytes=_SEGMENT_BYTES,
            folder=f"s3://bucket/folder/{context.cluster_id}/{log.log_id}/{lssn}",
            objects=tuple(
                StoredObject(125 * n, 125_000 * n, f"{ledger_id}-token-{n}-1.parquet", 64 << 20)
                for n in range(8)
            ),
        )
        staged = StagedLedger(
            ledger_id=ledger_id,
            identity=":merging",
            owner="",
            created_ms=now_ms,
            extents=1,
            settled=True,
        )
        end = SegmentEnd(
            created_ms=now_ms,
            completed_ms=now_ms,
            start_sequence_id=_ROWS * (lssn - 1),
            chunk_count=0,
            chunked=Totals(),
            packed=pack([extent]),
        )
        await context.ledger_store.create(
            ledger,
            extra_ops=(Create(context.paths.staged_ledger(ledger_id), encode(staged)),),
        )
        ops.append(Create(own.segment(lssn), encode(end)))
    at = await context.logs.read(log)
    head = LogHead(
        max_lssn=count,
        max_txid=now_ms,
        next_sequence_id=_ROWS * count,
        last_timestamp_ms=now_ms,
        end=(count, _ENTRIES),
    )
    for start in range(0, count, _AT_ONCE):
        await context.store.multi(ops[start : start + _AT_ONCE])
    await context.store.multi([Put(own.head, encode(head), at.version)])
