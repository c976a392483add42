"""Streams of clients that write: found their log, counted, refused or forwarded, and served.

A stream to a log of another proxy is refused, or forwarded to that proxy if the client asks for
this.  The protocol of a stream that is served here is `dlcore.flight.producer_server`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dlcore.base.errors import AlreadyClosedError, DLError, LogElsewhereError, WriteError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.producer_server import ProducerServer
from dlcore.flight.put import PutDecoder, PutTarget, StagingTarget, parse_target
from dlcore.flight.replies import Ready
from dlcore.proxy.writing.admission import Limits, read_message
from dlcore.proxy.writing.budget import ByteBudget, Holder, ReceivedBytes, StreamCounts
from dlcore.proxy.writing.producer_driver import ProducerStream
from dlcore.proxy.writing.rates import Rate, Rates
from dlcore.proxy.writing.route import Route

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from dlcore.log.entries.stamp import Claim
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.writing.admission import Context
    from dlcore.proxy.writing.forwarding import Forwarding, Refusal
    from dlcore.proxy.writing.owned_log import OwnedLog
    from dlcore.proxy.writing.owner import LogOwner
    from dlcore.proxy.writing.staging import Stagings

_SCHEMA_BYTES = 64 * 1024
"""A larger schema counts as a waiting message."""


class PutService:
    """Serves the streams of one proxy."""

    def __init__(
        self, owner: LogOwner, forwarding: Forwarding, stagings: Stagings, config: ProxyConfig
    ) -> None:
        self._owner = owner
        self._forwarding = forwarding
        self._stagings = stagings
        self._config = config
        self._budget = ByteBudget(
            config.pending_bytes_max,
            log_bytes_max=config.log_pending_bytes_max,
            principal_bytes_max=config.principal_pending_bytes_max,
        )
        self._received = ReceivedBytes(
            config.received_bytes_max, principal_bytes_max=config.principal_pending_bytes_max
        )
        self._streams = StreamCounts()

        def rate(scope: str) -> Rate:
            per_s = (getattr(config, f"{scope}{unit}_per_s") for unit in ("records", "bytes"))
            return Rate(records_per_s=next(per_s), bytes_per_s=next(per_s))

        self._rates = Rates(
            stream=rate("stream_"),
            log=rate("log_"),
            principal=rate("principal_"),
            proxy=rate(""),
            wait_max_s=config.throttle_max_s,
        )

    async def serve(self, context: Context) -> None:
        """Serve one stream to its end.

        Raises:
            DLError: the stream is refused, after the acknowledgement of all accepted records; or
                no more records can be acknowledged.
            OwnerStatusError: the status of a forwarded stream.
        """
        wish = self._forwarding.wish(context)
        first = await read_message(context)
        if first is None:
            return
        target, decoder = parse_target(first.told.flight_descriptor), PutDecoder(first)
        schema_bytes = len(first.told.data_header)
        opening = first.told if wish.forward else None
        del first  # free its memory during the waits
        name = target.staging if isinstance(target, StagingTarget) else target.log
        principal = await self._forwarding.client_of(context, wish)
        holder, rates = Holder(name, principal), self._rates.join(name, principal)
        with self._received.hold(holder, schema_bytes if schema_bytes > _SCHEMA_BYTES else 0):
            if isinstance(target, StagingTarget):
                with self._count(principal):
                    await self._stagings.serve(context, decoder, target, rates)
            else:
                limits = Limits(holder, self._budget, self._received, rates)
                # Before the limits here are checked: the owner may be another proxy with room.
                log = await self._find(context, target, opening, limits)
                if log is None:
                    return
                with (
                    self._count(principal),
                    self._streams.join(f"log {name!r}", self._config.log_streams_max),
                ):
                    await self._serve(context, decoder, target, limits, log)

    async def _find(
        self,
        context: Context,
        target: PutTarget,
        opening: pb.FlightData | None,
        limits: Limits,
    ) -> OwnedLog | None:
        """Return the log to write to; None after another proxy has served the stream.

        Args:
            context: the client's call.
            target: the stream's target.
            opening: the stream's first message for another proxy, if it may be forwarded.
            limits: the stream's limits.

        Raises: as `LogOwner.get` and `Forwarding.put`.
        """
        client = limits.holder.principal
        route = Route(self._owner.location, target.unreachable)
        while True:
            try:
                return await self._owner.get(
                    target.log, log_id=target.log_id, unreachable=route.unreachable
                )
            except LogElsewhereError as error:
                if opening is None or client is None:
                    raise
                ask = partial(self._forward, context, target, opening, limits, route)
                if await self._forwarding.follow(f"log {target.log!r}", error, route, ask):
                    return None

    async def _forward(
        self,
        context: Context,
        target: PutTarget,
        opening: pb.FlightData,
        limits: Limits,
        route: Route,
        location: str,
    ) -> Refusal | None:
        passing_over = msgspec.structs.replace(target, unreachable=route.unreachable)
        opening.flight_descriptor.type = pb.FlightDescriptor.CMD
        opening.flight_descriptor.cmd = msgspec.json.encode(passing_over)
        client = str(limits.holder.principal)
        first = opening.SerializeToString()
        return await self._forwarding.put(context, location, first, client, limits.hold_here)

    def _count(self, principal: str | None) -> AbstractContextManager[None]:
        streams_max = 0 if principal is None else self._config.principal_streams_max
        return self._streams.join(str(principal), streams_max)

    async def _serve(
        self,
        context: Context,
        decoder: PutDecoder,
        target: PutTarget,
        limits: Limits,
        log: OwnedLog,
    ) -> None:
        log.check(decoder.schema)
        config = self._config
        ready = Ready(
            log=target.log,
            window_records=config.window_records,
            window_bytes=config.window_bytes,
            message_bytes_max=config.message_bytes_max,
        )
        machine = ProducerServer(target, decoder, ready)
        await ProducerStream(context, log, machine, limits, self).serve()

    async def begin(self, name: str, log: OwnedLog, producer: str | Claim) -> tuple[Claim, int]:
        """Begin or continue an incarnation of a producer; see `OwnedLog.begin`."""
        try:
            async with self._owner.bounded():
                return await log.begin(producer)
        except (WriteError, AlreadyClosedError) as error:
            raise log.ending or self.lost(name, log, error) from error

    def lost(self, name: str, log: OwnedLog, error: DLError) -> DLError:
        """Release a log that cannot be written any more; return the error for its clients."""
        told = WriteError(
            f"log {name!r} is lost to this proxy, and unacknowledged records may be in it or not: "
            f"{type(error).__name__}: {error}"
        )
        self._owner.lost(name, log, told)
        return told
