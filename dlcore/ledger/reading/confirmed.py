"""The end of an open ledger for a read that begins: by the entries that bookies hold and the LAC.

Theory of operation.  An entry is acknowledged once Qa bookies of its write set hold it and all
entries before it are acknowledged.  The bookies learn that later, from the LAC.  A read that asked
for the LAC alone would miss entries that were acknowledged a moment ago.  Therefore it asks for the
LAC and for the entries above it that are durable.  By the answers each entry above the highest LAC
is

* *held*, if Qa of its write set hold it;
* *absent*, if Qw - Qa + 1 of its write set do not: when the read began, too few held it for an
  acknowledgement, so neither it nor any entry after it was acknowledged;
* *undecided* otherwise: the missing answers could make it either.

The ledger's end is the entry before the first absent one.  It is at or above every entry that was
acknowledged when the read began.  A held entry that was not acknowledged may be shown, because it
stays in the ledger:

* a recovery ends the ledger at Qw - Qa + 1 proven noes, which an entry held by Qa never gets;
* a writer that replaces a bookie first copies to the new one every entry above the LAC that the old
  one may hold, and then changes the metadata (`writing/appender.py`);
* a writer that fails with unacknowledged entries leaves the ledger's end to a recovery.

This argument is about bookies that got the entry from the ledger's writer.  While a ledger is in
recovery, the recoverers write entries back, and another recovery may already have left out such an
entry.  Therefore the metadata must show the ledger open, with the same bookies, after the last
answer came.

The driver is `LedgerReader.read_last_add_confirmed`.

The LAC itself may be false: a writer sends it to one bookie after the other, and any client that
reaches a bookie can send it any LAC.  Therefore a LAC that one bookie alone returns, above those of
the others, is a *claim*.  If the entry that it names had been acknowledged, Qa bookies of its write
set would hold it durably, and each entry before it; at most Qw - Qa bookies could prove that they
do not.  If more of them prove it, the claim is false, and it counts up to the entry before.  A
missing answer refutes nothing: a true LAC is never taken back.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, NamedTuple

from dlcore.ledger.metadata.values import is_covered, write_set

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dlcore.base.config import QuorumConfig
    from dlcore.wire.port import EntryRange, HeldEntries


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


class LedgerEnd(NamedTuple):
    """The end of an open ledger by the answers of its bookies.

    Entries up to `claimed`, the highest LAC, are acknowledged.  An ack quorum holds the entries
    after it up to `held`.  The next entry is absent, or `is_decided` is False.  If one bookie alone
    returned a LAC above `vouched`, it is a claim, unless others hold the entries up to
    it.
    """

    claimed: int
    held: int
    is_decided: bool
    vouched: int
    is_vouched: bool


def judge_end(
    quorum: QuorumConfig, first_entry_id: int, answers: Mapping[int, HeldEntries]
) -> LedgerEnd | None:
    """Return the end of a ledger by answers of its last ensemble; None: there are too few answers.

    Args:
        quorum: the ledger's quorum.
        first_entry_id: the first entry of the last ensemble; all before it are acknowledged.
        answers: the answers by position.
    """
    if not is_covered(quorum, answers.keys()):
        return None
    lacs = [answer.last_add_confirmed for answer in answers.values()]
    vouched, claimed = vouched_and_claimed(lacs, floor=first_entry_id - 1)
    is_vouched = _is_vouched(quorum, answers, vouched, claimed)
    absent_min = quorum.write_quorum_size - quorum.ack_quorum_size + 1
    held = claimed
    while True:
        entry_id = held + 1
        known = [
            _holds(answers[position], entry_id)
            for position in write_set(quorum, entry_id)
            if position in answers
        ]
        if known.count(True) < quorum.ack_quorum_size:
            is_decided = known.count(False) >= absent_min
            return LedgerEnd(claimed, held, is_decided, vouched, is_vouched)
        held = entry_id


def _is_vouched(
    quorum: QuorumConfig, answers: Mapping[int, HeldEntries], vouched: int, claimed: int
) -> bool:
    """Return whether others hold enough of the entries that one bookie alone calls acknowledged."""
    others = {
        position: answer
        for position, answer in answers.items()
        if answer.last_add_confirmed <= vouched
    }
    holders_min = max(1, quorum.ack_quorum_size - 1)
    for entry_id in range(vouched + 1, claimed + 1):
        write_positions = write_set(quorum, entry_id)
        holders = sum(p in others and _holds(others[p], entry_id) is True for p in write_positions)
        if holders < holders_min:
            return False
    return True


def _holds(answer: HeldEntries, entry_id: int) -> bool | None:
    """Return whether a bookie holds an entry above the LAC; None: it did not say."""
    if any(first <= entry_id <= last for first, last in answer.ranges):
        return True
    return False if entry_id <= answer.known_to else None
