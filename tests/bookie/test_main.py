"""The bookie's command line, up to the point where it would serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bookie.__main__ import EXIT_REFUSED, _parser, _read_config, main
from dlcore.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

URI = "distributedlog://127.0.0.1:1/dlog"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command line that must be refused; return what it says."""
    assert main([*arguments]) == EXIT_REFUSED
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if line.startswith("bookie refuses")]
    return line.removeprefix("bookie refuses to start: ")


def test_a_command_line_that_cannot_work_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By option and value; nothing was made."""
    folder = tmp_path / "data"
    whole = ["--name", "b", "--metadata-uri", URI, "--data-dir", str(folder)]
    assert "name" in refusal(capsys, *whole[2:])
    assert "port='x'" in refusal(capsys, *whole, "--port", "x")
    assert f"--config {tmp_path}/none: " in refusal(capsys, *whole, "--config", f"{tmp_path}/none")
    file = tmp_path / "bookie.toml"
    file.write_text("port = ")
    assert f"--config {file}: " in refusal(capsys, *whole, "--config", str(file))
    file.write_text("prot = 2")
    assert "unknown option 'prot'" in refusal(capsys, *whole, "--config", str(file))
    assert not folder.exists()


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    """Key by key."""
    file = tmp_path / "bookie.toml"
    file.write_text(f'name = "of-the-file"\nport = 7\nmetadata_uri = "{URI}"\ndata_dir = "/d"\n')
    options = vars(_parser().parse_args(["--config", str(file), "--name", "given"]))
    options.pop("watch_parent")
    config = _read_config(options)
    assert (config.name, config.port, config.metadata_uri) == ("given", 7, URI)
    with pytest.raises(ConfigurationError, match="name"):
        _read_config({"config": None})
