"""Goal: the memory of one message is that of the next, without the kernel's help.

Method: a process of its own touches blocks of a message's size, and counts its page faults.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
import numpy as np
from bookie import allocator

{install}
for _ in range(100):
    # As under load: several at a time, and none is left now and then.
    blocks = [np.ones(size * 1024, np.uint8) for size in (512, 1024, 512, 2048)]
    del blocks
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    blocks = [np.ones(size * 1024, np.uint8) for size in (512, 1024, 512, 2048)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, install: str) -> int:
    """Return the page faults of 400 MiB of blocks; each MiB has 256 pages."""
    command = [sys.executable, "-c", PROGRAM.format(install=install)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_freed_memory_is_kept() -> None:
    """With it next to no faults; without it most pages are new each time."""
    assert faults(install="allocator.install()") < 1000
    assert faults(install="pass") > 10_000
