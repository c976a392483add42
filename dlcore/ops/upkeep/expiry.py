"""Retention by time and size: visits the logs that have one now and then, written to or not.

They are listed, so that no other log is read.  `retention.py` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from dlcore.base.background import together
from dlcore.base.errors import CorruptMetadataError, LogNotFoundError, MetadataVersionError
from dlcore.base.isolating import Troubles
from dlcore.log.metadata.changes import plan_complete, plan_truncate
from dlcore.log.metadata.history import ChunkMissingError
from dlcore.log.metadata.values import RetainedLog, SegmentEnd
from dlcore.log.recovery import recover_log
from dlcore.log.upkeep.removal import listed_log, read_moved, remove_truncated
from dlcore.log.upkeep.retention import (
    first_kept,
    kept_by_size,
    kept_from_ms,
    last_write_ms,
    must_complete,
)
from dlcore.metadata.one_node import persistently
from dlcore.metadata.paths import BUCKETS
from dlcore.metadata.stored import decode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogKey, VersionedHead

logger = logging.getLogger(__name__)

_LOGS_AT_ONCE = 32
_NODES_AT_ONCE = 500
_BUCKETS_AT_ONCE = 32
_SEGMENTS_AT_ONCE = 100


async def expire_logs(context: LogContext) -> int:
    """Drop too old records of every log with a retention; return how many logs changed.

    A log that fails is reported, and tried again by the next call.

    Raises:
        MetadataError: the metadata store does not answer.
    """
    changed = 0
    limit = asyncio.Semaphore(_LOGS_AT_ONCE)
    troubles = Troubles()

    async def expire(log: LogKey) -> bool:
        has_changed = False
        async with limit:
            # A log that is not found was deleted meanwhile.
            isolated = troubles.isolated(f"retention of log {log.name}")
            with isolated, contextlib.suppress(LogNotFoundError):
                has_changed = await expire_log(context, log)
        return has_changed

    async for logs in listed_logs(context):
        due = await _due(context, logs)
        changed += sum(await together(*map(expire, due)))
    return changed


async def listed_logs(context: LogContext) -> AsyncGenerator[list[LogKey], None]:
    """Yield the logs whose settings need visits, many at a time."""
    for first in range(0, len(BUCKETS), _BUCKETS_AT_ONCE):
        buckets = BUCKETS[first : first + _BUCKETS_AT_ONCE]
        parents = [f"{context.paths.retained_logs}/{bucket}" for bucket in buckets]
        lists = await persistently(lambda parents=parents: context.store.get_children_many(parents))  # type: ignore[misc]
        listed = zip(parents, lists, strict=True)
        found = [f"{parent}/{name}" for parent, names in listed for name in names or ()]
        for start in range(0, len(found), _NODES_AT_ONCE):
            paths = found[start : start + _NODES_AT_ONCE]
            nodes = await persistently(lambda paths=paths: context.store.get_many(paths))  # type: ignore[misc]
            pairs = zip(paths, nodes, strict=True)
            yield [listed_log(RetainedLog, path, node) for path, node in pairs if node is not None]


async def _due(context: LogContext, logs: Sequence[LogKey]) -> list[LogKey]:
    """Return the logs that may hold too old records, by two requests for all of them.

    A log is also due where that is unknown: its own turn reports the reason.
    """
    now_ms = context.clock.now_ms()
    paths = [context.logs.paths_of(log) for log in logs]
    wanted = [path for each in paths for path in (each.head, each.settings)]
    nodes = await persistently(lambda: context.store.get_many(wanted))
    due: list[LogKey] = []
    unsure: dict[str, tuple[LogKey, int]] = {}  # by the path of the log's first segment
    for index, log in enumerate(logs):
        try:
            head = context.logs.head_of(log, nodes[2 * index]).head
            settings = context.logs.settings_of(log, nodes[2 * index + 1])
        except LogNotFoundError:
            continue  # it is being deleted
        except CorruptMetadataError:
            due.append(log)
            continue
        from_ms = kept_from_ms(settings, now_ms=now_ms)
        is_sized = settings.retention_bytes is not None  # only its newest segments tell
        if is_sized or (from_ms is not None and must_complete(head, kept_from_ms=from_ms)):
            due.append(log)
        elif from_ms is not None and head.first_lssn < head.max_lssn + (head.segment is None):
            unsure[paths[index].segment(head.first_lssn)] = log, from_ms
    ends = await persistently(lambda: context.store.get_many(list(unsure)))
    for (path, (log, from_ms)), node in zip(unsure.items(), ends, strict=True):
        try:
            end = None if node is None else decode(SegmentEnd, node.value, source=path)
        except CorruptMetadataError:
            end = None
        if end is None or last_write_ms(end) < from_ms:
            due.append(log)
    return due


async def expire_log(context: LogContext, log: LogKey) -> bool:
    """Drop the records of a log that are too old, or too many; return whether there were any.

    Raises:
        LogNotFoundError: the log was deleted.
    """
    at, settings = await context.logs.open(log)
    from_ms = kept_from_ms(settings, now_ms=context.clock.now_ms())
    if from_ms is not None and must_complete(at.head, kept_from_ms=from_ms):
        at = await complete_unowned(context, at)
    before = at
    if from_ms is not None and not settings.explicit_truncation:
        at = await _truncate(context, at, from_ms)
    if settings.retention_bytes is not None:
        at = await _truncate_to_size(context, at, settings.retention_bytes)
    if from_ms is None and settings.retention_bytes is None:
        return False
    after = await remove_truncated(context, at)
    return after.version != before.version


async def _truncate_to_size(
    context: LogContext, at: VersionedHead, bytes_max: int
) -> VersionedHead:
    """Truncate the oldest segments while the newer ones have enough; one conflict ends it.

    Segments are read from the newest on, until they have so much.
    """
    head, paths = at.head, context.logs.paths_of(at.log)
    first, end = head.first_active[0], head.max_lssn + (head.segment is None)
    newest: list[SegmentEnd] = []
    while (dlsn := kept_by_size(head, newest, bytes_max=bytes_max)) is None and end > first:
        lssns = range(end - 1, max(first, end - _SEGMENTS_AT_ONCE) - 1, -1)
        wanted = [paths.segment(lssn) for lssn in lssns]
        nodes = await persistently(lambda wanted=wanted: context.store.get_many(wanted))  # type: ignore[misc]
        for path, node in zip(wanted, nodes, strict=True):
            if node is None or not node.value:
                return at  # the log has moved on
            newest.append(decode(SegmentEnd, node.value, source=path))
        end = lssns[-1]
    change = None if dlsn is None else plan_truncate(paths, at, dlsn)
    if change is None:
        return at
    try:
        at = await context.logs.apply(change)
    except MetadataVersionError:
        return await context.logs.read(at.log)  # the next sweep does it
    logger.info("truncated log=%s at %s by size", at.name, dlsn)
    return at


async def complete_unowned(context: LogContext, at: VersionedHead) -> VersionedHead:
    """Complete the segment in progress unless a writer owns the log."""
    extent = at.head.open_extent
    if extent is None:
        change = plan_complete(
            context.logs.paths_of(at.log), at, now_ms=context.clock.now_ms(), closing=None
        )
        try:
            return await context.logs.apply(change)
        except MetadataVersionError:
            return await context.logs.read(at.log)
    if await context.logs.locks.holder_of(at.log) is not None:
        return at
    return await recover_log(context, at, only_this=True)


async def _truncate(context: LogContext, at: VersionedHead, from_ms: int) -> VersionedHead:
    paths = context.logs.paths_of(at.log)
    while True:
        head = at.head
        last = head.max_lssn if head.segment is None else head.max_lssn - 1
        first = head.first_active[0]
        lssns = range(first, min(last + 1, first + _SEGMENTS_AT_ONCE))
        nodes = await context.store.get_many([paths.segment(lssn) for lssn in lssns])
        ends = [
            decode(SegmentEnd, node.value, source=paths.segment(lssn))
            for lssn, node in zip(lssns, nodes, strict=True)
            if node is not None and node.value
        ]
        if len(ends) < len(lssns):  # a segment was removed meanwhile
            at = await read_moved(context, at, ChunkMissingError("a segment is missing"))
            continue
        dlsn = first_kept(head, ends, kept_from_ms=from_ms)
        change = None if dlsn is None else plan_truncate(paths, at, dlsn)
        if change is None:
            return at
        try:
            at = await context.logs.apply(change)
        except MetadataVersionError:
            at = await context.logs.read(at.log)
        else:
            logger.info("truncated log=%s at %s by age", at.name, dlsn)
