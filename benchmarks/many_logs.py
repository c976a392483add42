"""A namespace of 100,000 logs: creating, listing, watching, opening them, and ZooKeeper's memory.

None of them holds a record: what a log with records costs does not depend on how many there are.
"""

from __future__ import annotations

import asyncio
import gc
import re
import resource
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.counted_client import counted_client
from benchmarks.figures import Figure, Target
from benchmarks.logs import CONFIG
from dlcore.metadata.paths import BUCKETS, parse_uri

if TYPE_CHECKING:
    from benchmarks.counted_client import CountedClient
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ops.sandbox.cluster import Sandbox

LOGS = 100_000
_TENANTS = 100
_AT_ONCE = 64
_OPENED = 2_000
_LIMITS: dict[str, tuple[str, float]] = {
    "create": ("us each", 1_000),
    "list": ("s", 3),
    "list_prefix": ("s", 3),
    "answer": ("KB", 100),
    "watch": ("s", 15),
    "watch_memory": ("bytes a log", 1_000),
    "change_seen": ("ms", 50),
    "exists": ("ms", 5),
    "open": ("ms", 5),
    "zookeeper": ("bytes a log", 1_600),
}
"""Where a namespace of a million logs still works: in minutes, with a heap of 2 GB, and answers of
less than 1 MB."""


def many_logs(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """Each operation of a namespace of 100,000 logs."""
    before = live_heap_bytes(sandbox)
    values = asyncio.run(_measure(sandbox))
    values["zookeeper"] = (live_heap_bytes(sandbox) - before) / LOGS
    target = Target(ratio=1.0, is_rate=False)
    return [
        Figure(name=f"many_logs_{what}", unit=unit, value=values[what], limit=limit, target=target)
        for what, (unit, limit) in _LIMITS.items()
    ]


def live_heap_bytes(sandbox: Sandbox) -> int:
    """Return what ZooKeeper's live objects take, after a full collection."""
    jcmd = shutil.which("jcmd")
    assert jcmd is not None, "needs jcmd, which comes with a JDK"
    command = [jcmd, str(sandbox.metadata_server.pid), "GC.class_histogram"]
    output = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout
    total = re.search(r"^Total +\d+ +(\d+)", output, re.MULTILINE)
    assert total is not None, output
    return int(total[1])


def name_of(number: int) -> str:
    """Return the name of a log."""
    return f"tenants/tenant-{number % _TENANTS:03d}/events-{number:07d}"


async def _measure(sandbox: Sandbox) -> dict[str, float]:
    uri = parse_uri(sandbox.uri)
    async with counted_client(uri.servers, uri.root) as client:
        values = await _create_and_list(client)
    async with counted_client(uri.servers, uri.root) as client:
        values |= await _watch(client.namespace)
    async with counted_client(uri.servers, uri.root) as client:
        values |= await _open(client)
    for what, value in values.items():
        print(f"{what:14} {value:12,.2f} {_LIMITS[what][0]}", flush=True)
    return values


async def _create_and_list(client: CountedClient) -> dict[str, float]:
    namespace = client.namespace
    numbers = iter(range(LOGS))

    async def create() -> None:
        for number in numbers:
            await namespace.create_log(name_of(number), config=CONFIG)

    started_s = time.perf_counter()
    await asyncio.gather(*(create() for _ in range(_AT_ONCE)))
    taken_s = time.perf_counter() - started_s
    listed = 0

    async def list_all(prefix: str | None) -> None:
        nonlocal listed
        listed = 0
        async for page in namespace.list_logs(prefix):
            listed += len(page)

    listing = await client.measure(lambda: list_all(None))
    assert listed == LOGS
    prefixed = await client.measure(lambda: list_all("tenants/tenant-007/"))
    assert listed == LOGS // _TENANTS
    store, paths = client.context.store, client.context.paths
    answers = [await store.get_children(paths.log_bucket(bucket)) or [] for bucket in BUCKETS]
    return {
        "create": taken_s / LOGS * 1e6,
        "list": listing.ms / 1000,
        "list_prefix": prefixed.ms / 1000,
        "answer": max(sum(4 + len(name) for name in names) for names in answers) / 1000,
    }


async def _watch(namespace: DirectNamespace) -> dict[str, float]:
    before, started_s = _resident_bytes(), time.perf_counter()
    async with namespace.watch_logs() as watch:
        changes = 0
        while changes < LOGS:
            changes += len(await watch.take())
        taken_s = time.perf_counter() - started_s
        grown = _resident_bytes() - before
        times: list[float] = []
        for number in range(20):
            started_s = time.perf_counter()
            await namespace.create_log(f"new/{number}", config=CONFIG)
            assert [change.name for change in await watch.take()] == [f"new/{number}"]
            times.append(time.perf_counter() - started_s)
            await namespace.delete_log(f"new/{number}")
            await watch.take()
    return {
        "watch": taken_s,
        "watch_memory": grown / LOGS,
        "change_seen": statistics.median(times) * 1000,
    }


def _resident_bytes() -> int:
    """Return the memory that this process has now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def _open(client: CountedClient) -> dict[str, float]:
    namespace = client.namespace
    numbers = [number * (LOGS // _OPENED) for number in range(_OPENED)]

    async def all_exist() -> None:
        for number in numbers:
            assert await namespace.log_exists(name_of(number))

    async def open_all() -> None:
        for number in numbers:
            async with await namespace.open_log(name_of(number)) as log:
                assert not await log.is_end_of_stream_marked()

    exists = await client.measure(all_exist)
    opened = await client.measure(open_all)
    return {"exists": exists.ms / _OPENED, "open": opened.ms / _OPENED}
