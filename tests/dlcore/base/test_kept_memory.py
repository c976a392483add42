"""Goal: freed memory is used again, and what is held for long is not looked at over and over.

Methods: a process of its own touches blocks of a message's size, and counts its page faults;
another one holds much, and makes cycles, which are freed.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dlcore.base import server_process

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[3]
CYCLES = """
import gc, weakref
from dlcore.base import server_process

class Node:
    pass

server_process.collect_what_is_new()
looked_at, held, freed = [], [], []
gc.callbacks.append(
    lambda phase, info: phase == "start" and looked_at.append(len(gc.get_objects()))
)
for number in range(400_000):
    held.append([])
    if number % 1000 == 0:
        node = Node()
        node.itself = node
        weakref.finalize(node, freed.append, number)
        del node
gc.collect()
assert gc.get_freeze_count() > 300_000, gc.get_freeze_count()
assert max(looked_at) < 120_000, max(looked_at)
assert len(freed) == 400, len(freed)
server_process.collect_what_is_new()
assert gc.callbacks.count(server_process._freeze_survivors) == 1
"""
MESSAGES = """
import resource
import numpy as np
from dlcore.base import server_process

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


def test_full_collections_look_at_what_is_new() -> None:
    """Goal: however much is held, a collection looks at a part of it, and frees what it should."""
    subprocess.run([sys.executable, "-c", CYCLES], check=True, cwd=ROOT)


def test_few_survivors_are_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything in a collection of the young, or before a collection has ended."""
    frozen: list[int] = []
    thresholds: list[tuple[int, ...]] = []
    monkeypatch.setattr(gc, "set_threshold", lambda *given: thresholds.append(given))
    monkeypatch.setattr(gc, "callbacks", [])
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    for _ in range(2):
        server_process.collect_what_is_new()
    assert gc.callbacks == [server_process._freeze_survivors]
    assert len(frozen) == 2
    assert thresholds == [(700, 10, 10)] * 2  # they hold for the whole process
    for phase, generation, count in (("start", 2, 20_000), ("stop", 1, 20_000), ("stop", 2, 9)):
        monkeypatch.setattr(gc, "get_objects", lambda *, generation, n=count: [None] * n)
        server_process._freeze_survivors(phase, {"generation": generation})
    assert len(frozen) == 2
    monkeypatch.setattr(gc, "get_objects", lambda *, generation: [None] * 20_000)
    server_process._freeze_survivors("stop", {"generation": 2})
    assert len(frozen) == 3


def faults(*, install: str) -> int:
    """Return the page faults of 400 MiB of blocks in a process; each MiB has 256 pages.

    By itself glibc raises the size from which it returns a block at once, and then what lies above
    the blocks in the heap decides.  With a fixed size it returns each of them.
    """
    command = [sys.executable, "-c", MESSAGES.format(install=install)]
    fixed = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}
    return int(subprocess.check_output(command, text=True, cwd=ROOT, env=fixed))


def test_freed_memory_is_kept() -> None:
    """With it next to no faults; without it most pages are new each time."""
    assert faults(install="server_process.keep_what_is_freed()") < 1000
    assert faults(install="pass") > 10_000
