"""Recovery of a ledger whose writer is gone: fence, find the end, write back its last entries.

Theory of operation (bookkeeper.md section 3.1, and the proofs there):

1. *Enter*: compare-and-set the stored metadata from OPEN to IN_RECOVERY, and pin what is stored
   then.  A ledger that is closed already needs no more.
2. *Fence* every bookie of the last ensemble, until no write set can still reach an ack quorum
   without a bookie that answered.  The highest LAC of the answers, or the entry before the last
   ensemble, is where to start.  A LAC that one bookie alone returns is a claim: any client may have
   written it there.  Therefore the entries between it and the next lower LAC are read first.  If
   one of them had been acknowledged, Qa bookies would hold it, and fewer than Qw - Qa + 1 could
   prove that they do not.  If that many do, the claim is false, and recovery starts at the next
   lower LAC.  If the answers are unknown, the claim counts.
3. *Read* entry after entry from its whole write set.  One valid copy recovers an entry; Qw - Qa + 1
   proven noes are its end: it cannot have been acknowledged.  The reads fence too, which makes a
   "no" final: the bookie will never accept the entry from the old writer.  A copy counts the bytes
   of its ledger up to its end.  If this count does not follow the entry before, the copy is not the
   writer's, whatever its checksum: it is unknown.
4. *Write back* each recovered entry, so that Qa bookies hold it, before the ledger ends after it.
5. *Store* the end by a compare-and-set to CLOSED, or adopt the end that another client stored.  The
   length comes with the frame of the last entry; if that was not read, it is read now.

An answer that is neither a valid copy nor a proven no is unknown.  If unknown answers could change
the decision, recovery aborts and leaves the ledger as it is; it never guesses.  All reads go to the
ensemble as it was when recovery began, because the bookies that recovery itself adds have nothing
from the writer.

The driver is `recovery_driver.py`.  docs/architecture/machines.md shows `TRANSITIONS` as a
diagram.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, assert_never

from msgspec.structs import replace

from dlcore.base.errors import (
    DLError,
    LedgerRecoveryError,
    MetadataVersionError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from dlcore.base.ids import INVALID_ENTRY_ID
from dlcore.base.machines import CallFailed, Machine, State, Transitions
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState, is_covered, write_set
from dlcore.ledger.writing.appender import MetadataRead, MetadataStored, StoreMetadata
from dlcore.wire.frames import EntryFrame, decode_frame

if TYPE_CHECKING:
    from dlcore.base.config import QuorumConfig
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import Ensemble

READ_AHEAD_MAX = 16
"""Entries read and written back at a time; this bounds the memory of a recovery."""


class RecoveryState(State):
    """The state of the machine; ENDED and ABORTED are final."""

    READY = "nothing has begun"
    ENTERING = "the stored metadata is moved to IN_RECOVERY"
    FENCING = "the bookies of the last ensemble are fenced"
    CHECKING = "entries up to a LAC that only one bookie reports are read"
    READING = "entries are read and written back, until one is proven never acknowledged"
    WRITING_BACK = "the end is known, and entries before it are being written back"
    MEASURING = "all is written back, and the length of the ledger is read"
    STORING = "the stored metadata is moved to CLOSED"
    ENDED = "the ledger is closed, by this recovery or another client"
    ABORTED = "the end cannot be known or stored now, or an entry not be written back"


_S = RecoveryState
TRANSITIONS = Transitions(
    _S.READY,
    {
        _S.READY: {_S.ENTERING: "begin"},
        _S.ENTERING: {
            _S.FENCING: "IN_RECOVERY is stored",
            _S.ENDED: "the ledger is closed already",
            _S.ABORTED: "the metadata store failed",
        },
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
            _S.MEASURING: "all is written back, the length is unknown",
            _S.STORING: "all is written back",
            _S.ABORTED: "an entry was not written back",
        },
        _S.MEASURING: {
            _S.STORING: "the length is read",
            _S.ABORTED: "the last entry cannot be read",
        },
        _S.STORING: {
            _S.ENDED: "CLOSED is stored",
            _S.ABORTED: "the metadata store failed, or the ledger changed",
        },
        _S.ENDED: {},
        _S.ABORTED: {},
    },
)


class Signal(enum.Enum):
    """An event that carries nothing."""

    BEGIN = "a client wants the ledger closed"


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
    """Event: the bookie at `position` gave a valid copy of an entry."""

    entry: EntryFrame
    position: int


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
    """Event: entries up to this one are held by Qa bookies of `ensembles`, the ledger's as of now.

    Bookies that were added to write entries back are in it, and not in the stored metadata.
    """

    last_entry_id: int
    ensembles: tuple[Ensemble, ...]


@dataclass(frozen=True, slots=True)
class WriteBackFailed:
    """Event: an entry cannot be written back."""

    error: DLError


@dataclass(frozen=True, slots=True)
class LengthRead:
    """Event: the ledger has so many bytes up to the entry of `ReadLength`."""

    length_bytes: int


Event: TypeAlias = (
    Signal
    | MetadataRead
    | MetadataStored
    | CallFailed
    | Fenced
    | FenceFailed
    | Found
    | Missing
    | Unknown
    | WrittenBack
    | WriteBackFailed
    | LengthRead
)


@dataclass(frozen=True, slots=True)
class ReadMetadata:
    """Effect: read the ledger's metadata; `MetadataRead` or `CallFailed`."""


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
    """Effect: entries after `last_add_confirmed` will be written back to the ledger of `pinned`."""

    pinned: MetadataRead | MetadataStored
    last_add_confirmed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBack:
    """Effect: write `entry` back, in the order of these effects; answer with `WrittenBack`."""

    entry: EntryFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLength:
    """Effect: read the ledger's bytes up to `entry_id`, the last one; `LengthRead` or `CallFailed`.

    A frame of an entry has them.  The entry may be in any ensemble of `metadata`.
    """

    entry_id: int
    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecovery:
    """Effect: the ledger is closed, as the store holds it; answer the caller."""

    closed: LedgerMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRecovery:
    """Effect: the ledger stays as it is; answer the caller with the error."""

    error: DLError


