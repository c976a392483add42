"""Bugs of ledger clients that named tests catch: quorums, placement, conduct, readers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec.structs import replace

from dlcore.base.errors import LedgerFencedError, MetadataConnectionError
from dlcore.ledger.metadata import values as quorum_module
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.ledger.metadata.values import write_set
from dlcore.ledger.placing import health as health_module, placement as placement_module
from dlcore.ledger.placing.health import Conduct
from dlcore.ledger.placing.placement import Topology, _Filling, _Racks
from dlcore.ledger.reading.follow import LedgerFollow, _Coming
from dlcore.ledger.reading.range_read import RangeReader, ReadLane
from dlcore.ledger.reading.reader import LedgerReader
from dlcore.ledger.recovering import recovery_driver as recoverer_module
from dlcore.ledger.recovering.recovery import LedgerRecovery
from dlcore.ledger.writing import appender as appender_module
from dlcore.ledger.writing.appender import (
    Add,
    AddWindow,
    AppenderState,
    Call,
    CallFailed,
    LacPublication,
    LedgerAppender,
)
from dlcore.ledger.writing.writer import AppenderDriver, LedgerWriter
from dlcore.metadata.stored import encode
from dlcore.wire.frames import EntryFrame
from tests.fixtures.simulated_store import SimulatedStore
from tests.simulation.mutants_client import changes_at_once
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from dlcore.base.config import QuorumConfig
    from dlcore.base.errors import DLError
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata
    from dlcore.wire.port import HeldEntries

_LEDGER = "dlcore/ledger"


@caught_by(f"{_LEDGER}/test_confirmed.py::test_too_few_answers_say_nothing")
def the_end_is_asked_of_one_bookie() -> Iterator[None]:
    """Section 1.4: the first answer counts as enough.

    Not for the simulation: what is decided is decided by noes, which no single bookie has enough
    of; a reader would wait where it can say at once that too few answer.
    """
    with patch("dlcore.ledger.reading.confirmed.is_covered", lambda _, known: len(known) > 0):
        yield


@caught_by(f"{_LEDGER}/test_confirmed.py::test_by_chance")
def coverage_ignores_striping() -> Iterator[None]:
    """Section 1.2: Qw - Qa + 1 bookies of the whole ensemble count as coverage; the same rule."""

    def by_number(quorum: QuorumConfig, known: Collection[int]) -> bool:
        return len(known) > quorum.write_quorum_size - quorum.ack_quorum_size

    with (
        patch("dlcore.ledger.reading.confirmed.is_covered", by_number),
        patch("dlcore.ledger.recovering.recovery.is_covered", by_number),
    ):
        yield


@caught_by(f"{_LEDGER}/test_quorum.py::test_covered_means_that_no_entry_can_be_acked_unseen")
def coverage_is_off_by_one() -> Iterator[None]:
    """Section 1.2: a write set may have Qa silent members, and still counts as covered.

    Not for the simulation: publishing and reading a LAC then agree about what is enough, and the
    reads of a recovery fence by themselves.
    """

    def generous(quorum: QuorumConfig, known: Collection[int]) -> bool:
        return all(
            sum(position not in known for position in write_set(quorum, first))
            <= quorum.ack_quorum_size
            for first in range(quorum.ensemble_size)
        )

    with patch.object(quorum_module, "is_covered", generous):
        yield


@caught_by(f"{_LEDGER}/test_append_by_chance.py::test_random_answers_keep_the_promises")
def late_acks_of_replaced_bookies_count() -> Iterator[None]:
    """#1591: a position's ack is believed from any bookie, also after its bookie was replaced.

    Not for the simulation: what is on its way to a bookie is given up with it.
    """

    def take(self: Add, position: int, _: BookieId) -> bool:
        self.waiting.pop(position, None)
        return True

    with patch.object(Add, "take_answer", take):
        yield


@caught_by(f"{_LEDGER}/test_append.py::test_confirmed_entries_are_not_sent_again_and_are_given_up")
def confirmed_entries_are_sent_again() -> Iterator[None]:
    """BOOKKEEPER-355: a change moves entries that were confirmed in the ensemble before."""
    change_stored = LedgerAppender._change_stored

    def change(self: LedgerAppender, metadata: LedgerMetadata) -> Any:
        window = self.window
        confirmed, window.last_add_confirmed = window.last_add_confirmed, -1
        with patch.object(LedgerAppender, "_confirm", lambda _: []):
            effects = change_stored(self, metadata)
        window.last_add_confirmed = confirmed
        return effects + self._confirm()

    with patch.object(LedgerAppender, "_change_stored", change):
        yield


@caught_by(f"{_LEDGER}/test_append.py::test_a_sealed_machine_starts_no_change")
def a_sealed_ledger_changes_its_ensemble() -> Iterator[None]:
    """Section 2: a change that begins while the ledger is closed overwrites its end."""
    may_look = (*AppenderState,)
    with patch.object(appender_module, "_MAY_LOOK", may_look):
        yield


@caught_by(f"{_LEDGER}/test_append.py::test_bytes_are_pending_until_the_whole_write_set_answered")
def a_slow_replica_is_not_counted() -> Iterator[None]:
    """#1088: an entry leaves memory's account when Qa of its Qw bookies answered."""

    def release(self: AddWindow, add: Add) -> None:
        if (
            add.entry_id <= self.last_add_confirmed
            and self.adds.pop(add.entry_id, None) is not None
        ):
            self.pending_bytes -= len(add.frame)

    with patch.object(AddWindow, "release", release):
        yield


