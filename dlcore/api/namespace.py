"""The namespace: one class for its users, whatever reaches the logs.

`open_namespace` chooses the back end by the scheme of the URI: `DirectNamespace` talks to the
metadata store and the bookies, `FlightNamespace` to proxies.  Each operation is declared once, with
its promise, in `Namespace` or in one of the classes that it inherits: each is one part of what a
namespace offers.  An operation that a back end does not have raises UnsupportedError.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from dlcore.base.closing import AsyncClosing
from dlcore.base.config import LogConfig, LogSettings, require_kind
from dlcore.base.errors import UnsupportedError
from dlcore.base.ids import name_prefix, validate_log_name, validate_log_names
from dlcore.base.records import require_search
from dlcore.log.metadata.listing import PAGE_SIZE
from dlcore.log.reading.merged import AsyncMergedReader
from dlcore.log.typed.arrow import first_schema

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
    from typing import NoReturn

    import pyarrow as pa

    from dlcore.api.log import DistributedLogManager
    from dlcore.base.errors import DLError
    from dlcore.base.ids import DLSN
    from dlcore.base.records import NotLessThan, RecordPlace
    from dlcore.base.statistics import NamespaceStatistics
    from dlcore.ledger.metadata.store import ReadLedgers
    from dlcore.ledger.metadata.values import BookieRegistration, LedgerMetadata
    from dlcore.log.metadata.commits import AppendRun, CommitStatus, SharedStaging
    from dlcore.log.reading.scan import LogSnapshot, ScanBatch, ScanRange
    from dlcore.log.reading.watching import LogWatch
    from dlcore.log.staging.faces import StagedAppend, StagingWriter
    from dlcore.log.typed.schema import LogSchema


class OpenedNamespace(AsyncClosing):
    """The base of all that a namespace offers."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """The URI that it was opened with."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close every connection; writers and readers of the namespace stop working.

        An open writer is abandoned, and an error is logged for records that it had not written.
        """

    def _unsupported(self, operation: str) -> NoReturn:
        raise UnsupportedError(
            f"{self.uri}: proxies do not offer `{operation}`; open the namespace directly, as "
            "distributedlog://…"
        )


class ScanPlanning(OpenedNamespace):
    """Reads that are planned once for many logs, and may run in other processes.

    A snapshot does not change, so that all that is planned with it fits together.
    """

    async def get_snapshots(
        self, names: Sequence[str], *, fresh: bool = False
    ) -> dict[str, LogSnapshot | None]:
        """Return a snapshot of each log; None for those that do not exist.

        Logs of earlier calls are watched, and an unchanged log is not read again.  A change of a
        moment ago may be missing.  With `fresh` all changes that completed before this call are
        included, for one more round trip, however many logs there are.  Proxies always do this.

        Raises: InvalidLogNameError, LedgerReadError, MetadataError.
        """
        return await self._get_snapshots(validate_log_names(names), fresh=fresh)

    @abstractmethod
    async def _get_snapshots(
        self, names: Sequence[str], *, fresh: bool
    ) -> dict[str, LogSnapshot | None]:
        """Return a snapshot of each log; its name is valid."""

    async def survey_logs(self, names: Sequence[str]) -> dict[str, LogSnapshot | DLError]:
        """Return a snapshot of each log, or the error that prevents it.

        It is like `get_snapshots` with `fresh`, but a log with damaged metadata, or without an
        answer of its bookies, does not hide the others.  Logs that do not exist are left out.

        Raises: MetadataError; UnsupportedError over proxies.
        """
        self._unsupported("survey_logs")

    async def get_schemas(
        self, names: Sequence[str], *, for_write: bool = False
    ) -> dict[str, pa.Schema | None]:
        """Return each existing log's schema, None if of bytes.

        With `for_write` a sealed log is an error, at the cost of one read for all logs.

        Raises: InvalidLogNameError, MetadataError; with `for_write` EndOfStreamError.
        """
        return await self._get_schemas(validate_log_names(names), for_write=for_write)

    @abstractmethod
    async def _get_schemas(
        self, names: Sequence[str], *, for_write: bool
    ) -> dict[str, pa.Schema | None]:
        """Return each existing log's schema; its name is valid."""

    async def find_places(
        self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]
    ) -> list[RecordPlace]:
        """Return the place of the first record of each search, in its snapshot.

        It reads a few entries from bookies, and nothing from the metadata store.

        Raises: LedgerReadError: no replica of an entry is readable; LogNotFoundError over proxies.
        """
        for _, what in wanted:
            require_search(what)
        return await self._find_places(wanted)

    @abstractmethod
    async def _find_places(
        self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]
    ) -> list[RecordPlace]:
        """Return the place of the first record of each search, in its snapshot."""

    @abstractmethod
    def scan(self, part: ScanRange) -> AsyncGenerator[ScanBatch, None]:
        """Yield the records of a range of a snapshot, in order, one `ScanBatch` per entry.

        `dlcore.scan` does the same in any process, without an open namespace.

        Raises:
            LedgerReadError: no replica of an entry is readable, or no proxy returned all records
                within `patience_s`.
            AlreadyTruncatedError, LogNotFoundError: records were truncated or deleted since the
                scan was planned.
        """

    async def grant(
        self, parts: Sequence[Sequence[ScanRange]], *, lifetime_s: int = 3600
    ) -> list[tuple[bytes, ...]]:
        """Return, for each of `parts`, capabilities to read its ranges, and nothing else.

        A process without a certificate reads ranges that have them, as `ScanRange.capabilities`,
        from bookies that take capabilities.  They are secrets: they give their rights to every
        holder, for `lifetime_s` seconds, at most a day.

        Raises: ConfigurationError, MetadataError; UnsupportedError over proxies.
        """
        self._unsupported("grant")


