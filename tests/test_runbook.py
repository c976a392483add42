"""Each alert has its page, which its rule names, with commands, paths and metrics that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from dlcore.base.config import LogSettings
from dlcore.base.listening.operator_port import ENTRANCES
from dlcore.ops.live_settings import is_live
from tests.fixtures.alerts import RULES
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.runbook import FOLDER, HOST, PORTS, commands_of, part_of
from tests.fixtures.shell import require_command
from tests.test_metrics_page import METRICS, unknown_in

GROUPS = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
ANNOTATIONS = {rule["alert"]: rule["annotations"] for group in GROUPS for rule in group["rules"]}
PARTS = ["Look", "Do", "Over"]
UNITS = {path.stem for path in (REPOSITORY / "deploy" / "systemd").glob("*.service")}
PATHS = {each.name.removeprefix("GET ") for each in ENTRANCES}


def test_each_alert_has_its_page_and_its_rehearsal() -> None:
    """No page is of an alert that is gone; the list of alerts links to each."""
    differing = {path.stem for path in FOLDER.glob("*.md")} ^ set(ANNOTATIONS)
    assert not differing, f"each alert of {RULES.name} has a page docs/runbook/NAME.md"
    listed = (REPOSITORY / "docs" / "alerts.md").read_text(encoding="utf-8")
    rehearsals = (Path(__file__).parent / "integration").glob("test_*alerts.py")
    rehearsed = "".join(each.read_text(encoding="utf-8") for each in rehearsals)
    for alert, texts in ANNOTATIONS.items():
        assert texts["runbook_url"] == f"docs/runbook/{alert}.md"
        assert listed.count(f"[{alert}](runbook/{alert}.md)") == 1, f"docs/alerts.md: {alert}"
        assert f'"{alert}"' in rehearsed, f"no tests/integration/test_*alerts.py makes {alert} fire"


@pytest.mark.parametrize("alert", ANNOTATIONS)
def test_a_page_says_what_can_be_done(alert: str) -> None:
    """It has its parts in order; metrics and linked pages exist."""
    page = (FOLDER / f"{alert}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {alert}\n\n")
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == PARTS
    assert all(part_of(alert, each).strip() for each in PARTS)
    assert not unknown_in(page) - {each.name for each in METRICS}
    for target in re.findall(r"\]\(([^)#]+)", page):
        assert (FOLDER / target).exists(), target


@pytest.mark.parametrize("alert", ANNOTATIONS)
def test_a_page_names_commands_that_exist(alert: str) -> None:
    """Those in blocks, and those within sentences, with their options and settings."""
    page = (FOLDER / f"{alert}.md").read_text(encoding="utf-8")
    quoted = [each for each in re.findall(r"`([a-z]+ [^`]+)`", page) if each.split()[0] == "dlog"]
    blocks = [line for each in PARTS for line in commands_of(alert, each)]
    assert blocks
    for line in (*quoted, *blocks):
        program, *words = shlex.split(line)
        if program == "dlog":
            require_command(words)
        elif program == "curl":
            port, _, path = words[-1].removeprefix("http://HOST:").partition("/")
            assert port in PORTS
            assert f"/{path}" in PATHS
        else:
            assert program in HOST, line
        for word in words:
            unit = word.startswith("dlog-") and program in ("systemctl", "journalctl")
            assert not unit or word in UNITS, line
    settings = set(re.findall(r"--(?:un)?set ([a-z_.]+)", page))
    of_clusters = {each for each in settings if "." in each}
    assert settings - of_clusters <= set(LogSettings.__struct_fields__)
    for each in of_clusters:
        table, key = each.split(".")
        assert is_live(table, key)
