"""`dlog sandbox` as a process: it announces itself, stops cleanly, and finds its data again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dlcore.base.records import LogRecord
from dlcore.ops.cli.app import EXIT_FAILED, EXIT_USAGE, run
from dlcore.sync import open_namespace
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration

WAIT_S = 120


@contextmanager
def sandbox_process(*arguments: str, stop: signal.Signals) -> Iterator[dict[str, object]]:
    """Run `dlog sandbox --json`, yield what it announced, end it with `stop`: exit code 0."""
    command = [LOADED_PYTHON, "-c", "from dlcore.ops.cli import main; main()", "sandbox", "--json"]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            announced = json.loads(process.stdout.readline())
            yield announced
            process.send_signal(stop)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


@pytest.fixture
def hang_up() -> Iterator[signal.Signals]:
    """SIGHUP, which a child ignores if this process was started by nohup, and not here."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield signal.SIGHUP
    signal.signal(signal.SIGHUP, before)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    """Wait until none of `pids` runs."""
    deadline = time.monotonic() + WAIT_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[p for p in pids if is_running(p)]}"
        time.sleep(0.05)


def pids_of(announced: dict[str, object]) -> list[int]:
    """Return the process ids of bookies and proxies, and of auto-recovery if announced."""
    bookies, proxies = announced["bookies"], announced["proxies"]
    autorecovery = announced["autorecovery"]
    assert isinstance(bookies, list)
    assert isinstance(proxies, list)
    assert autorecovery is None or isinstance(autorecovery, int)
    return [
        *(each["pid"] for each in (*bookies, *proxies)),
        *([] if autorecovery is None else [autorecovery]),
    ]


def test_a_restart_on_the_same_folder_finds_all_data(tmp_path: Path) -> None:
    """Stopped by Ctrl-C the first time, by SIGTERM the second."""
    options = ("--bookies", "3", "--data-dir", str(tmp_path / "data"))
    uri_file = tmp_path / "uri"
    with sandbox_process(*options, "--uri-file", str(uri_file), stop=signal.SIGINT) as announced:
        assert uri_file.read_text().strip() == announced["uri"]
        with open_namespace(str(announced["uri"])) as namespace:
            namespace.create_log("kept")
            with namespace.open_log("kept") as log, log.open_writer() as writer:
                writer.write(LogRecord(txid=7, payload=b"kept"))
        pids = pids_of(announced)
        assert len(pids) == 5
        assert all(is_running(pid) for pid in pids)
    wait_until_gone(pids)
    assert not uri_file.exists()

    with (
        sandbox_process(*options, stop=signal.SIGTERM) as announced,
        open_namespace(str(announced["uri"])) as namespace,
        namespace.open_log("kept") as log,
        log.open_reader() as reader,
    ):
        record = reader.read_next()
        assert record is not None
        assert (record.txid, record.payload) == (7, b"kept")
    wait_until_gone(pids_of(announced))


def test_a_folder_or_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    """The refusal names it; the cluster that has it goes on.  A proxy's port is the last one."""
    folder, base = tmp_path / "data", free_ports(5)
    with (
        sandbox_process(
            "--bookies", "1", "--no-autorecovery", "--data-dir", str(folder), stop=signal.SIGTERM
        ) as announced,
        socket.create_server(("127.0.0.1", base + 4)),
    ):
        assert announced["autorecovery"] is None
        port = str(announced["uri"]).split(":")[2].split("/")[0]
        for options, name in (
            (["--data-dir", str(folder)], str(folder)),
            (["--base-port", port], port),
            (
                ["--base-port", str(base)],
                f"port {base + 4} of 127.0.0.1 is taken: expected a free one",
            ),
        ):
            refused = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    "from dlcore.ops.cli import main; main()",
                    "sandbox",
                    *options,
                ],
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=False,
                env=os.environ | {"PYTHONWARNINGS": "error"},
            )
            assert refused.returncode in (1, 2)
            assert refused.stderr.startswith("error: "), refused.stderr
            assert refused.stderr.count("\n") == 1
            assert name in refused.stderr
        assert all(is_running(pid) for pid in pids_of(announced))


class Watcher(threading.Thread):
    """Acts on a sandbox that runs in this process's main thread, and collects what it prints."""

    def __init__(
        self, capfd: pytest.CaptureFixture[str], act: Callable[[Watcher, dict[str, object]], None]
    ) -> None:
        super().__init__()
        self._capfd = capfd
        self._act = act
        self.out = self.err = ""

    def collect(self) -> None:
        """Take what was printed since the last call."""
        captured = self._capfd.readouterr()
        self.out += captured.out
        self.err += captured.err

    def has_printed(self, text: str) -> bool:
        """Return whether it was printed to standard error."""
        return text in self.err

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds for what was printed."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, (self.out, self.err)
            time.sleep(0.05)
            self.collect()

    def run(self) -> None:
        """Wait for the announcement, act, and end the sandbox whatever comes of it."""
        try:
            self.wait_for(lambda: "\n" in self.out)
            self._act(self, json.loads(self.out.splitlines()[0]))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)


