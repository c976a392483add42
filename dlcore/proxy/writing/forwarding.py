"""Calls that this proxy makes at the owner of a log, for clients that reach only this proxy.

Messages of such a client are passed on to the owner one by one.  Answers of the owner, with its
status and trailing metadata, are passed back unchanged.  One message of a stream is in transit at a
time, and counts as memory of its log here.  While the owner accepts none, the client is not read.
The owner accepts and acknowledges records, numbers producers, and applies rates and limits of log
and client, as on a direct stream of the client.

Promises: acknowledged records are durable, because only the owner acknowledges; if the owner is
gone, the stream ends with UNAVAILABLE, after all its acknowledgements; a call is forwarded once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from dlcore.base.background import BackgroundTasks, side_tasks
from dlcore.base.errors import (
    DLError,
    LogElsewhereError,
    LogNotReadyError,
    WriteError,
)
from dlcore.flight.calls import BROKEN, Channels, reply_of, send, send_reply
from dlcore.flight.forwards import Forwarder, Wish, wish_of
from dlcore.flight.replies import Draining, PutReply
from dlcore.flight.statuses import ERROR_KEY, KEY_PREFIX, LOCATION_KEY
from dlcore.proxy.writing.budget import RETRY_AFTER_S
from dlcore.proxy.writing.route import AskHere, GiveTo, GiveUp, Route, Sent, Unreached

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from dlcore.base.access.rights import Caller
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.flight.calls import Context
    from dlcore.proxy.callers import Stay
    from dlcore.proxy.membership import Membership

logger = logging.getLogger(__name__)

# The time that the owner itself gives (`producer_server.PARTING_S`).
_PARTING_S = 1.0
_ENDS = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""Exceptions of a write to a call that has ended."""


class OwnerStatusError(Exception):
    """The owner of a log ended a call with this status, which is passed on to the client."""

    def __init__(
        self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...]
    ) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.metadata = metadata


