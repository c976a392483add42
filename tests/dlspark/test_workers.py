"""Collections between tasks pass over what a worker keeps; no other process is touched."""

from __future__ import annotations

import gc
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from dlspark import workers
from dlspark.workers import freeze_imports

if TYPE_CHECKING:
    from collections.abc import Callable

    RunAs = Callable[[str | None], None]


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many modules there were at each freezing."""
    times: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: times.append(len(sys.modules)))
    monkeypatch.setattr(workers, "_frozen_modules", 0)
    return times


@pytest.fixture
def run_as(monkeypatch: pytest.MonkeyPatch) -> RunAs:
    """Return what makes this process one that runs a module, or a script."""

    def run(module: str | None) -> None:
        spec = None if module is None else SimpleNamespace(name=module)
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)

    return run


def test_a_worker_freezes_again_what_it_imported_since(
    frozen: list[int], run_as: RunAs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and not at each task."""
    run_as("pyspark.daemon")
    for _ in range(3):
        freeze_imports()
    before = len(sys.modules)
    assert frozen == [before]
    monkeypatch.setitem(sys.modules, "imported_by_a_task", ModuleType("imported_by_a_task"))
    for _ in range(3):
        freeze_imports()
    assert frozen == [before, before + 1]


@pytest.mark.parametrize("module", [None, "pytest", "pyspark.worker"])
def test_no_other_process_is_frozen(frozen: list[int], run_as: RunAs, module: str | None) -> None:
    """A user's program, a test, or a worker that serves one task."""
    run_as(module)
    freeze_imports()
    assert not frozen
