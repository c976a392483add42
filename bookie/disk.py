"""The disk: its port, the real one and the one in memory, under one name."""

from __future__ import annotations

from bookie.disk_port import Disk, DiskFile, DiskSpace
from bookie.memory_disk import MemoryDisk
from bookie.real_disk import RealDisk

__all__ = ["Disk", "DiskFile", "DiskSpace", "MemoryDisk", "RealDisk"]
