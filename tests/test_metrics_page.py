"""Metrics are named by the rules, and pages, rules and dashboards name only those that exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from dlcore.base.metrics import Kind
from tests import dashboards_document, metrics_document
from tests.fixtures.alerts import PROMTOOL, RULES
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.made_parts import require_as_made

if TYPE_CHECKING:
    from pathlib import Path

METRICS = [each for table in metrics_document.TABLES.values() for each in table]
SAMPLES = {
    f"{each.name}{end}"
    for each in METRICS
    for end in (("_bucket", "_count", "_sum") if each.kind is Kind.HISTOGRAM else ("",))
}


def unknown_in(text: str) -> set[str]:
    """Return the samples that a text names, and that no process has."""
    return set(re.findall(r"\bdlog_[a-z_]+", text)) - SAMPLES


def test_the_page_of_metrics_is_that_of_the_code() -> None:
    """`make pages` was run after the last change."""
    require_as_made(metrics_document.DOCUMENT, metrics_document.page())


def test_names_are_prometheus_own() -> None:
    """Each once; a counter ends in `_total`, a histogram in its unit; no text ends in a stop."""
    assert not [name for name, count in Counter(each.name for each in METRICS).items() if count > 1]
    for each in METRICS:
        assert re.fullmatch(r"dlog_[a-z_]+", each.name)
        assert each.name.endswith("_total") == (each.kind is Kind.COUNTER)
        assert each.kind is not Kind.HISTOGRAM or each.name.endswith("_seconds")
        assert each.text
        assert not each.text.endswith(".")


def test_rules_and_their_page_name_metrics_that_exist() -> None:
    """A metric that was renamed would make an alert silent for ever."""
    assert not unknown_in(RULES.read_text(encoding="utf-8"))
    page = (REPOSITORY / "docs" / "alerts.md").read_text(encoding="utf-8")
    assert not unknown_in(page) - {each.name for each in METRICS}


@pytest.mark.parametrize("role", dashboards_document.DASHBOARDS)
def test_a_dashboard_is_the_generated_one(role: str) -> None:
    """It has a title for each panel, and names metrics that exist."""
    path = dashboards_document.FOLDER / f"{role}.json"
    require_as_made(path, dashboards_document.dashboard(role))
    panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
    assert not unknown_in(json.dumps([each["targets"] for each in panels]))
    assert all(each["title"] for each in panels)


@pytest.mark.skipif(PROMTOOL is None, reason="Debian's package prometheus has promtool")
def test_the_expressions_of_dashboards_are_valid(tmp_path: Path) -> None:
    """Promtool reads them as recording rules."""
    rules = [
        {"record": f"panel:{role}:{number}", "expr": panel.expression}
        for role in dashboards_document.DASHBOARDS
        for number, panel in enumerate(dashboards_document.panels_of(role))
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
