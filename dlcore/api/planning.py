"""Plans to read many logs, such as those of a query: snapshots, places, and the ranges between."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dlcore.api.opened_namespace import OpenedNamespace

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import pyarrow as pa

    from dlcore.base.errors import DLError
    from dlcore.base.ids import DLSN
    from dlcore.base.records import NotLessThan, RecordPlace
    from dlcore.log.reading.scan import LogSnapshot, ScanBatch, ScanRange


class ScanPlanning(OpenedNamespace):
    """Reads that are planned once for many logs, and may run in other processes.

    A snapshot does not change, so that all that is planned with it fits together.
    """

    @abstractmethod
    async def get_snapshots(
        self, names: Sequence[str], *, fresh: bool = False
    ) -> dict[str, LogSnapshot | None]:
        """Return a snapshot of each log; None for those that do not exist.

        Logs of earlier calls are watched, and an unchanged log is not read again.  A change of a
        moment ago may be missing.  With `fresh` all changes that completed before this call are
        included, for one more round trip, however many logs there are.  Proxies always do this.

        Raises: LedgerReadError, MetadataError.
        """

    async def survey_logs(self, names: Sequence[str]) -> dict[str, LogSnapshot | DLError]:
        """Return a snapshot of each log, or the error that prevents it.

        It is like `get_snapshots` with `fresh`, but a log with damaged metadata, or without an
        answer of its bookies, does not hide the others.  Logs that do not exist are left out.

        Raises: MetadataError; UnsupportedError over proxies.
        """
        self._unsupported("survey_logs")

    @abstractmethod
    async def get_schemas(
        self, names: Sequence[str], *, for_write: bool = False
    ) -> dict[str, pa.Schema | None]:
        """Return each existing log's schema, None if of bytes.

        With `for_write` a sealed log is an error, at the cost of one read for all logs.

        Raises: InvalidLogNameError, MetadataError; with `for_write` EndOfStreamError.
        """

    @abstractmethod
    async def find_places(
        self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]
    ) -> list[RecordPlace]:
        """Return the place of the first record of each search, in its snapshot.

        It reads a few entries from bookies, and nothing from the metadata store.

        Raises: LedgerReadError: no replica of an entry is readable; LogNotFoundError over proxies.
        """

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
