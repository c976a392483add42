"""Truncates a log by one write of its head; `upkeep/removal.py` removes the data step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.config import require, require_kind
from dlcore.base.errors import ConfigurationError, MetadataVersionError
from dlcore.base.ids import DLSN, TXID_MAX
from dlcore.log.metadata.changes import plan_reset_txid, plan_truncate
from dlcore.log.reading.snapshot import Finder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogKey, VersionedHead
    from dlcore.log.reading.scan import LogSnapshot


async def end_of_log(context: LogContext, at: VersionedHead) -> DLSN:
    """Return the position after the last readable record of the last segment."""
    head = at.head
    extent = head.open_extent
    if extent is None:
        return head.end_dlsn
    reader = await context.ledgers.open_ledger(extent.ledger_id)
    confirmed = await reader.read_last_add_confirmed()
    before = head.end[1] if head.end[0] == head.max_lssn else 0
    return DLSN(head.max_lssn, before + max(0, confirmed - extent.first_entry_id + 1), 0)


async def first_to_keep(
    context: LogContext,
    snapshot: Callable[[], Awaitable[LogSnapshot]],
    dlsn: DLSN | None,
    txid: int | None,
    timestamp_ms: int | None,
) -> DLSN:
    """Return the first position to keep, by the one of the three arguments that is given."""
    given = {"dlsn": dlsn, "txid": txid, "timestamp_ms": timestamp_ms}
    named = [key for key, value in given.items() if value is not None]
    if len(named) != 1:
        raise ConfigurationError(f"expected one of {', '.join(given)}, not {named or 'none'}")
    if dlsn is not None:
        require_kind("dlsn", dlsn, DLSN)
        return dlsn
    finder = Finder(context, await snapshot())
    if txid is not None:
        return await finder.not_less_than_txid(txid)
    assert timestamp_ms is not None
    return await finder.not_less_than_timestamp(timestamp_ms)


async def truncate_log(
    context: LogContext, at: VersionedHead, dlsn: DLSN, *, end: DLSN | None = None
) -> tuple[bool, VersionedHead]:
    """Make the records below `dlsn` unreadable; their data stays until it is removed.

    Args:
        context: the namespace's adapters.
        at: the log's head as it was read last.
        dlsn: the first position to keep; the end of the log drops every record.
        end: the end of the log, if the caller knows; read otherwise.

    Returns: whether anything was truncated, and the head after.

    Raises:
        ConfigurationError: `dlsn` is past the end, which the message names; nothing was dropped.
    """
    paths = context.logs.paths_of(at.log)
    while True:
        if dlsn > at.head.first_active_dlsn:
            _require_within(at, dlsn, end or await end_of_log(context, at))
        change = plan_truncate(paths, at, dlsn)
        if change is None:
            return False, at
        try:
            return True, await context.logs.apply(change)
        except MetadataVersionError:
            at = await context.logs.read(at.log)


def _require_within(at: VersionedHead, dlsn: DLSN, end: DLSN) -> None:
    # A position that was mistyped must not drop every record.
    if dlsn > end:
        raise ConfigurationError(
            f"position {dlsn} lies past the end of log {at.name!r}, {end}: nothing was "
            f"truncated; {end} would drop every record"
        )


async def reset_txid(context: LogContext, log: LogKey, txid: int) -> bool:
    """Let the next record of a log without records have any transaction id from `txid` on.

    This helps if a record got a transaction id that no other can follow: truncate the log to its
    end first.  Return whether it changed anything.

    Raises:
        ConfigurationError: there are records or a writer, or it is no transaction id.
        LogNotFoundError: the log was deleted.
    """
    require_kind("txid", txid, int)
    require(
        condition=0 <= txid <= TXID_MAX,
        key="txid",
        value=txid,
        rule=f"expected 0 … {TXID_MAX}",
    )
    while True:
        at = await context.logs.read(log)
        change = plan_reset_txid(context.logs.paths_of(log), at, txid)
        if change is None:
            return False
        try:
            await context.logs.apply(change)
        except MetadataVersionError:
            continue  # decide again by the present head
        return True
