"""Recovery of a ledger whose writer is gone: fence, find the end, write back what was half written.

Theory of operation (bookkeeper.md section 3.1, and the proofs there):

1. *Fence* every bookie of the last ensemble, until no write set can still reach an ack quorum
   without one that answered.  The highest LAC heard, or the entry before the last ensemble, says
   where to start.
2. *Read* entry after entry from its whole write set.  One valid copy recovers an entry; Qw - Qa + 1
   proven noes are its end: nobody can have acknowledged it.  The reads fence too, which makes a
   "no" final: a bookie that said it will never accept the entry from the old writer.
3. *Write back* each recovered entry, so that Qa bookies hold it, before the ledger ends after it.

An answer that is neither a valid copy nor a proven no is unknown.  If the unknown ones could change
the decision, recovery aborts and leaves the ledger as it is; it never guesses.  All reads go to the
ensemble as it was when recovery began: bookies that recovery itself adds know nothing of the
writer.

The driver (`recovery_driver.py`) moves the metadata to IN_RECOVERY before, and to CLOSED after.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from dlcore.errors import DLError, LedgerRecoveryError
from dlcore.ledger.metadata.quorum import is_covered, write_set
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState

if TYPE_CHECKING:
    from dlcore.ids import BookieId
    from dlcore.wire.digest import EntryFrame

READ_AHEAD_MAX = 16
"""Entries read and written back at a time; bounds the memory of a recovery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceBookie:
    """Effect: read the LAC of `bookie`, fencing the ledger there."""

    position: int
    bookie: BookieId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEntry:
    """Effect: read an entry from `bookie`, fencing the ledger there."""

    entry_id: int
    position: int
    bookie: BookieId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWriteBack:
    """Effect: entries after `last_add_confirmed` will be written back."""

    last_add_confirmed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBack:
    """Effect: write `entry` back, in the order of these effects; report with `written_back`."""

    entry: EntryFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLedger:
    """Effect: the ledger ends with `last_entry_id` (-1: empty), and everything is written back."""

    last_entry_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRecovery:
    """Effect: what is unknown could change the result."""

    error: LedgerRecoveryError


Effect: TypeAlias = FenceBookie | ReadEntry | StartWriteBack | WriteBack | EndLedger | AbortRecovery


@dataclass(slots=True)
class _Read:
    """What the write set of one entry answered."""

    entry: EntryFrame | None = None
    noes: set[int] = field(default_factory=set)
    unknown: dict[int, DLError] = field(default_factory=dict)


