"""Calls to one of several proxies: errors are those of `dlcore`, outages are retried.

gRPC does not report clearly why TLS fails.  A second connection is made without gRPC, and its
handshake shows the reason.  A proxy that is gone or busy yields no reason here, because another
attempt may succeed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import ssl
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from dlcore.backends.flight.bearer import Bearer
from dlcore.base import errors
from dlcore.base.access.tls import context_for
from dlcore.base.access.tls_refusals import explained, judge_as_grpc, own_refusal
from dlcore.base.addresses import is_address
from dlcore.base.backoff import Backoff, Wait
from dlcore.base.closing import AsyncClosing
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    DLError,
    ProxyUnavailableError,
    UnauthenticatedError,
)
from dlcore.flight.actions import ANSWER_S
from dlcore.flight.calls import Channels
from dlcore.flight.put import UNREACHABLE_MAX
from dlcore.flight.statuses import LOCATION_KEY, RETRY_KEY

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from google.protobuf.message import Message

    from dlcore.backends.flight.bearer import Token
    from dlcore.base.access.tls import TlsFiles


_SERVERS = ssl.Purpose.SERVER_AUTH
_LOOK_S = 2.0
"""A proxy that answers at all sends its first byte within this time."""


class TlsReasons:
    """Why TLS fails with each of several proxies, as far as it was looked for."""

    def __init__(self, locations: Sequence[str], tls: TlsFiles | None) -> None:
        self._locations = locations
        self._tls = tls
        self._found: dict[str, str] = {}

    async def explained(self, error: DLError, location: str) -> DLError:
        """Return the error to report if a proxy does not answer.

        If TLS is wrong at every proxy, it is a `ConfigurationError`, which is not retried.
        """
        scheme, _, address = location.partition("://")
        reason = await tls_reason(address, self._tls, is_secure=scheme == "grpc+tls")
        if reason is None:
            self._found.pop(location, None)
            return error
        self._found[location] = f"the proxy at {location}: {reason}"
        is_everywhere = len(self._found) == len(set(self._locations))
        kind = ConfigurationError if is_everywhere else type(error)
        return kind("; ".join(self._found.values()))


async def tls_reason(address: str, tls: TlsFiles | None, *, is_secure: bool) -> str | None:
    """Return why TLS with a proxy fails, and how to mend it; None if TLS is not the reason.

    Raises: ConfigurationError: our own files are invalid.
    """
    if not is_secure:
        found = await _first_byte(address, _trusting_all())
        if found is None or _is_plain(found):
            return None
        return f"it speaks TLS: expected grpc+tls://{address}, with the certificates to trust"
    context = context_for(_SERVERS) if tls is None else tls.client_context()
    judge_as_grpc(context)
    found = await _first_byte(address, context)
    if isinstance(found, ssl.SSLCertVerificationError):
        return explained(found, tls)
    if _is_plain(found):
        return f"it does not speak TLS: expected grpc://{address}"
    if found is None or found == _SETTINGS:
        return None
    if tls is None or not tls.cert:
        return f"it lets no client in without a certificate: {_EXPECTED}"
    own = own_refusal(tls, host=None, strictly=False)
    return f"it lets no client in with cert={tls.cert!r}: {own or _EXPECTED}"


_EXPECTED = "expected a certificate signed by whom its tls_ca names"


_SETTINGS = b"\0"
"""The first byte of HTTP/2 from a server that has accepted our certificate."""


def _trusting_all() -> ssl.SSLContext:
    """Return a context that trusts every server: safe, because no data is sent."""
    context = context_for(_SERVERS)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _is_plain(found: bytes | ssl.SSLError | None) -> bool:
    # An alert comes from a server that speaks TLS, and has refused us.
    return isinstance(found, ssl.SSLError) and "ALERT" not in (found.reason or "")


async def _first_byte(address: str, context: ssl.SSLContext) -> bytes | ssl.SSLError | None:
    """Return the first byte from a server under TLS, or TLS's error; None if neither is known."""
    host, _, port = address.rpartition(":")
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(_LOOK_S):
            opening = asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
            reader, writer = await opening
            try:
                return await reader.read(1)
            finally:
                writer.transport.abort()
    # It closed the connection without a word of TLS, as a stopping server does.
    except ssl.SSLEOFError:
        return None
    except ssl.SSLError as error:
        return error
    except OSError:  # a timeout is one as well
        return None


