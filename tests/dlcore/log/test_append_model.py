"""The writer's machine under any order of events: its invariants, against a log of a few lines.

The stored head is made by the real plans.  Beside the writer there are others, which recover what
it has open, or start segments of their own, as happens while a lock is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from dlcore.base.config import LogConfig
from dlcore.base.errors import DLError, LedgerFencedError, TransactionIdOutOfOrderError, WriteError
from dlcore.base.ids import DLSN
from dlcore.log.entries.body import EntryHeader, batch_of, decode_entry_header
from dlcore.log.metadata.changes import (
    SegmentLimits,
    plan_append,
    plan_complete,
    plan_pause,
    plan_start,
    plan_truncate,
)
from dlcore.log.metadata.segment import Extent
from dlcore.log.metadata.values import LogHead, LogKey, VersionedHead
from dlcore.log.proxied.producers import Producers
from dlcore.log.writing.append import (
    Abort,
    Acknowledge,
    AwaitCapacity,
    CloseLedger,
    Completed,
    CompleteSegment,
    Ended,
    Ending,
    EntryDurable,
    Fail,
    HeadChanged,
    LedgerClosed,
    Overtaken,
    Recovered,
    RecoverLog,
    Refuse,
    Resumed,
    SegmentStarted,
    StartSegment,
    SteppedBack,
    Suspended,
    WriterState,
)
from dlcore.metadata.paths import NamespacePaths
from tests.fixtures.appenders import Stepped
from tests.fixtures.lengths import amount
from tests.fixtures.log_states import staged

PATHS = NamespacePaths("/dlog").log_of("log-1")


@dataclass
class Ledger:
    """The entries that bookies hold of a ledger, and how many of them the writer knows."""

    entries: list[EntryHeader] = field(default_factory=list)
    answered: int = 0
    is_fenced: bool = False

    def extent(self, ledger_id: int, count: int) -> Extent | None:
        """Return its first entries as a final extent; None for no entry."""
        held = self.entries[:count]
        if not held:
            return None
        return Extent(
            ledger_id=ledger_id,
            first_entry_id=0,
            last_entry_id=count - 1,
            record_count=sum(each.record_count for each in held),
            size_bytes=100 * count,
            first_txid=held[0].first_txid,
            last_txid=held[-1].last_txid,
            last_timestamp_ms=held[-1].write_time_ms,
        )


class Writing(RuleBasedStateMachine):
    """One writer, and all that may happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.ledgers: dict[int, Ledger] = {}
        self.asked: list[int] = []  # tickets of records, in order
        self.record_count = 0
        self.barriers: set[int] = set()
        self.ends: set[int] = set()
        self.pauses: set[int] = set()
        self.answers: dict[int, DLSN | DLError | None] = {}
        self.acknowledged: list[tuple[DLSN, int]] = []  # with how many records up to it
        self.last_ticket = 0

    @initialize(first_txid=st.integers(-1, 5), gives_turns=st.booleans())
    def begin(self, first_txid: int, gives_turns: bool) -> None:
        """The log may have had a life before."""
        head = LogHead(max_txid=first_txid)
        at = VersionedHead(log=LogKey(name="clicks", log_id="log-1"), head=head, version=0)
        self.stored = at
        self.machine: Stepped[int] = Stepped(
            at,
            LogConfig(entry_bytes=60, segment_bytes_max=1500, segment_age_max_s=0.05),
            Producers() if gives_turns else None,
        )

    # Callers

    @rule(entry_bytes=st.integers(1, 200), segment_bytes=st.integers(300, 3000))
    def configure(self, entry_bytes: int, segment_bytes: int) -> None:
        """The log's settings changed, at any moment."""
        self.machine.configure(LogConfig(entry_bytes=entry_bytes, segment_bytes_max=segment_bytes))

    def ticket(self) -> int:
        """Return one that no writer has."""
        self.last_ticket += 1
        return self.last_ticket

    @property
    def refuses(self) -> bool:
        """Whether nothing more is accepted."""
        machine = self.machine
        ended = self.ends or self.pauses or machine.is_over
        return bool(ended) or machine.log.at.head.sealed

    @rule(step=st.integers(-1, 2), count=st.integers(1, 8), size=st.sampled_from([0, 10, 100]))
    def write(self, step: int, count: int, size: int) -> None:
        """A record, or several as a batch."""
        ticket, txid = self.ticket(), self.machine.last_txid + step
        refuses = self.refuses
        try:
            if count == 1:
                self.machine.add_record(max(txid, 0), b"x" * size, ticket)
            else:
                batch = batch_of([max(txid, 0)] * count, [b"x" * size] * count)
                self.machine.add_batch(batch, ticket)
        except TransactionIdOutOfOrderError:
            assert step < 0
        except DLError:
            assert refuses
        else:
            assert not refuses
            self.asked.append(ticket)
            self.record_count += count

    @precondition(lambda self: not self.refuses)
    @rule()
    def flush(self) -> None:
        """It is answered with what was accepted before it, or needs no answer."""
        ticket = self.ticket()
        if self.machine.flush(ticket):
            self.barriers.add(ticket)
        else:
            assert set(self.asked) <= self.answers.keys()

    @precondition(lambda self: not self.machine.is_closing and self.machine.error is None)
    @rule(ending=st.sampled_from(Ending))
    def end(self, ending: Ending) -> None:
        """Seal, close, or pause for another writer."""
        if ending is not Ending.CLOSE and self.refuses:
            return
        ticket = self.ticket()
        self.machine.end_with(ending, ticket)
        (self.pauses if ending is Ending.PAUSE else self.ends).add(ticket)

    @precondition(lambda self: self.pauses and self.pauses <= self.answers.keys())
    @rule(appended=st.integers(0, 20))
    def step_back(self, appended: int) -> None:
        """Another may have changed the log meanwhile; what is accepted then follows it."""
        head = self.stored.head
        if head.open_extent is None and not head.sealed:
            for _ in range(appended):
                self.append_staged()
        self.pauses.clear()
        self.perform(self.machine.feed(SteppedBack(self.stored, self.now_ms)))
        assert self.machine.is_over or self.machine.last_txid >= self.stored.head.max_txid

    def append_staged(self) -> None:
        """An atomic append of one record."""
        ledger_id, txid = len(self.ledgers) + 1, max(self.stored.head.max_txid, 0)
        self.ledgers[ledger_id] = Ledger(
            [EntryHeader(record_count=1, first_txid=txid, last_txid=txid, **_MORE)], 1
        )
        extent = replace(staged(ledger_id), record_count=1)
        limits = SegmentLimits.of(LogConfig())
        change, _, _ = plan_append(PATHS, self.stored, [extent], now_ms=self.now_ms, limits=limits)
        self.stored = change.after

    @precondition(lambda self: len(self.asked) > 6)
    @rule()
    def abort(self) -> None:
        """Give up at once."""
        self.perform(self.machine.feed(Abort(WriteError("aborted"))))

    # The driver

    def perform(self, effects: list[Any]) -> None:
        """Take answers, and judge their order."""
        for effect in effects:
            match effect:
                case Acknowledge():
                    self.take_acks(effect)
                case Refuse():
                    for ticket in effect.tickets:
                        self.answer(ticket, effect.error)
                case Ended():
                    assert set(self.asked) <= self.answers.keys()
                    self.answer(effect.ticket, None)

    def take_acks(self, effect: Acknowledge[int]) -> None:
        """Nothing is acknowledged after a failure or while suspended; positions rise."""
        assert self.machine.error is None
        assert self.machine.state is not WriterState.SUSPENDED
        for slot, ticket in zip(effect.slots, effect.tickets, strict=True):
            dlsn = DLSN(effect.lssn, effect.entry_id, slot)
            assert all(dlsn >= before for before, _ in self.acknowledged[-1:])
            if ticket in self.asked:
                self.acknowledged.append((dlsn, ticket))
            self.answer(ticket, dlsn)

    def answer(self, ticket: int, answer: DLSN | DLError | None) -> None:
        """Each is answered once, and records in the order in which they were written."""
        assert ticket not in self.answers
        if ticket in self.asked:
            assert all(before in self.answers for before in self.asked if before < ticket)
        self.answers[ticket] = answer

    @rule(passed_ms=st.sampled_from([0, 0, 1, 30]))
    def step(self, passed_ms: int) -> None:
        """Perform what the machine asks for; a change is refused if the log has changed."""
        self.now_ms += passed_ms
        machine = self.machine
        self.perform(machine.accept(now_ms=self.now_ms))
        step = None if machine.is_over else machine.step
        match step:
            case AwaitCapacity():
                self.append_entry()
            case CloseLedger():
                self.close_ledger()
            case StartSegment() | CompleteSegment():
                assert not machine.is_over
                if step.at.version != self.stored.version:
                    self.perform(machine.feed(Overtaken(self.stored, self.now_ms)))
                elif isinstance(step, StartSegment):
                    self.start(step)
                elif step.stays:
                    assert step.closing is not None
                    self.stored = plan_pause(PATHS, step.at, closing=step.closing).after
                    self.perform(machine.feed(Completed(self.stored, self.now_ms)))
                else:
                    self.stored = plan_complete(
                        PATHS, step.at, now_ms=self.now_ms, closing=step.closing, seal=step.seal
                    ).after
                    self.perform(machine.feed(Completed(self.stored, self.now_ms, ends=step.ends)))
            case RecoverLog():
                assert step.at.head.open_extent is not None
                self.recover(0)
                self.perform(machine.feed(Recovered(self.stored, self.now_ms)))

    @property
    def own_ledger(self) -> Ledger:
        """That of the writer's segment: another may have started a later one."""
        segment = self.machine.log.segment
        assert segment is not None
        return self.ledgers[segment.ledger_id]

    def append_entry(self) -> None:
        """The ledger takes the entry, as long as it is not fenced."""
        body = self.machine.next_entry(now_ms=self.now_ms)
        if body is None:
            assert self.machine.state in (WriterState.SUSPENDED, WriterState.ROLLING)
            return
        ledger = self.own_ledger
        header = decode_entry_header(b"".join(body))
        assert header.records_before == sum(each.record_count for each in ledger.entries)
        if ledger.entries:
            assert header.first_txid >= ledger.entries[-1].last_txid
            assert header.write_time_ms >= ledger.entries[-1].write_time_ms
        ledger.entries.append(header)

    def close_ledger(self) -> None:
        """Only when all of it was acknowledged."""
        ledger = self.own_ledger
        assert ledger.answered == len(ledger.entries) > 0
        if ledger.is_fenced:
            self.perform(self.machine.feed(Fail(LedgerFencedError("fenced"))))
        else:
            self.perform(self.machine.feed(LedgerClosed(ledger.answered - 1, 1, self.now_ms)))

    def start(self, step: StartSegment) -> None:
        """A new ledger, and the change that names it."""
        ledger_id = len(self.ledgers) + 1
        self.ledgers[ledger_id] = Ledger()
        self.stored = plan_start(
            PATHS,
            step.at,
            ledger_id=ledger_id,
            now_ms=self.now_ms,
            closing=step.closing,
            limits=step.limits,
        ).after
        self.perform(self.machine.feed(SegmentStarted(ledger_id, self.stored, self.now_ms)))

    @precondition(
        lambda self: any(each.answered < len(each.entries) for each in self.ledgers.values())
    )
    @rule()
    def durable(self) -> None:
        """An entry is acknowledged by its bookies, or they refuse it on command."""
        ledger = next(each for each in self.ledgers.values() if each.answered < len(each.entries))
        if ledger.is_fenced:
            self.perform(self.machine.feed(Fail(LedgerFencedError("fenced"))))
        else:
            self.perform(self.machine.feed(EntryDurable()))
        ledger.answered += 1

    @rule()
    def suspend(self) -> None:
        """The session is gone."""
        self.machine.feed(Suspended())

    @rule()
    def resume(self) -> None:
        """The writer has the lock again, if the log is as it was left."""
        if self.machine.state is not WriterState.SUSPENDED:
            return
        if self.machine.log.is_untouched(self.stored):
            self.perform(self.machine.feed(Resumed(self.now_ms)))
        else:
            self.perform(self.machine.feed(Fail(WriteError("denied"))))

    # Others

    def recover(self, extra: int) -> None:
        """A reader fences the open ledger, and completes its segment with all of its entries."""
        extent = self.stored.head.open_extent
        if extent is None:
            return
        ledger = self.ledgers.setdefault(extent.ledger_id, Ledger())
        ledger.is_fenced = True
        count = min(len(ledger.entries), ledger.answered + extra)
        closing = ledger.extent(extent.ledger_id, count)
        empty = extent.ledger_id if closing is None else None
        self.stored = plan_complete(
            PATHS, self.stored, now_ms=self.now_ms, closing=closing, empty_ledger_id=empty
        ).after

    @precondition(lambda self: len(self.asked) > 3)
    @rule(extra=st.integers(0, 2))
    def another_recovers(self, extra: int) -> None:
        """It may find more than was acknowledged, never less."""
        self.recover(extra)

    @precondition(lambda self: len(self.asked) > 3 and not self.stored.head.sealed)
    @rule(txids=st.integers(0, 3), ends=st.booleans())
    def another_writes(self, txids: int, ends: bool) -> None:
        """It starts a segment with one record, and may leave it open."""
        if self.stored.head.open_extent is not None:
            return
        ledger_id = len(self.ledgers) + 1
        first = max(self.stored.head.max_txid, 0) + txids
        self.ledgers[ledger_id] = Ledger(
            [EntryHeader(record_count=1, first_txid=first, last_txid=first, **_MORE)], 1
        )
        self.stored = plan_start(PATHS, self.stored, ledger_id=ledger_id, now_ms=self.now_ms).after
        if ends:
            self.recover(0)

    @rule(back=st.integers(0, 3))
    def truncate(self, back: int) -> None:
        """The writer truncates a part of its acknowledged records."""
        if self.machine.error is not None or not self.acknowledged:
            return
        dlsn = self.acknowledged[-1 - min(back, len(self.acknowledged) - 1)][0]
        change = plan_truncate(PATHS, self.stored, dlsn)
        if change is not None:
            self.stored = change.after
            self.perform(self.machine.feed(HeadChanged(self.stored, self.now_ms)))

    # Invariants

    @invariant()
    def what_is_pending_is_what_is_not_answered(self) -> None:
        """And records that were given up are reported."""
        if not self.last_ticket:
            return
        waiting = [ticket for ticket in self.asked if ticket not in self.answers]
        if self.machine.is_over:
            assert not waiting
            assert self.barriers | self.ends | self.pauses <= self.answers.keys()
        assert (self.machine.transmitter.pending_bytes > 0) is bool(waiting)

    @invariant()
    def final_extents_hold_acknowledged_records(self) -> None:
        """The log has at least the acknowledged records of each ledger, once each."""
        if not self.last_ticket:
            return
        held = self.stored.head.next_sequence_id
        count = sum(
            entry.record_count
            for ledger in self.ledgers.values()
            for entry in ledger.entries[: ledger.answered]
            if not ledger.is_fenced
        )
        open_extent = self.stored.head.open_extent
        if open_extent is not None:
            ledger = self.ledgers[open_extent.ledger_id]
            held += sum(entry.record_count for entry in ledger.entries[: ledger.answered])
        assert held >= count

    def teardown(self) -> None:
        """Once everything heals, each waiting caller is answered."""
        if not hasattr(self, "machine"):
            return
        self.resume()
        for _ in range(4 * self.record_count + 40):  # each may need an entry and a segment
            self.step(0)
            if any(each.answered < len(each.entries) for each in self.ledgers.values()):
                self.durable()
        assert {*self.asked, *self.barriers, *self.ends, *self.pauses} <= self.answers.keys()


_MORE: dict[str, Any] = {"records_before": 0, "write_time_ms": 0}

TestWriting = Writing.TestCase
TestWriting.settings = settings(max_examples=amount(100, sampled=30), stateful_step_count=50)
