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

A paused writer (PAUSE) has closed its extent, and lets an append change the log.  `SteppedBack`
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
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, assert_never

import msgspec

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
from dlcore.log.entries.batcher import txid_out_of_order
from dlcore.log.entries.body import Compressor
from dlcore.log.metadata.changes import SegmentLimits
from dlcore.log.writing.transmit import OwnExtent, Transmitter, Unwritten
from dlcore.wire.frames import BytesLike

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlcore.base.config import LogConfig
    from dlcore.log.entries.encryption import EntryEncryptor
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import VersionedHead
    from dlcore.log.writing.port import Stamper
    from dlcore.log.writing.transmit import Group

_Ticket = TypeVar("_Ticket")


class Ending(enum.Enum):
    """How a writer ends in good order."""

    SEAL = "seal"
    CLOSE = "close"
    PAUSE = "pause"
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
    Ending.PAUSE: WriterState.OPENING,
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


Outcome: TypeAlias = LedgerClosed | SegmentStarted | Completed | Overtaken | Recovered
"""An event that answers a change."""


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


@dataclass(frozen=True, slots=True)
class _Finish:
    """Nothing is left to do before the next end."""


@dataclass(frozen=True, slots=True)
class _GiveUp:
    error: DLError


class Ends(Generic[_Ticket]):
    """The ends that callers asked for, in their order, and whether one is a pause."""

    def __init__(self) -> None:
        self._asked: deque[tuple[Ending, _Ticket]] = deque()
        self.is_paused = False
        """Whether the writer is paused, or about to be."""

    def __bool__(self) -> bool:
        return bool(self._asked)

    @property
    def first(self) -> Ending:
        """The next one to do."""
        return self._asked[0][0]

    @property
    def is_closing(self) -> bool:
        """Whether the last one is a close."""
        return bool(self._asked) and self._asked[-1][0] is Ending.CLOSE

    @property
    def is_sealing(self) -> bool:
        """Whether one of them seals the log."""
        return any(ending is Ending.SEAL for ending, _ in self._asked)

    def require_unsealed(self, at: VersionedHead) -> None:
        """Raise if the log is sealed at this head, or will be."""
        if self.is_sealing or at.head.sealed:
            raise EndOfStreamError(f"log {at.name!r} is sealed: no record can follow")

    def ask(self, ending: Ending, ticket: _Ticket) -> None:
        """Add one behind the others."""
        self.is_paused |= ending is Ending.PAUSE
        self._asked.append((ending, ticket))

    def take(self) -> tuple[Ending, _Ticket]:
        """Take the next one, which is done."""
        return self._asked.popleft()

    def clear(self) -> list[_Ticket]:
        """Give all of them up; return their tickets."""
        tickets = [ticket for _, ticket in self._asked]
        self._asked.clear()
        return tickets


