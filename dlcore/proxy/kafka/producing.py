"""The records of Kafka's producers: taken one request after the other, and answered when durable.

A request is taken when all its batches are refused, or accepted by their logs, in their order; the
next one of the connection may be taken before this one is answered.  Records that are not
acknowledged are never reported as written, and those that may be in the log never as refused.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from kio.schema.errors import ErrorCode

from dlcore.base.access.rights import Right
from dlcore.base.clock import steady_s
from dlcore.base.errors import AlreadyClosedError, DLError, LogElsewhereError, WriteError
from dlcore.flight.needs import Need
from dlcore.proxy.kafka.codes import write_code_of
from dlcore.proxy.kafka.numbering import ID_BITS, mark_of, name_of
from dlcore.proxy.kafka.positions import RecentOffsets, bounds_of, place_of
from dlcore.proxy.kafka.records import NO_PRODUCER, RefusedBatchError, produced_in
from dlcore.proxy.kafka.topics import log_in
from dlcore.proxy.writing.budget import Holder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.ids import DLSN
    from dlcore.log.entries.stamp import Mark
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.gatekeeper import Entry
    from dlcore.proxy.kafka.messages import Request, Response
    from dlcore.proxy.kafka.records import ProducedBatch
    from dlcore.proxy.membership import Membership
    from dlcore.proxy.reading.serving import ReadPath
    from dlcore.proxy.writing.owned_log import Accepted, OwnedLog
    from dlcore.proxy.writing.put import PutService
    from dlcore.proxy.writing.rates import StreamRates

logger = logging.getLogger(__name__)
# By default Kafka's producers give records up after this time (`delivery.timeout.ms`).
_WAIT_MAX_S = 120.0
"""A request is answered after this time, however long its client would wait."""
_NEVER = timedelta(0)
_ACKS_ALL = -1
_NO_ACKS = "acks={}: expected all (-1), since a proxy acknowledges what is durable only"
_REASONS = {
    ErrorCode.unknown_producer_id: "the log does not know this producer, or has forgotten it",
    ErrorCode.out_of_order_sequence_number: "records before these are missing",
    ErrorCode.invalid_producer_epoch: "the producer has a later epoch",
}
_LOGGED = {
    ErrorCode.corrupt_message,
    ErrorCode.invalid_record,
    ErrorCode.invalid_required_acks,
    ErrorCode.message_too_large,
    ErrorCode.policy_violation,
    ErrorCode.unsupported_compression_type,
}
"""Refusals whose reason is logged: Java's client shows the text with the code, librdkafka not."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """A batch that is not written."""

    code: ErrorCode
    reason: str
    first: int = -1
    """The offset of the log's first record, where a client asks for it."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """A batch that its log has accepted."""

    name: str
    log: OwnedLog
    batch: ProducedBatch
    mark: Mark | None
    accepted: Accepted


class Producing:
    """Takes the records of one connection.

    Args:
        namespace: the logs.
        membership: the live proxies.
        reads: finds where records are that came again.
        puts: the streams of the proxy, which have rates and memory in common.
        recent: the offsets of batches, of all connections.
        config: the proxy's configuration.
    """

    def __init__(
        self,
        namespace: DirectNamespace,
        membership: Membership,
        reads: ReadPath,
        puts: PutService,
        recent: RecentOffsets,
        config: ProxyConfig,
    ) -> None:
        self._namespace = namespace
        self._membership = membership
        self._reads = reads
        self._puts = puts
        self._recent = recent
        self._config = config
        self._rates: StreamRates | None = None

    def begun(self, request: Request, make: Response) -> Any:
        """Return the answer to InitProducerId: an id that no other producer has."""
        # Random, because proxies have no counter in common.
        code, producer = ErrorCode.none, secrets.randbits(ID_BITS)
        if request.body.transactional_id is not None:
            code, producer = ErrorCode.transactional_id_authorization_failed, NO_PRODUCER
        return make.of(
            "InitProducerIdResponse",
            throttle_time=_NEVER,
            error_code=code,
            producer_id=producer,
            producer_epoch=0 if producer >= 0 else -1,
        )

    async def take(
        self, request: Request, make: Response, entry: Entry
    ) -> Callable[[], Awaitable[Any]]:
        """Take the batches of a request; return what waits for the answer to it."""
        asked = request.body
        reason = None if asked.acks == _ACKS_ALL else _NO_ACKS.format(asked.acks)
        refusal = None if reason is None else _Refused(ErrorCode.invalid_required_acks, reason)
        taken = [
            (topic.name, part.index, refusal or await self._take(topic.name, part, entry))
            for topic in asked.topic_data
            for part in topic.partition_data
        ]
        for topic_name, _, each in taken:
            if isinstance(each, _Refused) and each.code in _LOGGED:
                logger.info(
                    "%s: records for topic %r are refused with %s: %s",
                    entry.caller.account,
                    topic_name,
                    each.code.name.upper(),
                    each.reason,
                )
        wait_s = min(max(asked.timeout.total_seconds(), 0.0), _WAIT_MAX_S)
        return partial(self._answered, make, taken, steady_s() + wait_s)

    async def _take(self, topic: str, part: Any, entry: Entry) -> _Taken | _Refused:
        try:
            name = log_in(topic, part.index)
            await entry.require([Need(Right.APPEND, name)])
            batch = produced_in(part.records, bytes_max=self._config.message_bytes_max)
            log = await self._owned(name)
            rows = _rows_of(batch, log)
            return await self._write(name, log, batch, rows, entry.caller.account)
        except RefusedBatchError as error:
            return _Refused(error.code, f"{error}", await self._first_of(topic, error.code))
        except DLError as error:
            return _Refused(write_code_of(error), f"{error}")

    async def _owned(self, name: str) -> OwnedLog:
        """Return a log to write to; a proxy that serves no clients of Kafka is passed over."""
        try:
            return await self._puts.owned(name)
        except LogElsewhereError as error:
            membership = self._membership
            async with membership.outages.bounded():
                addresses = await membership.kafka_addresses()
            if error.location in addresses:
                raise
            return await self._puts.owned(name, unreachable=membership.live - addresses.keys())

    async def _first_of(self, topic: str, code: ErrorCode) -> int:
        """Return a log's first offset for a code after which clients ask for it, else -1."""
        if code is not ErrorCode.unknown_producer_id:
            return -1
        try:
            _, snapshot = await self._reads.opened(log_in(topic))
            return (await bounds_of(self._namespace, snapshot))[0]
        except DLError:
            return -1  # the client fails

    async def _write(
        self, name: str, log: OwnedLog, batch: ProducedBatch, rows: pa.RecordBatch, account: str
    ) -> _Taken:
        released = asyncio.Event()
        wake = released.set
        with ExitStack() as holding:
            holding.enter_context(self._puts.counted(name, account))
            log.streams.join(wake)
            holding.callback(log.streams.leave, wake)
            try:
                mark = await self._mark(name, log, batch)
                limits = self._puts.limits(Holder(name, account), self._rates_of(name, account))
                accept = partial(log.accept, rows, mark)
                accepted, _ = await limits.write(log, len(batch), rows.nbytes, released, accept)
            except (WriteError, AlreadyClosedError) as error:
                raise log.ending or self._puts.lost(name, log, error) from error
            held = holding.pop_all()
            accepted.future.add_done_callback(lambda _: held.close())
        return _Taken(name, log, batch, mark, accepted)

    def _rates_of(self, name: str, account: str) -> StreamRates:
        if self._rates is None:
            self._rates = self._puts.rates(name, account)
        return self._rates.to(name)

    async def _mark(self, name: str, log: OwnedLog, batch: ProducedBatch) -> Mark | None:
        if batch.producer == NO_PRODUCER:
            return None
        found = mark_of(batch, log.producer(name_of(batch.producer)))
        if isinstance(found, ErrorCode):
            # The facts known here may be stale after a takeover: refuse only while the log is owned
            # here.
            await self._puts.verify(name, log)
            reason = f"producer {batch.producer}, epoch {batch.epoch}, number {batch.sequence}: "
            raise RefusedBatchError(found, f"log {name!r}: {reason}{_REASONS[found]}")
        log.adopt(found.claim)
        return found

    # Answers

    async def _answered(
        self, make: Response, taken: Sequence[tuple[str, int, _Taken | _Refused]], until_s: float
    ) -> Any:
        futures = [each.accepted.future for _, _, each in taken if isinstance(each, _Taken)]
        if futures:
            await asyncio.wait(futures, timeout=max(0.0, until_s - steady_s()))
        topics: dict[str, list[Any]] = {}
        for topic, index, each in taken:
            found = each if isinstance(each, _Refused) else await self._result(each)
            topics.setdefault(topic, []).append(_part(make, index, found))
        responses = tuple(
            make.of("TopicProduceResponse", name=topic, partition_responses=tuple(parts))
            for topic, parts in topics.items()
        )
        return make.of("ProduceResponse", responses=responses, throttle_time=_NEVER)

    async def _result(self, taken: _Taken) -> int | _Refused:
        """Return the offset of a batch that is durable, or why it is not known to be."""
        name, future = taken.name, taken.accepted.future
        if not future.done():
            reason = f"log {name!r}: these records are not durable yet: send them again"
            return _Refused(ErrorCode.request_timed_out, reason)
        error = future.exception()
        if error is not None:
            assert isinstance(error, DLError)
            if not taken.log.is_lost:
                self._puts.lost(name, taken.log, error)
            return _Refused(ErrorCode.not_enough_replicas_after_append, f"{error}")
        offset = await self._offset_of(taken, future.result())
        if offset is None:
            reason = f"log {name!r}: these records are in it, and their offset is forgotten"
            return _Refused(ErrorCode.duplicate_sequence_number, reason)
        return offset

    async def _offset_of(self, taken: _Taken, dlsn: DLSN | None) -> int | None:
        """Return the offset of a batch's first record; None if that is not known any more."""
        log, batch, accepted, count = taken.log, taken.batch, taken.accepted, len(taken.batch)
        numbers = batch.epoch << 31 | batch.sequence, count
        if accepted.fresh != count:
            found = self._recent.find(log.log_id, batch.producer, numbers)
            if found is not None:
                return found
        # Not all of it was written now.  In one entry it is then only if it was written at once.
        is_whole = accepted.fresh == count or (dlsn is not None and dlsn.slot_id >= count - 1)
        if dlsn is None or not accepted.is_placed or not is_whole:
            return None
        last = log.writer.machine.report.sequence_id_of(dlsn)
        if last is None:
            last = await self._look_up(taken.name, dlsn)
        if last is None:
            return None
        offset = last - count + 1
        if taken.mark is not None:
            self._recent.note(log.log_id, batch.producer, numbers, offset)
        return offset

    async def _look_up(self, name: str, dlsn: DLSN) -> int | None:
        """Return the offset of a record that an earlier owner wrote."""
        try:
            _, snapshot = await self._reads.opened(name)
            place = await place_of(self._namespace, snapshot, dlsn)
        except DLError:
            return None  # the record is durable nevertheless
        return place.sequence_id if place.dlsn == dlsn else None


def _rows_of(batch: ProducedBatch, log: OwnedLog) -> pa.RecordBatch:
    """Return a batch as rows of a log.  Raises: RefusedBatchError: a log of bytes has no room."""
    columns = {"value": batch.values, "key": batch.keys, "headers": batch.headers}
    if not log.writer.is_typed:
        more = [name for name in ("key", "headers") if columns[name] is not None]
        if batch.values.null_count:
            more.append("null as their value")
        if more:
            reason = (
                f"log {log.name!r} is a log of bytes, and keeps values only, but these records "
                f"have {' and '.join(more)}: write them to a typed log with the columns key, value "
                "and headers"
            )
            raise RefusedBatchError(ErrorCode.invalid_record, reason)
    given = {name: each for name, each in columns.items() if each is not None}
    return pa.RecordBatch.from_pydict(given)


def _part(make: Response, index: int, found: int | _Refused) -> Any:
    refused = found if isinstance(found, _Refused) else None
    return make.of(
        "PartitionProduceResponse",
        index=index,
        error_code=ErrorCode.none if refused is None else refused.code,
        base_offset=found if refused is None else -1,
        log_start_offset=-1 if refused is None else refused.first,
        record_errors=(),
        error_message=None if refused is None else refused.reason,
    )
