"""The port to one directory of files: the disk as the entry log needs it.

A file with appends may be longer on the device than its `size`: space is preallocated, the last
block is written whole, and a new file may reuse the blocks of a recycled one.  The next `open`
finds this longer file.  Behind the appended bytes it holds zeros, or bytes of the recycled file.

When an operation that promises durability returns, its bytes are durable.  Every failure of the
device is a `BookieStorageError`.  After a failed write or sync the state of the file is unknown,
and the caller must not write to the file again.  The one exception is `DiskFullError`: nothing was
written, and the caller may try the same write again.

The directory's owner can reserve space with `hold`, so that no other user of the file system takes
it.  If the disk is full, `release` gives some of the reserve to a write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dlcore.wire.frames import BytesLike

P = ParamSpec("P")
T = TypeVar("T")

_SLACK_BYTES = 16 * 1024
"""Space that a write may take beside its bytes: the rest of a block, and the file system's own
metadata."""


class DiskFullError(BookieStorageError):
    """The file system is full: nothing was written, and the file is as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """Bytes of the file system that holds the directory."""

    free_bytes: int
    """Bytes that this directory's owner may still write, with the reserve of `hold`."""
    total_bytes: int


class DiskFile(Protocol):
    """One open file: one task at a time appends, any number of tasks read."""

    @property
    def name(self) -> str:
        """The file's name in its directory."""
        ...

    @property
    def size(self) -> int:
        """Bytes in the file.

        A file from `create` has its content and its appends.  In a file from `open`, preallocated
        bytes count as well, because the port cannot distinguish them.
        """
        ...

    async def append(self, buffers: Sequence[BytesLike]) -> None:
        """Write `buffers` at the end and make them durable; append to one file at a time.

        Raises:
            DiskFullError: the disk is full, and nothing was written.
        """
        ...

    def append_now(self, buffers: Sequence[BytesLike]) -> bool:
        """Append like `append`, but blocking, if the device is quick and the append is small.

        Returns: False if the caller must use `append`; nothing was done.
        """
        ...

    async def rewrite(self, offset: int, data: BytesLike) -> None:
        """Write `data` over existing bytes, or at the end, and make it durable."""
        ...

    async def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes, durably, with the space preallocated behind them."""
        ...

    async def read(self, offset: int, size: int) -> memoryview:
        """Return exactly `size` bytes.

        Raises:
            BookieStorageError: they cannot be read, or the file is shorter.
        """
        ...

    async def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill at most 1,024 buffers (the limit of `preadv`), one after the other.

        Raises:
            BookieStorageError: they cannot be read, or the file is shorter.
        """
        ...

    def read_recent(self, offset: int, size: int) -> memoryview | None:
        """Return exactly `size` bytes if they are in memory; None: use `read`."""
        ...

    def read_now(self, offset: int, size: int) -> memoryview:
        """Return exactly `size` bytes, blocking: for reads that are small and mostly cached.

        Raises:
            BookieStorageError: they cannot be read, or the file is shorter.
        """
        ...

    def close(self) -> None:
        """Close the file; reads in progress complete first.

        Space preallocated behind the end is cut off, but not durably.
        """
        ...


class Disk(Protocol):
    """One directory, owned by one process."""

    @property
    def place(self) -> str:
        """The directory, for messages."""
        ...

    def space(self) -> DiskSpace:
        """Return free and total space; preallocated and recycled space counts as free."""
        ...

    @property
    def held_bytes(self) -> int:
        """Space that is reserved now."""
        ...

    async def hold(self, size_bytes: int) -> None:
        """Reserve `size_bytes` in all, from now on and across restarts.

        Raises:
            DiskFullError: the disk is full; the reserve is as large as before.
        """
        ...

    async def release(self, size_bytes: int) -> bool:
        """Release up to `size_bytes` of the reserve for writes; False if the reserve is empty."""
        ...

    def names(self) -> list[str]:
        """Return the names of all files, sorted; folders are not listed."""
        ...

    async def create(self, name: str, content: Sequence[BytesLike]) -> DiskFile:
        """Create a file that begins with `content`.

        After a crash the file either exists with all its content, or does not exist.  It may reuse
        a recycled file that no reader has open.
        """
        ...

    def open(self, name: str) -> DiskFile:
        """Open an existing file for reading and appending."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Delete files durably; a missing file is no error."""
        ...

    async def recycle(self, names: Sequence[str]) -> None:
        """Delete files durably; their space may be kept for files that are created later."""
        ...

    async def use_spares(self, *, allowed: bool) -> None:
        """Let `recycle` keep space from now on, or not, and then delete durably what it kept.

        That includes what a `recycle` would keep that is under way.
        """
        ...

    async def read_file(self, name: str) -> bytes | None:
        """Return a small file's content; None if it does not exist."""
        ...

    async def write_file(self, name: str, data: bytes) -> None:
        """Set a small file's content atomically and durably."""
        ...

    async def compute(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a long function that reads files or computes, without blocking the event loop."""
        ...

    async def aclose(self) -> None:
        """Close all open files, and give up the directory."""
        ...


async def write_with_room(disk: Disk, size_bytes: int, write: Callable[[], Awaitable[T]]) -> T:
    """Call `write`, which writes `size_bytes`; if the disk is full, use the reserve.

    Raises:
        DiskFullError: the disk is full, and the reserve is empty.
    """
    while True:
        try:
            return await write()
        except DiskFullError:
            if not await disk.release(size_bytes + _SLACK_BYTES):
                raise


async def try_disk(disk: Disk, name: str, new_token: Callable[[], str]) -> None:
    """Write a small file durably, and read it; two trials at once need two names.

    Raises:
        BookieStorageError: the disk is full, or does not give back what was written.
    """
    written = new_token().encode()
    await disk.write_file(name, written)
    found = await disk.read_file(name)
    # A device may report success and lose the bytes.
    if found != written:
        raise BookieStorageError(f"{name}: read {found!r}, expected {written!r}")
