"""Requests of readers: lists of logs, facts about a range of a log, and its records."""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from dlcore.backends.direct.log import DirectLog
from dlcore.base.clock import steady_s
from dlcore.base.config import MIB
from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN
from dlcore.base.proto import flight_pb2 as pb
from dlcore.base.records import NotLessThan, RecordField
from dlcore.base.server_process import give_back_what_is_free
from dlcore.flight.replies import LogInfo, PartInfo
from dlcore.flight.sending import schema_message
from dlcore.flight.tickets import Latest, Place, Ticket
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.snapshot import Finder
from dlcore.proxy.reading.delivery import Deliveries, Reading
from dlcore.proxy.reading.following import FollowedLogs
from dlcore.proxy.reading.outgoing import Outgoing
from dlcore.proxy.reading.parts import Part, parts_of
from dlcore.proxy.reading.ring import RingBudget
from dlcore.proxy.reading.rows import RowView

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    import pyarrow as pa

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.flight.tickets import Wanted
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.membership import Membership
    from dlcore.proxy.reading.outgoing import Send

LOOK_S = 0.5
"""Interval of returning freed memory while memory is short."""
CALM_S = 30.0
"""Time after a use of memory at which all free memory is returned, with buffers kept for reuse."""


class Relief:
    """Returns the memory of one proxy to the system, after sends to readers have used much of it.

    The C library keeps freed memory for later use, and by itself returns only the ends of its
    heaps.  After many clients that received nothing, it would keep hundreds of megabytes.

    Args:
        forget: frees buffers that are kept for reuse and not in use.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._look: asyncio.TimerHandle | None = None
        self._calm: asyncio.TimerHandle | None = None
        self._was_short = False

    def used(self) -> None:
        """Note that memory is used now."""
        if self._calm is None:
            self._calm = asyncio.get_running_loop().call_later(CALM_S, self._give_all_back)

    def needed(self) -> None:
        """Note that memory is short now."""
        self.used()
        self._was_short = True
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._give_back)

    def _give_back(self) -> None:
        self._look = None
        _give_back_aside()

    def _give_all_back(self) -> None:
        self._calm = None
        if self._was_short:  # else the pause of a collection is not worth it
            gc.collect()
        self._was_short = False
        self._forget()
        _give_back_aside()

    def close(self) -> None:
        """Stop returning memory."""
        for timer in (self._look, self._calm):
            if timer is not None:
                timer.cancel()
        self._look = self._calm = None


def _give_back_aside() -> None:
    # In a thread, since it takes up to some ten milliseconds.  No caller waits for its end.
    name = "giving memory back"
    threading.Thread(target=give_back_what_is_free, name=name, daemon=True).start()


READ_AHEAD_BYTES = 3 * MIB
"""Read-ahead of each reader of `dlcore` that the proxy opens."""
_ENDLESS = DLSN(2**63 - 1, 0, 0)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A ticket, and its meaning now."""

    ticket: Ticket
    snapshot: LogSnapshot
    reading: Reading


