"""A bookie's storage: what it holds, what it refuses, and what it answers.

An add is decided when it is called, in one step with giving it its place in the log; so an add
called before a fence is in the log before the fence, and one called after it is refused.  A fencing
request is answered when everything accepted before it is durable: no entry that it calls absent can
appear any more, but by recovery.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from bookie.files.damage import DamageLog
from bookie.files.entry_log import EntryLog
from bookie.files.entry_reader import EntryReader
from bookie.files.format import owner_digest
from bookie.files.listed_ranges import ListedRanges
from bookie.files.replay import open_entry_log
from bookie.files.sealed_files import SealedFiles
from bookie.files.unsealed import EntryLogEvents
from bookie.followers import Followers
from bookie.ledger_state import LedgerState, check_id, check_ids, check_range, may_add, note_sealed
from bookie.membership.given_ids import GivenIds
from bookie.space.budget import Claim
from bookie.space.held_entries import HeldEntries
from bookie.space.room import LOOK_DELAY_S, Room, run_room_bytes
from bookie.storage_core import StorageCore, StorageState, StorageStats, stats_of
from bookie.timers import Timers
from bookie.upkeep.rounds import Upkeep
from dlcore.errors import (
    BadRequestError,
    BookieError,
    BookieReadOnlyError,
    BookieUnavailableError,
    EntryTooLargeError,
    LedgerFencedError,
    NoSuchLedgerError,
)
from dlcore.ids import INVALID_ENTRY_ID
from dlcore.ledger.port import FollowUpdate
from dlcore.wire.digest import decode_frame, following_frames

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from bookie.config import StorageConfig
    from bookie.disks.port import Disk, DiskFile
    from bookie.files.index import FileIndex
    from bookie.files.listed_ranges import RangePage
    from bookie.files.replay import OpenedLog, WritePosition
    from bookie.upkeep.compaction import CompactionReport
    from bookie.upkeep.garbage import GarbageReport
    from bookie.upkeep.scrub import ScrubReport
    from dlcore.clock import Clock
    from dlcore.wire.digest import BytesLike
    from dlcore.wire.frames import FrameRun

logger = logging.getLogger(__name__)


class LedgerStorage:
    """Every entry this bookie holds; used on one event loop only.

    Requests raise `BookieUnavailableError` after `aclose` and, as far as they need the disk's
    writing half, `BookieStorageError` once a write or sync has failed.
    """

    @classmethod
    async def open(
        cls,
        disk: Disk,
        config: StorageConfig,
        *,
        clock: Clock,
        owner: str = "",
        given_ids: GivenIds | None = None,
    ) -> LedgerStorage:
        """Replay `disk` and start the writer task.

        `owner` (cluster and incarnation) is bound into every file; files of another are refused.
        `given_ids`, which is closed with the storage, says of which new ledgers it takes anything;
        None: of all.

        Raises:
            BookieStorageError: data that was acknowledged may be damaged or missing.
        """
        digest = owner_digest(owner)
        ledgers: dict[int, LedgerState] = {}
        opened = await open_entry_log(
            disk, owner=digest, new_life=clock.new_token, take_sealed=partial(note_sealed, ledgers)
        )
        return cls(disk, config, opened, ledgers, owner=digest, clock=clock, given_ids=given_ids)

    def __init__(
        self,
        disk: Disk,
        config: StorageConfig,
        opened: OpenedLog,
        ledgers: dict[int, LedgerState],
        *,
        owner: bytes,
        clock: Clock,
        given_ids: GivenIds | None,
    ) -> None:
        self._disk = disk
        self._given_ids = given_ids or GivenIds(None)
        self._config = config
        self._ledgers = ledgers
        self.damage = DamageLog(entries_max=config.damaged_entries_max)
        """Entries known to be damaged and needed."""
        self._log = EntryLog(
            disk,
            config,
            opened,
            owner=owner,
            new_life=clock.new_token,
            events=EntryLogEvents(
                self._on_durable, self._on_sealed, self._on_failed, self._on_stalled
            ),
        )
        self._reader = EntryReader(
            disk,
            self._log,
            self._ledgers,
            self.damage,
            open_files_max=config.open_files_max,
            footer_bytes_max=config.footer_bytes_max,
        )
        self._files = SealedFiles(disk, self._log, self._reader, self._ledgers, self.damage)
        for sealed in opened.sealed:
            self._files.take(
                sealed.number, size=sealed.size, records_end=sealed.records_end, seed=sealed.seed
            )
            if not sealed.has_footer:
                self.damage.note_footer(sealed.number)
        for summary in opened.index.summaries():
            self._ledger(summary.ledger_id).note_summary(summary)
        self._room = Room(disk, self._log, config)
        core = StorageCore(disk, self._log, self._reader, self._files, self._ledgers, self.damage)
        self._core = core
        self._held = HeldEntries(core, self._check_room)
        self.upkeep = Upkeep(
            core, config, owner=owner, clock=clock, is_full=lambda: self._room.is_read_only
        )
        self._followers = Followers(asyncio.get_running_loop().call_soon)
        self._timers = Timers()
        self._state_callbacks: list[Callable[[StorageState], None]] = []
        self._is_closing = False
        self._has_failed = False
        self._state = self._current_state()
        self._writer = asyncio.get_running_loop().create_task(
            self._log.run(), name="bookie entry log"
        )
        self._watch_space()
        self._settle_later()

    def __repr__(self) -> str:
        return f"<LedgerStorage {self._state.value} ledgers={len(self._ledgers)}>"

    def add_entry(self, frame: BytesLike, *, is_recovery: bool = False) -> asyncio.Future[None]:
        """Accept or refuse `frame` now; the future is done when it is durable or was refused.

        Of a ledger that is new here it may be decided later, once the id is known to be given.
        Adding identical bytes again succeeds; if the held ones are damaged, these replace them.
        Nothing is raised here: the future may hold
        LedgerFencedError, BookieReadOnlyError, BookieOverloadedError, EntryTooLargeError,
        DigestMismatchError, BadRequestError (other bytes for a held entry, or a ledger that was
        never made), BookieStorageError or BookieUnavailableError.
        """
        try:
            return self._add_entry(frame, is_recovery=is_recovery)
        except BookieError as error:
            refusal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            refusal.set_exception(error)
            return refusal

    def add_run(self, run: FrameRun) -> asyncio.Future[None] | None:
        """Accept new entries of a ledger all together; the future is done when all are durable.

        None: each has to be looked at by itself; nothing was accepted or refused.
        """
        what = following_frames(run)
        state = None if what is None else self._ledgers.get(what.ledger_id)
        if what is None or state is None or not may_add(run, what, state, self._config):
            return None
        try:
            self._check_open()
            self._log.check()
            self._check_room(run_room_bytes(run), Claim.ADD)
        except BookieError:
            return None
        durable = self._log.append_run(run, what)
        if durable is None:
            return None
        last_entry_id = what.first_entry_id + len(run) - 1
        if state.note_entry(last_entry_id, int(what.last_add_confirmed.max())):
            self._followers.wake(what.ledger_id)
        return durable

    def write_lac(self, ledger_id: int, last_add_confirmed: int) -> asyncio.Future[None]:
        """Remember the LAC and wake followers now; the future is done when it is durable.

        Of a ledger that is new here it may be taken later, as adds are.  The next add may still
        carry it to disk: for that it waits up to `lac_delay_s`.

        Raises:
            BadRequestError: an id out of range.
            BookieReadOnlyError, BookieOverloadedError: there is no room for it now.
            BookieStorageError: the storage failed; the future may hold any of these, too.
        """
        self._check_open()
        self._log.check()
        check_id("ledger", ledger_id)
        if last_add_confirmed != INVALID_ENTRY_ID:
            check_id("entry", last_add_confirmed)
        if not self._is_given(ledger_id):
            return self._given_ids.once_given(
                ledger_id, partial(self.write_lac, ledger_id, last_add_confirmed)
            )
        known = self._ledgers.get(ledger_id)
        if known is None or known.is_deleted or last_add_confirmed > known.last_add_confirmed:
            self._check_room(0, Claim.RECOVERY)
        has_moved = self._ledger(ledger_id).note_lac(last_add_confirmed)
        if has_moved:
            self._followers.wake(ledger_id)
        self._timers.call_later(self._config.lac_delay_s, self._log.wake)
        if has_moved:
            return self._log.append_lac(ledger_id, last_add_confirmed)
        return self._log.watch()  # known already, but perhaps from a record on its way

    async def read_lac(self, ledger_id: int, *, fence: bool) -> int:
        """Return the highest LAC known, -1 for none; with `fence`, fence first and durably.

        Raises:
            NoSuchLedgerError: without `fence`, for a ledger it knows nothing of.
            BadRequestError: the ledger was never made; BookieUnavailableError: that is not known.
            BookieReadOnlyError, BookieOverloadedError: no room for the fence now.
        """
        await self._prepare_read(ledger_id, fence=fence)
        return self._known_ledger(ledger_id).last_add_confirmed

    async def read_entry(self, ledger_id: int, entry_id: int, *, fence: bool) -> memoryview:
        """Return one verified frame; with `fence`, any answer comes after the fence is durable.

        Raises:
            NoSuchLedgerError, NoSuchEntryError: proven no.
            BookieStorageError: the entry cannot be read or is damaged.
            BookieReadOnlyError, BookieOverloadedError: no room for the fence now.
        """
        check_id("entry", entry_id)
        await self._prepare_read(ledger_id, fence=fence)
        while (location := self._reader.find(ledger_id, entry_id)) is None:
            await self._reader.refuse_absent(ledger_id, entry_id)
        await self._log.make_durable([location])
        return (await self._reader.read([location]))[0]

    async def read_chunk(
        self,
        ledger_id: int,
        *,
        first_entry_id: int,
        last_entry_id: int,
        stride: int = 1,
        bytes_max: int,
    ) -> Sequence[memoryview]:
        """Return the verified frames of entries first, first + stride, … ≤ last, as many as fit.

        They have at most `bytes_max` bytes, or are one frame; they end before the first entry that
        is not held.

        Raises:
            NoSuchLedgerError, NoSuchEntryError: the first entry is not held.
        """
        check_id("ledger", ledger_id)
        wanted = check_range(first_entry_id, last_entry_id, stride=stride, bytes_max=bytes_max)
        self._check_open()
        frames = await self._reader.read_next(ledger_id, wanted, bytes_max=bytes_max)
        if frames is not None:
            return frames
        while not (chunk := self._reader.find_all(ledger_id, wanted, bytes_max=bytes_max)):
            await self._reader.refuse_absent(ledger_id, first_entry_id)
            self._check_open()
        await self._log.make_durable(chunk)
        return await self._reader.read(chunk)

    def watch(self, ledger_id: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` whenever `follow_chunk` may have news; returns what ends that."""
        check_id("ledger", ledger_id)
        return self._followers.watch(ledger_id, callback)

    async def follow_chunk(
        self, ledger_id: int, *, first_entry_id: int, told: FollowUpdate | None, bytes_max: int
    ) -> FollowUpdate | None:
        """Return what is new for a follower that was told `told`, or None.

        It is complete up to its own `last_add_confirmed`: an entry at or below it, from
        `first_entry_id` on, that is not among its frames is not held here.  A follower that is far
        behind gets the LAC in steps of `bytes_max` bytes of frames, or one frame.

        Raises:
            BookieStorageError: the storage failed, and all that could be read was delivered.
        """
        check_id("ledger", ledger_id)
        check_id("entry", first_entry_id)
        self._check_open()
        state = self._ledgers.get(ledger_id)
        fenced = state is not None and state.is_fence_durable
        if (newest := self._reader.read_newest(ledger_id, first_entry_id)) is not None:
            return FollowUpdate([newest], first_entry_id, fenced)
        many = await self._reader.read_confirmed(ledger_id, first_entry_id, bytes_max=bytes_max)
        if many is not None:
            return FollowUpdate(many, first_entry_id + len(many) - 1, fenced)
        locations, confirmed = self._reader.find_confirmed(
            ledger_id, first_entry_id, bytes_max=bytes_max
        )
        known = told and (told.last_add_confirmed, told.fenced)
        if not locations and known == (confirmed, fenced):
            self._log.check()
            return None
        frames = await self._reader.read(locations)
        return FollowUpdate(frames=frames, last_add_confirmed=confirmed, fenced=fenced)

    def may_tell_more(self, ledger_id: int, told: FollowUpdate) -> bool:
        """Return whether a follower who was told `told` just now may find more, or an error."""
        state = self._ledgers.get(ledger_id)
        if state is None or self._has_failed or self._is_closing:
            return True
        return told.last_add_confirmed < state.last_add_confirmed or state.is_fence_durable

    def list_entries(self, ledger_id: int) -> ListedRanges:
        """Return the ranges of durable entries, looked up step by step as they are read.

        Each step may raise NoSuchLedgerError, and BookieStorageError.
        """
        check_id("ledger", ledger_id)

        def look(first_entry_id: int) -> RangePage:
            self._check_open()
            self._known_ledger(ledger_id)
            return self._reader.durable_ranges(ledger_id, first_entry_id)

        return ListedRanges(look)

    def ledgers(self) -> list[int]:
        """Return the ledgers it knows, ascending, without those proven deleted."""
        return sorted(each for each, state in self._ledgers.items() if not state.is_deleted)

    def stats(self) -> StorageStats:
        """Return counts and space."""
        return stats_of(
            self._core, is_read_only=self._room.is_read_only, has_failed=self._has_failed
        )

    @property
    def state(self) -> StorageState:
        """What the storage accepts now."""
        return self._state

    def on_state(self, callback: Callable[[StorageState], None]) -> None:
        """Call `callback` at each change of `state`."""
        self._state_callbacks.append(callback)

    async def collect_garbage(
        self,
        is_unneeded: Callable[[int], Awaitable[bool]],
        *,
        confirm: Callable[[int], AbstractAsyncContextManager[bool]] = lambda _: nullcontext(True),
        is_released: bool = False,
    ) -> GarbageReport:
        """Ask about every ledger, and drop files whose ledgers are all proven unneeded.

        `confirm` has the last word on each; its context keeps others from coming to need it.
        """
        self._check_open()
        collect = self.upkeep.collect_garbage
        return await collect(is_unneeded, confirm=confirm, is_released=is_released)

    async def compact(self) -> CompactionReport:
        """Move what is needed out of mostly dead sealed files and delete them; see compaction.py.

        One pass: each file that is sealed now is looked at once.  It may be cancelled at any time.

        Raises:
            BookieUnavailableError: the storage is closed.
            BookieStorageError: the log failed.
        """
        self._check_open()
        report = await self.upkeep.compact()
        self._watch_space()
        return report

    async def scrub(self) -> ScrubReport:
        """Read and verify everything stored, once; see scrub.py."""
        self._check_open()
        return await self.upkeep.scrub()

    async def repair_entry(self, frame: BytesLike) -> None:
        """Write a good frame again in place of a held copy that is damaged; durable at the end.

        An intact copy with the same bytes is left as it is.

        Raises:
            DigestMismatchError: the frame is damaged.
            BadRequestError: the entry is not held, or held intact with other bytes.
            BookieReadOnlyError, BookieOverloadedError: no room now.
            BookieStorageError, BookieUnavailableError: as for adds.
        """
        self._check_open()
        self._log.check()
        entry = decode_frame(frame)
        check_ids(entry)
        if self._reader.find(entry.ledger_id, entry.entry_id) is None:
            raise BadRequestError(
                f"entry {entry.ledger_id}:{entry.entry_id} is not held, so it is not repaired"
            )
        await self._held.add_again(entry, is_recovery=True)

    async def aclose(self) -> None:
        """Take no more, make what was accepted durable, and stop; the disk stays open."""
        if self._is_closing:
            await asyncio.wait([self._writer])
            return
        self._is_closing = True
        self._timers.close()
        self._log.end_waiting()
        try:
            await self._given_ids.aclose()
            await self._room.aclose()
            if not self._has_failed:
                self._settle()
                await self._log.flush()
            await self._held.comparisons.finish()
        except BookieError as error:
            logger.warning("closing after a failure: %s", error)
        finally:
            self._writer.cancel()
            await asyncio.wait([self._writer])
            self._followers.wake_all()
            self._reader.close()
            self._log.close_files()
        if not self._writer.cancelled():
            self._writer.result()

    # Adding

    def _add_entry(self, frame: BytesLike, *, is_recovery: bool) -> asyncio.Future[None]:
        self._check_open()
        self._log.check()
        if len(frame) > self._config.entry_size_bytes_max:
            raise EntryTooLargeError(
                f"entry of {len(frame)} bytes, expected at most {self._config.entry_size_bytes_max}"
            )
        entry = decode_frame(frame)
        check_ids(entry)
        if not self._is_given(entry.ledger_id):
            return self._given_ids.once_given(
                entry.ledger_id, partial(self._add_entry, frame, is_recovery=is_recovery)
            )
        state = self._ledgers.get(entry.ledger_id)
        if state is not None:
            if not state.accepts(is_recovery=is_recovery):
                raise LedgerFencedError(f"ledger {entry.ledger_id} is fenced")
            may_be_held = entry.entry_id <= state.last_entry_id
            if may_be_held and self._reader.find(entry.ledger_id, entry.entry_id) is not None:
                self._ledger(entry.ledger_id)
                return self._held.add_again(entry, is_recovery=is_recovery)
        self._check_room(len(frame), Claim.RECOVERY if is_recovery else Claim.ADD)
        durable = self._log.append_entry(entry)
        if self._ledger(entry.ledger_id).note_entry(entry.entry_id, entry.last_add_confirmed):
            self._followers.wake_soon(entry.ledger_id)
        return durable

    def _is_given(self, ledger_id: int) -> bool:
        return ledger_id in self._ledgers or self._given_ids.covers(ledger_id)

    def _check_room(self, size: int, claim: Claim) -> None:
        try:
            self._room.check(size, claim)
        except BookieReadOnlyError:
            self._watch_space()
            raise

    # Fencing and reading

    async def _prepare_read(self, ledger_id: int, *, fence: bool) -> None:
        check_id("ledger", ledger_id)
        self._check_open()
        if not fence:
            return
        self._log.check()
        if not self._is_given(ledger_id):
            await self._given_ids.check(ledger_id)
            self._check_open()
            self._log.check()
        known = self._ledgers.get(ledger_id)
        if known is None or known.is_deleted or not known.fenced:
            self._check_room(0, Claim.FENCE)
        state = self._ledger(ledger_id)
        if not state.fenced:
            self._log.append_fence(ledger_id)
            state.fenced = True
        await self._log.flush()
        if not state.is_fence_durable:
            state.is_fence_durable = True
            self._followers.wake(ledger_id)

    def _known_ledger(self, ledger_id: int) -> LedgerState:
        state = self._ledgers.get(ledger_id)
        if state is None or state.is_deleted:
            self._log.check()
            raise NoSuchLedgerError(f"ledger {ledger_id} is unknown here")
        return state

    # What happens to the log

    def _on_durable(self, ledger_ids: set[int]) -> None:
        for ledger_id in self._followers.ledgers() & ledger_ids:
            self._followers.wake_soon(ledger_id)
        self._settle_later()
        if self._room.is_due:
            self._watch_space()
        else:
            self._timers.call_later(LOOK_DELAY_S, self._watch_space)

    async def _on_sealed(self, index: FileIndex, file: DiskFile, position: WritePosition) -> None:
        await self._files.take_over(
            index, size=file.size, records_end=position.offset, seed=position.header.seed
        )

    def _on_failed(self, error: BookieError) -> None:
        self._followers.wake_all()
        if self._is_closing:
            return
        self._has_failed = True
        logger.error("the entry log failed, nothing will be written any more: %s", error)
        self._update_state()

    def _on_stalled(self, is_stalled: bool) -> None:
        self._room.note_stalled(is_stalled=is_stalled)
        self._watch_space()

    def _settle_later(self) -> None:
        if not self._log.is_marked:
            self._timers.call_later(self._config.settle_interval_s, self._settle)

    def _settle(self) -> None:
        """Log proof that the last flush was durable."""
        if not self._has_failed and not self._log.is_marked:
            self._log.append_mark()

    # State and timers

    def _watch_space(self) -> None:
        if self._is_closing:
            return
        self._room.look()
        if self._room.is_read_only:
            self._timers.call_later(self._config.space.check_interval_s, self._watch_space)
        self._update_state()

    def _current_state(self) -> StorageState:
        if self._has_failed:
            return StorageState.FAILED
        return StorageState.READ_ONLY if self._room.is_read_only else StorageState.WRITABLE

    def _update_state(self) -> None:
        state = self._current_state()
        if state is not self._state:
            logger.info("storage is %s now, it was %s", state.value, self._state.value)
            self._state = state
            for callback in self._state_callbacks:
                callback(state)

    def _ledger(self, ledger_id: int) -> LedgerState:
        """Return the ledger's state for a change to it; one thought deleted is in use again.

        What the files say of the latter may be dropped already, so it is logged again.
        """
        state = self._ledgers.get(ledger_id)
        if state is None:
            state = self._ledgers[ledger_id] = LedgerState()
        elif state.is_deleted:
            state.is_deleted = False
            if state.fenced:
                self._log.append_fence(ledger_id)
            if state.last_add_confirmed != INVALID_ENTRY_ID:
                self._log.copy_lac(ledger_id, state.last_add_confirmed)
        return state

    def _check_open(self) -> None:
        if self._is_closing:
            raise BookieUnavailableError("the bookie's storage is closed")
