"""The metrics of a proxy, and its checks: the value that gRPC's health and the action share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.clock import steady_s
from dlcore.base.metrics import TopRates, counter, defined_in, gauge, histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.base.access.audit_file import AuditFile
    from dlcore.base.health import Check
    from dlcore.base.metrics import Sample
    from dlcore.proxy.health import Health
    from dlcore.proxy.membership import Membership
    from dlcore.proxy.reading.serving import ReadPath
    from dlcore.proxy.writing.admission import PutFigures
    from dlcore.proxy.writing.owner import LogOwner

OWNED = gauge("proxy_owned_logs", "Logs that this proxy owns")
ACQUIRED = counter("proxy_acquired_logs_total", "Logs acquired, again and again the same ones")
LOST = counter("proxy_lost_logs_total", "Logs whose writer failed, so that they were released")
HANDED_OVER = counter("proxy_handed_over_logs_total", "Logs handed over to proxies with less load")
LIVE = gauge("proxy_live_proxies", "Live proxies of the cluster, as this one sees them")
STREAMS = gauge("proxy_streams", "Streams of clients that write")
APPENDS = histogram(
    "proxy_append_seconds", "A batch of a stream, from its acceptance until it is durable"
)
RECORDS = counter("proxy_append_records_total", "New records accepted")
BYTES = counter("proxy_append_bytes_total", "Bytes of the messages with them")
REPEATED = counter(
    "proxy_duplicate_records_total", "Records that producers repeated, not written again"
)
FAILED = counter("proxy_failed_batches_total", "Accepted batches that failed")
THROTTLED = counter("proxy_throttled_seconds_total", "Time for which rates delayed batches")
DELIVERIES = histogram(
    "proxy_delivery_seconds",
    "A message to a follower, from the arrival of its records until it is sent",
)
SENT = counter("proxy_delivery_bytes_total", "Bytes of messages to readers")
CATCH_UPS = counter(
    "proxy_catch_up_messages_total", "Messages of older records, read from bookies for one reader"
)
KEPT = counter(
    "proxy_kept_messages_total", "Messages of older records, kept since another reader had them"
)
CATCHING_UP = gauge("proxy_catching_up_readers", "Readers of older records")
FOLLOWED = gauge("proxy_followed_logs", "Logs that are followed for readers")
RINGS = gauge("proxy_ring_bytes", "Bytes of the latest records that are kept for readers")
KEPT_BYTES = gauge("proxy_kept_bytes", "Bytes of older messages that are kept for readers")
SENDING = gauge("proxy_sending_bytes", "Bytes in transit to readers, with gRPC's copies")
AUDIT = gauge(
    "proxy_audit_failed", "Whether the last line of the audit log failed (1 or 0); only with one"
)
LOG_RATE = gauge(
    "proxy_log_bytes_per_second",
    "Bytes a second to a log since the last scrape, of the `http_logs_max` logs with most",
    "log",
)

METRICS = defined_in(globals())
"""The metrics of a proxy, in the order of the documentation."""


class ProxyMetrics:
    """Makes the samples of one proxy."""

    def __init__(
        self,
        owner: LogOwner,
        reads: ReadPath,
        figures: PutFigures,
        membership: Membership,
        handed_over: Callable[[], int],
        audit: AuditFile | None,
        *,
        logs_max: int,
    ) -> None:
        self._owner = owner
        self._reads = reads
        self._figures = figures
        self._membership = membership
        self._handed_over = handed_over
        self._audit = audit
        self._top = TopRates(logs_max)

    def samples(self) -> Iterator[Sample]:
        """Yield the present samples."""
        owner, figures, reads = self._owner, self._figures, self._reads
        yield OWNED.of(len(owner))
        yield ACQUIRED.of(owner.acquired_count)
        yield LOST.of(owner.lost_count)
        yield HANDED_OVER.of(self._handed_over())
        yield LIVE.of(len(self._membership.live))
        yield STREAMS.of(figures.streams)
        yield APPENDS.of(figures.append_times)
        yield RECORDS.of(figures.records)
        yield BYTES.of(figures.size_bytes)
        yield REPEATED.of(figures.repeated_records)
        yield FAILED.of(figures.failed_batches)
        yield THROTTLED.of(figures.throttled_s)
        yield DELIVERIES.of(reads.deliveries.times)
        yield SENT.of(reads.outgoing.sent_bytes)
        yield CATCH_UPS.of(reads.deliveries.catch_up_messages)
        yield KEPT.of(reads.deliveries.kept_messages)
        yield CATCHING_UP.of(reads.deliveries.catching_up)
        yield FOLLOWED.of(len(reads.followed))
        yield RINGS.of(reads.followed.budget.size_bytes)
        yield KEPT_BYTES.of(reads.followed.budget.older.size_bytes)
        yield SENDING.of(reads.outgoing.size_bytes)
        if self._audit is not None:
            yield AUDIT.of(self._audit.failure is not None)
        totals = {name: float(log.room.accepted_bytes) for name, log in owner.logs.items()}
        for name, rate in self._top.take(totals, now_s=steady_s()):
            yield LOG_RATE.of(rate, name)


def checks(membership: Membership, health: Health, audit: AuditFile | None) -> dict[str, Check]:
    """Return the checks of a proxy, by name."""

    def registered() -> str | None:
        is_live = membership.location in membership.live
        return None if is_live else f"{membership.location} is not among the live proxies"

    def takes_logs() -> str | None:
        return None if health.serves else "it starts, stops, or was drained"

    found: dict[str, Check] = {
        "metadata_store": lambda: membership.outages.reason,
        "registered": registered,
        "takes_logs": takes_logs,
    }
    if audit is not None:
        found["audit_log"] = lambda: audit.failure
    return found
