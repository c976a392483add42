"""The lag of subscribers, for operators: Spark's queries are among them.

The auditor visits logs in turn, no more than `LOGS_AT_ONCE` at a time, so that the cost does not
grow with the namespace.  A scrape shows what it found, and reads nothing.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

from dlcore.base.background import together
from dlcore.base.errors import DLError, LogNotFoundError
from dlcore.log.metadata.listing import list_pages
from dlcore.ops.inspection import seconds_behind

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ops.autorecovery.metrics import AuditFigures

logger = logging.getLogger(__name__)

LOGS_AT_ONCE = 1000
_VISITS_AT_ONCE = 8


class SubscriberLags:
    """Keeps the lags in `figures` as long as this process is the auditor."""

    def __init__(
        self, namespace: DirectNamespace, figures: AuditFigures, *, interval_s: float
    ) -> None:
        self._namespace = namespace
        self._figures = figures
        self._interval_s = interval_s
        self._limit = asyncio.Semaphore(_VISITS_AT_ONCE)
        self._forget()

    def _forget(self) -> None:
        self._after: str | None = None
        self._before: dict[str, dict[str, float]] = {}
        self._round: dict[str, dict[str, float]] = {}
        self._figures.lags = {}

    async def run(self) -> None:
        """Look again and again until cancelled."""
        try:
            while True:
                if self._figures.is_auditor:
                    await self.look()
                else:
                    self._forget()
                await asyncio.sleep(self._interval_s)
        finally:
            self._forget()

    async def look(self) -> None:
        """Visit the logs whose turn it is; those that are gone are forgotten after the last one."""
        context = self._namespace.log_context
        pages = list_pages(
            context.store, context.paths, "", after=self._after, page_size=LOGS_AT_ONCE
        )
        async with aclosing(pages):
            names: list[str] = await anext(pages, [])
        lags = await together(*map(self._visit, names))
        self._round |= {name: found for name, found in zip(names, lags, strict=True) if found}
        if len(names) < LOGS_AT_ONCE:
            self._after, self._before, self._round = None, self._round, {}
        else:
            self._after = names[-1]
        # A look visits some logs only: the others keep their values of the round before.
        self._figures.lags = self._before | self._round

    async def _visit(self, name: str) -> dict[str, float]:
        """Return the seconds by which each subscriber is behind."""
        async with self._limit:
            try:
                async with await self._namespace.open_log(name) as manager:
                    now_ms = self._namespace.log_context.clock.now_ms()
                    return {
                        subscriber: await seconds_behind(manager, position, now_ms=now_ms)
                        for subscriber, position in (await manager.get_subscriptions()).items()
                    }
            except LogNotFoundError:
                return {}  # it was deleted meanwhile
            except DLError as error:
                logger.info("log=%s tells no lag now: %s", name, error)
                return self._before.get(name, {})
