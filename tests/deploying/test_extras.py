"""Each extra alone: an environment with nothing but what it installs does the extra's main job.

The environments hold links to the packages of this one, so that no test needs a network.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import distribution
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dlcore.base.extras import EXTRA_OF
from dlcore.sync import open_namespace
from tests.fixtures.deployment import deployed_environment, make_python
from tests.fixtures.spark import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration

WITHOUT = """
import importlib.util, sys
found = [name for name in {names!r} if importlib.util.find_spec(name) is not None]
assert not found, found
"""
OVER_A_PROXY = """
from dlcore import LogRecord
from dlcore.sync import open_namespace
with open_namespace({endpoint!r}) as namespace, namespace.open_log({log!r}) as log:
    with log.open_writer() as writer:
        writer.write(LogRecord(1, b"written"))
    with log.open_reader() as reader:
        print([record.payload for record in reader])
"""
OVER_BOOKIES_ASYNC = """
import asyncio
from dlcore import open_namespace

asyncio.run(open_namespace("distributedlog://127.0.0.1:1/dlog"))
"""
OVER_BOOKIES = """
from dlcore import LogRecord
from dlcore.sync import open_namespace
with open_namespace({uri!r}) as namespace, namespace.open_log({log!r}) as log:
    with log.open_writer() as writer:
        writer.write(LogRecord(1, b"written"))
    with log.open_reader() as reader:
        print([record.payload for record in reader])
"""
IN_SPARK = """
import dlspark
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
dlspark.register(spark)
options = dict(uri={uri!r}, log={log!r})
rows = spark.createDataFrame([(b"written",)], "value binary")
rows.write.format("dlog").options(**options).mode("append").save()
print([bytes(row.value) for row in spark.read.format("dlog").options(**options).load().collect()])
"""


def project() -> dict[str, object]:
    """Return the section of pyproject.toml that says what is installed."""
    found: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))[
        "project"
    ]
    return found


def packages_of(*extras: str) -> set[str]:
    """Return the distributions that dlog with these extras depends on, directly or not."""
    section = project()
    optional = section["optional-dependencies"]
    assert isinstance(optional, dict)
    assert isinstance(section["dependencies"], list)
    ahead = [*section["dependencies"], *(line for extra in extras for line in optional[extra])]
    found: set[str] = set()
    while ahead:
        wanted = Requirement(ahead.pop())
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(wanted.name)
        if name == canonicalize_name("distributed-dlog"):
            ahead += [line for extra in wanted.extras for line in optional[extra]]
        elif name not in found:
            found.add(name)
            ahead += distribution(name).requires or []
    return found


def environment_of(folder: Path, *extras: str) -> Path:
    """Make an environment with what these extras install; return its Python."""
    return make_python(folder, with_dlog=True, packages=packages_of(*extras))


def run(python: Path, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with nothing of this environment on its path."""
    return subprocess.run(
        [str(python), "-c", program],
        cwd=folder,
        env={**deployed_environment(folder), "PYSPARK_PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.fixture
def log(sandbox: Sandbox) -> Iterator[str]:
    """An empty log of the shared cluster."""
    name = f"extras/{uuid4().hex}"
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(name)
        yield name


def test_a_plain_installation_works_over_proxies(
    proxy: ProxyProcess, log: str, tmp_path: Path
) -> None:
    """It has no ZooKeeper client, no server and no command, and says how to get them."""
    python = environment_of(tmp_path / "plain")
    job = WITHOUT.format(names=sorted(EXTRA_OF)) + OVER_A_PROXY.format(
        endpoint=proxy.location, log=log
    )
    done = run(python, job, tmp_path)
    assert (done.returncode, done.stdout) == (0, "[b'written']\n"), done.stderr
    for program, wanted in (
        (OVER_BOOKIES.format(uri="distributedlog://127.0.0.1:1/dlog", log=log), "cluster"),
        (OVER_BOOKIES_ASYNC, "cluster"),
        ("import dlcore.ops.cli", "cli"),
    ):
        refused = run(python, program, tmp_path)
        assert refused.returncode == 1
        last = refused.stderr.splitlines()[-1]
        assert re.fullmatch(
            r"ModuleNotFoundError: \w+ is not installed, and this part of dlog needs it: "
            rf"pip install 'distributed-dlog\[{wanted}\]'",
            last,
        ), refused.stderr


def test_the_extra_for_clusters(sandbox: Sandbox, log: str, tmp_path: Path) -> None:
    """Logs over ZooKeeper and bookies, and the program of a bookie."""
    python = environment_of(tmp_path / "cluster", "cluster")
    job = WITHOUT.format(names=["click", "rich", "pandas", "pyspark"])
    done = run(python, job + OVER_BOOKIES.format(uri=sandbox.uri, log=log), tmp_path)
    assert (done.returncode, done.stdout) == (0, "[b'written']\n"), done.stderr
    started = run(python, "import bookie.__main__, dlcore.proxy.server", tmp_path)
    assert started.returncode == 0, started.stderr


def test_the_extra_for_the_command(sandbox: Sandbox, log: str, tmp_path: Path) -> None:
    """`dlog` asks the cluster, and shows tables."""
    python = environment_of(tmp_path / "cli", "cli")
    job = (
        WITHOUT.format(names=["pandas", "pyspark"])
        + "from dlcore.ops.cli import main\n"
        + f"main(['--uri', {sandbox.uri!r}, 'log', 'show', {log!r}])"
    )
    done = run(python, job, tmp_path)
    assert done.returncode == 0, done.stderr
    assert log in done.stdout


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_the_extra_for_spark(sandbox: Sandbox, log: str, tmp_path: Path) -> None:
    """A session writes a log and reads it."""
    python = environment_of(tmp_path / "spark", "spark")
    job = WITHOUT.format(names=["click", "rich"]) + IN_SPARK.format(uri=sandbox.uri, log=log)
    done = run(python, job, tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[b'written']"]), done.stderr


def test_every_optional_package_has_its_extra() -> None:
    """The error of a missing package names an extra that brings it, whatever is installed here."""
    section = project()
    optional = section["optional-dependencies"]
    assert isinstance(optional, dict)
    for extra, lines in optional.items():
        for name in (Requirement(line).name for line in lines):
            if name not in {"distributed-dlog", "uvloop"}:
                assert EXTRA_OF[name.replace("-", "_")] == extra
