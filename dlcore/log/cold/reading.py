"""Reads cold ledgers: each row group of an object becomes entries as bookies would return them.

The entries have the same records, with transaction ids and write times of their own, in bodies that
are made again: all that reads entries reads these.  They have no stamps of producers; the segment
with the last ones is never tiered.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dlcore.base.background import fulfil, side_tasks, together
from dlcore.base.config import LedgerClientConfig
from dlcore.base.errors import LedgerReadError, ObjectStoreError
from dlcore.ledger.port import ColdEntries
from dlcore.log.cold.budget import Part, ReadBudget

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from dlcore.ledger.metadata.values import LedgerMetadata, StoredObject
    from dlcore.log.cold.facts import ObjectFacts
    from dlcore.log.cold.objects import Objects
    from dlcore.log.cold.parquet import ObjectLayout, RowGroup
    from dlcore.wire.frames import BytesLike, EntryFrame

    Run = Callable[..., Awaitable[Any]]

T = TypeVar("T")

_LAYOUTS_KEPT_MAX = 256


async def here(work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of work, without a thread."""
    return work(*arguments)


def _in_threads(count: int, name: str) -> Run:
    """Return what runs work in so many threads, which begin when they are needed."""
    threads = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, partial(work, *arguments, **named))

    return run


class _Group(NamedTuple):
    """A row group of an object of a ledger."""

    stored: StoredObject
    layout: ObjectLayout
    number: int

    @property
    def group(self) -> RowGroup:
        """Its entries and its place."""
        return self.layout.row_groups[self.number]


class ColdLedgers(ColdEntries):
    """Cold ledgers of any namespace; all that read them share one budget.

    Args:
        objects: the stores; by default those that obstore knows.
        run: runs what takes a CPU for some milliseconds, by default in one thread: Python code of
            several would keep the event loop waiting, and with it all that is written.
        config: how much is read at the same time.
    """

    def __init__(
        self,
        objects: Objects | None = None,
        run: Run | None = None,
        *,
        config: LedgerClientConfig | None = None,
    ) -> None:
        self._config = config or LedgerClientConfig()
        self._objects = objects
        self.run: Run = run or _in_threads(1, "dlog-cold-decoding")
        self._layouts: OrderedDict[str, ObjectLayout] = OrderedDict()
        self._budget = ReadBudget(
            reads_at_once=self._config.cold_reads_at_once,
            bytes_max=self._config.cold_read_bytes,
        )
        self._granted: dict[Part, asyncio.Future[None]] = {}  # of parts that wait

    @property
    def objects(self) -> Objects:
        """The stores."""
        if self._objects is None:
            from dlcore.log.cold.stores import StoredObjects

            # Threads of their own: waiting for a store keeps no other work from those of all.
            run = _in_threads(self._config.cold_reads_at_once, "dlog-cold-reading")
            self._objects = StoredObjects(run)
        return self._objects

    async def read(
        self, ledger: LedgerMetadata, first_entry_id: int, last_entry_id: int
    ) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield entries in order, a row group at a time; the next ones are read meanwhile."""
        next_entry_id = first_entry_id
        ahead: deque[tuple[Part, asyncio.Task[Sequence[EntryFrame]]]] = deque()
        async with side_tasks() as fetching:
            try:
                groups = await self._groups(ledger, first_entry_id, last_entry_id)
                while groups or ahead:
                    if not ahead:
                        part, at = groups.popleft()
                        turn = self._want(part)
                        ahead.append((part, fetching.start(self._fetch(part, ledger, at, turn))))
                    while groups and self._budget.ahead(groups[0][0]):
                        part, at = groups.popleft()
                        ahead.append((part, fetching.start(self._fetch(part, ledger, at))))
                    part, task = ahead[0]
                    frames = _within(await task, next_entry_id, last_entry_id)
                    ahead.popleft()
                    self._grant(self._budget.give_back(part))
                    next_entry_id += len(frames)
                    yield frames
                _require_end(next_entry_id, last_entry_id)
            except ObjectStoreError as error:
                raise LedgerReadError(
                    f"ledger {ledger.ledger_id} is cold, and its entries {first_entry_id} to "
                    f"{last_entry_id} cannot be read: {error}"
                ) from error
            finally:
                for part, _ in ahead:
                    self._granted.pop(part, None)
                    self._grant(self._budget.give_back(part))

    def _grant(self, parts: Sequence[Part]) -> None:
        for part in parts:
            granted = self._granted.pop(part, None)
            if granted is not None:
                fulfil(granted, None)

    def _want(self, part: Part) -> asyncio.Future[None]:
        """Ask for a part whose reader waits; the future is done when it is its turn."""
        granted = self._granted[part] = asyncio.get_running_loop().create_future()
        self._grant(self._budget.want(part))
        return granted

    async def _groups(
        self, ledger: LedgerMetadata, first: int, last: int
    ) -> deque[tuple[Part, _Group]]:
        """Return the row groups that have some of the entries, of all objects."""
        ends = [*(each.first_entry_id for each in ledger.objects[1:]), ledger.last_entry_id + 1]
        wanted = [
            stored
            for stored, end in zip(ledger.objects, ends, strict=True)
            if stored.first_entry_id <= last and end > first
        ]
        layouts = await together(
            *(self.layout_of(f"{ledger.folder}/{each.name}", each.size_bytes) for each in wanted)
        )
        reader = object()
        found: deque[tuple[Part, _Group]] = deque()
        for stored, layout in zip(wanted, layouts, strict=True):
            moved = stored.first_entry_id - layout.facts.first_entry
            for number, group in enumerate(layout.row_groups):
                if group.first_entry + moved <= last and group.last_entry + moved >= first:
                    part = Part(reader, group.memory_bytes)
                    found.append((part, _Group(stored, layout, number)))
        return found

    async def _fetch(
        self,
        part: Part,
        ledger: LedgerMetadata,
        at: _Group,
        turn: asyncio.Future[None] | None = None,
    ) -> Sequence[EntryFrame]:
        """Return the entries of a row group, read when it is its turn, if it has to wait."""
        if turn is not None:
            await turn
        url = f"{ledger.folder}/{at.stored.name}"
        try:
            data = await self.objects.read(url, at.group.start, at.group.end)
            found: Sequence[EntryFrame] = await self.run(_frames, ledger, at, data)
        finally:
            self._grant(self._budget.read(part))
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

        # A layout that was kept must not stand in for the object that the store has now.
        self._layouts.pop(url, None)
        layout = (
            await self.layout_of(url, size_bytes)
            if sent is None
            else ObjectLayout(sent, size_bytes, url)
        )
        counter, end = FactsCounter(), 0
        for number, group in enumerate(layout.row_groups):
            # From the end of the group before, so that no byte of the object stays unread.
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
    if not found or [each.entry_id for each in found] != [*expected]:
        raise ObjectStoreError(f"entries from {first} on are missing, or out of order")
    return found


def _require_end(next_entry_id: int, last_entry_id: int) -> None:
    if next_entry_id <= last_entry_id:
        raise ObjectStoreError(f"entry {next_entry_id} is in no object")


def _frames(ledger: LedgerMetadata, at: _Group, data: BytesLike) -> Sequence[EntryFrame]:
    from dlcore.log.entries.body import Compressor, encode_entry
    from dlcore.wire.frames import EntryFrame

    stored, facts, compressor = at.stored, at.layout.facts, Compressor("none")
    frames = []
    for entry in at.layout.decode(at.number, data):
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
