"""The calls of Kafka's clients, performed: Metadata, ListOffsets and Fetch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from kio.schema.errors import ErrorCode

from dlcore.base.access.rights import Demand, Right
from dlcore.base.background import all_of
from dlcore.base.clock import steady_s
from dlcore.base.config import MIB
from dlcore.base.errors import (
    AlreadyTruncatedError,
    DLError,
    OverCapacityError,
    ReaderStalledError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import NotLessThan, RecordField
from dlcore.flight.needs import Need
from dlcore.proxy.kafka import entrances, messages
from dlcore.proxy.kafka.batches import Batches
from dlcore.proxy.kafka.codes import code_of
from dlcore.proxy.kafka.feeds import Feed
from dlcore.proxy.kafka.messages import Request, Response
from dlcore.proxy.kafka.positions import RecentOffsets, bounds_of, place_of
from dlcore.proxy.kafka.producing import Producing
from dlcore.proxy.kafka.topics import log_in, node_of, topic_of
from dlcore.proxy.kafka.view import RecordView
from dlcore.proxy.reading.delivery import Reading
from dlcore.proxy.rendezvous import preferred_owner

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.background import BackgroundTasks
    from dlcore.log.metadata.values import LogMetadata
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.gatekeeper import Entry
    from dlcore.proxy.kafka.batches import Batch
    from dlcore.proxy.kafka.groups import Groups
    from dlcore.proxy.membership import Membership
    from dlcore.proxy.reading.serving import ReadPath
    from dlcore.proxy.writing.put import PutService

Answer: TypeAlias = "list[bytes | memoryview]"
"""An answer with its size, in parts."""
Later: TypeAlias = "Callable[[], Awaitable[Answer]]"
"""A call that waits for an answer, while the next requests are taken."""
LISTED_MAX = 10_000
"""Most logs in an answer to a client that asks for all; of more it gets these."""
_OWNERS_MAX = 100
"""The owners of more logs at once are not looked up, but computed."""
_WAIT_MAX_S = 30.0
_GATHERED_MAX = MIB
"""Most bytes that a client lets a proxy gather before it answers."""
_FEED_IDLE_S = 60.0
LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL = -1, -2, -3, -4
"""Times in ListOffsets that mean something else."""
_ENDLESS = DLSN(2**63 - 1, 0, 0)
_NEVER = timedelta(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The parts of a proxy that all connections use."""

    namespace: DirectNamespace
    membership: Membership
    reads: ReadPath
    puts: PutService
    groups: Groups
    config: ProxyConfig
    tasks: BackgroundTasks
    feeds: dict[Feed, None] = field(default_factory=dict)
    """All feeds, in an ordered set."""
    recent: RecentOffsets = field(default_factory=RecentOffsets)


@dataclass(slots=True, eq=False)
class _Part:
    """The answer for a partition of a Fetch."""

    topic: str
    index: int
    bytes_max: int
    feed: Feed | None = None
    code: ErrorCode = ErrorCode.none
    batches: list[Batch] = field(default_factory=list)
    size_bytes: int = 0


