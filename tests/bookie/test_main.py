"""The bookie's command line, up to the point where it would serve."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from bookie.__main__ import (
    EXIT_FAILED,
    EXIT_REFUSED,
    EXIT_STOPPED,
    _parser,
    _read_config,
    _run,
    main,
)
from bookie.disks.port import DiskFullError
from bookie.server import BookieServer
from dlcore.base import server_process
from dlcore.base.errors import (
    BookieStorageError,
    ConfigurationError,
    MetadataSessionExpiredError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from bookie.server_config import BookieConfig
    from dlcore.base.errors import DLError
    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper

URI = "distributedlog://127.0.0.1:1/dlog"


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how often a bookie that serves would have set up Python's collector.

    It does so for its whole process, which here is that of other tests, too: Hypothesis takes what
    is frozen for unused, and warns of it.
    """
    counts: list[int] = []
    monkeypatch.setattr(server_process, "collect_what_is_new", lambda: counts.append(1))
    return counts


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
    assert f"file {tmp_path}/none: " in refusal(capsys, *whole, "--config", f"{tmp_path}/none")
    file = tmp_path / "bookie.toml"
    file.write_text("port = ")
    assert f"file {file}: " in refusal(capsys, *whole, "--config", str(file))
    file.write_text("[bookie]\nprot = 2")
    said = refusal(capsys, *whole, "--config", str(file))
    assert f"{file} [bookie] prot=2: there is no such setting, expected one of" in said
    assert not folder.exists()


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    """Key by key."""
    file = tmp_path / "bookie.toml"
    file.write_text(
        f'[bookie]\nname = "of-the-file"\nport = 7\nmetadata_uri = "{URI}"\ndata_dir = "/d"\n'
    )
    options = vars(_parser().parse_args(["--config", str(file), "--name", "given"]))
    options.pop("watch_parent")
    config = _read_config(options)
    assert (config.name, config.port, config.metadata_uri) == ("given", 7, URI)
    with pytest.raises(ConfigurationError, match="name"):
        _read_config({"config": None})


def test_it_is_refused_without_the_checks_that_guard_the_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are assertions."""
    monkeypatch.setattr(sys, "flags", SimpleNamespace(optimize=1))
    assert "python -O" in refusal(capsys)


@pytest.mark.integration
@pytest.mark.parametrize("ends_by", ["signal", "parent"])
def test_it_serves_until_a_signal_or_its_parents_end(
    zookeeper: EmbeddedZooKeeper,
    zookeeper_root: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    frozen: list[int],
    ends_by: str,
) -> None:
    """By a signal, or by the end of its standard input, which its parent holds."""
    theirs, ours = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(theirs))
    uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"
    options: dict[str, object] = {"name": "b", "metadata_uri": uri, "data_dir": str(tmp_path)}

    async def scenario() -> int:
        config = _read_config({"config": None, **options})
        task = asyncio.create_task(_run(config, watch_parent=ends_by == "parent"))
        out = ""
        while "serving on" not in out:
            assert not task.done()
            await asyncio.sleep(0.02)
            out += capfd.readouterr().out
        if ends_by == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            os.write(ours, b"ignored")
            os.close(ours)
        return await task

    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert asyncio.run(scenario()) == EXIT_STOPPED
        assert frozen == [1]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.stdin.close()
        if ends_by == "signal":
            os.close(ours)


@pytest.mark.integration
def test_it_says_why_it_failed_or_did_not_start(
    zookeeper: EmbeddedZooKeeper,
    zookeeper_root: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The folder of another bookie is refused; a failure has another status."""
    uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"

    def config_of(name: str) -> BookieConfig:
        return _read_config(
            {"config": None, "name": name, "metadata_uri": uri, "data_dir": str(tmp_path)}
        )

    for error, to_do in (
        (BookieStorageError("made to fail"), "; to do: look for errors of the device"),
        (DiskFullError("made to fail"), "; to do: free space"),
        (MetadataSessionExpiredError("made to fail"), "\n"),
    ):

        async def fails(_server: BookieServer, error: DLError = error) -> DLError:
            return error

        monkeypatch.setattr(BookieServer, "wait_failed", fails)
        assert asyncio.run(_run(config_of("a"), watch_parent=False)) == EXIT_FAILED
        assert f"bookie a failed: made to fail{to_do}" in capsys.readouterr().err
    assert asyncio.run(_run(config_of("b"), watch_parent=False)) == EXIT_REFUSED
    assert "bookie refuses to start" in capsys.readouterr().err
