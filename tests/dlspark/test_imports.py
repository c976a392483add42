"""Importing the connector is light, and finding it by its name works.

Goal: neither Spark's look-up nor a process that Spark forks from loads grpc or kazoo.  Method: a
fresh interpreter that imports and then lists its modules.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

import dlspark
import pyspark_dlog

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("module", ["dlspark", "pyspark_dlog", "dlspark.batch", "dlspark.stream"])
def test_no_client_is_loaded_by_an_import(module: str) -> None:
    """The clients come with the first call; pyarrow with the first reader or writer.

    Modules that PySpark itself loads do not count: PySpark 4.1 loads numpy.
    """
    heavy = {"grpc", "kazoo", "google.protobuf"}
    if module in ("dlspark", "pyspark_dlog"):
        heavy |= {"pyarrow", "numpy", "pandas"}
    script = (
        "import json, sys, pyspark.sql.datasource; before = set(sys.modules)\n"
        f"import {module}; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert not heavy & set(json.loads(run.stdout))


def test_spark_finds_the_source_by_its_module() -> None:
    """Spark takes `DefaultSource` of modules called pyspark_*."""
    assert pyspark_dlog.DefaultSource is dlspark.DistributedLogDataSource
    assert pyspark_dlog.DefaultSource.name() == "dlog"


@pytest.mark.parametrize(
    ("inherited", "has_jvm", "warns"),
    [
        (None, True, True),
        ("/opt/lib:/opt/other.zip", True, True),
        ("/opt/lib:dlog.zip", True, False),
        (None, False, False),  # of a client of Spark Connect, which ships nothing of its own
    ],
)
def test_register_tells_where_a_zip_file_does_not_reach(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    inherited: str | None,
    has_jvm: bool,
    warns: bool,
) -> None:
    """Streams are planned in processes that have what the JVM inherited, and no shipped files."""
    shipped = tmp_path / "dlog.zip"
    shipped.touch()
    monkeypatch.setattr(dlspark, "__file__", str(shipped / "dlspark" / "__init__.py"))
    spark = Mock()
    spark._jvm = Mock() if has_jvm else None
    if has_jvm:
        spark._jvm.System.getenv.return_value = inherited
    dlspark.register(spark)
    spark.dataSource.register.assert_called_once_with(dlspark.DistributedLogDataSource)
    assert ("set PYTHONPATH" in caplog.text) is warns
    if has_jvm:
        spark._jvm.SparkSession.setActiveSession.assert_called_once_with(spark._jsparkSession)


def test_the_face_is_what_it_says() -> None:
    """`__all__` is sorted and complete."""
    assert dlspark.__all__ == sorted(dlspark.__all__)
    assert all(hasattr(dlspark, name) for name in dlspark.__all__)
