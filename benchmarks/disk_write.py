"""How a group commit is best written on a disk: each way, at each size, one after the other.

`python -m benchmarks.disk_write [FOLDER]`.  The ways take turns, so that what slows the machine
slows all of them.

    growing     appended to a file that grows, then fdatasync
    allocated   into blocks from posix_fallocate, never written, then fdatasync
    written     into blocks that were written before, as in a recycled file, then fdatasync
    direct      the same with O_DIRECT and O_DSYNC: one aligned write, padded to whole blocks
    direct, allocated   the same into blocks never written
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_BYTES = 4096
MIB = 1024 * 1024
SIZES = {1200: 2000, 16 * 1024: 1000, 64 * 1024: 1000, MIB: 200}
"""Bytes of a commit, and how many are made in each round."""
ROUNDS = 3
_ZEROS = bytes(MIB)


@dataclass(slots=True)
class Times:
    """What the commits of one way and size took."""

    seconds: list[float] = field(default_factory=list)
    kernel_s: float = 0.0


def prepare(path: Path, size: int, *, allocated: bool, written: bool) -> None:
    """Make a file of `size` bytes, with blocks as told, and everything of it durable."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        if allocated:
            os.posix_fallocate(descriptor, 0, size)
        if written:
            for offset in range(0, size, MIB):
                os.pwrite(descriptor, _ZEROS, offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit_all(path: Path, size: int, count: int, times: Times, *, direct: bool) -> None:
    """Write `count` commits of `size` bytes, one after the other, each durable before the next."""
    flags = os.O_WRONLY | (os.O_DIRECT | os.O_DSYNC if direct else 0)
    stored = -(-size // BLOCK_BYTES) * BLOCK_BYTES if direct else size
    descriptor = os.open(path, flags)
    with mmap.mmap(-1, stored) as buffer:
        buffer.write(os.urandom(stored))
        started_kernel_s = resource.getrusage(resource.RUSAGE_SELF).ru_stime
        for number in range(count):
            started_s = time.perf_counter()
            assert os.pwrite(descriptor, buffer, number * stored) == stored
            if not direct:
                os.fdatasync(descriptor)
            times.seconds.append(time.perf_counter() - started_s)
        times.kernel_s += resource.getrusage(resource.RUSAGE_SELF).ru_stime - started_kernel_s
    os.close(descriptor)


WAYS: dict[str, tuple[bool, bool, bool]] = {
    "growing": (False, False, False),
    "allocated": (True, False, False),
    "written": (True, True, False),
    "direct": (True, True, True),
    "direct, allocated": (True, False, True),
}
"""Whether blocks are allocated, whether they were written, and whether the writes are direct."""


def measure(folder: Path, tell: Callable[..., None]) -> None:
    """Measure every way at every size."""
    for size, count in SIZES.items():
        times = {way: Times() for way in WAYS}
        stored = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        for number in range(ROUNDS):
            for way, (allocated, written, direct) in WAYS.items():
                path = folder / f"{size}-{number}-{way}"
                prepare(path, stored * count, allocated=allocated, written=written)
                commit_all(path, size, count, times[way], direct=direct)
                path.unlink()
        for way, taken in times.items():
            total_bytes = size * count * ROUNDS
            tell(
                f"{size:,}",
                way,
                f"{statistics.median(taken.seconds) * 1000:.2f}",
                f"{statistics.quantiles(taken.seconds, n=100)[98] * 1000:.2f}",
                f"{total_bytes / 1e6 / sum(taken.seconds):,.0f}",
                f"{taken.kernel_s / (total_bytes / 1e9):.2f}",
            )


def main() -> None:
    """Measure in a folder, and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.disk_write", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("artifacts"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    table = Table("bytes", "way", "p50 ms", "p99 ms", "MB/s", "kernel CPU s/GB")
    with tempfile.TemporaryDirectory(prefix="disk-", dir=folder) as temporary:
        measure(Path(temporary), table.add_row)
    Console().print(table)


if __name__ == "__main__":
    main()
