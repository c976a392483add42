"""The collector looks at what is new, and still frees cycles; in a process of its own."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bookie import collector

if TYPE_CHECKING:
    import pytest

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


def test_few_survivors_are_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything in a collection of the young, or before a collection has ended."""
    frozen: list[int] = []
    monkeypatch.setattr(gc, "callbacks", [])
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    for _ in range(2):
        collector.install()
    assert gc.callbacks == [collector._freeze_survivors]
    assert len(frozen) == 2
    for phase, generation, count in (("start", 2, 20_000), ("stop", 1, 20_000), ("stop", 2, 9)):
        monkeypatch.setattr(gc, "get_objects", lambda *, generation, n=count: [None] * n)
        collector._freeze_survivors(phase, {"generation": generation})
    assert len(frozen) == 2
    monkeypatch.setattr(gc, "get_objects", lambda *, generation: [None] * 20_000)
    collector._freeze_survivors("stop", {"generation": 2})
    assert len(frozen) == 3
