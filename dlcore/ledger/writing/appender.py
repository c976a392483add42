"""The append half of one ledger: quorum adds, ensemble changes, the LAC for readers, the close.

Theory of operation.  Every entry goes to its write set in the last ensemble and is *confirmed* once
Qa bookies hold it and all entries before it are confirmed; confirmation is what callers see,
strictly in entry order.  A bookie that fails an add is *failed* until it is replaced, or taken back
because no bookie can replace it.  docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

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
replaced or taken back.  An entry that cannot reach Qa waits for bookies as long as the search
allows it; then the machine fails.  A bookie that refuses an entry for the entry's own sake, as too
large or as malformed, would refuse it for ever.  If a member says so, the machine fails with that
error.  If a new bookie says so of a copy, which the members hold, it is left out for this ledger.

An add carries the LAC.  If none does, the LAC is sent by itself: at once to the bookie that
followers listen to, a few milliseconds later to all, with one message per bookie at a time.  A
newer LAC is sent when the message before it was answered, and a failed message is repeated.

A ledger is closed at its LAC once every entry is confirmed and no change is under way.  If adds
failed while bookies or metadata were missing, a recovery finds the end instead, since readers may
have seen entries that an ack quorum holds.

Recovery writes entries back through the same machine with ``is_recovery=True``: its ensemble
changes take effect at once and in memory only, and reach the metadata with the closing write.  Such
a machine tells no LAC and closes nothing.

The machine decides when the ensemble changes and how the ledger ends.  It owns three parts, which
know nothing of each other: `AddWindow` (entries, their holders, the LAC), `Replacements` (members
that failed, bookies that join) and `LacPublication` (messages that tell the LAC).

The driver (`writer.py`) performs the effects and feeds the answers back.  It waits while all
writers of the client together have too much `InFlight`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, assert_never

from dlcore.base.backoff import Backoff
from dlcore.base.errors import (
    BadRequestError,
    BookieAccessDeniedError,
    BookieOverloadedError,
    CorruptMetadataError,
    DLError,
    EntryTooLargeError,
    LedgerClosedError,
    LedgerFencedError,
    LedgerNotFoundError,
    MetadataError,
    MetadataVersionError,
    NotEnoughBookiesError,
)
from dlcore.base.machines import Machine, State, Transitions
from dlcore.ledger.metadata.values import (
    LedgerMetadata,
    LedgerState,
    first_followed,
    is_covered,
    write_set,
)
from dlcore.ledger.placing.placement import Topology, choose_replacements
from dlcore.wire.frames import BytesLike, EntryFrame, encode_frame, frame_parts

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from dlcore.base.ids import BookieId
    from dlcore.ledger.placing.health import Choice, ReplacementSearch
    from dlcore.wire.frames import FrameParts


class InFlight:
    """Bounds the entries of all writers that some bookie has not answered.

    A writer that finds the limit reached waits in a queue, and no other passes it.  A writer that
    has nothing in flight may always append one entry.  Therefore a writer whose bookies do not
    answer does not block the others for good.
    """

    def __init__(self, *, bytes_max: int, entries_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries_max = entries_max
        self.size_bytes = 0
        self.entry_count = 0
        self.line: dict[Share, None] = {}

    @property
    def has_room(self) -> bool:
        """Whether bytes and entries are both below their limits."""
        return self.size_bytes < self._bytes_max and self.entry_count < self._entries_max

    def wake_first(self) -> None:
        """Wake the first writer in the queue to check again."""
        # Only the first: it wakes the next one when it leaves, so that no writer passes another.
        for first in self.line:
            first.wake()
            return


class Share:
    """One writer's bytes and entries in flight; `wake` makes it check again if it may append."""

    def __init__(self, total: InFlight, wake: Callable[[], None]) -> None:
        self._total = total
        self._size_bytes = 0
        self._entry_count = 0
        self.wake = wake

    def changed(self, *, size_bytes: int, entry_count: int) -> None:
        """Record the bytes and entries that the writer has in flight now."""
        total = self._total
        more_bytes, more_entries = size_bytes - self._size_bytes, entry_count - self._entry_count
        total.size_bytes += more_bytes
        total.entry_count += more_entries
        self._size_bytes, self._entry_count = size_bytes, entry_count
        if more_bytes < 0 or more_entries < 0:
            total.wake_first()

    def may_append(self) -> bool:
        """Return whether the writer may append an entry now; if not, it is in the queue now."""
        total = self._total
        # A writer with nothing in flight must not wait: no answer of its own would ever make room.
        if self._entry_count == 0 or (total.has_room and next(iter(total.line), self) is self):
            return True
        total.line.setdefault(self)
        return False

    def leave(self) -> None:
        """Leave the queue, if the writer is in it, and wake the first one."""
        if self in self._total.line:
            del self._total.line[self]
            self._total.wake_first()


METADATA_PATIENCE_S = 20.0
"""How long the metadata store is asked again for what adds, or a close, wait for."""
_BACKOFF_S = 0.1
_BACKOFF_S_MAX = 2.0
_OVERLOAD_S = 0.02
"""First pause before an overloaded bookie is asked again; it doubles up to `_OVERLOAD_S_MAX`."""
_OVERLOAD_S_MAX = 1.0
_SPREAD_S = 0.005
"""After this time, or twice that, all bookies get a LAC that no add has carried.  At once it
goes only to the bookie that followers listen to: messages to all would delay each other and the
entries that it pushes."""
_LAC_RETRY_S = 0.5
_JOIN_BYTES = 8192
"""A body below this size is joined once here, else each connection would join its parts."""

TAKEN = (LedgerFencedError, LedgerClosedError, LedgerNotFoundError)
"""Errors after which the ledger is another client's, or deleted, for good."""


_REFUSALS = (EntryTooLargeError, BadRequestError, BookieAccessDeniedError)
"""Errors by which a bookie refuses an entry for the entry's own sake."""


class AppenderState(State):
    """The state of the machine; CLOSED is final."""

    STEADY = "every member of the ensemble takes adds"
    LOOKING = "a member failed, and bookies are listed that may replace it"
    COPYING = "replacements are chosen, and get copies of what is not confirmed"
    CHANGING = "the ensemble change is being stored"
    SHORT = "no bookie can replace a failed member; entries reach Qa without it"
    STUCK = "no bookie can replace a failed member, and an entry waits for one"
    SEALED = "every entry is confirmed, and no more are taken"
    STORING = "the end of the ledger is being stored"
    FAILED = "no entry is confirmed any more; what is left is to close the ledger"
    RECOVERING = "a recovery closes the ledger"
    CLOSED = "the metadata store holds the end of the ledger"


