"""The servers that a bundle describes, which go on working meanwhile."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from dlcore.base.server_process import NAME_PREFIX
from dlcore.ops.diagnosis import servers
from dlcore.ops.diagnosis.servers import paths_below

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


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


def test_a_server_that_closes_a_file_meanwhile_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy one opens and closes sockets while its files are listed."""
    open_files = tmp_path / "123" / "fd"
    open_files.mkdir(parents=True)
    for name in ("3", "4"):
        (open_files / name).write_text(json.dumps({"role": "bookie", "name": "b", "settings": {}}))
    closed: list[Path] = []

    def target(file: Path) -> str:
        if not closed:
            closed.append(file)
            raise FileNotFoundError(file)
        return f"/memfd:{NAME_PREFIX}bookie b (deleted)"

    monkeypatch.setattr(servers, "_PROC", tmp_path)
    monkeypatch.setattr(servers, "_target", target)
    (found,) = servers.find_servers()
    assert (found.pid, found.facts["name"]) == (123, "b")
