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

The driver (`appender_driver.py`) performs the effects and feeds the answers back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, assert_never

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
from dlcore.ledger.metadata.quorum import first_followed, is_covered, write_set
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState
from dlcore.ledger.placing.placement import Topology, choose_replacements
from dlcore.wire.digest import BytesLike, EntryFrame, encode_frame, frame_parts

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dlcore.base.ids import BookieId
    from dlcore.ledger.placing.health import Choice, ReplacementSearch
    from dlcore.wire.frames import FrameParts

METADATA_PATIENCE_S = 20.0
"""How long the metadata store is asked again for what adds, or a close, wait for."""
_BACKOFF_S = 0.1
_BACKOFF_S_MAX = 2.0
_OVERLOAD_S = 0.02
"""First pause before an overloaded bookie is asked again; it doubles up to `_OVERLOAD_S_MAX`."""
_OVERLOAD_S_MAX = 1.0
_SPREAD_S = 0.005
"""After this time, or twice that, all bookies are told a LAC that no add has carried.  At once it
goes only to the bookie that followers listen to: messages to all would delay each other and the
entries that it pushes."""
_LAC_RETRY_S = 0.5
_JOIN_BYTES = 8192
"""A body below this size is joined once here, else each connection would join its parts."""

TAKEN = (LedgerFencedError, LedgerClosedError, LedgerNotFoundError)
"""Errors after which the ledger is another client's, or nobody's, for good."""


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


class _Add:
    __slots__ = ("acks", "copied", "entry_id", "frame", "ledger_bytes", "owed", "pauses", "waiting")

    def __init__(self, entry_id: int, frame: bytes | FrameParts, ledger_bytes: int) -> None:
        self.entry_id = entry_id
        self.frame = frame
        self.ledger_bytes = ledger_bytes
        self.acks: set[int] = set()  # positions whose bookie made it durable
        self.waiting: dict[int, BookieId] = {}  # positions whose bookie has not answered yet
        self.owed: set[int] = set()  # positions of joining bookies that have no durable copy yet
        self.copied: set[BookieId] = set()  # joining bookies that have a durable copy
        # Overloaded bookies: the last pause, and how long the bookie is asked again.
        self.pauses: dict[BookieId, tuple[float, float]] | None = None

    def pause_s(self, bookie: BookieId, now: float, patience_s: float) -> float | None:
        """Return the pause before an overloaded bookie is asked again; None: it is given up."""
        if self.pauses is None:
            self.pauses = {}
        last_s, until = self.pauses.get(bookie, (0.0, now + patience_s))
        pause_s = min(max(2 * last_s, _OVERLOAD_S), _OVERLOAD_S_MAX)
        self.pauses[bookie] = (pause_s, until)
        return pause_s if now + pause_s < until else None


class _Outage:
    """The failures of the metadata store since it last answered what was asked of it."""

    def __init__(self) -> None:
        self._backoff = Backoff(_BACKOFF_S, _BACKOFF_S_MAX)
        self._until = 0.0

    def pause_s(self, error: DLError, now: float) -> float | None:
        """Note a failure; return the pause before asking again, None if asking is over."""
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


