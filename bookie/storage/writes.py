"""Writes to a storage: adds, last adds confirmed, fences, repairs, and who follows them.

The call of an add decides on it and gives it its position in the log, in one step.  Therefore an
add called before a fence is in the log before the fence, and an add called after it is refused.

An entry that is held already is accepted again with equal bytes, and a damaged copy is replaced.
An add with other bytes is refused.  If the held copy is damaged, the entry's content is unknown, so
the bookie contradicts no earlier answer when it accepts the entry again.  If the damaged record
still states its checksum, only bytes with this checksum are accepted.  The new record is the newest
copy, which is the valid one from then on: at lookups, in listings and after replay.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bookie.files.index import LedgerState
from bookie.membership.given_ids import GivenIds, Need
from bookie.storage.status import Claim, run_room_bytes
from dlcore.base.background import BackgroundTasks, failed, outcome_of, reported_to_callers
from dlcore.base.errors import (
    BadRequestError,
    BookieError,
    BookieStorageError,
    EntryTooLargeError,
    LedgerFencedError,
)
from dlcore.base.ids import INVALID_ENTRY_ID
from dlcore.wire.frames import decode_frame, following_frames, frame_check

if TYPE_CHECKING:
    from collections.abc import Callable, KeysView

    from bookie.config import StorageConfig
    from bookie.files.index import Location
    from bookie.storage.status import StorageStatus, Timers
    from bookie.storage.storage_core import StorageCore
    from dlcore.wire.frames import BytesLike, EntryFrame, FollowingFrames, FrameRun


_ID_MAX = 2**63 - 1


class Followers:
    """Callbacks for changes of a ledger; nothing is queued for a follower."""

    def __init__(self) -> None:
        self._callbacks: dict[int, dict[Callable[[], None], None]] = {}

    def watch(self, ledger_id: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` at every change of the ledger, until the returned function is called."""
        callbacks = self._callbacks.setdefault(ledger_id, {})
        callbacks[callback] = None

        def end() -> None:
            callbacks.pop(callback, None)
            if not callbacks and self._callbacks.get(ledger_id) is callbacks:
                del self._callbacks[ledger_id]

        return end

    def __len__(self) -> int:
        return sum(map(len, self._callbacks.values()))

    def ledgers(self) -> KeysView[int]:
        """Return the ledgers that are followed."""
        return self._callbacks.keys()

    def wake(self, ledger_id: int) -> None:
        """Call the callbacks of the ledger's followers."""
        # A copy, because a callback may end its own watch.
        for callback in tuple(self._callbacks.get(ledger_id, ())):
            callback()

    def wake_all(self) -> None:
        """Call the callbacks of all followers."""
        for ledger_id in tuple(self._callbacks):
            self.wake(ledger_id)


class CheckRoom(Protocol):
    """Raises if `size` more bytes may not be written."""

    def __call__(self, size: int, claim: Claim) -> None:
        """Raise BookieReadOnlyError or BookieOverloadedError."""