class Calls:
    """Performs the calls of one connection.

    Args:
        shared: what it shares with others.
        on_stall: called when the client does not take what it is sent, and others need the memory.
    """

    def __init__(self, shared: Shared, on_stall: Callable[[], None]) -> None:
        self._shared = shared
        self._on_stall = on_stall
        self._feeds: dict[str, Feed] = {}  # by topic
        self._news = asyncio.Event()
        self._producing = Producing(
            shared.namespace,
            shared.membership,
            shared.reads,
            shared.puts,
            shared.recent,
            shared.config,
        )

    def close(self) -> None:
        """Ask for no more records."""
        for topic in list(self._feeds):
            self._drop(topic)

    def received(self) -> None:
        """Note that the client has received the last answer."""
        for feed in self._feeds.values():
            feed.received()

    async def perform(self, request: Request, entry: Entry) -> Answer | Later:
        """Return the answer to a request, with its size, in parts, or what waits for it."""
        make = Response(request.call, request.version)
        match request.call:
            case messages.PRODUCE:
                waiting = await self._producing.take(request, make, entry)
                return partial(_framed, make, request.number, waiting)
            case call if call in messages.GROUP_CALLS:
                body = await self._shared.groups.perform(request, make, entry)
            case messages.INIT_PRODUCER_ID:
                body = self._producing.begun(request, make)
            case messages.METADATA:
                body = await self._metadata(request, make, entry)
            case messages.LIST_OFFSETS:
                body = await self._list_offsets(request, make, entry)
            case _:
                body = await self._fetch(request, make, entry)
        return make.framed(request.number, body)

    # Metadata

    async def _metadata(self, request: Request, make: Response, entry: Entry) -> Any:
        membership = self._shared.membership
        async with membership.outages.bounded():
            addresses, (logs, owners, topics) = await all_of(
                membership.kafka_addresses(), self._wanted(request, make, entry)
            )
            for log, owner in zip(logs, owners, strict=True):
                leader = self._leader(log, owner, addresses)
                topics.append(_topic(make, topic_of(log.name), leader))
        brokers = tuple(
            make.of("MetadataResponseBroker", node_id=node_of(each), host=host, port=port)
            for each, (host, port) in sorted(addresses.items())
        )
        return make.of(
            "MetadataResponse",
            throttle_time=_NEVER,
            brokers=brokers,
            cluster_id=self._shared.namespace.log_context.cluster_id,
            controller_id=node_of(membership.location),
            topics=tuple(topics),
        )

    async def _wanted(
        self, request: Request, make: Response, entry: Entry
    ) -> tuple[list[LogMetadata], Sequence[str | None], list[Any]]:
        """Return the logs that are asked for, their owners, and the answers for other topics."""
        wanted = request.body.topics
        # An empty list asks for all logs in version 0, and for none in later ones.
        if wanted is None or (not wanted and request.version == 0):
            logs, topics = await self._listed(entry), list[Any]()
        else:
            logs, topics = await self._named(make, [each.name for each in wanted], entry)
        if len(logs) > _OWNERS_MAX:
            return logs, [None] * len(logs), topics
        return logs, await all_of(*map(self._shared.membership.owner_of, logs)), topics

    async def _listed(self, entry: Entry) -> list[LogMetadata]:
        found: list[str] = []
        async for names in self._shared.namespace.list_logs(None):
            found += [each for each in names if entry.may(Demand(Right.DESCRIBE, each))]
            if len(found) >= LISTED_MAX:
                break
        return await self._shared.namespace.log_context.logs.find_existing(found[:LISTED_MAX])

    async def _named(
        self, make: Response, names: Sequence[str | None], entry: Entry
    ) -> tuple[list[LogMetadata], list[Any]]:
        """Return the logs of these topics, and the answers for topics without a log."""
        asked, refused = [], {}
        for name in dict.fromkeys(names):
            try:
                log = log_in(name)
                await entry.require([Need(Right.DESCRIBE, log)])
                asked.append(log)
            except DLError as error:
                refused[name or ""] = code_of(error)
        logs = await self._shared.namespace.log_context.logs.find_existing(asked)
        missing = set(asked) - {each.name for each in logs}
        refused |= {topic_of(each): ErrorCode.unknown_topic_or_partition for each in missing}
        return logs, [_topic(make, name, None, code) for name, code in refused.items()]

    def _leader(self, log: LogMetadata, owner: str | None, addresses: dict[str, Any]) -> int:
        """Return the proxy at which all readers of a log meet; each proxy serves all logs."""
        if owner not in addresses:
            owner = preferred_owner(log.name, addresses)
        return node_of(owner or self._shared.membership.location)

    # Offsets

    async def _list_offsets(self, request: Request, make: Response, entry: Entry) -> Any:
        topics = []
        for topic in request.body.topics:
            parts = []
            for part in topic.partitions:
                code, offset, time_ms = ErrorCode.none, -1, -1
                try:
                    log = log_in(topic.name, part.partition_index)
                    await entry.require([Need(Right.DESCRIBE, log)])
                    async with self._shared.membership.outages.bounded():
                        _, snapshot = await self._shared.reads.opened(log)
                        offset, time_ms = await self._offset_at(snapshot, part.timestamp)
                except DLError as error:
                    code = code_of(error)
                parts.append(
                    make.of(
                        "ListOffsetsPartitionResponse",
                        partition_index=part.partition_index,
                        error_code=code,
                        timestamp=time_ms,
                        offset=offset,
                    )
                )
            topics.append(
                make.of("ListOffsetsTopicResponse", name=topic.name, partitions=tuple(parts))
            )
        return make.of("ListOffsetsResponse", throttle_time=_NEVER, topics=tuple(topics))

    async def _offset_at(self, snapshot: LogSnapshot, time_ms: int) -> tuple[int, int]:
        """Return the offset of the first record of a time, and its time; -1 for what is not."""
        if time_ms in (LATEST, EARLIEST, EARLIEST_LOCAL):
            first, end = await bounds_of(self._shared.namespace, snapshot)
            return (end if time_ms == LATEST else first), -1
        if time_ms == MAX_TIMESTAMP and not snapshot.is_empty:
            time_ms = (await place_of(self._shared.namespace, snapshot, snapshot.end)).timestamp_ms
        if time_ms < 0:
            return -1, -1
        place = await place_of(
            self._shared.namespace, snapshot, NotLessThan(RecordField.TIMESTAMP_MS, time_ms)
        )
        if place.dlsn >= snapshot.end:
            return -1, -1
        return place.sequence_id, place.timestamp_ms

    # Records

    async def _fetch(self, request: Request, make: Response, entry: Entry) -> Any:
        asked = request.body
        wait_s = min(max(asked.max_wait.total_seconds(), 0.0), _WAIT_MAX_S)
        wanted, bytes_max = min(asked.min_bytes, _GATHERED_MAX), asked.max_bytes
        until_s = steady_s() + wait_s
        parts = [
            await self._opened(topic.topic, part, entry)
            for topic in asked.topics
            for part in topic.partitions
        ]
        self._drop_idle()
        while True:
            self._news.clear()
            self._take(parts, bytes_max)
            size_bytes = sum(each.size_bytes for each in parts)
            left_s = until_s - steady_s()
            if size_bytes >= wanted or left_s <= 0 or any(map(_has_failed, parts)):
                break
            if size_bytes:
                self.received()  # so that more comes
            try:
                async with asyncio.timeout(left_s):
                    await self._news.wait()
            except TimeoutError:
                wanted = 0
        responses = tuple(self._response(make, each) for each in parts)
        return make.of(
            "FetchResponse",
            throttle_time=_NEVER,
            error_code=ErrorCode.none,
            session_id=0,
            responses=responses,
        )

    async def _opened(self, topic: str, asked: Any, entry: Entry) -> _Part:
        part = _Part(topic, asked.partition, asked.partition_max_bytes)
        try:
            await entry.require([Need(Right.READ, log_in(topic, asked.partition))])
            feed = self._feeds.get(topic)
            if feed is None or feed.offset != asked.fetch_offset or feed.error is not None:
                feed = await self._open(topic, asked.fetch_offset)
            feed.used_s = steady_s()
            part.feed = feed
        except DLError as error:
            part.code = code_of(error)
        return part

    async def _open(self, topic: str, offset: int) -> Feed:
        """Open a feed from an offset on, in the place of the one that the topic has."""
        shared = self._shared
        failed = self._drop(topic)
        if failed is not None and not isinstance(failed, ReaderStalledError):
            raise failed
        if len(shared.feeds) >= shared.config.calls_max:
            raise OverCapacityError(
                f"{len(shared.feeds):,} logs are fetched by Kafka's clients: expected fewer than "
                f"calls_max={shared.config.calls_max:,}"
            )
        async with shared.membership.outages.bounded():
            log, snapshot = await shared.reads.opened(log_in(topic))
            first, end = await bounds_of(self._shared.namespace, snapshot)
            if not first <= offset <= end:
                raise AlreadyTruncatedError(
                    f"log {log.name!r}: offset {offset}: expected {first} to {end}"
                )
            start = snapshot.end if offset == end else snapshot.first
            if first < offset < end:
                wanted = NotLessThan(RecordField.SEQUENCE_ID, offset)
                start = (await place_of(self._shared.namespace, snapshot, wanted)).dlsn
        view = RecordView(
            log.name,
            snapshot.columns,
            is_arrow=shared.config.kafka_typed == "arrow",
            has_headers=shared.config.kafka_headers,
        )
        reading = Reading(
            log=log,
            view=view,
            start=start,
            end=_ENDLESS,
            known_end=snapshot.end,
            follow=True,
            rewrites=snapshot.rewrites,
        )
        feed = Feed(
            reading,
            offset=offset,
            first=first,
            end=end,
            on_news=self._news.set,
            on_stall=self._on_stall,
        )
        self._feeds[topic] = feed
        shared.feeds[feed] = None
        feed.start(shared.reads.deliveries, shared.tasks)
        return feed

    def _drop(self, topic: str) -> DLError | None:
        """Close the feed of a topic, if there is one; return its error, which no client got yet."""
        feed = self._feeds.pop(topic, None)
        if feed is None:
            return None
        del self._shared.feeds[feed]
        feed.close()
        return feed.error

    def _drop_idle(self) -> None:
        now_s = steady_s()
        for topic, feed in list(self._feeds.items()):
            if now_s - feed.used_s > _FEED_IDLE_S:
                self._drop(topic)

    def _take(self, parts: Sequence[_Part], bytes_max: int) -> None:
        size_bytes = sum(each.size_bytes for each in parts)
        for part in parts:
            if part.feed is None:
                continue
            left = min(part.bytes_max - part.size_bytes, bytes_max - size_bytes)
            # The first batch is sent even if it exceeds the limits, or the consumer would not get
            # past it.
            taken = part.feed.take(left, is_first=not size_bytes)
            taken_bytes = sum(each.size_bytes for each in taken)
            part.batches += taken
            part.size_bytes += taken_bytes
            size_bytes += taken_bytes

    def _response(self, make: Response, part: _Part) -> Any:
        feed, code = part.feed, part.code
        if feed is not None and feed.error is not None and not part.batches:
            error = self._drop(part.topic)
            if error is not None and not isinstance(error, ReaderStalledError):
                code = code_of(error)
        if feed is None or code is not ErrorCode.none:
            end = first = -1
        else:
            end = max(feed.end, self._shared.reads.followed.records_of(feed.log_id))
            first = feed.first
        data = make.of(
            "PartitionData",
            partition_index=part.index,
            error_code=code,
            high_watermark=end,
            last_stable_offset=end,
            log_start_offset=first,
            aborted_transactions=None,
            records=Batches(part.batches),
        )
        return make.of("FetchableTopicResponse", topic=part.topic, partitions=(data,))


