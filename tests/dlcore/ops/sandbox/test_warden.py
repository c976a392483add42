"""The warden kills the processes that it knows, once its parent is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dlcore.ops.sandbox import warden

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_running_processes_are_killed_and_gone_ones_are_no_error(
    monkeypatch: pytest.MonkeyPatch, *, has_descriptors: bool
) -> None:
    """Those that ended before it knew them, and those that end before it kills them."""
    if not has_descriptors:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    running = [subprocess.Popen(sleep) for _ in range(2)]
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    leaving = subprocess.Popen(sleep)

    lines = [str(process.pid) for process in (running[0], ended, leaving, running[1])]

    def sent() -> Iterator[str]:
        yield from lines
        leaving.kill()
        leaving.wait(60)

    monkeypatch.setattr(sys, "stdin", sent())
    try:
        warden.main()
        assert [process.wait(60) for process in running] == [-9, -9]
    finally:
        for process in (*running, leaving):
            process.kill()
            process.wait(60)


def test_another_process_with_the_id_of_one_that_ended_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without descriptors the time of its start tells it apart; here that of the first is made."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    starts = iter(["Mon Jan  1 00:00:00 2024"])
    start_of = warden._start_of
    monkeypatch.setattr(warden, "_start_of", lambda pid: next(starts, None) or start_of(pid))
    monkeypatch.setattr(sys, "stdin", iter([str(other.pid)]))
    try:
        warden.main()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(60)
