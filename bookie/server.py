"""One bookie from start to stop: identity, storage, service, registration, garbage collection.

The bookie starts in this order and stops in the reverse order.  Therefore it is registered only
while it serves, and it serves only after the replay.  If the storage fails, or if another process
takes over the same identity, the bookie ends (`wait_failed`): it never continues with only some of
its guarantees.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from bookie.disks.port import DiskSpace, try_disk
from bookie.disks.real import RealDisk
from bookie.housekeeping import Housekeeping, Place
from bookie.ledger_storage import LedgerStorage
from bookie.membership.given_ids import GivenIds
from bookie.membership.identity import begin_life, establish_identity
from bookie.membership.registration import SpaceReport
from bookie.membership.registration_driver import Registrar
from bookie.serving import metrics
from bookie.serving.control import BookieControl
from bookie.serving.service import BookieService
from bookie.storage.status import StorageState
from dlcore.base.access.tls_in_use import LOOK_S, TlsInUse
from dlcore.base.access.tls_refusals import own_refusal
from dlcore.base.background import fulfil, outcome_of
from dlcore.base.closing import AsyncClosing
from dlcore.base.errors import BookieStorageError, DLError
from dlcore.base.http_options import address_of
from dlcore.base.listening.listener import listening_error
from dlcore.base.listening.operator_port import Operated, operator_port
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.metadata.binding import ensure_namespace, read_binding
from dlcore.metadata.operated import METRICS as METADATA_METRICS, session_check, source_of
from dlcore.metadata.paths import NamespacePaths, parse_uri

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie.server_config import BookieConfig
    from bookie.serving.access import Access
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.clock import Clock
    from dlcore.base.ids import BookieId
    from dlcore.base.metrics import Source
    from dlcore.metadata.port import MetadataStore

logger = logging.getLogger(__name__)

_ANSWER_S = 2.0
"""How long another process of the same bookie has to accept a connection."""
_READS_GRACE_S = 2.0
"""How long reads in progress may take when the bookie stops."""
_REGISTER_PATIENCE_S = 2.0
"""Added to the session's time-out: the node of a process that was killed ends with its session."""
_TRIAL_FILE = "trial"
"""The file that health checks write."""
_SPACE_INTERVAL_S = 5.0
"""How often the free space is checked; it is reported to the cluster far less often."""


class _Served(NamedTuple):
    """The part of a bookie that serves."""

    control_address: str
    """Address of the control service, host:port."""
    samples: Source
    """The present values of its metrics."""


