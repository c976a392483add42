"""Quorum append to one ledger: which bookies get an entry, when it counts, ensemble changes.

Theory of operation.  Every entry goes to its write set in the last ensemble and is *confirmed* once
Qa bookies hold it and all entries before it are confirmed; confirmation is what callers see,
strictly in entry order.  A bookie that fails an add is *failed* until it is replaced:

    steady --a bookie fails--> looking --found--> copying --held--> changing --stored--> steady
                               |     ^  <--it fails--+                 |
                               +none-+ (later)                         +--taken over--> failed

Invariants:

* From the moment an ensemble change is planned until it is known to be in the metadata nothing is
  confirmed.  The change starts at LAC + 1, so no confirmed entry ever belongs to an ensemble that
  does not hold it (BookKeeper's #1591 and #4651 were violations).
* Planning and confirming happen in this one serial machine, never interleaved.
* Before a change is planned the new bookies hold every unconfirmed entry that was sent to the
  bookies that they replace.  Therefore an entry that Qa bookies hold, acknowledged or not, is held
  by Qa of the next ensemble too: readers show it (`reading/confirmed.py`), and recovery keeps it.
* Acknowledgements are kept after an entry has Qa of them, because a change can take some away
  again.
* A refusal because of fencing ends the machine: another client decides from now on.

While replacements are looked for and get copies, confirmation goes on: the ensemble in the metadata
is still the one that the entries were sent to.  A failed position gets no new entries until it is
replaced or, when no bookie can replace it, re-admitted.  An entry that cannot reach Qa waits for
bookies as long as the driver allows it; then the machine fails.

A new bookie may refuse a copy that the others hold, because its limits are lower.  It would refuse
the copy again, so the machine leaves it out for the rest of the ledger.

Recovery writes entries back through the same machine with ``persist=False``: its ensemble changes
take effect at once and in memory only.  They reach the metadata with the closing write.

The driver (`append_driver.py`) performs the effects and feeds the answers back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from dlcore.base.errors import (
    BadRequestError,
    CorruptMetadataError,
    DLError,
    EntryTooLargeError,
    LedgerClosedError,
    LedgerFencedError,
    NotEnoughBookiesError,
)
from dlcore.ledger.metadata.quorum import first_followed, write_set
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState
from dlcore.ledger.placing.placement import UNKNOWN_TOPOLOGY, Topology, choose_replacements
from dlcore.wire.digest import BytesLike, EntryFrame, encode_frame, frame_parts

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Mapping, Sequence

    from dlcore.base.ids import BookieId
    from dlcore.wire.frames import FrameParts


_JOIN_BYTES = 8192
"""A body below this size is joined once here, else each connection would join its parts."""


class SendAdd(NamedTuple):
    """Effect: send `frame` to each (position, bookie) of `targets`, in the order of the effects."""

    entry_id: int
    frame: bytes | FrameParts
    targets: list[tuple[int, BookieId]]


class CompleteAdds(NamedTuple):
    """Effect: entries `first_entry_id` to `last_entry_id` are confirmed; answer their callers."""

    first_entry_id: int
    last_entry_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FindReplacements:
    """Effect: list the registered bookies and answer with `bookies_listed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryReplacements:
    """Effect: no bookie can replace `failed` now; after a while do as for `FindReplacements`."""

    failed: frozenset[BookieId]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMetadata:
    """Effect: compare-and-set the metadata; answer with `change_stored` or `metadata_reread`."""

    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class FailAdds:
    """Effect: the machine ended with `error`; every unconfirmed add fails with it."""

    error: DLError


Effect: TypeAlias = (
    SendAdd | CompleteAdds | FindReplacements | RetryReplacements | StoreMetadata | FailAdds
)


class _Add:
    __slots__ = ("acks", "copied", "entry_id", "frame", "ledger_bytes", "owed", "waiting")

    def __init__(self, entry_id: int, frame: bytes | FrameParts, ledger_bytes: int) -> None:
        self.entry_id = entry_id
        self.frame = frame
        self.ledger_bytes = ledger_bytes
        self.acks: set[int] = set()  # positions whose bookie made it durable
        self.waiting: dict[int, BookieId] = {}  # positions whose bookie has not answered yet
        self.owed: set[int] = set()  # positions of joining bookies that have no durable copy yet
        self.copied: set[BookieId] = set()  # joining bookies that have a durable copy


class LedgerAppender:
    """The append half of a ledger: one instance per writer or recoverer, one caller at a time."""

    def __init__(
        self,
        metadata: LedgerMetadata,
        *,
        last_add_confirmed: int = -1,
        length_bytes: int = 0,
        persist: bool = True,
    ) -> None:
        assert metadata.state is not LedgerState.CLOSED
        self.metadata = metadata
        self.last_add_confirmed = last_add_confirmed
        self.last_add_pushed = last_add_confirmed
        self.pushed_bytes = length_bytes
        self.confirmed_bytes = length_bytes
        self.pending_bytes = 0
        self.lac_carried = last_add_confirmed
        """The LAC that the last add carried."""
        self.error: DLError | None = None
        self._persist = persist
        self._adds: dict[int, _Add] = {}  # unconfirmed, or not yet answered by all; ascending
        self._failed: dict[int, BookieId] = {}  # positions whose bookie failed
        self._reasons: dict[BookieId, DLError] = {}  # why it failed last
        self._unfit: dict[BookieId, DLError] = {}  # what a new bookie refused that others hold
        self._is_looking = False
        self._is_waiting = False  # for bookies, with an entry that cannot reach Qa
        self._joining: dict[int, BookieId] = {}  # new bookies by position, until the change
        self._copies_left = 0  # copies that joining bookies have yet to make durable
        self._planned: LedgerMetadata | None = None
        self._is_sealed = False
        quorum = metadata.quorum
        followed = first_followed(metadata.ledger_id, quorum.ensemble_size)
        # An add carries the LAC: send first to the bookie that followers listen to.
        self._write_sets = [
            sorted(write_set(quorum, first), key=lambda position: position != followed)
            for first in range(quorum.ensemble_size)
        ]

    @property
    def pending_count(self) -> int:
        """Entries that some bookie of their write set has not answered, or that are unconfirmed."""
        return len(self._adds)

    @property
    def is_idle(self) -> bool:
        """Whether every pushed entry is confirmed."""
        return self.last_add_confirmed == self.last_add_pushed

    @property
    def has_news(self) -> bool:
        """Whether no add has carried the current LAC."""
        return self.last_add_confirmed > self.lac_carried

    @property
    def is_changing(self) -> bool:
        """Whether an ensemble change is planned and not known to be stored."""
        return self._planned is not None

    @property
    def is_stuck(self) -> bool:
        """Whether an unconfirmed entry cannot reach Qa without a replacement."""
        return any(not self._can_confirm(add) for add in self._unconfirmed())

    @property
    def failed_bookies(self) -> frozenset[BookieId]:
        """Members of the last ensemble that failed and are not replaced."""
        return frozenset(self._failed.values())

    def append(self, body: Sequence[BytesLike]) -> list[Effect]:
        """Give the next entry id to `body` and send it; it carries the LAC of this moment."""
        assert self.error is None
        assert not self._is_sealed
        entry_id = self.last_add_pushed + 1
        ledger_bytes = self.pushed_bytes + sum(map(len, body))
        self.lac_carried = self.last_add_confirmed
        is_small = ledger_bytes - self.pushed_bytes < _JOIN_BYTES
        frame = (encode_frame if is_small else frame_parts)(
            ledger_id=self.metadata.ledger_id,
            entry_id=entry_id,
            last_add_confirmed=self.last_add_confirmed,
            ledger_bytes=ledger_bytes,
            body=body,
        )
        return self._push(frame, ledger_bytes)

    def append_recovered(self, entry: EntryFrame) -> list[Effect]:
        """Write an entry back as it was read: its frame must stay the same byte for byte."""
        assert self.error is None
        assert entry.entry_id == self.last_add_pushed + 1
        return self._push(bytes(entry.data), entry.ledger_bytes)

    def _push(self, frame: bytes | FrameParts, ledger_bytes: int) -> list[Effect]:
        self.last_add_pushed += 1
        self.pushed_bytes = ledger_bytes
        self.pending_bytes += len(frame)
        add = _Add(self.last_add_pushed, frame, ledger_bytes)
        self._adds[add.entry_id] = add
        effects = self._send(add, self._positions(add.entry_id))
        if self._failed and not self._is_waiting and not self._can_confirm(add):
            effects += self._look()
        return effects

    def _positions(self, entry_id: int) -> Sequence[int]:
        return self._write_sets[entry_id % len(self._write_sets)]

    def _send(self, add: _Add, positions: Collection[int]) -> list[Effect]:
        """Send to those of `positions` that have not failed, answered, or an add on its way."""
        bookies = self.metadata.last_ensemble.bookies
        failed, acks, waiting = self._failed, add.acks, add.waiting
        targets = [
            (position, bookies[position])
            for position in positions
            if position not in failed and position not in acks and position not in waiting
        ]
        if not targets:
            return []
        waiting.update(targets)
        return [SendAdd(add.entry_id, add.frame, targets)]

    def awaits(self, entry_id: int, position: int, bookie: BookieId) -> bool:
        """Return whether the bookie's answer about the entry still matters."""
        add = self._adds.get(entry_id)
        return add is not None and (
            add.waiting.get(position) == bookie or self._owes(add, position, bookie)
        )

    def _owes(self, add: _Add | None, position: int, bookie: BookieId) -> bool:
        """Return whether `bookie`, which will take `position`, does not hold the entry yet."""
        is_owed = add is not None and position in add.owed
        return is_owed and self._joining.get(position) == bookie

    def frame_of(self, entry_id: int) -> bytes | FrameParts:
        """Return the frame of an entry that still awaits an answer."""
        return self._adds[entry_id].frame

    def add_succeeded(self, entry_id: int, position: int, bookie: BookieId) -> list[Effect]:
        """Record that `bookie` made the entry durable; late and repeated answers do no harm."""
        add = self._adds.get(entry_id)
        if add is not None and self._owes(add, position, bookie):
            add.owed.discard(position)
            add.copied.add(bookie)
            self._copies_left -= 1
            return self._plan_if_copied()
        add = self._take_answer(entry_id, position, bookie)
        if add is None:
            return []
        add.acks.add(position)
        self._release(add)
        return self._confirm()

    def add_failed(
        self, *, entry_id: int, position: int, bookie: BookieId, error: DLError
    ) -> list[Effect]:
        """Record a refusal or a missing answer."""
        if isinstance(error, LedgerFencedError):
            return self.fail(error)
        if self._owes(self._adds.get(entry_id), position, bookie):
            if isinstance(error, EntryTooLargeError | BadRequestError):
                self._unfit[bookie] = error
            self._joining = {}
            return self._look()
        add = self._take_answer(entry_id, position, bookie)
        if add is None:
            return []
        if self._persist and isinstance(error, EntryTooLargeError | BadRequestError):
            # Every bookie would answer the same.  In recovery it is one bookie with other bytes.
            return self.fail(error)
        self._release(add)
        if position in self._failed and self._can_confirm(add):
            return []
        self._failed[position] = bookie
        self._reasons[bookie] = error
        return self._look()

    def _take_answer(self, entry_id: int, position: int, bookie: BookieId) -> _Add | None:
        add = self._adds.get(entry_id)
        if add is None or add.waiting.get(position) != bookie:
            return None
        del add.waiting[position]
        return add

    def _release(self, add: _Add) -> None:
        """Forget a confirmed entry that no bookie of its write set has yet to answer."""
        if add.waiting or add.entry_id > self.last_add_confirmed:
            return
        del self._adds[add.entry_id]
        self.pending_bytes -= len(add.frame)

    def _confirm(self) -> list[Effect]:
        """Advance the LAC over every entry at Qa; not while a planned change is not stored."""
        if self._planned is not None:
            return []
        first = self.last_add_confirmed + 1
        needed = self.metadata.quorum.ack_quorum_size
        add = self._adds.get(first)
        while add is not None and len(add.acks) >= needed:
            self.last_add_confirmed = add.entry_id
            self._copies_left -= len(add.owed)
            add.owed.clear()
            self.confirmed_bytes = add.ledger_bytes
            self._release(add)
            add = self._adds.get(add.entry_id + 1)
        assert self.last_add_confirmed <= self.last_add_pushed
        if self.last_add_confirmed < first:
            return []
        return [CompleteAdds(first, self.last_add_confirmed), *self._plan_if_copied()]

    def _can_confirm(self, add: _Add) -> bool:
        """Whether Qa bookies hold the entry or may still answer that they do."""
        hopeful = add.acks.union(p for p in add.waiting if p not in self._failed)
        return len(hopeful) >= self.metadata.quorum.ack_quorum_size

    def _look(self) -> list[Effect]:
        """Ask for replacements, unless a search or a change is under way: its end asks again."""
        if self._is_looking or self._joining or self._planned is not None or self._is_sealed:
            return []
        self._is_looking = True
        return [FindReplacements()]

    def retry_replacements(self) -> list[Effect]:
        """Look again, a while after `RetryReplacements`."""
        self._is_waiting = False
        return self._look() if self._failed and self.error is None else []

    def bookies_listed(
        self,
        candidates: Collection[BookieId],
        *,
        readmitted: Collection[BookieId] = (),
        topology: Topology = UNKNOWN_TOPOLOGY,
        may_wait: bool = False,
        rng: random.Random,
    ) -> list[Effect]:
        """Plan an ensemble change with bookies from `candidates`, chosen by `topology`.

        If the candidates do not suffice, failed bookies in `readmitted` get entries again; for that
        the metadata does not change.  If some entry still cannot reach Qa, the machine looks again
        later if `may_wait`, and fails otherwise.
        """
        assert self._planned is None
        self._is_looking = False
        if self.error is not None or self._is_sealed or not self._failed:
            return []
        ensemble = self.metadata.last_ensemble
        chosen = choose_replacements(
            [each for each in candidates if each not in self._unfit],
            ensemble=ensemble.bookies,
            positions=sorted(self._failed),
            write_quorum_size=self.metadata.quorum.write_quorum_size,
            topology=topology,
            rng=rng,
        )
        if not chosen:
            return self._go_on_without(readmitted, may_wait=may_wait)
        self._joining, self._copies_left = chosen, 0
        effects: list[Effect] = []
        for add in self._unconfirmed() if self._persist else ():
            # A bookie that failed with one entry keeps the others: send only the entries it lacks.
            add.owed = {
                p
                for p in self._positions(add.entry_id)
                if p in chosen and chosen[p] not in add.copied
            }
            self._copies_left += len(add.owed)
            if add.owed:
                targets = [(p, chosen[p]) for p in sorted(add.owed)]
                effects.append(SendAdd(add.entry_id, add.frame, targets))
        return effects + self._plan_if_copied()

    def _plan_if_copied(self) -> list[Effect]:
        """Plan the change to the joining bookies, once they hold all entries that they need."""
        if not self._joining or self._copies_left or self._planned is not None or self._is_sealed:
            return []
        bookies = list(self.metadata.last_ensemble.bookies)
        for position, bookie in self._joining.items():
            bookies[position] = bookie
        return self._plan(self.metadata, tuple(bookies))

    def _plan(self, base: LedgerMetadata, bookies: tuple[BookieId, ...]) -> list[Effect]:
        planned = base.with_last_ensemble(
            first_entry_id=self.last_add_confirmed + 1, bookies=bookies
        )
        self._planned = planned
        if not self._persist:
            return self.change_stored(planned)
        return [StoreMetadata(metadata=planned)]

    def _go_on_without(self, readmitted: Collection[BookieId], *, may_wait: bool) -> list[Effect]:
        effects: list[Effect] = []
        back = {position for position, bookie in self._failed.items() if bookie in readmitted}
        for position in back:
            del self._failed[position]
        if back:
            for add in self._unconfirmed():
                effects += self._send(add, [p for p in self._positions(add.entry_id) if p in back])
        stuck = next((add for add in self._unconfirmed() if not self._can_confirm(add)), None)
        if stuck is not None and not may_wait:
            return self.fail(self._not_enough(stuck))
        if self._failed:
            self._is_waiting = stuck is not None
            effects.append(RetryReplacements(failed=self.failed_bookies))
        return effects

    def _not_enough(self, add: _Add) -> NotEnoughBookiesError:
        failed = _told({each: self._reasons[each] for each in self.failed_bookies})
        refused = f", for new ones refused entries: {_told(self._unfit)}" if self._unfit else ""
        quorum = self.metadata.quorum
        return NotEnoughBookiesError(
            f"ledger {self.metadata.ledger_id}: entry {add.entry_id} cannot reach "
            f"{quorum.ack_quorum_size} of {quorum.write_quorum_size} bookies: {failed} failed, "
            f"and no other writable bookie can take the place{refused}"
        )

    def _unconfirmed(self) -> list[_Add]:
        if self.error is not None:
            return []  # they failed with that error
        return [self._adds[e] for e in range(self.last_add_confirmed + 1, self.last_add_pushed + 1)]

    def change_stored(self, metadata: LedgerMetadata) -> list[Effect]:
        """Use the stored ensemble: send to replaced positions, then confirm waiting entries."""
        assert self._planned is not None
        old, new = self.metadata.last_ensemble, metadata.last_ensemble
        if self.error is not None:
            return []
        if new.first_entry_id > self.last_add_confirmed + 1:
            return self.fail(
                CorruptMetadataError(
                    f"ledger {metadata.ledger_id}: the last ensemble starts at entry "
                    f"{new.first_entry_id}, expected at most {self.last_add_confirmed + 1}"
                )
            )
        self._planned = None
        self.metadata = metadata
        changed = {p for p, bookie in enumerate(new.bookies) if bookie != old.bookies[p]}
        self._failed = {p: bookie for p, bookie in self._failed.items() if p not in changed}
        effects: list[Effect] = []
        for add in list(self._adds.values()):
            for position in changed:
                add.waiting.pop(position, None)
            if add.entry_id > self.last_add_confirmed:
                positions = [p for p in self._positions(add.entry_id) if p in changed]
                add.acks -= changed
                add.acks.update(p for p in positions if new.bookies[p] in add.copied)
                effects += self._send(add, positions)
            self._release(add)
        self._joining = {}
        effects += self._confirm()
        if self._failed:
            effects += self._look()
        return effects

    def metadata_reread(self, metadata: LedgerMetadata) -> list[Effect]:
        """Decide a change whose write lost, or whose outcome is unknown, by the stored metadata."""
        assert self._planned is not None
        if self.error is not None:
            return []
        ledger_id = metadata.ledger_id
        if metadata.state is LedgerState.CLOSED:
            return self.fail(
                LedgerClosedError(
                    f"ledger {ledger_id} was closed by another client at entry "
                    f"{metadata.last_entry_id}"
                )
            )
        if metadata.state is LedgerState.IN_RECOVERY:
            return self.fail(LedgerFencedError(f"ledger {ledger_id} is being recovered"))
        if metadata.last_ensemble != self.metadata.last_ensemble:
            # Only this writer changes the last ensemble of an open ledger: it is its own write.
            return self.change_stored(metadata)
        bookies = self._planned.last_ensemble.bookies
        self.metadata = metadata
        return self._plan(metadata, bookies)

    def fail(self, error: DLError) -> list[Effect]:
        """End for good: nothing is confirmed any more."""
        if self.error is not None:
            return []
        self.error = error
        self._adds.clear()
        self._joining = {}
        self.pending_bytes = 0
        return [FailAdds(error=error)]

    def seal(self) -> None:
        """Take no more entries and start no more changes: the ledger is about to be closed."""
        self._is_sealed = True


def _told(errors: Mapping[BookieId, DLError]) -> str:
    return ", ".join(f"{each} ({errors[each]})" for each in sorted(errors))
