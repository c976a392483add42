"""The history checker finds what it is for: each kind of break is planted and must be counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlcore import DLSN
from tests.chaos.history import DAMAGED, Found, History, judge, longest_gap_s
from tests.chaos.payloads import identity_of, payload_of

LOG = "log"


def history_of(*lines: str) -> History:
    """Return the history that lines with blanks for tabs tell."""
    history = History()
    history.add_file("".join(line.replace(" ", "\t") + "\n" for line in lines))
    return history


def found(*identities: str, log_entries_from: int = 0) -> list[Found]:
    """Return records in a row."""
    return [
        Found(DLSN(1, log_entries_from + number, 0), number, identity)
        for number, identity in enumerate(identities)
    ]


SOUND = (
    "S log w#0 - 1.0",
    "S log w#1 - 1.1",
    "A w#0 1:0:0 1.2",
    "A w#1 1:1:0 1.3",
    "S log v#0 - 1.4",
    "S log w#2 - 1.5",
    "A v#0 1:2:0 1.6",
    "T log r 1:0:0 w#0",
    "T log r 1:1:0 w#1",
)
WHOLE = found("w#0", "w#1", "v#0")


def counts(history: History, records: list[Found]) -> dict[str, int]:
    """Return how often each promise was broken, where it was."""
    return dict(judge(history, {LOG: records}).counts)


def test_a_sound_history_is_clean() -> None:
    """An append without an acknowledgement may be there or not."""
    assert counts(history_of(*SOUND), WHOLE) == {}
    assert counts(history_of(*SOUND), found("w#0", "w#1", "v#0", "w#2")) == {}


def test_a_lost_record() -> None:
    """At the end, or in the middle, where the numbers behind it shift as well."""
    assert counts(history_of(*SOUND), WHOLE[:2]) == {"lost": 1}
    middle = [WHOLE[0], replace(WHOLE[2], sequence_id=1)]
    assert counts(history_of(*SOUND), middle) == {"lost": 1, "diverged": 1}


def test_a_gap_in_the_numbers() -> None:
    """Sequence ids have no gaps."""
    assert counts(history_of(*SOUND), [*WHOLE[:2], replace(WHOLE[2], sequence_id=7)]) == {
        "misnumbered": 1
    }


def test_a_doubled_record() -> None:
    """An append that was not acknowledged must not be there twice either."""
    again = Found(DLSN(1, 3, 0), 3, "w#0")
    assert counts(history_of(*SOUND), [*WHOLE, again]) == {"doubled": 1, "out of order": 2}
    twice = found("w#0", "w#1", "v#0", "w#2", "w#2")
    assert counts(history_of(*SOUND), twice) == {"doubled": 1}


def test_one_writer_out_of_order() -> None:
    """Its records come in the order it wrote them, though no acknowledgement says so."""
    history = history_of("S log w#0 - 1.0", "S log w#1 - 1.0")
    assert counts(history, found("w#1", "w#0")) == {"out of order": 1}


def test_two_writers_out_of_order_in_time() -> None:
    """An append that began after an acknowledgement comes after it; overlapping ones may swap."""
    after = history_of("S log w#0 - 1.0", "A w#0 - 1.1", "S log v#0 - 1.2", "A v#0 - 1.3")
    assert counts(after, found("w#0", "v#0")) == {}
    assert counts(after, found("v#0", "w#0")) == {"out of order": 1}
    beside = history_of("S log w#0 - 1.0", "S log v#0 - 1.1", "A w#0 - 1.2", "A v#0 - 1.3")
    assert counts(beside, found("v#0", "w#0")) == {}


def test_a_moved_record() -> None:
    """It is read, and not where its writer's answer said."""
    moved = replace(WHOLE[2], dlsn=DLSN(1, 3, 0))
    assert counts(history_of(*SOUND), [*WHOLE[:2], moved]) == {"moved": 1}


