"""Earlier releases, taken out of the repository's history into folders to run from."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LAST = "0.2.0"
"""The release that this one runs beside."""
_PARTS = ("bookie", "dlcore", "dlspark", "pyspark_dlog.py")


@dataclass(frozen=True, slots=True)
class Installed:
    """A release in a folder; processes that are started with `environment` run it."""

    name: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its processes: not even the working folder comes before it.

        Those of this release are forked as in other tests, which PYTHONSAFEPATH would prevent.
        """
        return {
            "PYTHONPATH": str(self.folder),
            **({} if self.folder == REPOSITORY else {"PYTHONSAFEPATH": "1"}),
            "PYTHONUNBUFFERED": "1",
            "PYSPARK_PYTHON": sys.executable,
        }


NOW = Installed("this release", REPOSITORY)


def commit_of(version: str, repository: Path = REPOSITORY) -> str:
    """Return the commit of a release: by its tag, else by the subject of its commit."""
    tagged = _git(repository, "rev-parse", "--quiet", "--verify", f"v{version}^{{commit}}")
    found = tagged or _git(
        repository, "log", "--format=%H", "--max-count=1", f"--grep=^Release {version}$"
    )
    if not found:
        shallow = _git(repository, "rev-parse", "--is-shallow-repository") == "true"
        pytest.skip(
            f"there is neither a tag v{version} nor a commit 'Release {version}': "
            + (
                "the history is cut off, git fetch --unshallow --tags brings it"
                if shallow
                else "these tests need a clone of the repository with its history"
            )
        )
    return found


def install(version: str, folder: Path) -> Installed:
    """Take a release out of the history; dependencies are those of this Python."""
    packed = subprocess.run(
        ["git", "archive", commit_of(version), *_PARTS],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    about = folder / f"distributed_dlog-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: distributed-dlog\nVersion: {version}\n"
    )
    return Installed(version, folder)


def _git(repository: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=repository, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
