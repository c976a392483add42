"""The namespace over a metadata store and bookies, and the composition root: it connects adapters.

`open_namespace` loads kazoo when it is called, so that importing dlcore does not.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dlcore.api.namespace import (
    AccessRules,
    AtomicAppends,
    ClusterView,
    Namespace,
    OpenedNamespace,
    ScanPlanning,
)
from dlcore.backends.direct.log import DirectLog
from dlcore.backends.direct.metrics import METRICS, samples
from dlcore.backends.direct.ports import NamespacePorts
from dlcore.backends.direct.scanning import scan_entries
from dlcore.base.access.rights import Rule, require_present, texts_of
from dlcore.base.access.zookeeper import EVERYBODY
from dlcore.base.background import all_of
from dlcore.base.clock import Clock, SystemClock
from dlcore.base.config import (
    SESSION_TIMEOUT_S,
    LedgerClientConfig,
    LogConfig,
    LogSettings,
    require,
)
from dlcore.base.errors import LogExistsError, LogNotFoundError
from dlcore.base.ids import DLSN, name_prefix, validate_log_id, validate_log_name
from dlcore.base.statistics import NamespaceStatistics
from dlcore.ledger.client import LedgerClient
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.log.cold.reading import ColdLedgers
from dlcore.log.context import Lifetime, LogContext
from dlcore.log.forgetting import forget_log
from dlcore.log.metadata.commit_records import last_version, list_commits
from dlcore.log.metadata.ledger_cache import LedgerCache
from dlcore.log.metadata.listing import PAGE_SIZE, list_pages
from dlcore.log.metadata.owner import StagingOwner
from dlcore.log.metadata.store import LogStore
from dlcore.log.metadata.values import LogMetadata
from dlcore.log.reading.rows_reader import AsyncLogReader
from dlcore.log.reading.schemas import find_schemas, find_targets
from dlcore.log.reading.snapshot import find_places
from dlcore.log.reading.snapshots import LogFollowers
from dlcore.log.reading.watching import LogWatch
from dlcore.log.tidying import Tidier
from dlcore.log.typed.arrow import first_schema
from dlcore.log.typed.schema import schemas_to_write
from dlcore.log.writing.records_writer import AsyncLogWriter
from dlcore.metadata.access_rules import RuleStore
from dlcore.metadata.one_node import persistently
from dlcore.metadata.paths import NamespacePaths, parse_uri, unescape
from dlcore.metadata.port import SessionState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    import pyarrow as pa

    from dlcore.base.access.encryption_keys import EncryptionKeys
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.access.zookeeper import ZooKeeperAccess
    from dlcore.base.errors import DLError
    from dlcore.base.ids import DLSN
    from dlcore.base.records import NotLessThan, RecordPlace
    from dlcore.ledger.metadata.store import ReadLedgers
    from dlcore.ledger.metadata.values import BookieRegistration, LedgerMetadata
    from dlcore.log.metadata.commits import AppendRun, CommitStatus, SharedStaging
    from dlcore.log.reading.scan import LogSnapshot, ScanBatch, ScanRange
    from dlcore.log.staging.append import DirectStagedAppend
    from dlcore.log.staging.writer import DirectStagingWriter
    from dlcore.log.typed.schema import LogSchema
    from dlcore.metadata.capability_keys import FollowedKeys
    from dlcore.metadata.cluster_settings import ClusterSettingsStore
    from dlcore.metadata.port import MetadataStore
    from dlcore.wire.port import BookieClient


class DirectOpenedNamespace(OpenedNamespace):
    """The adapters of one namespace, on which all its parts rest, and their end."""

    def __init__(
        self, uri: str, ports: NamespacePorts, context: LogContext, keys: FollowedKeys | None
    ) -> None:
        self._uri = uri
        self._keys = keys
        self.ports = ports
        """The ports of the namespace, for auto-recovery and maintenance; it closes them."""
        self.log_context = context
        """The adapters of its logs, for maintenance; it closes them."""
        self.staging_owner = StagingOwner(
            ports.store, ports.paths, clock=context.clock, client_id=context.client_id
        )
        """The node that shows that this process lives, for those that stage and merge."""
        self.followers = LogFollowers(context)
        """The logs with kept snapshots; it closes them."""
        self.access_rules = RuleStore(ports.store, ports.paths)
        """The rules of access, for proxies and maintenance."""

    @property
    @override
    def uri(self) -> str:
        return self._uri

    def _require_open(self) -> None:
        self.log_context.lifetime.require_open()

    @override
    async def aclose(self) -> None:
        if self.log_context.lifetime.has_ended:
            return
        self.log_context.lifetime.has_ended = True
        async with AsyncExitStack() as steps:  # from the last to the first, even if one fails
            steps.push_async_callback(self.ports.store.aclose)
            for keys in (self._keys, self.log_context.encryption_keys):
                if keys is not None:
                    steps.push_async_callback(keys.aclose)
            steps.push_async_callback(self.ports.bookies.aclose)
            steps.push_async_callback(self.ports.registry.aclose)
            steps.push_async_callback(self.ports.ledgers.aclose)
            steps.push_async_callback(self.staging_owner.aclose)
            steps.callback(self.followers.close)
            steps.push_async_callback(self.log_context.tidier.aclose)
            # All at once, because each takes a while without a metadata store.
            opened = self.log_context.open_objects
            await all_of(*(each.abandon("its namespace was closed") for each in opened))


class DirectPlanning(DirectOpenedNamespace, ScanPlanning):
    """Reads of many logs; snapshots of earlier calls are kept, and followed."""

    @override
    async def _get_snapshots(
        self, names: Sequence[str], *, fresh: bool
    ) -> dict[str, LogSnapshot | None]:
        return await self.followers.take(names, fresh=fresh)

    @override
    async def survey_logs(self, names: Sequence[str]) -> dict[str, LogSnapshot | DLError]:
        found = await self.followers.survey(names, fresh=True)
        return {name: outcome for name, outcome in found.items() if outcome is not None}

    @override
    async def _get_schemas(
        self, names: Sequence[str], *, for_write: bool
    ) -> dict[str, pa.Schema | None]:
        self._require_open()
        logs = self.log_context.logs
        if for_write:
            return schemas_to_write(await find_targets(logs, names))
        return await find_schemas(logs, names)

    @override
    async def _find_places(
        self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]
    ) -> list[RecordPlace]:
        self._require_open()
        return await find_places(self.log_context, wanted)

    @override
    def scan(self, part: ScanRange) -> AsyncGenerator[ScanBatch, None]:
        async def current() -> LogContext:
            return self.log_context

        self._require_open()
        return scan_entries(part, self.ports.ledgers, current, self.log_context.encryption_keys)

    @override
    async def grant(
        self, parts: Sequence[Sequence[ScanRange]], *, lifetime_s: int = 3600
    ) -> list[tuple[bytes, ...]]:
        from dlcore.base.access.capability import LIFETIME_S_MAX
        from dlcore.metadata.capability_keys import ensure_keys

        self._require_open()
        require(
            condition=0 < lifetime_s <= LIFETIME_S_MAX,
            key="lifetime_s",
            value=lifetime_s,
            rule=f"expected 1 … {LIFETIME_S_MAX}",
        )
        ring = await ensure_keys(self.ports.store, self.log_context.paths, self.log_context.clock)
        now_s = self.log_context.clock.now_ms() // 1000
        signer = ring.signer(now_s)
        return [
            signer.sign_all(
                (grant for scan in part for grant in scan.grants()), expires_s=now_s + lifetime_s
            )
            for part in parts
        ]


class DirectAppends(DirectOpenedNamespace, AtomicAppends):
    """Appends whose ledgers belong to this process until they are committed."""

    @override
    async def begin_append(
        self,
        identity: str,
        version: int,
        *,
        shared: SharedStaging | None = None,
        run: AppendRun | None = None,
        lock_timeout_s: float | None = None,
        keep_record: bool = True,
        strict: bool = False,
        after: int | None = None,
        token: str | None = None,
    ) -> DirectStagedAppend:
        # Loaded here, because most commands of `dlog` append nothing.
        from dlcore.log.staging.append import DirectStagedAppend

        self._require_open()
        return DirectStagedAppend(
            self.log_context,
            self.staging_owner,
            identity,
            version,
            shared=shared,
            run=run,
            lock_timeout_s=(
                self.log_context.config.lock_timeout_s if lock_timeout_s is None else lock_timeout_s
            ),
            config=self.log_context.config,
            keep_record=keep_record,
            strict=strict,
            after=after,
            token=token,
        )

    @override
    async def open_staging_writer(
        self, *, identity: str, shared: bool = False
    ) -> DirectStagingWriter:
        from dlcore.log.staging.writer import DirectStagingWriter

        self._require_open()
        return DirectStagingWriter(
            self.log_context, self.staging_owner, identity, self.log_context.config
        )

    @override
    async def last_version(self, identity: str) -> int:
        return await last_version(self.ports.store, self.ports.paths, identity)

    @override
    async def list_commits(self) -> list[CommitStatus]:
        self._require_open()
        return await list_commits(self.ports.store, self.ports.paths)


class DirectAccessRules(DirectOpenedNamespace, AccessRules):
    """The rules of one namespace."""

    @override
    async def get_access_rules(self) -> list[str]:
        self._require_open()
        return list(map(str, await persistently(self.access_rules.read)))

    @override
    async def change_access_rules(
        self, *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> list[str]:
        added, removed = texts_of(add), texts_of(remove)
        require_present(await self.get_access_rules(), removed)
        rules = await self.access_rules.change(
            add=map(Rule.parse, added), remove=map(Rule.parse, removed)
        )
        return list(map(str, rules))


class DirectClusterView(DirectOpenedNamespace, ClusterView):
    """The cluster of one namespace."""

    @override
    def get_statistics(self) -> NamespaceStatistics:
        self._require_open()
        context, written = self.log_context, self.ports.ledgers.writers.statistics()
        # A copy: a collector may ask in another thread.
        kinds = Counter(_public_name(each) for each in list(context.open_objects))
        return NamespaceStatistics(
            entries_written=written.entries,
            bytes_written=written.size_bytes,
            entries_read=context.reads.entries,
            bytes_read=context.reads.size_bytes,
            sessions_lost=self.ports.store.figures.sessions_lost,
            is_connected=self.ports.store.session_state is SessionState.CONNECTED,
            open_ledgers=written.open_ledgers,
            pending_bytes=written.pending_bytes,
            open_objects=dict(kinds),
            followed_logs=len(self.followers),
        )

    @override
    def get_collector(self) -> Any:
        from dlcore.base.metrics import SampleCollector

        self._require_open()
        return SampleCollector(METRICS, partial(samples, self.log_context, self.get_statistics))

    @override
    async def get_proxies(self) -> list[str]:
        self._require_open()
        nodes = await self.ports.store.get_children(self.ports.paths.proxies, fresh=True)
        return sorted(map(unescape, nodes or ()))

    @override
    async def get_bookies(self) -> list[BookieRegistration]:
        self._require_open()
        return await self.ports.registry.get_bookies()

    @override
    async def get_ledger(self, ledger_id: int) -> LedgerMetadata:
        self._require_open()
        return (await self.log_context.ledger_store.read(ledger_id)).metadata

    @override
    async def list_ledgers(self, *, first: int = 0, count: int = 1000) -> ReadLedgers:
        self._require_open()
        return await self.log_context.ledger_store.read_from(first, count)


def _public_name(opened: object) -> str:
    """Return the name of the class that users know, which may be a base."""
    known = (base for base in (AsyncLogReader, AsyncLogWriter) if isinstance(opened, base))
    return next(known, type(opened)).__name__


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
    async def _create_log(
        self,
        name: str,
        *,
        config: LogConfig | None,
        settings: LogSettings,
        schema: LogSchema | None,
        log_id: str | None = None,
    ) -> None:
        self._require_open()
        metadata = LogMetadata(
            name=name,
            log_id=self.log_context.clock.new_token()
            if log_id is None
            else validate_log_id(log_id),
            created_ms=self.log_context.clock.now_ms(),
            quorum=(config or self.log_context.config).quorum,
            typed=schema is not None,
        )
        if self._cluster_settings is not None:
            settings = await self._cluster_settings.settings_of_new_log(settings)
        await self.log_context.logs.create(metadata, settings, schema)
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
    async def fork_log(
        self, name: str, new_name: str, *, at: DLSN | None = None, log_id: str | None = None
    ) -> DLSN:
        from dlcore.log.upkeep.forks import fork_log  # seldom

        self._require_open()
        return await fork_log(self.log_context, name, new_name, at=at, log_id=log_id)

    @override
    async def log_exists(self, name: str) -> bool:
        self._require_open()
        return await self.log_context.logs.exists(validate_log_name(name))

    @override
    async def _get_logs(self, prefix: str) -> list[str]:
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

    parsed, clock, tls_in_use = parse_uri(uri), SystemClock(), TlsInUse.of(tls)
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
        tls=tls_in_use,
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


async def create_identified(
    namespace: DirectNamespace, name: str, *, log_id: str | None, settings: LogSettings, schema: Any
) -> None:
    """Create a log with the id that a client chose, or with a new one.

    A proxy calls it.  By the id it knows the request of a client that repeats it.
    """
    name, first = validate_log_name(name), first_schema(schema)
    await namespace._create_log(name, config=None, settings=settings, schema=first, log_id=log_id)
