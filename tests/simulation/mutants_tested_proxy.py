"""Bugs of the proxy's write path that named tests catch: acknowledgements, ownership, bounds."""

from __future__ import annotations

from contextlib import aclosing, nullcontext, suppress
from dataclasses import replace
from functools import partialmethod
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from dlcore.base.errors import AlreadyClosedError, LedgerReadError, WriteError
from dlcore.base.ids import DLSN
from dlcore.flight import put as put_messages
from dlcore.flight.producer_server import (
    Ack,
    BatchDurable,
    BatchFailed,
    Effect,
    Event,
    ProducerServer,
    StreamAcks,
)
from dlcore.ledger.reading.reader import LedgerReader
from dlcore.log.entries.batches import byte_log_batch
from dlcore.log.metadata.values import VersionedHead
from dlcore.log.proxied import extension
from dlcore.log.staging.commit import HeldLog
from dlcore.log.writing.append import KnownLog, LogAppender, StartSegment
from dlcore.log.writing.transmit import OwnExtent
from dlcore.log.writing.writer import DirectWriter, Pump
from dlcore.proxy.reading.kept import KeptMessages, Key
from dlcore.proxy.writing.budget import ByteBudget, ReceivedBytes
from dlcore.proxy.writing.owned_log import Accepted, OwnedLog
from dlcore.proxy.writing.owner import LogOwner, elsewhere, not_here
from dlcore.proxy.writing.ownership import Decision, Elsewhere, Ownership, Verdict
from dlcore.proxy.writing.rates import StreamRates, TokenBucket
from tests.simulation.mutants_proxy import more_is_acknowledged_than_was_sent
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Iterator, Sequence, Sized

    import pyarrow as pa

    from dlcore.ledger.reading.follow import FollowStep
    from dlcore.log.context import LogContext
    from dlcore.log.entries.stamp import Claim
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.metadata.values import LogHead

_ROOM = "dlcore/proxy"
_ACKS = "dlcore/flight/test_acks.py"
_MERGED = "test_appends_beside_a_proxy_are_merged_with_what_it_writes"
_LET_GO = "test_an_append_on_a_condition_does_not_lose_a_log_that_is_let_go_of"
_RELEASED = "test_accepted_records_are_acknowledged_before_their_log_is_released"
_BUSY = "test_records_of_a_busy_proxy_and_of_appends_are_there_once_and_in_order"


@caught_by(f"{_ACKS}::test_nothing_is_acknowledged_before_it_is_durable")
def an_acknowledgement_is_sent_before_it_is_durable() -> Iterator[None]:
    """Accepted records count as durable."""
    accepted = StreamAcks.accepted

    def early(self: StreamAcks, records: int, size_bytes: int) -> None:
        accepted(self, records, size_bytes)
        self._durable = Ack(self._pending_records, DLSN.INITIAL)

    with patch.object(StreamAcks, "accepted", early):
        yield


@caught_by(f"{_ACKS}::test_any_order_of_events_keeps_the_books")
def an_acknowledgement_is_beyond_what_was_sent() -> Iterator[None]:
    """An acknowledgement counts the records that it adds once more."""
    with more_is_acknowledged_than_was_sent():
        yield


@caught_by(f"{_ACKS}::test_the_window_is_of_records_and_of_bytes")
def the_window_of_a_stream_is_not_bounded() -> Iterator[None]:
    """A stream takes whatever comes."""
    with patch.object(StreamAcks, "has_room", new=True):
        yield


@caught_by(f"{_ROOM}/test_budget.py::test_logs_that_stand_still_leave_room_for_others")
def a_log_that_stands_still_holds_all_memory() -> Iterator[None]:
    """Streams that wait for a quorum take the memory that other logs need."""
    with patch.object(ByteBudget, "_may", lambda *_: True):
        yield


