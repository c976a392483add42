"""The namespace: one class for its users, whatever reaches the logs.

`open_namespace` chooses the back end by the scheme of the URI: `DirectNamespace` talks to the
metadata store and the bookies, `FlightNamespace` to proxies.  Each operation is declared once, with
its promise: here, or in the class of its field, which this one inherits.  An operation that a back
end does not have raises UnsupportedError.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from dlcore.api.access import AccessRules
from dlcore.api.appends import AtomicAppends
from dlcore.api.cluster import ClusterView
from dlcore.api.planning import ScanPlanning
from dlcore.log.metadata.listing import PAGE_SIZE
from dlcore.log.reading.merged import AsyncMergedReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from dlcore.api.log import DistributedLogManager
    from dlcore.base.config import LogConfig, LogSettings
    from dlcore.base.ids import DLSN
    from dlcore.log.metadata.watching import LogWatch


class Namespace(ScanPlanning, AtomicAppends, AccessRules, ClusterView):
    """A collection of logs; used on one event loop.  Use `open_namespace`.

    Over proxies each method may also raise ProxyUnavailableError, if no proxy answers for
    `patience_s`.  A change may then have happened, or not.
    """

    def __repr__(self) -> str:
        return f"<Namespace {self.uri}>"

    @abstractmethod
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
        have it open, continue.  Records that were staged for it enter it under its new name.

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

    @abstractmethod
    async def get_logs(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of the logs that start with `prefix`.  Raises: MetadataError."""

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

    @abstractmethod
    async def aclose(self) -> None:
        """Close every connection; writers and readers of the namespace stop working.

        An open writer is abandoned, and an error is logged for records that it had not written.
        """