@caught_by(
    f"{_LEDGER}/test_recovery.py::test_reading_ahead_decides_in_order_and_ends_after_writing_back"
)
def a_recovery_decides_out_of_order() -> Iterator[None]:
    """Section 3.1: a no beyond an entry that is not decided ends the ledger before it."""
    missing = LedgerRecovery._missing

    def jump(self: LedgerRecovery, entry_id: int, position: int) -> Any:
        read = self._reads.open.get(entry_id)
        noes_needed = (
            self._pinned.quorum.write_quorum_size - self._pinned.quorum.ack_quorum_size + 1
        )
        if read is not None and len({*read.noes, position}) >= noes_needed:
            self._next_entry = max(self._next_entry, entry_id)
        return missing(self, entry_id, position)

    with patch.object(LedgerRecovery, "_missing", jump):
        yield


@caught_by(
    f"{_LEDGER}/test_recovery.py::test_entries_before_the_last_ensemble_are_taken_as_acknowledged"
)
def a_recovery_starts_at_the_first_entry() -> Iterator[None]:
    """#2615: entries of earlier ensembles are asked of bookies that never had them."""
    after = LedgerRecovery._after_fence_answer

    def forgetful(self: LedgerRecovery) -> Any:
        from_the_start = replace(self._pinned.last_ensemble, first_entry_id=0)
        with patch.object(LedgerRecovery, "_ensemble", from_the_start):
            return after(self)

    with patch.object(LedgerRecovery, "_after_fence_answer", forgetful):
        yield


@caught_by(f"{_LEDGER}/test_store.py::test_a_lost_reply_is_read_back_as_it_is_now")
def replies_are_read_back_without_sync() -> Iterator[None]:
    """Section 3.4: a server that lags says what became of a write whose reply was lost.

    Not for the simulation: who believes it does the write again, is refused, and looks once more.
    """

    get = SimulatedStore.get

    async def lax(self: SimulatedStore, path: str, **_: bool) -> Any:
        return await get(self, path)

    with patch.object(SimulatedStore, "get", lax):
        yield


@caught_by(f"{_LEDGER}/test_store.py::test_ids_are_never_given_twice")
def ids_are_read_and_written_blindly() -> Iterator[None]:
    """Section 2: the next ledger id is written without its version."""

    async def take(self: LedgerStore) -> int:
        path = self._paths.ledger_idgen
        while True:
            node = await self._store.get(path)
            assert node is not None
            with contextlib.suppress(MetadataConnectionError):
                await self._store.put(path, b"%d" % (int(node.value) + 1), version=-1)
                return int(node.value)

    with patch.object(LedgerStore, "new_ledger_id", take):
        yield


@caught_by(f"{_LEDGER}/test_reader.py::test_a_stale_reader_looks_at_the_metadata_after_a_failure")
def a_reader_keeps_its_metadata() -> Iterator[None]:
    """#1579, #4613: a client that opened a ledger asks the bookies of that time for ever."""

    async def never(self: LedgerReader, *about: Any) -> bool:
        return False

    with patch.object(LedgerReader, "_has_moved", never):
        yield


@caught_by(f"{_LEDGER}/test_reader.py::test_a_silent_replica_costs_the_speculative_delay")
def reads_wait_for_the_time_out() -> Iterator[None]:
    """Section 1.3: a replica that is silent is waited for, though another one could answer."""
    with patch.object(ReadLane, "silent", lambda *_: []):
        yield


