"""The client of kazoo: its connections, its user, for whom its nodes are, and its log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kazoo.client import KazooClient
from kazoo.protocol.serialization import Auth
from kazoo.retry import KazooRetry
from kazoo.security import make_digest_acl

from dlcore.metadata.answers import ConnectionHandler

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.base.access.zookeeper import ZooKeeperAccess


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


_RECONNECT_DELAY_MAX_S = 1.0
"""kazoo's own default grows to an hour."""


def client_of(
    servers: str,
    access: ZooKeeperAccess,
    log: KazooLog,
    *,
    session_timeout_s: float,
) -> Any:
    """Return a client that has not connected yet.

    Raises:
        ConfigurationError: a file of `access` cannot be read, or has wrong content.
    """
    tls = None
    if access.tls is not None:
        from dlcore.base.access.tls_in_use import TlsInUse  # not needed without TLS

        tls = TlsInUse(access.tls)
    handler, credentials = ConnectionHandler(tls), access.credentials()
    known: dict[str, Any] = {}
    if credentials is not None:
        # Not the ACL of all authenticated clients: the name in a client certificate would count,
        # too, and differs from process to process.
        user, _, password = credentials.secret.partition(":")
        known["auth_data"] = [("digest", credentials.secret)]
        known["default_acl"] = [make_digest_acl(user, password, all=True)]
    return KazooClient(
        hosts=servers,
        timeout=session_timeout_s,
        handler=handler,
        connection_retry=KazooRetry(
            max_tries=-1, max_delay=_RECONNECT_DELAY_MAX_S, sleep_func=handler.sleep_func
        ),
        logger=log,
        **known,
    )
