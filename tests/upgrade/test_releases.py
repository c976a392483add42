"""Earlier releases are found in the history, and it is said what a clone lacks without it."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.upgrade.releases import LAST, REPOSITORY, commit_of

if TYPE_CHECKING:
    from pathlib import Path


def test_a_release_is_found_without_its_tag(tmp_path: Path) -> None:
    """By the subject of its commit, as in a clone without tags."""
    clone = tmp_path / "clone"
    options = ["--quiet", "--no-tags", "--no-checkout", "--shared"]
    subprocess.run(["git", "clone", *options, str(REPOSITORY), str(clone)], check=True)
    assert commit_of(LAST, clone) == commit_of(LAST)


def test_a_history_that_is_cut_off_is_named(tmp_path: Path) -> None:
    """With the command that brings the rest; else the release may not exist at all."""
    clone = tmp_path / "clone"
    options = ["--quiet", "--no-checkout", "--depth", "1"]
    subprocess.run(["git", "clone", *options, f"file://{REPOSITORY}", str(clone)], check=True)
    with pytest.raises(pytest.skip.Exception, match="git fetch --unshallow --tags"):
        commit_of(LAST, clone)
    with pytest.raises(pytest.skip.Exception, match="nor a commit 'Release 99\\.0\\.0'"):
        commit_of("99.0.0")
