"""Removes truncated parts of logs, and deleted logs: from the front, a transaction for each step.

Each step releases the ledgers of some extents, removes the nodes that named them, and moves the
head's `first_lssn` and `first_chunk`.  Any client can continue with the next step from there.  The
extents at the front of a segment that stays go too (`retention.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.background import all_of
from dlcore.base.config import LogSettings
from dlcore.base.errors import (
    CorruptMetadataError,
    MetadataVersionError,
    NodeNotEmptyError,
    NoNodeError,
    UnexpectedError,
)
from dlcore.base.features import PARTIAL_REMOVAL
from dlcore.log.entries.stamp import PRODUCERS_KEPT_MS
from dlcore.log.metadata.changes import Piece, plan_remove, plan_settings
from dlcore.log.metadata.history import ChunkMissingError, read_chunks
from dlcore.log.metadata.values import (
    LogHead,
    LogKey,
    SegmentEnd,
    VersionedHead,
)
from dlcore.log.upkeep.retention import Front, kept_from_ms, last_write_ms
from dlcore.log.upkeep.staged import plan_releases
from dlcore.metadata.one_node import persistently
from dlcore.metadata.paths import unescape
from dlcore.metadata.port import ANY_VERSION, UNANSWERED, Delete
from dlcore.metadata.stored import decode, decode_or_tell, encode

if TYPE_CHECKING:
    from dlcore.log.context import LogContext
    from dlcore.metadata.paths import LogPaths
    from dlcore.metadata.port import Versioned

logger = logging.getLogger(__name__)

# Each may need a change of another ledger, and ZooKeeper limits the size of a transaction.
_EXTENTS_PER_STEP = 500
_CHUNKS_AT_ONCE = 50
_SEGMENTS_AT_ONCE = 100
_NODES_AT_ONCE = 100
_ATTEMPTS_MAX = 100


async def remove_truncated(context: LogContext, at: VersionedHead) -> VersionedHead:
    """Remove the truncated part of a log, step by step; return the head after that.

    If a log has a retention and explicit truncation, younger segments stay until they are old
    enough.  The segment with the stamps of producers also stays, with all after it: else a new
    owner would not recognise the records that producers send again.  Extents at the front of
    the first segment that stays go too, if they lie wholly in the truncated part.
    """
    from_ms = await _truncated_kept_from_ms(context, at)
    while True:
        try:
            pieces = await _removable(context, at, kept_from_ms=from_ms)
            if not pieces:
                return at
            at = await _remove(context, at, pieces)
        except ChunkMissingError as error:
            at = await read_moved(context, at, error)
        except MetadataVersionError:
            at = await context.logs.read(at.log)


async def has_removable(context: LogContext, at: VersionedHead) -> bool:
    """Return whether something truncated of a log is still there, and may go.

    Raises:
        ChunkMissingError: the log has changed, or is damaged.
    """
    from_ms = await _truncated_kept_from_ms(context, at)
    return bool(await _removable(context, at, kept_from_ms=from_ms))


async def _truncated_kept_from_ms(context: LogContext, at: VersionedHead) -> int | None:
    """Return the write time from which a log keeps truncated records; None: it keeps none."""
    settings = await context.logs.read_settings(at.log)
    if not settings.explicit_truncation:
        return None
    return kept_from_ms(settings, now_ms=context.clock.now_ms())


async def _removable(
    context: LogContext, at: VersionedHead, *, kept_from_ms: int | None
) -> list[Piece]:
    """Return the first truncated pieces of a log that can be removed, as many as one step takes."""
    if pieces := await _next_pieces(context, at, kept_from_ms=kept_from_ms):
        return pieces
    pieces = await _front_pieces(context, at, kept_from_ms=kept_from_ms)
    if not pieces:
        return []
    from dlcore.metadata.binding import ClusterFeatures  # few truncations need it

    features = ClusterFeatures(context.store, context.paths)
    return pieces if await features.has(PARTIAL_REMOVAL) else []


async def read_moved(
    context: LogContext, known: VersionedHead, error: ChunkMissingError
) -> VersionedHead:
    """Return the head of a log in which `known` does not match the stored nodes.

    Raises:
        CorruptMetadataError: the head has not changed.
    """
    at = await context.logs.read(known.log)
    if at.version == known.version:
        raise CorruptMetadataError(f"log {known.name!r}: {error}") from error
    return at


def listed_log(kind: type[LogKey], path: str, node: Versioned) -> LogKey:
    """Return the log of a node in a list; if the node is damaged, its path has the id."""
    log_id = unescape(path.rpartition("/")[2])
    tell = partial(logger.warning, "the log with id %s is listed without its name: %s", log_id)
    found = decode_or_tell(kind, node, source=path, tell=tell)
    return LogKey(name=f"of id {log_id}" if found is None else found.name, log_id=log_id)


async def remove_deleted(context: LogContext, log: LogKey) -> None:
    """Remove everything of a deleted log, step by step; no error if it is gone.

    Damaged nodes are removed too: ledgers that only these named stay, as orphans.

    Raises:
        UnexpectedError: the stored state contradicts itself in an unknown way.
    """
    paths = context.logs.paths_of(log)
    missed_at = -1
    for _ in range(_ATTEMPTS_MAX):
        node = await persistently(lambda: context.store.get(paths.head, fresh=True))
        if node is None:
            return
        try:
            if not await _remove_all(context, log, node):
                return
        except (ChunkMissingError, CorruptMetadataError, NodeNotEmptyError) as error:
            children = await context.store.get_children(paths.head, fresh=True) or []
            if paths.lock in (f"{paths.head}/{child}" for child in children):
                # A client has just taken the lock, and will soon find that the log is gone.
                logger.info("deleted log=%s id=%s is still locked", log.name, log.log_id)
                return
            # The same head failed twice: the nodes are damaged, not just read during a change.
            if node.version == missed_at:
                await _remove_damaged(context, log, error)
            missed_at = node.version
        except (MetadataVersionError, NoNodeError, *UNANSWERED) as error:
            logger.info("removing deleted log=%s goes on: %s", log.name, error)
    raise UnexpectedError(
        f"deleted log {log.name!r} (id {log.log_id}) is not removed after {_ATTEMPTS_MAX} tries"
    )


async def _remove_all(context: LogContext, log: LogKey, node: Versioned) -> bool:
    """Remove the segments of a deleted log, then its other nodes, then its head.

    Returns: False if it is not deleted: it was a fork that was being made, and is whole now.
    """
    paths = context.logs.paths_of(log)
    head = decode(LogHead, node.value, source=paths.head)
    if not head.deleted:
        listed = context.paths.deleted_log(log.log_id)
        if await persistently(lambda: context.store.get(listed, fresh=True)) is None:
            return False
        raise UnexpectedError(f"log {log.name!r} is listed as deleted, but its head is not deleted")
    at = VersionedHead(log=log, head=head, version=node.version)
    while pieces := await _next_pieces(context, at):
        at = await _remove(context, at, pieces)
    await _remove_subscriptions(context, paths)
    settings, schema = await context.store.get_many([paths.settings, paths.schema])
    await context.store.multi(
        [
            *plan_settings(context.paths, log, settings, LogSettings()),
            *(() if schema is None else (Delete(paths.schema),)),
            Delete(paths.head, at.version),
            Delete(context.paths.deleted_log(log.log_id)),
        ]
    )
    return True


async def _remove_damaged(context: LogContext, log: LogKey, error: Exception) -> None:
    """Remove the nodes of a deleted log if they do not lead to its ledgers.

    An empty head replaces the old one, and `remove_deleted` goes on with it.
    """
    logger.warning(
        "deleted log=%s id=%s is damaged, ledgers of it may stay until `dlog ledger audit`: "
        "%s; to do: run that command, and delete what it names",
        log.name,
        log.log_id,
        error,
    )
    paths = context.logs.paths_of(log)
    # The head comes last: it is damaged or misleading until then, so that after a crash the next
    # attempt gets here again.
    await _remove_below(context, paths.head, but=paths.lock)
    with contextlib.suppress(NoNodeError):
        await context.store.delete(context.paths.retained_log(log.log_id))
    with contextlib.suppress(NoNodeError):
        await context.store.put(paths.head, encode(LogHead(deleted=True)), version=ANY_VERSION)


async def _remove_below(context: LogContext, path: str, *, but: str = "") -> None:
    """Remove all nodes below one, the deepest first."""
    names = await persistently(lambda: context.store.get_children(path, fresh=True)) or []
    paths = [f"{path}/{name}" for name in names if f"{path}/{name}" != but]
    for start in range(0, len(paths), _NODES_AT_ONCE):
        some = paths[start : start + _NODES_AT_ONCE]
        await all_of(*(_remove_below(context, each) for each in some))
        await all_of(*(_remove_node(context, each) for each in some))


async def _remove_node(context: LogContext, path: str) -> None:
    with contextlib.suppress(NoNodeError, NodeNotEmptyError):  # gone, or left to the next try
        await persistently(lambda: context.store.delete(path))


async def _remove_subscriptions(context: LogContext, paths: LogPaths) -> None:
    """Remove the stored positions of readers, and the locks of readers that still hold them."""
    names = await context.store.get_children(paths.subscribers, fresh=True)
    if names is None:
        return
    for name in names:
        path = f"{paths.subscribers}/{name}"
        children = await context.store.get_children(path, fresh=True) or []
        await context.store.multi([*(Delete(f"{path}/{each}") for each in children), Delete(path)])
    await context.store.delete(paths.subscribers)


async def _remove(context: LogContext, at: VersionedHead, pieces: list[Piece]) -> VersionedHead:
    extents = [extent for piece in pieces for extent in piece.extents]
    counts = Counter(extent.ledger_id for extent in extents)
    cold = {extent.ledger_id for extent in extents if extent.is_cold}
    releases = await plan_releases(context, counts, cold=cold)
    paths = context.logs.paths_of(at.log)
    return await context.logs.apply(plan_remove(paths, at, pieces, releases))


async def _next_pieces(
    context: LogContext, at: VersionedHead, *, kept_from_ms: int | None = None
) -> list[Piece]:
    """Return the first pieces that can be removed, as many as one step takes.

    Raises:
        ChunkMissingError: a segment is not as the head says: it has changed, or is damaged.
    """
    head = at.head
    paths = context.logs.paths_of(at.log)
    now_ms = context.clock.now_ms()
    # For the segment with the first active position, its end decides whether it can go.
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
            if pieces:
                break  # remove the pieces before it first
            raise ChunkMissingError(f"segment {lssn} is not as its head says")
        else:
            end = decode(SegmentEnd, node.value, source=paths.segment(lssn))
            count, tail = end.chunk_count, end.tail
            if not head.deleted and _stays(head, lssn, end, kept_from_ms, now_ms):
                break
        number = head.first_chunk if lssn == head.first_lssn else 0
        chunks = read_chunks(
            context.store, paths, lssn, range(number, count), at_once=_CHUNKS_AT_ONCE
        )
        async with aclosing(chunks):
            async for number, chunk in chunks:
                extents = chunk.extents
                pieces.append(Piece(lssn=lssn, chunk=number, extents=extents, covers=chunk.covers))
                if _is_enough(pieces):
                    return pieces
        pieces.append(Piece(lssn=lssn, chunk=None, extents=tail, has_node=node is not None))
        if _is_enough(pieces):
            break
    return pieces


async def _front_pieces(
    context: LogContext, at: VersionedHead, *, kept_from_ms: int | None
) -> list[Piece]:
    """Return the first pieces of the log's first segment that can go, though it stays.

    Raises:
        ChunkMissingError: the segment is not as the head says: it has changed, or is damaged.
    """
    head, lssn = at.head, at.head.first_lssn
    paths = context.logs.paths_of(at.log)
    if head.first_active <= (lssn, 0, 0) or lssn > head.max_lssn:
        return []
    end: SegmentEnd | None = None
    if lssn < head.max_lssn or head.segment is None:
        node = await context.store.get(paths.segment(lssn))
        if node is None or not node.value:
            raise ChunkMissingError(f"segment {lssn} is not as its head says")
        end = decode(SegmentEnd, node.value, source=paths.segment(lssn))
    stored = end or head.segment
    assert stored is not None
    front = Front(head, end, kept_from_ms=kept_from_ms)
    if front.limit <= 0:
        return []
    numbers = range(head.first_chunk, stored.chunk_count)
    pieces: list[Piece] = []
    chunks = read_chunks(context.store, paths, lssn, numbers, at_once=_CHUNKS_AT_ONCE)
    async with aclosing(chunks):
        async for number, chunk in chunks:
            piece = front.of_chunk(number, chunk)
            pieces += [] if piece is None else [piece]
            if piece is None or piece.left is not None or _is_enough(pieces):
                return pieces
    piece = None if end is None else front.of_end(end)
    return pieces if piece is None else [*pieces, piece]


def _stays(
    head: LogHead, lssn: int, end: SegmentEnd, kept_from_ms: int | None, now_ms: int
) -> bool:
    if lssn == head.producers_lssn and now_ms - end.completed_ms < PRODUCERS_KEPT_MS:
        return True
    if kept_from_ms is not None and last_write_ms(end) >= kept_from_ms:
        return True
    return not _is_passed(head.first_active, lssn, end)


def _is_passed(first_active: tuple[int, int, int], lssn: int, end: SegmentEnd) -> bool:
    entries = end.chunked.plus(end.tail).entries
    return lssn < first_active[0] or first_active[1] >= entries


def _is_enough(pieces: list[Piece]) -> bool:
    """Return whether a step is as large as allowed: each extent may be in another ledger."""
    return sum(len(piece.extents) for piece in pieces) >= _EXTENTS_PER_STEP
