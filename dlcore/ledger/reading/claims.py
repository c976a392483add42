"""Decides which LAC of those that bookies return counts: one bookie's claim, or a quorum's.

Theory of operation.  A writer tells one bookie after the other how far its entries are
acknowledged, and any client that reaches a bookie can send it any LAC.  Therefore a LAC that one
bookie alone returns, above those of the others, is a claim.  If the entry that it names had been
acknowledged, Qa bookies of its write set would hold it durably, and each entry before it; at most
Qw - Qa bookies could prove that they do not.  If more of them prove it, the claim is false, and it
counts up to the entry before.  A missing answer refutes nothing: a true LAC is never taken back.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from dlcore.ledger.metadata.quorum import write_set

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dlcore.base.config import QuorumConfig
    from dlcore.wire.port import EntryRange


def vouched_and_claimed(lacs: Iterable[int], *, floor: int) -> tuple[int, int]:
    """Return the highest LAC that two bookies confirm, and the highest that one of them claims.

    Entries up to `floor` are confirmed in any case.
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
    """Return up to where a claim holds, by the entries that some bookies proved to hold.

    `held` has the ascending ranges of entries of the bookies that answered.
    """
    firsts = {position: [each.first_entry_id for each in held[position]] for position in held}

    def holds(position: int, entry_id: int) -> bool:
        index = bisect.bisect_right(firsts[position], entry_id) - 1
        return index >= 0 and entry_id <= held[position][index].last_entry_id

    noes_needed = quorum.write_quorum_size - quorum.ack_quorum_size + 1
    # Not every entry up to the claim is looked at: a false claim, or a forged entry, may be
    # billions ahead.  Fewer bookies hold an entry than its predecessors only behind the end of a
    # range.  Therefore the first refuted entry is one of the next few behind such an end, or behind
    # `vouched`.
    lasts = (each.last_entry_id for ranges in held.values() for each in ranges)
    looked_at = {
        entry_id
        for end in {vouched, *(last for last in lasts if last > vouched)}
        for entry_id in range(end + 1, end + 1 + quorum.ensemble_size)
        if entry_id <= claimed
    }
    for entry_id in sorted(looked_at):
        noes = sum(p in held and not holds(p, entry_id) for p in write_set(quorum, entry_id))
        if noes >= noes_needed:
            return entry_id - 1
    return claimed
