"""The file of an audit log: it continues the chain of its last line, at a bounded rate.

Promises:

* A line is with the operating system when `write` returns, and on disk a second later.
* One process writes a file: another one that opens it is refused.
* Denials of one kind are written some times in a minute, and then counted: a stranger cannot fill
  the disk.
* After a line that could not be written, `require_writable` raises until one was written again.
* A file that is full is renamed, with the time in its name, and the next one continues its chain.
  Nothing is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from dlcore.base.access.audit import AuditLine, Chain, digest_of
from dlcore.base.background import BackgroundTasks
from dlcore.base.clock import steady_s
from dlcore.base.config import MIB
from dlcore.base.errors import ConfigurationError, LogNotReadyError
from dlcore.base.log_lines import Seldom

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger(__name__)

FILE_BYTES_MAX = 64 * MIB
LINE_BYTES_MAX = 64 * 1024
DENIALS_MAX = 20
"""Most written denials of one kind in a minute."""
_SYNC_S = 1.0


class AuditFile:
    """An open audit log.

    Args:
        path: the file; it is made with its folder if it does not exist.
        now: the present time.

    Raises:
        ConfigurationError: it cannot be opened, another process writes it, or its last line is no
            line of an audit log.
    """

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        file_bytes_max: int = FILE_BYTES_MAX,
    ) -> None:
        self._path = path
        self._now = now
        self._file_bytes_max = file_bytes_max
        self._denials = Seldom(DENIALS_MAX)
        self._like: dict[object, AuditLine] = {}
        self._failure: OSError | None = None
        self._is_synced = True
        self._syncing = BackgroundTasks()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
            self._chain = Chain(self._last_digest())
        except OSError as error:
            raise ConfigurationError(
                f"audit_file={str(path)!r}: expected a file that this process alone may write: "
                f"{error}"
            ) from error

    def _open(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise
        return file

    def _last_digest(self) -> str:
        """Return the digest of the last whole line; cut off a line that a crash left unfinished."""
        size = os.fstat(self._file).st_size
        # The last whole line, and a torn one behind it, are no longer than this together.
        start = max(0, size - 2 * LINE_BYTES_MAX)
        data = os.pread(self._file, size - start, start)
        whole, end, torn = data.rpartition(b"\n")
        if torn:
            logger.warning(
                "%s: its last line is unfinished, and is cut off; to do: nothing, the process was "
                "killed while it wrote the line",
                self._path,
            )
            os.ftruncate(self._file, size - len(torn))
        if not end:
            return Chain().digest
        line = whole.rpartition(b"\n")[2]
        try:
            msgspec.json.decode(line, type=AuditLine)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"audit_file={str(self._path)!r}: its last line is no line of an audit log "
                f"({error}): keep that file under another name"
            ) from error
        return digest_of(line)

    @property
    def failure(self) -> str | None:
        """Why the last line could not be written; None if it was."""
        return None if self._failure is None else str(self._failure)

    def require_writable(self) -> None:
        """Raise unless the next line can probably be written.

        Raises: LogNotReadyError.
        """
        if self._failure is not None:
            raise LogNotReadyError(
                f"the audit log cannot be written ({self._failure}), and management is refused "
                "until it can"
            )

    def write(self, line: AuditLine) -> None:
        """Write a line with the present time; `require_writable` raises a failure."""
        self._tell_left_out()
        self._append(self._timed(line))

    def write_denial(self, line: AuditLine) -> None:
        """Write a line, or count it if there were many of its kind in this minute."""
        self._tell_left_out()
        # Only what an anonymous caller does not choose makes a kind, so that the kinds are few.
        kind = (line.principal, line.entrance)
        if self._denials.is_written(kind, now_s=steady_s()):
            self._append(self._timed(line))
        else:
            self._like[kind] = self._timed(line)

    def _timed(self, line: AuditLine) -> AuditLine:
        return msgspec.structs.replace(line, time=self._now().isoformat(timespec="milliseconds"))

    def _tell_left_out(self, *, at_end: bool = False) -> None:
        now_s = float("inf") if at_end else steady_s()
        for kind, count in self._denials.left_out(now_s=now_s).items():
            self._append(msgspec.structs.replace(self._like.pop(kind), count=count))

    def _append(self, line: AuditLine) -> None:
        digest = self._chain.digest
        data = self._chain.next(line)
        try:
            if os.fstat(self._file).st_size + len(data) > self._file_bytes_max:
                self._rotate()
            self._write(data)
        except OSError as error:
            # The lost line is no part of the chain: the next one follows the line before it.
            self._chain.digest = digest
            self._fail(error)
            return
        self._failure = None
        if self._is_synced:
            self._is_synced = False
            self._syncing.start(self._sync(), name="syncing the audit log")

    def _write(self, data: bytes) -> None:
        written = os.write(self._file, data)
        if written < len(data):
            # The next line would continue this part of one, and the chain would be broken.
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(f"{written} of {len(data)} bytes of a line were written")

    def _fail(self, error: OSError) -> None:
        if self._failure is None:
            logger.error(
                "%s: the audit log cannot be written: %s; to do: free space, or repair the disk; "
                "managing calls fail until then",
                self._path,
                error,
            )
        self._failure = error

    def _rotate(self) -> None:
        os.fsync(self._file)
        full = self._path.with_name(f"{self._path.name}.{self._now():%Y%m%dT%H%M%S.%f}")
        with contextlib.suppress(FileNotFoundError):  # renamed by an attempt that opened no other
            self._path.rename(full)
        # Before the old one is closed, so that after an error there is still a file to write.
        file = self._open()
        os.close(self._file)
        self._file = file

    async def _sync(self) -> None:
        await asyncio.sleep(_SYNC_S)
        # Before the call: a line that is written during it needs another one.
        self._is_synced = True
        try:
            await asyncio.to_thread(os.fdatasync, self._file)
        except OSError as error:
            self._fail(error)

    async def aclose(self) -> None:
        """Write what was counted, sync, and close the file."""
        await self._syncing.aclose()
        self._tell_left_out(at_end=True)
        await self._syncing.aclose()
        os.fsync(self._file)
        os.close(self._file)
