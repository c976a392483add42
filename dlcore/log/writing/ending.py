"""Seals and deletes a log under its writer lock, while it has no writer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dlcore.base.errors import MetadataVersionError, NoNodeError
from dlcore.log.metadata.changes import plan_complete, plan_delete, require_unsealed
from dlcore.log.recovery import recover_log
from dlcore.metadata.port import UNANSWERED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogMetadata, VersionedHead
    from dlcore.log.writing.lock import WriterLock

logger = logging.getLogger(__name__)


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