# Each entry compares with these: to look a member of an enumeration up costs more than to compare.
(
    _STEADY,
    _LOOKING,
    _COPYING,
    _CHANGING,
    _SHORT,
    _STUCK,
    _SEALED,
    _STORING,
    _FAILED,
    _RECOVERING,
    _CLOSED,
) = AppenderState
_MAY_LOOK = (_STEADY, _SHORT, _STUCK)
_STORES = (_CHANGING, _STORING)
_ENDING = (_STORING, _RECOVERING)

TRANSITIONS = Transitions(
    _STEADY,
    {
        _STEADY: {
            _LOOKING: "a member fails",
            _SEALED: "close, all confirmed",
            _FAILED: "fenced, or an entry refused",
        },
        _LOOKING: {
            _COPYING: "replacements found",
            _STEADY: "none found, members taken back",
            _SHORT: "none found",
            _STUCK: "none found, an entry waits",
            _SEALED: "close, all confirmed",
            _FAILED: "too few bookies, or fenced",
        },
        _COPYING: {
            _CHANGING: "copies are held",
            _LOOKING: "a copy fails",
            _FAILED: "fenced, or an entry refused",
        },
        _CHANGING: {
            _STEADY: "change stored",
            _CHANGING: "not stored, planned anew",
            _FAILED: "overtaken, or no answer",
        },
        _SHORT: {
            _LOOKING: "later, or another fails",
            _SEALED: "close, all confirmed",
            _FAILED: "fenced, or an entry refused",
        },
        _STUCK: {
            _LOOKING: "later, or another fails",
            _SHORT: "a failed member has it after all",
            _FAILED: "fenced, or an entry refused",
        },
        _SEALED: {
            _STORING: "close",
            _CLOSED: "closed by the caller",
            _FAILED: "fenced",
        },
        _STORING: {
            _CLOSED: "end stored",
            _SEALED: "no answer",
            _FAILED: "overtaken",
        },
        _FAILED: {
            _SEALED: "close, all confirmed",
            _RECOVERING: "close, some not confirmed",
            _CLOSED: "closed by the caller",
        },
        _RECOVERING: {
            _CLOSED: "recovered",
            _FAILED: "not recovered",
        },
        _CLOSED: {},
    },
)


class Signal(enum.Enum):
    """Events that carry nothing: wishes of the caller, and the ends of pauses."""

    CLOSE = "no more entries come; close the ledger, and answer with `CloseEnded`"
    PREPARE_CLOSE = "no more entries come; answer with `CloseEnded` once the caller may store `end`"
    TELL_LAC = "followers are to see the LAC before the next entry is made"
    PUBLISH_LAC = "all bookies are to know the LAC"
    CALLERS_ANSWERED = "callers of `CompleteAdds` have run, and may have appended in response"
    LIST_DUE = "bookies may be listed again"
    RETRY_DUE = "the pause of `GoOnWithout` is over"
    READ_DUE = "the metadata may be read again"
    SPREAD_DUE = "all bookies are to know the LAC unless an add carried it"
    LAC_RETRY_DUE = "LACs that were not accepted may be sent again"


class Call(enum.Enum):
    """Effects that carry nothing: calls with one answer; any may be answered by `CallFailed`."""

    LIST_BOOKIES = "list the writable bookies; answer with `BookiesListed`"
    READ_METADATA = "read the ledger's metadata; answer with `MetadataRead`"
    RECOVER_LEDGER = "recover and close the ledger; answer with `LedgerClosed`"


# Events and effects of every entry are named tuples, which cost least to make.


class Append(NamedTuple):
    """Event: a caller appends an entry with this body."""

    body: Sequence[BytesLike]


class AppendRecovered(NamedTuple):
    """Event: a recovery writes an entry back; its frame stays the same byte for byte."""

    entry: EntryFrame


class AddSucceeded(NamedTuple):
    """Event: `bookie`, at `position` of the ensemble, made an entry durable."""

    entry_id: int
    position: int
    bookie: BookieId


class AddFailed(NamedTuple):
    """Event: `bookie` refused an entry, or did not answer; `now` is any clock's time in seconds."""

    entry_id: int
    position: int
    bookie: BookieId
    error: DLError
    now: float


class AddDue(NamedTuple):
    """Event: a bookie that was overloaded may be asked again."""

    entry_id: int
    position: int
    bookie: BookieId


class LacAccepted(NamedTuple):
    """Event: `bookie` made this LAC durable."""

    bookie: BookieId
    lac: int


@dataclass(frozen=True, slots=True)
class LacFailed:
    """Event: `bookie` refused a LAC, or did not answer."""

    bookie: BookieId
    error: DLError


@dataclass(frozen=True, slots=True)
class BookiesListed:
    """Event: these bookies are writable."""

    bookies: Sequence[BookieId]
    topology: Topology
    now: float


@dataclass(frozen=True, slots=True)
class ChoiceDue:
    """Event: bookies of `choice` may be tried now."""

    choice: Choice
    topology: Topology
    now: float


@dataclass(frozen=True, slots=True)
class MetadataStored:
    """Event: the metadata store holds `metadata` as `version`."""

    metadata: LedgerMetadata
    version: int


@dataclass(frozen=True, slots=True)
class MetadataRead:
    """Event: the metadata store was read."""

    metadata: LedgerMetadata
    version: int


@dataclass(frozen=True, slots=True)
class CallFailed:
    """Event: a call was refused, or its outcome is unknown."""

    call: Call | StoreMetadata
    error: DLError
    now: float


@dataclass(frozen=True, slots=True)
class LedgerClosed:
    """Event: the metadata store holds this end, by a transaction of the caller or a recovery."""

    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True)
class Fail:
    """Event: the caller gives the ledger up, or a defect makes it; every add fails."""

    error: DLError


Event: TypeAlias = (
    Signal
    | Append
    | AppendRecovered
    | AddSucceeded
    | AddFailed
    | AddDue
    | LacAccepted
    | LacFailed
    | BookiesListed
    | ChoiceDue
    | MetadataStored
    | MetadataRead
    | CallFailed
    | LedgerClosed
    | Fail
)


LacEvent: TypeAlias = (
    LacAccepted
    | LacFailed
    | Literal[
        Signal.CALLERS_ANSWERED,
        Signal.TELL_LAC,
        Signal.PUBLISH_LAC,
        Signal.SPREAD_DUE,
        Signal.LAC_RETRY_DUE,
    ]
)


