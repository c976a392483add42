"""Reads cold ledgers: each row group of an object becomes entries as bookies would return them.

The entries have the same records, with transaction ids and write times of their own, in bodies that
are made again: all that reads entries reads these.  They have no stamps of producers; the segment
with the last ones is never tiered.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeVar

from dlcore.base.background import side_tasks
from dlcore.base.errors import LedgerReadError, ObjectStoreError
from dlcore.ledger.port import ColdEntries

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from dlcore.ledger.metadata.values import LedgerMetadata, StoredObject
    from dlcore.log.cold.facts import ObjectFacts
    from dlcore.log.cold.objects import Objects
    from dlcore.log.cold.parquet import ObjectLayout
    from dlcore.wire.digest import BytesLike, EntryFrame

    Run = Callable[..., Awaitable[Any]]

T = TypeVar("T")

_LAYOUTS_KEPT_MAX = 256


async def here(work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of work, without a thread."""
    return work(*arguments)


class ColdLedgers(ColdEntries):
    """Cold ledgers of any namespace.

    Args:
        objects: the stores; by default those that obstore knows.
        run: runs what takes a CPU for some milliseconds, by default in a thread.
    """

    def __init__(self, objects: Objects | None = None, run: Run = asyncio.to_thread) -> None:
        self._objects = objects
        self.run = run
        self._layouts: OrderedDict[str, ObjectLayout] = OrderedDict()

    @property
    def objects(self) -> Objects:
        """The stores."""
        if self._objects is None:
            from dlcore.log.cold.stores import StoredObjects

            self._objects = StoredObjects()
        return self._objects

    async def read(
        self, ledger: LedgerMetadata, first_entry_id: int, last_entry_id: int
    ) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield entries in order, a row group at a time; the next one is fetched meanwhile."""
        async with side_tasks() as fetching:
            ahead: asyncio.Task[Sequence[EntryFrame]] | None = None
            next_entry_id = first_entry_id
            try:
                for stored, layout, number in [
                    each async for each in self._groups(ledger, first_entry_id, last_entry_id)
                ]:
                    before, ahead = (
                        ahead,
                        fetching.start(self._fetch(ledger, stored, layout, number)),
                    )
                    if before is not None:
                        frames = _within(await before, next_entry_id, last_entry_id)
                        next_entry_id += len(frames)
                        yield frames
                if ahead is not None:
                    frames = _within(await ahead, next_entry_id, last_entry_id)
                    next_entry_id += len(frames)
                    yield frames
                _require_end(next_entry_id, last_entry_id)
            except ObjectStoreError as error:
                raise LedgerReadError(
                    f"ledger {ledger.ledger_id} is cold, and its entries {first_entry_id} to "
                    f"{last_entry_id} cannot be read: {error}"
                ) from error

    async def _groups(
        self, ledger: LedgerMetadata, first: int, last: int
    ) -> AsyncGenerator[tuple[StoredObject, ObjectLayout, int], None]:
        """Yield the row groups that have some of the entries."""
        ends = [*(each.first_entry_id for each in ledger.objects[1:]), ledger.last_entry_id + 1]
        for stored, end in zip(ledger.objects, ends, strict=True):
            if stored.first_entry_id > last or end <= first:
                continue
            layout = await self.layout_of(f"{ledger.folder}/{stored.name}", stored.size_bytes)
            moved = stored.first_entry_id - layout.facts.first_entry
            for number, group in enumerate(layout.row_groups):
                if group.first_entry + moved <= last and group.last_entry + moved >= first:
                    yield stored, layout, number

    async def _fetch(
        self, ledger: LedgerMetadata, stored: StoredObject, layout: ObjectLayout, number: int
    ) -> Sequence[EntryFrame]:
        url = f"{ledger.folder}/{stored.name}"
        group = layout.row_groups[number]
        data = await self.objects.read(url, group.start, group.end)
        found: Sequence[EntryFrame] = await self.run(_frames, ledger, stored, layout, number, data)
        return found

    async def layout_of(self, url: str, size_bytes: int) -> ObjectLayout:
        """Return the layout of an object.

        Raises:
            ObjectStoreError: it is missing, damaged, or cannot be read now.
        """
        from dlcore.log.cold.parquet import TAIL_BYTES, ObjectLayout, footer_bytes

        found = self._layouts.get(url)
        if found is None:
            tail = await self.objects.read(url, max(0, size_bytes - TAIL_BYTES), size_bytes)
            needed = min(footer_bytes(tail, url), size_bytes)
            if needed > len(tail):
                tail = await self.objects.read(url, size_bytes - needed, size_bytes)
            found = self._layouts[url] = ObjectLayout(tail, size_bytes, url)
            if len(self._layouts) > _LAYOUTS_KEPT_MAX:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(url)
        return found

    async def facts_of(
        self, url: str, size_bytes: int, *, sent: BytesLike | None = None
    ) -> ObjectFacts:
        """Return what an object holds by its rows, all of which are read from the store now.

        With `sent` each byte of the object must be as it was sent, those of its footer, too.

        Raises:
            ObjectStoreError: it is missing, damaged, differs, or cannot be read now.
        """
        from dlcore.log.cold.parquet import FactsCounter, ObjectLayout

        self._layouts.pop(url, None)
        layout = (
            await self.layout_of(url, size_bytes)
            if sent is None
            else ObjectLayout(sent, size_bytes, url)
        )
        counter, end = FactsCounter(), 0
        for number, group in enumerate(layout.row_groups):
            data = await self._read_as_sent(url, end, group.end, sent)
            rows = memoryview(data)[group.start - end :]
            for entry in await self.run(layout.decode, number, rows):
                counter.add(entry)
            end = group.end
        await self._read_as_sent(url, end, size_bytes, sent)
        said = layout.facts
        facts = counter.facts((said.cluster_id, said.log_id, said.lssn), said.schema_id)
        if facts != said:
            raise ObjectStoreError(
                f"{url} holds {facts} by its rows, and says {said}", is_damaged=True
            )
        return facts

    async def _read_as_sent(
        self, url: str, start: int, end: int, sent: BytesLike | None
    ) -> BytesLike:
        data = await self.objects.read(url, start, end)
        if sent is not None and data != memoryview(sent)[start:end]:
            raise ObjectStoreError(
                f"{url} has other bytes from {start} to {end} than were sent", is_damaged=True
            )
        return data


def _within(frames: Sequence[EntryFrame], first: int, last: int) -> Sequence[EntryFrame]:
    """Return the frames from the entry `first` on, up to `last` at most, and without a gap."""
    found = [each for each in frames if first <= each.entry_id <= last]
    expected = range(first, first + len(found))
    if [each.entry_id for each in found] != [*expected]:
        raise ObjectStoreError(f"entries from {first} on are missing, or out of order")
    return found


def _require_end(next_entry_id: int, last_entry_id: int) -> None:
    if next_entry_id <= last_entry_id:
        raise ObjectStoreError(f"entry {next_entry_id} is in no object")


def _frames(
    ledger: LedgerMetadata, stored: StoredObject, layout: ObjectLayout, number: int, data: Any
) -> Sequence[EntryFrame]:
    from dlcore.log.entries.body import encode_entry
    from dlcore.log.entries.compression import Compressor
    from dlcore.wire.digest import EntryFrame

    facts, compressor = layout.facts, Compressor("none")
    frames = []
    for entry in layout.decode(number, data):
        txids = entry.batch.column(0)
        body = encode_entry(
            entry.batch,
            first_txid=txids[0].as_py(),
            last_txid=txids[-1].as_py(),
            # The extent of a cold ledger begins with its first entry.
            records_before=entry.sequence_id - facts.first_sequence_id + stored.records_before,
            write_time_ms=entry.timestamp_ms,
            compressor=compressor,
            schema_id=facts.schema_id,
        )
        whole = memoryview(b"".join(body))
        entry_id = stored.first_entry_id + entry.entry - facts.first_entry
        frames.append(EntryFrame(ledger.ledger_id, entry_id, entry_id, 0, whole, whole))
    return frames
