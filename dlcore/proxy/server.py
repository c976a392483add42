"""The life of a proxy: it opens its namespace, listens, appears among the live ones, and leaves."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc

from dlcore.closing import AsyncClosing
from dlcore.errors import ConfigurationError
from dlcore.namespace import open_namespace
from dlcore.proxy.actions import Actions
from dlcore.proxy.health import Health
from dlcore.proxy.membership import Membership, location_of
from dlcore.proxy.reading.serving import ReadPath
from dlcore.proxy.service import FlightService

if TYPE_CHECKING:
    from dlcore.proxy.config import ProxyConfig
    from dlcore.tls import TlsFiles

_STOP_GRACE_S = 0.5


class ProxyServer(AsyncClosing):
    """One proxy, which serves from `start` to `aclose`."""

    def __init__(self, address: str, reads: ReadPath, steps: AsyncExitStack) -> None:
        self.address = address
        """Where clients reach it: ``host:port``."""
        self.reads = reads
        self._steps = steps

    @property
    def location(self) -> str:
        """Where Flight clients connect to."""
        return location_of(self.address)

    @classmethod
    async def start(
        cls, uri: str, config: ProxyConfig, *, tls: TlsFiles | None = None
    ) -> ProxyServer:
        """Serve the namespace at `uri`; with `tls` bookies are asked by it.

        Raises:
            ConfigurationError: the port is taken, or the host is none of this machine.
            DLError: of the namespace.
        """
        async with AsyncExitStack() as steps:
            server = grpc.aio.server(
                options=[
                    # Two processes on one port would share its clients between them.
                    ("grpc.so_reuseport", 0),
                    ("grpc.max_receive_message_length", config.message_bytes_max),
                ]
            )
            steps.push_async_callback(server.stop, None)
            port = _listen(server, config)
            address = f"{config.advertised_host or config.host}:{config.advertised_port or port}"
            namespace = await steps.enter_async_context(
                await open_namespace(uri, client_id=location_of(address), tls=tls)
            )
            context = namespace.log_context
            membership = Membership(context.store, context.paths, address)
            steps.push_async_callback(membership.aclose)
            health = Health()
            reads = ReadPath(namespace, membership, config)
            steps.push_async_callback(reads.aclose)
            service = FlightService(Actions(namespace, membership), reads)
            server.add_generic_rpc_handlers((service.handler(), health.handler()))
            await server.start()
            steps.push_async_callback(server.stop, _STOP_GRACE_S)
            await membership.join()
            steps.push_async_callback(membership.leave)
            health.tell(serves=True)
            steps.callback(health.tell, serves=False)
            return cls(address, reads, steps.pop_all())

    async def aclose(self) -> None:
        """Leave the live proxies, end what is served, close the namespace."""
        await self._steps.aclose()


def _listen(server: grpc.aio.Server, config: ProxyConfig) -> int:
    address = f"{config.host}:{config.port}"
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigurationError(
            f"cannot listen on {address}: the port is taken, or the host is no address of this "
            "machine"
        ) from error