class AtomicAppends(OpenedNamespace):
    """Appends whose records are durable first, and then enter all their logs in one step."""

    @abstractmethod
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
                Proxies always keep it, because a client may lose their answer.
            strict: refuse a repetition unless it is the latest version, to the same logs.  Without
                it any committed version is skipped, by its number alone.
            after: the version that must be the last committed one at the commit, -1 for none.  Not
                over proxies.

        Raises: ConfigurationError: the identity or version is invalid.
        """

    @abstractmethod
    async def open_staging_writer(self, *, identity: str, shared: bool = False) -> StagingWriter:
        """Open a writer whose records enter logs when an append commits their extents.

        With `shared` proxies keep its ledgers open for other writers of the same identity.  A
        direct writer keeps its ledgers open in any case, until it is closed.

        Raises: ConfigurationError: `identity` is empty, or too long.
        """

    async def last_version(self, identity: str) -> int:
        """Return the last version that an appender committed, or -1.

        Raises: MetadataError; UnsupportedError over proxies.
        """
        self._unsupported("last_version")

    async def list_commits(self) -> list[CommitStatus]:
        """Return the last commit of each appender that is remembered.

        Raises: MetadataError; UnsupportedError over proxies.
        """
        self._unsupported("list_commits")


class AccessRules(OpenedNamespace):
    """The rules that say what callers of proxies may do."""

    @abstractmethod
    async def get_access_rules(self) -> list[str]:
        """Return the rules of access, as texts, in the order in which they were added.

        A rule says what callers of proxies may do: docs/access.md.  Without any they may do
        everything.  Clients that reach the metadata store and the bookies are bound by none.

        Raises: MetadataError; AccessDeniedError: over proxies it needs to manage the namespace.
        """

    @abstractmethod
    async def change_access_rules(
        self, *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> list[str]:
        """Remove rules, then add others, in one step; return all rules.

        Proxies follow within seconds, and end streams that lost their right.

        Args:
            add: texts of rules, as ``allow user:alice read,append prefix pay/``.
            remove: texts of rules that are there.

        Raises:
            ConfigurationError: a text is no rule, one to remove is not there, or there are too
                many.
            MetadataError; AccessDeniedError: as for `get_access_rules`.
        """


class ClusterView(OpenedNamespace):
    """The bookies and ledgers below all logs, and this client's work with them.

    Only a client that reaches the bookies itself sees them: over proxies each call but
    `get_proxies` raises UnsupportedError.
    """

    def get_statistics(self) -> NamespaceStatistics:
        """Return counts of this client's work so far, and its open objects.

        Raises: UnsupportedError over proxies.
        """
        self._unsupported("get_statistics")

    def get_collector(self) -> Any:
        """Return the metrics of this client, for a registry of `prometheus_client`.

        The registry asks it at each scrape, in any thread; a closed namespace has no samples.

        Raises: UnsupportedError over proxies, which have metrics themselves.
        """
        self._unsupported("get_collector")

    @abstractmethod
    async def get_proxies(self) -> list[str]:
        """Return the locations of the live proxies of the namespace, sorted.

        Raises: MetadataError.
        """

    async def get_bookies(self) -> list[BookieRegistration]:
        """Return the bookies that are registered now.

        Raises: MetadataError; UnsupportedError over proxies.
        """
        self._unsupported("get_bookies")

    async def get_ledger(self, ledger_id: int) -> LedgerMetadata:
        """Return the metadata of a ledger.

        Raises: LedgerNotFoundError, MetadataError; UnsupportedError over proxies.
        """
        self._unsupported("get_ledger")

    async def list_ledgers(self, *, first: int = 0, count: int = 1000) -> ReadLedgers:
        """Return the metadata of up to `count` ledgers by id, ascending from `first` on.

        A damaged ledger has its error instead, so that it does not hide the others.

        Raises: MetadataError; UnsupportedError over proxies.
        """
        self._unsupported("list_ledgers")


class Namespace(ScanPlanning, AtomicAppends, AccessRules, ClusterView):
    """A collection of logs; used on one event loop.  Use `open_namespace`.

    Over proxies each method may also raise ProxyUnavailableError, if no proxy answers for
    `patience_s`.  A change may then have happened, or not.
    """

    def __repr__(self) -> str:
        return f"<Namespace {self.uri}>"

    async def create_log(
        self,
        name: str,
        *,
        config: LogConfig | None = None,
        settings: LogSettings | None = None,
        schema: Any = None,
    ) -> None:
        """Create a log, and warn if it needs more bookies than are registered.

        Args:
            name: the log.
            config: its quorums are stored with the log, for all its writers.  Proxies give the
                quorums of their own configuration, and refuse this argument.
            settings: settings that are stored with the log, for all its writers.  A cluster may
                have a `retention_s` and `explicit_truncation` for new logs (`dlog cluster
                settings`), which a log gets if these set neither.
            schema: an Arrow schema of its columns, for a typed log; without it a byte log.

        Raises: InvalidLogNameError, LogExistsError, ConfigurationError.
        """
        name = validate_log_name(name)
        if config is not None:
            require_kind("config", config, LogConfig)
        if settings is None:
            settings = LogSettings()
        require_kind("settings", settings, LogSettings)
        await self._create_log(name, config=config, settings=settings, schema=first_schema(schema))

    @abstractmethod
    async def _create_log(
        self,
        name: str,
        *,
        config: LogConfig | None,
        settings: LogSettings,
        schema: LogSchema | None,
    ) -> None:
        """Create a log with valid arguments."""

    @abstractmethod
    async def delete_log(self, name: str, *, damaged: bool = False) -> None:
        """Delete a log and its data.

        Args:
            name: the log.
            damaged: its metadata is damaged: delete its known parts.  Ledgers that are not known to
                belong to it remain, and `dlog ledger audit` finds them.  Not over proxies.

        Raises:
            LogNotFoundError: there is no such log.
            OwnershipAcquireFailedError: a writer owns it.  A proxy that owns it releases it first.
            CorruptMetadataError: its metadata is damaged, and `damaged` is False.
            ConfigurationError: `damaged` is True, but its metadata is intact.
        """

    @abstractmethod
    async def rename_log(self, name: str, new_name: str) -> None:
        """Give a log another name, at once for all clients.

        The log's nodes and data stay where they are, below its id.  Readers, and other clients that
        have it open, continue; only a writer through proxies gets a LogRenamedError, and opens the
        log by its new name.  Records that were staged for it enter it under its new name.

        Raises:
            LogNotFoundError, LogExistsError: there is no log `name`, or one `new_name`.
            OwnershipAcquireFailedError: a writer owns the log.
        """

    @abstractmethod
    async def fork_log(self, name: str, new_name: str, *, at: DLSN | None = None) -> DLSN:
        """Make a log that begins with the records that another one has in objects.

        The fork names the same objects, so that nothing is copied, however large the log is.  Its
        records have the positions, transaction ids, sequence ids and times of the source, and the
        ones that are written to it follow.  It has the settings and the schema of the source, as
        they are now, and no subscriptions.  From then on each of the two logs is written,
        truncated and deleted without the other one; an object stays as long as one of them names
        it.

        Args:
            name: the source.
            new_name: the fork.
            at: the fork has the records before this position, which is the beginning of an entry,
                or the end of a segment; None: all that is in objects.

        Returns: the position where the records of the source end in the fork.

        Raises:
            LogNotFoundError, LogExistsError: there is no log `name`, or one `new_name`.
            ConfigurationError: no fork can end there, or what is before that is not in objects
                yet.  The message names positions that work, or what to do.
        """

    @abstractmethod
    async def log_exists(self, name: str) -> bool:
        """Return whether the log exists.  Raises: MetadataError."""

    async def get_logs(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of the logs that start with `prefix`.

        Raises: InvalidLogNameError: `prefix` is no text; MetadataError.
        """
        return await self._get_logs(name_prefix(prefix))

    @abstractmethod
    async def _get_logs(self, prefix: str) -> list[str]:
        """Return the sorted names of the logs that start with `prefix`."""

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

        Raises: MetadataError; UnsupportedError over proxies.
        """
        self._unsupported("list_logs")

    def watch_logs(self, prefix: str | None = None) -> LogWatch:
        """Return a watch of all logs, or of those whose names start with `prefix`.

        It reports the existing logs first, and then those created, deleted and renamed.

        Raises: UnsupportedError over proxies.
        """
        self._unsupported("watch_logs")

    @abstractmethod
    async def open_log(
        self, name: str, *, config: LogConfig | None = None, create_if_missing: bool = False
    ) -> DistributedLogManager:
        """Open a log.

        Args:
            name: the log.
            config: replaces the namespace's; the log's own quorums and settings take precedence.
                Over proxies only the fields of a blocking writer's buffer may be set.
            create_if_missing: create it with `config` if it does not exist.

        Raises:
            LogNotFoundError: there is no such log.
            InvalidLogNameError: no log can have this name.
        """

    async def open_merged_reader(
        self,
        names: Sequence[str],
        *,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        positions: Mapping[str, DLSN] | None = None,
    ) -> AsyncMergedReader:
        """Open a reader over several logs, whose records are ordered by transaction id.

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
        return await AsyncMergedReader.open(
            self.open_log, names, positions, txid=txid, timestamp_ms=timestamp_ms
        )
