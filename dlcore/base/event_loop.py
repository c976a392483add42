"""The event loop of servers and of the blocking API: uvloop's, or else asyncio's.

uvloop is a package with compiled parts.  For a new Python or another system there may be no build
of it.  Then asyncio's own loop does the same with more CPU.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, the fastest available one."""
    try:
        import uvloop
    except ImportError as error:
        # A client of proxies does without it on purpose; servers are installed with it.
        is_left_out = isinstance(error, ModuleNotFoundError) and error.name == "uvloop"
        level = logging.INFO if is_left_out else logging.WARNING
        logger.log(
            level,
            "asyncio's event loop takes the place of uvloop's: %s; to do: install dlog with its "
            "extra `cluster`; the program is slower until then",
            error,
        )
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine on such a loop, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
