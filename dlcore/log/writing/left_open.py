"""Writers that were not closed: at the end of the process they log what they could not write."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Unclosed(Protocol):
    """An object that can report what it has not written."""

    def report_unwritten(self, reason: str) -> None:
        """Log the unwritten records as an error, with the reason."""


left_open: weakref.WeakSet[Unclosed] = weakref.WeakSet()


def _report_left_open() -> None:
    for writer in list(left_open):
        writer.report_unwritten("the process ended")


atexit.register(_report_left_open)
os.register_at_fork(after_in_child=left_open.clear)  # they belong to the parent
