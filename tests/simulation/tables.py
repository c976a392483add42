"""Tables beside logs with a tier: a catalog that lies, and the invariants of what it names.

The product's keeper, its decisions, its reader of chains and its guard of sweeps are the real ones;
only the format is made here.  An answer is an error, is lost after the change was made, or comes
while the change is still under way; a look shows the version before the newest one.  A version has
a number that no other one has, also after the table was deleted.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from dlcore.base.errors import ObjectStoreError, TableError
from dlcore.log.cold import delta_tables, tables
from dlcore.log.cold.delta_format import DELTA
from dlcore.log.cold.table_format import (
    AddedFile,
    TableFile,
    TableFiles,
    TableForm,
    TableSeen,
    description_of,
    segment_of,
)
from dlcore.ops.upkeep import table_guard, table_keeper
from tests.simulation.life_checkers import require
from tests.simulation.redaction_checkers import PAYLOAD
from tests.simulation.stored_log import completed_segments_of, has_table, read_head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dlcore.log.cold.table_format import Field, Place
    from dlcore.metadata.paths import NamespacePaths
    from tests.fixtures.simulated_store import SimulatedTree
    from tests.simulation.cold_store import ColdStore, ColdStoreOfProcess

    IsCold = Callable[[str], bool]

ONCE = "T6 TablesHaveRowsOnce"
NAMED_STAY = "T7 ObjectsOfTablesStay"
FOLLOWED = "T8 TablesFollow"
TABLE_INVARIANTS = (ONCE, NAMED_STAY, FOLLOWED)

TABLE_FAULTS = ("table refused", "table lost", "table late")
_LOOK_FAULTS = ("table refused", "table stale")
_LATE_S_MAX = 4.0


@dataclass(frozen=True, slots=True)
class Version:
    """A table at one version."""

    number: int
    position: Place
    fields: tuple[Field, ...]
    files: dict[str, TableFile]


class Catalog:
    """All tables of a run, by the URLs of their folders, and what must hold of them."""

    def __init__(
        self,
        store: ColdStore,
        tree: SimulatedTree,
        paths: NamespacePaths,
        on_violation: Callable[[BaseException], None],
    ) -> None:
        self.store = store
        self._on_violation = on_violation
        self._tree = tree
        self._paths = paths
        self.tables: dict[str, list[Version]] = {}
        self._numbers = 0
        self._held: dict[str, tuple[Place, Place, int]] = {}  # of an object: entries, rows
        self._payloads: dict[str, bytes] = {}  # of an object, also once it is gone
        self.commits = 0

    def newest(self, url: str) -> Version | None:
        """Return the newest version of a table."""
        versions = self.tables.get(url)
        return versions[-1] if versions else None

    def change(
        self,
        url: str,
        seen: int | None,
        fields: tuple[Field, ...] | None,
        files: dict[str, TableFile] | None,
        position: Place,
    ) -> None:
        """Put a version behind the one that was seen.

        Raises:
            ObjectStoreError: another one came after it.
        """
        now = self.newest(url)
        if (None if now is None else now.number) != seen:
            raise ObjectStoreError(f"the table in {url} was changed meanwhile")
        self._numbers += 1
        if now is not None:
            fields, files = fields or now.fields, now.files if files is None else files
        new = Version(self._numbers, position, fields or (), files or {})
        with self._judging():
            self._check(url, now, new)
        self.tables.setdefault(url, []).append(new)
        self.commits += 1

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """End the run at a violation: workers isolate what goes wrong with one log."""
        try:
            yield
        except AssertionError as violation:
            self._on_violation(violation)
            raise

    def _check(self, url: str, before: Version | None, new: Version) -> None:
        """T6, T7: no entry is there twice or missing, and all objects are there."""
        require(
            ONCE,
            holds=before is None or before.position <= new.position,
            message=f"the table in {url} goes back to {new.position}",
        )
        parts = sorted(self._held_by(url, each) for each in new.files.values())
        end: Place = (0, 0)
        for start, after, _ in parts:
            is_next = start == end if start[0] == end[0] else True
            require(
                ONCE,
                holds=is_next and after <= new.position,
                message=f"the table in {url} has {start} after {end}, up to {new.position}",
            )
            end = after

    def _held_by(self, url: str, file: TableFile) -> tuple[Place, Place, int]:
        """Return which entries an object has, by its rows, and how many rows."""
        name = f"{url}/{file.name}"
        stored = self.store.objects.get(name)
        require(
            NAMED_STAY, holds=stored is not None, message=f"a table names {name}, which is gone"
        )
        held = self._entries_of(name)
        require(
            ONCE,
            holds=held[1:] == (file.end, file.records),
            message=f"a table says of {name} that it ends at {file.end}, it has {held}",
        )
        return held

    def _entries_of(self, name: str) -> tuple[Place, Place, int]:
        """Return the first entry of an object that is there, the one after its last, and rows."""
        if name not in self._held:
            data = pa.BufferReader(self.store.objects[name].data)
            table = pq.read_table(data)
            columns = (table["_lssn"].to_pylist(), table["_entry"].to_pylist())
            places = sorted(zip(*columns, strict=True))
            if PAYLOAD in table.column_names:
                rows = table[PAYLOAD].to_pylist()
                self._payloads[name] = b"".join(each or b"" for each in rows)
            lssn, last = places[-1]
            self._held[name] = places[0], (lssn, last + 1), len(places)
        return self._held[name]

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Yield what versions of tables tell of private rows: their statistics have values.

        They tell it also of files that are gone.
        """
        for folder, versions in self.tables.items():
            for version in versions:
                payloads = (self._payloads.get(f"{folder}/{each}", b"") for each in version.files)
                yield f"version {version.number} of the table in {folder}", b"".join(payloads)

    def check_deleted(self, url: str) -> None:
        """T7: the newest version of no table names it."""
        for folder, versions in self.tables.items():
            is_named = url.removeprefix(f"{folder}/") in versions[-1].files
            with self._judging():
                require(NAMED_STAY, holds=not is_named, message=f"{url} goes, and a table names it")

    # The end

    def _head_of(self, folder: str) -> str:
        return self._paths.log_of(folder.rpartition("/")[2]).head

    def _has_table(self, folder: str) -> bool:
        """Return whether there is the log of a folder, and its settings ask for a table."""
        settings = self._tree._find(f"{self._head_of(folder)}/settings")
        return settings is not None and has_table(settings.value)

    def is_kept(self, url: str) -> bool:
        """Return whether an object that no ledger names must stay for the table of its log."""
        folder, lssn, name = url.rsplit("/", 2)
        if not self._has_table(folder):
            return False
        now = self.newest(folder)
        found = segment_of(f"{lssn}/{name}")
        return now is None or found is None or found >= now.position[0]

    def differences(self, owned: Sequence[str], is_cold: IsCold) -> Iterator[str]:
        """Yield what tables lack, and what they have beside what ledgers name.

        Args:
            owned: all objects that ledgers name.
            is_cold: tells whether a completed segment is in objects, by its node.
        """
        by_folder: dict[str, set[str]] = {}
        for url in owned:
            folder, lssn, name = url.rsplit("/", 2)
            by_folder.setdefault(folder, set()).add(f"{lssn}/{name}")
        nodes = self._tree.dump()
        for folder in {*by_folder, *self.tables}:
            head_path = self._head_of(folder)
            if head_path not in nodes or not self._has_table(folder):
                continue
            first = read_head(nodes[head_path].value).first_active
            # The cold part ends at a segment that stays with bookies: one that is truncated in
            # part, say, or tells of producers.
            segments = completed_segments_of(head_path, nodes)
            numbers = {int(each.rpartition("/")[2]): each for each in segments}
            stays = (n for n, each in numbers.items() if n >= first.lssn and not is_cold(each))
            until = min(stays, default=math.inf)
            now, names = self.newest(folder), by_folder.get(folder, set())
            have = set() if now is None else set(now.files)
            for each in names - have:
                _, end, _ = self._entries_of(f"{folder}/{each}")
                if end[0] < until and end > (first.lssn, first.entry_id):
                    yield f"{folder} lacks {each}"
            yield from (f"{folder} has {each}" for each in have - names)

    def check_followed(self, owned: Sequence[str], is_cold: IsCold) -> None:
        """T8: each table has what is cold, and nothing else."""
        found = list(self.differences(owned, is_cold))
        require(FOLLOWED, holds=not found, message=f"{found[:3]}")


