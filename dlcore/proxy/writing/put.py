"""Streams of clients that write: found their log, counted, refused or forwarded, and served.

A stream to a log of another proxy is refused, or forwarded to that proxy if the client asks for
this.  The protocol of a stream that is served here is `dlcore.flight.producer_server`.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dlcore.base.access.rights import Right
from dlcore.base.errors import AlreadyClosedError, DLError, LogElsewhereError, WriteError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.needs import Need
from dlcore.flight.producer_server import ProducerServer
from dlcore.flight.put import PutDecoder, PutTarget, StagingTarget, parse_target
from dlcore.flight.replies import Ready
from dlcore.proxy.writing.admission import Limits, PutFigures, read_message
from dlcore.proxy.writing.budget import ByteBudget, Holder, ReceivedBytes, StreamCounts
from dlcore.proxy.writing.producer_driver import ProducerStream
from dlcore.proxy.writing.rates import Rate, Rates
from dlcore.proxy.writing.route import Route

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from contextlib import AbstractContextManager

    from dlcore.flight.needs import Pass
    from dlcore.log.entries.stamp import Claim
    from dlcore.proxy.callers import Stay
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.writing.admission import Context
    from dlcore.proxy.writing.forwarding import Forwarding, Refusal
    from dlcore.proxy.writing.owned_log import OwnedLog
    from dlcore.proxy.writing.owner import LogOwner
    from dlcore.proxy.writing.rates import StreamRates
    from dlcore.proxy.writing.staging import Stagings

logger = logging.getLogger(__name__)

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
        self.figures = PutFigures()

        self._rates = Rates(**_rates_of(config), wait_max_s=config.throttle_max_s)

    def configure(self, config: ProxyConfig) -> None:
        """Use other rates and budgets; the windows of streams that are open stay as they are."""
        self._config = config
        self._rates.configure(**_rates_of(config), wait_max_s=config.throttle_max_s)
        self._budget.resize(
            config.pending_bytes_max,
            log_bytes_max=config.log_pending_bytes_max,
            principal_bytes_max=config.principal_pending_bytes_max,
        )
        self._received.resize(
            config.received_bytes_max, principal_bytes_max=config.principal_pending_bytes_max
        )

    async def serve(self, context: Context, entry: Pass, stay: Stay) -> None:
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
        target, decoder = parse_target(first.data.flight_descriptor), PutDecoder(first)
        schema_bytes = len(first.data.data_header)
        opening = first.data if wish.forward else None
        del first  # free its memory during the waits
        name = target.staging if isinstance(target, StagingTarget) else target.log
        if isinstance(target, PutTarget):
            await entry.require([Need(Right.APPEND, target.log, target.log_id)])
        account = entry.caller.account
        holder, rates = Holder(name, account), self._rates.join(name, account)
        with self._received.hold(holder, schema_bytes if schema_bytes > _SCHEMA_BYTES else 0):
            if isinstance(target, StagingTarget):
                with self._count(account), stay.ending_block():
                    await self._stagings.serve(context, decoder, target, rates, entry)
            else:
                limits = self.limits(holder, rates)
                # Before the limits here are checked: the owner may be another proxy with room.
                log = await self._find(context, target, opening, limits, stay)
                if log is None:
                    return
                with self.counted(name, account):
                    await self._serve(context, decoder, target, limits, log, stay)

    async def _find(
        self,
        context: Context,
        target: PutTarget,
        opening: pb.FlightData | None,
        limits: Limits,
        stay: Stay,
    ) -> OwnedLog | None:
        """Return the log to write to; None after another proxy has served the stream.

        Args:
            context: the client's call.
            target: the stream's target.
            opening: the stream's first message for another proxy, if it may be forwarded.
            limits: the stream's limits.
            stay: the time for which the stream may last.

        Raises: as `LogOwner.get` and `Forwarding.put`.
        """
        route = Route(self._owner.location, target.unreachable)
        while True:
            try:
                return await self._owner.get(
                    target.log, log_id=target.log_id, unreachable=route.unreachable
                )
            except LogElsewhereError as error:
                if opening is None:
                    raise
                ask = partial(self._forward, context, target, opening, limits, stay, route)
                if await self._forwarding.follow(f"log {target.log!r}", error, route, ask):
                    return None

    async def _forward(
        self,
        context: Context,
        target: PutTarget,
        opening: pb.FlightData,
        limits: Limits,
        stay: Stay,
        route: Route,
        location: str,
    ) -> Refusal | None:
        passing_over = msgspec.structs.replace(target, unreachable=route.unreachable)
        # The client may have named the log by a path, which has no place for the unreachable
        # proxies.
        opening.flight_descriptor.type = pb.FlightDescriptor.CMD
        opening.flight_descriptor.cmd = msgspec.json.encode(passing_over)
        first = opening.SerializeToString()
        return await self._forwarding.put(context, location, first, stay, limits.hold_here)

    # Calls that streams of other protocols use as well

    async def owned(self, name: str, *, unreachable: Collection[str] = ()) -> OwnedLog:
        """Return a log to write to, acquired if need be.  Raises: as `LogOwner.get`."""
        return await self._owner.get(name, unreachable=unreachable)

    async def verify(self, name: str, log: OwnedLog) -> None:
        """Check that a log is owned still, before a refusal by what is known of it here.

        Raises: why it is not, or MetadataError.
        """
        try:
            async with self._owner.bounded():
                await log.writer.pump.verify()
        except (WriteError, AlreadyClosedError) as error:
            raise log.ending or self.lost(name, log, error) from error

    def rates(self, name: str, account: str) -> StreamRates:
        """Return the rates of a new stream."""
        return self._rates.join(name, account)

    def limits(self, holder: Holder, rates: StreamRates) -> Limits:
        """Return the limits of a stream."""
        return Limits(holder, self._budget, self._received, rates, self.figures)

    def received(self, holder: Holder, size_bytes: int) -> AbstractContextManager[None]:
        """Hold memory for what is being received, during a block.  Raises: LogNotReadyError."""
        return self._received.hold(holder, size_bytes)

    @contextlib.contextmanager
    def counted(self, name: str, account: str) -> Iterator[None]:
        """Count a stream to a log during a block.  Raises: OverCapacityError."""
        streams_max = self._config.log_streams_max
        with self._count(account), self._streams.join(f"log {name!r}", streams_max):
            yield

    def _count(self, account: str) -> AbstractContextManager[None]:
        return self._streams.join(account, self._config.principal_streams_max)

    async def _serve(
        self,
        context: Context,
        decoder: PutDecoder,
        target: PutTarget,
        limits: Limits,
        log: OwnedLog,
        stay: Stay,
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
        self.figures.streams += 1
        try:
            await ProducerStream(context, log, machine, limits, self).serve(stay)
        finally:
            self.figures.streams -= 1

    async def begin(self, name: str, log: OwnedLog, producer: str | Claim) -> tuple[Claim, int]:
        """Begin or continue an incarnation of a producer; see `OwnedLog.begin`."""
        try:
            async with self._owner.bounded():
                return await log.begin(producer)
        except (WriteError, AlreadyClosedError) as error:
            raise log.ending or self.lost(name, log, error) from error

    def lost(self, name: str, log: OwnedLog, error: DLError) -> DLError:
        """Release a log that cannot be written any more; return the error for its clients."""
        failure = WriteError(
            f"log {name!r} is lost to this proxy, and unacknowledged records may be in it or not: "
            f"{type(error).__name__}: {error}"
        )
        self._owner.lost(name, log, failure)
        return failure


def _rates_of(config: ProxyConfig) -> dict[str, Rate]:
    """Return the rates that a configuration sets, by the names of `Rates`."""
    scopes = {"stream": "stream_", "log": "log_", "principal": "principal_", "proxy": ""}
    return {
        name: Rate(
            records_per_s=getattr(config, f"{scope}records_per_s"),
            bytes_per_s=getattr(config, f"{scope}bytes_per_s"),
        )
        for name, scope in scopes.items()
    }