def watched(
    capfd: pytest.CaptureFixture[str],
    act: Callable[[Watcher, dict[str, object]], None],
    *options: str,
) -> tuple[int, Watcher]:
    """Run the command in this thread while a watcher acts; return its exit code."""
    # The signal must not end this process if it comes when the command is over.
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watcher = Watcher(capfd, act)
    watcher.start()
    try:
        exit_code = run(["sandbox", "--json", "--bookies", "1", *options])
        watcher.join()
    finally:
        signal.signal(signal.SIGTERM, previous)
    watcher.collect()
    return exit_code, watcher


def test_a_process_that_ends_by_itself_is_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of these may be missed: the rest goes on until it is stopped."""
    names = ("bookie-1", "proxy-1", "autorecovery")
    uri_file = tmp_path / "uri"

    def kill_each(watcher: Watcher, announced: dict[str, object]) -> None:
        assert uri_file.read_text().strip() == announced["uri"]
        for pid, name in zip(pids_of(announced), names, strict=True):
            os.kill(pid, signal.SIGKILL)
            watcher.wait_for(partial(watcher.has_printed, f"{name} ended; its output is in "))

    exit_code, watcher = watched(capfd, kill_each, "--uri-file", str(uri_file))
    assert exit_code == 0
    assert [watcher.err.count(f"{name} ended") for name in names] == [1, 1, 1]
    assert not uri_file.exists()


def test_without_metadata_the_sandbox_ends_with_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing works any more then."""
    folder = tmp_path / "data"

    def kill_metadata_server(watcher: Watcher, _announced: dict[str, object]) -> None:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                lines.append((path, path.read_bytes()))
        (found,) = [
            int(path.parent.name)
            for path, line in lines
            if b"\0metadata\0serve\0" in line and str(folder).encode() in line
        ]
        os.kill(found, signal.SIGKILL)
        watcher.wait_for(partial(watcher.has_printed, '"error": '))

    options = ("--no-autorecovery", "--data-dir", str(folder))
    exit_code, watcher = watched(capfd, kill_metadata_server, *options)
    assert exit_code == EXIT_FAILED
    assert '"error": "the metadata server ended by itself; stopped the sandbox"' in watcher.err


def test_a_uri_file_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It lies below a file."""
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "uri")
    assert run(["sandbox", "--uri-file", place]) == EXIT_USAGE
    assert f"error: uri-file={place!r}: cannot remove it" in capsys.readouterr().err


def test_the_uri_file_of_a_sandbox_that_runs_stays(tmp_path: Path, hang_up: signal.Signals) -> None:
    """Another sandbox that is to have the same file is refused; one that was killed left it free.

    The end of the terminal (SIGHUP) stops it as Ctrl-C does.
    """
    uri_file = tmp_path / "uri"
    uri_file.write_text("left by one that was killed\n")
    options = ["--bookies", "1", "--proxies", "0", "--no-autorecovery", "--uri-file", str(uri_file)]
    with sandbox_process(*options, stop=hang_up) as announced:
        refused = subprocess.run(
            [sys.executable, "-m", "dlcore.ops.cli", "sandbox", *options],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert refused.returncode == EXIT_USAGE
        assert f"uri-file={str(uri_file)!r} is that of a sandbox that runs" in refused.stderr
        assert uri_file.read_text().strip() == announced["uri"]
    assert not uri_file.exists()


@pytest.mark.parametrize(
    ("stop", "code", "reason"),
    [(signal.SIGINT, 130, "error: interrupted"), (signal.SIGTERM, 143, "")],
)
def test_a_start_that_is_interrupted_is_given_up(
    tmp_path: Path, stop: signal.Signals, code: int, reason: str
) -> None:
    """The cluster is not announced, and nothing of it runs on."""
    log = tmp_path / "data" / "metadata" / "metadata-server.log"
    command = [sys.executable, "-m", "dlcore.ops.cli", "sandbox", "--data-dir", str(log.parents[1])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        deadline = time.monotonic() + WAIT_S
        while not log.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(stop)
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err.strip()) == (code, "", reason)
    folder = str(log.parents[1]).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            assert folder not in path.read_bytes()


def test_ctrl_c_while_the_command_is_loaded() -> None:
    """It ends with a line and the same code as later."""
    program = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'dlcore.ops.cli.app':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import dlcore.ops.cli\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "error: interrupted\n")
