"""Opens a namespace by the scheme of its URI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.config import SESSION_TIMEOUT_S
from dlcore.base.errors import InvalidNamespaceUriError, UnsupportedError
from dlcore.base.extras import missing_packages_explained

if TYPE_CHECKING:
    from dlcore.api.namespace import Namespace
    from dlcore.backends.flight.bearer import Token
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.access.zookeeper import ZooKeeperAccess
    from dlcore.base.config import LedgerClientConfig, LogConfig


def is_endpoint(uri: str) -> bool:
    """Return whether the URI names proxies, ``grpc://…`` or ``grpc+tls://…``."""
    return uri.startswith(("grpc://", "grpc+tls://"))


async def open_namespace(
    uri: str,
    *,
    config: LogConfig | None = None,
    client_config: LedgerClientConfig | None = None,
    create: bool = False,
    client_id: str | None = None,
    tls: TlsFiles | None = None,
    zookeeper: ZooKeeperAccess | None = None,
    token: Token | None = None,
    capabilities: bool = False,
    encryption_keys: str | None = None,
    session_timeout_s: float = SESSION_TIMEOUT_S,
    connect_timeout_s: float = SESSION_TIMEOUT_S,
    patience_s: float | None = None,
) -> Namespace:
    """Open a namespace.

    Over a metadata store and bookies: ``distributedlog://zk1:2181,zk2:2181/path``.  Over proxies,
    without either: ``grpc://host:port,host:port``, or ``grpc+tls://…`` for encrypted connections.
    If a proxy does not answer, the client tries the others, and this one again.

    Args:
        uri: the servers of the metadata store, and the namespace's root path in it; or proxies.
        config: configuration of logs, unless `open_log` gets another one.  Over proxies only the
            fields of a blocking writer's buffer may be set.
        client_config: configuration of the client of bookies.  Not over proxies.
        create: create the namespace if it does not exist.  Not over proxies.
        client_id: this client's name in its locks; by default host and process.  Not over proxies.
        tls: certificates for connections to bookies, which are not encrypted without them; over
            proxies, the trusted authorities and the client's own certificate, without which the
            system's authorities are trusted.
        zookeeper: certificates and user for the metadata store.  Not over proxies.
        token: proves to proxies who calls: a signed token, or a function that returns the present
            one.  It is called on the event loop at the first call, shortly before the token
            expires, and when a proxy has refused it.  Only over proxies.
        capabilities: present capabilities to bookies, in place of a certificate; this client signs
            them with the cluster's key, which it must be allowed to read.  Not over proxies.
        encryption_keys: file with the keys that encrypt and decrypt records of encrypted logs, or
            ``command:…`` that prints them (docs/encryption.md).  Not over proxies, which have keys
            of their own.
        session_timeout_s: after this long without contact to the metadata store this client loses
            its locks.
        connect_timeout_s: how long to wait for the first connection to the metadata store.
        patience_s: how long a call waits for proxies in all, by default 60 s.  Only over proxies.

    Raises:
        InvalidNamespaceUriError: the URI does not parse.
        MetadataConnectionError: no answer from the metadata store.
        ConfigurationError: there is no namespace at that path, `tls` does not fit the endpoint, or
            there are no keys at `encryption_keys`.
        UnsupportedError: an argument is of the other kind of URI.
    """
    if not isinstance(uri, str):
        raise InvalidNamespaceUriError(f"{uri!r}: expected a URI as text")
    if is_endpoint(uri):
        given = {
            "client_config": client_config,
            "client_id": client_id,
            "create": create or None,
            "zookeeper": zookeeper,
            "capabilities": capabilities or None,
            "encryption_keys": encryption_keys,
        }
        for argument, value in given.items():
            if value is not None:
                raise UnsupportedError(
                    f"{uri}: {argument}={value!r} is for a namespace that is opened directly, as "
                    "distributedlog://…"
                )
        from dlcore.backends.flight import namespace as flight

        patience_s = flight.PATIENCE_S if patience_s is None else patience_s
        return await flight.open_namespace(
            uri, patience_s=patience_s, tls=tls, token=token, config=config
        )
    scheme, separator, _ = uri.partition("://")
    if separator and not scheme.lower().startswith("distributedlog"):
        raise InvalidNamespaceUriError(
            f"{uri!r}: expected distributedlog://host:port[,host:port]/path, or "
            "grpc://host:port[,host:port] of proxies"
        )
    if patience_s is not None:
        raise UnsupportedError(f"{uri}: patience_s={patience_s!r} is for proxies, at grpc://…")
    if token is not None:
        raise UnsupportedError(f"{uri}: a token is for proxies, at grpc://…")
    from dlcore.base.access.zookeeper import EVERYBODY

    with missing_packages_explained():
        from dlcore.backends.direct import namespace as direct  # loads kazoo

    return await direct.open_namespace(
        uri,
        config=config,
        client_config=client_config,
        create=create,
        client_id=client_id,
        tls=tls,
        zookeeper=zookeeper or EVERYBODY,
        capabilities=capabilities,
        encryption_keys=encryption_keys,
        session_timeout_s=session_timeout_s,
        connect_timeout_s=connect_timeout_s,
    )
