"""Iceberg tables of logs, by the library pyiceberg: looked at, made, and changed by single commits.

The table is in the folder of the log, and known to a catalog.  Its first metadata is written by
dlog, and a copy of it registered: a table that the library makes by itself gets other field ids
than the log's objects have.  Each commit is one transaction: files that come and go, the position
in the snapshot's summary, and the tag.  The catalog makes it only if the current snapshot is the
one that was seen; it is tried once, and the caller looks again before the next.  Calls run in
threads.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from dlcore.base.clock import SystemClock
from dlcore.base.errors import ObjectStoreError, TableError
from dlcore.log.cold import iceberg_catalog
from dlcore.log.cold.files_kept import FilesKept
from dlcore.log.cold.iceberg_catalog import catalog_errors, identifier_of
from dlcore.log.cold.iceberg_format import (
    ANCESTORS_MAX,
    FIRST_METADATA,
    FOLDER,
    LOG,
    NAME,
    NAMESPACE,
    REGISTERED_METADATA,
    SNAPSHOTS_KEPT,
    TAG,
    SnapshotSeen,
    first_metadata,
    merged_away,
    missing_fields,
    newest_in,
    position_of,
    require_properties,
    summary_of,
    table_file,
    table_name,
    version_of,
    with_fields,
    without_floats,
)
from dlcore.log.cold.objects import delete_below
from dlcore.log.cold.stores import put_new, read_whole, size_of
from dlcore.log.cold.table_format import FilesPart, TableFiles, TableSeen, require_reached

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.log.cold.objects import Objects
    from dlcore.log.cold.table_format import AddedFile, Field, Place, TableFile

_BEGINNING: Place = (1, 0)
_manifests_read = FilesKept[FilesPart]()
"""Manifests never change, and are not read again."""


class _Seen(NamedTuple):
    position: Place
    version: int


class IcebergTables:
    """The table in any folder, for the log with one id.

    Args:
        url: the folder.
        app_id: the log, as its table names it.
        objects: the store of the folder.
        snapshots_kept: how many snapshots stay, when it is tidied.
    """

    def __init__(
        self, url: str, app_id: str, objects: Objects, *, snapshots_kept: int = SNAPSHOTS_KEPT
    ) -> None:
        self.url = url
        self._app_id = app_id
        self._objects = objects
        self._snapshots_kept = snapshots_kept
        self._table: Any = None  # as it was seen last
        self._manifests: list[tuple[str, FilesPart]] = []  # of it that have files, with these
        self._seen_last = _Seen(_BEGINNING, 0)

    async def look(self) -> TableSeen | None:
        """Return the table at its newest version; None if there is none.

        Raises:
            TableError: a part of it is none of dlog's, or the catalog lacks it.
            ObjectStoreError: it cannot be read now.
        """
        table = await self._load()
        return None if table is None else await asyncio.to_thread(self._seen, table)

    async def _load(self) -> Any:
        """Return the table of the catalog; None if there is none."""
        self._table = None
        first = await self._first()
        if first is None:
            return None
        place = (first["properties"][NAMESPACE], first["properties"][NAME])
        table = await iceberg_catalog.load_table(self.url, place)
        if table is None:
            await self._require_unused(place)
        elif str(table.metadata.table_uuid) != first["table-uuid"]:
            raise TableError(
                f"the catalog's table {'.'.join(place)} is not the one in {self.url}: another "
                "program made it; to do: rename it in the catalog, or unset the setting `table`"
            )
        self._table = table
        return table

    async def _first(self) -> Any:
        """Return the table's first metadata; None if there is none."""
        url = f"{self.url}/{FOLDER}/{FIRST_METADATA}"
        iceberg_catalog.require_library(url)
        data = await asyncio.to_thread(read_whole, url)
        return None if data is None else _decoded(url, data)

    async def _require_unused(self, place: tuple[str, str]) -> None:
        """Require that a table which the catalog lacks never was in it.

        A worker with another catalog would make it again, and a sweep delete its files.
        """
        async for page in self._objects.list_below(f"{self.url}/{FOLDER}"):
            for each in page:
                if not each.url.endswith((f"/{FIRST_METADATA}", f"/{REGISTERED_METADATA}")):
                    raise TableError(
                        f"the catalog {iceberg_catalog.CATALOG} lacks the table {'.'.join(place)} "
                        f"of {self.url}, which has been there: is it another catalog?  To do: name "
                        f"the right one; or delete the folder {self.url}/{FOLDER}, and the table "
                        "is made again if the log has the setting `table`"
                    )

    def _seen(self, table: Any) -> TableSeen:
        metadata = table.metadata
        require_properties(metadata.properties)
        current = metadata.current_snapshot()
        with catalog_errors("reading the files of", self.url):
            self._manifests = [] if current is None else list(self._held(table, current))
        newest = newest_in(_ancestors(metadata), _tagged(metadata), self._app_id)
        position = None if newest is None else position_of(newest, self._app_id)
        if position is None and current is None and metadata.properties.get(LOG) == self._app_id:
            position = _BEGINNING  # it was made, and its first commit was not
        self._seen_last = _Seen(position or _BEGINNING, version_of(newest))
        return TableSeen(
            version=self._seen_last.version,
            known_as=0 if current is None else current.snapshot_id,
            position=position,
            description=metadata.properties.get("comment", ""),
            fields=_fields_of(metadata),
            files=TableFiles(tuple(part for _, part in self._manifests)),
        )

    def _held(self, table: Any, snapshot: Any) -> Iterator[tuple[str, FilesPart]]:
        """Yield the manifests of a snapshot that name files, with these."""
        from pyiceberg.manifest import ManifestContent

        for manifest in snapshot.manifests(table.io):
            if manifest.content != ManifestContent.DATA:
                raise TableError(
                    f"the table in {self.url} has files that delete rows of others: another "
                    f"program changed it; to do: go back to the snapshot with the tag {TAG}"
                )
            path = manifest.manifest_path
            part = _manifests_read.get(path)
            if part is None:
                entries = manifest.fetch_manifest_entry(table.io)
                files = tuple(self._table_file(each.data_file) for each in entries)
                if not files:
                    continue  # it names only what is gone
                part = FilesPart.of(files)
                _manifests_read.put(path, part, files=len(files))
            yield path, part

    def _table_file(self, found: Any) -> TableFile:
        return table_file(
            self.url,
            found.file_path,
            found.file_size_in_bytes,
            found.record_count,
            found.upper_bounds,
        )

    # Versions

    async def position_at(self, version: int) -> Place | None:
        """Return the position of the snapshot with an id; None if it has none.

        Raises:
            TableError: there is no such snapshot, or not any more.
            ObjectStoreError: the table cannot be read now.
        """
        table = await self._load()
        found = None if table is None else table.metadata.snapshot_by_id(version)
        if found is None:
            raise TableError(
                f"version {version} of the table in {self.url}: expected the id of one of its "
                "snapshots; those that expired are gone"
            )
        return position_of(_snapshot(found), self._app_id)

    async def version_with(self, place: Place) -> int:
        """Return the id of the first snapshot that is there and has all records before a place.

        Raises:
            TableError: the newest one does not have them, or there is no table.
        """
        table = await self._load()
        chain = [] if table is None else list(_ancestors(table.metadata))
        tagged = None if table is None else _tagged(table.metadata)
        newest = newest_in(chain, tagged, self._app_id)
        require_reached(
            self.url, None if newest is None else position_of(newest, self._app_id), place
        )
        reached = chain[0].snapshot_id
        for each in chain[1:]:
            position = position_of(each, self._app_id)
            if position is None or position < place:
                break
            reached = each.snapshot_id
        return reached

    # Changes

    async def create(
        self, name: str, fields: Sequence[Field], files: Sequence[AddedFile], position: Place
    ) -> None:
        """Make the table of the log of this name, with its first files, by two commits.

        Raises:
            TableError: the catalog has another table of this name.
            ObjectStoreError: it was not made, or that is not known.
        """
        namespace = await asyncio.to_thread(iceberg_catalog.namespace_of, self.url)
        first = await self._first()
        if first is None:
            place = (namespace, table_name(name))
            if await iceberg_catalog.load_table(self.url, place) is not None:
                raise self._taken(place)
            first = await self._write_first(place, fields)
        place = (first["properties"][NAMESPACE], first["properties"][NAME])
        table = await asyncio.to_thread(self._register, place, json.dumps(first).encode())
        if str(table.metadata.table_uuid) != first["table-uuid"]:
            raise self._taken(place)
        if table.current_snapshot() or missing_fields(_fields_of(table.metadata), fields):
            raise ObjectStoreError(
                f"the table in {self.url} was made before: it is looked at again"
            )
        self._table, self._seen_last = table, _Seen(_BEGINNING, 0)
        await asyncio.to_thread(self._apply, files, (), position)

    def _taken(self, place: tuple[str, str]) -> TableError:
        return TableError(
            f"the catalog has a table {'.'.join(place)} already, which is not that of {self.url}; "
            "to do: rename or drop it in the catalog, or set another namespace "
            "(PYICEBERG_CATALOG__DLOG__NAMESPACE)"
        )

    async def _write_first(self, place: tuple[str, str], fields: Sequence[Field]) -> dict[str, Any]:
        clock = SystemClock()
        metadata = first_metadata(
            url=self.url,
            uuid=str(uuid.UUID(clock.new_token())),
            now_ms=clock.now_ms(),
            app_id=self._app_id,
            place=place,
            fields=fields,
        )
        data = json.dumps(metadata).encode()
        await self._objects.put_new(f"{self.url}/{FOLDER}/{FIRST_METADATA}", data)
        return metadata

    def _register(self, place: tuple[str, str], first: bytes) -> Any:
        catalog = iceberg_catalog.open_catalog(self.url)
        from pyiceberg.exceptions import TableAlreadyExistsError

        url = f"{self.url}/{FOLDER}/{REGISTERED_METADATA}"
        with catalog_errors("making", self.url):
            if size_of(url) is None:  # a worker that died may have written it
                put_new(url, first)
            # A client that may not make a namespace can work with one that is there.
            if not catalog.namespace_exists(place[0]):
                catalog.create_namespace_if_not_exists(place[0])
            with suppress(TableAlreadyExistsError):
                return catalog.register_table(identifier_of(place), url)
            return catalog.load_table(identifier_of(place))

    async def add_fields(self, fields: Sequence[Field], position: Place) -> None:
        """Add columns to the table that was seen, or parts of columns, or widen them.

        Raises:
            ObjectStoreError: they were not added, or that is not known.
        """
        await asyncio.to_thread(self._add_fields, fields)

    def _add_fields(self, fields: Sequence[Field]) -> None:
        from pyiceberg.schema import Schema
        from pyiceberg.table.update import (
            AddSchemaUpdate,
            AssertCurrentSchemaId,
            AssertTableUUID,
            SetCurrentSchemaUpdate,
        )

        table = self._table
        metadata = table.metadata
        number = max(each.schema_id for each in metadata.schemas) + 1
        new = {"type": "struct", "fields": with_fields(_fields_of(metadata), fields)}
        with catalog_errors("adding columns to", self.url):
            schema = Schema.model_validate({**new, "schema-id": number})
            # The library's own `update_schema` gives columns other ids than the objects have.
            table.catalog.commit_table(
                table,
                (
                    AssertTableUUID(uuid=metadata.table_uuid),
                    AssertCurrentSchemaId(**{"current-schema-id": metadata.current_schema_id}),
                ),
                (AddSchemaUpdate(schema=schema), SetCurrentSchemaUpdate()),
            )

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

        Raises:
            ObjectStoreError: it was not done, or that is not known.
        """
        await asyncio.to_thread(self._apply, adds, removes, position, is_same=not data_change)

    def _apply(
        self,
        adds: Sequence[AddedFile],
        removes: Sequence[TableFile],
        position: Place,
        *,
        is_same: bool = False,
    ) -> None:
        from pyiceberg.table.update.snapshot import ManageSnapshots

        seen = self._seen_last
        last = summary_of(self._app_id, position, seen.version + 1)
        with catalog_errors("changing", self.url):
            transaction = _with_current_snapshot_only(self._table).transaction()
            if is_same or not adds:
                snapshot_id = self._overwrite(transaction, adds, removes, last)
            else:
                # Only a snapshot that adds merges manifests, and drops those of removed files.
                if removes:
                    before = summary_of(self._app_id, seen.position, seen.version)
                    self._overwrite(transaction, (), removes, before)
                snapshot = transaction.update_snapshot(snapshot_properties=last).merge_append()
                for added in adds:
                    snapshot.append_data_file(self._data_file(self._table.metadata, added))
                snapshot.commit()
                snapshot_id = snapshot.snapshot_id
            ManageSnapshots(transaction).create_tag(snapshot_id, TAG).commit()
            transaction.commit_transaction()

    def _overwrite(
        self,
        transaction: Any,
        adds: Sequence[AddedFile],
        removes: Sequence[TableFile],
        summary: dict[str, str],
    ) -> int:
        """Let a transaction have a snapshot that changes files; return its number."""
        from dlcore.log.cold.iceberg_private import read_only

        names = {each.name for each in removes}
        segments = {each.end[0] for each in removes}
        holding = {
            path
            for path, part in self._manifests
            if part.may_have(segments) and any(each.name in names for each in part.files)
        }
        snapshot = transaction.update_snapshot(snapshot_properties=summary).overwrite()
        for added in adds:
            snapshot.append_data_file(self._data_file(self._table.metadata, added))
        for removed in removes:
            snapshot.delete_data_file(self._removed_file(removed))
        read_only(snapshot, holding)
        snapshot.commit()
        return int(snapshot.snapshot_id)

    def _removed_file(self, removed: TableFile) -> Any:
        """Return a file as far as the library needs it to remove it, and to sum up."""
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
        from pyiceberg.typedef import Record

        found = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=f"{self.url}/{removed.name}",
            file_format=FileFormat.PARQUET,
            partition=Record(),
            record_count=removed.records,
            file_size_in_bytes=removed.size_bytes,
        )
        found.spec_id = self._table.metadata.default_spec_id
        return found

    def _data_file(self, metadata: Any, added: AddedFile) -> Any:
        from pyiceberg.io.pyarrow import (
            compute_statistics_plan,
            data_file_statistics_from_parquet_metadata,
            parquet_path_to_id_mapping,
        )
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
        from pyiceberg.typedef import Record

        schema = metadata.schema()
        found = data_file_statistics_from_parquet_metadata(
            parquet_metadata=added.footer,
            stats_columns=compute_statistics_plan(schema, metadata.properties),
            parquet_column_mapping=parquet_path_to_id_mapping(schema),
        ).to_serialized_dict()
        for bounds in ("lower_bounds", "upper_bounds"):
            found[bounds] = without_floats(found[bounds], _fields_of(metadata))
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=f"{self.url}/{added.name}",
            file_format=FileFormat.PARQUET,
            partition=Record(),
            file_size_in_bytes=added.size_bytes,
            sort_order_id=None,
            spec_id=metadata.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **found,
        )

    # Old snapshots

    async def tidy(self) -> None:
        """Remove old snapshots, and delete what only they had, but for data files.

        Raises:
            ObjectStoreError: that failed; nothing is lost.
        """
        for url in await asyncio.to_thread(self._expire):
            await self._objects.delete(url)

    def _expire(self) -> Sequence[str]:
        """Remove old snapshots; return the manifests and their lists that no other one has."""
        table = self._table
        metadata = table.metadata
        with catalog_errors("removing old snapshots of", self.url):
            chain = [each.snapshot_id for each in _walk(metadata)]
            kept = {*chain[: self._snapshots_kept]}
            kept |= {each.snapshot_id for each in metadata.refs.values()}
            old = [each for each in metadata.snapshots if each.snapshot_id not in kept]
            if not old:
                return []
            # A manifest is in consecutive snapshots.  If an old snapshot and one that is kept have
            # it, the oldest one that is kept has it as well, or one with a user's tag.
            oldest = chain[: self._snapshots_kept][-1:]
            others = [each for each in kept if each not in chain[: self._snapshots_kept]]
            needed = {
                each.manifest_path
                for number in (*oldest, *others)
                for each in metadata.snapshot_by_id(number).manifests(table.io)
            }
            gone: set[str] = set()
            for each in old:
                manifests = {found.manifest_path for found in each.manifests(table.io)}
                gone |= {*manifests, *merged_away(each.manifest_list, manifests)}
            table.maintenance.expire_snapshots().by_ids([each.snapshot_id for each in old]).commit()
        return sorted(gone - needed) + [each.manifest_list for each in old]

    async def drop(self) -> None:
        """Delete the table, but not its files."""
        first = await self._first()
        if first is not None:
            place = (first["properties"][NAMESPACE], first["properties"][NAME])
            table = await iceberg_catalog.load_table(self.url, place)
            if table is not None and str(table.metadata.table_uuid) == first["table-uuid"]:
                await asyncio.to_thread(self._drop, table)
        await delete_below(self._objects, f"{self.url}/{FOLDER}")

    def _drop(self, table: Any) -> None:
        with catalog_errors("dropping", self.url):
            table.catalog.drop_table(table.name())


def _with_current_snapshot_only(table: Any) -> Any:
    """Return a table for one commit: the library copies all of its metadata 19 times for each.

    The catalog applies the changes to all of its own.
    """
    metadata = table.metadata
    current = metadata.current_snapshot()
    small = metadata.model_copy(
        update={"snapshots": [] if current is None else [current], "snapshot_log": []}
    )
    return type(table)(
        table.name(), small, table.metadata_location, table.io, table.catalog, table.config
    )


def _decoded(url: str, data: bytes) -> Any:
    """Return the first metadata of a table; it has the parts that are used."""
    try:
        found = json.loads(data)
        parts = (found["properties"][NAMESPACE], found["properties"][NAME], found["table-uuid"])
        fields = found["schemas"][0]["fields"]
    except (ValueError, LookupError, TypeError) as error:
        raise TableError(
            f"{url} is not what dlog wrote there: {error!r}; to do: delete the folder {FOLDER}, "
            "and the table is made again"
        ) from error
    if not all(isinstance(each, str) for each in parts) or not isinstance(fields, list):
        raise TableError(f"{url} is not what dlog wrote there; to do: delete the folder {FOLDER}")
    return found


def _fields_of(metadata: Any) -> tuple[Field, ...]:
    return tuple(json.loads(metadata.schema().model_dump_json())["fields"])


def _snapshot(found: Any) -> SnapshotSeen:
    summary = found.summary
    if summary is None:
        return SnapshotSeen(found.snapshot_id, "unknown", {})
    return SnapshotSeen(found.snapshot_id, summary.operation.value, summary.additional_properties)


def _walk(metadata: Any) -> Iterator[Any]:
    from pyiceberg.table.snapshots import ancestors_of

    return itertools.islice(ancestors_of(metadata.current_snapshot(), metadata), ANCESTORS_MAX)


def _ancestors(metadata: Any) -> Iterator[SnapshotSeen]:
    return map(_snapshot, _walk(metadata))


def _tagged(metadata: Any) -> SnapshotSeen | None:
    ref = metadata.refs.get(TAG)
    found = None if ref is None else metadata.snapshot_by_id(ref.snapshot_id)
    return None if found is None else _snapshot(found)
