"""Keeps the tables of logs up to date: performs what `TableCommits` decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, assert_never

from dlcore.base.background import all_of
from dlcore.base.errors import CorruptMetadataError, LogNotFoundError, ObjectStoreError
from dlcore.base.steps import run_to_end
from dlcore.log.cold.delta_log import DeltaState
from dlcore.log.cold.files_kept import FilesKept
from dlcore.log.cold.table_format import CHECKPOINT_EVERY, AddedFile, app_id_of, boundary_of
from dlcore.log.cold.tables import form_of, table_at
from dlcore.ops.upkeep.table_chain import ChainReader
from dlcore.ops.upkeep.table_commits import (
    BEGINNING,
    COMPARED_PER_RUN_MAX,
    AddFields,
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

    from dlcore.log.cold.table_format import Place, TableForm
    from dlcore.log.cold.tables import LogTable
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.log.metadata.values import LogKey
    from dlcore.ops.upkeep.table_commits import Event, Work

logger = logging.getLogger(__name__)

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
