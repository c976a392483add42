"""The servers of this machine, by the files in which they report themselves, and /proc of each.

Only those are found that the caller may look at: the servers of the same user, or all for root.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlcore.base.server_process import NAME_PREFIX, STACKS_SIGNAL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.base.access.tls import TlsFiles

_PROC = Path("/proc")
_NAME = re.compile(rf"/memfd:{NAME_PREFIX}\S+ .* \(deleted\)")
_STATUS_KEYS = ("State", "Threads", "VmRSS", "VmHWM", "VmSwap", "FDSize")
_LOG_BYTES_MAX = 256 * 1024
_STACKS_WAIT_S = 3.0
_POLL_S = 0.05
_FILES_MAX = 2000
_TIMEOUT_S = 5.0
_METRICS_BYTES_MAX = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Server:
    """A server process."""

    pid: int
    report: Path
    """The file in which it reports itself."""
    facts: dict[str, Any]
    """Its role, name and settings."""

    @property
    def label(self) -> str:
        """A name for files."""
        return f"{self.facts['role']}-{self.pid}"

    @property
    def folder(self) -> str:
        """The folder with its data; empty: it has none."""
        return str(self.facts["settings"].get("data_dir", ""))

    def describe(self) -> dict[str, object]:
        """Return what it reports, and what the kernel knows of it."""
        process = _PROC / str(self.pid)
        lines = (line.partition(":") for line in _text(process / "status").splitlines())
        return self.facts | {
            "pid": self.pid,
            "status": {key: value.strip() for key, _, value in lines if key in _STATUS_KEYS},
            "limits": _text(process / "limits").splitlines(),
            "open_files": len(list((process / "fd").iterdir())),
            "open_files_max": _open_files_max(_text(process / "limits")),
            "log": _target(process / "fd" / "2"),
        }

    def log_tail(self) -> str:
        """Return the end of its log, if that is in a file."""
        log = _PROC / str(self.pid) / "fd" / "2"
        if not log.is_file():
            return f"its log goes to {_target(log)}, which cannot be read from here\n"
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES_MAX))
            return file.read(_LOG_BYTES_MAX).decode(errors="replace")

    def stacks(self) -> str:
        """Return the stacks of its threads.  A process that is stopped writes none."""
        status = _text(_PROC / str(self.pid) / "status")
        caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
        if caught is None or not int(caught[1], 16) >> (STACKS_SIGNAL - 1) & 1:
            return "it does not take the signal for stacks\n"  # which would end it
        start = known = self.report.stat().st_size
        os.kill(self.pid, STACKS_SIGNAL)
        for _ in range(int(_STACKS_WAIT_S / _POLL_S)):
            time.sleep(_POLL_S)
            size = self.report.stat().st_size
            if size == known > start:
                break
            known = size
        else:
            return f"it wrote no stacks within {_STACKS_WAIT_S:g} s: is it stopped?\n"
        with self.report.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def metrics(self, tls: TlsFiles | None) -> str:
        """Return its metrics, from the HTTP port that its settings name."""
        settings = self.facts["settings"]
        address, has_tls = settings["http_address"], settings.get("http_tls", "none") != "none"
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        if has_tls and tls is not None:
            context = tls.client_context()
            connection = http.client.HTTPSConnection(address, timeout=_TIMEOUT_S, context=context)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read(_METRICS_BYTES_MAX).decode(errors="replace")
        finally:
            connection.close()

    def list_folder(self) -> dict[str, object]:
        """Return the files below its folder with their sizes, and the room of the file system."""
        files = {}
        for path in islice(paths_below(self.folder), _FILES_MAX):
            with suppress(OSError):  # it was removed meanwhile
                if path.is_file():
                    files[str(path.relative_to(self.folder))] = path.stat().st_size
        return {"folder": self.folder, "files": files} | room_of(self.folder)


def paths_below(folder: str) -> Iterator[Path]:
    """Yield what is below a folder, in order.  A folder that is removed meanwhile is left out.

    ``os.walk`` promises that; ``Path.rglob`` of Python 3.11 may fail for such a folder.
    """
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            yield Path(parent, name)


def find_servers() -> list[Server]:
    """Return the servers of this machine, without this process."""
    found = []
    for process in sorted(_PROC.glob("[0-9]*")):
        pid = int(process.name)
        with suppress(OSError, ValueError, KeyError):  # it is another user's, or has ended
            for file in (process / "fd").iterdir() if pid != os.getpid() else ():
                if _is_report(file):
                    with file.open("rb") as report:
                        facts = json.loads(report.readline())
                    known = {key: facts[key] for key in ("role", "name", "settings")}
                    found.append(Server(pid, file, known))
                    break
    return found


def _is_report(file: Path) -> bool:
    try:
        return _NAME.fullmatch(_target(file)) is not None
    except FileNotFoundError:
        return False  # a server at work opens and closes files while they are listed


def describe_machine() -> dict[str, object]:
    """Return memory, load and mounts of this machine."""
    memory = dict(line.split(":", 1) for line in _text(_PROC / "meminfo").splitlines())
    return {
        "name": os.uname().nodename,
        "kernel": " ".join(os.uname()[::2]),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "memory": {key: value.strip() for key, value in memory.items()},
        "mounts": _text(_PROC / "self" / "mounts").splitlines(),
        "pressure": {
            each: _text(_PROC / "pressure" / each).splitlines() for each in ("cpu", "io", "memory")
        },
    }


def room_of(folder: str) -> dict[str, object]:
    """Return the room of the file system that holds a folder."""
    room = os.statvfs(folder)
    return {
        "free_bytes": room.f_bavail * room.f_frsize,
        "total_bytes": room.f_blocks * room.f_frsize,
        "free_inodes": room.f_favail,
    }


def _open_files_max(limits: str) -> int | None:
    found = re.search(r"^Max open files\s+(\d+)", limits, re.MULTILINE)
    return int(found[1]) if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # this kernel has none


def _target(link: Path) -> str:
    return str(link.readlink())