Effect: TypeAlias = (
    ReadMetadata
    | StoreMetadata
    | FenceBookie
    | ReadEntry
    | StartWriteBack
    | WriteBack
    | ReadLength
    | EndRecovery
    | AbortRecovery
)


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
        return Found(decode_frame(answer, ledger_id=ledger_id, entry_id=entry_id), position)
    except DLError as damage:
        return Unknown(entry_id, position, damage)


@dataclass(slots=True)
class _Read:
    """The answers of the write set of one entry, by position.

    A bookie may answer twice: an entry is asked for again when a claim was checked with it before.
    Its second answer must not count as another bookie's.
    """

    copies: dict[int, EntryFrame] = field(default_factory=dict)
    noes: set[int] = field(default_factory=set)
    unknown: dict[int, DLError] = field(default_factory=dict)

    @property
    def answers(self) -> int:
        """How many bookies answered."""
        return len(self.copies.keys() | self.noes | self.unknown.keys())

    @property
    def first_copy(self) -> EntryFrame:
        """The copy that came first."""
        return next(iter(self.copies.values()))

    def is_refuted(self, quorum: QuorumConfig) -> bool:
        """Return whether so many bookies lack the entry that fewer than Qa can ever have it."""
        return len(self.noes) > quorum.write_quorum_size - quorum.ack_quorum_size

    def problem(self, bytes_before: int | None) -> str:
        """Return why the copies do not count, to append to an error; empty without copies."""
        if not self.copies:
            return ""
        return (
            f" ({len(self.copies)} copies count {self.first_copy.ledger_bytes} bytes of the ledger "
            f"and do not follow on the {bytes_before} before them)"
        )

    def copy_after(self, bytes_before: int | None, *, ack_quorum_size: int) -> EntryFrame | None:
        """Return a copy whose byte count follows `bytes_before`; any copy if that is None.

        A copy that an ack quorum holds is returned in any case: it may have been acknowledged.
        """
        copies = self.copies.values()
        for copy in copies:
            if bytes_before is None or copy.ledger_bytes == bytes_before + len(copy.body):
                return copy
        # None follows the bytes before it.  One such copy alone proves nothing, even with Qa = 1.
        for copy in copies:
            same = sum(bytes(each.data) == bytes(copy.data) for each in copies)
            if same >= max(ack_quorum_size, 2):
                return copy
        return None


