"""Keeps a sweep from objects that a table names, or may still add.

Order and proof.  Truncation takes records out of the log at once, and with them the ledger that
names their objects.  The table follows by a commit that removes the files, and moves its position
beyond them.  The sweep deletes an object of a log with a table only if no ledger names it, the
table at its newest version does not name it, and the table's position is in a later segment.  A
commit that would add it later was decided by a look before that version, and is refused for that.
Therefore no version that is the newest at any time names an object that was deleted.  While there
is no table yet, or it cannot be read, all objects of the log stay.

One case is left to time: a commit that names an object in the place of one with the same records,
by a worker that stood still until its records were truncated, or yet another one had taken its
place in the chain.  A sweep deletes no object that is younger than a day, and the next comparison
mends the table.

Older versions of the table may name such objects: a reader of one fails, and finds no wrong rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.log.cold.table_format import app_id_of, segment_of
from dlcore.log.cold.tables import forms_in, table_at
from dlcore.log.metadata.values import LogKey
from dlcore.metadata.one_node import persistently

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.isolating import Troubles
    from dlcore.log.cold.table_format import TableSeen
    from dlcore.log.context import LogContext


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
            self._tables = {log_id: _Table((), None, follows=True)}  # a list has a log's in a row
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
        app_id = app_id_of(context.cluster_id, log_id)
        found = await forms_in(context.cold.objects, url)
        tables = {each.kind: table_at(each, url, app_id, context.cold.objects) for each in found}
        if head is None:  # the log was deleted, and so are its tables, before the files go
            for table in tables.values():
                await table.drop()
            return _Table((), None, follows=False)
        log = LogKey(name=f"of id {log_id}", log_id=log_id)
        kind = context.logs.settings_of(log, node).table
        seen = {each: await table.look() for each, table in tables.items()}
        there = [each for each in seen.values() if each is not None]
        return _Table(there, seen.get(kind or ""), follows=kind is not None)


class _Table:
    """The claims of tables on objects: of all that there are, and of the one that follows."""

    def __init__(
        self, tables: Sequence[TableSeen], following: TableSeen | None, *, follows: bool
    ) -> None:
        self._names = {file.name for each in tables for file in each.files}
        self._follows = follows
        reached = None if following is None else following.position
        self._lssn = 0 if reached is None else reached[0]

    def keeps(self, name: str) -> bool:
        lssn = segment_of(name)
        return name in self._names or (self._follows and (lssn is None or lssn >= self._lssn))
