"""Children of a sandbox: how long they may take to start.

Method: real processes that compete for one processor, without an end of their own.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from dlcore.ops.sandbox.process import ChildProcess, Warden, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

BUSY = ("sh", "-c", "while :; do :; done")


def test_time_without_a_processor_does_not_count(tmp_path: Path) -> None:
    """A start is not given up because the machine does other things; one that hangs is."""
    alone = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    with closing(Warden()) as warden:

        def start(*command: str) -> ChildProcess:
            return ChildProcess(command, log_path=tmp_path / "log", warden=warden)

        busy, *others = (start(*alone, *BUSY) for _ in range(5))
        hanging = start("sleep", "1000")
        assert wait_until(lambda: busy.kept_waiting_s() > 1, timeout_s=0.5, child=busy)
        assert not wait_until(lambda: False, timeout_s=0.5, child=hanging)
        for each in (busy, hanging, *others):
            each.kill()
    assert busy.kept_waiting_s() == 0  # it is gone
