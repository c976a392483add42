"""A log as a binary file: raw streams, to which `io` adds buffering and text."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from dlcore.base.records import LogRecord

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from dlcore.log.streams import AsyncAppendOnlyStreamReader
    from dlcore.sync.buffering import BufferingWriter
    from dlcore.sync.portal import Portal


class _Stream(io.RawIOBase):
    """The common base of both streams."""

    def __del__(self) -> None:
        """Do not close it, as `io` would: the thread of this call is not known."""

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")


class AppendOnlyStreamWriter(_Stream):
    """Appends bytes to a stream, as a file that is open for writing.  Not thread-safe.

    `write` buffers; `flush` and `close` wait until all bytes are durable and visible.  An open
    stream is closed with its namespace, or at exit, but not by the garbage collector.
    """

    def __init__(self, writer: BufferingWriter, position: int) -> None:
        super().__init__()
        self._writer = writer
        self._position = self._end = position

    def __repr__(self) -> str:
        return f"<AppendOnlyStreamWriter at {self._end} of {self._writer!r}>"

    @property
    def position(self) -> int:
        """The end of the durable bytes, as of the last flush."""
        return self._position

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next byte to write."""
        return self._end

    def write(self, data: ReadableBuffer, /) -> int:
        """Accept all of `data`; return its size in bytes.  Raises as `LogWriter.write`."""
        self._require_open()
        from dlcore.log.entries.stream import cut

        view = memoryview(data).cast("B")
        for end, chunk in cut(view, self._end):
            self._writer.write(LogRecord(end, chunk))
            self._end = end
        return len(view)

    def flush(self) -> None:
        """Wait until all written bytes are durable and visible.

        Raises: ValueError: the stream is closed; else as `LogWriter.commit`.
        """
        self._require_open()
        if self._position != self._end:
            self._writer.commit()
            self._position = self._end

    def mark_end_of_stream(self) -> None:
        """Flush and seal the stream: no byte can follow.  Raises: as `flush`."""
        self.flush()
        self._writer.mark_end_of_stream()

    def abort(self) -> None:
        """Close without flushing, as a crash would; flushed bytes stay."""
        self._end = self._position
        self._writer.abort()
        self.close()

    def close(self) -> None:
        """Flush, and release the log; harmless if it is closed.  Raises: as `LogWriter.close`."""
        try:
            super().close()
        finally:
            self._writer.close()


class AppendOnlyStreamReader(_Stream):
    """Reads the bytes of a stream, as a file that is open for reading.  Not thread-safe.

    At the end a read returns nothing, until more bytes are written.  With `has_ended` nothing more
    will come, because the stream is sealed.
    """

    def __init__(self, portal: Portal, reader: AsyncAppendOnlyStreamReader) -> None:
        super().__init__()
        self._portal = portal
        self._reader = reader
        # The twin may be further, because it has read for a call that was interrupted.
        self._position = reader.tell()

    def __repr__(self) -> str:
        return repr(self._reader).replace("Async", "", 1)

    @property
    def has_ended(self) -> bool:
        """Whether all of a sealed stream was read, up to its end."""
        return self._reader.has_ended

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Read the available bytes into `buffer`; return their number, 0 at the end.

        Raises: ValueError: the stream is closed; else as `AsyncAppendOnlyStreamReader.read`.
        """
        self._require_open()

        async def readinto() -> int:
            await self._reader.seek(self._position)
            return await self._reader.readinto(buffer)

        count = self._portal.call(readinto())
        self._position += count
        return count

    def readall(self) -> bytes:
        """Return all readable bytes.  Raises: as `readinto`."""
        self._require_open()

        async def read() -> bytes:
            await self._reader.seek(self._position)
            return await self._reader.read()

        found = self._portal.call(read())
        self._position += len(found)
        return found

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position, forward or back, possibly beyond the end; return it.

        Raises: ConfigurationError: there is no such position; else as `readinto`.
        """
        self._require_open()
        if whence == io.SEEK_CUR:
            offset, whence = self._position + offset, io.SEEK_SET
        self._position = self._portal.call(self._reader.seek(offset, whence))
        return self._position

    def skip_to(self, position: int) -> bool:
        """Move to a position that is readable, or is the end; else stay and return False.

        Raises:
            EndOfStreamError: the stream is sealed and ends before the position.
        """
        self._require_open()
        is_there = self._portal.call(self._reader.skip_to(position))
        if is_there:
            self._position = position
        return is_there

    def close(self) -> None:
        """Stop reading; harmless if it is closed already."""
        if not self.closed:
            super().close()
            if not self._portal.is_inherited:
                self._portal.call(self._reader.aclose())
