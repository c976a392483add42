"""Delta tables of logs: looked at, made, and changed by one commit each.

A table that is not known is read by the library deltalake, and so is what dlog does not write
itself; the library also makes tables, columns and checkpoints.  Its cost grows with the table.
Commits, and tables that are known, are read and written by `delta_log.py`, whose cost does not.

The library has a client of object stores of its own, with the same variables of the environment and
the same limits as that of the tier.  Both make a commit's file only where there is none.  A commit
is tried once: the caller looks again before the next one.  Calls run in threads.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import ConfigurationError, ObjectStoreError, TableError
from dlcore.base.extras import missing_packages_explained
from dlcore.log.cold.delta_format import (
    COLUMNS_OF_FILES,
    DELTA,
    before_last_checkpoint,
    files_of,
    statistics_of,
)
from dlcore.log.cold.delta_log import (
    DeltaState,
    after,
    commit_of,
    identity_of,
    name_of,
    require_known_features,
)
from dlcore.log.cold.files_kept import FilesKept
from dlcore.log.cold.objects import delete_below
from dlcore.log.cold.stores import OPTIONS, read_whole, store_errors, sync_file
from dlcore.log.cold.table_format import (
    CHECKPOINT_EVERY,
    TableFiles,
    boundary_of,
    description_of,
    number_of,
    place_of,
    require_reached,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.log.cold.objects import Objects
    from dlcore.log.cold.table_format import AddedFile, Field, Place, TableFile, TableSeen

_COMMITS_READ_MAX = 100
"""Commits that are read one by one; if there are more, all of the table is read."""
_VERSION = re.compile(r"(\d{20})(?:\.checkpoint)?\.(?:json|parquet)")
PROPERTIES = {
    # A checkpoint has all files.  To open the table takes some 30 requests for it, and 4 for each
    # commit since.
    "delta.checkpointInterval": str(CHECKPOINT_EVERY),
    # How long old versions can be read, as far as their files are there.
    "delta.logRetentionDuration": "interval 30 days",
    # Only dlog's own sweep deletes files; this is for users that call VACUUM.
    "delta.deletedFileRetentionDuration": "interval 30 days",
}


class DeltaTables:
    """The table in any folder, for the log with one id.

    Args:
        url: the folder.
        app_id: the log, as its table names it.
        objects: the store of the folder.
        kept: tables as they were seen last, by their folders: of one that is among them only later
            commits are read.
    """

    def __init__(
        self,
        url: str,
        app_id: str,
        objects: Objects,
        kept: FilesKept[DeltaState] | None = None,
    ) -> None:
        self.url = url
        self._objects = objects
        self._app_id = app_id
        self._kept = FilesKept[DeltaState]() if kept is None else kept
        self._version = -1  # that was seen last

    async def look(self) -> TableSeen | None:
        """Return the table at its newest version; None if there is none.

        Later commits succeed only if no other one came after the version that was seen last.

        Raises:
            TableError: a file of it is none of dlog's, or it needs what dlog does not know.
            ObjectStoreError: it cannot be read now, or is damaged.
        """
        return await asyncio.to_thread(self._look)

    def _look(self) -> TableSeen | None:
        known = self._kept.get(self.url)
        state = None if known is None else self._read_on(known)
        if state is None:
            self._kept.forget(self.url)
            state = self._read_whole()
            if state is None:
                return None
        # Without it a later look could not know whether the table was made again.
        if state.commit:
            self._kept.put(self.url, state, files=len(state.files))
        self._version = state.version
        return state.seen()

    def _read_on(self, state: DeltaState) -> DeltaState | None:
        """Return a table that is known at its newest version; None if all of it is to be read."""
        data = self._commit_file(state.version)
        if data is None or identity_of(data) != state.commit:
            return None  # it was made again, or there was no commit for a month
        for _ in range(_COMMITS_READ_MAX):
            data = self._commit_file(state.version + 1)
            if data is None:
                return state
            found = after(state, data, self._app_id)
            if found is None:
                return None
            state = found
        return None

    def _read_whole(self) -> DeltaState | None:
        module = _library(self.url)
        with _delta_errors("reading", self.url):
            try:
                table = module.DeltaTable(self.url, storage_options=OPTIONS)
            except module.exceptions.TableNotFoundError:
                return None
            number = table.transaction_version(self._app_id)
            rows = table.get_add_actions(flatten=True)
            metadata = table.metadata()
            protocol = table.protocol()
            fields = json.loads(table.schema().to_json())["fields"]
        require_known_features(protocol.min_writer_version, protocol.writer_features)
        names = [each for each in COLUMNS_OF_FILES if each in rows.schema.names]
        columns = zip(*(rows.column(each).to_pylist() for each in names), strict=True)
        data = self._commit_file(table.version())
        return DeltaState(
            version=table.version(),
            commit=b"" if data is None else identity_of(data),
            checkpoint=self._checkpoint(),
            position=None if number is None else place_of(number),
            description=metadata.description or "",
            fields=tuple(fields),
            files=TableFiles.of(files_of(dict(zip(names, each, strict=True)) for each in columns)),
        )

    def _checkpoint(self) -> int:
        """Return the version of the newest checkpoint; 0 if there is none."""
        data = self._file("_last_checkpoint")
        with suppress(ValueError, LookupError, TypeError):
            return 0 if data is None else int(json.loads(data)["version"])
        return 0  # readers pass a damaged one over

    def _commit_file(self, version: int) -> bytes | None:
        return self._file(name_of(version))

    def _file(self, name: str) -> bytes | None:
        """Return a file of the table's log; None if there is none."""
        return read_whole(f"{self.url}/{DELTA.folder}/{name}")

    async def position_at(self, version: int) -> Place | None:
        """Return the position of a version.

        Raises:
            TableError: there is no such version, or it is too old.
            ObjectStoreError: it cannot be read now.
        """
        try:
            return await asyncio.to_thread(self._position_at, version)
        except ObjectStoreError as error:
            oldest, seen = await self._oldest(), await self.look()
            if seen is not None and not oldest <= version <= seen.version:
                raise TableError(
                    f"version {version} of the table in {self.url}: expected one from {oldest}, "
                    f"the oldest that is left, to {seen.version}"
                ) from error
            raise

    def _position_at(self, version: int) -> Place | None:
        module = _library(self.url)
        with _delta_errors(f"reading version {version} of", self.url):
            table = module.DeltaTable(self.url, version=version, storage_options=OPTIONS)
            number = table.transaction_version(self._app_id)
        return None if number is None else place_of(number)

    async def version_with(self, place: Place) -> int:
        """Return the first version that can be read and has all records before a place.

        Raises:
            TableError: the newest version does not have them, or there is no table.
            ObjectStoreError: the table cannot be read now.
        """
        seen = await self.look()
        require_reached(self.url, None if seen is None else seen.position, place)
        assert seen is not None
        low, high = await self._oldest(), seen.version
        while low < high:
            middle = (low + high) // 2
            position = await self.position_at(middle)
            if position is not None and position >= place:
                high = middle
            else:
                low = middle + 1
        return high

    async def _oldest(self) -> int:
        """Return the oldest version that can be read: the first commit's, or a checkpoint's."""
        commits: list[int] = []
        checkpoints: list[int] = []
        for name in await self._log_names():
            if found := _VERSION.fullmatch(name):
                (checkpoints if "checkpoint" in name else commits).append(int(found[1]))
        if 0 in commits or not checkpoints:
            return 0
        return min(checkpoints)

    async def _log_names(self) -> list[str]:
        """Return the names of the files of the table's log."""
        folder = f"{self.url}/{DELTA.folder}"
        pages = self._objects.list_below(folder)
        return [each.url.removeprefix(f"{folder}/") async for page in pages for each in page]

    async def create(
        self, name: str, fields: Sequence[Field], files: Sequence[AddedFile], position: Place
    ) -> None:
        """Make the table, with its first files.

        Raises:
            ObjectStoreError: it was not made, or that is not known.
        """
        await asyncio.to_thread(self._create, name, fields, files, position)

    def _create(
        self, name: str, fields: Sequence[Field], files: Sequence[AddedFile], position: Place
    ) -> None:
        module = _library(self.url)
        with _delta_errors("making", self.url):
            module.transaction.create_table_with_add_actions(
                self.url,
                _schema(module, fields),
                _adds(module, files, data_change=True),
                mode="error",
                name=name,
                description=description_of(self._app_id),
                configuration=PROPERTIES,
                storage_options=OPTIONS,
                **self._commit(module, position),
            )
            self._sync(0)

    async def add_fields(self, fields: Sequence[Field], position: Place) -> None:
        """Add columns to the table that was seen, or parts of columns.

        Raises:
            ObjectStoreError: they were not added, or that is not known.
        """
        await asyncio.to_thread(self._add_fields, fields, position)

    def _add_fields(self, fields: Sequence[Field], position: Place) -> None:
        module = _library(self.url)
        with _delta_errors("adding columns to", self.url):
            # As it was seen, so that a commit of another program since then is a conflict.
            table = module.DeltaTable(self.url, version=self._version, storage_options=OPTIONS)
            table.alter.add_columns(
                list(_schema(module, fields).fields), **self._commit(module, position)
            )
            self._sync(self._version + 1)

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

        Raises:
            ObjectStoreError: it was not done, or that is not known.
        """
        data = commit_of(
            adds,
            removes,
            position,
            app_id=self._app_id,
            now_ms=now_ms,
            data_change=data_change,
        )
        # If two commits follow the same version, one finds the other's file, and fails.
        name = name_of(self._version + 1)
        await self._objects.put_new(f"{self.url}/{DELTA.folder}/{name}", data)

    def _commit(self, module: Any, position: Place) -> dict[str, Any]:
        transaction = module.transaction
        return {
            "commit_properties": transaction.CommitProperties(
                app_transactions=[transaction.Transaction(self._app_id, number_of(position))],
                # For people: it is in the history of the table.
                custom_metadata={"dlog.end": str(boundary_of(position))},
                # Else the library would put it behind commits of others, which were not looked at.
                max_commit_retries=0,
            ),
            # `tidy` does both, at its own time.
            "post_commithook_properties": transaction.PostCommitHookProperties(
                create_checkpoint=False, cleanup_expired_logs=False
            ),
        }

    def _sync(self, version: int) -> None:
        """Bring a commit to disk, which the library leaves to the system.

        A store over the network answers when it has done so.
        """
        if self.url.startswith("file://"):
            folder = Path(self.url.removeprefix("file://"), "_delta_log")
            sync_file(folder / f"{version:020}.json")

    async def tidy(self) -> None:
        """Make a checkpoint of the newest version, and delete commits that are too old.

        Raises:
            ObjectStoreError: that failed; nothing is lost.
        """
        await asyncio.to_thread(self._tidy)

    def _tidy(self) -> None:
        module = _library(self.url)
        with _delta_errors("making a checkpoint of", self.url):
            table = module.DeltaTable(self.url, storage_options=OPTIONS)
            table.create_checkpoint()
            table.cleanup_metadata()
            version = table.version()
        known = self._kept.get(self.url)
        if known is not None:
            made = known._replace(checkpoint=version)
            self._kept.put(self.url, made, files=len(made.files))

    async def forget_history(self) -> None:
        """Delete all versions of the table but the newest.

        A commit's file has statistics of the files that it added, texts among them.

        Raises:
            ObjectStoreError: that failed, or it is not known; the newest version is not touched.
        """
        # The newest version needs none of the earlier files once it has a checkpoint.
        await self.tidy()
        for name in before_last_checkpoint(await self._log_names()):
            await self._objects.delete(f"{self.url}/{DELTA.folder}/{name}")

    async def drop(self) -> None:
        """Delete the table, but not its files."""
        await delete_below(self._objects, f"{self.url}/{DELTA.folder}")


def _schema(module: Any, fields: Sequence[Field]) -> Any:
    return module.Schema.from_json(json.dumps({"type": "struct", "fields": list(fields)}))


def _adds(module: Any, files: Sequence[AddedFile], *, data_change: bool) -> list[Any]:
    return [
        module.transaction.AddAction(
            each.name,
            each.size_bytes,
            {},
            each.modified_ms,
            data_change,
            statistics_of(each.footer, each.end_entry),
        )
        for each in files
    ]


def _library(url: str) -> Any:
    try:
        with missing_packages_explained():
            import deltalake
            import deltalake.exceptions
            import deltalake.transaction
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"the table in {url}: {error}") from error
    return deltalake


@contextmanager
def _delta_errors(what: str, url: str) -> Iterator[None]:
    """Raise what the library raises as `ObjectStoreError`."""
    from deltalake.exceptions import DeltaError

    with store_errors(what, url, DeltaError, ValueError):
        yield
