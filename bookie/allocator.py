"""Tells the C library to keep memory that was freed, for the messages that come next.

By default it gives back what is free at the heap's end beyond twice the largest block, and maps
very large ones anew each time.  With messages of half a megabyte that is after each of them, and
the kernel's work to hand out zeroed pages again is a third of the CPU of an add.
"""

from __future__ import annotations

import ctypes
import logging

from dlcore.config import MIB

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
_KEPT_BYTES_MAX = 64 * MIB
"""Free at the heap's end, beyond which it is given back: as much as readers may be sent."""
_BLOCK_BYTES_MAX = 16 * MIB
"""Larger blocks are mapped, and given back at once; no message is as large."""


def install() -> None:
    """Keep freed memory from now on; another C library than glibc does as it likes."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        logger.info("this C library has no mallopt")
        return
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES_MAX)
    mallopt(_MMAP_THRESHOLD, _BLOCK_BYTES_MAX)
