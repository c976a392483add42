"""Tiering of a run of extents: its entries go to objects, and one cold extent takes its place.

Theory of operation.  A cold ledger is registered first, like a ledger that a merge fills, and its
id and token are part of the name of each object.  An object that is being written is therefore
never a stray one, and after a crash both go the way of all leftovers.  Each object is written under
a name that was never used before, and read back from the store.  If it equals the entries of the
bookies, by count, range and sum, the next one follows; else it is written again under another name.
When all is in objects, the ledger names them, and the swap of merges (`swap.py`) puts the cold
extent in the place of the run, in one transaction guarded by the log's head.
docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

Promises:

* No ledger is given up before each of its records was read back from an object.
* Readers meet an object only after the swap, and the old ledgers stay for a grace after it.
* A crash leaves the old extents or the cold one, and nothing that is not swept.
* A run that was truncated, deleted or merged meanwhile is left alone.

The driver is `tierer.py`.  Each event has one effect.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, assert_never

from msgspec.structs import asdict

from dlcore.base.errors import CorruptMetadataError, DLError, ObjectStoreError
from dlcore.base.machines import State, Transitions
from dlcore.base.steps import CallFailed, Ended, StepMachine
from dlcore.ledger.metadata.values import StoredObject
from dlcore.log.metadata.segment import ColdExtent
from dlcore.ops.upkeep.merging import MergeRun, merged_extent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.log.cold.facts import ObjectFacts
    from dlcore.log.metadata.segment import Extent
    from dlcore.ops.upkeep.config import MergePolicy

ATTEMPTS_MAX = 3
"""How often an object is written under a new name, until the log waits for the next round."""


class TierState(State):
    """The state of the machine; TIERED, OVERTAKEN and FAILED are final."""

    READY = "nothing has begun"
    CREATING = "the cold ledger is being registered"
    WRITING = "an object is being written under a new name"
    READING_BACK = "the object is read from the store, and compared"
    CLOSING = "the cold ledger gets its objects"
    SWAPPING = "the cold extent takes the place of the run"
    TIERED = "the cold extent is in the log"
    OVERTAKEN = "the run is not in the log any more"
    FAILED = "the store, the bookies or the metadata did not do their part"


_S = TierState
TRANSITIONS = Transitions(
    _S.READY,
    {
        _S.READY: {_S.CREATING: "begin"},
        _S.CREATING: {_S.WRITING: "registered", _S.FAILED: "refused"},
        _S.WRITING: {
            _S.READING_BACK: "written",
            _S.WRITING: "no answer; again, under another name",
            _S.FAILED: "refused, not the entries expected, or too many attempts",
        },
        _S.READING_BACK: {
            _S.WRITING: "the next object, or again under another name",
            _S.CLOSING: "the last one is whole",
            _S.FAILED: "refused, or too many attempts",
        },
        _S.CLOSING: {_S.SWAPPING: "stored", _S.FAILED: "refused"},
        _S.SWAPPING: {
            _S.TIERED: "stored",
            _S.OVERTAKEN: "truncated, deleted or merged",
            _S.FAILED: "refused",
        },
        _S.TIERED: {},
        _S.OVERTAKEN: {},
        _S.FAILED: {},
    },
)


class Signal(enum.Enum):
    """Events that carry nothing."""

    BEGIN = "the run was chosen"
    CLOSED = "the cold ledger names its objects"


@dataclass(frozen=True, slots=True)
class Created:
    """Event: the cold ledger is registered."""

    ledger_id: int
    token: str


@dataclass(frozen=True, slots=True)
class Written:
    """Event: an object was stored; `facts` are those of the entries as bookies returned them."""

    facts: ObjectFacts
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Event: the facts of the object by the rows that the store returned."""

    facts: ObjectFacts


@dataclass(frozen=True, slots=True)
class Swapped:
    """Event: the swap ended; False: it was overtaken."""

    is_there: bool


Event: TypeAlias = Signal | Created | Written | ReadBack | Swapped | CallFailed


@dataclass(frozen=True, slots=True)
class Create:
    """Effect: register a cold ledger; answer with `Created`."""


@dataclass(frozen=True, slots=True)
class Write:
    """Effect: store an object of the entries from this one of the segment on, as many as it takes.

    With `again` they are the entries of the last object.  Answer with `Written`.
    """

    name: str
    first_entry: int
    again: bool


