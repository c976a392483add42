"""Goal: a release is one commit and one tag that passed its check, or nothing.

Method: a small repository of its own, with checks that pass and that fail.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tools.release import NotReleasableError, release

if TYPE_CHECKING:
    from pathlib import Path

DAY = "2026-11-26"
PASSES = [sys.executable, "-c", ""]
FAILS = [sys.executable, "-c", "raise SystemExit(1)"]
PYPROJECT = '[project]\nversion = "0.1.0"\n'
CHANGELOG = "# Changelog\n\nNewest first.\n\n## Not released yet\n\n- **Logs**.\n"


def git(root: Path, *arguments: str) -> list[str]:
    """Run git and return the lines of its output."""
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a checkout with one commit."""
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    for name in ("name", "email"):
        git(tmp_path, "config", f"user.{name}", "author@example.org")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "Begin")
    return tmp_path


def test_release_is_committed_tagged_and_followed(root: Path) -> None:
    """The tag has the version and the day; what comes after has a place in the changelog."""
    release(root, "0.2.0", PASSES, DAY)
    assert git(root, "log", "--format=%s", "v0.2.0") == ["Release 0.2.0", "Begin"]
    assert 'version = "0.2.0"' in git(root, "show", "v0.2.0:pyproject.toml")
    assert f"## 0.2.0, {DAY}" in git(root, "show", "v0.2.0:CHANGELOG.md")
    assert 'version = "0.3.0.dev0"' in (root / "pyproject.toml").read_text()
    headings = [each for each in (root / "CHANGELOG.md").read_text().split("\n") if "##" in each]
    assert headings == ["## Not released yet", f"## 0.2.0, {DAY}"]
    assert not git(root, "status", "--porcelain")


def test_failed_check_leaves_nothing(root: Path) -> None:
    """The checkout is what it was, without a tag."""
    with pytest.raises(NotReleasableError, match="taken back"):
        release(root, "0.2.0", FAILS, DAY)
    assert git(root, "log", "--format=%s") == ["Begin"]
    assert git(root, "tag") == git(root, "status", "--porcelain") == []


@pytest.mark.parametrize(
    ("version", "named"), [("0.2", "three numbers"), ("v0.2.0", "v0.2.0"), ("0.0.9", "later")]
)
def test_wrong_version_is_refused(root: Path, version: str, named: str) -> None:
    """The error names it."""
    with pytest.raises(NotReleasableError, match=named):
        release(root, version, PASSES, DAY)


def test_second_release_needs_changes_and_another_tag(root: Path) -> None:
    """A release without a change in the changelog tells users nothing."""
    release(root, "0.2.0", PASSES, DAY)
    with pytest.raises(NotReleasableError, match="no change below"):
        release(root, "0.3.0", PASSES, DAY)
    git(root, "tag", "v0.3.0")
    with pytest.raises(NotReleasableError, match="exists already"):
        release(root, "0.3.0", PASSES, DAY)


def test_uncommitted_changes_are_refused(root: Path) -> None:
    """They would not be in the tag, or come into it unseen."""
    (root / "new").write_text("")
    with pytest.raises(NotReleasableError, match="not committed"):
        release(root, "0.2.0", PASSES, DAY)