class SendAdd(NamedTuple):
    """Effect: send `frame` to each (position, bookie) of `targets`, in the order of the effects."""

    entry_id: int
    frame: bytes | FrameParts
    targets: list[tuple[int, BookieId]]


class CompleteAdds(NamedTuple):
    """Effect: entries `first_entry_id` to `last_entry_id` are confirmed.

    Answer their callers, and then, in a later turn of the loop, say `CALLERS_ANSWERED`.
    """

    first_entry_id: int
    last_entry_id: int


class SendLac(NamedTuple):
    """Effect: tell `bookie` the LAC."""

    bookie: BookieId
    lac: int


class After(NamedTuple):
    """Effect: feed `event` after so many seconds."""

    after_s: float
    event: Signal | AddDue | ChoiceDue


@dataclass(frozen=True, slots=True)
class NoteFailure:
    """Effect: note for other ledgers that the bookie failed an add, or refused it rightly."""

    entry_id: int
    bookie: BookieId
    error: DLError
    is_refusal: bool


@dataclass(frozen=True, slots=True)
class GoOnWithout:
    """Effect: no bookie can replace `failed` now; say `RETRY_DUE` after so many seconds."""

    failed: frozenset[BookieId]
    after_s: float


@dataclass(frozen=True, slots=True)
class StoreMetadata:
    """Effect: compare-and-set; answer with `MetadataStored`, or with `CallFailed`."""

    metadata: LedgerMetadata
    version: int


@dataclass(frozen=True, slots=True)
class FailAdds:
    """Effect: every unconfirmed add failed with `error`; answer their callers."""

    error: DLError


@dataclass(frozen=True, slots=True)
class CloseEnded:
    """Effect: answer the caller of `CLOSE` or `PREPARE_CLOSE`; None for success."""

    error: DLError | None


Effect: TypeAlias = (
    Call
    | SendAdd
    | CompleteAdds
    | SendLac
    | After
    | NoteFailure
    | GoOnWithout
    | StoreMetadata
    | FailAdds
    | CloseEnded
)


class Add:
    """One entry that was pushed: its frame, and which bookies answered."""

    __slots__ = ("acks", "copied", "entry_id", "frame", "ledger_bytes", "owed", "pauses", "waiting")

    def __init__(self, entry_id: int, frame: bytes | FrameParts, ledger_bytes: int) -> None:
        self.entry_id = entry_id
        self.frame = frame
        self.ledger_bytes = ledger_bytes
        self.acks: set[int] = set()  # positions whose bookie made it durable
        self.waiting: dict[int, BookieId] = {}  # positions whose bookie has not answered yet
        self.owed: dict[int, BookieId] = {}  # joining bookies that have no durable copy yet
        self.copied: set[BookieId] = set()  # joining bookies that have a durable copy
        # Overloaded bookies: the last pause, and how long the bookie is asked again.
        self.pauses: dict[BookieId, tuple[float, float]] | None = None

    def send(
        self, positions: Iterable[int], bookies: Sequence[BookieId], failed: Collection[int]
    ) -> list[Effect]:
        """Send to those of `positions` that have not failed, answered, or an add on its way."""
        acks, waiting = self.acks, self.waiting
        targets = [
            (position, bookies[position])
            for position in positions
            if position not in failed and position not in acks and position not in waiting
        ]
        if not targets:
            return []
        waiting.update(targets)
        return [SendAdd(self.entry_id, self.frame, targets)]

    def owes(self, position: int, bookie: BookieId) -> bool:
        """Return whether `bookie`, which will take `position`, does not hold the entry yet."""
        return self.owed.get(position) == bookie

    def awaits(self, position: int, bookie: BookieId) -> bool:
        """Return whether the answer of `bookie` for `position` is still missing."""
        return self.waiting.get(position) == bookie or self.owes(position, bookie)

    def take_answer(self, position: int, bookie: BookieId) -> bool:
        """Return whether a member's answer was awaited; it is not from now on."""
        if self.waiting.get(position) != bookie:
            return False
        del self.waiting[position]
        return True

    def pause_s(self, bookie: BookieId, now: float, patience_s: float) -> float | None:
        """Return the pause before an overloaded bookie is asked again; None: it is given up."""
        if self.pauses is None:
            self.pauses = {}
        last_s, until = self.pauses.get(bookie, (0.0, now + patience_s))
        pause_s = min(max(2 * last_s, _OVERLOAD_S), _OVERLOAD_S_MAX)
        self.pauses[bookie] = (pause_s, until)
        return pause_s if now + pause_s < until else None