@dataclass(frozen=True, slots=True)
class Check:
    """Effect: read all rows of the object that was written last; answer with `ReadBack`."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Close:
    """Effect: store these objects, of the extent, in the ledger; answer with `Signal.CLOSED`."""

    objects: tuple[StoredObject, ...]
    extent: ColdExtent


@dataclass(frozen=True, slots=True)
class PutInPlace:
    """Effect: put the extent in the place of the run; answer with `Swapped`."""

    extent: ColdExtent


Work: TypeAlias = Create | Write | Check | Close | PutInPlace
Effect: TypeAlias = Work | Ended[bool]
"""The outcome is whether the extent is in the place of the run."""


class RunPlace(NamedTuple):
    """The place of a record of a run: its segment, its entry there, and its sequence id."""

    lssn: int
    entry: int
    sequence_id: int

    def after(self, *, entries: int, records: int) -> RunPlace:
        """Return the place behind so many entries and records."""
        return RunPlace(self.lssn, self.entry + entries, self.sequence_id + records)


class TierRun(StepMachine[TierState, Event, Work, bool]):
    """Tiers one run.

    Args:
        start: the place of its first record.
        parts: the extents of the run, all final.
    """

    transitions = TRANSITIONS

    def __init__(self, start: RunPlace, parts: Sequence[Extent]) -> None:
        self.state = TierState.READY
        self._parts = parts
        self._start = start
        self._end = start.after(
            entries=sum(part.entry_count for part in parts),
            records=sum(part.record_count for part in parts),
        )
        self._next = start  # where the objects that are whole end
        self._created: Created | None = None
        self._objects: list[StoredObject] = []
        self._attempt = 0
        self._written: Written | None = None

    def handle(self, event: Event) -> Effect:
        """Take one event."""
        try:
            match event:
                case Signal.BEGIN:
                    self._become(TierState.CREATING)
                    return Create()
                case Created():
                    self._created = event
                    return self._write(again=False)
                case Written():
                    return self._check(event)
                case ReadBack(facts):
                    return self._compare(facts)
                case Signal.CLOSED:
                    self._become(TierState.SWAPPING)
                    return PutInPlace(self._extent())
                case Swapped(is_there):
                    self._become(TierState.TIERED if is_there else TierState.OVERTAKEN)
                    return Ended(is_there)
                case CallFailed(error):
                    return self._try_again(error)
                case _:
                    assert_never(event)
        except DLError as error:
            self._become(TierState.FAILED)
            return Ended(error)

    def _name(self) -> str:
        assert self._created is not None
        number = len(self._objects)
        return f"{self._created.ledger_id}-{self._created.token}-{number}-{self._attempt}.parquet"

    def _write(self, *, again: bool) -> Effect:
        self._become(TierState.WRITING)
        self._attempt += 1
        self._written = None
        return Write(self._name(), self._next.entry, again)

    def _check(self, written: Written) -> Effect:
        facts, expected = written.facts, self._next
        found = RunPlace(facts.lssn, facts.first_entry, facts.first_sequence_id)
        end = found.after(entries=facts.entries, records=facts.records)
        # Each record is counted by its extent; the last object is the one with all of them.
        is_whole = end == self._end or end.entry < self._end.entry
        if found != expected or facts.entries < 1 or not is_whole:
            raise CorruptMetadataError(
                f"segment {expected.lssn}: entries {found.entry} to {end.entry - 1} have "
                f"{facts.records} records from sequence id {found.sequence_id} on; expected "
                f"entry {expected.entry} and sequence id {expected.sequence_id} first, and "
                f"{self._end.sequence_id - self._start.sequence_id} records in all entries before "
                f"{self._end.entry}"
            )
        self._become(TierState.READING_BACK)
        self._written = written
        return Check(self._name(), written.size_bytes)

    def _compare(self, facts: ObjectFacts) -> Effect:
        written = self._written
        assert written is not None
        if facts != written.facts:
            return self._try_again(
                ObjectStoreError(
                    f"object {self._name()} holds {facts} by its rows, written was {written.facts}"
                )
            )
        self._objects.append(
            StoredObject(
                self._next.entry - self._start.entry,
                self._next.sequence_id - self._start.sequence_id,
                self._name(),
                written.size_bytes,
                facts.crc32c,
            )
        )
        self._next = self._next.after(entries=facts.entries, records=facts.records)
        self._attempt = 0
        if self._next != self._end:
            return self._write(again=False)
        self._become(TierState.CLOSING)
        return Close(tuple(self._objects), self._extent())

    def _try_again(self, error: DLError) -> Effect:
        writes = self.state in (TierState.WRITING, TierState.READING_BACK)
        if not writes or not isinstance(error, ObjectStoreError) or self._attempt == ATTEMPTS_MAX:
            raise error
        return self._write(again=True)

    def _extent(self) -> ColdExtent:
        assert self._created is not None
        merged = merged_extent(self._parts, ledger_id=self._created.ledger_id)
        return ColdExtent(**asdict(merged))

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert self._attempt <= ATTEMPTS_MAX
        assert (self._written is not None) or self.state is not TierState.READING_BACK
        if self.state in (TierState.CLOSING, TierState.SWAPPING, TierState.TIERED):
            assert self._next == self._end


def plan_tier(extents: Sequence[Extent], policy: MergePolicy) -> MergeRun | None:
    """Return the next run of a segment to tier; None if all of it is cold.

    The numbers of extents and ledgers are bounded, as for merges, and so is the transaction.
    """
    first = next((n for n, extent in enumerate(extents) if not extent.is_cold), None)
    if first is None:
        return None
    end, ledgers = first, set[int]()
    for extent in extents[first : first + policy.run_extents_max]:
        ledgers.add(extent.ledger_id)
        if extent.is_cold or len(ledgers) > policy.run_ledgers_max:
            break
        end += 1
    return MergeRun(first=first, end=end)
