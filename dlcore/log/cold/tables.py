"""The port to the table of a log, and which formats there are.

Every method may raise `ObjectStoreError`: the table cannot be read or changed now, or it is not
known whether it was changed.  A caller looks again before the next change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dlcore.log.cold.delta_format import DELTA
from dlcore.log.cold.delta_tables import DeltaTables
from dlcore.log.cold.iceberg_format import ICEBERG
from dlcore.log.cold.iceberg_tables import IcebergTables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.log.cold.delta_log import DeltaState
    from dlcore.log.cold.files_kept import FilesKept
    from dlcore.log.cold.objects import Objects
    from dlcore.log.cold.table_format import (
        AddedFile,
        Field,
        Place,
        TableFile,
        TableForm,
        TableSeen,
    )

FORMS = (DELTA, ICEBERG)


class LogTable(Protocol):
    """The table in one folder, for the log with one id.

    Changes succeed only if no other one came after the version that was seen last.
    """

    url: str

    async def look(self) -> TableSeen | None:
        """Return the table at its newest version; None if there is none.

        Raises:
            TableError: a part of it is none of dlog's.
        """
        ...

    async def position_at(self, version: int) -> Place | None:
        """Return the position of a version, as readers know it; None if it has none.

        Raises:
            TableError: there is no such version, or it is too old.
            ObjectStoreError: it cannot be read now.
        """
        ...

    async def version_with(self, place: Place) -> int:
        """Return the first version that can be read and has all records before a place.

        Raises:
            TableError: the newest version does not have them, or there is no table.
        """
        ...

    async def create(
        self, name: str, fields: Sequence[Field], files: Sequence[AddedFile], position: Place
    ) -> None:
        """Make the table of the log of this name, with its first files.

        Raises:
            TableError: another one has its place.
        """
        ...

    async def add_fields(self, fields: Sequence[Field], position: Place) -> None:
        """Add columns to the table that was seen, or parts of columns."""
        ...

    async def commit(
        self,
        adds: Sequence[AddedFile],
        removes: Sequence[TableFile],
        position: Place,
        *,
        now_ms: int,
        data_change: bool,
    ) -> None:
        """Add and remove files of the table that was seen, and set its position.

        Without `data_change` the files that are added have the rows of those that are removed.
        """
        ...

    async def tidy(self) -> None:
        """Do what lets the next commit cost the same, and delete what is too old."""
        ...

    async def drop(self) -> None:
        """Delete the table, but not its files.  It need not be there."""
        ...


def form_of(kind: str) -> TableForm:
    """Return the format that the setting `table` names."""
    return next(each for each in FORMS if each.kind == kind)


def table_at(
    form: TableForm,
    url: str,
    app_id: str,
    objects: Objects,
    kept: FilesKept[DeltaState] | None = None,
) -> LogTable:
    """Return the table of a format in a folder, for the log with an id.

    `kept` are the tables of Delta that the caller has seen before, by their folders.
    """
    if form is ICEBERG:
        return IcebergTables(url, app_id, objects)
    return DeltaTables(url, app_id, objects, kept)


async def forms_in(objects: Objects, url: str) -> list[TableForm]:
    """Return the formats that have a table in a folder.

    Raises:
        ObjectStoreError: the store does not answer.
    """
    return [form for form in FORMS if await _has_any(objects, f"{url}/{form.folder}")]


async def _has_any(objects: Objects, url: str) -> bool:
    async for page in objects.list_below(url):
        if page:
            return True
    return False
