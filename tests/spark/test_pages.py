"""Each block of code in README and docs runs as it is pasted, twice, in the order of its page.

Goal: a user that copies a page from top to bottom, from an empty cluster on, sees it work, and a
block that is pasted again does no harm.  Method: the blocks are taken out of the pages.  Those of
Python and SQL run in one program for each page, those of a shell in a shell; nothing is changed but
the ports, and where checkpoints are, for the session began in another folder; what shells call as
`dlog` is forked.  A block that no test runs here is in a table, with the reason; nothing else is
left out.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

import dlcore.sync
from dlcore.ops.sandbox.cluster import Sandbox
from tests.fixtures.forked_commands import environment_at
from tests.fixtures.pages import PAGES, ROOT, Block, blocks_of
from tests.fixtures.spark import settings_in
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.integration]

SHELL_S = 240
CHECKPOINT = "checkpoint-of-copy"
OTHER_TESTS = {
    "README.md": "tests/integration/test_readme.py, for it starts a sandbox of its own",
    "docs/operating.md": "tests/deploying/test_secured_hosts.py, on three hosts",
    "docs/replacing-a-disk.md": "tests/integration/test_replacing_a_disk.py, on disks to lose",
    "docs/access.md": "tests/dlcore/ops/cli/test_secure_sandbox.py, for rules shut others out",
    "docs/flight-sql.md": "tests/integration/test_flight_sql.py, with a server",
    "docs/encryption.md": "tests/integration/test_encryption.py, with a file that it chooses",
    "docs/tls.md": "tests/integration/test_tls_page.py, which uses what they make",
    **{
        page: "tests/integration/test_alerts.py, during the fault"
        for page in PAGES
        if page.startswith("docs/runbook/")
    },
}
"""Pages whose blocks another test runs, also twice."""
SHOWS = "shows what the block before it prints"
SANDBOX = "runs until Ctrl-C; tests/integration/test_readme.py runs it"
INSTALLS = "installs packages, from the network; tests/test_packaging.py builds them"
HOSTS = "needs other hosts; tests/deploying/test_deploy_folder.py checks it against the code"
PROVED = "tests/integration/test_client_recipes.py does, with make prove, where its tools are"
KAFKA = "needs a proxy with that port; tests/dlcore/proxy/kafka and tests/integration/test_kafka.py"
ONCE = {
    "docs/spark-changes.md": "tests/spark/test_changes_into_table.py repeats the job, which starts "
    "a Java of its own",
}
"""Pages whose blocks are pasted once, and why."""
NOT_RUN = {
    "README.md, text: make demo     # a minute": "is what runs this test, and more",
    "docs/abuse.md, text: make abuse": "takes a quarter of an hour",
    "docs/backup.md, text: dlog metadata export /ba": "loses a cluster; "
    "tests/integration/test_restore.py does so",
    "docs/clients-go.md, go: package main": PROVED,
    "docs/clients-go.md, sh: go mod init example.com/": PROVED,
    "docs/clients-java.md, java: import com.fasterxml.jac": PROVED,
    'docs/clients-java.md, xml: <project xmlns="http://m': PROVED,
    "docs/clients-java.md, sh: mvn -q compile dependenc": PROVED,
    "docs/clients-rust.md, rust: use std::{sync::Arc, tim": PROVED,
    "docs/clients-rust.md, toml: [package]": PROVED,
    "docs/clients-rust.md, sh: cargo run --quiet": PROVED,
    "docs/deploying.md, sh: rm -rf wheel && pip whee": HOSTS,
    "docs/deploying.md, sh: pip wheel . --no-deps -w": HOSTS,
    'docs/deploying.md, sh: names="dlog-bookie-0.dlo': HOSTS,
    "docs/diagnosing.md, text: kill -HUP $(pgrep -f 'dl": "would reach all proxies of the machine; "
    "tests/integration/test_reconfiguring.py sends the signal to its own",
    "docs/diagnosing.md, text: dlog debug bundle": "tells the faults here, and ends with 1; "
    "tests/dlcore/ops/diagnosis run both commands",
    "docs/flight-sql.md, text: jdbc:arrow-flight-sql://": "tests/integration/test_flight_sql.py "
    "does, with make prove",
    'docs/http.md, json: {"dlsn":"1:0:0","txid":1': "is an answer",
    "docs/kafka-protocol.md, bash: .venv/bin/dlog proxy run": KAFKA,
    "docs/kafka-protocol.md, python: from confluent_kafka imp": KAFKA,
    "docs/kafka-protocol.md, python: spark.readStream.format(": KAFKA,
    "docs/kafka-protocol.md, python: rows = spark.readStream.": "as tests/integration/"
    "test_kafka_real_time.py does, with make prove",
    'docs/kafka-protocol.md, python: {"security.protocol": "S': KAFKA,
    "docs/learn/operator.md, bash: .venv/bin/dlog sandbox -": SANDBOX,
    "docs/learn/operator.md, text: name      address": SHOWS,
    "docs/learn/operator.md, text: too few bookies: ledger": SHOWS,
    "docs/learn/python.md, bash: .venv/bin/dlog sandbox -": SANDBOX,
    "docs/learn/spark.md, bash: .venv/bin/dlog sandbox -": SANDBOX,
    "docs/package.md, bash: dlog sandbox --base-port": SANDBOX,
    "docs/package.md, text: pip install '.[cli,spark": INSTALLS,
    "docs/package.md, text: pip wheel . --no-deps -w": INSTALLS,
    "docs/tables.md, text: pip install 'distributed": INSTALLS,
    "docs/restore.md, bash: python -m pytest -s test": "is a test itself",
    "docs/restore.md, text: dlog cluster settings --": "loses a cluster; "
    "tests/integration/test_lost_cluster.py does so",
    "docs/restore.md, text: log     records  lost": SHOWS,
    "docs/tier.md, text: pip install 'distributed": "tests/integration/test_tier.py has one",
}
"""How blocks begin that are not run, and why."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """The README's sandbox, on other ports.

    A redaction waits until each ledger is proven to be gone that was deleted within ten minutes;
    here these are the ledgers of the logs of other pages.
    """
    folder, options = tmp_path_factory.mktemp("pages"), ("--garbage-age-ms=0",)
    with Sandbox(
        3, data_dir=folder, proxies=1, autorecovery=False, bookie_options=options
    ) as started:
        yield started


class Reader:
    """A reader with an empty cluster that pastes the blocks of a page."""

    def __init__(self, folder: Path, cluster: Sandbox, spark: SparkSession, program: Path) -> None:
        self.outputs: list[str] = []  # by shells
        self.known: dict[str, Any] = {"__name__": "__main__"}
        self._folder = folder
        self._spark = spark
        self._path = f"{program.parent}{os.pathsep}{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"
        self._places = {
            "zookeeper": urlsplit(cluster.uri).netloc,
            "proxy": urlsplit(cluster.proxies[0].location).netloc,
        }

    def paste(self, block: Block) -> None:
        """Run a block twice in a row, but for `ONCE`."""
        block = block.at(**self._places)
        checkpoint = self._folder / CHECKPOINT
        block = block._replace(text=block.text.replace(CHECKPOINT, str(checkpoint)))
        for _ in range(1 if block.page in ONCE else 2):
            getattr(self, f"_run_{block.language}")(block)
            self._hear_out()

    def _hear_out(self) -> None:
        """Wait until a listener that was added has heard of the query, and remove it."""
        listener = self.known.pop("listener", None)
        if listener is not None:
            wait_until(lambda: listener.points, timeout_s=SHELL_S)
            self._spark.streams.removeListener(listener)

    def _run_python(self, block: Block) -> None:
        code = "\n" * (block.line - 1) + block.text  # an error names the line of the page
        exec(compile(code, block.page, "exec"), self.known)

    def _run_sql(self, block: Block) -> None:
        for statement in filter(str.strip, block.text.split(";\n")):
            self._spark.sql(statement).collect()

    def _run_bash(self, block: Block) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("DLOG_")}
        settings = [f"--conf={key}={value}" for key, value in settings_in(self._folder).items()]
        clean["PYSPARK_SUBMIT_ARGS"] = shlex.join([*settings, "pyspark-shell"])  # as `spark`
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=self._folder,
            env={**clean, "PATH": self._path},
            capture_output=True,
            text=True,
            check=False,
            timeout=SHELL_S,
        )
        assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stdout}{done.stderr}"
        self.outputs.append(done.stdout)

    def _run_toml(self, block: Block) -> None:
        """Let `dlog` use a configuration file of this content."""
        (self._folder / "dlog.toml").write_text(block.text, encoding="utf-8")
        self._run_bash(block._replace(text=".venv/bin/dlog log list --config dlog.toml"))


@pytest.fixture
def reader(
    tmp_path: Path,
    cluster: Sandbox,
    spark: SparkSession,
    dlog_program: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Reader]:
    """One in a folder as a checkout is, with a sandbox that holds no log."""
    location = cluster.proxies[0].location
    with dlcore.sync.open_namespace(location) as namespace:
        for name in namespace.get_logs():
            namespace.delete_log(name)
    monkeypatch.chdir(tmp_path)
    environment_at(tmp_path, dlog_program)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    yield Reader(tmp_path, cluster, spark, dlog_program)
    for made in ("TABLE IF EXISTS clicks", "VIEW IF EXISTS into_clicks"):
        spark.sql(f"DROP {made}")


def runnable(page: str) -> list[Block]:
    """Return the blocks of a page that are run here."""
    return [each for each in blocks_of(page) if each.name not in NOT_RUN]


def test_nothing_is_left_out_without_a_reason() -> None:
    """Each page is run here or elsewhere, and each block, but for those that the table names."""
    found = {block.name for page in PAGES for block in blocks_of(page)}
    assert set(NOT_RUN) <= found, sorted(set(NOT_RUN) - found)
    assert len(NOT_RUN) == 36
    assert all(NOT_RUN.values())
    assert len(ONCE) == 1
    here = [page for page in PAGES if page not in OTHER_TESTS and runnable(page)]
    assert here == [page for page, _ in EXPECTED], "a page that no test runs, or none any more"


EXPECTED: list[tuple[str, int]] = [
    ("docs/clients-dlcore.md", 3),
    ("docs/clients-pyarrow.md", 7),
    ("docs/configuration.md", 1),
    ("docs/deploying-spark.md", 1),
    ("docs/diagnosing.md", 1),
    ("docs/forks.md", 3),
    ("docs/http.md", 1),
    ("docs/kafka-protocol.md", 2),
    ("docs/learn/operator.md", 7),
    ("docs/learn/python.md", 8),
    ("docs/learn/spark.md", 7),
    ("docs/logs.md", 7),
    ("docs/package.md", 3),
    ("docs/proxy-actions.md", 1),
    ("docs/proxy-operating.md", 2),
    ("docs/proxy-producers.md", 4),
    ("docs/proxy.md", 3),
    ("docs/python.md", 2),
    ("docs/redact.md", 3),
    ("docs/spark-changes.md", 1),
    ("docs/spark-read.md", 1),
    ("docs/spark-sql.md", 2),
    ("docs/spark-stream.md", 1),
    ("docs/spark-typed.md", 1),
    ("docs/spark-watch.md", 1),
    ("docs/spark-write.md", 1),
    ("docs/spark.md", 1),
    ("docs/tables.md", 8),
    ("docs/tier.md", 5),
]
"""Pages, and how many blocks of each are run."""


@pytest.mark.parametrize(("page", "count"), EXPECTED, ids=[page for page, _ in EXPECTED])
def test_a_page_runs_as_it_stands(
    page: str, count: int, reader: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    """From an empty cluster, block after block, each of them twice."""
    blocks = runnable(page)
    assert len(blocks) == count
    for block in blocks:
        reader.paste(block)
    output = capsys.readouterr().out
    if page in SEEN:
        SEEN[page](reader, output)


def _saw_pyarrow(reader: Reader, output: str) -> None:
    assert reader.known["table"].num_rows == reader.known["frame"].shape[0] == 1000
    assert "100 b'100'\n" in output  # a range
    assert "[(1000, " in output  # DuckDB


def _saw_dlcore(reader: Reader, output: str) -> None:
    assert reader.known["frame"].shape[0] == 2
    assert "another client wrote meanwhile" in output
    assert output.count("[b'0', b'1', b'2', b'0', b'1']\n") == 4  # async, over both, twice


def _saw_proxy(reader: Reader, output: str) -> None:
    assert reader.known["table"].num_rows >= 100


def _saw_learn_operator(reader: Reader, _: str) -> None:
    assert sum("2/2/2 where 3/3/2 is wanted" in each for each in reader.outputs) == 2
    assert "grpc://" in reader.outputs[-3], "the proxy is back"


def _saw_learn_python(_: Reader, output: str) -> None:
    assert "6 new clicks\n0 since then\n" in output
    assert output.count("SchemaMismatchError 551 ") == 2


def _saw_tables(_: Reader, output: str) -> None:
    assert output.endswith("\n2000\n2000\n2000\n2000\n"), "each table, and its log after it"
    assert "999.0" in output


SEEN = {
    "docs/clients-dlcore.md": _saw_dlcore,
    "docs/clients-pyarrow.md": _saw_pyarrow,
    "docs/learn/operator.md": _saw_learn_operator,
    "docs/learn/python.md": _saw_learn_python,
    "docs/proxy.md": _saw_proxy,
    "docs/tables.md": _saw_tables,
}
