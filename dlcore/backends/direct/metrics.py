"""The metrics of a client of a namespace; servers that have one show the same."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dlcore.base.metrics import counter, defined_in, gauge, histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.base.metrics import Sample
    from dlcore.base.statistics import NamespaceStatistics
    from dlcore.log.context import LogContext

APPENDS = histogram(
    "client_append_seconds",
    "An entry, from the call until it and all before it are acknowledged by bookies",
)
RECOVERIES = histogram(
    "client_recovery_seconds",
    "A recovery of a ledger that another client left open, from the first read of its metadata "
    "until its end is stored",
)
ENTRIES_WRITTEN = counter("client_entries_written_total", "Acknowledged entries")
BYTES_WRITTEN = counter("client_written_bytes_total", "Bytes of their bodies, before replication")
ENTRIES_READ = counter("client_entries_read_total", "Entries that readers received")
BYTES_READ = counter("client_read_bytes_total", "Bytes of these entries")
OPEN_LEDGERS = gauge("client_open_ledgers", "Ledgers that are being written")
PENDING = gauge("client_pending_bytes", "Bytes of entries that some bookie has not answered yet")
OPEN_OBJECTS = gauge("client_open_objects", "Writers, readers and watches not closed", "class")
FOLLOWED = gauge("client_followed_logs", "Logs whose last snapshot is kept")
CONNECTED = gauge("client_metadata_connected", "Whether the metadata store answers (1 or 0)")
SESSIONS_LOST = counter(
    "client_metadata_session_expirations_total", "Sessions with the metadata store that were lost"
)

METRICS = defined_in(globals())
"""The metrics of a client, in the order of the documentation."""


def samples(
    context: LogContext, get_statistics: Callable[[], NamespaceStatistics]
) -> Iterator[Sample]:
    """Yield the present samples of one client; none once its namespace is closed."""
    if context.lifetime.has_ended:
        return
    found = get_statistics()
    appends, recoveries = context.ledgers.durations
    yield APPENDS.of(appends)
    yield RECOVERIES.of(recoveries)
    yield ENTRIES_WRITTEN.of(found.entries_written)
    yield BYTES_WRITTEN.of(found.bytes_written)
    yield ENTRIES_READ.of(found.entries_read)
    yield BYTES_READ.of(found.bytes_read)
    yield OPEN_LEDGERS.of(found.open_ledgers)
    yield PENDING.of(found.pending_bytes)
    for kind, count in sorted(Counter(found.open_objects).items()):
        yield OPEN_OBJECTS.of(count, kind)
    yield FOLLOWED.of(found.followed_logs)
    yield CONNECTED.of(found.is_connected)
    yield SESSIONS_LOST.of(found.sessions_lost)
