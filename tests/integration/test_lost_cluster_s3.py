"""The drill of docs/restore.md over a real S3 server: auto-recovery exports and tiers, ZooKeeper
and all bookies are lost, and a restore brings back what is in objects.

Goal: each record of a cold segment is read at its position, the records that were not tiered are
named, and the age of the export and the time are shown.  Method: processes; their data is deleted.
`python -m pytest -s tests/integration/test_lost_cluster_s3.py` prints the figures of the page.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.config import LogConfig, LogSettings, QuorumConfig
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.ops.sandbox.metadata_server import EmbeddedMetadataServer
from dlcore.sync import open_namespace
from tests.fixtures.s3 import s3_server
from tests.fixtures.shell import Shell
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import DistributedLogManager, Namespace

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

WAIT_S = 120.0
WRITING = LogConfig(quorum=QuorumConfig(), segment_bytes_max=20_000, entry_bytes=2_000)
COLD = ("clicks", "views")
LOGS = (*COLD, "hot")
COUNT, TAIL, LATE, KEEP = 400, 7, 30, 3
SETTINGS = {
    "tier_after_s": "0",
    "tier_interval_s": "0.5",
    "export_every_s": "0.5",
    "export_keep": str(KEEP),
}

Rows = list[tuple[DLSN, bytes]]
"""Positions and values of records."""


def _is_cold(log: DistributedLogManager) -> bool:
    return all(extent.is_cold for each in log.get_log_segments() for extent in each.extents)


def write(namespace: Namespace, name: str, first: int, count: int) -> None:
    """Write records, in some segments."""
    with namespace.open_log(name, config=WRITING) as log, log.open_writer() as writer:
        for number in range(first, first + count):
            writer.write(LogRecord(number, b"%d" % number * 50))


def rows_of(namespace: Namespace, name: str) -> Rows:
    """Return the records of a log."""
    with namespace.open_log(name) as log:
        table = log.read(columns=["dlsn", "value"]).to_arrow()
    places = [DLSN(*each.values()) for each in table["dlsn"].to_pylist()]
    return list(zip(places, table["value"].to_pylist(), strict=True))


class Drill:
    """A cluster in use, whose logs are tiered and whose metadata is exported by itself."""

    def __init__(self, cluster: Sandbox, shell: Shell, place: str) -> None:
        self.cluster = cluster
        self.shell = shell
        self.place = place
        self.cold: dict[str, Rows] = {}
        """The records of each log that are in objects."""
        self.first_lost: dict[str, str] = {}

    def set_up(self, namespace: Namespace) -> None:
        """Set where everything goes, and make the logs."""
        settings = {"tier": self.place, "export": self.place, **SETTINGS}
        pairs = [("--set", f"autorecovery.{key}={value}") for key, value in settings.items()]
        self.shell.text("cluster", "settings", *(word for pair in pairs for word in pair))
        for name in LOGS:
            own = LogSettings() if name in COLD else LogSettings(tier="none")
            namespace.create_log(name, config=WRITING, settings=own)

    def fill(self, namespace: Namespace) -> None:
        """Write, until all of the logs with a tier is cold."""
        for name in LOGS:
            write(namespace, name, 0, COUNT)
            with namespace.open_log(name) as log:
                if name in COLD:
                    wait_until(partial(_is_cold, log), timeout_s=WAIT_S)

    def exported(self) -> dict[str, Any]:
        """Return what the status says of exports."""
        status = self.shell.json("autorecovery", "status")
        return {"exported": status["exported"], "export": status["export"]}

    def wait_for_exports(self, count: int) -> str:
        """Return the newest export after so many more."""
        seen = {self.exported()["export"]}

        def are_there() -> bool:
            seen.add(self.exported()["export"])
            return len(seen) > count

        wait_until(are_there, timeout_s=WAIT_S)
        return str(self.exported()["export"])

    def note(self, namespace: Namespace) -> None:
        """Note what is in objects, and where the rest begins."""
        for name in LOGS:
            rows = rows_of(namespace, name)
            with namespace.open_log(name) as log:
                warm = [
                    each.lssn
                    for each in log.get_log_segments()
                    if not each.extents or not all(extent.is_cold for extent in each.extents)
                ]
            first = DLSN(min(warm), 0, 0)
            self.first_lost[name] = str(first)
            self.cold[name] = [row for row in rows if row[0] < first]
            assert len(self.cold[name]) < len(rows)
        assert self.cold["hot"] == []

    def check_answer(self, report: dict[str, Any]) -> None:
        """Require that the restore names all that is not there."""
        rows = {row["log"]: row for row in report["logs"]}
        assert sorted(rows) == sorted(LOGS)
        for name in LOGS:
            assert rows[name]["records"] == len(self.cold[name])
            assert rows[name]["lost"].startswith(f"{self.first_lost[name]} "), rows[name]


def test_everything_but_the_objects_is_lost(
    fresh_sandbox: Callable[..., Sandbox],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Export and tier by settings alone, lose ZooKeeper and the bookies, restore, and compare."""
    with s3_server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        place = f"{server.url}/dlog"
        cluster = fresh_sandbox(3, zookeeper=True, autorecovery=True)
        drill = Drill(cluster, Shell(cluster.uri, capsys), place)
        newest, written = _use(drill)
        cluster.stop()
        shutil.rmtree(cluster.data_dir)

        anew = tmp_path / "anew"
        with EmbeddedMetadataServer(anew / "metadata") as metadata:
            shell = Shell(f"distributedlog://{metadata.servers}/dlog", capsys)
            named = shell.json("restore", "--from", newest, "--dry-run")
            report = shell.json("restore", "--from", place)
        assert report["logs"] == named["logs"]
        assert report["exported"] == named["exported"]
        drill.check_answer(report)

        again = fresh_sandbox(3, data_dir=anew, autorecovery=True)
        shell = Shell(again.uri, capsys)
        with open_namespace(again.uri) as namespace:
            for name in LOGS:
                assert rows_of(namespace, name) == drill.cold[name]
                write(namespace, name, 10_000, 1)
                assert len(rows_of(namespace, name)) == len(drill.cold[name]) + 1
        after = Drill(again, shell, place)
        assert after.exported()["export"] != newest  # that one does not know of itself
        assert shell.json("metadata", "accept", "--yes")["accepted"]
        wait_until(lambda: (after.exported()["export"] or "") > newest, timeout_s=WAIT_S)
    kept = sum(map(len, drill.cold.values()))
    figures = {
        "recovery_point_age_s": report["recovery_point_age_s"],
        "records_lost": written - kept,
        "records_kept": kept,
        "took_s": report["took_s"],
    }
    with capsys.disabled():
        print(json.dumps(figures))  # for docs/restore.md


def _use(drill: Drill) -> tuple[str, int]:
    """Use the cluster until it is lost; return its newest export, and how much was written."""
    with open_namespace(drill.cluster.uri) as namespace, ExitStack() as stack:
        drill.set_up(namespace)
        drill.fill(namespace)
        for name in COLD:
            log = stack.enter_context(namespace.open_log(name, config=WRITING))
            writer = stack.enter_context(log.open_writer())  # its segment is not completed
            for number in range(COUNT, COUNT + TAIL):
                writer.write(LogRecord(number, b"tail"))
            writer.flush()
        newest = drill.wait_for_exports(KEEP + 2)
        assert newest.startswith(f"{drill.place}/metadata/")
        assert drill.cluster.autorecovery is not None
        drill.cluster.autorecovery.kill()
        newest = str(drill.exported()["export"])
        write(namespace, "hot", COUNT, LATE)  # the export does not know of these
        drill.note(namespace)
    return newest, len(LOGS) * COUNT + len(COLD) * TAIL + LATE
