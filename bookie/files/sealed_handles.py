"""The open files of a log, and the footers that are kept in memory.

Sealed files are opened when needed.  The most recently used ones stay open with their footers.  The
number is limited because a big disk holds more files than a process may have descriptors, and more
footers than fit into memory.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from bookie.files.format import file_name
from bookie.files.index import SealedIndex, read_footer
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from bookie.disks.port import Disk, DiskFile
    from bookie.files.damage import DamageLog
    from bookie.files.entry_log import EntryLog


class FooterPlace(NamedTuple):
    """Offset of a sealed file's footer, and the seed of its checksum."""

    offset: int
    seed: int


class _Footer(NamedTuple):
    """A footer in memory, and its size there."""

    entries: SealedIndex
    size: int


class SealedHandles:
    """Opens files, and reads footers of sealed files; a dropped file does not exist for it.

    Args:
        disk: holds the files.
        log: has the files open that are not sealed yet.
        damage: notes every footer that is found damaged.
        open_files_max: most sealed files that are kept open.
        footer_bytes_max: most bytes of footers in memory; the footer used last always stays.
    """

    def __init__(
        self,
        disk: Disk,
        log: EntryLog,
        damage: DamageLog,
        *,
        open_files_max: int,
        footer_bytes_max: int,
    ) -> None:
        self._disk = disk
        self._log = log
        self._damage = damage
        self._open_files_max = open_files_max
        self._footer_bytes_max = footer_bytes_max
        self._places: dict[int, FooterPlace] = {}
        self._open: OrderedDict[int, DiskFile] = OrderedDict()
        self._footers: OrderedDict[int, _Footer] = OrderedDict()
        self._footer_bytes = 0

    def add(self, number: int, *, footer_offset: int, seed: int) -> None:
        """Add a sealed file; `seed` is that of its header."""
        self._places[number] = FooterPlace(footer_offset, seed)

    def place(self, number: int) -> FooterPlace | None:
        """Return the place of a sealed file's footer; None if there is no such file any more."""
        return self._places.get(number)

    def forget(self, number: int) -> None:
        """Forget a file that is about to be deleted."""
        del self._places[number]
        self.let_go(number)

    def let_go(self, number: int) -> None:
        """Close a sealed file, and read its footer from the disk at the next use."""
        file = self._open.pop(number, None)
        if file is not None:
            file.close()
        footer = self._footers.pop(number, None)
        if footer is not None:
            self._footer_bytes -= footer.size

    def close(self) -> None:
        """Close every sealed file."""
        for number in list(self._open.keys() | self._footers.keys()):
            self.let_go(number)

    def file(self, number: int) -> DiskFile | None:
        """Return the open file; None if it was dropped."""
        file = self._log.unsealed.handle(number)
        if file is not None:
            return file
        file = self._open.get(number)
        if file is not None:
            self._open.move_to_end(number)
            return file
        if number not in self._places:
            return None
        file = self._open[number] = self._disk.open(file_name(number))
        while len(self._open) > self._open_files_max:
            self._open.popitem(last=False)[1].close()
        return file

    def footer(self, number: int) -> SealedIndex:
        """Return the footer of a sealed file, from memory or from the disk.

        Raises:
            BookieStorageError: it is damaged or cannot be read.
        """
        cached = self._footers.get(number)
        if cached is not None:
            self._footers.move_to_end(number)
            return cached.entries
        place = self._places[number]
        file = self.file(number)
        assert file is not None  # the file is in _places
        size = max(0, file.size - place.offset)
        try:
            data = file.read_now(place.offset, size)
        except BookieStorageError as error:
            raise self._footer_is_damaged(number, f": {error}") from error
        index = read_footer(data, offset=place.offset, number=number, seed=place.seed)
        if index is None:
            raise self._footer_is_damaged(number, "")
        self._footers[number] = _Footer(index, size)
        self._footer_bytes += size
        while self._footer_bytes > self._footer_bytes_max and len(self._footers) > 1:
            self._footer_bytes -= self._footers.popitem(last=False)[1].size
        return index

    async def read_footer(self, number: int) -> SealedIndex | None:
        """Return the verified footer as it is on the disk now; None if the file was dropped.

        Raises:
            BookieStorageError: it is damaged or cannot be read.
        """
        place = self._places.get(number)
        if place is None:
            return None
        footer = None
        reason = ""
        # A handle of its own: during the read another call may push the kept one out.
        file = self._disk.open(file_name(number))
        try:
            data = await file.read(place.offset, max(0, file.size - place.offset))
            footer = await self._disk.compute(
                read_footer, data, offset=place.offset, number=number, seed=place.seed
            )
        except BookieStorageError as error:
            reason = f": {error}"
        finally:
            file.close()
        # If the file was dropped during the read, an unreadable footer is no damage.
        if footer is None and number in self._places:
            self.let_go(number)
            raise self._footer_is_damaged(number, reason)
        return footer

    def _footer_is_damaged(self, number: int, reason: str) -> BookieStorageError:
        self._damage.note_footer(number)
        return BookieStorageError(f"the footer of {file_name(number)} is damaged{reason}")
