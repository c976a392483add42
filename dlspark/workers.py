"""Spark's Python workers: what each is for, and its memory, which garbage collections pass over.

Spark's daemon collects all garbage after each task of a worker.  That looks at everything which
the worker has imported, a hundred thousand objects: far more work than a task with few rows, and
the next task waits for it.
"""

from __future__ import annotations

import gc
import sys

_DAEMON = "pyspark.daemon"
"""The program that workers which serve many tasks are forked from."""
_COMMITTER = "pyspark.sql.worker.python_streaming_sink_runner"
"""What a worker runs that ends micro-batches; each such program has workers of its own."""
_frozen_modules = 0


def only_commits() -> bool:
    """Return whether this process ends micro-batches, and neither plans nor writes them."""
    return _COMMITTER in sys.modules


def freeze_imports() -> None:
    """Freeze what there is, in a worker that has imported something since it was last done.

    At the beginning of a task: it was collected after the one before, so nearly all of it is there
    to stay, and next to nothing that could become garbage of a cycle is kept for ever.
    """
    global _frozen_modules
    program = getattr(sys.modules["__main__"], "__spec__", None)
    if program is None or program.name != _DAEMON or len(sys.modules) == _frozen_modules:
        return
    _frozen_modules = len(sys.modules)
    gc.freeze()