class HeldEntries:
    """Compares entries that are added with entries that are held."""

    def __init__(self, core: StorageCore, check_room: CheckRoom) -> None:
        self._core = core
        self._check_room = check_room
        self.comparisons = BackgroundTasks(reported_to_callers)
        """Comparisons in progress."""
        self._replacements: dict[tuple[int, int], asyncio.Future[None]] = {}
        """Replacements that are not durable yet; until then the damaged copies are found."""

    def add_again(self, entry: EntryFrame, *, is_recovery: bool) -> asyncio.Future[None]:
        """Compare an entry with the held one; the future is done when it is durable and intact.

        The future may hold BadRequestError (other bytes are held), LedgerFencedError,
        BookieReadOnlyError, BookieOverloadedError or BookieStorageError.
        """
        return self.comparisons.start(self._add_again(entry, is_recovery=is_recovery))

    async def _add_again(self, entry: EntryFrame, *, is_recovery: bool) -> None:
        core = self._core
        while True:
            held = core.reader.find(entry.ledger_id, entry.entry_id)
            if held is None:
                raise BookieStorageError(
                    f"entry {entry.ledger_id}:{entry.entry_id} was dropped as garbage meanwhile"
                )
            # A repeated add must not be acknowledged before the first one is.
            if not core.log.unsealed.is_durable(held):
                await core.log.commits.flush()
            frame = await self._read(held)
            if frame is not None:
                break
            checksum = await core.reader.stated_checksum(held)
            # The record is damaged, but its intact header says that other bytes were held.
            if checksum is not None and checksum != frame_check(entry.data):
                break
            replacement = self._replacements.get((entry.ledger_id, entry.entry_id))
            if replacement is not None:
                # Another add replaces it now: then the new copy is compared.
                await asyncio.wait([replacement])
            elif core.reader.find(entry.ledger_id, entry.entry_id) == held:
                await self._replace(entry, is_recovery=is_recovery)
                return
        if frame is not None:
            core.damage.forget_entry(entry.ledger_id, entry.entry_id, is_repaired=False)
        if frame is None or frame != memoryview(entry.data):
            raise BadRequestError(
                f"entry {entry.ledger_id}:{entry.entry_id} is held with other bytes"
            )

    async def _read(self, held: Location) -> memoryview | None:
        """Return the held frame; None if it is damaged, which one failed read does not prove."""
        # A device may fail once and read the same sector at the next try.
        for _ in range(2):
            try:
                (frame,) = await self._core.reader.read([held])
            except BookieStorageError:
                continue
            return frame
        return None

    async def _replace(self, entry: EntryFrame, *, is_recovery: bool) -> None:
        """Write the entry again; there must be no wait between finding the damage and this call."""
        core = self._core
        core.log.commits.check()
        state = core.ledgers[entry.ledger_id]
        if not state.accepts(is_recovery=is_recovery):
            raise LedgerFencedError(f"ledger {entry.ledger_id} is fenced")
        self._check_room(len(entry.data), Claim.RECOVERY if is_recovery else Claim.ADD)
        key = entry.ledger_id, entry.entry_id
        self._replacements[key] = durable = core.log.append_entry(entry)
        state = ledger_for_change(core, entry.ledger_id)
        state.note_entry(entry.entry_id, entry.last_add_confirmed)

        def on_done(done: asyncio.Future[None]) -> None:
            self._replacements.pop(key, None)
            done.exception()  # retrieve the error, also if the caller was cancelled

        durable.add_done_callback(on_done)
        await outcome_of(durable)
        core.damage.forget_entry(entry.ledger_id, entry.entry_id, is_repaired=True)


