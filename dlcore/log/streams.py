"""A log as a stream of bytes, which is appended to and read like a file.

`entries/stream.py` says how bytes are stored in records.  No failure makes a gap: a new writer
begins where the durable bytes end, whatever outcomes the writer before it knew.
"""

from __future__ import annotations

import asyncio
import io
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from dlcore.base.closing import AsyncClosing
from dlcore.base.config import require
from dlcore.base.errors import AlreadyTruncatedError, EndOfStreamError, UnexpectedError
from dlcore.base.ids import TXID_MAX
from dlcore.base.records import LogRecord
from dlcore.log.entries.body import batch_of
from dlcore.log.entries.stream import bytes_of, cut

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from _typeshed import ReadableBuffer, WriteableBuffer

    from dlcore.base.ids import DLSN


class AsyncAppendOnlyStreamWriter(AsyncClosing):
    """Appends bytes to a stream.  Use `open_stream_writer` of a log, or of one over an endpoint."""

    def __init__(self, writer: Any, position: int) -> None:
        self._writer = writer  # the log's writer
        self._position = self._end = position

    def __repr__(self) -> str:
        return f"<AsyncAppendOnlyStreamWriter {self._writer.log_name!r} at {self._position}>"

    @property
    def position(self) -> int:
        """Where the durable bytes end: it moves once bytes are acknowledged."""
        return self._position

    def tell(self) -> int:
        """Return where the next bytes go: the position once all written bytes are durable."""
        return self._end

    def write(self, data: ReadableBuffer) -> asyncio.Future[int]:
        """Accept bytes; return the future of the position after them, completed once durable.

        Raises: as `AsyncLogWriter.write`.
        """
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        records = list(cut(memoryview(data).cast("B"), self._end))
        if not records:
            answer.set_result(self._position)
            return answer
        if len(records) == 1:
            written = self._writer.write(LogRecord(*records[0]))
        else:
            txids, payloads = zip(*records, strict=True)
            written = self._writer.write_batch(batch_of(txids, payloads))
        self._end = records[-1][0]
        written.add_done_callback(partial(self._acknowledged, self._end, answer))
        return answer

    def _acknowledged(
        self, end: int, answer: asyncio.Future[int], written: asyncio.Future[DLSN]
    ) -> None:
        error = written.exception()
        if error is None:
            self._position = max(self._position, end)
        if answer.cancelled():
            return
        if error is None:
            answer.set_result(end)
        else:
            answer.set_exception(error)
            answer.exception()  # mark it retrieved: the next call gets the error in any case

    async def flush(self) -> int:
        """Wait until all bytes written so far are durable and visible; return the position.

        Raises: as `AsyncLogWriter.commit`.
        """
        end = self._end
        await self._writer.commit()
        self._position = max(self._position, end)
        return self._position

    async def mark_end_of_stream(self) -> None:
        """Flush and seal the stream: no byte can follow.  Raises: as `AsyncLogWriter.flush`."""
        end = self._end
        await self._writer.mark_end_of_stream()
        self._position = max(self._position, end)

    async def abort(self) -> None:
        """Stop at once, as a crash would; acknowledged bytes stay."""
        await self._writer.abort()

    async def aclose(self) -> None:
        """Flush, and release the log; a second call does nothing.

        Raises: as `AsyncLogWriter.aclose`.
        """
        await self._writer.aclose()

    async def __aexit__(self, *raised: Any) -> None:
        await self._writer.__aexit__(*raised)