_ADDRESS = r"([^\s/,:\[\]]+|\[[0-9a-fA-F:.]+\]):\d+"
_ENDPOINT = re.compile(rf"grpc(\+tls)?://{_ADDRESS}(,{_ADDRESS})*")
_NAMED = re.compile(r"(\w+Error): (.*)", re.DOTALL)
LIST_ANSWER_S = 300.0
"""Timeout of the list of logs."""
_LOGS_MAX = 10_000
"""Most logs whose owner is remembered; for the other logs the proxies are asked."""
_FIRST_PAUSE_S, _PAUSE_MAX_S = 0.01, 1.0
_LATE = "timed out"
"""A part of gRPC's message if a connection brought no byte.  Then TLS is not the reason: a server
answers before it refuses TLS."""
_TOO_LARGE = "larger than max"
"""A part of gRPC's message if a message exceeds a limit.  Only then is another attempt useless."""

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


def addresses_of(endpoint: str) -> list[str]:
    """Return the addresses in an endpoint such as ``grpc://host:port,host:port``.

    Raises: ConfigurationError: it begins with neither ``grpc://`` nor ``grpc+tls://``, or an
        address is invalid.
    """
    addresses = endpoint.partition("://")[2].split(",")
    if _ENDPOINT.fullmatch(endpoint) is None or not all(
        is_address(*address.rpartition(":")[::2]) for address in addresses
    ):
        raise ConfigurationError(
            f"endpoint {endpoint!r}: expected grpc://host:port, or several proxies as in "
            "grpc://host:port,host:port; with TLS grpc+tls://host:port"
        )
    return addresses


def _require_fit(endpoint: str, tls: TlsFiles | None) -> None:
    """Raises: ConfigurationError: `tls` is given for an endpoint without TLS."""
    if tls is not None and not endpoint.startswith("grpc+tls:"):
        raise ConfigurationError(f"endpoint {endpoint!r} with files of TLS: expected grpc+tls://…")


def token_at(
    location: str, token: Token | None, *, endpoint: str | None, tls: TlsFiles | None
) -> Token | None:
    """Return the token for a location that a proxy names; it must not take one out of TLS."""
    is_secure = tls is not None or (endpoint or "").startswith("grpc+tls:")
    return None if is_secure and not location.startswith("grpc+tls:") else token


def is_cancelled() -> bool:
    """Return whether this task was cancelled, and not only the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def error_of(status: grpc.StatusCode, details: str) -> DLError:
    """Return the error in a proxy's status, or the error for a status that no proxy sends."""
    named = _NAMED.fullmatch(details)
    kind = None if named is None else getattr(errors, named[1], None)
    if named is not None and isinstance(kind, type) and issubclass(kind, DLError):
        return kind(named[2])
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return ProxyUnavailableError(f"no proxy answers: {details}")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE not in details:
        # gRPC itself refuses a call beyond its limit of concurrent calls.
        return ProxyUnavailableError(f"a proxy is at its limit of calls (calls_max): {details}")
    return errors.UnexpectedError(f"a proxy answered {status.name}: {details}")


