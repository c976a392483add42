"""Metadata of auto-recovery."""

from __future__ import annotations

import msgspec

from dlcore.ids import BookieId
from dlcore.metadata.stored import LAYOUT, Count


class UnderReplicatedLedger(msgspec.Struct, frozen=True, kw_only=True):
    """A ledger on the list: which members are lost (none: entries or copies are), since when.

    `findings` counts how often it was found (each writes the node, so no deletion overlooks one),
    `attempts` how often its repair did not finish, and `reason` says why the last one did not
    (empty: none was made).
    """

    layout: int = LAYOUT
    ledger_id: Count
    missing: tuple[BookieId, ...]
    since_ms: Count
    findings: Count = 1
    attempts: Count = 0
    reason: str = ""


class ElectedAuditor(msgspec.Struct, frozen=True, kw_only=True):
    """Who is the auditor: for people (host:pid), and exactly."""

    layout: int = LAYOUT
    owner: str
    token: str


class SweepTroubles(msgspec.Struct, frozen=True, kw_only=True):
    """What the last sweep of a kind had to leave out: how many, the first ones, and when.

    The sweep went on: whatever is named here is damaged, or brought a defect to light.
    """

    layout: int = LAYOUT
    sweep: str
    at_ms: Count
    count: Count
    found: tuple[str, ...] = ()


class ReplicaCheckRun(msgspec.Struct, frozen=True, kw_only=True):
    """A full replica check, and what it found; `unknown` are ledgers of which some bookie did not
    answer.

    Of one that is under way `finished_ms` says when this was written, and ledgers from
    `next_ledger_id` on were not looked at yet.
    """

    layout: int = LAYOUT
    started_ms: Count
    finished_ms: Count
    ledgers: Count
    under_replicated: Count
    unknown: Count
    next_ledger_id: Count = 0
