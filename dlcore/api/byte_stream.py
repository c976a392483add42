"""A log as one sequence of bytes, which is written and read as a file."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dlcore.api.opened_log import OpenedLog
from dlcore.log.streams import AsyncAppendOnlyStreamReader, AsyncAppendOnlyStreamWriter

if TYPE_CHECKING:
    from dlcore.log.reading.rows_reader import AsyncLogReader
    from dlcore.log.writing.records_writer import AsyncLogWriter


class ByteStream(OpenedLog):
    """The bytes of one log, each of which has a position.

    A back end opens a writer and a reader of records for them, and knows where they end.
    """

    async def open_stream_writer(self) -> AsyncAppendOnlyStreamWriter:
        """Open a writer of the log's bytes, which begins where the log's bytes end.

        Through proxies it fences an earlier writer of bytes, and does not prevent writers of
        records.

        Raises: SchemaMismatchError: the log is typed; and as `open_writer`.
        """
        return AsyncAppendOnlyStreamWriter(*await self._begin_stream())

    async def open_stream_reader(self, position: int | None = None) -> AsyncAppendOnlyStreamReader:
        """Open a reader of the log's bytes.

        Args:
            position: the first byte wanted, perhaps past the end; None: the first one that is not
                truncated.

        Raises: SchemaMismatchError: the log is typed; as `open_reader`; and as
            `AsyncAppendOnlyStreamReader.seek`.
        """
        reader = await self._open_bytes_reader()
        return await AsyncAppendOnlyStreamReader.open(reader, self._stream_end, position)

    @abstractmethod
    async def _begin_stream(self) -> tuple[AsyncLogWriter, int]:
        """Return a writer for bytes, and where they end.  Raises: as `open_stream_writer`."""

    @abstractmethod
    async def _open_bytes_reader(self) -> AsyncLogReader:
        """Open a reader of the records of bytes.  Raises: SchemaMismatchError: it is typed."""

    @abstractmethod
    async def _stream_end(self) -> tuple[int, bool]:
        """Return where the readable bytes of a stream end, and whether the stream is sealed.

        Raises: SchemaMismatchError: the log is typed.
        """
