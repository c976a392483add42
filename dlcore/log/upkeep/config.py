"""Configuration of the upkeep of logs."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlcore.config import MIB, require
from dlcore.log.upkeep.merging import MergePolicy

_DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepConfig:
    """How often is looked, how much is done at a time, and what counts as old."""

    poll_interval_s: float = 10.0
    """How often a worker looks which logs are asked for."""
    sweep_interval_s: float = 600.0
    """How often what is old is looked for, and records that are older than their log keeps them."""
    logs_at_once: int = 2
    """Logs that one worker merges at the same time."""
    copy_bytes_per_s: float = 32.0 * MIB
    """Pace of copying, of all logs that one worker merges."""
    merged_grace_s: float = 300.0
    """How long a ledger stays that merging has emptied: readers may hold older views of the log."""
    leftovers_age_s: float = _DAY_S
    """What a dead process staged under an identity that never came back goes at this age."""
    commits_age_s: float = 90 * _DAY_S
    """Records of commits go at this age: a replay that is older is not recognised."""
    policy: MergePolicy = field(default_factory=MergePolicy)

    def __post_init__(self) -> None:
        for key in ("poll_interval_s", "sweep_interval_s", "logs_at_once", "copy_bytes_per_s"):
            value = getattr(self, key)
            require(condition=value > 0, key=key, value=value, rule="expected a number > 0")
        for key in ("merged_grace_s", "leftovers_age_s", "commits_age_s"):
            value = getattr(self, key)
            require(condition=value >= 0, key=key, value=value, rule="expected seconds >= 0")
