"""The catalogue of known bugs of systems like this one: the simulation must find each of them.

A mutant is a context manager that puts one bug back for as long as it is open.  Some bugs need a
rare meeting of faults; their mutants run under a *focus*: plans with the faults that matter here.
Without a mutant every focus must pass like any other plan.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec import structs

from bookie.config import GarbageConfig
from dlcore.base.config import QuorumConfig
from tests.simulation import (
    mutants_bookie,
    mutants_client,
    mutants_consumers,
    mutants_disk,
    mutants_garbage,
    mutants_life,
    mutants_log_writers,
    mutants_logs,
    mutants_proxy,
    mutants_quorum,
    mutants_recovery,
    mutants_redaction,
    mutants_remotes,
    mutants_rules,
    mutants_sinks,
    mutants_space,
    mutants_stale,
    mutants_storage,
    mutants_tables,
    mutants_tier,
    mutants_types,
    mutants_wire,
    mutants_writing,
)
from tests.simulation.plan import Plan, draw_usual_plan, with_logs, with_proxies, with_redactions

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    Apply = Callable[[], contextlib.AbstractContextManager[None]]


_MODULES = (
    mutants_client,
    mutants_consumers,
    mutants_quorum,
    mutants_bookie,
    mutants_disk,
    mutants_garbage,
    mutants_life,
    mutants_log_writers,
    mutants_logs,
    mutants_proxy,
    mutants_recovery,
    mutants_redaction,
    mutants_remotes,
    mutants_rules,
    mutants_sinks,
    mutants_space,
    mutants_stale,
    mutants_storage,
    mutants_tables,
    mutants_tier,
    mutants_types,
    mutants_wire,
    mutants_writing,
)
_USUAL = QuorumConfig(ensemble_size=3, write_quorum_size=3, ack_quorum_size=2)


def _any(plan: Plan) -> Plan:
    return plan


def _takeovers(plan: Plan) -> Plan:
    """Recoverers against writers, and bookies that are lost just after they fenced."""
    return replace(
        plan,
        quorum=_USUAL,
        faults=("bookie dies", "partition", "lag", "bookie pauses"),
        hunt_chance=0.6,
        disk_latency_s=0.0005,
        writers=2,
    )


def _slow_disks(plan: Plan) -> Plan:
    """Entries that are sent twice while their first copy is on its way to a disk that may die."""
    faults = ("crash at a step", "weather", "bookie dies")
    return replace(_takeovers(plan), faults=faults, fault_interval_s=0.1, disk_latency_s=0.05)


def _changes(plan: Plan) -> Plan:
    """Ensemble changes one after the other, and a metadata store that is slow."""
    return replace(
        plan,
        quorum=_USUAL,
        spare_bookies=2,
        faults=("bookie dies", "lag", "lag", "weather"),
        fault_interval_s=0.2,
        metadata_latency_s=0.2,
        disk_latency_s=0.0005,
        writers=2,
    )


def _lost_replies(plan: Plan) -> Plan:
    """Ensemble changes and recoveries whose writes to the metadata store are answered or not."""
    faults = ("metadata", "metadata", "metadata", "bookie dies", "lag")
    return replace(_changes(plan), faults=faults, fault_interval_s=0.1)


def _with_small_files(plan: Plan) -> Plan:
    storage = replace(plan.storage, file_bytes_max=4096, file_entries_max=4, settle_interval_s=0.1)
    return replace(plan, quorum=_USUAL, storage=storage, writers=2)


def _crashes(plan: Plan) -> Plan:
    """Disks that fail and lose what was not synced."""
    faults = ("bookie dies", "crash at a step", "sync error")
    return replace(_with_small_files(plan), faults=faults, fault_interval_s=0.1)


def _garbage(plan: Plan) -> Plan:
    """Ledgers that are deleted, or seem to be, while bookies collect garbage and die."""
    return replace(
        _with_small_files(plan),
        faults=("deletion", "deletion", "bookie dies", "crash at a step", "clock jump"),
        maintenance_interval_s=0.3,
        hiding_chance=0.3,
        fault_interval_s=0.5,
    )


def _lost_disks(plan: Plan) -> Plan:
    """Disks that are lost, one soon after the other, and bookies that start on the new ones."""
    return replace(_repairs(plan), faults=("lost disk",), fault_interval_s=0.1)


def _made_up_ledgers(plan: Plan) -> Plan:
    """Ids that no one was given, beside ledgers that are deleted."""
    return replace(_garbage(plan), faults=("deletion", "made-up ledger"))


def _repairs(plan: Plan) -> Plan:
    """Disks that are lost, and auto-recovery that makes good for them while a writer writes."""
    return replace(
        plan,
        quorum=_USUAL,
        spare_bookies=2,
        auto_recoveries=1,
        faults=("lost disk", "lost disk", "bookie dies"),
        fault_interval_s=0.5,
        disk_latency_s=0.0005,
    )


def _scene(
    name: str, *, acks: tuple[int, ...] = (2,), spares: int = 0, **more: Any
) -> Callable[[Plan], Plan]:
    """Return a focus that plays a scene, with nothing else that goes wrong."""

    def change(plan: Plan) -> Plan:
        ack = acks[plan.quorum.ensemble_size % len(acks)]  # as good as drawn
        return replace(
            _with_small_files(plan),
            quorum=structs.replace(_USUAL, ack_quorum_size=ack),
            spare_bookies=spares,
            faults=(),
            scene=name,
            writers=1,
            disk_latency_s=0.0005,
            maintenance_interval_s=0.0,
            auto_recoveries=0,
            hunt_chance=0.0,
            **more,
        )

    return change


def _lonely_fences(plan: Plan) -> Plan:
    return replace(_scene("lonely_fence")(plan), maintenance_interval_s=0.3)


def _rotten_files(plan: Plan) -> Plan:
    return replace(_scene("rotten_file")(plan), maintenance_interval_s=0.3)


def _full_disks(plan: Plan) -> Plan:
    """With quick garbage collection: what it needs beside time is room."""
    storage = replace(
        _with_small_files(plan).storage,
        in_flight_bytes_max=1 << 20,
        garbage=GarbageConfig(age_ms=200, brake_count=2),
    )
    scene = _scene("full_disk", metadata_latency_s=0.002, hiding_chance=0.0)
    return replace(scene(plan), storage=storage, maintenance_interval_s=0.2)


def _missed(scene: str) -> Callable[[Plan], Plan]:
    """Return a focus on a bookie that is thought to be gone: auto-recovery replaces it."""
    return lambda plan: replace(_scene(scene, spares=2)(plan), auto_recoveries=1)


def _stripes(plan: Plan) -> Plan:
    striped = QuorumConfig(ensemble_size=4, write_quorum_size=3, ack_quorum_size=2)
    return replace(plan, quorum=striped)


def _contested_swaps(plan: Plan) -> Plan:
    scene = _scene("contested_swap", spares=3, metadata_latency_s=0.05)
    return replace(scene(plan), auto_recoveries=2)


def _striped_repairs(plan: Plan) -> Plan:
    striped = QuorumConfig(ensemble_size=5, write_quorum_size=2, ack_quorum_size=2)
    return replace(_repairs(plan), quorum=striped)


def _moved_lacs(plan: Plan) -> Plan:
    pair = QuorumConfig(ensemble_size=2, write_quorum_size=2, ack_quorum_size=2)
    return replace(_scene("moved_lacs", spares=3)(plan), quorum=pair)


def _published_lacs(plan: Plan) -> Plan:
    """Striped, so that coverage matters."""
    striped = QuorumConfig(ensemble_size=4, write_quorum_size=2, ack_quorum_size=2)
    return replace(_scene("published_lacs")(plan), quorum=striped)


def _many_files(plan: Plan) -> Plan:
    storage = replace(_with_small_files(plan).storage, file_entries_max=1, open_files_max=2)
    return replace(_scene("read_again")(plan), storage=storage)


def _rough_stripes(plan: Plan) -> Plan:
    striped = QuorumConfig(ensemble_size=5, write_quorum_size=3, ack_quorum_size=2)
    scene = _scene("rough_links", spares=2, metadata_latency_s=0.2)
    return replace(scene(plan), quorum=striped)


def _rough_pairs(plan: Plan) -> Plan:
    """Two bookies, so that an ensemble change may replace all of them."""
    pair = QuorumConfig(ensemble_size=2, write_quorum_size=2, ack_quorum_size=2)
    return replace(_scene("rough_links", spares=3, metadata_latency_s=0.05)(plan), quorum=pair)


def _damaged_ends(plan: Plan) -> Plan:
    """The same while files are large, so that more follows in the file that is damaged."""
    storage = replace(plan.storage, file_bytes_max=40_960, settle_interval_s=0.1)
    return replace(_scene("damaged_tail", acks=(2, 3))(plan), storage=storage)


def _logs(plan: Plan) -> Plan:
    """Logs that are appended to, merged, truncated and read by processes that die."""
    return replace(
        with_logs(plan),
        log_writers=0,
        quorum=_USUAL,
        spare_bookies=1,
        faults=("client dies", "metadata", "metadata", "client pauses", "lag"),
        fault_interval_s=0.5,
        metadata_latency_s=0.002,
        disk_latency_s=0.0005,
        auto_recoveries=0,
        maintenance_interval_s=0.3,
        hiding_chance=0.0,
    )


def _merged_logs(plan: Plan) -> Plan:
    """The same logs, whose small extents several processes merge at once."""
    return replace(_logs(plan), mergers=4)


def _written_logs(plan: Plan) -> Plan:
    """The same logs, with writers that compete for them."""
    return replace(_logs(plan), log_writers=3)


def _lived_logs(plan: Plan) -> Plan:
    """The same, which are renamed, sealed and so on meanwhile."""
    return replace(_logs(plan), log_writers=2, has_life=True)


_TIER_STEPS_TO_LIVE = 25


def _tiered_logs(plan: Plan) -> Plan:
    """The same, whose old segments go to objects."""
    return replace(_logs(plan), log_writers=1, has_tier=True, has_tables=False)


def _logs_with_tables(plan: Plan) -> Plan:
    """The same, each with a table; metadata is quick, and all goes at once, for many commits."""
    tiered = replace(_tiered_logs(plan), has_tables=True, is_encrypted=False, tier_after_s=0.0)
    return replace(tiered, metadata_latency_s=0.001)


def _dying_tiers(plan: Plan) -> Plan:
    """The same without tables, whose processes die within a few requests, again and again."""
    tiered = replace(_tiered_logs(plan), tier_after_s=0.0, metadata_latency_s=0.001)
    return replace(tiered, tier_steps_to_live=_TIER_STEPS_TO_LIVE)


def _dying_tables(plan: Plan) -> Plan:
    """The same with tables."""
    return replace(_logs_with_tables(plan), tier_steps_to_live=_TIER_STEPS_TO_LIVE)


def _redacted_logs(plan: Plan) -> Plan:
    """The same, with one whose rows are redacted; others have no writers, for many redactions."""
    return with_redactions(_logs(plan))


def _redacted_tiers(plan: Plan) -> Plan:
    """The same, whose old segments go to objects."""
    return replace(_redacted_logs(plan), has_tier=True, tier_after_s=0.0)


def _redacted_tables(plan: Plan) -> Plan:
    """The same, each log with a table."""
    return replace(_redacted_tiers(plan), has_tables=True, is_encrypted=False)


def _typed_logs(plan: Plan) -> Plan:
    """The same, with one that is typed."""
    return replace(_logs(plan), has_types=True)


def _proxies(plan: Plan) -> Plan:
    """Logs that are written and read through proxies."""
    return with_proxies(_logs(plan))


def _consumers(plan: Plan) -> Plan:
    """The same, with subscribers over proxies."""
    return with_proxies(_logs(plan), has_consumers=True)


def _remotes(plan: Plan) -> Plan:
    """The same proxies, with programs that write over them by the real client."""
    return with_proxies(_logs(plan), has_remotes=True)


def _rules(plan: Plan) -> Plan:
    """The same proxies, which judge calls by rules of access."""
    return replace(with_proxies(_logs(plan)), has_rules=True)


def _sinks(plan: Plan) -> Plan:
    """The same logs, with queries of Spark that write to them."""
    return replace(_logs(plan), has_sinks=True)


def _remote_sinks(plan: Plan) -> Plan:
    """The same proxies, with such queries; most of these know proxies alone."""
    return replace(with_proxies(_logs(plan)), has_sinks=True)


def _wire(plan: Plan) -> Plan:
    return replace(plan, has_wire=True)


FOCUSES: dict[str, Callable[[Plan], Plan]] = {
    "any": _any,
    "consumers": _consumers,
    "takeovers": _takeovers,
    "crashes": _crashes,
    "garbage": _garbage,
    "repairs": _repairs,
    "rough pairs": _rough_pairs,
    "striped repairs": _striped_repairs,
    "slow disks": _slow_disks,
    "stripes": _stripes,
    "busy takeovers": _scene("busy_takeover", spares=3, metadata_latency_s=0.05),
    "changing recoveries": _scene("changing_recovery", spares=2),
    "contested swaps": _contested_swaps,
    "creations": _scene("creations"),
    "damaged footers": _scene("damaged_footer"),
    "damaged ends of large files": _damaged_ends,
    "damaged last entries": _scene("damaged_tail", acks=(2, 3)),
    "late adds": _scene("late_add", acks=(2, 3)),
    "full disks": _full_disks,
    "late closes": _scene("late_close"),
    "lost replies": _lost_replies,
    "lost disks": _lost_disks,
    "made-up ledgers": _made_up_ledgers,
    "many files": _many_files,
    "any logs": with_logs,
    "logs": _logs,
    "lived logs": _lived_logs,
    "merged logs": _merged_logs,
    "proxies": _proxies,
    "remote sinks": _remote_sinks,
    "remotes": _remotes,
    "rules": _rules,
    "sinks": _sinks,
    "tiered logs": _tiered_logs,
    "dying tiers": _dying_tiers,
    "dying tables": _dying_tables,
    "redacted logs": _redacted_logs,
    "redacted tiers": _redacted_tiers,
    "redacted tables": _redacted_tables,
    "logs with tables": _logs_with_tables,
    "typed logs": _typed_logs,
    "written logs": _written_logs,
    "lonely fences": _lonely_fences,
    "missed bookies": _missed("missed_bookie"),
    "missed bookies in recovery": _missed("missed_in_recovery"),
    "moved LACs": _moved_lacs,
    "moved tails": _scene("moved_tail", acks=(2, 3), spares=2),
    "published LACs": _published_lacs,
    "rotten files": _rotten_files,
    "rough links": _scene("rough_links", spares=2, metadata_latency_s=0.2),
    "rough stripes": _rough_stripes,
    "wire": _wire,
    "wire and crashes": lambda plan: _wire(_crashes(plan)),
    "wire and damage": lambda plan: _wire(_scene("damaged_tail", acks=(2, 3))(plan)),
    "wire and repairs": lambda plan: _wire(_repairs(plan)),
    "torn changes": _scene("torn_change", spares=1, metadata_latency_s=0.2),
}
_FOCUS_OF = {
    **dict.fromkeys(mutants_consumers.MUTANTS, "consumers"),
    **dict.fromkeys(mutants_garbage.MUTANTS, "garbage"),
    **dict.fromkeys(mutants_disk.MUTANTS, "crashes"),
    **dict.fromkeys(mutants_recovery.MUTANTS, "repairs"),
    **dict.fromkeys(mutants_space.MUTANTS, "full disks"),
    mutants_bookie.damage_is_called_absence: "damaged last entries",
    mutants_bookie.fences_are_not_logged: "lonely fences",
    mutants_bookie.fences_of_unknown_ledgers_do_not_stick: "takeovers",
    mutants_bookie.followers_get_what_is_not_confirmed: "late adds",
    mutants_bookie.footers_forget_fences: "lonely fences",
    mutants_bookie.negative_answers_before_the_fence_is_durable: "late adds",
    mutants_bookie.open_files_are_not_counted: "many files",
    mutants_client.a_read_gives_up_after_one_replica: "damaged footers",
    mutants_client.a_read_relies_on_the_lac: "published LACs",
    mutants_client.acks_during_an_ensemble_change: "torn changes",
    mutants_client.new_ensembles_start_at_the_lac: "rough links",
    mutants_client.one_no_ends_the_ledger: "damaged last entries",
    mutants_client.recovery_asks_the_bookies_it_added: "changing recoveries",
    mutants_client.recovery_reads_do_not_fence: "late adds",
    mutants_client.recovery_starts_at_the_lac_alone: "moved tails",
    mutants_client.recovery_stores_its_ensembles: "changing recoveries",
    mutants_client.recovery_takes_damage_for_noes: "damaged last entries",
    mutants_client.recovery_takes_errors_for_noes: "damaged last entries",
    mutants_client.recovery_takes_silence_for_noes: "damaged last entries",
    mutants_client.recovery_writes_back_to_one_bookie: "takeovers",
    mutants_client.replaced_bookies_get_nothing_again: "torn changes",
    mutants_client.the_writer_ignores_fences: "busy takeovers",
    mutants_client.the_writer_takes_its_ledger_back: "busy takeovers",
    mutants_client.write_sets_count_from_the_ensemble: "rough stripes",
    mutants_disk.a_damaged_footer_is_read_as_empty: "damaged footers",
    mutants_disk.an_empty_disk_keeps_the_identity: "lost disks",
    mutants_disk.damage_is_taken_for_a_torn_tail: "damaged ends of large files",
    mutants_disk.marks_are_not_written: "damaged ends of large files",
    mutants_recovery.compaction_drops_damaged_entries: "rotten files",
    mutants_recovery.compaction_forgets_fences_and_lacs: "garbage",
    mutants_recovery.compaction_moves_nothing: "garbage",
    mutants_recovery.the_last_ensemble_of_an_open_ledger_is_changed: "missed bookies",
    mutants_garbage.any_ledger_id_is_believed: "made-up ledgers",
    mutants_garbage.files_without_entries_are_garbage: "lonely fences",
    mutants_stale.a_lac_read_asks_a_replaced_ensemble: "moved LACs",
    mutants_stale.a_repair_writes_without_a_version: "contested swaps",
    mutants_storage.a_batch_is_answered_before_its_sync: "crashes",
    mutants_storage.a_failed_log_goes_on: "crashes",
    mutants_storage.a_fence_flag_is_set_too_late: "busy takeovers",
    mutants_storage.an_add_again_is_answered_unread: "slow disks",
    mutants_storage.group_commit_acknowledges_the_next_batch: "crashes",
    mutants_storage.headers_name_no_files: "crashes",
    mutants_storage.lacs_may_fall: "published LACs",
    mutants_storage.listings_hold_what_is_not_durable: "crashes",
    mutants_writing.a_close_ignores_a_recovery: "late closes",
    mutants_writing.copies_come_from_where_the_fragment_starts: "striped repairs",
    mutants_writing.lost_writes_are_classified_by_version_only: "lost replies",
    mutants_writing.recovery_ends_before_it_wrote_back: "takeovers",
    mutants_writing.the_last_ensemble_is_changed_in_recovery: "missed bookies in recovery",
    mutants_quorum.a_ledger_in_recovery_is_read_as_open: "busy takeovers",
    mutants_quorum.ensembles_begin_one_entry_late: "rough pairs",
    mutants_quorum.old_ensembles_are_read_as_the_newest: "rough links",
    mutants_quorum.write_sets_are_shifted: "stripes",
    mutants_garbage.ids_are_used_twice: "creations",
    mutants_garbage.lost_replies_count_as_success: "lost replies",
    mutants_garbage.metadata_is_overwritten: "any",
    mutants_garbage.new_ledgers_are_judged_by_an_old_look: "creations",
    mutants_garbage.new_ledgers_are_judged_without_sync: "creations",
    **dict.fromkeys(mutants_life.MUTANTS, "lived logs"),
    **dict.fromkeys(mutants_logs.MUTANTS, "logs"),
    **dict.fromkeys(mutants_log_writers.MUTANTS, "written logs"),
    **dict.fromkeys(mutants_proxy.MUTANTS, "proxies"),
    **dict.fromkeys(mutants_redaction.OF_LEDGERS, "redacted logs"),
    **dict.fromkeys(mutants_redaction.OF_OBJECTS, "redacted tiers"),
    **dict.fromkeys(mutants_redaction.OF_TABLES, "redacted tables"),
    **dict.fromkeys(mutants_remotes.MUTANTS, "remotes"),
    **dict.fromkeys(mutants_rules.MUTANTS, "rules"),
    **dict.fromkeys(mutants_sinks.ON_THE_CLUSTER, "sinks"),
    **dict.fromkeys(mutants_sinks.OVER_PROXIES, "remote sinks"),
    **dict.fromkeys(mutants_tables.MUTANTS, "logs with tables"),
    **dict.fromkeys(mutants_tier.MUTANTS, "tiered logs"),
    **dict.fromkeys(mutants_types.MUTANTS, "typed logs"),
    **dict.fromkeys(mutants_wire.MUTANTS, "wire"),
    mutants_log_writers.runs_of_several_logs_are_one: "logs",
    mutants_log_writers.staged_extents_leave_out_their_first_entry: "logs",
    mutants_logs.a_second_merge_is_not_noticed: "merged logs",
    mutants_logs.swaps_are_not_guarded: "merged logs",
    mutants_wire.a_lost_connection_is_a_no: "wire and damage",
    mutants_wire.adds_are_acknowledged_on_arrival: "wire and crashes",
    mutants_wire.handshakes_are_not_checked: "wire and repairs",
}
BUGS_OF_LIVENESS = {
    "a_file_that_is_full_is_not_synced",
    "a_full_disk_ends_the_log",
    "a_start_needs_room",
    "any_ledger_id_is_believed",
    "changes_before_an_extent_is_followed_are_forgotten",
    "copies_come_from_where_the_fragment_starts",
    "directories_are_not_synced",
    "fences_refuse_recovery_adds",
    "files_are_deleted_before_that_is_durable",
    "nothing_is_held_back_from_others",
    "runs_of_several_logs_are_one",
    "sequences_are_lost_at_the_end_of_a_segment",
    "half_open_connections_are_not_noticed",
    "the_last_batch_is_not_written_again",
    "windows_are_not_given_back",
}
"""Here it counts that something stands still: a bookie, say, that refuses to start with what it
finds, because it notices the loss.  All others must break a promise of safety."""


@contextlib.contextmanager
def focused(focus: str) -> Iterator[None]:
    """Draw plans of this focus."""

    def draw(rng: random.Random) -> Plan:
        plan = replace(draw_usual_plan(rng), has_wire=False)
        return FOCUSES[focus](plan)

    with patch("tests.simulation.workload.draw_plan", draw):
        yield


def _with_focus(apply: Apply) -> Apply:
    @contextlib.contextmanager
    def mutated() -> Iterator[None]:
        with focused(focus_of(apply.__name__)), apply():
            yield

    return mutated


def focus_of(name: str) -> str:
    """Return the focus of a mutant."""
    return next((focus for each, focus in _FOCUS_OF.items() if each.__name__ == name), "any")


MUTANTS: dict[str, Apply] = {
    apply.__name__: _with_focus(apply) for module in _MODULES for apply in module.MUTANTS
}
