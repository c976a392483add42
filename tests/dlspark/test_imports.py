"""Importing the connector is light, and finding it by its name works.

Goal: neither Spark's look-up nor a process that Spark forks from loads grpc or kazoo.  Method: a
fresh interpreter that imports and then lists its modules.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import dlspark
import pyspark_dlog


@pytest.mark.parametrize("module", ["dlspark", "pyspark_dlog", "dlspark.batch", "dlspark.stream"])
def test_no_client_is_loaded_by_an_import(module: str) -> None:
    """The clients come with the first call; pyarrow with the first reader or writer."""
    heavy = {"grpc", "kazoo", "google.protobuf"}
    if module in ("dlspark", "pyspark_dlog"):
        heavy |= {"pyarrow", "numpy", "pandas"}
    script = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert not heavy & set(json.loads(run.stdout))


def test_spark_finds_the_source_by_its_module() -> None:
    """Spark takes `DefaultSource` of modules called pyspark_*."""
    assert pyspark_dlog.DefaultSource is dlspark.DistributedLogDataSource
    assert pyspark_dlog.DefaultSource.name() == "dlog"


def test_the_face_is_what_it_says() -> None:
    """`__all__` is sorted and complete."""
    assert dlspark.__all__ == sorted(dlspark.__all__)
    assert all(hasattr(dlspark, name) for name in dlspark.__all__)