@caught_by(f"{_ROOM}/test_budget.py::test_a_log_and_a_principal_hold_no_more_than_they_may")
def a_principal_holds_what_it_wants() -> Iterator[None]:
    """Its limit is forgotten."""
    with patch.object(ByteBudget, "is_due_to_principal", lambda *_: False):
        yield


@caught_by(f"{_ROOM}/test_rates.py::test_a_stream_to_several_logs_has_one_rate_of_its_own")
def a_stream_has_a_rate_for_each_of_its_logs() -> Iterator[None]:
    """Its staged records for one log count for no other."""

    def anew(self: StreamRates, log: str) -> StreamRates:
        return self._rates.join(log, self._principal)

    with patch.object(StreamRates, "to", anew):
        yield


@caught_by(f"{_ROOM}/test_stalls.py::test_more_than_may_wait_is_refused")
def whatever_waits_for_a_log_is_held() -> Iterator[None]:
    """Messages that are read, and find no room, are as many as there are streams."""
    with patch.object(ReceivedBytes, "hold", lambda *_: nullcontext()):
        yield


@caught_by(f"{_ROOM}/test_put.py::test_a_fenced_proxy_acknowledges_nothing_more")
def a_zombie_proxy_goes_on_to_acknowledge() -> Iterator[None]:
    """A batch that failed counts as durable."""

    handle = ProducerServer.handle

    def believe(self: ProducerServer, event: Event) -> Sequence[Effect]:
        failed = isinstance(event, BatchFailed)
        return handle(self, BatchDurable(DLSN.INITIAL) if failed else event)

    with patch.object(ProducerServer, "handle", believe):
        yield


@caught_by(f"{_ROOM}/test_producers.py::test_a_fenced_proxy_judges_no_condition")
def a_zombie_proxy_judges_conditions() -> Iterator[None]:
    """It does not look whether the log is its own before it tells of the last record."""

    async def believe(_: Pump) -> None:
        pass

    with patch.object(Pump, "verify", believe):
        yield


@caught_by(f"{_ROOM}/test_owned_log.py::test_a_proxy_that_has_lost_the_log_judges_nothing")
def a_zombie_proxy_judges_producers() -> Iterator[None]:
    """It tells of a gap, or that another incarnation writes, by what it knew when it wrote last."""
    unlooked = {name: getattr(OwnedLog, name).__wrapped__ for name in ("accept", "begin")}
    with patch.multiple(OwnedLog, **unlooked):
        yield


@caught_by(f"{_ROOM}/test_owned_log.py::test_a_proxy_that_has_lost_the_log_judges_nothing")
def a_zombie_without_a_segment_takes_the_log_for_its_own() -> Iterator[None]:
    """It does not mind that another writer has one open."""
    read = KnownLog.read

    def unmoved(self: KnownLog, at: VersionedHead) -> Any:
        is_idle = self.segment is None and at.head.open_extent is not None
        return None if is_idle else read(self, at)

    with patch.object(KnownLog, "read", unmoved):
        yield


@caught_by(f"{_ROOM}/test_ownership.py::test_a_client_is_never_sent_to_whom_it_asks")
def a_proxy_sends_clients_to_itself() -> Iterator[None]:
    """The one that should own a log names itself instead of acquiring it."""
    ask = Ownership.ask

    def sent_elsewhere(self: Ownership, log: str, live: Collection[str]) -> Decision:
        decision = ask(self, log, live)
        return Elsewhere(self._location) if decision is Verdict.ACQUIRE else decision

    with patch.object(Ownership, "ask", sent_elsewhere):
        yield


@caught_by(f"{_ROOM}/test_draining.py::{_RELEASED}")
def a_log_is_let_go_of_without_what_was_accepted() -> Iterator[None]:
    """Its writer is aborted, where it should write all that it has."""

    async def close(self: LogOwner, name: str) -> None:
        successor = self._ownership.successor(name, self._membership.live)
        self._logs[name].end(not_here(name) if successor is None else elsewhere(name, successor))
        await self._abort(name)

    with patch.object(LogOwner, "_close", close):
        yield


