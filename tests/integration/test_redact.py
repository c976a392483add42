"""Goal: after `dlog log redact` no file has the rows: the needle of one is searched for in all.

Method: real bookies, a tier of files and a Delta table on disk.  The needle is in plain text in
entries, and in the statistics of objects and of the table's commits; what is compressed is read by
Parquet's own reader.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dlcore import LogConfig, LogSettings, QuorumConfig
from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.access.audit import verify
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.redactor import LogRedactor
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import amount
from tests.fixtures.s3 import s3_server
from tests.fixtures.table_readers import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

NEEDLE = "zzz-needle-of-ann@example.org"
WHERE = f"email = '{NEEDLE}'"
SCHEMA = pa.schema([("user_id", pa.int64()), ("email", pa.string())])
COLUMNS = ["_dlsn", "_txid", "_sequence_id", "_timestamp", *SCHEMA.names]
WRITING = LogConfig(quorum=QuorumConfig(), segment_bytes_max=10_000, entry_bytes=2_000)
TIERING = UpkeepConfig(tier_object_bytes=5_000)
BOOKIES = ("--garbage-age-ms=0", "--garbage-interval-s=1", "--session-timeout-s=30")
ROWS = 300
STRIDE = amount(3, sampled=31)
STEPS_MAX = 200
TIME_LIMIT_S = amount(1700, sampled=280)


class Scene:
    """A log with cold and hot segments and a table, beside another log on the same bookies."""

    def __init__(self, cluster: Sandbox, folder: Path, *, url: str = "") -> None:
        self.cluster = cluster
        self.tier = folder / "cold"
        self.url = url or f"file://{self.tier}"
        self.rows = 0

    async def fill(self, namespace: DirectNamespace) -> None:
        """Write, tier, and write more; each twentieth row has the needle."""
        settings = LogSettings(tier=self.url, tier_after_s=0, table="delta")
        await namespace.create_log("other", schema=SCHEMA, config=WRITING)
        await namespace.create_log("clicks", schema=SCHEMA, config=WRITING, settings=settings)
        await self.write(namespace)
        assert await LogUpkeep.of(namespace, TIERING).tier() > 0
        await self.write(namespace)

    async def write(self, namespace: DirectNamespace) -> None:
        """Write rows to both logs."""
        numbers = range(self.rows, self.rows + ROWS)
        emails = [NEEDLE if each % 20 == 7 else f"user-{each}@example.org" for each in numbers]
        await _write(namespace, "clicks", numbers, emails)
        await _write(namespace, "other", numbers, [f"other-{each}" for each in numbers])
        self.rows += ROWS

    def files_with_needle(self) -> list[str]:
        """Return the files in which it is, in plain text or by Parquet's reader."""
        files = [
            path
            for folder in (self.cluster.data_dir, self.tier)
            for path in folder.rglob("*")
            if path.is_file()
        ]
        assert len(files) > 8
        return sorted(str(path) for path in files if _has_needle(path.name, path.read_bytes()))


async def _write(namespace: DirectNamespace, name: str, numbers: range, emails: list[str]) -> None:
    log = await namespace.open_log(name, config=WRITING)
    batch = pa.record_batch([list(numbers), emails], schema=SCHEMA)
    async with await log.open_writer() as writer:
        for start in range(0, len(numbers), 30):
            await writer.write_batch(batch.slice(start, 30))


async def _objects_with_needle(namespace: DirectNamespace, url: str) -> list[str]:
    objects = namespace.log_context.cold.objects
    found = []
    async for page in objects.list_below(url):
        for each in page:
            data = bytes(await objects.read(each.url, 0, each.size_bytes))
            found += [each.url] * _has_needle(each.url, data)
    return found


def _has_needle(name: str, data: bytes) -> bool:
    if NEEDLE.encode() in data:
        return True
    if not name.endswith(".parquet"):
        return False
    table = pq.ParquetFile(pa.BufferReader(data)).read()
    return any(NEEDLE in str(column.to_pylist()) for column in table.columns)


async def _read(namespace: DirectNamespace, name: str) -> list[dict[str, Any]]:
    log = await namespace.open_log(name)
    rows: list[dict[str, Any]] = (await (await log.read(columns=COLUMNS)).to_arrow()).to_pylist()
    return rows


def _redacted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | dict.fromkeys(SCHEMA.names) if row["email"] == NEEDLE else row for row in rows]


