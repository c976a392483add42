"""Each extra alone: an environment with nothing but what it installs does the extra's main job.

The wheel is built once.  Each environment holds links to what the wheel unpacks to, which is all
that pip does with a wheel of Python only, and to the distributions that its metadata asks for.
They are found as pip finds them: markers, extras and bounds of the metadata are followed from one
distribution to the next.  Their releases are those of this environment, which other tests use, so
that no test needs a network.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from adbc_driver_flightsql import dbapi
from kio.static.constants import EntityType
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dlcore.base.extras import EXTRA_OF
from dlcore.proxy.kafka import messages
from dlcore.sync import open_namespace
from tests.fixtures.deployment import deployed_environment, make_python, running
from tests.fixtures.kafka import RawClient, class_of
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
WRITE_AND_READ = """
from dlcore import LogRecord
from dlcore.sync import open_namespace
with open_namespace({uri!r}) as namespace, namespace.open_log({log!r}) as log:
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
OVER_OWN_BOOKIE = """
import asyncio, subprocess, sys
from dlcore import LogConfig, LogRecord, QuorumConfig
from dlcore.base.clock import SystemClock
from dlcore.metadata.binding import ensure_namespace
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.sync import open_namespace

async def make():
    where = parse_uri({uri!r})
    store = await ZooKeeperStore.connect(where.servers)
    await ensure_namespace(store, NamespacePaths(where.root), SystemClock())
    await store.aclose()

asyncio.run(make())
command = [sys.executable, "-m", "bookie", "--name=alone", "--host=127.0.0.1", "--port=0"]
command += ["--metadata-uri", {uri!r}, "--data-dir", {folder!r}, "--watch-parent"]
piped = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
config = LogConfig(quorum=QuorumConfig(1, 1, 1))
with subprocess.Popen(command, **piped) as process, open_namespace({uri!r}) as namespace:
    assert b"serving on" in process.stdout.readline()
    namespace.create_log("own", config=config)
    with namespace.open_log("own", config=config) as log:
        with log.open_writer() as writer:
            writer.write(LogRecord(1, b"written"))
        with log.open_reader() as reader:
            print([record.payload for record in reader])
    process.stdin.close()
    assert process.wait() == 0
"""
SCRAPED = """
from dlcore.sync import open_namespace
from prometheus_client import CollectorRegistry, generate_latest
registry = CollectorRegistry()
with open_namespace({uri!r}) as namespace:
    registry.register(namespace.get_collector())
    print(generate_latest(registry).decode())
"""
TIERED = """
import asyncio
from dlcore import LogRecord, LogSettings, open_namespace
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.table_keeper import TableKeeper
from dlcore.ops.upkeep.tierer import LogTierer

async def work():
    async with await open_namespace({uri!r}) as namespace:
        settings = LogSettings(tier={tier!r}, tier_after_s=0, table={table!r})
        await namespace.create_log({log!r}, settings=settings)
        log = await namespace.open_log({log!r})
        async with await log.open_writer() as writer:
            await writer.write(LogRecord(1, b"written"))
        context, owner = namespace.log_context, namespace.staging_owner
        found = await context.logs.find({log!r})
        await LogTierer(context, owner, UpkeepConfig(tier_grace_s=0)).tier(found)
        if {table!r}:
            keeper = TableKeeper(context, owner, compare_every_s=3600, checkpoint_every=20)
            await keeper.follow(found)
        async with await log.open_reader() as reader:
            return [record.payload async for record in reader]

print(asyncio.run(work()))
"""
IN_DELTA = """
from pathlib import Path
from deltalake import DeltaTable
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
(folder,) = (found.parent for found in Path({folder!r}).rglob("_delta_log"))
files = SubTreeFileSystem(str(folder), LocalFileSystem())
print(DeltaTable(folder).to_pyarrow_table(filesystem=files)["value"].to_pylist())
"""
IN_ICEBERG = """
from pyiceberg.catalog import load_catalog
with load_catalog("dlog") as catalog:
    print(catalog.load_table("dlog.{log}").scan().to_arrow()["value"].to_pylist())
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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the wheel of this tree puts into an environment."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def packages_of(dlog: Distribution, *extras: str) -> set[str]:
    """Return the distributions that dlog with these extras depends on, directly or not."""
    ours = canonicalize_name(dlog.name)
    ahead = [(dlog, extra) for extra in ("", *extras)]
    found: set[tuple[str, str]] = set()
    while ahead:
        package, extra = ahead.pop()
        key = (canonicalize_name(package.name), extra)
        if key in found:
            continue
        found.add(key)
        for wanted in map(Requirement, package.requires or ()):
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
                continue
            other = dlog if canonicalize_name(wanted.name) == ours else distribution(wanted.name)
            assert wanted.specifier.contains(other.version, prereleases=True), wanted
            ahead += [(other, each) for each in ("", *wanted.extras)]
    return {name for name, _ in found} - {ours}


def environment_of(folder: Path, installed: Path, *extras: str) -> Path:
    """Make an environment with what the wheel with these extras installs; return its Python."""
    (metadata,) = installed.glob("*.dist-info")
    packages = packages_of(PathDistribution(metadata), *extras)
    python = make_python(folder, with_dlog=False, packages=packages)
    (target,) = folder.glob("lib/python*/site-packages")
    for each in installed.iterdir():
        (target / each.name).symlink_to(each)
    return python


def environment_in(folder: Path, python: Path) -> dict[str, str]:
    """Return variables with which programs find nothing but what their environment has."""
    return {
        **deployed_environment(folder),
        "PYSPARK_PYTHON": str(python),
        "PYTHONSAFEPATH": "1",  # the working directory may be the checkout
    }


def run(python: Path, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with nothing of this environment on its path."""
    try:
        return subprocess.run(
            [str(python), "-c", program],
            cwd=folder,
            env=environment_in(folder, python),
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
    except subprocess.TimeoutExpired as late:
        text = f"not ended after 200 s; it printed {late.stdout!r} and {late.stderr!r}"
        raise AssertionError(text) from late


@pytest.fixture
def log(sandbox: Sandbox) -> Iterator[str]:
    """An empty log of the shared cluster."""
    name = f"extras/{uuid4().hex}"
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(name)
        yield name


def test_a_plain_installation_works_over_proxies(
    installed: Path, proxy: ProxyProcess, log: str, tmp_path: Path
) -> None:
    """It has no ZooKeeper client, no server and no command, and says how to get them."""
    python = environment_of(tmp_path / "plain", installed)
    job = WITHOUT.format(names=sorted(EXTRA_OF)) + WRITE_AND_READ.format(
        uri=proxy.location, log=log
    )
    done = run(python, job, tmp_path)
    assert (done.returncode, done.stdout) == (0, "[b'written']\n"), done.stderr
    for program, wanted in (
        (WRITE_AND_READ.format(uri="distributedlog://127.0.0.1:1/dlog", log=log), "cluster"),
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


def test_the_extra_for_clusters(
    installed: Path, sandbox: Sandbox, log: str, tmp_path: Path
) -> None:
    """Logs over ZooKeeper and bookies; a bookie, to whose namespace of its own a record goes."""
    python = environment_of(tmp_path / "cluster", installed, "cluster")
    job = WITHOUT.format(names=["click", "rich", "pandas", "pyspark"])
    done = run(python, job + WRITE_AND_READ.format(uri=sandbox.uri, log=log), tmp_path)
    assert (done.returncode, done.stdout) == (0, "[b'written']\n"), done.stderr
    own = sandbox.uri.rpartition("/")[0] + f"/extras-{uuid4().hex}"
    program = OVER_OWN_BOOKIE.format(uri=own, folder=str(tmp_path / "bookie"))
    done = run(python, "import dlcore.proxy.server\n" + program, tmp_path)
    assert (done.returncode, done.stdout) == (0, "[b'written']\n"), done.stderr


def test_the_extra_for_the_command(
    installed: Path, sandbox: Sandbox, log: str, tmp_path: Path
) -> None:
    """`dlog` asks the cluster, and shows tables."""
    python = environment_of(tmp_path / "cli", installed, "cli")
    job = (
        WITHOUT.format(names=["pandas", "pyspark"])
        + "from importlib.metadata import entry_points\n"
        + "(command,) = entry_points(group='console_scripts', name='dlog')\n"
        + f"command.load()(['--uri', {sandbox.uri!r}, 'log', 'show', {log!r}])"
    )
    done = run(python, job, tmp_path)
    assert done.returncode == 0, done.stderr
    assert log in done.stdout


def test_the_extra_for_kafka(installed: Path, sandbox: Sandbox, tmp_path: Path) -> None:
    """`dlog proxy run` serves Kafka's protocol: a client asks which calls it knows."""
    python = environment_of(tmp_path / "kafka", installed, "kafka")
    command = [str(python), "-m", "dlcore.ops.cli", "--uri", sandbox.uri, "proxy", "run"]
    with running(
        [*command, "--kafka-address=127.0.0.1:0"],
        log=tmp_path / "proxy.log",
        environment=environment_in(tmp_path, python),
        until="proxy serving on",
    ) as said:
        found = re.search(r"Kafka's clients are served at ([^\s\"]+)", said)
        assert found is not None, said
        assert messages.API_VERSIONS in asyncio.run(calls_of(found[1]))


async def calls_of(address: str) -> set[int]:
    """Return the calls that a proxy says it knows."""
    client = await RawClient.connect(address)
    kind = class_of(messages.API_VERSIONS, 3, EntityType.request)
    answer = await client.ask(kind(client_software_name="raw", client_software_version="1"))
    client.writer.close()
    await client.writer.wait_closed()
    return {each.api_key for each in answer.api_keys}


def test_the_extra_for_sql(installed: Path, proxy: ProxyProcess, log: str, tmp_path: Path) -> None:
    """`dlog sql` answers a query, which a process of its own runs."""
    python = environment_of(tmp_path / "sql", installed, "sql")
    command = [str(python), "-m", "dlcore.ops.cli", "--endpoint", proxy.location, "sql"]
    with (
        running(
            [*command, "--address=127.0.0.1:0"],
            log=tmp_path / "sql.log",
            environment=environment_in(tmp_path, python),
            until="grpc://",
        ) as said,
        dbapi.connect(
            f"grpc+tcp://{said.partition('grpc://')[2].split()[0]}", autocommit=True
        ) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(f'SELECT count(*) FROM "{log}"')
        assert cursor.fetchall() == [(0,)]


def test_the_extra_for_metrics(installed: Path, sandbox: Sandbox, tmp_path: Path) -> None:
    """A client's metrics are in a scrape."""
    python = environment_of(tmp_path / "metrics", installed, "metrics")
    job = WITHOUT.format(names=["aiohttp", "click", "rich"]) + SCRAPED.format(uri=sandbox.uri)
    done = run(python, job, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "# TYPE dlog_" in done.stdout


@pytest.mark.parametrize(
    ("extra", "table", "absent", "reading"),
    [
        ("tier", None, ["aiohttp", "click", "deltalake", "pyiceberg"], ""),
        ("table", "delta", ["pyiceberg", "pyspark"], IN_DELTA),
        ("iceberg", "iceberg", ["deltalake", "pyspark"], IN_ICEBERG),
    ],
)
def test_the_extras_for_cold_segments(
    *,
    extra: str,
    table: str | None,
    absent: list[str],
    reading: str,
    installed: Path,
    sandbox: Sandbox,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A segment goes to a folder, and is read from there; and from a table, where there is one."""
    monkeypatch.setenv("PYICEBERG_CATALOG__DLOG__URI", f"sqlite:///{tmp_path}/catalog.db")
    python = environment_of(tmp_path / "environment", installed, extra)
    log, folder = f"extras-{uuid4().hex}", tmp_path / "cold"
    job = TIERED.format(uri=sandbox.uri, tier=folder.as_uri(), table=table, log=log)
    job += reading.format(folder=str(folder), log=log)
    done = run(python, WITHOUT.format(names=absent) + job, tmp_path)
    expected = ["[b'written']"] * (2 if reading else 1)
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr
    assert [each for each in folder.rglob("*") if each.is_file()]


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_the_extra_for_spark(installed: Path, sandbox: Sandbox, log: str, tmp_path: Path) -> None:
    """A session writes a log and reads it."""
    python = environment_of(tmp_path / "spark", installed, "spark")
    job = WITHOUT.format(names=["click", "rich"]) + IN_SPARK.format(uri=sandbox.uri, log=log)
    done = run(python, job, tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[b'written']"]), done.stderr


def test_every_optional_package_has_its_extra() -> None:
    """The error of a missing package names an extra that brings it, whatever is installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra, lines in project["optional-dependencies"].items():
        for name in (Requirement(line).name for line in lines):
            if name not in {"distributed-dlog", "uvloop"}:
                assert EXTRA_OF[name.replace("-", "_")] == extra
