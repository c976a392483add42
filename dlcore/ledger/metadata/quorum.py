"""Quorum arithmetic: write sets and coverage."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from dlcore.base.config import QuorumConfig


def write_set(quorum: QuorumConfig, entry_id: int) -> tuple[int, ...]:
    """Return the ensemble positions that store `entry_id` (round-robin striping)."""
    assert entry_id >= 0
    return tuple((entry_id + i) % quorum.ensemble_size for i in range(quorum.write_quorum_size))


def is_covered(quorum: QuorumConfig, known: AbstractSet[int]) -> bool:
    """Return whether no write set can still reach an ack quorum without a position in `known`.

    `known` holds the positions that answered (yes or proven no).  In every write set fewer than Qa
    positions may be unknown.  This is the exact form (bookkeeper.md section 1.2).
    """
    return all(
        sum(position not in known for position in write_set(quorum, first)) < quorum.ack_quorum_size
        for first in range(quorum.ensemble_size)
    )


def first_followed(ledger_id: int, ensemble_size: int) -> int:
    """Return the position of the bookie that followers ask first; it gets each LAC first."""
    return ledger_id % ensemble_size
