"""The table of a log for people: where it is, how far it is, and its versions by positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.errors import TableError
from dlcore.log.cold.table_format import app_id_of, boundary_of
from dlcore.log.cold.tables import form_of, forms_in, table_at

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

    def __init__(self, context: LogContext, log: LogKey, tier: str | None, kind: str) -> None:
        app_id = app_id_of(context.cluster_id, log.log_id)
        self._context = context
        self._name = log.name
        self.url = _folder(log, tier, app_id)
        self._form = form_of(kind)
        self._table = table_at(self._form, self.url, app_id, context.cold.objects)

    @classmethod
    async def of(cls, context: LogContext, name: str) -> TableReader:
        """Return one for the log of a name; without the setting `table`, for what is left of it.

        Raises:
            TableError: there is no table, or without the setting one of each format.
            ObjectStoreError: the store does not answer.
        """
        log = await context.logs.find(name)
        settings = await context.logs.read_settings(log)
        kind = settings.table or await _kind_left(context, log, settings.tier_url)
        return cls(context, log, settings.tier_url, kind)

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
            raise _no_table(self._name, self.url)
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
            TableError: there is no such version, or not any more; or it has nothing of this log.
            ObjectStoreError: it cannot be read now.
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


def _folder(log: LogKey, tier: str | None, app_id: str) -> str:
    if tier is None:
        raise TableError(f"log {log.name!r} has no setting `tier`, and no table")
    return f"{tier}/{app_id}"


def _no_table(name: str, url: str) -> TableError:
    return TableError(
        f"log {name!r} has no table in {url}: its first cold segment makes one, if the log has "
        "the setting `table`; dlog autorecovery status says what keeps a worker from it"
    )


async def _kind_left(context: LogContext, log: LogKey, tier: str | None) -> str:
    """Return the format of the table that a log has without the setting."""
    url = _folder(log, tier, app_id_of(context.cluster_id, log.log_id))
    found = await forms_in(context.cold.objects, url)
    if not found:
        raise _no_table(log.name, url)
    if len(found) > 1:
        ways = "; or ".join(f"for {form.kind}, {form.away}" for form in found)
        raise TableError(
            f"log {log.name!r} has no setting `table`, and {len(found)} tables in {url}; to see "
            f"one, {ways}"
        )
    return found[0].kind
