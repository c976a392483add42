"""The disk: its port, the real one and the one in memory, under one name."""

from __future__ import annotations

from bookie.disks.memory import MemoryDisk
from bookie.disks.port import Disk, DiskFile, DiskSpace
from bookie.disks.real import RealDisk

__all__ = ["Disk", "DiskFile", "DiskSpace", "MemoryDisk", "RealDisk"]