class ReadPath:
    """The read half of one proxy."""

    def __init__(
        self, namespace: DirectNamespace, membership: Membership, config: ProxyConfig
    ) -> None:
        self._namespace = namespace
        self._membership = membership
        self._log_config = replace(namespace.log_context.config, read_ahead_bytes=READ_AHEAD_BYTES)
        self.followed = FollowedLogs(RingBudget(config.ring_bytes_max))
        self._relief = Relief(self._forget)
        self.outgoing = Outgoing(
            config.sending_bytes_max, on_use=self._relief.used, on_full=self._relief.needed
        )
        self.deliveries = Deliveries(
            self.followed,
            self.outgoing,
            self.followed.budget.older,
            catching_up_max=config.catching_up_max,
        )

    def configure(self, config: ProxyConfig) -> None:
        """Use other budgets of memory."""
        self.followed.budget.resize(config.ring_bytes_max)
        self.outgoing.resize(config.sending_bytes_max)
        self.deliveries.resize(config.catching_up_max)

    def _forget(self) -> None:
        """Free what is kept for later: buffers, and older messages whose time is over."""
        older = self.followed.budget.older
        older.expire(steady_s())
        if older:
            self._relief.used()  # the time of the others will be over as well
        self._namespace.log_context.ledgers.forget_free_memory()

    async def aclose(self) -> None:
        """Stop following all logs."""
        self._relief.close()
        await self.followed.aclose()

    async def do_get(self, ticket: Ticket, send: Send) -> None:
        """Send the records that a ticket names.

        Raises:
            LogNotFoundError: there is no log of this name, or none of the ticket's id.
            SchemaMismatchError: the log has no such column.
            AlreadyTruncatedError: the ticket's position was truncated away.
            ReaderStalledError: the client received nothing for long, and others needed the memory.
        """
        await self.deliveries.deliver(await self._begin(ticket, send), send)

    async def _begin(self, ticket: Ticket, send: Send) -> Reading:
        # A function of its own, so that the snapshot is freed before the log is followed for long.
        asked = await self._asked(ticket)
        reading = asked.reading
        await send(schema_message(reading.view.schema))  # clients wait for it, even without rows
        if reading.follow:
            return reading
        return replace(reading, end=lowest(asked.snapshot, reading.end))

    async def get_flight_info(
        self, descriptor: pb.FlightDescriptor, ticket: Ticket
    ) -> pb.FlightInfo:
        """Return facts about a range, and the tickets of its parts.  Raises: as `do_get`."""
        asked = await self._asked(ticket)
        snapshot, reading = asked.snapshot, asked.reading
        start, end = reading.start, min(reading.end, snapshot.end)
        parts = parts_of(snapshot, start, end)
        if reading.follow and not (parts and parts[-1].is_tail):
            at = parts[-1].end if parts else start
            parts.append(Part(start=at, end=at, record_count=0, size_bytes=0, is_tail=True))
        size_bytes = sum(each.size_bytes for each in parts)
        async with self._membership.outages.bounded():
            known = await self._metadata(snapshot, start, end, size_bytes)
        return pb.FlightInfo(
            schema=reading.view.schema.serialize().to_pybytes(),
            flight_descriptor=descriptor,
            endpoint=[self._endpoint(asked, part, known.owner) for part in parts],
            total_records=known.records,
            total_bytes=known.size_bytes,
            ordered=True,
            app_metadata=msgspec.json.encode(known),
        )

    async def get_schema(self, ticket: Ticket) -> pb.SchemaResult:
        """Return the columns of a log's rows.  Raises: as `do_get`."""
        asked = await self._asked(ticket)
        return pb.SchemaResult(schema=asked.reading.view.schema.serialize().to_pybytes())

    async def list_flights(self, criteria: pb.Criteria) -> AsyncIterator[tuple[str, pb.FlightInfo]]:
        """Yield logs by name, those that begin with the expression of the criteria, in no order.

        Raises: ConfigurationError: the expression is not UTF-8; MetadataError.
        """
        try:
            prefix = criteria.expression.decode()
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"criteria {criteria.expression!r}: expected a prefix of names in UTF-8"
            ) from error
        listing = aiter(self._namespace.list_logs(prefix or None))
        while (schemas := await self._next_schemas(listing)) is not None:
            for name, schema in schemas:
                yield name, _listed(name, schema)

    async def _next_schemas(
        self, listing: AsyncIterator[list[str]]
    ) -> list[tuple[str, pa.Schema | None]] | None:
        """Return the next logs with their schemas; None at the end."""
        async with self._membership.outages.bounded():
            names = await anext(listing, None)
            if names is None:
                return None
            schemas = await self._namespace.get_schemas(names)
            return [(name, schemas[name]) for name in names if name in schemas]

    async def _asked(self, ticket: Ticket) -> _Asked:
        async with self._membership.outages.bounded():
            return await self._found(ticket)

    async def _found(self, ticket: Ticket) -> _Asked:
        log, snapshot = await self.opened(ticket.log, ticket.log_id)
        view = RowView(log.name, snapshot.columns, ticket.columns)
        start, awaited = snapshot.first, None
        if ticket.start is not None:
            wanted = ticket.start.wanted
            start = await self._position_of(snapshot, wanted)
            # In a ticket by hand the initial position means the first readable record.  In a part
            # of a plan it is exact: its records were readable, and must not be skipped silently.
            is_part = ticket.log_id is not None and not ticket.follow
            finder = Finder(self._namespace.log_context, snapshot)
            await finder.require_left(start, is_exact=is_part)
            if isinstance(wanted, NotLessThan):
                await finder.require_left(wanted)
            if ticket.follow and isinstance(wanted, NotLessThan) and start >= snapshot.end:
                awaited = wanted
        end = _ENDLESS if ticket.follow else snapshot.end
        if ticket.end is not None:
            end = await self._position_of(snapshot, ticket.end.wanted)
            end = end if ticket.follow else snapshot.canonical(end)
        reading = Reading(
            log=log,
            view=view,
            start=max(start, snapshot.first),
            end=end,
            known_end=snapshot.end,
            follow=ticket.follow,
            rewrites=snapshot.rewrites,
            awaited=awaited,
        )
        return _Asked(ticket, snapshot, reading)

    async def opened(self, name: str, log_id: str | None = None) -> tuple[DirectLog, LogSnapshot]:
        """Return a log, which its readers share, and its present snapshot.

        Raises: LogNotFoundError, LedgerReadError, MetadataError.
        """
        follower, snapshot = await self._namespace.followers.follow(name, log_id)
        context = self._namespace.log_context
        return DirectLog(context, follower.log, self._log_config, follower), snapshot

    async def _position_of(self, snapshot: LogSnapshot, wanted: Wanted) -> DLSN:
        match wanted:
            case DLSN():
                return wanted
            case Latest():
                return snapshot.end
            case NotLessThan():
                (place,) = await self._namespace.find_places([(snapshot, wanted)])
                return place.dlsn

    async def _metadata(
        self, snapshot: LogSnapshot, start: DLSN, end: DLSN, size_bytes: int
    ) -> LogInfo:
        first, stop = await self._namespace.find_places([(snapshot, start), (snapshot, end)])
        count = max(0, stop.sequence_id - first.sequence_id)
        last = None
        if count:
            wanted = NotLessThan(RecordField.SEQUENCE_ID, stop.sequence_id - 1)
            (place,) = await self._namespace.find_places([(snapshot, wanted)])
            last = str(place.dlsn)
        key = LogKey(name=snapshot.log, log_id=snapshot.log_id)
        return LogInfo(
            log_id=snapshot.log_id,
            first=str(first.dlsn) if count else None,
            last=last,
            end=str(end),
            records=count,
            size_bytes=size_bytes,
            sealed=snapshot.sealed,
            owner=await self._membership.owner_of(key),
            name=snapshot.log,
        )

    def _endpoint(self, asked: _Asked, part: Part, owner: str | None) -> pb.FlightEndpoint:
        ticket, follows = asked.ticket, asked.ticket.follow and part.is_tail
        end: Place | None = Place(dlsn=str(part.end))
        start: Place | None = Place(dlsn=str(part.start))
        if follows:
            end = ticket.end
            if part.start == asked.snapshot.end and ticket.start is not None:
                start = ticket.start  # it may name a record to come
        locations: Collection[str] = self._membership.live
        if part.is_tail:
            # All followers of a log should use one proxy, which reads it once: this one if it
            # follows the log already.
            here = self._membership.location
            is_here = here in locations and asked.snapshot.log_id in self.followed
            locations = [here] if is_here else [owner] if owner is not None else []
        place = Ticket(
            log=asked.snapshot.log,
            log_id=asked.snapshot.log_id,
            start=start,
            end=end,
            follow=follows,
            columns=ticket.columns,
        )
        known = PartInfo(
            start=str(part.start),
            end=str(part.end),
            records=part.record_count,
            size_bytes=part.size_bytes,
            tail=part.is_tail,
        )
        return pb.FlightEndpoint(
            ticket=pb.Ticket(ticket=place.encode()),
            location=[pb.Location(uri=each) for each in sorted(locations)],
            app_metadata=msgspec.json.encode(known),
        )


def lowest(snapshot: LogSnapshot, end: DLSN) -> DLSN:
    """Return the lowest position that has the same records before it as `end`.

    A reader that stops there has all these records, and does not need later entries, which may be
    truncated by then.
    """
    found = snapshot.first
    for segment in snapshot.segments:
        if segment.lssn < end.lssn and segment.entry_count:
            found = DLSN(segment.lssn, segment.entry_count, 0)
        elif segment.lssn == end.lssn and end.entry_id + end.slot_id:
            found = end
    return max(found, snapshot.first)


def _listed(name: str, schema: pa.Schema | None) -> pb.FlightInfo:
    columns = schema if schema is not None else RowView(name, None, None).schema
    return pb.FlightInfo(
        schema=columns.serialize().to_pybytes(),
        flight_descriptor=pb.FlightDescriptor(type=pb.FlightDescriptor.PATH, path=[name]),
        total_records=-1,
        total_bytes=-1,
    )
