"""The folder of a disk in memory: bytes and names of its files, and what a power loss leaves.

A file's bytes are on the device, or only in the cache that readers see.  A name leads to a file
now, and to the same or another one once power was lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence

SECTOR_BYTES = 512
"""The unit that a device writes completely or not at all."""
_SPARE_SUFFIX = ".spare"
_SPARES_MAX = 2


class Inode:
    """A file's bytes: on the device, in the cache that readers see, and the sectors that differ."""

    __slots__ = ("cache", "dirty", "durable", "lost")

    def __init__(self) -> None:
        self.durable = bytearray()
        self.cache = bytearray()
        self.dirty: set[int] = set()
        self.lost: set[int] = set()  # sectors that cannot be read

    def write(self, offset: int, data: bytes) -> None:
        """Write into the cache; lost sectors that are written can be read again."""
        self.cache[offset : offset + len(data)] = data
        written = _sectors(offset, len(data))
        self.dirty.update(written)
        if self.lost:
            self.lost.difference_update(written)

    def check_readable(self, offset: int, size: int) -> None:
        """Raise `BookieStorageError` if a lost sector is in this range."""
        if self.lost and not self.lost.isdisjoint(_sectors(offset, size)):
            raise BookieStorageError(f"cannot read {size} bytes at offset {offset}: lost sector")

    def allocate(self, size: int) -> None:
        """Grow to `size` bytes, with zeros."""
        self.cache.extend(bytes(max(0, size - len(self.cache))))

    def truncate(self, size: int) -> None:
        """Cut the cache."""
        del self.cache[size:]
        self.dirty.add(size // SECTOR_BYTES)

    def sync(self) -> None:
        """Bring the cache to the device."""
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


class MemoryFolder:
    """Files by their names, and by those that are durable.

    A recycled file is kept under a name of its own, as a spare for a file that is created later.
    """

    def __init__(self) -> None:
        self.files: dict[str, Inode] = {}
        """All files by name, with spares."""
        self.keeps_spares = True
        """Whether `retire` keeps recycled files."""
        self._durable: dict[str, Inode] = {}

    def names(self) -> list[str]:
        """Return the names of all files, sorted, without spares."""
        return sorted(name for name in self.files if not name.endswith(_SPARE_SUFFIX))

    def size_of(self, name: str) -> int:
        """Return the size of an existing file, with the bytes preallocated behind its end."""
        return len(self.files[name].cache)

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Yield each file that is there or comes back after a crash: its name, all that it has."""
        for names in (self.files, self._durable):
            for name, inode in names.items():
                yield name, bytes(inode.durable) + bytes(inode.cache)

    def used_bytes(self) -> int:
        """Return the bytes of all files, with spares."""
        return sum(len(inode.cache) for inode in self.files.values())

    # Changes of names, durable once `sync` was called

    def sync(self) -> None:
        """Make all names durable."""
        self._durable = dict(self.files)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; a missing one is no error."""
        for name in names:
            self.files.pop(name, None)

    def put(self, name: str, inode: Inode, spare: str | None) -> None:
        """Let a name lead to a file, which was the spare of this name, if any."""
        if spare is not None:
            self.files.pop(spare, None)
        self.files[name] = inode

    def retire(self, names: Sequence[str]) -> Mapping[str, Inode]:
        """Remove files; return those that `keep` is to keep as spares."""
        kept: dict[str, Inode] = {}
        spares_max = _SPARES_MAX if self.keeps_spares else 0
        for name in names:
            inode = self.files.pop(name, None)
            if inode is not None and len(self.spares()) + len(kept) < spares_max:
                kept[name + _SPARE_SUFFIX] = inode
        return kept

    def keep(self, spares: Mapping[str, Inode]) -> None:
        """Keep spares."""
        self.files.update(spares)

    def spares(self) -> list[str]:
        """Return the names of spares."""
        return [name for name in self.files if name.endswith(_SPARE_SUFFIX)]

    def spare_bytes(self) -> int:
        """Return the bytes of spares."""
        return sum(len(self.files[name].cache) for name in self.spares())

    # What a device does to files by itself

    def lose_power(self, rng: random.Random) -> None:
        """Lose what is not durable, or some of it."""
        # Each name change without a sync survives the power loss or not, independently of others.
        for name in sorted(self.files.keys() | self._durable.keys()):
            if self.files.get(name) is not self._durable.get(name):
                kept = rng.choice((self.files, self._durable)).get(name)
                self._set_durable(name, kept)
        used = {id(i) for n, i in self._durable.items() if not n.endswith(_SPARE_SUFFIX)}
        for name in [n for n in self._durable if n.endswith(_SPARE_SUFFIX)]:
            if id(self._durable[name]) in used:  # a rename leaves one name or the other
                del self._durable[name]
        self.files = dict(self._durable)
        for name in sorted(self.files):
            self.files[name].lose(rng)

    def corrupt(self, name: str, offset: int, data: bytes) -> None:
        """Change bytes without a write, on the device and in the cache."""
        inode = self.files[name]
        inode.cache[offset : offset + len(data)] = data
        inode.durable[offset : offset + len(data)] = data

    def flip(self, name: str, offset: int, bits: int) -> None:
        """Change one byte as `corrupt` does: invert the bits that are set in `bits`."""
        self.corrupt(name, offset, bytes([self.files[name].cache[offset] ^ bits]))

    def lose_sector(self, name: str, offset: int) -> None:
        """Make the sector at `offset` unreadable until it is written again."""
        self.files[name].lost.add(offset // SECTOR_BYTES)

    def _set_durable(self, name: str, inode: Inode | None) -> None:
        if inode is None:
            self._durable.pop(name, None)
        else:
            self._durable[name] = inode
