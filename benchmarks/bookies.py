"""Figures of one bookie: its start after a crash, and its memory."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from benchmarks.figures import Figure, Target
from benchmarks.limits import bare_replay_s, disk_read_s
from benchmarks.logs import MEMORY_MB_MAX, append_times, memory_mb, peak_memory_mb
from bookie.membership.identity import COOKIE_FILE
from dlcore.base.config import LedgerClientConfig
from dlcore.ledger.metadata.values import BookieCookie
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.metadata.port import ANY_VERSION
from dlcore.metadata.stored import decode
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.wire.client import WireBookieClient
from dlcore.wire.frames import encode_frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dlcore.base.ids import BookieId
    from dlcore.ops.sandbox.cluster import Bookie, Sandbox

GB = 10**9
RESTART_BYTES = 2 * GB
RESTART_BYTES_FULL = 10 * GB
_RESTART_BYTES_FEW = GB
_RESTARTS = 5
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")

MEMORY_ENTRIES = 1_000_000
MEMORY_ENTRIES_FULL = 10_000_000
_ENTRIES_PER_LEDGER = 100
_BODY = b"x" * 100
_IN_FLIGHT = 5000
_LEDGERS_READ = 100
APPEND_P999_MS_MAX = 20.0
_APPENDS = 20_000
_LEDGERS_MORE = 200_000
"""More than are begun while so many appends are measured."""
_CLIENT = LedgerClientConfig(add_timeout_s=60.0, read_timeout_s=60.0)


def restart(sandbox: Sandbox, _: Path) -> list[Figure]:
    """The start of a killed bookie that stores 2 GB, beside one with 1 GB and the bare work."""
    return _restart(sandbox, RESTART_BYTES)


def restart_full(sandbox: Sandbox, _: Path) -> list[Figure]:
    """The start of a killed bookie that stores 10 GB, beside one with 1 GB and the bare work."""
    return _restart(sandbox, RESTART_BYTES_FULL)


def _restart(sandbox: Sandbox, stored_bytes: int) -> list[Figure]:
    """Start bookies that store nothing, little and much, in turn; each was killed before."""
    empty, few, many = sandbox.bookies
    _fill(few, _RESTART_BYTES_FEW)
    _fill(many, stored_bytes)
    oldest, *_, newest = sorted(many.folder.glob("*.log"))
    seconds: dict[Bookie, list[float]] = {empty: [], few: [], many: []}
    replays, reads = [], []
    for _ in range(_RESTARTS):
        for bookie, times in seconds.items():
            times.append(_start_s(bookie))
            peak_mb = peak_memory_mb(bookie.pid)  # in the end that of the bookie with much
            bookie.kill()
        _forget_cached_files()
        replays.append(bare_replay_s(newest))
        reads.append(disk_read_s(oldest) / (oldest.stat().st_size / GB))
    empty_s, few_s, many_s = (statistics.median(times) for times in seconds.values())
    further_gb = (_stored_bytes(many) - _stored_bytes(few)) / GB
    cache = "cold" if _can_forget() else "warm"
    return [
        _at_most(1.25, f"restart_{stored_bytes // GB}_gb", f"s, {cache}", many_s, few_s),
        _at_most(
            0.1,
            "restart_further_gb",
            f"ms/GB, {cache}",
            (many_s - few_s) / further_gb * 1000,
            statistics.median(reads) * 1000,
        ),
        _at_most(
            10.0, "restart_replay", f"s, {cache}", few_s - empty_s, statistics.median(replays)
        ),
        _memory_figure("restart_peak_memory", peak_mb),
    ]


def _at_most(ratio_max: float, name: str, unit: str, value: float, limit: float) -> Figure:
    target = Target(ratio=ratio_max, is_rate=False)
    return Figure(name=name, unit=unit, value=value, limit=limit, target=target)


def _fill(bookie: Bookie, stored_bytes: int) -> None:
    """Fill the bookie's folder while it does not run, up to a SIGKILL."""
    bookie.kill()
    command = [sys.executable, "-m", "benchmarks.fill_storage"]
    command += [str(bookie.folder), str(stored_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        process.kill()


def _start_s(bookie: Bookie) -> float:
    """Return the time from the start of the process until it serves."""
    if bookie.is_running:
        bookie.kill()
    _forget_cached_files()
    started = time.perf_counter()
    bookie.restart()
    return time.perf_counter() - started


def _stored_bytes(bookie: Bookie) -> int:
    return sum(path.stat().st_size for path in bookie.folder.glob("*.log"))


def _can_forget() -> bool:
    return os.access(_DROP_CACHES, os.W_OK)


def _forget_cached_files() -> None:
    """Have the kernel forget what it read from disks, if this user may ask for it."""
    if _can_forget():
        os.sync()
        _DROP_CACHES.write_text("1")


def memory(sandbox: Sandbox, _: Path) -> list[Figure]:
    """Resident memory of a bookie with a million entries in 10,000 ledgers, all open at once."""
    return _memory(sandbox, MEMORY_ENTRIES)


def memory_full(sandbox: Sandbox, _: Path) -> list[Figure]:
    """Resident memory of a bookie with 10 million entries in 100,000 ledgers, all open at once."""
    return _memory(sandbox, MEMORY_ENTRIES_FULL)


def _memory(sandbox: Sandbox, entry_count: int) -> list[Figure]:
    bookie = sandbox.bookies[0]
    ledger_count = entry_count // _ENTRIES_PER_LEDGER
    with asyncio.Runner() as runner:
        runner.run(_give_ids(sandbox.uri, ledger_count))
        runner.run(_write_entries(bookie, ledger_count))
        figures = [
            _memory_figure("memory_written", memory_mb(bookie.pid)),
            _memory_figure("memory_written_peak", peak_memory_mb(bookie.pid)),
        ]
        bookie.kill()
        bookie.restart()
        figures += [
            _memory_figure("memory_restarted", memory_mb(bookie.pid)),
            _memory_figure("memory_restarted_peak", peak_memory_mb(bookie.pid)),
        ]
        runner.run(_read_entries(bookie, ledger_count))
        return [*figures, _memory_figure("memory_read", memory_mb(bookie.pid))]


def append_p999(sandbox: Sandbox, _: Path) -> list[Figure]:
    """The slowest of 1,000 appends; one of the bookies is empty, or has a million entries."""
    return _append_p999(sandbox, MEMORY_ENTRIES)


def append_p999_full(sandbox: Sandbox, _: Path) -> list[Figure]:
    """The slowest of 1,000 appends; one of the bookies is empty, or has 10 million entries."""
    return _append_p999(sandbox, MEMORY_ENTRIES_FULL)


def _append_p999(sandbox: Sandbox, entry_count: int) -> list[Figure]:
    bookie = sandbox.bookies[0]
    ledger_count = entry_count // _ENTRIES_PER_LEDGER
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_give_ids(sandbox.uri, ledger_count + 2 * _LEDGERS_MORE))
        empty = runner.run(_append_beside(sandbox.uri, bookie, ledger_count))
        runner.run(_write_entries(bookie, ledger_count))
        filled = runner.run(_append_beside(sandbox.uri, bookie, ledger_count + _LEDGERS_MORE))
    return [_p999("append_p999_empty", empty), _p999("append_p999", filled)]


def _p999(name: str, times: list[float]) -> Figure:
    value_ms = sorted(times)[-max(1, len(times) // 1000)] * 1000
    return _at_most(1.0, name, "ms", value_ms, APPEND_P999_MS_MAX)


async def _append_beside(uri: str, bookie: Bookie, first_ledger_id: int) -> list[float]:
    """Append to a log, while another client begins one ledger after the other at one bookie.

    Each makes objects that stay, which is what Python's collector looks at.
    """

    async def begin_ledgers(client: WireBookieClient, bookie_id: BookieId) -> None:
        for ledger_id in range(first_ledger_id, first_ledger_id + _LEDGERS_MORE):
            await client.add_entry(bookie_id, _frame(ledger_id, 0))

    async with _client_of(bookie) as (client, bookie_id):
        beginning = asyncio.create_task(begin_ledgers(client, bookie_id))
        times = await append_times(uri, _APPENDS)
        beginning.cancel()
        with suppress(asyncio.CancelledError):
            await beginning
    return times


def _memory_figure(name: str, value_mb: float) -> Figure:
    return _at_most(1.0, name, "MB", value_mb, MEMORY_MB_MAX)


async def _give_ids(uri: str, ledger_count: int) -> None:
    """Have the namespace say that it gave the ids of so many ledgers, which bookies ask of it."""
    address = parse_uri(uri)
    store = await ZooKeeperStore.connect(address.servers)
    try:
        path = NamespacePaths(address.root).ledger_idgen
        await store.put(path, b"%d" % ledger_count, version=ANY_VERSION)
    finally:
        await store.aclose()


async def _write_entries(bookie: Bookie, ledger_count: int) -> None:
    """Write entries to all ledgers in turn, so that every file holds some of each."""
    pending: deque[asyncio.Future[None]] = deque()
    async with _client_of(bookie) as (client, bookie_id):
        for entry_id in range(_ENTRIES_PER_LEDGER):
            for ledger_id in range(ledger_count):
                pending.append(client.add_entry(bookie_id, _frame(ledger_id, entry_id)))
                if len(pending) == _IN_FLIGHT:
                    await pending.popleft()
        await asyncio.gather(*pending)


def _frame(ledger_id: int, entry_id: int) -> bytes:
    return encode_frame(
        ledger_id=ledger_id,
        entry_id=entry_id,
        last_add_confirmed=entry_id - 1,
        ledger_bytes=(entry_id + 1) * len(_BODY),
        body=[_BODY],
    )


async def _read_entries(bookie: Bookie, ledger_count: int) -> None:
    """Read some ledgers whole, which needs every file."""
    async with _client_of(bookie) as (client, bookie_id):
        for ledger_id in range(0, ledger_count, ledger_count // _LEDGERS_READ):
            chunks = client.read_entries(
                bookie_id,
                ledger_id=ledger_id,
                first_entry_id=0,
                last_entry_id=_ENTRIES_PER_LEDGER - 1,
            )
            assert sum([len(frames) async for frames in chunks]) == _ENTRIES_PER_LEDGER


@asynccontextmanager
async def _client_of(bookie: Bookie) -> AsyncIterator[tuple[WireBookieClient, BookieId]]:
    """Talk to one bookie as the ledger client does."""
    cookie = decode(BookieCookie, (bookie.folder / COOKIE_FILE).read_bytes(), source=COOKIE_FILE)

    async def resolve(_: BookieId) -> str:
        return bookie.address

    client = WireBookieClient(resolve, cluster_id=cookie.cluster_id, config=_CLIENT)
    try:
        yield client, cookie.bookie
    finally:
        await client.aclose()
