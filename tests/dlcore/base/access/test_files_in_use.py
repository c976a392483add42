"""The content of files that a process uses, while another process writes them."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest

from dlcore.base.access.files_in_use import FilesInUse
from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def read(path: Path) -> bytes:
    """Return what a file holds."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"no file: {error}") from error


def number(content: bytes) -> int:
    """Make a number of the content."""
    if not content.isdigit():
        raise ConfigurationError(f"{content!r}: expected a number")
    return int(content)


def in_use(path: Path, make: Callable[[bytes], int] = number) -> FilesInUse[bytes, int]:
    """Return a number in a file."""
    path.write_bytes(b"1")
    return FilesInUse(lambda: read(path), make, what="numbers", where=path)


def test_other_content_of_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    """As after `cp -p` or `rsync --times`, and for two writes within one tick of the clock."""
    path = tmp_path / "file"
    files = in_use(path)
    assert files.made == 1
    assert not files.look()
    before = path.stat()
    path.write_bytes(b"2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files.look()
    assert (files.content, files.made) == (b"2", 2)
    assert not files.look()


def test_each_reason_is_logged_once_and_again_after_a_good_look(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The earlier result stays; a file that is not there is a reason as well."""
    path = tmp_path / "file"
    files = in_use(path)
    reported: list[int] = []
    for content in (b"x", b"x", b"1", b"x", None, None, b"x", b"3", b"x"):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        caplog.clear()
        assert files.look() == (content == b"3")
        assert files.made == (3 if content == b"3" or len(reported) == 8 else 1)
        reported.append(sum(each.levelno == logging.WARNING for each in caplog.records))
    assert reported == [1, 0, 0, 1, 1, 0, 1, 0, 1]


def test_files_that_change_while_they_are_used_are_left_to_the_next_look(tmp_path: Path) -> None:
    """The result could be of both contents."""
    path = tmp_path / "file"

    def make(content: bytes) -> int:
        if content == b"2":
            path.write_bytes(b"3")
        return number(content)

    files = in_use(path, make)
    path.write_bytes(b"2")
    assert not files.look()
    assert files.made == 1
    assert files.look()
    assert files.made == 3


def test_the_first_content_must_be_right(tmp_path: Path) -> None:
    """There is nothing that could stay."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with pytest.raises(ConfigurationError, match="expected a number"):
        FilesInUse(lambda: read(path), number, what="numbers", where=path)
