"""Reads a planned range from bookies, and plans it again if they cannot be read as planned."""

from __future__ import annotations

import contextlib
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from dlcore.base.errors import (
    AlreadyTruncatedError,
    BookieError,
    DLError,
    LedgerNotFoundError,
    LedgerReadError,
    LogNotFoundError,
)
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.scan_driver import by_entry, scan_range
from dlcore.log.reading.snapshot import LogFollower

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from dlcore.base.access.encryption_keys import EncryptionKeys
    from dlcore.ledger.client import LedgerClient
    from dlcore.log.context import LogContext
    from dlcore.log.reading.scan import ScanBatch, ScanRange
    from dlcore.log.reading.scan_run import ScanRun


async def scan_part(
    part: ScanRange,
    ledgers: LedgerClient,
    fresh_context: Callable[[], Awaitable[LogContext]] | None,
    keys: EncryptionKeys | None = None,
) -> AsyncGenerator[ScanRun, None]:
    """Yield the records of a range, small entries joined.

    After a failed read the range is planned again, with the current metadata of `fresh_context`.
    Without it the failure is final.

    Raises: LedgerReadError, BookieError, EncryptionKeyError; AlreadyTruncatedError: only with
    `fresh_context`.
    """
    planned: ScanRange | None = None  # the new plan after a failure
    while True:
        rest = planned or part
        last_entry_id: int | None = None
        try:
            async with aclosing(scan_range(rest, ledgers, keys)) as runs:
                async for run in runs:
                    yield run
                    last_entry_id = run.end.entry_id
        except (LedgerNotFoundError, LedgerReadError, BookieError) as error:
            left = rest if last_entry_id is None else rest.after_entry(last_entry_id)
            if left is None:
                # The failure came behind the last entry that is wanted.
                return
            if fresh_context is None:
                raise
            context = await fresh_context()
            again = await _plan_again(left, context, error)
            if planned is not None and again.extents == left.extents:
                raise  # a read with the current metadata has failed already
            planned, ledgers = again, context.ledgers
        else:
            return


def scan_entries(
    part: ScanRange,
    ledgers: LedgerClient,
    fresh_context: Callable[[], Awaitable[LogContext]] | None,
    keys: EncryptionKeys | None = None,
) -> AsyncGenerator[ScanBatch, None]:
    """Yield the records of a range, one `ScanBatch` per entry.  Raises: as `scan_part`."""
    return by_entry(scan_part(part, ledgers, fresh_context, keys))


async def _plan_again(part: ScanRange, context: LogContext, error: DLError) -> ScanRange:
    """Plan a range again with the current metadata: other bookies, or the ledger of a merge."""
    log = LogKey(name=part.log, log_id=part.log_id)  # it may have another name now
    with contextlib.suppress(LogNotFoundError):
        snapshot = await LogFollower(context, log).take()
        scans = snapshot.scans(part.start, part.end)
        if len(scans) == 1 and scans[0].start == part.start:
            return replace(scans[0], columns=part.columns)
    raise AlreadyTruncatedError(
        f"log {part.log!r}: records of the range {part.start} to {part.end} were truncated "
        f"or deleted while it was read: {error}"
    ) from error
