"""Goal: every decision of recovery.  Method: feed answers, compare the exact effects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from dlcore.base.errors import (
    BookieUnavailableError,
    DLError,
    LedgerRecoveryError,
    MetadataConnectionError,
    MetadataVersionError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from dlcore.base.machines import CallFailed
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ledger.recovering.recovery import (
    AbortRecovery,
    Effect,
    EndRecovery,
    FenceBookie,
    Fenced,
    FenceFailed,
    Found,
    LedgerRecovery,
    LengthRead,
    Missing,
    ReadEntry,
    ReadLength,
    ReadMetadata,
    RecoveryState,
    Signal,
    StartWriteBack,
    Unknown,
    WriteBack,
    WriteBackFailed,
    WrittenBack,
    answer_to,
)
from dlcore.ledger.writing.appender import MetadataRead, MetadataStored, StoreMetadata
from tests.fixtures.ledgers import LEDGER_ID, bookie, entry_of, frame_of, metadata_of, quorum_of
from tests.fixtures.recovery_machine import VERSION, Recovery, begun

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlcore.base.config import QuorumConfig
    from dlcore.ledger.metadata.values import LedgerMetadata

UNKNOWN = BookieUnavailableError("silent")
ENSEMBLES = ((0, "ABC"), (5, "ABD"))
PINNED = metadata_of(*ENSEMBLES, state=LedgerState.IN_RECOVERY)
RECOVERED = metadata_of(*ENSEMBLES, (8, "AED"), state=LedgerState.IN_RECOVERY)


def recovery_of(
    *ensembles: tuple[int, str], quorum: QuorumConfig | None = None, ahead: int = 1
) -> LedgerRecovery:
    """Return a machine that fences the ledger."""
    return begun(*ensembles, quorum=quorum, ahead=ahead)[0]


def ends(effects: list[Effect]) -> list[int]:
    """Return the last entry that is stored, or with which the ledger's length is asked for."""
    return [
        each.entry_id if isinstance(each, ReadLength) else each.metadata.last_entry_id
        for each in effects
        if isinstance(each, ReadLength | StoreMetadata)
    ]


FIRST_ENSEMBLES = metadata_of((0, "ABC")).ensembles


def reads(entry_id: int, *positions: tuple[int, str]) -> list[ReadEntry]:
    """Return the effects that read an entry."""
    return [
        ReadEntry(entry_id=entry_id, position=position, bookie=bookie(name))
        for position, name in positions
    ]


def reading(lac: int = -1, *, quorum: QuorumConfig | None = None, ahead: int = 1) -> LedgerRecovery:
    """Return a recovery of ABC that reads its first entry."""
    machine = recovery_of(quorum=quorum, ahead=ahead)
    for position in range(3):
        machine.handle(Fenced(position, lac))
    return machine


def test_fencing_goes_to_the_whole_last_ensemble_and_ends_with_coverage() -> None:
    """And the highest LAC is the start."""
    machine, effects = begun((0, "ABC"), (5, "ABD"))
    assert effects == [
        FenceBookie(position=position, bookie=bookie(name)) for position, name in enumerate("ABD")
    ]
    assert machine.handle(Fenced(2, 7)) == []
    assert machine.handle(FenceFailed(0, UNKNOWN)) == []
    assert machine.handle(Fenced(1, 7)) == [
        StartWriteBack(pinned=MetadataRead(PINNED, VERSION), last_add_confirmed=7),
        *reads(7, (1, "B"), (2, "D"), (0, "A")),  # how many bytes the next one follows
        *reads(8, (2, "D"), (0, "A"), (1, "B")),
    ]
    assert machine.handle(Fenced(0, 9)) == []  # late, and not needed


def test_entries_before_the_last_ensemble_are_taken_as_acknowledged() -> None:
    """BookKeeper's #2615."""
    machine = recovery_of((0, "ABC"), (5, "ABD"))
    machine.handle(Fenced(0, -1))
    effects = machine.handle(Fenced(1, 2))
    assert starts(effects) == [4]


