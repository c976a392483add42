"""Goal: every decision of recovery.  Method: feed answers, compare the exact effects."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    BookieUnavailableError,
    DLError,
    LedgerRecoveryError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ledger.recovering.recovery import (
    AbortRecovery,
    Effect,
    EndLedger,
    Event,
    FenceBookie,
    Fenced,
    FenceFailed,
    Found,
    LedgerRecovery,
    Missing,
    ReadEntry,
    RecoveryState,
    Signal,
    StartWriteBack,
    Unknown,
    WriteBack,
    WriteBackFailed,
    WrittenBack,
    answer_to,
    closed_over,
)
from tests.fixtures.ledgers import LEDGER_ID, bookie, entry_of, frame_of, metadata_of, quorum_of
from tests.fixtures.lengths import for_each

if TYPE_CHECKING:
    from dlcore.base.config import QuorumConfig
    from dlcore.ledger.metadata.values import LedgerMetadata

UNKNOWN = BookieUnavailableError("silent")


class Recovery(LedgerRecovery):
    """A machine that is checked after each event."""

    def handle(self, event: Event) -> list[Effect]:
        """Take one event."""
        effects = super().handle(event)
        self.validate()
        return effects


def recovery_of(
    *ensembles: tuple[int, str], quorum: QuorumConfig | None = None, ahead: int = 1
) -> LedgerRecovery:
    """Return a machine for a ledger in recovery."""
    metadata = metadata_of(
        *(ensembles or ((0, "ABC"),)), quorum=quorum, state=LedgerState.IN_RECOVERY
    )
    machine = Recovery(metadata, read_ahead_max=ahead)
    machine.validate()
    return machine


def reads(entry_id: int, *positions: tuple[int, str]) -> list[ReadEntry]:
    """Return the effects that read an entry."""
    return [
        ReadEntry(entry_id=entry_id, position=position, bookie=bookie(name))
        for position, name in positions
    ]


def reading(lac: int = -1, *, quorum: QuorumConfig | None = None, ahead: int = 1) -> LedgerRecovery:
    """Return a recovery of ABC that reads its first entry."""
    machine = recovery_of(quorum=quorum, ahead=ahead)
    machine.handle(Signal.BEGIN)
    for position in range(3):
        machine.handle(Fenced(position, lac))
    return machine


def test_fencing_goes_to_the_whole_last_ensemble_and_ends_with_coverage() -> None:
    """And the highest LAC is the start."""
    machine = recovery_of((0, "ABC"), (5, "ABD"))
    assert machine.handle(Signal.BEGIN) == [
        FenceBookie(position=position, bookie=bookie(name)) for position, name in enumerate("ABD")
    ]
    assert machine.handle(Fenced(2, 7)) == []
    assert machine.handle(FenceFailed(0, UNKNOWN)) == []
    assert machine.handle(Fenced(1, 7)) == [
        StartWriteBack(last_add_confirmed=7),
        *reads(7, (1, "B"), (2, "D"), (0, "A")),  # how many bytes the next one follows
        *reads(8, (2, "D"), (0, "A"), (1, "B")),
    ]
    assert machine.handle(Fenced(0, 9)) == []  # late, and not needed


def test_entries_before_the_last_ensemble_are_taken_as_acknowledged() -> None:
    """BookKeeper's #2615."""
    machine = recovery_of((0, "ABC"), (5, "ABD"))
    machine.handle(Signal.BEGIN)
    machine.handle(Fenced(0, -1))
    effects = machine.handle(Fenced(1, 2))
    assert effects[0] == StartWriteBack(last_add_confirmed=4)


def test_coverage_of_a_striped_ensemble_is_of_every_write_set() -> None:
    """Three of five leave one write set open."""
    machine = recovery_of((0, "ABCDE"), quorum=quorum_of(5, 3, 2))
    machine.handle(Signal.BEGIN)
    for position in (0, 1, 2):
        assert machine.handle(Fenced(position, -1)) == []
    assert machine.handle(Fenced(3, -1)) != []


