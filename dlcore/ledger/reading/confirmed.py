"""The end of an open ledger for a read that begins: by what bookies hold, not by the LAC alone.

Theory of operation.  An entry is acknowledged once Qa bookies of its write set hold it, and all
entries before it are acknowledged.  The bookies learn of that later, by the LAC.  A read that asked
for the LAC alone would miss what was acknowledged a moment ago, so it asks for both: the LAC, and
which entries above it are durable.  By the answers each entry behind the highest LAC is

* *held*, where Qa of its write set hold it;
* *absent*, where Qw - Qa + 1 of it do not: when the read began too few held it for an
  acknowledgement, and so it was not acknowledged, nor was any entry behind it;
* *undecided* otherwise: the missing answers could make it either.

The ledger's end is the entry before the first absent one.  It is at or above every entry that was
acknowledged when the read began.  What is held and was not acknowledged may be shown, for it stays:

* a recovery ends the ledger at Qw - Qa + 1 proven noes, which an entry held by Qa never gets;
* a writer that replaces a bookie first copies to the new one whatever the old one may hold above
  the LAC, and then changes the metadata (`writing/append.py`);
* a writer that fails with entries unacknowledged leaves the ledger's end to a recovery.

That argument is about bookies that got the entry of its writer.  While a ledger is in recovery,
others write entries back, which another recovery may have left out already; therefore the metadata
must call the ledger open, with the same bookies, after the last answer has come.

The driver is `LedgerReader.read_last_add_confirmed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dlcore.ledger.metadata.quorum import is_covered, write_set
from dlcore.ledger.reading.claims import vouched_and_claimed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.config import QuorumConfig
    from dlcore.ledger.port import HeldEntries


class LedgerEnd(NamedTuple):
    """What bookies say of an open ledger's end.

    Entries up to `told` are acknowledged, as bookies know; those behind it up to `held` are held by
    an ack quorum.  The entry behind them is absent, or `is_decided` is False.  What one bookie
    tells alone, behind `vouched`, is a claim (`claims`), unless others hold what it names.
    """

    told: int
    held: int
    is_decided: bool
    vouched: int
    is_vouched: bool


def judge_end(
    quorum: QuorumConfig, first_entry_id: int, answers: Mapping[int, HeldEntries]
) -> LedgerEnd | None:
    """Return the end of a ledger by answers of its last ensemble; None: there are too few.

    Args:
        quorum: the ledger's.
        first_entry_id: of the last ensemble; the entries before it are acknowledged.
        answers: by position.
    """
    if not is_covered(quorum, answers.keys()):
        return None
    lacs = [answer.last_add_confirmed for answer in answers.values()]
    vouched, told = vouched_and_claimed(lacs, floor=first_entry_id - 1)
    is_vouched = _is_vouched(quorum, answers, vouched, told)
    absent_min = quorum.write_quorum_size - quorum.ack_quorum_size + 1
    held = told
    while True:
        entry_id = held + 1
        known = [
            _holds(answers[position], entry_id)
            for position in write_set(quorum, entry_id)
            if position in answers
        ]
        if known.count(True) < quorum.ack_quorum_size:
            is_decided = known.count(False) >= absent_min
            return LedgerEnd(told, held, is_decided, vouched, is_vouched)
        held = entry_id


def _is_vouched(
    quorum: QuorumConfig, answers: Mapping[int, HeldEntries], vouched: int, told: int
) -> bool:
    """Return whether others hold enough of what one bookie alone calls acknowledged."""
    others = {
        position: answer
        for position, answer in answers.items()
        if answer.last_add_confirmed <= vouched
    }
    holders_min = max(1, quorum.ack_quorum_size - 1)
    for entry_id in range(vouched + 1, told + 1):
        write_positions = write_set(quorum, entry_id)
        holders = sum(p in others and _holds(others[p], entry_id) is True for p in write_positions)
        if holders < holders_min:
            return False
    return True


def _holds(answer: HeldEntries, entry_id: int) -> bool | None:
    """Return whether a bookie holds an entry above the LAC; None if it did not say."""
    if any(first <= entry_id <= last for first, last in answer.ranges):
        return True
    return False if entry_id <= answer.told_to else None
