"""Adding what is held already: the same bytes are taken, others refused, damaged ones replaced.

An entry whose held copy is damaged is unknown, so writing it again takes nothing back that was ever
said of it.  If the damaged record still states the checksum of what it held, only that is taken.
The new record is the newest copy, which is the one that counts from then on, at
lookups, in listings and after replay.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bookie.space.budget import Claim
from dlcore.background import BackgroundTasks, outcome_of, told_to_callers
from dlcore.errors import BadRequestError, BookieStorageError, LedgerFencedError
from dlcore.wire.digest import frame_check

if TYPE_CHECKING:
    from typing import Protocol

    from bookie.files.unsealed import Location
    from bookie.storage.storage_core import StorageCore
    from dlcore.wire.digest import EntryFrame

    class CheckRoom(Protocol):
        """Raises if so many more bytes may not be written."""

        def __call__(self, size: int, claim: Claim) -> None:
            """Raise BookieReadOnlyError or BookieOverloadedError."""


class HeldEntries:
    """Compares entries that are added with those that are held."""

    def __init__(self, core: StorageCore, check_room: CheckRoom) -> None:
        self._core = core
        self._check_room = check_room
        self.comparisons = BackgroundTasks(told_to_callers)
        """Those under way."""
        self._replacements: dict[tuple[int, int], asyncio.Future[None]] = {}
        """Written and not durable yet: until they are, the damaged copies are those found."""

    def add_again(self, entry: EntryFrame, *, is_recovery: bool) -> asyncio.Future[None]:
        """Take an entry that is held; the future is done when it is held durably and intact.

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
            if not core.log.unsealed.is_durable(held):
                await core.log.commits.flush()
            frame = await self._read(held)
            if frame is not None:
                break
            checksum = await core.reader.stated_checksum(held)
            if checksum is not None and checksum != frame_check(entry.data):
                break
            replacement = self._replacements.get((entry.ledger_id, entry.entry_id))
            if replacement is not None:
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
        """Return the held frame, None if it is damaged: one failure to read it proves nothing."""
        for _ in range(2):
            try:
                (frame,) = await self._core.reader.read([held])
            except BookieStorageError:
                continue
            return frame
        return None

    async def _replace(self, entry: EntryFrame, *, is_recovery: bool) -> None:
        """Write the entry again; nothing was waited for since it was found damaged."""
        core = self._core
        core.log.commits.check()
        state = core.ledgers[entry.ledger_id]
        if not state.accepts(is_recovery=is_recovery):
            raise LedgerFencedError(f"ledger {entry.ledger_id} is fenced")
        self._check_room(len(entry.data), Claim.RECOVERY if is_recovery else Claim.ADD)
        key = entry.ledger_id, entry.entry_id
        self._replacements[key] = durable = core.log.append_entry(entry)
        core.ledger_for_change(entry.ledger_id).note_entry(entry.entry_id, entry.last_add_confirmed)

        def on_done(done: asyncio.Future[None]) -> None:
            self._replacements.pop(key, None)
            done.exception()  # retrieved, also when whoever asked was cancelled

        durable.add_done_callback(on_done)
        await outcome_of(durable)
        core.damage.forget_entry(entry.ledger_id, entry.entry_id, is_repaired=True)