def test_coverage_of_a_striped_ensemble_is_of_every_write_set() -> None:
    """Three of five leave one write set open."""
    machine = recovery_of((0, "ABCDE"), quorum=quorum_of(5, 3, 2))
    for position in (0, 1, 2):
        assert machine.handle(Fenced(position, -1)) == []
    assert machine.handle(Fenced(3, -1)) != []


def test_without_coverage_it_aborts_once_everybody_answered() -> None:
    """It does not guess, and says which bookies did not answer."""
    machine = recovery_of()
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
    assert machine.handle(Found(entry_of(0), 0)) == []
    assert machine.handle(Missing(0, 0)) == []
    assert machine.handle(Unknown(0, 0, UNKNOWN)) == []


def test_one_copy_recovers_and_two_noes_end() -> None:
    """Generous with entries, strict with the end."""
    machine = reading()
    assert machine.handle(Missing(0, 0)) == []
    entry = entry_of(0)
    assert machine.handle(Found(entry, 1)) == [WriteBack(entry=entry)]
    assert machine.handle(Found(entry_of(0), 2)) == []  # a second copy
    assert machine.handle(WrittenBack(0, FIRST_ENSEMBLES)) == reads(1, (1, "B"), (2, "C"), (0, "A"))
    assert machine.handle(Missing(1, 1)) == []
    assert machine.handle(Missing(1, 1)) == []  # the same one again
    assert ends(machine.handle(Missing(1, 0))) == [0]
    assert machine.handle(Found(entry_of(1), 2)) == []  # decided


def test_an_empty_ledger_ends_at_once() -> None:
    """At -1."""
    machine = reading()
    machine.handle(Missing(0, 0))
    assert ends(machine.handle(Missing(0, 2))) == [-1]


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
    assert ends(machine.handle(Missing(0, 2))) == [-1]
    machine = reading()
    machine.handle(Unknown(0, 0, UNKNOWN))
    assert machine.handle(Found(entry_of(0), 1)) == [WriteBack(entry=entry_of(0))]


def test_where_all_must_hold_an_entry_one_no_ends_it() -> None:
    """Qw = Qa."""
    machine = recovery_of(quorum=quorum_of(3, 3, 3))
    machine.handle(Fenced(1, -1))
    assert ends(machine.handle(Missing(0, 2))) == [-1]


def test_reading_ahead_decides_in_order_and_ends_after_writing_back() -> None:
    """The ledger ends only with what Qa hold."""
    machine = reading(ahead=3)
    machine.handle(Missing(2, 0))
    assert machine.handle(Missing(2, 1)) == []  # the end, if 0 and 1 exist
    assert machine.handle(Found(entry_of(1), 0)) == []
    assert machine.handle(Found(entry_of(0), 0)) == [
        WriteBack(entry=entry_of(0)),
        WriteBack(entry=entry_of(1)),
    ]
    assert machine.handle(WrittenBack(0, FIRST_ENSEMBLES)) == []
    assert ends(machine.handle(WrittenBack(1, FIRST_ENSEMBLES))) == [1]
    assert machine.handle(WrittenBack(1, FIRST_ENSEMBLES)) == []


def test_an_abort_beyond_a_recovered_entry_still_writes_it_back() -> None:
    """The next recovery finds it easier."""
    machine = reading(ahead=2)
    for position in range(3):
        machine.handle(Unknown(1, position, UNKNOWN))
    effects = machine.handle(Found(entry_of(0), 0))
    assert effects[0] == WriteBack(entry=entry_of(0))
    assert isinstance(effects[1], AbortRecovery)
    assert machine.handle(WrittenBack(0, FIRST_ENSEMBLES)) == []


