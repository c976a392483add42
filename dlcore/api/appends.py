"""Appends to several logs, all or none, each once however often it is repeated."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dlcore.api.opened_namespace import OpenedNamespace

if TYPE_CHECKING:
    from dlcore.log.metadata.commits import AppendRun, CommitStatus, SharedStaging
    from dlcore.log.staging.faces import StagedAppend, StagingWriter


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
