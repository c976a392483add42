"""The log for kazoo: its errors before the first session are noted, not shown."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kazoo.protocol.serialization import Auth

if TYPE_CHECKING:
    from collections.abc import Callable


class KazooLog(logging.LoggerAdapter[logging.Logger]):
    """The log of one client of kazoo.

    If another service listens at the port, kazoo tries again and again, and logs each attempt with
    a traceback of its own code.  Until there is a session, these messages go to the debug level.
    """

    def __init__(self, has_session: Callable[[], bool]) -> None:
        logger = logging.getLogger(__name__)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)  # the store reports what matters, once
        super().__init__(logger, {})
        self._has_session = has_session
        self._has_failed = False

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log the message, at the debug level if it is about an attempt to connect."""
        if any(isinstance(each, Auth) for each in args):
            return  # it has the password
        if level >= logging.ERROR and not self._has_session():
            self._has_failed = True
            level = logging.DEBUG
        super().log(level, msg, *args, **kwargs)

    def explain(self, *, tls: str = "") -> str:
        """Return a hint if an attempt failed because another service answered, else nothing.

        With `tls`, the reason for which TLS failed, that is the hint.
        """
        if tls:
            return f"; {tls}"
        if not self._has_failed:
            return ""
        return "; what answers there is not ZooKeeper: is it the port of a bookie or a proxy?"
