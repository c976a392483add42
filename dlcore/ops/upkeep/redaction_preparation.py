"""Prepares the redaction of a log: looks for obstacles, and completes the segment in progress."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from dlcore.base.errors import MetadataVersionError, NoNodeError, OwnershipAcquireFailedError
from dlcore.log.metadata.changes import plan_complete
from dlcore.log.metadata.store import persistently
from dlcore.log.staging.commit import held_log
from dlcore.ops.upkeep.expiry import complete_unowned
from dlcore.ops.upkeep.strays import looked_into, tier_urls

if TYPE_CHECKING:
    from dlcore.log.cold.table_format import TableForm
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogMetadata
    from dlcore.log.staging.commit import HeldLog
    from dlcore.metadata.port import Op

_TURN_PATIENCE_S = 30.0
_TURN_POLL_S = 0.1


class Preparation:
    """Looks at one log before it is redacted, and completes its segment in progress."""

    def __init__(self, context: LogContext, log: LogMetadata) -> None:
        self._context = context
        self._log = log

    async def obstacles(self) -> tuple[str, ...]:
        """Return sentences on what else has the rows, and is not redacted.

        Raises:
            DLError: the metadata or a store does not answer.
        """
        context = self._context
        found = []
        restored = context.paths.restored
        if await persistently(lambda: context.store.get(restored, fresh=True)) is not None:
            found.append(
                "the metadata was imported: nothing is deleted before dlog metadata accept"
            )
        settings = await context.logs.read_settings(self._log)
        if settings.table not in (None, "delta"):
            found.append(
                f"the log has a table of the kind {settings.table}, whose versions are not "
                "redacted: unset `table` and delete the table first"
            )
        for tier in await tier_urls(context):
            folder = f"{tier}/{context.cluster_id}/{self._log.log_id}"
            with looked_into(tier):
                forms = await _forms_in(context, folder)
            found += [
                f"in {folder} is a table of the kind {form.kind} that does not follow the log any "
                f"more: {form.remake} first"
                for form in forms
                if (tier, form.kind) != (settings.tier_url, settings.table)
            ]
        return tuple(found)

    async def complete(self) -> None:
        """Complete the segment in progress: without a writer, or in a turn that it gives.

        Raises:
            OwnershipAcquireFailedError: a writer has it, and gives no turn.
            DLError: the metadata or bookies do not answer.
        """
        logs, loop = self._context.logs, asyncio.get_running_loop()
        until_s = loop.time() + _TURN_PATIENCE_S
        while True:
            at = await complete_unowned(self._context, await logs.read(self._log))
            if at.head.segment is None:
                return
            held = await self._held()
            if held is not None and held.holder.turn == "refused":
                break
            if held is not None and await self._complete_in_turn(held):
                return
            if loop.time() >= until_s:
                break
            await asyncio.sleep(_TURN_POLL_S)
        who = "a writer" if held is None else held.holder.described(self._context.client_id)
        raise OwnershipAcquireFailedError(
            f"segment {at.head.max_lssn} of log {self._log.name!r} is in progress and has such "
            f"rows, and {who} writes it: close that writer, or wait until the segment is completed "
            "(segment_age_max_s, segment_bytes_max), and run the command again"
        )

    async def _held(self) -> HeldLog | None:
        path = self._context.logs.paths_of(self._log).lock
        node = await persistently(lambda: self._context.store.get(path, fresh=True))
        return held_log(self._context.paths, self._log, node)

    async def _complete_in_turn(self, held: HeldLog) -> bool:
        """Complete the segment if the writer gives a turn, else ask for one, as appends do."""
        context = self._context
        at = await context.logs.read(self._log)
        gives = held.gives_turn_at(at)
        ops: list[Op] = []
        if gives:
            # The transaction ends the turn, and the writer goes on in the next segment.
            ops.append(held.turned("free"))
            if at.head.segment is not None:
                paths, now_ms = context.logs.paths_of(self._log), context.clock.now_ms()
                ops += plan_complete(paths, at, now_ms=now_ms, closing=None).ops
        elif held.holder.turn == "free":
            ops.append(held.turned("asked"))
        with contextlib.suppress(MetadataVersionError, NoNodeError):
            if ops:
                await context.store.multi(ops)
                return gives
        return False


async def _forms_in(context: LogContext, folder: str) -> list[TableForm]:
    from dlcore.log.cold.tables import forms_in  # it loads Arrow

    return await forms_in(context.cold.objects, folder)