class AddWindow:
    """The entries that are not yet confirmed, or not yet answered by their whole write set.

    Args:
        metadata: of the ledger.
        followed: the position of the bookie that followers listen to.
        last_add_confirmed: the entry that the first one follows.
    """

    def __init__(self, metadata: LedgerMetadata, followed: int, last_add_confirmed: int) -> None:
        quorum = metadata.quorum
        self.last_add_confirmed = last_add_confirmed
        self.last_add_pushed = last_add_confirmed
        self.confirmed_bytes = 0
        """Length of the ledger up to the LAC."""
        self.pushed_bytes = 0
        self.pending_bytes = 0
        """Size of the frames that the window holds."""
        self.copies_left = 0
        """Number of copies that joining bookies have yet to make durable."""
        self.adds: dict[int, Add] = {}  # ascending
        self._ledger_id = metadata.ledger_id
        self._ack_quorum_size = quorum.ack_quorum_size
        # An add carries the LAC: send first to the bookie that followers listen to.
        self._write_sets = [
            sorted(write_set(quorum, first), key=lambda position: position != followed)
            for first in range(quorum.ensemble_size)
        ]

    @property
    def pending_count(self) -> int:
        """Entries that some bookie of their write set has not answered, or that are unconfirmed."""
        return len(self.adds)

    @property
    def is_idle(self) -> bool:
        """Whether every pushed entry is confirmed."""
        return self.last_add_confirmed == self.last_add_pushed

    def closed(self, metadata: LedgerMetadata) -> LedgerMetadata:
        """Return `metadata` closed at the LAC."""
        return metadata.closed(
            last_entry_id=self.last_add_confirmed, length_bytes=self.confirmed_bytes
        )

    def positions(self, entry_id: int) -> Sequence[int]:
        """Return the write set of an entry, as positions of the ensemble."""
        return self._write_sets[entry_id % len(self._write_sets)]

    def append(self, body: Sequence[BytesLike]) -> Add:
        """Give the next entry id to `body`; it carries the LAC of this moment."""
        size = sum(map(len, body))
        ledger_bytes = self.pushed_bytes + size
        frame = (encode_frame if size < _JOIN_BYTES else frame_parts)(
            ledger_id=self._ledger_id,
            entry_id=self.last_add_pushed + 1,
            last_add_confirmed=self.last_add_confirmed,
            ledger_bytes=ledger_bytes,
            body=body,
        )
        return self.push(frame, ledger_bytes)

    def push(self, frame: bytes | FrameParts, ledger_bytes: int) -> Add:
        """Take the next entry, as it is sent."""
        self.last_add_pushed += 1
        self.pushed_bytes = ledger_bytes
        self.pending_bytes += len(frame)
        add = self.adds[self.last_add_pushed] = Add(self.last_add_pushed, frame, ledger_bytes)
        return add

    def confirm(self) -> CompleteAdds | None:
        """Advance the LAC over every entry at Qa; None if there is none."""
        first, needed = self.last_add_confirmed + 1, self._ack_quorum_size
        add = self.adds.get(first)
        while add is not None and len(add.acks) >= needed:
            self.last_add_confirmed = add.entry_id
            # A change begins at LAC + 1.  A confirmed entry stays with the old members, so joining
            # bookies owe no copy of it.
            self.copies_left -= len(add.owed)
            add.owed.clear()
            self.confirmed_bytes = add.ledger_bytes
            self.release(add)
            add = self.adds.get(add.entry_id + 1)
        assert self.last_add_confirmed <= self.last_add_pushed
        lac = self.last_add_confirmed
        return CompleteAdds(first, lac) if lac >= first else None

    def release(self, add: Add) -> None:
        """Forget a confirmed entry that no bookie of its write set has yet to answer."""
        if add.waiting or add.entry_id > self.last_add_confirmed:
            return
        del self.adds[add.entry_id]
        self.pending_bytes -= len(add.frame)

    def clear(self) -> None:
        """Forget all entries: nothing is confirmed any more."""
        self.adds.clear()
        self.pending_bytes = self.copies_left = 0

    def can_confirm(self, add: Add, failed: Collection[int]) -> bool:
        """Whether Qa bookies hold the entry, or may still answer that they do."""
        # An acknowledgement counts even if its bookie failed later: the entry is durable there.
        hopeful = add.acks.union(p for p in add.waiting if p not in failed)
        return len(hopeful) >= self._ack_quorum_size

    def unconfirmed(self) -> list[Add]:
        """Return the entries that wait for Qa, in order; none once the window was cleared."""
        if not self.adds:
            return []
        return [self.adds[e] for e in range(self.last_add_confirmed + 1, self.last_add_pushed + 1)]

    def first_stuck(self, failed: Collection[int]) -> Add | None:
        """Return the first entry that cannot reach Qa without the positions that failed."""
        return next((add for add in self.unconfirmed() if not self.can_confirm(add, failed)), None)

    def copy_to(self, joining: Mapping[int, BookieId]) -> list[Effect]:
        """Send joining bookies all unconfirmed entries of their positions.

        A bookie that failed with one entry keeps the others: it gets only those that it lacks.
        """
        effects: list[Effect] = []
        self.copies_left = 0
        for add in self.unconfirmed():
            add.owed = {
                p: joining[p]
                for p in sorted(self.positions(add.entry_id))
                if p in joining and joining[p] not in add.copied
            }
            self.copies_left += len(add.owed)
            if add.owed:
                effects.append(SendAdd(add.entry_id, add.frame, [*add.owed.items()]))
        return effects

    def drop_copies(self) -> None:
        """Wait for no copy any more; bookies keep the durable ones."""
        self.copies_left = 0
        for add in self.adds.values():
            add.owed.clear()

    def move(
        self, changed: Collection[int], bookies: Sequence[BookieId], failed: Collection[int]
    ) -> list[Effect]:
        """Wait for the new bookies at the positions `changed`; their copies count as acks."""
        effects: list[Effect] = []
        # A copy, because `release` deletes entries.
        for add in list(self.adds.values()):
            for position in changed:
                # Confirmed entries too: nothing else would end their wait for a bookie that is
                # gone, and the window would keep their frames for ever.
                add.waiting.pop(position, None)
            if add.entry_id > self.last_add_confirmed:
                positions = [p for p in self.positions(add.entry_id) if p in changed]
                # The metadata will name the new bookies, and a recovery asks only those: what the
                # replaced ones hold no longer counts.
                add.acks.difference_update(changed)
                add.acks.update(p for p in positions if bookies[p] in add.copied)
                effects += add.send(positions, bookies, failed)
            self.release(add)
        return effects

    def validate(self) -> None:
        """Assert all that holds between two events."""
        assert self.last_add_confirmed <= self.last_add_pushed
        assert self.confirmed_bytes <= self.pushed_bytes
        assert self.pending_bytes == sum(len(add.frame) for add in self.adds.values())
        assert self.copies_left == sum(len(add.owed) for add in self.adds.values())
        for add in self.adds.values():
            assert add.waiting.keys().isdisjoint(add.acks)
            assert add.waiting or add.entry_id > self.last_add_confirmed


