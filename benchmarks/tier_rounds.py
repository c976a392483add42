"""A worker's rounds over 10,000 logs with a tier, in each of which a segment waits for its age.

Metadata is in memory, so that the time is the worker's own.  Beside it is the time to read the
settings of all these logs once, as a round without a memory of its own must.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING
from unittest.mock import patch

from benchmarks.figures import Figure, Target
from dlcore.base.config import LogSettings
from dlcore.log.metadata.segment import Extent
from dlcore.log.metadata.values import LogHead, LogKey, SegmentEnd, Totals, pack
from dlcore.metadata.port import Create, Put
from dlcore.metadata.stored import encode
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.fixtures.memory_namespace import memory_cluster

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ops.sandbox.cluster import Sandbox

LOGS = 10_000
ROUNDS = 60
_ROUND_MS = 60_000
_SETTINGS = LogSettings(tier="s3://bucket/logs", tier_after_s=86_400)


def tier_rounds(_sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """The CPU of a round, on average over an hour, and how many nodes it reads."""
    round_ms, nodes, all_settings_ms = asyncio.run(_measure())
    cpu, reads = Target(ratio=0.5, is_rate=False), Target(ratio=0.4, is_rate=False)
    return [
        Figure(name="tier_round_cpu", unit="ms", value=round_ms, limit=all_settings_ms, target=cpu),
        Figure(name="tier_round_reads", unit="nodes", value=nodes, limit=LOGS, target=reads),
    ]


async def _measure() -> tuple[float, float, float]:
    async with memory_cluster() as cluster:
        namespace = await cluster.open("worker")
        clock = cluster.clocks["worker"]
        logs = await _create(namespace)
        worker = LogUpkeep.of(namespace)
        await worker.tier()
        store = namespace.log_context.store
        get_many, nodes = store.get_many, 0

        async def counted(paths: Sequence[str], *, fresh: bool = False) -> object:
            nonlocal nodes
            nodes += len(paths)
            return await get_many(paths, fresh=fresh)

        with patch.object(store, "get_many", counted):
            began_s = time.process_time()
            for _ in range(ROUNDS):
                clock.current_ms += _ROUND_MS
                await worker.tier()
            round_ms = (time.process_time() - began_s) * 1000 / ROUNDS
        began_s = time.process_time()
        await namespace.log_context.logs.read_settings_of(logs)
        all_settings_ms = (time.process_time() - began_s) * 1000
        return round_ms, nodes / ROUNDS, all_settings_ms


async def _create(namespace: DirectNamespace) -> list[LogKey]:
    """Create the logs, each with a completed segment of this day and one that is in progress."""
    context, logs = namespace.log_context, []
    now_ms = context.clock.now_ms()
    extent = Extent(
        ledger_id=1,
        first_entry_id=0,
        last_entry_id=0,
        record_count=1,
        size_bytes=1,
        first_txid=1,
        last_txid=1,
        timestamp_floor_ms=now_ms,
        last_timestamp_ms=now_ms,
    )
    end = SegmentEnd(
        created_ms=now_ms,
        completed_ms=now_ms,
        start_sequence_id=0,
        chunk_count=0,
        chunked=Totals(),
        packed=pack([extent]),
    )
    for number in range(LOGS):
        name = f"events-{number}"
        await namespace.create_log(name, settings=_SETTINGS)
        log = await context.logs.find(name)
        at = await context.logs.read(log)
        paths = context.logs.paths_of(log)
        head = encode(LogHead(end=(1, 1), max_lssn=1, next_sequence_id=1, last_timestamp_ms=now_ms))
        await context.store.multi(
            [Put(paths.head, head, at.version), Create(paths.segment(1), encode(end))]
        )
        logs.append(log)
    return [LogKey(name=each.name, log_id=each.log_id) for each in logs]
