"""Scans of the blocking API: batches are fetched on the portal while the caller uses others."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from typing import TYPE_CHECKING, TypeAlias

from dlcore.base.config import LedgerClientConfig
from dlcore.sync.portal import Portal, close_at_exit, shared_portal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.backends.flight.bearer import Token
    from dlcore.backends.scanning import ScanClients
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.access.zookeeper import ZooKeeperAccess
    from dlcore.log.reading.scan import ScanBatch, ScanRange
    from dlcore.log.reading.scan_run import ScanRun

_PREFETCH_BYTES_MAX = 16 * 1024 * 1024
"""About how many bytes `scan` fetches ahead of its caller, once that has taken as much."""


def scan(
    scans: Sequence[ScanRange],
    *,
    uri: str | None = None,
    config: LedgerClientConfig | None = None,
    tls: TlsFiles | None = None,
    token: Token | None = None,
    zookeeper: ZooKeeperAccess | None = None,
    encryption_keys: str | None = None,
) -> Iterator[ScanBatch]:
    """Yield the records of `scans`, in order, one `ScanBatch` per entry, fetching ahead.

    Bookies are read directly.  The metadata store at `uri` is contacted only after a read failed,
    to find the current ensembles and addresses.  `tls`, `token`, `zookeeper` and
    `encryption_keys` are as for `open_namespace`.

    Raises:
        LedgerReadError: no replica of an entry is readable.
        AlreadyTruncatedError: records were truncated or deleted since the scan was planned;
            detected only with `uri`.
    """
    runs = scan_runs(
        scans,
        uri=uri,
        config=config,
        tls=tls,
        token=token,
        zookeeper=zookeeper,
        encryption_keys=encryption_keys,
    )
    return (entry for run in runs for entry in run.entries())


def scan_runs(
    scans: Sequence[ScanRange],
    *,
    uri: str | None = None,
    config: LedgerClientConfig | None = None,
    tls: TlsFiles | None = None,
    token: Token | None = None,
    zookeeper: ZooKeeperAccess | None = None,
    encryption_keys: str | None = None,
) -> Iterator[ScanRun]:
    """Yield the records of `scans`, in order, many entries at a time; otherwise as `scan`."""
    portal = shared_portal()
    config = config or LedgerClientConfig()
    clients = _scan_clients(portal, (config, tls, token, zookeeper, encryption_keys))
    return _Prefetched(portal, list(scans), uri, clients)


class _SharedScanClients:
    """Connections that all scans of the process share, so that a scan need not open them."""

    def __init__(self, portal: Portal, clients: ScanClients) -> None:
        self.portal = portal
        self.clients = clients
        close_at_exit(self, clients.aclose)


_Arguments: TypeAlias = (
    "tuple[LedgerClientConfig, TlsFiles | None, Token | None, ZooKeeperAccess | None, str | None]"
)
_shared_clients: dict[_Arguments, _SharedScanClients] = {}


def _scan_clients(portal: Portal, key: _Arguments) -> ScanClients:
    from dlcore.backends.scanning import ScanClients

    shared = _shared_clients.get(key)
    if shared is None or shared.portal is not portal:
        config, tls, token, zookeeper, encryption_keys = key
        clients = ScanClients(
            config, tls=tls, token=token, zookeeper=zookeeper, encryption_keys=encryption_keys
        )
        shared = _SharedScanClients(portal, clients)
        _shared_clients[key] = shared
    return shared.clients


class _Prefetched:
    """Batches that the portal fetches ahead; only the caller refers to it, so it can be freed."""

    def __init__(
        self, portal: Portal, scans: list[ScanRange], uri: str | None, clients: ScanClients
    ) -> None:
        self._portal = portal
        self._prefetch = _Prefetch()
        self._finished = False
        self._task = portal.submit(self._prefetch.fetch(scans, uri, clients))

    def __iter__(self) -> Iterator[ScanRun]:
        return self

    def __next__(self) -> ScanRun:
        if self._finished:
            raise StopIteration
        prefetch = self._prefetch
        item, size_bytes = prefetch.items.get()
        if item is None:
            self._finished = True
            raise StopIteration
        if isinstance(item, BaseException):
            self._finished = True
            raise item
        self._portal.post(lambda: prefetch.taken(size_bytes))
        return item

    def close(self) -> None:
        """Stop fetching."""
        self._finished = True
        self._task.cancel()

    def __del__(self) -> None:
        if not self._finished and self._portal.is_usable:
            self._task.cancel()


class _Prefetch:
    """The queue from the portal to the caller's thread.

    It fetches ahead by only as much as the caller has taken so far, because it cannot know whether
    the caller wants a few records or all.
    """

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[tuple[ScanRun | BaseException | None, int]] = (
            queue.SimpleQueue()
        )
        self._room = asyncio.Event()
        self._ahead_bytes = 0
        self._ahead_bytes_max = 0

    async def fetch(self, scans: list[ScanRange], uri: str | None, clients: ScanClients) -> None:
        """Fetch all batches; the last item is an error, or None at the end."""
        from dlcore.backends.scanning import scan_runs as scan_async

        try:
            async with contextlib.aclosing(scan_async(scans, uri=uri, clients=clients)) as runs:
                async for run in runs:
                    size_bytes = run.batch.nbytes
                    self._ahead_bytes += size_bytes
                    self.items.put((run, size_bytes))
                    # After the put: a run larger than the bound must get through as well.
                    while self._ahead_bytes > self._ahead_bytes_max:
                        self._room.clear()
                        await self._room.wait()
        except Exception as error:  # noqa: BLE001  # raised in the caller's thread
            self.items.put((error, 0))
        else:
            self.items.put((None, 0))

    def taken(self, size_bytes: int) -> None:
        """Note that the caller has taken a batch, so that more can be fetched."""
        self._ahead_bytes -= size_bytes
        more = self._ahead_bytes_max + size_bytes
        self._ahead_bytes_max = min(more, _PREFETCH_BYTES_MAX)
        self._room.set()