class KnownLog:
    """The log as far as its writer knows it: the head, and the extent that the writer has open.

    It says which change is due, and counts how often that was overtaken.

    Args:
        at: the head.
        is_stamped: whether the writer must know all stamps of the log.
    """

    def __init__(self, at: VersionedHead, *, is_stamped: bool) -> None:
        self.name = at.name
        self.at = at
        self.segment: OwnExtent | None = None
        self.must_recover = False
        """Whether another writer's segment must be completed before ours can start."""
        self.attempts = 0
        """How often the change that is due now was overtaken."""
        self._is_stamped = is_stamped

    @property
    def closing(self) -> Extent | None:
        """The final form of our extent, once its ledger is closed."""
        return None if self.segment is None else self.segment.closing

    @property
    def end(self) -> DLSN | None:
        """The position after the last acknowledged record of our segment, if it has one."""
        return None if self.segment is None else self.segment.end

    def is_untouched(self, at: VersionedHead) -> bool:
        """Return whether the log, read as `at`, is as this writer left it."""
        if self.segment is not None:
            return at.is_open_over(self.segment.ledger_id)
        left, now = ((each.max_lssn, each.end, each.sealed) for each in (self.at.head, at.head))
        return left == now and at.head.open_extent is None

    # Changes that are due

    def start(self, first_txid: int, limits: SegmentLimits) -> Change | _GiveUp:
        """Return the start of the segment whose first record has this transaction id."""
        if self.attempts == _START_ATTEMPTS_MAX:
            return _GiveUp(
                WriteError(
                    f"log {self.name!r}: {_START_ATTEMPTS_MAX} attempts to start a segment "
                    "were overtaken"
                )
            )
        if first_txid < self.at.head.max_txid:
            # An atomic append was committed between our opening and our first record.
            return _GiveUp(txid_out_of_order(first_txid, self.at.head.max_txid))
        if self.must_recover:
            return RecoverLog(self.at)
        # A writer that lets others append continues in the segment that they appended to.
        continues = self._is_stamped and self.closing is None
        return StartSegment(self.at, self.closing, limits if continues else None)

    def finish(self, ending: Ending) -> Change | _Finish:
        """Return what is left to do before this end."""
        if self.closing is None and ending is not Ending.SEAL:
            return _Finish()
        if self.must_recover:
            return RecoverLog(self.at)
        return CompleteSegment(
            self.at, self.closing, seal=ending is Ending.SEAL, stays=ending is Ending.PAUSE
        )

    # Changes that were made, by this writer or by others

    def started(self, ledger_id: int, at: VersionedHead) -> None:
        """Our change was made: the head `at` opens a segment over this ledger."""
        self.segment = OwnExtent.opened(ledger_id, at.head)
        self._changed(at)

    def completed(self, at: VersionedHead) -> None:
        """Our change was made, and our extent has ended."""
        self.segment = None
        self._changed(at)

    def recovered(self, at: VersionedHead) -> None:
        """The segment of the other writer was completed."""
        self.at = at
        self.must_recover = False

    def overtaken(self, at: VersionedHead) -> DLError | None:
        """Our change was refused, and another one left this head; return the error of its loss."""
        segment = self.segment
        if segment is not None and not at.is_open_over(segment.ledger_id):
            # The client that completed our segment read the same ledger to its end.
            assert segment.closing is not None
            if at.head.end != (segment.lssn, segment.acknowledged):
                return self._taken_over()
            self.segment = None
        elif segment is None and self._is_stale(at, end=self.at.head.end):
            return self._taken_over()
        self.at = at
        self.attempts += 1
        self.must_recover = self.segment is None and at.head.open_extent is not None
        return None

    def read(self, at: VersionedHead) -> DLError | None:
        """Take over the head that others left; return the error if one has taken the log over."""
        if self.segment is not None:
            if not at.is_open_over(self.segment.ledger_id):
                return self._taken_over()
            self.at = at
        elif self._is_stale(at, end=at.head.end):
            return self._taken_over()
        elif at.head.open_extent is None:
            # An open segment is another writer's.  With the old head our next change will fail, and
            # only then is the log taken over.
            self.at = at
        return None

    def _changed(self, at: VersionedHead) -> None:
        self.at = at
        self.attempts = 0
        self.must_recover = False

    def _is_stale(self, at: VersionedHead, *, end: tuple[int, int]) -> bool:
        """Return whether the stamps, or the end of the log, may differ from those we know."""
        head, known = at.head, self.at.head
        stamped = known.producers_lssn, known.producers_entries
        is_same = (head.producers_lssn, head.producers_entries, head.end) == (*stamped, end)
        return self._is_stamped and not (is_same and head.open_extent is None)

    def _taken_over(self) -> OwnershipAcquireFailedError:
        """Return the error of a writer that has lost the log."""
        what = "wrote to it"
        if self.segment is not None:
            what = f"recovered ledger {self.segment.ledger_id} of this one"
        return OwnershipAcquireFailedError(f"log {self.name!r}: another writer {what}")


