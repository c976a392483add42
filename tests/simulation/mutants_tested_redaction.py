"""Bugs of redaction and erasure that named tests catch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bookie.upkeep.compaction import Compactor
from bookie.upkeep.rounds import Upkeep
from dlcore.ops.upkeep.redaction import Call, Redaction, RedactionState
from dlcore.ops.upkeep.redaction_purge import Purger
from dlcore.ops.upkeep.redaction_scan import RedactionScanner
from tests.fixtures.memory_disk import MemoryDisk
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ops.upkeep.redaction import Effect

_ERASING = "bookie/test_erasing.py"
_MACHINE = "dlcore/ops/upkeep/test_redaction.py"
_REDACTOR = "dlcore/ops/upkeep/test_redactor.py"
_PURGE = "dlcore/ops/upkeep/test_redaction_purge.py"


async def _nothing(*_: Any, **__: Any) -> tuple[str, ...]:
    return ()


@caught_by(f"{_ERASING}::test_no_byte_of_the_ledger_is_in_a_file_afterwards")
def files_with_little_garbage_are_not_erased() -> Iterator[None]:
    """An erasure copies the files that are worth it, and answers that it has copied all."""
    run = Compactor.run

    def worth_it(self: Compactor, **_: Any) -> Any:
        return run(self)

    with (
        patch.object(Compactor, "run", worth_it),
        patch("bookie.upkeep.rounds._why_left", lambda *_: ""),
    ):
        yield


@caught_by(f"{_ERASING}::test_no_byte_of_the_ledger_is_in_a_file_afterwards")
def recycled_files_are_not_erased() -> Iterator[None]:
    """Files that are kept to be used again have the old bytes."""
    with patch.object(MemoryDisk, "use_spares", _nothing):
        yield


@caught_by(f"{_ERASING}::test_no_byte_of_it_is_in_a_file_of_a_real_disk")
def the_newest_file_is_not_erased() -> Iterator[None]:
    """The file that takes records has some of the ledger, too."""

    async def is_sealed(_: Upkeep) -> bool:
        return True

    with patch.object(Upkeep, "_seal_newest", is_sealed):
        yield


@caught_by(f"{_MACHINE}::test_runs_are_rewritten_from_the_last_one_on_and_scanned_again")
def the_log_is_not_read_again() -> Iterator[None]:
    """Rows that came, or moved, while others were rewritten stay."""
    next_run = Redaction._next_run

    def content(self: Redaction) -> Effect:
        if self._runs:
            return next_run(self)
        self._become(RedactionState.SCANNING)
        return self._begin_round()

    with patch.object(Redaction, "_next_run", content):
        yield


@caught_by(f"{_MACHINE}::test_after_a_crash_the_rounds_go_on")
def old_copies_of_a_crashed_redaction_stay() -> Iterator[None]:
    """After a crash nothing is found in the log, and that is taken for the end."""
    begin = Redaction._begin_round

    def content(self: Redaction) -> Effect:
        if self._is_changed:
            return begin(self)
        self._become(RedactionState.CLEAN)
        return Call.FINISH

    with patch.object(Redaction, "_begin_round", content):
        yield


@caught_by(f"{_REDACTOR}::test_a_fork_is_an_obstacle_that_is_named")
def forks_are_not_looked_for() -> Iterator[None]:
    """A log is redacted whose objects another one shares."""
    with patch.object(RedactionScanner, "_shared", _nothing):
        yield


@caught_by(f"{_PURGE}::test_copies_of_earlier_merges_and_tiers_go_too")
def ledgers_of_earlier_merges_stay() -> Iterator[None]:
    """Ledgers that a merge has just replaced are deleted after its grace, long after the answer."""
    with patch.object(Purger, "_merged_of_log", _nothing):
        yield


@caught_by(f"{_PURGE}::test_it_ends_when_all_bookies_have_answered")
def answers_of_bookies_are_not_awaited() -> Iterator[None]:
    """Bookies are asked, and that is taken for the end."""
    with patch.object(Purger, "_unanswered", _nothing):
        yield