def test_a_damaged_record() -> None:
    """Bytes that no client wrote; the record that they were is lost."""
    assert counts(history_of(*SOUND), [*WHOLE[:2], replace(WHOLE[2], identity=DAMAGED)]) == {
        "damaged": 1,
        "lost": 1,
    }


def test_a_record_in_the_wrong_log() -> None:
    """It is not lost, and still wrong."""
    verdict = judge(history_of(*SOUND), {LOG: WHOLE[:2], "other": found("v#0", log_entries_from=2)})
    assert dict(verdict.counts) == {"in the wrong log": 1}


def test_positions_that_do_not_rise() -> None:
    """A reader gave records in an order that contradicts their positions."""
    swapped = [WHOLE[1], WHOLE[0], WHOLE[2]]
    assert counts(history_of(*SOUND), swapped)["misnumbered"] == 3


def test_an_atomic_append_torn_apart() -> None:
    """All of a group or nothing, across logs, acknowledged or not."""
    history = history_of("S log w#0 g 1.0", "S other v#0 g 1.0")
    both = {LOG: found("w#0"), "other": found("v#0")}
    assert judge(history, both).is_clean
    assert judge(history, {LOG: [], "other": []}).is_clean
    assert dict(judge(history, {LOG: found("w#0"), "other": []}).counts) == {"torn apart": 1}


@pytest.mark.parametrize(
    "given",
    [
        ["T log r 1:1:0 w#1"],
        ["T log r 1:0:0 w#0", "T log r 1:0:0 w#0"],
        ["T log r 1:0:0 w#0", "T log r 1:2:0 v#0"],
        ["T log r 1:0:0 w#0", "T log r 1:1:0 w#2"],
        [*(f"T log r {each.dlsn} {each.identity}" for each in WHOLE), "T log r 1:3:0 w#2"],
    ],
    ids=["skipped the first", "twice", "skipped one", "another record", "beyond the end"],
)
def test_a_tail_reader_that_was_given_something_else(given: list[str]) -> None:
    """Readers see the beginning of what the log holds in the end, and nothing else."""
    assert counts(history_of(*SOUND[:7], *given), WHOLE) == {"diverged": 1}


def test_a_torn_line_ends_a_file() -> None:
    """A killed process leaves half a line at most; whole lines count."""
    history = History()
    history.add_file("S\tlog\tw#0\t-\t1.0\nA\tw#0\t1:0:")
    assert list(history.appends) == ["w#0"]
    assert history.appends["w#0"].acked_s is None
    with pytest.raises(ValueError, match="twice"):
        history.add_file("S\tlog\tw#0\t-\t1.0\n")


def test_payloads_show_damage() -> None:
    """Each identity has its own bytes, of several sizes, and a flipped or missing one is seen."""
    sizes = set()
    for number in range(1000):
        payload = payload_of(f"w#{number}")
        sizes.add(len(payload))
        assert identity_of(payload) == f"w#{number}"
        assert identity_of(payload[:-1]) is None
        assert identity_of(bytes([payload[0] ^ 1]) + payload[1:]) is None
    assert max(sizes) > 40_000 > min(sizes) + 30_000
    assert identity_of(b"\xff\xfe") is None


def test_acknowledged_entries() -> None:
    """An entry counts once, whatever number of its records was acknowledged."""
    together = [*WHOLE[:2], replace(WHOLE[2], dlsn=DLSN(1, 1, 1))]
    history = history_of(*SOUND)
    assert history.count_acked_entries({LOG: WHOLE}) == 3
    assert history.count_acked_entries({LOG: together}) == 2
    assert history.count_acked_entries({LOG: found("w#2", "w#0")}) == 1


def test_the_longest_gap() -> None:
    """The time before the first and after the last one counts."""
    assert longest_gap_s([2.0, 3.0, 7.0], first_s=1.0, last_s=8.0) == 4.0
    assert longest_gap_s([2.0, 20.0], first_s=1.0, last_s=8.0) == 6.0
    assert longest_gap_s([], first_s=1.0, last_s=8.0) == 7.0
