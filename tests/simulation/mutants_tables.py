"""Bugs of tables beside logs, and of the guard of their objects, put back on purpose."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

from dlcore.log.cold.table_format import TableFiles
from dlcore.ops.upkeep import table_guard
from dlcore.ops.upkeep.table_commits import Commit, TableCommits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.log.cold.table_format import Place, TableSeen
    from dlcore.ops.upkeep.table_commits import Chain, Effect


@contextlib.contextmanager
def commits_leave_out_their_first_file() -> Iterator[None]:
    """The position moves over a file that the commit does not add."""
    advance = TableCommits._advance

    def brief(self: TableCommits, table: TableSeen, position: Place, chain: Chain) -> Effect:
        effect = advance(self, table, position, chain)
        if isinstance(effect, Commit) and len(effect.adds) > 1:
            return replace(effect, adds=effect.adds[1:])
        return effect

    with patch.object(TableCommits, "_advance", brief):
        yield


@contextlib.contextmanager
def positions_stay_behind_their_files() -> Iterator[None]:
    """A commit adds files, and leaves the position where it was."""
    advance = TableCommits._advance

    def behind(self: TableCommits, table: TableSeen, position: Place, chain: Chain) -> Effect:
        effect = advance(self, table, position, chain)
        return replace(effect, position=position) if isinstance(effect, Commit) else effect

    with patch.object(TableCommits, "_advance", behind):
        yield


@contextlib.contextmanager
def tables_keep_truncated_files() -> Iterator[None]:
    """Truncated rows stay in the table."""
    advance = TableCommits._advance

    def keeping(self: TableCommits, table: TableSeen, position: Place, chain: Chain) -> Effect:
        return advance(self, table._replace(files=TableFiles()), position, chain)

    with patch.object(TableCommits, "_advance", keeping):
        yield


@contextlib.contextmanager
def sweeps_ask_no_table() -> Iterator[None]:
    """Objects that no ledger names go, though a table names them."""

    async def nothing(*_: object) -> bool:
        return False

    with patch.object(table_guard.TableGuard, "keeps", nothing):
        yield


MUTANTS = (
    commits_leave_out_their_first_file,
    positions_stay_behind_their_files,
    sweeps_ask_no_table,
    tables_keep_truncated_files,
)