class AsyncAppendOnlyStreamReader(AsyncClosing):
    """Reads the bytes of a stream.  Use `open_stream_reader` of a log, or of one over an endpoint.

    As with a growing file, a read at the end returns nothing, and later more.  At the end of a
    sealed stream nothing more will come, and `has_ended` is True.
    """

    def __init__(
        self,
        reader: Any,
        read_end: Callable[[], Awaitable[tuple[int, bool]]],
    ) -> None:
        self._reader = reader  # the log's reader, at its beginning
        self._read_end = read_end
        self._position = 0
        self._begin = 0
        self._data = memoryview(b"")  # from `_begin` on
        self._has_ended = False
        self._is_astray = False  # the log's reader is not where `_data` ends
        self._turn = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        reader: Any,
        read_end: Callable[[], Awaitable[tuple[int, bool]]],
        position: int | None,
    ) -> Self:
        """Read from a position, or else from the first byte that exists.

        Raises: as `seek`; the log's reader is closed then.
        """
        stream = cls(reader, read_end)
        try:
            if position is None:
                await stream.start_at_first()
            else:
                await stream.seek(position)
        except BaseException:
            await stream.aclose()
            raise
        return stream

    def __repr__(self) -> str:
        return f"<AsyncAppendOnlyStreamReader {self._reader.log_name!r} at {self._position}>"

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._position

    @property
    def has_ended(self) -> bool:
        """Whether a read reached the end of a sealed stream."""
        return self._has_ended

    async def start_at_first(self) -> None:
        """Go to the first byte that is not truncated, or to where the first one will be.

        Raises: as `read`.
        """
        if await self._take(anywhere=True):
            self._position = self._begin
        else:
            self._position = self._begin = (await self._read_end())[0]

    async def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, all readable ones if it is negative; fewer at the end.

        A call that is cancelled, or fails, reads nothing: the position stays.

        Raises:
            AlreadyTruncatedError: the bytes at the position are gone.
            UnexpectedError: the log is no byte stream.
            LogNotFoundError, MetadataConnectionError, BookieUnavailableError: as `AsyncLogReader`.
        """
        async with self._turn:
            return await self._read(size if size >= 0 else TXID_MAX)

    async def _read(self, left: int) -> bytes:
        parts, begin = [], self._position
        try:
            while left and (part := await self._next(left)):
                parts.append(bytes(part))
                left -= len(part)
        except BaseException:
            parts.append(bytes(self._data[self._position - self._begin :]))
            self._begin = self._position = begin
            self._data = memoryview(b"".join(parts))
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def readinto(self, buffer: WriteableBuffer) -> int:
        """Read the next available bytes into `buffer`; return how many, 0 at the end.

        Raises: as `read`.
        """
        view = memoryview(buffer).cast("B")
        async with self._turn:
            part = await self._next(len(view)) if view else b""
            view[: len(part)] = part
        return len(part)

    async def _next(self, size: int) -> memoryview:
        """Return up to `size` contiguous bytes; none at the end."""
        while self._position >= self._begin + len(self._data):
            if not await self._take():
                return memoryview(b"")
        start = self._position - self._begin
        part = self._data[start : start + size]
        self._position += len(part)
        return part

    async def _take(self, *, anywhere: bool = False) -> bool:
        """Take over the next bytes of the log; return False if there are none now."""
        if self._is_astray:
            await self._find(self._position)
            self._is_astray = False
        try:
            batch = await self._reader.read_batch(until_caught_up=True)
        except EndOfStreamError:
            self._has_ended = True
            return False
        if batch is None:
            return False
        begin, data = bytes_of(batch, self._reader.log_name)
        known = self._begin + len(self._data)
        if len(self._data) and begin < known:
            raise UnexpectedError(
                f"log {self._reader.log_name!r} is no byte stream: byte {begin} follows byte "
                f"{known - 1}"
            )
        if begin > self._position and not anywhere:
            raise AlreadyTruncatedError(
                f"stream {self._reader.log_name!r}: bytes {self._position} … {begin - 1} were "
                "truncated"
            )
        self._begin, self._data = begin, data
        return True

    async def _find(self, position: int) -> None:
        try:
            await self._reader.seek(txid=position + 1)
        except AlreadyTruncatedError:
            await self._reader.seek()  # a read there reports which bytes are gone

    async def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position, forward or back, perhaps past the end; return it.

        Raises: ConfigurationError: there is no such position; MetadataError.
        """
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position}.get(whence)
        if base is None:
            base = (await self._read_end())[0]
        position = base + offset
        require(
            condition=0 <= position < TXID_MAX,
            key="position",
            value=position,
            rule=f"expected 0 … {TXID_MAX - 1}",
        )
        async with self._turn:
            if not self._begin <= position <= self._begin + len(self._data):
                self._is_astray = True  # until the reader is at the position
                await self._find(position)
                self._begin, self._data, self._is_astray = position, memoryview(b""), False
            self._position = position
            self._has_ended = False
        return position

    async def skip_to(self, position: int) -> bool:
        """Go to a position if it is readable, or the end; else stay and return False.

        Raises:
            EndOfStreamError: the stream is sealed and ends before.
        """
        end, is_sealed = await self._read_end()
        if position <= end:
            await self.seek(position)
            return True
        if is_sealed:
            raise EndOfStreamError(
                f"stream {self._reader.log_name!r} is sealed and ends at {end}, before {position}"
            )
        return False

    async def aclose(self) -> None:
        """Stop reading."""
        await self._reader.aclose()
