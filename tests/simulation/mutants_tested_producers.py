"""Bugs of identity and time at proxies that named tests catch: producers, incarnations, lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec.structs import replace

from dlcore.backends.flight.planning import get_info
from dlcore.flight import producer_client
from dlcore.flight.producer_client import Identity, ProducerClient
from dlcore.flight.producer_server import Begun, Effect, Event, ProducerServer
from dlcore.flight.tickets import Ticket
from dlcore.log.entries.stamp import KEPT_MS, Claim, Mark, ProducerRow, Stamp
from dlcore.log.proxied import producers as producers_module
from dlcore.log.proxied.producers import Producers
from dlcore.metadata.session_node import SessionNode
from dlcore.proxy.membership import Membership
from dlcore.proxy.reading.serving import ReadPath
from dlcore.proxy.writing.owned_log import OwnedLog
from dlcore.proxy.writing.owner import LogOwner, OwnershipChanges
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator, Sequence

    from dlcore.base.errors import DLError

_SILENT = "dlcore/log/test_silent_producers.py::test_{}".format
_OWNED = "dlcore/proxy/test_owned_log.py::test_{}".format
_MEMBERS = "dlcore/proxy/test_membership.py::test_{}".format
_ONLY_WRITES = _SILENT("only_what_a_producer_writes_keeps_it")
_BACK = _SILENT("a_clock_that_goes_back_makes_no_producer_older")
_LATE = "test_a_late_notice_of_an_earlier_life_of_a_log_ends_no_later_one"


def _used(table: Producers[Any]) -> dict[str, int]:
    return {name: each.used_ms for name, each in table._known.items()}


# When a producer is forgotten


@caught_by(_SILENT("a_producer_that_wrote_is_known_until_its_time"))
def producers_are_forgotten_after_an_hour() -> Iterator[None]:
    """Those with names of their own are kept no longer than those with names made for a writer."""
    with patch.object(producers_module, "PRODUCERS_KEPT_MS", KEPT_MS):
        yield


@caught_by(_BACK)
def a_clock_that_goes_back_makes_producers_older() -> Iterator[None]:
    """The time of the last write counts, though it is before that of an earlier one."""
    accepted = Producers.accepted

    def aging(self: Producers[Any], mark: Mark, count: int, ticket: Any, *, now_ms: int) -> None:
        accepted(self, mark, count, ticket, now_ms=now_ms)
        self._known[mark.claim.name].used_ms = now_ms

    with patch.object(Producers, "accepted", aging):
        yield


@caught_by(_BACK)
def an_entry_of_a_clock_that_went_back_makes_producers_older() -> Iterator[None]:
    """A next owner takes the time of the last entry, whatever those before it say."""
    restore = Producers.restore

    def aging(self: Producers[Any], stamp: Stamp, *, written_ms: int, **where: int) -> None:
        restore(self, stamp, written_ms=written_ms, **where)
        for run in stamp.runs:
            self._known[self._numbers[run.number]].used_ms = written_ms

    with patch.object(Producers, "restore", aging):
        yield


@caught_by(_SILENT("the_last_entry_of_a_producer_counts_and_not_the_newest_list"))
def a_next_owner_takes_times_from_the_list_alone() -> Iterator[None]:
    """A producer that wrote after the newest list counts as silent since then."""
    restore = Producers.restore

    def listed(self: Producers[Any], stamp: Stamp, **more: int) -> None:
        before = {} if stamp.rows is not None else _used(self)
        restore(self, stamp, **more)
        for name, used_ms in before.items():
            self._known[name].used_ms = used_ms

    with patch.object(Producers, "restore", listed):
        yield


@caught_by(_ONLY_WRITES)
def a_next_owner_renews_all_producers() -> Iterator[None]:
    """A producer that is in a list counts as having written then, so no one is ever forgotten."""
    restore = Producers.restore

    def renewing(self: Producers[Any], stamp: Stamp, *, written_ms: int, **where: int) -> None:
        restore(self, stamp, written_ms=written_ms, **where)
        for row in stamp.rows or ():
            self._known[row.name].used_ms = written_ms

    with patch.object(Producers, "restore", renewing):
        yield


@caught_by(_ONLY_WRITES)
def a_list_renews_all_producers() -> Iterator[None]:
    """Each list says that they wrote when it was made."""
    snapshot_of = Producers._snapshot_of

    def renewing(self: Producers[Any], entry_id: int, now_ms: int) -> tuple[ProducerRow, ...]:
        rows = snapshot_of(self, entry_id, now_ms)
        return tuple(replace(row, used_ms=now_ms) for row in rows)

    with patch.object(Producers, "_snapshot_of", renewing):
        yield


@caught_by(_ONLY_WRITES)
def a_producer_that_begins_again_counts_as_having_written() -> Iterator[None]:
    """A program that starts each day and writes nothing is known for ever."""
    grant = Producers.grant

    def renewing(self: Producers[Any], name: str, token: bytes, *, now_ms: int) -> Claim:
        claim = grant(self, name, token, now_ms=now_ms)
        self._known[name].used_ms = now_ms
        return claim

    with patch.object(Producers, "grant", renewing):
        yield


@caught_by(_ONLY_WRITES)
def a_producer_that_opens_a_stream_counts_as_having_written() -> Iterator[None]:
    """The same with each stream."""
    continue_with = Producers.continue_with

    def renewing(self: Producers[Any], claim: Claim, *, now_ms: int) -> int:
        last = continue_with(self, claim, now_ms=now_ms)
        self._known[claim.name].used_ms = now_ms
        return last

    with patch.object(Producers, "continue_with", renewing):
        yield


@caught_by(_SILENT("a_producer_with_records_on_their_way_keeps_its_place"))
def a_producer_with_records_in_flight_is_forgotten_for_another() -> Iterator[None]:
    """The log does not know them then, and records that are sent again are written twice."""

    def make_room(self: Producers[Any], now_ms: int) -> None:
        silent = min(self._known.values(), key=lambda each: each.used_ms)
        assert now_ms >= silent.used_ms
        self._forget(silent)

    with patch.object(Producers, "_make_room", make_room):
        yield


@caught_by(_SILENT("each_extent_begins_with_a_list"))
def only_a_segment_begins_with_a_list() -> Iterator[None]:
    """A further extent of the same owner refers to one that is before the extents of others."""
    stamp = Producers.stamp

    def following(self: Producers[Any], rows: Any, **more: Any) -> bytes:
        return stamp(self, rows, **{**more, "is_first": False})

    with patch.object(Producers, "stamp", following):
        yield


@caught_by(
    "dlcore/backends/test_forgotten.py::test_doubtful_records_are_not_sent_to_a_log_that_forgot"
)
def a_named_writer_in_doubt_believes_any_answer() -> Iterator[None]:
    """It sends again what a log may hold that has forgotten it."""
    is_forgotten = Identity.is_forgotten

    def careless(self: Identity, *about: Any) -> bool:
        with patch.object(producer_client, "KEPT_MS", 2**60):
            return is_forgotten(self, *about)

    with patch.object(Identity, "is_forgotten", careless):
        yield


@caught_by("dlcore/backends/test_writing.py::test_a_writer_that_was_idle_for_long_keeps_its_stream")
def the_silence_of_an_idle_stream_counts() -> Iterator[None]:
    """A writer takes its proxy for dead as soon as it sends something after a pause."""
    send_next = ProducerClient._send_next

    def counting(self: ProducerClient[Any], now: float) -> Any:
        owed_since = self._stream.owed_since
        effects = send_next(self, now)
        self._stream.owed_since = owed_since
        return effects

    with patch.object(ProducerClient, "_send_next", counting):
        yield


# Which incarnation writes, and from where


@caught_by(_OWNED("a_producer_learns_where_it_goes_on_once_that_is_durable"))
def an_incarnation_begins_behind_what_is_not_durable() -> Iterator[None]:
    """Earlier records on their way may be lost, and then there is a gap."""
    begin = OwnedLog.begin

    async def early(self: OwnedLog, producer: str | Claim) -> tuple[Claim, int]:
        if isinstance(producer, Claim):
            return await begin(self, producer)
        claim = self._producers.grant(
            producer, self._clock.new_token().encode(), now_ms=self._clock.now_ms()
        )
        return claim, claim.base - 1

    with patch.object(OwnedLog, "begin", early):
        yield


@caught_by(_OWNED("two_incarnations_are_distinguished_wherever_they_begin"))
def incarnations_of_two_proxies_have_the_same_token() -> Iterator[None]:
    """Those of the same epoch take each other's sequences, and both are acknowledged."""
    grant = Producers.grant

    def same(self: Producers[Any], name: str, token: bytes, *, now_ms: int) -> Claim:
        return grant(self, name, bytes(len(token)), now_ms=now_ms)

    with patch.object(Producers, "grant", same):
        yield