@caught_by(f"{_ROOM}/test_put.py::test_transaction_ids_are_the_time_and_never_fall")
def a_proxy_gives_its_clock_as_transaction_id() -> Iterator[None]:
    """It does not look at those that the log has."""

    async def fitted(self: DirectWriter, batch: pa.RecordBatch) -> Any:
        if "txid" in batch.schema.names:
            batch = batch.rename_columns(["value", "txid"])
        return byte_log_batch(batch, assigned_txid=self._context.clock.now_ms())

    with patch.object(DirectWriter, "fitted_latest", fitted):
        yield


@caught_by(f"{_ROOM}/test_budget.py::test_a_request_that_finds_it_full_waits_in_turn")
def the_memory_of_all_streams_is_not_bounded() -> Iterator[None]:
    """Everything fits into it."""
    with patch.object(ByteBudget, "_fits", partialmethod(lambda self, size_bytes: True)):
        yield


@caught_by("dlcore/flight/test_put_messages.py::test_compressed_batches_are_refused")
def a_proxy_inflates_what_it_is_sent() -> Iterator[None]:
    """Four MiB become as much as a client wishes."""
    with patch.object(put_messages, "_is_compressed", lambda header: False):
        yield


@caught_by(f"dlcore/log/test_turns.py::{_BUSY}")
def an_owner_goes_on_as_if_no_one_had_appended() -> Iterator[None]:
    """Its next segment starts from its old head, which skips the extents behind it."""
    step_back = LogAppender._step_back

    def blind(self: LogAppender[Any], at: VersionedHead) -> Any:
        return step_back(self, VersionedHead(log=at.log, head=self.log.at.head, version=at.version))

    with patch.object(LogAppender, "_step_back", blind):
        yield


@caught_by("dlcore/log/test_turns.py::test_a_turn_is_not_taken_while_the_owner_writes")
def an_append_enters_beside_an_open_segment() -> Iterator[None]:
    """It believes the lock's node, and does not look at the head."""

    def gives_turn(self: HeldLog, _: VersionedHead) -> bool:
        return self.holder.turn == "given"

    with patch.object(HeldLog, "gives_turn_at", gives_turn):
        yield


@caught_by("dlcore/log/test_turns.py::test_an_append_enters_a_log_that_a_proxy_is_writing")
def an_owner_goes_on_below_the_transaction_ids_of_an_append() -> Iterator[None]:
    """It remembers only those that it gave itself."""
    step_back = LogAppender._step_back

    def forgetful(self: LogAppender[Any], at: VersionedHead) -> Any:
        before = self.transmitter.last_txid
        effects = step_back(self, at)
        self.transmitter.last_txid = before
        return effects

    with patch.object(LogAppender, "_step_back", forgetful):
        yield


@caught_by(f"dlcore/log/test_turns.py::{_MERGED}")
def each_turn_of_an_owner_begins_a_segment() -> Iterator[None]:
    """It does not go on in the one that it left, so nothing is merged."""
    start = KnownLog.start

    def anew(self: KnownLog, *about: Any) -> Any:
        step = start(self, *about)
        return replace(step, limits=None) if isinstance(step, StartSegment) else step

    with patch.object(KnownLog, "start", anew):
        yield


@caught_by(f"dlcore/log/test_turns.py::{_MERGED}")
def an_owner_counts_its_entries_from_its_own_extent() -> Iterator[None]:
    """Those of an append before it in the segment have the positions that it tells of its own."""
    opened = OwnExtent.opened

    def at_zero(ledger_id: int, head: LogHead) -> OwnExtent:
        extent = opened(ledger_id, head)
        extent.first_entry_id = extent.acknowledged = 0
        return extent

    with patch.object(OwnExtent, "opened", at_zero):
        yield