class Writes:
    """Accepts or refuses changes of ledgers; used on one event loop only.

    All requests raise `BookieUnavailableError` once the storage is closed, and
    `BookieStorageError` once a write or sync has failed.
    """

    def __init__(
        self,
        core: StorageCore,
        config: StorageConfig,
        *,
        status: StorageStatus,
        followers: Followers,
        timers: Timers,
        given_ids: GivenIds,
    ) -> None:
        self._core = core
        self._config = config
        self._status = status
        self._followers = followers
        self._timers = timers
        self._given_ids = given_ids
        self._held = HeldEntries(core, status.check_room)

    def add_entry(self, frame: BytesLike, *, is_recovery: bool = False) -> asyncio.Future[None]:
        """Accept or refuse `frame` now; the future is done when it is durable or was refused.

        If the ledger is new here, the decision may come later, once it is found that the id is
        allocated, and that it is no deleted or closed ledger which the bookie has forgotten.
        Adding identical bytes again succeeds.  If the held bytes are damaged, the new ones replace
        them.  Nothing is raised here: the future may hold LedgerFencedError,
        BookieReadOnlyError, BookieOverloadedError, EntryTooLargeError, DigestMismatchError,
        BadRequestError (other bytes for a held entry, or a ledger that was never created),
        BookieStorageError or BookieUnavailableError.
        """
        try:
            return self._add_entry(frame, is_recovery=is_recovery)
        except BookieError as error:
            return failed(error)

    def add_run(self, run: FrameRun) -> asyncio.Future[None] | None:
        """Accept new entries of a ledger all together; the future is done when all are durable.

        None: nothing was accepted or refused; the entries have to be added singly.
        """
        # It has verified all frames in one pass, which is why a run costs so little.
        what = following_frames(run)
        state = None if what is None else self._core.ledgers.get(what.ledger_id)
        if what is None or state is None or not may_add(run, what, state, self._config):
            return None
        try:
            self._check_log()
            self._status.check_room(run_room_bytes(run), Claim.ADD)
        except BookieError:
            # Added singly, each entry gets its own refusal, and the first ones may still fit.
            return None
        durable = self._core.log.append_run(run, what)
        if durable is None:
            return None
        last_entry_id = what.first_entry_id + len(run) - 1
        if state.note_entry(last_entry_id, int(what.last_add_confirmed.max())):
            self._followers.wake(what.ledger_id)
        return durable

    def write_lac(self, ledger_id: int, last_add_confirmed: int) -> asyncio.Future[None]:
        """Note the LAC and wake followers now; the future is done when the LAC is durable.

        If the ledger is new here, the LAC may be accepted later, as adds are.  To share the flush
        of the next add, the LAC waits up to `lac_delay_s`.

        Raises:
            BadRequestError: an id out of range.
            BookieReadOnlyError, BookieOverloadedError: there is no space for it now.
            BookieStorageError: the storage failed; the future may also hold any of these.
        """
        self._check_log()
        check_id("ledger", ledger_id)
        if last_add_confirmed != INVALID_ENTRY_ID:
            check_id("entry", last_add_confirmed)
        if ledger_id not in self._core.ledgers and not self._given_ids.covers(ledger_id, Need.OPEN):
            note = partial(self._note_lac, ledger_id, last_add_confirmed)
            return self._given_ids.once_given(ledger_id, Need.OPEN, note)
        return self._note_lac(ledger_id, last_add_confirmed)

    def _note_lac(self, ledger_id: int, last_add_confirmed: int) -> asyncio.Future[None]:
        self._check_log()
        core = self._core
        known = core.ledgers.get(ledger_id)
        if known is None or known.is_deleted or last_add_confirmed > known.last_add_confirmed:
            self._status.check_room(0, Claim.RECOVERY)
        has_moved = ledger_for_change(core, ledger_id).note_lac(last_add_confirmed)
        if has_moved:
            self._followers.wake(ledger_id)
        self._timers.call_later(self._config.lac_delay_s, core.log.commits.wake)
        if has_moved:
            return core.log.append_lac(ledger_id, last_add_confirmed)
        return core.log.commits.watch()  # the LAC is known, but its record may be not durable yet

    async def fence(self, ledger_id: int) -> None:
        """Accept no more adds of the ledger, except by recovery.

        Returns when the fence and everything accepted before it are durable.  An entry that a read
        finds absent from then on can be added only by recovery.

        Raises:
            BadRequestError: the ledger was never created; BookieUnavailableError: this is not
                known.
            BookieReadOnlyError, BookieOverloadedError: there is no space for the fence now.
        """
        self._check_log()
        if ledger_id not in self._core.ledgers:
            # A fence of an id that was never given would refuse the ledger that gets it later.
            await self._given_ids.check(ledger_id, Need.ALLOCATED)
            self._check_log()
        core = self._core
        known = core.ledgers.get(ledger_id)
        # A fence that is known needs no room, so recoveries go on when the disk is full.
        if known is None or known.is_deleted or not known.fenced:
            self._status.check_room(0, Claim.FENCE)
        state = ledger_for_change(core, ledger_id)
        # Set with the record, not after the flush: no add may be accepted behind the record.
        if not state.fenced:
            core.log.append_fence(ledger_id)
            state.fenced = True
        await core.log.commits.flush()
        if not state.is_fence_durable:
            state.is_fence_durable = True
            self._followers.wake(ledger_id)

    async def repair_entry(self, frame: BytesLike) -> None:
        """Write an intact frame again in place of a damaged copy; durable at the end.

        An intact copy with the same bytes is kept.

        Raises:
            DigestMismatchError: the frame is damaged.
            BadRequestError: the entry is not held, or held intact with other bytes.
            BookieReadOnlyError, BookieOverloadedError: there is no space now.
            BookieStorageError, BookieUnavailableError: as for adds.
        """
        self._check_log()
        entry = decode_frame(frame)
        check_ids(entry)
        if self._core.reader.find(entry.ledger_id, entry.entry_id) is None:
            raise BadRequestError(
                f"entry {entry.ledger_id}:{entry.entry_id} is not held, so it is not repaired"
            )
        await self._held.add_again(entry, is_recovery=True)

    async def finish(self) -> None:
        """Return when no comparison with a held entry is in progress."""
        await self._held.comparisons.finish()

    def _add_entry(
        self, frame: BytesLike, *, is_recovery: bool, is_given: bool = False
    ) -> asyncio.Future[None]:
        self._check_log()
        if len(frame) > self._config.entry_size_bytes_max:
            raise EntryTooLargeError(
                f"entry of {len(frame)} bytes, expected at most {self._config.entry_size_bytes_max}"
            )
        entry = decode_frame(frame)
        check_ids(entry)
        core = self._core
        state = core.ledgers.get(entry.ledger_id)
        if state is None:
            need = Need.THERE if is_recovery else Need.OPEN
            if not is_given and not self._given_ids.covers(entry.ledger_id, need):
                add = partial(self._add_entry, frame, is_recovery=is_recovery, is_given=True)
                return self._given_ids.once_given(entry.ledger_id, need, add)
        else:
            if not state.accepts(is_recovery=is_recovery):
                raise LedgerFencedError(f"ledger {entry.ledger_id} is fenced")
            # A writer appends in order: the lookup is needed only for entries below the last one.
            may_be_held = entry.entry_id <= state.last_entry_id
            if may_be_held and core.reader.find(entry.ledger_id, entry.entry_id) is not None:
                # A ledger that was thought deleted is in use again, even if it holds this entry.
                ledger_for_change(core, entry.ledger_id)
                return self._held.add_again(entry, is_recovery=is_recovery)
        self._status.check_room(len(frame), Claim.RECOVERY if is_recovery else Claim.ADD)
        durable = core.log.append_entry(entry)
        # Behind the append, so that an add that is refused makes no ledger known here.
        if state is None or state.is_deleted:
            state = ledger_for_change(core, entry.ledger_id)
        if state.note_entry(entry.entry_id, entry.last_add_confirmed):
            # Followers may read the entries up to the LAC now.  They need not wait for the write of
            # this entry, which they do not get yet.
            self._followers.wake(entry.ledger_id)
        return durable

    async def end_waiting(self) -> None:
        """Refuse writes that wait to hear whether their ledger's id was given, and ask no more."""
        await self._given_ids.aclose()

    def _check_log(self) -> None:
        self._status.check_open()
        self._core.log.commits.check()


