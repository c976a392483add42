"""Scans of the blocking API: batches are fetched on the portal while the caller uses others."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from dlcore.base.background import BackgroundTasks, all_of
from dlcore.base.config import LedgerClientConfig
from dlcore.sync.portal import Portal, close_at_exit, shared_portal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from dlcore.backends.flight.bearer import Token
    from dlcore.backends.scanning import ScanClients
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.access.zookeeper import ZooKeeperAccess
    from dlcore.log.reading.scan import ScanBatch, ScanRange
    from dlcore.log.reading.scan_run import ScanRun

CLIENTS_MAX = 8
"""Kept clients, beside those that scans use."""
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
    # Imported here, and not on the event loop, which the import would hold up.
    from dlcore.backends.scanning import ScanClients

    config = config or LedgerClientConfig()

    def open_clients() -> ScanClients:
        return ScanClients(
            config, tls=tls, token=token, zookeeper=zookeeper, encryption_keys=encryption_keys
        )

    access = (config, tls, token, zookeeper, encryption_keys)
    return _Prefetched(shared_portal(), list(scans), uri, access, open_clients)


_Access: TypeAlias = (
    "tuple[LedgerClientConfig, TlsFiles | None, Token | None, ZooKeeperAccess | None, str | None]"
)


@dataclass(eq=False, slots=True)
class _Kept:
    clients: ScanClients
    scans: int = 0


class SharedScanClients:
    """Connections that the scans of a process share, so that a scan need not open them.

    All calls are made on the event loop of one portal.  A program that renews its token has other
    connections with each token: those of which no scan is left are closed if they are many.
    """

    def __init__(self, portal: Portal) -> None:
        self.portal = portal
        self._kept: dict[_Access, _Kept] = {}  # the last used ones are the last
        self._closing = BackgroundTasks()
        close_at_exit(self, self._aclose)

    def __len__(self) -> int:
        return len(self._kept)

    @contextlib.contextmanager
    def of(self, access: _Access, open_clients: Callable[[], ScanClients]) -> Iterator[ScanClients]:
        """Give a scan its clients; they stay open until it ends."""
        kept = self._kept.pop(access, None)
        if kept is None:
            kept = _Kept(open_clients())
        self._kept[access] = kept
        kept.scans += 1
        try:
            yield kept.clients
        finally:
            kept.scans -= 1
            self._close_unused()

    def _close_unused(self) -> None:
        unused = [access for access, kept in self._kept.items() if not kept.scans]
        for access in unused[: max(0, len(self._kept) - CLIENTS_MAX)]:
            clients = self._kept.pop(access).clients
            # A task, because the scan that ends now shall not wait, nor fail, for others.
            self._closing.start(clients.aclose(), name="closing the connections of scans")

    async def _aclose(self) -> None:
        kept, self._kept = self._kept, {}
        await self._closing.finish()
        await all_of(*(each.clients.aclose() for each in kept.values()))


_shared: SharedScanClients | None = None


def shared_clients(portal: Portal) -> SharedScanClients:
    """Return the clients that the scans on this portal share; called on its event loop."""
    global _shared
    if _shared is None or _shared.portal is not portal:
        _shared = SharedScanClients(portal)
    return _shared


class _Prefetched:
    """Batches that the portal fetches ahead; only the caller refers to it, so it can be freed."""

    def __init__(
        self,
        portal: Portal,
        scans: list[ScanRange],
        uri: str | None,
        access: _Access,
        open_clients: Callable[[], ScanClients],
    ) -> None:
        self._portal = portal
        self._prefetch = _Prefetch()
        self._finished = False

        def use_clients() -> AbstractContextManager[ScanClients]:
            return shared_clients(portal).of(access, open_clients)

        self._task = portal.submit(self._prefetch.fetch(scans, uri, use_clients))

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

    async def fetch(
        self,
        scans: list[ScanRange],
        uri: str | None,
        use_clients: Callable[[], AbstractContextManager[ScanClients]],
    ) -> None:
        """Fetch all batches; the last item is an error, or None at the end."""
        from dlcore.backends.scanning import scan_runs as scan_async

        try:
            async with contextlib.AsyncExitStack() as steps:
                clients = steps.enter_context(use_clients())
                runs = scan_async(scans, uri=uri, clients=clients)
                await steps.enter_async_context(contextlib.aclosing(runs))
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