class TableOfProcess:
    """A table as one process reaches it: `LogTable`."""

    def __init__(
        self,
        form: TableForm,
        url: str,
        app_id: str,
        objects: ColdStoreOfProcess,
        _kept: object = None,
    ) -> None:
        assert form is DELTA
        self.url = url
        self._app_id = app_id
        self._objects = objects
        self._catalog = _catalog_of(objects)
        self._seen: Version | None = None

    async def look(self) -> TableSeen | None:
        """Return the newest version, or the one before."""
        store = self._catalog.store
        await self._objects._pass(("look at table", "before"))
        fate = store.fate_of(_LOOK_FAULTS)
        if fate == "table refused":
            raise ObjectStoreError(f"reading the table in {self.url}: 503")
        versions = self._catalog.tables.get(self.url)
        if not versions:
            self._seen = None
            return None
        self._seen = seen = versions[-2 if fate and len(versions) > 1 else -1]
        await self._objects._pass(("look at table", "after"))
        return TableSeen(
            seen.number,
            seen.number,
            seen.position,
            description_of(self._app_id),
            seen.fields,
            TableFiles.of(seen.files.values()),
        )

    async def create(
        self, _: str, fields: Sequence[Field], files: Sequence[AddedFile], position: Place
    ) -> None:
        """Make the table."""
        if self._seen is not None:
            raise TableError(f"there is a table in {self.url}")
        await self._change(tuple(fields), _files_of(files), position)

    async def add_fields(self, fields: Sequence[Field], position: Place) -> None:
        """Add columns, or let columns become what they are by now."""
        assert self._seen is not None
        known = {each["name"]: each for each in self._seen.fields}
        known.update({each["name"]: each for each in fields})
        await self._change(tuple(known.values()), None, position)

    async def commit(
        self,
        adds: Sequence[AddedFile],
        removes: Sequence[TableFile],
        position: Place,
        *,
        now_ms: int,
        data_change: bool,
    ) -> None:
        """Change files and position."""
        del now_ms, data_change
        assert self._seen is not None
        gone = {each.name for each in removes}
        files = {name: each for name, each in self._seen.files.items() if name not in gone}
        await self._change(None, {**files, **_files_of(adds)}, position)

    async def _change(
        self,
        fields: tuple[Field, ...] | None,
        files: dict[str, TableFile] | None,
        position: Place,
    ) -> None:
        catalog, store = self._catalog, self._catalog.store
        seen = None if self._seen is None else self._seen.number
        await self._objects._pass(("change table", "before"))
        fate = store.fate_of(TABLE_FAULTS)
        if fate == "table refused":
            raise ObjectStoreError(f"changing the table in {self.url}: 503")
        if fate == "table late":
            delay_s = store.rng.uniform(0.0, _LATE_S_MAX)
            asyncio.get_running_loop().call_later(
                delay_s, self._arrive, seen, fields, files, position
            )
            raise ObjectStoreError(f"changing the table in {self.url}: no answer")
        catalog.change(self.url, seen, fields, files, position)
        await self._objects._pass(("change table", "after"))
        if fate == "table lost":
            raise ObjectStoreError(f"changing the table in {self.url}: no answer")

    def _arrive(
        self,
        seen: int | None,
        fields: tuple[Field, ...] | None,
        files: dict[str, TableFile] | None,
        position: Place,
    ) -> None:
        with suppress(ObjectStoreError):
            self._catalog.change(self.url, seen, fields, files, position)

    async def tidy(self) -> None:
        """Take a while."""
        await self._objects._pass(("tidy table", "before"))

    async def forget_history(self) -> None:
        """Delete all versions before the one that is the newest when it begins."""
        await self.tidy()
        catalog, store = self._catalog, self._catalog.store
        newest = catalog.newest(self.url)
        if newest is None:
            raise ObjectStoreError(f"there is no table in {self.url}")
        await self._objects._pass(("forget history", "before"))
        fate = store.fate_of(TABLE_FAULTS)
        if fate in ("table refused", "table late"):
            raise ObjectStoreError(f"deleting old versions of the table in {self.url}: 503")
        versions = catalog.tables.get(self.url, [])
        versions[:] = [each for each in versions if each.number >= newest.number]
        await self._objects._pass(("forget history", "after"))
        if fate == "table lost":
            raise ObjectStoreError(f"deleting old versions of the table in {self.url}: no answer")

    async def drop(self) -> None:
        """Delete the table."""
        await self._objects._pass(("drop table", "before"))
        self._catalog.tables.pop(self.url, None)


