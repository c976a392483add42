"""Bugs of bookies that named tests catch: revival, compaction, repair, scrubbing, replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bookie.files import (
    compaction_choice as compaction_choice_module,
    format as entry_log_format_module,
    records as records_module,
    replay as replay_module,
)
from bookie.files.damage import DamageLog
from bookie.files.entry_reader import EntryReader
from bookie.files.records import IntactRecord
from bookie.files.sealed_files import SealedFiles
from bookie.housekeeping import Housekeeping
from bookie.membership.given_ids import GivenIds
from bookie.serving.reads_in_progress import FollowStream
from bookie.storage import writes as writes_module
from bookie.storage.status import StorageStatus, Timers
from bookie.storage.writes import Followers, HeldEntries
from bookie.upkeep import compaction as compaction_module
from bookie.upkeep.compaction import Compactor
from bookie.upkeep.garbage import GarbageJudge
from bookie.upkeep.garbage_collector import GarbageCollector
from bookie.upkeep.repair import Repairer
from bookie.upkeep.scrub import Scrubber
from dlcore.ledger.metadata.values import LedgerMetadata
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from bookie.files.index import LedgerState, Location
    from bookie.storage.status import Claim
    from bookie.storage.storage_core import StorageCore
    from dlcore.wire.messages import Update


@caught_by("bookie/test_storage_repair.py::test_the_new_copy_counts_at_once_and_after_restarts")
def the_oldest_copy_counts() -> Iterator[None]:
    """Section 4.6: of an entry that was written again the first, damaged copy is found.

    Not for the simulation: damage, repair and a second look at the same bookie are too rare there.
    """

    def oldest(self: EntryReader, found: list[Location]) -> list[Location]:
        first: dict[int, Location] = {}
        for each in sorted(found, key=lambda each: (each.file_number, each.offset)):
            first.setdefault(each.entry_id, each)
        return [first[entry_id] for entry_id in sorted(first)]

    with patch.object(EntryReader, "_newest_copies", oldest):
        yield


@caught_by(
    "bookie/test_upkeep_races.py::test_fence_and_lac_of_a_ledger_used_again_hold_after_a_restart"
)
def a_revival_forgets_the_fence() -> Iterator[None]:
    """#870: a ledger that was thought deleted and is in use again takes adds of its old writer.

    Not for the simulation: ids that were deleted are not used again by its clients.
    """
    ledger_for_change = writes_module.ledger_for_change

    def forgetful(core: StorageCore, ledger_id: int) -> LedgerState:
        state = core.ledgers.get(ledger_id)
        if state is not None:
            state.is_deleted = False
        return ledger_for_change(core, ledger_id)

    with patch.object(writes_module, "ledger_for_change", forgetful):
        yield


@caught_by("bookie/test_compaction.py::test_a_ledger_in_use_again_keeps_its_file")
def compaction_ignores_the_revived() -> Iterator[None]:
    """#870: a file is dropped although a ledger that was left out of it is in use again."""

    class Nothing(set[int]):
        def add(self, _: int) -> None:
            """Forget it."""

    needed = Compactor._needed

    async def blind(self: Compactor, *about: Any) -> Any:
        return (await needed(self, *about))._replace(left_out=Nothing())

    with patch.object(Compactor, "_needed", blind):
        yield


@caught_by("bookie/test_upkeep_races.py::test_a_dead_file_is_looked_at_again_before_it_is_dropped")
def a_dead_file_is_dropped_though_it_is_in_use_again() -> Iterator[None]:
    """#4607: ledgers are looked at one after the other, and one of the first is in use again."""

    async def early(self: SealedFiles) -> dict[int, int]:
        import asyncio

        dead = set(self._files)
        deleted: list[int] = []
        for ledger_id, state in list(self._ledgers.items()):
            if state.is_deleted:
                deleted.append(ledger_id)
            else:
                dead.difference_update(state.files())
        await asyncio.sleep(0)
        return await self.drop(dead & self._files.keys(), deleted)

    with patch.object(SealedFiles, "drop_dead", early):
        yield


@caught_by("bookie/test_compaction.py::test_a_damaged_newer_copy_is_replaced_by_the_older_one")
def compaction_trusts_newer_copies() -> Iterator[None]:
    """Section 4.6: the last good copy goes because a newer one, which is damaged, exists."""

    async def none(self: Compactor, number: int, needed: Any) -> Any:
        import numpy as np

        return np.array([], np.int64)

    with patch.object(Compactor, "_lost_copies", none):
        yield


@caught_by("bookie/test_compaction.py::test_a_disk_that_fills_up_meanwhile_gets_no_copies")
def compaction_fills_the_disk() -> Iterator[None]:
    """#3524: compaction takes the room that fences and recovery need."""
    init = Compactor.__init__

    def greedy(self: Compactor, *about: Any, **more: Any) -> None:
        init(self, *about, **{**more, "room_bytes": lambda: 1 << 50})

    with patch.object(Compactor, "__init__", greedy):
        yield


