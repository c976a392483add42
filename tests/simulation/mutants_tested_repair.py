"""Bugs of auto-recovery that named tests catch: audit, election, repair, decommission."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec import structs

from dlcore.ledger.recovering import recovery as recovery_module
from dlcore.ledger.writing.appender import AppenderState, LedgerAppender
from dlcore.metadata.port import ANY_VERSION, SessionState
from dlcore.ops.autorecovery import (
    audit as audit_module,
    check as check_module,
    replicas as replicas_module,
    worker as worker_module,
)
from dlcore.ops.autorecovery.audit import BookieAudit, Shortage
from dlcore.ops.autorecovery.auditor import Auditor
from dlcore.ops.autorecovery.check import Held, Unknown
from dlcore.ops.autorecovery.copying import EntryCopier, Throttle
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.autorecovery.maintenance import Maintenance
from dlcore.ops.autorecovery.repair import LedgerRepairer
from dlcore.ops.autorecovery.runner import PausableRunner
from dlcore.ops.autorecovery.service import Election
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ledger.metadata.values import LedgerMetadata

_ROOM = "dlcore/ops/autorecovery"


@caught_by(f"{_ROOM}/test_hazards.py::test_a_writer_whose_lost_bookie_comes_back_is_not_fenced")
def a_repair_fences_a_writer_whose_bookie_came_back() -> Iterator[None]:
    """Section 5: the last look before a ledger is recovered asks for nothing but its ensemble.

    Not for the simulation: to fence a writer without need breaks no promise of safety.
    """

    async def is_still_kept(self: LedgerRepairer, plan: Any, metadata: LedgerMetadata) -> bool:
        stored = await self._context.ledger_store.read(metadata.ledger_id, fresh=True)
        return stored.metadata.last_ensemble == metadata.last_ensemble

    with patch.object(LedgerRepairer, "_is_still_kept", is_still_kept):
        yield


@caught_by(
    f"{_ROOM}/test_hazards.py"
    "::test_a_writer_that_replaces_its_lost_bookie_at_the_last_moment_is_not_fenced"
)
def a_repair_does_not_look_again_before_it_fences() -> Iterator[None]:
    """Section 5: what was decided before a long copy is done after it."""

    async def trust(self: LedgerRepairer, *about: Any) -> bool:
        return True

    with patch.object(LedgerRepairer, "_is_still_kept", trust):
        yield


@caught_by(
    f"{_ROOM}/test_service.py::test_a_writer_that_keeps_a_lost_bookie_is_fenced_after_the_grace_and_not_before"
)
def writers_get_no_grace() -> Iterator[None]:
    """Section 5: a live writer is fenced as soon as one of its bookies is lost."""
    with patch.object(LedgerRepairer, "_grace_left_s", lambda *_: 0.0):
        yield


@caught_by(
    f"{_ROOM}/test_service.py::test_a_writer_is_not_fenced_for_a_bookie_without_a_replacement"
)
def writers_are_fenced_for_nothing() -> Iterator[None]:
    """Section 5: a writer is fenced although no one could take the lost bookie's place."""
    with patch.object(LedgerRepairer, "_check_successor", lambda *_: None):
        yield


@caught_by(
    f"{_ROOM}/test_joining.py::test_a_joined_bookie_is_kept_out_where_the_ledger_changed_meanwhile"
)
def who_joins_undoes_what_changed_meanwhile() -> Iterator[None]:
    """A ledger is enlarged as it was when its entries were copied, whatever is stored now.

    Not for the simulation: a repair has the ledger's lock, so two seldom meet.
    """

    async def blind(self: LedgerRepairer, planned: LedgerMetadata, joined: Any, lock: str) -> bool:
        store = self._context.ledger_store
        stored = await store.read(planned.ledger_id, fresh=True)
        await store.write(planned.with_joined(joined), version=stored.version)
        return True

    with patch.object(LedgerRepairer, "_enlarge", blind):
        yield


@caught_by(f"{_ROOM}/test_joining.py::test_bookies_that_come_back_join")
def bookies_that_come_back_are_not_noticed() -> Iterator[None]:
    """A ledger that began small stays so until the next audit, minutes later."""
    with patch.object(Shortage, "has_eased", lambda *_: False):
        yield