def test_without_coverage_it_aborts_once_everybody_answered() -> None:
    """It does not guess, and says which bookies did not answer."""
    machine = recovery_of()
    machine.handle(Signal.BEGIN)
    machine.handle(FenceFailed(0, UNKNOWN))
    machine.handle(Fenced(2, -1))
    (effect,) = machine.handle(FenceFailed(1, UNKNOWN))
    assert isinstance(effect, AbortRecovery)
    assert isinstance(effect.error, LedgerRecoveryError)
    assert "too few bookies fenced it: A/00000000: BookieUnavailableError: silent" in str(
        effect.error
    )
    assert machine.handle(Fenced(0, -1)) == []


def test_answers_before_the_reads_mean_nothing() -> None:
    """They cannot be about anything."""
    machine = recovery_of()
    machine.handle(Signal.BEGIN)
    assert machine.handle(Found(entry_of(0))) == []
    assert machine.handle(Missing(0, 0)) == []
    assert machine.handle(Unknown(0, 0, UNKNOWN)) == []


def test_one_copy_recovers_and_two_noes_end() -> None:
    """Generous with entries, strict with the end."""
    machine = reading()
    assert machine.handle(Missing(0, 0)) == []
    entry = entry_of(0)
    assert machine.handle(Found(entry)) == [WriteBack(entry=entry)]
    assert machine.handle(Found(entry_of(0))) == []  # a second copy
    assert machine.handle(WrittenBack(0)) == reads(1, (1, "B"), (2, "C"), (0, "A"))
    assert machine.handle(Missing(1, 1)) == []
    assert machine.handle(Missing(1, 1)) == []  # the same one again
    assert machine.handle(Missing(1, 0)) == [EndLedger(last_entry_id=0)]
    assert machine.handle(Found(entry_of(1))) == []  # decided


def test_an_empty_ledger_ends_at_once() -> None:
    """At -1."""
    machine = reading()
    machine.handle(Missing(0, 0))
    assert machine.handle(Missing(0, 2)) == [EndLedger(last_entry_id=-1)]


def test_unknown_never_counts_as_no() -> None:
    """One no and two unknown decide nothing."""
    machine = reading()
    machine.handle(Missing(0, 0))
    assert machine.handle(Unknown(0, 1, UNKNOWN)) == []
    (effect,) = machine.handle(Unknown(0, 2, UNKNOWN))
    assert isinstance(effect, AbortRecovery)
    assert "entry 0 may exist: B/00000000" in str(effect.error)
    assert machine.handle(Missing(0, 1)) == []


def test_one_unknown_does_not_hold_up_what_the_others_decide() -> None:
    """A dead bookie must not block recovery (#1067)."""
    machine = reading()
    machine.handle(Unknown(0, 0, UNKNOWN))
    machine.handle(Missing(0, 1))
    assert machine.handle(Missing(0, 2)) == [EndLedger(last_entry_id=-1)]
    machine = reading()
    machine.handle(Unknown(0, 0, UNKNOWN))
    assert machine.handle(Found(entry_of(0))) == [WriteBack(entry=entry_of(0))]


def test_where_all_must_hold_an_entry_one_no_ends_it() -> None:
    """Qw = Qa."""
    machine = recovery_of(quorum=quorum_of(3, 3, 3))
    machine.handle(Signal.BEGIN)
    machine.handle(Fenced(1, -1))
    assert machine.handle(Missing(0, 2)) == [EndLedger(last_entry_id=-1)]


def test_reading_ahead_decides_in_order_and_ends_after_writing_back() -> None:
    """The ledger ends only with what Qa hold."""
    machine = reading(ahead=3)
    machine.handle(Missing(2, 0))
    assert machine.handle(Missing(2, 1)) == []  # the end, if 0 and 1 exist
    assert machine.handle(Found(entry_of(1))) == []
    assert machine.handle(Found(entry_of(0))) == [
        WriteBack(entry=entry_of(0)),
        WriteBack(entry=entry_of(1)),
    ]
    assert machine.handle(WrittenBack(0)) == []
    assert machine.handle(WrittenBack(1)) == [EndLedger(last_entry_id=1)]
    assert machine.handle(WrittenBack(1)) == []


def test_an_abort_beyond_a_recovered_entry_still_writes_it_back() -> None:
    """The next recovery finds it easier."""
    machine = reading(ahead=2)
    for position in range(3):
        machine.handle(Unknown(1, position, UNKNOWN))
    effects = machine.handle(Found(entry_of(0)))
    assert effects[0] == WriteBack(entry=entry_of(0))
    assert isinstance(effects[1], AbortRecovery)
    assert machine.handle(WrittenBack(0)) == []


