"""Every supported Python: which interpreters are here, and a Debian root for each that is not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.elsewhere import debian

SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
_USABLE = "import ctypes, ensurepip, sqlite3, ssl, sys, venv; print('%d.%d' % sys.version_info[:2])"
"""The needs of dlog, its tools and `make` of a self-compiled Python."""
_SAME_ON_ALL = (
    # Searches, each of which runs the machines that unit tests run, too.
    "tests/model",
    "tests/simulation",
    # Tests of the texts of the repository's files, and of the tools that read them.
    "tests/tools",
    "tests/test_architecture_pages.py",
    "tests/test_circles.py",
    "tests/test_docstrings.py",
    "tests/test_figures.py",
    "tests/test_hidden_protocols.py",
    "tests/test_paragraphs.py",
    "tests/test_project.py",
    "tests/test_purity.py",
    "tests/test_runbook.py",
    "tests/test_tidy.py",
)
LEFT_OUT = tuple(f"--ignore={each}" for each in _SAME_ON_ALL)
"""Options for pytest: without the tests that one Python is enough for."""


class Interpreter(NamedTuple):
    """A Python of a supported version, or why it cannot be had."""

    version: str
    path: str
    """Where it is; empty if it cannot be had."""
    root: Path | None
    """The Debian that it is in; None if it is this system's."""
    problem: str = ""

    def __str__(self) -> str:
        place = f"Debian {self.root.name}" if self.root else self.path
        return f"Python {self.version} ({self.problem or place})"

    def make(self, *words: str) -> list[str]:
        """Return what runs make with it, in the checkout or a fresh clone of it."""
        command = ["make", *words, f"PYTHON={self.path}"]
        return command if self.root is None else debian.command_in(self.root, command)


def find(version: str) -> Interpreter:
    """Return an interpreter of a version: of this system, else in a Debian made for it."""
    candidates = [shutil.which(f"python{version}"), *_of_pyenv(version), shutil.which("python3")]
    for candidate in candidates:
        if candidate and _version_of(candidate) == version:
            return Interpreter(version, candidate, None)
    release = next((each for each in debian.RELEASES if each.python == version), None)
    if release is None:
        return Interpreter(version, "", None, "not on the PATH, nor in pyenv's folders")
    if problem := debian.why_not():
        return Interpreter(
            version, "", None, f"not on the PATH, nor in pyenv's folders, and {problem}"
        )
    return _find_in(release)


def _find_in(release: debian.Release) -> Interpreter:
    try:
        root = debian.make(release)
    except subprocess.CalledProcessError as error:
        return Interpreter(
            release.python, "", None, f"Debian {release.name} cannot be had: {error}"
        )
    debian.clone_into(root)
    path = "/usr/bin/python3"
    shown = _shown(debian.command_in(root, [path, "-c", _USABLE]))
    if shown != release.python:
        problem = f"the python3 of Debian {release.name} is {shown or 'unusable'}"
        return Interpreter(release.python, "", root, problem)
    return Interpreter(release.python, path, root)


def _of_pyenv(version: str) -> list[str]:
    """Return the Pythons of a version that pyenv has, the newest first."""
    folder = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = sorted(folder.glob(f"{version}.*/bin/python3"), key=_patch_of, reverse=True)
    return list(map(str, found))


def _patch_of(path: Path) -> int:
    match = re.match(r"\d+\.\d+\.(\d+)", path.parents[1].name)
    return int(match[1]) if match else -1


def _version_of(path: str) -> str:
    return _shown([path, "-c", _USABLE])


def _shown(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