@caught_by(
    f"{_ROOM}/test_swaps.py::test_a_writer_closes_its_ledger_on_top_of_what_was_changed_meanwhile"
)
def a_closing_writer_undoes_a_swap() -> Iterator[None]:
    """BOOKKEEPER-584: the end is stored with the ensembles that the writer knew.

    Not for the simulation: the lost bookie is put in again, and auto-recovery replaces it again.
    """
    judge = LedgerAppender._judge

    def undo(self: LedgerAppender, metadata: LedgerMetadata, version: int) -> Any:
        if self.state is AppenderState.STORING:
            metadata = structs.replace(metadata, ensembles=self.metadata.ensembles)
        return judge(self, metadata, version)

    with patch.object(LedgerAppender, "_judge", undo):
        yield


@caught_by(
    f"{_ROOM}/test_swaps.py::test_a_recovery_keeps_what_was_changed_in_earlier_ensembles_meanwhile"
)
def a_closing_recovery_undoes_a_swap() -> Iterator[None]:
    """BOOKKEEPER-584: the same, when a recovery closes the ledger."""
    closed_over = recovery_module.closed_over

    def undo(
        stored: LedgerMetadata, *, pinned: LedgerMetadata, **about: Any
    ) -> LedgerMetadata | None:
        undone = structs.replace(stored, ensembles=pinned.ensembles)
        return closed_over(undone, pinned=pinned, **about)

    with patch.object(recovery_module, "closed_over", undo):
        yield


@caught_by(
    f"{_ROOM}/test_swaps.py::test_a_bookie_that_is_back_before_the_copy_is_complete_keeps_its_place"
)
def a_bookie_that_is_back_loses_its_place() -> Iterator[None]:
    """Section 5: a swap does not look whether the lost bookie has come back."""
    swap = LedgerRepairer._swap

    async def blind(self: LedgerRepairer, *about: Any) -> bool:
        async def no_bookies() -> list[Any]:
            return []

        with patch.object(self._context.registry, "get_bookies", no_bookies):
            return await swap(self, *about)

    with patch.object(LedgerRepairer, "_swap", blind):
        yield


@caught_by(
    f"{_ROOM}/test_swaps.py::test_a_replacement_that_does_not_hold_what_it_acknowledged_stays_out"
)
def a_replacement_is_not_asked_for_proof() -> Iterator[None]:
    """BOOKKEEPER-237: what a bookie acknowledged counts as held."""
    missing_on = LedgerRepairer._missing_on
    copied: list[Any] = []
    copy = LedgerRepairer._copy

    async def note(self: LedgerRepairer, turn: Any, *about: Any, target: Any, **more: Any) -> None:
        await copy(self, turn, *about, target=target, **more)
        copied.append(target)

    async def trust(self: LedgerRepairer, bookie: Any, *about: Any) -> Any:
        return () if bookie in copied else await missing_on(self, bookie, *about)

    with (
        patch.object(LedgerRepairer, "_copy", note),
        patch.object(LedgerRepairer, "_missing_on", trust),
    ):
        yield


@caught_by(f"{_ROOM}/test_service.py::test_a_bookie_that_does_not_answer_is_unknown_and_not_empty")
def silence_is_an_empty_bookie() -> Iterator[None]:
    """#2908: a member that did not answer counts as one that holds nothing."""
    ask = replicas_module.ask_replica

    async def guess(*about: Any) -> Any:
        answer = await ask(*about)
        return Held(()) if isinstance(answer, Unknown) else answer

    with patch.object(replicas_module, "ask_replica", guess):
        yield


@caught_by(f"{_ROOM}/test_service.py::test_a_damaged_copy_is_not_copied")
def copies_are_not_verified() -> Iterator[None]:
    """Section 5: a damaged replica is multiplied."""
    with patch("dlcore.ops.autorecovery.copying.decode_frame", lambda *_, **__: None):
        yield


@caught_by(f"{_ROOM}/test_service.py::test_copies_and_checks_keep_their_pace")
def copies_have_no_pace() -> Iterator[None]:
    """#2802: a repair takes all of the cluster's network and disks."""

    async def at_once(self: Throttle, size: int) -> None:
        """Let everything pass."""

    with patch.object(Throttle, "take", at_once):
        yield


@caught_by(f"{_ROOM}/test_service.py::test_a_finding_made_while_a_ledger_is_repaired_is_not_lost")
def a_ledger_leaves_the_list_whatever_was_found_since() -> Iterator[None]:
    """Section 5.8: a worker takes off the list what was put on it while it worked."""
    remove = RepairList.remove

    async def blind(self: RepairList, listed: Any) -> bool:
        return await remove(self, replace(listed, version=ANY_VERSION))

    with patch.object(RepairList, "remove", blind):
        yield