def test_an_entry_that_cannot_be_written_back_ends_it() -> None:
    """The ledger stays as it is, before its end is known and after."""
    for noes in ((), (0, 1)):
        machine = reading(ahead=2)
        machine.handle(Found(entry_of(0)))
        for position in noes:
            assert machine.handle(Missing(1, position)) == []
        (abort,) = machine.handle(WriteBackFailed(UNKNOWN))
        assert isinstance(abort, AbortRecovery)
        assert "a recovered entry was not written back: silent" in str(abort.error)
        assert abort.error.__cause__ is UNKNOWN
        assert machine.state is RecoveryState.ABORTED
        for event in (WriteBackFailed(UNKNOWN), WrittenBack(0), Found(entry_of(1))):
            assert machine.handle(event) == []


class RandomRecovery:
    """Some bookies are silent, the others hold what they hold; answers come in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        quorum = quorum_of(*rng.choice([(3, 3, 2), (5, 3, 2), (3, 3, 3), (3, 2, 1)]))
        size = quorum.ensemble_size
        self.machine = recovery_of((0, "ABCDE"[:size]), quorum=quorum, ahead=rng.choice((1, 3, 16)))
        self.acked = -1
        self.holders: list[set[int]] = []
        for entry_id in range(rng.randint(0, 8)):
            positions = [(entry_id + i) % size for i in range(quorum.write_quorum_size)]
            holders = set(rng.sample(positions, rng.randint(0, len(positions))))
            self.holders.append(holders)
            if len(holders) >= quorum.ack_quorum_size and self.acked == entry_id - 1:
                self.acked = entry_id
        self.silent = set(rng.sample(range(size), rng.choice((0, 0, 1, 2))))
        self.requests: list[Effect] = []
        self.written = -1
        self.ends: list[int] = []
        self.aborts = 0

    def take(self, effects: list[Effect]) -> None:
        """Do what needs no bookie; queue the rest."""
        for effect in effects:
            match effect:
                case StartWriteBack(last_add_confirmed=lac):
                    self.written = lac
                case WriteBack(entry=entry):
                    assert entry.entry_id == self.written + 1
                    self.written += 1
                    self.requests.append(effect)
                case EndLedger(last_entry_id=last):
                    self.ends.append(last)
                case AbortRecovery():
                    self.aborts += 1
                case _:
                    self.requests.append(effect)

    def answer(self) -> list[Effect]:
        """Let one of the requests be answered."""
        effect = self.requests.pop(self.rng.randrange(len(self.requests)))
        match effect:
            case FenceBookie(position=position):
                return self.answer_fence(position)
            case ReadEntry(entry_id=entry_id, position=position):
                return self.answer_read(entry_id, position)
            case _:
                # Confirmations come in order, whatever arrives first.
                waiting = [e.entry.entry_id for e in self.requests if isinstance(e, WriteBack)]
                last = min(waiting, default=self.written + 1) - 1
                assert isinstance(effect, WriteBack)
                if last < effect.entry.entry_id:
                    self.requests.append(effect)
                    return []
                return self.machine.handle(WrittenBack(last))

    def answer_fence(self, position: int) -> list[Effect]:
        """Answer with any LAC that the writer may have sent."""
        if position in self.silent:
            return self.machine.handle(FenceFailed(position, UNKNOWN))
        lac = self.rng.randint(-1, self.acked)
        return self.machine.handle(Fenced(position, lac))

    def answer_read(self, entry_id: int, position: int) -> list[Effect]:
        """Answer truthfully, or not at all."""
        if position in self.silent:
            return self.machine.handle(Unknown(entry_id, position, UNKNOWN))
        if entry_id < len(self.holders) and position in self.holders[entry_id]:
            return self.machine.handle(Found(entry_of(entry_id)))
        return self.machine.handle(Missing(entry_id, position))


@for_each(range(200))
def test_random_answers_lose_nothing_and_invent_nothing(seed: int) -> None:
    """Entries of Qa bookies are kept, entries of none are not made, and every run ends."""
    run = RandomRecovery(seed)
    run.take(run.machine.handle(Signal.BEGIN))
    while run.requests:
        run.take(run.answer())
    assert len(run.ends) + run.aborts == 1
    for end in run.ends:
        assert run.acked <= end
        assert run.written == end
        assert all(run.holders[entry_id] for entry_id in range(end + 1))
    if not run.silent:
        held = list(itertools.takewhile(bool, run.holders))
        # Where one no is enough, one bookie that lacks the entry may end it earlier.
        assert run.ends[0] <= len(held) - 1


def claimed(*lacs: int, quorum: QuorumConfig | None = None) -> tuple[LedgerRecovery, list[Effect]]:
    """Return a recovery whose bookies returned these LACs, and what it does next."""
    machine = recovery_of(quorum=quorum, ahead=4)
    machine.handle(Signal.BEGIN)
    effects: list[Effect] = []
    for position, lac in enumerate(lacs):
        effects = machine.handle(Fenced(position, lac))
    return machine, effects


def refused(machine: LedgerRecovery, entry_id: int, *positions: int) -> list[Effect]:
    """Let bookies prove that they do not hold an entry."""
    effects: list[Effect] = []
    for position in positions:
        effects = machine.handle(Missing(entry_id, position))
    return effects


def starts(effects: list[Effect]) -> list[int]:
    """Return where recovery begins."""
    return [each.last_add_confirmed for each in effects if isinstance(each, StartWriteBack)]


@pytest.mark.parametrize("lac", [7, 8, 100, 2**62])
def test_a_lac_that_one_bookie_tells_and_a_quorum_disproves_is_no_start(lac: int) -> None:
    """Recovery begins at the LAC that another one returned, too."""
    machine, effects = claimed(lac, 5)
    assert starts(effects) == []
    assert {each.entry_id for each in effects if isinstance(each, ReadEntry)} == set(
        range(6, min(lac, 9) + 1)
    )
    assert machine.handle(Found(entry_of(6, body=b"x", ledger_bytes=60))) == []
    assert starts(refused(machine, 7, 1, 2)) == [5]


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "unknown"])
def test_a_lac_of_one_bookie_that_no_other_disproves_is_the_start(*, is_held: bool) -> None:
    """As BookKeeper has it: what was acknowledged is never read again to be lost."""
    machine, _ = claimed(7, 5)
    machine.handle(Found(entry_of(6, body=b"x", ledger_bytes=60)))
    if is_held:
        effects = machine.handle(Found(entry_of(7, body=b"x", ledger_bytes=61)))
    else:
        machine.handle(Unknown(7, 0, UNKNOWN))
        machine.handle(Unknown(7, 1, UNKNOWN))
        effects = machine.handle(Missing(7, 2))
    assert starts(effects) == [7]


def test_a_bookie_that_answers_alone_is_asked_for_the_newest_entry() -> None:
    """It may hold it or not; if not, the whole ensemble's entries are read."""
    quorum = quorum_of(2, 2, 2)
    for holds in (True, False):
        machine = Recovery(metadata_of((0, "AB"), quorum=quorum, state=LedgerState.IN_RECOVERY))
        machine.handle(Signal.BEGIN)
        assert [
            each.entry_id for each in machine.handle(Fenced(0, 9)) if isinstance(each, ReadEntry)
        ] == [9, 9]
        if holds:
            assert starts(machine.handle(Found(entry_of(9, body=b"x", ledger_bytes=9)))) == [9]
        else:
            assert starts(machine.handle(Missing(9, 0))) == [-1]


