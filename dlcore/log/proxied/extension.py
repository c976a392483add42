"""Restores the producers of a log, and extends its writer for a proxy: stamps, and turns."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import InvalidEntryError, LedgerNotFoundError
from dlcore.log.entries.body import decode_entry_header, stamp_of
from dlcore.log.entries.stamp import Stamp, decode_stamp
from dlcore.log.metadata.history import LogHistory
from dlcore.log.proxied.turns_driver import TurnGiver

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Callable

    from dlcore.base.ids import DLSN
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.metadata.values import LogMetadata, VersionedHead
    from dlcore.log.proxied.producers import Producers
    from dlcore.log.writing.lock import WriterLock
    from dlcore.log.writing.port import PausableWriter


class ProxyExtension:
    """Extends one writer: its entries have stamps of `producers`, and appends get turns."""

    def __init__(self, producers: Producers[asyncio.Future[DLSN]]) -> None:
        self.stamper = producers
        self._turns: TurnGiver | None = None  # once there is a writer with a lock

    async def restore(self, context: LogContext, at: VersionedHead) -> None:
        """Restore the producers from a log whose head is `at` and has no open extent.

        Raises: as `restore_producers`.
        """
        await restore_producers(context, at, self.stamper)

    def attend(
        self, context: LogContext, log: LogMetadata, lock: WriterLock, writer: PausableWriter
    ) -> TurnGiver:
        """Give turns to appends until the writer is closed."""
        self._turns = TurnGiver(context, log, lock, writer)
        return self._turns

    def tell_when_wanted(self, on_wanted: Callable[[str], None]) -> None:
        """Call `on_wanted` once another writer waits for the lock of the log, if there is one."""
        if self._turns is not None:
            self._turns.tell_when_wanted(on_wanted)


async def restore_producers(
    context: LogContext, at: VersionedHead, producers: Producers[Any]
) -> None:
    """Restore `producers` from a log whose head is `at` and has no open extent.

    It reads the last stamped entry, and all entries after the snapshot that this one names.

    Raises:
        InvalidEntryError: the stamp of an entry is impossible.
        LedgerReadError, MetadataError: the stamps cannot be read now.
    """
    lssn = at.head.producers_lssn
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
