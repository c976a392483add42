"""The metrics of a bookie, its checks, and its trial: a write and a read on its own disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie.storage.status import StorageState
from dlcore.base.metrics import counter, defined_in, gauge, histogram

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from bookie.ledger_storage import LedgerStorage
    from bookie.serving.reads_in_progress import ReadBudget
    from dlcore.base.health import Check
    from dlcore.base.metrics import Sample

WRITABLE = gauge("bookie_writable", "Whether ordinary adds are accepted (1 or 0)")
FAILED = gauge("bookie_failed", "Whether a write failed, so that nothing is accepted (1 or 0)")
ADDS = histogram(
    "bookie_add_seconds",
    "Time of each group of adds, from the first acceptance until all are durable",
)
SYNCS = histogram("bookie_sync_seconds", "A write of a batch to the disk, with its sync")
ADDED = counter("bookie_added_bytes_total", "Bytes of records made durable since the start")
PENDING = gauge("bookie_pending_add_bytes", "Bytes accepted and not durable")
OVERLOADED = counter(
    "bookie_overloaded_total", "Adds refused because too many bytes were in flight"
)
FULL = counter("bookie_disk_full_total", "Adds refused for want of space on the disk")
FREE = gauge("bookie_disk_free_bytes", "Bytes that the bookie may still write")
SIZE = gauge("bookie_disk_size_bytes", "Size of the file system of the data folder")
STORED = gauge("bookie_stored_bytes", "Bytes of entries and their indexes on the disk")
LEDGERS = gauge("bookie_ledgers", "Ledgers with entries here")
DAMAGED = gauge("bookie_damaged_entries", "Entries known to be damaged and not repaired yet")
REPAIRED = counter("bookie_repaired_entries_total", "Damaged entries repaired since the start")
SCRUB_AGE = gauge(
    "bookie_scrub_age_seconds", "Seconds since the last pass of scrubbing, or since the start"
)
FREED = counter("bookie_freed_bytes_total", "Bytes freed by garbage collection and compaction")
READ = counter("bookie_read_bytes_total", "Bytes of entries sent to readers since the start")
FOLLOWERS = gauge("bookie_followers", "Readers that wait for new entries")
CONNECTIONS = gauge("bookie_connections", "Connections of clients")

METRICS = defined_in(globals())
"""The metrics of a bookie, in the order of the documentation."""


def samples(
    storage: LedgerStorage, connections: Collection[object], reads: ReadBudget
) -> Iterator[Sample]:
    """Yield the present samples."""
    stats, commits = storage.status.stats(), storage.core.log.commits
    yield WRITABLE.of(storage.status.state is StorageState.WRITABLE)
    yield FAILED.of(stats.failed)
    yield ADDS.of(commits.times.adds)
    yield SYNCS.of(commits.times.syncs)
    yield ADDED.of(commits.queue.durable_end)
    yield PENDING.of(commits.queue.pending_bytes)
    yield OVERLOADED.of(stats.overloaded_count)
    yield FULL.of(stats.full_count)
    yield FREE.of(stats.disk_free_bytes)
    yield SIZE.of(stats.disk_total_bytes)
    yield STORED.of(stats.stored_bytes)
    yield LEDGERS.of(stats.ledger_count)
    yield DAMAGED.of(stats.damaged_entry_count)
    yield REPAIRED.of(stats.repaired_entry_count)
    yield SCRUB_AGE.of(storage.upkeep.scrubber.age_s())
    yield FREED.of(storage.upkeep.freed_bytes)
    yield READ.of(reads.sent_bytes)
    yield FOLLOWERS.of(len(storage.followers))
    yield CONNECTIONS.of(len(connections))


def checks(storage: LedgerStorage) -> dict[str, Check]:
    """Return the checks of the disk; the state is the one in the registration."""

    def disk() -> str | None:
        is_good = storage.status.state is not StorageState.FAILED
        return None if is_good else "a write or sync of the disk has failed"

    def space() -> str | None:
        is_good = not storage.status.is_read_only
        return None if is_good else f"the bookie is read-only: {storage.status.shortage}"

    return {"disk": disk, "space": space}
