"""Bugs of typed logs, put back on purpose: how schemas change, and what entries say of theirs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from dlcore.log.entries.body import move_entry
from dlcore.log.metadata.store import LogStore
from dlcore.log.reading.schemas import KnownSchemas
from dlcore.log.typed import schema as schema_module
from dlcore.log.typed.arrow import EntrySchemas
from dlcore.log.typed.rows import TypedRows
from dlcore.log.typed.schema import LogSchema
from dlcore.metadata.port import ANY_VERSION
from dlcore.metadata.stored import decode, encode
from dlcore.ops.upkeep import merger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from dlcore.log.metadata.values import LogKey
    from dlcore.log.typed.schema import Column


@contextlib.contextmanager
def schema_changes_are_not_guarded() -> Iterator[None]:
    """The later of two changes of a schema that meet writes over the other."""

    async def blind(
        self: LogStore, log: LogKey, change: Callable[[LogSchema], LogSchema]
    ) -> LogSchema:
        path = self.paths_of(log).schema
        node = await self._store.get(path, fresh=True)
        assert node is not None
        schema = change(decode(LogSchema, node.value, source=path))
        await self._store.put(path, encode(schema), version=ANY_VERSION)
        return schema

    with patch.object(LogStore, "change_schema", blind):
        yield


@contextlib.contextmanager
def unanswered_schema_changes_count_as_done() -> Iterator[None]:
    """A client that got no answer takes for real some columns that the log does not have."""
    change_schema = LogStore.change_schema

    async def hopeful(
        self: LogStore, log: LogKey, change: Callable[[LogSchema], LogSchema]
    ) -> LogSchema:
        planned: list[LogSchema] = []

        def once(known: LogSchema) -> LogSchema:
            if planned:
                raise _TriedError
            planned.append(change(known))
            return planned[0]

        try:
            return await change_schema(self, log, once)
        except _TriedError:
            return planned[0]

    with patch.object(LogStore, "change_schema", hopeful):
        yield


@contextlib.contextmanager
def columns_of_others_are_dropped() -> Iterator[None]:
    """A schema that is changed has the columns that were asked for, and no others."""
    merge_columns = schema_module.merge_columns

    def asked(known: Sequence[Column], columns: Sequence[Column]) -> Any:
        names = {column.name for column in columns}
        kept = [column for column in known if column.name in names or column.name == "value"]
        return merge_columns(kept, columns)

    with patch.object(schema_module, "merge_columns", asked):
        yield


@contextlib.contextmanager
def the_type_that_came_last_counts() -> Iterator[None]:
    """A column gets narrower when a client asks for less than another one did."""
    with patch.object(schema_module, "_join_leaves", lambda _, other: other):
        yield


@contextlib.contextmanager
def readers_keep_the_schema_that_they_opened_with() -> Iterator[None]:
    """An entry that was written by a later version of the schema cannot be read."""

    async def learn_nothing(_: KnownSchemas, schema_id: int) -> None:
        """Read nothing."""

    with patch.object(KnownSchemas, "learn", learn_nothing):
        yield


@contextlib.contextmanager
def entries_are_read_by_the_latest_schema() -> Iterator[None]:
    """Rows written before a change of the schema are decoded by the later one."""
    with patch.object(EntrySchemas, "of", lambda self, _: self.latest):
        yield


@contextlib.contextmanager
def entries_name_the_version_before() -> Iterator[None]:
    """Rows that were fitted to the latest version are said to have the one before."""
    of = TypedRows.of

    def late(log: str, batch: pa.RecordBatch, schema_id: int) -> TypedRows:
        return of(log, batch, max(1, schema_id - 1))

    with patch.object(TypedRows, "of", staticmethod(late)):
        yield


@contextlib.contextmanager
def merged_entries_forget_their_schema() -> Iterator[None]:
    """Entries that a merge copies are said to have the first version."""

    def forgetful(body: Any, **more: Any) -> Any:
        head, rest = map(bytes, move_entry(body, **more))
        is_typed = head[2:4] != bytes(2)
        return [head[:2] + int(is_typed).to_bytes(2, "big") + head[4:], rest]

    with patch.object(merger, "move_entry", forgetful):
        yield


class _TriedError(Exception):
    """It is tried a second time."""


MUTANTS = (
    columns_of_others_are_dropped,
    entries_are_read_by_the_latest_schema,
    entries_name_the_version_before,
    merged_entries_forget_their_schema,
    readers_keep_the_schema_that_they_opened_with,
    schema_changes_are_not_guarded,
    the_type_that_came_last_counts,
    unanswered_schema_changes_count_as_done,
)
