"""Configuration of the upkeep of logs."""

from __future__ import annotations

from dataclasses import dataclass

from dlcore.config import MIB, checked, require, require_not_negative, require_positive

_DAY_S = 24 * 3600.0
ENTRY_WEIGHT = 1024
"""What an entry costs a reader beside its bytes, in bytes that it could have read meanwhile."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class MergePolicy:
    """What is small, and how much is merged in one step."""

    large_weight: int = 4 * MIB
    """Extents that weigh so much, their bytes and 1 KiB for each entry, are read nearly as fast as
    any: they are left alone."""
    fan_in: int = 16
    """A merged extent weighs at least so many times what the heaviest of its parts weighed."""
    run_weight_max: int = 64 * MIB
    """What is merged into one extent weighs at most so much."""
    run_extents_max: int = 4_096
    """Extents that are merged into one, at most."""
    run_ledgers_max: int = 500
    """Ledgers that these may lie in: each has a registration, which is written when the log gives
    up extents of it."""

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
    """How often is looked, how much is done at a time, and what counts as old."""

    upkeep_interval_s: float = 10.0
    """How often a worker looks for logs with small extents to merge."""
    sweep_interval_s: float = 600.0
    """How often what is old is looked for, and records that are older than their log keeps them."""
    logs_at_once: int = 2
    """Logs that one worker merges at the same time."""
    merge_bytes_per_s: float = 32.0 * MIB
    """Pace of copying, of all logs that one worker merges."""
    merged_grace_s: float = 300.0
    """How long a ledger stays that merging has emptied: readers may hold older views of the log."""
    leftovers_age_s: float = _DAY_S
    """What a dead process staged under an identity that never came back goes at this age."""
    commits_age_s: float = 90 * _DAY_S
    """Records of commits go at this age: a replay that is older is not recognised."""
    merge: MergePolicy = MergePolicy()
    """What is small, and how much is merged in one step."""

    def __post_init__(self) -> None:
        require_positive(
            self, "upkeep_interval_s", "sweep_interval_s", "logs_at_once", "merge_bytes_per_s"
        )
        require_not_negative(self, "merged_grace_s", "leftovers_age_s", "commits_age_s")
