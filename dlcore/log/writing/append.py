"""The writer of one log: records in, entries, segments and answers out.  No I/O, no clock.

Theory of operation.  Accepted records wait in the transmitter, become entries of the ledger of the
open segment, and are answered when their entry is durable.  When a segment is full or old and all
of it is answered, the change that starts the next segment completes it.  If it is old and no record
waits, it is completed without a next one, so that its records are not kept too long.
docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

Invariants:

* Every accepted record is answered exactly once, in the order of the calls: with its position, or
  with an error.  Positions and sequence ids rise, transaction ids never fall.
* Nothing is acknowledged while ownership is lost (SUSPENDED).  Entries that became durable
  meanwhile are acknowledged when ownership is regained, and fail when it is denied.
* After the first failure nothing is acknowledged.  Records in flight fail with that error, because
  they may be in the log.  Records that were never sent are cancelled, and are not in the log.
* A ledger is closed only when all of it is answered, so that its extent agrees with the answers to
  callers.  A change that was overtaken is planned again from the log as it is.  If another client
  has completed our segment at the end that we know, nothing was lost; at any other end we fail.

The promises of calls, by state:

              OPENING, OPEN, ROLLING    SUSPENDED             SEALED           FAILED      CLOSED
    write     accepted                  accepted, answered    end of stream    the error   closed
                                        once resumed
    flush     all before it answered    once resumed          nothing is left  the error   closed
    seal      all answered, then sealed once resumed          end of stream    the error   closed
    close     all answered, and the     once resumed          at once          the error   at once
              segment completed
    abort     at once: unanswered calls fail, the segment stays for recovery

A paused writer (ASIDE) has closed its extent, and lets an append change the log.  `SteppedBack`
ends the pause: it goes on from the head that the append left.  During the pause it refuses records
as not ready, so that none gets a transaction id below those of the append.

`commit` is a flush and a call to the ledger.  Truncation changes the head beside this machine;
`HeadChanged` reports that.  From the call of seal or close on, writes are refused as if it were
done.

The calls that accept are methods, for a refusal is an error of the caller; `Accepted` follows them.
The driver (`writer.py`) performs the effects and feeds the answers back.  One step at a time is
without its answer, and one change of the log's metadata is under way.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, assert_never

import msgspec
from msgspec.structs import replace

from dlcore.base.errors import (
    AlreadyClosedError,
    DLError,
    EndOfStreamError,
    LogNotReadyError,
    OwnershipAcquireFailedError,
    WriteCancelledError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.base.machines import Machine, State, Transitions
from dlcore.base.records import LogRecord
from dlcore.log.entries.batcher import txid_out_of_order
from dlcore.log.entries.compression import Compressor
from dlcore.log.metadata.changes import SegmentLimits
from dlcore.log.writing.run import OwnExtent, Run
from dlcore.log.writing.transmit import Transmitter, Unwritten
from dlcore.wire.digest import BytesLike

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    from dlcore.base.config import LogConfig
    from dlcore.log.entries.encryption import EntryEncryptor
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import VersionedHead
    from dlcore.log.typed.rows import TypedRows
    from dlcore.log.writing.producers import Mark, Producers
    from dlcore.log.writing.transmit import Group

_Ticket = TypeVar("_Ticket")


class Ending(enum.Enum):
    """How a writer ends in good order."""

    SEAL = "seal"
    CLOSE = "close"
    ASIDE = "aside"
    """A pause for an append: until `SteppedBack` the writer takes no record and opens no extent."""


class WriterState(State):
    """The state of the machine; FAILED and CLOSED are final."""

    OPENING = "the writer has no segment: the first entry starts one"
    OPEN = "entries are sent"
    ROLLING = "nothing is sent: the segment is completed, and the next one started or the log ended"
    SUSPENDED = "the lock is lost, and nothing is acknowledged"
    FAILED = "the first failure ended the writer"
    SEALED = "no record can follow in this log"
    CLOSED = "the writer takes nothing more"


_S = WriterState
_ALWAYS = {
    _S.SUSPENDED: "the lock is lost",
    _S.FAILED: "a failure",
    _S.CLOSED: "closed, or aborted",
}
_RESUMED = "the lock is regained"
TRANSITIONS = Transitions(
    _S.OPENING,
    {
        _S.OPENING: {_S.OPEN: "a segment is started", _S.SEALED: "sealed", **_ALWAYS},
        _S.OPEN: {_S.ROLLING: "the segment is full or old, or an end is asked for", **_ALWAYS},
        _S.ROLLING: {
            _S.OPEN: "the next segment is started",
            _S.OPENING: "old and idle, paused, or completed by another client",
            _S.SEALED: "sealed",
            **_ALWAYS,
        },
        _S.SUSPENDED: {
            _S.OPENING: _RESUMED,
            _S.OPEN: _RESUMED,
            _S.ROLLING: _RESUMED,
            _S.SEALED: _RESUMED,
            _S.FAILED: "the lock is denied, or another failure",
            _S.CLOSED: "closed, or aborted",
        },
        _S.SEALED: _ALWAYS,
        _S.FAILED: {_S.CLOSED: "aborted"},
        _S.CLOSED: {},
    },
)


STATE_AFTER = {
    Ending.SEAL: WriterState.SEALED,
    Ending.CLOSE: WriterState.CLOSED,
    Ending.ASIDE: WriterState.OPENING,
}


class Accepted(msgspec.Struct, frozen=True):
    """Event: calls were accepted since the last one, the settings changed, or `old_in_s` is over.

    One for all records that were accepted in one iteration of the event loop: each by itself would
    cost the writer of single records more than the record.
    """

    now_ms: int


class HasCapacity(msgspec.Struct, frozen=True):
    """Event: the answer to `AwaitCapacity`."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class MayChange:
    """Event: the answer to `AwaitTurn`; what follows is done before others may change the log."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class LedgerClosed:
    """Event: the segment's ledger ends here."""

    last_entry_id: int
    size_bytes: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class SegmentStarted:
    """Event: the head `at` has opened a segment over this ledger."""

    ledger_id: int
    at: VersionedHead
    now_ms: int