@caught_by(f"{_ROOM}/test_service.py::test_two_processes_share_the_work_and_one_of_them_audits")
def everybody_is_the_auditor() -> Iterator[None]:
    """Section 5: an auditor's role that another one holds counts as taken."""

    async def yes(self: Election) -> bool:
        return True

    with patch.object(Election, "_is_ours", yes):
        yield


@caught_by(f"{_ROOM}/test_service.py::test_a_bookie_that_comes_back_in_time_changes_nothing")
def absence_is_loss() -> Iterator[None]:
    """Section 5.8: a bookie that restarts has all of its ledgers copied elsewhere."""
    init = BookieAudit.__init__

    def early(self: BookieAudit, *, lost_bookie_delay_s: float) -> None:
        init(self, lost_bookie_delay_s=0.0)

    with patch.object(BookieAudit, "__init__", early):
        yield


@caught_by(f"{_ROOM}/test_audit.py::test_no_bookie_is_lost_while_none_is_registered")
def a_restored_metadata_store_loses_everybody() -> Iterator[None]:
    """Section 5.8: when no bookie at all is registered, all of them are lost."""
    look = BookieAudit.look

    def count(self: BookieAudit, *, registered: Any, **about: Any) -> Any:
        class NoBookies(list[Any]):
            def __bool__(self) -> bool:
                return True

        return look(self, registered=registered or NoBookies(), **about)

    with patch.object(BookieAudit, "look", count):
        yield


@caught_by(
    f"{_ROOM}/test_hazards.py::test_an_incarnation_that_was_replaced_is_lost_at_the_first_audit"
)
def a_replaced_incarnation_is_only_absent() -> Iterator[None]:
    """#4812: an empty bookie under the same name is waited for as if its data could come back."""
    look = BookieAudit.look

    def by_name(self: BookieAudit, *, known: Any, registered: Any, now: float) -> Any:
        names = {each.name for each in registered}
        alike = {each for each in known if each.name in names}
        return look(self, known=known, registered={*registered, *alike}, now=now)

    with patch.object(BookieAudit, "look", by_name):
        yield


@caught_by(
    f"{_ROOM}/test_audit.py::test_a_ledger_lacks_replicas_by_the_lost_members_of_any_ensemble"
)
def only_the_last_ensemble_is_audited() -> Iterator[None]:
    """Section 5: bookies that only earlier ensembles name are not missed."""

    def last(metadata: LedgerMetadata, lost: Any) -> Any:
        return tuple(sorted(set(metadata.last_ensemble.bookies).intersection(lost)))

    with patch.object(audit_module, "lost_members", last):
        yield


@caught_by(f"{_ROOM}/test_check.py::test_missing_is_what_the_write_sets_say_less_what_is_held")
def a_striped_position_holds_one_run() -> Iterator[None]:
    """Section 5: of a striped ledger only the first entries of each position are checked."""
    expected = check_module.expected_ranges

    def first(*about: Any, **more: Any) -> Any:
        for each in expected(*about, **more):
            yield each
            return

    with patch.object(check_module, "expected_ranges", first):
        yield


@caught_by(f"{_ROOM}/test_plan.py::test_sources_that_answered_come_first_and_lost_ones_last")
def lost_sources_are_asked_first() -> Iterator[None]:
    """Section 5: every copy begins with a time-out at the bookie that is gone."""

    def unsorted(values: Any, key: Any = None) -> list[Any]:
        return sorted(values) if key is None else list(values)

    with patch("dlcore.ops.autorecovery.plan.sorted", unsorted, create=True):
        yield


@caught_by(f"{_ROOM}/test_runner.py::test_work_ends_with_its_session_and_with_a_pause")
def work_outlives_its_session() -> Iterator[None]:
    """Section 5: an auditor and a worker go on after their role and locks are gone."""

    def ignore(self: PausableRunner, state: SessionState) -> None:
        """Go on."""

    with patch.object(PausableRunner, "_on_session", ignore):
        yield


@caught_by(f"{_ROOM}/test_service.py::test_a_pause_stops_work_and_an_end_of_it_lets_it_go_on")
def a_pause_reaches_no_worker() -> Iterator[None]:
    """Section 5: an operator pauses auto-recovery, and it works on."""

    async def never(self: RepairList) -> bool:
        return False

    with patch.object(RepairList, "is_paused", never):
        yield