def test_an_entry_that_cannot_be_written_back_ends_it() -> None:
    """The ledger stays as it is, before its end is known and after."""
    for noes in ((), (0, 1)):
        machine = reading(ahead=2)
        machine.handle(Found(entry_of(0), 0))
        for position in noes:
            assert machine.handle(Missing(1, position)) == []
        (abort,) = machine.handle(WriteBackFailed(UNKNOWN))
        assert isinstance(abort, AbortRecovery)
        assert "a recovered entry was not written back: silent" in str(abort.error)
        assert abort.error.__cause__ is UNKNOWN
        assert machine.state is RecoveryState.ABORTED
        for event in (
            WriteBackFailed(UNKNOWN),
            WrittenBack(0, FIRST_ENSEMBLES),
            Found(entry_of(1), 0),
        ):
            assert machine.handle(event) == []


def claimed(
    *lacs: int, ensembles: Iterable[tuple[int, str]] = (), quorum: QuorumConfig | None = None
) -> tuple[LedgerRecovery, list[Effect]]:
    """Return a recovery whose bookies returned these LACs, and what it does next."""
    machine = recovery_of(*ensembles, quorum=quorum, ahead=4)
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
    assert machine.handle(Found(entry_of(6, body=b"x", ledger_bytes=60), 0)) == []
    assert starts(refused(machine, 7, 1, 2)) == [5]


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "unknown"])
def test_a_lac_of_one_bookie_that_no_other_disproves_is_the_start(*, is_held: bool) -> None:
    """As BookKeeper has it: what was acknowledged is never read again to be lost."""
    machine, _ = claimed(7, 5)
    machine.handle(Found(entry_of(6, body=b"x", ledger_bytes=60), 0))
    if is_held:
        effects = machine.handle(Found(entry_of(7, body=b"x", ledger_bytes=61), 0))
    else:
        machine.handle(Unknown(7, 0, UNKNOWN))
        machine.handle(Unknown(7, 1, UNKNOWN))
        effects = machine.handle(Missing(7, 2))
    assert starts(effects) == [7]


def test_a_bookie_that_answers_alone_is_asked_for_the_newest_entry() -> None:
    """It may hold it or not; if not, the whole ensemble's entries are read."""
    quorum = quorum_of(2, 2, 2)
    for holds in (True, False):
        machine = recovery_of((0, "AB"), quorum=quorum)
        assert [
            each.entry_id for each in machine.handle(Fenced(0, 9)) if isinstance(each, ReadEntry)
        ] == [9, 9]
        if holds:
            assert starts(machine.handle(Found(entry_of(9, body=b"x", ledger_bytes=9), 0))) == [9]
        else:
            assert starts(machine.handle(Missing(9, 0))) == [-1]


def test_an_entry_that_does_not_count_on_from_the_one_before_has_no_owner() -> None:
    """The ledger ends before it where a quorum does not hold it; another copy is taken."""
    forged = entry_of(6, body=b"forged", ledger_bytes=6)
    machine, _ = claimed(5, 5)
    machine.handle(Found(entry_of(5, body=b"x", ledger_bytes=50), 0))
    assert machine.handle(Found(forged, 0)) == []
    assert ends(refused(machine, 6, 1, 2)) == [5]

    machine, _ = claimed(5, 5)
    assert machine.handle(Found(forged, 0)) == []
    own = entry_of(6, body=b"own", ledger_bytes=53)
    assert machine.handle(Found(own, 1)) == []
    assert machine.handle(Found(entry_of(5, body=b"x", ledger_bytes=50), 0)) == [
        WriteBack(entry=own)
    ]

    machine, _ = claimed(5, 5)
    machine.handle(Found(entry_of(5, body=b"x", ledger_bytes=50), 0))
    machine.handle(Found(forged, 0))
    machine.handle(Missing(6, 1))
    (abort,) = machine.handle(Unknown(6, 2, UNKNOWN))
    assert isinstance(abort, AbortRecovery)
    assert "do not follow on the 50 before them" in str(abort.error)


