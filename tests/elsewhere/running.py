"""Runs the demo and the tests on a Python or in a place, and sums up how each ended."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.elsewhere.debian import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.elsewhere.places import Place

_APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount")
_SUMMARY = re.compile(r"^=* ?(\d+ (?:passed|failed|error).* in [\d.]+s.*?) ?=*$")
_SHOWN_LINES = 15


class Outcome(NamedTuple):
    """How one command ended in one place."""

    place: str
    work: str
    """`demo`, `test` or `coverage`."""
    status: str
    """`passed`, `FAILED`, or `skipped`."""
    last_line: str
    """The summary of the tests, or the reason."""
    seconds: float

    def __str__(self) -> str:
        return f"{self.status:8}{self.work:9}{self.place:42}{self.seconds:6.0f} s  {self.last_line}"


def run(
    place: str,
    work: str,
    command: Sequence[str],
    log: Path,
    *,
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run one command; its output goes to a file, the last lines of which are shown if it fails."""
    print(f"== {place}: {work}, see {log}", flush=True)
    began = time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    lines = log.read_text(errors="replace").splitlines()
    found = [match[1] for line in lines if (match := _SUMMARY.match(line))]
    last = found[-1] if found else ""
    if done.returncode:
        print("\n".join(lines[-_SHOWN_LINES:]), flush=True)
        last = last or f"exit status {done.returncode}"
    elif work != "demo" and not found:
        return Outcome(place, work, "FAILED", "no test was run", time.monotonic() - began)
    status = "FAILED" if done.returncode else "passed"
    return Outcome(place, work, status, last, time.monotonic() - began)


def words_for(work: str, tests: str) -> list[str]:
    """Return what make is asked for: the work, and for pytest which tests."""
    return [work] if work == "demo" else [work, f"ARGS={tests}"]


def why_not(place: Place) -> str | None:
    """Return what a place lacks here; None if it can be made."""
    if place.needs_root and os.geteuid() != 0:
        return "only root can make this place"
    missing = [name for name in place.programs if shutil.which(name) is None]
    return f"{', '.join(missing)} is not installed" if missing else None


def run_place(place: Place, works: Sequence[str], tests: str, logs: Path) -> list[Outcome]:
    """Run the demo, the tests, or both in a place."""
    if reason := why_not(place):
        return [Outcome(place.name, work, "skipped", reason, 0) for work in works]
    outcomes = []
    with ExitStack() as stack:
        work_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlog-place-")))
        work_folder.chmod(0o755)
        checkout = _checkout(place, work_folder)
        for work in works:
            if work == "demo" and place.lacks_demo:
                outcomes.append(Outcome(place.name, work, "skipped", place.lacks_demo, 0))
                continue
            again = tempfile.mkdtemp(dir=work_folder)
            Path(again).chmod(0o1777)
            environment = _environment(place, again)
            log = logs / f"{re.sub(r'[^A-Za-z0-9]+', '-', place.name)}-{work}.log"
            words = words_for(work, tests)
            if work != "demo" and place.workers:
                words.append(f"WORKERS={place.workers}")
            command = _command(place, words)
            outcomes.append(
                run(place.name, work, command, log, folder=checkout, environment=environment)
            )
    return outcomes


def _checkout(place: Place, work_folder: Path) -> Path:
    """Return the folder to run in: this checkout, or a fresh clone that belongs to the user."""
    if not place.folder:
        return ROOT
    clone = work_folder / place.folder
    clone_command = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)]
    subprocess.run(clone_command, check=True)
    if place.user:
        user = pwd.getpwnam(place.user)
        for path in (work_folder, *work_folder.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
    return clone


def _environment(place: Place, folder: str) -> Mapping[str, str]:
    added = {key: value.replace("$WORK", folder) for key, value in place.environment.items()}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    if place.user:
        added["HOME"] = folder
    return {**kept, "WORK": folder, **added}


def _command(place: Place, words: Sequence[str]) -> list[str]:
    """Return what runs make in the place."""
    command = ["make", *words]
    if place.user:
        groups = ("--reuid", place.user, "--regid", "nogroup", "--clear-groups", "--inh-caps=-all")
        command = ["setpriv", *groups, *command]
    if not place.setup:
        return command
    program = ["sh", "-euc", f"{place.setup}\nexec {shlex.join(command)}"]
    return [*_APART, *place.namespaces, *program] if place.needs_root else program
