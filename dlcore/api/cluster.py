"""A namespace's cluster, as one of its clients sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlcore.api.opened_namespace import OpenedNamespace

if TYPE_CHECKING:
    from dlcore.base.statistics import NamespaceStatistics
    from dlcore.ledger.metadata.store import ReadLedgers
    from dlcore.ledger.metadata.values import BookieRegistration, LedgerMetadata


class ClusterView(OpenedNamespace):
    """The bookies and ledgers below all logs, and this client's work with them.

    Only a client that reaches the bookies itself sees them: over proxies each call raises
    UnsupportedError.
    """

    def get_statistics(self) -> NamespaceStatistics:
        """Return counts of this client's work so far, and its open objects.

        Raises: UnsupportedError over proxies.
        """
        self._unsupported("get_statistics")

    def get_collector(self) -> Any:
        """Return the metrics of this client, for a registry of `prometheus_client`.

        The registry asks it at each scrape, in any thread; a closed namespace has no samples.

        Raises: UnsupportedError over proxies, which have metrics themselves.
        """
        self._unsupported("get_collector")

    async def get_bookies(self) -> list[BookieRegistration]:
        """Return the bookies that are registered now.

        Raises: MetadataError; UnsupportedError over proxies.
        """
        self._unsupported("get_bookies")

    async def get_ledger(self, ledger_id: int) -> LedgerMetadata:
        """Return the metadata of a ledger.

        Raises: LedgerNotFoundError, MetadataError; UnsupportedError over proxies.
        """
        self._unsupported("get_ledger")

    async def list_ledgers(self, *, first: int = 0, count: int = 1000) -> ReadLedgers:
        """Return the metadata of up to `count` ledgers by id, ascending from `first` on.

        A damaged ledger has its error instead, so that it does not hide the others.

        Raises: MetadataError; UnsupportedError over proxies.
        """
        self._unsupported("list_ledgers")
