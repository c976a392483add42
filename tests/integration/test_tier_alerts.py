"""Alerts about tiers and tables of logs: as in `test_alerts.py`, over a cluster of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.clock import steady_s
from dlcore.base.config import LogSettings
from dlcore.base.records import LogRecord
from dlcore.ops.autorecovery.metrics import TIER_ROUND, TieringFigures
from dlcore.sync import open_namespace
from tests.fixtures import watched as watching
from tests.fixtures.alerts import PROMTOOL
from tests.fixtures.operators import scraped
from tests.fixtures.table_worker import CATALOG_URI
from tests.fixtures.waiting import wait_until
from tests.fixtures.watched import WAIT_S, other_port, require_fires, watched_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fixtures.alerts import Seen
    from tests.fixtures.runbook import Operator
    from tests.fixtures.shell import Shell
    from tests.fixtures.watched import Watched

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(PROMTOOL is None, reason="Debian's package prometheus has promtool"),
]
shell, operator = watching.shell, watching.operator
"""Fixtures over the `watched` of this module."""


@pytest.fixture(scope="module")
def catalogs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the catalog that the cluster's workers know; it is not there."""
    folder = tmp_path_factory.mktemp("catalogs") / "away"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CATALOG_URI, f"sqlite:///{folder}/catalog.db")
        yield folder


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, catalogs: Path) -> Iterator[Watched]:
    """A cluster that the tests share; each undoes its fault."""
    assert not catalogs.exists()
    with watched_cluster(tmp_path_factory.mktemp("alerts")) as cluster:
        yield cluster


def test_a_tier_that_refuses(watched: Watched, tmp_path: Path, operator: Operator) -> None:
    """A file is where its folder should be; once it is gone, the segments are there."""
    failing, place = "dlog_autorecovery_tier_failing_logs", tmp_path / "tier"
    errors = "dlog_autorecovery_tier_errors_total"
    before = watched.look()
    place.write_bytes(b"")
    logs = ["refused-1", "refused-2"]
    for log in logs:
        _write_segment(watched, log, LogSettings(tier=f"file://{place}/here", tier_after_s=0))
    wait_until(lambda: watched.value("autorecovery", failing) == len(logs), timeout_s=WAIT_S)
    during = watched.look()
    seen = operator.look("DlogTierFails")
    assert "tiering log refused-" in seen
    assert f"file://{place}/here" in seen
    (kind,) = scraped(watched.url("autorecovery"), errors)[errors]
    assert kind == ("ObjectStoreError",)
    operator.knowing(LOG=logs[0]).act("DlogTierFails")
    place.unlink()
    wait_until(lambda: not watched.value("autorecovery", failing), timeout_s=WAIT_S)
    assert len(list(place.glob("here/*/*/*/*.parquet"))) == len(logs)
    require_fires(["DlogTierFails"], tmp_path, before, during, watched.look)


def test_a_catalog_that_is_away(
    watched: Watched, tmp_path: Path, operator: Operator, shell: Shell, catalogs: Path
) -> None:
    """The log goes to its tier meanwhile, and the table follows once the catalog is there."""
    failing, longest = (f"dlog_autorecovery_table_failing_{each}" for each in ("logs", "seconds"))
    before = watched.look()
    settings = LogSettings(tier=f"file://{tmp_path}/tier", tier_after_s=0, table="iceberg")
    _write_segment(watched, "trips", settings)
    wait_until(lambda: watched.value("autorecovery", longest) > 1, timeout_s=WAIT_S)
    during = watched.look()
    assert watched.value("autorecovery", failing) == 1
    assert not watched.value("autorecovery", "dlog_autorecovery_tier_failing_logs")
    assert "dlog autorecovery status says" in shell.outcome("log", "table", "trips")[2]
    status = shell.text("autorecovery", "status")
    assert "the table of log trips: ObjectStoreError" in status
    assert "unable to open database file" in status
    catalogs.mkdir()
    wait_until(lambda: not watched.value("autorecovery", failing), timeout_s=WAIT_S)
    operator = operator.knowing(LOG="trips")
    assert "iceberg" in operator.look("DlogTableFails")
    operator.act("DlogTableFails")
    require_fires(["DlogTableFails"], tmp_path, before, during, watched.look)


def test_a_round_of_tiering_that_lasts(
    watched: Watched, tmp_path: Path, operator: Operator, shell: Shell
) -> None:
    """The process tells since when the round in progress lasts; none does for an hour here."""
    before = watched.look()

    (series,) = (each for each in before if TIER_ROUND.name in each)

    def seen(since_s: float) -> Seen:
        samples = TieringFigures(round_s=steady_s() - since_s).samples()
        (value,) = (each.value for each in samples if each.metric is TIER_ROUND)
        assert isinstance(value, float)
        return before | {series: value}

    assert "dlog_autorecovery_tier_round_seconds" in operator.look("DlogTierSlow")
    with other_port(watched):
        operator.act("DlogTierSlow")
    with other_port(watched):
        shell.text("cluster", "settings", "--unset", "autorecovery.tier_bytes_per_s")
    require_fires(["DlogTierSlow"], tmp_path, before, seen(4000.0), lambda: seen(60.0))


def _write_segment(watched: Watched, log: str, settings: LogSettings) -> None:
    """Make a log with a record in a completed segment."""
    with open_namespace(watched.sandbox.uri) as namespace:
        namespace.create_log(log, settings=settings)
        with namespace.open_log(log).open_writer() as writer:
            writer.write(LogRecord(0, b"x"))
            writer.mark_end_of_stream()
