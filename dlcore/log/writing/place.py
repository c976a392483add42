"""The place of a writer's next ledger, found before it is needed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dlcore.base.background import BackgroundTasks
from dlcore.base.errors import DLError

if TYPE_CHECKING:
    from dlcore.ledger.client import LedgerPlace
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogMetadata

logger = logging.getLogger(__name__)

_AGE_MS_MAX = 30_000
"""Age at which a found place is dropped: other bookies may be better by then."""


class NextPlace:
    """The place of one log's next ledger, if it was looked for and is not old."""

    def __init__(self, context: LogContext, log: LogMetadata) -> None:
        self._context = context
        self._log = log
        self._place: LedgerPlace | None = None
        self._found_ms = 0
        self._looks = BackgroundTasks()

    def look(self) -> None:
        """Start to look for a place in the background, unless there is one."""
        now_ms = self._context.clock.now_ms()
        is_due = self._place is None or now_ms - self._found_ms > _AGE_MS_MAX
        if not self._looks and is_due:
            self._found_ms = now_ms
            self._looks.start(self._look(), name=f"next-ledger-{self._log.name}")

    async def _look(self) -> None:
        try:
            self._place = await self._context.ledgers.find_place(self._log.quorum)
        except DLError as error:
            # The next roll looks again, and fails if it finds none.
            logger.info("log=%s: no place for its next ledger yet: %s", self._log.name, error)

    def take(self) -> LedgerPlace | None:
        """Return the place, for one ledger; None: the caller must look."""
        place, self._place = self._place, None
        is_old = self._context.clock.now_ms() - self._found_ms > _AGE_MS_MAX
        return None if is_old else place

    def close(self) -> None:
        """Stop looking."""
        self._looks.cancel()
