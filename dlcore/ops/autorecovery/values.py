"""Metadata of auto-recovery."""

from __future__ import annotations

import msgspec

from dlcore.base.features import UNKNOWN_RELEASE, Release
from dlcore.base.ids import BookieId
from dlcore.metadata.stored import LAYOUT, Count


class UnderReplicatedLedger(msgspec.Struct, frozen=True, kw_only=True):
    """A ledger on the list: its lost members (none: entries or copies are missing), and since when.

    `findings` counts how often it was found.  Each finding writes the node, so that no deletion
    overlooks one.  `attempts` counts the repairs that did not finish, and `reason` says why the
    last one did not (empty: there was no attempt).
    """

    layout: int = LAYOUT
    ledger_id: Count
    missing: tuple[BookieId, ...]
    since_ms: Count
    findings: Count = 1
    attempts: Count = 0
    reason: str = ""


class ElectedAuditor(msgspec.Struct, frozen=True, kw_only=True):
    """The current auditor: `owner` for people (host:pid), and a unique `token`."""

    layout: int = LAYOUT
    owner: str
    token: str


class RecoveryMember(msgspec.Struct, frozen=True, kw_only=True):
    """A process of auto-recovery, whether it is the auditor or not; `owner` is for people."""

    layout: int = LAYOUT
    owner: str
    release: Release = UNKNOWN_RELEASE


class SweepTroubles(msgspec.Struct, frozen=True, kw_only=True):
    """Items that the last sweep of a kind left out: their number, the first ones, and when.

    The sweep continued without them.  Each item is damaged, or revealed a defect.
    """

    layout: int = LAYOUT
    sweep: str
    at_ms: Count
    count: Count
    found: tuple[str, ...] = ()


class ScrubProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A pass of scrubbing over the objects of all cold ledgers, and its place.

    Objects before `number` of the ledger `ledger_id`, and of all ledgers before it, were read.
    `left_bytes` are the bytes of the others, as counted at `counted_ms` and read since.
    """

    layout: int = LAYOUT
    started_ms: Count
    ledger_id: Count = 0
    number: Count = 0
    due_ms: Count = 0
    """When the next object is read."""
    counted_ms: Count = 0
    left_bytes: Count = 0
    objects: Count = 0
    """Objects that were read in this pass; `read_bytes` are their bytes."""
    read_bytes: Count = 0
    damaged: Count = 0
    """Objects that were damaged or missing."""
    skipped: Count = 0
    """Objects that could not be read, although the store answered about others or was away."""
    tries: Count = 0
    """How often the next object could not be read."""


class LastExport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest export of metadata that upkeep made: its URL, and its time."""

    layout: int = LAYOUT
    url: str
    exported_ms: Count
    left_out: Count = 0
    """Logs that are not in it, because their metadata are damaged."""


class ReplicaCheckRun(msgspec.Struct, frozen=True, kw_only=True):
    """A full replica check and its result.

    `unknown` counts ledgers for which a bookie did not answer.  While the check is in progress,
    `finished_ms` is the time of this report, and ledgers from `next_ledger_id` on are not checked
    yet.
    """

    layout: int = LAYOUT
    started_ms: Count
    finished_ms: Count
    ledgers: Count
    under_replicated: Count
    unknown: Count
    next_ledger_id: Count = 0
