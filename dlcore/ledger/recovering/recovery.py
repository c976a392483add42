"""Recovery of a ledger whose writer is gone: fence, find the end, write back its last entries.

Theory of operation (bookkeeper.md section 3.1, and the proofs there):

1. *Fence* every bookie of the last ensemble, until no write set can still reach an ack quorum
   without a bookie that answered.  The highest LAC of the answers, or the entry before the last
   ensemble, is where to start.  A LAC that one bookie alone returns is a claim: any client may have
   written it there.  Therefore the entries between it and the next lower LAC are read first.  If
   one of them had been acknowledged, Qa bookies would hold it, and fewer than Qw - Qa + 1 could
   prove that they do not.  If that many do, the claim is false, and recovery starts at the next
   lower LAC.  If the answers are unknown, the claim counts.
2. *Read* entry after entry from its whole write set.  One valid copy recovers an entry; Qw - Qa + 1
   proven noes are its end: it cannot have been acknowledged.  The reads fence too, which makes a
   "no" final: the bookie will never accept the entry from the old writer.  A copy counts the bytes
   of its ledger up to its end.  If this count does not follow the entry before, the copy is not the
   writer's, whatever its checksum: it is unknown.
3. *Write back* each recovered entry, so that Qa bookies hold it, before the ledger ends after it.

An answer that is neither a valid copy nor a proven no is unknown.  If unknown answers could change
the decision, recovery aborts and leaves the ledger as it is; it never guesses.  All reads go to the
ensemble as it was when recovery began, because the bookies that recovery itself adds have nothing
from the writer.

The driver (`recovery_driver.py`) moves the metadata to IN_RECOVERY before, and to CLOSED after.
docs/architecture/machines.md shows `TRANSITIONS` as a diagram.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, assert_never

from msgspec.structs import replace

from dlcore.base.errors import (
    DLError,
    LedgerRecoveryError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from dlcore.base.ids import INVALID_ENTRY_ID
from dlcore.base.machines import Machine, State, Transitions
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState, is_covered, write_set
from dlcore.wire.frames import EntryFrame, decode_frame

if TYPE_CHECKING:
    from dlcore.base.ids import BookieId

READ_AHEAD_MAX = 16
"""Entries read and written back at a time; this bounds the memory of a recovery."""


class RecoveryState(State):
    """The state of the machine; ENDED and ABORTED are final."""

    READY = "nothing has begun"
    FENCING = "the bookies of the last ensemble are fenced"
    CHECKING = "entries up to a LAC that only one bookie reports are read"
    READING = "entries are read and written back, until one is proven never acknowledged"
    WRITING_BACK = "the end is known, and entries before it are being written back"
    ENDED = "all is written back, and the ledger may be closed"
    ABORTED = "the end cannot be known now, or an entry not be written back"


_S = RecoveryState
TRANSITIONS = Transitions(
    _S.READY,
    {
        _S.READY: {_S.FENCING: "begin"},
        _S.FENCING: {
            _S.CHECKING: "enough fenced it, one of them knows a later LAC than all others",
            _S.READING: "enough fenced it",
            _S.ABORTED: "all answered, too few fenced it",
        },
        _S.CHECKING: {_S.READING: "the LAC is proven wrong, or counts"},
        _S.READING: {
            _S.WRITING_BACK: "proven noes",
            _S.ABORTED: "unknown answers, or an entry was not written back",
        },
        _S.WRITING_BACK: {
            _S.ENDED: "all is written back",
            _S.ABORTED: "an entry was not written back",
        },
        _S.ENDED: {},
        _S.ABORTED: {},
    },
)


class Signal(enum.Enum):
    """An event that carries nothing."""

    BEGIN = "the stored metadata is IN_RECOVERY"


@dataclass(frozen=True, slots=True)
class Fenced:
    """Event: the bookie at `position` fenced the ledger durably, and knew this LAC."""

    position: int
    last_add_confirmed: int


@dataclass(frozen=True, slots=True)
class FenceFailed:
    """Event: whether the bookie at `position` fenced the ledger is unknown."""

    position: int
    error: DLError


@dataclass(frozen=True, slots=True)
class Found:
    """Event: a bookie gave a valid copy of an entry."""

    entry: EntryFrame


@dataclass(frozen=True, slots=True)
class Missing:
    """Event: the bookie at `position` proved that it does not hold the entry, and never will."""

    entry_id: int
    position: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """Event: whether the bookie at `position` holds the entry is unknown."""

    entry_id: int
    position: int
    error: DLError


@dataclass(frozen=True, slots=True)
class WrittenBack:
    """Event: entries up to this one are held by Qa bookies."""

    last_entry_id: int


@dataclass(frozen=True, slots=True)
class WriteBackFailed:
    """Event: an entry cannot be written back."""

    error: DLError


Event: TypeAlias = (
    Signal | Fenced | FenceFailed | Found | Missing | Unknown | WrittenBack | WriteBackFailed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceBookie:
    """Effect: read the LAC of `bookie`, fencing the ledger there; `Fenced` or `FenceFailed`."""

    position: int
    bookie: BookieId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEntry:
    """Effect: read an entry from `bookie`, fencing the ledger there; answer as `answer_to` says."""

    entry_id: int
    position: int
    bookie: BookieId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWriteBack:
    """Effect: entries after `last_add_confirmed` will be written back."""

    last_add_confirmed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBack:
    """Effect: write `entry` back, in the order of these effects; answer with `WrittenBack`."""

    entry: EntryFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLedger:
    """Effect: the ledger ends with `last_entry_id` (-1: empty), and everything is written back."""

    last_entry_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRecovery:
    """Effect: the ledger stays as it is."""

    error: LedgerRecoveryError


Effect: TypeAlias = FenceBookie | ReadEntry | StartWriteBack | WriteBack | EndLedger | AbortRecovery


def answer_to(
    read: ReadEntry, answer: bytes | memoryview | DLError, *, ledger_id: int
) -> Found | Missing | Unknown:
    """Return the event of an answer to a read: a frame, or the error instead of one."""
    entry_id, position = read.entry_id, read.position
    if isinstance(answer, NoSuchEntryError | NoSuchLedgerError):
        # A proven no of a fenced bookie: it will not get this entry any more.
        return Missing(entry_id, position)
    if isinstance(answer, DLError):
        return Unknown(entry_id, position, answer)
    try:
        return Found(decode_frame(answer, ledger_id=ledger_id, entry_id=entry_id))
    except DLError as damage:
        return Unknown(entry_id, position, damage)


@dataclass(slots=True)
class _Read:
    """The answers of the write set of one entry."""

    copies: list[EntryFrame] = field(default_factory=list)
    noes: set[int] = field(default_factory=set)
    unknown: dict[int, DLError] = field(default_factory=dict)

    @property
    def answers(self) -> int:
        """How many bookies answered."""
        return len(self.copies) + len(self.noes) + len(self.unknown)

    def copy_after(self, bytes_before: int | None, *, ack_quorum_size: int) -> EntryFrame | None:
        """Return a copy whose byte count follows `bytes_before`; any copy if that is None.

        A copy that an ack quorum holds is returned in any case: it may have been acknowledged.
        """
        for copy in self.copies:
            if bytes_before is None or copy.ledger_bytes == bytes_before + len(copy.body):
                return copy
        # None follows the bytes before it.  One such copy alone proves nothing, even with Qa = 1.
        for copy in self.copies:
            same = sum(bytes(each.data) == bytes(copy.data) for each in self.copies)
            if same >= max(ack_quorum_size, 2):
                return copy
        return None


def closed_over(
    stored: LedgerMetadata,
    *,
    pinned: LedgerMetadata,
    recovered: LedgerMetadata,
    last_entry_id: int,
    length_bytes: int,
) -> LedgerMetadata | None:
    """Return the CLOSED metadata to store over `stored`; None if another client closed the ledger.

    Args:
        pinned: the metadata when recovery began.
        recovered: the same with the ensembles that recovery wrote to.

    Raises:
        LedgerRecoveryError: the ledger changed in a way that only its writer may change it.
    """
    if stored.state is LedgerState.CLOSED:
        return None
    if stored.state is not LedgerState.IN_RECOVERY or stored.last_ensemble != pinned.last_ensemble:
        raise LedgerRecoveryError(
            f"ledger {stored.ledger_id} changed while it was recovered: it is "
            f"{stored.state.name} with {stored.last_ensemble}"
        )
    # Recovery changes the last ensemble only; auto-recovery may change the others meanwhile.
    kept = len(pinned.ensembles) - 1
    ensembles = (*stored.ensembles[:-1], *recovered.ensembles[kept:])
    closed = replace(stored, ensembles=ensembles)
    return closed.closed(last_entry_id=last_entry_id, length_bytes=length_bytes)


class _Fences:
    """The answers of the bookies that are asked to fence the ledger, by their positions."""

    def __init__(self) -> None:
        self.lacs: dict[int, int] = {}
        """The LACs of those that fenced it."""
        self.errors: dict[int, DLError] = {}

    def claim(self, floor: int) -> _Claim:
        """Return the LACs to judge; a ledger's last ensemble begins behind the entry `floor`."""
        heard = sorted((max(lac, floor) for lac in self.lacs.values()), reverse=True)
        return _Claim(heard[0], heard[1] if len(heard) > 1 else floor)


