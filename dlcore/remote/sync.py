"""The blocking face of `dlcore.remote`: the same names, over one background event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore._blocking import Blocking, iterate
from dlcore._portal import Portal, shared_portal
from dlcore.remote import reading
from dlcore.remote.reading import PATIENCE_S, LogInfo, RemoteRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    import pyarrow as pa

    from dlcore.ids import DLSN
    from dlcore.log.reading.ranges import Bound

__all__ = [
    "LogInfo",
    "RemoteLog",
    "RemoteNamespace",
    "RemoteRange",
    "RemoteReader",
    "RemoteRecord",
    "open_namespace",
]


def open_namespace(endpoint: str, *, patience_s: float = PATIENCE_S) -> RemoteNamespace:
    """Open the logs that proxies serve.  Arguments and errors: `dlcore.remote.open_namespace`."""
    portal = shared_portal()
    opening = reading.open_namespace(endpoint, patience_s=patience_s)
    return RemoteNamespace(portal, portal.call(opening))


class RemoteNamespace(Blocking):
    """A collection of logs."""

    def __init__(self, portal: Portal, namespace: reading.RemoteNamespace) -> None:
        super().__init__(portal, namespace.aclose)
        self._namespace = namespace

    def __repr__(self) -> str:
        return repr(self._namespace)

    def get_logs(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of all logs, or of those that start with `prefix`.

        Raises: ProxyUnavailableError, MetadataError.
        """
        return self._call(self._namespace.get_logs(prefix))

    def open_log(self, name: str) -> RemoteLog:
        """Open a log.  Raises: LogNotFoundError, InvalidLogNameError, ProxyUnavailableError."""
        return RemoteLog(self._portal, self._call(self._namespace.open_log(name)))


class RemoteLog:
    """One log.  Each method is that of the async twin, with its errors."""

    def __init__(self, portal: Portal, log: reading.RemoteLog) -> None:
        self._portal = portal
        self._log = log

    def __repr__(self) -> str:
        return repr(self._log)

    @property
    def name(self) -> str:
        """The log's name."""
        return self._log.name

    def get_info(self) -> LogInfo:
        """Return what the log holds now.  Raises: LogNotFoundError, ProxyUnavailableError."""
        return self._portal.call(self._log.get_info())

    def get_schema(self) -> pa.Schema:
        """Return the columns of its rows.  Raises: as `get_info`."""
        return self._portal.call(self._log.get_schema())

    def get_log_record_count(self) -> int:
        """Return the exact number of readable records.  Raises: as `get_info`."""
        return self._portal.call(self._log.get_log_record_count())

    def get_first_dlsn(self) -> DLSN:
        """Return the position of the first record.  Raises: LogEmptyError, and as `get_info`."""
        return self._portal.call(self._log.get_first_dlsn())

    def get_last_dlsn(self) -> DLSN:
        """Return the position of the last record.  Raises: LogEmptyError, and as `get_info`."""
        return self._portal.call(self._log.get_last_dlsn())

    def is_end_of_stream_marked(self) -> bool:
        """Return whether the log is sealed.  Raises: as `get_info`."""
        return self._portal.call(self._log.is_end_of_stream_marked())

    def read(
        self,
        start: Bound | None = None,
        end: Bound | None = None,
        *,
        columns: Sequence[str] | None = None,
    ) -> RemoteRange:
        """Return the records in [start, end), to be read at once.

        Raises: ConfigurationError: a time has no time zone.
        """
        found = self._portal.call(self._log.read(start, end, columns=columns))
        return RemoteRange(self._portal, found)

    def open_reader(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp: datetime | None = None,
        columns: Sequence[str] | None = None,
    ) -> RemoteReader:
        """Open a reader; at the first record that is not truncated, unless one of these is given.

        Raises: ConfigurationError: several are.
        """
        reader = self._log.open_reader(dlsn=dlsn, txid=txid, timestamp=timestamp, columns=columns)
        return RemoteReader(self._portal, reader)


class RemoteReader(Blocking):
    """Reads one log in order, each record once.  Not thread-safe."""

    def __init__(self, portal: Portal, reader: reading.RemoteReader) -> None:
        super().__init__(portal, reader.aclose)
        self._reader = reader

    def __repr__(self) -> str:
        return repr(self._reader)

    @property
    def log_name(self) -> str:
        """The log's name."""
        return self._reader.log_name

    @property
    def position(self) -> DLSN | None:
        """Where it reads on; None as long as that is not told by a position."""
        return self._reader.position

    def batches(self, *, follow: bool = False) -> Iterator[pa.RecordBatch]:
        """Yield Arrow batches, up to the end of what is readable, or following the log.

        Raises: as the async twin.
        """
        return iterate(self._portal, self._reader.batches(follow=follow))

    def records(self, *, follow: bool = False) -> Iterator[RemoteRecord]:
        """Yield records of a log of bytes; ends as `batches` does.

        Raises: as the async twin.
        """
        for batch in self.batches(follow=follow):
            yield from reading.records_of(batch)


class RemoteRange:
    """The records of a log in [start, end)."""

    def __init__(self, portal: Portal, found: reading.RemoteRange) -> None:
        self._portal = portal
        self._range = found

    def __repr__(self) -> str:
        return repr(self._range)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return iterate(self._portal, self._range.__aiter__())

    def to_arrow(self) -> pa.Table:
        """Return all of it as a table.  Raises: as iterating."""
        return self._portal.call(self._range.to_arrow())