@dataclass(frozen=True, slots=True)
class Completed:
    """Event: the answer to `CompleteSegment`, whose `ends` it repeats; `at` is the head after."""

    at: VersionedHead
    now_ms: int
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Event: a change was refused, and the head was read again."""

    at: VersionedHead
    now_ms: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """Event: the answer to `RecoverLog`; `at` is the head after."""

    at: VersionedHead
    now_ms: int


@dataclass(frozen=True, slots=True)
class HeadChanged:
    """Event: the head was read, or changed by this client beside the machine."""

    at: VersionedHead
    now_ms: int


@dataclass(frozen=True, slots=True)
class SteppedBack:
    """Event: the pause for others is over; they left this head."""

    at: VersionedHead
    now_ms: int


class EntryDurable(msgspec.Struct, frozen=True):
    """Event: the oldest entry in flight is durable.

    Say `Accepted` once its callers are answered, for they may write more at once.
    """


@dataclass(frozen=True, slots=True)
class Suspended:
    """Event: the lock is lost."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Event: the lock is regained."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Event: a step, an entry or the lock failed."""

    error: DLError


@dataclass(frozen=True, slots=True)
class Abort:
    """Event: close at once; unanswered calls fail with `error`."""

    error: DLError


Event: TypeAlias = (  # those of each entry are Structs, which cost a fifth of a dataclass
    Accepted
    | HasCapacity
    | MayChange
    | LedgerClosed
    | SegmentStarted
    | Completed
    | Overtaken
    | Recovered
    | HeadChanged
    | SteppedBack
    | EntryDurable
    | Suspended
    | Resumed
    | Fail
    | Abort
)


class AwaitCapacity(msgspec.Struct, frozen=True):
    """Step: wait until the ledger takes an entry; say `HasCapacity`."""


@dataclass(frozen=True, slots=True)
class AwaitTurn:
    """Step: wait until no other change of the log's metadata is under way; say `MayChange`."""


@dataclass(frozen=True, slots=True)
class CloseLedger:
    """Step: append nothing more to the ledger of the segment; say `LedgerClosed`.

    The transaction of the next change closes the ledger, so that a roll needs one transaction.
    """


