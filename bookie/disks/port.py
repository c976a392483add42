"""The port to one directory of files: what the entry log needs of a disk.

A file that is appended to may be longer on the device than its `size`: space is allocated ahead,
blocks are written whole, and a created file may be made of a recycled one.  Whoever opens it next
finds the longer one, and behind the bytes that were written zeros or bytes of an earlier life.

An operation that promises durability has it when it returns.  Every failure of the device is a
`BookieStorageError`; after a failed write or sync the state of the file is unknown, and the caller
must not use the file for writing again.  The one exception is `DiskFullError`: nothing was written,
and the same may be tried again.

Some space may be held back for the directory's owner (`hold`), so that nobody else on the same file
system can take it; when a write finds no room, `release` gives some of it to that write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dlcore.wire.digest import BytesLike

P = ParamSpec("P")
T = TypeVar("T")

_SLACK_BYTES = 16 * 1024
"""What a file system may take for a write beside its bytes: whole blocks, and its own records."""


class DiskFullError(BookieStorageError):
    """The file system has no room: nothing was written, and the file is as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """Bytes of the file system that holds the directory."""

    free_bytes: int
    """What this directory's owner may still write, with what is held back for it."""
    total_bytes: int


class DiskFile(Protocol):
    """One open file; appended to by one task at a time, read by any number."""

    @property
    def name(self) -> str:
        """The file's name in its directory."""
        ...

    @property
    def size(self) -> int:
        """Bytes in the file as it was created, appended to and cut; else all that there are."""
        ...

    async def append(self, buffers: Sequence[BytesLike]) -> None:
        """Write `buffers` at the end and make them durable; one file at a time is appended to.

        Raises:
            DiskFullError: no room for all of them, and none was written.
        """
        ...

    def append_now(self, buffers: Sequence[BytesLike]) -> bool:
        """Append like `append`, while the caller waits, if the device is quick and this is small.

        Returns: False if it is not, and nothing was done.
        """
        ...

    async def rewrite(self, offset: int, data: BytesLike) -> None:
        """Write `data` over existing bytes, or at the end, and make it durable."""
        ...

    async def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes, durably, with all that is behind them."""
        ...

    async def read(self, offset: int, size: int) -> memoryview:
        """Return exactly `size` bytes; fewer in the file is a `BookieStorageError`."""
        ...

    async def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill at most 1,024 buffers, one after the other; a shorter file is an error as above."""
        ...

    def read_recent(self, offset: int, size: int) -> memoryview | None:
        """Return exactly `size` bytes if they are in memory; None: `read` them."""
        ...

    def read_now(self, offset: int, size: int) -> memoryview:
        """Return exactly `size` bytes, waiting for the device: for what is small and mostly cached.

        Raises:
            BookieStorageError: they cannot be read, or the file is shorter.
        """
        ...

    def close(self) -> None:
        """Close the file; reads under way are completed first.

        What is behind the end of a file that was appended to is cut, not durably.
        """
        ...


class Disk(Protocol):
    """One directory, owned by one process."""

    def space(self) -> DiskSpace:
        """Return free and total space; what is allocated ahead or kept for recycling is free."""
        ...

    @property
    def held_bytes(self) -> int:
        """Space held back now."""
        ...

    async def hold(self, size_bytes: int) -> None:
        """Hold back `size_bytes` in all, from now on and over restarts.

        Raises:
            DiskFullError: there is no room for that; as much as before is held back.
        """
        ...

    async def release(self, size_bytes: int) -> bool:
        """Give up to `size_bytes` of what is held back to writes; False if nothing is."""
        ...

    def names(self) -> list[str]:
        """Return the names of all files, sorted; folders are left out."""
        ...

    async def create(self, name: str, content: Sequence[BytesLike]) -> DiskFile:
        """Create a file that begins with `content`; under its name it exists with it or not at all.

        It may be made of a recycled file that nobody has open.
        """
        ...

    def open(self, name: str) -> DiskFile:
        """Open an existing file for reading and appending."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Delete files durably; one that does not exist is no error."""
        ...

    async def recycle(self, names: Sequence[str]) -> None:
        """Delete files durably; their space may be kept for files that are created later."""
        ...

    async def read_file(self, name: str) -> bytes | None:
        """Return a small file's content; None if it does not exist."""
        ...

    async def write_file(self, name: str, data: bytes) -> None:
        """Set a small file's content atomically and durably."""
        ...

    async def compute(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run long work that reads files or computes, without holding up the event loop."""
        ...

    async def aclose(self) -> None:
        """Give the directory up; files still open are closed."""
        ...


async def write_with_room(disk: Disk, size_bytes: int, write: Callable[[], Awaitable[T]]) -> T:
    """Do a write of `size_bytes`; if the disk is full, with space that was held back for it.

    Raises:
        DiskFullError: the disk is full, and nothing is held back any more.
    """
    while True:
        try:
            return await write()
        except DiskFullError:
            if not await disk.release(size_bytes + _SLACK_BYTES):
                raise
