"""Logs that writers hold: an append waits for their locks, or asks for a turn and waits for it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.base.errors import MetadataVersionError, NoNodeError, OwnershipAcquireFailedError
from dlcore.log.metadata.store import UNANSWERED
from dlcore.log.metadata.values import LockHolder
from dlcore.metadata.port import Put
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.backoff import Wait
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogKey, VersionedHead
    from dlcore.metadata.port import Versioned

logger = logging.getLogger(__name__)

ASKING_S = 15.0
"""The shortest time-out for a turn: it comes soon, if the proxy lives."""
_LOOKS_EVERY_S = 1.0
"""How often an awaited lock is read again, in case a notification was lost."""


@dataclass(frozen=True, slots=True)
class HeldLog:
    """A log that a writer holds, and the node of its lock as it was read."""

    log: LogKey
    holder: LockHolder
    version: int

    def gives_turn_at(self, at: VersionedHead) -> bool:
        """Return whether the log may be changed at this head, which was read with the lock."""
        return self.holder.turn == "given" and at.head.open_extent is None

    def turned(self, context: LogContext, turn: str) -> Put:
        """Return the operation that sets the turn, unless the lock has changed meanwhile."""
        value = encode(replace(self.holder, turn=turn))
        return Put(context.logs.paths_of(self.log).lock, value, self.version)


def held_log(context: LogContext, log: LogKey, lock: Versioned | None) -> HeldLog | None:
    """Return the holder in the node of a log's lock; None if there is none."""
    if lock is None:
        return None
    path = context.logs.paths_of(log).lock
    return HeldLog(log, decode(LockHolder, lock.value, source=path), lock.version)


async def wait_for_turns(
    context: LogContext, held: Sequence[HeldLog], wait: Wait, *, timeout_s: float
) -> None:
    """Wait until the locks change, at most for a while; ask proxies for a turn.

    The lock of a dead writer vanishes with its session.  A long wait is logged as a warning.

    Raises: OwnershipAcquireFailedError: `timeout_s` have passed since the wait began, or `ASKING_S`
        if that is longer and all holders give turns.
    """
    if all(each.holder.turn != "refused" for each in held):
        timeout_s = max(timeout_s, ASKING_S)
    first, now = held[0], asyncio.get_running_loop().time()
    left_s = wait.begun_s + timeout_s - now
    who = first.holder.described(context.client_id)
    text = f"log {first.log.name!r} is owned by the writer {who}"
    if left_s <= 0:
        raise OwnershipAcquireFailedError(
            f"{text} (waited {timeout_s:g} s)", owner=first.holder.owner
        )
    if wait.is_due(now):
        logger.warning("%s; waiting for %.0f s more", text, left_s)
    try:
        async with asyncio.timeout(min(left_s, _LOOKS_EVERY_S)):
            await asyncio.gather(*(_wait(context, each) for each in held))
    except TimeoutError:
        names = ", ".join(each.log.name for each in held[:5])
        logger.debug("logs still owned by others: %s", names)


async def _wait(context: LogContext, held: HeldLog) -> None:
    logs, changed, known = context.logs, asyncio.Event(), held.holder
    path = logs.paths_of(held.log).lock
    unsubscribe = context.store.watch(path, changed.set, children=False)
    try:
        if known.turn in ("free", "given"):
            try:
                await context.store.multi([held.turned(context, "asked")])
            except (MetadataVersionError, NoNodeError, *UNANSWERED):
                return
            known = replace(known, turn="asked")
        while await logs.read_lock(held.log) == known:
            await changed.wait()
            changed.clear()
    finally:
        unsubscribe()
