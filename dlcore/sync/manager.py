"""The blocking API of one log: its writers, its readers, and its metadata."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from dlcore.base.errors import AlreadyClosedError
from dlcore.sync.log_calls import LogCalls
from dlcore.sync.stream import AppendOnlyStreamWriter
from dlcore.sync.writer import LogWriter

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from dlcore.api.log import DistributedLogManager as AsyncManager
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.writing.records_writer import AsyncLogWriter
    from dlcore.sync.buffering import BufferingWriter
    from dlcore.sync.portal import Portal


class DistributedLogManager(LogCalls):
    """One log: its writers, its readers, and its metadata."""

    def __init__(
        self, portal: Portal, manager: AsyncManager, writers: dict[BufferingWriter, None]
    ) -> None:
        super().__init__(portal, manager.aclose)
        self._manager = manager
        self._writers = writers

    def open_writer(
        self, *, producer: str | None = None, ledger_metadata: Mapping[str, str] | None = None
    ) -> LogWriter:
        """Open a writer.  Arguments: those of the async method.

        Raises: ConfigurationError, EndOfStreamError, LogModeError, OwnershipAcquireFailedError,
            LedgerRecoveryError, LogNotFoundError, MetadataError, ProxyUnavailableError.
        """
        opening = self._manager.open_writer(producer=producer, ledger_metadata=ledger_metadata)
        return self._twin_of(self._call(opening))

    def _twin_of(self, opened: AsyncLogWriter) -> LogWriter:
        return LogWriter(self._portal, opened, self._writers)

    def open_stream_writer(self) -> AppendOnlyStreamWriter:
        """Open the log's writer as a binary file, positioned at the end of the log's bytes.

        Raises: SchemaMismatchError: the log is typed; and as `open_writer`.
        """
        opened, position = self._call(self._manager._begin_stream())
        return AppendOnlyStreamWriter(self._twin_of(opened), position)

    def watch_segments(self) -> Generator[list[LogSegment], None, None]:
        """Yield the log's segments now, and again after each change.

        It waits for changes.  Raises: LogNotFoundError: the log is deleted; MetadataError.
        """

        watching = self._call_on_loop(self._manager.watch_segments)
        try:
            while True:
                yield self._call(anext(watching))
        finally:
            # At the end of the process, by the garbage collector.
            with suppress(AlreadyClosedError):
                self._call(watching.aclose())
