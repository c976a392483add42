"""Memory settings of the C library and of Python for a server, which holds much memory for long.

After a free, the C library returns the free memory at the heap's end beyond twice the largest
block, and it maps very large blocks again each time.  With messages of half a megabyte this happens
after each of them.  The kernel's work to provide zeroed pages again is a third of the CPU of a
bookie's add, and a quarter of the CPU for sending to a proxy's reader.

Python's full collection examines every object that may be in a cycle, and nothing else runs
meanwhile.  Long-lived objects of a bookie (states of ledgers, indexes) are in no cycle, and are
freed by their reference counts.  Therefore objects that have survived a full collection are frozen,
because they contain no garbage then.  The next collection examines only newer objects.  A frozen
object that later becomes part of garbage in a cycle is never freed.  For this reason nothing is
frozen until there are many survivors: then nearly all of them are permanent, and the possible loss
is a small share.

A full collection then examines the objects created since the last one, and the collector's
thresholds limit their number.  The defaults differ: Python 3.11 and 3.12 allow 85,000 objects,
later versions 242,000.  Therefore they are set here.  Some releases of Python 3.14 have an
incremental collector, which runs no full collection by itself.  Each of its steps is small without
a freeze, and there is no freeze after the start.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging

from dlcore.base.config import MIB

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
_KEPT_BYTES_MAX = 64 * MIB
"""Most free bytes at the heap's end that are kept: as many as may be in transit to readers."""
_BLOCK_BYTES_MAX = 16 * MIB
"""Larger blocks are mapped, and returned at once; no message is as large."""
SURVIVORS_MIN = 20_000
"""Number of objects that is examined in some milliseconds."""
_OLDEST = 2
"""The generation of a full collection, as Python's documentation of `gc` says."""
_THRESHOLDS = (700, 10, 10)
"""A full collection runs after 700 · 11 · 11 new objects that still exist."""


def keep_what_is_freed() -> None:
    """Keep freed memory for the next messages; this has an effect only with glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        logger.info("this C library has no mallopt")
        return
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES_MAX)
    mallopt(_MMAP_THRESHOLD, _BLOCK_BYTES_MAX)


def give_back_what_is_free() -> None:
    """Return all free memory of the heap to the system; takes milliseconds."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def freeze_what_is_here() -> None:
    """Freeze all existing objects: modules and what a server has from its start to its end.

    A server whose later objects come and go with its clients, some of them in cycles, does no more.
    """
    gc.collect()
    gc.freeze()


def collect_what_is_new() -> None:
    """Freeze all existing objects now, and later the survivors when there are many."""
    gc.set_threshold(*_THRESHOLDS)
    freeze_what_is_here()
    if _freeze_survivors not in gc.callbacks:
        gc.callbacks.append(_freeze_survivors)


def _freeze_survivors(phase: str, info: dict[str, int]) -> None:
    is_full = phase == "stop" and info["generation"] == _OLDEST
    if is_full and len(gc.get_objects(generation=_OLDEST)) >= SURVIVORS_MIN:
        gc.freeze()
