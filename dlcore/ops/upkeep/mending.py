"""Mending of a damaged object of a cold ledger: one with the same records takes its place.

Theory of operation.  The chain says what the object held: its entries, its records, and the sum of
what readers are given.  Two sources may still have that.  The old ledgers are on bookies for a
grace after tiering, and the cold ledger notes which they are.  Then there may be another object in
the folder of the segment: a write whose answer was lost leaves one, and so does a worker that died.
A source counts only if it holds exactly what the chain says.  The new object is written under a new
name, read back, and compared; then one compare-and-set of the ledger's metadata names it in the
place of the damaged one.  docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

Promises:

* The ledger never names an object that was not read back, and has the sum that the chain knows.
* A source that differs in anything is never used, so that nothing that was redacted comes back.
* The damaged object is not overwritten or deleted here: it stays until a sweep finds it unnamed.
* If no source is left, the run ends with an error that names the entries and each source.

The driver is `mender.py`.  Each event has one effect.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from msgspec.structs import replace

from dlcore.base.errors import DLError, MetadataError, ObjectStoreError
from dlcore.base.machines import State, Transitions
from dlcore.base.steps import CallFailed, Ended, StepMachine
from dlcore.log.cold.facts import difference, end_entry_of, url_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.log.cold.facts import ObjectFacts

ATTEMPTS_MAX = 3
"""How often the new object is written under another name."""
TWINS_MAX = 20
"""Most other objects of the folder that are read."""


class MendState(State):
    """The state of the machine; MENDED, OVERTAKEN and FAILED are final."""

    READY = "nothing has begun"
    MAKING = "the entries are read from their old ledgers, and an object is made of them"
    LISTING = "the folder of the segment is listed"
    READING = "another object of the folder is read"
    WRITING = "what was found is written under a new name"
    READING_BACK = "the new object is read from the store, and compared"
    NAMING = "the ledger gets the new name"
    MENDED = "the ledger names the new object"
    OVERTAKEN = "the ledger was changed meanwhile, or is gone"
    FAILED = "no source has the records, or a store did not do its part"


_S = MendState
TRANSITIONS = Transitions(
    _S.READY,
    {
        _S.READY: {_S.MAKING: "begin", _S.FAILED: "the chain knows no sum"},
        _S.MAKING: {
            _S.WRITING: "made, as the chain says",
            _S.LISTING: "the ledgers are gone, or differ",
            _S.FAILED: "refused",
        },
        _S.LISTING: {
            _S.READING: "there are others",
            _S.FAILED: "there is no other, or refused",
        },
        _S.READING: {
            _S.WRITING: "it is as the chain says",
            _S.READING: "it is not; the next one",
            _S.FAILED: "that was the last one",
        },
        _S.WRITING: {
            _S.READING_BACK: "written",
            _S.WRITING: "no answer; again, under another name",
            _S.FAILED: "refused, or too many attempts",
        },
        _S.READING_BACK: {
            _S.NAMING: "it is whole",
            _S.WRITING: "it is not; again, under another name",
            _S.FAILED: "refused, or too many attempts",
        },
        _S.NAMING: {
            _S.MENDED: "stored",
            _S.OVERTAKEN: "changed, or gone",
            _S.FAILED: "refused",
        },
        _S.MENDED: {},
        _S.OVERTAKEN: {},
        _S.FAILED: {},
    },
)


class Signal(enum.Enum):
    """Events that carry nothing."""

    BEGIN = "the object was found damaged, or missing"


@dataclass(frozen=True, slots=True)
class Have:
    """Event: a source was read as a whole; it holds these facts by its rows."""

    facts: ObjectFacts
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Listed:
    """Event: the other objects of the folder, by URL, with their sizes."""

    objects: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Written:
    """Event: what the last source had was stored."""


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Event: the facts of the new object by the rows that the store returned."""

    facts: ObjectFacts


@dataclass(frozen=True, slots=True)
class Named:
    """Event: the compare-and-set ended; False: the ledger was changed meanwhile, or is gone."""

    is_stored: bool


Event: TypeAlias = Signal | Have | Listed | Written | ReadBack | Named | CallFailed


@dataclass(frozen=True, slots=True)
class Make:
    """Effect: make the object of the ledgers that had the entries; answer with `Have`."""


@dataclass(frozen=True, slots=True)
class List:
    """Effect: list the folder of the segment; answer with `Listed`."""


@dataclass(frozen=True, slots=True)
class Read:
    """Effect: read a whole object; answer with `Have`."""

    url: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Write:
    """Effect: store what the last source had under this name; answer with `Written`."""

    name: str