@dataclass(frozen=True, slots=True)
class StartSegment:
    """Step: plan and apply the next segment's start; say `SegmentStarted` or `Overtaken`."""

    at: VersionedHead
    closing: Extent | None
    limits: SegmentLimits | None = None
    """Given if it may continue in the segment in progress, unless that is full."""


@dataclass(frozen=True, slots=True)
class CompleteSegment:
    """Step: plan and apply the end of our segment; say `Completed` or `Overtaken`.

    If it `ends`, this ends the writer or the log; else the segment was old and no record waits.  If
    it `stays`, only the extent ends, and the segment goes on with those of others.
    """

    at: VersionedHead
    closing: Extent | None
    seal: bool
    ends: bool = True
    stays: bool = False


@dataclass(frozen=True, slots=True)
class RecoverLog:
    """Step: complete the segment that another writer left open; say `Recovered`."""

    at: VersionedHead


Change: TypeAlias = CloseLedger | StartSegment | CompleteSegment | RecoverLog
Step: TypeAlias = AwaitCapacity | AwaitTurn | Change
"""An effect that is answered by an event; there is one at a time."""


class AppendEntry(msgspec.Struct, frozen=True):
    """Effect: append these parts of a body to the ledger; say `EntryDurable` later, in order."""

    body: list[BytesLike]
    is_nearly_full: bool
    """Whether the segment will soon be completed at the present rate."""


@dataclass(frozen=True, slots=True)
class Acknowledge(Generic[_Ticket]):
    """Effect: the records of an entry are durable; answer the tickets of its slots."""

    lssn: int
    entry_id: int
    slots: list[int]
    tickets: list[_Ticket]
    """One for each of `slots`."""


@dataclass(frozen=True, slots=True)
class Refuse(Generic[_Ticket]):
    """Effect: answer these tickets with the error."""

    tickets: list[_Ticket]
    error: DLError


@dataclass(frozen=True, slots=True)
class Ended(Generic[_Ticket]):
    """Effect: the log is sealed, or the writer closed, as this ticket asked."""

    ticket: _Ticket


Effect: TypeAlias = Step | AppendEntry | Acknowledge[_Ticket] | Refuse[_Ticket] | Ended[_Ticket]

_START_ATTEMPTS_MAX = 20
_ANSWERED_KEPT = 256
"""The number of entries that are remembered of those acknowledged last."""
_NEARLY_FULL = 0.75
"""With this share of its size or age a segment will soon be completed."""


@dataclass(frozen=True, slots=True)
class _Finish:
    """Nothing is left to do before the next end."""


@dataclass(frozen=True, slots=True)
class _GiveUp:
    error: DLError


