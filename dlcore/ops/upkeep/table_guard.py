"""Keeps a sweep from objects that a table names, or may still add.

Order and proof.  Truncation takes records out of the log at once, and with them the ledger that
names their objects.  The table follows by a commit that removes the files, and moves its position
beyond them.  The sweep deletes an object of a log with a table only if no ledger names it, the
table at its newest version does not name it, and the table's position is in a later segment.  A
commit that would add it later was decided by a look before that version, and is refused for that.
Therefore no version that is the newest at any time names an object that was deleted.  While there
is no table yet, or it cannot be read, all objects of the log stay.

Older versions of the table may name such objects: a reader of one fails, and finds no wrong rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.log.cold.delta_tables import DeltaTables
from dlcore.log.cold.table_format import app_id_of, segment_of
from dlcore.log.metadata.store import persistently
from dlcore.log.metadata.values import LogKey

if TYPE_CHECKING:
    from dlcore.base.isolating import Troubles
    from dlcore.log.cold.table_format import TableSeen
    from dlcore.log.context import LogContext

_LOG = "_delta_log"


class TableGuard:
    """Decides on objects below one folder of a cluster, for one sweep.

    Args:
        context: the namespace's adapters.
        folder: a tier's folder of the cluster, whose folders are those of logs.
        troubles: notes tables that cannot be read.
    """

    def __init__(self, context: LogContext, folder: str, troubles: Troubles) -> None:
        self._context = context
        self._folder = folder
        self._troubles = troubles
        self._tables: dict[str, _Table] = {}

    async def keeps(self, url: str) -> bool:
        """Return whether an object that no ledger names must stay for now."""
        log_id, _, name = url.removeprefix(f"{self._folder}/").partition("/")
        if log_id not in self._tables:
            self._tables = {log_id: _Table(None, follows=True)}  # a list has a log's in a row
            with self._troubles.isolated(f"the table of the log with id {log_id}"):
                self._tables = {log_id: await self._read(log_id)}
        return self._tables[log_id].keeps(name)

    async def _read(self, log_id: str) -> _Table:
        context = self._context
        url = f"{self._folder}/{log_id}"
        paths = context.paths.log_of(log_id)
        head, node = await persistently(
            lambda: context.store.get_many([paths.head, paths.settings], fresh=True)
        )
        has_log = await self._has_log(url)
        if head is None:  # the log was deleted, and so is its table, before the files go
            if has_log:
                await self._delete_log(url)
            return _Table(None, follows=False)
        log = LogKey(name=f"of id {log_id}", log_id=log_id)
        follows = context.logs.settings_of(log, node).table is not None
        app_id = app_id_of(context.cluster_id, log_id)
        seen = await DeltaTables(url, app_id).look() if has_log else None
        return _Table(seen, follows=follows)

    async def _has_log(self, url: str) -> bool:
        async for page in self._context.cold.objects.list_below(f"{url}/{_LOG}"):
            if page:
                return True
        return False

    async def _delete_log(self, url: str) -> None:
        objects = self._context.cold.objects
        found = [each.url async for page in objects.list_below(f"{url}/{_LOG}") for each in page]
        for each in found:
            await objects.delete(each)


class _Table:
    """The claims of a table on objects."""

    def __init__(self, seen: TableSeen | None, *, follows: bool) -> None:
        self._names = set() if seen is None else {each.name for each in seen.files}
        self._follows = follows
        self._lssn = 0 if seen is None or seen.position is None else seen.position[0]

    def keeps(self, name: str) -> bool:
        lssn = segment_of(name)
        return name in self._names or (self._follows and (lssn is None or lssn >= self._lssn))