def test_entries_of_an_ack_quorum_are_recovered_whatever_it_counts() -> None:
    """It may have been acknowledged."""
    machine, _ = claimed(5, 5)
    machine.handle(Found(entry_of(5, body=b"x", ledger_bytes=7), 0))
    own = entry_of(6, body=b"own", ledger_bytes=53)
    assert machine.handle(Found(own, 0)) == []
    assert machine.handle(Found(own, 1)) == [WriteBack(entry=own)]


def test_a_bookie_that_answers_twice_has_one_copy() -> None:
    """The check of a claim and the recovery ask for the same entry: one bookie proves nothing."""
    machine, _ = claimed(5, 3)
    assert starts(refused(machine, 4, 1, 2)) == [3]
    machine.handle(Found(entry_of(3, body=b"x", ledger_bytes=30), 0))
    forged = entry_of(4, body=b"forged", ledger_bytes=999)
    for _ in range(2):
        assert machine.handle(Found(forged, 0)) == []
    assert machine.handle(Missing(4, 1)) == []
    assert ends(machine.handle(Missing(4, 2))) == [3]


def test_a_bookie_that_answers_twice_is_one_that_answered() -> None:
    """Recovery waits for the others before it aborts."""
    machine = reading()
    machine.handle(Missing(0, 0))
    assert machine.handle(Unknown(0, 0, UNKNOWN)) == []
    assert machine.handle(Unknown(0, 1, UNKNOWN)) == []
    entry = entry_of(0)
    assert machine.handle(Found(entry, 2)) == [WriteBack(entry=entry)]


def test_where_the_entry_before_cannot_be_read_any_copy_will_do() -> None:
    """One copy recovers an entry."""
    machine, _ = claimed(5, 5)
    own = entry_of(6, body=b"own", ledger_bytes=53)
    assert machine.handle(Found(own, 0)) == []
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
    assert ends(answers(machine, asked[1], error)) == [-1]


CONFLICT = MetadataVersionError("another version")
OPEN = metadata_of(*ENSEMBLES, state=LedgerState.OPEN)


def entering(stored: LedgerMetadata) -> tuple[LedgerRecovery, list[Effect]]:
    """Return a recovery that found the ledger so, and what it does."""
    machine = Recovery(LEDGER_ID)
    machine.handle(Signal.BEGIN)
    return machine, machine.handle(MetadataRead(stored, VERSION))


def test_an_open_ledger_is_moved_to_in_recovery_before_it_is_fenced() -> None:
    """By a compare-and-set: if its writer was first, the ledger is read again."""
    machine, effects = entering(OPEN)
    assert effects == [StoreMetadata(PINNED, VERSION)]
    assert machine.handle(CallFailed(CONFLICT)) == [ReadMetadata()]
    assert machine.handle(MetadataRead(OPEN, 4)) == [StoreMetadata(PINNED, 4)]
    fences = machine.handle(MetadataStored(PINNED, 5))
    assert [type(each) for each in fences] == [FenceBookie] * 3
    machine.handle(Fenced(0, 4))
    assert machine.handle(Fenced(1, 4))[0] == StartWriteBack(
        pinned=MetadataStored(PINNED, 5), last_add_confirmed=4
    )


def test_a_ledger_that_is_closed_needs_no_recovery() -> None:
    """Its end is the answer, at the first look or after a lost race."""
    closed = PINNED.closed(last_entry_id=6, length_bytes=7)
    assert entering(closed)[1] == [EndRecovery(closed=closed)]
    machine, _ = entering(OPEN)
    machine.handle(CallFailed(CONFLICT))
    assert machine.handle(MetadataRead(closed, 4)) == [EndRecovery(closed=closed)]
    assert machine.state is RecoveryState.ENDED


def closing_machine() -> tuple[LedgerRecovery, list[Effect]]:
    """Return a recovery that wrote entry 5 back to another bookie, and how it stores the end."""
    machine, _ = claimed(4, 4, ensembles=ENSEMBLES)
    machine.handle(Found(entry_of(5, body=b"x", ledger_bytes=50), 0))
    machine.handle(WrittenBack(5, RECOVERED.ensembles))
    return machine, refused(machine, 6, 0, 1)