class _Before:
    """The bytes of the ledger before the first entry that is not decided, as far as known."""

    def __init__(self) -> None:
        self.anchor: int | None = None
        """The entry before the first one, until it is read: it has the count."""
        self.size_bytes: int | None = None


class _Reads:
    """The entries that are read, each from its write set, and up to which.

    Entries are read ahead of the first one that is not decided, at most so many.
    """

    def __init__(self, metadata: LedgerMetadata, ahead_max: int) -> None:
        self.open: dict[int, _Read] = {}
        """Those without a decision."""
        self.next = 0
        """The entry that is read next."""
        self.ahead_max = ahead_max
        self._quorum = metadata.quorum
        self._bookies = metadata.last_ensemble.bookies

    def begin(self, entry_id: int) -> list[Effect]:
        """Read one entry."""
        self.open[entry_id] = _Read()
        return [
            ReadEntry(entry_id=entry_id, position=position, bookie=self._bookies[position])
            for position in write_set(self._quorum, entry_id)
        ]

    def up_to(self, last: int) -> list[Effect]:
        """Read the next entries, up to this one."""
        effects: list[Effect] = []
        while self.next <= last:
            effects += self.begin(self.next)
            self.next += 1
        return effects


class _Claim(NamedTuple):
    """The LAC that is checked, and the highest one that a second bookie confirms."""

    lac: int = -1
    vouched: int = -1