@caught_by("bookie/test_compaction.py::test_a_crash_between_copy_and_drop_copies_nothing_twice")
def compaction_copies_everything_again() -> Iterator[None]:
    """#3524: what was copied before a crash is copied again, and again."""

    async def none(self: Compactor, *about: Any) -> None:
        """Look at no newer file."""

    def nowhere(self: Compactor, *about: Any) -> Any:
        return iter(())

    with (
        patch.object(Compactor, "_note_superseded", none),
        patch.object(Compactor, "_unsealed_copies", nowhere),
    ):
        yield


@caught_by("bookie/test_compaction_choice.py::test_no_copy_is_begun_that_does_not_fit")
def files_are_chosen_without_room() -> Iterator[None]:
    """#2103: a copy is begun that cannot be finished."""
    choose = compaction_choice_module.choose_next

    def hopeful(loads: Any, *, below_live_share: float, room_bytes: int) -> Any:
        return choose(loads, below_live_share=below_live_share, room_bytes=1 << 50)

    with patch.object(compaction_choice_module, "choose_next", hopeful):
        yield


@caught_by("bookie/test_garbage.py::test_two_sightings_with_the_age_between_are_needed")
def garbage_has_no_age() -> Iterator[None]:
    """#870: two looks in a row prove a deletion, however close they are."""
    judge = GarbageJudge.judge

    def early(self: GarbageJudge, *, now_ms: int, **about: Any) -> Any:
        self._suspicions = {
            key: each._replace(since_ms=now_ms - 10**9) for key, each in self._suspicions.items()
        }
        return judge(self, now_ms=now_ms, **about)

    with patch.object(GarbageJudge, "judge", early):
        yield


@caught_by(
    "bookie/test_given_ids.py::test_a_writer_that_was_paused_adds_nothing_to_a_deleted_ledger"
)
def forgotten_ledgers_are_taken_for_new_ones() -> Iterator[None]:
    """A fenced ledger is deleted and forgotten, and its old writer's adds are acknowledged."""
    with patch.object(GivenIds, "forget", lambda *_: None):
        yield


@caught_by("bookie/test_garbage.py::test_a_ledger_seen_alive_starts_anew")
def a_suspicion_outlives_its_refutation() -> Iterator[None]:
    """#876: a ledger that was seen alive in between is deleted by an old suspicion."""
    judge = GarbageJudge.judge

    def grudge(self: GarbageJudge, **about: Any) -> Any:
        before = dict(self._suspicions)
        verdict = judge(self, **about)
        self._suspicions = {**before, **self._suspicions}
        return verdict

    with patch.object(GarbageJudge, "judge", grudge):
        yield


@caught_by("bookie/test_server.py::test_metadata_that_is_older_than_the_data_deletes_nothing")
def a_restored_backup_deletes_ledgers() -> Iterator[None]:
    """#876: metadata that knows less than the bookie is believed."""

    async def trust(self: GarbageCollector) -> None:
        """Ask nothing."""

    with patch.object(GarbageCollector, "_check_metadata_is_not_older", trust):
        yield


@caught_by(
    "bookie/test_repair.py::test_an_entry_of_a_replaced_ensemble_is_asked_of_the_bookies_of_its_own"
)
def a_repair_asks_the_last_ensemble() -> Iterator[None]:
    """Section 5: a damaged entry is sought where new entries go."""
    with patch.object(LedgerMetadata, "ensemble_of", lambda self, _: self.last_ensemble):
        yield


@caught_by("bookie/test_repair.py::test_it_tries_again_later_and_later_until_a_holder_is_back")
def a_repair_is_tried_once() -> Iterator[None]:
    """Section 5: damage that could not be mended at once stays."""
    start_due = Repairer._start_due

    def once(self: Repairer, tries: asyncio.TaskGroup) -> None:
        start_due(self, tries)

    with patch.object(Repairer, "_start_due", once):
        yield


@caught_by("bookie/test_repair.py::test_entries_that_no_ledger_needs_are_forgotten")
def damage_beyond_the_end_is_sought_for_ever() -> Iterator[None]:
    """Section 5: entries that never became part of their ledger are asked for without end."""
    with patch.object(DamageLog, "forget_entry", lambda *_, **__: None):
        yield


