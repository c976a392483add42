"""The choice of the file to compact next; pure.

Whatever the order, a file is worth copying only if that frees more than it takes, and a copy is
begun only if all of it fits.  So a nearly full disk starts with files that hold next to nothing,
and the room they free lets the next ones fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bookie.files.format import RECORD_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

LEDGER_BYTES_MAX = 2 * RECORD_HEADER_BYTES + 8 + 16
"""Of one ledger's fence and LAC records."""
_PASS_BYTES = 4096
"""For the records that say what happened, and the header of a new file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLoad:
    """What a sealed file holds; sizes are upper limits where they cannot be exact."""

    number: int
    size_bytes: int
    footer_bytes: int
    live_bytes: int
    """Entry records of ledgers that are not proven deleted."""
    live_ledgers: int
    """How many such ledgers it says anything about."""
    is_unfit: bool = False
    """It is damaged in a way that must not be met at the next start: whatever its share, what it
    holds should be moved."""

    @property
    def copy_bytes(self) -> int:
        """Most bytes that copying its live part adds to the disk, footers and all."""
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
    """Return the file to compact next, None if none is worth it or none fits `room_bytes`.

    Unfit files come first; then those that free most, the oldest of equal ones.
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
