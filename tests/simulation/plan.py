"""The plan of one seed: each has its own sizes, and its own subset and rhythm of faults.

A run in which everything goes wrong at once hides what a few faults would show ("swarm testing").
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bookie.config import CompactionConfig, GarbageConfig, SpaceConfig, StorageConfig
from dlcore.base.config import QuorumConfig

if TYPE_CHECKING:
    import random

QUORUMS = ((3, 3, 2), (3, 3, 2), (3, 3, 2), (4, 3, 2), (5, 3, 2), (3, 2, 2), (3, 3, 3), (2, 2, 1))

PROCESS_FAULTS = ("bookie dies", "bookie pauses", "client dies", "client pauses")
NETWORK_FAULTS = ("partition", "flapping", "lag", "weather")
METADATA_FAULTS = ("metadata", "bookie metadata", "metadata outage")
DISK_FAULTS = (
    "crash at a step",
    "write error",
    "sync error",
    "read error",
    "damage",
    "damage",
    "lost disk",
    "full disk",
)
OTHER_FAULTS = ("clock jump", "deletion", "made-up ledger")
CLASSIC_FAULTS = (
    "bookie dies",
    "bookie pauses",
    "partition",
    "lag",
    "weather",
    "client dies",
    "client pauses",
    "metadata",
)
ALL_FAULTS = PROCESS_FAULTS + NETWORK_FAULTS + METADATA_FAULTS + DISK_FAULTS + OTHER_FAULTS

_SPACE = SpaceConfig(
    read_only_below_bytes=320 << 10,
    writable_above_bytes=352 << 10,
    minimum_bytes=256 << 10,
    check_interval_s=0.5,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieSettings:
    """How the bookies of a run are set up."""

    storage: StorageConfig
    cluster_id: str
    maintenance_interval_s: float
    """Between passes of garbage collection; others are rarer.  0: no housekeeping, no repair."""
    hiding_chance: float
    """How often a look of garbage collection misses a ledger that is there."""
    has_wire: bool
    """Whether requests travel on connections, or each by itself."""
    quick_share: float
    """How often a disk takes an append at once."""
    erases: bool
    """Whether bookies answer requests to erase, beside other housekeeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The choices that are made before a run begins."""

    quorum: QuorumConfig
    spare_bookies: int
    disk_latency_s: float
    storage: StorageConfig
    maintenance_interval_s: float
    auto_recoveries: int
    """Processes that make lost replicas again."""
    hiding_chance: float
    metadata_latency_s: float
    faults: tuple[str, ...]
    fault_interval_s: float
    hunt_chance: float
    hunts_by_crash: bool
    writers: int
    has_wire: bool
    """Whether requests travel on connections, byte by byte, or each by itself."""
    quick_share: float = 0.0
    """How often a disk takes an append at once, while its bookie waits."""
    has_logs: bool = False
    """Whether there are logs, and processes that use them, in place of ledgers and their writers;
    see `logs.py`."""
    has_life: bool = False
    """Whether logs are renamed, sealed and so on, beside what is written; see `log_life.py`."""
    has_types: bool = False
    """Whether one more log is typed, and its schema changes; see `log_types.py`."""
    is_encrypted: bool = False
    """Whether most processes encrypt what they write to logs; all of them have the key."""
    has_proxies: bool = False
    """Whether logs are written and read through proxies; see `proxies.py`."""
    has_consumers: bool = False
    """Whether there are subscribers over proxies, too; see `proxy_consumers.py`."""
    has_remotes: bool = False
    """Whether the real client writes over proxies, too; see `proxy_remotes.py`."""
    has_rules: bool = False
    """Whether proxies judge calls by rules of access, which change; see `proxy_rules.py`."""
    has_sinks: bool = False
    """Whether queries of Spark write to logs, too; see `sinks.py`."""
    has_tier: bool = False
    """Whether old segments of logs go to objects; see `tiers.py`."""
    tier_after_s: float | None = None
    """How old segments are that go; None: that is drawn."""
    has_tables: bool = False
    """Whether a table follows each log with a tier; see `tables.py`."""
    tier_steps_to_live: int | None = None
    """If given, each process that tiers, or keeps tables, dies within so many of its requests."""
    has_redactions: bool = False
    """Whether there is a log whose rows are redacted; see `redactions.py`."""
    mergers: int = 1
    """How many processes merge logs without asking whether others do."""
    log_writers: int | None = None
    """How many writers compete with those that append to logs at once; None: left to chance."""
    kept_down: int = 0
    """How many bookies are down from the beginning until everything heals."""
    scene: str = ""
    """The scene played in place of the usual writers; see `scenes.py`."""

    @property
    def losses_max(self) -> int:
        """How many bookies may lose what they acknowledged."""
        return self.quorum.ack_quorum_size - 1


_WIRE_SHARE = 0.5
_LOGS_SHARE = 1 / 2
_PROXIES_SHARE = 1 / 3
"""The share of all plans, therefore two thirds of those with logs."""
_LIFE_SHARE = 0.5
_TYPES_SHARE = 0.5
_CONSUMERS_SHARE = 0.5
_REMOTES_SHARE = 0.5
_SINKS_SHARE = 0.4
_ENCRYPTED_SHARE = 0.25
_RULES_SHARE = 0.5
"""The share of the plans with proxies."""
_TIER_SHARE = 0.4
"""The share of the plans with logs."""
_TABLES_SHARE = 0.5
"""The share of the plans with a tier."""
_REDACTIONS_SHARE = 0.5
"""The share of the plans with logs, without encryption and without proxies."""
_KEPT_DOWN_SHARE = 0.08
_QUICK_SHARES = (0.0, 0.0, 0.9)


def draw_plan(rng: random.Random) -> Plan:
    """Draw a plan, of ledgers or of logs, also one in which a bookie is down all the time."""
    plan = draw_usual_plan(rng)
    fate = copy(rng)  # as in `draw_usual_plan`
    fate.seed(fate.random())  # else it would draw the same again
    is_kept_down, has_logs = fate.random() < _KEPT_DOWN_SHARE, fate.random() < _LOGS_SHARE
    if has_logs:
        plan = _with_some_shape(plan, fate)
        plan = replace(plan, has_sinks=fate.random() < _SINKS_SHARE)
        plan = replace(plan, is_encrypted=fate.random() < _ENCRYPTED_SHARE)
        plan = replace(plan, has_rules=plan.has_proxies and fate.random() < _RULES_SHARE)
        plan = replace(plan, has_tier=fate.random() < _TIER_SHARE)
        has_tables = plan.has_tier and not plan.is_encrypted and fate.random() < _TABLES_SHARE
        plan = replace(plan, has_tables=has_tables)
        if not (plan.is_encrypted or plan.has_proxies) and fate.random() < _REDACTIONS_SHARE:
            plan = with_redactions(plan)
    return with_one_kept_down(plan, has_logs=has_logs) if is_kept_down else plan


def _with_some_shape(plan: Plan, fate: random.Random) -> Plan:
    """Return a plan with logs, and with some of what else there may be."""
    if fate.random() < _PROXIES_SHARE / _LOGS_SHARE:
        return with_proxies(
            plan,
            has_consumers=fate.random() < _CONSUMERS_SHARE,
            has_remotes=fate.random() < _REMOTES_SHARE,
        )
    return replace(
        with_logs(plan),
        has_life=fate.random() < _LIFE_SHARE,
        has_types=fate.random() < _TYPES_SHARE,
    )


def draw_usual_plan(rng: random.Random) -> Plan:
    """Draw a plan of ledgers, in which bookies that are down come back soon, unless they are lost.

    The further shape of the plan is drawn apart: seeds of a focus, which has its own shape,
    play what they played whatever the shares of shapes are.
    """
    ensemble, write, ack = rng.choice(QUORUMS)
    # Half of the runs are about the protocol between processes, the others about everything.
    kinds = CLASSIC_FAULTS if rng.random() < 0.5 else ALL_FAULTS
    faults = tuple(rng.sample(kinds, rng.randint(1, min(len(kinds), 8))))
    fate = copy(rng)  # what is drawn of it leaves no trace in what comes after
    plan = Plan(
        quorum=QuorumConfig(ensemble_size=ensemble, write_quorum_size=write, ack_quorum_size=ack),
        spare_bookies=rng.choice((0, 1, 1, 2)),
        disk_latency_s=rng.choice((0.0005, 0.003, 0.05)),
        storage=StorageConfig(
            file_bytes_max=rng.choice((12_288, 40_960)),
            file_entries_max=64,
            in_flight_bytes_max=rng.choice((2000, 1 << 20, 1 << 20)),
            entry_size_bytes_max=4096,
            open_files_max=rng.choice((2, 8)),
            settle_interval_s=rng.choice((0.1, 1.0)),
            space=_SPACE,
            compact=CompactionConfig(floor_bytes=64 << 10),
            garbage=GarbageConfig(age_ms=rng.choice((200, 1500)), brake_count=2),
        ),
        maintenance_interval_s=rng.choice((0.0, 0.0, 0.3, 1.0)),
        auto_recoveries=rng.choice((0, 0, 0, 0, 1, 2)),
        hiding_chance=rng.choice((0.0, 0.3)),
        metadata_latency_s=rng.choice((0.002, 0.002, 0.05, 0.2)),
        faults=faults,
        fault_interval_s=rng.choice((0.1, 0.5, 2.0)),
        hunt_chance=rng.choice((0.0, 0.3, 0.6)),
        hunts_by_crash=rng.random() < 0.5,
        writers=rng.choice((1, 1, 2)),
        has_wire=fate.random() < _WIRE_SHARE,
    )
    fate.random()  # once drew the shape
    return replace(plan, quick_share=fate.choice(_QUICK_SHARES))


def with_one_kept_down(plan: Plan, *, has_logs: bool) -> Plan:
    """Return a plan of exactly E bookies, of which one is down until everything heals.

    New ledgers begin smaller than they are wanted, and auto-recovery brings them up in the end.
    """
    plan = replace(
        plan,
        quorum=QuorumConfig(),
        spare_bookies=0,
        kept_down=1,
        auto_recoveries=max(plan.auto_recoveries, 1),
    )
    return with_logs(plan) if has_logs else plan


def with_logs(plan: Plan) -> Plan:
    """Return a plan with logs, whose ledgers come and go.

    A mass of logs is deleted at once: no brake may hold them, and grace follows clocks that agree.
    """
    garbage = replace(plan.storage.garbage, brake_count=10_000)
    return replace(
        plan,
        has_logs=True,
        storage=replace(plan.storage, garbage=garbage),
        faults=tuple(each for each in plan.faults if each != "clock jump"),
    )


def with_proxies(plan: Plan, *, has_consumers: bool = False, has_remotes: bool = False) -> Plan:
    """Return a plan whose logs are written through proxies."""
    return replace(
        with_logs(plan),
        has_proxies=True,
        has_consumers=has_consumers,
        has_remotes=has_remotes,
        has_life=False,
        has_types=False,
    )


def with_redactions(plan: Plan) -> Plan:
    """Return a plan with a log whose rows are redacted.

    Bookies must answer, so none loses its disk for good, or has one that is damaged or full.  A
    redaction makes hundreds of requests to the metadata, one after the other: with the slowest
    answers it would not end within the time that healing has.
    """
    unfit = ("lost disk", "damage", "full disk")
    return replace(
        plan,
        has_redactions=True,
        metadata_latency_s=min(plan.metadata_latency_s, 0.05),
        maintenance_interval_s=plan.maintenance_interval_s or 0.3,
        faults=tuple(each for each in plan.faults if each not in unfit),
    )
