"""Keeps the tables of logs up to date: performs what `TableCommits` decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, assert_never

from dlcore.base.background import all_of
from dlcore.base.errors import CorruptMetadataError, LogNotFoundError, ObjectStoreError, TableError
from dlcore.base.machines import run_to_end
from dlcore.log.cold.delta_log import DeltaState
from dlcore.log.cold.files_kept import FilesKept
from dlcore.log.cold.table_format import CHECKPOINT_EVERY, AddedFile, app_id_of, boundary_of
from dlcore.log.cold.tables import form_of, table_at
from dlcore.log.metadata.history import ChunkMissingError
from dlcore.log.upkeep.removal import read_moved
from dlcore.ops.upkeep.rewriting import SegmentRewriter
from dlcore.ops.upkeep.table_commits import (
    BEGINNING,
    COMPARED_PER_RUN_MAX,
    FILES_PER_COMMIT_MAX,
    AddFields,
    Chain,
    ChainRead,
    Commit,
    Create,
    Followed,
    Look,
    Looked,
    ObjectAt,
    ReadChain,
    Signal,
    TableCommits,
    Tidy,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.log.cold.table_format import Field, Place, TableForm
    from dlcore.log.cold.tables import LogTable
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import LogKey, VersionedHead
    from dlcore.ops.upkeep.table_commits import Event, Work

logger = logging.getLogger(__name__)


class ChainReader(SegmentRewriter):
    """Reads the cold parts of the chains of any logs: the objects that their tables may have."""

    async def read_chain(self, log: LogKey, url: str, form: TableForm, start: Place) -> Chain:
        """Return a part of the cold part of a log from a place on, whose objects are below a URL.

        Fields are those of the table's format.

        Raises:
            LogNotFoundError: the log was deleted.
            TableError: an object is elsewhere.
        """
        fields = await self._fields_of(log, form)
        at = await self._context.logs.read(log)
        while True:
            try:
                return await self._walk(at, url, start, fields)
            except ChunkMissingError as error:
                at = await read_moved(self._context, at, error)

    async def _fields_of(self, log: LogKey, form: TableForm) -> tuple[Field, ...]:
        from dlcore.log.cold.parquet import columns_of_object

        found = await self._context.logs.find_again(log)
        (schema,) = await self._context.logs.read_schemas([found])
        return form.fields_of(columns_of_object(schema, 0 if schema is None else schema.latest_id))

    async def _walk(
        self, at: VersionedHead, url: str, start: Place, fields: tuple[Field, ...]
    ) -> Chain:
        head = at.head
        first: Place = head.first_active[:2]
        start = max(start, first)
        end, objects, goes_on = first, list[ObjectAt](), False
        for lssn in range(start[0], head.max_lssn + (head.segment is None)):
            if len(objects) >= FILES_PER_COMMIT_MAX:
                goes_on = True  # perhaps by nothing that is cold
                break
            found = await self._cold_part(at, lssn)
            if found is None:
                continue
            ledgers, end_entry, is_whole = found
            end = max(end, (lssn, end_entry))
            for base, extent, ledger in ledgers:
                held = _objects_of(ledger, extent, f"{url}/{lssn}", (lssn, base))
                objects += [each for each in held if each.end > start]
            if not is_whole:
                break
        return Chain(first, end, tuple(objects), fields, goes_on=goes_on)

    async def _cold_part(
        self, at: VersionedHead, lssn: int
    ) -> tuple[list[tuple[int, Extent, LedgerMetadata]], int, bool] | None:
        """Return a segment's extents with their ledgers up to one that is not cold.

        Each has its first entry in the segment.  Also returned are the entry after these, and
        whether that is all of the segment.  None: it is being removed.

        Raises:
            ChunkMissingError: the log has changed meanwhile.
        """
        stored = await self._read_segment(at, lssn)
        if stored is None or stored.end is None:
            if lssn <= at.head.first_active[0]:
                return None
            raise ChunkMissingError(f"segment {lssn} is not as its head says")
        parts: list[tuple[int, Extent]] = []
        base = stored.first_entry_id
        for extent in stored.extents:
            if not extent.is_cold:
                break
            parts.append((base, extent))
            base += extent.entry_count
        found = await self._context.ledger_store.read_many([each.ledger_id for _, each in parts])
        ledgers = []
        for first, extent in parts:
            ledger = found.get(extent.ledger_id)
            if ledger is None:
                raise ChunkMissingError(f"ledger {extent.ledger_id} of segment {lssn} is gone")
            if isinstance(ledger, CorruptMetadataError):
                raise ledger
            ledgers.append((first, extent, ledger))
        return ledgers, base, len(parts) == len(stored.extents)


def _objects_of(
    ledger: LedgerMetadata, extent: Extent, folder: str, start: Place
) -> list[ObjectAt]:
    if ledger.folder != folder:
        raise TableError(
            f"segment {start[0]} has its objects in {ledger.folder}, and the table can only name "
            f"those in {folder}; to do: set `tier` as it was, or unset `table`"
        )
    lssn, base = start
    objects = ledger.objects
    entries = [*(each.first_entry_id for each in objects[1:]), ledger.last_entry_id + 1]
    records = [*(each.records_before for each in objects[1:]), extent.record_count]
    return [
        ObjectAt(
            name=f"{lssn}/{each.name}",
            size_bytes=each.size_bytes,
            start=(lssn, base + each.first_entry_id),
            end=(lssn, base + entry),
            records=record - each.records_before,
        )
        for each, entry, record in zip(objects, entries, records, strict=True)
    ]


_TABLES_KNOWN_MAX = 100_000
_FOOTERS_AT_ONCE = 8


class _Seen(NamedTuple):
    """A table: as it was seen last, and the comparison of its files that began last.

    `compared` is up to where it has come; None: to the end.
    """

    followed: Followed | None
    began_s: float
    compared: Place | None


class TableKeeper:
    """Keeps the tables of any logs, one after the other.

    Args:
        context: the namespace's adapters.
        owner: the node that shows that this process lives.
        compare_every_s: how often all files of a table are compared with the chain.
        checkpoint_every: of how many commits one is followed by a checkpoint.
        compare_max: how many files are compared each time that a table follows.
    """

    def __init__(
        self,
        context: LogContext,
        owner: StagingOwner,
        *,
        compare_every_s: float,
        checkpoint_every: int = CHECKPOINT_EVERY,
        compare_max: int = COMPARED_PER_RUN_MAX,
    ) -> None:
        self._context = context
        self._chains = ChainReader(context, owner)
        self._compare_every_s = compare_every_s
        self._checkpoint_every = checkpoint_every
        self._compare_max = compare_max
        self._seen: OrderedDict[str, _Seen] = OrderedDict()  # by log id
        self._kept = FilesKept[DeltaState]()

    async def follow(self, log: LogKey) -> bool:
        """Let the table of a log have what is cold; return whether it was looked at.

        Raises:
            TableError: the table is ahead of the log, or is not this log's alone.
            UnsupportedError: the log has a column that tables cannot have, or not any more.
            DLError: the store or the metadata did not answer; nothing is lost.
        """
        context = self._context
        with contextlib.suppress(LogNotFoundError):
            at, settings = await context.logs.open(log)
            if settings.table is None or settings.tier_url is None:
                return False
            form = form_of(settings.table)
            app_id = app_id_of(context.cluster_id, log.log_id)
            url = f"{settings.tier_url}/{app_id}"
            seen = self._recall(log, url)
            table = table_at(form, url, app_id, context.cold.objects, self._kept)
            machine = TableCommits(
                app_id,
                form,
                checkpoint_every=self._checkpoint_every,
                known=seen.followed,
                compared=seen.compared,
                compare_max=self._compare_max,
            )
            job = _Job(context, self._chains, at.log, form, table)
            try:
                looked = await run_to_end(machine, Signal.BEGIN, job.answer_of)
            except ObjectStoreError:  # what was compared needs not be compared again
                self._keep(log, _Seen(None, seen.began_s, machine.compared))
                raise
            if machine.followed is not None:
                self._keep(log, _Seen(machine.followed, seen.began_s, machine.compared))
            return looked
        return False

    def is_comparing(self, log: LogKey) -> bool:
        """Return whether more files of a table are to be compared soon."""
        seen = self._seen.get(log.log_id)
        return seen is not None and seen.compared is not None

    def _recall(self, log: LogKey, url: str) -> _Seen:
        """Return the table of a log as it was seen last, or one of which nothing was compared."""
        now_s = asyncio.get_running_loop().time()
        seen = self._seen.pop(log.log_id, None)
        if seen is not None and (
            seen.compared is not None or seen.began_s + self._compare_every_s > now_s
        ):
            return seen
        self._kept.forget(url)  # what is compared is what is stored
        return _Seen(None, now_s, BEGINNING)

    def _keep(self, log: LogKey, seen: _Seen) -> None:
        self._seen[log.log_id] = seen
        if len(self._seen) > _TABLES_KNOWN_MAX:
            self._seen.popitem(last=False)


class _Job:
    """The driver of one machine."""

    def __init__(
        self,
        context: LogContext,
        chains: ChainReader,
        log: LogKey,
        form: TableForm,
        table: LogTable,
    ) -> None:
        self._context = context
        self._chains = chains
        self._log = log
        self._form = form
        self._table = table
        self._url = table.url

    async def answer_of(self, work: Work) -> Event:
        """Do a work of the machine."""
        match work:
            case Look():
                seen = await self._table.look()
                return Signal.NO_TABLE if seen is None else Looked(seen)
            case ReadChain(start):
                chain = await self._chains.read_chain(self._log, self._url, self._form, start)
                return ChainRead(chain)
            case Create(fields, adds, position):
                await self._table.create(self._log.name, fields, await self._added(adds), position)
                self._tell(f"made it of {len(adds)} files up to {boundary_of(position)}")
            case AddFields(fields, position):
                await self._table.add_fields(fields, position)
                self._tell(f"added columns {', '.join(each['name'] for each in fields)}")
            case Commit(adds, removes, position, is_same):
                await self._table.commit(
                    await self._added(adds),
                    removes,
                    position,
                    now_ms=self._context.clock.now_ms(),
                    data_change=not is_same,
                )
                self._tell(
                    f"added {len(adds)} files and removed {len(removes)}, up to "
                    f"{boundary_of(position)}"
                )
            case Tidy():
                await self._table.tidy()
            case _:
                assert_never(work)
        return Signal.DONE

    def _tell(self, what: str) -> None:
        logger.info("table of log=%s in=%s: %s", self._log.name, self._url, what)

    async def _added(self, objects: Sequence[ObjectAt]) -> Sequence[AddedFile]:
        limit = asyncio.Semaphore(_FOOTERS_AT_ONCE)

        async def read(each: ObjectAt) -> AddedFile:
            async with limit:
                return await self._added_file(each)

        return await all_of(*map(read, objects))

    async def _added_file(self, found: ObjectAt) -> AddedFile:
        """Return an object as a file of the table, with its footer."""
        url = f"{self._url}/{found.name}"
        layout = await self._context.cold.layout_of(url, found.size_bytes)
        facts = layout.facts
        held = (facts.log_id, facts.lssn, facts.first_entry, facts.entries, facts.records)
        entries = found.end[1] - found.start[1]
        if held != (self._log.log_id, *found.start, entries, found.records):
            raise CorruptMetadataError(
                f"{url} says that it holds {facts}, and the log's chain that it holds {entries} "
                f"entries with {found.records} records from {boundary_of(found.start)} on"
            )
        now_ms = self._context.clock.now_ms()
        return AddedFile(found.name, found.size_bytes, now_ms, layout.metadata, found.end[1])
