"""The restore drill: all metadata and all bookies are lost, and what is in objects is read.

Goal: each record that is in objects is read at its position, what is lost is named
for each log, and no position is given twice.  Method: processes and a folder of objects; the data
of metadata server and bookies is deleted.
"""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from dlcore import LogConfig, LogSettings, QuorumConfig
from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.ops.sandbox.metadata_server import EmbeddedMetadataServer
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.shell import Shell
from tests.fixtures.tier_worker import CONFIG

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

WRITING = LogConfig(quorum=QuorumConfig(), segment_bytes_max=20_000, entry_bytes=2_000)
TIME_LIMIT_S = 120
LOGS = ("clicks", "views", "hot")


def on_namespace(uri: str, body: Callable[[DirectNamespace], Awaitable[None]]) -> None:
    """Run `body` with the namespace."""

    async def run() -> None:
        async with await open_namespace(uri) as namespace:
            await body(namespace)

    run_in_own_time(asyncio.wait_for(run(), TIME_LIMIT_S))


async def write(namespace: DirectNamespace, name: str, first: int, count: int) -> None:
    """Write records, in some segments."""
    log = await namespace.open_log(name, config=WRITING)
    async with await log.open_writer() as writer:
        for number in range(first, first + count):
            await writer.write(LogRecord(number, b"%d" % number * 50))


async def read(namespace: DirectNamespace, name: str) -> list[LogRecordWithDLSN]:
    """Return the records of a log."""
    async with await (await namespace.open_log(name)).open_reader() as reader:
        found: list[LogRecordWithDLSN] = []
        while more := await reader.read_bulk(1000, until_caught_up=True):
            found += more
        return found


class Drill:
    """The content before the loss, and the report of the restore."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.before: dict[str, list[LogRecordWithDLSN]] = {"hot": []}
        """The records of each log that are in objects."""
        self.positions: dict[str, DLSN] = {}
        """The number of the last record that was ever written."""
        self.rows_by_log: dict[str, dict[str, Any]] = {}

    async def fill(self, namespace: DirectNamespace) -> None:
        """Write and tier, fork, and write something that stays on bookies."""
        settings = LogSettings(tier=self.tier, tier_after_s=0)
        for name in LOGS:
            own = LogSettings() if name == "hot" else settings
            await namespace.create_log(name, config=WRITING, settings=own)
            await write(namespace, name, 0, 400)
        await LogUpkeep.of(namespace, CONFIG).tier()
        for name in ("clicks", "views"):
            self.before[name] = await read(namespace, name)
        at = self.before["clicks"][150].dlsn
        await namespace.fork_log("clicks", "forked", at=DLSN(at.lssn, at.entry_id, 0))
        self.before["forked"] = await read(namespace, "forked")
        await write(namespace, "clicks", 400, 10)

    async def write_more(self, namespace: DirectNamespace) -> None:
        """Write what the export does not know; of one log it becomes cold."""
        for name in LOGS:
            await write(namespace, name, 450, 200)
            self.positions[name] = (await read(namespace, name))[-1].dlsn
        await (await namespace.open_log("clicks")).update_settings(tier=None)
        assert await LogUpkeep.of(namespace, CONFIG).tier()
        self.before["views"] = await read(namespace, "views")
        assert len(self.before["views"]) == 600

    def check_answer(self, rows: list[dict[str, Any]]) -> None:
        """Require that the restore names what is lost of each log."""
        self.rows_by_log = {row["log"]: row for row in rows}
        assert sorted(self.rows_by_log) == sorted([*LOGS, "forked"])
        for name, row in self.rows_by_log.items():
            assert row["records"] == len(self.before[name])
        lssn = self.before["clicks"][-1].dlsn.lssn
        lost = f"{DLSN(lssn + 1, 0, 0)} … {DLSN(lssn + 2, 0, 0)}"
        assert [self.rows_by_log[name]["lost"] for name in ("clicks", "views")] == [lost, ""]
        assert self.rows_by_log["hot"]["lost"].startswith("1:0:0 … ")

    async def compare(self, namespace: DirectNamespace) -> None:
        """Require the records of before, then write, tier, delete and sweep."""
        for name, kept in self.before.items():
            assert await read(namespace, name) == kept
            await write(namespace, name, 10_000, 100)
            found = await read(namespace, name)
            assert found[: len(kept)] == kept
            assert len(found) == len(kept) + 100
            begun = found[len(kept)].dlsn
            assert str(begun) == self.rows_by_log[name]["next"]
            assert begun > self.positions.get(name, DLSN(1, 0, 0))
        log = await namespace.open_log("clicks")
        async with await log.open_reader(dlsn=self.positions["clicks"]) as reader:
            record = await reader.read_next()  # it was at a lost position
            assert record is not None
            assert record.txid == 10_000
        assert await LogUpkeep.of(namespace, CONFIG).tier()
        await namespace.delete_log("forked")
        await self.sweep(namespace)

    async def sweep(self, namespace: DirectNamespace) -> None:
        """Require that a sweep deletes nothing that is needed."""
        await LogUpkeep.of(namespace, CONFIG).sweep()
        for name in ("clicks", "views"):
            kept = self.before[name]
            assert (await read(namespace, name))[: len(kept)] == kept


def test_objects_survive_the_loss_of_everything_else(
    fresh_sandbox: Callable[..., Sandbox], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Write, tier, export, write more, lose all, restore, and compare."""
    cluster, tier = fresh_sandbox(3), f"file://{tmp_path}/tier"
    shell, drill = Shell(cluster.uri, capsys), Drill(tier)
    on_namespace(cluster.uri, drill.fill)
    exported = shell.json("metadata", "export", tier)
    assert exported["file"].startswith(f"{tier}/metadata/{exported['cluster']}/")
    on_namespace(cluster.uri, drill.write_more)
    cluster.stop()
    shutil.rmtree(cluster.data_dir)

    anew = tmp_path / "anew"
    with EmbeddedMetadataServer(anew / "metadata") as server:
        shell = Shell(f"distributedlog://{server.servers}/dlog", capsys)
        first = min(
            (tmp_path / "tier").glob("*/*/*/*.parquet"), key=lambda each: each.stat().st_mtime
        )
        hidden = first.rename(tmp_path / "hidden")
        refused = shell.outcome("restore", "--from", tier)
        assert (refused[0], first.name in refused[2]) == (1, True)
        assert "1 objects that the export names are not there" in refused[2]
        assert "with --lose-missing their records are taken for lost" in refused[2]
        less = shell.json("restore", "--from", tier, "--dry-run", "--lose-missing")
        hidden.rename(first)
        assert shell.json("restore", "--from", tier, "--dry-run")["dry_run"]
        report = shell.json("restore", "--from", tier)
        fewer = [
            a["log"]
            for a, b in zip(less["logs"], report["logs"], strict=True)
            if a["records"] < b["records"] and a["lost"] != b["lost"]
        ]
        assert fewer  # a fork shares the object
        assert "there is a namespace" in shell.outcome("restore", "--from", tier)[2]
    assert (report["cluster"], report["dry_run"]) == (exported["cluster"], False)
    assert 0 <= report["recovery_point_age_s"] < TIME_LIMIT_S
    drill.check_answer(report["logs"])

    again = fresh_sandbox(3, data_dir=anew)
    shell = Shell(again.uri, capsys)
    on_namespace(again.uri, drill.compare)
    assert shell.json("log", "inspect", "--entries") == []
    assert shell.json("metadata", "accept", "--yes")["accepted"]
    on_namespace(again.uri, drill.sweep)