class LogAppender(Machine[WriterState], Generic[_Ticket]):
    """The only writer of a log from the head `at` on, which has no open extent.

    `_Ticket` identifies a caller's record or end in effects.  With `producers`, which are known as
    of `at`, its entries have stamps of producers.  It then fails if another writer has written to
    the log, because the producers are not known any more.  An `encryptor` encrypts its entries.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        at: VersionedHead,
        config: LogConfig,
        producers: Producers[Any] | None = None,
        encryptor: EntryEncryptor | None = None,
    ) -> None:
        self._at = at
        self._producers = producers
        self.state = WriterState.OPENING
        self.error: DLError | None = None
        self.last_dlsn: DLSN | None = None
        self._transmitter: Transmitter[_Ticket] = Transmitter(
            entry_bytes=config.entry_bytes, last_txid=at.head.max_txid, admit=self._admit
        )
        self.add_record = self._transmitter.add_record
        """Accept a record, or raise the error for which it, or any record, cannot follow."""
        self.configure(config, encryptor)
        self._segment: OwnExtent | None = None
        self._durable = 0  # durable entries in flight that are not acknowledged while suspended
        self._suspended: WriterState | None = None  # the state to resume
        self._must_recover = False
        self._attempts = 0  # at the change that is due now
        self._ends: deque[tuple[Ending, _Ticket]] = deque()
        self._is_aside = False  # or about to be
        self._has_step = False  # that is not answered
        self._lost: Unwritten | None = None  # the records given up
        # Of the last acknowledged entries: segment, entry, and the sequence id of the first record.
        self._answered: deque[tuple[int, int, int]] = deque(maxlen=_ANSWERED_KEPT)
        self._untold: Unwritten | None = None  # those of them whose error no caller has got

    def __repr__(self) -> str:
        segment = self._segment
        where = "no segment" if segment is None else f"segment={segment.lssn}"
        return f"<LogAppender {self.at.name!r} {self.state.name} {where}>"

    @property
    def at(self) -> VersionedHead:
        """The head as far as it is known."""
        return self._at

    @at.setter
    def at(self, at: VersionedHead) -> None:
        self._at = at
        self._transmitter.revoke()

    def configure(self, config: LogConfig, encryptor: EntryEncryptor | None = None) -> None:
        """Use this configuration from the next entries and segments on."""
        self._limits = SegmentLimits.of(config)
        compressor = Compressor(config.compression)
        self._encode = partial(Run.encode, compressor=compressor, encryptor=encryptor)
        self._transmitter.limit(
            bytes_max=config.pending_bytes_max, records_max=config.pending_records_max
        )
        self._fails_while_rolling = config.fail_while_rolling
        self._transmitter.entry_bytes = config.entry_bytes

    # Properties

    @property
    def last_txid(self) -> int:
        """The highest transaction id accepted, or found in the log; -1 if there is none."""
        return self._transmitter.last_txid

    @property
    def has_room(self) -> bool:
        """Whether at most a quarter of the limits is pending, and the writer is not paused."""
        return (not self._is_aside or self.is_over) and self._transmitter.has_room

    @property
    def has_waiting(self) -> bool:
        """Whether records wait for their entry to be made."""
        return self._transmitter.queued_bytes > 0

    @property
    def unwritten(self) -> Unwritten | None:
        """Records accepted and not acknowledged, unless a call has failed because of them."""
        return self._untold or self._transmitter.unacknowledged()

    @property
    def lost(self) -> Unwritten | None:
        """Records accepted and not acknowledged, also if a call has failed because of them."""
        return self._lost or self._transmitter.unacknowledged()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be sent or acknowledged."""
        return self.state in (WriterState.FAILED, WriterState.CLOSED)

    @property
    def is_closing(self) -> bool:
        """Whether the writer is closed, or a close was requested."""
        if self._ends:
            return self._ends[-1][0] is Ending.CLOSE
        return self.state is WriterState.CLOSED

    @property
    def end(self) -> DLSN | None:
        """The position after the last acknowledged record of our segment, if it has one."""
        segment = self._segment
        if segment is None or segment.acknowledged == segment.first_entry_id:
            return None
        return DLSN(segment.lssn, segment.acknowledged, 0)

    def sequence_id_of(self, dlsn: DLSN) -> int | None:
        """Return the sequence id of a record; None if it was not acknowledged here, and lately."""
        for lssn, entry_id, first in reversed(self._answered):
            if (lssn, entry_id) == (dlsn.lssn, dlsn.entry_id):
                return first + dlsn.slot_id
        return None

    def is_untouched(self, at: VersionedHead) -> bool:
        """Return whether the log, read as `at`, is as this writer left it."""
        if self._segment is not None:
            return at.is_open_over(self._segment.ledger_id)
        left, now = ((each.max_lssn, each.end, each.sealed) for each in (self.at.head, at.head))
        return left == now and at.head.open_extent is None

    # Accepting

    def add_batch(
        self,
        batch: pa.RecordBatch | LogRecord,
        ticket: _Ticket,
        *,
        mark: Mark | None = None,
        whole: bool = False,
    ) -> None:
        """Accept a byte log's batch of at least one row as a whole, or raise as `add_record`."""
        if not isinstance(batch, LogRecord):  # `_admit` does this for single records
            self._require_writable()
        self._transmitter.add_batch(batch, ticket, mark=mark, whole=whole)

    def add_rows(
        self, rows: TypedRows, ticket: _Ticket, *, mark: Mark | None = None, whole: bool = False
    ) -> None:
        """Accept at least one row of a typed log as a whole, or raise as `add_record`."""
        self._require_writable()
        self._transmitter.add_rows(rows, ticket, mark=mark, whole=whole)

    def flush(self, ticket: _Ticket) -> bool:
        """Answer the ticket with the last accepted record; False if that is answered already."""
        self.require_usable()
        return self._transmitter.add_barrier(ticket)

    def end_with(self, ending: Ending, ticket: _Ticket) -> None:
        """Answer the ticket once all records are answered and the ending is done."""
        if ending is not Ending.CLOSE:
            self._require_unsealed()
        self.require_usable()
        self._is_aside |= ending is Ending.ASIDE
        self._transmitter.seal()
        self._ends.append((ending, ticket))

    def require_usable(self) -> None:
        """Raise if the writer has failed or is closed; the failure then counts as reported."""
        if self.error is not None:
            self.failure_was_told()
            raise WriteError(
                f"the writer of log {self.at.name!r} failed and takes no more records: "
                f"{type(self.error).__name__}: {self.error}"
            ) from self.error
        if self.is_closing:
            raise AlreadyClosedError(f"the writer of log {self.at.name!r} is closed")

    def _require_unsealed(self) -> None:
        self.require_usable()
        sealing = any(ending is Ending.SEAL for ending, _ in self._ends)
        if sealing or self.at.head.sealed:
            raise EndOfStreamError(f"log {self.at.name!r} is sealed: no record can follow")

    def _require_writable(self) -> None:
        self._require_unsealed()
        if self._is_aside:
            raise LogNotReadyError(
                f"log {self.at.name!r} takes no record until an atomic append has changed it"
            )
        if self._fails_while_rolling and self.state in (WriterState.ROLLING, WriterState.SUSPENDED):
            state = self.state.name.lower()
            raise LogNotReadyError(
                f"log {self.at.name!r} is {state} and takes no record at the moment"
            )
        self._transmitter.require_room(self.at.name)

    def _admit(self) -> bool:
        """Return whether records may follow at once; raise if none may."""
        self._require_writable()
        return not self._fails_while_rolling

    def failure_was_told(self) -> None:
        """Note that a caller got the error: it need not be reported at the end."""
        self._untold = None

    # Events and steps

    def handle(self, event: Event) -> list[Effect[_Ticket]]:  # noqa: C901 - one case for each kind
        """Take one event."""
        effects: list[Effect[_Ticket]] = []
        may_change = False
        match event:
            # The most frequent ones first, because the cases are tried one after the other.
            case EntryDurable():
                return self._entry_durable()
            case HasCapacity():
                self._has_step = False
                effects = self._append(event.now_ms)
            case Accepted():
                pass
            case MayChange():
                self._has_step, may_change = False, True
            case LedgerClosed(last_entry_id, size_bytes):
                self._ledger_closed(last_entry_id, size_bytes)
            case SegmentStarted(ledger_id, at):
                self._segment_started(ledger_id, at)
            case Completed(at, _, ends):
                effects = self._completed(at, ends=ends)
            case Overtaken(at):
                effects = self._overtaken(at)
            case Recovered(at):
                self._recovered(at)
            case HeadChanged(at):
                effects = self._head_changed(at)
            case SteppedBack(at):
                effects = self._step_back(at)
            case Resumed():
                effects = self._resume()
            case Suspended():
                return self._suspend()
            case Fail(error):
                return self._fail(error)
            case Abort(error):
                return self._abort(error)
            case _:
                assert_never(event)
        return effects + self._advance(event.now_ms, may_change=may_change)

    def _advance(self, now_ms: int, *, may_change: bool) -> list[Effect[_Ticket]]:
        """Take the next step, unless one has no answer yet; a change waits for its turn first."""
        effects: list[Effect[_Ticket]] = []
        while not self._has_step and (step := self._decide(now_ms)) is not None:
            match step:
                case _Finish():
                    effects += self._end()
                case _GiveUp(error):
                    effects += self._fail(error)
                case AwaitCapacity():
                    self._has_step = True
                    effects.append(step)
                case _:
                    self._has_step = True
                    effects.append(step if may_change else AwaitTurn())
        return effects

    def _decide(self, now_ms: int) -> AwaitCapacity | Change | _Finish | _GiveUp | None:
        if self.state is WriterState.OPEN:
            if self._transmitter.has_next and not self._is_full(now_ms):
                return AwaitCapacity()
            if not (self._transmitter.has_next or self._must_end or self._is_old(now_ms)):
                return None
            self._become(WriterState.ROLLING)
        if self.state in (WriterState.OPENING, WriterState.ROLLING):
            return self._next_change()
        if self.state is WriterState.SEALED and self._ends:
            return _Finish()
        return None

    def old_in_s(self, *, now_ms: int) -> float | None:
        """Return in how many seconds our segment must be completed for its age; None: never."""
        segment = self._segment
        if self.state is not WriterState.OPEN or segment is None or not segment.run.entry_count:
            return None
        return max(0, segment.started_ms + self._limits.age_max_ms - now_ms) / 1000

    def is_nearly_full(self, *, now_ms: int) -> bool:
        """Return whether our segment will soon be completed at the present rate."""
        segment = self._segment
        return segment is not None and self._limits.is_reached(
            size_bytes=int(segment.size_bytes / _NEARLY_FULL),
            age_ms=int((now_ms - segment.started_ms) / _NEARLY_FULL),
        )

    def _is_old(self, now_ms: int) -> bool:
        """Return whether the segment has reached its age and no record waits."""
        return self._transmitter.is_idle and self.old_in_s(now_ms=now_ms) == 0

    def _is_full(self, now_ms: int) -> bool:
        segment = self._segment
        assert segment is not None
        # A segment without an entry is never completed, however long its start took.
        return segment.run.entry_count > 0 and self._limits.is_reached(
            size_bytes=segment.size_bytes, age_ms=now_ms - segment.started_ms
        )

    @property
    def _must_end(self) -> bool:
        return bool(self._ends) and self._transmitter.is_idle

    def _next_change(self) -> Change | _Finish | _GiveUp | None:
        segment = self._segment
        closing = None if segment is None else segment.closing
        if segment is not None and closing is None:
            return None if self._transmitter.has_in_flight else CloseLedger()
        if not self._must_end:
            if self._transmitter.has_next:
                return self._next_start(closing)
            if closing is None:
                return None
            return CompleteSegment(self.at, closing, seal=False, ends=False)
        ending, _ = self._ends[0]
        if closing is None and ending is not Ending.SEAL:
            return _Finish()
        return self._recovery() or CompleteSegment(
            self.at, closing, seal=ending is Ending.SEAL, stays=ending is Ending.ASIDE
        )

    def _next_start(self, closing: Extent | None) -> Change | _GiveUp:
        first_txid = self._transmitter.next_txid
        if self._attempts == _START_ATTEMPTS_MAX:
            return _GiveUp(
                WriteError(
                    f"log {self.at.name!r}: {_START_ATTEMPTS_MAX} attempts to start a segment "
                    "were overtaken"
                )
            )
        if first_txid < self.at.head.max_txid:
            # An atomic append was committed between our opening and our first record.
            return _GiveUp(txid_out_of_order(first_txid, self.at.head.max_txid))
        # A writer that lets others append continues in the segment that they appended to.
        limits = None if self._producers is None or closing is not None else self._limits
        return self._recovery() or StartSegment(self.at, closing, limits)

    def _recovery(self) -> RecoverLog | None:
        return RecoverLog(self.at) if self._must_recover else None

    # Answers to steps

    def _append(self, now_ms: int) -> list[Effect[_Ticket]]:
        """Make the next entry, unless it does not belong in the segment any more."""
        if self.state is not WriterState.OPEN or self._is_full(now_ms):
            return []
        assert self._segment is not None
        group, run, stamp = self._transmitter.next_group(), self._segment.run, b""
        if self._producers is not None:
            stamp = self._producers.stamp(
                group.marked,
                lssn=self._segment.lssn,
                entry_id=self._segment.first_entry_id + run.entry_count,
                size_bytes=group.size_bytes,
                now_ms=now_ms,
                is_first=not run.entry_count,
                is_last=self.is_closing and not self._transmitter.has_sealed,
            )
        body = self._encode(run, group, now_ms=now_ms, stamp=stamp)
        return [AppendEntry(body, self.is_nearly_full(now_ms=now_ms))]

    def _ledger_closed(self, last_entry_id: int, size_bytes: int) -> None:
        """Take over the end of the segment's ledger."""
        self._has_step = False
        if self.is_over:
            return
        segment = self._segment
        assert segment is not None
        closing = segment.run.extent(segment.ledger_id)
        end = segment.first_entry_id + last_entry_id + 1
        assert (last_entry_id, end) == (closing.last_entry_id, segment.acknowledged)
        segment.closing = replace(closing, size_bytes=size_bytes)

    def _segment_started(self, ledger_id: int, at: VersionedHead) -> None:
        """Continue in the segment that the head `at` opens over this ledger."""
        self._segment = OwnExtent.opened(ledger_id, at.head)
        self._change_made(at)
        self._go_to(WriterState.OPEN)

    def _completed(self, at: VersionedHead, *, ends: bool) -> list[Effect[_Ticket]]:
        """Take over the head after a step that completed our segment."""
        self._segment = None
        self._change_made(at)
        if ends:
            return self._end()
        self._go_to(WriterState.OPENING)
        return []

    def _end(self) -> list[Effect[_Ticket]]:
        if self.is_over:
            return []
        ending, ticket = self._ends.popleft()
        self._go_to(STATE_AFTER[ending])
        return [Ended(ticket)]

    def _step_back(self, at: VersionedHead) -> list[Effect[_Ticket]]:
        """Continue from the head that was read after the others' turn."""
        self._is_aside = False
        if self.is_over:
            return []
        assert self._segment is None
        self._transmitter.last_txid = max(self.last_txid, at.head.max_txid)
        return self._head_changed(at)

    def _overtaken(self, at: VersionedHead) -> list[Effect[_Ticket]]:
        """Plan again from the head that was read after a change was refused."""
        self._has_step = False
        segment = self._segment
        if segment is not None and not at.is_open_over(segment.ledger_id):
            # The client that completed our segment read the same ledger to its end.
            assert segment.closing is not None
            if at.head.end != (segment.lssn, segment.acknowledged):
                return self._fail(self._taken_over(segment.ledger_id))
            self._segment = None
            self._go_to(WriterState.OPENING)
        elif segment is None and self._is_stale(at, end=self.at.head.end):
            return self._fail(self._taken_over(None))
        self.at = at
        self._attempts += 1
        self._must_recover = self._segment is None and at.head.open_extent is not None
        return []

    def _recovered(self, at: VersionedHead) -> None:
        """Continue from the head after its open extent was completed."""
        self._has_step = False
        self.at = at
        self._must_recover = False

    def _change_made(self, at: VersionedHead) -> None:
        self._has_step = False
        self.at = at
        self._attempts = 0
        self._must_recover = False

    def _go_to(self, state: WriterState) -> None:
        if self.state is WriterState.SUSPENDED:
            self._suspended = state
        elif not self.is_over and state is not self.state:
            self._become(state)

    # Other events

    def _head_changed(self, at: VersionedHead) -> list[Effect[_Ticket]]:
        """Take over the head that others left, unless another writer has taken over."""
        segment = self._segment
        if segment is None:
            if self._is_stale(at, end=at.head.end):
                return self._fail(self._taken_over(None))
            # An open segment is another writer's.  With the old head our next change will fail, and
            # only then is the log taken over.
            if at.head.open_extent is None:
                self.at = at
            return []
        if not at.is_open_over(segment.ledger_id):
            return self._fail(self._taken_over(segment.ledger_id))
        self.at = at
        return []

    def _entry_durable(self) -> list[Effect[_Ticket]]:
        """Acknowledge the oldest entry in flight, unless ownership is lost."""
        if self.is_over:
            return []
        self._durable += 1
        return [] if self.state is WriterState.SUSPENDED else self._acknowledge()

    def _acknowledge(self) -> list[Effect[_Ticket]]:
        effects: list[Effect[_Ticket]] = []
        segment = self._segment
        for _ in range(self._durable):
            assert segment is not None
            group = self._transmitter.acknowledged()
            entry_id = segment.acknowledged
            segment.acknowledged += 1
            self._answered.append((segment.lssn, entry_id, segment.acknowledged_records))
            segment.acknowledged_records += group.record_count
            self.last_dlsn = DLSN(segment.lssn, entry_id, group.record_count - 1)
            effects.append(Acknowledge(segment.lssn, entry_id, group.slots, group.tickets))
        self._durable = 0
        return effects

    def _suspend(self) -> list[Effect[_Ticket]]:
        """Acknowledge nothing until ownership is regained."""
        if not self.is_over and self.state is not WriterState.SUSPENDED:
            self._suspended = self.state
            self._become(WriterState.SUSPENDED)
        return []

    def _resume(self) -> list[Effect[_Ticket]]:
        """Note that ownership is regained: acknowledge durable entries, and go on."""
        if self.state is not WriterState.SUSPENDED:
            return []
        assert self._suspended is not None
        self._become(self._suspended)
        self._suspended = None
        return self._acknowledge()

    def _fail(self, error: DLError) -> list[Effect[_Ticket]]:
        """End for good with the first failure; later ones are ignored."""
        if self.is_over:
            return []
        self.error = error
        self._become(WriterState.FAILED)
        return self._give_up(error)

    def _abort(self, error: DLError) -> list[Effect[_Ticket]]:
        """Close at once; unanswered calls fail with `error`."""
        effects = self._give_up(error)
        if self.state is not WriterState.CLOSED:
            self._become(WriterState.CLOSED)
        return effects

    def _give_up(self, error: DLError) -> list[Effect[_Ticket]]:
        self._lost = self.lost
        self._untold = self._untold or self._transmitter.unacknowledged()
        in_flight, queued = self._transmitter.drain()
        if not in_flight:
            in_flight, queued = queued[:1], queued[1:]  # the group that could not be sent
        cancelled = WriteCancelledError(f"never sent, an earlier write failed: {error}")
        cancelled.__cause__ = error
        ends = [ticket for _, ticket in self._ends]
        self._ends.clear()
        failed, never_sent = _tickets_of(in_flight), _tickets_of(queued)
        if queued and queued[0].goes_on:
            failed.append(never_sent.pop(0))  # its batch's first rows may be in the log
        refusals = [Refuse(failed, error), Refuse(never_sent, cancelled), Refuse(ends, error)]
        return [each for each in refusals if each.tickets]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state, segment = self.state, self._segment
        assert (self._suspended is not None) == (state is WriterState.SUSPENDED) or self.is_over
        assert self._suspended not in (WriterState.SUSPENDED, WriterState.FAILED)
        assert (self.error is not None) or state is not WriterState.FAILED
        assert state is not WriterState.OPEN or (segment is not None and segment.closing is None)
        assert state not in (WriterState.OPENING, WriterState.SEALED) or segment is None
        assert not self._durable or state is WriterState.SUSPENDED or self.is_over
        assert not (self._ends and self.is_over)

    def _is_stale(self, at: VersionedHead, *, end: tuple[int, int]) -> bool:
        """Return whether the producers, or the end of the log, may differ from those we know."""
        head, known = at.head, self.at.head
        stamped = known.producers_lssn, known.producers_entries
        is_same = (head.producers_lssn, head.producers_entries, head.end) == (*stamped, end)
        return self._producers is not None and not (is_same and head.open_extent is None)

    def _taken_over(self, ledger_id: int | None) -> OwnershipAcquireFailedError:
        what = "wrote to it" if ledger_id is None else f"recovered ledger {ledger_id} of this one"
        return OwnershipAcquireFailedError(f"log {self.at.name!r}: another writer {what}")


def _tickets_of(groups: Iterable[Group[_Ticket]]) -> list[_Ticket]:
    return [ticket for group in groups for ticket in group.tickets]
