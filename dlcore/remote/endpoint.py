"""Calls to whichever of some proxies answers: errors are the core's, outages are waited out."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from dlcore.base import errors
from dlcore.base.background import BackgroundTasks
from dlcore.base.backoff import Backoff, Wait
from dlcore.base.closing import AsyncClosing
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    DLError,
    ProxyUnavailableError,
)
from dlcore.flight.calls import CLIENT_OPTIONS, METHOD
from dlcore.flight.put import UNREACHABLE_MAX
from dlcore.flight.statuses import LOCATION_KEY, RETRY_KEY
from dlcore.remote.tls_reasons import tls_reason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractAsyncContextManager

    from google.protobuf.message import Message

    from dlcore.base.tls import TlsFiles

_ADDRESS = r"([^\s/,:\[\]]+|\[[0-9a-fA-F:.]+\]):\d+"
_ENDPOINT = re.compile(rf"grpc(\+tls)?://{_ADDRESS}(,{_ADDRESS})*")
_NAMED = re.compile(r"(\w+Error): (.*)", re.DOTALL)
ANSWER_S = 30.0
"""A call that asks for one answer is given up after so long, and another proxy is asked."""
LONG_ANSWER_S = 120.0
"""Likewise one that may wait for a lock, for what is being written, or for very many logs."""
DRAIN_ANSWER_S = 600.0
"""Likewise a drain, which waits for all logs of a proxy."""
LIST_ANSWER_S = 300.0
"""Likewise the list of logs."""
_LONG_ACTIONS = frozenset(
    {
        "abort_append",
        "commit_append",
        "delete",
        "move_subscription",
        "places",
        "release",
        "rename",
        "schemas",
        "seal",
        "snapshots",
        "stream_end",
        "truncate",
    }
)
_IDLE_MAX = 16
"""Of so many proxies to which it was sent channels without a call are kept."""
_LOGS_MAX = 10_000
"""Of so many logs is noted where they are written; for another one the proxies are asked."""
_FIRST_PAUSE_S, _PAUSE_MAX_S = 0.01, 1.0
_LATE = "timed out"
"""gRPC says so of a connection on which nothing came; TLS is refused with an answer."""
_TOO_LARGE = "larger than max"
"""What gRPC says of a message; for nothing else than that would it be of no use to try again."""

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


def addresses_of(endpoint: str) -> list[str]:
    """Return what an endpoint like ``grpc://host:port,host:port`` names; or ``grpc+tls://…``.

    Raises: ConfigurationError: it is something else.
    """
    if _ENDPOINT.fullmatch(endpoint) is None:
        raise ConfigurationError(
            f"endpoint {endpoint!r}: expected grpc://host:port, or several proxies as in "
            "grpc://host:port,host:port; with TLS grpc+tls://host:port"
        )
    return endpoint.partition("://")[2].split(",")


def answer_s(asked: str) -> float:
    """Return how long an action, or a method with an end, may take before it is given up."""
    if asked == "ListFlights":
        return LIST_ANSWER_S
    if asked == "drain":
        return DRAIN_ANSWER_S
    return LONG_ANSWER_S if asked in _LONG_ACTIONS else ANSWER_S


def open_channels(endpoint: str, tls: TlsFiles | None) -> list[grpc.aio.Channel]:
    """Return a channel to each proxy of an endpoint, which connects when it is used.

    Raises: ConfigurationError: there is no such endpoint, or TLS is given on one side only.
    """
    addresses, is_secure = addresses_of(endpoint), endpoint.startswith("grpc+tls:")
    if not is_secure and tls is not None:
        raise ConfigurationError(f"endpoint {endpoint!r} with files of TLS: expected grpc+tls://…")
    if not is_secure:
        return [grpc.aio.insecure_channel(each, options=CLIENT_OPTIONS) for each in addresses]
    # Without files whom the system trusts is trusted.
    credentials = grpc.ssl_channel_credentials() if tls is None else tls.channel_credentials()
    return [
        grpc.aio.secure_channel(each, credentials, options=CLIENT_OPTIONS) for each in addresses
    ]


def is_cancelled() -> bool:
    """Return whether a cancellation is this task's, and not one of the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def error_of(status: grpc.StatusCode, details: str) -> DLError:
    """Return the error that a proxy told, or that it cannot be reached, or answers no proxy's."""
    named = _NAMED.fullmatch(details)
    kind = None if named is None else getattr(errors, named[1], None)
    if named is not None and isinstance(kind, type) and issubclass(kind, DLError):
        return kind(named[2])
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return ProxyUnavailableError(f"no proxy answers: {details}")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE not in details:
        # gRPC refuses it, before the proxy knows of it.
        return ProxyUnavailableError(f"a proxy serves as many calls as it may: {details}")
    return errors.UnexpectedError(f"a proxy answered {status.name}: {details}")


