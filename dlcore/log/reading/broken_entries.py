"""The broken entries that a reader left out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlcore.base.errors import DLError

logger = logging.getLogger(__name__)


class BrokenEntries:
    """Counts the entries without an undamaged replica that one reader leaves out.

    A missing entry, or one whose bookies do not answer, is always an error.
    """

    def __init__(self, log: str, *, skip: bool) -> None:
        self._log = log
        self.skips = skip
        """Whether broken entries are left out, as was requested; else they are errors."""
        self.count = 0

    def add(self, lssn: int, entry_id: int, error: DLError) -> None:
        """Count and report one."""
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
