"""Decide which last add confirmed counts, of those that bookies tell: a claim, or a quorum's.

Theory of operation.  A writer tells one bookie after the other how far its entries are
acknowledged, and anybody who reaches a bookie can tell it anything.  So what one bookie alone says
beyond the others is a claim.  Had the entry that it names been acknowledged, Qa bookies of its
write set would hold it durably, and so each one before it; at most Qw - Qa could prove that they do
not.  Where more of them do, the claim is false, and counts up to the entry before.  What bookies do
not answer refutes nothing: a LAC that is true is never taken back.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from dlcore.ledger.metadata.quorum import write_set

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dlcore.config import QuorumConfig
    from dlcore.ledger.port import EntryRange


def vouched_and_claimed(lacs: Iterable[int], *, floor: int) -> tuple[int, int]:
    """Return the highest LAC that two bookies vouch for, and the highest that one of them claims.

    Entries up to `floor` are confirmed whatever the bookies say.
    """
    heard = sorted((max(each, floor) for each in lacs), reverse=True)
    claimed = heard[0] if heard else floor
    return (heard[1] if len(heard) > 1 else floor), claimed


def confirmed_of(
    quorum: QuorumConfig,
    held: Mapping[int, Sequence[EntryRange]],
    *,
    vouched: int,
    claimed: int,
) -> int:
    """Return up to where a claim stands, by what the bookies at some positions proved to hold.

    `held` has the ranges of entries of those that answered, ascending.
    """
    firsts = {position: [each.first_entry_id for each in held[position]] for position in held}

    def holds(position: int, entry_id: int) -> bool:
        index = bisect.bisect_right(firsts[position], entry_id) - 1
        return index >= 0 and entry_id <= held[position][index].last_entry_id

    noes_needed = quorum.write_quorum_size - quorum.ack_quorum_size + 1
    highest = max((ranges[-1].last_entry_id for ranges in held.values() if ranges), default=-1)
    # Beyond what anybody holds, entries differ in nothing but their write sets.
    looked_at = min(claimed, max(highest, vouched) + quorum.ensemble_size)
    for entry_id in range(vouched + 1, looked_at + 1):
        noes = sum(p in held and not holds(p, entry_id) for p in write_set(quorum, entry_id))
        if noes >= noes_needed:
            return entry_id - 1
    return claimed
