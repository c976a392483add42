"""Scans of planned ranges in any process: from bookies directly, or through proxies.

For a direct namespace the metadata store is read only after a failed read, to find the current
place of entries.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from dlcore.backends.direct.namespace import DirectNamespace, open_namespace
from dlcore.backends.direct.scanning import scan_part
from dlcore.backends.opening import is_endpoint
from dlcore.base.clock import SystemClock
from dlcore.base.config import LedgerClientConfig
from dlcore.base.errors import (
    BookieUnavailableError,
)
from dlcore.ledger.client import LedgerClient

if TYPE_CHECKING:
    from dlcore.backends.flight.namespace import FlightNamespace
    from dlcore.base.ids import BookieId
    from dlcore.base.tls import TlsFiles
    from dlcore.log.context import LogContext
    from dlcore.log.reading.scan import ScanBatch, ScanRange

_Closer = Callable[[], Coroutine[Any, Any, None]]


class ScanClients:
    """Connections for scans, kept from one scan to the next; used on one event loop."""

    def __init__(
        self, config: LedgerClientConfig | None = None, *, tls: TlsFiles | None = None
    ) -> None:
        self._config = config or LedgerClientConfig()
        self._tls = tls
        self._addresses: dict[BookieId, str] = {}
        self._clients: dict[str, LedgerClient] = {}
        self._namespaces: dict[str, DirectNamespace] = {}
        self._endpoints: dict[str, FlightNamespace] = {}
        self._opening = asyncio.Lock()
        self._closers: list[_Closer] = []

    def client_of(self, cluster_id: str, addresses: Mapping[BookieId, str]) -> LedgerClient:
        """Return a client that needs only ledger metadata; it uses the latest addresses."""
        from dlcore.transport.client import WireBookieClient

        self._addresses.update(addresses)
        client = self._clients.get(cluster_id)
        if client is None:
            clock = SystemClock()
            bookies = WireBookieClient(
                self._resolve, cluster_id=cluster_id, config=self._config, tls=self._tls
            )
            client = LedgerClient(
                ledger_store=None,
                registry=None,
                bookies=bookies,
                config=self._config,
                clock=clock,
                rng=random.Random(clock.new_token()),
            )
            self._clients[cluster_id] = client
            self._closers += [client.aclose, bookies.aclose]
        return client

    async def _resolve(self, bookie: BookieId) -> str:
        address = self._addresses.get(bookie)
        if address is None:
            raise BookieUnavailableError(
                f"bookie {bookie} was not registered when scans were planned"
            )
        return address

    async def fresh_context(self, uri: str) -> LogContext:
        """Return the adapters of the namespace at `uri`, to read the current metadata."""
        async with self._opening:  # many scans may fail at once
            namespace = self._namespaces.get(uri)
            if namespace is None:
                namespace = await open_namespace(uri, client_config=self._config, tls=self._tls)
                self._namespaces[uri] = namespace
                self._closers.append(namespace.aclose)
            return namespace.log_context

    async def proxies(self, endpoint: str) -> FlightNamespace:
        """Return the namespace of the proxies at an endpoint."""
        namespace = self._endpoints.get(endpoint)
        if namespace is None:
            from dlcore.backends.flight.namespace import open_namespace as open_proxies

            namespace = self._endpoints[endpoint] = await open_proxies(endpoint, tls=self._tls)
            self._closers.append(namespace.aclose)
        return namespace

    async def aclose(self) -> None:
        """Close every connection."""
        closers, self._closers = self._closers, []
        self._clients, self._namespaces, self._endpoints = {}, {}, {}
        async with AsyncExitStack() as steps:  # even if one of them fails
            for closer in reversed(closers):
                steps.push_async_callback(closer)


async def scan(
    scans: Sequence[ScanRange],
    *,
    uri: str | None = None,
    config: LedgerClientConfig | None = None,
    clients: ScanClients | None = None,
    tls: TlsFiles | None = None,
) -> AsyncGenerator[ScanBatch, None]:
    """Yield the records of `scans`, in order, one `ScanBatch` per entry.

    Args:
        scans: ranges of a snapshot.
        uri: proxies that read the ranges, ``grpc://…``; or the namespace of the bookies.  That one
            is opened only after a failed read, to find the current ensembles and addresses, and
            without it such a failure is final.
        config: configuration of the client of bookies.
        clients: connections to use, which stay open; by default new ones, closed at the end.
        tls: certificates for new connections; None: no encryption.

    Raises:
        LedgerReadError: no replica of an entry is readable.
        AlreadyTruncatedError: records of the range were truncated, or the log was deleted, since
            the scan was planned.  Detected only with `uri`.
    """
    own = clients is None
    clients = clients or ScanClients(config, tls=tls)
    try:
        for part in scans:
            if uri is not None and is_endpoint(uri):
                scanning = (await clients.proxies(uri)).scan(part)
            else:
                scanning = _scan_bookies(part, uri, clients)
            async with aclosing(scanning) as batches:
                async for batch in batches:
                    yield batch
    finally:
        if own:
            await clients.aclose()


def _scan_bookies(
    part: ScanRange, uri: str | None, clients: ScanClients
) -> AsyncGenerator[ScanBatch, None]:
    ledgers = clients.client_of(part.cluster_id, part.addresses)
    if uri is None:
        return scan_part(part, ledgers, None)
    return scan_part(part, ledgers, partial(clients.fresh_context, uri))