def test_an_entry_that_does_not_count_on_from_the_one_before_has_no_owner() -> None:
    """The ledger ends before it where a quorum does not hold it; another copy is taken."""
    forged = entry_of(6, body=b"forged", ledger_bytes=6)
    machine, _ = claimed(5, 5)
    machine.handle(Found(entry_of(5, body=b"x", ledger_bytes=50)))
    assert machine.handle(Found(forged)) == []
    assert refused(machine, 6, 1, 2) == [EndLedger(last_entry_id=5)]

    machine, _ = claimed(5, 5)
    assert machine.handle(Found(forged)) == []
    own = entry_of(6, body=b"own", ledger_bytes=53)
    assert machine.handle(Found(own)) == []
    assert machine.handle(Found(entry_of(5, body=b"x", ledger_bytes=50))) == [WriteBack(entry=own)]

    machine, _ = claimed(5, 5)
    machine.handle(Found(entry_of(5, body=b"x", ledger_bytes=50)))
    machine.handle(Found(forged))
    machine.handle(Missing(6, 1))
    (abort,) = machine.handle(Unknown(6, 2, UNKNOWN))
    assert isinstance(abort, AbortRecovery)
    assert "do not follow on the 50 before them" in str(abort.error)


def test_entries_of_an_ack_quorum_are_recovered_whatever_it_counts() -> None:
    """It may have been acknowledged."""
    machine, _ = claimed(5, 5)
    machine.handle(Found(entry_of(5, body=b"x", ledger_bytes=7)))
    own = entry_of(6, body=b"own", ledger_bytes=53)
    assert machine.handle(Found(own)) == []
    assert machine.handle(Found(own)) == [WriteBack(entry=own)]


