"""The life cycle of a proxy: it opens its namespace, listens, joins the live proxies, and stops."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from dlcore.backends.direct.metrics import METRICS as CLIENT_METRICS, samples
from dlcore.backends.direct.trial import trial_log, try_log
from dlcore.base.access.audit_file import AuditFile
from dlcore.base.access.tls import TlsFiles
from dlcore.base.access.tls_in_use import TlsInUse
from dlcore.base.access.tls_refusals import own_refusal
from dlcore.base.background import side_tasks
from dlcore.base.closing import AsyncClosing
from dlcore.base.extras import missing_packages_explained
from dlcore.base.http_options import http_address_of
from dlcore.base.listening.listener import listening_error
from dlcore.base.listening.operator_port import Operated, operator_port
from dlcore.flight.calls import keepalive_options
from dlcore.metadata.binding import read_binding
from dlcore.metadata.cluster_settings import ClusterSettingsStore
from dlcore.metadata.operated import METRICS as METADATA_METRICS, source_of
from dlcore.proxy.actions import Actions
from dlcore.proxy.callers import Callers
from dlcore.proxy.config import LIVE_SETTINGS
from dlcore.proxy.gatekeeper import Gatekeeper
from dlcore.proxy.health import Health
from dlcore.proxy.membership import Membership
from dlcore.proxy.metrics import METRICS, ProxyMetrics, checks
from dlcore.proxy.reading.serving import ReadPath
from dlcore.proxy.service import FlightService
from dlcore.proxy.writing.balancing import Balancing
from dlcore.proxy.writing.forwarding import Forwarding
from dlcore.proxy.writing.owner import LogOwner
from dlcore.proxy.writing.put import PutService
from dlcore.proxy.writing.staging import Stagings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.backends.direct.ports import NamespacePorts
    from dlcore.base.health import Check
    from dlcore.base.listening.http_server import HttpServer
    from dlcore.metadata.cluster_settings import Value
    from dlcore.metadata.one_node import NodeFollower
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.kafka.server import KafkaServer

logger = logging.getLogger(__name__)


class LiveSettings:
    """The configuration of a proxy, with the settings of its cluster, which it takes over.

    Args:
        given: what the proxy was started with.
        parts: called with each new configuration.
    """

    def __init__(self, given: ProxyConfig, *parts: Callable[[ProxyConfig], None]) -> None:
        self._given = self._config = given
        self._parts = parts

    def follow(self, store: MetadataStore, paths: NamespacePaths) -> NodeFollower:
        """Take over the settings of the cluster, soon and after each change, until it is closed."""
        return ClusterSettingsStore(store, paths).follow("proxy", self.configure)

    def configure(self, settings: Mapping[str, Value]) -> None:
        """Take over the settings of the cluster; the others are as they were given.

        Raises:
            ConfigurationError: a value is wrong; nothing changes.
        """
        known = {key: value for key, value in settings.items() if key in LIVE_SETTINGS}
        config = replace(self._given, **known)  # type: ignore[arg-type]  # checked
        if config == self._config:
            return
        logger.info("settings of the cluster are in use: %s", known)
        self._config = config
        for configure in self._parts:
            configure(config)


_STOP_GRACE_S = 1.0
_READ_ON_S = 0.5
"""Time in which readers may finish at a stop; the others are then sent to another proxy."""
# By default gRPC closes connections of clients that ping more often than every five minutes.
_PING_MIN_MS = 1_000
_SILENCE_MS = 20_000
_HANDSHAKE_MS = 10_000
_IDLE_MS = 600_000
"""A connection without a call is closed after this time; the client's next call opens another."""


