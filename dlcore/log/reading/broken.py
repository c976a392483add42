"""Entries of which no replica is undamaged: refused by a reader, or skipped and counted."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlcore.base.errors import DLError

logger = logging.getLogger(__name__)


class BrokenEntries:
    """Entries of which no replica is undamaged: an error, or skipped and counted on request.

    A missing entry, or one whose bookies do not answer, is always an error.
    """

    def __init__(self, log: str, *, skip: bool) -> None:
        self._log = log
        self.skips = skip
        """Whether broken entries are skipped."""
        self.count = 0

    def meet(self, lssn: int, entry_id: int, error: DLError) -> None:
        """Count a broken entry that is skipped; raise `error` if none may be."""
        if not self.skips:
            raise error
        self.count += 1
        logger.warning(
            "log=%s: broken entry %d:%d is left out, %d so far: %s; to do: dlog log inspect, "
            "then dlog log repair; the record is not read",
            self._log,
            lssn,
            entry_id,
            self.count,
            error,
        )