class Replacements:
    """The members of the last ensemble that failed, and the bookies that join in their place.

    Args:
        members: the bookies of the last ensemble.
        search: which bookies may replace failed ones, and when to look again.
        rng: chooses among them.
        overload_patience_s: how long an overloaded bookie is asked again before it has failed.
    """

    def __init__(
        self,
        members: Sequence[BookieId],
        search: ReplacementSearch,
        rng: random.Random,
        overload_patience_s: float,
    ) -> None:
        self.members = members
        self.failed: dict[int, BookieId] = {}
        """Members that failed, by position."""
        self.unfit: dict[BookieId, DLError] = {}
        """Bookies that refuse an entry of this ledger, and so are left out."""
        self.joining: dict[int, BookieId] = {}
        """New bookies by position, until the change is stored."""
        self.planned: LedgerMetadata | None = None
        """The change, while it is being stored."""
        self.search = search
        self.overload_patience_s = overload_patience_s
        self._rng = rng
        self._reasons: dict[BookieId, DLError] = {}  # why a member failed last
        self._is_retry_due = False  # `RETRY_DUE` comes

    def fail(self, position: int, bookie: BookieId, error: DLError) -> None:
        """Note that a member failed."""
        self.failed[position] = bookie
        self._reasons[bookie] = error

    def choose(self, event: ChoiceDue, write_quorum_size: int) -> bool:
        """Choose bookies that join; return whether there is one."""
        self.joining = choose_replacements(
            [each for each in event.choice.candidates if each not in self.unfit],
            ensemble=self.members,
            positions=sorted(self.failed),
            write_quorum_size=write_quorum_size,
            topology=event.topology,
            rng=self._rng,
        )
        return bool(self.joining)

    def changed(self) -> tuple[BookieId, ...]:
        """Return the ensemble with the joining bookies in their positions."""
        return tuple(self.joining.get(position, each) for position, each in enumerate(self.members))

    def readmit(self, bookies: Collection[BookieId]) -> set[int]:
        """Take failed members back if they may return; return their positions."""
        fit = {each for each in bookies if each not in self.unfit}
        back = {position for position, bookie in self.failed.items() if bookie in fit}
        for position in back:
            del self.failed[position]
        return back

    def later(self, now: float) -> list[Effect]:
        """Look again later, unless that is due already."""
        if self._is_retry_due:
            return []
        self._is_retry_due = True
        return [GoOnWithout(frozenset(self.failed.values()), self.search.look_later(now))]

    def look_again(self) -> None:
        """The pause of `GoOnWithout` is over."""
        self._is_retry_due = False
        self.search.look_again()

    def replaced(self, members: Sequence[BookieId]) -> set[int]:
        """The change to these members is stored; return the positions that have other bookies."""
        positions = {p for p, bookie in enumerate(members) if bookie != self.members[p]}
        self.members = members
        self.search.replaced()
        self.give_up()
        for position in positions:
            self.failed.pop(position, None)
        return positions

    def give_up(self) -> None:
        """Forget the bookies that were to join."""
        self.joining, self.planned = {}, None

    def missing(self) -> str:
        """Return in words which members failed, and why no other bookie takes their places."""
        failed = _reasons_of({each: self._reasons[each] for each in self.failed.values()})
        refused = f", for new ones refused entries: {_reasons_of(self.unfit)}" if self.unfit else ""
        return f"{failed} failed, and no other writable bookie can take the place{refused}"


class LacPublication:
    """The messages that tell bookies the LAC, apart from the adds that carry it.

    At most one message to a bookie is on its way; a newer LAC follows once it was answered.

    Args:
        lac: the LAC that bookies know.
        followed: the position of the bookie that followers listen to.
    """

    def __init__(self, lac: int, followed: int) -> None:
        self.carried = lac
        """The LAC of the last add."""
        self.is_answered = False
        """Whether callers appended in response to the last acknowledgement: an add carries it."""
        self.accepted: dict[BookieId, int] = {}
        self._followed = followed
        self._due: dict[BookieId, int] = {}  # the newest LAC that each member has to accept
        self._out: set[BookieId] = set()
        self._spreading: int | None = None  # the LAC that waits for `SPREAD_DUE`
        self._is_retrying = False  # `LAC_RETRY_DUE` comes

    def callers_answered(
        self, lac: int, members: Sequence[BookieId], *, is_idle: bool
    ) -> list[Effect]:
        """The callers have their answers; `is_idle`: no add is under way that may carry `lac`."""
        self.is_answered = lac <= self.carried
        if self.is_answered:
            return []
        effects = self.tell(lac, members) if is_idle else []
        if self._spreading is None:
            effects.append(self._spread_later(lac))
        return effects

    def note_accepted(self, bookie: BookieId, lac: int) -> list[Effect]:
        """A bookie has accepted this LAC: it gets a newer one that is due."""
        self._out.discard(bookie)
        self.accepted[bookie] = max(lac, self.accepted.get(bookie, -1))
        return self._send((bookie,))

    def note_failed(self, bookie: BookieId) -> list[Effect]:
        """A bookie did not accept its message: all are sent again after a pause."""
        self._out.discard(bookie)
        if self._is_retrying:
            return []
        self._is_retrying = True
        return [After(_LAC_RETRY_S, Signal.LAC_RETRY_DUE)]

    def retry(self) -> list[Effect]:
        """The pause after a failure is over."""
        self._is_retrying = False
        return self._send(self._due)

    def tell(self, lac: int, members: Sequence[BookieId]) -> list[Effect]:
        """Tell the LAC to the bookie that followers listen to."""
        return self.publish(lac, members, (members[self._followed],))

    def publish(
        self, lac: int, members: Sequence[BookieId], bookies: Iterable[BookieId]
    ) -> list[Effect]:
        """Send the LAC to `bookies`; other members keep the LAC that was already due for them."""
        # By the members of now: a bookie that was replaced gets no more messages.
        due = {each: self._due[each] for each in members if each in self._due}
        self._due = due | dict.fromkeys(bookies, lac)
        return self._send(self._due)

    def unaware(self, lac: int, members: Sequence[BookieId]) -> set[int]:
        """Return the positions of the members that have not accepted this LAC."""
        accepted = self.accepted
        return {p for p, bookie in enumerate(members) if accepted.get(bookie, -1) < lac}

    def _send(self, bookies: Iterable[BookieId]) -> list[Effect]:
        """Send each of `bookies` the LAC that it has not accepted, one message at a time."""
        effects: list[Effect] = []
        for bookie in bookies:
            lac = self._due.get(bookie, -1)
            if bookie not in self._out and lac > self.accepted.get(bookie, -1):
                self._out.add(bookie)
                effects.append(SendLac(bookie, lac))
        return effects

    def _spread_later(self, lac: int) -> Effect:
        self._spreading = lac
        return After(_SPREAD_S, Signal.SPREAD_DUE)

    def spread(self, lac: int, members: Sequence[BookieId]) -> list[Effect]:
        """Tell all members a LAC that no add has carried since it began to wait."""
        since, self._spreading = self._spreading, None
        assert since is not None
        if lac <= self.carried:
            return []
        if self.carried < since:
            return self.publish(lac, members, members)
        return [self._spread_later(lac)]  # the current LAC is newer, and an add may still carry it


class _Outage:
    """The failures of the metadata store since it last answered what was asked of it."""

    def __init__(self) -> None:
        self._backoff = Backoff(_BACKOFF_S, _BACKOFF_S_MAX)
        self._until = 0.0

    def pause_s(self, error: DLError, now: float) -> float | None:
        """Note a failure; return the pause before asking again, None if asking is over."""
        # Only the first failure of an outage sets the limit; else each one would extend it.
        if self._backoff.pause_s == 0.0:
            self._until = now + METADATA_PATIENCE_S
        pause_s = self._backoff.failed(now)
        may_pass = isinstance(error, MetadataError) and error.retriable
        if may_pass and self._backoff.due_s <= self._until:
            return pause_s
        self.end()
        return None

    def end(self) -> None:
        """Begin anew with the next failure."""
        self._backoff.succeeded()