class Retries:
    """When something is tried again that has failed: after a pause, or at once where we are sent.

    Pauses are of no certain length, so that many who have lost one proxy do not come together.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._clock = asyncio.get_running_loop().time
        self._forget()

    def _forget(self) -> None:
        self._backoff = Backoff(_FIRST_PAUSE_S, _PAUSE_MAX_S)
        self._asked: set[str] = set()  # where we were sent to
        self._outage: Wait | None = None

    def succeeded(self) -> None:
        """Forget the failures."""
        if self._outage is not None:
            self._forget()

    def failed(
        self, error: DLError, location: str | None, *, again: bool, retry_after_s: float = 0.0
    ) -> float:
        """Return after how long to try again.  Raises: `error`, not `again` or once too late.

        Who has waited for a while is told of it, once.
        """
        now = self._clock()
        self._outage = self._outage or Wait(now)
        left_s = self._outage.begun_s + self._patience_s - now
        if not again or left_s <= 0:
            raise error from None  # what gRPC said is in it
        if self._outage.is_due(now):
            logger.warning("%s; trying for %.0f s more", error, left_s)
        if location is not None and location not in self._asked:
            self._asked.add(location)
            return 0.0
        pause_s = self._backoff.failed(now)
        # At the end of the patience once more, to tell why.
        return min(retry_after_s + random.uniform(pause_s / 2, pause_s), left_s)


class _Located:
    """A channel to a proxy to which one was sent, and how many calls it has."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls = 0


def _note(known: dict[str, _T], log: str, value: _T) -> None:
    """Note a value of a log, in place of the log's that was noted first where there are many."""
    known.pop(log, None)
    known[log] = value
    if len(known) > _LOGS_MAX:
        del known[next(iter(known))]


