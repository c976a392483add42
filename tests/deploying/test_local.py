"""The settings of spark-conf for one machine: a session starts with them, writes and reads."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore.sync import open_namespace
from tests.fixtures.deployment import deployed_environment, submit
from tests.fixtures.spark import ROOT, finds_formats

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = [
    pytest.mark.spark,
    pytest.mark.integration,
    pytest.mark.prove,  # a session of its own
    pytest.mark.timeout(300),
]


def test_a_session_with_the_settings_for_one_machine(sandbox: Sandbox, tmp_path: Path) -> None:
    """`SPARK_CONF_DIR` names the folder, and nothing else is set that it sets."""
    log = f"local/{uuid4().hex}"
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(log)
    work = {
        "uri": sandbox.uri,
        "log": log,
        "checkpoint": str(tmp_path / "checkpoint"),
        "artifacts": [],
        "registers": not finds_formats(sys.executable),
    }
    done = submit(
        [
            *("--conf", "spark.ui.enabled=false", "--driver-memory", "768m"),
            *("--conf", f"spark.sql.warehouse.dir={tmp_path / 'warehouse'}"),
            str(ROOT / "tests" / "deploying" / "job.py"),
            json.dumps(work),
        ],
        environment={
            **deployed_environment(tmp_path),
            "SPARK_CONF_DIR": str(ROOT / "spark-conf" / "local"),
            "PYTHONPATH": str(ROOT),
            "PYSPARK_PYTHON": sys.executable,
        },
        folder=tmp_path,
        timeout_s=280,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "batch": [1000, 999],
        "stream": 1000,
        "executors": 0,
        "pushes_filters": "true",
    }