class LedgerAppender(Machine[AppenderState]):
    """The append half of a ledger: one instance per writer or recoverer, one caller at a time.

    Args:
        metadata: the metadata as it is stored, as `version`.
        version: its version in the metadata store.
        search: which bookies may replace failed ones, and when to look again.
        rng: chooses among them.
        overload_patience_s: how long an overloaded bookie is asked again.
        last_add_confirmed: the entry that the first one follows.
        is_recovery: whether entries are written back that a recovery read.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        metadata: LedgerMetadata,
        *,
        version: int,
        search: ReplacementSearch,
        rng: random.Random,
        overload_patience_s: float,
        last_add_confirmed: int = -1,
        is_recovery: bool = False,
    ) -> None:
        assert metadata.state is not LedgerState.CLOSED
        self.metadata = metadata
        # Also for a change that was given up: the next write needs the version that is stored.
        self.version = version
        self.state = _STEADY
        self.error: DLError | None = None
        """Why no entry is taken any more."""
        followed = first_followed(metadata.ledger_id, metadata.quorum.ensemble_size)
        self.window = AddWindow(metadata, followed, last_add_confirmed)
        self._lac = LacPublication(last_add_confirmed, followed)
        members = metadata.last_ensemble.bookies
        self._replacements = Replacements(members, search, rng, overload_patience_s)
        self._is_recovery = is_recovery
        self._outage = _Outage()
        self._closing: Signal | None = None  # CLOSE or PREPARE_CLOSE, until its caller is answered

    @property
    def is_closing(self) -> bool:
        """Whether the ledger is closed, or about to be."""
        return self._closing is not None or self.state is _SEALED or self.state is _CLOSED

    def is_published(self, lac: int) -> bool:
        """Return whether no read can reach coverage without a bookie that accepted this LAC."""
        ensemble = self.metadata.last_ensemble
        if self.state is _CLOSED or lac < ensemble.first_entry_id:
            return True  # the metadata says or implies it
        return not is_covered(self.metadata.quorum, self._lac.unaware(lac, ensemble.bookies))

    def handle(self, event: Event) -> list[Effect]:  # noqa: C901 - one case for each kind
        """Take one event; late and repeated answers do no harm."""
        match event:
            # The most frequent ones first, because the cases are tried one after the other.
            case AddSucceeded():
                return self._add_succeeded(*event)
            case Append(body):
                assert not self.is_closing
                self._lac.carried = self.window.last_add_confirmed
                return self._send(self.window.append(body))
            case Signal.CALLERS_ANSWERED | LacAccepted() | Signal.TELL_LAC | Signal.PUBLISH_LAC:
                return self._tell(event)
            case AppendRecovered(entry):
                assert entry.entry_id == self.window.last_add_pushed + 1
                return self._send(self.window.push(bytes(entry.data), entry.ledger_bytes))
            case AddFailed():
                return self._add_failed(event)
            case AddDue(entry_id, position, bookie):
                add = self.window.adds.get(entry_id)
                if add is None or not add.awaits(position, bookie):
                    return []
                return [SendAdd(entry_id, add.frame, [(position, bookie)])]
            case LacFailed(_, LedgerFencedError() as error):
                return self._fail(error)
            case LacFailed() | Signal.LAC_RETRY_DUE | Signal.SPREAD_DUE:
                return self._tell(event)
            case Signal.RETRY_DUE:
                self._replacements.look_again()
                return self._look()
            case Signal.LIST_DUE:
                return [Call.LIST_BOOKIES] if self.state is _LOOKING else []
            case BookiesListed():
                return self._listed(event)
            case ChoiceDue():
                return self._chosen(event)
            case MetadataStored(metadata, version):
                return self._stored(metadata, version)
            case MetadataRead(metadata, version):
                return self._judge(metadata, version)
            case Signal.READ_DUE:
                return [Call.READ_METADATA] if self.state in _STORES else []
            case CallFailed():
                return self._call_failed(event)
            case Signal.CLOSE | Signal.PREPARE_CLOSE:
                return self._close(event)
            case LedgerClosed(metadata):
                return self._closed(metadata)
            case Fail(error):
                # While the end is being stored, or recovered, the caller of the close waits too,
                # and must be answered.
                if self.state not in _ENDING:
                    return self._fail(error)
                self._become(_FAILED)
                return self._close_failed(error, is_given_up=True)
            case _:
                assert_never(event)

    # Entries

    def _send(self, add: Add) -> list[Effect]:
        """Send a new entry to its write set."""
        assert self.error is None
        window, replacements = self.window, self._replacements
        failed = replacements.failed
        effects = add.send(window.positions(add.entry_id), replacements.members, failed)
        # Another write set than those before: the members that are left may be too few for it.
        if self.state is _SHORT and not window.can_confirm(add, failed):
            effects += self._look()
        return effects

    def _add_succeeded(self, entry_id: int, position: int, bookie: BookieId) -> list[Effect]:
        add = self.window.adds.get(entry_id)
        if add is None:
            return []
        if add.owed and add.owes(position, bookie):
            del add.owed[position]
            add.copied.add(bookie)
            self.window.copies_left -= 1
            return self._plan_if_copied()
        if not add.take_answer(position, bookie):
            return []
        add.acks.add(position)
        self.window.release(add)
        if self.state is _STUCK and self.window.first_stuck(self._replacements.failed) is None:
            self._become(_SHORT)
        return self._confirm()

    def _add_failed(self, event: AddFailed) -> list[Effect]:
        entry_id, position, bookie, error, now = event
        # Before the check that the answer is awaited: even one that comes too late proves that
        # another client has taken the ledger.
        if isinstance(error, LedgerFencedError):
            return self._fail(error)
        add = self.window.adds.get(entry_id)
        if add is None or not add.awaits(position, bookie):
            return []
        if isinstance(error, BookieOverloadedError):
            # The bookie is sound, and will probably take the entry soon.  To replace it would cost
            # copies of all that is not confirmed.
            pause_s = add.pause_s(bookie, now, self._replacements.overload_patience_s)
            if pause_s is not None:
                return [After(pause_s, AddDue(entry_id, position, bookie))]
        window, replacements = self.window, self._replacements
        is_refusal = isinstance(error, _REFUSALS)
        if is_refusal:
            replacements.unfit[bookie] = error
        noted = NoteFailure(entry_id, bookie, error, is_refusal)
        if add.owes(position, bookie):
            # The search begins anew.  It leaves this bookie out, which rests after its failure.
            replacements.give_up()
            window.drop_copies()
            self._become(_LOOKING)
            return [noted, Call.LIST_BOOKIES]
        add.take_answer(position, bookie)
        if bookie in replacements.unfit and not self._is_recovery:
            # Every bookie would answer the same.  In recovery it is one bookie with other bytes.
            return [noted, *self._fail(error)]
        window.release(add)
        # The search for a replacement is on already; only an entry that lacks Qa would hasten it.
        if position in replacements.failed and window.can_confirm(add, replacements.failed):
            return [noted]
        replacements.fail(position, bookie, error)
        return [noted, *self._look()]

    def _confirm(self) -> list[Effect]:
        """Confirm every entry at Qa; not while a planned change is not stored."""
        if self.state is _CHANGING:
            return []
        confirmed = self.window.confirm()
        if confirmed is None:
            return []
        # If callers appended in response last time, they will again, and that add carries the LAC.
        effects = [] if self._lac.is_answered else self._tell(Signal.TELL_LAC)
        effects.append(confirmed)
        # The entries that were confirmed just now may have been the last that lacked copies.
        if self._replacements.joining:
            effects += self._plan_if_copied()
        if self._closing is not None:
            effects += self._go_on_closing()
        return effects

    def _tell(self, event: LacEvent) -> list[Effect]:
        """Tell bookies the LAC by messages of its own, unless this is a recovery, or failed."""
        if self._is_recovery:
            return []
        window = self.window
        lac, members = window.last_add_confirmed, self._replacements.members
        effects: list[Effect] = []
        match event:
            # The most frequent ones first, because the cases are tried one after the other.
            case Signal.CALLERS_ANSWERED:
                is_idle = lac == window.last_add_pushed
                effects = self._lac.callers_answered(lac, members, is_idle=is_idle)
            case LacAccepted(bookie, accepted):
                effects = self._lac.note_accepted(bookie, accepted)
            case Signal.TELL_LAC:
                if lac == window.last_add_pushed:
                    effects = self._lac.tell(lac, members)
            case Signal.PUBLISH_LAC:
                effects = self._lac.publish(lac, members, members)
            case Signal.SPREAD_DUE:
                effects = self._lac.spread(lac, members)
            case LacFailed(bookie):
                effects = self._lac.note_failed(bookie)
            case Signal.LAC_RETRY_DUE:
                effects = self._lac.retry()
            case _:
                assert_never(event)
        return effects if self.error is None else []

    # Replacements

    def _look(self) -> list[Effect]:
        """List bookies, unless that or a change is under way: its end does."""
        if self.state not in _MAY_LOOK or not self._replacements.failed:
            return []
        self._become(_LOOKING)
        return [Call.LIST_BOOKIES]

    def _listed(self, event: BookiesListed) -> list[Effect]:
        if self.state is not _LOOKING:
            return []
        self._outage.end()
        replacements = self._replacements
        stuck = self.window.first_stuck(replacements.failed)
        choice = replacements.search.choose(
            event.bookies,
            members=replacements.members,
            # Not the entry that is stuck: this number rises with every confirmation, and by that
            # the search sees progress, after which its time begins anew.
            stuck_entry=None if stuck is None else self.window.last_add_confirmed + 1,
            now=event.now,
        )
        due = ChoiceDue(choice, event.topology, event.now + choice.pause_s)
        return [After(choice.pause_s, due)] if choice.pause_s else self._chosen(due)

    def _chosen(self, event: ChoiceDue) -> list[Effect]:
        """Begin an ensemble change with bookies of the choice, or go on without one."""
        if self.state is not _LOOKING:
            return []
        choice, replacements = event.choice, self._replacements
        if not replacements.choose(event, self.metadata.quorum.write_quorum_size):
            return self._go_on_without(choice.readmitted, may_wait=choice.may_wait, now=event.now)
        self._become(_COPYING)
        # A recovery changes its ensemble in memory only, and `move` sends the entries then.
        effects = [] if self._is_recovery else self.window.copy_to(replacements.joining)
        return effects + self._plan_if_copied()

    def _go_on_without(
        self, readmitted: Collection[BookieId], *, may_wait: bool, now: float
    ) -> list[Effect]:
        """Take members of `readmitted` back; wait for others, or fail if no entry may wait."""
        window, replacements = self.window, self._replacements
        effects: list[Effect] = []
        back = replacements.readmit(readmitted)
        if back:
            for add in window.unconfirmed():
                positions = [p for p in window.positions(add.entry_id) if p in back]
                effects += add.send(positions, replacements.members, replacements.failed)
        stuck = self.window.first_stuck(self._replacements.failed)
        if stuck is not None and not may_wait:
            quorum = self.metadata.quorum
            return self._fail(
                NotEnoughBookiesError(
                    f"ledger {self.metadata.ledger_id}: entry {stuck.entry_id} cannot reach "
                    f"{quorum.ack_quorum_size} of {quorum.write_quorum_size} bookies: "
                    f"{replacements.missing()}"
                )
            )
        if not replacements.failed:
            self._become(_STEADY)
            return effects
        self._become(_SHORT if stuck is None else _STUCK)
        return effects + replacements.later(now)

    # Ensemble changes

    def _plan_if_copied(self) -> list[Effect]:
        """Plan the change to the joining bookies, once they hold all entries that they need."""
        if self.state is not _COPYING or self.window.copies_left:
            return []
        return self._plan(self.metadata, self._replacements.changed())

    def _plan(self, base: LedgerMetadata, bookies: tuple[BookieId, ...]) -> list[Effect]:
        self._become(_CHANGING)
        self._replacements.planned = planned = base.with_last_ensemble(
            first_entry_id=self.window.last_add_confirmed + 1, bookies=bookies
        )
        if self._is_recovery:
            return self._change_stored(planned)
        return [StoreMetadata(planned, self.version)]

    def _stored(self, metadata: LedgerMetadata, version: int) -> list[Effect]:
        self.version = version
        if self.state is _CHANGING:
            return self._change_stored(metadata)
        is_end = self.state is _STORING and metadata.state is LedgerState.CLOSED
        return self._closed(metadata) if is_end else []  # else a change that was given up

    def _judge(self, metadata: LedgerMetadata, version: int) -> list[Effect]:
        """Decide a change or an end, whose write lost or has an unknown outcome, by what is stored.

        Only this writer changes the last ensemble of an open ledger.
        """
        self.version = version
        window, last = self.window, self.window.last_add_confirmed
        if self.state is _CHANGING:
            planned = self._replacements.planned
            assert planned is not None
            if metadata.state is not LedgerState.OPEN:
                return self._fail(_taken(metadata))
            # The answer was lost, but the change was stored.
            if metadata.last_ensemble != self.metadata.last_ensemble:
                return self._change_stored(metadata)
            self.metadata = metadata
            # Auto-recovery replaced a bookie of an earlier ensemble, which raised the version.
            return self._plan(metadata, planned.last_ensemble.bookies)
        if self.state is not _STORING:
            return []
        if metadata.state is LedgerState.OPEN:
            return [StoreMetadata(window.closed(metadata), version)]
        # This writer's own write, or a recovery that found the same end: nothing is lost.
        if metadata.state is LedgerState.CLOSED and metadata.last_entry_id == last:
            return self._closed(metadata)
        self._become(_FAILED)
        return self._close_failed(_taken(metadata, f", this writer's LAC is {last}"))

    def _call_failed(self, event: CallFailed) -> list[Effect]:
        error, now = event.error, event.now
        if event.call is Call.RECOVER_LEDGER:
            if self.state is not _RECOVERING:
                return []
            self._become(_FAILED)
            return self._close_failed(error)
        if event.call is Call.LIST_BOOKIES:
            if self.state is not _LOOKING:
                return []
            if (
                self.window.first_stuck(self._replacements.failed) is None
            ):  # entries need no replacement
                self._outage.end()
                return self._go_on_without((), may_wait=False, now=now)
            pause_s = self._outage.pause_s(error, now)
            return self._fail(error) if pause_s is None else [After(pause_s, Signal.LIST_DUE)]
        if self.state not in _STORES:
            return []
        if isinstance(error, MetadataVersionError):
            return [Call.READ_METADATA]
        pause_s = self._outage.pause_s(error, now)
        if pause_s is not None:
            return [After(pause_s, Signal.READ_DUE)]  # the metadata says whether it was stored
        if self.state is _CHANGING:
            return self._fail(error)
        # Back to SEALED and not FAILED: all entries are confirmed, so the caller may try again.
        self._become(_SEALED)
        return self._close_failed(error)

    def _change_stored(self, metadata: LedgerMetadata) -> list[Effect]:
        """Use the stored ensemble: send to replaced positions, then confirm waiting entries."""
        new = metadata.last_ensemble
        first = self.window.last_add_confirmed + 1
        if new.first_entry_id > first:
            return self._fail(
                CorruptMetadataError(
                    f"ledger {metadata.ledger_id}: the last ensemble starts at entry "
                    f"{new.first_entry_id}, expected at most {first}"
                )
            )
        self._outage.end()
        self._become(_STEADY)
        self.metadata = metadata
        changed = self._replacements.replaced(new.bookies)
        effects = self.window.move(changed, new.bookies, self._replacements.failed)
        # Only now: an entry may have lost acknowledgements by the move, and must not be confirmed
        # by bookies that the metadata does not name.
        effects += self._confirm()
        effects += self._go_on_closing()
        return effects + self._look()

    # The end

    def _close(self, signal: Signal) -> list[Effect]:
        if self.state is _CLOSED:
            return [CloseEnded(None if signal is Signal.CLOSE else self.error)]
        if self.state in _ENDING:
            return []  # of a caller that was cancelled; its answer will be this one's
        self._closing = signal
        return self._go_on_closing()

    def _go_on_closing(self) -> list[Effect]:
        """Close, or seal, the ledger once nothing is left to wait for."""
        if self._closing is None or self.state in _ENDING:
            return []
        # A recovery would be of no use: another client decides the end.
        if isinstance(self.error, TAKEN):
            return self._close_failed(self.error)
        if self.error is None and (not self.window.is_idle or self.state is _CHANGING):
            return []
        stores = self._closing is Signal.CLOSE
        if not self.window.is_idle:
            assert self.error is not None
            if not stores:
                return self._close_failed(self.error)
            self._become(_RECOVERING)
            return [Call.RECOVER_LEDGER]
        if self.state is not _SEALED:
            self._become(_SEALED)
        if not stores:
            self._closing = None
            return [CloseEnded(None)]
        self._become(_STORING)
        return [StoreMetadata(self.window.closed(self.metadata), self.version)]

    def _closed(self, metadata: LedgerMetadata) -> list[Effect]:
        if self.state is _CLOSED:
            return []
        self._become(_CLOSED)
        self.metadata = metadata
        closing, self._closing = self._closing, None
        effects = self._fail(LedgerClosedError(f"ledger {metadata.ledger_id} is closed"))
        return effects if closing is None else [*effects, CloseEnded(None)]

    def _close_failed(self, error: DLError, *, is_given_up: bool = False) -> list[Effect]:
        """Answer the caller of the close, which may try again unless the ledger was taken."""
        self._closing = None
        effects = self._fail(error) if is_given_up or isinstance(error, TAKEN) else []
        return [*effects, CloseEnded(error)]

    def _fail(self, error: DLError) -> list[Effect]:
        """End for good: nothing is confirmed any more."""
        if self.error is not None:
            return []
        self.error = error
        self.window.clear()
        self._replacements.give_up()
        if self.state not in (*_ENDING, _FAILED, _CLOSED):
            self._become(_FAILED)
        return [FailAdds(error), *self._go_on_closing()]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state, window, replacements = self.state, self.window, self._replacements
        window.validate()
        # A recovery may have closed the ledger with other bookies.
        assert state is _CLOSED or replacements.members == self.metadata.last_ensemble.bookies
        assert (replacements.planned is not None) == (state is _CHANGING)
        assert bool(replacements.joining) == (state in (_COPYING, _CHANGING))
        assert bool(window.copies_left) == (state is _COPYING)
        if self.error is not None:
            assert not window.adds
            return
        stuck = self.window.first_stuck(self._replacements.failed)
        assert state is not _STEADY or not replacements.failed
        assert state is not _STEADY or stuck is None
        assert state is not _SHORT or stuck is None
        assert state is not _STUCK or stuck is not None
        assert state not in (_SEALED, _STORING) or window.is_idle


def _taken(metadata: LedgerMetadata, note: str = "") -> LedgerFencedError | LedgerClosedError:
    """Return the error of a ledger that another client closed, or is about to close."""
    if metadata.state is LedgerState.IN_RECOVERY:
        return LedgerFencedError(f"ledger {metadata.ledger_id} is being recovered")
    return LedgerClosedError(
        f"ledger {metadata.ledger_id} was closed by another client at entry "
        f"{metadata.last_entry_id}{note}"
    )


def _reasons_of(errors: Mapping[BookieId, DLError]) -> str:
    return ", ".join(f"{each} ({errors[each]})" for each in sorted(errors))
