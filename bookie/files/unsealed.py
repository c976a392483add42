"""The unsealed part of an entry log: files without a footer, batches on their way to them, and
those who are told what becomes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dlcore.errors import BookieError, BookieStorageError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from bookie.disks.port import DiskFile
    from bookie.files.index import FileIndex
    from bookie.files.replay import WritePosition
    from dlcore.wire.digest import BytesLike


class Batch:
    """Records of one file that become durable together."""

    __slots__ = ("buffers", "file_number", "futures", "ledger_ids", "offset", "size")

    def __init__(self, file_number: int, offset: int) -> None:
        self.file_number = file_number
        self.offset = offset
        self.size = 0
        self.buffers: list[BytesLike] = []
        self.ledger_ids: set[int] = set()
        self.futures: list[asyncio.Future[None]] = []

    def check_place(self, file: DiskFile) -> None:
        """Refuse a file that does not end where the batch begins."""
        if file.size != self.offset:
            raise BookieStorageError(f"{file.name} has {file.size} bytes, expected {self.offset}")


class EntryLogEvents(NamedTuple):
    """Whom the log tells, on the event loop."""

    on_durable: Callable[[set[int]], None]
    """A batch with records of these ledgers is durable."""
    on_sealed: Callable[[FileIndex, DiskFile, WritePosition], Awaitable[None]]
    """A file got its footer at that position; once this is over it is a sealed one.  Meanwhile the
    log goes on."""
    on_failed: Callable[[BookieError], None]
    """Nothing will become durable any more."""
    on_stalled: Callable[[bool], None]
    """The disk has no room for the next write, or has it again."""


class UnsealedFile:
    """A file that takes records, or took them and waits for its footer."""

    __slots__ = ("content", "file", "index", "is_noted", "position")

    def __init__(self, index: FileIndex, position: WritePosition, content: bytes) -> None:
        self.index = index
        self.position = position
        self.content = content
        self.file: DiskFile | None = None
        self.is_noted = False
        """That it exists: before that nothing in it may be acknowledged."""
