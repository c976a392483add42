"""Goal: no kill of a worker loses or doubles a record.  Method: processes, killed at each step."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa
import pytest

from dlcore import LogConfig, LogSettings, QuorumConfig
from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.ids import DLSN
from dlcore.log.upkeep.staged import list_staged, read_owners
from dlcore.ops.upkeep.swap import MERGING_IDENTITY
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.fixtures.aio import until_async
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import amount
from tests.fixtures.s3 import s3_server
from tests.fixtures.tier_worker import CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

WRITING = LogConfig(quorum=QuorumConfig(), segment_bytes_max=150_000, entry_bytes=10_000)
ROWS = 5_000
TAIL = 100
STEPS_MAX = 60
STRIDE = amount(1, sampled=7)
TIME_LIMIT_S = amount(1700, sampled=280)
BYTES = pa.schema([("txid", pa.int64()), ("value", pa.binary())])
LOGS = {
    "cold-clicks": BYTES,
    "cold-rides": pa.schema([("fare", pa.float64()), ("city", pa.string())]),
}


@pytest.mark.timeout(1800)  # some seconds for each step, with --full
def test_a_worker_that_is_killed_at_each_step(sandbox: Sandbox, tmp_path: Path) -> None:
    """Readers see each record once all the time; then DuckDB counts the same in the objects."""
    tier = tmp_path / "tier"
    run_in_own_time(asyncio.wait_for(_kill_at_each_step(sandbox.uri, tier), TIME_LIMIT_S))


async def _kill_at_each_step(uri: str, tier: Path) -> None:
    async with await open_namespace(uri) as namespace:
        await _fill(namespace, f"file://{tier}")
        ends = []
        for step in range(1, STEPS_MAX, STRIDE):
            ends.append(await _run_worker(uri, step))
            await _check(namespace)
        assert set(ends) <= {0, -signal.SIGKILL}
        assert ends.count(-signal.SIGKILL) > len(ends) // 3
        assert await _run_worker(uri, 0) == 0
        await _check(namespace)
        await _sweep(namespace)
        await _check(namespace)
        for name in LOGS:
            await _count(namespace, name, tier)


async def _count(namespace: DirectNamespace, name: str, tier: Path) -> None:
    """Require that objects have what is cold, as another program counts it, and the log a tail."""
    log = await namespace.open_log(name)
    segments = await log.get_log_segments()
    assert all(extent.is_cold for segment in segments for extent in segment.extents)
    async with await log.open_writer() as writer:
        await writer.write_batch(_batch(LOGS[name], range(ROWS, ROWS + TAIL)))
        query = (
            "SELECT count(*), count(DISTINCT _sequence_id), min(_sequence_id), max(_sequence_id) "
            f"FROM '{tier}/*/{log.log_id}/*/*.parquet'"
        )
        with duckdb.connect() as connection:
            assert connection.sql(query).fetchall() == [(ROWS, ROWS, 0, ROWS - 1)]
        tail = await (await log.read(start=DLSN(segments[-1].lssn + 1, 0, 0))).to_arrow()
        assert tail.num_rows == TAIL
        assert (await (await log.read()).to_arrow()).num_rows == ROWS + TAIL


def _batch(schema: pa.Schema, numbers: range) -> pa.RecordBatch:
    """Return a row for each number."""
    columns = [pa.array(numbers), pa.array([b"%09d" % number * 12 for number in numbers])]
    return pa.RecordBatch.from_arrays(columns, names=schema.names).cast(schema)


async def _fill(namespace: DirectNamespace, tier: str) -> None:
    settings = LogSettings(tier=tier, tier_after_s=0)
    for name, schema in LOGS.items():
        if await namespace.log_exists(name):
            await namespace.delete_log(name)
        typed = None if schema is BYTES else schema
        await namespace.create_log(name, config=WRITING, settings=settings, schema=typed)
        log = await namespace.open_log(name, config=WRITING)
        async with await log.open_writer() as writer:
            for start in range(0, ROWS, 500):
                await writer.write_batch(_batch(schema, range(start, start + 500)))


async def _check(namespace: DirectNamespace) -> None:
    """Require that both logs have each row once and in order."""
    for name, schema in LOGS.items():
        log = await namespace.open_log(name)
        columns = ["sequence_id" if schema is BYTES else "_sequence_id", schema.names[0]]
        found = await (await log.read(columns=columns)).to_arrow()
        assert found[0].to_pylist() == list(range(ROWS))
        assert found[1].to_pylist() == list(range(ROWS))


async def _run_worker(uri: str, step: int) -> int:
    """Return how a worker ended."""
    command = [LOADED_PYTHON, "-m", "tests.fixtures.tier_worker", uri, str(step)]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL)
    return await process.wait()


async def _sweep(namespace: DirectNamespace) -> None:
    """Remove what the dead left, once their sessions are over."""
    context = namespace.log_context

    async def are_gone() -> bool:
        return not await read_owners(context)

    await until_async(are_gone)
    await LogUpkeep.of(namespace, CONFIG).sweep()
    assert await list_staged(context, MERGING_IDENTITY) == []


def test_a_log_over_s3(
    fresh_sandbox: Callable[..., Sandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same over a real S3 server, to which a reader that follows the log goes too.

    The cluster remembers the server, which is gone later, so that no other test may use it.
    """
    cluster = fresh_sandbox(3)
    with s3_server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        run_in_own_time(asyncio.wait_for(_over_s3(cluster.uri, f"{server.url}/t"), TIME_LIMIT_S))


async def _over_s3(uri: str, tier: str) -> None:
    async with await open_namespace(uri) as namespace:
        await _fill(namespace, tier)
        assert await LogUpkeep.of(namespace, CONFIG).tier() > 1
        await _check(namespace)
        log = await namespace.open_log("cold-clicks")
        async with await log.open_reader() as reader:
            found: list[LogRecordWithDLSN] = []
            while len(found) < ROWS:
                found += await reader.read_bulk(1000)
        assert [each.sequence_id for each in found] == list(range(ROWS))