@caught_by(f"{_LEDGER}/test_reader.py::test_damage_silence_and_death_are_read_around")
def reads_are_not_verified() -> Iterator[None]:
    """#4659: what a bookie sends is passed on as it comes."""

    def trust(self: RangeReader, stream: Any, frames: Sequence[Any], stride: int) -> Any:
        entries = []
        for frame in frames:
            data = memoryview(frame)
            entries.append(
                EntryFrame(
                    ledger_id=self._ledger_id,
                    entry_id=stream.next_entry_id,
                    last_add_confirmed=-1,
                    ledger_bytes=0,
                    body=data,
                    data=data,
                )
            )
            stream.next_entry_id += stride
        return entries, None

    with patch.object(RangeReader, "_verified", trust):
        yield


@caught_by(f"{_LEDGER}/test_placer.py::test_readers_ask_a_suspect_last")
def readers_ask_suspects_first() -> Iterator[None]:
    """#1489: a reader forgets who has just let it wait."""
    with patch.object(health_module.BookieHealth, "is_suspect", lambda *_: False):
        yield


@caught_by(
    f"{_LEDGER}/test_reader.py::test_a_follower_of_a_bookie_that_hears_nothing_asks_the_others"
)
def a_follower_believes_a_silent_bookie() -> Iterator[None]:
    """Section 1.4: no news from the followed bookie means that there is none."""

    def nothing(self: LedgerFollow, _: object) -> Any:
        return answered(self, ())

    answered = LedgerFollow._members_answered
    with patch.object(LedgerFollow, "_members_answered", nothing):
        yield


@caught_by(f"{_LEDGER}/test_follow.py::test_the_followed_bookie_is_believed_beside_what_it_pushed")
def what_the_followed_bookie_pushes_is_all_it_knows() -> Iterator[None]:
    """Section 1.4: a push that never came is never missed where no one else knows the LAC."""
    answered = LedgerFollow._members_answered

    def by_others(self: LedgerFollow, answers: Sequence[tuple[BookieId, HeldEntries]]) -> Any:
        return answered(self, [each for each in answers if each[0] != self._source.followed])

    with patch.object(LedgerFollow, "_members_answered", by_others):
        yield


@caught_by(f"{_LEDGER}/test_lac.py::test_publishing_waits_for_enough_bookies")
def a_lac_is_published_by_one_bookie() -> Iterator[None]:
    """Section 1.4: `publish_lac` returns when any bookie has the LAC."""

    def is_published(self: LedgerAppender, lac: int) -> bool:
        return lac in self._lac.accepted.values()

    with patch.object(LedgerAppender, "is_published", is_published):
        yield


@caught_by(f"{_LEDGER}/test_append.py::test_an_entry_confirmed_meanwhile_needs_no_copy")
def a_change_names_bookies_before_they_have_copies() -> Iterator[None]:
    """Fewer than Qa of the next ensemble hold entries that readers saw."""
    with changes_at_once():
        yield


@caught_by(f"{_LEDGER}/test_read_end.py::test_write_backs_of_recoveries_are_shown_once_one_ends")
def what_recoveries_write_back_is_shown() -> Iterator[None]:
    """One that found too few copies before may close the ledger without it."""

    async def stays(self: LedgerReader, _: Ensemble) -> bool:
        return True

    with patch.object(LedgerReader, "_stays", stays):
        yield


@caught_by(f"{_LEDGER}/test_odd_moments.py::test_a_recovery_that_cannot_write_back_closes_nothing")
def a_failed_write_back_counts() -> Iterator[None]:
    """Section 3.1: a recovery ends the ledger although what it found was not written back.

    Not for the simulation: in hundreds of seeds no recovery lacks bookies for so long.
    """

    def go_on(self: LedgerRecovery, error: DLError) -> Any:
        return self._written_back(self._next_entry - 1, self._ensembles)

    with patch.object(LedgerRecovery, "_write_back_failed", go_on):
        yield


@caught_by(f"{_LEDGER}/test_append.py::test_one_who_refuses_a_copy_that_others_hold_is_left_out")
def a_bookie_that_refuses_a_copy_is_chosen_again() -> Iterator[None]:
    """A bookie with a lower limit is asked for the same copy without end."""
    add_failed = LedgerAppender._add_failed

    def forget(self: LedgerAppender, *event: Any) -> Any:
        effects = add_failed(self, *event)
        self._replacements.unfit.clear()
        return effects

    with patch.object(LedgerAppender, "_add_failed", forget):
        yield


