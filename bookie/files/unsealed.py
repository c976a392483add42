"""The unsealed part of an entry log: files without a footer, and the batches for them.

It also knows up to which offset the files are durable, and the callbacks for events of the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.errors import BookieError, BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie.disks.port import DiskFile
    from bookie.files.format import FileHeader
    from bookie.files.index import FileIndex
    from bookie.files.replay import WritePosition
    from dlcore.wire.frames import BytesLike


_OFFSET_MAX = 2**32


class Location(NamedTuple):
    """Position of an entry's frame."""

    entry_id: int
    file_number: int
    offset: int
    size: int
    ledger_id: int


class Batch:
    """Records of one file that become durable together."""

    __slots__ = ("buffers", "file_number", "ledger_ids", "offset", "size")

    def __init__(self, file_number: int, offset: int) -> None:
        self.file_number = file_number
        self.offset = offset
        self.size = 0
        self.buffers: list[BytesLike] = []
        self.ledger_ids: set[int] = set()


class EntryLogEvents(NamedTuple):
    """Callbacks of the log, called on the event loop."""

    on_durable: Callable[[set[int]], None]
    """A batch with records of these ledgers became durable."""
    on_sealed: Callable[[FileIndex, DiskFile, WritePosition], Awaitable[None]]
    """A file got its footer at that position.  The file counts as sealed once the callback returns;
    the log continues meanwhile."""
    on_failed: Callable[[BookieError], None]
    """No further record will become durable."""
    on_stalled: Callable[[bool], None]
    """The disk has no space for the next write (True), or has it again (False)."""


class UnsealedFile:
    """A file that accepts records, or is full and waits for its footer."""

    __slots__ = ("content", "file", "index", "is_noted", "position")

    def __init__(self, index: FileIndex, position: WritePosition, content: bytes) -> None:
        self.index = index
        self.position = position
        self.content = content
        self.file: DiskFile | None = None
        self.is_noted = False
        """Whether the file is noted as existing; before that nothing in it may be acknowledged."""


class UnsealedFiles:
    """The files of the log that are not sealed yet, oldest first; the last one accepts records."""

    def __init__(self, first: UnsealedFile) -> None:
        self._files = {first.index.number: first}
        self.current = first
        """The file that accepts records."""
        self.durable = (first.index.number, first.position.offset)
        """A file and an offset in it; everything before this position is durable."""
        self.owed_footer_bytes = 0
        """Bytes of the footers of files that are full and not sealed yet."""

    def __len__(self) -> int:
        return len(self._files)

    @property
    def written_bytes(self) -> int:
        """Bytes accepted for these files."""
        return sum(each.position.offset for each in self._files.values())

    def get(self, number: int) -> UnsealedFile | None:
        """Return a file; None if it is sealed or does not exist."""
        return self._files.get(number)

    def handle(self, number: int) -> DiskFile | None:
        """Return the handle of a file; None if the file is sealed or not created yet."""
        unsealed = self._files.get(number)
        return None if unsealed is None else unsealed.file

    def indexes(self) -> list[FileIndex]:
        """Return the indexes of the files."""
        return [each.index for each in self._files.values()]

    def durable_part(self, number: int) -> tuple[FileHeader, int, FileIndex] | None:
        """Return header, durable end and index of a file; None if it is sealed."""
        unsealed = self._files.get(number)
        if unsealed is None:
            return None
        position = unsealed.position
        end = min(position.offset, self.durable_offset(number))
        return position.header, end, unsealed.index

    def is_durable(self, location: Location) -> bool:
        """Return whether the record at `location` survives a crash."""
        return self.is_durable_at(location.file_number, location.offset)

    def is_durable_at(self, number: int, offset: int) -> bool:
        """Return whether the record around `offset` of file `number` survives a crash."""
        # Files are written one after the other, so file numbers decide before offsets.
        return (number, offset) < self.durable

    def durable_offset(self, number: int) -> int:
        """Return the offset in file `number` up to which everything is durable."""
        durable_number, offset = self.durable
        if number == durable_number:
            return offset
        return 0 if number > durable_number else _OFFSET_MAX

    def roll(self, following: UnsealedFile) -> None:
        """Direct the next records to another file."""
        self.owed_footer_bytes += self.current.index.footer_bytes
        self.current = following
        self._files[following.index.number] = following

    def forget(self, sealed: UnsealedFile) -> None:
        """Remove a file that is registered as sealed."""
        del self._files[sealed.index.number]

    def close(self) -> None:
        """Close the handles of the files."""
        for each in self._files.values():
            if each.file is not None:
                each.file.close()


def check_place(file: DiskFile, offset: int) -> None:
    """Refuse to append to a file that does not end at `offset`."""
    if file.size != offset:
        raise BookieStorageError(f"{file.name} has {file.size} bytes, expected {offset}")
