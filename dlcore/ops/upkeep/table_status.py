"""The table of a log for people: where it is, how far it is, and its versions by positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.errors import TableError
from dlcore.log.cold.delta_format import DELTA
from dlcore.log.cold.table_format import app_id_of, boundary_of
from dlcore.log.cold.tables import form_of, table_at

if TYPE_CHECKING:
    from dlcore.base.ids import DLSN
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogKey


class TableStatus(NamedTuple):
    """A table at its newest version; `end` is the first position that it does not have."""

    form: str
    url: str
    version: int
    end: DLSN
    files: int
    records: int
    size_bytes: int


class TableReader:
    """Reads about the table of one log; `kind` is the log's setting `table`, or what it was.

    Raises:
        TableError: the log has no setting `tier`, and therefore no table.
    """

    def __init__(
        self, context: LogContext, log: LogKey, tier: str | None, kind: str | None
    ) -> None:
        if tier is None:
            raise TableError(f"log {log.name!r} has no setting `tier`, and no table")
        app_id = app_id_of(context.cluster_id, log.log_id)
        self._context = context
        self._name = log.name
        self.url = f"{tier}/{app_id}"
        self._form = DELTA if kind is None else form_of(kind)
        self._table = table_at(self._form, self.url, app_id, context.cold.objects)

    @classmethod
    async def of(cls, context: LogContext, name: str) -> TableReader:
        """Return one for the log of a name."""
        log = await context.logs.find(name)
        settings = await context.logs.read_settings(log)
        return cls(context, log, settings.tier_url, settings.table)

    async def status(self) -> TableStatus:
        """Return how the table is.

        Raises:
            TableError: there is none, or it is not this log's alone.
            ObjectStoreError: it cannot be read now.
        """
        seen = await self._table.look()
        # One that was registered in a catalog, and has no commit yet, is none.
        is_empty = seen is not None and not seen.version and not seen.files
        if seen is None or seen.position is None or is_empty:
            raise TableError(
                f"log {self._name!r} has no table in {self.url}: its first cold segment makes "
                "one, if the log has the setting `table`"
            )
        return TableStatus(
            form=self._form.kind,
            url=self.url,
            version=seen.known_as,
            end=boundary_of(seen.position),
            files=len(seen.files),
            records=sum(each.records for each in seen.files),
            size_bytes=sum(each.size_bytes for each in seen.files),
        )

    async def end_of(self, version: int) -> DLSN:
        """Return the first position that a version does not have.

        Raises:
            TableError: it has nothing of this log.
            ObjectStoreError: there is no such version any more, or it cannot be read now.
        """
        position = await self._table.position_at(version)
        if position is None:
            raise TableError(f"version {version} of the table in {self.url} has no position")
        return boundary_of(position)

    async def version_with(self, dlsn: DLSN) -> int:
        """Return the first version that can be read and has all records before a position.

        Raises:
            TableError: the table does not have them yet.
            ObjectStoreError: it cannot be read now.
        """
        place = (dlsn.lssn, dlsn.entry_id + (dlsn.slot_id > 0))
        return await self._table.version_with(place)