@dataclass(frozen=True, slots=True)
class Check:
    """Effect: read all rows of the object that was written last; answer with `ReadBack`."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Name:
    """Effect: compare-and-set the metadata of the ledger; answer with `Named`."""

    ledger: LedgerMetadata


Work: TypeAlias = Make | List | Read | Write | Check | Name
"""Effects that the driver performs."""

Effect: TypeAlias = Work | Ended[bool]


class MendRun(StepMachine[MendState, Event, Work, bool]):
    """Mends one object.

    Args:
        ledger: the cold ledger as it was read.
        number: the place of the object among its objects.
        damage: how the object is damaged.
        unique: a number that no object of the ledger has in its name.
    """

    transitions = TRANSITIONS

    def __init__(self, ledger: LedgerMetadata, number: int, *, damage: str, unique: int) -> None:
        self.state = MendState.READY
        self._ledger = ledger
        self._number = number
        self._unique = unique
        self._reasons = [damage]
        self._twins: list[tuple[str, int]] = []
        self._size_bytes = 0
        self._attempt = 0

    def handle(self, event: Event) -> Effect:
        """Take one event."""
        try:
            match event:
                case Signal.BEGIN:
                    return self._begin()
                case Have():
                    return self._use(event)
                case Listed(objects):
                    own = {each.name for each in self._ledger.objects}
                    others = [each for each in objects if each[0].rpartition("/")[2] not in own]
                    self._twins = sorted(others, reverse=True)[:TWINS_MAX]
                    return self._next_twin()
                case Written():
                    self._become(MendState.READING_BACK)
                    return Check(self._name(), self._size_bytes)
                case ReadBack(facts):
                    return self._compare(facts)
                case Named(is_stored):
                    self._become(MendState.MENDED if is_stored else MendState.OVERTAKEN)
                    return Ended(is_stored)
                case CallFailed(error):
                    return self._go_on_after(error)
                case _:
                    assert_never(event)
        except DLError as error:
            self._become(MendState.FAILED)
            return Ended(error)

    def _begin(self) -> Effect:
        if self._ledger.objects[self._number].crc32c is None:
            self._reasons.append("an earlier release wrote it, so that nothing proves another one")
            raise self._hole()
        self._become(MendState.MAKING)
        return Make()

    def _use(self, source: Have) -> Effect:
        """Write what a source has, if it is what the chain says."""
        differs = difference(self._ledger, self._number, source.facts)
        if differs:
            return self._next_source(differs)
        self._size_bytes = source.size_bytes
        return self._write()

    def _next_source(self, reason: str) -> Effect:
        what = "on bookies" if self.state is MendState.MAKING else "another object of the folder"
        self._reasons.append(f"{what}: {reason}")
        if self.state is MendState.MAKING:
            self._become(MendState.LISTING)
            return List()
        return self._next_twin()

    def _next_twin(self) -> Effect:
        if not self._twins:
            if self.state is MendState.LISTING:
                self._reasons.append("there is no other object in its folder")
            raise self._hole()
        self._become(MendState.READING)
        return Read(*self._twins.pop())

    def _hole(self) -> ObjectStoreError:
        ledger, number = self._ledger, self._number
        first, end = ledger.objects[number].first_entry_id, end_entry_of(ledger, number)
        return ObjectStoreError(
            f"entries {first} to {end - 1} of ledger {ledger.ledger_id} of log "
            f"{ledger.custom.get('log')!r} are lost with object {url_of(ledger, number)}: "
            f"{' '.join('; '.join(self._reasons).split())}",  # libraries tell in several lines
            is_damaged=True,
        )

    def _name(self) -> str:
        ledger = self._ledger
        attempt = self._unique + self._attempt
        return f"{ledger.ledger_id}-{ledger.token}-{self._number}-{attempt}.parquet"

    def _write(self) -> Effect:
        self._become(MendState.WRITING)
        self._attempt += 1
        return Write(self._name())

    def _compare(self, facts: ObjectFacts) -> Effect:
        differs = difference(self._ledger, self._number, facts)
        if differs:
            return self._write_again(ObjectStoreError(f"object {self._name()}: {differs}"))
        self._become(MendState.NAMING)
        objects = list(self._ledger.objects)
        objects[self._number] = replace(
            objects[self._number], name=self._name(), size_bytes=self._size_bytes
        )
        return Name(replace(self._ledger, objects=tuple(objects)))

    def _write_again(self, error: DLError) -> Effect:
        if self._attempt == ATTEMPTS_MAX:
            raise error
        return self._write()

    def _go_on_after(self, error: DLError) -> Effect:
        is_source = self.state in (MendState.MAKING, MendState.READING)
        # Without the metadata store nothing is known of the source.
        if is_source and not isinstance(error, MetadataError):
            return self._next_source(str(error))
        is_write = self.state in (MendState.WRITING, MendState.READING_BACK)
        if is_write and isinstance(error, ObjectStoreError):
            return self._write_again(error)
        raise error

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert self._attempt <= ATTEMPTS_MAX
        assert len(self._twins) < TWINS_MAX or self.state is MendState.LISTING
        if self.state in (MendState.WRITING, MendState.READING_BACK, MendState.NAMING):
            assert self._attempt
            assert self._size_bytes