@dataclass(frozen=True, slots=True)
class Refusal:
    """The end of a call at another proxy that had no answer."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...]

    @property
    def location(self) -> str | None:
        """The location to which that proxy redirects the call."""
        return dict(self.metadata).get(LOCATION_KEY)

    @property
    def is_unreached(self) -> bool:
        """Whether gRPC ended the call, and not a proxy."""
        silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        is_silent = self.code in silent or self.details == BROKEN
        return is_silent and ERROR_KEY not in dict(self.metadata)

    def error(self) -> OwnerStatusError:
        """Return the error that passes the status on to the client."""
        return OwnerStatusError(self.code, self.details, self.metadata)


class Forwarding:
    """The calls that one proxy makes at others."""

    def __init__(self, membership: Membership, tls: TlsInUse | None) -> None:
        self._membership = membership
        self._channels = Channels(tls)
        self._relays: dict[Relay, None] = {}  # an ordered set

    def __len__(self) -> int:
        return len(self._relays)

    @property
    def location(self) -> str:
        """The location of this proxy."""
        return self._membership.location

    def wish(self, context: Context) -> Wish:
        """Return the wish of a call.  Raises: ConfigurationError."""
        return wish_of(context.invocation_metadata() or ())

    # Routing

    async def follow(
        self,
        what: str,
        error: LogElsewhereError,
        route: Route,
        ask: Callable[[str], Awaitable[Refusal | None]],
    ) -> bool:
        """Give a call to the proxy that `error` names, and follow its redirections.

        Returns: True if a proxy has served the call; False if this proxy must decide again.

        Raises:
            OwnerStatusError: the owner refused the call.
            LogNotReadyError: no proxy serves the log now.
        """
        effect = route.handle(Sent(error.location))
        while True:
            match effect:
                case AskHere(pause_s):
                    await asyncio.sleep(pause_s)
                    return False
                case GiveUp(location):
                    raise LogNotReadyError(
                        f"{what}: the proxy at {location} should serve it and does not, or is "
                        "not reached from here: try again",
                        retry_after_s=RETRY_AFTER_S,
                    ) from error
                case GiveTo(location):
                    refusal = await ask(location)
                    if refusal is None:
                        return True
                    if refusal.location is not None:
                        effect = route.handle(Sent(refusal.location))
                    elif refusal.is_unreached:
                        logger.warning(
                            "%s: the proxy at %s is not reached: %s; to do: see that proxies "
                            "reach each other at the addresses they announce",
                            what,
                            location,
                            refusal.details,
                        )
                        effect = route.handle(Unreached(location))
                    else:
                        raise refusal.error()

    # Streams

    async def put(
        self,
        context: Context,
        location: str,
        first: bytes,
        stay: Stay,
        held: Callable[[int], AbstractAsyncContextManager[None]],
    ) -> Refusal | None:
        """Serve a stream at another proxy to its end; return the refusal if it does not serve it.

        Args:
            context: the client's call.
            location: the location of the other proxy.
            first: the message that opens the stream.
            stay: the time for which the stream may last.
            held: holds memory for a number of bytes during its block.
        """
        call = self._call(location, "stream_stream", "DoPut", stay.caller)
        relay = Relay(context, call, location, held)
        try:
            answer: Any = grpc.aio.EOF
            with contextlib.suppress(*_ENDS):  # the status of the call says more, see below
                await call.write(first)
                answer = await call.read()
            if answer is grpc.aio.EOF:
                return await _refusal_of(call)
            logger.info("a stream of %s is forwarded to %s", stay.caller.account, location)
            self._relays[relay] = None
            stay.when_ended(relay.end)
            await relay.run(answer)
        finally:
            self._relays.pop(relay, None)
            call.cancel()
        return None

    # Actions

    async def act(
        self, location: str, request: bytes, caller: Caller, timeout_s: float | None
    ) -> tuple[list[bytes], Refusal | None]:
        """Have another proxy perform an action; return its answers, or its refusal."""
        call = self._call(
            location, "unary_stream", "DoAction", caller, request, timeout_s=timeout_s
        )
        try:
            return [answer async for answer in call], None
        except grpc.aio.AioRpcError:
            return [], await _refusal_of(call)
        finally:
            call.cancel()

    # Channels

    def _call(
        self,
        location: str,
        kind: str,
        method: str,
        caller: Caller,
        *request: bytes,
        timeout_s: float | None = None,
    ) -> Any:
        here = Forwarder(self._membership.location, self._membership.presence.secret, caller)
        return self._channels.call(
            location, kind, method, *request, metadata=here.metadata(), timeout=timeout_s
        )

    def end(self) -> None:
        """Stop forwarding on open streams; they end when all forwarded messages are answered."""
        for relay in list(self._relays):
            relay.end()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._channels.aclose()


class Relay:
    """One stream between a client and the owner of a log, which has accepted it."""

    def __init__(
        self,
        context: Context,
        call: Any,
        location: str,
        held: Callable[[int], AbstractAsyncContextManager[None]],
    ) -> None:
        self._context = context
        self._call = call
        self._location = location
        self._held = held
        self._last: tuple[bytes, ...] = ()  # the last two messages of the owner
        self._is_writing = False
        self._ending = asyncio.Event()
        self._reason: DLError = LogNotReadyError("this proxy stops: write on at another one")
        self._has_dropped = False  # messages that came after the end of forwarding
        self._endings = BackgroundTasks()

    async def run(self, answer: bytes) -> None:
        """Forward both ways until the owner ends the stream.

        Raises:
            OwnerStatusError: the owner's status.
            WriteError: the owner is gone.
            LogNotReadyError: a message got no memory here for long; or this proxy stops.
            UnauthenticatedError: the proof of the caller has ended.
        """
        async with contextlib.aclosing(self._endings), side_tasks() as tasks:
            taking = tasks.start(self._take(), name="forwarding a stream")
            await self._pass_back(answer)
            if self._ending.is_set():
                await self._part(taking)
            elif taking.done():
                taking.result()
            else:
                raise self.lost("the stream was ended there")

    async def _take(self) -> None:
        """Pass messages on to the owner, until the client has sent all, or memory is refused."""
        try:
            while isinstance(data := await self._context.read(), bytes):
                if self._ending.is_set():
                    self._has_dropped = True
                    continue
                async with self._held(len(data)):
                    if self._ending.is_set():  # while it waited for memory
                        self._has_dropped = True
                        continue
                    self._is_writing = True
                    await self._call.write(data)
                    self._is_writing = False
                # The memory of the message must not stay during the wait for the next one.
                del data
                if self._ending.is_set():
                    await self._call.done_writing()
            if not self._ending.is_set():
                await self._call.done_writing()
        except _ENDS:
            self._has_dropped = True  # the owner's answer says why
        except DLError:
            with contextlib.suppress(*_ENDS):
                await self._call.done_writing()  # the owner acknowledges the accepted messages
            raise

    async def _pass_back(self, answer: Any) -> None:
        """Pass the owner's answers on to the client, until the owner ends the stream."""
        try:
            while answer is not grpc.aio.EOF:
                self._last = (*self._last[-1:], answer)
                await send(self._context, answer)
                answer = await self._call.read()
        except grpc.aio.AioRpcError:
            refusal = await _refusal_of(self._call)
            if refusal is None or refusal.is_unreached:
                raise self.lost(refusal.details if refusal else "it ended") from None
            raise refusal.error() from None

    def end(self, reason: DLError | None = None) -> None:
        """Stop forwarding, and let the owner acknowledge the forwarded messages.

        The reason is by default that this proxy stops.
        """
        if not self._ending.is_set():
            self._reason = reason or self._reason
            self._ending.set()
            # A message that is being written must go out before the half-close; `_take` ends the
            # half then.
            if not self._is_writing:
                self._endings.start(self._done_writing(), name="ending a forwarded stream")

    async def _done_writing(self) -> None:
        with contextlib.suppress(*_ENDS):
            await self._call.done_writing()

    async def _part(self, taking: asyncio.Task[None]) -> None:
        """Tell the client that forwarding ends, and give it some time to end the stream.

        All forwarded messages are acknowledged by then.
        """
        await send_reply(self._context, PutReply(draining=Draining(self._location)))
        # Without a look at the result: the client may take its time, and is refused below in any
        # case.
        await asyncio.wait([taking], timeout=_PARTING_S)
        if not taking.done() or self._has_dropped:
            raise self._reason
        taking.result()

    def lost(self, why: str) -> WriteError:
        """Return the error for a stream whose owner is gone, with its last acknowledgement."""
        replies = map(reply_of, self._last)  # the last one may say that the owner drains
        acked = max((each.acked or 0 for each in replies), default=0)
        return WriteError(
            f"the stream to the proxy at {self._location}, to which it was forwarded, broke "
            f"({why}): the last acknowledgement that came of it was of {acked} records, which are "
            "durable; those after them may be in the log or not"
        )


async def _refusal_of(call: Any) -> Refusal | None:
    """Return the status of a call that has ended; None if it ended in order."""
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return None
    metadata = await call.trailing_metadata() or ()
    details = tuple((key, value) for key, value in metadata if key.startswith(KEY_PREFIX))
    return Refusal(code, await call.details() or "", details)
