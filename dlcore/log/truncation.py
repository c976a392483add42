"""Truncating a log: marks first, in one transaction; then data; then the nodes that named the data.

A crash in between leaves segments that are marked truncated, which nobody reads; the next
truncation removes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.errors import ConfigurationError, LedgerNotFoundError, MetadataVersionError
from dlcore.ids import DLSN
from dlcore.log.changes import plan_remove, plan_truncate, removable_segments
from dlcore.log.recovery import delete_ledger
from dlcore.log.store import persistently

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from dlcore.log.context import LogContext
    from dlcore.log.metadata import LogState
    from dlcore.log.segment import LogSegment

STAGING_IDENTITY = "staging_identity"
"""Key of a staged ledger's custom metadata: the identity it is staged under."""
_SEGMENTS_AT_ONCE = 200


async def end_of_log(context: LogContext, state: LogState) -> DLSN:
    """Return the position after the last readable record of the last segment."""
    last = state.last_segment
    if last is None:
        return DLSN.INITIAL
    count = last.closed_entry_count
    if last.has_open_extent:
        extent = last.extents[-1]
        reader = await context.ledgers.open_ledger(extent.ledger_id)
        confirmed = await reader.read_last_add_confirmed()
        count += max(0, confirmed - extent.first_entry_id + 1)
    return DLSN(last.lssn, count, 0)


async def truncate_log(
    context: LogContext, state: LogState, dlsn: DLSN, *, end: DLSN | None = None
) -> tuple[bool, LogState]:
    """Drop the records below `dlsn`.

    Args:
        context: the namespace's adapters.
        state: the log as it was read last.
        dlsn: the first position to keep; the end of the log drops every record.
        end: the end of the log, if the caller knows; read otherwise.

    Returns: whether anything was truncated, and the state after.

    Raises:
        ConfigurationError: `dlsn` lies past the end, which the message names; nothing was dropped.
    """
    paths = context.logs.paths_of(state.name)
    changed = False
    while True:
        if dlsn > state.first_active:
            _require_within(state, dlsn, end or await end_of_log(context, state))
        change = plan_truncate(paths, state, dlsn)
        if change is None:
            break
        try:
            state = await context.logs.apply(change)
            changed = True
        except MetadataVersionError:
            state = await context.logs.reread(state)
    return changed, await remove_truncated(context, state)


def _require_within(state: LogState, dlsn: DLSN, end: DLSN) -> None:
    # A position that was mistyped must not drop every record.
    if dlsn > end:
        raise ConfigurationError(
            f"position {dlsn} lies past the end of log {state.name!r}, {end}: nothing was "
            f"truncated; {end} would drop every record"
        )


async def remove_truncated(context: LogContext, state: LogState) -> LogState:
    """Delete the data of truncated segments, and then their nodes."""
    while removable := removable_segments(state)[:_SEGMENTS_AT_ONCE]:
        remaining = set(_ledgers_of(state.segments[len(removable) :]))
        unused = sorted(set(_ledgers_of(removable)) - remaining)
        lssns = [segment.lssn for segment in removable]
        staged = [
            ledger_id
            for ledger_id in unused
            if not await _delete_unless_staged(context, ledger_id, state.name, lssns)
        ]
        change = plan_remove(context.logs.paths_of(state.name), state, lssns)
        try:
            state = await context.logs.apply(change)
        except MetadataVersionError:
            state = await context.logs.reread(state)
            continue
        for ledger_id in staged:
            # Its staging node may have gone since: then nobody else would delete the ledger.
            await _delete_unless_staged(context, ledger_id, state.name, lssns)
    return state


def _ledgers_of(segments: Iterable[LogSegment]) -> list[int]:
    return [extent.ledger_id for segment in segments for extent in segment.extents]


async def _delete_unless_staged(
    context: LogContext, ledger_id: int, log: str, removed: Collection[int]
) -> bool:
    """Delete a ledger that was in the segments `removed` only, unless it is needed elsewhere.

    Returns: False if it is still registered as staged: whoever reaps it will delete it.
    """
    try:
        stored = await context.ledger_store.read(ledger_id)
    except LedgerNotFoundError:
        return True
    identity = stored.metadata.custom.get(STAGING_IDENTITY)
    if identity is not None:
        if await _is_registered(context, identity, ledger_id):
            return False
        # Without a registration no more of it can be committed; but a commit may have come between
        # the reading of the log and the end of the registration, and put entries of it into a later
        # segment.
        state = await context.logs.read(log)
        if ledger_id in _ledgers_of(s for s in state.segments if s.lssn not in removed):
            return True
    await delete_ledger(context, ledger_id)
    return True


async def _is_registered(context: LogContext, identity: str, ledger_id: int) -> bool:
    path = context.paths.staged_ledger(identity, ledger_id)

    async def look() -> bool:
        await context.store.sync(path)
        return await context.store.get(path) is not None

    return await persistently(look)


def refers_to(state: LogState, ledger_id: int) -> bool:
    """Return whether a segment of the log holds entries of the ledger."""
    return ledger_id in _ledgers_of(state.segments)
