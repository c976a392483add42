"""The servers that a bundle describes, which go on working meanwhile."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from dlcore.ops.diagnosis.servers import paths_below

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_that_is_removed_meanwhile_is_left_out(tmp_path: Path) -> None:
    """A bookie deletes folders of its own while a bundle is made."""
    for name in ("a", "b/c/d", "e/f"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = []
    for path in paths_below(str(tmp_path)):
        found.append(str(path.relative_to(tmp_path)))
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
    assert found == ["a", "e/f"]