def test_the_end_is_stored_with_the_bookies_that_wrote_back() -> None:
    """Its length is that of the last frame; late failures of the write back change nothing."""
    machine, effects = closing_machine()
    closed = replace(PINNED, ensembles=RECOVERED.ensembles).closed(last_entry_id=5, length_bytes=50)
    assert effects == [StoreMetadata(closed, VERSION)]
    assert machine.handle(WriteBackFailed(UNKNOWN)) == []
    assert machine.handle(CallFailed(CONFLICT)) == [ReadMetadata()]
    repaired = metadata_of((0, "EBC"), (5, "ABD"), state=LedgerState.IN_RECOVERY)
    (again,) = machine.handle(MetadataRead(repaired, 7))
    assert isinstance(again, StoreMetadata)
    assert again.version == 7
    assert again.metadata.ensembles == (*repaired.ensembles[:1], *RECOVERED.ensembles[1:])
    assert machine.handle(MetadataStored(again.metadata, 8)) == [EndRecovery(closed=again.metadata)]


def test_the_end_that_another_client_stored_is_adopted() -> None:
    """Two recoveries of one ledger have one result."""
    machine, _ = closing_machine()
    machine.handle(CallFailed(CONFLICT))
    closed = PINNED.closed(last_entry_id=8, length_bytes=53)
    assert machine.handle(MetadataRead(closed, 7)) == [EndRecovery(closed=closed)]


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        (OPEN, "it is OPEN"),
        (metadata_of((0, "ABC"), (5, "ABE"), state=LedgerState.IN_RECOVERY), "it is IN_RECOVERY"),
    ],
)
def test_a_ledger_that_is_written_again_is_not_closed(changed: LedgerMetadata, shown: str) -> None:
    """Only a writer changes the last ensemble."""
    machine, _ = closing_machine()
    machine.handle(CallFailed(CONFLICT))
    (abort,) = machine.handle(MetadataRead(changed, 7))
    assert isinstance(abort, AbortRecovery)
    assert f"changed while it was recovered: {shown}" in str(abort.error)
    assert machine.state is RecoveryState.ABORTED


@pytest.mark.parametrize("when", ["entering", "storing"])
def test_a_failure_of_the_store_ends_a_recovery(when: str) -> None:
    """The caller gets it as it is."""
    machine, _ = entering(OPEN) if when == "entering" else closing_machine()
    error = MetadataConnectionError("no answer")
    assert machine.handle(CallFailed(error)) == [AbortRecovery(error=error)]


def measuring() -> LedgerRecovery:
    """Return a recovery that ends with an entry of an earlier ensemble, which it does not read."""
    machine, _ = claimed(4, 4, ensembles=ENSEMBLES)
    assert refused(machine, 5, 0, 1) == [ReadLength(entry_id=4, metadata=PINNED)]
    return machine


def test_the_length_is_that_of_the_last_frame_which_is_read_if_it_was_not() -> None:
    """A length that was guessed would be believed for ever: without it the ledger stays."""
    known, _ = claimed(5, 5)
    known.handle(Found(entry_of(5, body=b"x", ledger_bytes=50), 0))
    for effects in (refused(known, 6, 0, 1), measuring().handle(LengthRead(50))):
        (store,) = effects
        assert isinstance(store, StoreMetadata)
        assert store.metadata.length_bytes == 50

    machine = measuring()
    (abort,) = machine.handle(CallFailed(UNKNOWN))
    assert isinstance(abort, AbortRecovery)
    assert isinstance(abort.error, LedgerRecoveryError)
    assert f"its last entry 4 cannot be read, so its length is unknown: {UNKNOWN}" in str(
        abort.error
    )
    assert abort.error.__cause__ is UNKNOWN