@caught_by("bookie/test_storage_repair.py::test_an_intact_entry_is_never_overwritten")
def a_repair_overwrites_what_is_intact() -> Iterator[None]:
    """Section 5: a repair may change what a bookie acknowledged."""
    add_again = HeldEntries._add_again

    async def overwrite(self: HeldEntries, entry: Any, *, is_recovery: bool) -> None:
        if is_recovery:
            await self._replace(entry, is_recovery=True)
        else:
            await add_again(self, entry, is_recovery=False)

    with patch.object(HeldEntries, "_add_again", overwrite):
        yield


@caught_by("bookie/test_storage_repair.py::test_one_failing_read_is_no_proof_of_damage")
def one_failed_read_is_damage() -> Iterator[None]:
    """#2908: an entry is overwritten because the disk stumbled once."""

    async def once(self: HeldEntries, held: Location) -> Any:
        from dlcore.base.errors import BookieStorageError

        try:
            (frame,) = await self._core.reader.read([held])
        except BookieStorageError:
            return None
        return frame

    with patch.object(HeldEntries, "_read", once):
        yield


@caught_by("bookie/test_storage_repair.py::test_the_list_of_damage_is_bounded")
def the_list_of_damage_grows() -> Iterator[None]:
    """#3497: a disk that rots takes all memory."""
    init = DamageLog.__init__

    def endless(self: DamageLog, *, entries_max: int) -> None:
        init(self, entries_max=1 << 40)

    with patch.object(DamageLog, "__init__", endless):
        yield


@caught_by("bookie/test_scrub.py::test_each_damaged_entry_is_found_wherever_it_is")
def scrubbing_leaves_out_the_newest_file() -> Iterator[None]:
    """#942: what is being written is never read back."""

    async def fine(self: Scrubber, *about: Any) -> bool:
        return True

    with patch.object(Scrubber, "_scrub_unsealed", fine):
        yield


@caught_by("bookie/test_scrub.py::test_a_footer_and_a_record_damaged_in_one_file_stay_unknown")
def a_footer_is_made_of_what_is_left() -> Iterator[None]:
    """Section 4.4: a new footer leaves out the damaged entry, which so counts as absent."""

    records = Scrubber._scrub_records

    async def quiet(self: Scrubber, file: Any, part: Any, report: Any) -> None:
        damaged = report.damaged_records
        await records(self, file, part, report)
        report.damaged_records = damaged

    with patch.object(Scrubber, "_scrub_records", quiet):
        yield


@caught_by("bookie/test_scrub.py::test_a_damaged_footer_is_made_again")
def damaged_footers_stay() -> Iterator[None]:
    """Section 4.4: a footer that rots is found, and no one makes it again."""

    async def nothing(self: Scrubber, *about: Any) -> None:
        """Leave it."""

    with patch.object(Scrubber, "_make_footer_again", nothing):
        yield


@caught_by("bookie/test_scrub.py::test_any_flipped_byte_of_a_sealed_file_is_found")
def scrubbing_believes_record_headers() -> Iterator[None]:
    """#4659: payloads are not compared with their checksums."""

    def believe(record: Any, payload: memoryview) -> IntactRecord:
        return IntactRecord(record, payload, None)

    with patch.object(records_module, "_verified", believe):
        yield


@caught_by("bookie/test_replay.py::test_a_record_out_of_sequence_is_damage")
def replay_ignores_the_sequence() -> Iterator[None]:
    """Section 4.3: a record that was there before the file was used again is taken.

    Not for the simulation: its disks hold nothing old.
    """
    read = entry_log_format_module.read_record_header

    class Same(int):
        def __eq__(self, _: object) -> bool:
            return True

        def __ne__(self, _: object) -> bool:
            return False

        __hash__ = int.__hash__

    def lenient(*about: Any, **more: Any) -> Any:
        record = read(*about, **more)
        return None if record is None else record._replace(sequence=Same(record.sequence))

    with patch.object(records_module, "read_record_header", lenient):
        yield


@caught_by("bookie/test_replay.py::test_a_closed_storage_proves_its_last_batch")
def replay_believes_damaged_records() -> Iterator[None]:
    """#2220: a record whose checksum is wrong is taken like any other."""

    def believe(record: Any, payload: memoryview) -> IntactRecord:
        return verified(record, payload) or IntactRecord(record, payload, None)

    verified = records_module._verified
    with patch.object(records_module, "_verified", believe):
        yield


@caught_by("bookie/test_replay.py::test_the_newest_file_is_missed")
def the_newest_file_is_not_noted() -> Iterator[None]:
    """BOOKKEEPER-636: nothing tells that the file written last is missing."""

    async def nothing(*about: Any) -> None:
        """Note nothing."""

    with (
        patch.object(replay_module, "note_newest", nothing),
        patch("bookie.files.entry_log.note_newest", nothing),
    ):
        yield


