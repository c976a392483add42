"""The choice of the file to compact next; pure.

A file is worth copying only if the copying frees more bytes than it takes, and a copy is begun only
if all of it fits.  On a nearly full disk the first files are therefore those that hold almost
nothing, and the space that they free lets the next ones fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bookie.files.format import RECORD_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

LEDGER_BYTES_MAX = 2 * RECORD_HEADER_BYTES + 8 + 16
"""Bytes of one ledger's fence and LAC records."""
_PASS_BYTES = 4096
"""Bytes for the records of the pass itself, and for the header of a new file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLoad:
    """The content of a sealed file; sizes are upper limits if they cannot be exact."""

    number: int
    size_bytes: int
    footer_bytes: int
    live_bytes: int
    """Bytes of entry records of ledgers that are not proven deleted."""
    live_ledgers: int
    """Number of such ledgers with records in the file."""
    is_unfit: bool = False
    """The file has damage that would make the next start fail.  Its content should be moved
    whatever the live share is."""

    @property
    def copy_bytes(self) -> int:
        """Most bytes that copying the live part adds to the disk, with footers."""
        return (
            self.live_bytes + self.live_ledgers * LEDGER_BYTES_MAX + self.footer_bytes + _PASS_BYTES
        )

    @property
    def live_share(self) -> float:
        """Share of its bytes that is live."""
        return self.live_bytes / self.size_bytes


def choose_next(
    loads: Iterable[FileLoad], *, below_live_share: float, room_bytes: int
) -> FileLoad | None:
    """Return the file to compact next, None if none is worth it or fits `room_bytes`.

    Unfit files come first; then come the files that free most, and the oldest of equal ones.
    """
    fitting = [
        load
        for load in loads
        if (load.is_unfit or load.live_share < below_live_share) and load.copy_bytes <= room_bytes
    ]
    return min(
        fitting,
        key=lambda load: (not load.is_unfit, load.live_bytes - load.size_bytes, load.number),
        default=None,
    )