class BookieServer(AsyncClosing):
    """A running bookie; `start` creates it, `aclose` ends it."""

    bookie: BookieId
    """The bookie's name and incarnation."""
    address: str
    """Address that clients connect to, host:port."""
    http_port: int | None = None
    """Port of metrics and health; None: there is none."""
    storage: LedgerStorage

    def __init__(
        self,
        config: BookieConfig,
        *,
        store: MetadataStore,
        clock: Clock,
    ) -> None:
        self._config = config
        paths = NamespacePaths(parse_uri(config.metadata_uri).root)
        self._place = Place(store, paths, clock, TlsInUse.of(config.tls))
        self._failure: asyncio.Future[DLError] = asyncio.get_running_loop().create_future()
        self._running = AsyncExitStack()
        self._stopping = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<BookieServer {self.bookie} at {self.address} {self.storage.status.state.value}>"

    @classmethod
    async def start(
        cls,
        config: BookieConfig,
        *,
        store: MetadataStore,
        clock: Clock,
    ) -> BookieServer:
        """Start a bookie.

        `store` stays the caller's, and is closed after the bookie.

        Raises:
            ConfigurationError: the data folder is in use or another bookie's, or the bookie
                cannot listen at its address.
            BookieStorageError: data that was acknowledged may be damaged or missing.
            MetadataError: the metadata store did not answer.
        """
        server = cls(config, store=store, clock=clock)
        try:
            await server._open_storage()
            served = await server._serve()
            await server._register(served.control_address)
            server._house.start()
            await server._open_operator_port(served.samples)
        except BaseException:
            await server.aclose()
            raise
        return server

    def configure(self, config: BookieConfig) -> None:
        """Continue with another configuration.

        Options that cannot change at run time must have the same values.
        """
        self._config = config
        self._house.configure(config)

    async def wait_failed(self) -> DLError:
        """Wait until the bookie can no longer serve, and return the error.  Raises nothing."""
        return await outcome_of(self._failure)

    async def aclose(self) -> None:
        """Unregister, finish the requests in flight, and stop; safe to call twice."""
        async with self._stopping:
            await self._running.aclose()

    async def _open_storage(self) -> None:
        store, paths, clock, *_ = self._place
        cluster_id = (await ensure_namespace(store, paths, clock)).cluster_id
        self._place = self._place._replace(cluster_id=cluster_id)
        disk = RealDisk(self._config.data_dir)
        self._running.push_async_callback(disk.aclose)
        cookie = await establish_identity(
            disk,
            store,
            paths,
            name=self._config.name,
            cluster_id=cluster_id,
            clock=clock,
            is_answered=_is_answered,
            patience_s=self._config.session_timeout_s + _REGISTER_PATIENCE_S,
        )
        self.bookie = cookie.bookie
        self.storage = await LedgerStorage.open(
            disk,
            self._config.storage,
            clock=clock,
            owner=f"{cluster_id}/{self.bookie.incarnation}",
            given_ids=GivenIds(LedgerStore(store, paths)),
        )
        self._running.push_async_callback(self.storage.aclose)
        # After the replay, which makes the first file: a cookie without data would count as a loss.
        await begin_life(disk, store, paths, cookie, clock=clock)
        self._house = Housekeeping(
            self.storage, self._config, self._place, bookie=self.bookie, running=self._running
        )

    async def _serve(self) -> _Served:
        config, tls, asks = self._config, self._place.tls, self._config.asks_clients
        service = BookieService(
            self.storage,
            bookie=self.bookie,
            cluster_id=self._place.cluster_id,
            connection_bytes_max=config.connection_bytes_max,
            read_bytes_max=config.read_bytes_max,
            receive_bytes_max=config.receive_bytes_max,
            client_names=config.client_names,
            new_access=await self._follow_keys() if config.takes_capabilities else None,
        )
        try:
            server = await service.listen(
                config.host,
                config.port,
                tls=None
                if tls is None
                else partial(
                    tls.server_context,
                    asks_clients=asks,
                    requires_them=not config.takes_capabilities,
                ),
            )
        except OSError as error:
            where = f"host={config.host!r} port={config.port}"
            raise listening_error(where, error) from error
        host = config.advertised_host or config.host
        port = config.advertised_port or server.sockets[0].getsockname()[1]
        self.address = address_of(host, port)
        if tls is not None:
            tls.on_change = partial(self._judge_own_certificate, tls.files, host)
            tls.on_change()

        async def stop() -> None:
            logger.info("draining bookie=%s", self.bookie)
            try:
                async with asyncio.timeout(self._config.drain_timeout_s):
                    await service.drain()
            except TimeoutError:
                logger.warning(
                    "clients did not receive their answers bookie=%s; to do: nothing, clients ask "
                    "again at other bookies",
                    self.bookie,
                )
            server.close()
            await service.aclose(grace_s=_READS_GRACE_S)

        self._running.push_async_callback(stop)
        if tls is not None:
            self._house.repeat("looking at the certificates", server.renew, lambda: LOOK_S)
        control = BookieControl(self.storage, bookie=self.bookie, client_names=config.client_names)
        self._running.push_async_callback(control.aclose)
        control_port = await control.start(
            address_of(config.host, config.control_port), tls=tls, asks_clients=asks
        )
        return _Served(
            address_of(host, config.advertised_control_port or control_port),
            partial(metrics.samples, self.storage, service.connections, service.read_budget),
        )

    async def _open_operator_port(self, samples: Source) -> None:
        storage, disk, tls = self.storage, self.storage.core.disk, self._place.tls
        checks = {"metadata_store": session_check(self._place.store), **metrics.checks(storage)}
        operated = Operated(
            role="bookie",
            metrics=(*METADATA_METRICS, *metrics.METRICS),
            sources=[source_of(self._place.store), samples],
            checks=checks,
            trial=partial(try_disk, disk, _TRIAL_FILE, self._place.clock.new_token),
        )
        opened = await self._running.enter_async_context(operator_port(self._config, operated, tls))
        self.http_port = None if opened is None else opened.port

    async def _follow_keys(self) -> Callable[[], Access]:
        """Return a function that makes the access of a connection by the cluster's current keys."""
        # Loaded here, because few bookies take capabilities.
        from bookie.serving.access import Access
        from dlcore.base.access.capability import Verifier
        from dlcore.metadata.capability_keys import FollowedKeys

        clock = self._place.clock
        verifier = Verifier(lambda: clock.now_ms() / 1000)
        keys = FollowedKeys(
            self._place.store,
            self._place.paths,
            clock,
            lambda ring: verifier.use(each.public_key for each in ring.keys),
        )
        self._running.push_async_callback(keys.aclose)
        await keys.start()
        return lambda: Access(verifier)

    def _judge_own_certificate(self, tls: TlsFiles, host: str) -> None:
        """Warn if clients, or the other bookies that this one asks, will refuse its certificate."""
        is_client = self._config.asks_clients
        for refusal in (
            own_refusal(tls, host=host),
            own_refusal(tls, host=None) if is_client else None,
        ):
            if refusal is not None:
                logger.warning(
                    "%s bookie=%s; to do: give it a certificate that fits (docs/tls.md), else "
                    "clients refuse it",
                    refusal,
                    self.bookie,
                )

    async def _register(self, control_address: str) -> None:
        registrar = Registrar(
            self._place.store,
            self._place.paths,
            bookie=self.bookie,
            address=self.address,
            control_address=control_address,
            rack=self._config.rack,
            on_conflict=self._fail,
        )
        self._running.push_async_callback(registrar.aclose)
        report = SpaceReport()
        self._report_space(registrar, report)

        def follow_state(state: StorageState) -> None:
            logger.info("storage state=%s bookie=%s", state.value, self.bookie)
            if state is StorageState.FAILED:
                self._fail(BookieStorageError(f"bookie {self.bookie}: the storage failed"))
            else:
                registrar.set_read_only(is_read_only=state is StorageState.READ_ONLY)

        self.storage.status.on_state(follow_state)
        # The storage may have failed before the callback was registered.
        if self.storage.status.state is StorageState.FAILED:
            raise BookieStorageError(f"bookie {self.bookie}: the storage failed")
        await registrar.register(
            is_read_only=self.storage.status.state is StorageState.READ_ONLY,
            patience_s=self._config.session_timeout_s + _REGISTER_PATIENCE_S,
        )
        # An upgrade that is finalized from now on has asked this bookie, too.
        await read_binding(self._place.store, self._place.paths, fresh=True)

        async def report_space() -> None:
            self._report_space(registrar, report)

        self._house.repeat("reporting free space", report_space, lambda: _SPACE_INTERVAL_S)

    def _report_space(self, registrar: Registrar, report: SpaceReport) -> None:
        stats = self.storage.status.stats()
        space = DiskSpace(free_bytes=stats.disk_free_bytes, total_bytes=stats.disk_total_bytes)
        now = asyncio.get_running_loop().time()
        if report.is_due(free_bytes=space.free_bytes, total_bytes=space.total_bytes, now=now):
            registrar.set_space(space)

    def _fail(self, error: DLError) -> None:
        logger.error(
            "bookie fails: %s; to do: see why, then start it again; auto-recovery copies its "
            "entries after its delay",
            error,
        )
        fulfil(self._failure, error)


async def _is_answered(address: str) -> bool:
    """Return whether a process accepts connections at an address."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    # The two in the middle come from a registered address that is none.
    except (OSError, ValueError, OverflowError, TimeoutError):
        return False
    writer.close()
    return True
