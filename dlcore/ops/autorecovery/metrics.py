"""The metrics of an auto-recovery process, and its checks."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlcore.base.clock import steady_s
from dlcore.base.metrics import Durations, counter, defined_in, gauge, histogram

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

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
TIER_FAILING = gauge(
    "autorecovery_tier_failing_logs",
    "Logs with due segments that this process could not bring to their tier when it last tried, "
    "and those that wait for the same store",
)
TIER_FAILING_FOR = gauge(
    "autorecovery_tier_failing_seconds",
    "Since the first failure in a row of the log that has failed longest; 0: none fails",
)
TIER_ERRORS = counter(
    "autorecovery_tier_errors_total",
    "Failures to bring due segments to a tier, by the error's class",
    "kind",
)
TIER_ROUND = gauge(
    "autorecovery_tier_round_seconds",
    "Since the round of tiering in progress began; 0 between rounds",
)
TABLE_FAILING = gauge(
    "autorecovery_table_failing_logs",
    "Logs whose Delta or Iceberg table this process could not bring up to date when it last tried",
)
TABLE_FAILING_FOR = gauge(
    "autorecovery_table_failing_seconds",
    "Since the first failure in a row of the table that has failed longest; 0: none fails",
)
TABLE_ERRORS = counter(
    "autorecovery_table_errors_total",
    "Failures to bring a log's table up to date, by the error's class",
    "kind",
)
TIMES = histogram("autorecovery_repair_seconds", "A repair of a ledger that finished")
BEHIND = gauge(
    "autorecovery_subscriber_seconds_behind",
    "Since the next record that a subscriber has to read was written, at the last look; of the 10 "
    "furthest behind, and only of the auditor",
    "log",
    "subscriber",
)

METRICS = defined_in(globals())
"""The metrics of auto-recovery, in the order of the documentation."""


@dataclass(slots=True)
class LogFailures:
    """The logs for which one kind of work fails, and all its errors since the start.

    Only numbers are exported: a label for each log would let a scrape cost more and more.
    """

    errors: Counter[str] = field(default_factory=Counter)
    """Errors by their class."""
    _since_s: dict[str, float] = field(default_factory=dict)
    """When the first failure in a row was, by log id, as `steady_s` tells."""

    def failed(self, log_id: str, error: Exception) -> None:
        """Count a failure of a log."""
        self.errors[type(error).__name__] += 1
        self.waits(log_id)

    def waits(self, log_id: str) -> None:
        """Note that a log waits for what failed for another one."""
        self._since_s.setdefault(log_id, steady_s())

    def ended(self, log_id: str) -> None:
        """Note that the work went well for a log, or that there is none."""
        self._since_s.pop(log_id, None)

    def forget_others(self, log_ids: Collection[str]) -> None:
        """Forget the logs that are not among these."""
        self._since_s = {each: since for each, since in self._since_s.items() if each in log_ids}

    @property
    def logs(self) -> int:
        """Number of logs for which the work fails."""
        return len(self._since_s)

    @property
    def longest_s(self) -> float:
        """Seconds since the first failure of the log that has failed longest; 0: none fails."""
        first_s = next(iter(self._since_s.values()), None)  # logs are in the order of failing
        return 0.0 if first_s is None else steady_s() - first_s


@dataclass(slots=True)
class AuditFigures:
    """The findings of this process as the auditor."""

    is_auditor: bool = False
    ended_s: float | None = None
    """When the last audit ended, as `steady_s` tells; None: it is not the auditor, or none
    has ended."""
    left_out: int = 0
    """Ledgers that the last audit could not read."""
    lost_bookies: int = 0
    lags: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds by which subscribers are behind, by log and subscriber."""

    def samples(self) -> Iterator[Sample]:
        """Yield the present samples."""
        yield UNREADABLE.of(self.left_out)
        yield IS_AUDITOR.of(self.is_auditor)
        if self.is_auditor:
            yield LOST.of(self.lost_bookies)
            if self.ended_s is not None:
                yield AUDIT_AGE.of(steady_s() - self.ended_s)
        lags = ((s, log, name) for log, each in self.lags.items() for name, s in each.items())
        for seconds, log, name in heapq.nlargest(_FURTHEST, lags):
            yield BEHIND.of(seconds, log, name)


@dataclass(slots=True)
class RepairFigures:
    """The repairs of ledgers by this process."""

    listed: int = 0
    """Ledgers on the list, when it was read last."""
    done: int = 0
    failed: int = 0
    times: Durations = field(default_factory=Durations)

    def samples(self) -> Iterator[Sample]:
        """Yield the present samples."""
        yield UNDERREPLICATED.of(self.listed)
        yield REPAIRS.of(self.done)
        yield FAILED.of(self.failed)
        yield TIMES.of(self.times)


@dataclass(slots=True)
class ColdFigures:
    """Cold objects that this process read again, found damaged, and made again."""

    scrubbed_bytes: int = 0
    damaged_objects: int = 0
    mended_objects: int = 0
    holes: set[int] = field(default_factory=set)
    """Cold ledgers on the list that have lost records, as far as this process knows."""

    def samples(self) -> Iterator[Sample]:
        """Yield the present samples."""
        yield SCRUBBED.of(self.scrubbed_bytes)
        yield DAMAGED.of(self.damaged_objects)
        yield MENDED.of(self.mended_objects)
        yield HOLES.of(len(self.holes))


@dataclass(slots=True)
class ExportFigures:
    """The exports of the metadata."""

    made_s: float | None = None
    """When the newest one was made, as `steady_s` tells; None: none is to be made."""
    every_s: float = 0.0

    def samples(self) -> Iterator[Sample]:
        """Yield the present samples."""
        if self.made_s is not None:
            yield EXPORT_AGE.of(max(0.0, steady_s() - self.made_s))
            yield EXPORT_EVERY.of(self.every_s)


@dataclass(slots=True)
class TieringFigures:
    """The rounds over logs with a tier or a table."""

    tier: LogFailures = field(default_factory=LogFailures)
    table: LogFailures = field(default_factory=LogFailures)
    round_s: float | None = None
    """When the round in progress began, as `steady_s` tells; None: none is."""

    def samples(self) -> Iterator[Sample]:
        """Yield the present samples."""
        yield TIER_FAILING.of(self.tier.logs)
        yield TIER_FAILING_FOR.of(self.tier.longest_s)
        for kind, count in self.tier.errors.items():
            yield TIER_ERRORS.of(count, kind)
        yield TIER_ROUND.of(0.0 if self.round_s is None else steady_s() - self.round_s)
        yield TABLE_FAILING.of(self.table.logs)
        yield TABLE_FAILING_FOR.of(self.table.longest_s)
        for kind, count in self.table.errors.items():
            yield TABLE_ERRORS.of(count, kind)


@dataclass(slots=True)
class RecoveryFigures:
    """The counts of one process since its start, by its work."""

    is_paused: bool = True
    audit: AuditFigures = field(default_factory=AuditFigures)
    repairs: RepairFigures = field(default_factory=RepairFigures)
    cold: ColdFigures = field(default_factory=ColdFigures)
    export: ExportFigures = field(default_factory=ExportFigures)
    tiering: TieringFigures = field(default_factory=TieringFigures)

    def samples(self) -> Iterator[Sample]:
        """Yield the present samples."""
        yield PAUSED.of(self.is_paused)
        for work in (self.repairs, self.audit, self.cold, self.export, self.tiering):
            yield from work.samples()
