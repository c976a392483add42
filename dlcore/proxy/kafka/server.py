"""The port of a proxy for Kafka's clients: it accepts connections, and drives their machines."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, assert_never

from dlcore.base.access.tls_in_use import LOOK_S
from dlcore.base.background import BackgroundTasks, together
from dlcore.base.clock import steady_s, wall_s
from dlcore.base.errors import DLError, UnauthenticatedError
from dlcore.base.http_options import address_of
from dlcore.base.listening.listener import Listener, listening_error
from dlcore.proxy.kafka import entrances, messages
from dlcore.proxy.kafka.calls import ENTRANCE_OF, Calls, Shared
from dlcore.proxy.kafka.groups import Groups
from dlcore.proxy.kafka.session import (
    Close,
    Effect,
    Event,
    KafkaSession,
    Perform,
    Performed,
    Prove,
    Proven,
    Received,
    Refused,
    Send,
    SendLater,
    Taken,
)
from dlcore.proxy.writing.budget import Holder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.access.rights import Principal
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.proxy.callers import Callers
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.gatekeeper import Entry, Gatekeeper
    from dlcore.proxy.kafka.calls import Answer, Later
    from dlcore.proxy.membership import Membership
    from dlcore.proxy.reading.serving import ReadPath
    from dlcore.proxy.writing.put import PutService

logger = logging.getLogger(__name__)

_PROOF_S = 10.0
"""A client that must prove who it is has so long, from its connection on."""
_REQUEST_S = 10.0
"""A request that has begun comes within this time."""
_IDLE_S = 600.0
"""A connection without a request is closed after this time, as Kafka's brokers do."""
_SEND_S = 60.0
"""A client that does not take an answer in this time is cut off."""
_LATE_S = 1.0
"""A late client is found out at most so much later: a timer for each wait would cost more."""
_SIZE_BYTES, _CALL_BYTES = 4, 2
"""Each request begins with its size, which does not count itself, and its call."""
_UNANSWERED_MAX = 5
"""Most requests of a producer that are taken and not answered; clients send as many ahead."""
_BUFFERED_BYTES = 64 * 1024


class KafkaServer:
    """Serves from `open` and `serve` to `aclose`.

    Args:
        config: the proxy's configuration; its `kafka_address` is an address.
        tls: the proxy's certificates; None: no TLS.
    """

    def __init__(self, config: ProxyConfig, tls: TlsInUse | None) -> None:
        self._config = config
        context = None
        if tls is not None:
            context = partial(tls.server_context, asks_clients=config.asks_clients)
        self._listener = Listener(self._protocol, context, handshake_s=_PROOF_S)
        self._connections: set[_Connection] = set()
        self._tasks = BackgroundTasks()
        self.address = ""
        """The ``host:port`` that clients connect to; empty before `open`."""
        self._serving: tuple[Shared, Callers, Gatekeeper] | None = None

    async def open(self) -> None:
        """Take the port.

        Raises:
            ConfigurationError: it cannot listen there.
        """
        config = self._config
        at = config.kafka_listens_at
        assert at is not None
        try:
            await self._listener.open(at.host, at.port)
        except OSError as error:
            where = f"kafka_address={config.kafka_address!r}"
            raise listening_error(where, error) from error
        port = config.kafka_advertised_port or self._listener.sockets[0].getsockname()[1]
        self._tasks.start(self._renew(), name="looking at the certificates for Kafka's clients")
        self._tasks.start(self._look(), name="looking for late clients of Kafka's")
        self.address = address_of(config.advertised_host or at.host, port)
        logger.info("Kafka's clients are served at %s", self.address)

    def serve(
        self,
        namespace: DirectNamespace,
        membership: Membership,
        reads: ReadPath,
        puts: PutService,
        callers: Callers,
        gate: Gatekeeper,
    ) -> None:
        """Begin to serve; clients that came before are sent away."""
        shared = Shared(
            namespace=namespace,
            membership=membership,
            reads=reads,
            puts=puts,
            groups=Groups(namespace, membership, reads),
            config=self._config,
            tasks=self._tasks,
        )
        self._serving = shared, callers, gate

    async def aclose(self) -> None:
        """Accept no more, and end the connections."""
        self._listener.close()
        # asyncio reports a connection that it accepted before the listener was closed even now.
        serving, self._serving = self._serving, None
        await self._tasks.aclose()
        if serving is not None:
            serving[0].groups.close()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._listener.renew()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LATE_S)
            for each in self._connections:
                each.look(steady_s())

    def _protocol(self) -> asyncio.BaseProtocol:
        reader = asyncio.StreamReader(limit=_BUFFERED_BYTES)
        return asyncio.StreamReaderProtocol(reader, self._connected)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A client that has reset the connection already has no address any more.
        has_left = writer.get_extra_info("peername") is None
        is_full = len(self._connections) >= self._config.kafka_connections_max
        if self._serving is None or has_left or is_full:
            writer.transport.abort()
            return
        connection = _Connection(reader, writer, *self._serving)
        self._connections.add(connection)
        task = self._tasks.start(connection.run(), name=f"Kafka's client {connection.peer}")
        task.add_done_callback(lambda _: self._ended(connection))

    def _ended(self, connection: _Connection) -> None:
        # Not in `run`: a task that is cancelled before its first step runs no line of it.
        connection.close()
        self._connections.discard(connection)