def _delta(url: str, app_id: str, objects: ColdStoreOfProcess) -> TableOfProcess:
    return TableOfProcess(DELTA, url, app_id, objects)


def _files_of(files: Sequence[AddedFile]) -> dict[str, TableFile]:
    return {
        each.name: TableFile(
            each.name,
            each.size_bytes,
            (segment_of(each.name) or 0, each.end_entry),
            each.footer.num_rows,
        )
        for each in files
    }


def _catalog_of(objects: ColdStoreOfProcess) -> Catalog:
    catalog = objects._store.catalog
    assert catalog is not None
    return catalog


async def _forms_in(objects: ColdStoreOfProcess, url: str) -> list[TableForm]:
    await objects._pass()
    catalog = objects._store.catalog
    return [DELTA] if catalog is not None and url in catalog.tables else []


@contextmanager
def tables_are_simulated() -> Iterator[None]:
    """Let the product keep tables in the catalog of its run."""
    with (
        patch.object(table_keeper, "table_at", TableOfProcess),
        patch.object(table_guard, "table_at", TableOfProcess),
        patch.object(table_guard, "forms_in", _forms_in),
        # Redactions load these late.
        patch.object(tables, "table_at", TableOfProcess),
        patch.object(tables, "forms_in", _forms_in),
        patch.object(delta_tables, "DeltaTables", _delta),
    ):
        yield
