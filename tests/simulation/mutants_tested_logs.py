"""Bugs of a log's writer that named tests catch: fencing hides them, or they need rare meetings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec

from dlcore.log.metadata.commits import decide
from dlcore.log.metadata.nodes import StagedNode
from dlcore.log.reading.watching import NameLooks
from dlcore.log.recovery import recover_log
from dlcore.log.staging import commit as commits
from dlcore.log.staging.commit import Commit
from dlcore.log.staging.writer import DirectStagingWriter
from dlcore.log.upkeep.retention import Front
from dlcore.log.writing.append import (
    CompleteSegment,
    KnownLog,
    LogAppender,
    RecoverLog,
    StartSegment,
)
from dlcore.log.writing.open_segment import OpenSegment
from dlcore.log.writing.ownership import CreateLock, Ownership, OwnershipState
from dlcore.log.writing.transmit import OwnExtent, Run
from dlcore.metadata.port import Put
from dlcore.metadata.stored import encode
from dlcore.ops.upkeep import expiry
from dlcore.sync.reader import LogReader
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.log.context import LogContext
    from dlcore.log.metadata.changes import SegmentLimits
    from dlcore.log.metadata.commits import Decision
    from dlcore.log.metadata.values import (
        CommitRecord,
        LockHolder,
        LogHead,
        SegmentEnd,
        VersionedHead,
    )
    from dlcore.log.reading.rows import Rows
    from dlcore.log.writing.append import Event
    from dlcore.metadata.port import Op

_CANCELLED = "dlcore/log/test_cancelled_reads.py"
_GUARDS = "dlcore/log/test_commit_guards.py"
_MACHINE = "dlcore/log/test_append.py"
_REPEATED = "dlcore/log/test_repeated_appends.py"
_WRITER = "dlcore/log/test_writer.py"
_RETENTION = "dlcore/log/test_retention.py"


@caught_by(f"{_WRITER}::test_nothing_is_acknowledged_while_the_lock_is_lost")
def a_lost_lock_suspends_nothing() -> Iterator[None]:
    """Records are acknowledged by who does not know whether the log is its own."""
    with patch.object(LogAppender, "_suspend", lambda _: []):
        yield


@caught_by(f"{_CANCELLED}::test_an_interrupted_read_loses_and_repeats_nothing")
def interrupted_reads_lose_what_had_come() -> Iterator[None]:
    """Rows are handed over with the result, which no one takes who is interrupted."""

    def take(self: LogReader, **wanted: Any) -> None:
        async def rows() -> list[Rows]:
            await self._reader._gather_rows(**wanted)
            return self._reader._take_gathered()

        self._rows.extend(self._call(rows()))

    with patch.object(LogReader, "_take", take):
        yield


@caught_by(f"{_MACHINE}::test_a_start_gives_up_when_its_first_record_cannot_follow_any_more")
def overtaken_starts_do_not_look_at_transaction_ids() -> Iterator[None]:
    """Records that another appended in between had higher ones."""

    def blind(self: KnownLog, *_: Any) -> Any:
        return RecoverLog(self.at) if self.must_recover else StartSegment(self.at, self.closing)

    with patch.object(KnownLog, "start", blind):
        yield


@caught_by("dlcore/log/test_run.py::test_headers_count_what_came_before_in_the_run")
def write_times_may_fall() -> Iterator[None]:
    """They follow the clock, also back."""
    encode = Run.encode

    def by_the_clock(self: Run, *about: Any, **more: Any) -> Any:
        self.timestamp_ms = 0
        return encode(self, *about, **more)

    with patch.object(Run, "encode", by_the_clock):
        yield


@caught_by(f"{_MACHINE}::test_another_that_completed_our_segment_elsewhere_has_taken_over")
def a_takeover_at_another_end_is_not_noticed() -> Iterator[None]:
    """The writer goes on behind whatever another made of its segment."""
    overtaken = KnownLog.overtaken

    def trusting(self: KnownLog, at: VersionedHead) -> Any:
        if self.segment is not None and not at.is_open_over(self.segment.ledger_id):
            self.segment = None
        return overtaken(self, at)

    with patch.object(KnownLog, "overtaken", trusting):
        yield


@caught_by("dlcore/log/test_unlocked_writers.py::test_truncation_by_an_idle_writer_without_a_lock")
def a_truncation_takes_the_log_over() -> Iterator[None]:
    """An idle writer takes the open segment that it saw for its own, and starts one beside it."""

    def greedy(self: KnownLog, at: VersionedHead) -> None:
        self.at = at

    with patch.object(KnownLog, "read", greedy):
        yield


@caught_by(f"{_WRITER}::test_a_seal_keeps_what_another_completed_meanwhile")
def a_seal_deletes_what_another_completed() -> Iterator[None]:
    """It takes a segment that is not open any more for an empty one."""
    close = OwnExtent.close
    apply = OpenSegment._apply
    closed: list[int] = []

    def noting(self: OwnExtent, *about: int) -> None:
        close(self, *about)
        closed.append(self.ledger_id)

    async def deleting(self: OpenSegment, step: StartSegment | CompleteSegment) -> Event:
        event = await apply(self, step)
        if isinstance(step, CompleteSegment) and step.closing is None and closed:
            await self._context.ledger_store.delete(closed.pop())
        return event

    with (
        patch.object(OwnExtent, "close", noting),
        patch.object(OpenSegment, "_apply", deleting),
    ):
        yield


@caught_by("dlcore/log/test_ownership.py::test_the_lock_is_regained_when_nothing_happened")
def a_lost_lock_is_taken_back_unseen() -> Iterator[None]:
    """A client that had the log meanwhile, and let it go again, is not noticed."""
    attempt = Ownership._attempt

    def unguarded(self: Ownership) -> list[Any]:
        effects: list[Any] = attempt(self)
        return [CreateLock(None)] if self.state is OwnershipState.REGAINING else effects

    with patch.object(Ownership, "_attempt", unguarded):
        yield


@caught_by("dlcore/log/test_odd_moments.py::test_a_session_ends_while_the_lock_is_asked_for")
def only_the_latest_attempt_makes_a_lock() -> Iterator[None]:
    """A node made in a new session by an attempt of the old one is taken for another's."""

    def is_latest(self: Ownership, holder: LockHolder) -> bool:
        return holder.token == self._tokens[-1]

    with patch.object(Ownership, "is_own", is_latest):
        yield