class _ClosedError(Exception):
    """The connection is closed, for a reason."""


class _Link:
    """The streams of one connection; a peer that is late is cut off by `look`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._transport = writer.transport
        # An answer counts as received when the kernel has all of it.  Not 0: with TLS asyncio then
        # waits although nothing is left to send, until the client sends something.
        self._transport.set_write_buffer_limits(high=1, low=0)
        self._reads_until_s = self._writes_until_s = inf

    async def read(self, count: int, within_s: float) -> bytes:
        """Return so many bytes."""
        self._reads_until_s = steady_s() + within_s
        try:
            return await self._reader.readexactly(count)
        finally:
            self._reads_until_s = inf

    async def write(self, parts: Sequence[Any]) -> None:
        """Send these parts, and wait until the kernel has nearly all of them."""
        self._writes_until_s = steady_s() + _SEND_S
        self._writer.writelines(parts)
        await self._writer.drain()
        self._writes_until_s = inf

    def is_late(self, now_s: float) -> bool:
        """Whether the peer has not sent or taken in time."""
        return min(self._reads_until_s, self._writes_until_s) < now_s

    def abort(self) -> None:
        """End the connection, without a goodbye: TLS waits for that of the client."""
        self._transport.abort()


class _Client:
    """The identity of one client: by its certificate or its host at first, later by its tokens."""

    def __init__(self, writer: asyncio.StreamWriter, callers: Callers, gate: Gatekeeper) -> None:
        self._callers = callers
        self._gate = gate
        host, port, *_ = writer.get_extra_info("peername")
        # A socket of both families has IPv4 clients with this prefix; rules and limits know them
        # without.
        self._host = str(host).removeprefix("::ffff:")
        self.address = address_of(self._host, port)
        certificate = writer.get_extra_info("peercert")
        self.caller = callers.of_connection(certificate, self._host)
        """None: it must prove who it is."""
        self._proven_as: Principal | None = None

    async def proven(self, token: str) -> Event:
        """Check a token; a client that is known already must stay the same."""
        try:
            caller = await self._callers.user_of(token, self._host)
            before = self._proven_as
            if before is not None and before != caller.principal:
                raise UnauthenticatedError(
                    f"a token of {caller.principal} on a connection of {before}"
                )
        except DLError as error:
            if isinstance(error, UnauthenticatedError):
                self._gate.tell_unproven(self._host, self.address, entrances.SASL.name, error)
            return Refused(f"{error}")
        self.caller, self._proven_as = caller, caller.principal
        if caller.expires_at is None:
            return Proven(None)
        return Proven(max(1, int((caller.expires_at - wall_s()) * 1000)))

    def enter(self, name: str) -> AbstractAsyncContextManager[Entry]:
        """Enter by an entrance; the client is known.

        Raises:
            _ClosedError: its token is not good any more.
        """
        caller = self.caller
        assert caller is not None
        if caller.expires_at is not None and caller.expires_at <= wall_s():
            raise _ClosedError(f"the token of {caller.principal} has expired")
        return self._gate.enter_as(caller, self.address, name)


class _Connection:
    """One connection of a client."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        shared: Shared,
        callers: Callers,
        gate: Gatekeeper,
    ) -> None:
        self._link = _Link(reader, writer)
        self._client = _Client(writer, callers, gate)
        self._calls = Calls(shared, on_stall=self._link.abort)
        self._puts = shared.puts
        self._later: asyncio.Queue[Later] = asyncio.Queue(_UNANSWERED_MAX)
        self._session = KafkaSession(
            is_known=self._client.caller is not None,
            checks_tokens=callers.checks_tokens,
            produce_bytes_max=shared.config.message_bytes_max,
        )

    @property
    def peer(self) -> str:
        """The ``host:port`` of the client."""
        return self._client.address

    async def run(self) -> None:
        """Serve until the connection ends."""
        try:
            await together(self._receive(), self._answer())
        except _ClosedError as error:
            logger.info("Kafka's client %s is sent away: %s", self.peer, error)
        except TimeoutError:
            logger.info("Kafka's client %s is sent away: it does not prove who it is", self.peer)
        except (asyncio.IncompleteReadError, OSError) as error:
            logger.debug("Kafka's client %s has left: %s", self.peer, error)

    def close(self) -> None:
        """End the connection, and what its calls hold."""
        self._calls.close()
        self._link.abort()

    def look(self, now_s: float) -> None:
        """Cut the client off if it is late."""
        if self._link.is_late(now_s):
            logger.info("Kafka's client %s is cut off: it was silent for too long", self.peer)
            self._link.abort()

    async def _receive(self) -> None:
        """Take the requests."""
        async with asyncio.timeout(_PROOF_S):
            while not self._session.is_known:
                await self._step(_PROOF_S)
        while True:
            await self._step(_IDLE_S)

    async def _step(self, within_s: float) -> None:
        """Take one request that begins within a time, and answer it, or let it be answered."""
        head = await self._link.read(_SIZE_BYTES + _CALL_BYTES, within_s)
        count = int.from_bytes(head[:_SIZE_BYTES], signed=True)
        call = int.from_bytes(head[_SIZE_BYTES:])
        self._require(count, self._session.bytes_max_of(call))
        try:
            with self._held(call, count):
                rest = await self._link.read(count - _CALL_BYTES, _REQUEST_S)
                frame = head[_SIZE_BYTES:] + rest
                await self._handle(Received(frame))
        except DLError as error:
            raise _ClosedError(f"call {call}: {error}") from error

    def _require(self, count: int, count_max: int) -> None:
        if not _CALL_BYTES <= count <= count_max:
            raise _ClosedError(f"a request of {count:,} bytes: expected 2 to {count_max:,}")

    def _held(self, call: int, size_bytes: int) -> AbstractContextManager[None]:
        """Hold memory for records while they are received and taken."""
        caller = self._client.caller
        if call != messages.PRODUCE or caller is None:
            return nullcontext()
        return self._puts.received(Holder(self.peer, caller.account), size_bytes)

    async def _answer(self) -> None:
        """Send the answers to requests that were taken."""
        while True:
            answer = await self._later.get()
            await self._link.write(await answer())
            self._later.task_done()

    async def _handle(self, event: Event) -> None:
        for effect in self._session.handle(event):
            await self._do(effect)

    async def _do(self, effect: Effect) -> None:
        match effect:
            case Send(parts):
                # Answers go out in the order of the requests.
                await self._later.join()
                await self._link.write(parts)
            case SendLater(answer):
                await self._later.put(answer)
            case Prove(token):
                await self._handle(await self._client.proven(token))
            case Perform(request):
                answer = await self._performed(request)
                if isinstance(answer, list):
                    await self._handle(Performed(answer))
                    # Only now: the next message of a feed takes memory, so the client must have
                    # this one.
                    self._calls.received()
                else:
                    await self._handle(Taken(answer))
            case Close(reason, loses_records):
                if loses_records:  # the client gets no answer, and takes them for written
                    logger.warning(
                        "Kafka's client %s: %s; to do: set acks=all in the client, which takes "
                        "records for written that are lost",
                        self.peer,
                        reason,
                    )
                raise _ClosedError(reason)
            case _:
                assert_never(effect)

    async def _performed(self, request: Any) -> Answer | Later:
        name = ENTRANCE_OF[request.call].name
        async with self._client.enter(name) as entry:
            try:
                return await self._calls.perform(request, entry)
            except DLError as error:
                # Each log has a code of its own; this is an outage, after which clients ask again.
                raise _ClosedError(f"{name}: {error}") from error
