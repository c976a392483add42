"""A disk in memory that loses bytes without a sync: for tests and the simulator."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from bookie.disks.memory_device import DEFAULT_TOTAL_BYTES, MemoryDevice, MemoryRoom
from bookie.disks.memory_folder import SECTOR_BYTES, Inode, MemoryFolder
from bookie.disks.port import DiskFullError, DiskSpace
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.wire.digest import BytesLike

P = ParamSpec("P")
T = TypeVar("T")


class DiskOwner:
    """The process that has the disk open: its handles work until it crashes or closes the disk."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self.is_alive = True

    def check_alive(self) -> None:
        """Raise `BookieStorageError` if it is dead."""
        if not self.is_alive:
            raise BookieStorageError("the disk's owner crashed or closed it")

    async def step(self) -> None:
        """Pass one point at which the machine can crash, and wait for the device's latency."""
        self.check_alive()
        device = self._disk.device
        if device.loses_power():
            self._disk.crash()
            device.on_crash()
        self.check_alive()
        if device.latency_s is not None:
            await asyncio.sleep(device.latency_s())
            self.check_alive()


class MemoryDisk:
    """One directory in memory, deterministic on any event loop; no threads.

    `crash` ends the running owner: its handles fail from then on, unsynced bytes are lost or torn
    by sector, and name changes that were not yet durable may vanish.  The next owner opens the same
    object.

    Its parts are what a test may change: `device` has speed, power and faults, `room` the space,
    and `folder` the bytes, which it can damage.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        *,
        total_bytes: int = DEFAULT_TOTAL_BYTES,
        latency_s: Callable[[], float] | None = None,
    ) -> None:
        self.folder = MemoryFolder()
        self.room = MemoryRoom(self.folder, total_bytes)
        self.device = MemoryDevice(latency_s)
        self._rng = rng if rng is not None else random.Random(0)
        self._open: set[MemoryFile] = set()
        self.owner = DiskOwner(self)
        """The running one; the next one follows it."""

    def crash(self, *, keep_cache: bool = False) -> None:
        """End the running owner: its handles fail from now on.

        Args:
            keep_cache: only the process dies (SIGKILL); otherwise the machine loses power.
        """
        self._end_owner()
        self.device.crash_at_step = None
        if not keep_cache:
            self.folder.lose_power(self._rng)

    @property
    def open_files(self) -> int:
        """Number of handles that the running owner has opened and not closed."""
        return len(self._open)

    # The port

    @property
    def place(self) -> str:
        """The directory, for messages."""
        return "memory"

    def space(self) -> DiskSpace:
        """Return free and total space; preallocated and recycled space counts as free."""
        room = self.room
        ahead_bytes = sum(file.ahead_bytes for file in self._open)
        again_bytes = room.held_bytes + self.folder.spare_bytes() + ahead_bytes
        return DiskSpace(free_bytes=room.free_bytes() + again_bytes, total_bytes=room.total_bytes)

    @property
    def held_bytes(self) -> int:
        """Space that is reserved now."""
        return self.room.held_bytes

    async def hold(self, size_bytes: int) -> None:
        """Reserve `size_bytes` in all; the reserve survives crashes."""
        self.room.hold(size_bytes)

    async def release(self, size_bytes: int) -> bool:
        """Release up to `size_bytes` of the reserve for writes; False if the reserve is empty."""
        return self.room.release(size_bytes)

    def names(self) -> list[str]:
        """Return the names of all files, sorted, without spares."""
        return self.folder.names()

    async def create(self, name: str, content: Sequence[BytesLike]) -> MemoryFile:
        """Create a file that begins with `content`; it reuses a spare if there is one."""
        if name in self.folder.files:
            raise BookieStorageError(f"cannot create {name}: it exists")
        data = b"".join(content)
        await self._place(name, data, self._unused_spare())
        inode = self.folder.files[name]
        return self._opened(MemoryFile(self, name, inode, len(data)))

    def open(self, name: str) -> MemoryFile:
        """Open an existing file for reading and appending."""
        inode = self.folder.files.get(name)
        if inode is None:
            raise BookieStorageError(f"cannot open {name}: no such file")
        size = len(inode.cache)
        return self._opened(MemoryFile(self, name, inode, size))

    async def delete(self, names: Sequence[str]) -> None:
        """Delete files durably; a missing file is no error."""
        owner = self.owner
        await owner.step()
        self.folder.remove(names)
        await owner.step()
        self.folder.sync()

    async def recycle(self, names: Sequence[str]) -> None:
        """Delete files durably, and keep some for files that are created later."""
        owner = self.owner
        await owner.step()
        kept = self.folder.retire(names)
        await owner.step()
        # Only now may a file reuse them: before the second step a crash can restore the old name.
        self.folder.keep(kept)
        self.folder.sync()

    async def use_spares(self, *, allowed: bool) -> None:
        """Keep space of recycled files, or delete what is kept."""
        self.folder.keeps_spares = allowed
        if not allowed and self.folder.spares():
            await self.delete(self.folder.spares())

    async def read_file(self, name: str) -> bytes | None:
        """Return a small file's content; None if it does not exist."""
        inode = self.folder.files.get(name)
        if inode is None:
            return None
        inode.check_readable(0, len(inode.cache))
        return bytes(inode.cache)

    async def write_file(self, name: str, data: bytes) -> None:
        """Set a small file's content atomically and durably."""
        await self._place(name, data)

    async def compute(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function at once; this disk has no threads."""
        return function(*args, **kwargs)

    async def aclose(self) -> None:
        """Close all open files, and give up the directory; its content stays for the next owner."""
        for file in list(self._open):
            file.close()
        self._end_owner()

    async def write(self, inode: Inode, offset: int, data: bytes, owner: DiskOwner) -> None:
        """Write into the cache and sync, one step each; fail if an error is set."""
        await owner.step()
        grown_from = len(inode.cache)
        if not self.room.fits(offset + len(data) - grown_from):
            inode.write(offset, data[: self._rng.randrange(len(data) + 1)])
            await owner.step()  # power can be lost before the part is cut off again
            inode.truncate(grown_from)
            raise DiskFullError("cannot write: no space left on device")
        error = self.device.take_write_error()
        if error is not None:
            inode.write(offset, data[: self._rng.randrange(len(data) + 1)])
            raise error
        inode.write(offset, data)
        await self.sync(inode, owner)

    async def sync(self, inode: Inode, owner: DiskOwner) -> None:
        """Make a file durable; a failed sync loses bytes and marks all pages clean, as on Linux."""
        await owner.step()
        error = self.device.take_sync_error()
        if error is not None:
            # Readers still see the written bytes: only the device has lost some of them.
            cached = bytes(inode.cache)
            inode.lose(self._rng)
            inode.cache[:] = cached
            raise error
        inode.sync()

    def note_closed(self, file: MemoryFile) -> None:
        """Count a handle as closed; a handle of an earlier owner is not counted any more."""
        self._open.discard(file)

    def _end_owner(self) -> None:
        self.owner.is_alive = False
        self.owner = DiskOwner(self)
        self._open.clear()

    def _opened(self, file: MemoryFile) -> MemoryFile:
        self._open.add(file)
        return file

    def _unused_spare(self) -> str | None:
        """Return a spare that no open handle reads."""
        spares = self.folder.spares()
        return next((name for name in spares if not self._is_open(self.folder.files[name])), None)

    def _is_open(self, inode: Inode) -> bool:
        return any(file.inode is inode for file in self._open)

    async def _place(self, name: str, data: bytes, spare: str | None = None) -> None:
        owner = self.owner
        inode = Inode() if spare is None else self.folder.files[spare]
        await self.write(inode, 0, data, owner)
        self.folder.put(name, inode, spare)
        await owner.step()
        self.folder.sync()


class MemoryFile:
    """An open file of a `MemoryDisk`."""

    def __init__(self, disk: MemoryDisk, name: str, inode: Inode, size: int) -> None:
        self._disk = disk
        self._owner = disk.owner
        self._name = name
        self.inode = inode
        self._size = size
        self._is_closed = False
        self._has_appended = False

    @property
    def name(self) -> str:
        """The file's name in its directory."""
        return self._name

    @property
    def size(self) -> int:
        """Bytes in the file, with unsynced ones."""
        return self._size

    @property
    def ahead_bytes(self) -> int:
        """Bytes preallocated behind the end of a file with appends."""
        return max(0, len(self.inode.cache) - self._size) if self._has_appended else 0

    async def append(self, buffers: Sequence[BytesLike]) -> None:
        """Write `buffers` at the end, then zeros up to the end of the sector; make them durable."""
        self._check_open()
        self._has_appended = True
        data = b"".join(buffers)
        size = self._size + len(data)
        end = -(-size // SECTOR_BYTES) * SECTOR_BYTES
        ahead_bytes = self._disk.room.ahead_bytes()
        if size > len(self.inode.cache) and ahead_bytes:
            self.inode.allocate(end + ahead_bytes)
        padding = bytes(max(0, min(end, len(self.inode.cache)) - size))
        # Before the write: bytes of the append do not count as preallocated while it is unsynced.
        offset, self._size = self._size, size
        try:
            await self._disk.write(self.inode, offset, data + padding, self._owner)
        except DiskFullError:
            self._size = offset
            raise

    def append_now(self, buffers: Sequence[BytesLike]) -> bool:
        """Append without latency if the disk is quick now; the faults are those of `append`."""
        device = self._disk.device
        if not device.is_quick():
            return False
        # Without latency `append` never waits, so one `send` runs the coroutine to its end.
        latency_s, device.latency_s = device.latency_s, None
        try:
            self.append(buffers).send(None)
        except StopIteration:
            return True
        finally:
            device.latency_s = latency_s
        raise AssertionError("an append without latency waited")

    async def rewrite(self, offset: int, data: BytesLike) -> None:
        """Write `data` over existing bytes, or at the end, and make it durable."""
        self._check_open()
        await self._disk.write(self.inode, offset, bytes(data), self._owner)
        self._size = max(self._size, offset + len(data))

    async def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes, durably, with the space preallocated behind them."""
        self._check_open()
        await self._owner.step()
        self.inode.truncate(size)
        if self._disk.room.is_crowded:
            self._disk.room.fill()
        await self._disk.sync(self.inode, self._owner)
        self._size = size

    async def read(self, offset: int, size: int) -> memoryview:
        """Return exactly `size` bytes."""
        return self.read_now(offset, size)

    async def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers, one after the other."""
        data = self.read_now(offset, sum(map(len, buffers)))
        for buffer in buffers:
            buffer[:] = data[: len(buffer)]
            data = data[len(buffer) :]

    def read_recent(self, offset: int, size: int) -> memoryview | None:
        """Return a copy of `size` bytes, None if they cannot be read."""
        if self._disk.device.read_error is not None:
            return None  # the error is meant for a read of the device
        try:
            return self.read_now(offset, size)
        except BookieStorageError:
            return None

    def read_now(self, offset: int, size: int) -> memoryview:
        """Return a copy of exactly `size` bytes."""
        self._check_open()
        self._owner.check_alive()
        self._disk.device.check_read()
        if offset + size > len(self.inode.cache):
            raise BookieStorageError(
                f"{self._name} has {len(self.inode.cache)} bytes, not {size} at offset {offset}"
            )
        self.inode.check_readable(offset, size)
        return memoryview(bytes(self.inode.cache[offset : offset + size]))

    def close(self) -> None:
        """Close the file, and cut off the space that appends preallocated behind its end."""
        if not self._is_closed:
            self._is_closed = True
            if self.ahead_bytes > 0 and self._owner.is_alive:
                self.inode.truncate(self._size)
            self._disk.note_closed(self)

    def _check_open(self) -> None:
        if self._is_closed:
            raise BookieStorageError(f"{self._name} is closed")
