"""A namespace and Spark in one process, which forks to start the JVM: any order works.

Method: one program, in a process of its own, for each order, with a writer that is busy or idle;
and once in the kernel of a notebook.  When both are open it forks by `multiprocessing`, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from typing import TYPE_CHECKING
from uuid import uuid4

import nbformat
import pytest
from nbclient import NotebookClient

from tests.fixtures.lengths import sample
from tests.fixtures.spark import ROOT, spark_environment

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.timeout(600)]
TIMEOUT_S = 550
PROGRAM = """
import multiprocessing, os, threading
from pathlib import Path
from dlcore import LogRecord
from dlcore.base.errors import ConfigurationError
from dlcore.sync import open_namespace
from tests.fixtures.spark import start_session

log, by_spark = work["log"], work["log"] + "-by-spark"
stop = threading.Event()
written = 0

def open_all():
    global namespace, manager, writer, busy
    namespace = open_namespace(work["uri"])
    namespace.create_log(log)
    namespace.create_log(by_spark)
    manager = namespace.open_log(log)
    writer = manager.open_writer()
    write_some()
    busy = threading.Thread(target=keep_busy, daemon=True)
    if work["is_busy"]:
        busy.start()

def write_some():
    global written
    for _ in range(50):
        writer.write(LogRecord(txid=written, payload=b"x" * 1000))
        written += 1
    writer.flush()

def keep_busy():
    while not stop.wait(0.02):
        write_some()

def start_spark():
    global spark
    spark = start_session(Path(work["folder"]))

def in_a_child():
    refused = []
    for use in (namespace.get_logs, writer.flush, lambda: manager.open_reader()):
        try:
            use()
        except ConfigurationError as error:
            refused.append("open the namespace in the process that uses it" in str(error))
    with open_namespace(work["uri"]) as own, own.open_log(log) as mine:
        with mine.open_reader() as reader:
            return refused == [True] * 3, len(reader.read_bulk(10))

if work["namespace_first"]:
    open_all()
    start_spark()
else:
    start_spark()
    open_all()
options = {"uri": work["uri"], "log": by_spark}
rows = spark.range(100).selectExpr("cast(id as string) as value", "id as txid")
rows.write.format("dlog").options(**options).mode("append").save()
assert spark.read.format("dlog").options(**options).load().count() == 100
with multiprocessing.get_context("fork").Pool(2) as pool:
    results = [pool.apply_async(in_a_child) for _ in range(4)]
    assert [each.get(100) for each in results] == [(True, 10)] * 4
stop.set()
if work["is_busy"]:
    busy.join()
write_some()
writer.commit()
assert manager.get_log_record_count() == written >= 100
assert spark.read.format("dlog").options(uri=work["uri"], log=log).load().count() == written
namespace.close()
spark.stop()
print("all of it worked")
"""


def work_of(sandbox: Sandbox, folder: Path, *, namespace_first: bool, is_busy: bool) -> str:
    """Return the line that tells the program what to do."""
    work = {
        "uri": sandbox.uri,
        "log": f"fork/{uuid4().hex}",
        "folder": str(folder),
        "namespace_first": namespace_first,
        "is_busy": is_busy,
    }
    return f"import json; work = json.loads({json.dumps(work)!r})"


@pytest.mark.prove  # tests/integration/test_fork.py has forks without Spark
@pytest.mark.parametrize(
    ("namespace_first", "is_busy"), sample(product((True, False), repeat=2), 1)
)
def test_a_script(
    sandbox: Sandbox, tmp_path: Path, *, namespace_first: bool, is_busy: bool
) -> None:
    """It works in any order, and so do its children, which may not use what they inherited."""
    work = work_of(sandbox, tmp_path, namespace_first=namespace_first, is_busy=is_busy)
    done = subprocess.run(
        [sys.executable, "-c", f"{work}\n{PROGRAM}"],
        env=spark_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all of it worked\n")
    assert "Traceback" not in done.stderr


@pytest.mark.prove
def test_a_notebook(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel has threads and a loop of its own."""
    for key, value in spark_environment().items():
        monkeypatch.setenv(key, value)
    cells = (work_of(sandbox, tmp_path, namespace_first=True, is_busy=True), PROGRAM)
    notebook = nbformat.v4.new_notebook(  # type: ignore[no-untyped-call]  # nbformat is untyped
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells]  # type: ignore[no-untyped-call]
    )
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=TIMEOUT_S, resources=where).execute()
    assert notebook.cells[-1].outputs[-1]["text"].endswith("all of it worked\n")
