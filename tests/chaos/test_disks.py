"""The launcher whose disk fails on demand, for machines without strace."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.bookie import obey

if TYPE_CHECKING:
    from pathlib import Path


def test_syncs_obey_the_file(tmp_path: Path) -> None:
    """No file: a real sync.  Error: no sync at all, and EIO.  Delay: a real sync, later."""
    synced: list[int] = []
    control = tmp_path / "control"
    sync = obey(control, synced.append)
    sync(1)
    control.write_text("error")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        sync(2)
    control.write_text("delay 0.05")
    began_s = time.monotonic()
    sync(3)
    assert time.monotonic() - began_s >= 0.05
    control.unlink()
    sync(4)
    assert synced == [1, 3, 4]
