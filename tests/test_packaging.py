"""The wheel and the source distribution: what is in them, and what an index shows of them."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from dlcore.ops.cli.console.entrances import FILES
from tools.release_check.twice import ELSEWHERE, HERE, build_from_copy, differences

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = {"bookie", "dlcore", "dlspark", "pyspark_dlog.py"}
SOURCES = IMPORTED | {
    "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "PKG-INFO",
    "README.md", "SECURITY.md", "deploy", "docs", "pyproject.toml", "tests", "tools", ".gitignore",
}  # fmt: skip
SIZE_BYTES_MAX = 4_200_000


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from this tree without a network."""
    return build_from_copy(ROOT, tmp_path_factory.mktemp("first"), HERE)


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of that pattern."""
    (found,) = folder.glob(pattern)
    return found


def test_the_wheel_holds_what_is_imported_and_nothing_else(built: Path) -> None:
    """The packages with their types, the module that Spark finds, the command, the licence."""
    with zipfile.ZipFile(only(built, "distributed_dlog-*.whl")) as wheel:
        names = wheel.namelist()
        (entry_points,) = (n for n in names if n.endswith("entry_points.txt"))
        assert "dlog = dlcore.ops.cli:main" in wheel.read(entry_points).decode()
        (metadata,) = (n for n in names if n.endswith("METADATA"))
        description = wheel.read(metadata).decode()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == IMPORTED
    assert {"dlcore/py.typed", "bookie/py.typed", "dlspark/py.typed"} <= set(names)
    static = {Path("dlcore/ops/cli/console/static") / name for name in FILES.values()}
    assert static <= {Path(name) for name in names}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in description
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert all(link.startswith("https://") for link in links), links


def test_the_source_distribution_holds_sources_only(built: Path) -> None:
    """No results, artifacts or caches; with its files one can build and test."""
    archive = only(built, "distributed_dlog-*.tar.gz")
    assert archive.stat().st_size < SIZE_BYTES_MAX
    with tarfile.open(archive) as sources:
        names = [name.partition("/")[2] for name in sources.getnames()]
    assert {name.partition("/")[0] for name in names} == SOURCES
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(names) - {"PKG-INFO"} <= set(tracked.stdout.splitlines())


def test_another_build_makes_the_same_bytes(built: Path, tmp_path: Path) -> None:
    """A user that builds the same sources elsewhere can compare the files with a release's."""
    elsewhere = build_from_copy(ROOT, tmp_path, ELSEWHERE)
    assert differences(built, elsewhere) == []


def test_an_index_would_take_them(built: Path) -> None:
    """The metadata is valid and the long description renders."""
    files = [str(path) for path in sorted(built.iterdir())]
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