@caught_by(f"{_LEDGER}/test_client.py::test_a_metadata_store_that_stays_away_ends_a_writer")
def a_failed_writer_closes_at_its_lac() -> Iterator[None]:
    """Entries behind it that readers saw are gone."""
    with patch.object(AddWindow, "is_idle", property(lambda _: True)):
        yield


@caught_by(f"{_LEDGER}/test_reader.py::test_a_follower_reads_damaged_pushes_from_others")
def a_follower_passes_over_damage() -> Iterator[None]:
    """Section 1.4: an entry that came damaged counts as delivered."""
    run = _Coming.run

    def skip(self: _Coming, lac: int) -> Any:
        if self.pushed:
            self.first = max(self.first, self.pushed[0].entry_id)
        return run(self, lac)

    with patch.object(_Coming, "run", skip):
        yield


@caught_by(f"{_LEDGER}/test_lac.py::test_publishing_waits_for_enough_bookies")
def publishing_does_not_wait() -> Iterator[None]:
    """Section 1.4: a LAC counts as published when it is sent."""
    with patch.object(LedgerAppender, "is_published", lambda *_: True):
        yield


@caught_by(f"{_LEDGER}/test_lac.py::test_the_lac_is_sent_without_a_following_entry")
def a_lac_waits_for_the_next_entry() -> Iterator[None]:
    """Section 1.4: readers see an entry when another one follows it."""
    with patch.object(LacPublication, "publish", lambda *_: []):
        yield


@caught_by(f"{_LEDGER}/test_client.py::test_recovery_that_cannot_tell_the_length_aborts")
def a_length_is_guessed() -> Iterator[None]:
    """Section 2: a recovery that cannot read the last entry stores a length of nothing."""

    async def nothing(self: Any, entry_id: int, metadata: object) -> int:
        return 0

    with patch.object(recoverer_module._Recoverer, "_length_at", nothing):
        yield


@caught_by(f"{_LEDGER}/test_client.py::test_an_overloaded_bookie_is_asked_again")
def an_overloaded_bookie_is_replaced() -> Iterator[None]:
    """Section 4.1: "later" counts as a failure, so load moves from bookie to bookie."""

    class Never(Exception):
        """Nothing is this."""

    with patch.object(appender_module, "BookieOverloadedError", Never):
        yield


@caught_by(f"{_LEDGER}/test_placement.py::test_an_ensemble_misses_no_rack_that_it_need_not")
def placement_ignores_racks() -> Iterator[None]:
    """Section 8: bookies are chosen as if they all stood in one rack."""
    with patch.object(Topology, "rack_of", lambda *_: "one"):
        yield


@caught_by(f"{_LEDGER}/test_placement.py::test_a_replacement_keeps_the_rule_if_any_does")
def a_replacement_ignores_the_others_racks() -> Iterator[None]:
    """Section 8: what is missing is judged without the members that stay."""
    with patch.object(_Racks, "shortfall", lambda _: 0):
        yield


@caught_by(f"{_LEDGER}/test_placement.py::test_avoided_bookies_come_last")
def placement_takes_avoided_bookies() -> Iterator[None]:
    """#2327: bookies that fail are chosen like any other."""
    init = _Filling.__init__

    def blind(self: _Filling, *, topology: Topology, **about: Any) -> None:
        init(self, topology=Topology(sites=topology.sites, config=topology.config), **about)

    with patch.object(_Filling, "__init__", blind):
        yield


@caught_by(f"{_LEDGER}/test_placement.py::test_bookies_are_chosen_by_their_free_space")
def an_empty_bookie_gets_everything() -> Iterator[None]:
    """Section 8: a new and empty disk draws all new ledgers at once."""
    with patch.object(placement_module, "WEIGHT_MEDIANS_MAX", 1 << 40):
        yield


@caught_by(f"{_LEDGER}/test_health.py::test_a_success_releases_at_once")
def a_quarantine_outlives_a_success() -> Iterator[None]:
    """#4879: a bookie that works again stays out for its whole time."""
    with patch.object(Conduct, "note_success", lambda *_: None):
        yield


@caught_by(f"{_LEDGER}/test_health.py::test_periods_differ_between_clients_and_lie_in_bounds")
def all_clients_come_back_at_once() -> Iterator[None]:
    """#2327: quarantines of all clients end together, and the load swings."""
    with patch.object(health_module, "_PERIOD_SPREAD", 0.0):
        yield


@caught_by(f"{_LEDGER}/test_health.py::test_old_answers_do_not_count")
def old_failures_count_for_ever() -> Iterator[None]:
    """#4879: failures of yesterday quarantine a bookie today."""

    def record_of(self: Conduct, bookie: BookieId, now: float) -> Any:
        return self._records.setdefault(bookie, health_module._Record(now))

    with patch.object(Conduct, "_record_of", record_of):
        yield


