"""Processes forked for a test are those that the test would have started itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlcore.ops.sandbox.process import GATE
from tests.fixtures.fork_server import STARTS_OTHERS
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.waiting import wait_until

WAIT_S = 60
LOOK = """
import json, os, signal, sys
def descriptors() -> int:
    for each in os.listdir("/proc/self/fd"):
        # The library of ctypes keeps itself open, in each process that has loaded it.
        if os.path.exists(name := f"/proc/self/fd/{each}") and "libffi" not in os.readlink(name):
            yield int(each)
signals = signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD, signal.SIGHUP
looks = {
    "name": __name__,
    "arguments": sys.argv,
    "folder": os.getcwd(),
    "imports from": sys.path[0],
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "group": os.getpgid(0) == os.getpid(),
    "session": os.getsid(0) == os.getpid(),
    "signals": [str(signal.getsignal(each)).partition(" at ")[0] for each in signals],
    "descriptors": sorted(descriptors()),
    "annotations": str(descriptors.__annotations__),
    "threads": len(os.listdir("/proc/self/task")),
    "streams": [(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through,
                 type(s.buffer).__name__) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")[1:],
    "main": sorted(name for name in vars(sys.modules["__main__"]) if name[:2] != "__"),
}
if sys.argv[1:]:
    looks["input"] = sys.stdin.read()
print(json.dumps(looks))
"""


def loaded(python: str) -> bool:
    """Return whether a program has dlog loaded at its start, in the test's environment as it is."""
    code = "import sys; print('bookie.server' in sys.modules)"
    return subprocess.run([python, "-c", code], capture_output=True, check=True).stdout == b"True\n"


def look(python: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Return what a program finds."""
    command = [python, "-c", LOOK, "some", "words"]
    shown = subprocess.run(
        command, capture_output=True, check=False, text=True, input="what\nit gets", **options
    )
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_unbuffered", [False, True])
@pytest.mark.parametrize("has_session", [False, True])
def test_it_finds_what_it_would_find(
    tmp_path: Path, *, has_session: bool, is_unbuffered: bool
) -> None:
    """Arguments, folder, variables, parent, signals, descriptors, streams are the same."""
    environment = {**os.environ, "DLOG_SOME": "thing"}
    environment.pop("PYTHONUNBUFFERED", None)
    if is_unbuffered:
        environment["PYTHONUNBUFFERED"] = "1"
    options = {"cwd": tmp_path, "env": environment, "start_new_session": has_session}
    forked = look(LOADED_PYTHON, tmp_path, **options)
    assert forked == look(sys.executable, tmp_path, **options)
    assert forked["parent"] == os.getpid()


def test_jobs_that_spark_starts_are_not_forked(spark_python: Path) -> None:
    """They are programs of a test's own, which may fork or ask where they are."""
    assert not loaded(str(spark_python))


def test_it_has_the_folder_and_environment_of_the_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not those in which the server was started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLOG_SOME", "thing")
    found = look(LOADED_PYTHON, tmp_path)
    assert (found["folder"], found["environment"]["DLOG_SOME"]) == (str(tmp_path), "thing")


@pytest.mark.parametrize(
    ("code", "status", "errors"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("import atexit; atexit.register(print, 'at the end'); raise SystemExit", 0, ""),
        ("print('at the end', end='')", 0, ""),
        ("class Last:\n def __del__(self): print('at the end')\nlast = Last()", 0, ""),
        (
            "class Last:\n def __del__(self): print('at the end')\na = [Last()]; a += [a]; del a",
            0,
            "",
        ),
        ("import os; print('lost'); os.close(1)", 120, "Bad file descriptor\n"),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import os; os._exit(9)", 9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("raise ValueError('why')", 1, "ValueError: why\n"),
    ],
)
def test_it_ends_as_it_would_end(code: str, status: int, errors: str) -> None:
    """Status and output are those of a Python that starts."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    ends = [
        subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=False, env=environment
        )
        for python in (LOADED_PYTHON, sys.executable)
    ]
    forked, other = ends
    assert (forked.returncode, forked.stdout) == (other.returncode, other.stdout)
    assert forked.returncode == status
    assert (forked.stderr[-len(errors) :] if errors else forked.stderr) == errors


def test_signals_reach_it() -> None:
    """It is stopped, interrupted, terminated and killed."""
    # A signal that comes just before a long sleep begins is looked at when that ends.
    code = "import time; print('ready', flush=True)\nwhile True: time.sleep(0.05)"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(
            [LOADED_PYTHON, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            assert process.wait(WAIT_S) == -number


def test_asyncio_waits_for_it() -> None:
    """Its end reaches the event loop."""

    async def scenario() -> tuple[bytes, int | None]:
        process = await asyncio.create_subprocess_exec(
            *(LOADED_PYTHON, "-c", "print(input()); raise SystemExit(5)"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        shown, _ = await process.communicate(b"sent\n")
        return shown, process.returncode

    assert asyncio.run(scenario()) == (b"sent\n", 5)


@pytest.mark.parametrize(("given", "shown"), [("go\nrest", "rest"), ("", "")])
def test_one_that_is_gated_waits_for_its_line(given: str, shown: str) -> None:
    """It runs after the line, with the rest; without one it fails."""
    command = [*GATE, LOADED_PYTHON, "-c", "import sys; print(sys.stdin.read(), end='')"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (shown, 0 if given else 1)


def test_a_module_runs_as_the_main_one() -> None:
    """Its output is the same."""
    forked, other = (
        subprocess.run(
            [python, "-m", "dlcore.ops.cli", *options], capture_output=True, text=True, check=False
        )
        for python in (LOADED_PYTHON, sys.executable)
        for options in (["log", "nonsense"],)
    )
    assert (forked.returncode, forked.stderr) == (other.returncode, other.stderr) != (0, "")


def test_a_process_that_cannot_be_forked_starts_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its usual name, or with other variables of Python's, it is not forked."""
    assert loaded(LOADED_PYTHON)
    assert not loaded(sys.executable)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert not loaded(LOADED_PYTHON)


def test_an_orphan_is_not_ours(tmp_path: Path) -> None:
    """A process of the tests that ended would stay for ever as a zombie."""
    loaded(LOADED_PYTHON)
    found = tmp_path / "parent"
    code = f"""if True:
        import os, time
        process = os.getpid()
        if os.fork() == 0:
            while os.getppid() == process:
                time.sleep(0.01)
            with open({str(found)!r}, "w") as file:
                file.write(f"{{os.getppid()}}\\n")
    """
    subprocess.run([LOADED_PYTHON, "-c", code], check=True)
    wait_until(lambda: found.exists() and found.read_text(), timeout_s=WAIT_S)
    assert int(found.read_text()) != os.getpid()


def test_a_sandbox_has_its_processes_forked() -> None:
    """They are its children, and have its output; the server for them ends when it is killed."""
    code = f"""if True:
        import os, subprocess, time
        look = "import os, sys; print('bookie.server' in sys.modules, os.getppid(), flush=True)"
        subprocess.run([{LOADED_PYTHON!r}, "-c", look], check=True)
        print(*open("/proc/self/task/%d/children" % os.getpid()), flush=True)
        time.sleep({WAIT_S})
    """
    with subprocess.Popen(
        [LOADED_PYTHON, "-c", code, *STARTS_OTHERS], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"True {process.pid}\n"
        (server,) = map(int, process.stdout.readline().split())
        process.kill()
        assert process.stdout.read() == ""
    wait_until(lambda: not Path(f"/proc/{server}").exists(), timeout_s=WAIT_S)
