"""The log that kazoo writes: without a session its errors are noted, not shown."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class KazooLog(logging.LoggerAdapter[logging.Logger]):
    """The log that one client of kazoo is given.

    kazoo tries a port that is another service's again and again, and tells of each attempt with a
    traceback of its own code.  Until a session is there that goes to the debug level.
    """

    def __init__(self, has_session: Callable[[], bool]) -> None:
        logger = logging.getLogger(__name__)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)  # what matters is reported by the store, once
        super().__init__(logger, {})
        self._has_session = has_session
        self._has_failed = False

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log it, unless it is of an attempt to connect."""
        if level >= logging.ERROR and not self._has_session():
            self._has_failed = True
            level = logging.DEBUG
        super().log(level, msg, *args, **kwargs)

    def explain(self) -> str:
        """Return what an error says of an attempt that failed for more than silence, or nothing."""
        if not self._has_failed:
            return ""
        return "; what answers there is not ZooKeeper: is it the port of a bookie or a proxy?"
