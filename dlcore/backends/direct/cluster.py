"""The bookies and ledgers of a namespace, and this client's work with them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dlcore.api.cluster import ClusterView
from dlcore.backends.direct.metrics import METRICS, samples
from dlcore.backends.direct.opened_namespace import DirectOpenedNamespace
from dlcore.base.statistics import NamespaceStatistics
from dlcore.log.reading.rows_reader import AsyncLogReader
from dlcore.log.writing.records_writer import AsyncLogWriter
from dlcore.metadata.port import SessionState

if TYPE_CHECKING:
    from dlcore.ledger.metadata.store import ReadLedgers
    from dlcore.ledger.metadata.values import BookieRegistration, LedgerMetadata


class DirectClusterView(DirectOpenedNamespace, ClusterView):
    """The cluster of one namespace."""

    @override
    def get_statistics(self) -> NamespaceStatistics:
        self._require_open()
        context, written = self.log_context, self.ports.ledgers.writers.statistics()
        # A copy: a collector may ask in another thread.
        kinds = Counter(_public_name(each) for each in list(context.open_objects))
        return NamespaceStatistics(
            entries_written=written.entries,
            bytes_written=written.size_bytes,
            entries_read=context.reads.entries,
            bytes_read=context.reads.size_bytes,
            sessions_lost=self.ports.store.figures.sessions_lost,
            is_connected=self.ports.store.session_state is SessionState.CONNECTED,
            open_ledgers=written.open_ledgers,
            pending_bytes=written.pending_bytes,
            open_objects=dict(kinds),
            followed_logs=len(self.followers),
        )

    @override
    def get_collector(self) -> Any:
        from dlcore.base.metrics import SampleCollector

        self._require_open()
        return SampleCollector(METRICS, partial(samples, self.log_context, self.get_statistics))

    @override
    async def get_bookies(self) -> list[BookieRegistration]:
        self._require_open()
        return await self.ports.registry.get_bookies()

    @override
    async def get_ledger(self, ledger_id: int) -> LedgerMetadata:
        self._require_open()
        return (await self.log_context.ledger_store.read(ledger_id)).metadata

    @override
    async def list_ledgers(self, *, first: int = 0, count: int = 1000) -> ReadLedgers:
        self._require_open()
        return await self.log_context.ledger_store.read_from(first, count)


def _public_name(opened: object) -> str:
    """Return the name of the class that users know, which may be a base."""
    known = (base for base in (AsyncLogReader, AsyncLogWriter) if isinstance(opened, base))
    return next(known, type(opened)).__name__