async def _framed(make: Response, number: int, waiting: Callable[[], Awaitable[Any]]) -> Answer:
    return make.framed(number, await waiting())


def _has_failed(part: _Part) -> bool:
    return part.feed is None or part.feed.error is not None


def _topic(make: Response, name: str, leader: int | None, code: ErrorCode = ErrorCode.none) -> Any:
    parts: tuple[Any, ...] = ()
    if leader is not None:
        nodes = (leader,)
        parts = (
            make.of(
                "MetadataResponsePartition",
                error_code=code,
                partition_index=0,
                leader_id=leader,
                replica_nodes=nodes,
                isr_nodes=nodes,
            ),
        )
    return make.of(
        "MetadataResponseTopic", error_code=code, name=name, topic_id=None, partitions=parts
    )


ENTRANCE_OF = {
    messages.METADATA: entrances.METADATA,
    messages.LIST_OFFSETS: entrances.LIST_OFFSETS,
    messages.FETCH: entrances.FETCH,
    messages.INIT_PRODUCER_ID: entrances.INIT_PRODUCER_ID,
    messages.PRODUCE: entrances.PRODUCE,
    messages.FIND_COORDINATOR: entrances.FIND_COORDINATOR,
    messages.JOIN_GROUP: entrances.GROUP,
    messages.SYNC_GROUP: entrances.GROUP,
    messages.HEARTBEAT: entrances.GROUP,
    messages.LEAVE_GROUP: entrances.GROUP,
    messages.OFFSET_COMMIT: entrances.OFFSETS,
    messages.OFFSET_FETCH: entrances.OFFSETS,
}
"""The entrance of each call that is performed."""
