"""The file in which a server tells of itself: its readers, and its contents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dlcore.base.log_lines import Process
from dlcore.base.server_process import report_oneself

if TYPE_CHECKING:
    import pytest

PROGRAM = """
import threading
from pathlib import Path
from dlcore.base.log_lines import Process
from dlcore.base.server_process import report_oneself
report_oneself(Process("bookie", "b\\n1" + "x" * 300), {"data_dir": Path("/d"), "port": 1})
def hangs(): print("ready", flush=True); threading.Event().wait()
hangs()
"""

NAME = r"/memfd:dlog bookie b\n1xxx"


def test_settings_and_stacks_are_reported() -> None:
    """The program hangs, and goes on after the signal."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            files = Path(f"/proc/{process.pid}/fd").iterdir()
            (file,) = (each for each in files if NAME in str(each.readlink()))
            assert file.stat().st_mode & 0o777 == 0o600
            (line,) = file.read_text().splitlines()
            assert json.loads(line)["settings"] == {"data_dir": "/d", "port": 1}
            for times in (1, 2):
                process.send_signal(signal.SIGUSR2)
                while file.read_text().count(" in hangs\n") < times:
                    assert process.poll() is None
        finally:
            process.kill()


def test_other_systems_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no such files."""
    monkeypatch.delattr(os, "memfd_create")
    report_oneself(Process("bookie", "b"), {})
