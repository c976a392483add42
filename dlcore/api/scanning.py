"""Scans of planned ranges in any process: entries are read from bookies directly.

The metadata store is read only after a failed read, to find the current place of entries.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dlcore.api.namespace import Namespace, open_namespace
from dlcore.base.clock import SystemClock
from dlcore.base.config import LedgerClientConfig
from dlcore.base.errors import (
    AlreadyTruncatedError,
    BookieError,
    BookieUnavailableError,
    DLError,
    LedgerNotFoundError,
    LedgerReadError,
    LogNotFoundError,
)
from dlcore.ledger.client import LedgerClient
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.scan_driver import scan_range
from dlcore.log.reading.snapshot import LogFollower

if TYPE_CHECKING:
    from dlcore.base.ids import BookieId
    from dlcore.base.tls import TlsFiles
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
        self._namespaces: dict[str, Namespace] = {}
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

    async def fresh_namespace(self, uri: str) -> Namespace:
        """Return the namespace at `uri`, to read the current metadata."""
        async with self._opening:  # many scans may fail at once
            namespace = self._namespaces.get(uri)
            if namespace is None:
                namespace = await open_namespace(uri, client_config=self._config, tls=self._tls)
                self._namespaces[uri] = namespace
                self._closers.append(namespace.aclose)
            return namespace

    async def aclose(self) -> None:
        """Close every connection."""
        closers, self._closers = self._closers, []
        self._clients, self._namespaces = {}, {}
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
        uri: the namespace; it is opened only after a failed read, to find the current ensembles and
            addresses.  Without it such a failure is final.
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
            async with aclosing(_scan_one(part, uri, clients)) as batches:
                async for batch in batches:
                    yield batch
    finally:
        if own:
            await clients.aclose()


async def _scan_one(
    part: ScanRange, uri: str | None, clients: ScanClients
) -> AsyncGenerator[ScanBatch, None]:
    ledgers = clients.client_of(part.cluster_id, part.addresses)
    planned: ScanRange | None = None  # the new plan after a failure
    while True:
        rest = planned or part
        last_entry_id: int | None = None
        try:
            async with aclosing(scan_range(rest, ledgers)) as batches:
                async for batch in batches:
                    yield batch
                    last_entry_id = batch.entry_id
        except (LedgerNotFoundError, LedgerReadError, BookieError) as error:
            left = rest if last_entry_id is None else rest.after_entry(last_entry_id)
            if left is None:
                return
            if uri is None:
                raise
            namespace = await clients.fresh_namespace(uri)
            again = await _plan_again(left, namespace, error)
            if planned is not None and again.extents == left.extents:
                raise  # a read with the current metadata has failed already
            planned, ledgers = again, namespace.ledgers
        else:
            return


async def _plan_again(part: ScanRange, namespace: Namespace, error: DLError) -> ScanRange:
    """Plan a range again with the current metadata: other bookies, or the ledger of a merge."""
    log = LogKey(name=part.log, log_id=part.log_id)  # it may have another name now
    with contextlib.suppress(LogNotFoundError):
        snapshot = await LogFollower(namespace.log_context, log).take()
        scans = snapshot.scans(part.start, part.end)
        if len(scans) == 1 and scans[0].start == part.start:
            return replace(scans[0], columns=part.columns)
    raise AlreadyTruncatedError(
        f"log {part.log!r}: records of the range {part.start} to {part.end} were truncated "
        f"or deleted while it was read: {error}"
    ) from error