class Report(Generic[_Ticket]):
    """The fate of records: positions of those acknowledged, and which others were given up."""

    def __init__(self, transmitter: Transmitter[_Ticket]) -> None:
        self._transmitter = transmitter
        # The last acknowledged entries: segment, entry, the sequence id of the first record, and
        # the number of records.
        self._answered: deque[tuple[int, int, int, int]] = deque(maxlen=_ANSWERED_KEPT)
        self._lost: Unwritten | None = None  # the records given up
        self._unreported: Unwritten | None = None  # those of them whose error no caller has got

    @property
    def last_dlsn(self) -> DLSN | None:
        """The position of the last acknowledged record."""
        if not self._answered:
            return None
        lssn, entry_id, _, record_count = self._answered[-1]
        return DLSN(lssn, entry_id, record_count - 1)

    @property
    def unwritten(self) -> Unwritten | None:
        """Records accepted and not acknowledged, unless a call has failed because of them."""
        return self._unreported or self._transmitter.unacknowledged()

    @property
    def lost(self) -> Unwritten | None:
        """Records accepted and not acknowledged, also if a call has failed because of them."""
        return self._lost or self._transmitter.unacknowledged()

    def sequence_id_of(self, dlsn: DLSN) -> int | None:
        """Return the sequence id of a record; None if it was not acknowledged here, and lately."""
        for lssn, entry_id, first, _ in reversed(self._answered):
            if (lssn, entry_id) == (dlsn.lssn, dlsn.entry_id):
                return first + dlsn.slot_id
        return None

    def acknowledge(self, segment: OwnExtent | None) -> Acknowledge[_Ticket]:
        """Acknowledge the oldest entry in flight, which is the next one of our segment."""
        assert segment is not None
        group, entry_id = self._transmitter.acknowledged(), segment.acknowledged
        first, count = segment.acknowledged_records, group.record_count
        segment.acknowledged += 1
        segment.acknowledged_records += count
        self._answered.append((segment.lssn, entry_id, first, count))
        return Acknowledge(segment.lssn, entry_id, group.slots, group.tickets)

    def give_up(self, error: DLError) -> list[Refuse[_Ticket]]:
        """Refuse all that is not acknowledged, and keep what it was."""
        self._lost = self.lost
        self._unreported = self._unreported or self._transmitter.unacknowledged()
        in_flight, queued = self._transmitter.drain()
        if not in_flight:
            in_flight, queued = queued[:1], queued[1:]  # the group that could not be sent
        cancelled = WriteCancelledError(f"never sent, an earlier write failed: {error}")
        cancelled.__cause__ = error
        failed, never_sent = _tickets_of(in_flight), _tickets_of(queued)
        if queued and queued[0].goes_on:
            failed.append(never_sent.pop(0))  # its batch's first rows may be in the log
        return [Refuse(failed, error), Refuse(never_sent, cancelled)]

    def failure_was_reported(self) -> None:
        """Note that a caller got the error: it need not be reported at the end."""
        self._unreported = None


class EntryMaker:
    """The bodies of entries, and the limits of segments, as the configuration says.

    With a `stamper` the entries have stamps.
    """

    def __init__(
        self, stamper: Stamper | None, config: LogConfig, encryptor: EntryEncryptor | None
    ) -> None:
        self.stamper = stamper
        self.configure(config, encryptor)

    def configure(self, config: LogConfig, encryptor: EntryEncryptor | None) -> None:
        """Use this configuration from the next entry on."""
        self.limits = SegmentLimits.of(config)
        self.fails_while_rolling = config.fail_while_rolling
        self.encryptor = encryptor
        self._compressor = Compressor(config.compression)

    def body(
        self, group: Group[Any], segment: OwnExtent, *, now_ms: int, is_last: bool
    ) -> list[BytesLike]:
        """Return the parts of the body of the segment's next entry."""
        run, stamp = segment.run, b""
        if self.stamper is not None:
            stamp = self.stamper.stamp(
                group.marked,
                lssn=segment.lssn,
                entry_id=segment.first_entry_id + run.entry_count,
                size_bytes=group.size_bytes,
                now_ms=now_ms,
                is_first=not run.entry_count,
                is_last=is_last,
            )
        return run.encode(
            group,
            now_ms=now_ms,
            compressor=self._compressor,
            stamp=stamp,
            encryptor=self.encryptor,
        )


