"""Changes of a whole log, each by one write: truncation, other names, the seal, deletion.

After a truncation or deletion `upkeep/removal.py` removes the data step by step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dlcore.base.config import require, require_kind
from dlcore.base.errors import (
    ConfigurationError,
    LogExistsError,
    LogNotFoundError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.base.ids import DLSN, TXID_MAX
from dlcore.log.metadata.changes import (
    plan_complete,
    plan_delete,
    plan_rename,
    plan_reset_txid,
    plan_truncate,
    require_unsealed,
)
from dlcore.log.reading.snapshot import Finder
from dlcore.log.recovery import recover_log
from dlcore.metadata.port import UNANSWERED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogKey, LogMetadata, VersionedHead
    from dlcore.log.reading.rows_reader import ReadStart
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.log.writing.lock import WriterLock


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
    start: ReadStart,
) -> DLSN:
    """Return the first position to keep."""
    if start.dlsn is not None:
        return start.dlsn
    finder = Finder(context, await snapshot())
    if start.txid is not None:
        return await finder.not_less_than_txid(start.txid)
    assert start.timestamp_ms is not None
    return await finder.not_less_than_timestamp(start.timestamp_ms)


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


logger = logging.getLogger(__name__)


async def rename_log(
    context: LogContext, lock: WriterLock, log: LogMetadata, name: str
) -> LogMetadata:
    """Give a log another name, in one transaction; return it under that name.

    The caller holds the writer lock.  A staged append that was planned meanwhile is planned again,
    and finds the log by its id.

    Raises:
        LogExistsError: there is a log of that name.
        LogNotFoundError: the log was deleted.
        LogRenamedError: another client has renamed it since `log` was read.
    """
    if name == log.name:
        raise LogExistsError(f"log {name!r} cannot be renamed to its own name")
    while True:
        await lock.wait_owned()
        at = await context.logs.read(log)
        renamed, ops = plan_rename(context.paths, log, at, name)
        try:
            await context.store.multi(ops)
        except NodeExistsError as error:
            raise LogExistsError(f"log {name!r} exists") from error
        except (MetadataVersionError, NoNodeError) as error:
            logger.info("renaming log=%s again: %s", log.name, error)
        except UNANSWERED as error:
            logger.info("renaming log=%s: %s", log.name, error)
            if await _is_named(context, renamed):
                return renamed
        else:
            return renamed


async def _is_named(context: LogContext, log: LogMetadata) -> bool:
    """Return whether the name of `log` leads to it: this shows the outcome after a lost reply."""
    try:
        return await context.logs.find(log.name) == log
    except LogNotFoundError:
        return False


async def seal_log(context: LogContext, lock: WriterLock, log: LogMetadata) -> None:
    """Complete a dead writer's segment, and seal the log.

    Raises:
        EndOfStreamError: it is sealed already.
        LogNotFoundError: it was deleted.
        LedgerRecoveryError: too few bookies answer to find the end of its last ledger.
    """
    paths = context.logs.paths_of(log)
    while True:
        at = await context.logs.read(log)
        require_unsealed(at)
        at = await recover_log(context, at)
        now_ms = context.clock.now_ms()
        # The recovery may have taken longer than a session lives: only the owner may seal.
        await lock.wait_owned()
        change = plan_complete(paths, at, now_ms=now_ms, closing=None, seal=True)
        try:
            await context.logs.apply(change)
        except MetadataVersionError as error:
            logger.info("sealing log=%s again: %s", log.name, error)
        else:
            return


async def delete_log(
    context: LogContext,
    lock: WriterLock,
    log: LogMetadata,
    read_head: Callable[[], Awaitable[VersionedHead | None]],
) -> None:
    """Free the log's name and mark the log as deleted: then it cannot be changed any more.

    `read_head` returns the present head, None if there is nothing left to delete.

    Raises:
        DLError: any error that `read_head` raises.
    """
    while True:
        await lock.wait_owned()
        at = await read_head()
        if at is None:
            return
        try:
            await context.store.multi(plan_delete(context.paths, log, at))
        except (MetadataVersionError, NoNodeError, *UNANSWERED) as error:
            logger.info("deleting log=%s again: %s", log.name, error)
        else:
            return