def ledger_for_change(core: StorageCore, ledger_id: int) -> LedgerState:
    """Return the ledger's state for a change; a ledger thought deleted is in use again.

    The files with such a ledger's fence and LAC may be dropped already, so these are logged again.
    """
    state = core.ledgers.get(ledger_id)
    if state is None:
        state = core.ledgers[ledger_id] = LedgerState()
    elif state.is_deleted:
        state.is_deleted = False
        if state.fenced:
            core.log.append_fence(ledger_id)
        if state.last_add_confirmed != INVALID_ENTRY_ID:
            core.log.copy_lac(ledger_id, state.last_add_confirmed)
    return state


def check_id(kind: str, value: int) -> None:
    """Raise `BadRequestError` for a ledger or entry id out of range; `kind` names it."""
    if not 0 <= value <= _ID_MAX:
        raise BadRequestError(f"{kind} id {value}: expected 0 … {_ID_MAX}")


def check_ids(entry: EntryFrame) -> None:
    """Raise `BadRequestError` for a frame whose ids are invalid."""
    if entry.ledger_id < 0 or entry.entry_id < 0:
        check_id("ledger", entry.ledger_id)
        check_id("entry", entry.entry_id)
    if not INVALID_ENTRY_ID <= entry.last_add_confirmed < entry.entry_id:
        raise BadRequestError(
            f"entry {entry.ledger_id}:{entry.entry_id} says the last add confirmed is "
            f"{entry.last_add_confirmed}, expected -1 … {entry.entry_id - 1}"
        )


def may_add(
    run: FrameRun, what: FollowingFrames, state: LedgerState, config: StorageConfig
) -> bool:
    """Return whether frames of a known ledger may be accepted all together.

    Each frame must be valid, its entry must be above all held ones, and the ledger must accept
    adds.
    """
    entry_ids = np.arange(what.first_entry_id, what.first_entry_id + len(run))
    return bool(
        state.accepts(is_recovery=False)
        # The single add makes a deleted ledger live again; a run has no need for that case.
        and not state.is_deleted
        and what.first_entry_id > state.last_entry_id
        and run.sizes.max() <= config.entry_size_bytes_max
        and what.ledger_id >= 0
        and (what.last_add_confirmed >= INVALID_ENTRY_ID).all()
        and (what.last_add_confirmed < entry_ids).all()
    )