@caught_by(f"{_MACHINE}::test_a_segment_without_an_entry_is_not_completed")
def an_empty_segment_may_be_too_old() -> Iterator[None]:
    """Its ledger is closed without an entry, and no extent can say so."""

    def is_full(self: OwnExtent, limits: SegmentLimits, *, now_ms: int) -> bool:
        age_ms = now_ms - self.started_ms
        return limits.is_reached(size_bytes=self.run.size_bytes, age_ms=age_ms)

    with patch.object(OwnExtent, "is_full", is_full):
        yield


@caught_by("dlcore/log/test_staging_writer.py::test_a_fenced_staging_writer_says_so")
def staging_does_not_wait_for_its_entries() -> Iterator[None]:
    """Committed records may never have reached their bookies."""
    guarded = DirectStagingWriter._guarded

    async def early(self: DirectStagingWriter, call: Any) -> None:
        if call.__name__ != "flush":
            await guarded(self, call)

    with patch.object(DirectStagingWriter, "_guarded", early):
        yield


@caught_by("dlcore/log/test_rolling.py::test_a_roll_is_one_metadata_request")
def rolls_leave_their_ledgers_open() -> Iterator[None]:
    """A segment is completed over a ledger that others take for one that is being written."""
    with patch.object(OpenSegment, "_closing_ops", lambda _: ()):
        yield


@caught_by(f"{_RETENTION}::test_a_recovery_for_retention_leaves_the_next_writer_alone")
def retention_fences_who_writes_by_then() -> Iterator[None]:
    """A segment opened after another recovery is taken for a dead writer's, too."""

    async def careless(context: LogContext, at: VersionedHead, **_: bool) -> VersionedHead:
        return await recover_log(context, at)

    with patch.object(expiry, "recover_log", careless):
        yield


@caught_by("dlcore/sync/test_watch.py::test_an_answer_that_fails_loses_nothing")
def watches_forget_what_they_could_not_read() -> Iterator[None]:
    """A look that fails is not made again: a change is never reported."""
    look = NameLooks.look

    async def once(self: NameLooks) -> None:
        before = list(self.due)
        try:
            await look(self)
        except BaseException:
            for bucket in before:
                self.due.pop(bucket, None)
            raise

    with patch.object(NameLooks, "look", once):
        yield


@caught_by(f"{_GUARDS}::test_the_record_alone_keeps_a_version_from_being_committed_twice")
def commit_records_are_written_over() -> Iterator[None]:
    """Both of two drivers commit the same version, one of which stood still."""
    record_ops = Commit._record_ops

    def blind(self: Commit, *about: Any, **more: Any) -> tuple[Op, ...]:
        return tuple(
            Put(each.path, each.value, -1) if isinstance(each, Put) else each
            for each in record_ops(self, *about, **more)
        )

    with patch.object(Commit, "_record_ops", blind):
        yield


@caught_by(f"{_GUARDS}::test_the_registration_alone_counts_what_two_commit_at_once")
def registrations_are_written_over() -> Iterator[None]:
    """One of two commits from one ledger is not counted: it goes while a log needs it."""
    with patch.object(
        StagedNode, "put", lambda self, staged: Put(self.path, encode(staged), version=-1)
    ):
        yield


@caught_by(f"{_GUARDS}::test_a_settled_ledger_alone_keeps_what_was_given_up_out")
def settled_ledgers_take_commits() -> Iterator[None]:
    """A driver that stood still appends a given-up commit after all."""
    count = Commit._count

    def careless(self: Commit, ledger_id: int, node: StagedNode | None) -> Op:
        if node is not None:
            node = replace(node, staged=msgspec.structs.replace(node.staged, settled=False))
        return count(self, ledger_id, node)

    with patch.object(Commit, "_count", careless):
        yield


@caught_by(f"{_REPEATED}::test_an_append_that_is_tried_again_late_is_known")
def late_tries_overlap() -> Iterator[None]:
    """An append that is tried again once its run has gone on ends the version for good."""

    def forgetful(record: CommitRecord | None, **more: Any) -> Decision:
        return decide(record and msgspec.structs.replace(record, earlier=()), **more)

    with patch.object(commits, "decide", forgetful):
        yield


@caught_by("dlcore/log/test_front.py::test_the_segment_with_the_last_stamps_stays_whole")
def the_segment_with_the_last_stamps_loses_its_front() -> Iterator[None]:
    """A new owner does not find what producers have sent, and takes it again."""
    begin = Front.__init__

    def careless(self: Front, head: LogHead, end: SegmentEnd | None, **more: Any) -> None:
        begin(self, msgspec.structs.replace(head, producers_lssn=0), end, **more)

    with patch.object(Front, "__init__", careless):
        yield
