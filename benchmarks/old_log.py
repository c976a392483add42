"""An operator's work on a log of a million extents in ten thousand segments, and its time.

Its metadata is written as commits would have, in less time; its ledgers hold no entries.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING
from uuid import uuid4

from benchmarks.counted_client import counted_client
from benchmarks.figures import Figure, Target
from benchmarks.logs import CONFIG
from benchmarks.written_history import write_history
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.metadata.paths import parse_uri

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from benchmarks.counted_client import Cost, CountedClient
    from dlcore.ops.sandbox.cluster import Sandbox

EXTENTS = 1_000_000
_YOUNG_EXTENTS = 1_000
_SEGMENT_EXTENTS = 100
_LIMITS_S = {
    "list": 1.0,
    "open": 1.0,
    "recover": 1.0,
    "open writer": 1.0,
    "first write": 1.0,
    "segments": 60.0,
    "truncate half": 120.0,
    "delete": 120.0,
}
"""How long each may take on two cores: what does not read the history no longer than of a new
log, and what reads or removes all of it some ten thousand extents a second."""


def old_log(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """Each operation on a log of 1,000,000 extents in 10,000 segments."""
    costs = asyncio.run(_measure(sandbox, EXTENTS))
    target = Target(ratio=1.0, is_rate=False)
    figures = [
        Figure(
            name=f"old_log_{what.replace(' ', '_')}",
            unit="s",
            value=costs[what].ms / 1000,
            limit=limit_s,
            target=target,
        )
        for what, limit_s in _LIMITS_S.items()
    ]
    depth = max(costs[what].depth for what in ("open writer", "first write"))
    figures.append(
        Figure(name="old_log_open_depth", unit="round trips", value=depth, limit=4, target=target)
    )
    return figures


async def _measure(sandbox: Sandbox, extents: int) -> dict[str, Cost]:
    uri = parse_uri(sandbox.uri)
    async with counted_client(uri.servers, uri.root) as client:
        await _operate(client, _YOUNG_EXTENTS)  # what is done for the first time takes longer
        return await _operate(client, extents)


async def _operate(client: CountedClient, extents: int) -> dict[str, Cost]:
    name = f"bench/{uuid4().hex}"
    namespace = client.namespace
    await namespace.create_log(name, config=CONFIG)
    started_s = time.perf_counter()
    await write_history(client.context, name, extents, segment_extents=_SEGMENT_EXTENTS)
    print(f"{extents:,d} extents written in {time.perf_counter() - started_s:.0f} s")
    costs: dict[str, Cost] = {}

    async def note(what: str, work: Callable[[], Awaitable[object]]) -> None:
        costs[what] = await client.measure(work)
        print(f"{what:14} {costs[what]}", flush=True)

    await note("list", namespace.get_logs)
    await note("open", lambda: namespace.open_log(name, config=CONFIG))
    async with await namespace.open_log(name, config=CONFIG) as log:
        await note("recover", log.recover)
        writers = []

        async def open_writer() -> None:
            writers.append(await log.open_writer())

        async def write() -> None:
            await writers[0].write(LogRecord(writers[0].last_txid, b"x"))

        await note("open writer", open_writer)
        await note("first write", write)
        await writers[0].aclose()
        await note("segments", log.get_log_segments)
        middle = DLSN(extents // _SEGMENT_EXTENTS // 2, 0, 0)
        await note("truncate half", lambda: log.truncate(middle))
    await note("delete", lambda: namespace.delete_log(name))
    return costs
