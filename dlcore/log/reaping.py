"""Removing staged ledgers that nobody fills any more.

What was never committed is deleted with its registration, in one transaction.  What a log holds
entries of is closed, and only its registration goes.  Each step is guarded by the registration's
version, which a commit changes: of a commit and a reaper that meet, one wins and the other one
learns it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlcore.errors import (
    DLError,
    LedgerNotFoundError,
    LedgerRecoveryError,
    LogNotFoundError,
    MetadataVersionError,
    NodeNotEmptyError,
    NoNodeError,
)
from dlcore.log import codec
from dlcore.log.recovery import delete_ledger
from dlcore.log.store import persistently
from dlcore.log.truncation import refers_to
from dlcore.metadata.paths import unescape
from dlcore.metadata.port import Delete, Op

if TYPE_CHECKING:
    from collections.abc import Collection

    from dlcore.log.context import LogContext
    from dlcore.log.metadata import StagedLedger

logger = logging.getLogger(__name__)

ABANDONED_AGE_MS = 24 * 3600 * 1000
"""Leftovers of other identities are reaped at this age: until then they may still commit."""


@dataclass(frozen=True, slots=True)
class StagedNode:
    """A registration as it is stored."""

    staged: StagedLedger
    path: str
    version: int

    def without_owner(self) -> StagedLedger:
        """Return the registration of a ledger that nobody fills."""
        return replace(self.staged, owner="")

    def as_committed(self) -> StagedLedger:
        """Return the registration of a ledger that a log holds entries of."""
        return replace(self.staged, committed=True)


async def read_staged(context: LogContext, identity: str, ledger_id: int) -> StagedNode | None:
    """Return the registration of a staged ledger, if there is one."""
    path = context.paths.staged_ledger(identity, ledger_id)

    async def read() -> StagedNode | None:
        await context.store.sync(path)
        node = await context.store.get(path)
        if node is None:
            return None
        return StagedNode(codec.decode_staged(node.value, path=path), path, node.version)

    return await persistently(read)


async def drop_staged(context: LogContext, node: StagedNode) -> None:
    """Remove a registration that nobody fills: delete the ledger, or close it if a log needs it.

    Does nothing if somebody else changes the registration at the same time.
    """
    ledger_id = node.staged.ledger_id
    remove: list[Op] = [Delete(node.path, node.version)]
    try:
        if node.staged.committed:
            await _close(context, ledger_id)
        elif await _ledger_exists(context, ledger_id):
            remove.append(Delete(context.paths.ledger(ledger_id)))
        await context.store.multi(remove)
    except (MetadataVersionError, NoNodeError):
        return  # committed or reaped by somebody else in this moment
    except LedgerRecoveryError as error:
        logger.warning("staged ledger=%d cannot be closed yet: %s", ledger_id, error)
        return
    if node.staged.committed and not await _is_referred_to(context, node.staged):
        await delete_ledger(context, ledger_id)
    logger.info("reaped staged ledger=%d committed=%s", ledger_id, node.staged.committed)


async def _close(context: LogContext, ledger_id: int) -> None:
    try:
        await context.ledgers.recover_ledger(ledger_id)
    except LedgerNotFoundError:
        logger.debug("ledger=%d is gone already", ledger_id)


async def _ledger_exists(context: LogContext, ledger_id: int) -> bool:
    try:
        await context.ledger_store.read(ledger_id)
    except LedgerNotFoundError:
        return False
    return True


async def _is_referred_to(context: LogContext, staged: StagedLedger) -> bool:
    try:
        state = await context.logs.read(staged.log)
    except LogNotFoundError:
        return False
    return state.metadata.log_id == staged.log_id and refers_to(state, staged.ledger_id)


async def reap(
    context: LogContext,
    identity: str,
    *,
    keep: Collection[int] = (),
    created_before_ms: int | None = None,
) -> None:
    """Drop the staged ledgers of an identity whose owner is gone, but for those in `keep`."""
    parent = context.paths.staging_of(identity)
    names = await persistently(lambda: context.store.get_children(parent))
    if names is None:
        return
    nodes = await asyncio.gather(*(read_staged(context, identity, int(name)) for name in names))
    # Read after the registrations: a registration is only made while its owner's node exists.
    owners = await persistently(lambda: _owners(context))
    for node in nodes:
        if node is None or node.staged.ledger_id in keep:
            continue
        is_young = created_before_ms is not None and node.staged.created_ms >= created_before_ms
        if node.staged.owner not in owners and not is_young:
            await drop_staged(context, node)
    await _remove_if_empty(context, parent)


async def _owners(context: LogContext) -> set[str]:
    await context.store.sync(context.paths.staging_owners)
    return set(await context.store.get_children(context.paths.staging_owners) or ())


async def _remove_if_empty(context: LogContext, parent: str) -> None:
    async def remove() -> None:
        if await context.store.get_children(parent) == []:
            await context.store.delete(parent)

    try:
        await persistently(remove)
    except (NodeNotEmptyError, NoNodeError):
        logger.debug("%s is in use, or gone", parent)


async def reap_abandoned(context: LogContext) -> None:
    """Drop what identities left behind that never came back.

    What cannot be dropped stays for the next one who tries: it is nobody's present work.
    """
    names = await persistently(lambda: context.store.get_children(context.paths.staging)) or []
    before_ms = context.clock.now_ms() - ABANDONED_AGE_MS
    for name in names:
        try:
            await reap(context, unescape(name), created_before_ms=before_ms)
        except DLError as error:
            logger.warning(
                "leftovers of append %s stay: %s: %s", unescape(name), type(error).__name__, error
            )
