"""The warden kills what it was told of, once its parent is gone."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from dlcore.sandbox import warden

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def test_what_still_runs_is_killed_and_what_is_gone_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that ended before it was told, and those that end before it kills them."""
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    running = [subprocess.Popen(sleep) for _ in range(2)]
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    leaving = subprocess.Popen(sleep)

    lines = [str(process.pid) for process in (running[0], ended, leaving, running[1])]

    def told() -> Iterator[str]:
        yield from lines
        leaving.kill()
        leaving.wait(60)

    monkeypatch.setattr(sys, "stdin", told())
    try:
        warden.main()
        assert [process.wait(60) for process in running] == [-9, -9]
    finally:
        for process in (*running, leaving):
            process.kill()
            process.wait(60)
