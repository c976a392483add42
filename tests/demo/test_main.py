"""The demo as its user runs it: whole, and interrupted; neither leaves a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from demo.report import writable
from tests.fixtures.java import java_options_in
from tests.fixtures.lengths import sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [pytest.mark.integration, pytest.mark.spark]

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 540
_MARK = "DLOG_TEST_OF_DEMO"


_FAILING = """
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from demo import main

def fail(_, stack, **__):
    stack.callback(main.stop_spark)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dlog-demo-"))
    main._start_spark(Path(folder)).read.format("no-such-format").load()

with patch.object(main, "_run", fail):
    sys.exit(main.main())
"""
"""The demo, in which Spark refuses the first thing that it is asked for."""


@contextmanager
def demo_process(
    folder: Path, words: Sequence[str] = ("-m", "demo.main")
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the demo in `folder`, with a mark that all its processes inherit."""
    mark = uuid4().hex
    environment = os.environ | {
        _MARK: mark,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder),
        "JDK_JAVA_OPTIONS": java_options_in(folder),
    }
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        # Reading its output would otherwise wait for ever for a demo that hangs.
        guard = threading.Timer(WAIT_S, process.kill)
        guard.start()
        try:
            yield process, mark
        finally:
            guard.cancel()
            process.kill()


def processes_marked(mark: str) -> list[str]:
    """Return the command lines of all processes that inherited `mark`."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it ended meanwhile
    return found


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Read the output up to a line that has `text`."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    pytest.fail(f"the demo ended without saying {text!r}:\n{''.join(seen)}")


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [(), ("--secure",)], ids=["open", "secured"])
def test_everything_is_equal(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The whole demo: exit code 0, its verdict, the plot, and nothing left."""
    with demo_process(tmp_path, ("-m", "demo.main", *options)) as (process, mark):
        output, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, output
    assert "336,776 records, every one once, in order" in output
    assert "all statistics equal" in output
    assert "with SIGKILL" in output
    assert ("let only clients with a certificate in" in output) == bool(options)
    assert (tmp_path / "artifacts" / "delays.png").read_bytes().startswith(b"\x89PNG")
    assert processes_marked(mark) == []
    assert list(tmp_path.glob("dlog-demo-*")) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", sample(["starting the cluster", "writing the first"], 1))
def test_ctrl_c_leaves_nothing(tmp_path: Path, moment: str) -> None:
    """As from a terminal, the signal goes to the whole process group."""
    with demo_process(tmp_path) as (process, mark):
        wait_for_line(process, moment)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 130, output
    assert "interrupted" in output
    assert processes_marked(mark) == []
    assert list(tmp_path.glob("dlog-demo-*")) == []


@pytest.mark.timeout(600)
def test_a_failure_is_printed_last(tmp_path: Path) -> None:
    """Spark keeps the text of its errors, and has stopped before the demo ends."""
    with demo_process(tmp_path, ("-c", _FAILING)) as (process, mark):
        output, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 1, output
    assert "exception str() failed" not in output
    assert "Traceback (most recent call last)" in output
    _, _, failures = output.rpartition("WRONG: ")
    assert "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: no-such-format" in failures, (
        output
    )
    assert len(failures.splitlines()) == len(["what failed", "because of which error"]), output
    assert processes_marked(mark) == []


def test_the_plot_of_a_read_only_checkout_is_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the usual one cannot be made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "artifacts"
    assert writable(folder / "delays.png") == folder / "delays.png"
    folder.rmdir()
    folder.touch()  # a folder that cannot be made, by root either
    assert writable(folder / "delays.png") == tmp_path / "dlog-demo-delays.png"