@caught_by(
    "dlcore/proxy/test_producers.py::"
    "test_an_incarnation_that_counts_nothing_goes_on_behind_what_it_wrote"
)
def each_stream_of_an_incarnation_counts_from_its_base() -> Iterator[None]:
    """Messages on a second stream count as sent again: acknowledged and not written."""
    handle = ProducerServer.handle

    def anew(self: ProducerServer, event: Event) -> Sequence[Effect]:
        effects = handle(self, event)
        if isinstance(event, Begun):
            self._numbering.begin(event.claim, event.claim.base - 1)
        return effects

    with patch.object(ProducerServer, "handle", anew):
        yield


# Which life of a log, or of a proxy, is meant


@caught_by(f"dlcore/proxy/test_owners.py::{_LATE}")
def a_late_failure_ends_the_next_life_of_a_log() -> Iterator[None]:
    """A report of a former writer is taken for one of the log's writer by now."""
    lost = LogOwner.lost

    def by_name(self: LogOwner, name: str, log: OwnedLog, error: DLError) -> None:
        lost(self, name, self._logs.get(name, log), error)

    with patch.object(LogOwner, "lost", by_name):
        yield


@caught_by(f"dlcore/proxy/test_owners.py::{_LATE}")
def a_late_wish_ends_the_next_life_of_a_log() -> Iterator[None]:
    """A writer that waited for the lock has it, and the proxy releases it once more."""
    wanted = LogOwner._wanted

    def by_name(self: LogOwner, name: str, log: OwnedLog, who: str) -> None:
        wanted(self, name, self._logs.get(name, log), who)

    with patch.object(LogOwner, "_wanted", by_name):
        yield


