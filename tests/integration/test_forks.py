"""Goal: a fork reads all of its records whatever is done to its source, and a kill leaves nothing.

Method: processes, objects in files; a process that forks is killed at each of its steps.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore import LogConfig, LogSettings, QuorumConfig
from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.ids import DLSN
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import amount
from tests.fixtures.tier_worker import CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

WRITING = LogConfig(quorum=QuorumConfig(), segment_bytes_max=60_000, entry_bytes=10_000)
ROWS, STEP = 4_000, 500
LOG = "forked-clicks"
TIME_LIMIT_S = amount(1700, sampled=280)
STEPS_MAX = 40
STRIDE = amount(1, sampled=3)


async def fill(namespace: DirectNamespace, tier: Path) -> list[int]:
    """Write several segments, tier them, and return the entries of each."""
    settings = LogSettings(tier=f"file://{tier}", tier_after_s=0)
    await namespace.create_log(LOG, config=WRITING, settings=settings)
    log = await namespace.open_log(LOG, config=WRITING)
    async with await log.open_writer() as writer:
        for start in range(0, ROWS, STEP):
            await write(writer, range(start, start + STEP))
    assert await LogUpkeep.of(namespace, CONFIG).tier() > 1
    segments = await log.get_log_segments()
    assert all(extent.is_cold for segment in segments for extent in segment.extents)
    return [segment.closed_entry_count for segment in segments]


async def write(writer: object, numbers: range) -> None:
    """Write a row for each number."""
    values = [b"%09d" % number * 12 for number in numbers]
    batch = pa.record_batch({"txid": pa.array(numbers), "value": pa.array(values, pa.binary())})
    await writer.write_batch(batch)  # type: ignore[attr-defined]


async def read(namespace: DirectNamespace, name: str) -> list[tuple[Any, ...]]:
    """Return the rows of a log."""
    log = await namespace.open_log(name)
    columns = ["dlsn", "txid", "sequence_id", "value"]
    table = await (await log.read(columns=columns)).to_arrow()
    return [tuple(row.values()) for row in table.to_pylist()]


async def sweep(namespace: DirectNamespace) -> None:
    """Remove what is not needed, objects too."""
    await LogUpkeep.of(namespace, CONFIG).sweep()


def objects(tier: Path) -> int:
    """Return how many objects there are."""
    return len(list(tier.glob("*/*/*/*.parquet")))


def test_a_source_that_is_truncated_and_deleted(
    fresh_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    """By commands; its fork has all of its records, and is written and tiered on."""

    async def body() -> None:
        tier, uri = tmp_path / "tier", fresh_sandbox().uri
        async with await open_namespace(uri) as namespace:
            entries = await fill(namespace, tier)
            before = await read(namespace, LOG)
            at = DLSN(2, entries[1] // 2, 0)
            reported = await asyncio.to_thread(fork_by_command, uri, str(at), "test")
            assert reported == f"forked log {LOG} at {at} to test"
            kept = before[: len(await read(namespace, "test"))]
            assert ROWS // 8 < len(kept) < ROWS
            assert await read(namespace, "test") == kept
            log = await namespace.open_log(LOG)
            await log.truncate(DLSN(2, 1, 0))
            await namespace.log_context.tidier.settled()
            await sweep(namespace)
            assert await read(namespace, "test") == kept
            await namespace.delete_log(LOG)
            await sweep(namespace)
            assert await read(namespace, "test") == kept
            fork = await namespace.open_log("test", config=WRITING)
            async with await fork.open_writer() as writer:
                await write(writer, range(ROWS, ROWS + STEP))
            assert await LogUpkeep.of(namespace, CONFIG).tier()
            await sweep(namespace)
            found = await read(namespace, "test")
            assert found[: len(kept)] == kept
            assert [row[2] for row in found] == list(range(len(kept) + STEP))
            assert found[len(kept)][0] == {"lssn": 3, "entry": 0, "slot": 0}
            assert objects(tier) > 0
            await namespace.delete_log("test")
            await sweep(namespace)
            assert objects(tier) == 0

    run_in_own_time(asyncio.wait_for(body(), TIME_LIMIT_S))


def fork_by_command(uri: str, at: str, name: str) -> str:
    """Return what the command says, without the time that it took."""
    command = [sys.executable, "-m", "dlcore.ops.cli", "--uri", uri]
    command += ["log", "fork", LOG, "--at", at, name]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    return ended.stdout.rpartition(", in ")[0]


@pytest.mark.timeout(1800)
def test_a_process_that_is_killed_at_each_step(
    fresh_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    """The fork is there whole, or not; then both logs go, and all objects with them."""
    run_in_own_time(asyncio.wait_for(_kill(fresh_sandbox().uri, tmp_path / "tier"), TIME_LIMIT_S))


async def _kill(uri: str, tier: Path) -> None:
    async with await open_namespace(uri) as namespace:
        await fill(namespace, tier)
        before = await read(namespace, LOG)
        ends, made = [], []
        for step in range(1, STEPS_MAX, STRIDE):
            name = f"test-{step}"
            ends.append(await _fork(uri, step, name))
            is_there = await namespace.log_exists(name)
            made.append(is_there)
            await sweep(namespace)
            if is_there:
                assert await read(namespace, name) == before
                await namespace.delete_log(name)
            assert await read(namespace, LOG) == before
            if ends[-1] == 0:
                break
        assert set(ends) == {0, -signal.SIGKILL}
        assert made.count(False) >= 3
        assert made[-1]
        await namespace.delete_log(LOG)
        await sweep(namespace)
        context = namespace.log_context
        assert not await context.store.get_children(context.paths.deleted_logs)
        assert objects(tier) == 0


async def _fork(uri: str, step: int, name: str) -> int:
    """Return how a process ended that forks the log, and kills itself at a step."""
    command = [LOADED_PYTHON, "-m", "tests.fixtures.fork_worker", uri, str(step), LOG, name]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL)
    return await process.wait()
