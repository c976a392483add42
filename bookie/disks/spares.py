"""Space of deleted files that a disk keeps for files to come: writes to it need no allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie.disks.file_calls import sync_directory

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

SUFFIX = ".spare"
_SPARES_MAX = 2
"""Most spares; each is as large as an entry log file."""
_SHARE_OF_FREE = 1 / 16
"""Most bytes of all spares: other users of the file system need the free space as well."""


class Spares:
    """The spares of one directory; those that are there are taken over.

    The disk calls these methods in its thread for writes, and syncs the directory after `keep` and
    `give`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sizes = {path: path.stat().st_size for path in directory.glob(f"*{SUFFIX}")}
        self.allowed = True
        """Whether new ones are kept."""

    def __bool__(self) -> bool:
        return bool(self._sizes)

    @property
    def size_bytes(self) -> int:
        """Bytes of all spares."""
        return sum(list(self._sizes.values()))  # copied: another thread may change them

    def keep(self, path: Path, *, free_bytes: int) -> bool:
        """Make a file a spare; False: there is no room for one more among the free bytes."""
        size = path.stat().st_size
        is_kept = (
            self.allowed
            and len(self._sizes) < _SPARES_MAX
            and size + self.size_bytes <= free_bytes * _SHARE_OF_FREE
        )
        if is_kept:
            self._sizes[path.rename(path.with_name(path.name + SUFFIX))] = size
        return is_kept

    def unused(self, in_use: Collection[int]) -> Path | None:
        """Return a spare that no open handle reads, which a rewrite would change; None: no such.

        Args:
            in_use: the inodes of open files.
        """
        return next((path for path in self._sizes if path.stat().st_ino not in in_use), None)

    def give(self, spare: Path, path: Path) -> None:
        """Let a spare, which was written over, be the file with this path."""
        spare.rename(path)
        self._sizes.pop(spare, None)

    def delete(self) -> None:
        """Delete all spares durably."""
        for path in list(self._sizes):
            path.unlink(missing_ok=True)
            self._sizes.pop(path, None)
        sync_directory(self._directory)