@caught_by(f"{_ROOM}/test_hazards.py::test_a_bookie_that_is_back_is_not_kept_on_the_list")
def who_is_back_stays_on_the_list() -> Iterator[None]:
    """Section 5: a bookie that was lost once is lost at once the next time."""
    note = RepairList.note_failure

    async def keep(self: RepairList, listed: Any, reason: str, **_: Any) -> Any:
        return await note(self, listed, reason)

    with patch.object(RepairList, "note_failure", keep):
        yield


@caught_by(f"{_ROOM}/test_hazards.py::test_a_failure_without_words_is_a_failure")
def an_error_without_words_is_success() -> Iterator[None]:
    """Section 5: a ledger leaves the list because its failure said nothing."""
    attempt = LedgerRepairer._attempt

    async def silent(self: LedgerRepairer, turn: Any, step: Any) -> None:
        await attempt(self, turn, step)
        turn.problems[:] = [each for each in turn.problems if not each.endswith("Error")]

    with patch.object(LedgerRepairer, "_attempt", silent):
        yield


@caught_by(f"{_ROOM}/test_hazards.py::test_a_long_list_is_not_read_again_for_every_ledger")
def the_list_is_read_for_every_ledger() -> Iterator[None]:
    """#2802: a worker reads the whole list of repairs after each of them."""
    repair_one = worker_module.Worker._repair_one

    async def wake(self: worker_module.Worker, ledger_id: int) -> None:
        await repair_one(self, ledger_id)
        self._wake.set()

    with patch.object(worker_module.Worker, "_repair_one", wake):
        yield


@caught_by(
    f"{_ROOM}/test_service.py::test_entries_missing_on_a_living_member_are_found_and_added_there"
)
def full_checks_find_nothing() -> Iterator[None]:
    """Section 5: only lost bookies are noticed, never lost entries."""

    async def fine(self: Auditor, *about: Any) -> tuple[bool, bool]:
        return False, False

    with patch.object(Auditor, "_check_one", fine):
        yield


@caught_by(
    f"{_ROOM}/test_maintenance.py::test_a_cookie_is_deleted_only_while_its_bookie_is_not_registered"
)
def a_decommission_asks_for_no_proof() -> Iterator[None]:
    """#515: the cookie of a bookie that has just been started again is deleted."""
    delete = Maintenance._delete_cookie

    async def blind(self: Maintenance, name: str, *, incarnation: str) -> None:
        store = self._context.store
        multi = store.multi

        async def unproved(ops: Any) -> None:
            await multi(ops[-1:])

        with patch.object(store, "multi", unproved):
            await delete(self, name, incarnation=incarnation)

    with patch.object(Maintenance, "_delete_cookie", blind):
        yield


@caught_by(
    f"{_ROOM}/test_maintenance.py::test_a_decommission_does_not_take_the_cookie_of_a_successor"
)
def a_decommission_takes_any_cookie() -> Iterator[None]:
    """#4812: the cookie of the next incarnation goes with the one that was decommissioned."""
    delete = Maintenance._delete_cookie

    async def any_cookie(self: Maintenance, name: str, *, incarnation: str) -> None:
        found = await self._read_cookie(name)
        await delete(self, name, incarnation=found.incarnation if found else incarnation)

    with patch.object(Maintenance, "_delete_cookie", any_cookie):
        yield


@caught_by(
    f"{_ROOM}/test_maintenance.py::test_a_decommission_ends_when_its_bookie_is_started_again"
)
def a_decommission_does_not_look_who_runs() -> Iterator[None]:
    """Section 5.8: a bookie that was started again is decommissioned for ever."""

    async def fine(self: Maintenance, name: str) -> Any:
        """Find no one who runs."""
        return await self._context.registry.get_bookies()

    with patch.object(Maintenance, "_require_stopped", fine):
        yield


@caught_by(
    f"{_ROOM}/test_service.py::test_unreadable_entries_keep_their_ledger_on_the_list_and_hold_up_no_other"
)
def a_copy_passes_over_what_it_cannot_read() -> Iterator[None]:
    """Section 5: an entry that no one gives is left out, and the rest counts as copied."""
    copy = EntryCopier.copy

    async def lenient(self: EntryCopier, ledger_id: int, lane: Any, *, target: Any) -> None:
        from dlcore.base.errors import LedgerReadError

        try:
            await copy(self, ledger_id, lane, target=target)
        except LedgerReadError:
            return

    async def trust(self: LedgerRepairer, *about: Any) -> tuple[()]:
        return ()

    with (
        patch.object(EntryCopier, "copy", lenient),
        patch.object(LedgerRepairer, "_missing_on", trust),
    ):
        yield
