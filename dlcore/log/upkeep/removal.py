"""Removing what is truncated, and deleted logs: from the front, in steps of one transaction each.

Each step gives up the ledgers of some extents, removes the nodes that named them, and moves the
head's `first_lssn` and `first_chunk`, so the next one, whoever makes it, goes on from there.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import aclosing
from typing import TYPE_CHECKING

from dlcore.config import LogSettings
from dlcore.errors import (
    MetadataVersionError,
    NodeNotEmptyError,
    NoNodeError,
    UnexpectedError,
)
from dlcore.log.metadata.changes import Piece, plan_remove, plan_settings
from dlcore.log.metadata.chunks import ChunkMissingError, read_chunks
from dlcore.log.metadata.staged import plan_releases
from dlcore.log.metadata.store import UNANSWERED, persistently
from dlcore.log.metadata.values import (
    LogHead,
    LogKey,
    SegmentEnd,
    VersionedHead,
)
from dlcore.log.upkeep.retention import kept_from_ms, last_write_ms
from dlcore.metadata.port import Delete
from dlcore.metadata.stored import decode

if TYPE_CHECKING:
    from dlcore.log.context import LogContext
    from dlcore.metadata.paths import LogPaths

logger = logging.getLogger(__name__)

_EXTENTS_PER_STEP = 500
_CHUNKS_AT_ONCE = 50
_SEGMENTS_AT_ONCE = 100


async def remove_truncated(context: LogContext, at: VersionedHead) -> VersionedHead:
    """Remove what is truncated, step by step; return the head after.

    Where a log truncates by itself and has a retention, younger segments wait for their time.
    """
    settings = await context.logs.read_settings(at.log)
    keeps = settings.explicit_truncation
    from_ms = kept_from_ms(settings, now_ms=context.clock.now_ms()) if keeps else None
    while True:
        try:
            pieces = await _next_pieces(context, at, kept_from_ms=from_ms)
            if not pieces:
                return at
            at = await _remove(context, at, pieces)
        except MetadataVersionError:
            at = await context.logs.read(at.log)


async def remove_deleted(context: LogContext, log: LogKey) -> None:
    """Remove all that a deleted log held, step by step; harmless when it is gone."""
    paths = context.logs.paths_of(log)
    while True:
        node = await persistently(lambda: context.store.get(paths.head, fresh=True))
        if node is None:
            return
        head = decode(LogHead, node.value, source=paths.head)
        if not head.deleted:
            raise UnexpectedError(f"log {log.name!r} is listed as deleted, and its head is not")
        at = VersionedHead(log=log, head=head, version=node.version)
        try:
            while pieces := await _next_pieces(context, at):
                at = await _remove(context, at, pieces)
            await _remove_subscriptions(context, paths)
            settings = await context.store.get(paths.settings)
            await context.store.multi(
                [
                    *plan_settings(context.paths, log, settings, LogSettings()),
                    Delete(paths.head, at.version),
                    Delete(context.paths.deleted_log(log.log_id)),
                ]
            )
        except NodeNotEmptyError:
            # Somebody is about to learn that the log whose lock he took is gone.
            logger.info("deleted log=%s id=%s is still locked", log.name, log.log_id)
            return
        except (MetadataVersionError, NoNodeError, *UNANSWERED) as error:
            logger.info("removing deleted log=%s goes on: %s", log.name, error)


async def _remove_subscriptions(context: LogContext, paths: LogPaths) -> None:
    """Remove the positions kept for readers, and the locks of those who have not noticed yet."""
    names = await context.store.get_children(paths.subscribers, fresh=True)
    if names is None:
        return
    for name in names:
        path = f"{paths.subscribers}/{name}"
        children = await context.store.get_children(path, fresh=True) or []
        await context.store.multi([*(Delete(f"{path}/{each}") for each in children), Delete(path)])
    await context.store.delete(paths.subscribers)


async def _remove(context: LogContext, at: VersionedHead, pieces: list[Piece]) -> VersionedHead:
    counts = Counter(extent.ledger_id for piece in pieces for extent in piece.extents)
    releases = await plan_releases(context, counts)
    paths = context.logs.paths_of(at.log)
    return await context.logs.apply(plan_remove(paths, at, pieces, releases))


async def _next_pieces(
    context: LogContext, at: VersionedHead, *, kept_from_ms: int | None = None
) -> list[Piece]:
    """Return the first pieces that can go, as many as one step takes."""
    head = at.head
    paths = context.logs.paths_of(at.log)
    # Of the segment that holds the first active position, only its end tells whether it can go.
    last = head.max_lssn if head.deleted else min(head.first_active[0], head.max_lssn)
    lssns = range(head.first_lssn, min(last + 1, head.first_lssn + _SEGMENTS_AT_ONCE))
    nodes = await context.store.get_many([paths.segment(lssn) for lssn in lssns]) if lssns else []
    pieces: list[Piece] = []
    for lssn, node in zip(lssns, nodes, strict=True):
        if lssn == head.max_lssn and head.segment is not None:
            if not head.deleted:
                break
            count, tail = head.segment.chunk_count, head.segment.tail
        elif node is None or not node.value:
            raise MetadataVersionError(f"log {at.name!r}: segment {lssn} is not as its head says")
        else:
            end = decode(SegmentEnd, node.value, source=paths.segment(lssn))
            count, tail = end.chunk_count, end.tail
            if not head.deleted and _stays(head, lssn, end, kept_from_ms):
                break
        number = head.first_chunk if lssn == head.first_lssn else 0
        chunks = read_chunks(
            context.store, paths, lssn, range(number, count), at_once=_CHUNKS_AT_ONCE
        )
        try:
            async with aclosing(chunks):
                async for number, chunk in chunks:
                    extents = chunk.extents
                    pieces.append(
                        Piece(lssn=lssn, chunk=number, extents=extents, covers=chunk.covers)
                    )
                    if _is_enough(pieces):
                        return pieces
        except ChunkMissingError as error:
            raise MetadataVersionError(f"log {at.name!r}: {error}") from error
        pieces.append(Piece(lssn=lssn, chunk=None, extents=tail, has_node=node is not None))
        if _is_enough(pieces):
            break
    return pieces


def _stays(head: LogHead, lssn: int, end: SegmentEnd, kept_from_ms: int | None) -> bool:
    if kept_from_ms is not None and last_write_ms(end) >= kept_from_ms:
        return True
    return not _is_passed(head.first_active, lssn, end)


def _is_passed(first_active: tuple[int, int, int], lssn: int, end: SegmentEnd) -> bool:
    entries = end.chunked.plus(end.tail).entries
    return lssn < first_active[0] or first_active[1] >= entries


def _is_enough(pieces: list[Piece]) -> bool:
    """Return whether a step is as large as it may be: each extent may be of another ledger."""
    return sum(len(piece.extents) for piece in pieces) >= _EXTENTS_PER_STEP