class Retries:
    """The time of the next attempt: after a pause, or at once at a location from a redirection.

    Pauses are random, so that clients that lost the same proxy do not all come back together.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._clock = asyncio.get_running_loop().time
        self._forget()

    def _forget(self) -> None:
        self._backoff = Backoff(_FIRST_PAUSE_S, _PAUSE_MAX_S)
        self._asked: set[str] = set()  # locations from redirections that were tried at once
        self._outage: Wait | None = None

    def succeeded(self) -> None:
        """Forget the failures."""
        if self._outage is not None:
            self._forget()

    def failed(
        self, error: DLError, location: str | None, *, again: bool, retry_after_s: float = 0.0
    ) -> float:
        """Return the seconds until the next attempt.

        A long wait is logged once.

        Raises: `error`, if `again` is False or the patience has ended.
        """
        now = self._clock()
        self._outage = self._outage or Wait(now)
        left_s = self._outage.begun_s + self._patience_s - now
        if not again or left_s <= 0:
            raise error from None  # it has gRPC's message
        if self._outage.is_due(now):
            logger.warning(
                "%s; trying for %.0f s more; to do: see that a proxy serves at the endpoint; the "
                "call fails after this time",
                error,
                left_s,
            )
        # Each location once without a pause: two proxies may redirect to each other for a while.
        if location is not None and location not in self._asked:
            self._asked.add(location)
            return 0.0
        pause_s = self._backoff.failed(now)
        # The last attempt is at the end of the patience: its error is the latest reason.
        return min(retry_after_s + random.uniform(pause_s / 2, pause_s), left_s)


def _note(known: dict[str, _T], log: str, value: _T) -> None:
    """Note a value of a log; beyond `_LOGS_MAX` the oldest note is forgotten."""
    known.pop(log, None)
    known[log] = value
    if len(known) > _LOGS_MAX:
        del known[next(iter(known))]


class Locations:
    """The proxies of an endpoint: whose turn it is, who owns which log, and who was not reached."""

    def __init__(self, locations: Sequence[str]) -> None:
        self.turn = 0
        """The number of the proxy that calls go to."""
        self._all = locations
        self._owners: dict[str, str] = {}  # log -> location of the proxy that writes it
        self._unreached: dict[str, tuple[str, ...]] = {}

    def at(self, turn: int) -> str:
        """Return the location of the proxy of this number."""
        return self._all[turn]

    def pass_by(self, turn: int) -> None:
        """Use the next proxy from now on, unless another call has already moved on."""
        if turn == self.turn:
            self.turn = (turn + 1) % len(self._all)

    def owner_of(self, log: str) -> str | None:
        """Return the location of the proxy that writes a log, if it is known."""
        return self._owners.get(log)

    def is_owned_by(self, log: str, location: str) -> None:
        """Note the location of the proxy that writes a log."""
        _note(self._owners, log, location)

    def failed(self, log: str, turn: int, *, reached: bool) -> None:
        """Note that a write failed at the log's owner, or at the proxy number `turn` without one.

        The next attempt goes to another proxy, and reports to it the locations that were not
        reached.
        """
        location = self._owners.pop(log, None)
        if location is None:
            self.pass_by(turn)
            location = self._all[turn]
        if not reached:
            others = [each for each in self.unreached(log) if each != location]
            _note(self._unreached, log, (*others[1 - UNREACHABLE_MAX :], location))

    def unreached(self, log: str) -> tuple[str, ...]:
        """Return the locations that were not reached since a proxy last accepted a write to it."""
        return self._unreached.get(log, ())

    def is_taken(self, log: str) -> None:
        """Note that a proxy has accepted a stream of writes to a log."""
        self._unreached.pop(log, None)


class Endpoint(AsyncClosing):
    """Several proxies; calls go to one of them until it fails, then to the next."""

    def __init__(
        self,
        endpoint: str,
        *,
        patience_s: float,
        tls: TlsFiles | None = None,
        token: Token | None = None,
    ) -> None:
        self._bearer = None if token is None else Bearer(token)
        self.sent = ""
        """The token of the latest call."""
        self._scheme = endpoint.partition("://")[0]
        locations = [f"{self._scheme}://{each}" for each in addresses_of(endpoint)]
        self.locations = Locations(locations)
        _require_fit(endpoint, tls)
        self._tls = tls
        in_use = None
        if tls is not None:
            from dlcore.base.access.tls_in_use import TlsInUse  # not needed without TLS

            in_use = TlsInUse(tls)
        self._channels = Channels(in_use)
        self._reasons = TlsReasons(locations, tls)
        self.is_reached = False
        """Whether a proxy has answered once.  Then a later failure is no error of configuration,
        and is always retried."""
        self.patience_s = patience_s
        self._closed = False

    async def ask(self, method: str, request: Message, answer: type[Message]) -> Any:
        """Return the answer of a method with one answer; each attempt may take `ANSWER_S`."""
        messages = self._messages("unary_unary", method, lambda: request, ANSWER_S)
        async with aclosing(messages) as answers:
            return answer.FromString(await anext(answers))

    def stream(
        self, method: str, request: Callable[[], Message], *, within_s: float | None = None
    ) -> AbstractAsyncContextManager[AsyncGenerator[bytes, None]]:
        """Return the messages of a method with many answers.

        After an outage the call is made again, with the request that `request` then returns.
        With `within_s` a call fails if its stream has not ended after this time.
        """
        return aclosing(self._messages("unary_stream", method, request, within_s))

    async def _messages(
        self, kind: str, method: str, request: Callable[[], Message], within_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        retries = Retries(self.patience_s)
        location: str | None = None
        while True:
            self.require_open()
            turn = self.locations.turn
            data = request().SerializeToString()
            call = self._call(location, kind, method, data, within_s=within_s)
            sent = self.sent
            try:
                if kind == "unary_unary":
                    answer = await call
                    self.is_reached = True
                    yield answer
                    return
                async with aclosing(aiter(call)) as answers:
                    async for data in answers:
                        self.is_reached = True
                        # A list that is cut off at its deadline starts again from the beginning.
                        # If its first messages counted as success, the patience would never end.
                        if within_s is None:
                            retries.succeeded()
                        yield data
            except asyncio.CancelledError:
                if not is_cancelled():
                    self.require_open()  # `aclose` ends calls by a cancellation
                raise
            except grpc.aio.AioRpcError as failure:
                trailing = dict(failure.trailing_metadata() or ())
                location = trailing.get(LOCATION_KEY)
                self.is_reached |= location is not None
                error = error_of(failure.code(), failure.details() or "")
                error = await self.explained(error, turn)
                after_s = int(trailing.get(RETRY_KEY, 0)) / 1000
                again = error.retriable or self.renewed(error, sent)
                pause_s = retries.failed(error, location, again=again, retry_after_s=after_s)
            else:
                return
            finally:
                call.cancel()
            if location is None:
                self.locations.pass_by(turn)
            await asyncio.sleep(pause_s)

    async def explained(self, error: DLError, turn: int) -> DLError:
        """Return the error to report for a failure at the proxy number `turn`.

        While no proxy has answered, the reason may be TLS.
        """
        if self.is_reached or not isinstance(error, ProxyUnavailableError) or _LATE in str(error):
            return error
        return await self._reasons.explained(error, self.locations.at(turn))

    def put(self, log: str) -> tuple[Any, int]:
        """Begin a stream that writes to a log, at the proxy that owns it, if this is known.

        Returns: the call, and the number of the current proxy, which `Locations.failed` takes.
        """
        self.require_open()
        call = self._call(self.locations.owner_of(log), "stream_stream", "DoPut")
        return call, self.locations.turn

    def _call(
        self,
        location: str | None,
        kind: str,
        method: str,
        *request: bytes,
        within_s: float | None = None,  # gRPC's own deadline
    ) -> Any:
        """Begin a call to the proxy at a location, or to the current one."""
        # A redirection must not take a token out of TLS.
        is_safe = location is None or location.startswith(f"{self._scheme}:")
        self.sent = self._bearer.token() if self._bearer is not None and is_safe else ""
        metadata = (("authorization", f"Bearer {self.sent}"),) if self.sent else None
        location = location or self.locations.at(self.locations.turn)
        _require_fit(location, self._tls)
        options = {"timeout": within_s, "metadata": metadata}
        return self._channels.call(location, kind, method, *request, **options)

    def renewed(self, error: DLError, sent: str) -> bool:
        """Return whether a call was refused for the token that it sent, and there is a new one."""
        is_refused = isinstance(error, UnauthenticatedError)
        return is_refused and self._bearer is not None and self._bearer.renewed(sent)

    def is_taken(self, log: str) -> None:
        """Note that a proxy has accepted a stream of writes to a log."""
        self.is_reached = True
        self.locations.is_taken(log)

    def require_open(self) -> None:
        """Raise `AlreadyClosedError` once the endpoint is closed."""
        if self._closed:
            raise AlreadyClosedError("the remote namespace is closed")

    async def aclose(self) -> None:
        """Close the connections; waiting calls end with an error."""
        self._closed = True
        await self._channels.aclose()
