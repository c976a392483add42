"""Requests for the upkeep of a log; `lssn_to_merge` of `metadata/changes.py` says when to make one.

A request is a node below ``upkeep`` that names the log and the segment to begin with.  The workers
of auto-recovery read these nodes, so that no worker has to look at logs that need nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from dlcore.base.background import all_of
from dlcore.base.errors import NodeExistsError
from dlcore.log.metadata.values import UpkeepRequest
from dlcore.metadata.stored import encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogKey

_ASKED_AT_ONCE = 32


async def ask_for_upkeep(context: LogContext, lssns: Mapping[LogKey, int]) -> None:
    """Ask for the upkeep of logs, each from a segment on; no error if that was done already.

    A request without an answer is left to the next caller.
    """
    limit = asyncio.Semaphore(_ASKED_AT_ONCE)

    async def ask(log: LogKey, lssn: int) -> None:
        request = UpkeepRequest(name=log.name, log_id=log.log_id, from_lssn=lssn)
        path = context.paths.upkeep_request(log.log_id)
        async with limit:
            with contextlib.suppress(NodeExistsError):
                await context.store.create(path, encode(request))

    await all_of(*(ask(log, lssn) for log, lssn in lssns.items()))
