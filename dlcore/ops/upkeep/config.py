"""Configuration of the upkeep of logs."""

from __future__ import annotations

from dataclasses import dataclass

from dlcore.base.config import (
    MIB,
    checked,
    require,
    require_not_negative,
    require_positive,
    require_tier,
)

_DAY_S = 24 * 3600.0
ENTRY_WEIGHT = 1024
"""The cost of an entry for a reader beside its bytes, in bytes that it could read meanwhile."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class MergePolicy:
    """Which extents are small, and how much is merged in one step."""

    large_weight: int = 4 * MIB
    """The weight from which an extent is left alone: its bytes and 1 KiB for each entry.  Larger
    extents are not read much faster."""
    fan_in: int = 16
    """A merged extent weighs at least this many times the heaviest of its parts."""
    run_weight_max: int = 64 * MIB
    """Most weight that is merged into one extent."""
    run_extents_max: int = 4_096
    """Most extents that are merged into one."""
    run_ledgers_max: int = 500
    """Most ledgers of these extents: each has a registration, which is written when the log
    releases extents of it."""

    def __post_init__(self) -> None:
        for key, least in (
            ("large_weight", ENTRY_WEIGHT + 1),
            ("fan_in", 2),
            ("run_weight_max", self.large_weight * self.fan_in),
            ("run_extents_max", self.fan_in),
            ("run_ledgers_max", self.fan_in),
        ):
            value = getattr(self, key)
            require(
                condition=value >= least, key=key, value=value, rule=f"expected {least} or more"
            )


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepConfig:
    """How often upkeep runs, how much it does at a time, and the ages of what it removes."""

    upkeep_interval_s: float = 10.0
    """How often a worker looks for logs with small extents to merge."""
    sweep_interval_s: float = 600.0
    """How often upkeep looks for old leftovers, and for records past their log's retention."""
    logs_at_once: int = 2
    """Logs that one worker merges at the same time."""
    merge_bytes_per_s: float = 32.0 * MIB
    """Pace of copying, for all logs that one worker merges."""
    merged_grace_s: float = 300.0
    """How long a ledger stays after merges emptied it: readers may hold older views of the log."""
    leftovers_age_s: float = _DAY_S
    """Age at which the staged ledgers of an identity that never came back are removed."""
    commits_age_s: float = 90 * _DAY_S
    """Age at which records of commits are removed: an older replay is not recognised."""
    tier: str = ""
    """Where completed segments of all logs go that have no setting `tier` of their own, as
    ``s3://bucket/folder`` or, on a cluster of one host, ``file:///folder``; empty: nowhere.  Set
    it for the cluster, so that all workers agree: ``dlog cluster settings``."""
    tier_after_s: float = 3600.0
    """How old a segment's last record is when the segment goes to a tier, in logs that have no
    setting `tier_after_s` of their own."""
    tier_interval_s: float = 60.0
    """How often a worker looks for segments that are old enough for their log's tier; in logs whose
    `tier_after_s` is less than this, also each five seconds in between."""
    tier_bytes_per_s: float = 32.0 * MIB
    """Pace of reading from bookies for tiers, for all logs of one worker."""
    tier_object_bytes: int = 64 * MIB
    """Bytes of entries after which an object ends; a worker holds one object in memory."""
    tier_grace_s: float = 3600.0
    """How long ledgers stay on bookies after an object has their entries: longer than the longest
    read that is planned once, like one task of Spark."""
    stray_interval_s: float = 6 * 3600.0
    """How often upkeep lists the objects of tiers, to delete those that no log names."""
    stray_age_s: float = _DAY_S
    """Age at which an object that no log names is deleted."""
    scrub_period_s: float = 30 * _DAY_S
    """Time in which every object of cold segments is read once, and compared with what the log's
    metadata says; 0: never."""
    scrub_bytes_per_s: float = 16.0 * MIB
    """Most bytes of objects that are read for this, for the whole namespace: a larger one takes
    longer than the period."""
    scrub_interval_s: float = 60.0
    """How often a worker looks whether an object is due for this."""
    export: str = ""
    """Where exports of the metadata go, for `dlog restore`: ``s3://bucket/folder`` or, on a cluster
    of one host, ``file:///folder``, best the place of the tier; empty: none is made.  Set it for
    the cluster, so that all workers agree: ``dlog cluster settings``."""
    export_every_s: float = 1800.0
    """Age of the newest export at which the next one is made: at most that much of the metadata is
    lost.  Less than `tier_grace_s`, so that the objects that an export names are still there."""
    export_keep: int = 48
    """Exports that stay there; older ones are deleted."""
    merge: MergePolicy = MergePolicy()
    """Which extents are small, and how much is merged in one step."""

    def __post_init__(self) -> None:
        require_positive(
            self,
            "upkeep_interval_s",
            "sweep_interval_s",
            "logs_at_once",
            "merge_bytes_per_s",
            "tier_interval_s",
            "tier_bytes_per_s",
            "tier_object_bytes",
            "stray_interval_s",
            "scrub_bytes_per_s",
            "scrub_interval_s",
            "export_every_s",
            "export_keep",
        )
        require_not_negative(
            self,
            "merged_grace_s",
            "leftovers_age_s",
            "commits_age_s",
            "tier_after_s",
            "tier_grace_s",
            "stray_age_s",
            "scrub_period_s",
        )
        require_tier("tier", self.tier or None)
        require_tier("export", self.export or None)
