"""Goal: what is durable, or has space, is so also where calls of Linux are missing."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
from typing import TYPE_CHECKING

import pytest

from bookie.disks import folder_calls, real_file
from bookie.disks.real import RealDisk
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from pathlib import Path

FULL_SYNC = 51


def use_disk(directory: Path) -> None:
    """Sync in each way: names, contents, appends, bytes written over, ends that were cut."""

    async def main() -> None:
        disk = RealDisk(directory)
        file = await disk.create("log", [b"head"])
        await file.append([b" and tail"])
        await file.rewrite(0, b"HEAD")
        await file.truncate(8)
        await disk.write_file("note", b"note")
        await disk.delete(["note"])
        assert bytes(await file.read(0, 8)) == b"HEAD and"
        await disk.aclose()

    asyncio.run(main())


def test_each_sync_is_a_full_one_on_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain one leaves the bytes in the cache of the device there."""
    synced: list[int] = []

    def command(descriptor: int, number: int) -> int:
        assert number == FULL_SYNC
        synced.append(descriptor)
        return 0

    def plain(descriptor: int) -> None:
        raise AssertionError(f"a plain sync of {descriptor}")

    monkeypatch.setattr(real_file, "_FULL_SYNC", FULL_SYNC)
    monkeypatch.setattr(folder_calls, "capabilities", lambda _: (False, False))
    monkeypatch.setattr("bookie.disks.real.capabilities", lambda _: (False, False))
    monkeypatch.setattr(fcntl, "fcntl", command)
    monkeypatch.setattr(os, "fsync", plain)
    monkeypatch.setattr(os, "fdatasync", plain, raising=False)
    use_disk(tmp_path)
    # The folder's own name; two for each file that is made (bytes and name), one for each other
    # change.
    assert len(synced) == 1 + 2 + 3 + 2 + 1


def test_a_file_system_without_full_syncs_gets_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one over a network; an error of the device is none of these."""
    synced: list[int] = []
    refusals = [errno.ENOTSUP, errno.EINVAL, errno.ENOTTY, errno.EIO]

    def command(_: int, __: int) -> int:
        number = refusals.pop(0)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(real_file, "_FULL_SYNC", FULL_SYNC)
    monkeypatch.setattr(fcntl, "fcntl", command)
    monkeypatch.setattr(os, "fsync", synced.append)
    path = tmp_path / "file"
    with path.open("wb") as file:
        for _ in range(3):
            real_file.sync_data(path, file.fileno())
        assert synced == [file.fileno()] * 3
        reason = f"cannot sync {re.escape(str(path))}: Input/output error"
        with pytest.raises(BookieStorageError, match=reason):
            real_file.sync_file(path, file.fileno())
    assert len(synced) == 3


def test_where_fdatasync_is_missing_fsync_does_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And POSIX has it."""
    synced: list[int] = []
    monkeypatch.setattr(real_file, "_FULL_SYNC", None)
    monkeypatch.delattr(os, "fdatasync", raising=False)
    monkeypatch.setattr(os, "fsync", synced.append)
    path = tmp_path / "file"
    with path.open("wb") as file:
        real_file.sync_data(path, file.fileno())
        assert synced == [file.fileno()]


def test_space_is_held_back_by_zeros_where_it_cannot_be_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves what was held before."""
    path, size = tmp_path / "reserve", 3 * 1024 * 1024 + 5
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert folder_calls.hold(path, 1000) == 1000
    assert folder_calls.hold(path, size) == size
    assert path.read_bytes() == bytes(size)
    assert folder_calls.allocated_bytes(path) == size

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "pwritev", full, raising=False)
    with pytest.raises(OSError, match="no space left"):
        folder_calls.hold(path, 2 * size)
    assert path.stat().st_size == size
    assert folder_calls.hold(path, 10) == 10
    assert path.stat().st_size == 10


def test_a_c_library_without_fallocate_allocates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found out at the start, like what a file system cannot do."""
    monkeypatch.setattr(folder_calls, "_LIBC", object())
    assert folder_calls.capabilities(tmp_path) == (False, False)
    use_disk(tmp_path)
