"""A disk in memory that forgets what was not synced: for tests and the simulator."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from bookie.disk_port import DiskSpace
from dlcore.errors import BookieStorageError
from dlcore.ledger.digest import BytesLike

P = ParamSpec("P")
T = TypeVar("T")

SECTOR_BYTES = 512
"""What a device writes whole or not at all."""

DEFAULT_TOTAL_BYTES = 1 << 40


class _Inode:
    """A file's bytes: what the device holds, what readers see, and the sectors that differ."""

    __slots__ = ("cache", "dirty", "durable")

    def __init__(self) -> None:
        self.durable = bytearray()
        self.cache = bytearray()
        self.dirty: set[int] = set()

    def write(self, offset: int, data: bytes) -> None:
        self.cache[offset : offset + len(data)] = data
        self.dirty.update(
            range(offset // SECTOR_BYTES, (offset + len(data) - 1) // SECTOR_BYTES + 1)
        )

    def truncate(self, size: int) -> None:
        del self.cache[size:]
        self.dirty.add(size // SECTOR_BYTES)

    def sync(self) -> None:
        if len(self.dirty) * SECTOR_BYTES * 4 < len(self.cache):
            self._copy_sectors(sorted(self.dirty))
            del self.durable[len(self.cache) :]
        else:
            self.durable[:] = self.cache
        self.dirty.clear()

    def lose(self, rng: random.Random) -> None:
        """Keep an arbitrary part of the un-synced sectors, and one of the possible lengths."""
        kept = sorted(sector for sector in self.dirty if rng.random() < 0.5)
        size = rng.randint(
            min(len(self.durable), len(self.cache)), max(len(self.durable), len(self.cache))
        )
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


class MemoryDisk:
    """One directory in memory, deterministic on any event loop; no threads.

    `crash` ends the running owner: its handles fail from then on, un-synced bytes are lost or torn by
    sector, and names that were not yet durable vanish.  The next owner opens the same object.

    Faults and costs are plain attributes: `write_error`, `sync_error` and `read_error` are raised by
    the next such operation and then cleared; `crash_at_step` crashes at the n-th step from now on;
    `latency_s` is drawn for every write and every sync.
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
        """Space taken by others on the same file system."""
        self.latency_s = latency_s
        self.write_error: str | None = None
        self.sync_error: str | None = None
        self.read_error: str | None = None
        self.crash_at_step: int | None = None