class LedgerRecovery:
    """One recovery; `metadata` is what was stored when the ledger was moved to IN_RECOVERY."""

    def __init__(self, metadata: LedgerMetadata, *, read_ahead_max: int = READ_AHEAD_MAX) -> None:
        assert metadata.state is LedgerState.IN_RECOVERY
        self._ledger_id = metadata.ledger_id
        self._quorum = metadata.quorum
        self._ensemble = metadata.last_ensemble
        self._read_ahead_max = read_ahead_max
        self._lacs: dict[int, int] = {}  # positions that fenced, and the LAC they knew
        self._fence_errors: dict[int, DLError] = {}
        self._reads: dict[int, _Read] | None = None  # None: still fencing
        self._next_read = 0
        self._next_entry = 0  # the first entry that is not decided
        self._written = -1
        self._end: int | None = None
        self._is_over = False

    def start(self) -> list[Effect]:
        """Fence the whole last ensemble."""
        return [
            FenceBookie(position=position, bookie=bookie)
            for position, bookie in enumerate(self._ensemble.bookies)
        ]

    def fenced(self, *, position: int, last_add_confirmed: int) -> list[Effect]:
        """The bookie at `position` fenced the ledger durably, and knew this LAC."""
        self._lacs[position] = last_add_confirmed
        return self._after_fence_answer()

    def fence_failed(self, *, position: int, error: DLError) -> list[Effect]:
        """Whether the bookie at `position` fenced the ledger is unknown."""
        self._fence_errors[position] = error
        return self._after_fence_answer()

    def _after_fence_answer(self) -> list[Effect]:
        if self._reads is not None or self._is_over:
            return []
        if is_covered(self._quorum, self._lacs.keys()):
            # Entries of earlier ensembles are acknowledged: a change starts at LAC + 1.
            start = max(*self._lacs.values(), self._ensemble.first_entry_id - 1)
            self._reads = {}
            self._written = start
            self._next_entry = self._next_read = start + 1
            return [StartWriteBack(last_add_confirmed=start), *self._read_ahead()]
        if len(self._lacs) + len(self._fence_errors) < self._quorum.ensemble_size:
            return []
        return self._abort("too few bookies fenced it", self._fence_errors)

    def _read_ahead(self) -> list[Effect]:
        assert self._reads is not None
        effects: list[Effect] = []
        while self._next_read <= self._written + self._read_ahead_max:
            entry_id = self._next_read
            self._reads[entry_id] = _Read()
            effects += [
                ReadEntry(
                    entry_id=entry_id, position=position, bookie=self._ensemble.bookies[position]
                )
                for position in write_set(self._quorum, entry_id)
            ]
            self._next_read += 1
        return effects

    def found(self, entry: EntryFrame) -> list[Effect]:
        """A bookie gave a valid copy of an entry."""
        read = self._read_of(entry.entry_id)
        if read is None or read.entry is not None:
            return []
        read.entry = entry
        return self._decide()

    def missing(self, *, entry_id: int, position: int) -> list[Effect]:
        """The bookie at `position` proved that it does not hold the entry, and never will."""
        read = self._read_of(entry_id)
        if read is None:
            return []
        read.noes.add(position)
        return self._decide()

    def unknown(self, *, entry_id: int, position: int, error: DLError) -> list[Effect]:
        """Whether the bookie at `position` holds the entry is unknown."""
        read = self._read_of(entry_id)
        if read is None:
            return []
        read.unknown[position] = error
        return self._decide()

    def _read_of(self, entry_id: int) -> _Read | None:
        return None if self._reads is None else self._reads.get(entry_id)

    def _decide(self) -> list[Effect]:
        """Decide entries strictly in order: what lies beyond the end does not matter."""
        assert self._reads is not None
        if self._is_over or self._end is not None:
            return []
        quorum = self._quorum
        noes_needed = quorum.write_quorum_size - quorum.ack_quorum_size + 1
        effects: list[Effect] = []
        while (read := self._reads.get(self._next_entry)) is not None:
            if read.entry is not None:
                effects.append(WriteBack(entry=read.entry))
                del self._reads[self._next_entry]
                self._next_entry += 1
                continue
            if len(read.noes) >= noes_needed:
                self._end = self._next_entry - 1
                self._reads.clear()
                return effects + self._finish()
            if len(read.noes) + len(read.unknown) == quorum.write_quorum_size:
                return effects + self._abort(f"entry {self._next_entry} may exist", read.unknown)
            break
        return effects

    def written_back(self, *, last_entry_id: int) -> list[Effect]:
        """Entries up to `last_entry_id` are held by Qa bookies."""
        assert self._written <= last_entry_id < self._next_entry
        self._written = last_entry_id
        if self._is_over:
            return []
        if self._end is not None:
            return self._finish()
        return self._read_ahead()

    def _finish(self) -> list[Effect]:
        assert self._end is not None
        if self._written < self._end:
            return []
        self._is_over = True
        return [EndLedger(last_entry_id=self._end)]

    def _abort(self, problem: str, errors: dict[int, DLError]) -> list[Effect]:
        self._is_over = True
        answers = "; ".join(
            f"{self._ensemble.bookies[position]}: {type(error).__name__}: {error}"
            for position, error in sorted(errors.items())
        )
        error = LedgerRecoveryError(f"ledger {self._ledger_id}: {problem}: {answers}")
        return [AbortRecovery(error=error)]
