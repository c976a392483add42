"""Bugs of the tables of logs that named tests catch: the simulation has no tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from dlcore.log.cold import (
    delta_format,
    delta_log,
    delta_tables as delta_tables_module,
    iceberg_format,
)
from dlcore.log.cold.iceberg_io import TierFiles
from dlcore.log.cold.iceberg_tables import IcebergTables
from dlcore.ops.upkeep import table_guard as table_guard_module
from dlcore.ops.upkeep.table_commits import Commit, TableCommits, TableState
from dlcore.ops.upkeep.table_guard import TableGuard
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from dlcore.base.errors import DLError
    from dlcore.log.cold.table_format import Place, TableSeen
    from dlcore.ops.upkeep.table_commits import Chain, Effect

COMMITS = "dlcore/ops/upkeep/test_table_commits.py"
KEEPER = "dlcore/ops/upkeep/test_table_keeper.py"
ICEBERG = "dlcore/ops/upkeep/test_iceberg_tables.py"
_LIES = f"{ICEBERG}::test_a_catalog_that_lies_of_commits[sqlite-refused-made]"


@caught_by(f"{COMMITS}::test_workers_that_die_and_a_store_that_lies")
def a_commit_without_an_answer_was_made() -> Iterator[None]:
    """redpanda-data/connect#4591 the other way: what is not known is taken as done."""
    failed = TableCommits._failed

    def hopeful(self: TableCommits, error: DLError) -> Effect:
        if self.state is TableState.CHANGING and self._table is not None:
            self._table = self._table._replace(position=self._position)
            self._become(TableState.LOOKING)
            return self._read()
        return failed(self, error)

    with patch.object(TableCommits, "_failed", hopeful):
        yield


@caught_by(f"{COMMITS}::test_a_table_that_does_not_fit_is_refused")
def a_table_that_is_ahead_is_left() -> Iterator[None]:
    """Rows of a log that was restored are dropped in silence, as by connectors keyed by name."""

    def silent(self: TableCommits, table: TableSeen, position: Place, chain: Chain) -> None:
        """Refuse nothing."""

    with patch.object(TableCommits, "_require_fit", silent):
        yield


@caught_by(f"{COMMITS}::test_segments_that_were_truncated_before_they_came_are_passed")
def truncated_segments_are_not_passed() -> Iterator[None]:
    """The position stays before segments that were truncated, and their objects for ever."""
    advance = TableCommits._advance

    def staying(self: TableCommits, table: TableSeen, position: Place, chain: Chain) -> Effect:
        effect = advance(self, table, position, chain)
        if isinstance(effect, Commit) and not effect.adds:
            self._position = position
            return replace(effect, position=position)
        return effect

    with patch.object(TableCommits, "_advance", staying):
        yield


@caught_by(f"{KEEPER}::test_truncated_records_leave_the_table_before_their_objects")
def sweeps_do_not_ask_tables() -> Iterator[None]:
    """Objects go as soon as no ledger names them, and the table's files dangle."""

    async def never(self: TableGuard, url: str) -> bool:
        return False

    with patch.object(TableGuard, "keeps", never):
        yield


@caught_by(f"{KEEPER}::test_truncated_records_leave_the_table_before_their_objects")
def sweeps_take_what_tables_may_still_add() -> Iterator[None]:
    """An object goes that is not in the table yet, and a commit that was begun before names it."""
    table = table_guard_module._Table

    def named(self: Any, name: str) -> bool:
        return name in self._names

    with patch.object(table, "keeps", named):
        yield


@caught_by(f"{KEEPER}::test_two_workers_at_once")
def commits_have_no_position() -> Iterator[None]:
    """A commit adds files, and does not say how far the table is."""
    made = delta_log.commit_of

    def without(*arguments: Any, **options: Any) -> bytes:
        lines = made(*arguments, **options).splitlines(keepends=True)
        return b"".join(each for each in lines if not each.startswith(b'{"txn"'))

    with patch.object(delta_tables_module, "commit_of", without):
        yield


@caught_by("dlcore/log/test_delta_tables.py::test_a_table_that_was_made_again")
def tables_that_are_known_are_the_same() -> Iterator[None]:
    """A table that was deleted is read on from the version that it had before."""
    with (
        patch.object(delta_tables_module, "identity_of", lambda _: b"?"),
        patch.object(delta_log, "identity_of", lambda _: b"?"),
    ):
        yield


@caught_by("dlcore/log/test_table_format.py::test_files_that_dlog_did_not_add")
def files_of_others_are_taken() -> Iterator[None]:
    """A table that another program changed is followed, as if it were the log's."""

    def all_of(rows: Any) -> tuple[Any, ...]:
        return tuple((row["path"], row["size_bytes"], (1, 1), row["num_records"]) for row in rows)

    with (
        patch.object(delta_format, "files_of", all_of),
        patch.object(delta_tables_module, "files_of", all_of),
    ):
        yield


@caught_by(_LIES)
def manifests_of_refused_commits_are_deleted() -> Iterator[None]:
    """A commit was made, its answer lost, and its second request refused: its manifests go."""

    def delete(self: TierFiles, location: Any) -> None:
        Path(str(location).removeprefix("file://")).unlink(missing_ok=True)

    with patch.object(TierFiles, "delete", delete):
        yield


@caught_by(f"{ICEBERG}::test_a_catalog_that_shows_an_older_table")
def the_library_tries_commits_again() -> Iterator[None]:
    """On top of a newer snapshot, whose files it adds a second time."""
    retries = "commit.retry.num-retries"
    known = {**iceberg_format._PROPERTIES, retries: "4", "commit.retry.min-wait-ms": "1"}
    with (
        patch.object(iceberg_format, "_PROPERTIES", known),
        patch.object(iceberg_format, "_REQUIRED", {}),
    ):
        yield


@caught_by(f"{ICEBERG}::test_another_catalog_does_not_make_the_table_again")
def a_table_that_the_catalog_lacks_is_gone() -> Iterator[None]:
    """A worker with another catalog makes it again, and its sweep deletes the files."""

    async def nothing(self: IcebergTables, place: tuple[str, str]) -> None:
        return None

    with patch.object(IcebergTables, "_require_unused", nothing):
        yield


@caught_by(f"{ICEBERG}::test_old_snapshots_go_with_what_only_they_had")
def manifests_of_snapshots_with_a_tag_are_deleted() -> Iterator[None]:
    """Files of an expired snapshot go, also if another one has them."""
    expire = IcebergTables._expire

    def all_of(self: IcebergTables) -> Any:
        table = self._table
        metadata = table.metadata
        every = {m.manifest_path for s in metadata.snapshots for m in s.manifests(table.io)}
        return sorted({*expire(self), *every})

    with patch.object(IcebergTables, "_expire", all_of):
        yield
