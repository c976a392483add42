"""The state of an entry log in memory: of each ledger, and of the files without a footer.

It also knows up to which offset these files are durable, and the callbacks for events of the log.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.errors import BadRequestError, BookieError, BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Container, Iterable, Iterator

    from bookie.disks.port import DiskFile
    from bookie.files.format import FileHeader
    from bookie.files.index import FileIndex, LedgerSummary
    from bookie.files.replay import WritePosition
    from dlcore.wire.frames import BytesLike


_ID_MAX = 2**63 - 1
_SPAN_FIELDS = 4
"""Values per file: its number, the ledger's first and last entry in it, and the bytes of its
entries."""


class LedgerState:
    """Fence, last add confirmed and files of one ledger.

    `fenced` is set when the fence is accepted, so that no later add is accepted.
    `is_fence_durable` is set once the fence's record is on disk; only then may the fence be
    reported to a client.
    """

    __slots__ = (
        "_spans",
        "fenced",
        "is_deleted",
        "is_fence_durable",
        "last_add_confirmed",
        "last_entry_id",
    )

    def __init__(self) -> None:
        self.fenced = False
        self.is_fence_durable = False
        self.is_deleted = False
        """The ledger's metadata is proven to be gone.  Its files are dropped when no other ledger
        needs them."""
        self.last_add_confirmed = -1
        self.last_entry_id = -1
        """Highest entry accepted; an add of a higher entry cannot be a repetition."""
        self._spans: array[int] = array("q")

    def note_sealed(self, number: int, summary: LedgerSummary) -> None:
        """Add the summary of the ledger in sealed file `number`."""
        self._spans.extend(
            (number, summary.first_entry_id, summary.last_entry_id, summary.entry_bytes)
        )
        self.note_summary(summary)

    def note_summary(self, summary: LedgerSummary) -> None:
        """Add the summary of the ledger in a replayed file."""
        self.note_entry(summary.last_entry_id, summary.last_add_confirmed)
        if summary.fenced:
            self.fenced = True
            self.is_fence_durable = True

    def note_entry(self, entry_id: int, last_add_confirmed: int) -> bool:
        """Note an accepted entry and the LAC it carries; return whether the LAC moved."""
        self.last_entry_id = max(self.last_entry_id, entry_id)
        return self.note_lac(last_add_confirmed)

    def note_lac(self, last_add_confirmed: int) -> bool:
        """Raise the last add confirmed; return whether it moved."""
        if last_add_confirmed <= self.last_add_confirmed:
            return False
        self.last_add_confirmed = last_add_confirmed
        return True

    def accepts(self, *, is_recovery: bool) -> bool:
        """Return whether an add is still allowed."""
        return is_recovery or not self.fenced

    def forget_files(self, numbers: Container[int]) -> None:
        """Forget deleted files."""
        kept: array[int] = array("q")
        for span in self._iterate():
            if span[0] not in numbers:
                kept.extend(span)
        self._spans = kept

    @property
    def has_files(self) -> bool:
        """Whether any sealed file has records of the ledger."""
        return len(self._spans) > 0

    def files(self) -> Iterator[int]:
        """Return the sealed files that have records of the ledger."""
        return iter(self._spans[::_SPAN_FIELDS])

    def file_bytes(self) -> Iterator[tuple[int, int]]:
        """Return (file, bytes of the ledger's entry records in it) of its sealed files."""
        return zip(self._spans[::_SPAN_FIELDS], self._spans[3::_SPAN_FIELDS], strict=True)

    def files_between(self, first_entry_id: int, last_entry_id: int) -> list[tuple[int, int]]:
        """Return (lowest entry id, file) of sealed files that may hold entries of the range."""
        return [
            (first, number)
            for number, first, last, _ in self._iterate()
            if first <= last_entry_id and last >= first_entry_id
        ]

    def _iterate(self) -> Iterator[tuple[int, int, int, int]]:
        spans = self._spans
        return zip(
            spans[::_SPAN_FIELDS],
            spans[1::_SPAN_FIELDS],
            spans[2::_SPAN_FIELDS],
            spans[3::_SPAN_FIELDS],
            strict=True,
        )


def note_sealed(
    ledgers: dict[int, LedgerState], number: int, summaries: Iterable[LedgerSummary]
) -> None:
    """Add the summaries of the ledgers in sealed file `number`."""
    for summary in summaries:
        state = ledgers.get(summary.ledger_id)
        if state is None:
            state = ledgers[summary.ledger_id] = LedgerState()
        state.note_sealed(number, summary)


def check_id(kind: str, value: int) -> None:
    """Raise `BadRequestError` for a ledger or entry id out of range; `kind` names it."""
    if not 0 <= value <= _ID_MAX:
        raise BadRequestError(f"{kind} id {value}: expected 0 … {_ID_MAX}")


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
