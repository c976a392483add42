"""Bugs of tiering that named tests catch: simulated clocks agree, and segments are small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec.structs import replace

from dlcore.base.errors import CorruptMetadataError
from dlcore.log.cold import reading
from dlcore.log.metadata.segment import Extent
from dlcore.ops.upkeep import tier_rounds, tier_visits, tiering
from dlcore.ops.upkeep.tier_visits import LogVisits, TierVisits
from dlcore.ops.upkeep.tierer import LogTierer
from dlcore.ops.upkeep.tiering import TierRun
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ops.upkeep.tiering import Effect

_MACHINE = "dlcore/ops/upkeep/test_tiering.py"
_TIERER = "dlcore/ops/upkeep/test_tierer.py"
_READ_BACK = "dlcore/ops/upkeep/test_read_back.py"
_ROUNDS = "dlcore/ops/upkeep/test_tier_rounds.py"
_VISITS = "dlcore/ops/upkeep/test_tier_visits.py"


@caught_by(f"{_MACHINE}::test_another_name_after_a_failure_and_then_no_more")
def what_was_read_back_is_not_compared() -> Iterator[None]:
    """An object that can be read is taken, whatever its rows are."""
    compare = TierRun._compare

    def content(self: TierRun, _: Any) -> Effect:
        assert self._written is not None
        return compare(self, self._written.facts)

    with patch.object(TierRun, "_compare", content):
        yield


@caught_by(f"{_MACHINE}::test_another_name_after_a_failure_and_then_no_more")
def objects_are_written_again_under_the_same_name() -> Iterator[None]:
    """A store that has the name already refuses each further attempt."""

    def name(self: TierRun) -> str:
        assert self._created is not None
        return f"{self._created.ledger_id}-{self._created.token}-{len(self._objects)}-1.parquet"

    with patch.object(TierRun, "_name", name):
        yield


@caught_by(f"{_MACHINE}::test_another_name_after_a_failure_and_then_no_more")
def a_store_that_fails_is_tried_for_ever() -> Iterator[None]:
    """One log's store holds up all others."""
    with patch.object(tiering, "ATTEMPTS_MAX", 1_000_000):
        yield


@caught_by(f"{_MACHINE}::test_other_entries_than_the_metadata_says")
def entries_are_not_counted() -> Iterator[None]:
    """The answers of bookies are taken for the entries that the log's metadata names."""
    check = TierRun._check

    def content(self: TierRun, written: Any) -> Effect:
        try:
            return check(self, written)
        except CorruptMetadataError:
            self._become(tiering.TierState.READING_BACK)
            self._written = written
            return tiering.Check(self._name(), written.size_bytes)

    with patch.object(TierRun, "_check", content):
        yield


@caught_by(f"{_READ_BACK}::test_old_ledgers_stay_for_a_grace_of_their_own")
def tiered_ledgers_go_as_soon_as_merged_ones() -> Iterator[None]:
    """A task that was planned before is as old as its ledgers get."""
    made = LogTierer.__init__

    def early(self: LogTierer, *about: Any) -> None:
        made(self, *about)
        self._kept_ms = 0

    with patch.object(LogTierer, "__init__", early):
        yield


@caught_by(f"{_TIERER}::test_the_same_records_from_objects")
def a_first_run_is_all_of_a_segment() -> Iterator[None]:
    """A segment of several runs counts as done with the first one."""
    tier_run = LogTierer._tier_run

    async def done(self: LogTierer, at: Any, stored: Any, run: Any, tier: str) -> bool:
        is_tiered = await tier_run(self, at, stored, run, tier)
        self._known[at.log.log_id].settled.add(stored.lssn)
        return is_tiered

    with patch.object(LogTierer, "_tier_run", done):
        yield


@caught_by(f"{_TIERER}::test_reads_from_any_position")
def edges_of_cold_reads_are_whole_row_groups() -> Iterator[None]:
    """A reader that begins within a row group gets all of it."""
    with patch.object(reading, "_within", lambda frames, _first, _last: frames):
        yield


@caught_by(f"{_TIERER}::test_the_same_records_from_objects")
def entries_keep_the_times_of_their_writers() -> Iterator[None]:
    """An entry from a clock that is behind is older in an object than in its extent."""
    with patch.object(Extent, "timestamp_ms", lambda _, written_ms: written_ms - 1):
        yield


@caught_by(f"{_TIERER}::test_the_last_stamps_of_producers_stay_on_bookies")
def the_last_stamps_of_producers_go_too() -> Iterator[None]:
    """A new owner of the log does not find the numbers that producers had."""
    look_at = tier_visits.look_at

    def blind(head: Any, *about: Any, **more: Any) -> Any:
        return look_at(replace(head, producers_lssn=0), *about, **more)

    with patch("dlcore.ops.upkeep.tierer.look_at", blind):
        yield


@caught_by(f"{_ROUNDS}::test_deleted_logs_are_forgotten")
def deleted_logs_are_remembered() -> Iterator[None]:
    """The memory of a worker grows with all logs that there ever were."""

    def forget_nothing(self: TierVisits) -> set[str]:
        return {each.log.log_id for each in self._logs.values()}

    with patch.object(TierVisits, "end", forget_nothing):
        yield


@caught_by(f"{_ROUNDS}::test_a_quiet_log_costs_nothing_until_something_can_be_due")
def each_log_is_looked_at_in_each_round() -> Iterator[None]:
    """Ten thousand logs are read each minute, though nothing can be due in most."""
    with patch.object(TierVisits, "looked", lambda *_, **__: None):
        yield


@caught_by(f"{_ROUNDS}::test_the_namespace_has_a_tier_for_logs_without_one")
def the_namespace_overrules_its_logs() -> Iterator[None]:
    """A log that wants to stay on bookies goes to the tier of the namespace."""
    rule_of = tier_visits.rule_of

    def deaf(settings: Any, config: Any) -> Any:
        return rule_of(settings if settings.tier_url else type(settings)(), config)

    with (
        patch.object(tier_rounds, "rule_of", deaf),
        patch("dlcore.ops.upkeep.tierer.rule_of", deaf),
    ):
        yield


@caught_by(f"{_VISITS}::test_a_finished_object_is_not_read_again")
def settled_segments_are_kept_for_ever() -> Iterator[None]:
    """The memory of a worker for a log grows with the log's age."""

    def advance(self: LogVisits, done: int) -> None:
        self.done = max(self.done, done)

    with patch.object(LogVisits, "advance", advance):
        yield
