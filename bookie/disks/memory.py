"""A disk in memory that loses bytes without a sync: for tests and the simulator."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from bookie.disks.port import DiskFullError, DiskSpace
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dlcore.wire.digest import BytesLike

P = ParamSpec("P")
T = TypeVar("T")

SECTOR_BYTES = 512
"""The unit that a device writes completely or not at all."""

DEFAULT_TOTAL_BYTES = 1 << 40
_AHEAD_BYTES = 3 * SECTOR_BYTES
"""Bytes preallocated at a time, behind the end of a file with appends."""
_AHEAD_SHARE_OF_FREE = 1 / 64
_SPARE_SUFFIX = ".spare"
_SPARES_MAX = 2


class _Inode:
    """A file's bytes: on the device, in the cache that readers see, and the sectors that differ."""

    __slots__ = ("cache", "dirty", "durable", "lost")

    def __init__(self) -> None:
        self.durable = bytearray()
        self.cache = bytearray()
        self.dirty: set[int] = set()
        self.lost: set[int] = set()  # sectors that cannot be read

    def write(self, offset: int, data: bytes) -> None:
        self.cache[offset : offset + len(data)] = data
        written = _sectors(offset, len(data))
        self.dirty.update(written)
        if self.lost:
            self.lost.difference_update(written)

    def check_readable(self, offset: int, size: int) -> None:
        if self.lost and not self.lost.isdisjoint(_sectors(offset, size)):
            raise BookieStorageError(f"cannot read {size} bytes at offset {offset}: lost sector")

    def allocate(self, size: int) -> None:
        """Grow to `size` bytes, with zeros."""
        self.cache.extend(bytes(max(0, size - len(self.cache))))

    def truncate(self, size: int) -> None:
        del self.cache[size:]
        self.dirty.add(size // SECTOR_BYTES)

    def sync(self) -> None:
        # Copying few sectors one by one is faster than copying a large file, and the reverse.
        if len(self.dirty) * SECTOR_BYTES * 4 < len(self.cache):
            self._copy_sectors(sorted(self.dirty))
            del self.durable[len(self.cache) :]
        else:
            self.durable[:] = self.cache
        self.dirty.clear()

    def lose(self, rng: random.Random) -> None:
        """Lose power: none, some or all unsynced sectors stay, with one of the possible lengths."""
        share = rng.choice((0.0, 0.5, 1.0))
        kept = sorted(sector for sector in self.dirty if rng.random() < share)
        shorter, longer = sorted((len(self.durable), len(self.cache)))
        size = rng.choice((shorter, longer, rng.randint(shorter, longer)))
        self._copy_sectors(kept)
        if len(self.durable) < size:
            self.durable.extend(bytes(size - len(self.durable)))
        del self.durable[size:]
        self.cache[:] = self.durable
        self.dirty.clear()

    def _copy_sectors(self, sectors: Sequence[int]) -> None:
        for sector in sectors:
            start = sector * SECTOR_BYTES
            data = self.cache[start : start + SECTOR_BYTES]
            if len(self.durable) < start:
                self.durable.extend(bytes(start - len(self.durable)))
            self.durable[start : start + len(data)] = data


def _sectors(offset: int, size: int) -> range:
    """Return the sectors that a range of bytes touches."""
    return range(offset // SECTOR_BYTES, -(-(offset + size) // SECTOR_BYTES))


class MemoryDisk:
    """One directory in memory, deterministic on any event loop; no threads.

    `crash` ends the running owner: its handles fail from then on, unsynced bytes are lost or torn
    by sector, and name changes that were not yet durable may vanish.  The next owner opens the same
    object.

    Faults and costs are plain attributes.  `write_error`, `sync_error` or `read_error` makes the
    next such operation fail, and is cleared by it.  The disk crashes and calls `on_crash` when
    `steps` reaches `crash_at_step`.  `latency_s` returns the delay of each step; an append that
    `is_quick` allows on the event loop has none.  `corrupt` and `lose_sector` damage durable bytes.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        *,
        total_bytes: int = DEFAULT_TOTAL_BYTES,
        latency_s: Callable[[], float] | None = None,
    ) -> None:
        self._rng = rng if rng is not None else random.Random(0)
        self._names: dict[str, _Inode] = {}
        self._durable_names: dict[str, _Inode] = {}
        self._generation = 0
        self._steps = 0
        self.total_bytes = total_bytes
        self.filler_bytes = 0
        """Space that other users of the file system take."""
        self.is_crowded = False
        """Whether other users of the file system take the space that a truncation frees at once."""
        self._held_bytes = 0
        self.latency_s = latency_s
        self.is_quick: Callable[[], bool] = lambda: False
        self.write_error: str | None = None
        self.sync_error: str | None = None
        self.read_error: str | None = None
        self.crash_at_step: int | None = None
        self.on_crash: Callable[[], None] = lambda: None
        """Called after the crash at `crash_at_step`: the machine lost power, and the callee must
        end every process on it."""
        self._open: set[MemoryFile] = set()
        self._keeps_spares = True

    def crash(self, *, keep_cache: bool = False) -> None:
        """End the running owner: its handles fail from now on.

        Args:
            keep_cache: only the process dies (SIGKILL); otherwise the machine loses power.
        """
        self._end_generation()
        self.crash_at_step = None
        if keep_cache:
            return
        # Each name change without a sync survives the power loss or not, independently of others.
        for name in sorted(self._names.keys() | self._durable_names.keys()):
            if self._names.get(name) is not self._durable_names.get(name):
                kept = self._rng.choice((self._names, self._durable_names)).get(name)
                self._set_durable_name(name, kept)
        used = {id(i) for n, i in self._durable_names.items() if not n.endswith(_SPARE_SUFFIX)}
        for name in [n for n in self._durable_names if n.endswith(_SPARE_SUFFIX)]:
            if id(self._durable_names[name]) in used:  # a rename leaves one name or the other
                del self._durable_names[name]
        self._names = dict(self._durable_names)
        for name in sorted(self._names):
            self._names[name].lose(self._rng)

    def corrupt(self, name: str, offset: int, data: bytes) -> None:
        """Change bytes without a write, on the device and in the cache."""
        inode = self._names[name]
        inode.cache[offset : offset + len(data)] = data
        inode.durable[offset : offset + len(data)] = data

    def flip(self, name: str, offset: int, bits: int) -> None:
        """Change one byte as `corrupt` does: invert the bits that are set in `bits`."""
        self.corrupt(name, offset, bytes([self._names[name].cache[offset] ^ bits]))

    def lose_sector(self, name: str, offset: int) -> None:
        """Make the sector at `offset` unreadable until it is written again."""
        self._names[name].lost.add(offset // SECTOR_BYTES)

    def size_of(self, name: str) -> int:
        """Return the size of an existing file, with the bytes preallocated behind its end."""
        return len(self._names[name].cache)

    @property
    def open_files(self) -> int:
        """Number of handles that the running owner has opened and not closed."""
        return len(self._open)

    @property
    def steps(self) -> int:
        """Number of writes, syncs and name changes so far; `crash_at_step` is in this unit."""
        return self._steps

    def space(self) -> DiskSpace:
        """Return free and total space; preallocated and recycled space counts as free."""
        spare_bytes = sum(len(self._names[name].cache) for name in self._spares())
        ahead_bytes = sum(file.ahead_bytes for file in self._open)
        free_bytes = self._room_bytes() + self._held_bytes + spare_bytes + ahead_bytes
        return DiskSpace(free_bytes=free_bytes, total_bytes=self.total_bytes)

    def _room_bytes(self) -> int:
        """Return the bytes that any user of the file system may take."""
        used = sum(len(inode.cache) for inode in self._names.values()) + self.filler_bytes
        return max(0, self.total_bytes - used - self._held_bytes)

    def fill(self, leave_bytes: int = 0) -> None:
        """Let other users take all space except `leave_bytes` and the reserve."""
        self.filler_bytes = max(0, self.filler_bytes + self._room_bytes() - leave_bytes)

    @property
    def held_bytes(self) -> int:
        """Space that is reserved now."""
        return self._held_bytes

    async def hold(self, size_bytes: int) -> None:
        """Reserve `size_bytes` in all; the reserve survives crashes."""
        if size_bytes - self._held_bytes > self._room_bytes():
            raise DiskFullError("cannot reserve space: no space left on device")
        self._held_bytes = size_bytes

    async def release(self, size_bytes: int) -> bool:
        """Release up to `size_bytes` of the reserve for writes; False if the reserve is empty."""
        is_held = self._held_bytes > 0
        self._held_bytes = max(0, self._held_bytes - size_bytes)
        return is_held

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Yield each file that is there or comes back after a crash: its name, all that it has."""
        for names in (self._names, self._durable_names):
            for name, inode in names.items():
                yield name, bytes(inode.durable) + bytes(inode.cache)

    def names(self) -> list[str]:
        """Return the names of all files, sorted, without spares."""
        return sorted(name for name in self._names if not name.endswith(_SPARE_SUFFIX))

    async def create(self, name: str, content: Sequence[BytesLike]) -> MemoryFile:
        """Create a file that begins with `content`; it reuses a spare if there is one."""
        if name in self._names:
            raise BookieStorageError(f"cannot create {name}: it exists")
        data = b"".join(content)
        spare = self._unused_spare()
        await self._place(name, data, spare)
        return self._opened(MemoryFile(self, name, self._names[name], self._generation, len(data)))

    def open(self, name: str) -> MemoryFile:
        """Open an existing file for reading and appending."""
        inode = self._names.get(name)
        if inode is None:
            raise BookieStorageError(f"cannot open {name}: no such file")
        size = len(inode.cache)
        return self._opened(MemoryFile(self, name, inode, self._generation, size))

    async def delete(self, names: Sequence[str]) -> None:
        """Delete files durably; a missing file is no error."""
        generation = self._generation
        await self.step(generation)
        for name in names:
            self._names.pop(name, None)
        await self.step(generation)
        self._durable_names = dict(self._names)

    async def recycle(self, names: Sequence[str]) -> None:
        """Delete files durably, and keep some for files that are created later."""
        generation = self._generation
        await self.step(generation)
        kept: dict[str, _Inode] = {}
        spares_max = _SPARES_MAX if self._keeps_spares else 0
        for name in names:
            inode = self._names.pop(name, None)
            if inode is not None and len(self._spares()) + len(kept) < spares_max:
                kept[name + _SPARE_SUFFIX] = inode
        await self.step(generation)
        # Only now may a file reuse them: before the second step a crash can restore the old name.
        self._names.update(kept)
        self._durable_names = dict(self._names)

    async def use_spares(self, *, allowed: bool) -> None:
        """Keep space of recycled files, or delete what is kept."""
        self._keeps_spares = allowed
        if not allowed and self._spares():
            generation = self._generation
            await self.step(generation)
            for name in self._spares():
                self._names.pop(name, None)
            await self.step(generation)
            self._durable_names = dict(self._names)

    async def read_file(self, name: str) -> bytes | None:
        """Return a small file's content; None if it does not exist."""
        inode = self._names.get(name)
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
        self._end_generation()

    async def step(self, generation: int) -> None:
        """Pass one point at which the machine can crash, and wait for the device's latency."""
        self.check_alive(generation)
        self._steps += 1
        if self.crash_at_step is not None and self._steps >= self.crash_at_step:
            self.crash()
            self.on_crash()
        self.check_alive(generation)
        if self.latency_s is not None:
            await asyncio.sleep(self.latency_s())
            self.check_alive(generation)

    def is_alive(self, generation: int) -> bool:
        """Return whether the handle's owner has neither crashed nor closed the disk."""
        return generation == self._generation

    def check_alive(self, generation: int) -> None:
        """Raise `BookieStorageError` if the handle's owner is dead."""
        if not self.is_alive(generation):
            raise BookieStorageError("the disk's owner crashed or closed it")

    async def write(self, inode: _Inode, offset: int, data: bytes, generation: int) -> None:
        """Write into the cache and sync, one step each; fail if an error is set."""
        await self.step(generation)
        grown_from = len(inode.cache)
        if not self._has_room(offset + len(data) - grown_from):
            inode.write(offset, data[: self._rng.randrange(len(data) + 1)])
            await self.step(generation)  # power can be lost before the part is cut off again
            inode.truncate(grown_from)
            raise DiskFullError("cannot write: no space left on device")
        if self.write_error is not None:
            message, self.write_error = self.write_error, None
            inode.write(offset, data[: self._rng.randrange(len(data) + 1)])
            raise BookieStorageError(f"cannot write: {message}")
        inode.write(offset, data)
        await self.sync(inode, generation)

    async def sync(self, inode: _Inode, generation: int) -> None:
        """Make a file durable; a failed sync loses bytes and marks all pages clean, as on Linux."""
        await self.step(generation)
        if self.sync_error is not None:
            message, self.sync_error = self.sync_error, None
            # Readers still see the written bytes: only the device has lost some of them.
            cached = bytes(inode.cache)
            inode.lose(self._rng)
            inode.cache[:] = cached
            raise BookieStorageError(f"cannot sync: {message}")
        inode.sync()

    def note_closed(self, file: MemoryFile) -> None:
        """Count a handle as closed; a handle of an earlier owner is not counted any more."""
        self._open.discard(file)

    def ahead_bytes(self) -> int:
        """Return how many bytes to preallocate now."""
        return _AHEAD_BYTES if self._room_bytes() * _AHEAD_SHARE_OF_FREE >= _AHEAD_BYTES else 0

    def _end_generation(self) -> None:
        self._generation += 1
        self._open.clear()

    def _opened(self, file: MemoryFile) -> MemoryFile:
        self._open.add(file)
        return file

    def _spares(self) -> list[str]:
        return [name for name in self._names if name.endswith(_SPARE_SUFFIX)]

    def _unused_spare(self) -> str | None:
        """Return a spare that no open handle reads."""
        return next((name for name in self._spares() if not self._is_open(self._names[name])), None)

    def _is_open(self, inode: _Inode) -> bool:
        return any(file.inode is inode for file in self._open)

    def _has_room(self, growth: int) -> bool:
        """Return whether `growth` more bytes fit, after the deletion of spares if need be."""
        if growth > self._room_bytes():
            for name in self._spares():
                del self._names[name]
        return growth <= self._room_bytes()

    def check_read(self) -> None:
        """Raise `read_error` if it is set."""
        if self.read_error is not None:
            message, self.read_error = self.read_error, None
            raise BookieStorageError(f"cannot read: {message}")

    def _set_durable_name(self, name: str, inode: _Inode | None) -> None:
        if inode is None:
            self._durable_names.pop(name, None)
        else:
            self._durable_names[name] = inode

    async def _place(self, name: str, data: bytes, spare: str | None = None) -> None:
        generation = self._generation
        inode = _Inode() if spare is None else self._names[spare]
        await self.write(inode, 0, data, generation)
        if spare is not None:
            self._names.pop(spare, None)
        self._names[name] = inode
        await self.step(generation)
        self._durable_names = dict(self._names)


class MemoryFile:
    """An open file of a `MemoryDisk`."""

    def __init__(
        self, disk: MemoryDisk, name: str, inode: _Inode, generation: int, size: int
    ) -> None:
        self._disk = disk
        self._name = name
        self.inode = inode
        self._generation = generation
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
        ahead_bytes = self._disk.ahead_bytes()
        if size > len(self.inode.cache) and ahead_bytes:
            self.inode.allocate(end + ahead_bytes)
        padding = bytes(max(0, min(end, len(self.inode.cache)) - size))
        # Before the write: bytes of the append do not count as preallocated while it is unsynced.
        offset, self._size = self._size, size
        try:
            await self._disk.write(self.inode, offset, data + padding, self._generation)
        except DiskFullError:
            self._size = offset
            raise

    def append_now(self, buffers: Sequence[BytesLike]) -> bool:
        """Append without latency if the disk is quick now; the faults are those of `append`."""
        disk = self._disk
        if not disk.is_quick():
            return False
        # Without latency `append` never waits, so one `send` runs the coroutine to its end.
        latency_s, disk.latency_s = disk.latency_s, None
        try:
            self.append(buffers).send(None)
        except StopIteration:
            return True
        finally:
            disk.latency_s = latency_s
        raise AssertionError("an append without latency waited")

    async def rewrite(self, offset: int, data: BytesLike) -> None:
        """Write `data` over existing bytes, or at the end, and make it durable."""
        self._check_open()
        await self._disk.write(self.inode, offset, bytes(data), self._generation)
        self._size = max(self._size, offset + len(data))

    async def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes, durably, with the space preallocated behind them."""
        self._check_open()
        await self._disk.step(self._generation)
        self.inode.truncate(size)
        if self._disk.is_crowded:
            self._disk.fill()
        await self._disk.sync(self.inode, self._generation)
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
        if self._disk.read_error is not None:
            return None  # the error is meant for a read of the device
        try:
            return self.read_now(offset, size)
        except BookieStorageError:
            return None

    def read_now(self, offset: int, size: int) -> memoryview:
        """Return a copy of exactly `size` bytes."""
        self._check_open()
        self._disk.check_alive(self._generation)
        self._disk.check_read()
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
            if self.ahead_bytes > 0 and self._disk.is_alive(self._generation):
                self.inode.truncate(self._size)
            self._disk.note_closed(self)

    def _check_open(self) -> None:
        if self._is_closed:
            raise BookieStorageError(f"{self._name} is closed")