def _dlog(uri: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlcore.ops.cli", "--uri", uri, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_needle_is_in_no_file(
    fresh_sandbox: Callable[..., Sandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: bookies, objects, the table with its history, metadata, logs, and the audit log."""
    cluster = fresh_sandbox(3, bookie_options=BOOKIES)
    scene = Scene(cluster, tmp_path)
    before: dict[str, list[dict[str, Any]]] = {}
    monkeypatch.chdir(tmp_path)

    async def fill() -> None:
        async with await open_namespace(cluster.uri) as namespace:
            await scene.fill(namespace)
            for name in ("clicks", "other"):
                before[name] = await _read(namespace, name)

    run_in_own_time(asyncio.wait_for(fill(), TIME_LIMIT_S))
    found = scene.files_with_needle()
    for part in ("bookie-1", "bookie-3", ".parquet", "_delta_log"):
        assert any(part in each for each in found)

    dry = _dlog(cluster.uri, "log", "redact", "clicks", "--where", WHERE, "--dry-run", "--json")
    counts = json.loads(dry.stdout)
    assert (counts["rows"], counts["obstacles"]) == (30, None)
    assert counts["cold_extents"] > 0
    done = _dlog(
        cluster.uri, "log", "redact", "clicks", "--where", WHERE, "--yes", "--json",
        "--patience-s", "120",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    receipt = json.loads(done.stdout)
    assert (receipt["rows"], receipt["left"], receipt["where"]) == (30, None, "email = ?")
    assert scene.files_with_needle() == []
    audit = tmp_path / receipt["audit_file"]
    assert NEEDLE not in audit.read_text()
    assert verify(audit.read_bytes().splitlines(keepends=True))[0] == 1
    line = json.loads(audit.read_text())
    assert (line["entrance"], line["result"]) == ("dlog log redact", "ok")
    assert f"digest=sha256:{receipt['digest']} rows=30" in line["resource"]
    assert receipt["salt"] not in audit.read_text()

    async def check() -> None:
        async with await open_namespace(cluster.uri) as namespace:
            assert await _read(namespace, "other") == before["other"]
            assert await _read(namespace, "clicks") == _redacted(before["clicks"])
            await _check_table(namespace, scene)

    run_in_own_time(asyncio.wait_for(check(), TIME_LIMIT_S))


async def _check_table(namespace: DirectNamespace, scene: Scene) -> None:
    """Require that the table has what is cold, without the rows, and that it goes on."""
    log = await namespace.log_context.logs.find("clicks")
    url = f"{scene.tier}/{namespace.log_context.cluster_id}/{log.log_id}"
    rows = _redacted(await _read(namespace, "clicks"))
    for count in (ROWS, 2 * ROWS):
        table = rows_of(DeltaTable(url), ["_sequence_id", *SCHEMA.names])
        assert table.sort_by("_sequence_id").to_pylist() == [
            {name: row[name] for name in ("_sequence_id", *SCHEMA.names)} for row in rows[:count]
        ]
        await LogUpkeep.of(namespace, TIERING).tier()


def test_the_needle_is_in_no_object_of_a_bucket(
    fresh_sandbox: Callable[..., Sandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the same over an S3 server; of the bucket each object is read."""
    cluster = fresh_sandbox(3, bookie_options=BOOKIES)

    async def main(scene: Scene) -> None:
        async with await open_namespace(cluster.uri) as namespace:
            await scene.fill(namespace)
            before = await _read(namespace, "clicks")
            found = await _objects_with_needle(namespace, scene.url)
            assert {each.rpartition(".")[2] for each in found} == {"parquet", "json"}
            redactor = await LogRedactor.open(
                namespace.log_context, namespace.staging_owner, "clicks", WHERE, config=TIERING
            )
            assert (await redactor.redact()).left == ()
            assert await _read(namespace, "clicks") == _redacted(before)
            assert await _objects_with_needle(namespace, scene.url) == []

    with s3_server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        scene = Scene(cluster, tmp_path, url=f"{server.url}/t")
        run_in_own_time(asyncio.wait_for(main(scene), TIME_LIMIT_S))
        assert scene.files_with_needle() == []


@pytest.mark.timeout(1800)  # some seconds for each step, with --full
def test_the_command_goes_on_after_a_kill_at_any_step(
    fresh_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    """Goal: the same command, again and again killed, ends with the same log and no needle."""
    cluster = fresh_sandbox(3, bookie_options=BOOKIES)
    scene = Scene(cluster, tmp_path)

    async def main() -> None:
        async with await open_namespace(cluster.uri) as namespace:
            await scene.fill(namespace)
            before = await _read(namespace, "clicks")
            ends = []
            for step in range(7, STEPS_MAX, STRIDE):
                ends.append(await _run_worker(cluster.uri, step))
                seen = await _read(namespace, "clicks")
                assert [each["_dlsn"] for each in seen] == [each["_dlsn"] for each in before]
                assert _redacted(seen) == _redacted(before) or _redacted_some(seen, before)
            assert set(ends) <= {0, -signal.SIGKILL}
            assert -signal.SIGKILL in ends
            assert await _run_worker(cluster.uri, 0) == 0
            assert await _read(namespace, "clicks") == _redacted(before)

    run_in_own_time(asyncio.wait_for(main(), TIME_LIMIT_S))
    assert scene.files_with_needle() == []


def _redacted_some(seen: list[dict[str, Any]], before: list[dict[str, Any]]) -> bool:
    """Return whether each row is as before, or as it is in the end."""
    after = _redacted(before)
    return all(row in pair for row, *pair in zip(seen, before, after, strict=True))


async def _run_worker(uri: str, step: int) -> int:
    """Return how a worker ended."""
    command = [LOADED_PYTHON, "-m", "tests.fixtures.redact_worker", uri, "clicks", WHERE]
    process = await asyncio.create_subprocess_exec(*command, str(step), stdin=subprocess.DEVNULL)
    return await process.wait()
