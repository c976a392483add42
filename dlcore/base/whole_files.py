"""Files that are whole and on disk under their name, or not there.

A file is written beside its place, synced, and only then given its name, which is synced in turn.
A full disk, a kill or a loss of power therefore leaves no half file that a reader takes for a whole
one.  After an error nothing is left, unless only the sync of the name failed.  After a kill a file
NAME.….partial may be left, which is never read.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, cast

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from _typeshed import ReadableBuffer

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""How file systems without hard links refuse one."""


@contextmanager
def whole_file(path: Path, *, mode: int = 0o644, replaces: bool = False) -> Iterator[BinaryIO]:
    """Yield a file to write, which is at `path` once the block has ended.

    Args:
        path: its place; the folder must be there.
        mode: who may read and write it, less the umask.
        replaces: whether it takes the place of another file; it never does otherwise.

    Raises:
        ConfigurationError: there is a file at `path`, before or after the block.
        OSError: it cannot be made, written or synced; the error names `path`.
    """
    _require_free(path, replaces=replaces)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    with naming(path):
        file = _File(partial, path, mode)
    try:
        with file:
            yield cast("BinaryIO", file)
            with naming(path):
                os.fsync(file.fileno())
        with naming(path):
            _put(partial, path, replaces=replaces)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    with naming(path):
        sync_names(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an `OSError` of the block name the file at `path`; the system names none at a write."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def sync_names(folder: Path) -> None:
    """Make the names in a folder durable.

    Raises: OSError.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_free(path: Path, *, replaces: bool) -> None:
    if not replaces and os.path.lexists(path):
        raise ConfigurationError(f"{path} exists: expected the name of a new file")


def _put(partial: Path, path: Path, *, replaces: bool) -> None:
    if replaces:
        partial.replace(path)
        return
    try:
        path.hardlink_to(partial)  # a rename would replace what came there meanwhile
    except OSError as error:
        if error.errno not in (*_NO_LINKS, errno.EEXIST):
            raise
        _require_free(path, replaces=False)
        partial.rename(path)
    else:
        partial.unlink()


class _File(io.FileIO):
    """A file at `partial` that names `path` in its errors, and takes all bytes of each write."""

    def __init__(self, partial: Path, path: Path, mode: int) -> None:
        self._path = path
        super().__init__(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode))

    def write(self, data: ReadableBuffer) -> int:
        """Write all of `data`.

        Raises: OSError.
        """
        left = memoryview(data).cast("B")
        with naming(self._path):
            while left:
                left = left[super().write(left) :]
        return memoryview(data).nbytes