@caught_by(f"dlcore/log/test_turns.py::{_MERGED}")
def producers_are_sought_at_the_end_of_their_segment() -> Iterator[None]:
    """Where the entries of an append may be, which tell of none."""
    stamps_of = extension._stamps_of

    async def at_the_end(context: LogContext, segment: LogSegment, _: int) -> Any:
        return await stamps_of(context, segment, segment.closed_entry_count - 1)

    with patch.object(extension, "_stamps_of", at_the_end):
        yield


@caught_by(f"{_ROOM}/test_owned_log.py::test_a_proxy_that_has_lost_the_log_begins_no_incarnation")
def a_zombie_proxy_begins_producers() -> Iterator[None]:
    """It tells who begins there of the last record that it knew of when it wrote last."""
    begin = OwnedLog.begin

    async def believe(_: Pump) -> None:
        pass

    async def unlooked(self: OwnedLog, producer: str | Claim) -> tuple[Claim, int]:
        with patch.object(Pump, "verify", believe):
            return await begin(self, producer)

    with patch.object(OwnedLog, "begin", unlooked):
        yield


@caught_by(f"{_ROOM}/test_draining.py::{_LET_GO}")
def a_condition_that_finds_the_writer_closed_loses_the_log() -> Iterator[None]:
    """A log that is released in good order counts as lost, for all its streams."""
    accept_if = OwnedLog.accept_if

    async def losing(self: OwnedLog, *args: Any) -> Accepted:
        try:
            return await accept_if(self, *args)
        except AlreadyClosedError as error:
            raise WriteError(str(error)) from error

    with patch.object(OwnedLog, "accept_if", losing):
        yield


@caught_by(f"{_ROOM}/test_rates.py::test_passed_bytes_keep_to_the_rate")
def a_batch_that_waited_for_its_rate_owes_nothing() -> Iterator[None]:
    """Tokens taken beyond the rate count as paid."""
    take = TokenBucket.take

    def generous(self: TokenBucket, amount: float) -> None:
        take(self, amount)
        self._level = max(0.0, self._level)

    with patch.object(TokenBucket, "take", generous):
        yield


@caught_by(f"{_ROOM}/test_unconfirmed.py::test_an_entry_that_was_never_confirmed_is_never_sent")
def rings_hold_what_is_not_confirmed() -> Iterator[None]:
    """Readers of a followed log get entries that bookies hold and that no one reported."""
    follow = LedgerReader.follow

    async def eager(self: LedgerReader, first: int, **options: Any) -> AsyncGenerator[FollowStep]:
        async with aclosing(follow(self, first, **options)) as steps:
            async for step in steps:
                yield step
                first += len(step.frames)
                with suppress(LedgerReadError):
                    async for frames in self.read(first, first):
                        yield replace(step, frames=frames)
                        first += 1

    with patch.object(LedgerReader, "follow", eager):
        yield


@caught_by("dlcore/proxy/test_kept.py::test_a_redacted_row_is_not_sent_again")
def kept_messages_outlive_a_redaction() -> Iterator[None]:
    """A reader that begins after a redaction gets what was sent before it."""
    find, keep = KeptMessages.find, KeptMessages.keep

    def unwritten(key: Key) -> Key:
        series, position = key
        return replace(series, rewrites=0), position

    def found(self: KeptMessages, key: Key, *rest: Any) -> tuple[Sized, DLSN] | None:
        return find(self, unwritten(key), *rest)

    def kept(self: KeptMessages, key: Key, *rest: Any) -> None:
        keep(self, unwritten(key), *rest)

    with patch.multiple(KeptMessages, find=found, keep=kept):
        yield


@caught_by("dlcore/proxy/test_kept.py::test_the_next_reader_asks_no_bookie")
def a_kept_message_goes_beyond_what_is_wanted() -> Iterator[None]:
    """A reader gets the whole of a kept message, also of one that it wants a part of."""
    find = KeptMessages.find

    def found(self: KeptMessages, key: Key, _: DLSN, now_s: float) -> tuple[Sized, DLSN] | None:
        return find(self, key, DLSN(2**63 - 1, 0, 0), now_s)

    with patch.object(KeptMessages, "find", found):
        yield
