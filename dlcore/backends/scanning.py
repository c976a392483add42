"""Scans of planned ranges in any process: from bookies directly, or through proxies.

For a direct namespace the metadata store is read only after a failed read, to find the current
place of entries.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dlcore.backends.direct.namespace import DirectNamespace, open_namespace
from dlcore.backends.direct.scanning import scan_part
from dlcore.backends.opening import is_endpoint
from dlcore.base.access.capability import CarriedPurse
from dlcore.base.access.zookeeper import EVERYBODY
from dlcore.base.clock import SystemClock
from dlcore.base.config import LedgerClientConfig
from dlcore.base.errors import (
    BookieUnavailableError,
)
from dlcore.ledger.client import LedgerClient
from dlcore.log.cold.reading import ColdLedgers
from dlcore.log.reading.scan_driver import by_entry

if TYPE_CHECKING:
    from dlcore.backends.flight.bearer import Token
    from dlcore.backends.flight.namespace import FlightNamespace
    from dlcore.base.access.encryption_keys import EncryptionKeys
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.access.zookeeper import ZooKeeperAccess
    from dlcore.base.ids import BookieId
    from dlcore.log.context import LogContext
    from dlcore.log.reading.scan import ScanBatch, ScanRange
    from dlcore.log.reading.scan_run import ScanRun

_Closer = Callable[[], Coroutine[Any, Any, None]]


class LedgerClients:
    """Clients that read ledgers as plans describe them: without a metadata store.

    Args:
        config: of the clients of bookies.
        tls: certificates for new connections; None: no encryption.
        on_opened: gets what closes each connection that is opened.
    """

    def __init__(
        self,
        config: LedgerClientConfig,
        tls: TlsFiles | None,
        on_opened: Callable[[_Closer], None],
    ) -> None:
        self._config = config
        self._tls = tls
        self._on_opened = on_opened
        self._addresses: dict[BookieId, str] = {}
        self._purse = CarriedPurse()
        self._cold = ColdLedgers(config=config)
        # With and without capabilities: a range without them does not use those of another.
        self._clients: dict[tuple[str, bool], LedgerClient] = {}

    def clear(self) -> None:
        """Forget all clients, which are closed."""
        self._clients = {}

    def client_of(self, cluster_id: str, addresses: Mapping[BookieId, str]) -> LedgerClient:
        """Return a client that needs only ledger metadata; it uses the latest addresses."""
        return self._client_of(cluster_id, addresses, None)

    def carrying_client_of(
        self, cluster_id: str, addresses: Mapping[BookieId, str], capabilities: Sequence[bytes]
    ) -> LedgerClient:
        """Return one that presents these capabilities, and the last ones that others brought."""
        self._purse.learn(capabilities)
        return self._client_of(cluster_id, addresses, self._purse)

    def _client_of(
        self, cluster_id: str, addresses: Mapping[BookieId, str], purse: CarriedPurse | None
    ) -> LedgerClient:
        from dlcore.base.access.tls_in_use import TlsInUse
        from dlcore.wire.client import WireBookieClient

        self._addresses.update(addresses)
        key = (cluster_id, purse is None)
        client = self._clients.get(key)
        if client is None:
            clock = SystemClock()
            bookies = WireBookieClient(
                self._resolve,
                cluster_id=cluster_id,
                config=self._config,
                tls=TlsInUse.of(self._tls),
                purse=purse,
            )
            client = LedgerClient(
                ledger_store=None,
                registry=None,
                bookies=bookies,
                config=self._config,
                clock=clock,
                rng=random.Random(clock.new_token()),
                cold=self._cold,
            )
            self._clients[key] = client
            self._on_opened(client.aclose)
            self._on_opened(bookies.aclose)
        return client

    async def _resolve(self, bookie: BookieId) -> str:
        address = self._addresses.get(bookie)
        if address is None:
            raise BookieUnavailableError(
                f"bookie {bookie} was not registered when scans were planned"
            )
        return address


@dataclass(frozen=True, slots=True, kw_only=True)
class _Access:
    """Certificates, tokens and keys, with which scans open connections and read logs."""

    config: LedgerClientConfig
    tls: TlsFiles | None
    token: Token | None
    zookeeper: ZooKeeperAccess
    encryption_keys: str | None
    """Where the keys are; None: no log is encrypted."""

    async def open_direct(self, uri: str, *, signs: bool) -> DirectNamespace:
        return await open_namespace(
            uri,
            client_config=self.config,
            tls=self.tls,
            zookeeper=self.zookeeper,
            capabilities=signs,
        )

    async def open_proxies(self, endpoint: str) -> FlightNamespace:
        from dlcore.backends.flight.namespace import open_namespace as open_proxies

        return await open_proxies(endpoint, tls=self.tls, token=self.token)


class ScanClients:
    """Connections for scans, kept from one scan to the next; used on one event loop."""

    def __init__(
        self,
        config: LedgerClientConfig | None = None,
        *,
        tls: TlsFiles | None = None,
        token: Token | None = None,
        zookeeper: ZooKeeperAccess | None = None,
        encryption_keys: str | None = None,
    ) -> None:
        self._access = _Access(
            config=config or LedgerClientConfig(),
            tls=tls,
            token=token,
            zookeeper=zookeeper or EVERYBODY,
            encryption_keys=encryption_keys,
        )
        self._keys: EncryptionKeys | None = None
        self._namespaces: dict[tuple[str, bool], DirectNamespace] = {}
        self._endpoints: dict[str, FlightNamespace] = {}
        self._opening = asyncio.Lock()
        self._closers: list[_Closer] = []
        self.ledgers = LedgerClients(self._access.config, tls, self._closers.append)

    async def fresh_context(self, uri: str) -> LogContext:
        """Return the adapters of the namespace at `uri`, to read the current metadata."""
        return await self._context_of(uri, signs=False)

    async def signing_context(self, uri: str) -> LogContext:
        """Return those of a namespace that signs capabilities: none of a plan is for other ledgers.

        Only a client that may read the cluster's keys can open it.
        """
        return await self._context_of(uri, signs=True)

    async def _context_of(self, uri: str, *, signs: bool) -> LogContext:
        async with self._opening:  # many scans may fail at once
            namespace = self._namespaces.get((uri, signs))
            if namespace is None:
                namespace = await self._access.open_direct(uri, signs=signs)
                self._namespaces[uri, signs] = namespace
                self._closers.append(namespace.aclose)
            return namespace.log_context

    async def encryption_keys(self) -> EncryptionKeys | None:
        """Return the keys of encrypted logs, read at the first call; None if none were named."""
        where = self._access.encryption_keys
        if where is None:
            return None
        async with self._opening:
            if self._keys is None:
                from dlcore.base.access.encryption_keys import EncryptionKeys

                self._keys = await EncryptionKeys.open(where)
                self._closers.append(self._keys.aclose)
            return self._keys

    async def proxies(self, endpoint: str) -> FlightNamespace:
        """Return the namespace of the proxies at an endpoint."""
        namespace = self._endpoints.get(endpoint)
        if namespace is None:
            namespace = await self._access.open_proxies(endpoint)
            self._endpoints[endpoint] = namespace
            self._closers.append(namespace.aclose)
        return namespace

    async def aclose(self) -> None:
        """Close every connection."""
        closers = list(self._closers)
        self._closers.clear()
        self.ledgers.clear()
        self._namespaces, self._endpoints = {}, {}
        self._keys = None
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
    token: Token | None = None,
    zookeeper: ZooKeeperAccess | None = None,
    encryption_keys: str | None = None,
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
        token: proves to proxies who calls, as for `open_namespace`.
        zookeeper: certificates and user for the metadata store.
        encryption_keys: the keys of encrypted logs, as for `open_namespace`.

    Raises:
        EncryptionKeyError: a log is encrypted, and its key is not among these.
        LedgerReadError: no replica of an entry is readable.
        AlreadyTruncatedError: records of the range were truncated, or the log was deleted, since
            the scan was planned.  Detected only with `uri`.
    """
    own = clients is None
    clients = clients or ScanClients(
        config, tls=tls, token=token, zookeeper=zookeeper, encryption_keys=encryption_keys
    )
    try:
        async with aclosing(by_entry(scan_runs(scans, uri=uri, clients=clients))) as batches:
            async for batch in batches:
                yield batch
    finally:
        if own:
            await clients.aclose()


async def scan_runs(
    scans: Sequence[ScanRange], *, uri: str | None, clients: ScanClients
) -> AsyncGenerator[ScanRun, None]:
    """Yield the records of `scans`, in order, many entries at a time.  Raises: as `scan`."""
    for part in scans:
        if uri is not None and is_endpoint(uri):
            scanning = (await clients.proxies(uri))._scan_runs(part)
        else:
            scanning = _scan_bookies(part, uri, clients, await clients.encryption_keys())
        async with aclosing(scanning) as runs:
            async for run in runs:
                yield run


def _scan_bookies(
    part: ScanRange, uri: str | None, clients: ScanClients, keys: EncryptionKeys | None
) -> AsyncGenerator[ScanRun, None]:
    place = part.cluster_id, part.addresses
    if part.capabilities:
        ledgers = clients.ledgers.carrying_client_of(*place, part.capabilities)
        context_of = clients.signing_context
    else:
        ledgers, context_of = clients.ledgers.client_of(*place), clients.fresh_context
    return scan_part(part, ledgers, None if uri is None else partial(context_of, uri), keys)