@caught_by(f"{_LEDGER}/test_placer.py::test_a_new_registration_ends_a_quarantine")
def a_quarantine_outlives_its_process() -> Iterator[None]:
    """#2327: a bookie that was restarted is judged by what its former process did."""
    with patch.object(health_module.BookieHealth, "release", lambda *_: None):
        yield


@caught_by(f"{_LEDGER}/test_placer.py::test_a_hung_bookie_is_quarantined_for_all_ledgers")
def every_ledger_meets_the_hung_bookie_itself() -> Iterator[None]:
    """#1489: what one ledger's writer learned of a bookie is no help to the next one."""
    with patch.object(AppenderDriver, "_note_add", lambda *_, **__: None):
        yield


@caught_by(
    f"{_LEDGER}/test_health.py::test_the_pause_before_a_trial_grows_with_each_failure_and_is_forgiven"
)
def a_failing_member_is_tried_all_the_time() -> Iterator[None]:
    """#2327: who fails again is not left alone for longer."""
    with patch.object(health_module, "TRIAL_S_MAX", 1.0):
        yield


@caught_by(f"{_LEDGER}/test_registry.py::test_a_change_while_an_address_is_read_is_not_missed")
def an_address_is_fresh_though_the_list_changed() -> Iterator[None]:
    """Section 8: an address read before a change is kept as one read after it."""
    resolve = BookieRegistry.resolve

    async def keep(self: BookieRegistry, bookie: BookieId) -> str:
        address = await resolve(self, bookie)
        self._fresh.add(bookie)
        return address

    with patch.object(BookieRegistry, "resolve", keep):
        yield


@caught_by(
    f"{_LEDGER}/test_client.py::test_adds_within_the_ensemble_go_on_without_the_metadata_store"
)
def every_failure_needs_the_metadata_store() -> Iterator[None]:
    """Section 2: an outage of the metadata store ends writers that could go on without it."""
    call_failed = LedgerAppender._call_failed

    def give_up(self: LedgerAppender, event: CallFailed) -> Any:
        if event.call is Call.LIST_BOOKIES:
            return self._fail(event.error)
        return call_failed(self, event)

    with (
        patch.object(LedgerAppender, "_call_failed", give_up),
        patch.object(appender_module, "METADATA_PATIENCE_S", 0.0),
    ):
        yield


@caught_by(f"{_LEDGER}/test_client.py::test_lost_replies_of_the_metadata_store_are_classified")
def a_change_that_was_stored_is_not_recognised() -> Iterator[None]:
    """Section 3.4: a writer whose own change was stored takes it for another one's."""

    async def write(self: LedgerStore, metadata: LedgerMetadata, *, version: int) -> int:
        try:
            path = self._paths.ledger(metadata.ledger_id)
            return await self._store.put(path, encode(metadata), version=version)
        except MetadataConnectionError as error:
            raise LedgerFencedError("another client wrote it") from error

    with patch.object(LedgerStore, "write", write):
        yield


@caught_by(f"{_LEDGER}/test_placer.py::test_a_single_failure_is_forgotten_after_a_rest")
def a_failed_bookie_is_chosen_at_once() -> Iterator[None]:
    """Section 8: a bookie that died a moment ago, and is still registered, is chosen again."""
    with patch.object(Conduct, "is_resting", lambda *_: False):
        yield


@caught_by(f"{_LEDGER}/test_client.py::test_without_a_spare_it_goes_on_and_takes_the_bookie_back")
def a_member_that_failed_once_gets_nothing_more() -> Iterator[None]:
    """#1591: without a spare the ledger has one replica less for the rest of its life."""
    with (
        patch.object(Conduct, "may_return", lambda *_: False),
        patch.object(Conduct, "is_last_hope", lambda *_: False),
    ):
        yield


@caught_by("dlcore/ledger/test_in_flight.py::test_all_writers_of_a_client_share_its_limits")
def writers_do_not_count_what_others_have_in_flight() -> Iterator[None]:
    """The limits of a client hold for each of its ledgers alone."""

    def alone(self: LedgerWriter) -> bool:
        limits = self._context.config
        return (
            self._appender.window.pending_bytes < limits.pending_bytes_max
            and self._appender.window.pending_count < limits.pending_entries_max
        )

    with patch.object(LedgerWriter, "_has_capacity", alone):
        yield
