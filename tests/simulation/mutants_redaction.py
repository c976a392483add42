"""Bugs of redaction and of erasure put back on purpose, which the files or readers show."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pyarrow as pa

from bookie.upkeep.rounds import Upkeep
from dlcore.log.entries.redacted_rows import RowRedactor
from dlcore.ops.upkeep.redaction import Redaction
from dlcore.ops.upkeep.redaction_purge import Purger, _TableNames
from dlcore.ops.upkeep.table_keeper import TableKeeper

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ops.upkeep.redaction import Effect, Scanned


async def _nothing(*_: Any, **__: Any) -> tuple[str, ...]:
    return ()


@contextlib.contextmanager
def bookies_answer_and_erase_nothing() -> Iterator[None]:
    """Deleted rows stay in files until compaction is worth it."""

    async def erase(_: Upkeep, collect: Any, **__: Any) -> tuple[str, frozenset[int]]:
        await collect()
        return "", frozenset()

    with patch.object(Upkeep, "erase", erase):
        yield


@contextlib.contextmanager
def bookies_are_asked_and_not_heard() -> Iterator[None]:
    """The request is taken for the deed."""
    with patch.object(Purger, "_unanswered", _nothing):
        yield


@contextlib.contextmanager
def replaced_ledgers_wait_for_their_grace() -> Iterator[None]:
    """Replaced ledgers are left to the sweep, as after a merge."""
    with patch.object(Purger, "drop", _nothing), patch.object(Purger, "_undropped", _nothing):
        yield


@contextlib.contextmanager
def the_segment_in_progress_is_left_out() -> Iterator[None]:
    """Only completed segments are rewritten."""
    scanned = Redaction._scanned

    def content(self: Redaction, seen: Scanned) -> Effect:
        return scanned(self, replace(seen, open_rows=0, must_complete=False))

    with patch.object(Redaction, "_scanned", content):
        yield


@contextlib.contextmanager
def rows_are_redacted_with_their_entry() -> Iterator[None]:
    """A row beside one that is redacted becomes null, too."""
    mask_of = RowRedactor._mask

    def whole(self: RowRedactor, *entry: Any) -> Any:
        mask = mask_of(self, *entry)
        return pa.array([any(mask.to_pylist())] * len(mask))

    with patch.object(RowRedactor, "_mask", whole):
        yield


@contextlib.contextmanager
def objects_wait_for_the_sweep() -> Iterator[None]:
    """Objects that no ledger names any more stay until they are old."""
    with patch.object(Purger, "delete", _nothing):
        yield


@contextlib.contextmanager
def tables_keep_their_history() -> Iterator[None]:
    """Old versions stay, whose statistics have values of the rows."""

    async def follow(self: Purger) -> tuple[str, ...]:
        await TableKeeper(self._context, self._owner, compare_every_s=0).follow(self._log)
        return ()

    with patch.object(Purger, "follow", follow):
        yield


@contextlib.contextmanager
def objects_go_while_a_table_names_them() -> Iterator[None]:
    """Unnamed objects are deleted, and the table follows later."""

    async def none(*_: Any) -> _TableNames:
        return _TableNames(set())

    with patch.object(Purger, "follow", _nothing), patch.object(Purger, "_guard", none):
        yield


OF_LEDGERS = (
    bookies_are_asked_and_not_heard,
    bookies_answer_and_erase_nothing,
    replaced_ledgers_wait_for_their_grace,
    rows_are_redacted_with_their_entry,
    the_segment_in_progress_is_left_out,
)
OF_OBJECTS = (objects_wait_for_the_sweep,)
OF_TABLES = (
    objects_go_while_a_table_names_them,
    tables_keep_their_history,
)
MUTANTS = (*OF_LEDGERS, *OF_OBJECTS, *OF_TABLES)