class _Telling:
    """The LACs that bookies are told by themselves: due, on their way, and accepted."""

    def __init__(self) -> None:
        self.due: dict[BookieId, int] = {}  # the newest LAC that each member has to accept
        self.out: set[BookieId] = set()
        self.accepted: dict[BookieId, int] = {}
        self.spreading: int | None = None  # the LAC that waits for `SPREAD_DUE`
        self.is_retrying = False  # `LAC_RETRY_DUE` comes


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
        self.version = version
        self.state = _STEADY
        self.error: DLError | None = None
        """Why no entry is taken any more."""
        self.last_add_confirmed = last_add_confirmed
        self.last_add_pushed = last_add_confirmed
        self.pushed_bytes = 0
        self.confirmed_bytes = 0
        self.pending_bytes = 0
        self._search = search
        self._rng = rng
        self._overload_patience_s = overload_patience_s
        self._is_recovery = is_recovery
        self._adds: dict[int, _Add] = {}  # unconfirmed, or not yet answered by all; ascending
        self._failed: dict[int, BookieId] = {}  # positions whose bookie failed
        self._reasons: dict[BookieId, DLError] = {}  # why it failed last
        self._unfit: dict[BookieId, DLError] = {}  # left out: they refuse an entry of this ledger
        self._joining: dict[int, BookieId] = {}  # new bookies by position, until the change
        self._copies_left = 0  # copies that joining bookies have yet to make durable
        self._planned: LedgerMetadata | None = None
        self._is_retry_due = False  # `RETRY_DUE` comes
        self._outage = _Outage()
        self._closing: Signal | None = None  # CLOSE or PREPARE_CLOSE, until its caller is answered
        self._lac_carried = last_add_confirmed  # by the last add
        self._is_answered = False  # callers appended in response to the last acknowledgement
        self._telling = _Telling()
        quorum = metadata.quorum
        self._followed = first_followed(metadata.ledger_id, quorum.ensemble_size)
        # An add carries the LAC: send first to the bookie that followers listen to.
        self._write_sets = [
            sorted(write_set(quorum, first), key=lambda position: position != self._followed)
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
    def is_closing(self) -> bool:
        """Whether the ledger is closed, or about to be."""
        closing = (_SEALED, _CLOSED)
        return self._closing is not None or self.state in closing

    @property
    def end(self) -> LedgerMetadata:
        """The closed metadata, once every entry is confirmed."""
        return self._end_of(self.metadata)

    def is_published(self, lac: int) -> bool:
        """Return whether no read can reach coverage without a bookie that accepted this LAC."""
        ensemble = self.metadata.last_ensemble
        if self.state is _CLOSED or lac < ensemble.first_entry_id:
            return True  # the metadata says or implies it
        accepted = self._telling.accepted
        unaware = {
            position
            for position, bookie in enumerate(ensemble.bookies)
            if accepted.get(bookie, -1) < lac
        }
        return not is_covered(self.metadata.quorum, unaware)

    def handle(self, event: Event) -> list[Effect]:  # noqa: C901 - one case for each kind
        """Take one event; late and repeated answers do no harm."""
        match event:
            case AddSucceeded():
                return self._add_succeeded(*event)
            case Append(body):
                return self._append(body)
            case Signal.CALLERS_ANSWERED:
                return self._callers_answered()
            case LacAccepted():
                return self._lac_accepted(*event)
            case AppendRecovered(entry):
                return self._append_recovered(entry)
            case AddFailed():
                return self._add_failed(*event)
            case AddDue():
                return self._add_due(*event)
            case Signal.TELL_LAC:
                return self._tell()
            case Signal.PUBLISH_LAC:
                return self._publish(self.metadata.last_ensemble.bookies)
            case Signal.SPREAD_DUE:
                return self._spread()
            case LacFailed(bookie, error):
                return self._lac_failed(bookie, error)
            case Signal.LAC_RETRY_DUE:
                self._telling.is_retrying = False
                return self._send_due(self._telling.due)
            case Signal.RETRY_DUE:
                return self._retry()
            case Signal.LIST_DUE:
                return [Call.LIST_BOOKIES] if self.state is _LOOKING else []
            case BookiesListed():
                return self._listed(event)
            case ChoiceDue():
                return self._chosen(event)
            case MetadataStored(metadata, version):
                return self._stored(metadata, version)
            case MetadataRead(metadata, version):
                return self._read(metadata, version)
            case Signal.READ_DUE:
                return [Call.READ_METADATA] if self.state in _STORES else []
            case CallFailed():
                return self._call_failed(event)
            case Signal.CLOSE | Signal.PREPARE_CLOSE:
                return self._close(event)
            case LedgerClosed(metadata):
                return self._closed(metadata)
            case Fail(error):
                return self._given_up(error)
            case _:
                assert_never(event)

    # Entries

    def _append(self, body: Sequence[BytesLike]) -> list[Effect]:
        """Give the next entry id to `body` and send it; it carries the LAC of this moment."""
        assert self.error is None
        assert not self.is_closing
        entry_id = self.last_add_pushed + 1
        ledger_bytes = self.pushed_bytes + sum(map(len, body))
        self._lac_carried = self.last_add_confirmed
        is_small = ledger_bytes - self.pushed_bytes < _JOIN_BYTES
        frame = (encode_frame if is_small else frame_parts)(
            ledger_id=self.metadata.ledger_id,
            entry_id=entry_id,
            last_add_confirmed=self.last_add_confirmed,
            ledger_bytes=ledger_bytes,
            body=body,
        )
        return self._push(frame, ledger_bytes)

    def _append_recovered(self, entry: EntryFrame) -> list[Effect]:
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
        if self.state is _SHORT and not self._can_confirm(add):
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

    def _owes(self, add: _Add, position: int, bookie: BookieId) -> bool:
        """Return whether `bookie`, which will take `position`, does not hold the entry yet."""
        return position in add.owed and self._joining.get(position) == bookie

    def _awaits(self, add: _Add, position: int, bookie: BookieId) -> bool:
        return add.waiting.get(position) == bookie or self._owes(add, position, bookie)

    def _add_succeeded(self, entry_id: int, position: int, bookie: BookieId) -> list[Effect]:
        add = self._adds.get(entry_id)
        if add is None:
            return []
        if self._owes(add, position, bookie):
            add.owed.discard(position)
            add.copied.add(bookie)
            self._copies_left -= 1
            return self._plan_if_copied()
        if not self._take_answer(add, position, bookie):
            return []
        add.acks.add(position)
        self._release(add)
        if self.state is _STUCK and self._first_stuck() is None:
            self._become(_SHORT)
        return self._confirm()

    def _add_failed(
        self, entry_id: int, position: int, bookie: BookieId, error: DLError, now: float
    ) -> list[Effect]:
        if isinstance(error, LedgerFencedError):
            return self._fail(error)
        add = self._adds.get(entry_id)
        if add is None or not self._awaits(add, position, bookie):
            return []
        if isinstance(error, BookieOverloadedError):
            pause_s = add.pause_s(bookie, now, self._overload_patience_s)
            if pause_s is not None:
                return [After(pause_s, AddDue(entry_id, position, bookie))]
        is_refusal = isinstance(
            error, EntryTooLargeError | BadRequestError | BookieAccessDeniedError
        )
        if is_refusal:
            self._unfit[bookie] = error
        noted = NoteFailure(entry_id, bookie, error, is_refusal)
        if self._owes(add, position, bookie):
            self._joining = {}
            self._become(_LOOKING)
            return [noted, Call.LIST_BOOKIES]
        return [noted, *self._member_failed(add, position, bookie, error)]

    def _member_failed(
        self, add: _Add, position: int, bookie: BookieId, error: DLError
    ) -> list[Effect]:
        self._take_answer(add, position, bookie)
        if bookie in self._unfit and not self._is_recovery:
            # Every bookie would answer the same.  In recovery it is one bookie with other bytes.
            return self._fail(error)
        self._release(add)
        if position in self._failed and self._can_confirm(add):
            return []
        self._failed[position] = bookie
        self._reasons[bookie] = error
        return self._look()

    def _add_due(self, entry_id: int, position: int, bookie: BookieId) -> list[Effect]:
        add = self._adds.get(entry_id)
        if add is None or not self._awaits(add, position, bookie):
            return []
        return [SendAdd(entry_id, add.frame, [(position, bookie)])]

    def _take_answer(self, add: _Add, position: int, bookie: BookieId) -> bool:
        """Return whether the answer was awaited; it is not from now on."""
        if add.waiting.get(position) != bookie:
            return False
        del add.waiting[position]
        return True

    def _release(self, add: _Add) -> None:
        """Forget a confirmed entry that no bookie of its write set has yet to answer."""
        if add.waiting or add.entry_id > self.last_add_confirmed:
            return
        del self._adds[add.entry_id]
        self.pending_bytes -= len(add.frame)

    def _confirm(self) -> list[Effect]:
        """Advance the LAC over every entry at Qa; not while a planned change is not stored."""
        if self.state is _CHANGING:
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
        effects = [] if self._is_answered else self._tell()
        effects.append(CompleteAdds(first, self.last_add_confirmed))
        if self._joining:
            effects += self._plan_if_copied()
        if self._closing is not None:
            effects += self._go_on_closing()
        return effects

    def _can_confirm(self, add: _Add) -> bool:
        """Whether Qa bookies hold the entry or may still answer that they do."""
        hopeful = add.acks.union(p for p in add.waiting if p not in self._failed)
        return len(hopeful) >= self.metadata.quorum.ack_quorum_size

    def _unconfirmed(self) -> list[_Add]:
        if self.error is not None:
            return []  # they failed with that error
        return [self._adds[e] for e in range(self.last_add_confirmed + 1, self.last_add_pushed + 1)]

    def _first_stuck(self) -> _Add | None:
        """Return the first entry that cannot reach Qa without a replacement."""
        return next((add for add in self._unconfirmed() if not self._can_confirm(add)), None)

    # Replacements

    def _look(self) -> list[Effect]:
        """List bookies, unless that or a change is under way: its end does."""
        if self.state not in _MAY_LOOK or not self._failed:
            return []
        self._become(_LOOKING)
        return [Call.LIST_BOOKIES]

    def _retry(self) -> list[Effect]:
        self._is_retry_due = False
        self._search.look_again()
        return self._look()

    def _listed(self, event: BookiesListed) -> list[Effect]:
        if self.state is not _LOOKING:
            return []
        self._outage.end()
        stuck = self._first_stuck()
        choice = self._search.choose(
            event.bookies,
            members=self.metadata.last_ensemble.bookies,
            stuck_entry=None if stuck is None else self.last_add_confirmed + 1,
            now=event.now,
        )
        due = ChoiceDue(choice, event.topology, event.now + choice.pause_s)
        return [After(choice.pause_s, due)] if choice.pause_s else self._chosen(due)

    def _unlisted(self, error: DLError, now: float) -> list[Effect]:
        """Ask again while an entry waits; entries that need no replacement go on without it."""
        if self._first_stuck() is None:
            self._outage.end()
            return self._go_on_without((), may_wait=False, now=now)
        pause_s = self._outage.pause_s(error, now)
        return self._fail(error) if pause_s is None else [After(pause_s, Signal.LIST_DUE)]

    def _chosen(self, event: ChoiceDue) -> list[Effect]:
        """Begin an ensemble change with bookies of the choice, or go on without one."""
        if self.state is not _LOOKING:
            return []
        choice = event.choice
        ensemble = self.metadata.last_ensemble
        chosen = choose_replacements(
            [each for each in choice.candidates if each not in self._unfit],
            ensemble=ensemble.bookies,
            positions=sorted(self._failed),
            write_quorum_size=self.metadata.quorum.write_quorum_size,
            topology=event.topology,
            rng=self._rng,
        )
        if not chosen:
            readmitted = [each for each in choice.readmitted if each not in self._unfit]
            return self._go_on_without(readmitted, may_wait=choice.may_wait, now=event.now)
        self._become(_COPYING)
        self._joining, self._copies_left = chosen, 0
        effects: list[Effect] = []
        for add in () if self._is_recovery else self._unconfirmed():
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

    def _go_on_without(
        self, readmitted: Collection[BookieId], *, may_wait: bool, now: float
    ) -> list[Effect]:
        """Take members of `readmitted` back; wait for others, or fail if no entry may wait."""
        effects: list[Effect] = []
        back = {position for position, bookie in self._failed.items() if bookie in readmitted}
        for position in back:
            del self._failed[position]
        if back:
            for add in self._unconfirmed():
                effects += self._send(add, [p for p in self._positions(add.entry_id) if p in back])
        stuck = self._first_stuck()
        if stuck is not None and not may_wait:
            return self._fail(self._not_enough(stuck))
        if not self._failed:
            self._become(_STEADY)
            return effects
        self._become(_SHORT if stuck is None else _STUCK)
        if not self._is_retry_due:
            self._is_retry_due = True
            failed = frozenset(self._failed.values())
            effects.append(GoOnWithout(failed, self._search.look_later(now)))
        return effects

    def _not_enough(self, add: _Add) -> NotEnoughBookiesError:
        failed = _told({each: self._reasons[each] for each in self._failed.values()})
        refused = f", for new ones refused entries: {_told(self._unfit)}" if self._unfit else ""
        quorum = self.metadata.quorum
        return NotEnoughBookiesError(
            f"ledger {self.metadata.ledger_id}: entry {add.entry_id} cannot reach "
            f"{quorum.ack_quorum_size} of {quorum.write_quorum_size} bookies: {failed} failed, "
            f"and no other writable bookie can take the place{refused}"
        )

    # Ensemble changes

    def _plan_if_copied(self) -> list[Effect]:
        """Plan the change to the joining bookies, once they hold all entries that they need."""
        if self.state is not _COPYING or self._copies_left:
            return []
        bookies = list(self.metadata.last_ensemble.bookies)
        for position, bookie in self._joining.items():
            bookies[position] = bookie
        return self._plan(self.metadata, tuple(bookies))

    def _plan(self, base: LedgerMetadata, bookies: tuple[BookieId, ...]) -> list[Effect]:
        self._become(_CHANGING)
        self._planned = base.with_last_ensemble(
            first_entry_id=self.last_add_confirmed + 1, bookies=bookies
        )
        if self._is_recovery:
            return self._change_stored(self._planned)
        return [StoreMetadata(self._planned, self.version)]

    def _stored(self, metadata: LedgerMetadata, version: int) -> list[Effect]:
        self.version = version
        if self.state is _CHANGING:
            return self._change_stored(metadata)
        is_end = self.state is _STORING and metadata.state is LedgerState.CLOSED
        return self._closed(metadata) if is_end else []  # else a change that was given up

    def _read(self, metadata: LedgerMetadata, version: int) -> list[Effect]:
        self.version = version
        if self.state is _CHANGING:
            return self._judge_change(metadata)
        return self._judge_end(metadata) if self.state is _STORING else []

    def _call_failed(self, event: CallFailed) -> list[Effect]:
        error, now = event.error, event.now
        if event.call is Call.RECOVER_LEDGER:
            if self.state is not _RECOVERING:
                return []
            self._become(_FAILED)
            return self._close_failed(error)
        if event.call is Call.LIST_BOOKIES:
            return self._unlisted(error, now) if self.state is _LOOKING else []
        if self.state not in _STORES:
            return []
        if isinstance(error, MetadataVersionError):
            return [Call.READ_METADATA]
        pause_s = self._outage.pause_s(error, now)
        if pause_s is not None:
            return [After(pause_s, Signal.READ_DUE)]  # the metadata says whether it was stored
        if self.state is _CHANGING:
            return self._fail(error)
        self._become(_SEALED)
        return self._close_failed(error)

    def _change_stored(self, metadata: LedgerMetadata) -> list[Effect]:
        """Use the stored ensemble: send to replaced positions, then confirm waiting entries."""
        old, new = self.metadata.last_ensemble, metadata.last_ensemble
        if new.first_entry_id > self.last_add_confirmed + 1:
            return self._fail(
                CorruptMetadataError(
                    f"ledger {metadata.ledger_id}: the last ensemble starts at entry "
                    f"{new.first_entry_id}, expected at most {self.last_add_confirmed + 1}"
                )
            )
        self._outage.end()
        self._search.replaced()
        self._become(_STEADY)
        self._planned = None
        self._joining = {}
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
        effects += self._confirm()
        effects += self._go_on_closing()
        return effects + self._look()

    def _judge_change(self, metadata: LedgerMetadata) -> list[Effect]:
        """Decide a change whose write lost, or whose outcome is unknown, by the stored metadata."""
        assert self._planned is not None
        ledger_id = metadata.ledger_id
        if metadata.state is LedgerState.CLOSED:
            return self._fail(
                LedgerClosedError(
                    f"ledger {ledger_id} was closed by another client at entry "
                    f"{metadata.last_entry_id}"
                )
            )
        if metadata.state is LedgerState.IN_RECOVERY:
            return self._fail(LedgerFencedError(f"ledger {ledger_id} is being recovered"))
        if metadata.last_ensemble != self.metadata.last_ensemble:
            # Only this writer changes the last ensemble of an open ledger: it is its own write.
            return self._change_stored(metadata)
        bookies = self._planned.last_ensemble.bookies
        self.metadata = metadata
        return self._plan(metadata, bookies)

    # The LAC

    def _lac_accepted(self, bookie: BookieId, lac: int) -> list[Effect]:
        telling = self._telling
        telling.out.discard(bookie)
        telling.accepted[bookie] = max(lac, telling.accepted.get(bookie, -1))
        return self._send_due((bookie,))

    def _lac_failed(self, bookie: BookieId, error: DLError) -> list[Effect]:
        self._telling.out.discard(bookie)
        if isinstance(error, LedgerFencedError):
            return self._fail(error)
        if self._telling.is_retrying or self.error is not None:
            return []
        self._telling.is_retrying = True
        return [After(_LAC_RETRY_S, Signal.LAC_RETRY_DUE)]

    def _tell(self) -> list[Effect]:
        """Tell the LAC to the bookie that followers listen to, unless an add is under way."""
        if self._is_recovery or self.error is not None or not self.is_idle:
            return []
        return self._publish((self.metadata.last_ensemble.bookies[self._followed],))

    def _publish(self, bookies: Sequence[BookieId]) -> list[Effect]:
        """Send the LAC to `bookies`; other members keep the LAC that was already due for them."""
        telling, lac = self._telling, self.last_add_confirmed
        members = self.metadata.last_ensemble.bookies
        due = {each: telling.due[each] for each in members if each in telling.due}
        telling.due = due | dict.fromkeys(bookies, lac)
        return self._send_due(telling.due)

    def _send_due(self, bookies: Iterable[BookieId]) -> list[Effect]:
        """Send each of `bookies` the LAC that it has not accepted, one message at a time."""
        telling = self._telling
        if self.error is not None:
            return []
        effects: list[Effect] = []
        for bookie in bookies:
            lac = telling.due.get(bookie, -1)
            if bookie not in telling.out and lac > telling.accepted.get(bookie, -1):
                telling.out.add(bookie)
                effects.append(SendLac(bookie, lac))
        return effects

    def _has_news(self) -> bool:
        return self.last_add_confirmed > self._lac_carried

    def _callers_answered(self) -> list[Effect]:
        """Tell a LAC that no answered caller's add took along, soon to all bookies."""
        if self._is_recovery or self.error is not None:
            return []
        self._is_answered = not self._has_news()
        if self._is_answered:
            return []
        effects = self._tell()
        if self._telling.spreading is None:
            effects.append(self._spread_later())
        return effects

    def _spread_later(self) -> Effect:
        self._telling.spreading = self.last_add_confirmed
        return After(_SPREAD_S, Signal.SPREAD_DUE)

    def _spread(self) -> list[Effect]:
        lac, self._telling.spreading = self._telling.spreading, None
        assert lac is not None
        if self.error is not None or not self._has_news():
            return []
        if self._lac_carried < lac:
            return self._publish(self.metadata.last_ensemble.bookies)
        return [self._spread_later()]  # the current LAC is newer, and an add may still carry it

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
        if isinstance(self.error, TAKEN):
            return self._close_failed(self.error)
        if self.error is None and (not self.is_idle or self.state is _CHANGING):
            return []
        stores = self._closing is Signal.CLOSE
        if not self.is_idle:
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
        return [StoreMetadata(self.end, self.version)]

    def _end_of(self, metadata: LedgerMetadata) -> LedgerMetadata:
        return metadata.closed(
            last_entry_id=self.last_add_confirmed, length_bytes=self.confirmed_bytes
        )

    def _judge_end(self, metadata: LedgerMetadata) -> list[Effect]:
        """Find out by the stored metadata whether this machine's end of the ledger was stored."""
        ledger_id, last = metadata.ledger_id, self.last_add_confirmed
        if metadata.state is LedgerState.OPEN:
            return [StoreMetadata(self._end_of(metadata), self.version)]
        if metadata.state is LedgerState.CLOSED and metadata.last_entry_id == last:
            return self._closed(metadata)
        error: DLError = LedgerFencedError(f"ledger {ledger_id} is being recovered")
        if metadata.state is LedgerState.CLOSED:
            error = LedgerClosedError(
                f"ledger {ledger_id} was closed by another client at entry "
                f"{metadata.last_entry_id}, this writer's LAC is {last}"
            )
        self._become(_FAILED)
        return self._close_failed(error)

    def _closed(self, metadata: LedgerMetadata) -> list[Effect]:
        if self.state is _CLOSED:
            return []
        self._become(_CLOSED)
        self.metadata = metadata
        closing, self._closing = self._closing, None
        effects = self._fail(LedgerClosedError(f"ledger {metadata.ledger_id} is closed"))
        return effects if closing is None else [*effects, CloseEnded(None)]

    def _close_failed(self, error: DLError) -> list[Effect]:
        """Answer the caller of the close; the ledger can be closed again unless it was taken."""
        self._closing = None
        effects = self._fail(error) if isinstance(error, TAKEN) else []
        return [*effects, CloseEnded(error)]

    def _given_up(self, error: DLError) -> list[Effect]:
        if self.state not in _ENDING:
            return self._fail(error)
        self._become(_FAILED)
        self._closing = None
        return [*self._fail(error), CloseEnded(error)]

    def _fail(self, error: DLError) -> list[Effect]:
        """End for good: nothing is confirmed any more."""
        if self.error is not None:
            return []
        self.error = error
        self._adds.clear()
        self._joining, self._copies_left, self._planned = {}, 0, None
        self.pending_bytes = 0
        if self.state not in (*_ENDING, _FAILED, _CLOSED):
            self._become(_FAILED)
        return [FailAdds(error), *self._go_on_closing()]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state = self.state
        assert self.last_add_confirmed <= self.last_add_pushed
        assert self.confirmed_bytes <= self.pushed_bytes
        assert self.pending_bytes == sum(len(add.frame) for add in self._adds.values())
        assert (self._planned is not None) == (state is _CHANGING)
        assert bool(self._joining) == (state in (_COPYING, _CHANGING))
        if self.error is not None:
            assert not self._adds
            return
        for add in self._adds.values():
            assert add.waiting.keys().isdisjoint(add.acks)
            assert add.waiting or add.entry_id > self.last_add_confirmed
        if state is _COPYING:
            assert self._copies_left == sum(len(add.owed) for add in self._adds.values()) > 0
        stuck = self._first_stuck()
        assert state is not _STEADY or not self._failed
        assert state is not _STEADY or stuck is None
        assert state is not _SHORT or stuck is None
        assert state is not _STUCK or stuck is not None
        assert state not in (_SEALED, _STORING) or self.is_idle


def _told(errors: Mapping[BookieId, DLError]) -> str:
    return ", ".join(f"{each} ({errors[each]})" for each in sorted(errors))
