"""Forks logs: performs what a `ForkRun` decides."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from dlcore.base.errors import LedgerNotFoundError, LogExistsError, MetadataError
from dlcore.base.features import FORKS
from dlcore.base.ids import DLSN, validate_log_id, validate_log_name
from dlcore.base.machines import Pause, run_to_end
from dlcore.log.metadata.forking import (
    Event,
    ForkRun,
    Look,
    Looked,
    Signal,
    Work,
    cut_of,
    removed_txid_of,
)
from dlcore.log.metadata.history import LogHistory
from dlcore.log.metadata.values import ForkOrigin, LogMetadata
from dlcore.log.recovery import bounded_extent
from dlcore.log.upkeep.removal import remove_deleted
from dlcore.metadata.attempts import Store
from dlcore.metadata.binding import ClusterFeatures
from dlcore.metadata.one_node import persistently

if TYPE_CHECKING:
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.forking import ForkCut
    from dlcore.log.metadata.segment import Extent

logger = logging.getLogger(__name__)

_ROUNDS_MAX = 10
"""How often a fork begins again if its source gives up segments meanwhile."""


async def fork_log(
    context: LogContext,
    source: str,
    name: str,
    *,
    at: DLSN | None = None,
    log_id: str | None = None,
) -> DLSN:
    """Make a log that begins with what another one has in objects; return where it goes on.

    Args:
        context: the namespace's adapters.
        source: the other log.
        name: the name of the fork.
        at: the position of the source before which all records are in the fork; None: all that is
            in objects.
        log_id: the id of the fork, by which a call that is repeated finds the fork that it made.

    Raises:
        UnsupportedError: the feature `forks` is not finalized.
        LogNotFoundError, LogExistsError: there is no log `source`, or one `name`.
        ConfigurationError: no fork can end at `at`; the message names positions that work.
        MetadataError: it is not known whether the fork is there; or the source changes all the
            time.
    """
    validate_log_name(name)
    await ClusterFeatures(context.store, context.paths).require(FORKS)
    own_id = context.clock.new_token() if log_id is None else validate_log_id(log_id)
    if log_id is not None:
        for found in await context.logs.find_existing([name]):
            if found.log_id == log_id and found.origin is not None:
                return DLSN.parse(found.origin.at)
    for _ in range(_ROUNDS_MAX):
        log = await context.logs.find(source)
        at_first = await context.logs.read(log)
        state = await LogHistory(context.logs, log, keeps_truncated=True).state_of(at_first)
        cut = cut_of(state, at)
        try:
            segments = cut.whole(await _split(context, cut))
        except LedgerNotFoundError:
            if (await context.logs.read(log)).version == state.version:
                raise  # no change of the log explains it
            continue
        # A table cannot name objects in the folder of another log.
        settings = (await context.logs.read_settings(log)).changed({"table": None})
        (schema,) = await context.logs.read_schemas([log])
        fork = LogMetadata(
            name=name,
            log_id=own_id,
            created_ms=context.clock.now_ms(),
            quorum=log.quorum,
            typed=log.typed,
            origin=ForkOrigin(name=log.name, log_id=log.log_id, at=str(cut.at)),
        )
        machine = ForkRun(
            context.paths,
            fork,
            segments,
            first_active=state.head.first_active,
            removed_txid=removed_txid_of(state),
            settings=settings,
            schema=schema,
        )
        if await _run(context, machine, fork):
            logger.info("forked log=%s at=%s to=%s id=%s", log.name, cut.at, name, own_id)
            return cut.at
    raise MetadataError(
        f"log {source!r} gave up its segments during each of {_ROUNDS_MAX} attempts to fork it: "
        "try again while it is not truncated all the time"
    )


async def _run(context: LogContext, machine: ForkRun, fork: LogMetadata) -> bool:
    """Return whether the fork is there; if not, nothing of it is left."""

    async def answer_of(work: Work) -> Event:
        return await _answer_of(context, work)

    try:
        is_there = await run_to_end(machine, Signal.BEGIN, answer_of)
    except LogExistsError:
        await remove_deleted(context, fork)
        raise
    # After another error the sweep of deleted logs removes what there is of it.
    if not is_there:
        await remove_deleted(context, fork)
    return is_there


async def _answer_of(context: LogContext, work: Work) -> Event:
    match work:
        case Look(paths):
            return Looked(await persistently(lambda: context.store.get_many(paths, fresh=True)))
        case Store(ops):
            await context.store.multi(ops)
            return Signal.STORED
        case Pause(s_max, error):
            logger.info("a fork is tried again: %s", error)
            await asyncio.sleep(context.rng.uniform(0, s_max))
            return Signal.PAUSE_OVER
        case _:
            assert_never(work)


async def _split(context: LogContext, cut: ForkCut) -> Extent | None:
    """Return the extent that ends at the fork's position, which is within a longer one."""
    extent = cut.split
    if extent is None:
        return None
    reader = await context.ledgers.open_ledger(extent.ledger_id)
    last = extent.first_entry_id + cut.split_entries - 1
    found = await bounded_extent(reader, extent, last_entry_id=last, first_txid=extent.first_txid)
    assert found is not None
    # The entries were made again of rows: their sizes are not those that were counted.
    size_bytes = extent.size_bytes * cut.split_entries // extent.entry_count
    return replace(found, size_bytes=size_bytes, stamped=False)
