"""Renames a log: moves its name's node and stores the name in its head; the data stays."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dlcore.base.errors import (
    LogExistsError,
    LogNotFoundError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.log.metadata.changes import plan_rename
from dlcore.metadata.port import UNANSWERED

if TYPE_CHECKING:
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogMetadata
    from dlcore.log.writing.lock import WriterLock

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
