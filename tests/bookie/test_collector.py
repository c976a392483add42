"""The collector looks at what is new, and still frees cycles; in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import gc, weakref
from bookie import collector

class Node:
    pass

collector.install()
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
collector.install()
assert gc.callbacks.count(collector._freeze_survivors) == 1
"""


def test_full_collections_look_at_what_is_new() -> None:
    """Goal: however much is held, a collection looks at a part of it, and frees what it should."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, cwd=ROOT)
