"""Namespaces, and the composition root: here the adapters are chosen and connected.

`open_namespace` loads kazoo when it is called, so that importing dlcore does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from dlcore.api.manager import DistributedLogManager
from dlcore.api.ports import NamespacePorts
from dlcore.base.clock import Clock, SystemClock
from dlcore.base.closing import AsyncClosing
from dlcore.base.config import SESSION_TIMEOUT_S, LedgerClientConfig, LogConfig, LogSettings
from dlcore.base.errors import DLError, LogExistsError, LogNotFoundError
from dlcore.base.ids import DLSN, name_prefix, validate_log_id, validate_log_name
from dlcore.base.statistics import NamespaceStatistics
from dlcore.ledger.client import LedgerClient
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.ledger.metadata.store import LedgerStore, ReadLedgers
from dlcore.log.context import Lifetime, LogContext
from dlcore.log.forgetting import forget_log
from dlcore.log.metadata.commit_records import last_version, list_commits, sweep_commits
from dlcore.log.metadata.ledger_cache import LedgerCache
from dlcore.log.metadata.listing import PAGE_SIZE, list_pages
from dlcore.log.metadata.owner import StagingOwner
from dlcore.log.metadata.staged import StagedStatus, list_all_staged, settle_abandoned
from dlcore.log.metadata.store import LogStore
from dlcore.log.metadata.values import LogMetadata
from dlcore.log.metadata.watching import LogWatch
from dlcore.log.reading.merged import AsyncMergedReader
from dlcore.log.reading.schemas import find_schemas
from dlcore.log.reading.snapshot import find_places
from dlcore.log.reading.snapshots import LogFollowers
from dlcore.log.tidying import Tidier
from dlcore.log.typed.arrow import first_schema
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.metadata.port import SessionState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    import pyarrow as pa

    from dlcore.base.records import LogRecordWithDLSN, NotLessThan, RecordPlace
    from dlcore.base.tls import TlsFiles
    from dlcore.ledger.metadata.bookies import BookieRegistration
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ledger.port import BookieClient
    from dlcore.log.metadata.commits import AppendRun, CommitStatus, SharedStaging
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.log.staging.append import StagedAppend
    from dlcore.log.staging.writer import StagingWriter
    from dlcore.metadata.port import MetadataStore

logger = logging.getLogger(__name__)


class Namespace(AsyncClosing):
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
    ) -> None:
        self._uri = uri
        self._store = store
        self._bookies = bookies
        self._registry = registry or BookieRegistry(store, paths)
        ledger_store = LedgerStore(store, paths)
        self._ledgers = LedgerClient(
            ledger_store=ledger_store,
            registry=self._registry,
            bookies=bookies,
            config=client_config,
            clock=clock,
            rng=rng,
        )
        self._context = LogContext(
            store=store,
            paths=paths,
            logs=LogStore(store, paths),
            ledger_store=ledger_store,
            ledger_cache=LedgerCache(ledger_store),
            ledgers=self._ledgers,
            tidier=Tidier(),
            registry=self._registry,
            clock=clock,
            rng=rng,
            config=config,
            client_id=client_id,
            cluster_id=cluster_id,
            lifetime=Lifetime(uri),
        )
        self._ports = NamespacePorts(
            store=store,
            paths=paths,
            ledger_store=ledger_store,
            registry=self._registry,
            bookies=bookies,
            ledgers=self._ledgers,
            client_config=client_config,
            clock=clock,
            rng=rng,
        )
        self._owner = StagingOwner(self._context)
        self._followers = LogFollowers(self._context)
        self._sessions_lost = 0
        store.on_session(self._session_changed)

    def __repr__(self) -> str:
        return f"<Namespace {self._uri}>"

    @property
    def uri(self) -> str:
        """The URI that it was opened with."""
        return self._uri

    @property
    def ledgers(self) -> LedgerClient:
        """The ledger client that its logs use."""
        return self._ledgers

    @property
    def ports(self) -> NamespacePorts:
        """The ports of the namespace, for auto-recovery and maintenance; it closes them."""
        return self._ports

    @property
    def log_context(self) -> LogContext:
        """The adapters of its logs, for maintenance; it closes them."""
        return self._context

    @property
    def followers(self) -> LogFollowers:
        """The logs with kept snapshots; the namespace closes them."""
        self._require_open()
        return self._followers

    @property
    def staging_owner(self) -> StagingOwner:
        """The node that shows that this process lives, for those that stage and merge."""
        return self._owner

    async def create_log(
        self,
        name: str,
        *,
        config: LogConfig | None = None,
        settings: LogSettings | None = None,
        schema: Any = None,
        log_id: str | None = None,
    ) -> None:
        """Create a log, and warn if it needs more bookies than are registered.

        Args:
            name: the log.
            config: its quorums are stored with the log, for all its writers.
            settings: settings that are stored with the log, for all its writers.
            schema: an Arrow schema of its columns, for a typed log; without it a byte log.
            log_id: a unique id, for a repeated call after a lost answer; by default a new one.

        Raises: InvalidLogNameError, LogExistsError, ConfigurationError.
        """
        self._require_open()
        name = validate_log_name(name)
        metadata = LogMetadata(
            name=name,
            log_id=self._context.clock.new_token() if log_id is None else validate_log_id(log_id),
            created_ms=self._context.clock.now_ms(),
            quorum=(config or self._context.config).quorum,
            typed=schema is not None,
        )
        await self._context.logs.create(metadata, settings or LogSettings(), first_schema(schema))
        await self._registry.warn_of_few(f"log {name!r}", metadata.quorum)

    async def delete_log(self, name: str, *, damaged: bool = False) -> None:
        """Delete a log and its data.

        Args:
            name: the log.
            damaged: its metadata is damaged: delete its known parts.  Ledgers that are not known to
                belong to it remain, and `dlog ledger audit` finds them.

        Raises:
            LogNotFoundError: there is no such log.
            OwnershipAcquireFailedError: a writer owns it.
            CorruptMetadataError: its metadata is damaged, and `damaged` is False.
            ConfigurationError: `damaged` is True, but its metadata is intact.
        """
        if damaged:
            self._require_open()
            await forget_log(self._context, name)
            return
        await (await self.open_log(name)).delete()

    async def rename_log(self, name: str, new_name: str) -> None:
        """Give a log another name, at once for all clients.

        The log's nodes and data stay where they are, below its id.  Readers, and other clients that
        have it open, continue.  Records that were staged for it enter it under its new name.

        Raises:
            LogNotFoundError, LogExistsError: there is no log `name`, or one `new_name`.
            OwnershipAcquireFailedError: a writer owns the log.
        """
        new_name = validate_log_name(new_name)
        manager = await self.open_log(name)
        await manager.rename(new_name)

    async def log_exists(self, name: str) -> bool:
        """Return whether the log exists.  Raises: MetadataError."""
        self._require_open()
        return await self._context.logs.exists(validate_log_name(name))

    async def get_logs(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of the logs that start with `prefix`.  Raises: MetadataError."""
        return sorted([name async for page in self.list_logs(prefix) for name in page])

    def list_logs(
        self, prefix: str | None = None, *, after: str | None = None, page_size: int = PAGE_SIZE
    ) -> AsyncIterator[list[str]]:
        """Return pages of the names of all logs, or of those that start with `prefix`.

        A page and each answer of the metadata store stay small, however many logs there are.  The
        order is always the same, but not sorted.  A log that exists all the time and keeps its name
        is listed once.  Each list reads every name whatever the prefix; to repeat it, `watch_logs`.

        Args:
            prefix: of a path, `orders/`, or any other start of a name.
            after: the last name of a page; the list goes on there, also in another process.
            page_size: how many names a page has, except the last one.

        Raises: MetadataError.
        """
        self._require_open()
        return list_pages(
            self._store,
            self._context.paths,
            name_prefix(prefix),
            after=None if after is None else validate_log_name(after),
            page_size=page_size,
        )

    def watch_logs(self, prefix: str | None = None) -> LogWatch:
        """Return a watch of all logs, or of those whose names start with `prefix`.

        It reports the existing logs first, and then those created, deleted and renamed.
        """
        self._require_open()
        return LogWatch(self._context, name_prefix(prefix))

    async def open_log(
        self, name: str, *, config: LogConfig | None = None, create_if_missing: bool = False
    ) -> DistributedLogManager:
        """Open a log.

        Args:
            name: the log.
            config: replaces the namespace's; the log's own quorums and settings take precedence.
            create_if_missing: create it with `config` if it does not exist.

        Raises:
            LogNotFoundError: there is no such log.
        """
        self._require_open()
        try:
            log = await self._context.logs.find(name)
        except LogNotFoundError:
            if not create_if_missing:
                raise
            with contextlib.suppress(LogExistsError):  # another client was faster
                await self.create_log(name, config=config)
            log = await self._context.logs.find(name)
        return DistributedLogManager(self._context, log, config or self._context.config)

    async def open_merged_reader(
        self,
        names: Sequence[str],
        *,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        positions: Mapping[str, DLSN] | None = None,
    ) -> AsyncMergedReader[LogRecordWithDLSN]:
        """Open a reader over several logs, whose records come by transaction id.

        Args:
            names: the logs, each once; at equal transaction ids the first named log comes first.
            txid: where to start in each log, as for `open_reader`; so is `timestamp_ms`.
            positions: where to start in some of them instead, such as `positions` of a reader.
                They belong to names.  If a log may be deleted and created again, store the `log_id`
                of each log, too: the position means nothing in a new log.

        Raises:
            LogNotFoundError, AlreadyTruncatedError: a log does not exist, or was truncated.
            ConfigurationError: no log is named, or one twice; SchemaMismatchError: one is typed.
        """
        self._require_open()
        return await AsyncMergedReader.open(
            self.open_log, names, positions, txid=txid, timestamp_ms=timestamp_ms
        )

    async def get_snapshots(
        self, names: Sequence[str], *, fresh: bool = False
    ) -> dict[str, LogSnapshot | None]:
        """Return a snapshot of each log; None for those that do not exist.

        Logs of earlier calls are watched, and an unchanged log is not read again.  A change of a
        moment ago may be missing.  With `fresh` all changes that completed before this call are
        included, for one more round trip, however many logs there are.

        Raises: LedgerReadError, MetadataError.
        """
        return await self.followers.take(names, fresh=fresh)

    async def survey_logs(self, names: Sequence[str]) -> dict[str, LogSnapshot | DLError]:
        """Return a snapshot of each log, or the error that prevents it.

        It is like `get_snapshots` with `fresh`, but a log with damaged metadata, or without an
        answer of its bookies, does not hide the others.  Logs that do not exist are left out.

        Raises: MetadataError.
        """
        found = await self.followers.survey(names, fresh=True)
        return {name: outcome for name, outcome in found.items() if outcome is not None}

    async def get_schemas(self, names: Sequence[str]) -> dict[str, pa.Schema | None]:
        """Return each existing log's schema, None if of bytes; raise `InvalidLogNameError`."""
        self._require_open()
        return await find_schemas(self._context.logs, names)

    async def find_places(
        self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]
    ) -> list[RecordPlace]:
        """Return the place of the first record of each search, in its snapshot.

        It reads a few entries from bookies, and nothing from the metadata store.

        Raises: LedgerReadError: no replica of an entry is readable.
        """
        self._require_open()
        return await find_places(self._context, wanted)

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
    ) -> StagedAppend:
        """Begin an atomic append to any number of logs.

        Args:
            identity: the appender, across restarts: 1 … 200 bytes.
            version: number of the identity's append; a committed version is not appended again.
            shared: staging shared with other appends; by default that of its own identity.
            run: the life of an appender that appends a version several times, one after the other,
                and repeats them in the same order; without it a version is appended once.
            lock_timeout_s: how long the commit waits for a log's writer; None: as configured.
            keep_record: False if the identity appends only once: its record is removed early.
            strict: refuse a repetition unless it is the latest version, to the same logs.  Without
                it any committed version is skipped, by its number alone.
            after: the version that must be the last committed one at the commit, -1 for none.
            token: unique to the append, for another try in another process.

        Raises: ConfigurationError: the identity or version is invalid.
        """
        # Loaded here, because most commands of `dlog` append nothing.
        from dlcore.log.staging.append import StagedAppend

        self._require_open()
        return StagedAppend(
            self._context,
            self._owner,
            identity,
            version,
            shared=shared,
            run=run,
            lock_timeout_s=(
                self._context.config.lock_timeout_s if lock_timeout_s is None else lock_timeout_s
            ),
            config=self._context.config,
            keep_record=keep_record,
            strict=strict,
            after=after,
            token=token,
        )

    async def open_staging_writer(self, *, identity: str) -> StagingWriter:
        """Open a writer whose records enter logs when an append commits their extents.

        Raises: ConfigurationError: `identity` is empty, or too long.
        """
        from dlcore.log.staging.append import check_identity
        from dlcore.log.staging.writer import StagingWriter

        self._require_open()
        check_identity(identity)
        return StagingWriter(self._context, self._owner, identity, self._context.config)

    async def list_staged(self) -> list[StagedStatus]:
        """Return the staged ledgers with uncommitted extents.  Raises: MetadataError."""
        self._require_open()
        return await list_all_staged(self._context)

    async def clean_staging(
        self, *, leftovers_age_s: float, commits_age_s: float
    ) -> tuple[int, int]:
        """Remove old staged ledgers of dead processes, and old records of commits.

        Returns: how many staged ledgers were removed, and how many records.  Raises: MetadataError.
        """
        self._require_open()
        now_ms = self._context.clock.now_ms()
        ledgers = await settle_abandoned(
            self._context, created_before_ms=now_ms - int(leftovers_age_s * 1000)
        )
        records = await sweep_commits(self._context, before_ms=now_ms - int(commits_age_s * 1000))
        return ledgers, records

    async def tidied(self) -> None:
        """Wait until the background work after the answers so far is done.  Raises nothing."""
        await self._context.tidier.settled()

    def get_statistics(self) -> NamespaceStatistics:
        """Return counts of this client's work so far, and its open objects."""
        self._require_open()
        context, written = self._context, self._ledgers.write_statistics
        kinds = Counter(type(each).__name__ for each in context.open_objects)
        return NamespaceStatistics(
            entries_written=written.entries,
            bytes_written=written.size_bytes,
            entries_read=context.reads.entries,
            bytes_read=context.reads.size_bytes,
            sessions_lost=self._sessions_lost,
            is_connected=self._store.session_state is SessionState.CONNECTED,
            open_ledgers=written.open_ledgers,
            pending_bytes=written.pending_bytes,
            open_objects=dict(kinds),
            followed_logs=len(self._followers),
        )

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.EXPIRED:
            self._sessions_lost += 1

    async def get_bookies(self) -> list[BookieRegistration]:
        """Return the bookies that are registered now.  Raises: MetadataError."""
        self._require_open()
        return await self._registry.get_bookies()

    async def get_ledger(self, ledger_id: int) -> LedgerMetadata:
        """Return the metadata of a ledger.  Raises: LedgerNotFoundError, MetadataError."""
        self._require_open()
        return (await self._context.ledger_store.read(ledger_id)).metadata

    async def list_ledgers(self, *, first: int = 0, count: int = 1000) -> ReadLedgers:
        """Return the metadata of up to `count` ledgers by id, ascending from `first` on.

        A damaged ledger has its error instead, so that it does not hide the others.  Raises:
        MetadataError.
        """
        self._require_open()
        return await self._context.ledger_store.read_from(first, count)

    async def last_version(self, identity: str) -> int:
        """Return the last version that an appender committed, or -1.  Raises: MetadataError."""
        return await last_version(self._context, identity)

    async def list_commits(self) -> list[CommitStatus]:
        """Return the last commit of each appender that is remembered.  Raises: MetadataError."""
        self._require_open()
        return await list_commits(self._context)

    def _require_open(self) -> None:
        self._context.lifetime.require_open()

    async def aclose(self) -> None:
        """Close every connection; writers and readers of the namespace stop working.

        An open writer is abandoned, and an error is logged for records that it had not written.
        """
        if self._context.lifetime.has_ended:
            return
        self._context.lifetime.has_ended = True
        async with AsyncExitStack() as steps:  # from the last to the first, even if one fails
            steps.push_async_callback(self._store.aclose)
            steps.push_async_callback(self._bookies.aclose)
            steps.push_async_callback(self._registry.aclose)
            steps.push_async_callback(self._ledgers.aclose)
            steps.push_async_callback(self._owner.aclose)
            steps.callback(self._followers.close)
            steps.push_async_callback(self._context.tidier.aclose)
            await self._abandon_open_objects()

    async def _abandon_open_objects(self) -> None:
        """Abandon all at once, because each takes a while without a metadata store."""
        results = await asyncio.gather(
            *(each.abandon("its namespace was closed") for each in self._context.open_objects),
            return_exceptions=True,
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors[1:]:
            logger.warning("closing %s: %s: %s", self._uri, type(error).__name__, error)
        if errors:
            raise errors[0]


async def open_namespace(
    uri: str,
    *,
    config: LogConfig | None = None,
    client_config: LedgerClientConfig | None = None,
    create: bool = False,
    client_id: str | None = None,
    tls: TlsFiles | None = None,
    session_timeout_s: float = SESSION_TIMEOUT_S,
    connect_timeout_s: float = SESSION_TIMEOUT_S,
) -> Namespace:
    """Open the namespace at `uri`, ``distributedlog://zk1:2181,zk2:2181/path``.

    Args:
        uri: the servers of the metadata store, and the namespace's root path in it.
        config: configuration of logs, unless `open_log` gets another one.
        client_config: configuration of the client of bookies.
        create: create the namespace if it does not exist.
        client_id: this client's name in its locks; by default host and process.
        tls: certificates for connections to bookies; None: no encryption.
        session_timeout_s: after this long without contact this client loses its locks.
        connect_timeout_s: how long to wait for the first connection to the metadata store.

    Raises:
        InvalidNamespaceUriError: the URI does not parse.
        MetadataConnectionError: no answer from the metadata store.
        ConfigurationError: there is no namespace at that path.
    """
    from dlcore.metadata.binding import ensure_namespace, read_binding
    from dlcore.metadata.zookeeper import ZooKeeperStore
    from dlcore.transport.client import WireBookieClient

    parsed, clock = parse_uri(uri), SystemClock()
    paths, client_config = NamespacePaths(parsed.root), client_config or LedgerClientConfig()
    store = await ZooKeeperStore.connect(
        parsed.servers, session_timeout_s=session_timeout_s, connect_timeout_s=connect_timeout_s
    )
    try:
        opening = ensure_namespace(store, paths, clock) if create else read_binding(store, paths)
        binding = await opening
    except BaseException:
        await store.aclose()
        raise
    registry = BookieRegistry(store, paths)
    bookies = WireBookieClient(
        registry.resolve,
        cluster_id=binding.cluster_id,
        config=client_config,
        resolve_control=registry.resolve_control,
        tls=tls,
    )
    return Namespace(
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
    )
