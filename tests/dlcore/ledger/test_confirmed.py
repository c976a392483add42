"""Goal: a read that begins sees what was acknowledged, and is shown nothing that may go again."""

from __future__ import annotations

import random

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.ledger.metadata.quorum import is_covered, write_set
from dlcore.ledger.reading.confirmed import LedgerEnd, judge_end
from dlcore.wire.port import ENTRY_ID_MAX, HeldEntries
from tests.fixtures.ledgers import quorum_of
from tests.fixtures.lengths import sample

QUORUMS = [
    quorum_of(e, w, a) for e in range(1, 6) for w in range(1, e + 1) for a in range(1, w + 1)
]


def answer(lac: int, *ranges: tuple[int, int], to: int = ENTRY_ID_MAX) -> HeldEntries:
    """Return an answer."""
    return HeldEntries(lac, to, ranges)


def judged(*answers: HeldEntries | None, first_entry_id: int = 0) -> LedgerEnd | None:
    """Return the answers of three bookies, two of which acknowledge; None: it did not answer."""
    known = {position: each for position, each in enumerate(answers) if each is not None}
    return judge_end(QuorumConfig(), first_entry_id, known)


def end_of(*answers: HeldEntries | None, first_entry_id: int = 0) -> tuple[int, int, bool] | None:
    """Return the claimed and the held entry, and whether it is decided."""
    end = judged(*answers, first_entry_id=first_entry_id)
    return None if end is None else (end.claimed, end.held, end.is_decided)


def test_the_lac_is_the_end_where_no_bookie_holds_more() -> None:
    """Two noes of three are enough: too few hold the next entry for an acknowledgement."""
    assert end_of(answer(4), answer(3), None) == (4, 4, True)
    assert end_of(answer(-1), answer(-1), None) == (-1, -1, True)
    assert end_of(answer(-1), answer(-1), None, first_entry_id=9) == (8, 8, True)


def test_too_few_answers_say_nothing() -> None:
    """The two silent bookies may have acknowledged anything."""
    assert end_of(answer(4), None, None) is None


def test_entries_of_an_ack_quorum_are_shown() -> None:
    """Up to the first entry that too few hold, also where more is held behind it."""
    assert end_of(answer(4, (5, 7)), answer(3, (4, 6)), answer(4, (5, 5), (7, 7))) == (4, 7, True)
    assert end_of(answer(4, (5, 7)), answer(4, (5, 6)), answer(4)) == (4, 6, True)
    assert end_of(answer(4, (6, 9)), answer(4, (6, 9)), answer(4)) == (4, 4, True)


def test_a_missing_answer_may_decide() -> None:
    """One yes and one no: the third may have acknowledged it, or not."""
    assert end_of(answer(4, (5, 5)), answer(4), None) == (4, 4, False)
    assert end_of(answer(4, (5, 6)), answer(4, (5, 5)), None) == (4, 5, False)


def test_silence_of_a_bookie_is_not_a_no() -> None:
    """It tells of so many entries only."""
    assert end_of(answer(4, (5, 5), to=5), answer(4), answer(4, to=4)) == (4, 4, False)
    assert end_of(answer(4, (5, 5), to=5), answer(4, (5, 6)), None) == (4, 5, False)


@pytest.mark.parametrize(
    ("answers", "is_vouched"),
    [
        ([answer(4), answer(4), None], True),
        ([answer(4), answer(3, (4, 4)), None], True),
        ([answer(4), answer(3), answer(2, (3, 4))], True),
        ([answer(4), answer(3), None], False),
        ([answer(5), answer(3, (4, 4)), answer(3)], False),
        ([answer(2**62), answer(3, (4, 9)), answer(3, (4, 9))], False),
    ],
)
def test_a_lac_of_one_bookie_alone_is_a_claim(
    answers: list[HeldEntries | None], is_vouched: bool
) -> None:
    """Unless another one holds what it names, or knows the same LAC."""
    end = judged(*answers)
    assert end is not None
    assert end.is_vouched is is_vouched
    assert end.vouched == (4 if answers[1] == answer(4) else 3)


@pytest.mark.parametrize("quorum", sample(QUORUMS, 12), ids=str)
def test_by_chance(quorum: QuorumConfig) -> None:
    """Goal: the end is at or above every acknowledgement, and below nothing that may go again.

    Method: entries reach random bookies of their write sets, with gaps; what was acknowledged
    follows.  Random bookies answer, some of them for a part; the end is found by the definition.
    """
    rng = random.Random(str(quorum))
    positions = range(quorum.ensemble_size)
    for _ in range(200):
        count = rng.randint(0, 8)
        holders = [
            {p for p in write_set(quorum, e) if rng.random() < rng.choice((0.5, 0.9, 1.0))}
            for e in range(count)
        ]
        acked = -1
        while acked + 1 < count and len(holders[acked + 1]) >= quorum.ack_quorum_size:
            acked += 1
        answers: dict[int, HeldEntries] = {}
        for position in positions:
            if rng.random() < 0.8:
                lac = rng.randint(-1, acked)
                to = rng.choice((ENTRY_ID_MAX, rng.randint(lac, count)))
                held = [e for e in range(lac + 1, count) if position in holders[e] and e <= to]
                answers[position] = HeldEntries(lac, to, [(e, e) for e in held])
        end = judge_end(quorum, 0, answers)
        assert (end is not None) == is_covered(quorum, answers.keys())
        if end is None:
            continue
        assert end.claimed <= end.held <= acked
        assert end.claimed == max(each.last_add_confirmed for each in answers.values())
        assert not end.is_decided or end.held == acked
        if len(answers) == len(positions) and all(
            each.known_to == ENTRY_ID_MAX for each in answers.values()
        ):
            assert end.is_decided
