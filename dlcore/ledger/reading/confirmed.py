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
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dlcore.ledger.metadata.quorum import is_covered, write_set
from dlcore.ledger.reading.claims import vouched_and_claimed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.base.config import QuorumConfig
    from dlcore.wire.port import HeldEntries


class LedgerEnd(NamedTuple):
    """The end of an open ledger by the answers of its bookies.

    Entries up to `claimed`, the highest LAC, are acknowledged.  An ack quorum holds the entries
    after it up to `held`.  The next entry is absent, or `is_decided` is False.  If one bookie alone
    returned a LAC above `vouched`, it is a claim (`claims`), unless others hold the entries up to
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
