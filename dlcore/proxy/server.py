"""The life cycle of a proxy: it opens its namespace, listens, joins the live proxies, and stops."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc

from dlcore.base.background import side_tasks
from dlcore.base.closing import AsyncClosing
from dlcore.base.errors import ConfigurationError
from dlcore.base.tls import TlsFiles
from dlcore.base.tls_refusals import own_refusal
from dlcore.flight.calls import keepalive_options
from dlcore.proxy.actions import Actions
from dlcore.proxy.health import Health
from dlcore.proxy.membership import Membership
from dlcore.proxy.reading.serving import ReadPath
from dlcore.proxy.service import FlightService
from dlcore.proxy.writing.balancing import Balancing
from dlcore.proxy.writing.forwarding import Forwarding
from dlcore.proxy.writing.owner import LogOwner
from dlcore.proxy.writing.put import PutService
from dlcore.proxy.writing.staging import Stagings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.proxy.config import ProxyConfig

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 1.0
_READ_ON_S = 0.5
"""Time in which readers may finish at a stop; the others are then sent to another proxy."""
_PING_MIN_MS = 1_000
_SILENCE_MS = 20_000
_HANDSHAKE_MS = 10_000
_IDLE_MS = 600_000
"""A connection without a call is closed after this time; the client's next call opens another."""


class ProxyServer(AsyncClosing):
    """One proxy; it serves from `start` to `aclose`."""

    def __init__(self, location: str, reads: ReadPath, steps: AsyncExitStack) -> None:
        self.location = location
        """The location that Flight clients connect to."""
        self.reads = reads
        self._steps = steps

    @property
    def address(self) -> str:
        """The location's ``host:port``."""
        return self.location.partition("://")[2]

    @classmethod
    async def start(
        cls, open_as: Callable[[str], Awaitable[DirectNamespace]], config: ProxyConfig
    ) -> ProxyServer:
        """Serve a namespace; `open_as` opens it under the proxy's location as its client name.

        Raises:
            ConfigurationError: the port is taken, or the host is no address of this machine.
            DLError: an error of the namespace.
        """
        async with AsyncExitStack() as steps:
            server = grpc.aio.server(
                maximum_concurrent_rpcs=config.calls_max,
                options=[
                    # Otherwise two processes on one port would share the clients between them.
                    ("grpc.so_reuseport", 0),
                    ("grpc.max_receive_message_length", config.message_bytes_max),
                    # Otherwise gRPC buffers some MiB of a stream that we do not read.
                    ("grpc.http2.bdp_probe", 0),
                    # Free the resources of clients whose machine is gone.
                    *keepalive_options(_SILENCE_MS, _SILENCE_MS),
                    # Close connections without a handshake, and idle ones.
                    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
                    ("grpc.max_connection_idle_ms", _IDLE_MS),
                    # Allow pings of clients that wait for records.
                    ("grpc.http2.min_ping_interval_without_data_ms", _PING_MIN_MS),
                    ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_MIN_MS),
                ],
            )
            steps.push_async_callback(server.stop, None)
            port = _listen(server, config)
            location = config.location(port)
            namespace = await steps.enter_async_context(await open_as(location))
            context = namespace.log_context
            membership = Membership(context.store, context.paths, location)
            steps.push_async_callback(membership.aclose)
            health = Health()
            reads = ReadPath(namespace, membership, config)
            steps.push_async_callback(reads.aclose)
            owner = LogOwner(namespace, membership, config)
            steps.push_async_callback(owner.aclose)

            changing = asyncio.Lock()

            async def drain() -> None:
                # First, so that load balancers send no more clients while logs are released.
                health.tell(serves=False)
                async with changing:
                    await owner.drain()

            async def undrain() -> None:
                async with changing:
                    await owner.undrain()
                    health.tell(serves=True)

            stagings = Stagings(namespace, config)
            steps.push_async_callback(stagings.aclose)
            forwarding = Forwarding(membership, config)
            steps.push_async_callback(forwarding.aclose)
            puts = PutService(owner, forwarding, stagings, config)
            balancing = Balancing(owner, membership, config)
            steps.push_async_callback(balancing.aclose)
            actions = Actions(namespace, membership, owner, puts, drain, undrain, balancing.told)
            service = FlightService(actions, puts, reads, forwarding)
            server.add_generic_rpc_handlers((service.handler(), health.handler()))
            await server.start()
            steps.push_async_callback(_stop, server, service)
            # Only now: other proxies send clients here as soon as they see us.
            await membership.join()
            balancing.start()
            health.tell(serves=True)
            steps.push_async_callback(drain)
            return cls(location, reads, steps.pop_all())

    async def aclose(self) -> None:
        """Release all logs, end all calls, and close the namespace."""
        await self._steps.aclose()


async def _stop(server: grpc.aio.Server, service: FlightService) -> None:
    """Accept no more calls, and end the present ones."""
    async with side_tasks() as tasks:
        stopping = tasks.start(server.stop(_STOP_GRACE_S), name="stopping the server")
        await service.end_streams(after_s=_READ_ON_S)
        await stopping


def _listen(server: grpc.aio.Server, config: ProxyConfig) -> int:
    tls = TlsFiles.of(ca=config.tls_ca, cert=config.tls_cert, key=config.tls_key)
    try:
        if tls is None:
            return server.add_insecure_port(config.address)
        refusal = own_refusal(tls, host=config.advertised_host or config.host, strictly=False)
        if refusal is not None:
            logger.warning("%s", refusal)
        asks_clients = config.tls_client_auth == "required"
        credentials = tls.server_credentials(asks_clients=asks_clients)
        return server.add_secure_port(config.address, credentials)
    except RuntimeError as error:
        raise ConfigurationError(
            f"cannot listen on {config.address}: the port is taken, or the host is no address of "
            "this machine"
        ) from error