def test_where_the_entry_before_cannot_be_read_any_copy_will_do() -> None:
    """One copy recovers an entry."""
    machine, _ = claimed(5, 5)
    own = entry_of(6, body=b"own", ledger_bytes=53)
    assert machine.handle(Found(own)) == []
    for position in (0, 1):
        assert machine.handle(Unknown(5, position, UNKNOWN)) == []
    assert machine.handle(Missing(5, 2)) == [WriteBack(entry=own)]


def answers(
    machine: LedgerRecovery, read: ReadEntry, answer: bytes | memoryview | DLError
) -> list[Effect]:
    """Let a bookie answer a read."""
    return machine.handle(answer_to(read, answer, ledger_id=LEDGER_ID))


@pytest.mark.parametrize("error", [NoSuchEntryError("not here"), NoSuchLedgerError("never seen")])
def test_an_answer_is_a_copy_a_proven_no_or_unknown(error: DLError) -> None:
    """Damage is no copy and no proof, as an error is that tells of something else."""
    damaged = bytearray(frame_of(0))
    damaged[-1] ^= 1
    asked = reads(0, (0, "A"), (1, "B"), (2, "C"))
    machine = reading()
    assert answers(machine, asked[0], error) == []
    assert answers(machine, asked[1], bytes(damaged)) == []
    (abort,) = answers(machine, asked[2], UNKNOWN)
    assert isinstance(abort, AbortRecovery)
    assert "B/00000000: DigestMismatchError" in str(abort.error)
    machine = reading()
    assert answers(machine, asked[1], bytes(damaged)) == []
    assert [type(each) for each in answers(machine, asked[0], frame_of(0))] == [WriteBack]
    machine = reading()
    answers(machine, asked[0], error)
    assert answers(machine, asked[1], error) == [EndLedger(last_entry_id=-1)]


PINNED = metadata_of((0, "ABC"), (5, "ABD"), state=LedgerState.IN_RECOVERY)
RECOVERED = metadata_of((0, "ABC"), (5, "ABD"), (8, "AED"), state=LedgerState.IN_RECOVERY)


def closing(stored: LedgerMetadata) -> LedgerMetadata | None:
    """Return what a recovery that wrote to one more ensemble stores."""
    return closed_over(stored, pinned=PINNED, recovered=RECOVERED, last_entry_id=9, length_bytes=99)


def test_a_recovery_closes_with_its_own_ensembles_and_the_others_as_they_are_now() -> None:
    """Auto-recovery may have changed an earlier one meanwhile; what others closed stays."""
    repaired = metadata_of((0, "EBC"), (5, "ABD"), state=LedgerState.IN_RECOVERY)
    closed = closing(repaired)
    assert closed is not None
    assert (closed.state, closed.last_entry_id, closed.length_bytes) == (LedgerState.CLOSED, 9, 99)
    assert closed.ensembles == (*repaired.ensembles[:1], *RECOVERED.ensembles[1:])
    assert closing(closed) is None


@pytest.mark.parametrize(
    "changed",
    [
        metadata_of((0, "ABC"), (5, "ABD"), state=LedgerState.OPEN),
        metadata_of((0, "ABC"), (5, "ABE"), state=LedgerState.IN_RECOVERY),
    ],
)
def test_a_recovery_closes_nothing_that_is_written_again(changed: LedgerMetadata) -> None:
    """Only a writer changes the last ensemble."""
    with pytest.raises(LedgerRecoveryError, match="ledger 7 changed while it was recovered: it is"):
        closing(changed)
