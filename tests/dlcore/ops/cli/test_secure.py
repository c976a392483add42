"""`dlog secure` as a user meets it: what it makes, what it tells, what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dlcore.ops.cli.app import EXIT_USAGE, run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

URI = "distributedlog://127.0.0.1:2181/dlog"


def test_init_tells_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths for people and programs; the second time that nothing is missing."""
    folder = tmp_path / "cluster"
    command = ["secure", "init", str(folder), "--host", "node-1", "--uri", URI]
    assert run([*command, "--client", "ingest", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["made"]
    assert {"ca.key", "hosts/node-1/bookie.toml", "clients/ingest/dlog.toml"} <= set(made)
    assert all((folder / name).is_file() for name in made)
    assert run(command) == 0
    assert capsys.readouterr().out == f"nothing is missing in {folder}\n"
    assert run([*command, "--client", "report"]) == 0
    assert f"made {folder}/clients/report/client.key\n" in capsys.readouterr().out


def test_a_token_is_all_that_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell can then keep it in a variable; programs learn when it expires, too."""
    assert run(["secure", "init", str(tmp_path), "--uri", URI]) == 0
    capsys.readouterr()
    command = ["secure", "token", str(tmp_path), "--user", "alice"]
    assert run(command) == 0
    assert capsys.readouterr().out.count(".") == 2
    assert run([*command, "--json"]) == 0
    assert {"token", "user", "expires"} == set(json.loads(capsys.readouterr().out))
    assert run(["secure", "token", str(tmp_path / "none"), "--user", "alice"]) == EXIT_USAGE


def test_a_wrong_name_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is reported as wrong use."""
    folder = tmp_path / "cluster"
    assert run(["secure", "init", str(folder), "--host", "../node", "--uri", URI]) == EXIT_USAGE
    assert "error: host='../node': expected a name" in capsys.readouterr().err
    assert not folder.exists()
