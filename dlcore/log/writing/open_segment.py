"""The segment that a writer fills: its ledger, and the changes of the log that begin and end it."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import BackgroundTasks
from dlcore.base.errors import DLError
from dlcore.log.metadata.changes import plan_complete, plan_pause, plan_start
from dlcore.log.recovery import recover_log
from dlcore.log.writing.append import (
    Change,
    CloseLedger,
    Completed,
    CompleteSegment,
    LedgerClosed,
    Overtaken,
    Recovered,
    RecoverLog,
    SegmentStarted,
    StartSegment,
)
from dlcore.metadata.port import CONFLICTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.ledger.client import LedgerPlace
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ledger.writing.writer import LedgerWriter
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogMetadata
    from dlcore.log.writing.append import Event
    from dlcore.metadata.port import Op

logger = logging.getLogger(__name__)

_PLACE_AGE_MS_MAX = 30_000
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
        is_due = self._place is None or now_ms - self._found_ms > _PLACE_AGE_MS_MAX
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
        is_old = self._context.clock.now_ms() - self._found_ms > _PLACE_AGE_MS_MAX
        return None if is_old else place

    def close(self) -> None:
        """Stop looking."""
        self._looks.cancel()


class OpenSegment:
    """The open segment of one writer, if it has one; `ledger_metadata` is noted in its ledgers."""

    def __init__(
        self, context: LogContext, log: LogMetadata, ledger_metadata: Mapping[str, str]
    ) -> None:
        self._context = context
        self._log = log
        self._ledger_metadata = dict(ledger_metadata)
        self.next_place = NextPlace(context, log)
        self.ledger: LedgerWriter | None = None
        self._closing: tuple[LedgerMetadata, Op] | None = None  # its end, once no entry follows

    async def perform(self, change: Change) -> Event:
        """Perform a change that the writer decided, one at a time; return its outcome.

        Raises: LedgerError, MetadataError, NotEnoughBookiesError.
        """
        match change:
            case CloseLedger():
                assert self.ledger is not None
                self._closing = await self.ledger.prepare_close()
                end = self._closing[0]
                return LedgerClosed(end.last_entry_id, end.length_bytes, self._now_ms())
            case StartSegment() | CompleteSegment():
                try:
                    return await self._apply(change)
                except CONFLICTS as error:
                    logger.info("log=%s changed under its writer: %s", self._log.name, error)
                    await self._close_ledger()
                    return Overtaken(await self._context.logs.read(self._log), self._now_ms())
            case RecoverLog():
                return Recovered(await recover_log(self._context, change.at), self._now_ms())
            case _:
                assert_never(change)

    def let_go(self) -> LedgerWriter | None:
        """End without another change; return the ledger, which the caller abandons."""
        self.next_place.close()
        ledger, self.ledger = self.ledger, None
        return ledger

    async def _apply(self, change: StartSegment | CompleteSegment) -> Event:
        if isinstance(change, StartSegment):
            return await self._start(change)
        paths, closing = self._context.logs.paths_of(self._log), self._closing_ops()
        if change.stays:
            assert change.closing is not None
            plan = plan_pause(paths, change.at, closing=change.closing)
        else:
            plan = plan_complete(
                paths,
                change.at,
                now_ms=self._now_ms(),
                closing=change.closing,
                seal=change.seal,
            )
        after = await self._context.logs.apply(replace(plan, ops=(*plan.ops, *closing)))
        await self._ledger_was_closed(closing)
        return Completed(after, self._now_ms(), ends=change.ends)

    async def _start(self, start: StartSegment) -> SegmentStarted:
        at, closing = start.at, self._closing_ops()
        plan = partial(
            plan_start,
            self._context.logs.paths_of(self._log),
            at,
            now_ms=self._now_ms(),
            closing=start.closing,
            limits=start.limits,
        )
        # One transaction creates the ledger and changes the head: a crash leaves no orphan.
        ledger = await self._context.ledgers.create_ledger(
            self._log.quorum,
            custom={**self._ledger_metadata, "log": at.name, "log_id": at.log.log_id},
            extra_ops=lambda ledger_id: (*plan(ledger_id=ledger_id).ops, *closing),
            place=self.next_place.take(),
        )
        await self._ledger_was_closed(closing)
        self.ledger = ledger
        after = plan(ledger_id=ledger.ledger_id).after
        lssn = after.head.max_lssn
        logger.info("started log=%s segment=%d ledger=%d", at.name, lssn, ledger.ledger_id)
        return SegmentStarted(ledger.ledger_id, after, self._now_ms())

    def _closing_ops(self) -> tuple[Op, ...]:
        return () if self._closing is None else (self._closing[1],)

    async def _ledger_was_closed(self, closing: tuple[Op, ...]) -> None:
        if closing:
            assert self.ledger is not None
            assert self._closing is not None
            ledger, self.ledger = self.ledger, None
            (end, _), self._closing = self._closing, None
            await ledger.was_closed(end)

    async def _close_ledger(self) -> None:
        """Close the ledger by itself, since another change overtook the one that closes it."""
        if self._closing is not None:
            assert self.ledger is not None
            await self.ledger.close()
            self.ledger = self._closing = None

    def _now_ms(self) -> int:
        return self._context.clock.now_ms()
