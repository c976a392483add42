"""Creates the writer of a locked log, after recovery and with the state that it needs."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import ConfigurationError, InvalidEntryError, LedgerNotFoundError
from dlcore.log.entries.body import decode_entry_header, stamp_of
from dlcore.log.entries.stamp import Stamp, decode_stamp
from dlcore.log.metadata.changes import require_unsealed
from dlcore.log.metadata.history import LogHistory
from dlcore.log.recovery import recover_log
from dlcore.log.writing.typed import DirectTypedWriter
from dlcore.log.writing.writer import DirectWriter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from dlcore.base.config import LogConfig
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.metadata.values import LogMetadata, VersionedHead
    from dlcore.log.writing.lock import WriterLock
    from dlcore.log.writing.producers import Producers


_OWN_METADATA = {"log", "log_id"}
_LEDGER_METADATA_BYTES_MAX = 4096


def checked_metadata(given: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata that an application wants stored with each ledger of its writer.

    Raises:
        ConfigurationError: it has keys that dlog itself uses, or is too large.
    """
    if taken := _OWN_METADATA & given.keys():
        raise ConfigurationError(
            f"ledger_metadata: {sorted(taken)} are keys that dlog sets itself: expected others"
        )
    size = sum(len(text.encode()) for text in (*given, *given.values()))
    if size > _LEDGER_METADATA_BYTES_MAX:
        raise ConfigurationError(
            f"ledger_metadata: {size} bytes of keys and values, expected at most "
            f"{_LEDGER_METADATA_BYTES_MAX}, because each ledger stores them"
        )
    return dict(given)


async def open_locked(
    context: LogContext,
    log: LogMetadata,
    lock: WriterLock | None,
    config: LogConfig,
    ledger_metadata: Mapping[str, str],
    producers: Producers[Any] | None,
) -> DirectWriter:
    """Recover a dead writer's segment of a log whose lock is held, and return the writer.

    `producers`, if given, are restored from the log.

    Raises:
        EndOfStreamError: it is sealed.
        LedgerRecoveryError, LedgerReadError, MetadataError: the state cannot be found now.
    """
    # Read under the lock: another writer may have changed the log since it was opened.
    at, settings = await context.logs.open(log)
    (schema,) = await context.logs.read_schemas([log])
    at = await recover_log(context, at)
    require_unsealed(at)  # the owner before us may have sealed it when it released the lock
    await restore_producers(context, at, producers)
    state = context, log, at, lock, config, settings, ledger_metadata, producers
    if schema is None:
        return DirectWriter(*state)
    return DirectTypedWriter(*state, schema=schema)


async def restore_producers(
    context: LogContext, at: VersionedHead, producers: Producers[Any] | None
) -> None:
    """Restore `producers`, if any, from a log whose head is `at` and has no open extent.

    It reads the last stamped entry, and all entries after the snapshot that this one names.

    Raises:
        InvalidEntryError: the stamp of an entry is impossible.
        LedgerReadError, MetadataError: the stamps cannot be read now.
    """
    lssn = 0 if producers is None else at.head.producers_lssn
    while lssn:
        history = LogHistory(context.logs, at.log, keeps_truncated=True)
        segment = (await history.state_of(at, from_lssn=lssn, count=1)).segment(lssn)
        if segment is None:
            return  # it is so old that all its producers are forgotten
        last = (at.head.producers_entries or segment.closed_entry_count) - 1
        try:
            found = await _stamps_of(context, segment, last)
        except LedgerNotFoundError:
            # A merge may have moved its entries to another ledger.  It changes the head: with the
            # same head the ledger is really lost.
            known, at = at, await context.logs.read(at.log)
            if at.version == known.version:
                raise
            continue
        assert producers is not None
        for entry_id, (stamp, written_ms) in enumerate(found, found[-1][0].snapshot):
            producers.restore(stamp, lssn=lssn, entry_id=entry_id, written_ms=written_ms)
        return


async def _stamps_of(
    context: LogContext, segment: LogSegment, last: int
) -> list[tuple[Stamp, int]]:
    """Return the stamps from the newest snapshot up to the last one, with their times."""
    (end,) = [each async for each in _stamps_from(context, segment, last, last)]
    if end[0].snapshot == last:
        return [end]
    return [each async for each in _stamps_from(context, segment, end[0].snapshot, last)]


async def _stamps_from(
    context: LogContext, segment: LogSegment, entry_id: int, last: int
) -> AsyncGenerator[tuple[Stamp, int], None]:
    while entry_id <= last:
        found = segment.find(entry_id)
        assert found is not None
        extent, base, _ = found
        assert extent.last_entry_id is not None
        moved = extent.first_entry_id - base
        end = min(moved + last, extent.last_entry_id)
        reader = await context.ledgers.open_ledger(extent.ledger_id)
        async with aclosing(reader.read(moved + entry_id, end)) as chunks:
            async for frames in chunks:
                for frame in frames:
                    header = decode_entry_header(frame.body)
                    if not header.stamp_bytes:
                        raise InvalidEntryError(
                            f"entry {entry_id} of segment {segment.lssn} has no stamp, and follows "
                            "one that has"
                        )
                    yield decode_stamp(stamp_of(frame.body, header)), header.write_time_ms
                    entry_id += 1