class ProxyServer(AsyncClosing):
    """One proxy; it serves from `start` to `aclose`."""

    def __init__(
        self,
        location: str,
        reads: ReadPath,
        http: HttpServer | None,
        kafka: KafkaServer | None,
        steps: AsyncExitStack,
    ) -> None:
        self.location = location
        """The location that Flight clients connect to."""
        self.reads = reads
        self.http_port = None if http is None else http.port
        """Port of metrics and health; None: there is none."""
        self.kafka = kafka
        """The port for Kafka's clients; None: there is none."""
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

        The proxy listens first, because the location has its port.  The last step is the first at
        the end: logs are released while all that this needs still works.

        Raises:
            ConfigurationError: it cannot listen there.
            DLError: an error of the namespace.
        """
        async with AsyncExitStack() as steps:
            audit = AuditFile(Path(config.audit_file)) if config.audit_file else None
            if audit is not None:
                steps.push_async_callback(audit.aclose)
            server = grpc.aio.server(
                maximum_concurrent_rpcs=config.calls_max,
                options=_options(config),
            )
            steps.push_async_callback(server.stop, None)
            port, tls = _listen(server, config)
            location = config.location(port)
            namespace = await steps.enter_async_context(await open_as(location))
            context = namespace.log_context
            kafka = await _kafka_port(config, tls, steps)
            address = None if kafka is None else kafka.address
            membership = Membership(context.store, context.paths, location, kafka=address)
            steps.push_async_callback(membership.aclose)
            health = Health()
            reads = ReadPath(namespace, membership, config)
            steps.push_async_callback(reads.aclose)
            owner = LogOwner(namespace, membership, config)
            steps.push_async_callback(owner.aclose)

            drain, undrain = _changes(owner, health)
            stagings = Stagings(namespace, config)
            steps.push_async_callback(stagings.aclose)
            forwarding = Forwarding(membership, tls)
            steps.push_async_callback(forwarding.aclose)
            puts = PutService(owner, forwarding, stagings, config)
            live = LiveSettings(config, puts.configure, stagings.configure, reads.configure)
            steps.push_async_callback(live.follow(context.store, context.paths).aclose)
            balancing = Balancing(owner, membership, config)
            steps.push_async_callback(balancing.aclose)
            found = checks(membership, health, audit)
            actions = Actions(
                namespace, membership, owner, puts, drain, undrain, balancing.report, tls, found
            )
            callers = Callers(membership, config)
            steps.push_async_callback(callers.aclose)
            gate = Gatekeeper(namespace, callers, membership.outages, config, audit)
            await gate.start()
            steps.push_async_callback(gate.aclose)
            service = FlightService(actions, puts, reads, forwarding, callers, gate)
            server.add_generic_rpc_handlers((service.handler(), health.handler()))
            await server.start()
            steps.push_async_callback(_stop, server, service)
            if kafka is not None:
                kafka.serve(namespace, membership, reads, puts, callers, gate)
                steps.push_async_callback(kafka.aclose)
            figures = ProxyMetrics(
                owner,
                reads,
                puts.figures,
                membership,
                balancing.handed_over,
                audit,
                logs_max=config.http_logs_max,
            )
            operated = _operated(namespace, figures, found, config)
            opened = await steps.enter_async_context(operator_port(config, operated, tls))
            # Only now: other proxies send clients here as soon as they see us.
            await _join(membership, namespace.ports)
            balancing.start()
            await steps.enter_async_context(_watched(tls))
            health.report(serves=True)
            steps.push_async_callback(drain)
            return cls(location, reads, opened, kafka, steps.pop_all())

    async def aclose(self) -> None:
        """Release all logs, end all calls, and close the namespace."""
        await self._steps.aclose()


async def _join(membership: Membership, ports: NamespacePorts) -> None:
    """Join the live proxies, with all features of the cluster."""
    await membership.join()
    # An upgrade that is finalized from now on has asked this proxy, too.
    await read_binding(ports.store, ports.paths, fresh=True)


def _changes(
    owner: LogOwner, health: Health
) -> tuple[Callable[[], Awaitable[None]], Callable[[], Awaitable[None]]]:
    """Return what drains a proxy, and what makes it take logs again; one at a time."""
    changing = asyncio.Lock()

    async def drain() -> None:
        # First, so that load balancers send no more clients while logs are released.
        health.report(serves=False)
        async with changing:
            await owner.drain()

    async def undrain() -> None:
        async with changing:
            await owner.undrain()
            health.report(serves=True)

    return drain, undrain


def _operated(
    namespace: DirectNamespace,
    figures: ProxyMetrics,
    checks: dict[str, Check],
    config: ProxyConfig,
) -> Operated:
    """Return the proxy as its operators see it."""
    context, address = namespace.log_context, http_address_of(config)
    name = trial_log("proxy", config.advertised_host or config.host, address.port if address else 0)
    return Operated(
        role="proxy",
        metrics=(*METADATA_METRICS, *METRICS, *CLIENT_METRICS),
        sources=[
            source_of(context.store),
            figures.samples,
            partial(samples, context, namespace.get_statistics),
        ],
        checks=checks,
        trial=partial(try_log, namespace, name),
    )


def _options(config: ProxyConfig) -> list[tuple[str, int]]:
    """Return gRPC's options of a proxy."""
    return [
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
    ]


async def _kafka_port(
    config: ProxyConfig, tls: TlsInUse | None, steps: AsyncExitStack
) -> KafkaServer | None:
    """Take the port for Kafka's clients, if there is to be one."""
    if config.kafka_listens_at is None:
        return None
    with missing_packages_explained():
        from dlcore.proxy.kafka.server import KafkaServer  # loads kio
    kafka = KafkaServer(config, tls)
    steps.push_async_callback(kafka.aclose)
    await kafka.open()
    return kafka


async def _stop(server: grpc.aio.Server, service: FlightService) -> None:
    """Accept no more calls, and end the present ones."""
    async with side_tasks() as tasks:
        stopping = tasks.start(server.stop(_STOP_GRACE_S), name="stopping the server")
        await service.end_streams(after_s=_READ_ON_S)
        await stopping


@asynccontextmanager
async def _watched(tls: TlsInUse | None) -> AsyncGenerator[None, None]:
    """Tell meanwhile when certificates expire."""
    async with side_tasks() as tasks:
        if tls is not None:
            tasks.start(tls.watch(), name="looking at the certificates")
        yield


def _judge_own_certificate(files: TlsFiles, host: str) -> None:
    """Warn if clients will refuse it."""
    refusal = own_refusal(files, host=host, strictly=False)
    if refusal is not None:
        logger.warning(
            "%s; to do: give it a certificate that fits (docs/tls.md), else clients refuse it",
            refusal,
        )


def _listen(server: grpc.aio.Server, config: ProxyConfig) -> tuple[int, TlsInUse | None]:
    files = TlsFiles.of(ca=config.tls_ca, cert=config.tls_cert, key=config.tls_key)
    tls = TlsInUse.of(files)
    try:
        if tls is None:
            if config.token_issuer:
                logger.warning(
                    "tokens come in clear text without tls_cert: others can read them; to do: set "
                    "tls_cert and tls_key, unless another program before it does TLS"
                )
            return server.add_insecure_port(config.address), None
        host = config.advertised_host or config.host
        tls.on_change = partial(_judge_own_certificate, tls.files, host)
        tls.on_change()
        credentials = tls.server_credentials(asks_clients=config.asks_clients)
        return server.add_secure_port(config.address, credentials), tls
    except RuntimeError as error:
        raise listening_error(config.address, error) from error
