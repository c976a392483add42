"""Disks to fill and to break: small tmpfs mounts, and syncs that fail or take long.

The process lives in a mount namespace of its own (see `enter_mount_namespace`), so no mount
outlives it.  Syncs are broken by strace, which makes the kernel answer with an error, where that
works; else by the launcher `tests.chaos.bookie`, which all bookies are started by.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from dlcore.ops.sandbox.process import ChildProcess, Warden
from tests.chaos.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_NAMESPACE_MARK = "DLOG_CHAOS_MOUNTS"
_UNSHARE = (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount"))
_FILLER = "filler"
_CHUNK_BYTES = 1024 * 1024
_HELD_S = 5.0
_PROBE = "import os; os.fdatasync(os.open('probe', os.O_CREAT | os.O_WRONLY))"


def enter_mount_namespace(arguments: Sequence[str]) -> None:
    """Start this program again in a mount namespace of its own, if the user may have one."""
    if _NAMESPACE_MARK in os.environ:
        return
    os.environ[_NAMESPACE_MARK] = "no"
    for unshare in _UNSHARE:
        if shutil.which(unshare[0]) and _succeeds([*unshare, "mount", "-t", "tmpfs", "x", "/mnt"]):
            os.environ[_NAMESPACE_MARK] = "yes"
            os.execvp(unshare[0], [*unshare, sys.executable, *arguments])


def can_mount() -> bool:
    """Whether small disks can be had: the program runs in its own mount namespace."""
    return os.environ.get(_NAMESPACE_MARK) == "yes"


def mount_small_disk(folder: Path, *, size_bytes: int) -> None:
    """Mount a file system of `size_bytes` at `folder`; it goes with the mount namespace."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size_bytes},mode=755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def unmount(folder: Path) -> None:
    """Take a small disk away; what it held is gone."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(folder: Path, *, leave_bytes: int) -> Path:
    """Fill the disk at `folder` up to `leave_bytes`; return the file that takes the space."""
    # Bookies do not look into folders.
    filler = folder / _FILLER / _FILLER
    filler.parent.mkdir(exist_ok=True)
    with filler.open("wb") as file:
        while (excess := _free_bytes(folder) - leave_bytes) > 0:
            try:
                file.write(bytes(min(excess, _CHUNK_BYTES)))
                file.flush()
            except OSError:
                break  # the bookie took the rest
    return filler


def free_disk(folder: Path) -> None:
    """Give back what `fill_disk` took."""
    shutil.rmtree(folder / _FILLER, ignore_errors=True)


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _succeeds(command: Sequence[str], *, folder: str | None = None) -> bool:
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0


class SyncFaults:
    """Makes a bookie's syncs fail or wait."""

    def __init__(self, folder: Path, warden: Warden) -> None:
        self._folder = folder
        self._warden = warden
        with tempfile.TemporaryDirectory() as probe:
            trial = [*_strace("delay_enter=1"), sys.executable, "-c", _PROBE]
            self.has_strace = shutil.which("strace") is not None and _succeeds(trial, folder=probe)
        self._tracers: dict[str, ChildProcess] = {}

    @property
    def method(self) -> str:
        """How it is done here."""
        return "strace" if self.has_strace else "a launcher that wraps the calls"

    def program(self, bookie: str) -> list[str]:
        """Return the module to run as a bookie, and its first arguments."""
        return ["tests.chaos.bookie", str(self._control(bookie)), str(self.journal(bookie))]

    def journal(self, bookie: str) -> Path:
        """Return the file of what a loss of power may take back."""
        return self._folder / f"{bookie}.unsynced"

    def fail(self, bookie: str, pid: int) -> None:
        """Let every sync of the process fail with EIO from now on."""
        self._begin(bookie, pid, injection="error=EIO", command="error")

    def slow_down(self, bookie: str, pid: int, *, delay_s: float) -> None:
        """Let every sync of the process take `delay_s` longer from now on."""
        injection = f"delay_enter={int(delay_s * 1e6)}"
        self._begin(bookie, pid, injection=injection, command=f"delay {delay_s}")

    def hold(self, bookie: str, pid: int) -> None:
        """Let what the process syncs from now on be done, and not return for a while."""
        injection = f"delay_exit={int(_HELD_S * 1e6)}"
        self._begin(bookie, pid, injection=injection, command=f"delay {_HELD_S}")

    async def end(self, bookie: str) -> None:
        """Let the syncs be as they are."""
        self._control(bookie).unlink(missing_ok=True)
        tracer = self._tracers.pop(bookie, None)
        if tracer is not None:
            await in_thread(tracer.terminate)

    def _begin(self, bookie: str, pid: int, *, injection: str, command: str) -> None:
        if self.has_strace:
            self._tracers[bookie] = ChildProcess(
                [*_strace(injection), "-p", str(pid)],
                log_path=self._folder / f"{bookie}.strace.log",
                warden=self._warden,
            )
            return
        control = self._control(bookie)
        fresh = control.with_suffix(".fresh")
        fresh.write_text(command)
        fresh.rename(control)

    def _control(self, bookie: str) -> Path:
        return self._folder / f"{bookie}.syncs"


def _strace(injection: str) -> list[str]:
    calls = "fsync,fdatasync,pwritev2"  # the last one writes and syncs
    return [
        *("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}"),
        *("-e", f"inject={calls}:{injection}"),
    ]