@caught_by(f"dlcore/proxy/test_owners.py::{_LATE}")
def the_end_of_a_change_hides_the_next_one() -> Iterator[None]:
    """A client that then asks for the log finds nothing to wait for."""

    def by_name(self: OwnershipChanges, name: str, _: asyncio.Future[None]) -> None:
        self._running.pop(name, None)

    with patch.object(OwnershipChanges, "ended", by_name):
        yield


@caught_by(
    "dlcore/proxy/test_known_logs.py::test_a_planned_part_is_of_the_log_that_it_was_planned_for"
)
def a_planned_part_is_of_whatever_has_the_name() -> Iterator[None]:
    """Its ticket does not say which log is meant."""
    endpoint = ReadPath._endpoint

    def nameless(self: ReadPath, *arguments: Any) -> Any:
        made = endpoint(self, *arguments)
        ticket = replace(Ticket.decode(made.ticket.ticket), log_id=None)
        made.ticket.ticket = ticket.encode()
        return made

    with patch.object(ReadPath, "_endpoint", nameless):
        yield


@caught_by("dlcore/backends/test_made_anew.py::test_writers_write_nothing_to_another_log")
def a_commit_is_seen_in_another_log() -> Iterator[None]:
    """A writer waits until its records are seen under the name of its log."""

    async def by_name(calls: Any, log: str, log_id: str | None = None) -> Any:
        assert log_id is not None
        return await get_info(calls, log)

    with patch("dlcore.backends.flight.writing.get_info", by_name):
        yield


@caught_by(_MEMBERS("a_proxy_that_restarts_is_seen_as_a_change"))
def a_proxy_that_restarts_was_never_away() -> Iterator[None]:
    """Only who is live counts, and not how often that has changed."""
    look = Membership._look

    async def uncounted(self: Membership) -> None:
        before = self.changes
        await look(self)
        self.changes = before

    with patch.object(Membership, "_look", uncounted):
        yield


@caught_by(_MEMBERS("whether_a_proxy_is_gone_is_looked_at_each_time"))
def a_proxy_that_was_gone_is_gone_for_good() -> Iterator[None]:
    """The first look is the last one."""
    is_gone, seen = Membership.is_gone, dict[str, bool]()

    async def kept(self: Membership, location: str) -> bool:
        if location not in seen:
            seen[location] = await is_gone(self, location)
        return seen[location]

    with patch.object(Membership, "is_gone", kept):
        yield


@caught_by(_MEMBERS("a_proxy_takes_over_the_node_that_an_earlier_process_left"))
def a_proxy_keeps_the_node_of_an_earlier_process() -> Iterator[None]:
    """It vanishes with the session of that one, and no one knows the proxy that lives."""

    async def leave(_: SessionNode, __: bytes) -> None:
        pass

    with patch.object(SessionNode, "_replace", leave):
        yield


@caught_by(_MEMBERS("a_call_is_known_by_the_secret_of_the_process_that_lives"))
def a_secret_that_was_read_once_proves_for_ever() -> Iterator[None]:
    """Also where its proxy has left, or another process lives at its location."""
    proves, proven = Membership.proves, set[tuple[str, str]]()

    async def kept(self: Membership, location: str, secret: str) -> bool:
        if (location, secret) in proven:
            return True
        is_proven = await proves(self, location, secret)
        if is_proven:
            proven.add((location, secret))
        return is_proven

    with patch.object(Membership, "proves", kept):
        yield


@caught_by(_MEMBERS("a_call_is_known_by_the_secret_of_the_process_that_lives"))
def any_secret_proves_a_live_proxy() -> Iterator[None]:
    """Its location is enough, which clients know."""

    async def careless(self: Membership, location: str, _: str) -> bool:
        return location in self.live

    with patch.object(Membership, "proves", careless):
        yield
