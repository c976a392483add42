"""The methods of Arrow Flight that a proxy serves, by name, on gRPC's generic handlers.

Each method serializes its own messages, so that messages which are framed already are sent without
a copy.  Each method parses its own request, so that an invalid one is refused and not reported as a
defect.  For a method that is not in the table gRPC answers UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from dlcore.base.errors import (
    DLError,
    LogElsewhereError,
    LogNotReadyError,
    ReaderStalledError,
    UncheckedTokenError,
)
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight import actions
from dlcore.flight.calls import close_connection, drop_the_rest, send
from dlcore.flight.requests import parsed
from dlcore.flight.statuses import code_of, message_of, metadata_of
from dlcore.proxy.writing.forwarding import OwnerStatusError
from dlcore.proxy.writing.route import Route

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from dlcore.flight.forwards import Wish
    from dlcore.proxy.actions import Actions
    from dlcore.proxy.reading.serving import ReadPath
    from dlcore.proxy.writing.forwarding import Forwarding, Refusal
    from dlcore.proxy.writing.put import PutService

logger = logging.getLogger(__name__)
_MessageT = TypeVar("_MessageT", bound=Message)

FLIGHT = "arrow.flight.protocol.FlightService"
_TOKENS = frozenset({"authorization", "auth-token-bin"})
"""Metadata keys in which clients of Flight send passwords and tokens."""
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def refuse(context: Context, error: DLError) -> NoReturn:
    """End a call with the status of an error."""
    await context.abort(
        grpc.StatusCode[code_of(error)], message_of(error), trailing_metadata=metadata_of(error)
    )
    raise AssertionError("abort raises")


def streaming(
    kind: type[_MessageT], answer: Callable[[_MessageT], AsyncIterator[Any]]
) -> Callable[[bytes, Context], AsyncIterator[Any]]:
    """Return a gRPC method for a function that answers a request with several messages.

    A `DLError` of the function becomes the status of the call.
    """

    async def method(request: bytes, context: Context) -> AsyncIterator[Any]:
        try:
            async for message in answer(parsed(kind, request)):
                yield message
        except DLError as error:
            await refuse(context, error)

    return method


def answering(
    kind: type[_MessageT], answer: Callable[[_MessageT], Awaitable[Any]]
) -> Callable[[bytes, Context], Awaitable[Any]]:
    """Return a gRPC method for a function that answers a request with one message.

    A `DLError` of the function becomes the status of the call.
    """

    async def method(request: bytes, context: Context) -> Any:
        try:
            return await answer(parsed(kind, request))
        except DLError as error:
            await refuse(context, error)

    return method


def _bytes_of(result: pb.PutResult | bytes) -> bytes:
    """Serialize an answer of DoPut; an answer forwarded from another proxy is bytes already."""
    return result if isinstance(result, bytes) else result.SerializeToString()


class _WithoutTokens(grpc.GenericRpcHandler):
    """The methods of Flight, without calls that carry a token: the proxy would not check it.

    A client that sends a token expects access control, and must not believe that there is any.
    """

    def __init__(self, methods: grpc.GenericRpcHandler) -> None:
        self._methods = methods

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a call, None if this service has no such method."""
        if not details.method.startswith(f"/{FLIGHT}/"):
            return None
        for key, _ in details.invocation_metadata or ():
            if key in _TOKENS:
                return grpc.stream_stream_rpc_method_handler(partial(_refuse_token, key))
        return self._methods.service(details)


async def _refuse_token(key: str, _: object, context: Context) -> None:
    await drop_the_rest(context)
    error = UncheckedTokenError(
        f"metadata {key!r} has a token, and a proxy checks no tokens: send none.  A proxy serves "
        "every client that can connect; with TLS, every client with a certificate that its tls_ca "
        "signed (docs/tls.md)"
    )
    await refuse(context, error)


class FlightService:
    """Answers the calls of Flight clients."""

    def __init__(
        self, actions: Actions, puts: PutService, reads: ReadPath, forwarding: Forwarding
    ) -> None:
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
        """Return the table of methods, for a server."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "DoAction": grpc.unary_stream_rpc_method_handler(self._do_action),
            "DoGet": grpc.unary_stream_rpc_method_handler(self._do_get),
            "GetFlightInfo": grpc.unary_unary_rpc_method_handler(
                answering(pb.FlightDescriptor, self._reads.get_flight_info),
                response_serializer=pb.FlightInfo.SerializeToString,
            ),
            "GetSchema": grpc.unary_unary_rpc_method_handler(
                answering(pb.FlightDescriptor, self._reads.get_schema),
                response_serializer=pb.SchemaResult.SerializeToString,
            ),
            "ListFlights": grpc.unary_stream_rpc_method_handler(
                streaming(pb.Criteria, self._reads.list_flights),
                response_serializer=pb.FlightInfo.SerializeToString,
            ),
            "DoPut": grpc.stream_stream_rpc_method_handler(
                self._do_put, response_serializer=_bytes_of
            ),
            "ListActions": grpc.unary_stream_rpc_method_handler(
                streaming(pb.Empty, self._list_actions),
                response_serializer=pb.ActionType.SerializeToString,
            ),
        }
        return _WithoutTokens(grpc.method_handlers_generic_handler(FLIGHT, methods))

    async def _do_get(self, request: bytes, context: Context) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            await self._reads.do_get(parsed(pb.Ticket, request).ticket, partial(send, context))
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
            await self._puts.serve(context)
        except OwnerStatusError as ended:
            if ended.code is not grpc.StatusCode.UNAVAILABLE:
                await drop_the_rest(context)
            await context.abort(ended.code, ended.details, trailing_metadata=ended.metadata)
        except DLError as error:
            # After UNAVAILABLE the client tries again anyway, and soon: do not delay it.
            if code_of(error) != "UNAVAILABLE":
                await drop_the_rest(context)
            await refuse(context, error)

    async def _do_action(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            for answer in await self._perform(request, context, self._forwarding.wish(context)):
                yield answer
        except OwnerStatusError as ended:
            await context.abort(ended.code, ended.details, trailing_metadata=ended.metadata)
        except DLError as error:
            await refuse(context, error)

    async def _perform(self, request: bytes, context: Context, wish: Wish) -> list[bytes]:
        """Perform an action here, or at the log's owner if the client asks for forwarding."""
        action = parsed(pb.Action, request)
        route = Route(self._forwarding.location)
        answers: list[bytes] = []

        async def ask(location: str) -> Refusal | None:
            nonlocal answers
            client = await self._forwarding.client_of(context, wish)
            left_s = context.time_remaining()
            answers, refusal = await self._forwarding.act(location, request, client, left_s)
            if refusal is not None and refusal.is_unreached:
                # The action may have taken effect there.  Only the client may retry: the id or the
                # token in its request makes the action count once.
                raise refusal.error()
            return refusal

        while True:
            try:
                body = await self._actions.perform(action.type, action.body)
            except LogElsewhereError as error:
                if not wish.forward:
                    raise
                if await self._forwarding.follow(f"action {action.type!r}", error, route, ask):
                    return answers
            else:
                return [pb.Result(body=body).SerializeToString()]

    async def _list_actions(self, _: pb.Empty) -> AsyncIterator[pb.ActionType]:
        for each in actions.ACTIONS:
            yield pb.ActionType(type=each.name, description=actions.described(each))
