"""The metrics of an auto-recovery process, and its checks."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlcore.base.clock import steady_s
from dlcore.base.metrics import Durations, counter, gauge, histogram

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.base.metrics import Sample

_FURTHEST = 10
"""Subscribers that are named: a label for each would let a scrape cost more and more."""

UNDERREPLICATED = gauge(
    "autorecovery_underreplicated_ledgers", "Ledgers that lack replicas, at the last look"
)
UNREADABLE = gauge(
    "autorecovery_unreadable_ledgers", "Ledgers that the last audit of this process left out"
)
IS_AUDITOR = gauge("autorecovery_is_auditor", "Whether this process is the auditor (1 or 0)")
PAUSED = gauge("autorecovery_paused", "Whether auto-recovery is paused (1 or 0)")
AUDIT_AGE = gauge(
    "autorecovery_audit_age_seconds", "Since the last audit of all ledgers; only of the auditor"
)
LOST = gauge("autorecovery_lost_bookies", "Bookies that count as lost; only of the auditor")
REPAIRS = counter("autorecovery_repairs_total", "Ledgers repaired by this process")
FAILED = counter("autorecovery_failed_repairs_total", "Repairs that did not finish")
BEHIND = gauge(
    "autorecovery_subscriber_seconds_behind",
    "Since the next record that a subscriber has to read was written, at the last look; of the 10 "
    "furthest behind, and only of the auditor",
    "log",
    "subscriber",
)
SCRUBBED = counter(
    "autorecovery_scrubbed_bytes_total",
    "Bytes of cold objects that this process read to find damage",
)
DAMAGED = counter(
    "autorecovery_damaged_objects_total", "Cold objects that scrubbing found damaged or missing"
)
MENDED = counter(
    "autorecovery_mended_objects_total", "Damaged cold objects that this process made again"
)
HOLES = gauge(
    "autorecovery_cold_holes",
    "Cold ledgers with damaged or missing objects that this process could not make again",
)
EXPORT_AGE = gauge(
    "autorecovery_export_age_seconds",
    "Since the newest export of the metadata, or since none was found; only if `export` is set",
)
EXPORT_EVERY = gauge(
    "autorecovery_export_every_seconds", "The setting `export_every_s`; only if `export` is set"
)
TIMES = histogram("autorecovery_repair_seconds", "A repair of a ledger that finished")

METRICS = (
    UNDERREPLICATED,
    UNREADABLE,
    IS_AUDITOR,
    PAUSED,
    AUDIT_AGE,
    LOST,
    REPAIRS,
    FAILED,
    SCRUBBED,
    DAMAGED,
    MENDED,
    HOLES,
    EXPORT_AGE,
    EXPORT_EVERY,
    TIMES,
    BEHIND,
)
"""The metrics of auto-recovery, in the order of the documentation."""


@dataclass(slots=True)
class RecoveryFigures:
    """The counts of one process since its start."""

    listed: int = 0
    """Ledgers on the list, when it was read last."""
    left_out: int = 0
    """Ledgers that the last audit could not read."""
    audited_s: float | None = None
    """When the last audit ended, as `steady_s` tells; None: it is not the auditor, or none
    has ended."""
    lost_bookies: int = 0
    is_auditor: bool = False
    is_paused: bool = True
    repairs: int = 0
    failed_repairs: int = 0
    repair_times: Durations = field(default_factory=Durations)
    scrubbed_bytes: int = 0
    damaged_objects: int = 0
    mended_objects: int = 0
    holes: set[int] = field(default_factory=set)
    """Cold ledgers on the list of which this process knows that records are lost."""
    exported_s: float | None = None
    """When the newest export was made, as `steady_s` tells; None: none is to be made."""
    export_every_s: float = 0.0
    lags: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds by which subscribers are behind, by log and subscriber."""

    def samples(self) -> Iterator[Sample]:
        """Yield the present samples."""
        yield UNDERREPLICATED.of(self.listed)
        yield UNREADABLE.of(self.left_out)
        yield IS_AUDITOR.of(self.is_auditor)
        yield PAUSED.of(self.is_paused)
        if self.is_auditor:
            yield LOST.of(self.lost_bookies)
            if self.audited_s is not None:
                yield AUDIT_AGE.of(steady_s() - self.audited_s)
        yield REPAIRS.of(self.repairs)
        yield FAILED.of(self.failed_repairs)
        yield SCRUBBED.of(self.scrubbed_bytes)
        yield DAMAGED.of(self.damaged_objects)
        yield MENDED.of(self.mended_objects)
        yield HOLES.of(len(self.holes))
        if self.exported_s is not None:
            yield EXPORT_AGE.of(max(0.0, steady_s() - self.exported_s))
            yield EXPORT_EVERY.of(self.export_every_s)
        yield TIMES.of(self.repair_times)
        lags = ((s, log, name) for log, each in self.lags.items() for name, s in each.items())
        for seconds, log, name in heapq.nlargest(_FURTHEST, lags):
            yield BEHIND.of(seconds, log, name)
