"""A run ends with the process that started it, even if that is killed."""

from __future__ import annotations

import os
import signal
import sys
import threading


def interrupt_at_end_of_stdin() -> None:
    """Interrupt this process, as Ctrl-C does, when the parent at the other end is gone."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
