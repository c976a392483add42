"""Wheel and source distribution, built twice in surroundings that differ."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_BUILD_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Properties of a machine that must not reach the built files."""

    zone: str
    umask: int
    hash_seed: str
    modified_s: int
    """The time at which the sources were laid down, in seconds since 1970."""


HERE = Surroundings(zone="UTC", umask=0o022, hash_seed="0", modified_s=1_700_000_000)
ELSEWHERE = Surroundings(zone="Asia/Tokyo", umask=0o077, hash_seed="1", modified_s=1_500_000_000)


def build_from_copy(root: Path, folder: Path, surroundings: Surroundings) -> Path:
    """Build a copy of the sources in `folder`, and return the folder of the built files.

    Raises:
        subprocess.CalledProcessError: the build failed; its output is in the error.
    """
    sources, built = folder / "sources", folder / "dist"
    _copy(root, sources, surroundings)
    subprocess.run(
        # Without isolation, so that both builds have the installed version of the build tool.
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(sources)],
        env=os.environ
        | {
            "SOURCE_DATE_EPOCH": released_s(root),
            "TZ": surroundings.zone,
            "PYTHONHASHSEED": surroundings.hash_seed,
        },
        umask=surroundings.umask,
        capture_output=True,
        text=True,
        check=True,
        timeout=_BUILD_TIMEOUT_S,
    )
    return built


def released_s(root: Path) -> str:
    """Return the time of the latest commit, which the built files have as theirs."""
    return _git(root, "log", "-1", "--format=%ct").strip()


def _copy(root: Path, sources: Path, surroundings: Surroundings) -> None:
    """Copy the files that git knows or would take, as a person with that umask unpacks them."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        source, target = root / name, sources / name
        if not source.exists():  # deleted, and not committed yet
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        mode = 0o777 if os.access(source, os.X_OK) else 0o666
        # `copyfile` takes no modes over: they are those of the person who unpacks the sources.
        target.chmod(mode & ~surroundings.umask)
        os.utime(target, (surroundings.modified_s, surroundings.modified_s))


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
    ).stdout


def differences(first: Path, second: Path) -> list[str]:
    """Return a sentence for each file that is not the same in both folders."""
    names = sorted({path.name for folder in (first, second) for path in folder.iterdir()})
    found = []
    for name in names:
        one, other = first / name, second / name
        if not one.exists() or not other.exists():
            found.append(f"{name} was built only once")
        elif one.read_bytes() != other.read_bytes():
            found.append(f"{name} differs between two builds: compare {one} with {other}")
    return found
