"""The process of a server: its report to operators, a new configuration at a signal, its memory.

The report is a file in memory with the settings in use, and the stacks of all threads at a signal.
`dlog debug bundle` finds the servers of a machine by these files: /proc shows them to the user of
the process and to root, and to no one else.  Nothing is on a disk, and nothing is left at the end.

The first line is an object with the settings in use.  They name files of keys and tokens, and hold
none.  At SIGUSR2 the stacks of all threads are written below it, by the handler of the signal
itself: also by a process whose event loop hangs.

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
import faulthandler
import gc
import json
import logging
import os
import signal
from typing import TYPE_CHECKING, TypeVar

from dlcore.base.config import MIB
from dlcore.base.errors import ConfigurationError
from dlcore.base.log_lines import escaped

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping

    from dlcore.base.log_lines import Process


NAME_PREFIX = "dlog "
"""How the names of these files begin; role and name of the process follow."""
STACKS_SIGNAL = signal.SIGUSR2
_NAME_BYTES_MAX = 200


def report_oneself(process: Process, settings: Mapping[str, object]) -> None:
    """Tell the settings of this process, and at `STACKS_SIGNAL` its stacks; only on Linux."""
    if not hasattr(os, "memfd_create"):
        return
    name = escaped(f"{NAME_PREFIX}{process.role} {process.name}").encode()
    file = os.memfd_create(name[:_NAME_BYTES_MAX].decode(errors="ignore"))
    os.fchmod(file, 0o600)
    report = {"role": process.role, "name": process.name, "settings": settings}
    os.write(file, json.dumps(report, default=str).encode() + b"\n")
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)


logger = logging.getLogger(__name__)

T = TypeVar("T")


async def next_configuration(
    hung_up: asyncio.Event, read: Callable[[], Awaitable[T]], known: T
) -> T:
    """Return the next configuration that differs from `known`.

    Args:
        hung_up: set by SIGHUP, when the configuration may have changed.
        read: returns the current configuration; its error is logged, and nothing changes.
        known: the configuration in use.
    """
    while True:
        await hung_up.wait()
        hung_up.clear()
        try:
            found = await read()
        except ConfigurationError as error:
            logger.error(  # noqa: TRY400  not ours
                "the configuration stays as it was: %s; to do: correct the setting, and send "
                "SIGHUP again",
                error,
            )
            continue
        logger.warning("the configuration was read again; to do: nothing")
        if found != known:
            return found
        logger.debug("the configuration is the same as before")


def tell_left(left: Mapping[str, object], kept: Mapping[str, object]) -> None:
    """Log the settings that a running program does not take over, and what it keeps of them."""
    for key, value in left.items():
        logger.warning(
            "%s=%s takes effect after a restart, until then %s; to do: restart the process when "
            "it suits",
            key,
            value,
            kept[key],
        )


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
