"""Deletes a log whose metadata is damaged: removes what can be found of it, and logs the rest.

A log is deleted by its head, which leads to all its ledgers.  For a damaged log the name becomes
free as for any other, in one transaction that marks the log as deleted.  `remove_deleted` then
removes the ledgers that are still named, and the nodes.  Ledgers that no node names any more stay
until `dlog ledger audit` finds that they belong to no log.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import (
    ConfigurationError,
    CorruptMetadataError,
    LogNotFoundError,
    NoNodeError,
    UnexpectedError,
)
from dlcore.base.ids import LogId, validate_log_name
from dlcore.log.metadata.changes import require_name
from dlcore.log.metadata.history import LogHistory
from dlcore.log.metadata.values import LogHead, LogKey, LogMetadata, VersionedHead
from dlcore.log.upkeep.removal import remove_deleted
from dlcore.log.writing.changing import delete_log
from dlcore.log.writing.lock import WriterLock
from dlcore.metadata.one_node import persistently
from dlcore.metadata.stored import decode

if TYPE_CHECKING:
    from dlcore.log.context import LogContext
    from dlcore.metadata.port import Versioned

logger = logging.getLogger(__name__)


class _Named(msgspec.Struct):
    """The part of a damaged name's node that is needed to delete more than the name."""

    log_id: LogId


async def damage_of(context: LogContext, name: str) -> str:
    """Return the damage in a log's metadata as text, "" if there is none.

    Raises:
        LogNotFoundError: there is no log of that name.
    """
    try:
        log = await context.logs.find(name)
    except CorruptMetadataError as error:
        return str(error)
    try:
        at, _ = await context.logs.open(log)
        require_name(log, at.head)
        await LogHistory(context.logs, log).state_of(at)
    except (CorruptMetadataError, UnexpectedError) as error:
        return str(error)
    except LogNotFoundError:
        await context.logs.find(name)  # raises if it was deleted or renamed meanwhile
        return f"log {name!r}: its name leads to id {log.log_id}, which is not a log of that name"
    return ""


async def forget_log(context: LogContext, name: str) -> None:
    """Delete a log whose metadata is damaged, and the ledgers that it still names.

    Raises:
        ConfigurationError: the log is not damaged.
        LogNotFoundError: there is no log of that name.
        OwnershipAcquireFailedError: a writer owns it.
    """
    name = validate_log_name(name)
    damage = await damage_of(context, name)
    if not damage:
        raise ConfigurationError(f"log {name!r} is not damaged: delete it as other logs")
    logger.warning(
        "deleting log=%s, which is damaged: %s; to do: dlog ledger audit, later, for ledgers "
        "that stay",
        name,
        damage,
    )
    path = context.paths.log(name)
    node = await persistently(lambda: context.store.get(path, fresh=True))
    if node is None:
        return
    log = _metadata_of(name, node, path)
    if log is None or await _head_of(context, log) is None:
        with contextlib.suppress(NoNodeError):
            await persistently(lambda: context.store.delete(path))
        return
    lock = WriterLock(context.logs, log, client_id=context.client_id, clock=context.clock)
    await lock.acquire(timeout_s=0)
    try:
        await delete_log(context, lock, log, partial(_head_of, context, log))
    finally:
        await lock.release()
    await remove_deleted(context, log)


def _metadata_of(name: str, node: Versioned, path: str) -> LogMetadata | None:
    """Return the contents of a name's node, or the part that deletion needs; None: less."""
    try:
        return decode(LogMetadata, node.value, source=path)
    except CorruptMetadataError:
        pass
    try:
        found = msgspec.json.decode(node.value, type=_Named)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return LogMetadata(name=name, log_id=found.log_id, created_ms=0, quorum=QuorumConfig())


async def _head_of(context: LogContext, log: LogKey) -> VersionedHead | None:
    """Return a log's head, an empty one if it is damaged; None if the name leads to no such log."""
    path = context.logs.paths_of(log).head
    node = await persistently(lambda: context.store.get(path, fresh=True))
    if node is None:
        return None
    try:
        head = decode(LogHead, node.value, source=path)
    except CorruptMetadataError:
        head = LogHead()
    if head.deleted or head.name not in ("", log.name):
        return None
    return VersionedHead(log=log, head=head, version=node.version)
