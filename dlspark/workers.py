"""Spark's Python workers: their roles, and how garbage collections skip their memory.

Spark's daemon collects all garbage after each task of a worker.  This examines all objects that the
worker has imported, a hundred thousand of them.  It is far more work than a task with few rows, and
the next task waits for it.
"""

from __future__ import annotations

import gc
import sys

_DAEMON = "pyspark.daemon"
"""The program that forks workers, each of which serves many tasks."""
_COMMITTER = "pyspark.sql.worker.python_streaming_sink_runner"
"""The program of workers that commit micro-batches; each program has its own workers."""
_frozen_modules = 0


def only_commits() -> bool:
    """Return whether this process commits micro-batches, and neither plans nor writes them."""
    return _COMMITTER in sys.modules


def freeze_imports() -> None:
    """Freeze all objects, in a worker that has imported modules since the last freeze.

    It runs at the beginning of a task.  The garbage was collected after the task before.  Nearly
    all remaining objects are permanent, so almost no garbage is kept for ever.
    """
    global _frozen_modules
    program = getattr(sys.modules["__main__"], "__spec__", None)
    if program is None or program.name != _DAEMON or len(sys.modules) == _frozen_modules:
        return
    _frozen_modules = len(sys.modules)
    gc.freeze()
