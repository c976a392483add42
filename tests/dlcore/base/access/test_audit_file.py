"""The file of an audit log: continued, bounded, rotated, and refused where it cannot be true."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dlcore.base.access import audit_file
from dlcore.base.access.audit import BEGINNING, AuditLine, verify
from dlcore.base.access.audit_file import DENIALS_MAX, AuditFile
from dlcore.base.errors import ConfigurationError, LogNotReadyError
from tests.fixtures.aio import run

if TYPE_CHECKING:
    from pathlib import Path

LINE = AuditLine(
    principal="user:alice",
    address="10.0.0.1",
    entrance="DoAction/delete",
    resource="log 'clicks'",
    result="ok",
)


def lines_of(path: Path) -> list[bytes]:
    """Return the lines of a file."""
    return path.read_bytes().splitlines(keepends=True)


def test_a_log_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Also after a crash in the middle of a line; the folder is made."""
    path = tmp_path / "new" / "audit.jsonl"

    async def scenario(count: int) -> None:
        file = AuditFile(path)
        for _ in range(count):
            file.write(LINE)
        await file.aclose()

    run(scenario(2))
    with path.open("ab") as torn:
        torn.write(b'{"time":"2026')
    run(scenario(3))
    count, digest = verify(lines_of(path))
    assert count == 5
    assert digest != BEGINNING
    assert b'"time":"20' in lines_of(path)[0]
    assert path.stat().st_mode & 0o007 == 0


def test_a_full_file_is_kept_under_another_name(tmp_path: Path) -> None:
    """The chain goes over the files in the order of their names, and the last one is the path."""
    path = tmp_path / "audit.jsonl"

    async def scenario() -> None:
        file = AuditFile(path, file_bytes_max=1000)
        for _ in range(10):
            file.write(LINE)
        with pytest.raises(ConfigurationError, match="this process alone"):
            AuditFile(path)  # the new file is locked as the old one was
        await file.aclose()

    run(scenario())
    *full, last = *sorted(tmp_path.glob("audit.jsonl.*")), path
    assert len(full) == 2
    digest, total = BEGINNING, 0
    for each in (*full, last):
        assert each.stat().st_size <= 1000
        count, digest = verify(lines_of(each), digest=digest)
        total += count
    assert total == 10


def test_a_full_file_is_replaced_later_if_no_other_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full one has its other name by then, and lines follow once there is a new one."""
    path = tmp_path / "audit.jsonl"

    def failing(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    async def scenario() -> None:
        file = AuditFile(path, file_bytes_max=300)
        file.write(LINE)
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", failing)
            file.write(LINE)
        with pytest.raises(LogNotReadyError, match="too many open files"):
            file.require_writable()
        file.write(LINE)
        file.require_writable()
        await file.aclose()

    run(scenario())
    (full,) = tmp_path.glob("audit.jsonl.*")
    count, digest = verify(lines_of(full))
    assert (count, verify(lines_of(path), digest=digest)[0]) == (1, 1)


def test_denials_are_counted_when_they_are_many(tmp_path: Path) -> None:
    """A stranger may ask a thousand times in a second; each principal is counted alone."""
    path = tmp_path / "audit.jsonl"
    other = msgspec.structs.replace(LINE, principal="x")

    async def scenario() -> None:
        file = AuditFile(path)
        for _ in range(1000):
            file.write_denial(LINE)
        file.write_denial(other)
        assert len(lines_of(path)) == DENIALS_MAX + 1
        await file.aclose()

    run(scenario())
    lines = lines_of(path)
    verify(lines)
    assert len(lines) == DENIALS_MAX + 2
    assert f'"count":{1000 - DENIALS_MAX}'.encode() in lines[-1]


@pytest.mark.parametrize("fault", ["no space", "a short write"])
def test_after_a_lost_line_management_is_refused_until_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The chain has no hole: the lost line was never in it."""
    path = tmp_path / "audit.jsonl"
    write = os.write

    def failing(file: int, data: bytes) -> int:
        if fault == "a short write":
            return write(file, data[:10])
        raise OSError(errno.ENOSPC, "no space left on device")

    async def scenario() -> None:
        file = AuditFile(path)
        file.write(LINE)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", failing)
            file.require_writable()
            file.write(LINE)
        with pytest.raises(LogNotReadyError, match="management is refused"):
            file.require_writable()
        file.write(LINE)
        file.require_writable()
        await file.aclose()

    run(scenario())
    assert verify(lines_of(path))[0] == 2


def test_a_line_is_synced_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of the disk is reported like a failed write."""
    monkeypatch.setattr(audit_file, "_SYNC_S", 0.01)
    synced = asyncio.Event()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        def failing(_: int) -> None:
            loop.call_soon_threadsafe(synced.set)
            raise OSError(errno.EIO, "input/output error")

        monkeypatch.setattr(os, "fdatasync", failing)
        file = AuditFile(tmp_path / "audit.jsonl")
        file.write(LINE)
        await synced.wait()
        await file._syncing.finish()
        with pytest.raises(LogNotReadyError, match="input/output"):
            file.require_writable()
        await file.aclose()

    run(scenario())


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda path: path.write_bytes(b"hello\n"), "last line is no line of an audit log"),
        (lambda path: path.mkdir(), "this process alone"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, prepare: Any, reason: str) -> None:
    """It is not overwritten, and not continued."""
    path = tmp_path / "audit.jsonl"
    prepare(path)
    with pytest.raises(ConfigurationError, match=reason):
        run(_open(path))


async def _open(path: Path) -> AuditFile:
    return AuditFile(path)
