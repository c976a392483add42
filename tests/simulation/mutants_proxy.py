"""Bugs of proxies, put back on purpose: acknowledgements, ownership, rings, readers, bounds."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from dlcore.base.ids import DLSN
from dlcore.flight.producer_server import (
    Ack,
    BatchDurable,
    BatchFailed,
    Effect,
    Event,
    ProducerServer,
    Signal,
    StreamAcks,
)
from dlcore.log.proxied.producers import Producers
from dlcore.log.writing.writer import DirectWriter
from dlcore.proxy.reading.following import FollowedLogs
from dlcore.proxy.reading.ring import Fetched, Ring, RingBudget, RingReader, Run
from dlcore.proxy.reading.rows import RowView
from dlcore.proxy.writing.owned_log import OwnedLog
from dlcore.proxy.writing.owner import LogOwner
from dlcore.proxy.writing.ownership import Decision, Elsewhere, Ownership, Verdict
from dlcore.proxy.writing.staging import Stagings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import pyarrow as pa

    from dlcore.backends.direct.log import DirectLog
    from dlcore.flight.put import StagingTarget
    from dlcore.log.entries.stamp import Mark
    from dlcore.log.reading.entry_rows import StoredRows
    from dlcore.log.staging.writer import DirectStagingWriter
    from dlcore.proxy.reading.following import FollowedLog
    from dlcore.proxy.writing.owned_log import Accepted

_SOMEWHERE = DLSN(2**62, 0, 0)


# Acknowledgements


@contextlib.contextmanager
def what_was_accepted_is_acknowledged() -> Iterator[None]:
    """A client gets the acknowledgement of its records before they are durable."""

    def early(self: StreamAcks) -> Ack | None:
        durable = self._durable or Ack(0, DLSN.INITIAL)
        records = durable.records + self._pending_records
        if records == self._sent:
            return None
        self._sent = records
        return durable if records == durable.records else Ack(records, _SOMEWHERE)

    with patch.object(StreamAcks, "next_ack", early):
        yield


@contextlib.contextmanager
def more_is_acknowledged_than_was_sent() -> Iterator[None]:
    """Each acknowledgement counts the records that it adds once more."""
    durable = StreamAcks.durable

    def twice(self: StreamAcks, dlsn: DLSN) -> None:
        records, *_ = self._pending[0]
        durable(self, dlsn)
        assert self._durable is not None
        self._durable = Ack(self._durable.records + records, dlsn)

    with patch.object(StreamAcks, "durable", twice):
        yield


@contextlib.contextmanager
def zombies_go_on_to_acknowledge() -> Iterator[None]:
    """An owner that lost its session goes on, and its failed records count as durable."""

    handle = ProducerServer.handle

    def believe(self: ProducerServer, event: Event) -> Sequence[Effect]:
        failed = isinstance(event, BatchFailed)
        return handle(self, BatchDurable(_SOMEWHERE) if failed else event)

    with (
        patch.object(ProducerServer, "handle", believe),
        patch.object(LogOwner, "_session_changed", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def streams_end_well_without_what_they_dropped() -> Iterator[None]:
    """A client that sent more when the log was released does not learn that it was dropped."""
    handle = ProducerServer.handle

    def keep_silent(self: ProducerServer, event: Event) -> Sequence[Effect]:
        self._reasons.has_dropped &= event is not Signal.ALL_SENT
        return handle(self, event)

    with patch.object(ProducerServer, "handle", keep_silent):
        yield


# Producers


@contextlib.contextmanager
def tables_of_producers_are_not_rebuilt() -> Iterator[None]:
    """A new owner knows no one."""
    with patch.object(Producers, "restore", lambda *_, **__: None):
        yield


@contextlib.contextmanager
def sequences_are_lost_at_the_end_of_a_segment() -> Iterator[None]:
    """A new segment says nothing of those who wrote to the ones before."""
    snapshot_of = Producers._snapshot_of

    def empty(self: Producers[Any], entry_id: int, now_ms: int) -> tuple[()]:
        snapshot_of(self, entry_id, now_ms)
        return ()

    with patch.object(Producers, "_snapshot_of", empty):
        yield


# Ownership


@contextlib.contextmanager
def proxies_send_clients_to_themselves() -> Iterator[None]:
    """The one that should own a log names itself instead of acquiring it."""
    ask = Ownership.ask

    def sent_elsewhere(self: Ownership, log: str, live: Collection[str]) -> Decision:
        decision = ask(self, log, live)
        return Elsewhere(self._location) if decision is Verdict.ACQUIRE else decision

    with patch.object(Ownership, "ask", sent_elsewhere):
        yield


# Appends that are whole


@contextlib.contextmanager
def conditions_are_not_looked_at() -> Iterator[None]:
    """A conditional record is written behind any last record."""
    accept_if = OwnedLog.accept_if

    async def anywhere(
        self: OwnedLog, batch: pa.RecordBatch, _: DLSN | None, mark: Mark | None = None
    ) -> Accepted:
        return await accept_if(self, batch, await self.writer.find_last(), mark)

    with patch.object(OwnedLog, "accept_if", anywhere):
        yield


@contextlib.contextmanager
def batches_with_a_condition_are_parted() -> Iterator[None]:
    """An all-or-none batch goes into as many entries as other batches do."""
    write_fitted = DirectWriter.write_fitted

    def parted(self: DirectWriter, rows: Any, *, mark: Mark | None = None, **_: object) -> Any:
        return write_fitted(self, rows, mark=mark)

    with patch.object(DirectWriter, "write_fitted", parted):
        yield


@contextlib.contextmanager
def conditions_are_of_what_the_owner_wrote() -> Iterator[None]:
    """The last record is its own last one, whichever client appended meanwhile."""

    async def find_last(self: DirectWriter) -> DLSN | None:
        await self.flush()
        return self.last_dlsn

    with patch.object(DirectWriter, "find_last", find_last):
        yield


@contextlib.contextmanager
def what_broken_streams_sent_stays_staged() -> Iterator[None]:
    """The next stream of the identity stages it, too."""

    async def give_up(self: Stagings, target: StagingTarget, writer: DirectStagingWriter) -> None:
        self._put_back(target, writer)

    with patch.object(Stagings, "_give_up", give_up):
        yield


# Bounds


@contextlib.contextmanager
def windows_of_streams_are_not_bounded() -> Iterator[None]:
    """A stream takes whatever comes."""
    with patch.object(StreamAcks, "has_room", new=True):
        yield


@contextlib.contextmanager
def rings_evict_nothing() -> Iterator[None]:
    """The memory of a proxy for its readers only grows."""

    def keep(self: RingBudget, ring: Ring, index: int, size_bytes: int) -> None:
        self._kept[ring, index] = 0
        self.size_bytes += size_bytes

    with patch.object(RingBudget, "_keep", keep):
        yield


@contextlib.contextmanager
def logs_are_followed_for_ever() -> Iterator[None]:
    """A log without readers is still followed."""

    @contextlib.contextmanager
    def follow(self: FollowedLogs, log: DirectLog, end: DLSN) -> Iterator[FollowedLog]:
        with kept(self, log, end) as followed:
            followed.users += 1
            yield followed

    kept = FollowedLogs.follow
    with patch.object(FollowedLogs, "follow", follow):
        yield


# Readers


@contextlib.contextmanager
def eviction_hands_out_another_run() -> Iterator[None]:
    """A reader whose next run has left the ring gets the oldest one that is left."""
    peek = RingReader.peek

    def any_run(self: RingReader) -> tuple[Run, int] | None:
        if self._index < self._ring._first:
            self._index = self._ring._first
            self._ring._enter(self._index)
        return peek(self)

    with (
        patch.object(RingReader, "peek", any_run),
        patch.object(RingReader, "is_behind", new=False),
    ):
        yield


@contextlib.contextmanager
def readers_join_at_the_end_of_a_ring() -> Iterator[None]:
    """Entries that a ring holds already are left out."""
    join = Ring.join

    def late(self: Ring, position: DLSN) -> RingReader | None:
        return join(self, max(position, self.end)) if position >= self.begin else None

    with patch.object(Ring, "join", late):
        yield


@contextlib.contextmanager
def whole_runs_are_sent_to_who_wants_a_part() -> Iterator[None]:
    """A reader that joins within a run gets earlier records, too."""
    with patch.object(Run, "rows_before", lambda *_: 0):
        yield


@contextlib.contextmanager
def ranges_hold_what_is_behind_their_end() -> Iterator[None]:
    """The entry at which a range ends is sent as a whole."""
    part = Fetched.part

    def whole(self: Fetched, view: RowView, end: DLSN) -> bytes | None:
        return part(self, view, max(end, self.end))

    with patch.object(Fetched, "part", whole):
        yield


@contextlib.contextmanager
def readers_get_a_position_beyond_what_they_have() -> Iterator[None]:
    """The position beside a batch is beyond what the reader has."""
    message = RowView.message

    def beyond(self: RowView, entries: Sequence[StoredRows], following: DLSN) -> bytes:
        return message(self, entries, DLSN(following.lssn, following.entry_id + 1, 0))

    with patch.object(RowView, "message", beyond):
        yield


@contextlib.contextmanager
def rings_join_runs_out_of_order() -> Iterator[None]:
    """Batches of entries that are sent together change places."""
    of = Fetched.of.__func__  # type: ignore[attr-defined]

    def turned(cls: type[Fetched], *taken: Any) -> Fetched:
        found: Fetched = of(cls, *taken)
        return replace(found, rows=list(reversed(found.rows)))

    with patch.object(Fetched, "of", classmethod(turned)):
        yield


MUTANTS = (
    batches_with_a_condition_are_parted,
    conditions_are_not_looked_at,
    conditions_are_of_what_the_owner_wrote,
    eviction_hands_out_another_run,
    logs_are_followed_for_ever,
    more_is_acknowledged_than_was_sent,
    proxies_send_clients_to_themselves,
    ranges_hold_what_is_behind_their_end,
    readers_get_a_position_beyond_what_they_have,
    readers_join_at_the_end_of_a_ring,
    rings_evict_nothing,
    rings_join_runs_out_of_order,
    sequences_are_lost_at_the_end_of_a_segment,
    streams_end_well_without_what_they_dropped,
    tables_of_producers_are_not_rebuilt,
    what_broken_streams_sent_stays_staged,
    what_was_accepted_is_acknowledged,
    whole_runs_are_sent_to_who_wants_a_part,
    windows_of_streams_are_not_bounded,
    zombies_go_on_to_acknowledge,
)