def closed_over(
    stored: LedgerMetadata,
    *,
    pinned: LedgerMetadata,
    ensembles: tuple[Ensemble, ...],
    last_entry_id: int,
    length_bytes: int,
) -> LedgerMetadata | None:
    """Return the CLOSED metadata to store over `stored`; None if another client closed the ledger.

    Args:
        stored: the metadata as it is stored now.
        pinned: the metadata when recovery began.
        ensembles: its ensembles, and those that recovery wrote to.
        last_entry_id: the end; -1: the ledger is empty.
        length_bytes: the bytes up to it.

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
    closed = replace(stored, ensembles=(*stored.ensembles[:-1], *ensembles[kept:]))
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

    def __init__(self, ahead_max: int) -> None:
        self.open: dict[int, _Read] = {}
        """Those without a decision."""
        self.next = 0
        """The entry that is read next."""
        self.ahead_max = ahead_max

    def begin(self, entry_id: int, metadata: LedgerMetadata) -> list[Effect]:
        """Read one entry."""
        self.open[entry_id] = _Read()
        bookies = metadata.last_ensemble.bookies
        return [
            ReadEntry(entry_id=entry_id, position=position, bookie=bookies[position])
            for position in write_set(metadata.quorum, entry_id)
        ]

    def up_to(self, last: int, metadata: LedgerMetadata) -> list[Effect]:
        """Read the next entries, up to this one."""
        effects: list[Effect] = []
        while self.next <= last:
            effects += self.begin(self.next, metadata)
            self.next += 1
        return effects


class _Claim(NamedTuple):
    """The LAC that is checked, and the highest one that a second bookie confirms."""

    lac: int = -1
    vouched: int = -1


class LedgerRecovery(Machine[RecoveryState]):
    """One recovery of a ledger, from the first look at its metadata until it is closed."""

    transitions = TRANSITIONS

    def __init__(self, ledger_id: int, *, read_ahead_max: int = READ_AHEAD_MAX) -> None:
        self.state = RecoveryState.READY
        self._ledger_id = ledger_id
        self._entered: MetadataRead | MetadataStored | None = None
        """The metadata that is IN_RECOVERY, as it was stored when fencing began."""
        self._fences = _Fences()
        self._reads = _Reads(read_ahead_max)
        self._claim = _Claim()
        self._before = _Before()
        self._next_entry = 0  # the first entry that is not decided
        self._written = -1
        self._ensembles: tuple[Ensemble, ...] = ()
        """Those that are stored with the end."""

    @property
    def _pinned(self) -> LedgerMetadata:
        assert self._entered is not None
        return self._entered.metadata

    @property
    def _ensemble(self) -> Ensemble:
        return self._pinned.last_ensemble

    def handle(self, event: Event) -> list[Effect]:  # noqa: C901 - one case for each kind
        """Take one event."""
        match event:
            case Signal.BEGIN:
                self._become(RecoveryState.ENTERING)
                return [ReadMetadata()]
            case MetadataRead():
                return self._read(event)
            case MetadataStored():
                return self._stored(event)
            case CallFailed(error):
                return self._call_failed(error)
            case Fenced(position, last_add_confirmed):
                self._fences.lacs[position] = last_add_confirmed
                return self._after_fence_answer()
            case FenceFailed(position, error):
                self._fences.errors[position] = error
                return self._after_fence_answer()
            case Found(entry, position):
                return self._found(entry, position)
            case Missing(entry_id, position):
                return self._missing(entry_id, position)
            case Unknown(entry_id, position, error):
                return self._unknown(entry_id, position, error)
            case WrittenBack(last_entry_id, ensembles):
                return self._written_back(last_entry_id, ensembles)
            case WriteBackFailed(error):
                return self._write_back_failed(error)
            case LengthRead(length_bytes):
                self._before.size_bytes = length_bytes
                return self._store()
            case _:
                assert_never(event)

    # The metadata

    def _read(self, stored: MetadataRead) -> list[Effect]:
        if self.state is RecoveryState.STORING:
            return self._close_over(stored.metadata, stored.version)
        match stored.metadata.state:
            case LedgerState.CLOSED:
                return self._end(stored.metadata)
            case LedgerState.IN_RECOVERY:
                return self._fence(stored)
            case LedgerState.OPEN:
                recovering = replace(stored.metadata, state=LedgerState.IN_RECOVERY)
                return [StoreMetadata(recovering, stored.version)]
            case _:
                assert_never(stored.metadata.state)

    def _stored(self, stored: MetadataStored) -> list[Effect]:
        if self.state is RecoveryState.STORING:
            return self._end(stored.metadata)
        return self._fence(stored)

    def _call_failed(self, error: DLError) -> list[Effect]:
        if isinstance(error, MetadataVersionError):
            # The writer changed the ensemble or closed the ledger, or another client recovers it.
            return [ReadMetadata()]
        if self.state is RecoveryState.MEASURING:
            failure = LedgerRecoveryError(
                f"ledger {self._ledger_id}: its last entry {self._written} cannot be read, "
                f"so its length is unknown: {error}"
            )
            failure.__cause__ = error
            error = failure
        self._become(RecoveryState.ABORTED)
        return [AbortRecovery(error=error)]

    def _fence(self, entered: MetadataRead | MetadataStored) -> list[Effect]:
        self._become(RecoveryState.FENCING)
        self._entered = entered
        self._ensembles = entered.metadata.ensembles
        return [
            FenceBookie(position=position, bookie=bookie)
            for position, bookie in enumerate(self._ensemble.bookies)
        ]

    def _store(self) -> list[Effect]:
        """Store the end; the metadata is probably as it was when recovery began."""
        assert self._entered is not None
        self._become(RecoveryState.STORING)
        return self._close_over(self._entered.metadata, self._entered.version)

    def _close_over(self, stored: LedgerMetadata, version: int) -> list[Effect]:
        assert self._before.size_bytes is not None
        try:
            closed = closed_over(
                stored,
                pinned=self._pinned,
                ensembles=self._ensembles,
                last_entry_id=self._written,
                length_bytes=self._before.size_bytes,
            )
        except LedgerRecoveryError as error:
            self._become(RecoveryState.ABORTED)
            return [AbortRecovery(error=error)]
        return self._end(stored) if closed is None else [StoreMetadata(closed, version)]

    def _end(self, closed: LedgerMetadata) -> list[Effect]:
        self._become(RecoveryState.ENDED)
        return [EndRecovery(closed=closed)]

    # The entries

    def _after_fence_answer(self) -> list[Effect]:
        if self.state is not RecoveryState.FENCING:
            return []
        if is_covered(self._pinned.quorum, self._fences.lacs.keys()):
            # Entries of earlier ensembles are acknowledged: an ensemble change starts at LAC + 1.
            floor = self._ensemble.first_entry_id - 1
            claim = self._claim = self._fences.claim(floor)
            if claim.lac == claim.vouched:
                return self._begin(claim.lac)
            self._become(RecoveryState.CHECKING)
            # If only one bookie answered, the newest entry that it calls confirmed must suffice.
            first = claim.vouched + 1 if len(self._fences.lacs) > 1 else claim.lac
            self._next_entry = self._reads.next = first
            return self._read_ahead()
        if len(self._fences.lacs) + len(self._fences.errors) < self._pinned.quorum.ensemble_size:
            return []
        return self._abort("too few bookies fenced it", self._fences.errors)

    def _begin(self, start: int) -> list[Effect]:
        """Begin after the entry that counts as the last acknowledged one."""
        self._become(RecoveryState.READING)
        self._reads.open.clear()
        self._written = start
        self._next_entry = self._reads.next = start + 1
        assert self._entered is not None
        effects: list[Effect] = [StartWriteBack(pinned=self._entered, last_add_confirmed=start)]
        if start == INVALID_ENTRY_ID:
            self._before.size_bytes = 0
        elif start >= self._ensemble.first_entry_id:  # an earlier ensemble stores the others
            self._before.anchor = start
            # Its frame counts the bytes up to it, and by that the first copy is judged.
            effects += self._reads.begin(start, self._pinned)
        return effects + self._read_ahead()

    def _read_ahead(self) -> list[Effect]:
        if self.state is RecoveryState.CHECKING:
            last = min(self._claim.lac, self._next_entry - 1 + self._reads.ahead_max)
        else:
            # From what is written back, not from what is read: entries wait in memory until then.
            last = self._written + self._reads.ahead_max
        return self._reads.up_to(last, self._pinned)

    def _found(self, entry: EntryFrame, position: int) -> list[Effect]:
        read = self._reads.open.get(entry.entry_id)
        if read is None:
            return []
        read.copies[position] = entry
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
                self._before.size_bytes, ack_quorum_size=self._pinned.quorum.ack_quorum_size
            )
            if copy is not None:
                effects.append(WriteBack(entry=copy))
                self._before.size_bytes = copy.ledger_bytes
                del self._reads.open[self._next_entry]
                self._next_entry += 1
                continue
            if read.is_refuted(self._pinned.quorum):
                self._become(RecoveryState.WRITING_BACK)
                self._reads.open.clear()
                return effects + self._finish()
            if read.answers == self._pinned.quorum.write_quorum_size:
                return effects + self._abort(
                    f"entry {self._next_entry} may exist{read.problem(self._before.size_bytes)}",
                    read.unknown,
                )
            break
        return effects

    def _decide_claim(self) -> list[Effect]:
        """Decide whether entries up to a LAC of one bookie alone can have been acknowledged."""
        while (read := self._reads.open.get(self._next_entry)) is not None:
            if read.is_refuted(self._pinned.quorum):
                return self._begin(self._claim.vouched)
            if read.copies:
                del self._reads.open[self._next_entry]
                self._next_entry += 1
                continue
            if read.answers == self._pinned.quorum.write_quorum_size:
                return self._begin(self._claim.lac)  # unknown: nothing refutes it
            return []
        if self._next_entry > self._claim.lac:
            return self._begin(self._claim.lac)
        return self._read_ahead()

    def _is_anchored(self) -> bool:
        """Return whether the bytes before the first entry are known, or can never be known."""
        if self._before.anchor is None:
            return True
        read = self._reads.open[self._before.anchor]
        if not read.copies and read.answers < self._pinned.quorum.write_quorum_size:
            return False
        if read.copies:
            self._before.size_bytes = read.first_copy.ledger_bytes
        del self._reads.open[self._before.anchor]
        self._before.anchor = None
        return True

    def _written_back(self, last_entry_id: int, ensembles: tuple[Ensemble, ...]) -> list[Effect]:
        assert self._written <= last_entry_id < self._next_entry
        self._written, self._ensembles = last_entry_id, ensembles
        if self.state is RecoveryState.WRITING_BACK:
            return self._finish()
        # An entry that was written back makes room for another one to be read.
        return self._read_ahead() if self.state is RecoveryState.READING else []

    def _finish(self) -> list[Effect]:
        """Let the ledger end before the first entry that was not acknowledged."""
        if self._written < self._next_entry - 1:
            return []
        if self._before.size_bytes is not None:
            return self._store()
        self._become(RecoveryState.MEASURING)
        return [ReadLength(entry_id=self._written, metadata=self._pinned)]

    def _write_back_failed(self, error: DLError) -> list[Effect]:
        if self.state not in (RecoveryState.READING, RecoveryState.WRITING_BACK):
            return []
        self._become(RecoveryState.ABORTED)
        failure = LedgerRecoveryError(
            f"ledger {self._ledger_id}: a recovered entry was not written back: {error}"
        )
        failure.__cause__ = error
        return [AbortRecovery(error=failure)]

    def _abort(self, problem: str, errors: dict[int, DLError]) -> list[Effect]:
        self._become(RecoveryState.ABORTED)
        answers = "; ".join(
            f"{self._ensemble.bookies[position]}: {type(error).__name__}: {error}"
            for position, error in sorted(errors.items())
        )
        error = LedgerRecoveryError(f"ledger {self._ledger_id}: {problem}: {answers}")
        return [AbortRecovery(error=error)]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        bookies = () if self._entered is None else self._ensemble.bookies
        asked = (*self._fences.lacs, *self._fences.errors)
        assert all(0 <= position < len(bookies) for position in asked)
        assert self._next_entry <= self._reads.next
        assert all(
            each == self._before.anchor or self._next_entry <= each < self._reads.next
            for each in self._reads.open
        )
        match self.state:
            case RecoveryState.READY | RecoveryState.ENTERING:
                assert self._entered is None
            case RecoveryState.FENCING:
                assert not self._reads.open
            case RecoveryState.CHECKING:
                assert self._claim.vouched < self._claim.lac
            case RecoveryState.READING | RecoveryState.ABORTED:
                assert self._written < self._next_entry
            case RecoveryState.WRITING_BACK:
                assert self._written < self._next_entry - 1
                assert not self._reads.open
            case RecoveryState.MEASURING:
                assert self._before.size_bytes is None
                assert self._written == self._next_entry - 1
            case RecoveryState.STORING:
                assert self._before.size_bytes is not None
                assert self._written == self._next_entry - 1
            case RecoveryState.ENDED:
                assert not self._reads.open
            case _:
                assert_never(self.state)
