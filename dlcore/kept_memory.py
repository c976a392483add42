"""Settings of the C library and of Python for the memory of a server: it holds much, and for long.

The C library gives back what is free at the heap's end beyond twice the largest block, and maps
very large ones anew each time.  With messages of half a megabyte that is after each of them, and
the kernel's work to hand out zeroed pages again is a third of the CPU of a bookie's add, and a
quarter of that of what a proxy sends to a reader.

Python's full collection looks at every object that may be in a cycle, and nothing else runs
meanwhile.  What a bookie holds for long (states of ledgers, indexes) is in no cycle and is freed by
its count of references.  So what survived a full collection, and then has no garbage in it, is
frozen: the next one looks at what is newer.  A frozen object that becomes part of a cycle of
garbage later is never freed.  Therefore nothing is frozen until the survivors are many: then nearly
all of them are there to stay, and what could ever be lost is a small share of what is held.

A full collection then looks at what was made since the last one, and the thresholds of the
collector say how much that is.  Their defaults differ: of Python 3.11 and 3.12 they allow 85,000
objects, later ones 242,000.  So they are set here.  A collector that works in increments, as some
releases of Python 3.14 have it, runs no full collection by itself: each of its steps is small
without a freeze, and there is none after the start.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging

from dlcore.config import MIB

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
_KEPT_BYTES_MAX = 64 * MIB
"""Free at the heap's end, beyond which it is given back: as much as readers may be sent."""
_BLOCK_BYTES_MAX = 16 * MIB
"""Larger blocks are mapped, and given back at once; no message is as large."""
SURVIVORS_MIN = 20_000
"""Looked at in some milliseconds."""
_OLDEST = 2
"""The generation that a full collection ends with; Python's documentation of `gc` says so."""
_THRESHOLDS = (700, 10, 10)
"""A full collection after 700 · 11 · 11 objects that were made and are still there."""


def keep_what_is_freed() -> None:
    """Keep freed memory for the messages that come next; not with another C library than glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        logger.info("this C library has no mallopt")
        return
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES_MAX)
    mallopt(_MMAP_THRESHOLD, _BLOCK_BYTES_MAX)


def give_back_what_is_free() -> None:
    """Give freed memory back to the system, wherever in the heap it is; takes milliseconds."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def collect_what_is_new() -> None:
    """Freeze what there is now, and from now on what survives in numbers."""
    gc.set_threshold(*_THRESHOLDS)
    gc.collect()
    gc.freeze()
    if _freeze_survivors not in gc.callbacks:
        gc.callbacks.append(_freeze_survivors)


def _freeze_survivors(phase: str, info: dict[str, int]) -> None:
    is_full = phase == "stop" and info["generation"] == _OLDEST
    if is_full and len(gc.get_objects(generation=_OLDEST)) >= SURVIVORS_MIN:
        gc.freeze()