@dataclass(slots=True)
class _Suspension:
    """The lock is lost."""

    resumes: WriterState
    """The state to go on in."""
    durable: int = 0
    """Entries in flight that are durable and not acknowledged."""


class LogAppender(Machine[WriterState], Generic[_Ticket]):
    """The only writer of a log from the head `at` on, which has no open extent.

    `_Ticket` identifies a caller's record or end in effects.  With a `stamper`, which knows the
    stamps as of `at`, its entries have stamps.  It then fails if another writer may have stamped
    entries of the log.  An `encryptor` encrypts its entries.

    Its parts are the `transmitter` (records until they are acknowledged), the `report`, the `log`
    as it is known, `EntryMaker` (bodies, limits), and `Ends`.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        at: VersionedHead,
        config: LogConfig,
        stamper: Stamper | None = None,
        encryptor: EntryEncryptor | None = None,
    ) -> None:
        self.state = WriterState.OPENING
        self.error: DLError | None = None
        self.transmitter: Transmitter[_Ticket] = Transmitter(
            entry_bytes=config.entry_bytes, last_txid=at.head.max_txid, admit=self._admit
        )
        """The queue; it accepts records, or raises the error for which they cannot follow."""
        self.report = Report(self.transmitter)
        self.log = KnownLog(at, is_stamped=stamper is not None)
        self._maker = EntryMaker(stamper, config, encryptor)
        self._suspension: _Suspension | None = None
        self._ends: Ends[_Ticket] = Ends()
        self._has_step = False  # that is not answered
        self.configure(config, encryptor)

    def __repr__(self) -> str:
        segment = self.log.segment
        where = "no segment" if segment is None else f"segment={segment.lssn}"
        return f"<LogAppender {self.log.name!r} {self.state.name} {where}>"

    @property
    def has_room(self) -> bool:
        """Whether at most a quarter of the limits is pending, and the writer is not paused."""
        return (not self._ends.is_paused or self.is_over) and self.transmitter.has_room

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be sent or acknowledged."""
        return self.state in (WriterState.FAILED, WriterState.CLOSED)

    @property
    def is_closing(self) -> bool:
        """Whether the writer is closed, or a close was requested."""
        return self._ends.is_closing if self._ends else self.state is WriterState.CLOSED

    def configure(self, config: LogConfig, encryptor: EntryEncryptor | None = None) -> None:
        """Use this configuration from the next entries and segments on."""
        self._maker.configure(config, encryptor)
        self.transmitter.limit(
            bytes_max=config.pending_bytes_max, records_max=config.pending_records_max
        )
        self.transmitter.entry_bytes = config.entry_bytes

    # Accepting

    def flush(self, ticket: _Ticket) -> bool:
        """Answer the ticket with the last accepted record; False if that is answered already."""
        self.require_usable()
        return self.transmitter.add_barrier(ticket)

    def end_with(self, ending: Ending, ticket: _Ticket) -> None:
        """Answer the ticket once all records are answered and the ending is done."""
        self.require_usable()
        if ending is not Ending.CLOSE:
            self._ends.require_unsealed(self.log.at)
        # Records accepted before the end must not wait for more that would fill their group.
        self.transmitter.seal()
        self._ends.ask(ending, ticket)

    def require_usable(self) -> None:
        """Raise if the writer has failed or is closed; the failure then counts as reported."""
        if self.error is not None:
            self.report.failure_was_reported()
            raise WriteError(
                f"the writer of log {self.log.name!r} failed and takes no more records: "
                f"{type(self.error).__name__}: {self.error}"
            ) from self.error
        if self.is_closing:
            raise AlreadyClosedError(f"the writer of log {self.log.name!r} is closed")

    def _admit(self) -> bool:
        """Return whether records may follow at once; raise if none may."""
        self.require_usable()
        self._ends.require_unsealed(self.log.at)
        name, fails = self.log.name, self._maker.fails_while_rolling
        if self._ends.is_paused:
            raise LogNotReadyError(
                f"log {name!r} takes no record until an atomic append has changed it"
            )
        if fails and self.state in (WriterState.ROLLING, WriterState.SUSPENDED):
            state = self.state.name.lower()
            raise LogNotReadyError(f"log {name!r} is {state} and takes no record at the moment")
        self.transmitter.require_room(name)
        # With this setting each record is checked: no admission may outlast the start of a roll.
        return not fails

    # Events and steps

    def handle(self, event: Event) -> list[Effect[_Ticket]]:  # noqa: C901 - one case for each kind
        """Take one event."""
        effects: list[Effect[_Ticket]] = []
        log, may_change, before = self.log, False, self.log.at
        match event:
            # The most frequent ones first, because the cases are tried one after the other.
            case EntryDurable():
                if self._suspension is None:
                    return [] if self.is_over else [self.report.acknowledge(log.segment)]
                # Durable, but perhaps fenced meanwhile by another owner, who decides if it stays.
                self._suspension.durable += 1
                return []
            case HasCapacity():
                self._has_step = False
                effects = self._append(event.now_ms)
            case Accepted():
                pass
            case MayChange():
                self._has_step, may_change = False, True
            case LedgerClosed() | SegmentStarted() | Completed() | Overtaken() | Recovered():
                self._has_step = False
                effects = self._go_on(event)
            case HeadChanged(at):
                effects = self._fail(log.read(at))
            case SteppedBack(at):
                effects = self._step_back(at)
            case Resumed():
                effects = self._resume()
            case Suspended():
                return self._suspend()
            case Fail(error):
                return self._fail(error)
            case Abort(error):
                effects = self._give_up(error)
                if self.state is not WriterState.CLOSED:
                    self._become(WriterState.CLOSED)
                return effects
            case _:
                assert_never(event)
        if log.at is not before:
            self.transmitter.revoke()  # the head says whether a record may follow
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
                    # Without a turn the step is dropped, and decided again at `MayChange`: until
                    # then another change may have made it wrong.
                    effects.append(step if may_change else AwaitTurn())
        return effects

    def _decide(self, now_ms: int) -> AwaitCapacity | Change | _Finish | _GiveUp | None:
        if self.state is WriterState.OPEN:
            has_next, segment = self.transmitter.has_next, self.log.segment
            assert segment is not None
            if has_next and not segment.is_full(self._maker.limits, now_ms=now_ms):
                return AwaitCapacity()
            is_idle = self.transmitter.is_idle
            is_due = is_idle and (bool(self._ends) or self.old_in_s(now_ms=now_ms) == 0)
            if not (has_next or is_due):
                return None
            self._become(WriterState.ROLLING)
        if self.state in (WriterState.OPENING, WriterState.ROLLING):
            return self._next_change()
        if self.state is WriterState.SEALED and self._ends:
            return _Finish()
        return None

    def old_in_s(self, *, now_ms: int) -> float | None:
        """Return in how many seconds our segment must be completed for its age; None: never."""
        segment = self.log.segment
        if self.state is not WriterState.OPEN or segment is None or not segment.run.entry_count:
            return None
        return max(0, segment.started_ms + self._maker.limits.age_max_ms - now_ms) / 1000

    def _next_change(self) -> Change | _Finish | _GiveUp | None:
        log, queue = self.log, self.transmitter
        if log.segment is not None and log.closing is None:
            # The extent has all that is in flight, so its ledger is closed behind that.
            return None if queue.has_in_flight else CloseLedger()
        if self._ends and queue.is_idle:
            return log.finish(self._ends.first)
        if queue.has_next:
            return log.start(queue.next_txid, self._maker.limits)
        if log.closing is None:
            return None
        return CompleteSegment(log.at, log.closing, seal=False, ends=False)

    # Answers to steps

    def _append(self, now_ms: int) -> list[Effect[_Ticket]]:
        """Make the next entry, unless it does not belong in the segment any more."""
        segment, limits = self.log.segment, self._maker.limits
        is_open = self.state is WriterState.OPEN
        if segment is None or not is_open or segment.is_full(limits, now_ms=now_ms):
            return []
        group = self.transmitter.next_group()
        is_last = self.is_closing and not self.transmitter.has_sealed
        body = self._maker.body(group, segment, now_ms=now_ms, is_last=is_last)
        return [AppendEntry(body, segment.is_nearly_full(limits, now_ms=now_ms))]

    def _go_on(self, outcome: Outcome) -> list[Effect[_Ticket]]:
        """Continue after a change, or after one that another change overtook."""
        log = self.log
        match outcome:
            case LedgerClosed(last_entry_id, size_bytes):
                if not self.is_over:
                    assert log.segment is not None
                    log.segment.close(last_entry_id, size_bytes)
            case SegmentStarted(ledger_id, at):
                log.started(ledger_id, at)
                self._go_to(WriterState.OPEN)
            case Completed(at, _, ends):
                log.completed(at)
                if ends:
                    return self._end()
                self._go_to(WriterState.OPENING)
            case Overtaken(at):
                error = log.overtaken(at)
                if error is None and log.segment is None:
                    self._go_to(WriterState.OPENING)
                return self._fail(error)
            case Recovered(at):
                log.recovered(at)
            case _:
                assert_never(outcome)
        return []

    def _end(self) -> list[Effect[_Ticket]]:
        if self.is_over:
            return []
        ending, ticket = self._ends.take()
        self._go_to(STATE_AFTER[ending])
        return [Ended(ticket)]

    def _step_back(self, at: VersionedHead) -> list[Effect[_Ticket]]:
        """Continue from the head that was read after the others' turn."""
        self._ends.is_paused = False
        if self.is_over:
            return []
        assert self.log.segment is None
        # An append may have brought higher transaction ids, and they never fall along a log.
        self.transmitter.last_txid = max(self.transmitter.last_txid, at.head.max_txid)
        return self._fail(self.log.read(at))

    def _go_to(self, state: WriterState) -> None:
        if self._suspension is not None:
            self._suspension.resumes = state
        # A change that began before the failure may still end: the machine has left for good.
        elif not self.is_over and state is not self.state:
            self._become(state)

    # Other events

    def _suspend(self) -> list[Effect[_Ticket]]:
        """Acknowledge nothing until ownership is regained."""
        if not self.is_over and self._suspension is None:
            self._suspension = _Suspension(self.state)
            self._become(WriterState.SUSPENDED)
        return []

    def _resume(self) -> list[Effect[_Ticket]]:
        """Note that ownership is regained: acknowledge durable entries, and go on."""
        suspension, self._suspension = self._suspension, None
        if suspension is None:
            return []
        self._become(suspension.resumes)
        segment = self.log.segment
        return [self.report.acknowledge(segment) for _ in range(suspension.durable)]

    def _fail(self, error: DLError | None) -> list[Effect[_Ticket]]:
        """End for good with the first failure, if this is it; later ones are ignored."""
        if error is None or self.is_over:
            return []
        self.error = error
        self._become(WriterState.FAILED)
        return self._give_up(error)

    def _give_up(self, error: DLError) -> list[Effect[_Ticket]]:
        self._suspension = None
        refusals = [*self.report.give_up(error), Refuse(self._ends.clear(), error)]
        return [each for each in refusals if each.tickets]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state, segment, suspension = self.state, self.log.segment, self._suspension
        assert (suspension is not None) == (state is WriterState.SUSPENDED)
        assert suspension is None or suspension.resumes not in (
            WriterState.SUSPENDED,
            WriterState.FAILED,
        )
        assert (self.error is not None) or state is not WriterState.FAILED
        assert state is not WriterState.OPEN or (segment is not None and segment.closing is None)
        assert state not in (WriterState.OPENING, WriterState.SEALED) or segment is None
        assert not (self._ends and self.is_over)


def _tickets_of(groups: Iterable[Group[_Ticket]]) -> list[_Ticket]:
    return [ticket for group in groups for ticket in group.tickets]
