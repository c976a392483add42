"""Ways to write a group commit on a disk: each way, at each size, one after the other.

`python -m benchmarks.disk_write [FOLDER]`.  The ways take turns, so that what slows the machine
slows all of them.

    growing     appended to a file that grows, then fdatasync
    allocated   into blocks from posix_fallocate, never written, then fdatasync
    written     into blocks that were written before, as in a recycled file, then fdatasync
    direct      into written blocks with O_DIRECT and RWF_DSYNC: one write of whole blocks, which
                begins with the block that the last one left partly filled; the bookie's way
    direct, padded      the same, but each commit begins a block
    direct, allocated   as `direct`, into blocks never written
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
from typing import TYPE_CHECKING, NamedTuple

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
    """The times of the commits of one way and size."""

    seconds: list[float] = field(default_factory=list)
    kernel_s: float = 0.0


def prepare(path: Path, size: int, *, allocated: bool, written: bool) -> None:
    """Make a file of `size` bytes, with such blocks, and make all of it durable."""
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


def commit_all(path: Path, size: int, count: int, times: Times, way: Way) -> None:
    """Write `count` commits of `size` bytes, one after the other, each durable before the next."""
    descriptor = os.open(path, os.O_WRONLY | (os.O_DIRECT if way.is_direct else 0))
    end = 0
    with mmap.mmap(-1, size + 2 * BLOCK_BYTES) as buffer, memoryview(buffer) as memory:
        memory[:] = os.urandom(len(memory))
        started_kernel_s = resource.getrusage(resource.RUSAGE_SELF).ru_stime
        for _ in range(count):
            started_s = time.perf_counter()
            if way.is_direct:
                start = end - end % BLOCK_BYTES
                stop = -(-(end + size) // BLOCK_BYTES) * BLOCK_BYTES
                os.pwritev(descriptor, [memory[: stop - start]], start, os.RWF_DSYNC)
            else:
                os.pwrite(descriptor, memory[:size], end)
                os.fdatasync(descriptor)
            times.seconds.append(time.perf_counter() - started_s)
            end = stop if way.is_padded else end + size
        times.kernel_s += resource.getrusage(resource.RUSAGE_SELF).ru_stime - started_kernel_s
    os.close(descriptor)


class Way(NamedTuple):
    """How a commit is written."""

    is_allocated: bool = False
    is_written: bool = False
    is_direct: bool = False
    is_padded: bool = False


WAYS = {
    "growing": Way(),
    "allocated": Way(is_allocated=True),
    "written": Way(is_allocated=True, is_written=True),
    "direct": Way(is_allocated=True, is_written=True, is_direct=True),
    "direct, padded": Way(is_allocated=True, is_written=True, is_direct=True, is_padded=True),
    "direct, allocated": Way(is_allocated=True, is_direct=True),
}


def measure(folder: Path, tell: Callable[..., None]) -> None:
    """Measure every way at every size."""
    for size, count in SIZES.items():
        times = {name: Times() for name in WAYS}
        stored = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        for number in range(ROUNDS):
            for name, way in WAYS.items():
                path = folder / f"{size}-{number}-{name}"
                prepare(path, stored * count, allocated=way.is_allocated, written=way.is_written)
                commit_all(path, size, count, times[name], way)
                path.unlink()
        for name, taken in times.items():
            total_bytes = size * count * ROUNDS
            tell(
                f"{size:,}",
                name,
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
