"""Runs a `MoreCheck`: reads the segment list, and asks for the end of an open extent."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from dlcore.base.machines import run_to_end
from dlcore.log.reading.more_check import AskEnd, EndAsked, MoreCheck, Signal
from dlcore.log.reading.tail import ReadState, StateRead

if TYPE_CHECKING:
    from dlcore.log.metadata.history import LogHistory
    from dlcore.log.reading.extent_ledgers import ExtentLedgers
    from dlcore.log.reading.more_check import Effect, Event
    from dlcore.log.reading.tail import LogTail


async def check_more(tail: LogTail, history: LogHistory, ledgers: ExtentLedgers) -> bool:
    """Return whether the log has a record to read now that the tail's caller has not taken.

    Raises: as `LogHistory.read`; AlreadyTruncatedError, LedgerNotFoundError, LedgerReadError.
    """

    async def answer_of(effect: Effect) -> Event:
        match effect:
            case ReadState(from_lssn):
                return StateRead(await history.read_ahead(from_lssn))
            case AskEnd(step):
                return EndAsked(await ledgers.is_readable(step))
            case _:
                assert_never(effect)

    return await run_to_end(MoreCheck(tail), Signal.BEGIN, answer_of)
