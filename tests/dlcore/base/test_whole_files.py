"""A file is whole and synced under its name, or not there: over errors, full disks and kills."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.base.whole_files import whole_file

LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))"
"""A disk on which a file has room for 500 bytes."""
KILLED = """
import os, pathlib, signal, sys
from dlcore.base.whole_files import whole_file
with whole_file(pathlib.Path(sys.argv[1])) as file:
    file.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
COMMAND = "from dlcore.ops.cli import main; main()"


def test_a_file_is_there_after_its_block(tmp_path: Path) -> None:
    """With its mode, and nothing beside it."""
    path = tmp_path / "new"
    with whole_file(path, mode=0o600) as file:
        file.write(b"a")
        file.write(memoryview(b"bc"))
        assert not path.exists()
    assert path.read_bytes() == b"abc"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_no_other_file_is_replaced_unless_asked(tmp_path: Path) -> None:
    """Neither one that was there, nor one that came during the block."""
    path = tmp_path / "new"
    with (
        pytest.raises(ConfigurationError, match="new exists: expected the name of a new file"),
        whole_file(path),
    ):
        path.write_bytes(b"another")
    with pytest.raises(ConfigurationError, match="new exists"), whole_file(path):
        pytest.fail("it began")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"another"]
    with whole_file(path, replaces=True) as file:
        file.write(b"mine")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"mine"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "of a socket"), KeyboardInterrupt()])
def test_after_an_error_nothing_is_left(tmp_path: Path, error: BaseException) -> None:
    """The block's own error is not said to be of the file."""
    with pytest.raises(type(error)) as raised, whole_file(tmp_path / "new"):
        raise error
    assert raised.value is error
    assert "new" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_reported_with_the_name_of_the_file(tmp_path: Path) -> None:
    """And not with that of the file beside it."""
    path = tmp_path / "no" / "new"
    with pytest.raises(FileNotFoundError) as raised, whole_file(path):
        pytest.fail("it began")
    assert raised.value.filename == str(path)


def test_a_killed_process_leaves_no_half_file_under_the_name(tmp_path: Path) -> None:
    """And what it left does not keep the next one from the name."""
    path = tmp_path / "new"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left.suffix, left.read_bytes()) == (".partial", b"half")
    with whole_file(path) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole"


def test_a_full_disk_is_reported_with_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    """Method: a command under a limit on the size of files, at which a first write is short."""
    folder = tmp_path / "cluster"
    command = ["secure", "init", str(folder), "--uri", "distributedlog://zk/dlog"]
    ended = subprocess.run(
        # -B: the limit would cut off bytecode that is written on the way, which every later
        # import fails to read.
        [sys.executable, "-B", "-c", f"{LIMIT}; {COMMAND}", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert f"File too large: '{folder}/ca.pem'" in ended.stderr, ended.stderr
    assert [each.name for each in folder.iterdir()] == ["ca.key"]


def test_a_name_is_given_to_what_is_synced_and_is_synced_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power leaves an empty file, or none after the command said that it is there.

    A file system without hard links takes the same steps.
    """
    done: list[str] = []
    sync, link, rename = os.fsync, Path.hardlink_to, Path.rename

    def noted_sync(descriptor: int) -> None:
        done.append("sync of " + Path(f"/proc/self/fd/{descriptor}").readlink().suffix)
        sync(descriptor)

    def noted_link(new: Path, old: Path) -> None:
        done.append("name")
        link(new, old)

    def no_link(_new: Path, _old: Path) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    def noted_rename(old: Path, new: Path) -> Path:
        done.append("name")
        return rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_sync)
    for method, reason in (("hardlink_to", noted_link), ("rename", noted_rename)):
        monkeypatch.setattr(Path, method, reason)
        folder = tmp_path / f"{method}.folder"
        folder.mkdir()
        with whole_file(folder / "new") as file:
            file.write(b"x")
        assert done == ["sync of .partial", "name", "sync of .folder"]
        assert [each.name for each in folder.iterdir()] == ["new"]
        done.clear()
        monkeypatch.setattr(Path, "hardlink_to", no_link)


def test_an_error_of_a_link_that_is_no_refusal_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the name of the file."""

    def fails(_new: Path, _old: Path) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(Path, "hardlink_to", fails)
    with pytest.raises(OSError, match=r"the disk is broken: '.*new'"), whole_file(tmp_path / "new"):
        pass
    assert list(tmp_path.iterdir()) == []