@caught_by("bookie/test_replay.py::test_files_of_another_bookie_are_refused")
def files_of_any_bookie_are_opened() -> Iterator[None]:
    """#2612: files are read although another process owns them."""
    decode = entry_log_format_module.decode_file_header

    def lenient(view: memoryview, *, number: int, owner: bytes) -> Any:
        import struct

        for offset in range(len(view) - len(owner) + 1):
            try:
                return decode(view, number=number, owner=bytes(view[offset : offset + len(owner)]))
            except (Exception, struct.error):  # noqa: BLE001  # not the place of the owner
                continue
        return decode(view, number=number, owner=owner)

    with patch.object(replay_module, "decode_file_header", lenient):
        yield


@caught_by("bookie/test_compaction.py::test_garbage_that_is_only_in_the_cache_is_not_deleted_yet")
def garbage_is_deleted_before_its_record_is_safe() -> Iterator[None]:
    """Section 4.6: replay believes a record of garbage that only the page cache holds."""
    settle = replay_module._settle_tail
    delete = replay_module._delete_garbage

    async def early(file: Any, replayed: Any) -> None:
        deleted = [each for each in replayed.index.deleted_files if each in _numbers(file)]
        await delete(file._disk, deleted)
        await settle(file, replayed)

    with patch.object(replay_module, "_settle_tail", early):
        yield


def _numbers(file: Any) -> set[int]:
    found = (entry_log_format_module.file_number(each) for each in file._disk.names())
    return {each for each in found if each is not None}


@caught_by("bookie/test_storage.py::test_too_much_under_way_is_refused_early")
def adds_are_not_held_back() -> Iterator[None]:
    """#1409: a bookie takes more than its disk can follow.

    Not for the simulation: its writers have less in flight than any limit.
    """

    def take(self: StorageStatus, size: int, claim: Claim) -> None:
        """Refuse nothing."""

    with patch.object(StorageStatus, "check_room", take):
        yield


@caught_by("bookie/test_follow.py::test_followers_end_with_the_storage")
def followers_outlive_their_storage() -> Iterator[None]:
    """#1108: a follower of a ledger on a bookie that ends is left waiting."""
    with patch.object(Followers, "wake_all", lambda _: None):
        yield


@caught_by(
    "contracts/test_bookie_client.py::test_a_follower_that_is_far_behind_misses_nothing[wire]"
)
def an_update_is_lost_at_the_edge_of_a_chunk() -> Iterator[None]:
    """After an update that could not take all that is confirmed, one entry is passed over."""
    advance = FollowStream.advance

    async def pass_over(self: FollowStream, bytes_max: int) -> Update | None:
        update = await advance(self, bytes_max)
        state = self._reads._core.ledgers.get(self._ledger_id)
        if update is not None and state is not None:
            self._next_entry_id += update.last_add_confirmed < state.last_add_confirmed
        return update

    with patch.object(FollowStream, "advance", pass_over):
        yield


@caught_by("bookie/test_storage_damage.py::test_a_rotted_footer_hides_no_entry")
def absence_is_not_proven() -> Iterator[None]:
    """#2908: "no such entry" is answered by a footer in memory that was never looked at again."""

    async def trust(self: EntryReader, *about: Any) -> None:
        """Prove nothing."""

    with patch.object(EntryReader, "prove_absent", trust):
        yield


@caught_by("bookie/test_explicit_lac.py::test_many_lacs_share_a_flush")
def every_lac_has_its_own_flush() -> Iterator[None]:
    """Section 1.4: explicit LACs cost as much as entries."""
    with patch.object(Timers, "call_later", lambda _self, _delay_s, action: action()):
        yield


@caught_by("bookie/test_compaction.py::test_one_bad_entry_and_one_bad_footer_stop_nothing")
def one_bad_file_ends_the_pass() -> Iterator[None]:
    """#3711: a file that cannot be compacted keeps all others from it."""
    with patch.object(compaction_module, "BookieStorageError", ZeroDivisionError):
        yield


@caught_by("bookie/test_garbage_collector.py::test_a_server_that_lags_makes_no_garbage")
def garbage_is_judged_without_sync() -> Iterator[None]:
    """#870: a ledger that the bookie's metadata server has not heard of counts as deleted."""

    async def is_deleted(self: GarbageCollector, ledger_id: int) -> bool:
        path = self._paths.ledger(ledger_id)
        return await self._store.get(path) is None and await self._store.get(path) is None

    with patch.object(GarbageCollector, "_is_unneeded", is_deleted):
        yield


@caught_by("bookie/test_idle_disk.py::test_an_idle_bookie_notices_a_disk_that_others_fill")
def an_idle_disk_is_not_tried() -> Iterator[None]:
    """A bookie on a bad disk is offered to writers until one of them has tried it."""

    async def nothing(self: Housekeeping) -> None:
        """Write nothing."""

    with patch.object(Housekeeping, "try_idle_disk", nothing):
        yield
