"""The client of kazoo: its connections, its user, and for whom the nodes are that it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kazoo.client import KazooClient
from kazoo.retry import KazooRetry
from kazoo.security import make_digest_acl

from dlcore.metadata.answers import ConnectionHandler

if TYPE_CHECKING:
    from dlcore.base.access.zookeeper import ZooKeeperAccess
    from dlcore.metadata.kazoo_log import KazooLog

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
