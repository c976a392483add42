"""The methods of Arrow Flight that a proxy serves, by name, on gRPC's generic handlers.

Each method serializes its own messages, so that messages which are framed already are sent without
a copy.  Each method parses its own request, so that an invalid one is refused and not reported as a
defect.  For a method that is not in the table gRPC answers UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import grpc

from dlcore.base.access.rights import Demand, Right
from dlcore.base.errors import (
    DLError,
    LogElsewhereError,
    LogNotReadyError,
    ReaderStalledError,
    UnauthenticatedError,
)
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight import actions
from dlcore.flight.calls import abort, close_connection, drop_the_rest, host_of, send
from dlcore.flight.entrances import METHODS
from dlcore.flight.needs import Need
from dlcore.flight.requests import parsed
from dlcore.flight.statuses import code_of, message_of, metadata_of
from dlcore.flight.tickets import Ticket, ticket_of
from dlcore.proxy.callers import AUTHORIZATION
from dlcore.proxy.writing.forwarding import OwnerStatusError
from dlcore.proxy.writing.route import Route

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from dlcore.proxy.actions import Actions
    from dlcore.proxy.callers import Callers
    from dlcore.proxy.gatekeeper import Entry, Gatekeeper
    from dlcore.proxy.reading.serving import ReadPath
    from dlcore.proxy.writing.forwarding import Forwarding, Refusal
    from dlcore.proxy.writing.put import PutService

logger = logging.getLogger(__name__)

FLIGHT = "arrow.flight.protocol.FlightService"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def refuse(context: Context, error: DLError) -> NoReturn:
    """End a call with the status of an error."""
    await abort(context, grpc.StatusCode[code_of(error)], message_of(error), metadata_of(error))


def _bytes_of(result: pb.PutResult | bytes) -> bytes:
    """Serialize an answer of DoPut; an answer forwarded from another proxy is bytes already."""
    return result if isinstance(result, bytes) else result.SerializeToString()


class FlightService:
    """Answers the calls of Flight clients."""

    def __init__(
        self,
        actions: Actions,
        puts: PutService,
        reads: ReadPath,
        forwarding: Forwarding,
        callers: Callers,
        gate: Gatekeeper,
    ) -> None:
        self._callers = callers
        self._gate = gate
        self._actions = actions
        self._puts = puts
        self._forwarding = forwarding
        self._reads = reads
        self._readers: set[asyncio.Task[Any]] = set()
        self._is_stopping = False

    async def end_streams(self, *, after_s: float) -> None:
        """End readers that still read after `after_s`, so that they go on at another proxy.

        Forwarded streams end at once, as the streams of a released log do.  The calls are ended
        here, because gRPC's own stop would report them as cancelled by their clients.
        """
        self._forwarding.end()
        if self._readers:
            await asyncio.wait(self._readers, timeout=after_s)
        self._is_stopping = True
        for reader in self._readers:
            reader.cancel()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the methods of `METHODS`, for a server."""
        asking, streaming = (
            grpc.unary_unary_rpc_method_handler,
            grpc.unary_stream_rpc_method_handler,
        )
        info, schema = pb.FlightInfo.SerializeToString, pb.SchemaResult.SerializeToString
        kind = pb.ActionType.SerializeToString
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Handshake": grpc.stream_stream_rpc_method_handler(self._handshake),
            "DoAction": streaming(self._do_action),
            "DoGet": streaming(self._do_get),
            "GetFlightInfo": asking(self._get_flight_info, response_serializer=info),
            "GetSchema": asking(self._get_schema, response_serializer=schema),
            "ListFlights": streaming(self._list_flights, response_serializer=info),
            "DoPut": grpc.stream_stream_rpc_method_handler(
                self._do_put, response_serializer=_bytes_of
            ),
            "ListActions": streaming(self._list_actions, response_serializer=kind),
        }
        in_table = {each.name: methods[each.name] for each in METHODS}
        return grpc.method_handlers_generic_handler(FLIGHT, in_table)

    async def _handshake(self, _: object, context: Context) -> None:
        """Answer the standard handshake: a token in the place of a password is sent back."""
        try:
            token = await self._callers.handshake(context)
            header = ((AUTHORIZATION, f"Bearer {token}"),)
            # Clients look in one or the other; some lose the first if the call ends at once.
            context.set_trailing_metadata(header)
            await context.send_initial_metadata(header)
        except UnauthenticatedError as error:
            self._gate.tell_unproven(host_of(context), context.peer(), "Handshake", error)
            await refuse(context, error)
        except DLError as error:
            await refuse(context, error)

    @asynccontextmanager
    async def _entered(self, context: Context, entrance: str) -> AsyncGenerator[Entry, None]:
        """Let a call in, for a block; a `DLError` of the block becomes the status of the call."""
        try:
            async with self._gate.enter(context, entrance) as entry:
                yield entry
        except DLError as error:
            await refuse(context, error)

    async def _get_flight_info(self, request: bytes, context: Context) -> pb.FlightInfo:
        async with self._entered(context, "GetFlightInfo") as entry:
            descriptor = parsed(pb.FlightDescriptor, request)
            ticket = ticket_of(descriptor)
            await entry.require([Need(Right.DESCRIBE, ticket.log, ticket.log_id)])
            return await self._reads.get_flight_info(descriptor, ticket)

    async def _get_schema(self, request: bytes, context: Context) -> pb.SchemaResult:
        async with self._entered(context, "GetSchema") as entry:
            ticket = ticket_of(parsed(pb.FlightDescriptor, request))
            await entry.require([Need(Right.DESCRIBE, ticket.log, ticket.log_id)])
            return await self._reads.get_schema(ticket)

    async def _list_flights(self, request: bytes, context: Context) -> AsyncIterator[pb.FlightInfo]:
        async with self._entered(context, "ListFlights") as entry:
            criteria = parsed(pb.Criteria, request)
            async for name, info in self._reads.list_flights(criteria):
                if entry.may(Demand(Right.DESCRIBE, name)):
                    yield info

    async def _do_get(self, request: bytes, context: Context) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            async with self._gate.enter(context, "DoGet") as entry:
                with entry.stay.ending_block():
                    ticket = Ticket.decode(parsed(pb.Ticket, request).ticket)
                    await entry.require([Need(Right.READ, ticket.log, ticket.log_id)])
                    sending = partial(entry.stay.send, partial(send, context))
                    await self._reads.do_get(ticket, sending)
        except asyncio.CancelledError:
            if not self._is_stopping or context.cancelled():
                raise
            # The cancellation is from `end_streams`: it must not prevent the answer.
            task.uncancel()
            await refuse(context, LogNotReadyError("this proxy stops: read on at another one"))
        except ReaderStalledError as error:
            logger.info("%s: %s", context.peer(), error)
            # Closed, because gRPC keeps the messages of a refused call until the client is gone.
            if close_connection(context):
                raise asyncio.CancelledError from error
            await refuse(context, error)
        except DLError as error:
            await refuse(context, error)
        finally:
            self._readers.discard(task)

    async def _do_put(self, _: object, context: Context) -> None:
        try:
            async with self._gate.enter(context, "DoPut") as entry:
                await self._puts.serve(context, entry, entry.stay)
        except OwnerStatusError as ended:
            if ended.code is not grpc.StatusCode.UNAVAILABLE:
                await drop_the_rest(context)
            await abort(context, ended.code, ended.details, ended.metadata)
        except DLError as error:
            # After UNAVAILABLE the client tries again anyway, and soon: do not delay it.
            if code_of(error) != "UNAVAILABLE":
                await drop_the_rest(context)
            await refuse(context, error)

    async def _do_action(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            async with self._gate.enter(context, "DoAction") as entry:
                answers = await self._perform(request, context, entry)
            # Outside of the block: the audit log has its line before the client sees the answer.
            for answer in answers:
                yield answer
        except OwnerStatusError as ended:
            await abort(context, ended.code, ended.details, ended.metadata)
        except DLError as error:
            await refuse(context, error)

    async def _perform(self, request: bytes, context: Context, entry: Entry) -> list[bytes]:
        """Perform an action here, or at the log's owner if the client asks for forwarding."""
        action, wish = parsed(pb.Action, request), self._forwarding.wish(context)
        route = Route(self._forwarding.location)
        answers: list[bytes] = []

        async def ask(location: str) -> Refusal | None:
            nonlocal answers
            left_s = context.time_remaining()
            answers, refusal = await self._forwarding.act(location, request, entry.caller, left_s)
            if refusal is not None and refusal.is_unreached:
                # The action may have taken effect there.  Only the client may retry: the id or the
                # token in its request makes the action count once.
                raise refusal.error()
            return refusal

        while True:
            try:
                body = await self._actions.perform(action.type, action.body, entry)
            except LogElsewhereError as error:
                if not wish.forward:
                    raise
                if await self._forwarding.follow(f"action {action.type!r}", error, route, ask):
                    return answers
            else:
                return [pb.Result(body=body).SerializeToString()]

    async def _list_actions(self, request: bytes, context: Context) -> AsyncIterator[pb.ActionType]:
        async with self._entered(context, "ListActions"):
            parsed(pb.Empty, request)
        for each in actions.ACTIONS:
            yield pb.ActionType(type=each.name, description=actions.described(each))
