"""The namespace over a metadata store and bookies, and the composition root: it connects adapters.

`open_namespace` loads kazoo when it is called, so that importing dlcore does not.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dlcore.api.namespace import Namespace
from dlcore.backends.direct.access import DirectAccessRules
from dlcore.backends.direct.appends import DirectAppends
from dlcore.backends.direct.cluster import DirectClusterView
from dlcore.backends.direct.log import DirectLog
from dlcore.backends.direct.planning import DirectPlanning
from dlcore.backends.direct.ports import NamespacePorts
from dlcore.base.access.zookeeper import EVERYBODY
from dlcore.base.clock import Clock, SystemClock
from dlcore.base.config import (
    SESSION_TIMEOUT_S,
    LedgerClientConfig,
    LogConfig,
    LogSettings,
)
from dlcore.base.errors import LogExistsError, LogNotFoundError
from dlcore.base.ids import DLSN, name_prefix, validate_log_id, validate_log_name
from dlcore.ledger.client import LedgerClient
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.log.cold.reading import ColdLedgers
from dlcore.log.context import Lifetime, LogContext
from dlcore.log.forgetting import forget_log
from dlcore.log.metadata.ledger_cache import LedgerCache
from dlcore.log.metadata.listing import PAGE_SIZE, list_pages
from dlcore.log.metadata.store import LogStore
from dlcore.log.metadata.values import LogMetadata
from dlcore.log.metadata.watching import LogWatch
from dlcore.log.tidying import Tidier
from dlcore.log.typed.arrow import first_schema
from dlcore.metadata.paths import NamespacePaths, parse_uri

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dlcore.base.access.encryption_keys import EncryptionKeys
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.access.zookeeper import ZooKeeperAccess
    from dlcore.metadata.capability_keys import FollowedKeys
    from dlcore.metadata.cluster_settings import ClusterSettingsStore
    from dlcore.metadata.port import MetadataStore
    from dlcore.wire.port import BookieClient


class DirectNamespace(
    DirectPlanning, DirectAppends, DirectAccessRules, DirectClusterView, Namespace
):
    """A collection of logs over one metadata store and its bookies; used on one event loop.

    `open_namespace` creates it with the real adapters; tests pass in others.  It closes its ports.
    """

    def __init__(
        self,
        *,
        uri: str,
        store: MetadataStore,
        bookies: BookieClient,
        paths: NamespacePaths,
        cluster_id: str,
        clock: Clock,
        rng: random.Random,
        config: LogConfig,
        client_config: LedgerClientConfig,
        client_id: str,
        registry: BookieRegistry | None = None,
        keys: FollowedKeys | None = None,
        encryption_keys: EncryptionKeys | None = None,
        cold: ColdLedgers | None = None,
        cluster_settings: ClusterSettingsStore | None = None,
    ) -> None:
        ledger_store = LedgerStore(store, paths)
        registry = registry or BookieRegistry(store, paths)
        ledgers = LedgerClient(
            ledger_store=ledger_store,
            registry=registry,
            bookies=bookies,
            config=client_config,
            clock=clock,
            rng=rng,
            cold=cold or ColdLedgers(config=client_config),
        )
        ports = NamespacePorts(
            store=store,
            paths=paths,
            ledger_store=ledger_store,
            registry=registry,
            bookies=bookies,
            ledgers=ledgers,
            client_config=client_config,
            clock=clock,
            rng=rng,
        )
        context = LogContext(
            store=store,
            paths=paths,
            logs=LogStore(store, paths),
            ledger_store=ledger_store,
            ledger_cache=LedgerCache(ledger_store),
            ledgers=ledgers,
            tidier=Tidier(),
            registry=registry,
            clock=clock,
            rng=rng,
            config=config,
            client_id=client_id,
            cluster_id=cluster_id,
            lifetime=Lifetime(uri),
            encryption_keys=encryption_keys,
        )
        super().__init__(uri, ports, context, keys)
        self._cluster_settings = cluster_settings

    @override
    async def create_log(
        self,
        name: str,
        *,
        config: LogConfig | None = None,
        settings: LogSettings | None = None,
        schema: Any = None,
        log_id: str | None = None,
    ) -> None:
        self._require_open()
        metadata = LogMetadata(
            name=validate_log_name(name),
            log_id=self.log_context.clock.new_token()
            if log_id is None
            else validate_log_id(log_id),
            created_ms=self.log_context.clock.now_ms(),
            quorum=(config or self.log_context.config).quorum,
            typed=schema is not None,
        )
        settings = settings or LogSettings()
        if self._cluster_settings is not None:
            settings = await self._cluster_settings.settings_of_new_log(settings)
        await self.log_context.logs.create(metadata, settings, first_schema(schema))
        await self.ports.registry.warn_of_few(f"log {metadata.name!r}", metadata.quorum)

    @override
    async def delete_log(self, name: str, *, damaged: bool = False) -> None:
        if damaged:
            self._require_open()
            await forget_log(self.log_context, name)
            return
        await (await self.open_log(name)).delete()

    @override
    async def rename_log(self, name: str, new_name: str) -> None:
        new_name = validate_log_name(new_name)
        await (await self.open_log(name)).rename(new_name)

    @override
    async def fork_log(self, name: str, new_name: str, *, at: DLSN | None = None) -> DLSN:
        from dlcore.log.upkeep.forks import fork_log  # seldom

        self._require_open()
        return await fork_log(self.log_context, name, new_name, at=at)

    @override
    async def log_exists(self, name: str) -> bool:
        self._require_open()
        return await self.log_context.logs.exists(validate_log_name(name))

    @override
    async def get_logs(self, prefix: str | None = None) -> list[str]:
        return sorted([name async for page in self.list_logs(prefix) for name in page])

    @override
    def list_logs(
        self, prefix: str | None = None, *, after: str | None = None, page_size: int = PAGE_SIZE
    ) -> AsyncIterator[list[str]]:
        self._require_open()
        return list_pages(
            self.ports.store,
            self.log_context.paths,
            name_prefix(prefix),
            after=None if after is None else validate_log_name(after),
            page_size=page_size,
        )

    @override
    def watch_logs(self, prefix: str | None = None) -> LogWatch:
        self._require_open()
        return LogWatch(self.log_context, name_prefix(prefix))

    @override
    async def open_log(
        self, name: str, *, config: LogConfig | None = None, create_if_missing: bool = False
    ) -> DirectLog:
        self._require_open()
        try:
            log = await self.log_context.logs.find(name)
        except LogNotFoundError:
            if not create_if_missing:
                raise
            with contextlib.suppress(LogExistsError):  # another client was faster
                await self.create_log(name, config=config)
            log = await self.log_context.logs.find(name)
        return DirectLog(self.log_context, log, config or self.log_context.config)


async def open_namespace(
    uri: str,
    *,
    config: LogConfig | None = None,
    client_config: LedgerClientConfig | None = None,
    create: bool = False,
    client_id: str | None = None,
    tls: TlsFiles | None = None,
    zookeeper: ZooKeeperAccess = EVERYBODY,
    capabilities: bool = False,
    encryption_keys: str | None = None,
    session_timeout_s: float = SESSION_TIMEOUT_S,
    connect_timeout_s: float = SESSION_TIMEOUT_S,
) -> DirectNamespace:
    """Open the namespace at `uri`, ``distributedlog://zk1:2181,zk2:2181/path``.

    Args:
        uri: the servers of the metadata store, and the namespace's root path in it.
        config: configuration of logs, unless `open_log` gets another one.
        client_config: configuration of the client of bookies.
        create: create the namespace if it does not exist.
        client_id: this client's name in its locks; by default host and process.
        tls: certificates for connections to bookies; None: no encryption.
        zookeeper: certificates and user for the metadata store.
        capabilities: present capabilities to bookies, signed with the cluster's key.
        encryption_keys: file with the keys of encrypted logs, or ``command:…`` that prints them.
        session_timeout_s: after this long without contact this client loses its locks.
        connect_timeout_s: how long to wait for the first connection to the metadata store.

    Raises:
        InvalidNamespaceUriError: the URI does not parse.
        MetadataConnectionError: no answer from the metadata store.
        ConfigurationError: there is no namespace at that path, or there are no keys.
    """
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.metadata.binding import ensure_namespace, read_binding
    from dlcore.metadata.capability_keys import own_purse
    from dlcore.metadata.cluster_settings import ClusterSettingsStore
    from dlcore.metadata.zookeeper import ZooKeeperStore
    from dlcore.wire.client import WireBookieClient

    parsed, clock = parse_uri(uri), SystemClock()
    paths, client_config = NamespacePaths(parsed.root), client_config or LedgerClientConfig()
    async with AsyncExitStack() as opened:  # closed again if the rest fails
        ring = None
        if encryption_keys:
            from dlcore.base.access.encryption_keys import EncryptionKeys

            ring = await EncryptionKeys.open(encryption_keys)
            opened.push_async_callback(ring.aclose)
        store = await ZooKeeperStore.connect(
            parsed.servers,
            session_timeout_s=session_timeout_s,
            connect_timeout_s=connect_timeout_s,
            access=zookeeper,
        )
        opened.push_async_callback(store.aclose)
        opening = ensure_namespace(store, paths, clock) if create else read_binding(store, paths)
        binding = await opening
        purse, keys = await own_purse(store, paths, clock) if capabilities else (None, None)
        opened.pop_all()
    registry = BookieRegistry(store, paths)
    bookies = WireBookieClient(
        registry.resolve,
        cluster_id=binding.cluster_id,
        config=client_config,
        resolve_control=registry.resolve_control,
        tls=TlsInUse.of(tls),
        purse=purse,
    )
    return DirectNamespace(
        uri=str(parsed),
        store=store,
        bookies=bookies,
        paths=paths,
        cluster_id=binding.cluster_id,
        clock=clock,
        rng=random.Random(clock.new_token()),
        config=config or LogConfig(),
        client_config=client_config,
        client_id=client_id or f"{socket.gethostname()}:{os.getpid()}",
        registry=registry,
        keys=keys,
        encryption_keys=ring,
        cluster_settings=ClusterSettingsStore(store, paths),
    )