class LedgerRecovery(Machine[RecoveryState]):
    """One recovery; `metadata` is the stored value after the move to IN_RECOVERY."""

    transitions = TRANSITIONS

    def __init__(self, metadata: LedgerMetadata, *, read_ahead_max: int = READ_AHEAD_MAX) -> None:
        assert metadata.state is LedgerState.IN_RECOVERY
        self.state = RecoveryState.READY
        self._metadata = metadata
        self._quorum = metadata.quorum
        self._ensemble = metadata.last_ensemble
        self._fences = _Fences()
        self._reads = _Reads(metadata, read_ahead_max)
        self._claim = _Claim()
        self._before = _Before()
        self._next_entry = 0  # the first entry that is not decided
        self._written = -1

    def handle(self, event: Event) -> list[Effect]:
        """Take one event."""
        match event:
            case Signal.BEGIN:
                self._become(RecoveryState.FENCING)
                return [
                    FenceBookie(position=position, bookie=bookie)
                    for position, bookie in enumerate(self._ensemble.bookies)
                ]
            case Fenced(position, last_add_confirmed):
                self._fences.lacs[position] = last_add_confirmed
                return self._after_fence_answer()
            case FenceFailed(position, error):
                self._fences.errors[position] = error
                return self._after_fence_answer()
            case Found(entry):
                return self._found(entry)
            case Missing(entry_id, position):
                return self._missing(entry_id, position)
            case Unknown(entry_id, position, error):
                return self._unknown(entry_id, position, error)
            case WrittenBack(last_entry_id):
                return self._written_back(last_entry_id)
            case WriteBackFailed(error):
                return self._write_back_failed(error)
            case _:
                assert_never(event)

    def _after_fence_answer(self) -> list[Effect]:
        if self.state is not RecoveryState.FENCING:
            return []
        if is_covered(self._quorum, self._fences.lacs.keys()):
            # Entries of earlier ensembles are acknowledged: an ensemble change starts at LAC + 1.
            floor = self._ensemble.first_entry_id - 1
            claim = self._claim = self._fences.claim(floor)
            if claim.lac == claim.vouched:
                return self._begin(claim.lac)
            self._become(RecoveryState.CHECKING)
            # If only one bookie answered, the newest entry that it calls confirmed must suffice.
            first = claim.vouched + 1 if len(self._fences.lacs) > 1 else claim.lac
            self._next_entry = self._reads.next = first
            return self._read_claimed()
        if len(self._fences.lacs) + len(self._fences.errors) < self._quorum.ensemble_size:
            return []
        return self._abort("too few bookies fenced it", self._fences.errors)

    def _begin(self, start: int) -> list[Effect]:
        """Begin after the entry that counts as the last acknowledged one."""
        self._become(RecoveryState.READING)
        self._reads.open.clear()
        self._written = start
        self._next_entry = self._reads.next = start + 1
        effects: list[Effect] = [StartWriteBack(last_add_confirmed=start)]
        if start == INVALID_ENTRY_ID:
            self._before.size_bytes = 0
        elif start >= self._ensemble.first_entry_id:  # an earlier ensemble stores the others
            self._before.anchor = start
            effects += self._reads.begin(start)
        return effects + self._read_ahead()

    def _read_claimed(self) -> list[Effect]:
        ahead = self._next_entry + self._reads.ahead_max - 1
        return self._reads.up_to(min(self._claim.lac, ahead))

    def _read_ahead(self) -> list[Effect]:
        return self._reads.up_to(self._written + self._reads.ahead_max)

    def _found(self, entry: EntryFrame) -> list[Effect]:
        read = self._reads.open.get(entry.entry_id)
        if read is None:
            return []
        read.copies.append(entry)
        return self._decide()

    def _missing(self, entry_id: int, position: int) -> list[Effect]:
        read = self._reads.open.get(entry_id)
        if read is None:
            return []
        read.noes.add(position)
        return self._decide()

    def _unknown(self, entry_id: int, position: int, error: DLError) -> list[Effect]:
        read = self._reads.open.get(entry_id)
        if read is None:
            return []
        read.unknown[position] = error
        return self._decide()

    @property
    def _noes_needed(self) -> int:
        # With so many bookies without the entry, fewer than Qa can ever have it.
        return self._quorum.write_quorum_size - self._quorum.ack_quorum_size + 1

    def _decide(self) -> list[Effect]:
        """Decide entries strictly in order: entries beyond the end do not matter."""
        if self.state is RecoveryState.CHECKING:
            return self._decide_claim()
        if self.state is not RecoveryState.READING or not self._is_anchored():
            return []
        effects: list[Effect] = []
        # A copy decides before the noes: one copy of an unacknowledged entry may be kept, but an
        # acknowledged entry must never be dropped.
        while (read := self._reads.open.get(self._next_entry)) is not None:
            copy = read.copy_after(
                self._before.size_bytes, ack_quorum_size=self._quorum.ack_quorum_size
            )
            if copy is not None:
                effects.append(WriteBack(entry=copy))
                self._before.size_bytes = copy.ledger_bytes
                del self._reads.open[self._next_entry]
                self._next_entry += 1
                continue
            if len(read.noes) >= self._noes_needed:
                self._become(RecoveryState.WRITING_BACK)
                self._reads.open.clear()
                return effects + self._finish()
            if read.answers == self._quorum.write_quorum_size:
                return effects + self._abort(self._problem_of(read), read.unknown)
            break
        return effects

    def _problem_of(self, read: _Read) -> str:
        problem = f"entry {self._next_entry} may exist"
        if read.copies:
            problem += (
                f" ({len(read.copies)} copies count {read.copies[0].ledger_bytes} bytes of the "
                f"ledger and do not follow on the {self._before.size_bytes} before them)"
            )
        return problem

    def _decide_claim(self) -> list[Effect]:
        """Decide whether entries up to a LAC of one bookie alone can have been acknowledged."""
        while (read := self._reads.open.get(self._next_entry)) is not None:
            if len(read.noes) >= self._noes_needed:
                return self._begin(self._claim.vouched)
            if read.copies:
                del self._reads.open[self._next_entry]
                self._next_entry += 1
                continue
            if read.answers == self._quorum.write_quorum_size:
                return self._begin(self._claim.lac)  # unknown: nothing refutes it
            return []
        if self._next_entry > self._claim.lac:
            return self._begin(self._claim.lac)
        return self._read_claimed()

    def _is_anchored(self) -> bool:
        """Return whether the bytes before the first entry are known, or can never be known."""
        if self._before.anchor is None:
            return True
        read = self._reads.open[self._before.anchor]
        if not read.copies and read.answers < self._quorum.write_quorum_size:
            return False
        if read.copies:
            self._before.size_bytes = read.copies[0].ledger_bytes
        del self._reads.open[self._before.anchor]
        self._before.anchor = None
        return True

    def _written_back(self, last_entry_id: int) -> list[Effect]:
        assert self._written <= last_entry_id < self._next_entry
        self._written = last_entry_id
        if self.state is RecoveryState.WRITING_BACK:
            return self._finish()
        return self._read_ahead() if self.state is RecoveryState.READING else []

    def _finish(self) -> list[Effect]:
        """Let the ledger end before the first entry that was not acknowledged."""
        end = self._next_entry - 1
        if self._written < end:
            return []
        self._become(RecoveryState.ENDED)
        return [EndLedger(last_entry_id=end)]

    def _write_back_failed(self, error: DLError) -> list[Effect]:
        if self.state not in (RecoveryState.READING, RecoveryState.WRITING_BACK):
            return []
        self._become(RecoveryState.ABORTED)
        failure = LedgerRecoveryError(
            f"ledger {self._metadata.ledger_id}: a recovered entry was not written back: {error}"
        )
        failure.__cause__ = error
        return [AbortRecovery(error=failure)]

    def _abort(self, problem: str, errors: dict[int, DLError]) -> list[Effect]:
        self._become(RecoveryState.ABORTED)
        answers = "; ".join(
            f"{self._ensemble.bookies[position]}: {type(error).__name__}: {error}"
            for position, error in sorted(errors.items())
        )
        error = LedgerRecoveryError(f"ledger {self._metadata.ledger_id}: {problem}: {answers}")
        return [AbortRecovery(error=error)]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        size = self._quorum.ensemble_size
        assert all(0 <= position < size for position in (*self._fences.lacs, *self._fences.errors))
        assert self._next_entry <= self._reads.next
        assert all(
            each == self._before.anchor or self._next_entry <= each < self._reads.next
            for each in self._reads.open
        )
        match self.state:
            case RecoveryState.READY:
                assert not self._fences.lacs
                assert not self._fences.errors
            case RecoveryState.FENCING:
                assert not self._reads.open
            case RecoveryState.CHECKING:
                assert self._claim.vouched < self._claim.lac
            case RecoveryState.WRITING_BACK:
                assert self._written < self._next_entry - 1
                assert not self._reads.open
            case RecoveryState.ENDED:
                assert self._written == self._next_entry - 1
            case RecoveryState.READING | RecoveryState.ABORTED:
                assert self._written < self._next_entry
            case _:
                assert_never(self.state)