class Endpoint(AsyncClosing):
    """Some proxies, one of which is asked until it fails."""

    def __init__(self, endpoint: str, *, patience_s: float, tls: TlsFiles | None = None) -> None:
        self._channels = open_channels(endpoint, tls)
        self._addresses = addresses_of(endpoint)
        self._scheme = endpoint.partition("://")[0]
        self._tls = tls
        self._reasons: dict[str, str] = {}
        self.is_reached = False
        """Whether a proxy has answered: then one that does not is waited for, whatever it says."""
        self._owners: dict[str, str] = {}  # of logs, the locations of the proxies that write them
        self._unreached: dict[str, tuple[str, ...]] = {}
        self._located: dict[str, _Located] = {}  # the one used last comes last
        self._closings = BackgroundTasks()
        self.patience_s = patience_s
        self._turn = 0
        self._closed = False

    async def ask(self, method: str, request: Message, answer: type[Message]) -> Any:
        """Return the answer of a method that gives one; each attempt may take `ANSWER_S`."""
        messages = self._messages("unary_unary", method, lambda: request, ANSWER_S)
        async with aclosing(messages) as answers:
            return answer.FromString(await anext(answers))

    def stream(
        self, method: str, request: Callable[[], Message], *, within_s: float | None = None
    ) -> AbstractAsyncContextManager[AsyncGenerator[bytes, None]]:
        """Return the messages of a method that gives many.

        After an outage the call is made again, with what `request` returns then, and goes on.
        With `within_s` a call that has not come to its end by then counts as one that failed.
        """
        return aclosing(self._messages("unary_stream", method, request, within_s))

    async def _messages(
        self, kind: str, method: str, request: Callable[[], Message], within_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        retries = Retries(self.patience_s)
        location: str | None = None
        while True:
            self._require_open()
            turn = self._turn
            data = request().SerializeToString()
            call = self._call(location, kind, method, data, within_s=within_s)
            try:
                if kind == "unary_unary":
                    answer = await call
                    self.is_reached = True
                    yield answer
                    return
                async with aclosing(aiter(call)) as answers:
                    async for data in answers:
                        self.is_reached = True
                        # A list that is cut off at its deadline begins anew: its first messages
                        # are no success, or patience would never end.
                        if within_s is None:
                            retries.succeeded()
                        yield data
            except asyncio.CancelledError:
                if not is_cancelled():
                    self._require_open()  # which ended the call
                raise
            except grpc.aio.AioRpcError as failure:
                told = dict(failure.trailing_metadata() or ())
                location = told.get(LOCATION_KEY)
                self.is_reached |= location is not None
                error = error_of(failure.code(), failure.details() or "")
                error = await self.explained(error, turn)
                after_s = int(told.get(RETRY_KEY, 0)) / 1000
                again = error.retriable
                pause_s = retries.failed(error, location, again=again, retry_after_s=after_s)
            else:
                return
            finally:
                call.cancel()
            if location is None:
                self._pass_by(turn)
            await asyncio.sleep(pause_s)

    def _pass_by(self, turn: int) -> None:
        """Ask the next proxy from now on, unless another call has found that this one fails."""
        if turn == self._turn:
            self._turn = (turn + 1) % len(self._channels)

    async def explained(self, error: DLError, turn: int) -> DLError:
        """Return what to tell of a failure at the proxy whose turn it was.

        As long as none was reached that is what is wrong with TLS, for good if it is with all.
        """
        if self.is_reached or not isinstance(error, ProxyUnavailableError) or _LATE in str(error):
            return error
        address = self._addresses[turn]
        is_secure = self._scheme == "grpc+tls"
        reason = await tls_reason(address, self._tls, is_secure=is_secure)
        if reason is None:
            self._reasons.pop(address, None)
            return error
        self._reasons[address] = f"the proxy at {self._scheme}://{address}: {reason}"
        kind = (
            ConfigurationError if len(self._reasons) == len(set(self._addresses)) else type(error)
        )
        return kind("; ".join(self._reasons.values()))

    def put(self, log: str) -> tuple[Any, int]:
        """Begin to write to a log, at the proxy that owns it, as far as that is known.

        Returns the call, and whose turn it is: what `failed` is told.
        """
        self._require_open()
        return self._call(self._owners.get(log), "stream_stream", "DoPut"), self._turn

    def _call(
        self,
        location: str | None,
        kind: str,
        method: str,
        *request: bytes,
        within_s: float | None = None,  # gRPC's own deadline
    ) -> Any:
        """Begin a call to the proxy at a location, or to the one whose turn it is."""
        path = f"{METHOD}{method}"
        if location is None:
            return getattr(self._channels[self._turn], kind)(path)(*request, timeout=within_s)
        located = self._located.pop(location, None)
        if located is None:
            located = _Located(*open_channels(location, self._tls))
        self._located[location] = located
        call = getattr(located.channel, kind)(path)(*request, timeout=within_s)
        located.calls += 1
        call.add_done_callback(partial(self._call_ended, located))
        return call

    def _call_ended(self, located: _Located, _: object) -> None:
        """Close the channels that nobody uses, but for the latest few.

        Proxies that are started again may have other addresses, without an end.
        """
        located.calls -= 1
        idle = [location for location, each in self._located.items() if not each.calls]
        for location in idle[:-_IDLE_MAX]:
            channel = self._located.pop(location).channel
            self._closings.start(channel.close(), name=f"closing the channel to {location}")

    def is_owned_by(self, log: str, location: str) -> None:
        """Note which proxy writes a log."""
        _note(self._owners, log, location)

    def failed(self, log: str, turn: int, *, reached: bool) -> None:
        """Note that the proxy asked at a turn does not write a log: another one is asked next.

        It is told which locations were not reached.
        """
        location = self._owners.pop(log, None)
        if location is None:
            self._pass_by(turn)
            location = f"{self._scheme}://{self._addresses[turn]}"
        if not reached:
            others = [each for each in self.unreached(log) if each != location]
            _note(self._unreached, log, (*others[1 - UNREACHABLE_MAX :], location))

    def unreached(self, log: str) -> tuple[str, ...]:
        """Return where a log was to be written that was not reached since a proxy took it."""
        return self._unreached.get(log, ())

    def is_taken(self, log: str) -> None:
        """Note that a proxy has taken what is written to a log."""
        self.is_reached = True
        self._unreached.pop(log, None)

    def _require_open(self) -> None:
        if self._closed:
            raise AlreadyClosedError("the remote namespace is closed")

    async def aclose(self) -> None:
        """Close the connections; calls that wait end."""
        self._closed = True
        channels = [*self._channels, *(each.channel for each in self._located.values())]
        await asyncio.gather(*(channel.close() for channel in channels))
        await self._closings.finish()
